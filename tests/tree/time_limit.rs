//! Tests of `tests/time-limit`, under which `make test` runs each test program.

use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Runs a shell script under `time-limit`, with a limit of so many seconds.
fn run(limit: u32, script: &str) -> Output {
    Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/time-limit"))
        .args(["sh", "-c", script])
        .env("WALVISOR_TEST_LIMIT", limit.to_string())
        .output()
        .unwrap()
}

#[test]
fn a_program_that_does_not_end_is_killed_and_its_threads_are_named() {
    let ended = run(1, "sleep 1003 >/dev/null 2>&1; true");
    let told = String::from_utf8(ended.stdout).unwrap();
    // As the shell says it of one that was killed.
    assert_eq!(ended.status.code(), Some(128 + 9), "{told}");
    let kills = told.matches("time limit: sh -c sleep 1003 >/dev/null 2>&1; true ");
    assert_eq!(kills.count(), 2, "{told}");
    assert!(told.contains("\ntime limit: another attempt\n"), "{told}");
    assert_eq!(told.matches("\n  sh: S ").count(), 2, "{told}");
    let children = told
        .lines()
        .filter_map(|line| line.strip_prefix("  child "));
    let children: Vec<_> = children
        .filter_map(|line| line.strip_suffix(": sleep 1003 "))
        .collect();
    assert_eq!(children.len(), 2, "{told}");
    for pid in children {
        let killed = Command::new("sh").args(["-c", "kill $0", pid]).status();
        assert!(killed.unwrap().success(), "{told}");
    }
}

#[test]
fn a_program_that_ends_is_as_without_a_limit() {
    let started = Instant::now();
    let ended = run(1000, "echo said; exit 3");
    assert_eq!(ended.status.code(), Some(3));
    assert_eq!((&*ended.stdout, &*ended.stderr), (&b"said\n"[..], &b""[..]));
    assert!(started.elapsed() < Duration::from_secs(500));
}
