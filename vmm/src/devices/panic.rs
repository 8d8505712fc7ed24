//! The port through which a guest reports that its kernel panicked: QEMU's pvpanic (QEMU,
//! docs/specs/pvpanic), for which Linux has a driver.
//!
//! Without it, a panic looks like a reset or a guest that hangs. The port is one byte: a read
//! returns the events that it supports, and a write reports events.

use std::sync::Arc;

pub use crate::arch::x86_64::layout::PANIC_SIZE as SIZE;

use crate::bus::BusDevice;
use crate::control::{RunControl, RunEnd};

/// The kernel panicked, and no crash kernel follows.
const PANICKED: u8 = 1;
/// The kernel panicked, and a crash kernel takes over, which writes a dump and resets.
const CRASH_LOADED: u8 = 1 << 1;

/// The port.
pub struct PanicPort(Arc<RunControl>);

impl PanicPort {
    /// The port; a panic without a crash kernel ends the run of `control`.
    pub fn new(control: Arc<RunControl>) -> Self {
        Self(control)
    }
}

impl BusDevice for PanicPort {
    fn read(&mut self, _: u64, data: &mut [u8]) {
        data.fill(0);
        if let [byte, ..] = data {
            *byte = PANICKED | CRASH_LOADED;
        }
    }

    fn write(&mut self, _: u64, data: &[u8]) {
        if data.first().is_some_and(|events| events & PANICKED != 0) {
            self.0.end(RunEnd::Panicked);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_ends_the_run_and_a_crash_kernel_does_not() {
        let control = Arc::new(RunControl::new().unwrap());
        let mut port = PanicPort::new(control.clone());
        let mut events = [0];
        port.read(0, &mut events);
        assert_eq!(events, [0b11]);
        for harmless in [&[][..], &[0], &[CRASH_LOADED], &[0xfc]] {
            port.write(0, harmless);
        }
        assert!(control.end_reason().is_none());
        port.write(0, &[PANICKED]);
        assert!(matches!(control.end_reason(), Some(RunEnd::Panicked)));
    }
}
