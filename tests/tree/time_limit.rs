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
    // As the shell says it of one that was killed; and it had one attempt.
    assert_eq!(ended.status.code(), Some(128 + 9), "{told}");
    assert_eq!(told.matches("time limit: ").count(), 1, "{told}");
    assert!(
        told.starts_with("time limit: sh -c sleep 1003 >/dev/null 2>&1; true "),
        "{told}"
    );
    let lines: Vec<&str> = told.lines().collect();
    assert!(lines[1].starts_with("  sh: S "), "{told}");
    let (child, command) = lines[2].trim().split_once(": ").unwrap();
    assert_eq!(command, "sleep 1003");
    let pid = child.strip_prefix("child ").unwrap();
    let killed = Command::new("sh").args(["-c", "kill $0", pid]).status();
    assert!(killed.unwrap().success(), "{told}");
}

#[test]
fn a_program_that_ends_is_as_without_a_limit() {
    let started = Instant::now();
    let ended = run(1000, "echo said; exit 3");
    assert_eq!(ended.status.code(), Some(3));
    assert_eq!((&*ended.stdout, &*ended.stderr), (&b"said\n"[..], &b""[..]));
    assert!(started.elapsed() < Duration::from_secs(500));
}
