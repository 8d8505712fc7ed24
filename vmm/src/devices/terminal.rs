//! The terminal in raw mode, restored on every way out.

use std::io;

use rustix::stdio;
use rustix::termios::{OptionalActions, OutputModes, Termios, isatty, tcgetattr, tcsetattr};

/// Raw mode of the terminal at stdin. Dropping it restores the mode found.
pub struct RawTerminal {
    original: Termios,
}

impl RawTerminal {
    /// Switches the terminal to raw mode; `None` if stdin is no terminal.
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
        // The guest's line discipline makes CR LF already; messages of this process need it too.
        raw.output_modes |= OutputModes::OPOST | OutputModes::ONLCR;
        tcsetattr(stdin, OptionalActions::Now, &raw)?;
        Ok(Some(Self { original }))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        // Nobody is left to hear of a failure.
        let _ = tcsetattr(stdio::stdin(), OptionalActions::Now, &self.original);
    }
}
