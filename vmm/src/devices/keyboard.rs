//! The keyboard controller. There is no keyboard: guests use it to reset.

use std::convert::Infallible;
use std::sync::Arc;

use vm_superio::{I8042Device, Trigger};

use crate::bus::BusDevice;
use crate::control::{RunControl, RunEnd};

/// Ends the run with a reset.
struct ResetTrigger(Arc<RunControl>);

impl Trigger for ResetTrigger {
    type E = Infallible;

    fn trigger(&self) -> Result<(), Infallible> {
        self.0.end(RunEnd::Reset);
        Ok(())
    }
}

/// Ports 0x60 to 0x64.
pub struct Keyboard(I8042Device<ResetTrigger>);

impl Keyboard {
    /// The controller; its reset command ends the run of `control`.
    pub fn new(control: Arc<RunControl>) -> Self {
        Self(I8042Device::new(ResetTrigger(control)))
    }
}

impl BusDevice for Keyboard {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        if let [byte] = data {
            *byte = self.0.read(offset as u8);
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if let [byte] = *data {
            // The error type has no values, so the write cannot fail.
            let _ = self.0.write(offset as u8, byte);
        }
    }
}
