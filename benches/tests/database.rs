//! `walvisor-bench database`: the counts for each commit of a database. The test checks no times.

mod support;

use serde_json::Value;
use support::{compare, count};

#[test]
fn a_commit_of_a_database_is_counted() {
    let needs = [
        ("linux.uml", "user-mode-linux"),
        ("mariadbd", "mariadb-server-core"),
        ("mariadb", "mariadb-client-core"),
        ("mariadb-slap", "mariadb-client"),
        ("sqlite3", "sqlite3"),
        ("mkfs.ext4", "e2fsprogs"),
    ];
    let Some(output) = compare("database --clients 2", &needs) else {
        return;
    };
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = |section: usize| report["sections"][section]["rows"].as_array().unwrap();
    let disks: Vec<&str> = rows(0)
        .iter()
        .map(|row| row["disk"].as_str().unwrap())
        .collect();
    assert_eq!(disks, ["raw", "wal", "wal, no doublewrite"]);
    let journals: Vec<&str> = rows(1)
        .iter()
        .map(|row| row["journal"].as_str().unwrap())
        .collect();
    assert_eq!(
        journals,
        [["write-ahead log"; 2], ["rollback journal"; 2]].concat()
    );
    for row in rows(0).iter().chain(rows(1)) {
        let of = |key: &str| count(&row[key], "median");
        // One sync may serve the commits of both clients. Only FLUSHes and checkpoints sync.
        assert!(of("flushes_per_commit") > 0.5, "{row}");
        let spare = of("flushes_per_commit") - of("syncs_per_commit");
        assert!(spare > -0.5 && of("syncs_per_commit") > 0.4, "{row}");
        assert!(of("writes_per_commit") > 1.0 && of("written_kib_per_commit") > 4.0);
    }
}
