//! Which disk of a log uses its room, so that a disk that floods the log waits, and no other.
//!
//! ```text
//!   since the copy began   │ a: 3 MiB ................................ │ b: 8 KiB │ rest │
//!                            beyond its part: a's next record waits     b's doesn't
//! ```
//! A copy to the images hands on the log's room bit by bit. Of what was used since the copy began,
//! each disk has a part by its weight. Who has used more leaves a rest of the room, and most of the
//! memory for pending records, to the others. So their records find room at once, and no record
//! that waits for room is before them in the log. A disk alone may use everything.

use std::collections::BTreeMap;

use crate::mutant::{Mutant, planted};

/// The weight of a disk without one of its own.
const USUAL_WEIGHT: u16 = 100;
/// Disks beyond their part leave one part in this many of the room that there was when the copy
/// began, or of a segment while the ring grows.
pub(crate) const RESERVED_ROOM: u64 = 16;
/// They get one part in this many of the memory for pending records, and of the bytes that wait for
/// write-back: the FLUSHes of the others wait for both.
const SHARED_PART: usize = 4;

/// How many bytes may be pending, or wait for write-back, of `most`, while a disk beyond its part
/// writes more.
pub(crate) fn shared_memory(most: usize) -> usize {
    most / SHARED_PART
}

/// What the disks of a log have used of its room since the last copy began.
#[derive(Default)]
pub(crate) struct RoomShares {
    /// Counts copies.
    copy: u64,
    used: u64,
    disks: BTreeMap<u32, DiskShare>,
}

struct DiskShare {
    weight: u16,
    /// The copy after whose beginning the disk last wanted room.
    wanted: Option<u64>,
    /// Bytes since then.
    used: u64,
}

impl Default for DiskShare {
    fn default() -> Self {
        Self {
            weight: USUAL_WEIGHT,
            wanted: None,
            used: 0,
        }
    }
}

impl RoomShares {
    /// Sets a disk's weight beside the others.
    pub(crate) fn set_weight(&mut self, disk_id: u32, weight: u16) {
        self.disks.entry(disk_id).or_default().weight = weight.max(1);
    }

    /// A disk that has left the log counts no more.
    pub(crate) fn forget(&mut self, disk_id: u32) {
        self.disks.remove(&disk_id);
    }

    /// A copy begins: what was used before is what it copies.
    pub(crate) fn begin_copy(&mut self) {
        self.copy += 1;
        self.used = 0;
    }

    /// A disk wants room.
    pub(crate) fn want(&mut self, disk_id: u32) {
        let own = self.disks.entry(disk_id).or_default();
        if own.wanted != Some(self.copy) {
            (own.wanted, own.used) = (Some(self.copy), 0);
        }
    }

    /// Whether a disk that [wants](Self::want) room has used more than its part. Those count that
    /// want room, or did before this copy began.
    pub(crate) fn is_beyond(&self, disk_id: u32) -> bool {
        let Some(own) = self.disks.get(&disk_id) else {
            return false;
        };
        let weights: u128 = self.wanting().map(|disk| u128::from(disk.weight)).sum();
        let (weight, used) = (u128::from(own.weight), u128::from(own.used));
        used * weights > u128::from(self.used) * weight && !planted(Mutant::RoomUnshared)
    }

    /// The disks that have wanted room since this copy began, or the one before.
    fn wanting(&self) -> impl Iterator<Item = &DiskShare> {
        let late = |disk: &&DiskShare| disk.wanted.is_some_and(|copy| copy + 1 >= self.copy);
        self.disks.values().filter(late)
    }

    /// Whether several disks want room.
    pub(crate) fn is_shared(&self) -> bool {
        self.wanting().nth(1).is_some() && !planted(Mutant::RoomUnshared)
    }

    /// A disk that wanted room has used so many bytes.
    pub(crate) fn take(&mut self, disk_id: u32, bytes: u64) {
        if let Some(own) = self.disks.get_mut(&disk_id) {
            own.used += bytes;
            self.used += bytes;
        }
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;

    #[test]
    fn only_who_used_more_than_its_part_is_beyond_it() {
        let mut room = RoomShares::default();
        let take = |room: &mut RoomShares, disk_id, bytes| {
            room.want(disk_id);
            room.take(disk_id, bytes);
        };
        room.set_weight(3, 1000);
        take(&mut room, 1, 1 << 40);
        assert!(!room.is_beyond(1), "no other disk wants room");
        room.want(2);
        assert!(room.is_beyond(1) && !room.is_beyond(2));
        take(&mut room, 2, 1 << 40);
        assert!(!room.is_beyond(1) && !room.is_beyond(2));
        // Of four parts, the second disk has three.
        room.set_weight(2, 300);
        assert!(room.is_beyond(1) && !room.is_beyond(2));
        take(&mut room, 2, 2 << 40);
        assert!(!room.is_beyond(1) && !room.is_beyond(2));
        take(&mut room, 2, 1);
        assert!(!room.is_beyond(1) && room.is_beyond(2));
        // What was used before a copy begins is what it copies. A disk that wanted room before
        // that counts until the next one begins.
        for beyond in [true, false] {
            room.begin_copy();
            room.want(1);
            assert!(!room.is_beyond(1));
            take(&mut room, 1, 1);
            assert_eq!(room.is_beyond(1), beyond);
        }
        room.want(2);
        assert!(room.is_beyond(1));
        room.forget(2);
        assert!(!room.is_beyond(1));
    }
}
