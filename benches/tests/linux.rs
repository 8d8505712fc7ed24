//! `walvisor-bench notify --load linux`: the counts on every path of the Linux kernels. The test checks no times.

mod support;

use serde_json::Value;
use support::{compare, count};
use walvisor_guest_images::obstacle;

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
