//! The `walvisor` program of this source tree, built if a test needs it.

use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::OnceLock;

use walvisor_guest_images::walvisor_binary;
use walvisor_testkit::{Daemon, process};

/// The program, which is built if it is missing or out of date.
#[must_use]
pub fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| walvisor_binary("dev").expect("building walvisor"))
}

/// Runs `walvisor` in `dir` to its end. Spaces separate its `arguments`.
#[must_use]
pub fn walvisor(dir: &Path, arguments: &str) -> Output {
    let _ = binary();
    process::walvisor(dir, arguments)
}

/// Runs `walvisor` in the same way, asserts that it succeeds, and returns its stdout.
#[track_caller]
pub fn succeed(dir: &Path, arguments: &str) -> String {
    let _ = binary();
    process::succeed(dir, arguments)
}

/// Starts `walvisor serve vhost-user` in `dir`, and waits until it serves all disks.
#[track_caller]
#[must_use]
pub fn serve(dir: &Path, arguments: &str) -> Daemon {
    let _ = binary();
    Daemon::start_door(dir, "vhost-user", arguments)
}
