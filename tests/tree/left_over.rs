//! Tests of `tests/left-over`, under which `make check` runs all tests.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use walvisor_testkit::leash;

/// Runs `script` under `left-over`, with `target` as the target directory.
fn run(target: &Path, script: &str) -> Output {
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/left-over");
    Command::new(program)
        .args(["sh", "-c", script])
        .env("CARGO_TARGET_DIR", target)
        .current_dir("/")
        .output()
        .unwrap()
}

#[test]
fn what_outlives_a_command_is_named_and_fails_it() {
    let target = tempfile::tempdir().unwrap();
    let target = target.path();
    let sleep = target.join("sleep");
    fs::copy("/bin/sleep", &sleep).unwrap();
    // A process from before the run is not reported.
    let mut before = leash(Command::new(&sleep).arg("1000")).spawn().unwrap();
    for status in [0, 3] {
        let ended = run(target, &format!("exit {status}"));
        assert_eq!(ended.status.code(), Some(status));
        assert_eq!((ended.stdout, ended.stderr), (Vec::new(), Vec::new()));
    }

    // A process that the script started and left is killed. So this call returns although that
    // process holds its stdout.
    let ended = run(target, "sleep 1001 & echo $!");
    let told = String::from_utf8(ended.stdout).unwrap();
    assert_eq!(ended.status.code(), Some(1), "{told}");
    let (process, left) = told.split_once('\n').unwrap();
    assert_eq!(
        left,
        format!("left over: process {process}: sleep 1001 in /\n")
    );

    // A process with another environment is recognized by its program or its directory. It may
    // belong to another run, so it is only reported.
    let directory = target.join("directory");
    fs::create_dir(&directory).unwrap();
    symlink("/bin/sleep", target.join("link")).unwrap();
    for script in [
        format!("cd / && exec env -i {} 1002", sleep.display()),
        format!("cd {} && exec env -i ../link 1002", directory.display()),
    ] {
        let started = "</dev/null >/dev/null 2>&1 & echo $!";
        let ended = run(target, &format!("({script}) {started}"));
        let told = String::from_utf8(ended.stdout).unwrap();
        assert_eq!(ended.status.code(), Some(1), "{told}");
        assert_eq!(told.matches("left over: ").count(), 1, "{told}");
        let (process, _) = told.split_once('\n').unwrap();
        let killed = Command::new("sh")
            .args(["-c", "kill $0", process])
            .stdin(Stdio::null())
            .status();
        assert!(killed.unwrap().success(), "{told}");
    }
    before.kill().unwrap();
    before.wait().unwrap();
}
