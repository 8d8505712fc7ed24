//! `walvisor-bench drbd`: real DRBD between two machines. The tests check counts and contents. The
//! only times that they check are those that the network's delay makes impossible.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};

use walvisor_testkit::leash;

use crate::{bench, compare, number, rows};

const NEEDS: [(&str, &str); 6] = [
    ("linux.uml", "user-mode-linux"),
    ("modprobe", "kmod"),
    ("drbdadm", "drbd-utils"),
    ("mkfs.ext4", "e2fsprogs"),
    ("ping", "iputils-ping"),
    ("tc", "iproute2"),
];

#[test]
fn a_round_trip_limits_commits_and_groups_share_it() {
    let Some(report) = compare("drbd --only matrix", &NEEDS) else {
        return;
    };
    let rows = rows(&report, "drbd");
    let links = rows
        .iter()
        .map(|row| (row["link"].as_str().unwrap(), number(row, "clients")));
    let expected = [
        ("RTT 4 ms", 1.0),
        ("RTT 4 ms", 8.0),
        ("RTT 20 ms", 1.0),
        ("RTT 20 ms", 8.0),
    ];
    assert_eq!(links.collect::<Vec<_>>(), expected);
    for row in rows {
        let median = |key: &str| number(row, key);
        let round_trip = match row["link"].as_str() {
            Some("RTT 4 ms") => 4.0,
            _ => 20.0,
        };
        assert!(median("ping_shortest_ms") >= round_trip, "{row}");
        assert!(
            median("ping_mean_ms") >= median("ping_shortest_ms"),
            "{row}"
        );
        // Each commit waits for a sync of its own, and each sync for the other machine.
        assert_eq!(median("off_syncs_per_commit"), 1.0, "{row}");
        let ceiling = 1000.0 / round_trip;
        // Rates have one decimal.
        assert!(median("off_commits_per_s") <= ceiling + 0.1, "{row}");
        match number(row, "clients") {
            1.0 => {
                assert_eq!(median("on_syncs_per_commit"), 1.0, "{row}");
                assert!(median("on_commits_per_s") <= ceiling + 0.1, "{row}");
            }
            _ => assert!(median("on_syncs_per_commit") < 1.0, "{row}"),
        }
        match row["source_off_per_s"].as_f64() {
            Some(source) => assert_eq!((source, round_trip), (250.0, 4.0)),
            None => assert_eq!(round_trip, 20.0),
        }
    }
}

#[test]
fn a_failover_loses_no_acknowledged_flush() {
    let Some(report) = compare("drbd --only failover", &NEEDS) else {
        return;
    };
    let rows = rows(&report, "drbd-failover");
    let [synchronous, control] = rows else {
        panic!("{rows:?}");
    };
    for row in [synchronous, control] {
        assert_eq!(number(row, "kills"), 1.0, "{row}");
        let judged = number(row, "present") + number(row, "lost");
        assert_eq!(number(row, "acknowledged"), judged, "{row}");
        assert!(judged >= 400.0, "{row}");
    }
    assert_eq!(synchronous["protocol"], "C");
    assert_eq!(number(synchronous, "lost"), 0.0, "{synchronous}");
    // The primary did not wait for the other machine, so the same judge must find commits missing.
    assert!(number(control, "lost") > 0.0, "{control}");
}

#[test]
fn the_judge_of_a_failover_finds_all_commits_and_sees_damage() {
    let dir = tempfile::tempdir().unwrap();
    let bench = |action: &str| -> Command {
        let arguments = ["store", action, "--clients", "3", "--dir", "."];
        let mut command = bench(dir.path(), &arguments);
        command.stdout(Stdio::piped());
        command
    };
    let mut load = leash(&mut bench("acknowledge")).spawn().unwrap();
    let mut acknowledged = [0; 3];
    let read = |last: &mut [u64; 3], word: &str, line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        let ["guest:", first, client, number] = words[..] else {
            panic!("{line}");
        };
        assert_eq!(first, word);
        let client: usize = client.parse().unwrap();
        last[client] = number.parse().unwrap();
    };
    let mut lines = BufReader::new(load.stdout.take().unwrap()).lines();
    for line in lines.by_ref().map_while(Result::ok).take(100) {
        read(&mut acknowledged, "acknowledged", &line);
    }
    load.kill().unwrap();
    load.wait().unwrap();
    let mut found = [0; 3];
    let output = bench("survivors").output().unwrap();
    assert!(output.status.success(), "{output:?}");
    for line in String::from_utf8(output.stdout).unwrap().lines() {
        read(&mut found, "found", line);
    }
    let both = found.iter().zip(acknowledged);
    assert!(
        both.clone()
            .all(|(found, acknowledged)| *found >= acknowledged),
        "{both:?}"
    );
    // The disk is closed, so its image holds the first client's blocks.
    let mut image = std::fs::File::options()
        .write(true)
        .open(dir.path().join("disk-0.img"))
        .unwrap();
    image.write_all(&[7; 512]).unwrap();
    let output = bench("survivors").output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(errors.contains("does not read back as written"), "{errors}");
    assert_eq!(output.status.code(), Some(1));
}
