//! The rows of `walvisor-bench archive`, `neighbours` and `peers`, and what they tell of programs
//! that are not here.

use crate::{bench, measure, number, rows, texts};
use walvisor_tests::have_all;

#[test]
fn commits_are_measured_with_an_archive_and_with_flushes_that_wait_for_it() {
    let report = measure(&["archive"]);
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
}

#[test]
fn a_victim_is_measured_alone_and_beside_an_attack() {
    let report = measure(&["neighbours", "--attack", "garbage"]);
    let rows = rows(&report, "neighbours");
    let ours = rows.iter().filter(|row| row["server"] == "walvisor");
    let ours: Vec<_> = ours.cloned().collect();
    assert_eq!(texts(&ours, "door"), ["vhost-user", "nbd"]);
    let keys = [
        "alone_per_s",
        "beside_per_s",
        "kept",
        "longest_ms",
        "peak_mib",
    ];
    for row in &ours {
        assert!(keys.iter().all(|key| number(row, key) > 0.0), "{row}");
    }
    // A missing peer is named, and one that dies has no figures.
    let notes = report["sections"][0]["notes"].to_string();
    let missing = notes.contains("install the package qemu-system-common");
    assert!(rows.len() == 4 || missing, "{rows:?}");
}

#[test]
fn the_same_job_is_measured_on_both_sides() {
    let needs = [
        ("qemu-storage-daemon", "qemu-system-common"),
        ("qemu-nbd", "qemu-utils"),
        ("fio", "fio"),
    ];
    if !have_all(&needs) {
        return;
    }
    let only = [
        "peers",
        "--only",
        "vhost-user,nbd",
        "--job",
        "write + flush, 1",
    ];
    let report = measure(&only);
    let rows = rows(&report, "peers");
    let told = texts(rows, "peer").into_iter().zip(texts(rows, "job"));
    let expected = [
        ("qemu-storage-daemon", "write + flush, 1 client"),
        ("qemu-storage-daemon", "write + flush, 16 clients, 4 queues"),
        ("qemu-nbd", "write + flush, 1 connection"),
        ("walvisor, answer=memory", "write + flush, 1 connection"),
        ("qemu-nbd", "write + flush, 16 connections"),
        ("walvisor, answer=memory", "write + flush, 16 connections"),
    ];
    assert_eq!(told.collect::<Vec<_>>(), expected);
    for row in rows {
        let keys = ["walvisor_per_s", "peer_per_s", "ratio"];
        assert!(keys.iter().all(|key| number(row, key) > 0.0), "{row}");
    }
}

#[test]
fn a_peer_that_is_not_here_is_told_with_its_package() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = bench(dir.path(), &["peers", "--quick"]);
    let output = command.env("PATH", dir.path()).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let text = String::from_utf8(output.stdout).unwrap();
    for (program, package) in [
        ("qemu-storage-daemon", "qemu-system-common"),
        ("qemu-nbd", "qemu-utils"),
        ("qemu-system-x86_64", "qemu-system-x86"),
        ("linux.uml", "user-mode-linux"),
    ] {
        let told = format!("Not measured: {program} is missing: install the package {package}");
        assert!(text.contains(&told), "{text}");
    }
}
