//! Looking at a disk and its log without changing them.

use std::fs::File;
use std::num::NonZeroUsize;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::catalog::control::find_control;
use crate::catalog::options::DiskOptions;
use crate::error::{Error, Result};
use crate::medium::directory::{Directory, directory};
use crate::medium::engine::EngineKind;
use crate::parallel::{Progress, thread_count};
use crate::recovery::replay::read_log;
use crate::recovery::scan::DamagedBlock;
use crate::store::attach::OpenBase;

/// What a log holds, as [`inspect`] found it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogReport {
    /// Segment files there are.
    pub segments: u64,
    /// Most segment files the ring may hold.
    pub max_segments: u32,
    /// Bytes of a segment file.
    pub segment_size: u64,
    /// Valid batches in segments still needed.
    pub batches: u64,
    /// Records that are not in the base images yet.
    pub records: u64,
    /// Payload bytes of those records.
    pub payload_bytes: u64,
    /// All records up to here are in the base images.
    pub checkpoint_lsn: u64,
    /// The newest record.
    pub last_lsn: u64,
    /// A write that was never acknowledged lies torn behind the end: normal after a crash, and ignored.
    pub torn_tail: bool,
    /// Where the base images of all disks on the log were when they were last open.
    pub disks: Vec<PathBuf>,
    /// What the medium has changed since it was written, of the bytes that disks of the log still need: reads of them
    /// fail. Empty if the log is clean.
    pub damaged: Vec<DamagedSectors>,
}

/// Sectors of a disk whose newest bytes, in the log, are not what was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DamagedSectors {
    /// Where the disk's base image was when it was last open.
    pub disk: PathBuf,
    /// The first of them, of 512 bytes.
    pub sector: u64,
    /// How many: at most a block of 4096 bytes.
    pub sectors: u64,
    /// The record that wrote them.
    pub lsn: u64,
    /// The segment file.
    pub segment: PathBuf,
    /// Byte offset in the segment file.
    pub offset: u64,
}

/// A disk and its log, as [`inspect`] found them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskReport {
    /// Bytes of the disk.
    pub size: u64,
    /// Bytes of the file system that the base image takes.
    pub allocated: u64,
    /// The log; `None` for a plain raw image that has none.
    pub log: Option<LogReport>,
}

/// Looks at a disk, reads its whole log and verifies every checksum, changing nothing. A log that is whole but for some
/// payloads is no error: the report names them.
///
/// # Errors
/// [`ErrorKind::Damaged`](crate::ErrorKind::Damaged) if acknowledged records are missing; [`ErrorKind::Locked`](crate::ErrorKind::Locked) if the disk or its log is
/// open elsewhere; [`ErrorKind::WrongLog`](crate::ErrorKind::WrongLog) if the log is not this disk's.
pub fn inspect(path: &Path, log_dir: &Path) -> Result<DiskReport> {
    inspect_telling(path, log_dir, None, &mut |_, _| {})
}

/// As [`inspect`], on so many threads (`None`: as many as there are processors; the report is the same for any number),
/// and tells of it as it goes on.
///
/// # Errors
/// As [`inspect`].
pub fn inspect_telling(
    path: &Path,
    log_dir: &Path,
    threads: Option<NonZeroUsize>,
    progress: Progress<'_>,
) -> Result<DiskReport> {
    let control = find_control(log_dir)?;
    let base = OpenBase::open(&DiskOptions::new(path), control.is_some())?;
    let metadata = base.file.host().map(File::metadata).transpose();
    let metadata = metadata.map_err(|error| Error::io("look at", path, error))?;
    let size = base.size;
    let allocated = metadata.map_or(size, |metadata| metadata.blocks() * 512);
    let Some(control) = control else {
        base.refuse_open(log_dir)?;
        return Ok(DiskReport {
            size,
            allocated,
            log: None,
        });
    };
    let medium = Directory {
        threads: thread_count(threads),
        ..directory(log_dir, EngineKind::Blocking)
    };
    let (scan, waiting) = read_log(&medium, log_dir, &control.control, progress)?;
    let found = base.find(&control, log_dir, &waiting)?;
    let size = control.control.disks[found].size.get();
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
    let log = LogReport {
        segments: (scan.live.len() + scan.free.len() + scan.void.len()) as u64,
        max_segments: header.max_segments.get(),
        segment_size: header.segment_size.get(),
        batches: scan.batches,
        records: scan.records,
        payload_bytes: scan.payload_bytes,
        checkpoint_lsn: header.checkpoint_lsn.get(),
        last_lsn: scan.last_lsn,
        torn_tail: scan.torn_tail,
        disks: control.image_paths(),
        damaged: scan.damaged.iter().map(sectors).collect(),
    };
    Ok(DiskReport {
        size,
        allocated,
        log: Some(log),
    })
}
