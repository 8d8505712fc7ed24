//! The `walvisor` program of this source tree: runs it to its end, or as a daemon that serves disks.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

use rustix::process::{Pid, Signal, kill_process};
use walvisor_guest_images::{leash, walvisor_binary};

/// The program, which is built if it is missing or out of date.
///
/// # Panics
/// The program cannot be built.
#[must_use]
pub fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| walvisor_binary("dev").expect("building walvisor"))
}

/// Runs `walvisor` in `dir` to its end. Spaces separate its `arguments`.
///
/// # Panics
/// The program cannot be built or started.
#[must_use]
pub fn walvisor(dir: &Path, arguments: &str) -> Output {
    Command::new(binary())
        .args(arguments.split_whitespace())
        .current_dir(dir)
        .stdin(Stdio::null())
        .output()
        .expect("walvisor starts")
}

/// Runs `walvisor` in the same way, asserts that it succeeds, and returns its stdout.
///
/// # Panics
/// The program fails.
#[track_caller]
pub fn succeed(dir: &Path, arguments: &str) -> String {
    let output = walvisor(dir, arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments}: {errors}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A running daemon. Dropping it kills it.
pub struct Daemon {
    child: Child,
}

impl Daemon {
    /// Starts `walvisor serve vhost-user` in `dir`, and waits until it serves all disks.
    ///
    /// # Panics
    /// The daemon does not serve all disks.
    #[track_caller]
    #[must_use]
    pub fn start(dir: &Path, arguments: &str) -> Self {
        Self::start_with(Command::new(binary()), dir, arguments)
    }

    /// Starts the daemon in the same way, by a command that runs [`binary`] with the arguments that follow it.
    ///
    /// # Panics
    /// The daemon does not serve all disks.
    #[track_caller]
    #[must_use]
    pub fn start_with(mut command: Command, dir: &Path, arguments: &str) -> Self {
        command
            .args(["serve", "vhost-user"])
            .args(arguments.split_whitespace())
            .current_dir(dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut child = leash(&mut command).spawn().expect("walvisor starts");
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let count = arguments.matches("path=").count();
        let lines = stdout.lines().take(count).map_while(Result::ok).count();
        assert_eq!(lines, count, "disks that are served");
        Self { child }
    }

    /// The daemon's process, or that of the command that runs it.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Stops the daemon with SIGTERM, as a service manager does, and asserts that its status is 0.
    ///
    /// # Panics
    /// The daemon ends with another status.
    #[track_caller]
    pub fn stop(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
    }

    /// Kills the daemon at once, as a power cut does.
    ///
    /// # Panics
    /// The daemon cannot be waited for.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
