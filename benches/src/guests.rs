//! Linux guests. `walvisor-guest-images` runs them in a process of its own, which ends with the comparison. This module
//! reads their consoles.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use walvisor::commands::CommandError;

use crate::programs::{GUEST_IMAGES, guest_images};
use crate::session::Session;

/// How often to check for an interrupt by the user.
const CHECK_INTERVAL: Duration = Duration::from_millis(200);
/// Console lines to show if a guest ends too early.
const LAST_LINES: usize = 20;

/// Runs `walvisor-guest-images ACTION SCRIPT ARGUMENTS`, with the action `user-mode` or `emulated`. Passes each line of the
/// guest to `on_line` until the guest or `session` ends. Returns `false` if the user interrupted it.
///
/// # Errors
/// If the program is missing, or the guest ended before its script did.
pub fn run(
    action: &str,
    script: &str,
    arguments: &[OsString],
    session: &Session,
    mut on_line: impl FnMut(&str) -> Result<(), CommandError>,
) -> Result<bool, CommandError> {
    let program = guest_images()?;
    let failed = |error: std::io::Error| {
        CommandError::Failed(format!("a directory for scripts cannot be made: {error}"))
    };
    let mut file = tempfile::NamedTempFile::new().map_err(failed)?;
    file.write_all(script.as_bytes()).map_err(failed)?;
    let child = Command::new(&program)
        .arg(action)
        .arg(file.path())
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let child = child.map_err(|error| {
        CommandError::Failed(format!("{} does not start: {error}", program.display()))
    })?;
    let mut child = TermGuard(child);
    let (sender, lines) = mpsc::channel();
    let stdout = child.0.stdout.take();
    let stderr = child.0.stderr.take();
    let forward = |sender: mpsc::Sender<String>, reader: Box<dyn std::io::Read + Send>| {
        std::thread::spawn(move || {
            let lines = BufReader::new(reader).split(b'\n').map_while(Result::ok);
            for line in lines {
                let line = String::from_utf8_lossy(&line).trim_end().to_owned();
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
    };
    if let (Some(stdout), Some(stderr)) = (stdout, stderr) {
        forward(sender.clone(), Box::new(stdout));
        forward(sender, Box::new(stderr));
    }
    let mut last = std::collections::VecDeque::new();
    loop {
        match lines.recv_timeout(CHECK_INTERVAL) {
            Ok(line) => {
                on_line(&line)?;
                last.push_back(line);
                if last.len() > LAST_LINES {
                    last.pop_front();
                }
            }
            Err(RecvTimeoutError::Timeout) if session.interrupted() => return Ok(false),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    let status = child.0.wait().map_err(CommandError::failed)?;
    if session.interrupted() {
        return Ok(false);
    }
    if status.success() {
        return Ok(true);
    }
    let last: Vec<String> = last.into();
    Err(CommandError::Failed(format!(
        "{GUEST_IMAGES} {action} failed ({status}); its last lines: {}",
        last.join(" / ")
    )))
}

/// A child that gets SIGTERM when this is dropped, upon which it ends its guest and itself.
struct TermGuard(Child);

impl Drop for TermGuard {
    fn drop(&mut self) {
        use rustix::process::{Pid, Signal, kill_process};
        if matches!(self.0.try_wait(), Ok(None)) {
            // Fails if the child has ended, which is fine.
            let _ = kill_process(Pid::from_child(&self.0), Signal::TERM);
        }
        let _ = self.0.wait();
    }
}
