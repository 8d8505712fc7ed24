//! A split virtqueue whose used index is published once per batch.
//!
//! ```text
//!  avail ring ──▶ available() ──▶ chains ──▶ (requests run) ──▶ publish([used, used, …])
//!                                                                │ elements, then one store of the index,
//!                                                                ▼ then one load of used_event
//!                                                              interrupt or not
//! ```
//!
//! `virtio-queue` walks the rings and checks the driver's addresses and indices. The used ring is
//! handled here, because that crate's `add_used` stores the index after every element, and its
//! `needs_notification` ignores VRING_AVAIL_F_NO_INTERRUPT.

use std::collections::VecDeque;
use std::num::Wrapping;
use std::sync::atomic::{Ordering, fence};

use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{AvailIter, Queue, QueueOwnedT, QueueState, QueueT};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemory, GuestMemoryError};

use super::tracker::{Tracker, UsedElement};

/// Length of a descriptor in bytes.
const DESCRIPTOR_LEN: u32 = 16;

/// What the driver has written to the registers of a queue, not yet checked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueSetup {
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
    /// `None`: a new ring, from which no chain was taken yet. Otherwise the ring was in use before;
    /// this is the index of its next available chain, and the used index is in the used ring.
    pub(crate) resume_at: Option<u16>,
}

/// Why a queue cannot go on. The device then needs a reset.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QueueError {
    #[error("the size or an address of the rings is not valid: {0}")]
    Setup(virtio_queue::Error),
    #[error("a ring lies outside guest memory")]
    OutsideMemory,
    #[error("the available ring is broken: {0}")]
    AvailableChains(virtio_queue::Error),
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
    /// Heads of chains that were in flight when the previous back-end died.
    resumed: VecDeque<u16>,
}

/// The available chains. Those that were in flight before a restart come first, in their order.
pub(crate) struct AvailableChains<'a, G> {
    memory: &'a G,
    table: GuestAddress,
    size: u16,
    ring: AvailIter<'a, &'a G>,
    tracker: Option<&'a mut Tracker>,
    resumed: &'a mut VecDeque<u16>,
}

/// The next available chain.
pub(crate) enum NextChain<'a, G> {
    Chain(Chain<'a, G>),
    /// It stays in the ring.
    Refused,
    /// There is none.
    None,
}

impl<'a, G: GuestMemory> AvailableChains<'a, G> {
    /// The next chain, if `admit` takes it. `admit` gets the sum of its descriptors' lengths.
    pub(crate) fn next_if(&mut self, admit: impl FnOnce(u64) -> bool) -> NextChain<'a, G> {
        let resumed = self.resumed.pop_front();
        let head = resumed.or_else(|| Some(self.ring.next()?.head_index()));
        let Some(head) = head else {
            return NextChain::None;
        };
        let chain = || Chain::new(self.memory, self.table, self.size, head);
        if !admit(chain().map(|descriptor| u64::from(descriptor.len())).sum()) {
            match resumed {
                Some(head) => self.resumed.push_front(head),
                None => self.ring.go_to_previous_position(),
            }
            return NextChain::Refused;
        }
        if resumed.is_none()
            && let Some(tracker) = &mut self.tracker
        {
            tracker.mark(head);
        }
        NextChain::Chain(chain())
    }
}

impl<'a, G: GuestMemory> Iterator for AvailableChains<'a, G> {
    type Item = Chain<'a, G>;

    fn next(&mut self) -> Option<Chain<'a, G>> {
        match self.next_if(|_| true) {
            NextChain::Chain(chain) => Some(chain),
            NextChain::Refused | NextChain::None => None,
        }
    }
}

/// Iterates over the descriptors of a chain from its head (virtio 1.2, 2.7.5). `virtio-queue` can
/// walk only chains of the available ring, but a chain that was in flight when a back-end died is
/// no longer there, and only its head is known.
///
/// The iterator ends early at an unreadable descriptor, a nested indirect table or a loop.
pub(crate) struct Chain<'a, G> {
    memory: &'a G,
    head: u16,
    table: GuestAddress,
    /// Number of descriptors in the table.
    entries: u16,
    next: u16,
    /// The most descriptors that may still follow.
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
    pub(crate) fn head(&self) -> u16 {
        self.head
    }

    /// Continues in the indirect table that `descriptor` refers to (2.7.5.3).
    fn enter_table(&mut self, descriptor: Descriptor) -> Option<()> {
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
            self.enter_table(descriptor)?;
        };
        // 2.7.5.2: at most 2^32 bytes.
        self.bytes = self.bytes.checked_add(descriptor.len())?;
        self.left = if descriptor.has_next() {
            self.left - 1
        } else {
            0
        };
        self.next = descriptor.next();
        Some(descriptor)
    }
}

impl Virtqueue {
    /// Checks what the driver has set up, and opens the queue.
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
        let mut resumed = VecDeque::new();
        if setup.resume_at.is_some() {
            let index = GuestAddress(setup.device + 2);
            let used = u16::from_le(memory.load(index, Ordering::Acquire)?);
            queue.set_next_used(used);
            if let Some(heads) = tracker.as_mut().and_then(|tracker| tracker.resume(used)) {
                // A front-end whose back-end died resumes at the used index, so the chains in
                // flight are added here.
                queue.set_next_avail(used.wrapping_add(heads.len() as u16));
                resumed = heads.into();
            }
        }
        Ok(Self {
            queue,
            tracker,
            resumed,
        })
    }

    /// Number of descriptors: the most chains that a well-behaved driver has in flight.
    pub(crate) fn size(&self) -> u16 {
        self.queue.size()
    }

    /// The chains that are available now. An available index that is ahead by more than the queue
    /// size is an error.
    pub(crate) fn available<'a, G: GuestMemory>(
        &'a mut self,
        memory: &'a G,
    ) -> Result<AvailableChains<'a, G>, QueueError> {
        let (table, size) = (GuestAddress(self.queue.desc_table()), self.queue.size());
        Ok(AvailableChains {
            memory,
            table,
            size,
            ring: self
                .queue
                .iter(memory)
                .map_err(QueueError::AvailableChains)?,
            tracker: self.tracker.as_mut(),
            resumed: &mut self.resumed,
        })
    }

    /// Number of chains taken so far, modulo 2^16.
    pub(crate) fn chains_taken(&self) -> u16 {
        self.queue.next_avail()
    }

    /// Whether a chain is available. Takes nothing.
    pub(crate) fn has_available<G: GuestMemory>(&self, memory: &G) -> Result<bool, QueueError> {
        let index = self
            .queue
            .avail_idx(memory, Ordering::Acquire)
            .map_err(QueueError::AvailableChains)?;
        Ok(index.0 != self.queue.next_avail())
    }

    /// How many chains are available and not taken.
    #[cfg(feature = "scsi")]
    pub(crate) fn untaken<G: GuestMemory>(&self, memory: &G) -> Result<u64, QueueError> {
        let index = self
            .queue
            .avail_idx(memory, Ordering::Acquire)
            .map_err(QueueError::AvailableChains)?;
        let in_ring = (index - Wrapping(self.queue.next_avail())).0;
        Ok(self.resumed.len() as u64 + u64::from(in_ring))
    }

    /// Asks the driver not to ring the doorbell. Does nothing with EVENT_IDX, where the driver
    /// rings only once per `avail_event`.
    pub(crate) fn disable_doorbell<G: GuestMemory>(
        &mut self,
        memory: &G,
    ) -> Result<(), QueueError> {
        self.queue
            .disable_notification(memory)
            .map_err(QueueError::AvailableChains)
    }

    /// Asks for a doorbell with the next chain. `true`: a chain has already arrived, so look again.
    pub(crate) fn enable_doorbell<G: GuestMemory>(
        &mut self,
        memory: &G,
    ) -> Result<bool, QueueError> {
        self.queue
            .enable_notification(memory)
            .map_err(QueueError::AvailableChains)
    }

    /// Puts `batch` into the used ring, publishes it with one store of the index, and says whether
    /// the driver wants an interrupt for it (virtio 1.2, 2.7.7.2 and 2.7.10).
    pub(crate) fn publish<G: GuestMemory>(
        &mut self,
        memory: &G,
        batch: &[UsedElement],
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
            // Cannot wrap: `is_valid` has checked that the whole ring lies in guest memory.
            let slot = u64::from(index.0 % size);
            memory.write_slice(&element, GuestAddress(ring + 4 + slot * 8))?;
            index += 1;
        }
        if let Some(tracker) = &mut self.tracker {
            tracker.link(batch);
        }
        // Release: a driver that sees the index also sees the elements, and the data and status
        // bytes before them.
        memory.store(index.0.to_le(), GuestAddress(ring + 2), Ordering::Release)?;
        self.queue.set_next_used(index.0);
        if let Some(tracker) = &mut self.tracker {
            tracker.clear(batch, index.0);
        }

        // The index must be visible before the driver's notification setting is read; the driver
        // accesses the two in the opposite order.
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

/// Whether an index that moved from `old` to `new` has passed `event`, all modulo 2^16 (virtio 1.2,
/// 2.7.10.1: the entry at index `event` triggers the event).
fn wants_event(event: Wrapping<u16>, new: Wrapping<u16>, old: Wrapping<u16>) -> bool {
    new - event - Wrapping(1) < new - old
}

/// The chains to publish next: all answered ones, or with IN_ORDER only those whose predecessors
/// are all answered (virtio 1.2, 6: "a device MUST use buffers in the same order in which they have
/// been available"). Kept between batches for its allocation.
pub(crate) struct UsedBatch {
    used: Vec<UsedElement>,
    /// The chains in the order in which they were taken, each with its answer once there is one.
    /// `None`: any order will do.
    order: Option<VecDeque<(u16, Option<UsedElement>)>>,
}

impl UsedBatch {
    pub(crate) fn new(in_order: bool) -> Self {
        Self {
            used: Vec::new(),
            order: in_order.then(VecDeque::new),
        }
    }

    /// Whether no more chains may be taken: as many as the queue has descriptors are taken and not
    /// published yet, which is all that a driver may have in flight.
    pub(crate) fn is_full(&self, size: u16) -> bool {
        self.order
            .as_ref()
            .is_some_and(|order| order.len() >= usize::from(size))
    }

    /// Records that the chain at `head` was taken.
    pub(crate) fn record_taken(&mut self, head: u16) {
        if let Some(order) = &mut self.order {
            order.push_back((head, None));
        }
    }

    /// Adds an answered chain. If a driver makes one head available twice, its answers are in the
    /// order of completion.
    pub(crate) fn push(&mut self, used: UsedElement) {
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

    /// The chains that can be published now.
    pub(crate) fn ready_elements(&self) -> &[UsedElement] {
        &self.used
    }

    /// Removes the ready chains, which were published or never will be.
    pub(crate) fn clear(&mut self) {
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

    fn used_element(head: u16) -> UsedElement {
        UsedElement { head, written: 1 }
    }

    fn heads(batch: &mut UsedBatch) -> Vec<u16> {
        let heads = batch
            .ready_elements()
            .iter()
            .map(|used| used.head)
            .collect();
        batch.clear();
        heads
    }

    #[test]
    fn in_any_order_every_answer_is_ready() {
        let mut batch = UsedBatch::new(false);
        [3, 1, 2]
            .into_iter()
            .for_each(|head| batch.record_taken(head));
        batch.push(used_element(2));
        batch.push(used_element(3));
        assert_eq!(heads(&mut batch), [2, 3]);
        assert!(heads(&mut batch).is_empty() && !batch.is_full(1));
    }

    #[test]
    fn in_order_a_chain_waits_for_those_before_it() {
        let mut batch = UsedBatch::new(true);
        [3, 1, 2, 1]
            .into_iter()
            .for_each(|head| batch.record_taken(head));
        assert!(batch.is_full(4) && !batch.is_full(5));
        batch.push(used_element(2));
        batch.push(used_element(1));
        assert!(heads(&mut batch).is_empty());
        batch.push(used_element(3));
        assert_eq!(heads(&mut batch), [3, 1, 2]);
        batch.push(used_element(1));
        assert_eq!(heads(&mut batch), [1]);
        assert!(!batch.is_full(1));
    }
}
