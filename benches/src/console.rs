//! A guest in user-mode Linux over the files of this machine. Its script reads commands from the
//! console, one per line, and answers with lines that begin with `guest: `.

use std::io::Write;
use std::path::Path;
use std::process::ChildStdin;

use walvisor::commands::CommandError;
use walvisor_guest_images::{Guest, UserMode};

/// Console lines of a guest in an error.
const LAST_LINES: usize = 10;

/// A running guest. Dropping it kills it.
pub struct Console {
    guest: Guest,
    input: ChildStdin,
}

impl Console {
    /// Boots `guest` with `script`. `directory` is for the files that it boots from.
    ///
    /// # Errors
    /// If a file cannot be written, or the guest cannot be started.
    pub fn boot(guest: &UserMode, directory: &Path, script: &str) -> Result<Self, CommandError> {
        let mut guest = guest
            .boot_here(directory, script)
            .map_err(CommandError::failed)?;
        let input = guest.input();
        let input =
            input.ok_or_else(|| CommandError::Failed("a guest has no console".to_owned()))?;
        Ok(Self { guest, input })
    }

    /// Sends a line to the script.
    ///
    /// # Errors
    /// If the guest has ended.
    pub fn send(&mut self, line: &str) -> Result<(), CommandError> {
        let sent = self.input.write_all(format!("{line}\n").as_bytes());
        sent.map_err(|error| CommandError::Failed(format!("a guest reads no commands: {error}")))
    }

    /// Waits for the next line that the script prints for its caller.
    ///
    /// # Errors
    /// If the guest ends, or prints nothing for four minutes.
    pub fn next_line(&mut self) -> Result<String, CommandError> {
        let line = self.guest.wait_for("guest: ");
        line.map(|line| line.replacen("guest: ", "", 1))
            .map_err(CommandError::failed)
    }

    /// Waits for a line for the caller that begins with `start`. Returns the rest of that line.
    ///
    /// # Errors
    /// If the script prints `failed: REASON` for its caller, or as for [`Self::next_line`].
    pub fn wait_for(&mut self, start: &str) -> Result<String, CommandError> {
        loop {
            let line = self.next_line()?;
            if let Some(rest) = line.strip_prefix(start) {
                return Ok(rest.to_owned());
            }
            if let Some(why) = line.strip_prefix("failed: ") {
                return Err(CommandError::Failed(format!("in the guest: {why}")));
            }
        }
    }

    /// Runs a command. Returns the lines that it printed for the caller.
    ///
    /// # Errors
    /// If the command fails, or the machine ends.
    pub fn run(&mut self, command: &str) -> Result<Vec<String>, CommandError> {
        self.send(command)?;
        self.wait_for_end()
            .map_err(|error| CommandError::Failed(format!("{command}: {error}")))
    }

    /// Waits until the command ends, with a line `done STATUS`. Returns the lines before it.
    ///
    /// # Errors
    /// As for [`Self::run`].
    pub fn wait_for_end(&mut self) -> Result<Vec<String>, CommandError> {
        let mut said = Vec::new();
        loop {
            let line = self.next_line()?;
            match line.strip_prefix("done ") {
                Some("0") => return Ok(said),
                Some(status) => {
                    return Err(CommandError::Failed(format!(
                        "status {status}; the machine's last lines: {}",
                        self.last()
                    )));
                }
                None => said.push(line),
            }
        }
    }

    /// The last lines of the console, for an error.
    fn last(&self) -> String {
        let console = self.guest.console();
        let last: Vec<&str> = console.lines().collect();
        last[last.len().saturating_sub(LAST_LINES)..].join(" / ")
    }

    /// Kills the guest at once. Returns the lines for the caller that were not read yet.
    pub fn kill(self) -> Vec<String> {
        let lines = self.guest.kill().into_iter();
        lines
            .filter_map(|line| Some(line.strip_prefix("guest: ")?.to_owned()))
            .collect()
    }
}
