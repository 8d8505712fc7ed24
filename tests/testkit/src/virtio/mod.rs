//! The driver's half of virtio 1.2: a block device's driver, over any transport that implements
//! [`Registers`].

mod driver;
mod ring;
pub mod scsi;
mod vhost_user;

use std::sync::Arc;

use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

pub use driver::{Answer, BlockDriver, PostedRequest, segment};
pub use ring::{Piece, Ring};
pub use vhost_user::{DeviceOwner, VhostUserRegisters};

/// Device status: the guest has noticed the device.
pub const ACKNOWLEDGE: u8 = 1;
/// Device status: the guest has a driver for it.
pub const DRIVER: u8 = 2;
/// Device status: the driver is ready.
pub const DRIVER_OK: u8 = 4;
/// Device status: features are negotiated.
pub const FEATURES_OK: u8 = 8;
/// Device status: the device cannot go on without a reset.
pub const NEEDS_RESET: u8 = 64;

/// The feature bit VIRTIO_F_VERSION_1.
pub const VERSION_1: u64 = 1 << VIRTIO_F_VERSION_1;
/// The feature bit VIRTIO_RING_F_EVENT_IDX.
pub const EVENT_IDX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;

/// Guest memory that its VMM, its driver and its devices share.
pub type Memory = Arc<GuestMemoryMmap>;

/// Bytes of each region of [`guest_memory`].
pub const REGION: u64 = 32 << 20;
/// The end of [`guest_memory`].
pub const MEMORY_END: u64 = 2 * REGION;

/// Guest memory: two adjacent regions, so that a buffer can lie across their border, and nothing
/// after them. It is backed by a file, so that it can be shared.
#[must_use]
pub fn guest_memory() -> Memory {
    let file = Arc::new(crate::vhost_user::memory(MEMORY_END));
    let regions = [0, REGION].map(|start| {
        let file = FileOffset::from_arc(Arc::clone(&file), start);
        (GuestAddress(start), REGION as usize, Some(file))
    });
    Arc::new(GuestMemoryMmap::from_ranges_with_files(regions).expect("guest memory"))
}

/// A device as its driver sees it, whatever the transport; at the end, what its VMM can do.
pub trait Registers {
    /// The features that the device offers.
    fn device_features(&mut self) -> u64;
    /// Chooses features.
    fn set_driver_features(&mut self, features: u64);
    /// The device status.
    fn status(&mut self) -> u8;
    /// Writes the device status; 0 resets the device.
    fn set_status(&mut self, status: u8);
    /// The generation of the configuration space.
    fn generation(&mut self) -> u32;
    /// Reads the configuration space.
    fn read_config(&mut self, offset: u64, data: &mut [u8]);
    /// Writes the configuration space.
    fn write_config(&mut self, offset: u64, data: &[u8]);
    /// Selects `queue` and returns its maximum size.
    fn queue_max(&mut self, queue: u16) -> u16;
    /// Sets a queue's size, addresses and interrupt, and enables it.
    fn set_queue(&mut self, queue: u16, size: u16, addresses: [u64; 3]);
    /// Doorbell by a register access: an exit to user space.
    fn notify(&mut self, queue: u16);
    /// Starts the reset of `queue` alone (2.6.1).
    fn reset_queue(&mut self, queue: u16);
    /// Whether the reset of `queue` is still going on.
    fn queue_resetting(&mut self, queue: u16) -> bool;
    /// Tries to enable `queue` as it is.
    fn enable_queue(&mut self, queue: u16);
    /// Disables `queue`, if the transport can.
    fn disable_queue(&mut self, queue: u16);
    /// Whether `queue` is enabled.
    fn queue_enabled(&mut self, queue: u16) -> bool;
    /// The eventfds that an ioeventfd would write to.
    fn doorbells(&self) -> Vec<EventFd>;
    /// Interrupts of `queue` since the last call, in whatever way the transport delivers them.
    fn take_queue_interrupts(&mut self, queue: u16) -> u64;
    /// Configuration change interrupts since the last call.
    fn take_config_interrupts(&mut self) -> u64;
    /// The VMM tells the device that its disk has another size.
    fn capacity_changed(&mut self);
    /// The VMM pauses the device.
    fn pause(&mut self);
    /// The VMM lets a paused device go on.
    fn resume(&mut self);
    /// The VMM switches the write cache. `false`: the device refuses.
    fn set_write_cache(&mut self, on: bool) -> bool;
}
