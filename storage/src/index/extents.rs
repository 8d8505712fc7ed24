//! Extents of a disk in few bytes: 16 each, in leaves that a B-tree keeps in order.
//!
//! ```text
//!   leaves by first sector ─▶ leaf: up to 256 extents in order ─▶ (sector, length, where)
//! ```
//! An extent's place takes one word. Words refer to segments, and to payloads not in the log yet,
//! by way of two small tables beside the leaves.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;

use super::leaf::{IndexExtent, LEAF, Leaf, NewExtent, PackedPlace, PlaceKind, zone};
use super::location::{Location, Piece};
use super::memory::{ExtentLimit, IndexMemory, MemoryShare};
use crate::error::Result;
use crate::medium::file::Segment;
use crate::mutant::{Mutant, planted};
use crate::sync::Arc;
use crate::{SECTOR_SIZE, SharedBuffer};

/// A payload that is not in the log yet.
#[derive(Debug)]
struct PendingPayload {
    lsn: u64,
    /// The first sector of its record.
    sector: u64,
    /// `None` once the payload is in the log; the entry stays while an earlier payload is not.
    payload: Option<SharedBuffer>,
}

/// Non-overlapping extents in the order of their sectors. The map pins every segment that it has
/// ever named, until it [releases](Self::release) them.
#[derive(Debug, Default)]
pub(crate) struct ExtentMap {
    /// By their bases.
    leaves: BTreeMap<u64, Leaf>,
    /// `None`: the slot is free.
    segments: Vec<Option<Arc<Segment>>>,
    /// Payloads that are not in the log yet, by LSN.
    pending: VecDeque<PendingPayload>,
    /// Bytes of memory that the leaves take.
    bytes: u64,
    /// Bytes of memory that the segments' checksums take, if no other map has these segments.
    checksums: u64,
    share: MemoryShare,
}

impl ExtentMap {
    /// An empty map whose memory is counted in the same place.
    pub(crate) fn successor(&self) -> Self {
        Self {
            share: MemoryShare::new(&self.share.memory),
            ..Self::default()
        }
    }

    /// Counts the memory of this map in `memory` from now on.
    pub(crate) fn count_in(&mut self, memory: &IndexMemory) {
        self.share = MemoryShare::new(memory);
        self.count();
    }

    /// As [`count_in`](Self::count_in), up to a limit.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput) if that is too much. The caller
    /// then drops the map.
    pub(crate) fn count_within(&mut self, limit: &ExtentLimit) -> Result<()> {
        self.count_in(&limit.memory);
        limit.check()
    }

    /// Counts the memory of checksums that go with the map.
    pub(super) fn add_checksums(&mut self, bytes: u64) {
        self.checksums += bytes;
        self.count();
    }

    fn count(&mut self) {
        self.share.set(self.bytes + self.checksums);
    }

    /// Bytes of memory that the extents take.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Inserts an extent, replacing everything in its range. A payload in memory is that of the
    /// whole record.
    pub(crate) fn insert(&mut self, sector: u64, sectors: u64, lsn: u64, place: Location) {
        let word = self.pack(sector, lsn, place);
        self.insert_word(sector, sectors, word);
    }

    fn insert_word(&mut self, sector: u64, sectors: u64, word: PackedPlace) {
        debug_assert!(sectors > 0, "an empty extent");
        let end = sector + sectors;
        let mut free = false;
        if let Some((_, leaf)) = self.leaves.range_mut(..=sector).next_back() {
            // The common case: the same range was written before.
            let (at, zone) = (leaf.position(sector), zone(leaf.base));
            if let Some(old) = leaf.extents.get_mut(at)
                && (zone + u64::from(old.start), u64::from(old.sectors)) == (sector, sectors)
            {
                old.word = word;
                return;
            }
            free = leaf.has_gap(at, sector, end);
        }
        let rest = if free { None } else { self.clear(sector, end) };
        self.put(sector, sectors, word);
        if let Some((sectors, word)) = rest {
            self.put(end, sectors, word);
        }
        self.count();
    }

    /// Removes everything in a range. Returns what is left of an extent that reached beyond the
    /// range: its sectors and its place.
    fn clear(&mut self, sector: u64, end: u64) -> Option<(u64, PackedPlace)> {
        let mut rest = None;
        if let Some((start, before)) = self.before(sector) {
            let before_end = start + u64::from(before.sectors);
            if before_end > end {
                rest = Some((before_end - end, before.word.skip(end - start)));
            }
            before.sectors = (before_end.min(sector) - start) as u32;
        }
        let mut freed = 0;
        for leaf in self.leaves_in(sector, end) {
            let (first, last) = (leaf.position(sector), leaf.position(end));
            if let Some(old) = leaf.extents[first..last].last() {
                let start = leaf.start(old);
                let old_end = start + u64::from(old.sectors);
                if old_end > end {
                    rest = Some((old_end - end, old.word.skip(end - start)));
                }
            }
            leaf.extents.drain(first..last);
            freed += leaf.trim();
        }
        // Drop emptied leaves, except the one in which the range begins: it gets the extent.
        self.leaves
            .extract_if(sector + 1..end, |_, leaf| leaf.extents.is_empty())
            .for_each(|(_, leaf)| freed += leaf.bytes());
        self.bytes -= freed;
        rest
    }

    /// Inserts an extent into an empty range.
    fn put(&mut self, sector: u64, sectors: u64, word: PackedPlace) {
        debug_assert!(u32::try_from(sectors).is_ok(), "an extent of one record");
        let extent = IndexExtent {
            start: sector as u32,
            sectors: sectors as u32,
            word,
        };
        let base = zone(sector);
        let made = match self.leaves.range_mut(base..=sector).next_back() {
            Some((_, leaf)) => {
                self.bytes -= leaf.bytes();
                let right = leaf.put(sector, extent);
                self.bytes += leaf.bytes();
                right
            }
            None => Some(Leaf {
                base,
                extents: vec![extent],
            }),
        };
        if let Some(leaf) = made {
            self.bytes += leaf.bytes();
            self.leaves.insert(leaf.base, leaf);
        }
    }

    /// A record for [`merge`](Self::merge), whose payload, if it has one, is in the log.
    pub(super) fn new_extent(
        &mut self,
        sector: u64,
        sectors: u32,
        number: u32,
        place: Location,
    ) -> NewExtent {
        let word = self.pack(sector, 0, place);
        NewExtent {
            sector,
            sectors,
            number,
            word,
        }
    }

    /// Inserts a record, replacing everything in its range.
    pub(super) fn insert_new(&mut self, new_extent: &NewExtent) {
        self.insert_word(
            new_extent.sector,
            new_extent.sectors.into(),
            new_extent.word,
        );
    }

    /// Inserts records that are in sector order and do not overlap.
    pub(super) fn merge(&mut self, mut new_extents: &[NewExtent]) {
        debug_assert!(
            new_extents.is_sorted_by(|one, next| one.end() <= next.sector),
            "extents are sorted and disjoint"
        );
        let mut merged = Vec::new();
        while let Some(first) = new_extents.first() {
            let count = self.merge_leaf(new_extents, &mut merged).unwrap_or(0);
            if count == 0 {
                self.insert_new(first);
            }
            new_extents = &new_extents[count.max(1)..];
        }
        self.count();
    }

    /// Merges as many of these records as possible into the leaf of the first one. Returns how
    /// many; `None` if there is no such leaf.
    fn merge_leaf(
        &mut self,
        new_extents: &[NewExtent],
        merged: &mut Vec<IndexExtent>,
    ) -> Option<usize> {
        let sector = new_extents.first()?.sector;
        let mut leaves = self.leaves.range(..=sector).rev();
        let (&base, leaf) = leaves.next().filter(|&(&base, _)| base >= zone(sector))?;
        let before = leaves
            .next()
            .and_then(|(_, before)| Some(before.end(before.extents.last()?)));
        let mut later = self.leaves.range((Bound::Excluded(base), Bound::Unbounded));
        // A leaf's extents are all in one zone.
        let limit = later.next().map_or(u64::MAX, |(&base, _)| base);
        let limit = limit.min(zone(sector) | u64::from(u32::MAX));
        merged.clear();
        let count = leaf.merge(new_extents, before.unwrap_or(0), limit, merged);
        if count == 0 {
            return Some(0);
        }
        let parts = merged.len().div_ceil(LEAF);
        let mut parts = merged.chunks(merged.len().div_ceil(parts));
        let leaf = self.leaves.get_mut(&base)?;
        self.bytes -= leaf.bytes();
        leaf.extents = parts.next().unwrap_or_default().to_vec();
        self.bytes += leaf.bytes();
        for part in parts {
            let base = zone(base) + u64::from(part[0].start);
            let extents = part.to_vec();
            let leaf = Leaf { base, extents };
            self.bytes += leaf.bytes();
            self.leaves.insert(base, leaf);
        }
        Some(count)
    }

    /// Calls `each` with the pieces of the range, in order, gaps included.
    pub(crate) fn visit(&self, sector: u64, sectors: u64, each: &mut impl FnMut(Piece)) {
        let end = sector + sectors;
        let mut at = sector;
        // If no extent of this leaf begins before the range, one of the leaf before may reach into
        // it.
        let mut before = self.leaves.range(..=sector).rev();
        let from = before.find(|(_, leaf)| leaf.position(sector + 1) > 0);
        let from = from.map_or(0, |(&base, _)| base);
        for (_, leaf) in self.leaves.range(from..end) {
            if at == end {
                break;
            }
            self.visit_leaf(leaf, &mut at, end, each);
        }
        if at < end {
            each(Piece::gap(at, end));
        }
    }

    /// Calls `each` with the pieces of `*at..end` up to the end of the leaf's last extent, and
    /// advances `at` to there.
    fn visit_leaf(&self, leaf: &Leaf, at: &mut u64, end: u64, each: &mut impl FnMut(Piece)) {
        // The last extent that begins at or before the range may reach into it.
        let first = leaf.position(*at + 1).saturating_sub(1);
        for extent in &leaf.extents[first..] {
            let start = leaf.start(extent);
            let piece_end = (start + u64::from(extent.sectors)).min(end);
            if start >= end {
                break;
            }
            if piece_end <= *at {
                continue;
            }
            if start > *at {
                each(Piece::gap(*at, start));
                *at = start;
            }
            debug_assert!(start <= *at && *at < piece_end, "pieces are in order");
            each(self.piece(*at, piece_end, extent.word.skip(*at - start)));
            *at = piece_end;
        }
    }

    /// The record `lsn`, which covered the range, is now in the log: moves the parts of it that are
    /// still visible here from memory to the log.
    pub(crate) fn relocate(
        &mut self,
        sector: u64,
        sectors: u64,
        lsn: u64,
        segment: &Arc<Segment>,
        offset: u64,
    ) {
        let waits = self.pending.partition_point(|pending| pending.lsn < lsn);
        let Some(pending) = self.pending.get_mut(waits).filter(|p| p.lsn == lsn) else {
            return;
        };
        pending.payload = None;
        while self.pending.pop_front_if(|p| p.payload.is_none()).is_some() {}
        let word = PackedPlace::log(self.slot(segment), offset / SECTOR_SIZE);
        let end = sector + sectors;
        let mut freed = 0;
        for leaf in self.leaves_in(sector, end) {
            let (first, last) = (leaf.position(sector), leaf.position(end));
            let zone = zone(leaf.base);
            for extent in &mut leaf.extents[first..last] {
                if extent.word == PackedPlace::pending(lsn) {
                    extent.word = word.skip(zone + u64::from(extent.start) - sector);
                }
            }
            leaf.join(first, last);
            freed += leaf.trim();
        }
        self.bytes -= freed;
        self.count();
    }

    /// All extents in order of their sectors.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Piece> + '_ {
        self.leaves.values().flat_map(move |leaf| {
            leaf.extents.iter().map(move |extent| {
                let start = leaf.start(extent);
                self.piece(start, start + u64::from(extent.sectors), extent.word)
            })
        })
    }

    /// The parts of this map that no extent of `newer` covers. This map must have no payloads in
    /// memory.
    pub(crate) fn without(&self, newer: &Self) -> Self {
        let mut left = self.successor();
        for piece in self.iter() {
            let Piece {
                sector,
                sectors,
                place,
            } = piece;
            newer.visit(sector, sectors, &mut |part| {
                if let (None, Some(place)) = (part.place, &place) {
                    left.insert(
                        part.sector,
                        part.sectors,
                        0,
                        place.skip(part.sector - sector),
                    );
                }
            });
        }
        left
    }

    /// Removes the parts of these pieces that are still current here, that is, at the same place,
    /// or zeroes of the same record. (A newer record may be in the same segment.)
    pub(crate) fn forget(&mut self, pieces: &[Piece]) {
        let mut same = Vec::new();
        for old in pieces {
            self.visit(old.sector, old.sectors, &mut |part| {
                let place = old.place.as_ref();
                let place = place.map(|place| place.skip(part.sector - old.sector));
                let is_same = match (&part.place, &place) {
                    (
                        Some(Location::Log { segment, offset }),
                        Some(Location::Log {
                            segment: other,
                            offset: at,
                        }),
                    ) => {
                        Arc::ptr_eq(segment, other)
                            && (offset == at || planted(Mutant::FoldForgetsSegment))
                    }
                    (Some(Location::Zero { lsn, .. }), Some(Location::Zero { lsn: other, .. })) => {
                        lsn == other
                    }
                    _ => false,
                };
                let is_newer = part.place.is_some() && planted(Mutant::FoldForgetsNewer);
                if is_same || is_newer {
                    same.push((part.sector, part.sector + part.sectors));
                }
            });
            for (sector, end) in same.drain(..) {
                if let Some((sectors, word)) = self.clear(sector, end) {
                    self.put(end, sectors, word);
                }
                let first = self.leaves.range(..=sector).next_back();
                if let Some((&base, _)) = first.filter(|(_, leaf)| leaf.extents.is_empty())
                    && let Some(leaf) = self.leaves.remove(&base)
                {
                    self.bytes -= leaf.bytes();
                }
            }
        }
        self.count();
    }

    /// Unpins these segments. No extent may be in them.
    pub(crate) fn release(&mut self, segments: &[Arc<Segment>]) {
        for slot in &mut self.segments {
            let named = |named: &Arc<Segment>| segments.iter().any(|s| Arc::ptr_eq(s, named));
            if slot.as_ref().is_some_and(named) {
                *slot = None;
            }
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.leaves.is_empty()
    }

    /// The leaves with extents that begin in a range.
    fn leaves_in(&mut self, sector: u64, end: u64) -> impl Iterator<Item = &mut Leaf> {
        let from = self.leaves.range(..=sector).next_back();
        let from = from.map_or(sector, |(&base, _)| base);
        self.leaves.range_mut(from..end).map(|(_, leaf)| leaf)
    }

    /// The last extent that begins before `sector`, and its first sector.
    fn before(&mut self, sector: u64) -> Option<(u64, &mut IndexExtent)> {
        let mut leaves = self.leaves.range_mut(..sector).rev();
        leaves.find_map(|(_, leaf)| {
            let last = leaf.position(sector).checked_sub(1)?;
            let start = leaf.start(&leaf.extents[last]);
            Some((start, &mut leaf.extents[last]))
        })
    }

    fn pack(&mut self, sector: u64, lsn: u64, place: Location) -> PackedPlace {
        match place {
            Location::Memory { payload, .. } => {
                let payload = Some(payload);
                let pending = PendingPayload {
                    lsn,
                    sector,
                    payload,
                };
                self.pending.push_back(pending);
                PackedPlace::pending(lsn)
            }
            Location::Log { segment, offset } => {
                PackedPlace::log(self.slot(&segment), offset / SECTOR_SIZE)
            }
            Location::Zero { unmap, lsn } => PackedPlace::zero(unmap, lsn),
        }
    }

    /// The segment's slot in the table, added if missing. Searches from the end, where recent
    /// segments are.
    fn slot(&mut self, segment: &Arc<Segment>) -> usize {
        let named = |slot: &Option<Arc<Segment>>| match slot {
            Some(named) => Arc::ptr_eq(named, segment),
            None => false,
        };
        let mut slots = self.segments.iter();
        if let Some(slot) = slots.rposition(named) {
            return slot;
        }
        let free = self.segments.iter().position(Option::is_none);
        let slot = free.unwrap_or(self.segments.len());
        match self.segments.get_mut(slot) {
            Some(free) => *free = Some(segment.clone()),
            None => self.segments.push(Some(segment.clone())),
        }
        slot
    }

    fn piece(&self, sector: u64, end: u64, word: PackedPlace) -> Piece {
        let place = match word.unpack() {
            PlaceKind::Log { slot, sector } => Location::Log {
                segment: self.segments[slot].clone().expect("it is named"),
                offset: sector * SECTOR_SIZE,
            },
            PlaceKind::Pending { lsn } => {
                let found = self.pending.partition_point(|pending| pending.lsn < lsn);
                let pending = &self.pending[found];
                let payload = pending.payload.clone();
                Location::Memory {
                    payload: payload.expect("it goes when nothing names it any more"),
                    offset: ((sector - pending.sector) * SECTOR_SIZE) as usize,
                }
            }
            PlaceKind::Zero { unmap, lsn } => Location::Zero { unmap, lsn },
        };
        Piece {
            sector,
            sectors: end - sector,
            place: Some(place),
        }
    }
}

#[cfg(test)]
impl ExtentMap {
    /// Number of records not in the log yet.
    pub(super) fn waiting(&self) -> usize {
        self.pending.len()
    }

    /// Number of leaves.
    pub(super) fn leaves(&self) -> usize {
        self.leaves.len()
    }

    /// Panics if a look-up could miss an extent, or if memory is counted wrongly. Returns the bytes
    /// that the leaves take.
    pub(super) fn check(&self) -> u64 {
        let (mut last_end, mut last_start) = (0, None);
        let bytes = self.leaves.values().map(Leaf::bytes).sum();
        assert_eq!(self.bytes, bytes);
        for (&base, leaf) in &self.leaves {
            assert_eq!(base, leaf.base);
            assert!((1..=LEAF).contains(&leaf.extents.len()));
            assert!(last_start.is_none_or(|last| last < leaf.base));
            assert!(leaf.start(&leaf.extents[0]) >= leaf.base);
            for extent in &leaf.extents {
                let start = leaf.start(extent);
                assert!(start >= last_end && extent.sectors > 0);
                last_end = start + u64::from(extent.sectors);
                last_start = Some(start);
            }
        }
        bytes
    }
}
