//! Building an index from the records of a whole log.
//!
//! In a large index each record in the order of the log is a search that misses the processor's
//! caches. So records are collected, and inserted in the order of their sectors: each leaf is found
//! once, and merged with all that belong into it.

use super::extents::ExtentMap;
use super::leaf::{IndexExtent, NewExtent};
use super::location::Location;
use super::memory::ExtentLimit;
use crate::error::{Error, Result};

/// Least records that are inserted together. A larger index takes more at a time: one for each
/// `SHARE` that it has got.
const LEAST: usize = if cfg!(test) { 16 } else { 1 << 16 };
const SHARE: usize = 8;

/// An index under construction.
#[derive(Default)]
pub(crate) struct IndexBuilder {
    map: ExtentMap,
    /// In the order of the log.
    new_extents: Vec<NewExtent>,
    /// `None`: it may take any memory.
    limit: Option<ExtentLimit>,
    /// It would have taken more, and ignores all records from then on.
    full: Option<Error>,
}

impl IndexBuilder {
    /// A builder of an index that is counted while it grows, and given up once it goes over the
    /// limit.
    pub(crate) fn within(limit: Option<ExtentLimit>) -> Self {
        let mut builder = Self::default();
        if let Some(limit) = &limit {
            builder.map.count_in(&limit.memory);
        }
        Self { limit, ..builder }
    }

    /// Adds a record that is in the log, or that has no payload. It replaces all that earlier ones
    /// put into its range.
    pub(crate) fn add(&mut self, sector: u64, sectors: u32, place: Location) {
        if self.is_full() {
            return;
        }
        let number = self.new_extents.len() as u32;
        let new_extent = self.map.new_extent(sector, sectors, number, place);
        self.new_extents.push(new_extent);
        // What waits takes a small part of the limit.
        let most = self.limit.as_ref().map_or(LEAST, |limit| {
            LEAST.min(limit.most as usize / SHARE / size_of::<NewExtent>())
        });
        let grown = self.map.bytes() as usize / SHARE / size_of::<IndexExtent>();
        if self.new_extents.len() >= most.max(grown) {
            self.insert();
        }
    }

    /// Counts `bytes` of checksums that are kept for the records.
    pub(crate) fn add_checksums(&mut self, bytes: u64) {
        if !self.is_full() {
            self.map.add_checksums(bytes);
            self.check();
        }
    }

    /// Whether the limit was reached, so that [`finish`](Self::finish) will fail.
    pub(crate) fn is_full(&self) -> bool {
        self.full.is_some()
    }

    /// The index of all records.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput) if it takes more memory than it
    /// may.
    pub(crate) fn finish(mut self) -> Result<ExtentMap> {
        self.insert();
        self.full.map_or(Ok(self.map), Err)
    }

    /// Gives up if the limit is reached.
    fn check(&mut self) {
        let checked = self.limit.as_ref().map_or(Ok(()), ExtentLimit::check);
        if let Err(error) = checked {
            *self = Self {
                full: Some(error),
                ..Self::default()
            };
        }
    }

    /// Inserts what was collected: in the order of the sectors, and what overlaps in the order of
    /// the log.
    fn insert(&mut self) {
        let new_extents = &mut self.new_extents;
        new_extents.sort_unstable_by_key(|new_extent| (new_extent.sector, new_extent.number));
        // Of several for the same range only the last counts. The later one is the first argument.
        new_extents.dedup_by(|later, kept| {
            let same = (later.sector, later.sectors) == (kept.sector, kept.sectors);
            if same {
                *kept = *later;
            }
            same
        });
        let mut rest = &mut new_extents[..];
        while !rest.is_empty() {
            let alone = rest.windows(2).position(|two| two[0].end() > two[1].sector);
            let (apart, others) = rest.split_at_mut(alone.unwrap_or(rest.len()));
            self.map.merge(apart);
            let (mut end, mut count) = (0, 0);
            while let Some(next) = others
                .get(count)
                .filter(|next| count == 0 || next.sector < end)
            {
                (end, count) = (end.max(next.end()), count + 1);
            }
            let (overlapping, later) = others.split_at_mut(count);
            overlapping.sort_unstable_by_key(|new_extent| new_extent.number);
            for new_extent in overlapping {
                self.map.insert_new(new_extent);
            }
            rest = later;
        }
        new_extents.clear();
        self.check();
    }
}
