//! From a log's records to the contents of its disks: reads the whole log and gives each disk its part.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use zerocopy::little_endian::U64;

use crate::SECTOR_SIZE;
use crate::catalog::control::ControlFile;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Control, Kind};
use crate::index::{Builder, ExtentMap, Place};
use crate::log::disk_state::DiskState;
use crate::medium::directory::Medium;
use crate::mutant::{Mutant, planted};
use crate::parallel::Progress;
use crate::recovery::contents::Verify;
use crate::recovery::scan::{self, Found, Scan};
use crate::sync::Arc;
use crate::sync::atomic::Ordering;

/// The records of one disk in a log that are not in its base image.
#[derive(Default)]
pub(crate) struct Waiting {
    pub extents: ExtentMap,
    /// LSN of the newest record.
    pub last_lsn: u64,
    pub records: u64,
    pub payload_bytes: u64,
}

/// A disk while the log is read.
struct Reading {
    /// Its capacity.
    sectors: u64,
    extents: Builder,
    /// Its extents are still missing.
    waiting: Waiting,
}

impl Reading {
    fn new(sectors: u64) -> Self {
        Self {
            sectors,
            extents: Builder::default(),
            waiting: Waiting::default(),
        }
    }

    /// Whether the disk has these sectors, at least one.
    fn has(&self, sector: u64, sectors: u32) -> bool {
        let end = sector.checked_add(u64::from(sectors));
        sectors > 0 && end.is_some_and(|end| end <= self.sectors)
    }

    fn finish(self) -> Waiting {
        Waiting {
            extents: self.extents.finish(),
            ..self.waiting
        }
    }
}

/// The waiting records of all disks that have any, by disk id.
pub(crate) type Indexes = HashMap<u32, Waiting>;

/// Reads the log: what it holds, and where the newest bytes of each disk are.
pub(crate) fn read_log(
    medium: &dyn Medium,
    log_dir: &Path,
    control: &Control,
    verify: Verify,
    progress: Progress<'_>,
) -> Result<(Scan, Indexes)> {
    read_log_until(medium, log_dir, control, u64::MAX, verify, progress)
}

/// As [`read_log`], but the indexes are as of LSN `until`.
pub(crate) fn read_log_until(
    medium: &dyn Medium,
    log_dir: &Path,
    control: &Control,
    until: u64,
    verify: Verify,
    progress: Progress<'_>,
) -> Result<(Scan, Indexes)> {
    let disks = control.disks.iter();
    let mut disks: BTreeMap<u32, Reading> = disks
        .map(|disk| (disk.id.get(), Reading::new(disk.size.get() / SECTOR_SIZE)))
        .collect();
    let mut stray = None;
    let scan = scan::scan(
        medium,
        log_dir,
        control,
        verify,
        &mut |Found {
                  lsn,
                  descriptor,
                  segment,
                  offset,
                  in_base,
                  ..
              }| {
            let newer = match planted(Mutant::PointReadsNewer) {
                true => lsn > until.saturating_add(1),
                false => lsn > until,
            };
            if in_base || newer {
                return;
            }
            let (sector, sectors) = (descriptor.sector.get(), descriptor.sectors.get());
            let disk = disks.get_mut(&descriptor.disk_id.get());
            let Some(disk) = disk.filter(|disk| disk.has(sector, sectors)) else {
                stray.get_or_insert(lsn);
                return;
            };
            let place = match Kind::from_raw(descriptor.kind.get()) {
                Some(Kind::Write) => Place::Log {
                    segment: segment.clone(),
                    offset,
                },
                kind => Place::Zero {
                    unmap: kind == Some(Kind::Discard),
                },
            };
            disk.extents.add(sector, sectors, place);
            disk.waiting.last_lsn = lsn;
            disk.waiting.records += 1;
            disk.waiting.payload_bytes += descriptor.payload_len();
        },
        progress,
    )?;
    let disks = disks.into_iter();
    let disks = disks.filter(|(_, disk)| disk.waiting.records > 0);
    let indexes: Indexes = disks.map(|(id, disk)| (id, disk.finish())).collect();
    let mut scan = scan;
    // Readers need no block that a later record has replaced.
    scan.damaged.retain(|damaged| {
        let needed = |waiting: &Waiting| damaged.is_needed(&waiting.extents);
        indexes.get(&damaged.disk_id).is_some_and(needed)
    });
    match stray {
        None => Ok((scan, indexes)),
        Some(lsn) => Err(Error::new(
            ErrorKind::Damaged,
            format!(
                "{}: record {lsn} is for sectors that no disk of this log has; restore the log from a copy",
                log_dir.display()
            ),
        )),
    }
}

/// Reads the log for recovery. Syncs the segments and drops their cached pages first, so that it reads what
/// is on the medium.
pub(crate) fn read_for_recovery(
    medium: &dyn Medium,
    log_dir: &Path,
    control: &mut ControlFile,
    progress: Progress<'_>,
) -> Result<(Scan, Indexes)> {
    control.confirm()?;
    for (_, segment) in medium.segments()? {
        let dropped = segment.file.drop_cache();
        dropped.map_err(|e| Error::io("sync the log segment", &segment.path, e))?;
    }
    let (scan, waiting) = read_log(medium, log_dir, &control.control, Verify::Tail, progress)?;
    if let Some(first) = scan.damaged.first() {
        let (count, dir) = (scan.damaged.len(), log_dir.display());
        tracing::error!(
            "{dir}: {count} blocks of 4096 bytes are damaged, the first in record {}: reads of them fail; close the \
             disk, then 'walvisor disk check' lists sectors and LSNs",
            first.lsn
        );
    }
    Ok((scan, waiting))
}

/// Gives the disks their parts of the log, and makes the log's end durable.
pub(crate) fn recover(
    control: &mut ControlFile,
    states: &[Arc<DiskState>],
    (scan, mut indexes): (Scan, Indexes),
) -> Result<Scan> {
    // The indexes are frozen at once. The first checkpoint then copies only what was recovered, whatever is written
    // meanwhile, and so needs no room in a ring that may be full.
    for state in states {
        if let Some(waiting) = indexes.remove(&state.id) {
            let mut index = state.index_mut();
            index.active = waiting.extents;
            index.freeze();
            state.last_lsn.store(waiting.last_lsn, Ordering::Release);
        }
    }
    let header = &mut control.control.header;
    let seen = match planted(Mutant::LsnRestart) {
        true => scan.last_lsn,
        false => scan.max_lsn.max(scan.last_lsn),
    };
    // This comes before any segment is wiped: numbers seen on the medium are never given out again.
    header.next_lsn = U64::new(seen + 1);
    header.next_cid = U64::new(scan.max_cid + 1);
    control.write()?;
    // The bytes behind the end must never be taken for part of the log again.
    scan.void
        .iter()
        .try_for_each(|segment| scan::wipe(segment))?;
    Ok(scan)
}
