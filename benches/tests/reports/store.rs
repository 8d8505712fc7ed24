//! `walvisor-bench store`, run like users do, with small numbers.

use std::process::Command;

use serde_json::Value;

use crate::{number, texts};

/// The rows of the report of `walvisor-bench store` with these words. It works in a directory on
/// the file system of the build, which is rarely in memory, and leaves nothing there.
#[track_caller]
fn rows(words: &str) -> Vec<Value> {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
    let mut command = Command::new(env!("CARGO_BIN_EXE_walvisor-bench"));
    let arguments: Vec<_> = words.split_whitespace().collect();
    let output = command
        .arg("store")
        .args(&arguments)
        .args(["--json", "--dir"])
        .arg(directory.path())
        .output()
        .unwrap();
    let left = std::fs::read_dir(directory.path()).map_or(0, Iterator::count);
    assert_eq!(left, 0, "the files are removed");
    crate::rows(&crate::report(&output), arguments[0]).to_vec()
}

/// The rows of the raw file and of the log, of `store commit` with one round.
#[track_caller]
fn commits(words: &str) -> [Value; 2] {
    let rows = rows(&format!("commit --rounds 1 {words}"));
    assert_eq!(texts(&rows, "side"), ["raw file", "log"]);
    rows.try_into().expect("two")
}

/// The number of groups in each size class.
fn groups(log: &Value) -> Vec<u64> {
    let sizes = log["group_sizes"].as_array().expect("a list");
    sizes
        .iter()
        .map(|count| count.as_f64().unwrap() as u64)
        .collect()
}

/// A sync so slow that the clients are in time for the next group even on a busy machine.
const SLOW_EIGHT: &str = "--clients 8 --sync-latency-us 20000 --commits 320";

/// Most syncs per commit of eight clients that share them. Two alternating groups need 2/8. On a
/// busy machine clients wake late and miss a group, so twice that is allowed, still far from the
/// 1.0 without groups.
const SHARED: f64 = 2.0 * 2.0 / 8.0;

#[test]
fn eight_clients_share_syncs_and_two_groups_alternate() {
    let [raw, log] = commits(SLOW_EIGHT);
    assert_eq!(number(&log, "commits"), 320.0);
    assert!(
        number(&log, "syncs_per_commit") <= SHARED && number(&log, "ratio") > 0.0,
        "{log}"
    );
    let groups = groups(&log);
    assert_eq!(groups.len(), 10, "{log}");
    // Every sync made a group with waiters durable, and no group has more waiters than there are
    // clients.
    assert_eq!(groups.iter().sum::<u64>() as f64, number(&log, "syncs"));
    assert_eq!(groups[4..].iter().sum::<u64>(), 0, "{log}");
    for side in [raw, log] {
        // A commit waits for at least its own sync, and so do the threads of the baseline.
        assert!(number(&side, "p50_us") >= 20_000.0, "{side}");
        assert!(number(&side, "p99_us") >= number(&side, "p50_us"), "{side}");
    }
}

/// The limit of operations per second applies to the writes and syncs of the store and of the
/// baseline.
#[test]
fn a_slow_medium_counts_writes_and_syncs() {
    let slow = "--operations-per-second 1000 --operation-latency-us 500";
    for more in ["", "--write-per-waiter"] {
        for side in commits(&format!("--clients 4 --commits 400 {slow} {more}")) {
            let operations = number(&side, "writes") + number(&side, "syncs");
            let rate = operations / number(&side, "commits") * number(&side, "commits_per_s");
            // It may begin with saved-up operations, those of 10 ms.
            assert!(
                rate <= 1000.0 * 1.5 && number(&side, "p50_us") >= 1000.0,
                "{side}"
            );
        }
    }
}

#[test]
fn append_recover_and_a_checkpoint_stand_beside_their_baselines() {
    let append = rows("append --bytes 8M --depth 4");
    // Headers need a little space; a payload is written once.
    let overhead = number(&append[1], "log_bytes_per_byte");
    assert!((1.0..1.2).contains(&overhead), "{append:?}");
    let recover = rows("recover --bytes 8M");
    assert!(number(&recover[1], "log_bytes") > (8 << 20) as f64);
    // The index alone takes 16 bytes.
    assert!(number(&recover[1], "memory_bytes_per_record") >= 16.0);
    let scattered = rows("checkpoint --bytes 4M");
    let sequential = rows("checkpoint --bytes 4M --sequential --block 64K");
    for (rows, figure) in [
        (append, "mib_per_s"),
        (recover, "ms"),
        (scattered, "mib_per_s"),
        (sequential, "mib_per_s"),
    ] {
        assert!(
            rows.len() == 2 && rows.iter().all(|row| number(row, figure) > 0.0),
            "{rows:?}"
        );
        assert!(number(&rows[1], "ratio") > 0.0, "{rows:?}");
    }
    let sparse = rows("recover --bytes 600M --sparse");
    assert!(number(&sparse[0], "ms") > 0.0 && sparse[0]["ratio"].is_null());
}

#[test]
fn a_load_is_done_by_one_thread_and_by_all() {
    let load = rows("load --bytes 4M --threads 3");
    assert_eq!(
        texts(&load, "work"),
        ["import", "export", "check", "recover"]
    );
    for work in load {
        for key in ["one_thread_mib_per_s", "all_threads_mib_per_s", "ratio"] {
            assert!(number(&work, key) > 0.0, "{work}");
        }
    }
}

/// If reads waited for a sync, at most as many as are in flight could end during each sync.
#[test]
fn reads_do_not_wait_for_the_syncs_of_another_disk() {
    let read = rows("read --bytes 4M --reads 4000 --depth 4 --beside-sync-us 200000");
    let beside = read.last().unwrap();
    assert!((4.0..200.0).contains(&number(beside, "syncs")), "{beside}");
    let kinds = [["checkpointed"; 2], ["in the log"; 2], ["beside syncs"; 2]].concat();
    assert_eq!(texts(&read, "reads_of"), kinds);
    for row in &read {
        assert!(number(row, "reads_per_s") > 0.0, "{row}");
        assert!(number(row, "p99_us") >= number(row, "p50_us"), "{row}");
    }
}

#[test]
fn reads_are_measured_beside_writes_that_keep_the_log_full() {
    let read = rows("read --bytes 8M --reads 1000 --depth 1 --beside-writes");
    let [.., store, _, raw] = &read[..] else {
        panic!("{read:?}")
    };
    for (row, kind) in [(store, "beside writes"), (raw, "raw, beside writes")] {
        assert_eq!(
            (row["reads_of"].as_str(), row["side"].as_str()),
            (Some(kind), Some("beside"))
        );
        assert!(number(row, "p99_ratio") > 0.0, "{row}");
    }
}
