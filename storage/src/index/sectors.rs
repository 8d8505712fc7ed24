//! Sets of sectors of a disk, such as those whose bytes are in another file.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::index::memory::MemoryShare;
use crate::index::{ExtentLimit, IndexMemory};

/// About what a range takes in the tree, whose nodes are not full.
const RANGE_BYTES: u64 = 48;

/// Sectors with a value each, in ranges that neither overlap nor touch another of the same value.
#[derive(Debug)]
pub(crate) struct SectorMap<T> {
    /// By first sector: the end, and the value.
    ranges: BTreeMap<u64, (u64, T)>,
    share: MemoryShare,
}

/// A set of sectors.
pub(crate) type SectorSet = SectorMap<()>;

impl<T> Default for SectorMap<T> {
    fn default() -> Self {
        Self {
            ranges: BTreeMap::new(),
            share: MemoryShare::default(),
        }
    }
}

impl<T: Copy + Eq> SectorMap<T> {
    /// Counts the memory of this map in `memory` from now on.
    pub(crate) fn count_in(&mut self, memory: &IndexMemory) {
        self.share = MemoryShare::new(memory);
        self.count();
    }

    fn count(&mut self) {
        self.share.set(self.bytes());
    }

    /// Bytes of memory that the map takes.
    pub(crate) fn bytes(&self) -> u64 {
        self.ranges.len() as u64 * RANGE_BYTES
    }

    /// Whether there are no sectors.
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Gives the sectors of a non-empty range a value.
    pub(crate) fn set(&mut self, sectors: Range<u64>, value: T) {
        let Range { mut start, mut end } = sectors;
        debug_assert!(start < end, "an empty range");
        // Join touching ranges of the same value; cut others to what lies outside.
        let touching = self.ranges.range(..=end).rev();
        let touching = touching.take_while(|(_, (old_end, _))| *old_end >= start);
        let touching: Vec<_> = touching.map(|(&first, &old)| (first, old)).collect();
        for (old_start, (old_end, old)) in touching {
            self.ranges.remove(&old_start);
            if old == value {
                (start, end) = (start.min(old_start), end.max(old_end));
                continue;
            }
            if old_start < start {
                self.ranges.insert(old_start, (start, old));
            }
            if old_end > end {
                self.ranges.insert(end, (old_end, old));
            }
        }
        self.ranges.insert(start, (end, value));
        self.count();
    }

    /// Calls `each` with the parts of the range, in order; `None`: sectors without a value.
    pub(crate) fn visit(&self, sectors: Range<u64>, each: &mut impl FnMut(Range<u64>, Option<T>)) {
        let Range { mut start, end } = sectors;
        let before = self.ranges.range(..=start).next_back();
        let from = before.map_or(start, |(&first, _)| first);
        for (&first, &(last, value)) in self.ranges.range(from..end) {
            if last <= start {
                continue;
            }
            if first > start {
                each(start..first, None);
                start = first;
            }
            let part = start..last.min(end);
            start = part.end;
            each(part, Some(value));
        }
        if start < end {
            each(start..end, None);
        }
    }

    /// Whether all sectors of the range have this value.
    pub(crate) fn has_all(&self, sectors: Range<u64>, value: T) -> bool {
        let mut all = true;
        self.visit(sectors, &mut |_, found| all &= found == Some(value));
        all
    }

    /// The ranges, in order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Range<u64>> {
        self.ranges.iter().map(|(&start, &(end, _))| start..end)
    }

    /// Removes all, and returns it.
    pub(crate) fn take(&mut self) -> Vec<Range<u64>> {
        let taken = self.iter().collect();
        self.ranges.clear();
        self.count();
        taken
    }
}

impl SectorSet {
    /// Adds a non-empty range of sectors.
    pub(crate) fn insert(&mut self, sectors: Range<u64>) {
        self.set(sectors, ());
    }
}

/// Leaves half of the memory beside an index to what is not a map of sectors.
impl ExtentLimit {
    /// Whether maps of sectors may grow.
    pub(crate) fn has_room_for_sectors(&self) -> bool {
        self.memory.bytes() < self.most / 2
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The map and a list of sectors agree, whatever is set.
    #[test]
    fn the_map_has_what_was_set_last() {
        let mut random = 1_u64;
        let mut below = |limit: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (random >> 33) % limit
        };
        let memory = IndexMemory::default();
        for _ in 0..200 {
            let (mut map, mut model) = (SectorMap::default(), [None; 40]);
            map.count_in(&memory);
            for _ in 0..30 {
                let start = below(40);
                let end = start + 1 + below(40 - start);
                let value = below(2) == 0;
                map.set(start..end, value);
                model[start as usize..end as usize].fill(Some(value));
                let from = below(40);
                let to = from + 1 + below(40 - from);
                let (mut at, mut last) = (from, None);
                map.visit(from..to, &mut |part, value| {
                    assert!(part.start == at && part.end > at);
                    assert_ne!(last, Some(value), "neighbours are joined");
                    let is = |sector: &Option<bool>| *sector == value;
                    assert!(model[part.start as usize..part.end as usize].iter().all(is));
                    (at, last) = (part.end, Some(value));
                });
                assert_eq!(at, to);
                assert_eq!(memory.bytes(), map.iter().count() as u64 * RANGE_BYTES);
            }
            assert!(!map.take().is_empty() && map.is_empty());
        }
        assert_eq!(memory.bytes(), 0);
    }
}
