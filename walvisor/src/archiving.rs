//! Archives of logs in use. For each log with `archive=`, a process `walvisor archive push` sends
//! to the store what the log gets. It has the network, which this process never uses.
//!
//! ```text
//!   this process ── a pipe: a byte, logs are open; its end, closed ──▶ archive push ──▶ the store
//!        ▲                                                                │
//!        └───────────── a file in memory: how far the archive is ◀────────┘
//! ```
//! On its standard output the push tells the LSN up to which the archive has everything, in 8 bytes,
//! or [`LOST`]. With `archive-sync=on`, FLUSHes wait for that. With `archive-limit=SIZE`, writes wait
//! while the archive lacks so much. A byte through the pipe tells the push that one does, and the
//! file in memory for which LSN.
//!
//! A push outlives a kill of this process until it has sent what the log got before.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::fs::{MemfdFlags, OFlags, fcntl_setfl, memfd_create};
use rustix::io::{Errno, FdFlags, fcntl_setfd};
use serde::{Deserialize, Serialize};
use walvisor_storage::{Disk, LogReplica, ReplicaCall, ReplicaOptions};
use walvisor_vmm::seccomp::Seccomp;

use crate::landlock::Landlock;
use crate::point::unix_us;

/// How long a push may go on once the logs are closed.
pub const LAST_PUSH: Duration = Duration::from_secs(10);
/// How long requests may still wait for an archive once somebody waits for them to end.
const LAST_WAIT: Duration = Duration::from_secs(5);
/// How long they fail then, before others may wait again.
const REFUSAL: Duration = Duration::from_secs(1);
/// What a push tells instead of an LSN if the archive can't get what it lacks before somebody has put
/// that right: requests fail meanwhile that would wait for it. The next LSN ends that.
pub const LOST: u64 = u64::MAX;
/// Most bytes of a [`PushProgress`] as JSON. The LSN for which a request waits comes behind it.
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
    /// What waits for the archive.
    pub waits: ReplicaOptions,
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
    /// How many bytes of log the archive lacks; `None`: the log is closed.
    pub lag_bytes: Option<u64>,
    /// Whether writes wait for the archive; `None`: they never do.
    pub holds_back: Option<bool>,
    /// How many FLUSHes wait for the archive; `None`: they never do.
    pub waiting: Option<u64>,
}

/// A process that archives a log.
struct Push {
    target: LogToArchive,
    child: Child,
    started: SystemTime,
    /// Its standard input.
    input: Arc<Mutex<Option<ChildStdin>>>,
    progress: File,
    /// The log's side, once the log is open.
    replica: OnceLock<Arc<LogReplica>>,
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
            .args([
                "archive",
                "push",
                "--follow",
                "--until-eof",
                "--acknowledge",
            ])
            .arg(format!("--progress-fd={}", progress.as_raw_fd()));
        if let Some(interval) = target.interval {
            command.arg(format!("--interval={}us", interval.as_micros()));
        }
        if target.waits.sync {
            command.arg("--sync");
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
        let input = child.stdin.take();
        if let Some(input) = &input {
            // A pipe that is full wakes the push as well as another byte.
            fcntl_setfl(input, OFlags::NONBLOCK)?;
        }
        Ok(Self {
            target,
            started: SystemTime::now(),
            input: Arc::new(Mutex::new(input)),
            child,
            progress,
            replica: OnceLock::new(),
        })
    }

    /// Tells the log of this push, which requests may wait for.
    fn replicate(&self, disk: &Disk) -> Result<(), String> {
        let input = Arc::clone(&self.input);
        let progress = self.progress.try_clone();
        let progress = progress.map_err(|error| error.to_string())?;
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let drains = Arc::new(eventfd(0, flags).map_err(|error| error.to_string())?);
        let drained = Arc::clone(&drains);
        let replica = disk.replicate(self.target.waits, move |call| match call {
            ReplicaCall::Waits(lsn) => wake(&input, Some((&progress, lsn))),
            // Only a full counter refuses it, which tells the same.
            ReplicaCall::Drains => drop(rustix::io::write(&drains, &1_u64.to_ne_bytes())),
        });
        let replica = Arc::new(replica.map_err(|error| error.to_string())?);
        let Some(output) = &self.child.stdout else {
            return Ok(());
        };
        let output = output.as_fd().try_clone_to_owned().map(File::from);
        let log = self.target.log.display().to_string();
        let acknowledges = Arc::clone(&replica);
        let started = output.and_then(|output| {
            let name = thread::Builder::new().name("archive-sync".to_owned());
            name.spawn(move || acknowledge(&acknowledges, (output, drained), &log))
        });
        started.map_err(|error| format!("can't wait for its archive push: {error}"))?;
        let _ = self.replica.set(replica);
        Ok(())
    }

    /// Waits until its process has ended, not longer than this; returns whether it has.
    fn has_ended(&self, limit: Duration) -> bool {
        // The other end is open until then.
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
        let replica = self.replica.get().map(|replica| &**replica);
        PushState {
            log: self.target.log.display().to_string(),
            url: self.target.url.clone(),
            running: !self.has_ended(Duration::ZERO),
            lag: Duration::from_micros(now.saturating_sub(since)),
            lag_bytes: replica.and_then(LogReplica::backlog_bytes),
            holds_back: replica
                .filter(|_| self.target.waits.limit.is_some())
                .map(LogReplica::holds_back),
            waiting: replica
                .filter(|_| self.target.waits.sync)
                .map(|replica| replica.waiting() as u64),
            progress,
        }
    }
}

/// Locks the input of a push.
fn lock(input: &Mutex<Option<ChildStdin>>) -> MutexGuard<'_, Option<ChildStdin>> {
    input.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes a push look at its log. `awaits`: the LSN for which a request waits, for its file.
fn wake(input: &Mutex<Option<ChildStdin>>, awaits: Option<(&File, u64)>) {
    if let Some(input) = lock(input).as_mut() {
        if let Some((progress, lsn)) = awaits.filter(|(file, lsn)| awaited(file) < *lsn) {
            let _ = progress.write_all_at(&lsn.to_ne_bytes(), PROGRESS_BYTES as u64);
        }
        // A push that has ended is seen as such.
        let _ = input.write_all(b"\n");
    }
}

/// Completes requests as the archive gets what they wait for, until the push ends. Those that still
/// wait [`LAST_WAIT`] after the event `drains` fail.
fn acknowledge(replica: &LogReplica, (mut output, drains): (File, Arc<OwnedFd>), log: &str) {
    let (mut bytes, mut until, mut refuses) = ([0; 512], None::<Instant>, false);
    loop {
        let limit = until.map(|until| until.saturating_duration_since(Instant::now()));
        if limit == Some(Duration::ZERO) {
            until = None;
            if refuses {
                replica.wait_again();
            }
            refuses = !refuses && (replica.waiting() > 0 || replica.holds_back());
            if refuses {
                tracing::error!(
                    "log {log}: requests that wait for its archive fail, because somebody waits for \
                     them to end"
                );
                replica.end_waits();
                until = Some(Instant::now() + REFUSAL);
            }
            continue;
        }
        let limit = limit.and_then(|limit| Timespec::try_from(limit).ok());
        let mut fds = [
            PollFd::new(&output, PollFlags::IN),
            PollFd::new(&drains, PollFlags::IN),
        ];
        match poll(&mut fds, limit.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => break,
        }
        let (told, waits) = (!fds[0].revents().is_empty(), !fds[1].revents().is_empty());
        if waits {
            let _ = rustix::io::read(&drains, &mut [0; 8]);
            if std::mem::take(&mut refuses) {
                replica.wait_again();
                until = None;
            }
            let _ = until.get_or_insert_with(|| Instant::now() + LAST_WAIT);
        }
        if told {
            match output.read(&mut bytes) {
                Ok(0) => break,
                Ok(count) => {
                    // Each was written at once, so none is cut.
                    let (lsns, _) = bytes[..count].as_chunks();
                    for lsn in lsns.iter().map(|lsn| u64::from_ne_bytes(*lsn)) {
                        if lsn == LOST {
                            tell_lost(replica, log);
                            replica.lose();
                        } else {
                            replica.acknowledge(lsn);
                        }
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
    }
    if replica.waiting() > 0 {
        tracing::error!(
            "log {log}: FLUSHes fail, because its archive push has ended; find out why, and start \
             this process again"
        );
    }
    if replica.holds_back() {
        tracing::error!(
            "log {log}: writes go on although its archive lacks too much, because its push has ended; \
             find out why, and start this process again"
        );
    }
    replica.lose();
}

/// Says which requests wait no longer for an archive whose push is there.
fn tell_lost(replica: &LogReplica, log: &str) {
    if replica.holds_back() {
        tracing::error!(
            "log {log}: writes go on although its archive lacks too much, because it can't get that; \
             the messages of its push say why"
        );
    }
    if replica.waiting() > 0 {
        tracing::error!(
            "log {log}: FLUSHes fail, because its archive can't get what they wait for; the messages \
             of its push say why, and what to do"
        );
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

    /// The directories of the logs whose requests wait for their archives.
    pub fn awaited(&self) -> impl Iterator<Item = &Path> {
        let waits = |push: &&Push| push.target.waits != ReplicaOptions::default();
        let awaited = self.0.iter().filter(waits);
        awaited.map(|push| push.target.log.as_path())
    }

    /// The logs are open. `disk_of` gives a disk of a log.
    ///
    /// # Errors
    /// One line: requests can't wait for a push.
    pub fn begin<'a>(&self, disk_of: impl Fn(&Path) -> Option<&'a Disk>) -> Result<(), String> {
        for push in &self.0 {
            let log = push.target.log.display();
            let disk = disk_of(&push.target.log);
            push.replicate(disk.ok_or_else(|| format!("{log}: the log is not open"))?)?;
            wake(&push.input, None);
        }
        Ok(())
    }

    /// The state of each.
    pub fn states(&self) -> Vec<PushState> {
        self.0.iter().map(Push::state).collect()
    }

    /// The logs are closed: waits until the archives have everything, for [`LAST_PUSH`] at most.
    pub fn finish(&self) {
        let until = Instant::now() + LAST_PUSH + Duration::from_secs(1);
        for push in &self.0 {
            *lock(&push.input) = None;
        }
        for push in &self.0 {
            let left = until.saturating_duration_since(Instant::now());
            if !push.has_ended(left) {
                tracing::warn!(
                    "log {}: its archive still lacks what was written last; its push may go on for \
                     a while",
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

/// The newest LSN for which a request has waited, from that file.
pub fn awaited(progress: &File) -> u64 {
    let mut lsn = [0; 8];
    let read = progress.read_exact_at(&mut lsn, PROGRESS_BYTES as u64);
    read.map_or(0, |()| u64::from_ne_bytes(lsn))
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
