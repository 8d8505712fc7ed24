//! Guests of monitors other than `walvisor run`: user-mode Linux, which runs at near-native speed
//! anywhere, and QEMU in full emulation, alone or under libvirt. They boot in seconds. Their disks,
//! if any, are attached over vhost-user.
//!
//! ```text
//!   initramfs.rs: busybox, fio, script ──▶ user_mode.rs, qemu.rs, libvirt.rs ──▶ Guest: console
//! ```
//!
//! Lines that a script prints should begin with `guest: `. The guest's last line is [`END`].

mod cable;
mod initramfs;
mod libvirt;
mod qemu;
mod user_mode;

use std::collections::VecDeque;
use std::path::Path;
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

pub use cable::CableEnd;
pub use libvirt::Libvirt;
pub use qemu::vhost_user_disk;
pub use user_mode::{NewestUserMode, UserMode};

use crate::error::{Error, FileContext, Result};
use crate::process::LeashedChild;

/// A guest that prints nothing for longer than this has hung: even on the slowest machine no step
/// takes this long.
const SILENCE_LIMIT: Duration = Duration::from_secs(240);

/// The most console lines in an error.
const LAST_LINES: usize = 60;

/// The last line that a guest prints.
pub const END: &str = "guest: end";

/// What every guest's init runs after its script.
const FINISH: &str = "
echo guest: end
poweroff -f
";

/// A running guest. Dropping it kills it.
pub struct Guest {
    process: LeashedChild,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    /// The last lines of the console, for error messages.
    last: VecDeque<String>,
}

impl Guest {
    /// Starts the monitor `command` in `directory`. Its stdout is the guest's console, and its
    /// stdin the console's input.
    ///
    /// # Errors
    /// The program cannot be started.
    fn spawn(mut command: Command, directory: &Path) -> Result<Self> {
        command
            .current_dir(directory)
            .env("HOME", directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        // The monitor may start processes of its own, so its whole process group is killed.
        let mut process = LeashedChild::spawn(&mut command, true)?;
        Ok(Self {
            input: process.take_input(),
            lines: process.read_lines(),
            process,
            last: VecDeque::new(),
        })
    }

    /// Waits for the next line of the console; `None`: the guest has ended.
    ///
    /// # Errors
    /// The guest prints nothing for four minutes.
    pub fn line(&mut self) -> Result<Option<String>> {
        match self.lines.recv_timeout(SILENCE_LIMIT) {
            Ok(line) => {
                self.keep(&line);
                Ok(Some(line))
            }
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => Err(self.error(format!(
                "has printed nothing for {} s",
                SILENCE_LIMIT.as_secs()
            ))),
        }
    }

    /// Waits for a line that begins with `start`.
    ///
    /// # Errors
    /// The guest ends without such a line, or prints nothing for four minutes.
    pub fn wait_for(&mut self, start: &str) -> Result<String> {
        while let Some(line) = self.line()? {
            if line.starts_with(start) {
                return Ok(line);
            }
        }
        Err(self.error(format!("has ended without printing {start:?}")))
    }

    /// Takes the console lines that have arrived and were not read yet.
    pub fn take_lines(&mut self) -> Vec<String> {
        let lines: Vec<_> = self.lines.try_iter().collect();
        lines.iter().for_each(|line| self.keep(line));
        lines
    }

    /// Remembers a line for error messages.
    fn keep(&mut self, line: &str) {
        if self.last.len() == LAST_LINES {
            self.last.pop_front();
        }
        self.last.push_back(line.to_owned());
    }

    /// Takes the input of the guest's console. Only the first call returns it. Dropping it hangs
    /// the console of user-mode Linux up.
    pub fn input(&mut self) -> Option<ChildStdin> {
        self.input.take()
    }

    /// The last lines of the console, up to 60.
    #[must_use]
    pub fn console(&self) -> String {
        self.last.iter().map(|line| format!("{line}\n")).collect()
    }

    /// Waits until the guest has powered off.
    ///
    /// # Errors
    /// The guest prints nothing for four minutes, or its monitor cannot be waited for.
    pub fn end(mut self) -> Result<ExitStatus> {
        while self.line()?.is_some() {}
        self.process.wait().at("wait for", "the guest")
    }

    /// Kills the guest at once, like a power cut. Returns the console lines that were not read yet.
    #[must_use]
    pub fn kill(self) -> Vec<String> {
        drop(self.process);
        self.lines.iter().collect()
    }

    fn error(&self, what: String) -> Error {
        Error::Guest {
            what,
            console: self.console(),
        }
    }
}
