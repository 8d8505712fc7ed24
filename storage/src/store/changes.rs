//! What changed between two points of a disk's history: the ranges that the records between them
//! wrote, zeroed or discarded.

use std::num::NonZeroUsize;
use std::path::Path;

use crate::catalog::options::DiskOptions;
use crate::catalog::readable::ReadableLog;
use crate::error::{Result, invalid};
use crate::index::Location;
use crate::store::view::LocatedDisk;
use crate::view::point::Point;
use crate::{Allocation, SECTOR_SIZE};

/// The changes of a disk between two points.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changes {
    /// Bytes of the disk.
    pub size: u64,
    /// The LSN of the last record before the changes.
    pub from_lsn: u64,
    /// The LSN of the last record of the changes, or `from_lsn`.
    pub to_lsn: u64,
    /// In the order of their offsets. No two overlap, and neighbours differ in `now`.
    pub ranges: Vec<ChangedRange>,
}

/// A range of a disk that was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangedRange {
    /// In bytes.
    pub offset: u64,
    /// In bytes.
    pub len: u64,
    /// The last change: bytes were written ([`Data`](Allocation::Data)), zeroes were written
    /// ([`Zero`](Allocation::Zero)), or it was discarded ([`Hole`](Allocation::Hole)).
    pub now: Allocation,
}

/// The ranges of the disk at `path` that changed after the point `from`, up to the point `to`
/// (`None`: the newest record). They are exact: a range is included if a record touched it, even if
/// the bytes did not change. The log is read on `threads` threads; `None`: one per processor.
///
/// What a restore in place between the points undid counts as changed. If the bytes are the base
/// image's again, it is reported as [`Data`](Allocation::Data).
///
/// # Errors
/// As [`restore_disk`](crate::restore_disk), for either point; or if `to` is before `from`.
pub fn disk_changes<'a>(
    path: &Path,
    log: impl Into<ReadableLog<'a>>,
    from: Point,
    to: Option<Point>,
    threads: Option<NonZeroUsize>,
) -> Result<Changes> {
    let log: ReadableLog<'_> = log.into();
    let (log_dir, access) = (log.dir(), log.access().of_image());
    let disk = &DiskOptions::new(path);
    let (base, mut log) = LocatedDisk::with_history(disk, log_dir, access, threads)?;
    let from_lsn = log.resolve(from, &base)?;
    let to_lsn = match to {
        Some(to) => log.resolve(to, &base)?,
        None => from_lsn.max(log.last_lsn),
    };
    if to_lsn < from_lsn {
        return Err(invalid(format!(
            "{}: the changes end at LSN {to_lsn}, before they begin at LSN {from_lsn}; exchange \
             the two points",
            log_dir.display()
        )));
    }
    let (control, disk_id) = (&log.control.control, log.entry().id.get());
    let (then, now) = (
        control.timeline(disk_id, from_lsn),
        control.timeline(disk_id, to_lsn),
    );
    let mut touched = log.read_records(|lsn| then.has(lsn) != now.has(lsn))?;
    // What was saved for snapshots, from the one at `from` on, has changed since, to what the base
    // image has now.
    let saved = log.read_saved(from_lsn..to_lsn)?;
    if let Some(saved) = &saved {
        saved.iter().for_each(|piece| {
            let place = Location::Zero {
                unmap: false,
                lsn: 0,
            };
            touched.insert(piece.sector, piece.sectors, 0, place);
        });
    }
    // What a restore in place undid has changed too: to what the records that still count left
    // there, or to the base image.
    let as_of_to = if saved.is_none() && control.is_continuous(disk_id, from_lsn, to_lsn) {
        None
    } else {
        log.read_until(to_lsn)?;
        Some(log.take_extents())
    };
    let mut pieces = Vec::new();
    for piece in touched.iter() {
        match &as_of_to {
            None => pieces.push(piece),
            Some(extents) => {
                extents.visit(piece.sector, piece.sectors, &mut |part| pieces.push(part))
            }
        }
    }
    let mut ranges: Vec<ChangedRange> = Vec::new();
    for piece in pieces {
        let changed = ChangedRange {
            offset: piece.sector * SECTOR_SIZE,
            len: piece.sectors * SECTOR_SIZE,
            now: match piece.place {
                Some(Location::Zero { unmap: true, .. }) => Allocation::Hole,
                Some(Location::Zero { unmap: false, .. }) => Allocation::Zero,
                _ => Allocation::Data,
            },
        };
        match ranges.last_mut() {
            Some(last) if last.now == changed.now && last.offset + last.len == changed.offset => {
                last.len += changed.len;
            }
            _ => ranges.push(changed),
        }
    }
    Ok(Changes {
        size: log.entry().size.get(),
        from_lsn,
        to_lsn,
        ranges,
    })
}
