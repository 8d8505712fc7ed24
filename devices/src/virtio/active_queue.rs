//! A queue that a worker serves: its rings, and the driver's side of it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use virtio_bindings::virtio_ring::VIRTIO_RING_F_EVENT_IDX;
use vm_memory::GuestMemory;

use super::device::QueueStart;
use super::driver_port::{DriverPort, give_up};
use super::features::Features;
use super::tracker::UsedElement;
use super::virtqueue::{QueueError, Virtqueue};
use crate::latency::add;
use crate::reactor::Turn;
use crate::status::DeviceStatus;

/// See the module's documentation. In each turn a worker [begins](Self::begin_taking) to take
/// chains, [ends](Self::end_taking) that, and [publishes](Self::publish) what it has used. If the
/// ring is empty then, it [waits](Self::wait) for the driver.
pub(crate) struct ActiveQueue {
    pub(crate) driver: DriverPort,
    pub(crate) ring: Virtqueue,
    /// Whether the ring was empty after the last chains were taken.
    emptied: bool,
    /// The number of chains taken so far, if the ring then reported another available chain.
    seen_available: Option<u16>,
}

impl ActiveQueue {
    /// Opens a queue of `device` that the driver has set up. `None` if its rings can't be used:
    /// the device then needs a reset.
    pub(crate) fn open<G: GuestMemory>(
        device: &'static str,
        queue: QueueStart,
        max_size: u16,
        features: Features,
        memory: &G,
        status: Arc<DeviceStatus>,
    ) -> Option<Self> {
        let event_idx = features.has(VIRTIO_RING_F_EVENT_IDX);
        let ring = Virtqueue::new(&queue.setup, max_size, event_idx, memory, queue.tracker);
        let ring = match ring {
            Ok(ring) => ring,
            Err(error) => {
                give_up(&status, device, queue.index, &error);
                return None;
            }
        };
        Some(Self {
            driver: DriverPort::new(device, queue.index, queue.doorbell, status),
            ring,
            emptied: true,
            seen_available: None,
        })
    }

    /// Turns doorbells off while chains are taken.
    ///
    /// # Errors
    /// If the rings can't be accessed.
    pub(crate) fn begin_taking<G: GuestMemory>(&mut self, memory: &G) -> Result<(), QueueError> {
        self.ring.disable_doorbell(memory)
    }

    /// `emptied`: the ring has no more chains.
    ///
    /// # Errors
    /// If it has reported one that can't be read. Without this check the worker would try again
    /// forever.
    pub(crate) fn end_taking(&mut self, emptied: bool) -> Result<(), QueueError> {
        self.emptied = emptied;
        match self.seen_available.take() {
            Some(before) if emptied && self.ring.chains_taken() == before => {
                Err(QueueError::Unreadable)
            }
            _ => Ok(()),
        }
    }

    /// Whether the ring was empty after the last chains were taken.
    pub(crate) fn is_emptied(&self) -> bool {
        self.emptied
    }

    /// Polls the ring for `longest`, with doorbells off; `true`: a chain is available. Adds the
    /// time to `spent` in nanoseconds.
    ///
    /// # Errors
    /// If the rings can't be accessed.
    pub(crate) fn poll<G: GuestMemory>(
        &mut self,
        memory: &G,
        turn: &Turn<'_>,
        longest: Duration,
        spent: &AtomicU64,
    ) -> Result<bool, QueueError> {
        if longest.is_zero() {
            return Ok(false);
        }
        let start = Instant::now();
        let found = loop {
            if self.ring.has_available(memory)? {
                break true;
            }
            if turn.is_stopping() || start.elapsed() >= longest {
                break false;
            }
            std::hint::spin_loop();
        };
        add(spent, start.elapsed().as_nanos() as u64);
        Ok(found)
    }

    /// Publishes used chains, and interrupts the driver if it wants that, unless the worker is
    /// `stopping`.
    ///
    /// # Errors
    /// If the rings can't be accessed.
    pub(crate) fn publish<G: GuestMemory>(
        &mut self,
        memory: &G,
        used: &[UsedElement],
        stopping: bool,
    ) -> Result<(), QueueError> {
        if self.ring.publish(memory, used)? && !stopping {
            self.driver.interrupt();
        }
        Ok(())
    }

    /// Turns doorbells on, unless a chain was `found` already. `true`: there is one to take.
    ///
    /// # Errors
    /// If the rings can't be accessed.
    pub(crate) fn wait<G: GuestMemory>(
        &mut self,
        memory: &G,
        found: bool,
    ) -> Result<bool, QueueError> {
        let available = found || self.ring.enable_doorbell(memory)?;
        self.seen_available = available.then(|| self.ring.chains_taken());
        Ok(available)
    }

    /// Gives up the queue: the driver has to reset the device.
    pub(crate) fn fail(&self, error: &dyn fmt::Display) {
        self.driver.fail(error);
    }
}

impl Drop for ActiveQueue {
    fn drop(&mut self) {
        self.driver.record_taken(self.ring.chains_taken());
    }
}
