//! From a log's records to the contents of its disks: reads the whole log and sorts the records by
//! disk.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use zerocopy::little_endian::U64;

use crate::SECTOR_SIZE;
use crate::catalog::control::ControlFile;
use crate::catalog::rewind::Timelines;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Control, Descriptor, DescriptorKind};
use crate::index::{ExtentLimit, ExtentMap, IndexBuilder, Location};
use crate::log::disk_state::DiskState;
use crate::medium::directory::Medium;
use crate::medium::file::Segment;
use crate::mutant::{Mutant, planted};
use crate::parallel::Progress;
use crate::recovery::contents::VerifyScope;
use crate::recovery::live::read_live;
use crate::recovery::scan::{self, FoundRecord, Scan};
use crate::sync::Arc;
use crate::sync::atomic::Ordering;

/// One disk's records in the log that are not in its base image.
#[derive(Default)]
pub(crate) struct UnappliedRecords {
    /// Those that count.
    pub extents: ExtentMap,
    /// LSN of the newest record.
    pub last_lsn: u64,
    /// Counts all records, including those undone by a rewind, which may itself be undone.
    pub records: u64,
    pub payload_bytes: u64,
}

/// One disk while the log is read.
struct DiskReplay {
    /// Its capacity.
    sectors: u64,
    extents: IndexBuilder,
    /// Everything but the extents.
    unapplied: UnappliedRecords,
}

impl DiskReplay {
    fn new(sectors: u64) -> Self {
        Self {
            sectors,
            extents: IndexBuilder::default(),
            unapplied: UnappliedRecords::default(),
        }
    }

    /// Whether this is a non-empty range of the disk.
    fn has(&self, sector: u64, sectors: u32) -> bool {
        let end = sector.checked_add(u64::from(sectors));
        sectors > 0 && end.is_some_and(|end| end <= self.sectors)
    }

    fn finish(self) -> Result<UnappliedRecords> {
        Ok(UnappliedRecords {
            extents: self.extents.finish()?,
            ..self.unapplied
        })
    }
}

/// All disks of a log while it is read.
struct LogReplay {
    disks: BTreeMap<u32, DiskReplay>,
    /// The records that count.
    timelines: Timelines,
    /// A record for sectors that no disk has.
    stray: Option<u64>,
}

impl LogReplay {
    /// Replays the disks as of LSN `until`.
    fn of(control: &Control, until: u64) -> Self {
        let disks = control.disks.iter();
        let disks = disks.map(|disk| {
            (
                disk.id.get(),
                DiskReplay::new(disk.size.get() / SECTOR_SIZE),
            )
        });
        Self {
            disks: disks.collect(),
            timelines: control.timelines(until),
            stray: None,
        }
    }

    /// Takes the next record, unless it is in the base image or a mark.
    fn take(&mut self, found: &FoundRecord<'_>) {
        if found.in_base || found.is_mark() {
            return;
        }
        let (descriptor, lsn) = (found.descriptor, found.lsn);
        let (sector, sectors) = (descriptor.sector.get(), descriptor.sectors.get());
        let disk_id = descriptor.disk_id.get();
        let disk = self.disks.get_mut(&disk_id);
        let changes = descriptor.changes_sectors();
        let Some(disk) = disk.filter(|disk| !changes || disk.has(sector, sectors)) else {
            self.stray.get_or_insert(lsn);
            return;
        };
        let counts = self.timelines.of(disk_id).has(lsn) || planted(Mutant::RecoveryAcceptsStale);
        if counts && changes {
            let place = place(descriptor, lsn, found.segment, found.offset);
            disk.extents.add(sector, sectors, place);
        }
        disk.unapplied.last_lsn = lsn;
        disk.unapplied.records += 1;
        disk.unapplied.payload_bytes += descriptor.payload_len();
    }

    fn finish(self, log_dir: &Path) -> Result<UnappliedByDisk> {
        if let Some(lsn) = self.stray {
            return Err(Error::new(
                ErrorKind::Damaged,
                format!(
                    "{}: record {lsn} is for sectors that no disk of this log has; restore the log \
                     from a copy",
                    log_dir.display()
                ),
            ));
        }
        let disks = self.disks.into_iter();
        let disks = disks.filter(|(_, disk)| disk.unapplied.records > 0);
        disks.map(|(id, disk)| Ok((id, disk.finish()?))).collect()
    }
}

/// The place of a record's bytes. Its payload, if any, is at this byte offset of a segment.
pub(crate) fn place(
    descriptor: &Descriptor,
    lsn: u64,
    segment: &Arc<Segment>,
    offset: u64,
) -> Location {
    match descriptor.kind() {
        Some(DescriptorKind::Write) => Location::Log {
            segment: segment.clone(),
            offset,
        },
        kind => Location::Zero {
            unmap: kind == Some(DescriptorKind::Discard),
            lsn,
        },
    }
}

/// The unapplied records of all disks that have any, by disk id.
pub(crate) type UnappliedByDisk = HashMap<u32, UnappliedRecords>;

/// Reads the log as of LSN `until`: what it holds, and where the newest bytes of each disk are.
/// `control` learns the rewinds.
pub(crate) fn read_log(
    medium: &dyn Medium,
    log_dir: &Path,
    control: &mut Control,
    (until, verify): (u64, VerifyScope),
    progress: Progress<'_>,
) -> Result<(Scan, UnappliedByDisk)> {
    let until = until.saturating_add(u64::from(planted(Mutant::PointReadsNewer)));
    let (mut scan, disks) = loop {
        let mut disks = LogReplay::of(control, until);
        let visit = &mut |found: FoundRecord<'_>| {
            if found.lsn <= until {
                disks.take(&found);
            }
        };
        let scan = scan::scan(medium, log_dir, control, verify, visit, progress)?;
        let known = scan.rewinds == control.rewinds;
        control.rewinds.clone_from(&scan.rewinds);
        // Which records count was unknown while they were read.
        if known {
            break (scan, disks);
        }
    };
    let indexes = disks.finish(log_dir)?;
    // Blocks overwritten by later records don't matter.
    scan.damaged.retain(|damaged| {
        let needed = |unapplied: &UnappliedRecords| damaged.is_needed(&unapplied.extents);
        indexes.get(&damaged.disk_id).is_some_and(needed)
    });
    Ok((scan, indexes))
}

/// As [`read_log`], and verifies only what it takes to find the log's end.
pub(crate) fn read_log_until(
    medium: &dyn Medium,
    log_dir: &Path,
    control: &mut Control,
    until: u64,
) -> Result<(Scan, UnappliedByDisk)> {
    let scope = (until, VerifyScope::Tail);
    read_log(medium, log_dir, control, scope, &mut |_, _| {})
}

/// The extents of one disk's records whose LSNs are `wanted`. These need not be the state at any
/// one point.
pub(crate) fn read_records(
    medium: &dyn Medium,
    log_dir: &Path,
    control: &Control,
    disk_id: u32,
    wanted: impl Fn(u64) -> bool,
) -> Result<ExtentMap> {
    let mut extents = IndexBuilder::default();
    let visit = &mut |found: FoundRecord<'_>| {
        let (descriptor, lsn) = (found.descriptor, found.lsn);
        if descriptor.disk_id.get() == disk_id && wanted(lsn) {
            let (sector, sectors) = (descriptor.sector.get(), descriptor.sectors.get());
            let place = place(descriptor, lsn, found.segment, found.offset);
            extents.add(sector, sectors, place);
        }
    };
    scan::scan(
        medium,
        log_dir,
        control,
        VerifyScope::Tail,
        visit,
        &mut |_, _| {},
    )?;
    extents.finish()
}

/// Reads one disk's extents from a log in use, up to LSN `until`. `segments`: see [`read_live`].
///
/// # Errors
/// As [`read_live`]; or if the extents go over the limit.
pub(crate) fn read_live_disk(
    segments: &[(Arc<Segment>, u64)],
    until: u64,
    (control, disk_id, log_dir): (&Control, u32, &Path),
    threads: usize,
    limit: Option<ExtentLimit>,
) -> Result<ExtentMap> {
    let newer = u64::from(planted(Mutant::PointReadsNewer));
    let mut disks = LogReplay::of(control, until.saturating_add(newer));
    if let Some(disk) = disks.disks.get_mut(&disk_id) {
        disk.extents = IndexBuilder::within(limit);
    }
    let visit = &mut |found: FoundRecord<'_>| {
        if found.descriptor.disk_id.get() == disk_id {
            disks.take(&found);
        }
    };
    read_live(segments, until, control, threads, visit)?;
    let unapplied = disks.finish(log_dir)?.remove(&disk_id);
    Ok(unapplied.unwrap_or_default().extents)
}

/// Reads the log for recovery. First syncs the segments and drops their cached pages, so that it
/// reads what is on the medium.
pub(crate) fn read_for_recovery(
    medium: &dyn Medium,
    log_dir: &Path,
    control: &mut ControlFile,
    progress: Progress<'_>,
) -> Result<(Scan, UnappliedByDisk)> {
    control.confirm()?;
    for (_, segment) in medium.segments()? {
        let dropped = segment.file.drop_cache();
        dropped.map_err(|e| Error::io("sync the log segment", &segment.path, e))?;
    }
    let (known, scope) = (&mut control.control, (u64::MAX, VerifyScope::Tail));
    let (scan, unapplied) = read_log(medium, log_dir, known, scope, progress)?;
    // Everything read is on the medium. The next write of the control file records that, so that
    // later damage to the last batch is not taken for a torn write, and the headers in void
    // segments are no longer needed as proof.
    let durable_lsn = &mut control.control.header.durable_lsn;
    *durable_lsn = U64::new(scan.read_to.max(durable_lsn.get()));
    if let Some(first) = scan.damaged.first() {
        let (count, dir) = (scan.damaged.len(), log_dir.display());
        tracing::error!(
            "{dir}: {count} blocks of 4096 bytes are damaged, the first in record {}; reading them \
             fails; close the disk, then 'walvisor disk check' lists sectors and LSNs",
            first.lsn
        );
    }
    Ok((scan, unapplied))
}

/// Gives each disk its part of the log, and makes the log's end durable. `keeps_records`: they stay
/// in the log. Also returns the segments that hold no part of the log.
pub(crate) fn recover(
    control: &mut ControlFile,
    states: &[Arc<DiskState>],
    (mut scan, mut indexes): (Scan, UnappliedByDisk),
    keeps_records: bool,
) -> Result<(Scan, Vec<Arc<Segment>>)> {
    // Unless the log keeps its records, freeze the indexes at once. The first checkpoint then
    // copies exactly what was recovered, whatever is written in the meantime, and so needs no room
    // in a ring that may be full.
    for state in states {
        if let Some(unapplied) = indexes.remove(&state.id) {
            let mut index = state.index_mut();
            index.active = unapplied.extents;
            if !keeps_records {
                index.freeze();
            }
            state.last_lsn.store(unapplied.last_lsn, Ordering::Release);
        }
    }
    // What lies after the end must never be taken for part of the log again.
    let free = scan.release(control)?;
    Ok((scan, free))
}
