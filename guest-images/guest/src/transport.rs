//! The operations of both transports: negotiation, queues, doorbells, the device's configuration
//! space.

use crate::error::Error;
use crate::queue::Queue;
use crate::register::Registers;

/// Bits of the device status (virtio 1.2, 2.1).
pub mod status {
    /// The guest has noticed the device.
    pub const ACKNOWLEDGE: u8 = 1;
    /// The guest has a driver for it.
    pub const DRIVER: u8 = 2;
    /// The driver is ready to drive it.
    pub const DRIVER_OK: u8 = 4;
    /// The driver has accepted features, and the device agrees.
    pub const FEATURES_OK: u8 = 8;
    /// The device has met an error that it cannot recover from.
    pub const NEEDS_RESET: u8 = 64;
}

/// A virtio device as its driver sees it.
pub trait Transport {
    /// Its name in reports.
    fn name(&self) -> &'static str;

    /// 32 of the feature bits that the device offers, from bit `32 * word` on.
    fn offered(&mut self, word: u32) -> u32;

    /// Accepts the features `bits`, from bit `32 * word` on.
    fn accept(&mut self, word: u32, bits: u32);

    /// Reads the device status.
    fn status(&mut self) -> u8;

    /// Writes the device status; 0 resets the device.
    fn set_status(&mut self, status: u8);

    /// Largest size of queue `index`; 0 if there is no such queue.
    fn queue_max(&mut self, index: u16) -> u16;

    /// Gives `queue` to the device as queue `index`, with its interrupt, and enables it.
    ///
    /// # Errors
    /// If the device has no interrupt vector for it.
    fn enable_queue(&mut self, index: u16, queue: &Queue) -> Result<(), Error> {
        match self.set_queue(index, queue.size(), queue.addresses()) {
            Ok(true) => Ok(()),
            Ok(false) => Err(Error::Queue {
                index,
                what: "does not become ready",
            }),
            Err(error) => Err(error),
        }
    }

    /// Sets queue `index` up with `size` descriptors, its three areas (descriptors, driver, device)
    /// and its interrupt, and enables it. The values may be invalid. Returns whether the device
    /// says that the queue is enabled.
    ///
    /// # Errors
    /// If the device has no interrupt vector for it.
    fn set_queue(&mut self, index: u16, size: u16, areas: [u64; 3]) -> Result<bool, Error>;

    /// Whether queue `index` is enabled.
    fn queue_enabled(&mut self, index: u16) -> bool;

    /// Starts the reset of queue `index` alone (2.6.1).
    fn reset_queue(&mut self, index: u16);

    /// Whether the reset of queue `index` is still going on.
    fn queue_resetting(&mut self, index: u16) -> bool;

    /// Writes the doorbell of queue `index`.
    fn notify(&mut self, index: u16);

    /// Acknowledges the interrupts received so far, if the transport requires that.
    fn acknowledge(&mut self);

    /// The generation of the configuration space, which changes with its content.
    fn generation(&mut self) -> u32;

    /// Masks or unmasks the interrupt vector of queue `index`. Returns `false` if the transport has
    /// no such vector.
    fn mask_queue(&mut self, index: u16, masked: bool) -> bool {
        let (_, _) = (index, masked);
        false
    }

    /// Whether an interrupt of queue `index` is pending until its vector is unmasked.
    fn queue_pending(&mut self, index: u16) -> bool {
        let _ = index;
        false
    }

    /// The registers that control the device, without its configuration space.
    fn control(&self) -> Registers;

    /// The device's configuration space.
    fn space(&self) -> Registers;

    /// Reads a byte of the configuration space.
    fn config8(&mut self, offset: u64) -> u8 {
        self.space().read8(offset)
    }

    /// Reads a 16-bit field of the configuration space.
    fn config16(&mut self, offset: u64) -> u16 {
        self.space().read16(offset)
    }

    /// Reads a 32-bit field of the configuration space.
    fn config32(&mut self, offset: u64) -> u32 {
        self.space().read32(offset)
    }

    /// Writes a byte of the configuration space.
    fn set_config8(&mut self, offset: u64, value: u8) {
        self.space().write8(offset, value);
    }

    /// Reads a 64-bit field of the configuration space as two halves, again if the configuration
    /// changed meanwhile (2.5.1).
    fn config64(&mut self, offset: u64) -> u64 {
        loop {
            let before = self.generation();
            let low = u64::from(self.config32(offset));
            let value = low | u64::from(self.config32(offset + 4)) << 32;
            if self.generation() == before {
                return value;
            }
        }
    }
}

/// The processor's interrupts.
pub trait Interrupts {
    /// Interrupts received so far.
    fn count(&self) -> u64;

    /// Sleeps until the processor has received more than `seen` interrupts; returns at once if it
    /// already has.
    fn wait(&self, seen: u64);

    /// Sends the edge interrupt of line `gsi` to this processor.
    fn connect_line(&mut self, gsi: u32);

    /// The address and the data of a message that interrupts this processor with source `number`.
    ///
    /// # Errors
    /// If there are fewer sources.
    fn message(&mut self, number: u16) -> Result<(u64, u32), Error>;
}
