//! Which sectors of a disk have changed since an LSN.
//!
//! The index says where the newest bytes of each sector are. Records lie in the log in the order of their LSNs:
//! ```text
//!   base image │ segment   segment   segm|ent   segment
//!              └── up to the LSN ────────┘└── behind it: changed
//! ```
//! So all that it takes is the border: where the records behind the LSN begin. The segment that has it is read once for that.

use std::collections::HashMap;

use crate::error::{Error, ErrorKind, Result};
use crate::index::{Piece, Place};
use crate::log::history::{Border, Borders};
use crate::log::ring::Live;
use crate::medium::segment::Segment;
use crate::recovery::contents::{Candidate, Contents, Verify};
use crate::sync::Arc;
use crate::{Change, SECTOR_SIZE};

/// Most borders that are remembered.
const REMEMBERED: usize = 64;

/// What is behind an LSN.
pub(crate) struct Since {
    lsn: u64,
    /// `None`: there are no records behind it.
    border: Option<Border>,
    /// The sequences of the segments in use.
    sequences: HashMap<*const Segment, u64>,
}

impl Since {
    /// `live`: the segments in use, of `size` bytes, as they were after the pieces of the index were looked up.
    ///
    /// # Errors
    /// If the segment that has the border can't be read.
    pub(crate) fn new(lsn: u64, live: &[Live], size: u64, borders: &Borders) -> Result<Self> {
        let place = live.iter().position(|live| live.last.lsn > lsn);
        let border = place.map(|place| {
            let known = || borders.lock().expect("borders lock");
            if let Some(border) = known().get(&lsn) {
                return Ok(*border);
            }
            let limit = (place + 1 < live.len()).then_some(live[place].last.lsn);
            let offset = first_behind(&live[place].segment, lsn, size, limit)?;
            let (border, mut known) = ((live[place].sequence, offset), known());
            if known.len() == REMEMBERED {
                known.clear();
            }
            known.insert(lsn, border);
            Ok(border)
        });
        let live = live.iter();
        let sequences = live.map(|live| (Arc::as_ptr(&live.segment), live.sequence));
        Ok(Self {
            lsn,
            border: border.transpose()?,
            sequences: sequences.collect(),
        })
    }

    /// Appends what has changed in this piece of an index. Nothing behind the LSN has left the log.
    pub(crate) fn append(&self, piece: &Piece, changes: &mut Vec<Change>) {
        // How many sectors at the begin of the piece have not changed.
        let old = match (&piece.place, self.border) {
            (None, _) => piece.sectors,
            (Some(Place::Zero { lsn, .. }), _) if *lsn <= self.lsn => piece.sectors,
            // What is not in the log yet came after all that is durable, as a named point is.
            (Some(Place::Zero { .. } | Place::Memory { .. }), _) => 0,
            (Some(Place::Log { segment, offset }), Some(border)) => {
                match self.sequences.get(&Arc::as_ptr(segment)) {
                    Some(sequence) if *sequence > border.0 => 0,
                    Some(sequence) if *sequence == border.0 => {
                        let before = border.1.saturating_sub(*offset) / SECTOR_SIZE;
                        before.min(piece.sectors)
                    }
                    // A segment that is not in use any more has only older records.
                    _ => piece.sectors,
                }
            }
            (Some(Place::Log { .. }), None) => piece.sectors,
        };
        push_change(changes, old, false);
        push_change(changes, piece.sectors - old, true);
    }
}

/// Appends to changes, joining neighbours of one kind.
pub(crate) fn push_change(changes: &mut Vec<Change>, sectors: u64, changed: bool) {
    match changes.last_mut() {
        _ if sectors == 0 => {}
        Some(last) if last.changed == changed => last.sectors += sectors,
        _ => changes.push(Change { sectors, changed }),
    }
}

/// The error for an LSN since which the changes are not known.
pub(crate) fn unknown_point(lsn: u64) -> Error {
    let message = format!("what has changed since LSN {lsn} is not known: no snapshot is there");
    Error::new(ErrorKind::NotFound, message)
}

/// The byte offset in a segment where the records behind an LSN begin. Others may write to the end of the segment meanwhile.
/// `limit`: its last LSN, if another segment follows.
fn first_behind(segment: &Arc<Segment>, lsn: u64, size: u64, limit: Option<u64>) -> Result<u64> {
    let candidate = Candidate::of(segment)?;
    let contents = Contents::read(&candidate, size, limit, Verify::Tail, true);
    let mut end = 0;
    for batch in &contents.batches {
        let first = batch.header.first_lsn.get();
        if first > lsn {
            return Ok(batch.offset);
        }
        end = batch.payload_at;
        for (of, descriptor) in (first..).zip(&batch.descriptors) {
            if of > lsn {
                return Ok(end);
            }
            end += descriptor.payload_len();
        }
        if batch.last_lsn() == lsn {
            return Ok(end);
        }
    }
    // A damaged header hides the rest: it counts as changed.
    Ok(end)
}
