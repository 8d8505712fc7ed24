//! What the transports have in common: registers in front of a [`DeviceState`].

use super::device_state::DeviceState;
use crate::block::VirtioBlock;
use crate::control::ControlTransport;
use crate::memory::DeviceMemory;

/// A transport: registers through which a driver reads and changes the state of a device.
pub(super) trait Registers: Send {
    type Memory: DeviceMemory;
    type Device;

    fn state(&mut self) -> &mut DeviceState<Self::Memory, Self::Device>;
}

/// The owner of a disk: its requests have the same effect with any transport.
impl<T: Registers<Device = VirtioBlock>> ControlTransport for T {
    fn capacity_changed(&mut self) {
        self.state().capacity_changed();
    }

    fn set_write_cache(&mut self, on: bool) -> bool {
        self.state().set_write_cache(on)
    }

    fn pause(&mut self) {
        self.state().pause();
    }

    fn resume(&mut self) {
        self.state().resume();
    }
}
