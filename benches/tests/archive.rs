//! `walvisor-bench archive`: a row for each delay of the store and number of clients.

mod support;

use support::{bench, number, report, rows};

#[test]
fn commits_are_measured_with_an_archive_and_with_flushes_that_wait_for_it() {
    let dir = tempfile::tempdir().unwrap();
    let report = report(
        &bench(dir.path(), &["archive", "--quick", "--json"])
            .output()
            .unwrap(),
    );
    let rows = rows(&report, "archive");
    assert_eq!(rows.len(), 2);
    for row in rows {
        for side in ["none", "archive", "sync"] {
            assert!(number(row, &format!("{side}_commits_per_s")) > 0.0, "{row}");
        }
        // A PUT and a GET for each group.
        assert!(number(row, "sync_requests_per_commit") > 0.0, "{row}");
        let ideal = number(row, "ideal_per_s");
        assert!(number(row, "sync_commits_per_s") <= ideal, "{row}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
