//! `walvisor-bench database`: the counts for each commit of a database. The tests check no times.

use serde_json::Value;
use walvisor_tests::postgresql;

use crate::{can_mount_volumes, compare, number, rows, texts};

/// Programs that every guest needs, with their packages.
const NEEDS: [(&str, &str); 3] = [
    ("linux.uml", "user-mode-linux"),
    ("modprobe", "kmod"),
    ("mkfs.ext4", "e2fsprogs"),
];

/// A sync serves at most one commit of each client, so there are at least `least` for a commit.
/// Only FLUSHes and checkpoints sync.
#[track_caller]
fn assert_counts(row: &Value, least: f64) {
    let (flushes, syncs) = (
        number(row, "flushes_per_commit"),
        number(row, "syncs_per_commit"),
    );
    assert!(flushes >= least && syncs >= 0.8 * least, "{row}");
    assert!(flushes - syncs > -0.5, "{row}");
    assert!(number(row, "writes_per_commit") >= least, "{row}");
    assert!(number(row, "written_kib_per_commit") > 4.0 * least, "{row}");
}

#[test]
fn a_commit_of_a_database_is_counted() {
    let mut needs = vec![
        ("mariadbd", "mariadb-server-core"),
        ("mariadb", "mariadb-client-core"),
        ("mariadb-slap", "mariadb-client"),
        ("sqlite3", "sqlite3"),
    ];
    needs.extend(postgresql::NEEDS);
    let arguments = "database --clients 2 --only mariadb,postgresql,sqlite";
    let Some(report) = compare(arguments, &[&NEEDS[..], &needs].concat()) else {
        return;
    };
    let [mariadb, postgresql, sqlite] =
        ["mariadb", "postgresql", "sqlite"].map(|key| rows(&report, key));
    let disks = ["raw", "wal", "wal, no doublewrite"];
    assert_eq!(texts(mariadb, "disk"), disks);
    let disks = [
        "raw",
        "raw, no full-page writes (unsafe)",
        "wal",
        "wal, no full-page writes",
    ];
    assert_eq!(texts(postgresql, "disk"), disks);
    let journals = [["write-ahead log"; 2], ["rollback journal"; 2]].concat();
    assert_eq!(texts(sqlite, "journal"), journals);
    for row in [mariadb, postgresql, sqlite].into_iter().flatten() {
        assert_counts(row, 0.5);
    }
    // The copy of a page is 8 KiB less its free space.
    let kib: Vec<f64> = postgresql
        .iter()
        .map(|row| number(row, "written_kib_per_commit"))
        .collect();
    assert!(kib[0] > kib[1] + 4.0 && kib[2] > kib[3] + 4.0, "{kib:?}");
}

#[test]
fn guests_on_one_log_count_its_syncs_once() {
    let needs = [&NEEDS[..], &postgresql::NEEDS].concat();
    let Some(report) = compare("database --only guests", &needs) else {
        return;
    };
    let rows = rows(&report, "guests");
    let disks = ["4 raw", "one log", "one log, no full-page writes"];
    assert_eq!(texts(rows, "disks"), disks);
    for row in rows {
        assert_eq!(
            (number(row, "guests"), number(row, "clients_each")),
            (4.0, 4.0)
        );
        // Four clients of a guest may share a FLUSH, and all clients of all guests a sync of the
        // log.
        assert_counts(row, 1.0 / 16.0);
    }
    let raw = &rows[0];
    assert_eq!(
        number(raw, "syncs_per_commit"),
        number(raw, "flushes_per_commit")
    );
}

#[test]
fn a_cluster_of_etcd_is_measured_alone_and_beside_neighbours() {
    let needs = [
        ("etcd", "etcd-server"),
        ("etcdctl", "etcd-client"),
        ("fio", "fio"),
        ("qemu-nbd", "qemu-utils"),
        ("nbdfuse", "libnbd-bin"),
        ("nbdkit", "nbdkit"),
        ("fusermount3", "fuse3"),
        ("losetup", "mount"),
        ("mkfs.ext4", "e2fsprogs"),
    ];
    if !can_mount_volumes() {
        return;
    }
    let Some(report) = compare("database --only etcd", &needs) else {
        return;
    };
    let rows = rows(&report, "etcd-directory");
    let disks = ["walvisor", "walvisor, backend=raw", "qemu-nbd, cache=none"];
    assert_eq!(texts(rows, "disk"), disks.repeat(2));
    for (at, row) in rows.iter().enumerate() {
        let neighbours = if at < 3 { 0.0 } else { 3.0 };
        assert_eq!(number(row, "neighbours"), neighbours);
        // Members that only started make fewer.
        assert!(number(row, "fsyncs") > 20.0, "{row}");
        assert!(number(row, "p50_ms") > 0.0, "{row}");
        match row["disk"].as_str() {
            // A peer does not tell.
            Some("qemu-nbd, cache=none") => assert!(row["syncs"].is_null(), "{row}"),
            _ => assert!(number(row, "syncs") > 0.0, "{row}"),
        }
    }
}
