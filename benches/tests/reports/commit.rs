//! `walvisor-bench commit`: its results, its output files, and its end after an interrupt.

use std::process::Stdio;

use rustix::process::{Pid, Signal, kill_process};
use walvisor_testkit::{leash, wait_until};

use crate::{bench, measure, number, report, rows};

#[test]
fn groups_need_fewer_syncs_and_fewer_writes() {
    let report = measure(&[
        "commit",
        "--only",
        "clients,waiters,wait,disks,mode,medium",
        // The number of commits in a group depends on the time of a sync. A slow sync makes that of
        // the processor negligible.
        "--sync-latency-us",
        "2000",
    ]);
    for row in rows(&report, "clients") {
        assert_eq!(number(row, "off_syncs_per_commit"), 1.0, "{row}");
        let on = number(row, "on_syncs_per_commit");
        match number(row, "clients") {
            1.0 => assert_eq!(on, 1.0, "{row}"),
            clients => assert!(on < 6.0 / clients, "{row}"),
        }
    }
    for row in rows(&report, "waiters") {
        // An earlier group may already have written a waiter's record, which then needs no write of
        // its own.
        assert!(number(row, "write_each_writes_per_commit") > 0.9, "{row}");
        assert!(number(row, "one_write_writes_per_commit") < 0.2, "{row}");
    }
    let medium = &rows(&report, "medium")[0];
    assert!(
        number(medium, "write_each_operations_per_commit") > 1.0,
        "{medium}"
    );
    assert!(
        number(medium, "one_write_operations_per_commit") < 0.7,
        "{medium}"
    );
    for key in ["wait", "disks", "mode"] {
        assert!(!rows(&report, key).is_empty());
    }
    assert_eq!(report["interrupted"], false);
    assert!(report["machine"]["kernel"].is_string());
}

#[test]
fn a_page_and_plots_are_written_and_need_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let files = ["--html", "page.html", "--svg", "a/plots"];
    let arguments = [&["commit", "--quick", "--only", "mode"][..], &files].concat();
    let output = bench(dir.path(), &arguments).output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("writethrough: syncs/commit"), "{text}");
    let page = std::fs::read_to_string(dir.path().join("page.html")).unwrap();
    assert!(page.contains("<svg") && page.contains("Writeback compared with writethrough"));
    // The XML namespace of SVG is not an address that a browser fetches.
    let rest = page.replace("http://www.w3.org/2000/svg", "");
    for word in ["http", "<script", "url(", "@import", "src="] {
        assert!(!rest.contains(word), "{word}");
    }
    let plot = std::fs::read_to_string(dir.path().join("a/plots/commit-mode.svg")).unwrap();
    assert!(plot.starts_with("<svg") && !plot.contains("var("), "{plot}");
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

#[test]
fn what_was_measured_before_an_interrupt_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    // Without the interrupt this takes minutes.
    let arguments = ["commit", "--only", "medium,latency", "--json"];
    let mut command = bench(dir.path(), &arguments);
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let child = leash(child).spawn().unwrap();
    let pid = Pid::from_child(&child);
    // Each cell has a directory of its own, made after the results of the previous cell were kept.
    let directory = || {
        let mut entries = std::fs::read_dir(dir.path()).unwrap();
        entries.next().map(|entry| entry.unwrap().file_name())
    };
    let mut first = None;
    wait_until("the second cell", || {
        first = first.clone().or_else(directory);
        first.is_some() && directory().is_some_and(|now| Some(now) != first)
    });
    kill_process(pid, Signal::INT).unwrap();
    let report = report(&child.wait_with_output().unwrap());
    assert_eq!(report["interrupted"], true);
    let sections = report["sections"].as_array().unwrap();
    assert_eq!(sections.len(), 2);
    let rows = |at: usize| sections[at]["rows"].as_array().unwrap().len();
    assert!(rows(0) + rows(1) > 0 && rows(0) + rows(1) < 47, "{report}");
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}
