//! A front-end's requests to a disk, their completions, and reports on a disk and its log.

use std::io;

use crate::{Buffer, StallCounts};

/// Bytes in a sector, the unit of every address here, as in virtio-blk (virtio 1.2, 5.2.4).
pub const SECTOR_SIZE: u64 = 512;

/// The longest request in bytes; longer ones fail with [`Failure::TooLarge`]. A request is one log
/// record, and a record never spans segments.
pub const MAX_REQUEST_BYTES: usize = 16 << 20;

/// One request to a disk. Every range is in sectors of [`SECTOR_SIZE`] bytes.
#[derive(Debug)]
pub enum Operation {
    /// Read `sectors` sectors from `sector` on. Completes with the data.
    Read {
        /// First sector.
        sector: u64,
        /// Number of sectors, at least 1.
        sectors: u32,
    },
    /// Write `data`, whose length is a positive multiple of [`SECTOR_SIZE`], from `sector` on.
    Write {
        /// First sector.
        sector: u64,
        /// The payload, copied out of the client's memory already.
        data: Buffer,
    },
    /// The client no longer needs these sectors; they read as zeroes from now on.
    Discard {
        /// First sector.
        sector: u64,
        /// Number of sectors, at least 1.
        sectors: u32,
    },
    /// Make these sectors read as zeroes.
    WriteZeroes {
        /// First sector.
        sector: u64,
        /// Number of sectors, at least 1.
        sectors: u32,
        /// Whether their space may be freed.
        unmap: bool,
    },
    /// Make all requests that completed before this one was submitted survive power loss.
    Flush,
}

/// Why a request failed. The data is as if it had never been made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// The range is empty, or ends beyond the disk.
    #[error("the range is empty or ends beyond the disk")]
    OutOfRange,
    /// Longer than [`MAX_REQUEST_BYTES`], or no multiple of the sector size.
    #[error("the request is too large or not a multiple of 512 bytes")]
    TooLarge,
    /// The disk is read-only.
    #[error("the disk is read-only")]
    ReadOnly,
    /// The medium failed, or the log had failed before (promise 5: an error is final). Or the log
    /// is full and can't be emptied, for instance for lack of space for the base image; once there
    /// is space, requests succeed again.
    #[error("I/O error")]
    Io,
}

/// Refuses sectors that a disk of `capacity` sectors does not have.
///
/// # Errors
/// [`Failure::OutOfRange`]; also for no sectors at all.
pub fn check_range(sector: u64, sectors: u64, capacity: u64) -> Result<(), Failure> {
    match sector.checked_add(sectors) {
        Some(end) if sectors > 0 && end <= capacity => Ok(()),
        _ => Err(Failure::OutOfRange),
    }
}

impl From<Failure> for io::Error {
    fn from(failure: Failure) -> Self {
        let kind = match failure {
            Failure::OutOfRange | Failure::TooLarge => io::ErrorKind::InvalidInput,
            Failure::ReadOnly => io::ErrorKind::ReadOnlyFilesystem,
            Failure::Io => io::ErrorKind::Other,
        };
        Self::new(kind, failure)
    }
}

/// The end of a request.
#[derive(Debug)]
pub struct Completion {
    /// The token given with the request.
    pub token: u64,
    /// The data of a read, `None` for every other operation; or why it failed.
    pub result: Result<Option<Buffer>, Failure>,
}

/// How a range of a disk is stored. A hint, possibly outdated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// The range may hold any bytes.
    Data,
    /// The range reads as zeroes, and has space allocated.
    Zero,
    /// The range reads as zeroes, and takes no space.
    Hole,
}

/// A range of a disk that is stored in one way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The length of the range in sectors, at least 1.
    pub sectors: u64,
    /// How the range is stored.
    pub allocation: Allocation,
}

impl Extent {
    /// A range of data: what is known of a disk that is not [`Mapped`](crate::Mapped).
    #[must_use]
    pub fn data(sectors: u64) -> Self {
        let allocation = Allocation::Data;
        Self {
            sectors,
            allocation,
        }
    }
}

/// A point in a disk's past.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PastPoint {
    /// Its name: ASCII letters, digits, '.', '_' and '-'.
    pub name: String,
    /// The number by which the disk knows it.
    pub number: u64,
}

/// A range of a disk, and whether it has changed since a point in the past.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change {
    /// The length of the range in sectors, at least 1.
    pub sectors: u64,
    /// Whether it has changed.
    pub changed: bool,
}

/// The result of copying a disk by an import or export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Bytes of the disk.
    pub size: u64,
    /// Bytes copied; the others were holes or are shared.
    pub copied: u64,
    /// Whether the new file shares the base image's blocks (a reflink, where the file system has
    /// them). A write to either file does not affect the other.
    pub shared: bool,
}

/// Length of [`LogCounters::group_sizes`].
pub const GROUP_SIZE_CLASSES: usize = 10;

/// What the log has done since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogCounters {
    /// FLUSH requests received, and writes in writethrough mode.
    pub flushes: u64,
    /// Those of `flushes` that waited for a commit group. The others had nothing to make durable.
    pub flushes_grouped: u64,
    /// Commit groups made durable.
    pub groups: u64,
    /// Writes to log segments: one for each batch.
    pub writes: u64,
    /// Device syncs (fdatasync) of log segments.
    pub syncs: u64,
    /// Bytes written to segments, headers and padding included.
    pub log_bytes: u64,
    /// Checkpoints finished.
    pub checkpoints: u64,
    /// Bytes that checkpoints wrote to base images; zeroed ranges do not count.
    pub base_bytes: u64,
    /// Operations of checkpoints on base images, zeroing included. Fewer than records, because
    /// adjacent records are copied together.
    pub base_writes: u64,
    /// Bytes of memory taken by the log's index now.
    pub index_bytes: u64,
    /// Commit groups by how many waiters they served: element 0 counts those that served 1, element
    /// 1 those that served 2, then 3 to 4, 5 to 8 and so on by powers of two; the last element
    /// counts all above 256. Groups without waiters do not count.
    pub group_sizes: [u64; GROUP_SIZE_CLASSES],
    /// Writes, and other requests that become records, that waited before they were in the log.
    pub stalled: StallCounts,
    /// Those that failed.
    pub refused: StallCounts,
}
