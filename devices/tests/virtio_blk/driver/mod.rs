//! The virtio-blk driver of the tests' kit, with a device of this crate over each transport.

mod mmio;
mod pci;
mod vhost_user;

use std::sync::Arc;
use std::time::Duration;

use virtio_bindings::virtio_blk::*;
use virtio_bindings::virtio_config::{VIRTIO_F_IN_ORDER, VIRTIO_F_RING_RESET};
use virtio_bindings::virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;
use walvisor_devices::backend::Backend;
use walvisor_devices::block::{BlockConfig, BlockCounts, BlockMetrics, VirtioBlock};
use walvisor_devices::vhost_user::Service;

use vhost_user::serve;

pub use mmio::MmioDriver;
pub use pci::PciDriver;
pub use walvisor_testkit::virtio::*;
pub use walvisor_testkit::{Random, pattern, wait_until};

pub const INDIRECT: u64 = 1 << VIRTIO_RING_F_INDIRECT_DESC;
pub const IN_ORDER: u64 = 1 << VIRTIO_F_IN_ORDER;
pub const RING_RESET: u64 = 1 << VIRTIO_F_RING_RESET;
pub const FLUSH: u64 = 1 << VIRTIO_BLK_F_FLUSH;
pub const CONFIG_WCE: u64 = 1 << VIRTIO_BLK_F_CONFIG_WCE;
/// Every feature that the device offers.
pub const EVERYTHING: u64 = u64::MAX;

pub const OK: u8 = VIRTIO_BLK_S_OK as u8;
pub const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;
pub const UNSUPP: u8 = VIRTIO_BLK_S_UNSUPP as u8;

/// Long enough for a forbidden event to happen if it would.
pub const A_WHILE: Duration = Duration::from_millis(50);

/// The transports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Mmio,
    Pci,
    VhostUser,
}

/// Turns functions that take a [`Kind`] into one test per transport.
macro_rules! on_both_transports {
    ($($name:ident,)*) => {
        mod mmio {
            $(#[test] fn $name() { super::$name($crate::driver::Kind::Mmio); })*
        }
        mod pci {
            $(#[test] fn $name() { super::$name($crate::driver::Kind::Pci); })*
        }
    };
}

/// The same with a third test for vhost-user, except for the functions after the semicolon.
macro_rules! on_every_transport {
    ($($name:ident,)* $(; $($registers:ident,)*)?) => {
        on_both_transports! { $($name,)* $($($registers,)*)? }
        mod vhost_user {
            $(#[test] fn $name() { super::$name($crate::driver::Kind::VhostUser); })*
        }
    };
}

pub fn config(queues: u16) -> BlockConfig {
    BlockConfig {
        queues,
        queue_size: 64,
        serial: "serial-of-a-disk".into(),
        ..BlockConfig::default()
    }
}

/// A driver with a device of its own.
pub type Driver = BlockDriver<Arc<BlockMetrics>>;

/// What makes the device of a [`Driver`].
pub trait DriverOfDevice: Sized {
    /// A device that no driver has initialised yet.
    fn attach(kind: Kind, backend: impl Backend + 'static, config: BlockConfig) -> Self;

    /// A live device, with those of the `wanted` features that it offers.
    fn start(kind: Kind, backend: impl Backend + 'static, config: BlockConfig, wanted: u64)
    -> Self;

    fn counts(&self) -> BlockCounts;
}

impl DriverOfDevice for Driver {
    fn attach(kind: Kind, backend: impl Backend + 'static, config: BlockConfig) -> Self {
        let memory = guest_memory();
        let device = VirtioBlock::new(Arc::new(backend), config).expect("a device");
        let metrics = device.metrics();
        let registers: Box<dyn Registers> = match kind {
            Kind::Mmio => Box::new(MmioDriver::new(device, Arc::clone(&memory))),
            Kind::Pci => Box::new(PciDriver::new(device, Arc::clone(&memory))),
            Kind::VhostUser => Box::new(serve(device, &memory, 12, Service::control)),
        };
        Self::new(registers, memory, metrics)
    }

    fn start(
        kind: Kind,
        backend: impl Backend + 'static,
        config: BlockConfig,
        wanted: u64,
    ) -> Self {
        let mut driver = Self::attach(kind, backend, config);
        driver.initialise(wanted);
        driver
    }

    fn counts(&self) -> BlockCounts {
        self.metrics.counts()
    }
}
