//! The device status field (virtio 1.2, 2.1), shared by the transport and the queue workers.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};

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

/// The status byte, and the interrupt that announces changes made by the device.
pub struct DeviceStatus {
    bits: AtomicU8,
    interrupt: Arc<dyn Interrupt>,
    complaints: AtomicU32,
}

/// The most warnings about one driver: a driver that keeps breaking the rules must not fill the
/// log.
const MAX_COMPLAINTS: u32 = 16;

impl DeviceStatus {
    pub(crate) fn new(interrupt: Arc<dyn Interrupt>) -> Self {
        Self {
            bits: AtomicU8::new(0),
            interrupt,
            complaints: AtomicU32::new(0),
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

    /// Resets the status to 0 and clears pending interrupts. No worker may be running.
    pub(crate) fn reset(&self) {
        self.bits.store(0, Ordering::SeqCst);
        self.interrupt.reset();
    }

    /// Sets DEVICE_NEEDS_RESET, and notifies the driver if DRIVER_OK is set (2.1.2).
    pub(crate) fn set_needs_reset(&self) {
        let before = self.bits.fetch_or(NEEDS_RESET, Ordering::SeqCst);
        if before & NEEDS_RESET == 0 && before & DRIVER_OK != 0 {
            self.interrupt.config();
        }
    }

    /// Logs a warning about the driver, only the first few times.
    pub(crate) fn warn(&self, text: fmt::Arguments<'_>) {
        match self.complaints.fetch_add(1, Ordering::Relaxed) {
            0..MAX_COMPLAINTS => tracing::warn!("{text}"),
            MAX_COMPLAINTS => {
                tracing::warn!("{text}; further warnings about this driver are not shown")
            }
            // Keeps the counter from wrapping.
            _ => self.complaints.store(MAX_COMPLAINTS + 1, Ordering::Relaxed),
        }
    }

    /// The interrupt for used buffer and configuration change notifications.
    pub(crate) fn interrupt(&self) -> &dyn Interrupt {
        &*self.interrupt
    }
}

#[cfg(test)]
mod tests {
    use walvisor_testkit::LogLines;

    use super::*;
    use crate::interrupt::Interrupt;

    struct NoInterrupt;

    impl Interrupt for NoInterrupt {
        fn queue(&self, _queue: u16) {}
        fn config(&self) {}
        fn reset(&self) {}
    }

    #[test]
    fn a_driver_that_keeps_breaking_rules_is_warned_of_a_few_times() {
        let log = LogLines::default();
        let status = DeviceStatus::new(Arc::new(NoInterrupt));
        tracing::subscriber::with_default(log.clone(), || {
            for round in 0..1000 {
                status.warn(format_args!("offence {round}"));
            }
        });
        let lines = log.all();
        assert_eq!(lines.len() as u32, MAX_COMPLAINTS + 1);
        assert_eq!(lines[0], "offence 0");
        assert!(lines.last().unwrap().contains("not shown"));
        assert_eq!(
            status.complaints.load(Ordering::Relaxed),
            MAX_COMPLAINTS + 1
        );
    }
}
