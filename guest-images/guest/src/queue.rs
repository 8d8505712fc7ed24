//! The driver's side of a split virtqueue (virtio 1.2, 2.7).
//!
//! ```text
//!   add ─▶ descriptor table ─▶ available ring ── publish ─▶ (doorbell?) ─▶ device
//!                                                                            │
//!   take ◀──────────────────────── used ring ◀── (interrupt?) ◀──────────────┘
//! ```
//!
//! With EVENT_IDX each side says after which entry it wants to be notified by the other
//! (`avail_event`, `used_event`), so one doorbell and one interrupt serve many requests.

use core::sync::atomic::{Ordering, fence};

use crate::error::Error;
use crate::memory::{Arena, Region};

/// Most descriptors that this driver uses in one queue.
pub const MAX_SIZE: u16 = 128;

/// A piece of memory in a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Address of its first byte.
    pub address: u64,
    /// Length in bytes.
    pub length: u32,
    /// Whether the device writes the memory; otherwise the device reads it.
    pub device_writes: bool,
}

/// A request that the device has used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UsedElement {
    /// The token that [`Queue::add`] got with the request.
    pub token: u16,
    /// Bytes written, according to the device.
    pub written: u32,
}

/// Features of the rings, as negotiated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingFeatures {
    /// VIRTIO_F_EVENT_IDX.
    pub event_idx: bool,
    /// VIRTIO_F_INDIRECT_DESC.
    pub indirect: bool,
}

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const DESCRIPTOR: usize = 16;
const NO_TOKEN: u16 = u16::MAX;
/// `flags` of the used ring: the device asks for no doorbells (without EVENT_IDX).
const NO_NOTIFY: u16 = 1;

/// One queue.
#[derive(Debug)]
pub struct Queue {
    size: u16,
    features: RingFeatures,
    descriptors: Region,
    available: Region,
    used: Region,
    /// Free descriptors, linked through `next`.
    free_head: u16,
    free: u16,
    next: [u16; MAX_SIZE as usize],
    /// The token and the length of each chain in flight, indexed by its head.
    tokens: [u16; MAX_SIZE as usize],
    lengths: [u16; MAX_SIZE as usize],
    /// The available index after all requests added, and the one that the device was last shown.
    added: u16,
    published: u16,
    /// Number of used entries taken, modulo 2^16.
    taken: u16,
}

impl Queue {
    /// A queue of `size` descriptors (a power of two, at most [`MAX_SIZE`]).
    ///
    /// # Errors
    /// [`Error::Memory`] if the arena is used up.
    pub fn new(arena: &mut Arena, size: u16, features: RingFeatures) -> Result<Self, Error> {
        assert!(size.is_power_of_two() && size <= MAX_SIZE, "queue size");
        let entries = usize::from(size);
        let mut next = [0; MAX_SIZE as usize];
        for (index, slot) in (1..).zip(next.iter_mut()) {
            *slot = index;
        }
        // Alignments of virtio 1.2, 2.7: 16, 2 and 4 bytes. Each ring ends with an event index.
        Ok(Self {
            size,
            features,
            descriptors: arena.take(entries * DESCRIPTOR, DESCRIPTOR)?,
            available: arena.take(6 + entries * 2, 2)?,
            used: arena.take(8 + entries * 8, 4)?,
            free_head: 0,
            free: size,
            next,
            tokens: [NO_TOKEN; MAX_SIZE as usize],
            lengths: [0; MAX_SIZE as usize],
            added: 0,
            published: 0,
            taken: 0,
        })
    }

    /// Number of descriptors.
    pub fn size(&self) -> u16 {
        self.size
    }

    /// Addresses of the descriptor table, the available ring and the used ring.
    pub fn addresses(&self) -> [u64; 3] {
        [
            self.descriptors.address(),
            self.available.address(),
            self.used.address(),
        ]
    }

    /// The features of its rings.
    pub fn features(&self) -> RingFeatures {
        self.features
    }

    /// Adds a request as a chain of descriptors. The segments that the device reads must come first
    /// (2.7.4.2). Returns whether there was room.
    pub fn add(&mut self, token: u16, segments: &[Segment]) -> bool {
        if segments.is_empty() || segments.len() > usize::from(self.free) {
            return false;
        }
        let head = self.free_head;
        let mut index = head;
        for (position, segment) in segments.iter().enumerate() {
            let last = position + 1 == segments.len();
            let next = self.next[usize::from(index)];
            put(&self.descriptors, index, segment, (!last).then_some(next));
            self.free_head = next;
            index = next;
        }
        self.begin(head, token, segments.len() as u16);
        true
    }

    /// Adds a request as one descriptor that points at `table`, which holds the chain (2.7.5.3).
    /// Returns whether there was room. `table` must stay untouched until the request is used.
    pub fn add_indirect(&mut self, token: u16, table: &Region, segments: &[Segment]) -> bool {
        if !self.features.indirect || segments.is_empty() || self.free == 0 {
            return false;
        }
        for (index, segment) in (0u16..).zip(segments) {
            let last = usize::from(index) + 1 == segments.len();
            put(table, index, segment, (!last).then_some(index + 1));
        }
        let head = self.free_head;
        self.free_head = self.next[usize::from(head)];
        let length = (segments.len() * DESCRIPTOR) as u32;
        let whole = Segment {
            address: table.address(),
            length,
            device_writes: false,
        };
        put(&self.descriptors, head, &whole, None);
        self.descriptors
            .write(usize::from(head) * DESCRIPTOR + 12, INDIRECT);
        self.begin(head, token, 1);
        true
    }

    fn begin(&mut self, head: u16, token: u16, length: u16) {
        self.free -= length;
        self.tokens[usize::from(head)] = token;
        self.lengths[usize::from(head)] = length;
        let slot = usize::from(self.added % self.size);
        self.available.write(4 + slot * 2, head);
        self.added = self.added.wrapping_add(1);
    }

    /// Shows the device everything added since the last call. Returns whether it wants a doorbell.
    pub fn publish(&mut self) -> bool {
        if self.added == self.published {
            return false;
        }
        // Writes the entries before the index that covers them (2.7.13.3).
        fence(Ordering::Release);
        self.available.write(2, self.added);
        let before = core::mem::replace(&mut self.published, self.added);
        // Writes the index before reading the device's event index or flags (2.7.13.4.1).
        fence(Ordering::SeqCst);
        if self.features.event_idx {
            let event = self.used.read::<u16>(4 + usize::from(self.size) * 8);
            passes(event, before, self.added)
        } else {
            self.used.read::<u16>(0) & NO_NOTIFY == 0
        }
    }

    /// Free descriptors.
    pub fn free(&self) -> u16 {
        self.free
    }

    /// Whether the device has used a request that the driver has not taken back yet.
    pub fn has_used(&self) -> bool {
        self.used.read::<u16>(2) != self.taken
    }

    /// Requests that the driver has shown to the device and not taken back.
    pub fn in_flight(&self) -> u16 {
        self.published.wrapping_sub(self.taken)
    }

    /// Takes back one request that the device has used, if there is one.
    ///
    /// # Errors
    /// [`Error::UsedRing`] if the device names a descriptor that heads no chain in flight.
    pub fn take(&mut self) -> Result<Option<UsedElement>, Error> {
        if self.used.read::<u16>(2) == self.taken {
            return Ok(None);
        }
        fence(Ordering::Acquire);
        let entry = 4 + usize::from(self.taken % self.size) * 8;
        let id = self.used.read::<u32>(entry);
        let written = self.used.read::<u32>(entry + 4);
        let head = u16::try_from(id).ok().filter(|&head| head < self.size);
        let head = head.ok_or(Error::UsedRing { id })?;
        let token = core::mem::replace(&mut self.tokens[usize::from(head)], NO_TOKEN);
        if token == NO_TOKEN {
            return Err(Error::UsedRing { id });
        }
        let length = self.lengths[usize::from(head)];
        let mut last = head;
        for _ in 1..length {
            last = self.next[usize::from(last)];
        }
        self.next[usize::from(last)] = self.free_head;
        self.free_head = head;
        self.free += length;
        self.taken = self.taken.wrapping_add(1);
        Ok(Some(UsedElement { token, written }))
    }

    /// Asks for an interrupt once `count` more requests are used. Returns `true` if the device has
    /// already used as many: then the interrupt may not come, and the caller must not wait for it.
    pub fn arm(&mut self, count: u16) -> bool {
        let count = count.clamp(1, self.in_flight().max(1));
        if self.features.event_idx {
            self.available.write(
                4 + usize::from(self.size) * 2,
                self.taken.wrapping_add(count - 1),
            );
        }
        // Writes the event before reading the index: the device does it in the opposite order
        // (2.7.7.1).
        fence(Ordering::SeqCst);
        let ready = self.used.read::<u16>(2).wrapping_sub(self.taken);
        // Without EVENT_IDX every used request interrupts, so one is enough.
        if self.features.event_idx {
            ready >= count
        } else {
            ready > 0
        }
    }
}

fn put(table: &Region, index: u16, segment: &Segment, next: Option<u16>) {
    let at = usize::from(index) * DESCRIPTOR;
    let write = if segment.device_writes { WRITE } else { 0 };
    let chained = if next.is_some() { NEXT } else { 0 };
    table.write(at, segment.address);
    table.write(at + 8, segment.length);
    table.write(at + 12, write | chained);
    table.write(at + 14, next.unwrap_or(0));
}

/// Whether a step of an index from `before` to `after` passes `event` (2.7.10, `vring_need_event`).
fn passes(event: u16, before: u16, after: u16) -> bool {
    after.wrapping_sub(event).wrapping_sub(1) < after.wrapping_sub(before)
}

#[cfg(test)]
mod tests;
