//! A descriptor chain, walked from its head (virtio 1.2, 2.7.5).
//!
//! `virtio-queue` gives only chains of the available ring. A chain that was in flight when a device died has left that
//! ring already, and only its head is known.

use virtio_queue::desc::split::Descriptor;
use vm_memory::{Address, Bytes, GuestAddress, GuestMemory};

/// Length of a descriptor in bytes.
const DESCRIPTOR_LEN: u32 = 16;

/// The descriptors of a chain. The iterator ends early at an unreadable descriptor, a nested indirect table or a loop.
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
    pub(super) fn new(memory: &'a G, table: GuestAddress, entries: u16, head: u16) -> Self {
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
