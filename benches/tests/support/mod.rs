//! Runs of `walvisor-bench` with real guests.

use std::process::{Command, Output};

use serde_json::Value;
use walvisor_guest_images::program;
use walvisor_tests::{binary, have};

/// Builds the program that runs guests, and returns the search path with its directory.
fn path_with_guest_images() -> std::ffi::OsString {
    let built = program("walvisor-guest-images", "dev").expect("the program that makes guests");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = std::env::split_paths(&path);
    let own = built.parent().unwrap().to_owned();
    std::env::join_paths([own].into_iter().chain(directories)).unwrap()
}

/// Runs `walvisor-bench` quickly, for its JSON report. Returns `None` if a program of `needs` cannot be installed,
/// after printing why.
pub fn compare(arguments: &str, needs: &[(&str, &str)]) -> Option<Output> {
    if !needs
        .iter()
        .all(|(program, package)| have(program, package))
    {
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_walvisor-bench"))
        .args(arguments.split(' '))
        .args(["--quick", "--json", "--dir"])
        .arg(directory.path())
        .env("WALVISOR", binary())
        .env("PATH", path_with_guest_images())
        .output();
    Some(output.unwrap())
}

/// A count of a row.
pub fn count(row: &Value, key: &str) -> f64 {
    row[key].as_f64().unwrap_or_else(|| panic!("{key}: {row}"))
}
