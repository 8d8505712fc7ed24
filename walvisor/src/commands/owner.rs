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
use std::os::fd::BorrowedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;
use serde_json::Value;
use walvisor_storage::{Progress, log_writer};

use super::CommandError;
use crate::control_socket::{ControlCommand, ask_on};

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
