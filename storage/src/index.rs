//! Where the newest bytes of each sector are: the extent index over the base image.
//!
//! ```text
//!   read ─▶ active (written since the last checkpoint began)
//!             └─ gaps ─▶ frozen (what a running checkpoint copies)
//!                          └─ gaps ─▶ base image
//! ```
//! A checkpoint freezes the active layer at one LSN in O(1) and copies from it without a lock while new
//! writes go to a new active layer: what it copies is exactly the disk as of that LSN.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::SharedBuffer;
use crate::segment::Segment;

/// Where an extent's bytes are.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// In memory, not written to the log yet; the extent starts `offset` bytes into the payload.
    Memory {
        payload: SharedBuffer,
        offset: usize,
    },
    /// In the log, at a byte offset of a segment file. Holding the segment keeps it from being recycled.
    Log { segment: Arc<Segment>, offset: u64 },
    /// All zeroes; `unmap` if the base image's space may be given back.
    Zero { unmap: bool },
}

impl Place {
    /// Where it goes on after `sectors`.
    pub(crate) fn skip(&self, sectors: u64) -> Self {
        let bytes = sectors * crate::SECTOR_SIZE;
        match self {
            Self::Memory { payload, offset } => Self::Memory {
                payload: payload.clone(),
                offset: offset + bytes as usize,
            },
            Self::Log { segment, offset } => Self::Log {
                segment: segment.clone(),
                offset: offset + bytes,
            },
            Self::Zero { unmap } => Self::Zero { unmap: *unmap },
        }
    }
}

#[derive(Clone, Debug)]
struct Extent {
    sectors: u64,
    lsn: u64,
    place: Place,
}

/// Non-overlapping extents by first sector.
#[derive(Debug, Default)]
pub(crate) struct ExtentMap {
    extents: BTreeMap<u64, Extent>,
}

/// A part of a looked-up range.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub sector: u64,
    pub sectors: u64,
    /// The record it comes from; 0 for a gap.
    pub lsn: u64,
    /// `None`: not in this layer.
    pub place: Option<Place>,
}

impl ExtentMap {
    /// Puts an extent over whatever was in its range.
    pub(crate) fn insert(&mut self, sector: u64, sectors: u64, lsn: u64, place: Place) {
        let end = sector + sectors;
        // The extent that begins before the range and reaches into it, or beyond it.
        if let Some((&start, before)) = self.extents.range_mut(..sector).next_back() {
            let before_end = start + before.sectors;
            if before_end > sector {
                let tail = (before_end > end).then(|| Extent {
                    sectors: before_end - end,
                    lsn: before.lsn,
                    place: before.place.skip(end - start),
                });
                before.sectors = sector - start;
                if let Some(tail) = tail {
                    self.extents.insert(end, tail);
                }
            }
        }
        while let Some((&start, _)) = self.extents.range(sector..end).next() {
            let old = self.extents.remove(&start).expect("just found");
            let old_end = start + old.sectors;
            if old_end > end {
                let place = old.place.skip(end - start);
                self.extents.insert(
                    end,
                    Extent {
                        sectors: old_end - end,
                        lsn: old.lsn,
                        place,
                    },
                );
            }
        }
        self.extents.insert(
            sector,
            Extent {
                sectors,
                lsn,
                place,
            },
        );
    }

    /// The range cut into pieces, in order, gaps included.
    pub(crate) fn pieces(&self, sector: u64, sectors: u64, pieces: &mut Vec<Piece>) {
        let end = sector + sectors;
        let first = match self.extents.range(..=sector).next_back() {
            Some((&start, extent)) if start + extent.sectors > sector => start,
            _ => sector,
        };
        let mut at = sector;
        for (&start, extent) in self.extents.range(first..end) {
            if start > at {
                pieces.push(Piece {
                    sector: at,
                    sectors: start - at,
                    lsn: 0,
                    place: None,
                });
                at = start;
            }
            let piece_end = (start + extent.sectors).min(end);
            let place = Some(extent.place.skip(at - start));
            pieces.push(Piece {
                sector: at,
                sectors: piece_end - at,
                lsn: extent.lsn,
                place,
            });
            at = piece_end;
        }
        if at < end {
            pieces.push(Piece {
                sector: at,
                sectors: end - at,
                lsn: 0,
                place: None,
            });
        }
    }

    /// The record `lsn`, which covered the range, is in the log now: whatever of it is still visible here
    /// moves from memory to there.
    pub(crate) fn relocate(
        &mut self,
        sector: u64,
        sectors: u64,
        lsn: u64,
        segment: &Arc<Segment>,
        offset: u64,
    ) {
        for (&start, extent) in self.extents.range_mut(sector..sector + sectors) {
            if extent.lsn == lsn {
                let offset = offset + (start - sector) * crate::SECTOR_SIZE;
                extent.place = Place::Log {
                    segment: segment.clone(),
                    offset,
                };
            }
        }
    }

    /// All extents in order of their sectors.
    pub(crate) fn iter(&self) -> impl Iterator<Item = Piece> + '_ {
        self.extents.iter().map(|(&sector, extent)| Piece {
            sector,
            sectors: extent.sectors,
            lsn: extent.lsn,
            place: Some(extent.place.clone()),
        })
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }
}

/// The two layers over a base image.
#[derive(Debug, Default)]
pub(crate) struct Index {
    pub active: ExtentMap,
    pub frozen: Option<Arc<ExtentMap>>,
}

impl Index {
    /// The range cut into pieces, newest layer first; `None` places are in the base image.
    pub(crate) fn pieces(&self, sector: u64, sectors: u64) -> Vec<Piece> {
        let mut pieces = Vec::new();
        self.active.pieces(sector, sectors, &mut pieces);
        let Some(frozen) = &self.frozen else {
            return pieces;
        };
        let mut merged = Vec::with_capacity(pieces.len());
        for piece in pieces {
            match piece.place {
                None => frozen.pieces(piece.sector, piece.sectors, &mut merged),
                Some(_) => merged.push(piece),
            }
        }
        merged
    }

    /// See [`ExtentMap::relocate`]. A frozen layer is still exclusively ours until its last record is durable.
    pub(crate) fn relocate(
        &mut self,
        sector: u64,
        sectors: u64,
        lsn: u64,
        segment: &Arc<Segment>,
        offset: u64,
    ) {
        self.active.relocate(sector, sectors, lsn, segment, offset);
        if let Some(frozen) = self.frozen.as_mut().and_then(Arc::get_mut) {
            frozen.relocate(sector, sectors, lsn, segment, offset);
        }
    }

    /// Freezes the active layer, if none is frozen already (a checkpoint that failed left one behind).
    /// Returns whether it did.
    pub(crate) fn freeze(&mut self) -> bool {
        let free = self.frozen.is_none();
        if free {
            self.frozen = Some(Arc::new(std::mem::take(&mut self.active)));
        }
        free
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Buffer;
    use proptest::prelude::*;

    proptest! {
        /// Against an array of one LSN a sector: same answer for every sector after any inserts.
        #[test]
        fn agrees_with_an_array(ops in prop::collection::vec((0u64..64, 1u64..20), 1..40), freeze_at in 0usize..40) {
            let mut index = Index::default();
            let mut model: [Option<(u64, u64)>; 96] = [None; 96];
            for (i, &(sector, sectors)) in ops.iter().enumerate() {
                let lsn = i as u64 + 1;
                if i == freeze_at { index.freeze(); }
                // The payload's first byte of each sector names the record and the offset within it.
                let mut payload = Buffer::zeroed(sectors as usize * 512);
                for s in 0..sectors { payload[s as usize * 512] = lsn as u8; payload[s as usize * 512 + 1] = s as u8; }
                index.active.insert(sector, sectors, lsn, Place::Memory { payload: payload.share(), offset: 0 });
                for s in 0..sectors { model[(sector + s) as usize] = Some((lsn, s)); }
            }
            let pieces = index.pieces(0, 96);
            prop_assert_eq!(pieces.iter().map(|p| p.sectors).sum::<u64>(), 96);
            for piece in pieces {
                for s in 0..piece.sectors {
                    let found = match &piece.place {
                        None => None,
                        Some(Place::Memory { payload, offset }) => {
                            let at = offset + s as usize * 512;
                            Some((u64::from(payload[at]), u64::from(payload[at + 1])))
                        }
                        other => panic!("{other:?}"),
                    };
                    prop_assert_eq!(found, model[(piece.sector + s) as usize]);
                }
            }
        }
    }
}
