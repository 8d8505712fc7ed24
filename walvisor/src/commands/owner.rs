//! A disk or a log that another process has open. If that process has a control socket and can be
//! trusted, it carries out the command; else the error names it.
//!
//! ```text
//!   disk VERB PATH ──▶ who has locked LOG/control? ──none──▶ the log is opened here
//!                       │ /proc/locks, /proc/PID/cmdline
//!                       ▼
//!                      --control SOCKET ──▶ is its server that process, of this user or root? ──▶ asked
//! ```
//! Nothing in the log's directory is believed: the kernel names the process with the lock, and the
//! process that listens.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf, absolute};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;
use serde_json::Value;
use walvisor_storage::{Point, Progress, ReadableLog, Transfer, log_writer};

use super::CommandError;
use super::disk::transfer_of;
use crate::control_socket::{ControlCommand, DiskChoice, ask_on};

/// After this time, the user is told who has not answered.
const PATIENCE: Duration = Duration::from_secs(3);

/// The failure of a command that only looks at a disk or a log. If a process with a control socket
/// has it open, the line ends with the command that asks that process.
pub(super) fn cannot_look(error: walvisor_storage::Error) -> CommandError {
    ask_owner(error, "stats")
}

/// The same, of a command that the process carries out as this request of `walvisor ctl`.
pub(super) fn ask_owner(error: walvisor_storage::Error, request: &str) -> CommandError {
    match error.owner().and_then(control_socket) {
        Some(socket) => CommandError::Failed(format!(
            "{error}, or ask it: walvisor ctl {} {request}",
            socket.display()
        )),
        None => CommandError::failed(error),
    }
}

/// The process that has a log open, connected.
pub(super) struct LogOwner {
    pid: u32,
    socket: PathBuf,
    stream: UnixStream,
}

impl LogOwner {
    /// The owner of the log in this directory, if it can be asked: it has a control socket, and is
    /// this user's process or root's.
    pub(super) fn find(log_dir: &Path) -> Option<Self> {
        let pid = log_writer(log_dir)?;
        let socket = control_socket(pid)?;
        let stream = UnixStream::connect(&socket).ok()?;
        let server = socket_peercred(&stream).ok()?;
        let trusted = server.uid.is_root() || server.uid == geteuid();
        let holds = u32::try_from(server.pid.as_raw_nonzero().get()) == Ok(pid);
        (trusted && holds).then_some(Self {
            pid,
            socket,
            stream,
        })
    }

    /// Lets it carry out a request.
    ///
    /// # Errors
    /// If it refuses, or ends.
    pub(super) fn ask(&self, request: &ControlCommand) -> Result<Value, CommandError> {
        self.ask_with(request, &[], &mut |_, _| {})
    }

    /// Lets it copy a disk, as of a point or now, to an empty file.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub(super) fn copy(
        &self,
        disk: Option<DiskChoice>,
        at: Option<Point>,
        file: &File,
        progress: Progress<'_>,
    ) -> Result<Transfer, CommandError> {
        let request = ControlCommand::Export {
            disk,
            at: at.map(|at| at.to_string()),
            output: PathBuf::new(),
            force: false,
        };
        let answer = self.ask_with(&request, &[file.as_fd()], progress)?;
        Ok(transfer_of(&answer))
    }

    /// As [`ask`](Self::ask), with descriptors. `progress` is called with the bytes done and the
    /// total.
    ///
    /// # Errors
    /// As [`ask`](Self::ask).
    pub(super) fn ask_with(
        &self,
        request: &ControlCommand,
        files: &[BorrowedFd<'_>],
        progress: Progress<'_>,
    ) -> Result<Value, CommandError> {
        let (pid, socket) = (self.pid, self.socket.display());
        // It may be stopped, or have much to do.
        let (answered, waits) = mpsc::channel::<()>();
        let told = thread::scope(|scope| {
            scope.spawn(move || {
                if waits.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                    tracing::warn!("waiting for process {pid}, which has the log open");
                }
            });
            let told = ask_on(&self.stream, &self.socket, request, files, progress);
            drop(answered);
            told
        });
        // It does not know how its socket is called here.
        let named = |error: String| error.replace("ctl SOCKET", &format!("ctl {socket}"));
        told.map_err(|error| CommandError::Failed(named(error)))
    }
}

/// How often a log in use is read until nothing has changed meanwhile.
const READINGS: u32 = 3;

/// A log to read. If another process has it open and can be asked, that process holds it as long as
/// this exists and the log needs no room.
pub(super) struct LogToRead<'a> {
    dir: &'a Path,
    held: Option<(LogOwner, ControlCommand, u64)>,
}

impl<'a> LogToRead<'a> {
    /// The log in this directory. `ask`: its owner may be asked.
    ///
    /// # Errors
    /// If the owner refuses.
    pub(super) fn open(dir: &'a Path, ask: bool) -> Result<Self, CommandError> {
        let owner = if ask { LogOwner::find(dir) } else { None };
        let hold = |owner: LogOwner| {
            let log = absolute(dir).map_err(CommandError::failed)?;
            let request = ControlCommand::Hold { log };
            let answer = owner.ask(&request)?;
            let newest = answer["newest_lsn"].as_u64().unwrap_or(0);
            Ok::<_, CommandError>((owner, request, newest))
        };
        let held = owner.map(hold).transpose()?;
        Ok(Self { dir, held })
    }

    /// As functions of the store take it.
    pub(super) fn log(&self) -> ReadableLog<'a> {
        match &self.held {
            Some((.., newest)) => ReadableLog::held(self.dir, *newest),
            None => self.dir.into(),
        }
    }

    /// Whether what was read is right: the log did not change meanwhile.
    pub(super) fn is_kept(&self) -> bool {
        match &self.held {
            // An owner that has ended changes nothing any more.
            Some((owner, request, _)) => {
                let answer = owner.ask(request);
                answer.is_ok_and(|answer| answer["kept"] == true)
            }
            None => true,
        }
    }
}

/// Reads a log. If a reading fails, or finds a fault (`is_faulty`), the log may have changed
/// meanwhile, and is read again. A reading without a fault is right: each record has a checksum, and
/// the LSNs continue up to the newest one.
///
/// # Errors
/// Those of `read`; or the owner of the log refuses, or needs the room each time.
pub(super) fn read_log<T>(
    dir: &Path,
    ask: bool,
    mut read: impl FnMut(ReadableLog<'_>) -> walvisor_storage::Result<T>,
    is_faulty: impl Fn(&T) -> bool,
) -> Result<T, CommandError> {
    let mut readings = 0;
    loop {
        let log = LogToRead::open(dir, ask)?;
        let found = read(log.log());
        readings += 1;
        let is_right = found.as_ref().is_ok_and(|found| !is_faulty(found));
        let is_last = readings == READINGS || log.held.is_none();
        if is_right || is_last && log.is_kept() {
            return found.map_err(cannot_look);
        }
        if is_last {
            return Err(not_kept(dir));
        }
    }
}

/// The error for a log that has changed while it was read.
pub(super) fn not_kept(dir: &Path) -> CommandError {
    CommandError::Failed(format!(
        "{}: the log needed room, or its files have changed, while it was read; try again when \
         less is written",
        dir.display()
    ))
}

/// The control socket of a process, from its command line.
fn control_socket(pid: u32) -> Option<PathBuf> {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let socket = named_socket(&line)?;
    // Another user's working directory can't be read; the path is then shown as that user gave it.
    let place = std::fs::read_link(format!("/proc/{pid}/cwd")).unwrap_or_default();
    Some(place.join(socket))
}

/// The value of `--control` in a command line whose words end with zero bytes.
fn named_socket(line: &[u8]) -> Option<&Path> {
    let mut words = line.split(|&byte| byte == 0);
    let socket = words.find_map(|word| match word.strip_prefix(b"--control")? {
        [] => Some(None),
        [b'=', socket @ ..] => Some(Some(socket)),
        _ => None,
    })?;
    let socket = socket.or_else(|| words.next())?;
    (!socket.is_empty()).then(|| Path::new(OsStr::from_bytes(socket)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_control_socket_is_found_in_a_command_line() {
        for (line, socket) in [
            (
                &b"walvisor\0serve\0nbd\0--control\0ctl.sock\0--disk\0x\0"[..],
                Some("ctl.sock"),
            ),
            (b"walvisor\0run\0--control=/run/ctl\0", Some("/run/ctl")),
            (b"walvisor\0run\0--controls\0ctl\0", None),
            (b"walvisor\0run\0--control\0", None),
            (b"", None),
        ] {
            assert_eq!(named_socket(line), socket.map(Path::new), "{line:?}");
        }
    }
}
