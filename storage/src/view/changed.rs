//! Which sectors of a disk have changed since an LSN.
//!
//! The index says where the newest bytes of each sector are. Records lie in the log in the order of
//! their LSNs:
//! ```text
//!   base image │ segment   segment   segm|ent   segment
//!              └── up to the LSN ────────┘└── behind it: changed
//! ```
//! So it is enough to know the position in the log where the records after the LSN begin. The
//! segment that contains it is read once.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use crate::catalog::snapshot::SavedFiles;
use crate::error::{Error, ErrorKind, Result};
use crate::index::{ExtentLimit, ExtentMap, Location, Piece};
use crate::log::commit::{LogPosition, PositionCache, SavedExtentsCache};
use crate::log::ring::LiveSegment;
use crate::medium::file::Segment;
use crate::medium::filesystem::FileSystem;
use crate::mutant::{Mutant, planted};
use crate::recovery::contents::{Candidate, SegmentContents, VerifyScope};
use crate::sync::Arc;
use crate::view::saved::read_saved;
use crate::{Change, SECTOR_SIZE};

/// Most positions to remember.
const REMEMBERED: usize = 64;
/// For how many snapshots to remember what was saved since: a client asks about a few of them in
/// turn, range by range.
const REMEMBERED_SAVED: usize = 8;

/// Tells what has changed since an LSN.
pub(crate) struct ChangesSince {
    lsn: u64,
    /// `None`: there are no records after it.
    position: Option<LogPosition>,
    /// The sequences of the segments in use.
    sequences: HashMap<*const Segment, u64>,
    /// Set if the base images have moved past the LSN: what was saved of the disk since.
    saved: Option<SavedExtents>,
}

/// What was saved of a disk since a snapshot.
pub(crate) struct SavedExtents {
    pub extents: Arc<ExtentMap>,
    /// Whether everything in the log counts as changed too, because it is newer than the snapshot.
    pub and_log: bool,
}

/// What was saved of a disk (number and bytes) since the first of these LSNs, up to the last;
/// `None` if there are no saved files of the disk for the first. `known` caches results, up to the
/// limit.
///
/// # Errors
/// As [`read_saved`].
pub(crate) fn saved_since(
    medium: &dyn FileSystem,
    log_dir: &Path,
    files: &SavedFiles,
    disk: (u32, u64),
    lsns: Range<u64>,
    (known, limit): (&SavedExtentsCache, ExtentLimit),
) -> Result<Option<Arc<ExtentMap>>> {
    if !files.has(lsns.start, disk.0) {
        return Ok(None);
    }
    let of = (disk.0, lsns.start);
    let mut known = known.lock().expect("saved extents lock");
    known.retain(|(read, ..)| read == files);
    if let Some((.., extents)) = known.iter().find(|(_, other, _)| *other == of) {
        return Ok(Some(extents.clone()));
    }
    let read = || {
        let (lsns, limit) = (lsns.clone(), Some(limit.clone()));
        read_saved(medium, log_dir, files, disk, lsns, limit)
    };
    let read = match read() {
        Err(error) if error.kind() == ErrorKind::InvalidInput && !known.is_empty() => {
            // Entries in use elsewhere keep taking memory.
            known.clear();
            read()
        }
        other => other,
    };
    let Some(extents) = read? else {
        return Ok(None);
    };
    if known.len() == REMEMBERED_SAVED {
        known.remove(0);
    }
    let extents = Arc::new(extents);
    known.push((files.clone(), of, extents.clone()));
    Ok(Some(extents))
}

impl ChangesSince {
    /// `live`: the segments in use, of `size` bytes each, listed after the pieces were looked up in
    /// the index.
    ///
    /// # Errors
    /// If the segment that contains the position can't be read.
    pub(crate) fn new(
        lsn: u64,
        live: &[LiveSegment],
        size: u64,
        positions: &PositionCache,
    ) -> Result<Self> {
        let place = live.iter().position(|live| live.last.lsn > lsn);
        let position = place.map(|place| {
            let known = || positions.lock().expect("positions lock");
            if let Some(position) = known().get(&lsn) {
                return Ok(*position);
            }
            let limit = (place + 1 < live.len()).then_some(live[place].last.lsn);
            let offset = first_behind(&live[place].segment, lsn, size, limit)?;
            let (position, mut known) = ((live[place].sequence, offset), known());
            if known.len() == REMEMBERED {
                known.clear();
            }
            known.insert(lsn, position);
            Ok(position)
        });
        let live = live.iter();
        let sequences = live.map(|live| (Arc::as_ptr(&live.segment), live.sequence));
        Ok(Self {
            lsn,
            position: position.transpose()?,
            sequences: sequences.collect(),
            saved: None,
        })
    }

    /// For a snapshot that the base images have moved past.
    pub(crate) fn saved(lsn: u64, saved: SavedExtents) -> Self {
        Self {
            lsn,
            position: None,
            sequences: HashMap::new(),
            saved: Some(saved),
        }
    }

    /// Appends what has changed in this piece of an index. Everything after the LSN is in the log
    /// or was saved.
    pub(crate) fn append(&self, piece: &Piece, changes: &mut Vec<Change>) {
        if let Some(SavedExtents { extents, and_log }) = &self.saved {
            return if piece.place.is_some() && *and_log {
                push_change(changes, piece.sectors, true)
            } else {
                extents.visit(piece.sector, piece.sectors, &mut |part| {
                    push_change(changes, part.sectors, part.place.is_some());
                })
            };
        }
        // How many sectors at the start of the piece have not changed.
        let old = match (&piece.place, self.position) {
            (None, _) => piece.sectors,
            (Some(Location::Zero { lsn, .. }), _) if *lsn <= self.lsn => piece.sectors,
            (Some(Location::Zero { unmap: true, .. }), _)
                if planted(Mutant::ChangesMissDiscard) =>
            {
                piece.sectors
            }
            // What is not in the log yet is newer than anything durable, and so than any snapshot.
            (Some(Location::Zero { .. } | Location::Memory { .. }), _) => 0,
            (Some(Location::Log { segment, offset }), Some(position)) => {
                match self.sequences.get(&Arc::as_ptr(segment)) {
                    Some(sequence) if *sequence > position.0 => 0,
                    Some(sequence) if *sequence == position.0 => {
                        let before = position.1.saturating_sub(*offset) / SECTOR_SIZE;
                        before.min(piece.sectors)
                    }
                    // A segment no longer in use has only older records.
                    _ => piece.sectors,
                }
            }
            (Some(Location::Log { .. }), None) => piece.sectors,
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
    let message = format!("the changes since LSN {lsn} are unknown: there is no snapshot at it");
    Error::new(ErrorKind::NotFound, message)
}

/// The byte offset in a segment where the records after an LSN begin. The end of the segment may be
/// written to at the same time. `limit`: its last LSN, if another segment follows.
fn first_behind(segment: &Arc<Segment>, lsn: u64, size: u64, limit: Option<u64>) -> Result<u64> {
    let candidate = Candidate::of(segment)?;
    let contents = SegmentContents::read(&candidate, size, limit, VerifyScope::Tail, true);
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

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;
    use crate::store::resize::tests::{MIB, end, fill, new_disk};
    use crate::{Operation, Tracked};

    /// A client that asks for two bitmaps in turn must not cause the saved files to be read for
    /// each range.
    #[test]
    fn what_was_saved_for_several_snapshots_is_remembered() {
        let (_dir, store) = new_disk();
        let disk = &store.disks()[0];
        let mut port = disk.open_port().unwrap();
        let lsns = ["a", "b"].map(|name| {
            fill(&mut port, 0, 1);
            end(&mut port, Operation::Flush);
            disk.snapshot(name.parse().unwrap()).unwrap().lsn
        });
        fill(&mut port, 8, 2);
        end(&mut port, Operation::Flush);
        disk.checkpoint().unwrap();
        let asked = || lsns.map(|lsn| disk.changes(lsn, 0, MIB / SECTOR_SIZE, 8).unwrap());
        let first = asked();
        // Reading them would fail from now on.
        for entry in std::fs::read_dir(&disk.log.dir).unwrap() {
            let path = entry.unwrap().path();
            if path.to_str().unwrap().contains("saved-") {
                std::fs::rename(&path, path.with_extension("away")).unwrap();
            }
        }
        assert_eq!(asked(), first);
        assert_eq!(disk.log.saved_since.lock().unwrap().len(), 2);
        drop(port);
        store.close().unwrap();
    }
}
