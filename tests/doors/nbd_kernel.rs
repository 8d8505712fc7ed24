//! The kernel's own NBD client on `walvisor serve nbd`: ext4, fio, fsync, discard, a kill of the daemon, and the
//! images. Another test sets the wall clock, forward, back and through a leap second, while disks of a daemon and of
//! a guest commit.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use walvisor_guest_images::{Metrics, UserMode, walvisor_binary};
use walvisor_tests::{guest_lines, have_all, job_lines, run_emulated_job};

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
    let place = dir.path().join("files");
    fs::create_dir(&place).unwrap();
    let script = format!(
        "WALVISOR='{}' PLACE='{}'\n{}",
        walvisor_binary("dev").expect("building walvisor").display(),
        place.display(),
        include_str!("../scripts/nbd-guest.sh")
    );
    let guest = UserMode {
        modules: vec!["nbd".to_owned()],
        ..UserMode::default()
    };
    let mut guest = guest.boot_here(dir.path(), &script).unwrap();
    assert_eq!(
        guest_lines(&mut guest),
        [
            "guest: nbd0 has 393216 sectors, write back, fua 1",
            "guest: nbd1 has 131072 sectors, write back, fua 1",
            "guest: fio: status 0",
            "guest: blkdiscard: status 0",
            "guest: raw disk reads back",
            "guest: killed: status 137",
            "guest: intact 20 of 20",
            "guest: fstrim: status 0",
            "guest: e2fsck: status 0",
            "guest: raw disk still reads back",
            "guest: nbd2 has 18014398509481983 sectors",
            "guest: last sector: write status 0",
            "guest: last sector reads back",
            "guest: daemon of the largest disk: status 0",
            "guest: daemon: status 0",
            "guest: check of files.img: status 0",
            "guest: check of raw.img: status 0",
            "guest: exported files.img is what the client saw",
            "guest: exported raw.img is what the client saw",
            "guest: end",
        ],
        "{}",
        guest.console()
    );
    guest.end().unwrap();
    // The counters of the second daemon: the client has trimmed, and no request failed.
    let metrics = fs::read_to_string(place.join("metrics.prom")).expect("the metrics");
    let metrics = Metrics::parse(&metrics);
    let of = |name| metrics.sum(name, "transport", "nbd").unwrap_or_default();
    assert!(of("walvisor_block_discards_total") >= 1.0);
    assert_eq!(of("walvisor_block_errors_total"), 0.0);
}

/// A file system and a database as they were a moment before a mistake are used from a scratch disk, and brought back.
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
    let place = dir.path().join("files");
    fs::create_dir(&place).unwrap();
    let script = format!(
        "WALVISOR='{}' PLACE='{}'\n{}",
        walvisor_binary("dev").expect("building walvisor").display(),
        place.display(),
        include_str!("../scripts/history-guest.sh")
    );
    let guest = UserMode {
        modules: vec!["nbd".to_owned()],
        ..UserMode::default()
    };
    let mut guest = guest.boot_here(dir.path(), &script).unwrap();
    assert_eq!(
        guest_lines(&mut guest),
        [
            "guest: row 7: owner 7",
            "guest: row 7: gone",
            "guest: killed: status 137",
            "guest: mounted without scratch: status 32",
            "guest: daemon: status 0",
            "guest: row 7: owner 7",
            "guest: integrity: ok",
            "guest: rows: 1000|1499500",
            "guest: rows: 1001|1499501",
            "guest: e2fsck: status 0",
            "guest: daemon: status 0",
            "guest: the disk and its log are as they were",
            "guest: clone: status 0",
            "guest: row 7: owner 7",
            "guest: rows: 1000|1499500",
            "guest: daemon: status 0",
            "guest: end",
        ],
        "{}",
        guest.console()
    );
    guest.end().unwrap();
}

const CLOCK_FUNCTIONS: &str = include_str!("../scripts/clock-functions.sh");

/// Makes the program of `leap.c` in `directory`. It runs on a machine without libraries too.
fn leap(directory: &Path) -> PathBuf {
    let program = directory.join("leap");
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/leap.c");
    let built = Command::new("cc")
        .args(["-O1", "-s", "-static", "-o"])
        .arg(&program)
        .arg(source)
        .status();
    assert!(built.expect("cc starts").success(), "cc failed");
    program
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
    let place = dir.path().join("files");
    fs::create_dir(&place).unwrap();
    let script = format!(
        "WALVISOR='{}' PLACE='{}' LEAP='{}'\n{CLOCK_FUNCTIONS}\n{}",
        walvisor_binary("dev").expect("building walvisor").display(),
        place.display(),
        leap(dir.path()).display(),
        include_str!("../scripts/clock-serve.sh")
    );
    let guest = UserMode {
        modules: vec!["nbd".to_owned()],
        ..UserMode::default()
    };
    let mut guest = guest.boot_here(dir.path(), &script).unwrap();
    let (ticks, lines): (Vec<_>, Vec<_>) = guest_lines(&mut guest)
        .into_iter()
        .partition(|line| line.starts_with("guest: serve quiet "));
    assert_eq!(
        lines,
        [
            "guest: commits: status 0",
            "guest: commits: status 0",
            "guest: commits: status 0",
            "guest: serve: the clock was set and had a leap second",
            "guest: commits: status 0",
            "guest: commits: status 0",
            "guest: waiting: dump: status 0",
            "guest: waiting: check: status 0",
            "guest: adaptive: dump: status 0",
            "guest: adaptive: check: status 0",
            "guest: end",
        ],
        "{}",
        guest.console()
    );
    guest.end().unwrap();
    nothing_spun(&ticks[0]);
    for disk in ["waiting", "adaptive"] {
        let dump = fs::read_to_string(place.join(format!("{disk}.json"))).expect("the dump");
        history_is_in_order(disk, &dump);
    }
}

#[test]
fn a_guest_commits_as_fast_however_the_wall_clock_is_set() {
    let dir = tempfile::tempdir().unwrap();
    // The machine gets its files as text.
    let text = Command::new("base64").arg(leap(dir.path())).output();
    let leap = String::from_utf8(text.expect("base64 starts").stdout).expect("text");
    let files = [
        ("guest.sh", include_str!("../scripts/clock-guest.sh")),
        ("leap.base64", &leap),
    ];
    let script = format!(
        "{CLOCK_FUNCTIONS}\n{}",
        include_str!("../scripts/clock-job.sh")
    );
    let Some(outcome) = run_emulated_job(&script, &files) else {
        return;
    };
    let (ticks, lines): (Vec<_>, Vec<_>) = job_lines(&outcome)
        .into_iter()
        .partition(|line| line.starts_with("run quiet "));
    assert_eq!(
        lines,
        [
            "run: the clock was set and had a leap second",
            "run: status 0"
        ]
    );
    assert_eq!(outcome.status, 0);
    nothing_spun(ticks[0]);
}

/// Checks that waits use the monotonic clock: the processor time of the same work is about the same while the clock
/// is set as before, and that of a period of rest is about none.
fn nothing_spun(ticks: &str) {
    println!("{ticks}");
    let numbers: Vec<u64> = ticks
        .split(' ')
        .filter_map(|word| word.parse().ok())
        .collect();
    let [quiet, stepped, idle_before, idle] = numbers[..] else {
        panic!("{ticks}");
    };
    // Both values are for the same work, and for `run` a period of rest. A spinning thread takes 100 ticks a second,
    // for 10 s.
    assert!(stepped <= 3 * quiet + 300, "{ticks}");
    // A spinning thread would take 300 ticks.
    assert!(idle <= idle_before + 100, "{ticks}");
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
