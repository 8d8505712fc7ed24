//! How a guest accesses a device: virtio over MMIO (virtio 1.2, 4.2) and over PCI (4.1).
//!
//! ```text
//!   MmioTransport ── registers ─┐
//!                               ├─▶ DeviceState ─▶ VirtioBlock
//!   PciTransport ── common cfg ─┘   (status, features, queues, configuration space, reset)
//! ```
//!
//! ```
//! use std::sync::Arc;
//! use walvisor_devices::backend::ram::RamDisk;
//! use walvisor_devices::block::{BlockConfig, VirtioBlock};
//! use walvisor_devices::transport::{MmioTransport, offsets::mmio};
//! use walvisor_devices::vm_memory::{GuestAddress, GuestMemoryMmap};
//! use walvisor_devices::vmm_sys_util::eventfd::EventFd;
//!
//! let device = VirtioBlock::new(Arc::new(RamDisk::new(2048)), BlockConfig::default())?;
//! let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 1 << 20)])?;
//! let irq = EventFd::new(0)?;
//! let mut transport = MmioTransport::new(device, Arc::new(memory), irq);
//! // The guest's read of this register has caused a VM exit.
//! let mut bytes = [0; 4];
//! transport.read(mmio::MAGIC_VALUE, &mut bytes);
//! assert_eq!(&bytes, b"virt");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod device_state;
mod mmio;
mod msix;
pub mod offsets;
mod pci;
mod pci_config;
mod registers;

use crate::virtio::VirtioDevice;

pub use crate::memory::DeviceMemory;
pub use mmio::MmioTransport;
pub use pci::{Bar, PciDoorbell, PciTransport};

/// A device that a transport presents: [`VirtioBlock`](crate::block::VirtioBlock) or
/// [`VirtioNet`](crate::net::VirtioNet).
pub trait Device: VirtioDevice {}

impl<D: VirtioDevice> Device for D {}
