//! A look that another process serves, or this one.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use walvisor_storage::scratch_file;

use super::CommandError;
use super::ctl::answer::text;
use super::serve::nbd::unix_uri;
use super::socket::bind;
use super::socket_names::SocketNames;
use crate::control_socket::{CONTROL_MODE, ControlCommand, LookRequest};
use crate::size::human_size;

/// What serves a look needs.
pub(super) struct LookFiles {
    pub(super) listener: UnixListener,
    /// Where writes go, if there may be any.
    pub(super) scratch: Option<File>,
    /// Closed when the look has ended. A child removes the socket's name then, because the process
    /// that serves may lack the right to, or be killed.
    pub(super) kept: Option<OwnedFd>,
}

impl LookFiles {
    /// Makes the socket of a look, and its scratch file.
    ///
    /// # Errors
    /// If one of them can't be made.
    pub(super) fn make(socket: &Path, scratch: bool) -> Result<Self, CommandError> {
        let (listener, name) = bind(socket, CONTROL_MODE)?;
        let mut names = SocketNames::default();
        names.add(name);
        let scratch = scratch.then(scratch_file).transpose()?;
        let kept = names.give_away().map_err(CommandError::failed)?;
        Ok(Self {
            listener,
            scratch,
            kept: kept.map(Into::into),
        })
    }

    fn all(&self) -> Vec<BorrowedFd<'_>> {
        let Self {
            listener,
            scratch,
            kept,
        } = self;
        let scratch = scratch.iter().map(AsFd::as_fd);
        let kept = kept.iter().map(AsFd::as_fd);
        [listener.as_fd()]
            .into_iter()
            .chain(scratch)
            .chain(kept)
            .collect()
    }
}

/// Makes a socket, and lets another process serve a look there. `ask` sends a request with
/// descriptors. `disk`: how the user names it, if not as the process does.
pub(super) fn look_in_use(
    wanted: &LookRequest,
    (json, disk): (bool, Option<&Path>),
    ask: impl FnOnce(&ControlCommand, &[BorrowedFd<'_>]) -> Result<Value, CommandError>,
) -> Result<(), CommandError> {
    let files = LookFiles::make(&wanted.socket, wanted.scratch)?;
    let command = ControlCommand::Look(LookRequest {
        socket: absolute(&wanted.socket),
        ..wanted.clone()
    });
    let mut answer = ask(&command, &files.all())?;
    if let Some(disk) = disk {
        answer["disk"] = json!(disk);
    }
    report(answer, json);
    Ok(())
}

pub(super) fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Says where the look is.
pub(super) fn report(mut answer: Value, json: bool) {
    let socket = text(&answer["socket"]);
    let uri = unix_uri(Path::new(&socket), &text(&answer["export"]));
    let line = if json {
        answer["uri"] = uri.into();
        format!("{answer}\n")
    } else {
        format!(
            "serving {} as of {}: {} at {uri}\n",
            text(&answer["disk"]),
            text(&answer["at"]),
            human_size(answer["size_bytes"].as_u64().unwrap_or(0)),
        )
    };
    // A failed write is fine: the reader has closed the pipe.
    let _ = std::io::stdout().write_all(line.as_bytes());
}
