//! How a device interrupts its driver, over either transport.
//!
//! ```text
//!  queue worker ─┐                 ┌─ MMIO: InterruptStatus bit + edge interrupt (EdgeLine)
//!                ├─▶ Interrupt ────┤
//!  device state ─┘                 └─ PCI: MSI-X vector of the queue ─▶ MsiRouter (the VMM)
//! ```
//!
//! A line that calls the hypervisor instead of signalling an eventfd:
//!
//! ```
//! use std::io;
//! use std::sync::atomic::{AtomicU32, Ordering};
//! use walvisor_devices::interrupt::EdgeLine;
//!
//! /// Counts edges, in place of a hypervisor.
//! struct Line(AtomicU32);
//!
//! impl EdgeLine for Line {
//!     fn pulse(&self) -> io::Result<()> {
//!         self.0.fetch_add(1, Ordering::Relaxed);
//!         Ok(())
//!     }
//! }
//!
//! let line = Line(AtomicU32::new(0));
//! line.pulse()?;
//! assert_eq!(line.0.into_inner(), 1);
//! # io::Result::Ok(())
//! ```

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use vmm_sys_util::eventfd::EventFd;

use crate::metrics::InterruptCounter;

/// The two notifications that a device sends (virtio 1.2, 2.3).
///
/// Queue workers and vCPU threads may call it at the same time. An implementation must not wait for
/// either of them, in particular not for a lock that is held while the transport's registers are
/// accessed.
pub trait Interrupt: Send + Sync {
    /// Used buffer notification of `queue`.
    fn queue(&self, queue: u16);

    /// Configuration change notification. Also announces DEVICE_NEEDS_RESET.
    fn config(&self);

    /// Clears pending notifications and the driver's settings: the device is being reset.
    fn reset(&self);
}

/// One message-signalled interrupt as a PCI function sends it: a write of `data` to `address`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsiMessage {
    /// Message address, both halves of the MSI-X table entry.
    pub address: u64,
    /// Message data.
    pub data: u32,
}

/// The VMM's side of MSI-X: one GSI and one irqfd per vector.
///
/// Called with the function's MSI-X state locked, from vCPU threads and from queue workers, so an
/// implementation must not take a lock that is held during an access to the function.
pub trait MsiRouter: Send + Sync {
    /// Routes `vector` to `message`. Called when the vector becomes unmasked, before its first
    /// [`trigger`](Self::trigger) and whenever the driver has changed its entry.
    ///
    /// # Errors
    /// If the hypervisor refuses the route. The vector then sends nothing until a route is set.
    fn set_route(&self, vector: u16, message: MsiMessage) -> io::Result<()>;

    /// Raises `vector`. Called only while the vector is unmasked and routed; this crate keeps masks
    /// and pending bits.
    ///
    /// # Errors
    /// If the interrupt cannot be delivered.
    fn trigger(&self, vector: u16) -> io::Result<()>;
}

/// An edge-triggered interrupt line: an eventfd that the hypervisor listens to, or a call of the
/// hypervisor.
///
/// Called from queue workers and vCPU threads at the same time.
pub trait EdgeLine: Send + Sync {
    /// Raises the line, and lowers it again.
    ///
    /// # Errors
    /// If the interrupt cannot be delivered.
    fn pulse(&self) -> io::Result<()>;
}

impl EdgeLine for EventFd {
    fn pulse(&self) -> io::Result<()> {
        self.write(1)
    }
}

/// The descriptor is an eventfd.
impl EdgeLine for OwnedFd {
    fn pulse(&self) -> io::Result<()> {
        rustix::io::write(self, &1_u64.to_ne_bytes())?;
        Ok(())
    }
}

/// Used buffer notification bit of InterruptStatus (virtio 1.2, 4.2.2) and of the ISR status
/// (4.1.4.5).
pub(crate) const INTERRUPT_QUEUE: u32 = 1;
/// Configuration change bit of InterruptStatus and of the ISR status.
pub(crate) const INTERRUPT_CONFIG: u32 = 2;

/// The single interrupt line of virtio-mmio: bits in InterruptStatus and an edge.
pub(crate) struct LineInterrupt {
    status: AtomicU32,
    line: Box<dyn EdgeLine>,
    counter: Arc<dyn InterruptCounter>,
}

impl LineInterrupt {
    pub(crate) fn new(line: impl EdgeLine + 'static, counter: Arc<dyn InterruptCounter>) -> Self {
        Self {
            status: AtomicU32::new(0),
            line: Box::new(line),
            counter,
        }
    }

    /// Reads InterruptStatus.
    pub(crate) fn status(&self) -> u32 {
        self.status.load(Ordering::SeqCst)
    }

    /// Writes InterruptACK: clears the bits given (virtio 1.2, 4.2.2).
    pub(crate) fn acknowledge(&self, bits: u32) {
        self.status.fetch_and(!bits, Ordering::SeqCst);
    }

    /// Sends an edge for every notification, even if its bit was already set: a driver that has
    /// read InterruptStatus but not acknowledged it yet would not look again.
    fn raise(&self, bit: u32) {
        self.status.fetch_or(bit, Ordering::SeqCst);
        match self.line.pulse() {
            Ok(()) => self.counter.count_interrupt(),
            Err(error) => {
                tracing::error!(%error, "cannot raise the interrupt line of a virtio-mmio device")
            }
        }
    }
}

impl Interrupt for LineInterrupt {
    fn queue(&self, _queue: u16) {
        self.raise(INTERRUPT_QUEUE);
    }

    fn config(&self) {
        self.raise(INTERRUPT_CONFIG);
    }

    fn reset(&self) {
        self.status.store(0, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};

    use super::*;
    use crate::metrics::BlockMetrics;

    #[test]
    fn any_kind_of_eventfd_is_a_line() {
        let line = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let other = EventFd::new(0).unwrap();
        let metrics = Arc::new(BlockMetrics::of_queues(1));
        for interrupt in [
            LineInterrupt::new(line.try_clone().unwrap(), metrics.clone()),
            LineInterrupt::new(other.try_clone().unwrap(), metrics.clone()),
        ] {
            interrupt.queue(0);
            interrupt.config();
        }
        let mut count = [0; 8];
        rustix::io::read(&line, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 2);
        assert_eq!(other.read().unwrap(), 2);
        assert_eq!(metrics.counts().interrupts, 4);
    }
}
