//! The first serial port, for output only.

use core::fmt;

use walvisor_guest::register::write_port;

const DATA: u16 = 0x3f8;

/// The console. It does not wait for the transmitter: a virtual one is always ready.
#[derive(Debug)]
pub struct Console;

impl fmt::Write for Console {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            // SAFETY: the serial port only takes the byte.
            unsafe { write_port(DATA, byte) };
        }
        Ok(())
    }
}
