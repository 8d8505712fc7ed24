//! The kernel's own NBD client on `walvisor serve nbd`: ext4, fio, fsync, discard, a kill of the
//! daemon, and the images. Another test sets the wall clock, forward, back and through a leap
//! second, while disks of a daemon commit.

use std::fs;

use serde_json::Value;

use walvisor_guest_images::Metrics;
use walvisor_tests::{CLOCK_FUNCTIONS, compile, have_all, nothing_spun, run_in_user_mode};

#[test]
fn the_kernels_client_keeps_a_file_system_through_a_kill() {
    let needs = [
        ("linux.uml", "user-mode-linux"),
        ("nbd-client", "nbd-client"),
        ("fio", "fio"),
        ("mkfs.ext4", "e2fsprogs"),
    ];
    if !have_all(&needs) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let script = include_str!("../scripts/nbd-guest.sh");
    assert_eq!(
        run_in_user_mode(dir.path(), &["nbd"], script),
        [
            "nbd0 has 393216 sectors, write back, fua 1",
            "nbd1 has 131072 sectors, write back, fua 1",
            "fio: status 0",
            "blkdiscard: status 0",
            "raw disk reads back",
            "killed: status 137",
            "intact 20 of 20",
            "fstrim: status 0",
            "e2fsck: status 0",
            "raw disk still reads back",
            "nbd2 has 18014398509481983 sectors",
            "last sector: write status 0",
            "last sector reads back",
            "daemon of the largest disk: status 0",
            "daemon: status 0",
            "check of files.img: status 0",
            "check of raw.img: status 0",
            "exported files.img is what the client saw",
            "exported raw.img is what the client saw",
        ]
    );
    // The counters of the second daemon: the client has trimmed, and no request failed.
    let metrics = fs::read_to_string(dir.path().join("files/metrics.prom")).expect("the metrics");
    let metrics = Metrics::parse(&metrics);
    let of = |name| metrics.sum(name, "transport", "nbd").unwrap_or_default();
    assert!(of("walvisor_block_discards_total") >= 1.0);
    assert_eq!(of("walvisor_block_errors_total"), 0.0);
}

/// A file system and a database as they were a moment before a mistake are used from a scratch
/// disk, and brought back.
#[test]
fn a_row_that_was_deleted_is_found_again() {
    let needs = [
        ("linux.uml", "user-mode-linux"),
        ("nbd-client", "nbd-client"),
        ("sqlite3", "sqlite3"),
        ("mkfs.ext4", "e2fsprogs"),
    ];
    if !have_all(&needs) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let script = include_str!("../scripts/history-guest.sh");
    assert_eq!(
        run_in_user_mode(dir.path(), &["nbd"], script),
        [
            "row 7: owner 7",
            "row 7: gone",
            "killed: status 137",
            "mounted without scratch: status 32",
            "daemon: status 0",
            "row 7: owner 7",
            "integrity: ok",
            "rows: 1000|1499500",
            "rows: 1001|1499501",
            "e2fsck: status 0",
            "daemon: status 0",
            "the disk and its log are as they were",
            "clone: status 0",
            "row 7: owner 7",
            "rows: 1000|1499500",
            "daemon: status 0",
        ]
    );
}

#[test]
fn disks_commit_in_order_however_the_wall_clock_is_set() {
    let needs = [
        ("linux.uml", "user-mode-linux"),
        ("nbd-client", "nbd-client"),
        ("fio", "fio"),
    ];
    if !have_all(&needs) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let script = format!(
        "LEAP='{}'\n{CLOCK_FUNCTIONS}\n{}",
        compile(dir.path(), "leap").display(),
        include_str!("../scripts/clock-serve.sh")
    );
    let lines = run_in_user_mode(dir.path(), &["nbd"], &script);
    let (ticks, lines): (Vec<_>, Vec<_>) = lines
        .into_iter()
        .partition(|line| line.starts_with("serve quiet "));
    assert_eq!(
        lines,
        [
            "commits: status 0",
            "commits: status 0",
            "commits: status 0",
            "serve: the clock was set and had a leap second",
            "commits: status 0",
            "commits: status 0",
            "waiting: dump: status 0",
            "waiting: check: status 0",
            "adaptive: dump: status 0",
            "adaptive: check: status 0",
        ]
    );
    nothing_spun(&ticks[0]);
    for disk in ["waiting", "adaptive"] {
        let dump =
            fs::read_to_string(dir.path().join(format!("files/{disk}.json"))).expect("the dump");
        history_is_in_order(disk, &dump);
    }
}

/// Checks that history is in order however the wall clock was set.
fn history_is_in_order(disk: &str, dump: &str) {
    let groups: Vec<Value> = dump
        .lines()
        .map(|line| serde_json::from_str(line).expect("a group"))
        .collect();
    let of = |key: &str| -> Vec<u64> {
        let values = groups.iter().map(|group| group[key].as_u64());
        values.map(|value| value.expect("a number")).collect()
    };
    let (cids, times) = (of("cid"), of("unix_us"));
    assert!(
        cids.len() >= 100 && cids.is_sorted_by(|a, b| a < b),
        "{disk}"
    );
    let lsns = of("first_lsn").into_iter().zip(of("last_lsn"));
    let lsns: Vec<u64> = lsns.flat_map(|(first, last)| [first, last]).collect();
    assert!(lsns.is_sorted(), "{disk}: LSNs go back");
    assert!(times.is_sorted(), "{disk}: time goes back");
    // The clock was set by a day and more, and never stayed there for long enough to be believed.
    let hour = times[0] + 3_600_000_000;
    let wrong = times.iter().filter(|&&time| time > hour).count();
    assert_eq!(wrong, 0, "{disk}: times of a wrong clock");
    let distinct = times.windows(2).filter(|pair| pair[0] < pair[1]).count();
    assert!(distinct >= 100, "{disk}: time stands still");
}
