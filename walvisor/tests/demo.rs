//! `walvisor demo`, as its users run it.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

const WALVISOR: &str = env!("CARGO_BIN_EXE_walvisor");

fn demo(arguments: &[&str], directory: &Path) -> Output {
    Command::new(WALVISOR)
        .arg("demo")
        .args(arguments)
        .arg("--dir")
        .arg(directory)
        .output()
        .expect("walvisor starts")
}

/// Whether this machine has a usable KVM; prints why the test is skipped if not.
fn kvm() -> bool {
    match walvisor_vmm::probe::open() {
        Ok(_) => true,
        Err(error) => {
            println!("skipped: {error}");
            false
        }
    }
}

fn entries(directory: &Path) -> usize {
    std::fs::read_dir(directory).expect("readable").count()
}

#[test]
fn both_transports_verify_every_byte_and_the_counts_make_sense() {
    if !kvm() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let output = demo(&["--json"], directory.path());
    let (text, errors) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{text}{errors}");
    let report: Value = serde_json::from_str(&text).expect("JSON, and nothing else");
    let transports = report["transports"].as_array().expect("a list");
    let names: Vec<_> = transports
        .iter()
        .map(|row| row["transport"].as_str())
        .collect();
    assert_eq!(names, [Some("mmio"), Some("pci")]);
    for row in transports {
        let count = |key: &str| row[key].as_u64().unwrap_or_else(|| panic!("{key}: {row}"));
        assert_eq!(row["verified"], true, "{row}");
        assert!(count("requests") > 4000, "{row}");
        assert!(count("flushes") > 80, "{row}");
        // With batches and EVENT_IDX one doorbell and one interrupt serve many requests. How many
        // depends on which of the threads gets a processor.
        for (few, least) in [("doorbells", 1), ("interrupts", 1), ("exits", 0)] {
            let expected = least..count("requests") / 2;
            assert!(expected.contains(&count(few)), "{few}: {row}");
        }
        // With group commit one sync serves several flushes.
        assert!((1..=count("flushes")).contains(&count("syncs")), "{row}");
        // Each of the 2048 blocks is read at the end, and more than a thousand were written.
        assert!(count("bytes") > (2048 + 1024) * 4096, "{row}");
        assert!(count("time_us") > 0, "{row}");
    }
    assert_eq!(entries(directory.path()), 0, "the disks are removed");
}

/// A person sees what the guest says, and a table.
#[test]
fn the_table_has_a_line_for_each_transport() {
    if !kvm() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let text = String::from_utf8(demo(&[], directory.path()).stdout).expect("UTF-8");
    let row = |line: &str| line.split(' ').next().map(str::to_owned);
    let rows: Vec<_> = text
        .lines()
        .filter(|line| line.ends_with(" all"))
        .filter_map(row)
        .collect();
    assert_eq!(rows, ["mmio", "pci"], "{text}");
    assert!(text.contains("guest: pci: block device 00:"), "{text}");
}

#[test]
fn every_case_of_conformance_passes_on_both_transports() {
    if !kvm() {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let output = demo(&["--conformance", "--json"], directory.path());
    let (text, errors) = (
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr),
    );
    assert!(output.status.success(), "{text}{errors}");
    assert_eq!(errors, "", "what the guest provokes is no warning");
    let report: Value = serde_json::from_str(&text).expect("JSON, and nothing else");
    assert_eq!(report["failed"], 0, "{text}");
    let cases = report["cases"].as_array().expect("a list");
    assert_eq!(report["passed"], cases.len());
    for transport in ["mmio", "pci"] {
        let names: Vec<&str> = cases
            .iter()
            .filter(|case| case["transport"] == transport)
            .filter_map(|case| case["case"].as_str())
            .collect();
        assert!(names.len() >= 60, "{transport}: {names:?}");
        for name in [
            "chain-loops-over-two",
            "sector-2-to-the-55",
            "zero-length",
            "indirect-in-indirect",
            "used-ring-scribbled-on",
            "doorbell-storm",
            "indices-wrap",
            "queue-reset-in-flight",
            "in-order",
        ] {
            assert!(names.contains(&name), "{transport}: {name}");
        }
    }
    assert_eq!(entries(directory.path()), 0, "the disks are removed");
}

#[test]
fn a_directory_that_is_not_there_is_named() {
    if !kvm() {
        return;
    }
    let output = demo(&[], Path::new("/nonexistent/place"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
    assert!(
        errors.contains("/nonexistent/place") && errors.contains("--dir"),
        "{errors}"
    );
}
