//! `walvisor-bench notify --load linux` and `walvisor-bench database`: the counts on every path of the Linux kernels,
//! and those for each commit of a database. The tests check no times.

use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

use serde_json::Value;
use walvisor_guest_images::{obstacle, program};
use walvisor_tests::{binary, have};

/// The paths of user-mode Linux, and of a machine with KVM, in the order of their turns.
const USER_MODE: [&str; 4] = ["vhost-user", "tcmu in a guest", "tcmu", "nbd"];
const MACHINE: [&str; 7] = [
    "virtio-mmio ioeventfd",
    "virtio-pci ioeventfd",
    "virtio-mmio exits",
    "virtio-pci exits",
    "tcmu in a guest",
    "tcmu",
    "nbd",
];

/// Builds the program that runs guests, and returns the search path with its directory.
fn path_with_guest_images() -> std::ffi::OsString {
    let built = program("walvisor-guest-images", "dev").expect("the program that makes guests");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = std::env::split_paths(&path);
    let own = built.parent().unwrap().to_owned();
    std::env::join_paths([own].into_iter().chain(directories)).unwrap()
}

/// Runs `walvisor-bench` quickly, for its JSON report. Returns `None` if a program of `needs` cannot be installed,
/// after printing why.
fn compare(arguments: &str, needs: &[(&str, &str)]) -> Option<Output> {
    if !needs
        .iter()
        .all(|(program, package)| have(program, package))
    {
        return None;
    }
    // One comparison at a time: each uses every processor of a small machine.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let directory = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_walvisor-bench"))
        .args(arguments.split(' '))
        .args(["--quick", "--json", "--dir"])
        .arg(directory.path())
        .env("WALVISOR", binary())
        .env("PATH", path_with_guest_images())
        .output();
    Some(output.unwrap())
}

/// A count of a row.
fn count(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or_else(|| panic!("{key}: {row}"))
}

#[test]
fn every_path_of_linux_counts_what_it_must() {
    if let Some(why) = obstacle() {
        return println!("skipped: {why}");
    }
    let needs = [
        ("linux.uml", "user-mode-linux"),
        ("fio", "fio"),
        ("nbd-client", "nbd-client"),
    ];
    let arguments = "notify --load linux --linux user-mode,machine";
    let Some(output) = compare(arguments, &needs) else {
        return;
    };
    let errors = String::from_utf8_lossy(&output.stderr);
    // The errors show how often the emulated machine crashed, if it did.
    println!("{errors}");
    // Different write caches would be an error.
    assert!(output.status.success(), "{errors}");
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let rows = |key: &str| -> Vec<Value> {
        let sections = report["sections"].as_array().unwrap();
        let section = sections.iter().find(|section| section["key"] == key);
        let section = section.unwrap_or_else(|| panic!("no {key}: {report}"));
        section["rows"].as_array().unwrap().clone()
    };
    for (kernel, paths) in [("user-mode-linux", &USER_MODE[..]), ("linux", &MACHINE[..])] {
        let reads = rows(&format!("{kernel}-ram-randread"));
        let commits = rows(&format!("{kernel}-wal-randwrite-fsync"));
        for rows in [&reads, &commits] {
            let told: Vec<&str> = rows
                .iter()
                .map(|row| row["path"].as_str().unwrap())
                .collect();
            // The notes contain the reason for each missing path.
            let notes = report["sections"].as_array().unwrap().iter();
            let notes: Vec<&Value> = notes.map(|section| &section["notes"]).collect();
            assert_eq!(told, paths, "{kernel}: {notes:#?}");
        }
        for row in &reads {
            assert!(row["syncs_per_request"].is_null(), "{row}");
        }
        for row in &commits {
            let syncs = count(row, "syncs_per_request");
            assert!(syncs > 0.0 && syncs < 2.5, "{row}");
        }
        for row in reads.iter().filter(|row| row["path"] != "nbd") {
            // Four requests are in flight, and a doorbell may announce only one of them.
            let doorbells = count(row, "doorbells_per_request");
            assert!(doorbells > 0.0 && doorbells < 1.6, "{row}");
        }
    }
    for row in rows("linux-wal-randwrite-fsync") {
        let path = row["path"].as_str().unwrap();
        let of = |key: &str| count(&row, key);
        // Each interrupt of virtio-mmio costs a register write, and so does each doorbell without an ioeventfd.
        let writes = match path {
            "virtio-mmio ioeventfd" => of("interrupts_per_request"),
            "virtio-mmio exits" => of("interrupts_per_request") + of("doorbells_per_request"),
            "virtio-pci exits" => of("doorbells_per_request"),
            "virtio-pci ioeventfd" | "tcmu in a guest" => 0.0,
            _ => continue,
        };
        let told = of("mmio_write_exits_per_request");
        assert!((told - writes).abs() < 0.1, "{writes}: {row}");
    }
}

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
