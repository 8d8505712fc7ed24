//! Runs of `walvisor-bench`, its reports and their figures. Each test uses a part of this.
#![allow(dead_code)]

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Output};

use rustix::process::geteuid;
use serde_json::Value;
use walvisor_guest_images::program;
use walvisor_tests::{binary, have, have_all};

/// `walvisor-bench` with these arguments, in `dir`.
pub fn bench(dir: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_walvisor-bench"));
    command
        .args(arguments)
        .current_dir(dir)
        .env("WALVISOR", binary());
    command
}

/// The report that a run printed, which must have succeeded.
#[track_caller]
pub fn report(output: &Output) -> Value {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    serde_json::from_slice(&output.stdout).expect("JSON, and nothing else")
}

/// The rows of the section with this key.
#[track_caller]
pub fn rows<'a>(report: &'a Value, key: &str) -> &'a [Value] {
    let mut sections = report["sections"].as_array().unwrap().iter();
    let section = sections.find(|section| section["key"] == key);
    let section = section.unwrap_or_else(|| panic!("no {key}: {report}"));
    section["rows"].as_array().unwrap()
}

/// The texts of a column.
pub fn texts<'a>(rows: &'a [Value], key: &str) -> Vec<&'a str> {
    rows.iter().map(|row| row[key].as_str().unwrap()).collect()
}

/// A figure of a row: the median if there are several rounds.
#[track_caller]
pub fn number(row: &Value, key: &str) -> f64 {
    let cell = &row[key];
    let value = cell.as_f64().or_else(|| cell["median"].as_f64());
    value.unwrap_or_else(|| panic!("{key}: {row}"))
}

/// Runs `walvisor-bench` with `arguments`, and asserts that it is refused with this status in one
/// line that has `told`.
#[track_caller]
pub fn assert_refused(command: &mut Command, status: i32, told: &str) {
    let output = command.output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(status), "{error}");
    assert!(
        error.contains(told) && error.lines().count() == 1,
        "{told}: {error}"
    );
    assert!(output.stdout.is_empty());
}

/// Builds the program that runs guests, and returns the search path with its directory.
fn path_with_guest_images() -> OsString {
    let built = program("walvisor-guest-images", "dev").expect("the program that makes guests");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = std::env::split_paths(&path);
    let own = built.parent().unwrap().to_owned();
    std::env::join_paths([own].into_iter().chain(directories)).unwrap()
}

/// The report of a quick run with real guests. Returns `None` if a program of `needs` cannot be
/// installed, after printing why.
pub fn compare(arguments: &str, needs: &[(&str, &str)]) -> Option<Value> {
    if !have_all(needs) {
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    let arguments: Vec<&str> = arguments.split(' ').collect();
    let mut command = bench(directory.path(), &arguments);
    command.args(["--quick", "--json"]);
    let output = command.env("PATH", path_with_guest_images()).output();
    let output = output.unwrap();
    // The errors show how often an emulated machine crashed, if it did.
    println!("{}", String::from_utf8_lossy(&output.stderr));
    Some(report(&output))
}

/// Whether file systems can be mounted on what an NBD server serves. Prints why if they can't.
pub fn can_mount_volumes() -> bool {
    let devices = ["/dev/fuse", "/dev/loop-control"];
    if !geteuid().is_root() || !devices.iter().all(|device| Path::new(device).exists()) {
        println!("skipped: mounting a volume needs root and {devices:?}");
        return false;
    }
    have("nbdkit", "nbdkit") && have("nbdfuse", "libnbd-bin")
}
