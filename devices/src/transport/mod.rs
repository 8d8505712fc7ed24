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

pub use mmio::MmioTransport;
pub use pci::{Bar, PciDoorbell, PciTransport};

/// Guest memory as a transport needs it, for instance an `Arc<GuestMemoryMmap>`.
pub trait DeviceMemory: GuestAddressSpace + Send + Sync + 'static {}

impl<M: GuestAddressSpace + Send + Sync + 'static> DeviceMemory for M {}
