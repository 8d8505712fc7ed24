//! Extents in few bytes, and leaves of a B-tree that hold them.

/// Most extents of a leaf.
pub(super) const LEAF: usize = 256;
/// Extents by which a leaf's memory grows.
const STEP: usize = 16;

/// Where an extent's bytes begin: two bits for the kind; the rest depends on the kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PackedPlace(u64);

/// A decoded [`PackedPlace`].
pub(super) enum PlaceKind {
    Log { slot: usize, sector: u64 },
    Pending { lsn: u64 },
    Zero { unmap: bool, lsn: u64 },
}

impl PackedPlace {
    const KIND: u32 = 62;
    const PENDING: u64 = 1 << Self::KIND;
    const ZERO: u64 = 2 << Self::KIND;

    /// A sector of the segment in this slot of the table. A segment has at most 2^21 sectors, and
    /// the log at most 2^16 segments.
    pub(super) fn log(slot: usize, sector: u64) -> Self {
        debug_assert!(slot < 1 << 30 && sector < 1 << 32);
        Self((slot as u64) << 32 | sector)
    }

    /// Somewhere in the payload of this record.
    pub(super) fn pending(lsn: u64) -> Self {
        assert!(lsn < Self::PENDING, "an LSN that counting can't reach");
        Self(Self::PENDING | lsn)
    }

    /// Zeroed by this record.
    pub(super) fn zero(unmap: bool, lsn: u64) -> Self {
        assert!(lsn < Self::PENDING / 2, "an LSN that counting can't reach");
        Self(Self::ZERO | lsn << 1 | u64::from(unmap))
    }

    pub(super) fn unpack(self) -> PlaceKind {
        let rest = self.0 & ((1 << Self::KIND) - 1);
        match self.0 & !rest {
            0 => PlaceKind::Log {
                slot: (rest >> 32) as usize,
                sector: rest & u64::from(u32::MAX),
            },
            Self::PENDING => PlaceKind::Pending { lsn: rest },
            _ => PlaceKind::Zero {
                unmap: rest & 1 != 0,
                lsn: rest >> 1,
            },
        }
    }

    /// The place `sectors` sectors further on in the same extent.
    pub(super) fn skip(self, sectors: u64) -> Self {
        match self.unpack() {
            PlaceKind::Log { slot, sector } => Self::log(slot, sector + sectors),
            PlaceKind::Pending { .. } | PlaceKind::Zero { .. } => self,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct IndexExtent {
    /// The low half of the number of its first sector. The leaf has the high half.
    pub(super) start: u32,
    pub(super) sectors: u32,
    pub(super) word: PackedPlace,
}

const _: () = assert!(size_of::<IndexExtent>() == 16);

impl IndexExtent {
    /// Both as one extent, if `next` begins where this one ends, both on the disk and in its place.
    pub(super) fn try_join(self, next: Self) -> Option<Self> {
        let sectors = self.sectors.checked_add(next.sectors)?;
        let adjacent = self.start.checked_add(self.sectors) == Some(next.start)
            && self.word.skip(u64::from(self.sectors)) == next.word;
        adjacent.then_some(Self { sectors, ..self })
    }
}

/// A record to be inserted into a map.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewExtent {
    pub sector: u64,
    pub sectors: u32,
    /// Its position in a list in the order of the log.
    pub number: u32,
    pub(super) word: PackedPlace,
}

impl NewExtent {
    pub(super) fn end(&self) -> u64 {
        self.sector + u64::from(self.sectors)
    }
}

/// The first of all sectors whose numbers have the same high half.
pub(super) fn zone(sector: u64) -> u64 {
    sector & !u64::from(u32::MAX)
}

/// Extents in order, all in one zone. Never empty.
#[derive(Debug)]
pub(super) struct Leaf {
    /// A sector at or before the start of every extent in this leaf, and after the start of every
    /// extent in the previous leaf.
    pub(super) base: u64,
    pub(super) extents: Vec<IndexExtent>,
}

impl Leaf {
    /// Where an extent begins.
    pub(super) fn start(&self, extent: &IndexExtent) -> u64 {
        zone(self.base) + u64::from(extent.start)
    }

    /// Where an extent ends.
    pub(super) fn end(&self, extent: &IndexExtent) -> u64 {
        self.start(extent) + u64::from(extent.sectors)
    }

    /// How many extents begin before `sector`.
    pub(super) fn position(&self, sector: u64) -> usize {
        let limit = sector.saturating_sub(zone(self.base));
        self.extents
            .partition_point(|extent| u64::from(extent.start) < limit)
    }

    /// Whether a range lies between two neighbouring extents, where `at` is the index of the
    /// second.
    pub(super) fn has_gap(&self, at: usize, sector: u64, end: u64) -> bool {
        let (Some(before), Some(after)) = (at.checked_sub(1), self.extents.get(at)) else {
            return false;
        };
        self.end(&self.extents[before]) <= sector && end <= self.start(after)
    }

    /// Merges new extents, in sector order, into the leaf's, up to the first one that partly
    /// overlaps an extent. `reach`: where the last extent before this leaf ends. `limit`: where the
    /// next leaf begins. Returns how many were merged.
    pub(super) fn merge(
        &self,
        new_extents: &[NewExtent],
        mut reach: u64,
        limit: u64,
        merged: &mut Vec<IndexExtent>,
    ) -> usize {
        let mut add = |extent: IndexExtent| {
            let joined = merged.last().and_then(|last| last.try_join(extent));
            match (joined, merged.last_mut()) {
                (Some(joined), Some(last)) => *last = joined,
                _ => merged.push(extent),
            }
        };
        let mut old = self.extents.iter().peekable();
        let mut count = 0;
        for new_extent in new_extents {
            let NewExtent {
                sector,
                sectors,
                word,
                ..
            } = *new_extent;
            while let Some(before) = old.next_if(|old| self.start(old) < sector) {
                reach = self.end(before);
                add(*before);
            }
            let same = |old: &&IndexExtent| self.start(old) == sector && old.sectors == sectors;
            let free_until = match old.peek() {
                Some(next) if same(next) => u64::MAX,
                Some(next) => self.start(next),
                None => limit,
            };
            if reach > sector || free_until < new_extent.end() {
                break;
            }
            old.next_if(same);
            let start = sector as u32;
            add(IndexExtent {
                start,
                sectors,
                word,
            });
            reach = new_extent.end();
            count += 1;
        }
        old.for_each(|extent| add(*extent));
        count
    }

    /// Adds an extent that overlaps none. If the leaf gets too full, splits off and returns its
    /// last extents.
    pub(super) fn put(&mut self, sector: u64, extent: IndexExtent) -> Option<Self> {
        let at = self.position(sector);
        if self.extents.len() == self.extents.capacity() {
            self.extents.reserve_exact(STEP);
        }
        debug_assert!(
            at == 0 || self.end(&self.extents[at - 1]) <= sector,
            "overlaps the extent before it"
        );
        debug_assert!(
            (self.extents.get(at)).is_none_or(|after| self.end(&extent) <= self.start(after)),
            "overlaps the extent after it"
        );
        self.extents.insert(at, extent);
        self.join(at, at + 1);
        if self.extents.len() <= LEAF {
            return None;
        }
        // Ascending writes should leave full leaves behind.
        let kept = if at == LEAF { LEAF } else { LEAF / 2 };
        let extents = self.extents.split_off(kept);
        self.extents.shrink_to(kept + STEP);
        Some(Self {
            base: self.start(&extents[0]),
            extents,
        })
    }

    /// Joins adjacent extents around and in `first..last`, where that is possible.
    pub(super) fn join(&mut self, first: usize, mut last: usize) {
        let extents = &mut self.extents;
        let mut at = first.max(1);
        while at <= last && at < extents.len() {
            match extents[at - 1].try_join(extents[at]) {
                Some(joined) => {
                    extents[at - 1] = joined;
                    extents.remove(at);
                    last -= 1;
                }
                None => at += 1,
            }
        }
    }

    /// Frees memory once most of it is unused; not earlier, so that a leaf that shrinks and grows
    /// keeps its memory. Returns how many bytes.
    pub(super) fn trim(&mut self) -> u64 {
        let (needed, before) = (self.extents.len().max(STEP), self.bytes());
        if self.extents.capacity() > 4 * needed {
            self.extents.shrink_to(2 * needed);
        }
        before - self.bytes()
    }

    /// Bytes of memory the leaf takes.
    pub(super) fn bytes(&self) -> u64 {
        (size_of::<Self>() + self.extents.capacity() * size_of::<IndexExtent>()) as u64
    }
}
