//! The client of a control socket: `walvisor ctl`.

use std::io::{BufRead, BufReader, IoSlice, Write};
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::Deserialize;
use serde_json::Value;
use walvisor_storage::Progress;

use super::command::ControlCommand;
use super::lines::MOST_FILES;

/// A line from the server: an answer, or an event before it.
#[derive(Deserialize)]
struct Line {
    #[serde(rename = "return")]
    done: Option<Value>,
    error: Option<Refusal>,
    data: Option<Passed>,
}

#[derive(Deserialize)]
struct Refusal {
    desc: String,
}

/// How far an export is.
#[derive(Deserialize)]
struct Passed {
    passed_bytes: u64,
    total_bytes: u64,
}

/// Sends one request to the socket at `path`, and waits for its answer.
///
/// # Errors
/// A line that says what, where and what to do: if no server listens there, the request was refused, or the
/// reply is not an answer.
pub fn ask(path: &Path, command: &ControlCommand) -> Result<Value, String> {
    ask_with(path, command, &[], &mut |_, _| {})
}

/// As [`ask`], with descriptors that the request carries. `progress` is told how far the server is.
///
/// # Errors
/// As [`ask`].
pub fn ask_with(
    path: &Path,
    command: &ControlCommand,
    files: &[BorrowedFd<'_>],
    progress: Progress<'_>,
) -> Result<Value, String> {
    let place = path.display();
    let stream = UnixStream::connect(path).map_err(|error| {
        format!("control socket '{place}': {error}: is 'walvisor run' or 'walvisor serve' running with --control {place}?")
    })?;
    let gone = |error: std::io::Error| {
        format!("control socket '{place}': {error}: the process behind it may have ended")
    };
    let mut request = command.to_line().into_bytes();
    request.push(b'\n');
    // A server that has too many clients answers before it reads a request, and the write may fail.
    let mut written = Some(send(&stream, &request, files));
    let mut lines = BufReader::new(&stream);
    loop {
        let mut text = String::new();
        let read = lines.read_line(&mut text);
        if text.is_empty() {
            written.take().unwrap_or(Ok(())).map_err(gone)?;
            read.map_err(gone)?;
            return Err(format!(
                "control socket '{place}': closed without an answer: the process behind it has ended"
            ));
        }
        match serde_json::from_str(&text) {
            Ok(Line {
                error: Some(error), ..
            }) => return Err(error.desc),
            Ok(Line {
                done: Some(value), ..
            }) => return Ok(value),
            Ok(Line {
                data: Some(passed), ..
            }) => progress(passed.passed_bytes, passed.total_bytes),
            Ok(_) => {
                return Err(format!(
                    "control socket '{place}': the process that answers is not walvisor: neither an answer nor an event"
                ));
            }
            Err(error) => {
                return Err(format!(
                    "control socket '{place}': what answers there is no control socket ({error}): name the one that was given to \
                     walvisor with --control"
                ));
            }
        }
    }
}

/// Sends all of `bytes`, and the descriptors with the first of them.
fn send(mut stream: &UnixStream, bytes: &[u8], files: &[BorrowedFd<'_>]) -> std::io::Result<()> {
    if files.is_empty() {
        return stream.write_all(bytes);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(files));
    let slices = [IoSlice::new(bytes)];
    let sent = sendmsg(stream, &slices, &mut control, SendFlags::NOSIGNAL)?;
    stream.write_all(&bytes[sent..])
}
