//! What is written to a base image in one operation: runs of adjacent extents, and stripes.
//!
//! ```text
//!   extents   ██ █  ██ █   ███                      ░░ zeroes
//!   runs      ── ─  ── ─   ───      one write each
//!   stripe    ────────────────      one read of the image, which fills the gaps, and one write
//! ```
//! An operation takes a medium some time, however few its bytes; many cloud volumes even meter
//! operations, of up to 256 KiB or more each. So where runs lie close together, the bytes between
//! them are read and written back along with them. That is safe: those bytes do not change,
//! whatever a crash tears.

use std::collections::VecDeque;
use std::iter::Peekable;

use crate::SECTOR_SIZE;
use crate::index::{Location, Piece};
use crate::medium::cost::MediumCost;
use crate::medium::file::MAX_CHUNKS;
use crate::sync::Arc;

/// Adjacent extents that become one operation on the base image.
pub(crate) enum Run {
    /// Extents in sector order. Only a stripe has gaps between them.
    Data { sector: u64, parts: Vec<Piece> },
    Zero {
        sector: u64,
        sectors: u64,
        unmap: bool,
    },
}

impl Run {
    /// The first sector.
    pub(crate) fn sector(&self) -> u64 {
        match self {
            Self::Data { sector, .. } | Self::Zero { sector, .. } => *sector,
        }
    }

    /// Sectors from the first to the last.
    pub(crate) fn sectors(&self) -> u64 {
        match self {
            Self::Data { sector, parts } => {
                let end = parts.last().map(|last| last.sector + last.sectors);
                end.map_or(0, |end| end - sector)
            }
            Self::Zero { sectors, .. } => *sectors,
        }
    }

    /// Whether it is a stripe, whose gaps are filled from the base image.
    pub(crate) fn has_gaps(&self) -> bool {
        match self {
            Self::Data { parts, .. } => {
                parts.iter().map(|part| part.sectors).sum::<u64>() < self.sectors()
            }
            Self::Zero { .. } => false,
        }
    }

    /// The time it takes the medium, expressed as bytes that the medium moves in that time.
    /// `operation`: the same for an operation without any bytes.
    pub(crate) fn cost(&self, operation: u64) -> u64 {
        let bytes = self.sectors() * SECTOR_SIZE;
        match self {
            // One call, for any length.
            Self::Zero { .. } => operation + SECTOR_SIZE,
            Self::Data { .. } if self.has_gaps() => 2 * (operation + bytes),
            Self::Data { .. } => operation + bytes,
        }
    }
}

/// Turns a layer's pieces, in sector order, into runs.
struct Runs<I: Iterator<Item = Piece>> {
    pieces: Peekable<I>,
    /// What is left of a piece longer than a run.
    rest: Option<Piece>,
    /// Most sectors of a run of data.
    longest: u64,
}

impl<I: Iterator<Item = Piece>> Runs<I> {
    /// `largest`: the most bytes of a run of data.
    fn new(pieces: I, largest: u64) -> Self {
        Self {
            pieces: pieces.peekable(),
            rest: None,
            longest: largest / SECTOR_SIZE,
        }
    }

    /// The next piece, if it begins at `sector`, cut to `most` sectors.
    fn next_at(&mut self, sector: u64, most: u64, fits: impl Fn(&Piece) -> bool) -> Option<Piece> {
        let wanted = |piece: &Piece| piece.sector == sector && fits(piece);
        let piece = match self.rest.take_if(|rest| wanted(rest)) {
            Some(rest) => rest,
            None if self.rest.is_some() => return None,
            None => self.pieces.next_if(wanted)?,
        };
        if piece.sectors <= most {
            return Some(piece);
        }
        self.rest = Some(Piece {
            sector: piece.sector + most,
            sectors: piece.sectors - most,
            place: piece.place.as_ref().map(|place| place.skip(most)),
        });
        Some(Piece {
            sectors: most,
            ..piece
        })
    }
}

fn is_zero(piece: &Piece) -> Option<bool> {
    match piece.place {
        Some(Location::Zero { unmap, .. }) => Some(unmap),
        _ => None,
    }
}

impl<I: Iterator<Item = Piece>> Iterator for Runs<I> {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        let first = self.rest.as_ref().or(self.pieces.peek())?;
        let (sector, zero) = (first.sector, is_zero(first));
        if let Some(unmap) = zero {
            let mut end = sector;
            while let Some(piece) = self.next_at(end, u64::MAX, |piece| is_zero(piece) == zero) {
                end += piece.sectors;
            }
            debug_assert!(sector < end, "a run of nothing");
            return Some(Run::Zero {
                sector,
                sectors: end - sector,
                unmap,
            });
        }
        let mut parts: Vec<Piece> = Vec::new();
        let (mut end, limit) = (sector, sector + self.longest);
        while end < limit
            && parts.len() < MAX_CHUNKS
            && let Some(piece) = self.next_at(end, limit - end, |piece| is_zero(piece).is_none())
        {
            end += piece.sectors;
            match parts.last_mut() {
                Some(last) if follows(last, &piece) => last.sectors += piece.sectors,
                _ => parts.push(piece),
            }
        }
        debug_assert!(
            !parts.is_empty() && sector < end && end <= limit,
            "a run has bytes, and at most one operation's"
        );
        Some(Run::Data { sector, parts })
    }
}

/// Whether `next` also follows `last` in the log, so that one read gets both.
fn follows(last: &Piece, next: &Piece) -> bool {
    match (&last.place, &next.place) {
        (
            Some(Location::Log { segment, offset }),
            Some(Location::Log {
                segment: next_segment,
                offset: next_offset,
            }),
        ) => {
            Arc::ptr_eq(segment, next_segment)
                && offset + last.sectors * SECTOR_SIZE == *next_offset
        }
        _ => false,
    }
}

/// The same, with runs merged into stripes where that is cheaper.
pub(crate) struct Stripes<I: Iterator<Item = Piece>> {
    runs: Peekable<Runs<I>>,
    cost: MediumCost,
    /// Runs that are cheaper separately.
    separate: VecDeque<Run>,
}

impl<I: Iterator<Item = Piece>> Stripes<I> {
    /// For a medium with these costs. A stripe never crosses a multiple of the longest write.
    pub(crate) fn new(pieces: I, cost: MediumCost) -> Self {
        Self {
            runs: Runs::new(pieces, cost.largest).peekable(),
            cost,
            separate: VecDeque::new(),
        }
    }
}

impl<I: Iterator<Item = Piece>> Iterator for Stripes<I> {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        if let Some(run) = self.separate.pop_front() {
            return Some(run);
        }
        let run = self.runs.next()?;
        let Run::Data { sector, parts } = &run else {
            return Some(run);
        };
        let sector = *sector;
        let longest = self.cost.largest / SECTOR_SIZE;
        let end = (sector / longest + 1) * longest;
        let mut count = parts.len();
        let mut fits = |run: &Run| match run {
            Run::Data { sector, parts } => {
                count += parts.len();
                // Reading the gaps takes one more operation.
                sector + run.sectors() <= end && count < MAX_CHUNKS
            }
            Run::Zero { .. } => false,
        };
        while let Some(run) = self.runs.next_if(&mut fits) {
            self.separate.push_back(run);
        }
        if self.separate.is_empty() {
            return Some(run);
        }
        self.separate.push_front(run);
        let runs = || self.separate.iter();
        let parts = runs().flat_map(|run| match run {
            Run::Data { parts, .. } => &parts[..],
            Run::Zero { .. } => &[],
        });
        let parts = parts.cloned().collect();
        let stripe = Run::Data { sector, parts };
        let operation = self.cost.operation;
        let separate = runs().map(|run| run.cost(operation)).sum::<u64>();
        if stripe.has_gaps() && stripe.cost(operation) < separate {
            self.separate.clear();
            return Some(stripe);
        }
        self.separate.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Buffer;

    const LARGEST: u64 = MediumCost::USUAL.largest;

    fn data(sector: u64, sectors: u64) -> Piece {
        let payload = Buffer::zeroed(512).share();
        // The tests never read the bytes; the offset identifies them.
        let offset = sector as usize * 512;
        let place = Some(Location::Memory { payload, offset });
        Piece {
            sector,
            sectors,
            place,
        }
    }

    fn zeroes(sector: u64, sectors: u64) -> Piece {
        let place = Some(Location::Zero {
            unmap: true,
            lsn: 1,
        });
        Piece {
            sector,
            sectors,
            place,
        }
    }

    /// Otherwise a copy with one long discard would seem far ahead of schedule, and wait until the
    /// log is full.
    #[test]
    fn a_long_discard_is_little_work() {
        let cost = |piece| {
            Runs::new([piece].into_iter(), LARGEST)
                .next()
                .map(|run| run.cost(1000))
        };
        assert_eq!(cost(data(0, 8)), Some(5096));
        assert_eq!(cost(zeroes(0, 1 << 40)), Some(1512));
    }

    /// Where each run begins, how many sectors it has, and whether it is a stripe.
    fn stripes(pieces: &[Piece], operation: u64) -> Vec<(u64, u64, bool)> {
        stripes_up_to(LARGEST, pieces, operation)
    }

    /// The same, of at most so many bytes.
    fn stripes_up_to(largest: u64, pieces: &[Piece], operation: u64) -> Vec<(u64, u64, bool)> {
        let cost = MediumCost {
            operation,
            largest,
            ..MediumCost::USUAL
        };
        let runs = Stripes::new(pieces.iter().cloned(), cost);
        runs.map(|run| match &run {
            Run::Data { sector, .. } | Run::Zero { sector, .. } => {
                (*sector, run.sectors(), run.has_gaps())
            }
        })
        .collect()
    }

    #[test]
    fn runs_are_joined_to_a_stripe_where_that_is_cheaper() {
        let scattered: Vec<_> = (0..64).step_by(4).map(|block| data(block * 8, 8)).collect();
        let separate: Vec<_> = (0..64)
            .step_by(4)
            .map(|block| (block * 8, 8, false))
            .collect();
        assert_eq!(stripes(&scattered, 0), separate);
        assert_eq!(stripes(&scattered, 16 << 10), separate);
        // 16 operations and 64 KiB, or 2 operations and twice 244 KiB.
        assert_eq!(stripes(&scattered, 31 << 10), [(0, 61 * 8, true)]);
        // Two operations take the place of two.
        assert_eq!(stripes(&scattered[..2], 1 << 30), separate[..2]);
        // No stripe covers zeroes, or crosses a multiple of 256 KiB.
        let mut zero = scattered.clone();
        zero.insert(8, zeroes(232, 8));
        let cut = [(0, 29 * 8, true), (232, 8, false), (256, 29 * 8, true)];
        assert_eq!(stripes(&zero, 1 << 20), cut);
        let far: Vec<_> = (56..120)
            .step_by(4)
            .map(|block| data(block * 8, 8))
            .collect();
        assert_eq!(stripes(&far, 1 << 20)[2..], [(512, 53 * 8, true)]);
        // A medium that does more in one operation gets longer stripes.
        assert_eq!(stripes_up_to(1 << 20, &far, 1 << 20), [(448, 61 * 8, true)]);
    }

    proptest! {
        /// For any extents, the runs cover all of them in order; no run is too long, and no two
        /// could be joined.
        #[test]
        fn runs_are_the_extents_joined_and_cut(
            extents in prop::collection::vec((0u64..3, 1..2 * LARGEST / SECTOR_SIZE, 0u8..4), 1..40),
        ) {
            let payload = Buffer::zeroed(512).share();
            let (mut at, mut pieces, mut wanted) = (0, Vec::new(), Vec::new());
            for (gap, sectors, kind) in extents {
                at += gap;
                let place = match kind {
                    // The test never reads the bytes; the offset identifies them.
                    0 | 1 => Location::Memory { payload: payload.clone(), offset: at as usize * 512 },
                    _ => Location::Zero { unmap: kind == 2, lsn: 1 },
                };
                let zero = match place { Location::Zero { unmap, .. } => Some(unmap), _ => None };
                wanted.extend((at..at + sectors).map(|sector| (sector, zero)));
                pieces.push(Piece { sector: at, sectors, place: Some(place) });
                at += sectors;
            }
            let mut found = Vec::new();
            let mut last = None;
            for run in Runs::new(pieces.into_iter(), LARGEST) {
                match run {
                    Run::Zero { sector, sectors, unmap } => {
                        prop_assert_ne!(last, Some((sector, Some(unmap))));
                        found.extend((sector..sector + sectors).map(|sector| (sector, Some(unmap))));
                        last = Some((sector + sectors, Some(unmap)));
                    }
                    Run::Data { sector, parts } => {
                        prop_assert!(!parts.is_empty() && parts.len() <= MAX_CHUNKS);
                        let mut end = sector;
                        for part in parts {
                            let Some(Location::Memory { offset, .. }) = part.place else { panic!("{part:?}") };
                            prop_assert_eq!((part.sector, offset as u64), (end, end * 512));
                            end += part.sectors;
                        }
                        prop_assert!((end - sector) * SECTOR_SIZE <= LARGEST);
                        found.extend((sector..end).map(|sector| (sector, None)));
                        last = Some((end, None));
                    }
                }
            }
            prop_assert_eq!(found, wanted);
        }
    }
}
