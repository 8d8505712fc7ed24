//! `walvisor serve`, as its clients see it: third-party programs, and clients that break every
//! rule.

mod activation;
mod clients;
mod control;
mod crash;
mod documents;
mod doors;
mod export;
mod formats;
mod history;
mod hostile;
mod incremental;
mod kill;
mod largest;
mod lifecycle;
mod looking;
mod looks;
mod members;
mod qemu_locks;
mod recovery;
mod sandbox;
mod slow_holes;
mod tls;
mod tracepoints;
mod vhost_user;
mod without_log;

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use walvisor_tests::leash;

const WALVISOR: &str = env!("CARGO_BIN_EXE_walvisor");
const MIB: u64 = 1 << 20;

/// The command for a third-party program, to be run in `dir` and ended after two minutes.
fn foreign(dir: &Path, program: &str) -> Command {
    // The distribution's Python comes before any other: only that one has the distribution's
    // libnbd.
    let paths = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new("timeout");
    command.args(["120", program]).current_dir(dir);
    command
        .env("PATH", format!("/usr/bin:{paths}"))
        .stdin(Stdio::null());
    command
}

/// Runs a third-party program for at most two minutes, asserts that it succeeds, and returns its
/// stdout.
#[track_caller]
fn client(dir: &Path, program: &str, arguments: &[&str]) -> String {
    let output = run_client(dir, program, arguments);
    let (out, errors) = (text(&output.stdout), text(&output.stderr));
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}\n{out}{errors}",
        output.status
    );
    out
}

fn run_client(dir: &Path, program: &str, arguments: &[&str]) -> Output {
    let output = foreign(dir, program).args(arguments).output();
    output.expect("timeout(1) starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs `walvisor` to its end.
fn walvisor(dir: &Path, arguments: &str) -> Output {
    let arguments: Vec<_> = arguments.split_whitespace().collect();
    run_client(dir, WALVISOR, &arguments)
}

/// Makes a disk.
#[track_caller]
fn create(dir: &Path, name: &str, size: &str) {
    let output = walvisor(dir, &format!("disk create {name} --size {size}"));
    assert!(output.status.success(), "{}", text(&output.stderr));
}

/// A running daemon. Dropping this kills it.
struct Daemon {
    child: Child,
    dir: PathBuf,
    /// The URI of each disk, in the order of the command line.
    uris: Vec<String>,
}

impl Daemon {
    /// Starts `walvisor serve nbd` in `dir` with the words of `arguments`, and waits until all
    /// disks are served.
    #[track_caller]
    fn start(dir: &Path, arguments: &str) -> Self {
        Self::start_door(dir, "nbd", arguments)
    }

    /// The same for any subcommand (`door`) of `walvisor serve`.
    #[track_caller]
    fn start_door(dir: &Path, door: &str, arguments: &str) -> Self {
        let mut command = Command::new(WALVISOR);
        command
            .args(["serve", door])
            .args(arguments.split_whitespace())
            .stdin(Stdio::null());
        let count = arguments.matches("path=").count() + arguments.matches("backend=ram").count();
        Self::start_as(dir, &mut command, count)
    }

    /// Starts a `command` that becomes a daemon, and waits until it serves `count` disks.
    #[track_caller]
    fn start_as(dir: &Path, command: &mut Command, count: usize) -> Self {
        Self::start_telling(dir, command, Stdio::piped(), count)
    }

    /// The same, for a daemon that writes its errors to `errors`.
    #[track_caller]
    fn start_telling(dir: &Path, command: &mut Command, errors: Stdio, count: usize) -> Self {
        let command = command
            .current_dir(dir)
            .stdout(Stdio::piped())
            .stderr(errors);
        let mut child = leash(command).spawn().expect("it starts");
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let uris: Vec<_> = stdout
            .lines()
            .take(count)
            .map(|line| line.unwrap().rsplit(' ').next().unwrap().to_owned())
            .collect();
        let mut daemon = Self {
            child,
            dir: dir.to_owned(),
            uris,
        };
        if daemon.uris.len() < count {
            let _ = daemon.child.wait();
            panic!("no daemon: {}", daemon.errors());
        }
        daemon
    }

    fn uri(&self) -> &str {
        &self.uris[0]
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// The daemon's stderr, once it has ended.
    fn errors(&mut self) -> String {
        let mut errors = String::new();
        let stderr = self.child.stderr.take();
        stderr.map(|mut stderr| stderr.read_to_string(&mut errors));
        errors
    }

    /// Stops the daemon as a service manager does, asserts exit status 0, and returns its stderr.
    #[track_caller]
    fn stop(mut self) -> String {
        self.signal(Signal::TERM);
        let status = self.child.wait().unwrap();
        let errors = self.errors();
        assert_eq!(status.code(), Some(0), "{errors}");
        errors
    }

    fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Runs Python with libnbd, with `h` connected to the first disk.
    #[track_caller]
    fn nbdsh(&self, script: &str) -> String {
        client(&self.dir, "nbdsh", &["-u", self.uri(), "-c", script])
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The value of a metric in `text`, for its first disk.
#[track_caller]
fn metric(text: &str, name: &str) -> u64 {
    let line = text
        .lines()
        .find(|line| line.starts_with(&format!("{name}{{")));
    let value = line.and_then(|line| line.rsplit(' ').next());
    value
        .unwrap_or_else(|| panic!("{name} is missing:\n{text}"))
        .parse()
        .unwrap()
}

/// Pseudo-random bytes, which neither compress nor look like a hole.
fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..len.div_ceil(8))
        .flat_map(|_| next())
        .take(len)
        .collect()
}
