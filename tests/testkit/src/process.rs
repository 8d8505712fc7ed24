//! Programs that a test runs: each ends with the test at the latest, and each wait for one has a
//! limit.

use std::io::{self, BufRead, BufReader, Read};
use std::ops::{Deref, DerefMut};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::LazyLock;
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, getppid, kill_process, set_parent_process_death_signal};

use crate::wait::{PATIENCE, pause};

/// Makes the kernel kill the child when the thread that started it ends for any reason, so that a
/// failed test leaves no child behind. The child's own children are not killed.
pub fn leash(command: &mut Command) -> &mut Command {
    let parent = Pid::from_raw(std::process::id().cast_signed());
    // SAFETY: between fork and exec the closure only makes two system calls, prctl and getppid. It
    // neither allocates nor takes a lock.
    unsafe {
        command.pre_exec(move || {
            set_parent_process_death_signal(Some(Signal::KILL))?;
            if getppid() != parent {
                return Err(io::Error::other("the parent ended first"));
            }
            Ok(())
        })
    }
}

/// A child that ends with the thread that started it, and is killed when this is dropped.
pub struct Process(Child);

impl Process {
    /// Starts a program.
    #[track_caller]
    pub fn spawn(command: &mut Command) -> Self {
        let child = leash(command).spawn();
        Self(child.unwrap_or_else(|error| panic!("{:?}: {error}", command.get_program())))
    }

    /// Its number, as rustix takes it.
    #[must_use]
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    /// Sends a signal.
    #[track_caller]
    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("a process");
    }

    /// Waits for its end.
    ///
    /// # Errors
    /// [`TimedOut`](io::ErrorKind::TimedOut) if it does not end within [`PATIENCE`].
    pub fn wait(&mut self) -> io::Result<ExitStatus> {
        drop(self.0.stdin.take());
        let began = Instant::now();
        loop {
            match self.0.try_wait()? {
                Some(status) => return Ok(status),
                None if began.elapsed() > PATIENCE => return Err(io::ErrorKind::TimedOut.into()),
                None => pause(began),
            }
        }
    }

    /// The first `count` lines of its stdout, which must be a pipe. Fewer if it ends before.
    #[track_caller]
    pub fn first_lines(&mut self, count: usize) -> Vec<String> {
        let stdout = BufReader::new(Limited(self.0.stdout.take().expect("a pipe")));
        let lines = stdout.lines().take(count);
        lines.map(|line| line.expect("a line in time")).collect()
    }

    /// What each of its threads says under `key` in `/proc/PID/task/*/status`.
    #[track_caller]
    pub fn thread_status(&self, key: &str) -> Vec<String> {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.id())).expect("a process");
        let told = threads.filter_map(|thread| {
            // A thread may end meanwhile.
            let status = thread.expect("a thread").path().join("status");
            let text = std::fs::read_to_string(status).ok()?;
            let value = text.lines().find_map(|line| line.strip_prefix(key));
            Some(value.expect(key).trim().to_owned())
        });
        told.collect()
    }

    /// Asserts that no thread has a capability besides those in `kept`, or can get one.
    #[track_caller]
    pub fn assert_capabilities(&self, kept: u64) {
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
            for found in self.thread_status(set) {
                let found = u64::from_str_radix(&found, 16).expect("a set of capabilities");
                assert_eq!(found & !kept, 0, "{set} {found:x}");
            }
        }
        let new = self.thread_status("NoNewPrivs:");
        assert!(new.iter().all(|new| new == "1"), "{new:?}");
    }

    /// Its stderr, which must be a pipe, to the end: empty if that has been read before.
    pub fn errors(&mut self) -> String {
        let mut errors = String::new();
        let stderr = self.0.stderr.take();
        stderr.map(|mut stderr| stderr.read_to_string(&mut errors));
        errors
    }
}

impl Deref for Process {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Process {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A pipe whose reads fail if nothing comes within [`PATIENCE`].
pub struct Limited<P>(pub P);

impl<P: Read + AsFd> Read for Limited<P> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let limit = Timespec::try_from(PATIENCE).expect("a time");
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        if poll(&mut fds, Some(&limit))? == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.0.read(bytes)
    }
}

/// The program `walvisor` that cargo has built beside this test.
#[must_use]
pub fn program() -> &'static Path {
    static PROGRAM: LazyLock<PathBuf> = LazyLock::new(|| {
        // This test is TARGET/debug/deps/NAME-HASH.
        let this = std::env::current_exe().expect("the test's own program");
        this.ancestors().nth(2).expect("debug").join("walvisor")
    });
    &PROGRAM
}

/// The command for a program, to be run in `dir` and ended after two minutes.
#[must_use]
pub fn foreign(dir: &Path, program: impl AsRef<Path>) -> Command {
    // The distribution's Python comes before any other: only that one has the distribution's
    // libnbd.
    let paths = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new("timeout");
    command.arg("120").arg(program.as_ref()).current_dir(dir);
    command
        .env("PATH", format!("/usr/bin:{paths}"))
        .stdin(Stdio::null());
    command
}

/// Runs a program, and returns its stdout.
///
/// # Errors
/// It does not start, or fails: the text says what failed, and why.
pub fn run(program: &str, arguments: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(arguments).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(text(&output.stdout).trim().to_owned());
    }
    let errors = text(&output.stderr);
    Err(format!("{program} {arguments:?}: {}", errors.trim()))
}

/// Runs a program for at most two minutes, asserts that it succeeds, and returns its stdout.
#[track_caller]
pub fn client(dir: &Path, program: &str, arguments: &[&str]) -> String {
    let output = run_client(dir, program, arguments);
    let (out, errors) = (text(&output.stdout), text(&output.stderr));
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {}\n{out}{errors}",
        output.status
    );
    out
}

/// Runs a program for at most two minutes.
#[track_caller]
#[must_use]
pub fn run_client(dir: &Path, program: &str, arguments: &[&str]) -> Output {
    let output = foreign(dir, program).args(arguments).output();
    output.expect("timeout(1) starts")
}

/// What a program has printed.
#[must_use]
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs `walvisor` in `dir` for at most two minutes. Spaces separate its `arguments`.
#[track_caller]
#[must_use]
pub fn walvisor(dir: &Path, arguments: &str) -> Output {
    let mut command = foreign(dir, program());
    let output = command.args(arguments.split_whitespace()).output();
    output.expect("timeout(1) starts")
}

/// Runs `walvisor` in the same way, asserts that it succeeds, and returns its stdout.
#[track_caller]
pub fn succeed(dir: &Path, arguments: &str) -> String {
    let output = walvisor(dir, arguments);
    let errors = text(&output.stderr);
    assert!(output.status.success(), "{arguments}: {errors}");
    text(&output.stdout)
}

/// Asserts that a text has each of `parts`.
#[track_caller]
pub fn assert_says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "{part:?} is missing: {text}");
    }
}

/// Asserts that `walvisor` has ended with `status`, without a word on stdout, and with one line on
/// stderr that has each of `parts`. Returns that line.
#[track_caller]
pub fn assert_refused(output: &Output, status: i32, parts: &[&str]) -> String {
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{error}");
    assert_eq!(text(&output.stdout), "", "{error}");
    assert_eq!(error.lines().count(), 1, "{error}");
    assert!(error.starts_with("walvisor: "), "{error}");
    assert_says(&error, parts);
    error
}

/// Runs `walvisor` in `dir`, and asserts that it refuses that. Returns what it says.
#[track_caller]
pub fn refused(dir: &Path, arguments: &str, status: i32, parts: &[&str]) -> String {
    println!("{arguments}");
    assert_refused(&walvisor(dir, arguments), status, parts)
}

/// Makes a disk: `size` may be followed by more arguments of `walvisor disk create`.
#[track_caller]
pub fn create(dir: &Path, name: &str, size: &str) {
    succeed(dir, &format!("disk create {name} --size {size}"));
}

/// A running daemon. Dropping this kills it.
pub struct Daemon {
    /// Its process.
    pub child: Process,
    /// The place of each disk, in the order of the command line.
    pub uris: Vec<String>,
    dir: PathBuf,
}

impl Daemon {
    /// Starts `walvisor serve nbd` in `dir` with the words of `arguments`, and waits until all
    /// disks are served.
    #[track_caller]
    #[must_use]
    pub fn start(dir: &Path, arguments: &str) -> Self {
        Self::start_door(dir, "nbd", arguments)
    }

    /// The same for any subcommand (`door`) of `walvisor serve`.
    #[track_caller]
    #[must_use]
    pub fn start_door(dir: &Path, door: &str, arguments: &str) -> Self {
        Self::start_with(&mut Command::new(program()), dir, door, arguments)
    }

    /// The same by a command that runs [`program`] with the arguments that follow it.
    #[track_caller]
    #[must_use]
    pub fn start_with(command: &mut Command, dir: &Path, door: &str, arguments: &str) -> Self {
        command.args(["serve", door]);
        command
            .args(arguments.split_whitespace())
            .stdin(Stdio::null());
        let count = arguments.matches("path=").count() + arguments.matches("backend=ram").count();
        Self::start_as(dir, command, count)
    }

    /// Starts a `command` that becomes a daemon, and waits until it serves `count` disks.
    #[track_caller]
    #[must_use]
    pub fn start_as(dir: &Path, command: &mut Command, count: usize) -> Self {
        Self::start_telling(dir, command, Stdio::piped(), count)
    }

    /// The same, for a daemon that writes its errors to `errors`.
    #[track_caller]
    #[must_use]
    pub fn start_telling(dir: &Path, command: &mut Command, errors: Stdio, count: usize) -> Self {
        command
            .current_dir(dir)
            .stdout(Stdio::piped())
            .stderr(errors);
        let mut child = Process::spawn(command);
        let lines = child.first_lines(count);
        if lines.len() < count {
            let status = child.wait();
            panic!("no daemon, {status:?}: {}", child.errors());
        }
        let uri = |line: String| line.rsplit(' ').next().expect("a word").to_owned();
        Self {
            child,
            uris: lines.into_iter().map(uri).collect(),
            dir: dir.to_owned(),
        }
    }

    /// The place of the first disk.
    #[must_use]
    pub fn uri(&self) -> &str {
        &self.uris[0]
    }

    /// The daemon's process, or that of the command that runs it.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The most memory that it has had resident so far, in bytes.
    #[must_use]
    pub fn peak_memory(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()));
        let status = status.expect("a process");
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok());
        kib.expect("a number of KiB") << 10
    }

    /// Sends a signal.
    #[track_caller]
    pub fn signal(&self, signal: Signal) {
        self.child.signal(signal);
    }

    /// The daemon's stderr, once it has ended.
    pub fn errors(&mut self) -> String {
        self.child.errors()
    }

    /// Stops the daemon with SIGTERM, as a service manager does, asserts that its status is 0, and
    /// returns its stderr.
    #[track_caller]
    pub fn stop(mut self) -> String {
        self.signal(Signal::TERM);
        let status = self.child.wait().expect("the daemon ends");
        let errors = self.errors();
        assert_eq!(status.code(), Some(0), "{errors}");
        errors
    }

    /// Kills the daemon at once, as a power cut does.
    pub fn kill(self) {
        drop(self);
    }

    /// Runs Python with libnbd, with `h` connected to the first disk.
    #[track_caller]
    pub fn nbdsh(&self, script: &str) -> String {
        client(&self.dir, "nbdsh", &["-u", self.uri(), "-c", script])
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        if std::thread::panicking() {
            eprint!("{}", self.errors());
        }
    }
}
