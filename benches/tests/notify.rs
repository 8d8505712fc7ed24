//! `walvisor-bench notify`: the counts on every path that this machine has. The tests check no times.

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;

/// The report of a quick comparison with these arguments.
#[track_caller]
fn compare(arguments: &[&str]) -> Value {
    let directory = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_walvisor-bench"))
        .env("WALVISOR", walvisor_tests::binary())
        .args(["notify", "--quick", "--json", "--dir"])
        .arg(directory.path())
        .args(arguments)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let left = std::fs::read_dir(directory.path()).unwrap().count();
    assert_eq!(left, 0, "something is left behind");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A figure of a row: the median if there are several rounds.
fn figure(row: &Value, key: &str) -> f64 {
    let cell = &row[key];
    let value = cell.as_f64().or_else(|| cell["median"].as_f64());
    value.unwrap_or_else(|| panic!("{key}: {row}"))
}

#[test]
fn every_path_counts_what_it_must_and_no_more() {
    let kvm = match walvisor_vmm::probe::open() {
        Ok(_) => true,
        Err(error) => {
            println!("skipped: the paths of a virtual machine: {error}");
            false
        }
    };
    let report = compare(&[]);
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
        let told: BTreeSet<&str> = rows
            .iter()
            .map(|row| row["path"].as_str().unwrap())
            .collect();
        assert_eq!(told, paths, "{key}");
        for row in rows {
            row_is_sane(key, row);
        }
    }
}

fn row_is_sane(section: &str, row: &Value) {
    let path = row["path"].as_str().unwrap();
    assert!(figure(row, "iops") > 0.0, "{section}: {row}");
    assert!(
        figure(row, "p50_us") <= figure(row, "p999_us"),
        "{section}: {row}"
    );
    assert!(
        figure(row, "vmm_cpu_us_per_request") > 0.0,
        "{section}: {row}"
    );
    let syncs = figure(row, "syncs_per_request");
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
        figure(row, "doorbells_per_request"),
        figure(row, "interrupts_per_request"),
    );
    // A request with a FLUSH counts as two. Notifications before the first request may add a little.
    let most = if section.ends_with("fsync") { 2.1 } else { 1.1 };
    assert!(doorbells > 0.0 && doorbells <= most, "{section}: {row}");
    assert!(interrupts <= most, "{section}: {row}");
    if path == "vhost-user" {
        assert_eq!(row["mmio_write_exits_per_request"], Value::Null);
        return;
    }
    let (reads, writes) = (
        figure(row, "mmio_read_exits_per_request"),
        figure(row, "mmio_write_exits_per_request"),
    );
    // A late interrupt, whose request the driver has already found, makes the driver read the device's status.
    // Allowed are two in a hundred, and two in a turn of 120 ms, which may have had few requests.
    let few = interrupts * 0.02 + 2.0 / (figure(row, "iops") * 0.12);
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
fn a_part_can_be_chosen_and_drawn() {
    let directory = tempfile::tempdir().unwrap();
    let (page, plots) = (
        directory.path().join("page.html"),
        directory.path().join("plots"),
    );
    let report = compare(&[
        "--only=vhost-user",
        "--backends=ram",
        "--html",
        page.to_str().unwrap(),
        "--svg",
        plots.to_str().unwrap(),
    ]);
    let sections = report["sections"].as_array().unwrap();
    assert_eq!(sections.len(), 3);
    for row in sections
        .iter()
        .flat_map(|section| section["rows"].as_array().unwrap())
    {
        assert_eq!(row["path"], "vhost-user");
    }
    let page = std::fs::read_to_string(page).unwrap();
    assert!(page.contains("<svg") && page.contains("vhost-user"));
    assert!(std::fs::read_dir(plots).unwrap().count() >= 12);
}
