//! How a guest sees a device: virtio over MMIO (virtio 1.2, 4.2) and over PCI (4.1).
//!
//! ```text
//!   MmioTransport ── registers ─┐
//!                               ├─▶ DeviceState ─▶ VirtioBlock
//!   PciTransport ── common cfg ─┘   (status, features, queues, configuration space, reset)
//! ```

mod device_state;
mod mmio;
mod msix;
mod pci;
mod pci_config;

use vm_memory::GuestAddressSpace;

use crate::control::ControlTransport;
use device_state::DeviceState;

pub use mmio::MmioTransport;
pub use pci::{Bar, PciDoorbell, PciTransport};

/// Guest memory as a transport needs it, for instance an `Arc<GuestMemoryMmap>`.
pub trait DeviceMemory: GuestAddressSpace + Send + Sync + 'static {}

impl<M: GuestAddressSpace + Send + Sync + 'static> DeviceMemory for M {}

/// A transport: registers through which a driver sees and changes the state of a device.
trait Registers: Send {
    type Memory: DeviceMemory;

    fn state(&mut self) -> &mut DeviceState<Self::Memory>;
}

/// What the owner of a device wants is the same through any registers.
impl<T: Registers> ControlTransport for T {
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
