//! The client of a control socket: `walvisor ctl`.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::command::ControlCommand;

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Answer {
    Return(Value),
    Error { desc: String },
}

/// Sends one request to the socket at `path`, and waits for its answer.
///
/// # Errors
/// A line that says what, where and what to do: if no server listens there, the request was refused, or the
/// reply is not an answer.
pub fn ask(path: &Path, command: &ControlCommand) -> Result<Value, String> {
    let place = path.display();
    let mut stream = UnixStream::connect(path).map_err(|error| {
        format!("control socket '{place}': {error}: is 'walvisor run' or 'walvisor serve' running with --control {place}?")
    })?;
    let gone = |error: std::io::Error| {
        format!("control socket '{place}': {error}: the process behind it may have ended")
    };
    let mut line = command.to_line().into_bytes();
    line.push(b'\n');
    // A server that has too many clients answers before it reads a request, and the write may fail.
    let written = stream.write_all(&line);
    let mut answer = String::new();
    let read = BufReader::new(&stream).read_line(&mut answer);
    if answer.is_empty() {
        written.map_err(gone)?;
        read.map_err(gone)?;
        return Err(format!(
            "control socket '{place}': closed without an answer: the process behind it has ended"
        ));
    }
    match serde_json::from_str(&answer) {
        Ok(Answer::Return(value)) => Ok(value),
        Ok(Answer::Error { desc }) => Err(desc),
        Err(error) => Err(format!(
            "control socket '{place}': the process that answers is not walvisor: {error}"
        )),
    }
}
