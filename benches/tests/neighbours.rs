//! `walvisor-bench neighbours`: a row for each server and attack, with the victim's commits alone
//! and beside it.

mod support;

use support::{bench, number, report, rows, texts};

#[test]
fn a_victim_is_measured_alone_and_beside_an_attack() {
    let dir = tempfile::tempdir().unwrap();
    let only = ["neighbours", "--quick", "--attack", "garbage", "--json"];
    let report = report(&bench(dir.path(), &only).output().unwrap());
    let rows = rows(&report, "neighbours");
    let ours: Vec<_> = rows
        .iter()
        .filter(|row| row["server"] == "walvisor")
        .cloned()
        .collect();
    assert_eq!(texts(&ours, "door"), ["vhost-user", "nbd"]);
    for row in &ours {
        for key in [
            "alone_per_s",
            "beside_per_s",
            "kept",
            "longest_ms",
            "peak_mib",
        ] {
            assert!(number(row, key) > 0.0, "{row}");
        }
    }
    // A peer that is missing is told, and one that dies has no figures.
    let notes = report["sections"][0]["notes"].to_string();
    let missing = notes.contains("install the package qemu-system-common");
    assert!(rows.len() == 4 || missing, "{rows:?}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
