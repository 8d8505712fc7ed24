//! `walvisor serve vhost-user` under Linux guests of other monitors: user-mode Linux, and QEMU in full emulation.

mod largest;
mod log_shared;
mod qemu;
mod user_mode;

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

use rustix::process::{Pid, Signal, kill_process};
use walvisor_guest_images::{UserMode, walvisor_binary};

fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| walvisor_binary("dev").expect("building walvisor"))
}

/// User-mode Linux with the disk at `socket` as /dev/vda.
fn user_mode(socket: &Path) -> UserMode {
    UserMode {
        disks: vec![socket.to_owned()],
        modules: Vec::new(),
    }
}

/// Runs `walvisor` in `dir` to its end.
fn walvisor(dir: &Path, arguments: &str) -> Output {
    Command::new(binary())
        .args(arguments.split_whitespace())
        .current_dir(dir)
        .stdin(Stdio::null())
        .output()
        .expect("walvisor starts")
}

/// Runs `walvisor` in `dir`, and asserts that it succeeds; its stdout.
#[track_caller]
fn succeed(dir: &Path, arguments: &str) -> String {
    let output = walvisor(dir, arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments}: {errors}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A daemon at work. Dropping it kills it.
struct Daemon {
    child: Child,
}

impl Daemon {
    /// Starts `walvisor serve vhost-user` in `dir`, and waits until all disks are served.
    #[track_caller]
    fn start(dir: &Path, arguments: &str) -> Self {
        let mut child = Command::new(binary())
            .args(["serve", "vhost-user"])
            .args(arguments.split_whitespace())
            .current_dir(dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("walvisor starts");
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let count = arguments.matches("path=").count();
        let lines = stdout.lines().take(count).map_while(Result::ok).count();
        assert_eq!(lines, count, "disks that are served");
        Self { child }
    }

    /// Stops it as a service manager does, and asserts that it ends well.
    #[track_caller]
    fn stop(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::TERM).unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
    }

    fn kill(mut self) {
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
