//! The device status field (virtio 1.2, 2.1), shared by the transport and the queue workers.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use virtio_bindings::virtio_config as bits;

use crate::interrupt::Interrupt;

/// The driver has noticed the device.
pub(crate) const ACKNOWLEDGE: u8 = bits::VIRTIO_CONFIG_S_ACKNOWLEDGE as u8;
/// The driver knows how to drive the device.
pub(crate) const DRIVER: u8 = bits::VIRTIO_CONFIG_S_DRIVER as u8;
/// The driver is ready: the queues run.
pub(crate) const DRIVER_OK: u8 = bits::VIRTIO_CONFIG_S_DRIVER_OK as u8;
/// The negotiation of features is complete.
pub(crate) const FEATURES_OK: u8 = bits::VIRTIO_CONFIG_S_FEATURES_OK as u8;
/// The device met an error that only a reset clears.
pub(crate) const NEEDS_RESET: u8 = bits::VIRTIO_CONFIG_S_NEEDS_RESET as u8;
/// The driver has given up on the device.
pub(crate) const FAILED: u8 = bits::VIRTIO_CONFIG_S_FAILED as u8;

/// The status byte, and the interrupt that announces what the device itself changes in it.
pub(crate) struct DeviceStatus {
    bits: AtomicU8,
    interrupt: Arc<dyn Interrupt>,
}

impl DeviceStatus {
    pub(crate) fn new(interrupt: Arc<dyn Interrupt>) -> Self {
        Self {
            bits: AtomicU8::new(0),
            interrupt,
        }
    }

    /// The status as the driver reads it.
    pub(crate) fn get(&self) -> u8 {
        self.bits.load(Ordering::SeqCst)
    }

    /// Whether every bit of `mask` is set.
    pub(crate) fn has(&self, mask: u8) -> bool {
        self.get() & mask == mask
    }

    /// Adds bits that the driver has set.
    pub(crate) fn insert(&self, mask: u8) {
        self.bits.fetch_or(mask, Ordering::SeqCst);
    }

    /// Back to 0, with nothing pending. Only once no worker runs.
    pub(crate) fn reset(&self) {
        self.bits.store(0, Ordering::SeqCst);
        self.interrupt.reset();
    }

    /// Sets DEVICE_NEEDS_RESET and tells the driver, once it is ready to hear it (2.1.2).
    pub(crate) fn needs_reset(&self) {
        let before = self.bits.fetch_or(NEEDS_RESET, Ordering::SeqCst);
        if before & NEEDS_RESET == 0 && before & DRIVER_OK != 0 {
            self.interrupt.config();
        }
    }

    /// Where used buffer and configuration change notifications go.
    pub(crate) fn interrupt(&self) -> &dyn Interrupt {
        &*self.interrupt
    }
}
