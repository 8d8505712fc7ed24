//! `walvisor disk restore` and `log dump --since --until`: the commits of a log that was not checkpointed.

use std::path::Path;

use serde_json::Value;
use walvisor_tests::have_python;

use crate::{MIB, done, json, objects, refused, unclosed, unclosed_bytes, walvisor};

/// The disk that `unclosed` makes after each of its records, beginning with the base image.
fn states() -> Vec<Vec<u8>> {
    let mut bytes = vec![0; 8 * MIB as usize];
    let changes = [
        (0..128, 1),
        (8..16, 2),
        (12..20, 3),
        (32..48, 0),
        (50..51, 0),
        (16376..16384, 9),
    ];
    let states = changes.into_iter().map(|(sectors, byte)| {
        bytes[sectors.start * 512..sectors.end * 512].fill(byte);
        bytes.clone()
    });
    let states: Vec<_> = states.collect();
    assert!(*states.last().unwrap() == unclosed_bytes());
    states
}

fn restored(dir: &Path, at: &str) -> Vec<u8> {
    let new = dir.join("restored.img");
    let _ = std::fs::remove_file(&new);
    let report = json(&done(
        dir,
        &format!("disk restore disk.img --at {at} -o restored.img --json"),
    ));
    assert_eq!(report["size_bytes"], 8 * MIB);
    std::fs::read(new).unwrap()
}

#[test]
fn every_record_and_commit_can_be_brought_back() {
    let dir = tempfile::tempdir().unwrap();
    let dir = &unclosed(dir.path());
    let states = states();
    let log = objects(&done(dir, "log dump disk.img.wal --records --json"));
    assert_eq!(log.len() + 1, states.len());
    let number = |record: &Value, key: &str| record[key].as_u64().unwrap();
    let first = number(&log[0], "lsn");
    // The base image alone.
    assert!(restored(dir, &format!("lsn:{}", first - 1)) == states[0]);
    for (record, state) in log.iter().zip(&states[1..]) {
        let (lsn, cid) = (number(record, "lsn"), number(record, "cid"));
        assert!(restored(dir, &format!("lsn:{lsn}")) == *state, "LSN {lsn}");
        let last = log
            .iter()
            .rposition(|record| number(record, "cid") == cid)
            .unwrap();
        assert!(
            restored(dir, &format!("cid:{cid}")) == states[last + 1],
            "commit {cid}"
        );
    }
    assert!(restored(dir, "-0s") == *states.last().unwrap());
    // The disk itself has not changed.
    done(dir, "disk export disk.img now.raw");
    assert!(std::fs::read(dir.join("now.raw")).unwrap() == unclosed_bytes());
    let all = objects(&done(dir, "log dump disk.img.wal --json"));
    let second = number(&all[1], "cid");
    let cids = |text: String| {
        let groups = objects(&text).into_iter();
        groups
            .map(|group| number(&group, "cid"))
            .collect::<Vec<_>>()
    };
    let since = done(
        dir,
        &format!("log dump disk.img.wal --json --since cid:{second}"),
    );
    assert_eq!(cids(since), [second, second + 1, second + 2]);
    let until = number(&all[1], "last_lsn");
    let until = done(
        dir,
        &format!("log dump disk.img.wal --json --until lsn:{until}"),
    );
    assert_eq!(cids(until), [second - 1, second]);
    assert_eq!(done(dir, "log dump disk.img.wal --json --until -1h"), "");
    assert!(done(dir, "log dump disk.img.wal --until -1h").contains("no records there"));
}

/// Times of a log are those of its batches.
#[test]
fn a_time_brings_back_what_was_there_then() {
    if !have_python() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = &unclosed(dir.path());
    let states = states();
    let log = objects(&done(dir, "log dump disk.img.wal --json"));
    let first = &log[0];
    let time = |us: &Value| {
        let script = "import sys, datetime as d; \
                      print((d.datetime(1970, 1, 1) + d.timedelta(microseconds=int(sys.argv[1]))).isoformat() + 'Z')";
        let arguments = ["-c", script, &us.to_string()];
        let output = std::process::Command::new("python3")
            .args(arguments)
            .output();
        String::from_utf8(output.unwrap().stdout)
            .unwrap()
            .trim()
            .to_owned()
    };
    // The next batch may have the same time.
    let same = log
        .iter()
        .filter(|group| group["unix_us"] == first["unix_us"]);
    let records: u64 = same.map(|group| group["records"].as_u64().unwrap()).sum();
    let at = format!("time:{}", time(&first["unix_us"]));
    assert!(restored(dir, &at) == states[records as usize], "{at}");
}

#[test]
fn points_that_are_not_there_name_the_nearest() {
    let dir = tempfile::tempdir().unwrap();
    let dir = &unclosed(dir.path());
    let log = objects(&done(dir, "log dump disk.img.wal --json"));
    let number = |group: &Value, key: &str| group[key].as_u64().unwrap();
    let (first, last) = (&log[0], log.last().unwrap());
    let newest = format!(
        "the newest is lsn:{} of cid:{}",
        number(last, "last_lsn"),
        number(last, "cid")
    );
    let base = number(first, "first_lsn") - 1;
    let oldest = format!(
        "the oldest are LSN {base}, which the base image holds, and lsn:{} of cid:{}",
        base + 1,
        number(first, "cid"),
    );
    for (at, part) in [
        (
            format!("lsn:{}", number(last, "last_lsn") + 1),
            newest.as_str(),
        ),
        (format!("cid:{}", number(last, "cid") + 5), &newest),
        ("lsn:0".to_owned(), &oldest),
        ("cid:0".to_owned(), &oldest),
        ("-1h".to_owned(), &oldest),
    ] {
        let restore = format!("disk restore disk.img --at {at} -o new.img");
        refused(dir, &restore, 1, &["disk.img.wal", part]);
    }
    refused(
        dir,
        "disk restore disk.img --at noon -o new.img",
        2,
        &["'noon' is not a point"],
    );
    refused(
        dir,
        "disk restore disk.img --at cid:1 -o disk.img",
        1,
        &["disk.img"],
    );
    assert!(!dir.join("new.img").exists());
    // A disk without a log has no history.
    done(dir, "disk checkpoint disk.img");
    let last = number(last, "last_lsn");
    refused(
        dir,
        &format!("disk restore disk.img --at lsn:{} -o new.img", last - 1),
        1,
        &[&format!(
            "there is only LSN {last}, which the base image holds"
        )],
    );
    std::fs::remove_dir_all(dir.join("disk.img.wal")).unwrap();
    refused(
        dir,
        "disk restore disk.img --at cid:1 -o new.img",
        1,
        &["no log, so no history"],
    );
    assert!(walvisor(dir, "disk check disk.img").status.success());
}
