//! Guests of other monitors than `walvisor run`: user-mode Linux, which is near native wherever a program runs, and
//! QEMU in full emulation, alone or under libvirt. They boot in seconds. Their disks, if any, are attached over
//! vhost-user.
//!
//! ```text
//!   initramfs.rs: busybox, fio, modules, the script ──▶ user_mode.rs, qemu.rs ──▶ Guest: its console, line by line
//! ```
//!
//! Lines that a script prints should begin with `guest: `. The guest's last line is [`END`].

mod cable;
mod initramfs;
mod qemu;
mod user_mode;

use std::collections::VecDeque;
use std::path::Path;
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

pub use cable::CableEnd;
pub use qemu::vhost_user_disk;
pub use user_mode::UserMode;

use crate::error::{Error, FileContext, Result};
use crate::process::Leashed;

/// A guest that prints nothing for longer than this has hung: no step of a guest takes this long on the slowest
/// machine.
const PATIENCE: Duration = Duration::from_secs(240);

/// Console lines that an error carries at most.
const LAST_LINES: usize = 60;

/// The last line that a guest prints.
pub const END: &str = "guest: end";

/// The commands of every guest's init after its script.
const FINISH: &str = "
echo guest: end
poweroff -f
";

/// A running guest. Dropping it kills it.
pub struct Guest {
    process: Leashed,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    /// The last lines of the console, for error messages.
    last: VecDeque<String>,
}

impl Guest {
    /// Starts the monitor `command` in `directory`. Its stdout is the guest's console, and its stdin that console's
    /// input.
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
        // The monitor may start processes of its own, so all of its process group is killed.
        let mut process = Leashed::spawn(&mut command, true)?;
        Ok(Self {
            input: process.input(),
            lines: process.lines(),
            process,
            last: VecDeque::new(),
        })
    }

    /// The next line of the console, or `None` when the guest has ended.
    ///
    /// # Errors
    /// The guest prints nothing for four minutes.
    pub fn line(&mut self) -> Result<Option<String>> {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => {
                self.keep(&line);
                Ok(Some(line))
            }
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(RecvTimeoutError::Timeout) => {
                Err(self.lost(format!("has said nothing for {} s", PATIENCE.as_secs())))
            }
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
        Err(self.lost(format!("has ended, and never said {start:?}")))
    }

    /// The console lines so far that the caller has not read yet.
    pub fn said(&mut self) -> Vec<String> {
        let lines: Vec<_> = self.lines.try_iter().collect();
        lines.iter().for_each(|line| self.keep(line));
        lines
    }

    /// Keeps a line for error messages.
    fn keep(&mut self, line: &str) {
        if self.last.len() == LAST_LINES {
            self.last.pop_front();
        }
        self.last.push_back(line.to_owned());
    }

    /// The input of the guest's console. Only user-mode Linux reads it. Only the first call gets it; dropping it
    /// hangs the console up.
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

    /// Kills the guest at once, like a power cut. Returns the console lines that the caller has not read yet.
    #[must_use]
    pub fn cut(self) -> Vec<String> {
        drop(self.process);
        self.lines.iter().collect()
    }

    fn lost(&self, what: String) -> Error {
        Error::Guest {
            what,
            console: self.console(),
        }
    }
}
