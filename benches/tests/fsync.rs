//! `walvisor-bench fsync`: a FLUSH reaches the medium or not, and what a cut loses and tears.

mod support;

use support::{bench, number, report, rows, texts};
use walvisor_tests::have_all;

#[test]
fn cuts_lose_nothing_flushed_with_a_log_and_all_without_syncs() {
    let dir = tempfile::tempdir().unwrap();
    let only = "walvisor,walvisor-unsafe,walvisor-raw";
    let only = ["fsync", "--quick", "--only", only, "--json"];
    let report = report(&bench(dir.path(), &only).output().unwrap());
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
    let no_syncs = row("walvisor, cache=unsafe");
    // The log syncs files of its own when it makes them, beside the clients if the machine is slow.
    assert!(number(no_syncs, "per_flush_alone") < 1.0, "{no_syncs}");
    assert_eq!(number(no_syncs, "lost_by_cut"), 10.0, "{no_syncs}");
    let raw = row("walvisor, backend=raw");
    assert!(number(raw, "per_flush_alone") >= 1.0, "{raw}");
    assert_eq!(number(raw, "lost_by_cut"), 0.0, "{raw}");
    assert!(number(raw, "torn") > 0.0, "{raw}");
}

#[test]
fn clients_in_user_mode_linux_commit_without_a_pause_and_lose_nothing() {
    if !have_all(&[("linux.uml", "user-mode-linux"), ("fio", "fio")]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let only = ["fsync", "--quick", "--only", "uml-walvisor", "--json"];
    let report = report(&bench(dir.path(), &only).output().unwrap());
    let row = &rows(&report, "guests")[0];
    assert!(number(row, "per_flush_alone") >= 1.0, "{row}");
    assert!(number(row, "per_flush_busy") > 0.0, "{row}");
    assert!(number(row, "commits_per_s") > 0.0, "{row}");
    assert_eq!(number(row, "lost_by_cut"), 0.0, "{row}");
    assert_eq!(number(row, "torn"), 0.0, "{row}");
}
