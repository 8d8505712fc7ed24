//! The client of a control socket: `walvisor ctl`.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use walvisor_storage::Progress;

use super::command::ControlCommand;
use crate::descriptors;

/// A line from the server: an answer, or an event before it.
#[derive(Deserialize)]
struct Reply {
    #[serde(rename = "return")]
    done: Option<Value>,
    error: Option<ErrorReply>,
    data: Option<ExportProgress>,
}

#[derive(Deserialize)]
struct ErrorReply {
    desc: String,
}

/// The progress of an export.
#[derive(Deserialize)]
struct ExportProgress {
    passed_bytes: u64,
    total_bytes: u64,
}

/// Sends one request to the socket at `path`, and waits for its answer.
///
/// # Errors
/// One line: what, where, what to do. If no server listens there, if it refuses the request, or if
/// its reply is not an answer.
pub fn ask(path: &Path, command: &ControlCommand) -> Result<Value, String> {
    ask_with(path, command, &[], &mut |_, _| {})
}

/// As [`ask`], for a request with descriptors. `progress` is called with the bytes done and the
/// total.
///
/// # Errors
/// As [`ask`].
pub fn ask_with(
    path: &Path,
    command: &ControlCommand,
    files: &[BorrowedFd<'_>],
    progress: Progress<'_>,
) -> Result<Value, String> {
    let stream = UnixStream::connect(path).map_err(|error| {
        let place = path.display();
        format!(
            "control socket '{place}': {error}: is 'walvisor run' or 'walvisor serve' running \
            with --control {place}?"
        )
    })?;
    ask_on(&stream, path, command, files, progress)
}

/// As [`ask_with`], of the server that is connected.
///
/// # Errors
/// As [`ask`].
pub fn ask_on(
    stream: &UnixStream,
    path: &Path,
    command: &ControlCommand,
    files: &[BorrowedFd<'_>],
    progress: Progress<'_>,
) -> Result<Value, String> {
    let place = path.display();
    let gone = |error: std::io::Error| {
        format!("control socket '{place}': {error}: its process may have ended")
    };
    let mut request = command.to_line().into_bytes();
    request.push(b'\n');
    // A server with too many clients answers without reading the request, so the write may fail.
    let mut written = Some(send(stream, &request, files));
    let mut lines = BufReader::new(stream);
    loop {
        let mut text = String::new();
        let read = lines.read_line(&mut text);
        if text.is_empty() {
            written.take().unwrap_or(Ok(())).map_err(gone)?;
            read.map_err(gone)?;
            return Err(format!(
                "control socket '{place}': closed without an answer: its process has ended"
            ));
        }
        match serde_json::from_str(&text) {
            Ok(Reply {
                error: Some(error), ..
            }) => return Err(error.desc),
            Ok(Reply {
                done: Some(value), ..
            }) => return Ok(value),
            Ok(Reply {
                data: Some(passed), ..
            }) => progress(passed.passed_bytes, passed.total_bytes),
            Ok(_) => {
                return Err(format!(
                    "control socket '{place}': the reply is neither an answer nor an event, so the \
                     process is not walvisor"
                ));
            }
            Err(error) => {
                return Err(format!(
                    "control socket '{place}': what answers there is no control socket ({error}): \
                     name the one that was given to walvisor with --control"
                ));
            }
        }
    }
}

/// Sends `bytes`, and the descriptors with the first byte.
fn send(mut stream: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) -> std::io::Result<()> {
    if files.is_empty() {
        return stream.write_all(bytes);
    }
    let sent = descriptors::send(stream, bytes, files)?;
    stream.write_all(&bytes[sent..])
}
