//! How a guest accesses a device: virtio over MMIO (virtio 1.2, 4.2) and over PCI (4.1).
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
mod registers;

pub use crate::memory::DeviceMemory;
pub use mmio::MmioTransport;
pub use pci::{Bar, PciDoorbell, PciTransport};
