//! `walvisor-bench notify` and `start`: the counts on every path that this machine has, and a start
//! on each transport. The tests check no times.

use std::collections::BTreeSet;

use serde_json::Value;

use crate::{bench, measure, number, report, rows, texts};

#[test]
fn every_path_counts_what_it_must_and_no_more() {
    let kvm = match walvisor_vmm::probe::open() {
        Ok(_) => true,
        Err(error) => {
            println!("skipped: the paths of a virtual machine: {error}");
            false
        }
    };
    let report = measure(&["notify"]);
    assert_eq!(report["interrupted"], false);
    let sections = report["sections"].as_array().unwrap();
    let keys: Vec<&str> = sections
        .iter()
        .map(|section| section["key"].as_str().unwrap())
        .collect();
    let expected = ["ram", "wal"].map(|backend| {
        ["randread", "randwrite", "randwrite-fsync"].map(|job| format!("{backend}-{job}"))
    });
    assert_eq!(keys, expected.concat());
    let mut paths = BTreeSet::from(["vhost-user", "nbd"]);
    if kvm {
        paths.extend([
            "virtio-mmio ioeventfd",
            "virtio-mmio exits",
            "virtio-pci ioeventfd",
            "virtio-pci exits",
        ]);
    } else {
        let notes = sections[0]["notes"].to_string();
        assert!(notes.contains("skipped: /dev/kvm"), "{notes}");
    }
    for section in sections {
        let key = section["key"].as_str().unwrap();
        let rows = section["rows"].as_array().unwrap();
        let told: BTreeSet<&str> = texts(rows, "path").into_iter().collect();
        assert_eq!(told, paths, "{key}");
        for row in rows {
            row_is_sane(key, row);
        }
    }
}

fn row_is_sane(section: &str, row: &Value) {
    let path = row["path"].as_str().unwrap();
    assert!(number(row, "iops") > 0.0, "{section}: {row}");
    assert!(
        number(row, "p50_us") <= number(row, "p999_us"),
        "{section}: {row}"
    );
    assert!(
        number(row, "vmm_cpu_us_per_request") > 0.0,
        "{section}: {row}"
    );
    let syncs = number(row, "syncs_per_request");
    match section {
        "wal-randwrite-fsync" => assert!(syncs > 0.0 && syncs <= 1.1, "{section}: {row}"),
        "wal-randread" | "wal-randwrite" => {}
        _ => assert_eq!(syncs, 0.0, "{section}: {row}"),
    }
    if path == "nbd" {
        assert_eq!(row["doorbells_per_request"], Value::Null);
        return;
    }
    let (doorbells, interrupts) = (
        number(row, "doorbells_per_request"),
        number(row, "interrupts_per_request"),
    );
    // A request with a FLUSH counts as two. Notifications before the first request may add a
    // little.
    let most = if section.ends_with("fsync") { 2.1 } else { 1.1 };
    assert!(doorbells > 0.0 && doorbells <= most, "{section}: {row}");
    assert!(interrupts <= most, "{section}: {row}");
    if path == "vhost-user" {
        assert_eq!(row["mmio_write_exits_per_request"], Value::Null);
        return;
    }
    let (reads, writes) = (
        number(row, "mmio_read_exits_per_request"),
        number(row, "mmio_write_exits_per_request"),
    );
    // A late interrupt, whose request the driver has already found, makes the driver read the
    // device's status. Allowed are two in a hundred, and two in a turn of 120 ms, which may have
    // had few requests.
    let few = interrupts * 0.02 + 2.0 / (number(row, "iops") * 0.12);
    match path {
        "virtio-pci ioeventfd" => {
            assert_eq!(writes, 0.0, "{section}: {row}");
            assert!(reads <= few, "{section}: {row}");
        }
        // The driver reads and acknowledges each interrupt, once at most.
        "virtio-mmio ioeventfd" => assert!(
            writes <= interrupts * 1.01 + 0.001 && writes <= reads,
            "{section}: {row}"
        ),
        "virtio-pci exits" => {
            assert!(reads <= few, "{section}: {row}");
            assert!(writes >= doorbells * 0.99 - 0.001, "{section}: {row}");
        }
        "virtio-mmio exits" => {
            assert!(writes >= doorbells * 0.99 - 0.001, "{section}: {row}");
        }
        _ => panic!("{row}"),
    }
}

#[test]
fn a_part_can_be_chosen() {
    let report = measure(&["notify", "--only=vhost-user", "--backends=ram"]);
    let sections = report["sections"].as_array().unwrap();
    assert_eq!(sections.len(), 3);
    for section in sections {
        let rows = section["rows"].as_array().unwrap();
        assert!(rows.iter().all(|row| row["path"] == "vhost-user"));
    }
}

#[test]
fn a_guest_with_a_disk_starts_and_its_memory_is_told() {
    if let Err(error) = walvisor_vmm::probe::open() {
        return println!("skipped: {error}");
    }
    let directory = tempfile::tempdir().unwrap();
    let arguments = ["start", "--rounds", "1", "--json"];
    let report = report(&bench(directory.path(), &arguments).output().unwrap());
    let rows = rows(&report, "start");
    assert_eq!(texts(rows, "disk"), ["none", "mmio", "pci"]);
    for row in rows {
        let [main, spawn] =
            ["main", "spawn"].map(|from| number(row, &format!("{from}_to_first_instruction_us")));
        assert!(0.0 < main && main < spawn, "{row}");
        let [own, resident] =
            ["own", "resident"].map(|which| number(row, &format!("vmm_{which}_bytes")));
        assert!(0.0 < own && own < resident, "{row}");
    }
}
