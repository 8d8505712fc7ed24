//! The terminal in raw mode, restored however the process ends the run.

use std::io;

use rustix::stdio;
use rustix::termios::{OptionalActions, OutputModes, Termios, isatty, tcgetattr, tcsetattr};

/// Raw mode of the terminal at stdin. Dropping it restores the original mode.
pub struct RawTerminal {
    original: Termios,
}

impl RawTerminal {
    /// Switches the terminal to raw mode. Returns `None` if stdin is not a terminal.
    ///
    /// # Errors
    /// If the terminal refuses.
    pub fn enter() -> io::Result<Option<Self>> {
        let stdin = stdio::stdin();
        if !isatty(stdin) {
            return Ok(None);
        }
        let original = tcgetattr(stdin)?;
        let mut raw = original.clone();
        raw.make_raw();
        // The guest's line discipline sends CR LF already, but messages of this process need the
        // conversion.
        raw.output_modes |= OutputModes::OPOST | OutputModes::ONLCR;
        tcsetattr(stdin, OptionalActions::Now, &raw)?;
        Ok(Some(Self { original }))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // There is nobody left to report a failure to.
        let _ = tcsetattr(stdio::stdin(), OptionalActions::Now, &self.original);
    }
}
