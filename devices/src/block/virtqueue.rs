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
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{AvailIter, Queue, QueueOwnedT, QueueState, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemory, GuestMemoryError};

use super::tracker::{Tracker, Used};

/// Length of a descriptor in bytes.
const DESCRIPTOR_LEN: u32 = 16;

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

/// The descriptors of a chain, walked from its head (virtio 1.2, 2.7.5). `virtio-queue` gives only chains of the
/// available ring. A chain that was in flight when a device died has left that ring already, and only its head is known.
///
/// The iterator ends early at an unreadable descriptor, a nested indirect table or a loop.
pub(crate) struct Chain<'a, G> {
    memory: &'a G,
    head: u16,
    table: GuestAddress,
    /// Descriptors in the table.
    entries: u16,
    next: u16,
    /// Descriptors that may still follow.
    left: u16,
    indirect: bool,
    bytes: u32,
}

impl<'a, G: GuestMemory> Chain<'a, G> {
    /// The chain that begins at `head` of a table of `entries` descriptors.
    fn new(memory: &'a G, table: GuestAddress, entries: u16, head: u16) -> Self {
        Self {
            memory,
            head,
            table,
            entries,
            next: head,
            left: entries,
            indirect: false,
            bytes: 0,
        }
    }

    /// Index of the first descriptor in the queue's table.
    pub(super) fn head(&self) -> u16 {
        self.head
    }

    /// Goes on in the table that `descriptor` refers to (2.7.5.3).
    fn enter(&mut self, descriptor: Descriptor) -> Option<()> {
        if self.indirect || !descriptor.len().is_multiple_of(DESCRIPTOR_LEN) {
            return None;
        }
        self.table = descriptor.addr();
        self.entries = u16::try_from(descriptor.len() / DESCRIPTOR_LEN).ok()?;
        (self.next, self.left, self.indirect) = (0, self.entries, true);
        Some(())
    }
}

impl<G: GuestMemory> Iterator for Chain<'_, G> {
    type Item = Descriptor;

    fn next(&mut self) -> Option<Descriptor> {
        let descriptor = loop {
            if self.left == 0 || self.next >= self.entries {
                return None;
            }
            let offset = u64::from(self.next) * u64::from(DESCRIPTOR_LEN);
            let address = self.table.checked_add(offset)?;
            let descriptor: Descriptor = self.memory.read_obj(address).ok()?;
            if !descriptor.refers_to_indirect_table() {
                break descriptor;
            }
            self.enter(descriptor)?;
        };
        // 2.7.5.2: at most 2^32 bytes.
        self.bytes = self.bytes.checked_add(descriptor.len())?;
        self.left = match descriptor.has_next() {
            true => self.left - 1,
            false => 0,
        };
        self.next = descriptor.next();
        Some(descriptor)
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

/// The ended chains that are published next: all of them, or with IN_ORDER only those whose predecessors have all ended
/// (virtio 1.2, 6: "a device MUST use buffers in the same order in which they have been available"). Kept between
/// batches for its memory.
pub(super) struct UsedBatch {
    used: Vec<Used>,
    /// Chains in the order in which they were taken, each with its answer once it has ended. `None`: any order will do.
    order: Option<VecDeque<(u16, Option<Used>)>>,
}

impl UsedBatch {
    pub(super) fn new(in_order: bool) -> Self {
        Self {
            used: Vec::new(),
            order: in_order.then(VecDeque::new),
        }
    }

    /// Whether no more chains may be taken, because too many wait for one before them: as many as the queue has
    /// descriptors, more than a driver may have in flight.
    pub(super) fn is_full(&self, size: u16) -> bool {
        self.order
            .as_ref()
            .is_some_and(|order| order.len() >= usize::from(size))
    }

    /// The chain that begins at `head` has been taken.
    pub(super) fn taken(&mut self, head: u16) {
        if let Some(order) = &mut self.order {
            order.push_back((head, None));
        }
    }

    /// A chain has been answered. A driver that offers one head twice gets the answers in the order of their ends.
    pub(super) fn push(&mut self, used: Used) {
        let Some(order) = &mut self.order else {
            self.used.push(used);
            return;
        };
        let waiting = order
            .iter_mut()
            .find(|(head, end)| *head == used.head && end.is_none());
        if let Some((_, end)) = waiting {
            *end = Some(used);
        }
        while let Some(&(_, Some(used))) = order.front() {
            self.used.push(used);
            order.pop_front();
        }
    }

    /// The chains that can be published.
    pub(super) fn ready(&self) -> &[Used] {
        &self.used
    }

    /// Removes the ready chains: they have been published, or never will be.
    pub(super) fn clear(&mut self) {
        self.used.clear();
    }
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

    fn used(head: u16) -> Used {
        Used { head, written: 1 }
    }

    fn heads(batch: &mut UsedBatch) -> Vec<u16> {
        let heads = batch.ready().iter().map(|used| used.head).collect();
        batch.clear();
        heads
    }

    #[test]
    fn in_any_order_everything_is_ready() {
        let mut batch = UsedBatch::new(false);
        [3, 1, 2].into_iter().for_each(|head| batch.taken(head));
        batch.push(used(2));
        batch.push(used(3));
        assert_eq!(heads(&mut batch), [2, 3]);
        assert!(heads(&mut batch).is_empty() && !batch.is_full(1));
    }

    #[test]
    fn in_order_a_chain_waits_for_those_before_it() {
        let mut batch = UsedBatch::new(true);
        [3, 1, 2, 1].into_iter().for_each(|head| batch.taken(head));
        assert!(batch.is_full(4) && !batch.is_full(5));
        batch.push(used(2));
        batch.push(used(1));
        assert!(heads(&mut batch).is_empty());
        batch.push(used(3));
        assert_eq!(heads(&mut batch), [3, 1, 2]);
        batch.push(used(1));
        assert_eq!(heads(&mut batch), [1]);
        assert!(!batch.is_full(1));
    }
}
