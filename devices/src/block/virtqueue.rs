//! A split virtqueue whose used index is published once per batch.
//!
//! ```text
//!  avail ring ──▶ available() ──▶ chains ──▶ (requests run) ──▶ publish([used, used, …])
//!                                                                │ elements, then one index store,
//!                                                                ▼ then one look at used_event
//!                                                              interrupt or not
//! ```
//!
//! `virtio-queue` walks the rings and checks the driver's addresses and indices. The used half is done here, because
//! `add_used` of that crate stores the index after every element, and its `needs_notification` ignores
//! VRING_AVAIL_F_NO_INTERRUPT.

use std::collections::VecDeque;
use std::num::Wrapping;
use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{AvailIter, Queue, QueueOwnedT, QueueState, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemory, GuestMemoryError};

use super::chain::Chain;
use super::tracker::{Tracker, Used};

/// The driver's settings in the registers of one queue, not checked yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct QueueSetup {
    /// Number of descriptors.
    pub(crate) size: u16,
    /// Whether the driver has enabled the queue.
    pub(crate) ready: bool,
    /// Guest physical address of the descriptor table.
    pub(crate) descriptors: u64,
    /// Guest physical address of the driver area (available ring).
    pub(crate) driver: u64,
    /// Guest physical address of the device area (used ring).
    pub(crate) device: u64,
    /// `None`: a new ring, from which no chain was taken yet. Otherwise the ring was in use before, and this is the
    /// index of the next available chain; the used ring holds the used index.
    pub(crate) resume_at: Option<u16>,
}

/// Reasons why a queue cannot go on. The device needs a reset.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QueueError {
    #[error("the size or an address of the rings is not valid: {0}")]
    Setup(virtio_queue::Error),
    #[error("a ring lies outside guest memory")]
    OutsideMemory,
    #[error("the available ring is broken: {0}")]
    Available(virtio_queue::Error),
    #[error("the available ring cannot be read")]
    Unreadable,
    #[error("a ring cannot be accessed: {0}")]
    Memory(#[from] GuestMemoryError),
    #[error("descriptor chain {head}: {reason}")]
    Chain { head: u16, reason: &'static str },
}

/// A running split virtqueue.
pub(crate) struct Virtqueue {
    queue: Queue,
    tracker: Option<Tracker>,
    /// Heads of chains that were in flight when the device before this one died.
    left_over: VecDeque<u16>,
}

/// The available chains: first those in flight before a restart, in their order.
pub(crate) struct Available<'a, G> {
    memory: &'a G,
    table: GuestAddress,
    size: u16,
    ring: AvailIter<'a, &'a G>,
    tracker: Option<&'a mut Tracker>,
    left_over: &'a mut VecDeque<u16>,
}

impl<'a, G: GuestMemory> Iterator for Available<'a, G> {
    type Item = Chain<'a, G>;

    fn next(&mut self) -> Option<Self::Item> {
        let head = match self.left_over.pop_front() {
            Some(head) => head,
            None => {
                let head = self.ring.next()?.head_index();
                if let Some(tracker) = &mut self.tracker {
                    tracker.take(head);
                }
                head
            }
        };
        Some(Chain::new(self.memory, self.table, self.size, head))
    }
}

impl Virtqueue {
    /// Opens the queue after checking what the driver has set up.
    pub(crate) fn new<G: GuestMemory>(
        setup: &QueueSetup,
        max_size: u16,
        event_idx: bool,
        memory: &G,
        mut tracker: Option<Tracker>,
    ) -> Result<Self, QueueError> {
        let mut queue = Queue::try_from(QueueState {
            max_size,
            next_avail: setup.resume_at.unwrap_or(0),
            next_used: 0,
            event_idx_enabled: event_idx,
            size: setup.size,
            ready: setup.ready,
            desc_table: setup.descriptors,
            avail_ring: setup.driver,
            used_ring: setup.device,
        })
        .map_err(QueueError::Setup)?;
        if !queue.is_valid(memory) {
            return Err(QueueError::OutsideMemory);
        }
        let mut left_over = VecDeque::new();
        if setup.resume_at.is_some() {
            let index = GuestAddress(setup.device + 2);
            let used = u16::from_le(memory.load(index, Ordering::Acquire)?);
            queue.set_next_used(used);
            if let Some(heads) = tracker.as_mut().and_then(|tracker| tracker.resume(used)) {
                // A front-end whose device died resumes at the used index, so the chains in flight are added here.
                queue.set_next_avail(used.wrapping_add(heads.len() as u16));
                left_over = heads.into();
            }
        }
        Ok(Self {
            queue,
            tracker,
            left_over,
        })
    }

    /// Number of descriptors, the most chains a well-behaved driver can have in flight.
    pub(crate) fn size(&self) -> u16 {
        self.queue.size()
    }

    /// The chains that are available now. An index more than the queue size ahead is an error.
    pub(crate) fn available<'a, G: GuestMemory>(
        &'a mut self,
        memory: &'a G,
    ) -> Result<Available<'a, G>, QueueError> {
        let (table, size) = (GuestAddress(self.queue.desc_table()), self.queue.size());
        Ok(Available {
            memory,
            table,
            size,
            ring: self.queue.iter(memory).map_err(QueueError::Available)?,
            tracker: self.tracker.as_mut(),
            left_over: &mut self.left_over,
        })
    }

    /// Number of chains taken so far, modulo 2^16.
    pub(crate) fn taken(&self) -> u16 {
        self.queue.next_avail()
    }

    /// Whether there is a chain to be taken. Changes nothing.
    pub(crate) fn has_available<G: GuestMemory>(&self, memory: &G) -> Result<bool, QueueError> {
        let index = self
            .queue
            .avail_idx(memory, Ordering::Acquire)
            .map_err(QueueError::Available)?;
        Ok(index.0 != self.queue.next_avail())
    }

    /// Asks the driver not to ring the doorbell. With EVENT_IDX this does nothing, because the driver rings only once
    /// for each `avail_event`.
    pub(crate) fn disable_doorbell<G: GuestMemory>(
        &mut self,
        memory: &G,
    ) -> Result<(), QueueError> {
        self.queue
            .disable_notification(memory)
            .map_err(QueueError::Available)
    }

    /// Asks for a doorbell with the next chain. `true`: a chain came in the meantime, so look again.
    pub(crate) fn enable_doorbell<G: GuestMemory>(
        &mut self,
        memory: &G,
    ) -> Result<bool, QueueError> {
        self.queue
            .enable_notification(memory)
            .map_err(QueueError::Available)
    }

    /// Puts `batch` into the used ring, publishes it with one store of the index, and says whether the
    /// driver wants an interrupt for it (virtio 1.2, 2.7.7.2 and 2.7.10).
    pub(crate) fn publish<G: GuestMemory>(
        &mut self,
        memory: &G,
        batch: &[Used],
    ) -> Result<bool, QueueError> {
        if batch.is_empty() {
            return Ok(false);
        }
        let ring = self.queue.used_ring();
        let size = self.queue.size();
        let old = Wrapping(self.queue.next_used());
        let mut index = old;
        for used in batch {
            let mut element = [0; 8];
            element[..4].copy_from_slice(&u32::from(used.head).to_le_bytes());
            element[4..].copy_from_slice(&used.written.to_le_bytes());
            // `is_valid` has checked that the whole ring lies in guest memory, so this cannot wrap.
            let slot = u64::from(index.0 % size);
            memory.write_slice(&element, GuestAddress(ring + 4 + slot * 8))?;
            index += 1;
        }
        if let Some(tracker) = &mut self.tracker {
            tracker.link(batch);
        }
        // Release: a driver that sees the index sees the elements, and the data and status bytes before them.
        memory.store(index.0.to_le(), GuestAddress(ring + 2), Ordering::Release)?;
        self.queue.set_next_used(index.0);
        if let Some(tracker) = &mut self.tracker {
            tracker.forget(batch, index.0);
        }

        // The index must be visible before the driver's wish is read: the driver accesses them in the opposite order.
        fence(Ordering::SeqCst);
        let available = self.queue.avail_ring();
        if self.queue.event_idx_enabled() {
            let address = GuestAddress(available + 4 + u64::from(size) * 2);
            let used_event = Wrapping(u16::from_le(memory.load(address, Ordering::Relaxed)?));
            Ok(wants_event(used_event, index, old))
        } else {
            let flags = u16::from_le(memory.load(GuestAddress(available), Ordering::Relaxed)?);
            Ok(flags & VRING_AVAIL_F_NO_INTERRUPT as u16 == 0)
        }
    }
}

/// Whether an index that moved from `old` to `new` has passed `event` (virtio 1.2, 2.7.10.1: the event
/// comes with the entry at index `event`), all modulo 2^16.
fn wants_event(event: Wrapping<u16>, new: Wrapping<u16>, old: Wrapping<u16>) -> bool {
    new - event - Wrapping(1) < new - old
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_due_when_the_batch_passes_it() {
        let due = |event, new, old| wants_event(Wrapping(event), Wrapping(new), Wrapping(old));
        assert!(due(0, 1, 0));
        assert!(!due(1, 1, 0));
        assert!(due(3, 5, 1));
        assert!(!due(5, 5, 1));
        assert!(!due(0, 5, 1));
        // Around 2^16.
        assert!(due(0xffff, 0, 0xffff));
        assert!(due(1, 3, 0xfffe));
        assert!(!due(0xfffd, 3, 0xfffe));
    }
}
