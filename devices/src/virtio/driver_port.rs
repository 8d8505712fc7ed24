//! The driver's side of a queue that is being served: its doorbell, its interrupt, and how it
//! ended.

use std::fmt;
use std::io::{self, IoSliceMut};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};

use rustix::io::{Errno, ReadWriteFlags};
use vmm_sys_util::eventfd::EventFd;

use crate::backend::descriptor;
use crate::event_loop::EventSet;
use crate::reactor::Turn;
use crate::status::DeviceStatus;

/// What the owner of a queue learns about it.
#[derive(Default)]
pub(crate) struct QueueOutcome {
    /// After an error: requests in flight still complete, but none are taken or answered any more.
    broken: AtomicBool,
    /// Number of chains taken, modulo 2^16, once the queue is gone.
    taken: AtomicU16,
}

impl QueueOutcome {
    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::SeqCst)
    }

    /// Number of chains taken, modulo 2^16, once the queue is gone.
    pub(crate) fn chains_taken(&self) -> u16 {
        self.taken.load(Ordering::SeqCst)
    }
}

/// The driver's side of a queue.
pub(crate) struct DriverPort {
    /// The kind of device, for messages: `virtio-blk`.
    device: &'static str,
    index: u16,
    doorbell: EventFd,
    status: Arc<DeviceStatus>,
    outcome: Arc<QueueOutcome>,
}

impl DriverPort {
    pub(crate) fn new(
        device: &'static str,
        index: u16,
        doorbell: EventFd,
        status: Arc<DeviceStatus>,
    ) -> Self {
        Self {
            device,
            index,
            doorbell,
            status,
            outcome: Arc::default(),
        }
    }

    /// The queue's index, from 0.
    pub(crate) fn index(&self) -> u16 {
        self.index
    }

    pub(crate) fn outcome(&self) -> Arc<QueueOutcome> {
        Arc::clone(&self.outcome)
    }

    /// Watches the doorbell, for the event `event`.
    pub(crate) fn watch(&self, turn: &mut Turn<'_>, event: usize) -> io::Result<()> {
        // Edge-triggered: every ring of the doorbell is reported once, even if another owner of the
        // descriptor clears its counter first.
        let edges = EventSet::IN | EventSet::EDGE_TRIGGERED;
        turn.watch(descriptor(&self.doorbell), event, edges)
    }

    /// How often the doorbell has rung since the last call.
    pub(crate) fn take_rings(&self) -> u64 {
        read_counter(descriptor(&self.doorbell))
    }

    /// Sends the driver a used buffer notification.
    pub(crate) fn interrupt(&self) {
        self.status.interrupt().queue(self.index);
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.outcome.is_broken()
    }

    /// Gives up the queue: the driver has to reset the device.
    pub(crate) fn fail(&self, error: &dyn fmt::Display) {
        give_up(&self.status, self.device, self.index, error);
        self.outcome.broken.store(true, Ordering::SeqCst);
    }

    /// The queue is gone. `taken`: the chains taken, modulo 2^16.
    pub(crate) fn record_taken(&self, taken: u16) {
        self.outcome.taken.store(taken, Ordering::SeqCst);
    }
}

/// Gives up a broken queue: DEVICE_NEEDS_RESET and a configuration change interrupt (virtio 1.2,
/// 2.1.2).
pub(crate) fn give_up(
    status: &DeviceStatus,
    device: &'static str,
    queue: u16,
    error: &dyn fmt::Display,
) {
    status.warn(format_args!(
        "{device} queue {queue}: {error}; the driver has to reset the device"
    ));
    status.set_needs_reset();
}

/// Reads and clears the counter of an eventfd. Never waits, although another owner of the
/// descriptor may have read the counter first, or have made the descriptor blocking.
fn read_counter(doorbell: BorrowedFd<'_>) -> u64 {
    let mut count = [0; 8];
    let mut buffer = [IoSliceMut::new(&mut count)];
    // Offset -1 means the current position.
    let current = u64::MAX;
    match rustix::io::preadv2(doorbell, &mut buffer, current, ReadWriteFlags::NOWAIT) {
        Ok(_) => u64::from_ne_bytes(count),
        Err(Errno::AGAIN) => 0,
        // NOWAIT fails on an eventfd before Linux 5.8: count one ring.
        Err(_) => 1,
    }
}
