//! A split virtqueue as plain memory (virtio 1.2, 2.7): a case can write every field, with right or
//! wrong values.

use core::sync::atomic::{Ordering, fence};

use crate::error::Error;
use crate::memory::{Arena, Region};

/// Most descriptors.
pub(super) const LARGEST: u16 = 1024;

pub(super) const NEXT: u16 = 1;
pub(super) const WRITE: u16 = 2;
pub(super) const INDIRECT: u16 = 4;

const DESCRIPTOR: usize = 16;

/// Writes a descriptor into a table, the queue's own or an indirect one.
pub(super) fn describe(
    table: &Region,
    index: u16,
    address: u64,
    length: u32,
    flags: u16,
    next: u16,
) {
    let at = usize::from(index) * DESCRIPTOR;
    table.write(at, address);
    table.write(at + 8, length);
    table.write(at + 12, flags);
    table.write(at + 14, next);
}

/// One queue's memory.
pub(super) struct Ring {
    pub(super) size: u16,
    pub(super) table: Region,
    available: Region,
    used: Region,
    /// The available index after the last offered head. The published index may be behind it.
    next: u16,
    /// Number of used elements taken, modulo 2^16.
    pub(super) taken: u16,
}

impl Ring {
    pub(super) fn new(arena: &mut Arena) -> Result<Self, Error> {
        let entries = usize::from(LARGEST);
        Ok(Self {
            size: LARGEST,
            table: arena.take(entries * DESCRIPTOR, 4096)?,
            available: arena.take(6 + entries * 2, 4096)?,
            used: arena.take(6 + entries * 8, 4096)?,
            next: 0,
            taken: 0,
        })
    }

    /// Empties the ring and gives it `size` descriptors. The device must not be using it.
    pub(super) fn clear(&mut self, size: u16) {
        for region in [&mut self.table, &mut self.available, &mut self.used] {
            region.bytes_mut().fill(0);
        }
        (self.size, self.next, self.taken) = (size, 0, 0);
    }

    /// Addresses of the descriptor table, the available ring and the used ring.
    pub(super) fn areas(&self) -> [u64; 3] {
        [
            self.table.address(),
            self.available.address(),
            self.used.address(),
        ]
    }

    pub(super) fn describe(&self, index: u16, address: u64, length: u32, flags: u16, next: u16) {
        describe(&self.table, index, address, length, flags, next);
    }

    /// Puts a head into the available ring, without publishing it.
    pub(super) fn offer(&mut self, head: u16) {
        let slot = usize::from(self.next % self.size);
        self.available.write(4 + slot * 2, head);
        self.next = self.next.wrapping_add(1);
    }

    /// Publishes the offered heads.
    pub(super) fn publish(&mut self) {
        self.set_index(self.next);
    }

    /// Number of heads offered, modulo 2^16.
    pub(super) fn offered(&self) -> u16 {
        self.next
    }

    /// Stores an available index, which may be wrong.
    pub(super) fn set_index(&self, index: u16) {
        fence(Ordering::Release);
        self.available.write(2, index);
        fence(Ordering::SeqCst);
    }

    pub(super) fn used_index(&self) -> u16 {
        let index = self.used.read(2);
        fence(Ordering::Acquire);
        index
    }

    /// Head and length of the used element at `index`.
    pub(super) fn used_at(&self, index: u16) -> (u32, u32) {
        let at = 4 + usize::from(index % self.size) * 8;
        (self.used.read(at), self.used.read(at + 4))
    }

    pub(super) fn used_flags(&self) -> u16 {
        self.used.read(0)
    }

    /// The available index at which the device asks for the next doorbell.
    pub(super) fn avail_event(&self) -> u16 {
        fence(Ordering::SeqCst);
        self.used.read(4 + usize::from(self.size) * 8)
    }

    /// Asks for an interrupt with the used element at `index`.
    pub(super) fn set_used_event(&self, index: u16) {
        let at = 4 + usize::from(self.size) * 2;
        self.available.write(at, index);
        fence(Ordering::SeqCst);
    }

    pub(super) fn set_no_interrupt(&self, none: bool) {
        self.available.write(0, u16::from(none));
        fence(Ordering::SeqCst);
    }

    /// Fills the used ring, including its index, with bytes that the device never wrote.
    pub(super) fn scribble_on_used(&mut self) {
        self.used.bytes_mut().fill(0x77);
        fence(Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::tests::arena;

    #[test]
    fn a_cleared_ring_is_empty_aligned_and_laid_out_as_the_specification_says() {
        let mut ring = Ring::new(&mut arena(64 << 10)).unwrap();
        for (area, alignment) in ring.areas().into_iter().zip([16, 2, 4]) {
            assert!(area.is_multiple_of(alignment));
        }
        ring.offer(7);
        ring.scribble_on_used();
        ring.clear(4);
        assert_eq!((ring.used_index(), ring.used_flags()), (0, 0));
        ring.describe(3, 0x1122, 16, NEXT | WRITE, 2);
        assert_eq!(ring.table.read::<u64>(48), 0x1122);
        assert_eq!(ring.table.read::<u32>(56), 16);
        assert_eq!(ring.table.read::<u16>(60), 3);
        assert_eq!(ring.table.read::<u16>(62), 2);
        (0..5).for_each(|head| ring.offer(head));
        assert_eq!(ring.available.read::<u16>(2), 0, "not published");
        ring.publish();
        assert_eq!(ring.available.read::<u16>(2), 5);
        // The fifth head wraps to the first slot.
        assert_eq!(ring.available.read::<u16>(4), 4);
        ring.set_used_event(9);
        assert_eq!(ring.available.read::<u16>(4 + 4 * 2), 9);
        ring.used.write(4 + 8, 3u32);
        ring.used.write(4 + 12, 513u32);
        ring.used.write(4 + 4 * 8, 77u16);
        assert_eq!((ring.used_at(5), ring.avail_event()), ((3, 513), 77));
    }
}
