//! `walvisor run`, the program itself: what it boots, how it ends, what it prints about bad input.

mod bad_input;
mod boot;
mod control;
mod demo;
mod kernel;
mod mistakes;
mod network;
mod power;
mod privileges;
mod terminal;

use std::ffi::OsStr;
use std::process::{Command, Output, Stdio};

use walvisor_testkit::{test_dir, wait_until as wait_for};

/// Whether this machine has a usable KVM; prints why the test is skipped if not.
fn has_kvm() -> bool {
    match walvisor_vmm::probe::open() {
        Ok(_) => true,
        Err(error) => {
            println!("skipped: {error}");
            false
        }
    }
}

/// The command `walvisor` with `arguments`, ended by SIGTERM after 120 seconds.
fn command<S: AsRef<OsStr>>(arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new("timeout");
    command
        .arg("120")
        .arg(env!("CARGO_BIN_EXE_walvisor"))
        .args(arguments)
        .stdin(Stdio::null());
    command
}

/// Runs `walvisor` with `arguments`, split at spaces, and then `rest`.
fn walvisor(arguments: &str, rest: &[&OsStr]) -> Output {
    let arguments = arguments.split_whitespace().map(OsStr::new);
    command(arguments.chain(rest.iter().copied()))
        .output()
        .expect("walvisor starts")
}

/// The program's stderr.
fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The program's stdout.
fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}
