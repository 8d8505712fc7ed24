//! `walvisor-bench sustained`: its report, and what it leaves behind.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use walvisor_tests::have;

use crate::{bench, can_mount_volumes, number, texts};

fn sustained(dir: &Path, arguments: &[&str]) -> Command {
    let mut command = bench(dir, &["sustained", "--size", "8M", "--json"]);
    command.args(arguments);
    command
}

/// The report. Nothing of the disks is left, and no loop device.
#[track_caller]
fn report(dir: &Path, output: &Output) -> Value {
    let report = crate::report(output);
    assert_eq!(std::fs::read_dir(dir).unwrap().count(), 0);
    let dir = dir.canonicalize().unwrap();
    for block in std::fs::read_dir("/sys/block").unwrap() {
        let file = block.unwrap().path().join("loop/backing_file");
        let file = std::fs::read_to_string(file).unwrap_or_default();
        assert!(!Path::new(file.trim()).starts_with(&dir), "{file}");
    }
    report
}

/// Checks the rows of each job, of the sides in turn.
#[track_caller]
fn check(section: &Value, jobs: &[&str], counts_operations: bool) {
    let rows = section["rows"].as_array().unwrap();
    let sides = ["walvisor", "qemu-nbd", "walvisor, backend=raw"];
    let told = texts(rows, "job").into_iter().zip(texts(rows, "side"));
    let expected = jobs.iter().flat_map(|job| {
        let sides = match *job {
            "8 connections, fsync each" => [&sides[..], &["walvisor, cache=unsafe"]].concat(),
            "16 connections, fsync each, history kept or not" => {
                vec!["walvisor", "walvisor, retain=1G"]
            }
            // No client flushes.
            "32 in flight" | "mix of a database, 32 in flight" => vec![
                "walvisor",
                "qemu-nbd",
                "qemu-nbd, cache=writeback",
                "walvisor, backend=raw",
            ],
            _ => sides.to_vec(),
        };
        sides.into_iter().map(|side| (*job, side))
    });
    assert_eq!(told.collect::<Vec<_>>(), expected.collect::<Vec<_>>());
    for row in rows {
        let figure = |key: &str| number(row, key);
        let positive = ["p50_us", "longest_ms", "with_close_per_s"];
        assert!(positive.iter().all(|key| figure(key) > 0.0), "{row}");
        assert!(figure("p50_us") <= figure("p999_us"), "{row}");
        assert!(
            figure("worst_tenth_per_s") <= figure("median_per_s"),
            "{row}"
        );
        let share = figure("slowest_second_share");
        assert!((0.0..=1.0).contains(&share), "{row}");
        let counted = !row["device_operations_per_4_kib"].is_null();
        assert_eq!(counted, counts_operations, "{row}");
        assert_eq!(row["answer"], "written");
        for series in ["each_second_per_s", "each_second_longest_ms"] {
            assert!(!row[series].as_array().unwrap().is_empty(), "{row}");
        }
    }
}

#[test]
fn all_sides_do_the_same_jobs_in_a_directory() {
    if !have("qemu-nbd", "qemu-utils") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let plots = tempfile::tempdir().unwrap();
    let mut command = sustained(
        dir.path(),
        &[
            "--media",
            "directory",
            "--only",
            "fsync,disks,eight,kept-fsync,mix",
        ],
    );
    command.args(["--seconds", "1", "--svg"]).arg(plots.path());
    let report = report(dir.path(), &command.output().unwrap());
    assert_eq!(report["interrupted"], false);
    let section = &report["sections"][0];
    assert_eq!(section["key"], "sustained-directory");
    let jobs = [
        "16 connections, fsync each",
        "4 disks x 4 clients, fsync each",
        "8 connections, fsync each",
        "16 connections, fsync each, history kept or not",
        "mix of a database, 32 in flight",
    ];
    check(section, &jobs, false);
    for job in ["fsync", "disks", "eight", "kept-fsync", "mix"] {
        let plot = plots.path().join(format!("sustained-directory-{job}.svg"));
        assert!(std::fs::read_to_string(plot).unwrap().starts_with("<svg"));
    }
}

#[test]
fn the_capped_volume_counts_operations_and_is_gone_at_the_end() {
    if !have("qemu-nbd", "qemu-utils") || !can_mount_volumes() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let arguments = ["--media", "capped", "--only", "in-flight", "--seconds", "1"];
    let output = sustained(dir.path(), &arguments).output().unwrap();
    let report = report(dir.path(), &output);
    let section = &report["sections"][0];
    assert_eq!(section["key"], "sustained-capped");
    check(section, &["32 in flight"], true);
}

#[test]
fn only_the_sides_that_are_asked_for_take_turns() {
    let both = ["walvisor", "walvisor, retain=1G"];
    for (only, sides, expected) in [
        ("fsync,kept-fsync", "raw", &["walvisor, backend=raw"][..]),
        ("kept-fsync", "walvisor,qemu-nbd,raw,unsafe,keeping", &both),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let arguments = ["--quick", "--only", only, "--seconds", "1"];
        let mut command = sustained(dir.path(), &arguments);
        // No turn needs qemu-nbd, so it need not be installed.
        command.env("PATH", "").args(["--sides", sides]);
        let report = report(dir.path(), &command.output().unwrap());
        let rows = report["sections"][0]["rows"].as_array().unwrap();
        let sides: Vec<_> = rows.iter().map(|row| row["side"].as_str()).collect();
        let expected: Vec<_> = expected.iter().map(|&side| Some(side)).collect();
        assert_eq!(sides, expected, "{report}");
        assert!(rows.iter().all(|row| row["p50_us"].is_object()), "{report}");
    }
}
