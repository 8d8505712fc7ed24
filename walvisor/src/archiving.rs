//! Archives of logs in use. For each log with `archive=`, a process `walvisor archive push` sends
//! to the store what the log gets. It has the network, which this process never uses.
//!
//! ```text
//!   this process ── a pipe: a byte, logs are open; its end, closed ──▶ archive push ──▶ the store
//!        ▲                                                                │
//!        └───────────── a file in memory: how far the archive is ◀────────┘
//! ```
//! A push outlives a kill of this process until it has sent what the log got before.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::io::{FdFlags, fcntl_setfd};
use serde::{Deserialize, Serialize};
use walvisor_vmm::seccomp::Seccomp;

use crate::landlock::Landlock;
use crate::point::unix_us;

/// How long a push may go on once the logs are closed.
pub const LAST_PUSH: Duration = Duration::from_secs(10);
/// Most bytes of a [`PushProgress`] as JSON.
const PROGRESS_BYTES: usize = 4096;

/// A log that is to be archived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogToArchive {
    /// Its directory.
    pub log: PathBuf,
    /// The address of the archive.
    pub url: String,
    /// How often to send what is new; `None`: as often as a push does by itself.
    pub interval: Option<Duration>,
}

/// How far a push has come.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PushProgress {
    /// The newest record in the archive.
    pub lsn: u64,
    /// Its commit group.
    pub cid: u64,
    /// Its time, in microseconds since 1970.
    pub unix_us: u64,
    /// What was durable in the log at this time, in microseconds since 1970, is in the archive; 0:
    /// the push has never caught up.
    pub caught_up_us: u64,
    /// Whether the archive has a complete copy of the images.
    pub restorable: bool,
    /// Bytes that were sent to the store, compressed.
    pub sent_bytes: u64,
    /// Requests to the store.
    pub requests: u64,
    /// Why the last attempt has failed.
    pub error: Option<String>,
}

impl PushProgress {
    /// Notes this in a file that [`open_progress`] has opened.
    ///
    /// # Errors
    /// If it can't be written.
    pub fn write(&self, file: &File) -> io::Result<()> {
        let mut cut = self.clone();
        if let Some(error) = &mut cut.error {
            // A character is at most 4 bytes here, and escapes make none longer than 6.
            *error = error.chars().take(500).collect();
        }
        let mut text = serde_json::to_vec(&cut)?;
        text.resize(PROGRESS_BYTES, b' ');
        file.write_all_at(&text, 0)
    }

    /// Reads what a push has noted. `None`: nothing yet.
    fn read(file: &File) -> Option<Self> {
        let mut before = [0; PROGRESS_BYTES];
        // A text that is the same twice is not half of another one.
        for _ in 0..100 {
            let mut text = [0; PROGRESS_BYTES];
            file.read_exact_at(&mut text, 0).ok()?;
            if text == before {
                return serde_json::from_slice(&text).ok();
            }
            before = text;
        }
        None
    }
}

/// The state of a push.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PushState {
    /// The directory of the log, as in messages and metrics.
    pub log: String,
    /// The address of the archive.
    pub url: String,
    /// Whether its process is there.
    pub running: bool,
    /// How far it has come.
    pub progress: PushProgress,
    /// Everything that was durable so long ago is in the archive. If it has never caught up: the
    /// time since its start.
    pub lag: Duration,
}

/// A process that archives a log.
struct Push {
    target: LogToArchive,
    child: Child,
    started: SystemTime,
    /// Its standard input.
    input: Mutex<Option<ChildStdin>>,
    progress: File,
}

impl Push {
    fn start(
        target: LogToArchive,
        more: &[&Path],
        seccomp: Seccomp,
        landlock: Landlock,
    ) -> io::Result<Self> {
        let progress = File::from(memfd_create("archive-progress", MemfdFlags::empty())?);
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["archive", "push", "--follow", "--until-eof"])
            .arg(format!("--progress-fd={}", progress.as_raw_fd()));
        if let Some(interval) = target.interval {
            command.arg(format!("--interval={}us", interval.as_micros()));
        }
        for directory in more {
            command.arg("--images-in").arg(directory);
        }
        command.arg(format!("--seccomp={}", seccomp.name()));
        if landlock == Landlock::Off {
            command.arg("--landlock=off");
        }
        command.arg("--").arg(&target.log).arg(&target.url);
        // A signal from the terminal must not end it before the logs are closed.
        command.process_group(0);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        // The next push must not get it.
        fcntl_setfd(&progress, FdFlags::CLOEXEC)?;
        Ok(Self {
            target,
            started: SystemTime::now(),
            input: Mutex::new(child.stdin.take()),
            child,
            progress,
        })
    }

    fn input(&self) -> MutexGuard<'_, Option<ChildStdin>> {
        self.input.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until its process has ended, not longer than this; returns whether it has.
    fn has_ended(&self, limit: Duration) -> bool {
        // It writes nothing there.
        let Some(output) = &self.child.stdout else {
            return true;
        };
        let limit = Timespec::try_from(limit).ok();
        let mut fds = [PollFd::new(output, PollFlags::empty())];
        poll(&mut fds, limit.as_ref()).is_ok_and(|ready| ready > 0)
    }

    fn state(&self) -> PushState {
        let progress = PushProgress::read(&self.progress).unwrap_or_default();
        let now = unix_us(SystemTime::now());
        let since = progress.caught_up_us.max(unix_us(self.started));
        PushState {
            log: self.target.log.display().to_string(),
            url: self.target.url.clone(),
            running: !self.has_ended(Duration::ZERO),
            lag: Duration::from_micros(now.saturating_sub(since)),
            progress,
        }
    }
}

/// The processes that archive this process's logs. Once this is dropped, they end when they have
/// sent everything.
#[derive(Default)]
pub struct Pushes(Vec<Push>);

impl Pushes {
    /// Starts a process for each of these logs, which exist. It waits until the logs are
    /// [open](Self::begin). Call this before this process gives up the right to start others.
    /// `more`: directories of images that may come to the logs later.
    ///
    /// # Errors
    /// One line: a process can't be started.
    pub fn start(
        targets: Vec<LogToArchive>,
        more: &[&Path],
        seccomp: Seccomp,
        landlock: Landlock,
    ) -> Result<Self, String> {
        let start = |target: LogToArchive| {
            let log = target.log.clone();
            Push::start(target, more, seccomp, landlock).map_err(|error| {
                format!("{}: can't start its archive push: {error}", log.display())
            })
        };
        targets
            .into_iter()
            .map(start)
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// The logs are open.
    pub fn begin(&self) {
        for push in &self.0 {
            if let Some(input) = push.input().as_mut() {
                // A push that has ended is seen as such.
                let _ = input.write_all(b"\n");
            }
        }
    }

    /// The state of each.
    pub fn states(&self) -> Vec<PushState> {
        self.0.iter().map(Push::state).collect()
    }

    /// The logs are closed: waits until the archives have everything, for [`LAST_PUSH`] at most.
    pub fn finish(&self) {
        let until = Instant::now() + LAST_PUSH + Duration::from_secs(1);
        for push in &self.0 {
            *push.input() = None;
        }
        for push in &self.0 {
            let left = until.saturating_duration_since(Instant::now());
            if !push.has_ended(left) {
                tracing::warn!(
                    "log {}: its archive still lacks what was written last; its push may go on for a while",
                    push.target.log.display()
                );
            }
        }
    }
}

/// Opens the file for the progress of a push, by the descriptor that the push was given.
///
/// # Errors
/// If there is no such descriptor.
pub fn open_progress(fd: u32) -> io::Result<File> {
    let path = Path::new("/proc/self/fd").join(fd.to_string());
    File::options().read(true).write(true).open(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_read_as_it_was_written() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(PushProgress::read(&file), None);
        let mut progress = PushProgress {
            lsn: 7,
            error: Some("\u{1F4BE}\n".repeat(5000)),
            ..PushProgress::default()
        };
        progress.write(&file).unwrap();
        progress.error = Some("\u{1F4BE}\n".repeat(250));
        assert_eq!(PushProgress::read(&file), Some(progress.clone()));
        progress.error = None;
        progress.write(&file).unwrap();
        assert_eq!(PushProgress::read(&file), Some(progress));
    }
}
