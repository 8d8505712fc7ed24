//! Inspecting a disk and its log without changing them.

use std::fs::File;
use std::num::NonZeroUsize;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::catalog::control::{ControlFile, find_control};
use crate::catalog::options::DiskOptions;
use crate::catalog::readable::ReadableLog;
use crate::catalog::retention::Retention;
use crate::catalog::snapshot::{Snapshot, SnapshotName};
use crate::error::{Error, Result};
use crate::index::IndexMemory;
use crate::log::holds::Holds;
use crate::log::spill::Spill;
use crate::medium::directory::directory_to_read;
use crate::medium::file::Segment;
use crate::medium::filesystem::{OpenMode, files};
use crate::medium::lock::Access;
use crate::parallel::Progress;
use crate::recovery::contents::VerifyScope;
use crate::recovery::replay::read_log;
use crate::recovery::scan::DamagedBlock;
use crate::store::attach::OpenBase;
use crate::view::horizon::LogHistory;
use crate::view::saved::{self, snapshots};

/// The state of a log, as [`inspect`] found it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogReport {
    /// Number of segment files.
    pub segments: u64,
    /// Maximum number of segment files in the ring.
    pub max_segments: u32,
    /// Size of a segment file in bytes.
    pub segment_size: u64,
    /// Valid batches in segments in use.
    pub batches: u64,
    /// Records that are not in the base images yet.
    pub records: u64,
    /// Payload bytes of those records.
    pub payload_bytes: u64,
    /// All records up to this LSN are in the base images.
    pub checkpoint_lsn: u64,
    /// LSN of the newest record.
    pub last_lsn: u64,
    /// The history of its disks.
    pub history: LogHistory,
    /// Whether there is a torn write after the log's end. It was never acknowledged: normal after a
    /// crash, and ignored.
    pub torn_tail: bool,
    /// Where the base images of all disks on the log were when last open.
    pub disks: Vec<PathBuf>,
    /// Sectors whose newest bytes are in the log and damaged there, so that reads fail. Empty if
    /// the log is clean.
    pub damaged: Vec<DamagedSectors>,
    /// Damaged batch headers. Their segments' summaries still have them, so no record is lost.
    pub damaged_headers: Vec<DamagedHeader>,
    /// Snapshots at which the disk can't be seen, or not completely.
    pub snapshot_faults: Vec<SnapshotFault>,
}

/// What is wrong with snapshots of a disk. Does not affect the disk's present contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SnapshotFault {
    /// The snapshots, oldest first.
    pub snapshots: Vec<SnapshotName>,
    /// What is wrong, and in which file.
    pub what: String,
}

/// The place of a batch header that is damaged in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DamagedHeader {
    /// The segment file that holds the batch.
    pub segment: PathBuf,
    /// Byte offset of the header in the segment file.
    pub offset: u64,
}

/// Sectors of a disk whose newest bytes are damaged in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DamagedSectors {
    /// Where the disk's base image was when it was last open.
    pub disk: PathBuf,
    /// The first damaged sector, of 512 bytes.
    pub sector: u64,
    /// Number of sectors: at most a block of 4096 bytes.
    pub sectors: u64,
    /// LSN of the record that wrote them.
    pub lsn: u64,
    /// The segment file that holds the record.
    pub segment: PathBuf,
    /// Byte offset of the sectors in the segment file.
    pub offset: u64,
}

/// A disk and its log, as [`inspect`] found them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskReport {
    /// Size of the disk in bytes.
    pub size: u64,
    /// Bytes that the base image takes on its file system.
    pub allocated: u64,
    /// Whether the image carries a disk's mark. If so, an image without a log is complete, because
    /// the disk was closed; if not, that is unknown, because a copy may have lost the mark.
    pub marked: bool,
    /// Bytes that the image lacks because it failed, and that are in a spill file beside the log.
    pub spilled: u64,
    /// Bytes of the chunks that a restore has not fetched yet.
    pub unfetched: u64,
    /// The log; `None` for a raw image that has none.
    pub log: Option<LogReport>,
}

impl DiskReport {
    /// Whether nothing is damaged, and all snapshots can be seen.
    pub fn is_clean(&self) -> bool {
        self.log.as_ref().is_none_or(|log| {
            log.damaged.is_empty()
                && log.damaged_headers.is_empty()
                && log.snapshot_faults.is_empty()
        })
    }
}

/// Inspects a disk, reads its whole log and verifies every checksum. Changes nothing. Damaged
/// payloads in an otherwise complete log are not an error; the report lists them.
///
/// This reads every file that an open, a look or a restore trusts:
///
/// | file | what is verified |
/// |---|---|
/// | `control` | both slots; one that is right is enough, as after a power cut |
/// | `segment-...` | every header and payload of those that hold records which are not in the base images, and their lengths |
/// | `saved-...` | every header and payload that the control file counts, and that none is missing |
/// | `spill-...` | that the map of each disk of the log is whole; the bytes have no checksums |
/// | the base image | its mark (else its inode), its length, its samples, and the time of the last write, if snapshots need it; it has no checksums |
///
/// It leaves out files that none of them trusts: unused segments, `.new` files, and saved files of
/// deleted snapshots.
///
/// # Errors
/// [`ErrorKind::Damaged`](crate::ErrorKind::Damaged) if acknowledged records are missing;
/// [`ErrorKind::Locked`](crate::ErrorKind::Locked) if the disk or its log is open elsewhere;
/// [`ErrorKind::WrongLog`](crate::ErrorKind::WrongLog) if the log is not this disk's.
pub fn inspect<'a>(path: &Path, log: impl Into<ReadableLog<'a>>) -> Result<DiskReport> {
    inspect_with_progress(path, log, None, &mut |_, _| {})
}

/// As [`inspect`], on `threads` threads (`None`: one per processor), with progress reports. The
/// result does not depend on the number of threads.
///
/// # Errors
/// As [`inspect`].
pub fn inspect_with_progress<'a>(
    path: &Path,
    log: impl Into<ReadableLog<'a>>,
    threads: Option<NonZeroUsize>,
    progress: Progress<'_>,
) -> Result<DiskReport> {
    let log: ReadableLog<'_> = log.into();
    let (log_dir, access) = (log.dir(), log.access());
    let control = find_control(log_dir, access)?;
    let base = OpenBase::open(
        &DiskOptions::new(path),
        access.of_image(),
        log_dir,
        control.is_some(),
    )?;
    let metadata = base.file.host().map(File::metadata).transpose();
    let metadata = metadata.map_err(|error| Error::io("read its metadata", path, error))?;
    let (size, marked) = (base.size, base.identity.mark.is_some());
    let unfetched = base.file.chunk_gate().map_or(0, |gate| gate.absent_bytes());
    let allocated = metadata.map_or(size.saturating_sub(unfetched), |metadata| {
        metadata.blocks() * 512
    });
    let Some(mut control) = control else {
        base.refuse_foreign(log_dir)?;
        return Ok(DiskReport {
            size,
            allocated,
            marked,
            spilled: 0,
            unfetched,
            log: None,
        });
    };
    let medium = directory_to_read(log_dir, access, threads);
    let (scan, mut unapplied) = read_log(
        &medium,
        log_dir,
        &mut control.control,
        (u64::MAX, VerifyScope::All),
        progress,
    )?;
    let found = base.find(&control, log_dir, &unapplied)?;
    let snapshot_faults = snapshot_faults(&base, &control, found, (log_dir, access))?;
    let entry = &control.control.disks[found];
    let (size, id) = (entry.size.get(), entry.id.get());
    let mut spilled = 0;
    // An open of the log needs the maps of all its disks.
    for entry in &control.control.disks {
        let spill = Spill::of(&control, entry.id.get(), OpenMode::Read)?;
        if let Some(spill) = spill.filter(|_| entry.id.get() == id) {
            spilled = spill.bytes();
        }
    }
    let header = &control.control.header;
    let sectors = |block: &DamagedBlock| {
        let mut disks = control.control.disks.iter();
        let entry = disks.find(|entry| entry.id.get() == block.disk_id);
        DamagedSectors {
            disk: entry
                .map(|entry| entry.path(&control.home))
                .unwrap_or_default(),
            sector: block.sector,
            sectors: block.sectors,
            lsn: block.lsn,
            segment: block.segment.path.clone(),
            offset: block.offset,
        }
    };
    let header_of = |(segment, offset): &(Arc<Segment>, u64)| DamagedHeader {
        segment: segment.path.clone(),
        offset: *offset,
    };
    let index = IndexMemory::default();
    for records in unapplied.values_mut() {
        records.extents.count_in(&index);
    }
    let newer = |lsn| scan.live.iter().filter(move |live| live.last.lsn > lsn);
    let held = Holds::of(&control.control).held();
    let bytes = |segments: usize| segments as u64 * header.segment_size.get();
    let (snapshots, saved_bytes) = snapshots(&*files(), log_dir, &control.control);
    let history = LogHistory {
        horizon: scan.horizon,
        kept_bytes: bytes(scan.live.len()),
        pinned_bytes: bytes(held.map_or(0, |lsn| newer(lsn).count())),
        room_bytes: bytes(header.max_segments.get() as usize),
        index_bytes: index.bytes(),
        retain: Retention::of(&control.control.history),
        saved_bytes,
        snapshots,
    };
    let log = LogReport {
        segments: scan.segments() as u64,
        max_segments: header.max_segments.get(),
        segment_size: header.segment_size.get(),
        batches: scan.batches,
        records: scan.records,
        payload_bytes: scan.payload_bytes,
        checkpoint_lsn: header.checkpoint_lsn.get(),
        last_lsn: scan.last.lsn,
        history,
        torn_tail: scan.torn_tail,
        disks: control.image_paths(),
        damaged: scan.damaged.iter().map(sectors).collect(),
        damaged_headers: scan.damaged_headers.iter().map(header_of).collect(),
        snapshot_faults,
    };
    Ok(DiskReport {
        size,
        allocated,
        marked,
        spilled,
        unfetched,
        log: Some(log),
    })
}

/// What is wrong with the snapshots of the disk at this place.
fn snapshot_faults(
    base: &OpenBase,
    control: &ControlFile,
    place: usize,
    (log_dir, access): (&Path, Access),
) -> Result<Vec<SnapshotFault>> {
    let known = &control.control;
    let disk_id = known.disks[place].id.get();
    let all = Snapshot::all(known);
    let names = |is: &dyn Fn(&Snapshot) -> bool| {
        let of_disk = all.iter().filter(|snapshot| snapshot.has(disk_id));
        let wanted = of_disk.filter(|snapshot| is(snapshot));
        wanted.map(|snapshot| snapshot.name).collect()
    };
    let mut faults = Vec::new();
    let since = known.since(disk_id);
    let lost: Vec<_> = names(&|snapshot| snapshot.lsn < since);
    let image = base.options.path.display();
    if !lost.is_empty() {
        faults.push(SnapshotFault {
            snapshots: lost,
            what: format!("{image} had another image before LSN {since}, or was not on the log"),
        });
    }
    let ours: Vec<_> = names(&|snapshot| snapshot.lsn >= since);
    // The process that holds a log has the right image open.
    if access.newest().is_none()
        && let Some(why) = base.why_no_past(control, place)?
        && !ours.is_empty()
    {
        faults.push(SnapshotFault {
            snapshots: ours,
            what: format!(
                "{image} is not the image that its past depends on: {why}; put that image back"
            ),
        });
    }
    // Older snapshots also need the files of newer ones.
    let damage = saved::check(&*files(), log_dir, &known.saved_files());
    faults.extend(damage.into_iter().map(|(lsn, what)| SnapshotFault {
        snapshots: names(&|snapshot| snapshot.lsn <= lsn),
        what,
    }));
    Ok(faults)
}
