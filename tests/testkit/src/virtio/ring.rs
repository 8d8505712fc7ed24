//! The driver's half of a split virtqueue (virtio 1.2, 2.7).

use std::sync::atomic::{Ordering, fence};

use vm_memory::{Bytes, GuestAddress};

use super::Memory;

/// The chain goes on at the descriptor's `next` field.
const NEXT: u16 = 1;
/// The device writes the buffer.
const WRITE: u16 = 2;
/// The buffer is a table of descriptors.
const INDIRECT_TABLE: u16 = 4;

/// One descriptor's buffer.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// Where it is.
    pub address: GuestAddress,
    /// Its length in bytes.
    pub len: u32,
    /// Whether the device writes it, or reads it.
    pub writable: bool,
}

impl Piece {
    /// A buffer that the device reads.
    #[must_use]
    pub fn readable(address: GuestAddress, len: u32) -> Self {
        Self {
            address,
            len,
            writable: false,
        }
    }

    /// A buffer that the device writes.
    #[must_use]
    pub fn writable(address: GuestAddress, len: u32) -> Self {
        Self {
            address,
            len,
            writable: true,
        }
    }
}

/// Descriptor table, available ring and used ring, in that order.
pub struct Ring {
    memory: Memory,
    /// Number of descriptors.
    pub size: u16,
    descriptors: u64,
    available: u64,
    used: u64,
    event_idx: bool,
    free: Vec<u16>,
    /// Descriptors of the chain that starts at each head.
    chains: Vec<Vec<u16>>,
    next_available: u16,
    published: u16,
    last_used: u16,
}

impl Ring {
    /// Bytes that a ring of `size` descriptors takes.
    pub fn bytes(size: u16) -> usize {
        let size = usize::from(size);
        size * 16 + (size * 2 + 6).next_multiple_of(4) + size * 8 + 6
    }

    /// An empty ring at `at`.
    #[must_use]
    pub fn new(memory: Memory, size: u16, at: GuestAddress, event_idx: bool) -> Self {
        let n = u64::from(size);
        let available = at.0 + n * 16;
        Self {
            memory,
            size,
            descriptors: at.0,
            available,
            used: available + (n * 2 + 6).next_multiple_of(4),
            event_idx,
            free: (0..size).rev().collect(),
            chains: vec![Vec::new(); usize::from(size)],
            next_available: 0,
            published: 0,
            last_used: 0,
        }
    }

    /// Descriptor table, driver area, device area.
    pub fn addresses(&self) -> [u64; 3] {
        [self.descriptors, self.available, self.used]
    }

    /// Number of descriptors that no chain uses.
    pub fn free_descriptors(&self) -> usize {
        self.free.len()
    }

    /// Makes a chain and puts it into the available ring, not published yet.
    pub fn add(&mut self, pieces: &[Piece]) -> u16 {
        let chain: Vec<u16> = pieces
            .iter()
            .map(|_| self.free.pop().expect("a free descriptor"))
            .collect();
        self.fill(self.descriptors, &chain, pieces);
        let head = chain[0];
        self.chains[usize::from(head)] = chain;
        self.offer(head);
        head
    }

    /// The same, with one descriptor that refers to an indirect table of the pieces at `table`.
    pub fn add_indirect(&mut self, pieces: &[Piece], table: GuestAddress) -> u16 {
        let indices: Vec<u16> = (0..pieces.len() as u16).collect();
        self.fill(table.0, &indices, pieces);
        let head = self.free.pop().expect("a free descriptor");
        let len = pieces.len() as u32 * 16;
        self.describe(self.descriptors, head, (table, len), INDIRECT_TABLE, 0);
        self.chains[usize::from(head)] = vec![head];
        self.offer(head);
        head
    }

    fn fill(&self, table: u64, chain: &[u16], pieces: &[Piece]) {
        for (position, (&index, piece)) in chain.iter().zip(pieces).enumerate() {
            let write = if piece.writable { WRITE } else { 0 };
            let (next, link) = match chain.get(position + 1) {
                Some(&next) => (next, NEXT),
                None => (0, 0),
            };
            let place = (piece.address, piece.len);
            self.describe(table, index, place, write | link, next);
        }
    }

    /// Writes a descriptor of any table. `place`: its address and its length.
    fn describe(&self, table: u64, index: u16, place: (GuestAddress, u32), flags: u16, next: u16) {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&place.0.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&place.1.to_le_bytes());
        bytes[12..14].copy_from_slice(&flags.to_le_bytes());
        bytes[14..].copy_from_slice(&next.to_le_bytes());
        let at = GuestAddress(table + u64::from(index) * 16);
        self.memory.write_slice(&bytes, at).expect("descriptor");
    }

    /// Puts a head, valid or not, into the available ring.
    pub fn offer(&mut self, head: u16) {
        let slot = u64::from(self.next_available % self.size);
        let at = GuestAddress(self.available + 4 + slot * 2);
        self.memory
            .write_obj(head.to_le(), at)
            .expect("available ring");
        self.next_available = self.next_available.wrapping_add(1);
    }

    /// Publishes the chains added. `true`: the device wants a doorbell (2.7.10).
    pub fn publish(&mut self) -> bool {
        let old = std::mem::replace(&mut self.published, self.next_available);
        self.store_index(self.next_available);
        fence(Ordering::SeqCst);
        if self.event_idx {
            let event = self.avail_event();
            let passed = self.next_available.wrapping_sub(event).wrapping_sub(1);
            passed < self.next_available.wrapping_sub(old)
        } else {
            self.load(self.used) & 1 == 0
        }
    }

    /// Stores an available index, correct or not.
    pub fn store_index(&self, index: u16) {
        let at = GuestAddress(self.available + 2);
        self.memory
            .store(index.to_le(), at, Ordering::Release)
            .expect("available index");
    }

    /// The available index, counting chains that are not published yet.
    pub fn available_index(&self) -> u16 {
        self.next_available
    }

    /// The used ring's flags.
    pub fn used_flags(&self) -> u16 {
        self.load(self.used)
    }

    /// The index at which the device wants the next doorbell.
    pub fn avail_event(&self) -> u16 {
        self.load(self.used + 4 + u64::from(self.size) * 8)
    }

    /// Writes `avail_event`, which only the device should write.
    pub fn set_avail_event(&self, index: u16) {
        let at = GuestAddress(self.used + 4 + u64::from(self.size) * 8);
        self.memory
            .store(index.to_le(), at, Ordering::SeqCst)
            .expect("avail_event");
    }

    /// With EVENT_IDX: the used index at which the driver wants the next interrupt.
    pub fn set_used_event(&self, index: u16) {
        let at = GuestAddress(self.available + 4 + u64::from(self.size) * 2);
        self.memory
            .store(index.to_le(), at, Ordering::SeqCst)
            .expect("used_event");
    }

    /// Without EVENT_IDX: whether the driver wants interrupts.
    pub fn set_no_interrupt(&self, none: bool) {
        let at = GuestAddress(self.available);
        self.memory
            .store(u16::from(none).to_le(), at, Ordering::SeqCst)
            .expect("flags");
    }

    /// The used index, which the device writes.
    pub fn used_index(&self) -> u16 {
        self.load(self.used + 2)
    }

    /// The used index up to which chains have been taken.
    pub fn last_used(&self) -> u16 {
        self.last_used
    }

    /// Takes the next used chain, if there is one, and frees its descriptors.
    pub fn pop_used(&mut self) -> Option<(u16, u32)> {
        let (head, written) = self.take_used_keep_chain()?;
        self.free.append(&mut self.chains[usize::from(head)]);
        Some((head, written))
    }

    /// The same, but the chain is not freed, so that it can be offered again.
    pub fn take_used_keep_chain(&mut self) -> Option<(u16, u32)> {
        if self.used_index() == self.last_used {
            return None;
        }
        let at = self.used + 4 + u64::from(self.last_used % self.size) * 8;
        let mut element = [0; 8];
        self.memory
            .read_slice(&mut element, GuestAddress(at))
            .expect("used ring");
        self.last_used = self.last_used.wrapping_add(1);
        let head = u32::from_le_bytes(element[..4].try_into().expect("4 bytes")) as u16;
        let written = u32::from_le_bytes(element[4..].try_into().expect("4 bytes"));
        Some((head, written))
    }

    fn load(&self, at: u64) -> u16 {
        u16::from_le(
            self.memory
                .load(GuestAddress(at), Ordering::SeqCst)
                .expect("ring"),
        )
    }
}
