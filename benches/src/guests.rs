//! Linux guests. `walvisor-guest-images` runs them in a process of its own, which ends with the
//! comparison. This module reads their consoles.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use walvisor::commands::CommandError;

use crate::bench_dirs::failed;
use crate::programs::{self, GUEST_IMAGES, guest_images};
use crate::session::Session;

/// How often to check for an interrupt by the user.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Lines of a console that an error shows, and the most letters of each.
const LAST_LINES: usize = 30;
const LINE_LENGTH: usize = 400;

/// The command `walvisor-guest-images ACTION`: `run`, `user-mode` or `emulated`.
///
/// # Errors
/// If the program is missing.
pub fn command(action: &str) -> Result<Command, CommandError> {
    let mut command = Command::new(guest_images()?);
    command.arg(action);
    Ok(command)
}

/// Writes a script into `directory`, and returns its path.
///
/// # Errors
/// If it can't be written.
pub fn write_script(directory: &Path, name: &str, text: &str) -> Result<PathBuf, CommandError> {
    let path = directory.join(name);
    std::fs::write(&path, text).map_err(failed("write the script", &path))?;
    Ok(path)
}

/// Runs a guest. Passes each line of its console, and the input that the guest reads, to `on_line`
/// until the guest or `session` ends.
///
/// # Errors
/// If the guest ended before its script did, or an error of `on_line`.
pub fn run(
    mut command: Command,
    session: &Session,
    mut on_line: impl FnMut(&str, &mut ChildStdin) -> Result<(), CommandError>,
) -> Result<(), CommandError> {
    let child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| CommandError::Failed(format!("{GUEST_IMAGES} does not start: {error}")))?;
    let mut child = TermGuard(child);
    let (sender, lines) = mpsc::channel();
    let (output, errors) = (child.0.stdout.take(), child.0.stderr.take());
    let (Some(mut input), Some(output), Some(errors)) = (child.0.stdin.take(), output, errors)
    else {
        return Err(CommandError::Failed(format!(
            "{GUEST_IMAGES} has no console"
        )));
    };
    forward(output, sender.clone(), Ok);
    forward(errors, sender, Err);
    let (mut last, mut complaint) = (VecDeque::new(), String::new());
    loop {
        match lines.recv_timeout(CHECK_INTERVAL) {
            Ok(Ok(line)) => {
                on_line(&line, &mut input)?;
                if last.len() == LAST_LINES {
                    last.pop_front();
                }
                if !line.trim().is_empty() {
                    last.push_back(first_part(line.trim()).to_owned());
                }
            }
            Ok(Err(line)) => {
                // The program retries after a machine has crashed, and the user should see its
                // note.
                if line.starts_with("a guest hung") {
                    eprintln!("{GUEST_IMAGES}: {line}");
                }
                complaint = line;
            }
            Err(RecvTimeoutError::Timeout) if session.interrupted() => return Ok(()),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    let status = child.0.wait().map_err(CommandError::failed)?;
    if status.success() || session.interrupted() {
        return Ok(());
    }
    Err(CommandError::Failed(format!(
        "{GUEST_IMAGES} ended with {status}: {}; the guest's last lines: {}",
        first_part(&complaint),
        Vec::from(last).join(" | ")
    )))
}

/// A line of the program's standard output, or of its standard error.
type OutputLine = Result<String, String>;

/// Sends the lines of `from` to `to`, in a thread of its own. `kind` marks which stream they come
/// from.
fn forward(
    from: impl Read + Send + 'static,
    to: mpsc::Sender<OutputLine>,
    kind: impl Fn(String) -> OutputLine + Send + 'static,
) {
    std::thread::spawn(move || {
        for line in BufReader::new(from).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).trim_end().to_owned();
            if to.send(kind(line)).is_err() {
                return;
            }
        }
    });
}

/// The part of a line that an error shows.
fn first_part(line: &str) -> &str {
    &line[..line.floor_char_boundary(LINE_LENGTH)]
}

/// A child that gets SIGTERM when this is dropped, upon which it ends its guest and itself.
struct TermGuard(Child);

impl Drop for TermGuard {
    fn drop(&mut self) {
        programs::end(&mut self.0, None);
    }
}
