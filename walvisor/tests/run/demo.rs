//! `walvisor demo`, as its users run it.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::{command, has_kvm, stderr, stdout, test_dir};

/// What the demo prints, and what it says beside that, in `dir`; all that it made there is gone.
#[track_caller]
fn demo(dir: &Path, arguments: &str) -> (String, String) {
    let words = format!("demo {arguments} --dir .");
    let run = { command(words.split_whitespace()) }
        .current_dir(dir)
        .output();
    let run = run.unwrap();
    let (text, errors) = (stdout(&run), stderr(&run));
    assert!(run.status.success(), "{text}{errors}");
    assert_eq!(
        fs::read_dir(dir).unwrap().count(),
        0,
        "the disks are removed"
    );
    (text, errors)
}

#[test]
fn both_transports_verify_every_byte_and_the_counts_make_sense() {
    if !has_kvm() {
        return;
    }
    let dir = &test_dir();
    let (text, _) = demo(dir, "--json");
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
    // A person sees what the guest says, and a table.
    let (text, _) = demo(dir, "");
    let rows = text.lines().filter(|line| line.ends_with(" all"));
    let rows: Vec<_> = rows.filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(rows, ["mmio", "pci"], "{text}");
    assert!(text.contains("guest: pci: block device 00:"), "{text}");
}

#[test]
fn every_case_of_conformance_passes_on_both_transports() {
    if !has_kvm() {
        return;
    }
    let (text, errors) = demo(&test_dir(), "--conformance --json");
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
        let some = "chain-loops-over-two sector-2-to-the-55 zero-length indirect-in-indirect \
                    used-ring-scribbled-on doorbell-storm indices-wrap queue-reset-in-flight \
                    in-order";
        for name in some.split(' ') {
            assert!(names.contains(&name), "{transport}: {name}");
        }
    }
}
