//! Guests of other monitors than `walvisor run`: user-mode Linux, which is near native wherever a program runs, and QEMU in
//! full emulation, alone or under libvirt. They boot in seconds and have their disks over vhost-user, if they have any.
//!
//! ```text
//!   initramfs.rs: busybox, fio, modules, the script ──▶ user_mode.rs, qemu.rs ──▶ Guest: its console, line by line
//! ```
//!
//! A script's own lines should begin with `guest: `; the last one is [`END`].

mod initramfs;
mod qemu;
mod user_mode;

use std::collections::VecDeque;
use std::path::Path;
use std::process::{ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

pub use qemu::vhost_user_disk;
pub use user_mode::UserMode;

use crate::error::{Error, FileContext, Result};
use crate::process::Leashed;

/// Nothing takes this long on the slowest machine; a guest that is silent for longer has hung.
const PATIENCE: Duration = Duration::from_secs(240);

/// How much of the console an error has.
const LAST_LINES: usize = 60;

/// What a guest says last.
pub const END: &str = "guest: end";

/// What every guest does after its script.
const FINISH: &str = "
echo guest: end
poweroff -f
";

/// A running guest. Dropping it kills it.
pub struct Guest {
    process: Leashed,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    /// The last lines of its console, for the one who wonders.
    last: VecDeque<String>,
}

impl Guest {
    /// Starts the monitor `command` in `directory`. Its stdout is the guest's console, and its stdin that console's input.
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
        // It may have processes of its own.
        let mut process = Leashed::spawn(&mut command, true)?;
        Ok(Self {
            input: process.input(),
            lines: process.lines(),
            process,
            last: VecDeque::new(),
        })
    }

    /// The next line of its console; `None` when it has ended.
    ///
    /// # Errors
    /// The guest says nothing for four minutes.
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
    /// The guest ends without one, or says nothing for four minutes.
    pub fn wait_for(&mut self, start: &str) -> Result<String> {
        while let Some(line) = self.line()? {
            if line.starts_with(start) {
                return Ok(line);
            }
        }
        Err(self.lost(format!("has ended, and never said {start:?}")))
    }

    /// What it has said by now that nobody has read.
    pub fn said(&mut self) -> Vec<String> {
        let lines: Vec<_> = self.lines.try_iter().collect();
        lines.iter().for_each(|line| self.keep(line));
        lines
    }

    /// Keeps a line for the one who wonders.
    fn keep(&mut self, line: &str) {
        if self.last.len() == LAST_LINES {
            self.last.pop_front();
        }
        self.last.push_back(line.to_owned());
    }

    /// What types on its console, which only user-mode Linux hears. The first caller gets it. To drop it hangs the console up.
    pub fn input(&mut self) -> Option<ChildStdin> {
        self.input.take()
    }

    /// What it said last: up to 60 lines.
    #[must_use]
    pub fn console(&self) -> String {
        self.last.iter().map(|line| format!("{line}\n")).collect()
    }

    /// Waits until it has powered off.
    ///
    /// # Errors
    /// The guest says nothing for four minutes, or its monitor cannot be waited for.
    pub fn end(mut self) -> Result<ExitStatus> {
        while self.line()?.is_some() {}
        self.process.wait().at("wait for", "the guest")
    }

    /// Cuts its power: it gets to do nothing more. What it had said that nobody has read.
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
