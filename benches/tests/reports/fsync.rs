//! `walvisor-bench fsync`: a FLUSH reaches the medium or not, and what a cut loses and tears.

use walvisor_tests::have_all;

use crate::{measure, number, rows, texts};

#[test]
fn cuts_lose_nothing_that_was_flushed() {
    let report = measure(&["fsync", "--only", "walvisor"]);
    let rows = rows(&report, "doors");
    let ways = texts(rows, "way");
    let row = |way: &str| {
        let at = ways.iter().position(|known| *known == way);
        &rows[at.unwrap_or_else(|| panic!("no {way}: {ways:?}"))]
    };
    let log = row("walvisor serve nbd");
    assert!(number(log, "per_flush_alone") >= 1.0, "{log}");
    assert!(number(log, "per_flush_together") > 0.0, "{log}");
    assert!(number(log, "per_fua_after_flush") >= 1.0, "{log}");
    assert_eq!(number(log, "lost_by_kill"), 0.0, "{log}");
    assert_eq!(number(log, "lost_by_cut"), 0.0, "{log}");
    assert_eq!(number(log, "torn"), 0.0, "{log}");
    let raw = row("walvisor, backend=raw");
    assert!(number(raw, "per_flush_alone") >= 1.0, "{raw}");
    assert_eq!(number(raw, "lost_by_cut"), 0.0, "{raw}");
    assert!(number(raw, "torn") > 0.0, "{raw}");
}

/// Any sync makes durable what was written before it: also one of a file that the log makes
/// meanwhile, or another process's of all file systems. Hardly three runs are hit by one, unless it
/// is the disk that syncs.
#[test]
fn without_syncs_a_cut_loses_all_that_was_flushed() {
    let loses_all = |_| {
        let report = measure(&["fsync", "--only", "walvisor-unsafe"]);
        let row = &rows(&report, "doors")[0];
        assert_eq!(row["way"], "walvisor, cache=unsafe");
        println!("{row}");
        number(row, "per_flush_alone") < 1.0 && number(row, "lost_by_cut") == 10.0
    };
    assert!((0..3).any(loses_all));
}

#[test]
fn clients_in_user_mode_linux_commit_without_a_pause_and_lose_nothing() {
    if !have_all(&[("linux.uml", "user-mode-linux"), ("fio", "fio")]) {
        return;
    }
    let report = measure(&["fsync", "--only", "uml-walvisor"]);
    let row = &rows(&report, "guests")[0];
    assert!(number(row, "per_flush_alone") >= 1.0, "{row}");
    assert!(number(row, "per_flush_busy") > 0.0, "{row}");
    assert!(number(row, "commits_per_s") > 0.0, "{row}");
    assert_eq!(number(row, "lost_by_cut"), 0.0, "{row}");
    assert_eq!(number(row, "torn"), 0.0, "{row}");
}
