//! `walvisor-bench peers`: rows for the installed peers and for answers from memory, and a note for
//! each missing peer.

mod support;

use support::{bench, number, report, rows};
use walvisor_tests::have_all;

#[test]
fn the_same_job_on_both_sides() {
    let needs = [
        ("qemu-storage-daemon", "qemu-system-common"),
        ("qemu-nbd", "qemu-utils"),
        ("fio", "fio"),
    ];
    if !have_all(&needs) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let only = [
        "peers",
        "--quick",
        "--only",
        "vhost-user,nbd",
        "--job",
        "write + flush, 1",
        "--json",
    ];
    let report = report(&bench(dir.path(), &only).output().unwrap());
    let rows = rows(&report, "peers");
    let told: Vec<_> = rows
        .iter()
        .map(|row| {
            format!(
                "{} {}",
                row["peer"].as_str().unwrap(),
                row["job"].as_str().unwrap()
            )
        })
        .collect();
    let expected = [
        "qemu-storage-daemon write + flush, 1 client",
        "qemu-storage-daemon write + flush, 16 clients, 4 queues",
        "qemu-nbd write + flush, 1 connection",
        "walvisor, answer=memory write + flush, 1 connection",
        "qemu-nbd write + flush, 16 connections",
        "walvisor, answer=memory write + flush, 16 connections",
    ];
    assert_eq!(told, expected);
    for row in rows {
        for side in ["walvisor_per_s", "peer_per_s"] {
            assert!(number(row, side) > 0.0, "{row}");
        }
        assert!(number(row, "ratio") > 0.0, "{row}");
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_peer_that_is_not_here_is_told_with_its_package() {
    let dir = tempfile::tempdir().unwrap();
    let mut command = bench(dir.path(), &["peers", "--quick"]);
    let output = command.env("PATH", dir.path()).output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let text = String::from_utf8(output.stdout).unwrap();
    for told in [
        "Not measured: qemu-storage-daemon is missing: install the package qemu-system-common",
        "Not measured: qemu-nbd is missing: install the package qemu-utils",
        "Not measured: qemu-system-x86_64 is missing: install the package qemu-system-x86",
        "Not measured: linux.uml is missing: install the package user-mode-linux",
    ] {
        assert!(text.contains(told), "{text}");
    }
}
