//! The options of logs and disks, and their limits.

use std::num::{NonZeroU32, NonZeroUsize};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::SECTOR_SIZE;
use crate::catalog::retention::Retention;
use crate::error::{Result, invalid};
use crate::format::BLOCK;
use crate::medium::engine::EngineKind;

/// How a log is created and run.
#[derive(Clone, Copy, Debug)]
pub struct StoreOptions {
    /// Bytes of a segment file of a new log: a multiple of 4096, 64 KiB to 1 GiB. Default 64 MiB. Requests longer
    /// than a quarter of it are refused.
    pub segment_size: u64,
    /// Most segment files of a new log: 4 to 65536. Default 32.
    pub max_segments: u32,
    /// The I/O engine.
    pub engine: EngineKind,
    /// Whether one sync serves every FLUSH that waits for it. If off, each FLUSH costs a sync of its own, as
    /// without group commit: for comparison only. Default on.
    pub group_commit: bool,
    /// How long a commit group may wait for more to join it. Default: adaptive.
    pub commit_wait: CommitWait,
    /// Whether each record gets a write of its own, in the order of the LSNs, before the sync that the whole group
    /// shares. For comparison only: it shows the gain of one write for the whole group. With one record for each
    /// waiting client, that is one write for each client. The resulting log is the same. Default off.
    pub write_per_waiter: bool,
    /// Added to the time of each sync of the log, to measure the effect of a slower medium. Default zero.
    pub sync_latency: Duration,
    /// Most operations a second on the log's segments, as small cloud volumes limit them. A sync is one operation,
    /// a write is one for each 256 KiB begun, and a write that syncs too is both. Checkpoints and reads are free.
    /// With this or `operation_latency` one thread does all writes of the log, so that no other thread has to wait.
    /// Default: no limit.
    pub operations_per_second: Option<NonZeroU32>,
    /// Added to the time of each write to the log's segments and of each sync of them. Default zero.
    pub operation_latency: Duration,
    /// How long closing may copy the log to the base images. What is not copied by then stays in the log, and the
    /// next open goes on with it; zero: nothing is copied. Default: closing copies everything, however long it takes.
    pub close_time: Option<Duration>,
    /// Most bytes of memory that the index of a log takes, at least 1: it knows where the log has the newest bytes of each
    /// sector, and takes about 17 bytes for each written range until a checkpoint has copied that to the base image.
    /// From half of this on, the log is copied; at all of it, writes wait for that. (The checksums of what the log
    /// holds take 4 bytes more for each 4 KiB, and 8 for each batch.) Looks, and what is kept in memory for snapshots, may take as much
    /// again, or 1 MiB if that is more; what would take more is refused. Default 64 MiB.
    pub index_memory: u64,
    /// How much of its history the log keeps. Default: as before; nothing for a new log. To keep a number of bytes, the log
    /// may get as many more segment files.
    pub retain: Option<Retention>,
    /// What happens to requests that need room in a full log that can't be emptied for want of space. Default: they fail.
    pub on_full: FullLogPolicy,
    /// Threads that read a log while it is opened, and copy an image while it is imported. Default: one for each
    /// processor.
    pub threads: Option<NonZeroUsize>,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            segment_size: 64 << 20,
            max_segments: 32,
            engine: EngineKind::Auto,
            group_commit: true,
            commit_wait: CommitWait::default(),
            write_per_waiter: false,
            sync_latency: Duration::ZERO,
            operations_per_second: None,
            operation_latency: Duration::ZERO,
            close_time: None,
            index_memory: 64 << 20,
            retain: None,
            on_full: FullLogPolicy::Fail,
            threads: None,
        }
    }
}

impl StoreOptions {
    /// Whether the log's leader builds every batch.
    pub(crate) fn leader_alone(&self) -> bool {
        let paced = self.operations_per_second.is_some() || !self.operation_latency.is_zero();
        paced || self.write_per_waiter
    }
}

/// What happens to requests that need room when a log is full and a file system has no space to empty it. The log tries
/// again each second either way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FullLogPolicy {
    /// They fail.
    #[default]
    Fail,
    /// They wait until there is space. Reads go on.
    Pause,
}

/// How long a commit group may wait for more FLUSHes, and writes in writethrough mode, to join it. The default is
/// adaptive: at most half the time of a sync, and only while that makes groups larger.
///
/// No group waits once every client has a FLUSH in it: each open [`Port`](crate::Port) is one, unless it
/// [says otherwise](crate::BackendQueue::set_clients).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommitWait {
    /// The longest wait; zero for none. `None`: adaptive, or 100 ms if a `count` is given.
    pub longest: Option<Duration>,
    /// A group starts as soon as this many FLUSHes wait. `None`: as many as the last group served or came
    /// meanwhile.
    pub count: Option<u32>,
}

impl CommitWait {
    /// Groups start at once.
    pub const NONE: Self = Self {
        longest: Some(Duration::ZERO),
        count: None,
    };
}

/// A disk to be opened.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// The base image.
    pub path: PathBuf,
    /// Whether writes are refused.
    pub read_only: bool,
    /// The meaning of FLUSH and of a completed WRITE.
    pub cache: CacheMode,
    /// Whether the image is known to be raw.
    pub format: ImageFormat,
}

impl DiskOptions {
    /// A writable writeback disk.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            read_only: false,
            cache: CacheMode::Writeback,
            format: ImageFormat::Unknown,
        }
    }
}

/// What is known of an image's format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ImageFormat {
    /// Nothing. An image that has never been a disk of a log is refused if it begins as a qcow2, VMDK, VDI, VHD, VHDX, QED
    /// or LUKS image does.
    #[default]
    Unknown,
    /// It is raw, whatever its first bytes are.
    Raw,
}

/// The log directory of a disk for which none is given: `disk.img` has `disk.img.wal`.
pub fn default_log_dir(disk: &Path) -> PathBuf {
    let mut name = disk.as_os_str().to_owned();
    name.push(".wal");
    name.into()
}

/// The meaning of FLUSH and of a completed WRITE.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheMode {
    /// A completed WRITE may be in memory; FLUSH makes it durable.
    #[default]
    Writeback,
    /// A WRITE completes when it is durable.
    Writethrough,
    /// FLUSH completes at once and promises nothing. For throw-away guests.
    Unsafe,
}

/// How many segment files a log may be allowed to have.
pub(crate) const SEGMENTS: std::ops::RangeInclusive<u32> = 4..=65536;

pub(crate) fn check_options(options: &StoreOptions) -> Result<()> {
    let size = options.segment_size;
    if !(64 << 10..=1 << 30).contains(&size) || !size.is_multiple_of(BLOCK as u64) {
        return Err(invalid(format!(
            "a segment size of {size} bytes is not valid; use a multiple of 4096 from 64 KiB to 1 GiB"
        )));
    }
    if !SEGMENTS.contains(&options.max_segments) {
        return Err(invalid(format!(
            "a limit of {} segments is not valid; use 4 to 65536",
            options.max_segments
        )));
    }
    Ok(())
}

/// The result of a resize.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resize {
    /// Size of the disk, or of the log, before, in bytes.
    pub old_size: u64,
    /// Its size now, in bytes.
    pub size: u64,
}

/// Refuses a size that no disk can have.
pub(crate) fn check_size(path: &Path, size: u64) -> Result<()> {
    match size == 0 || !size.is_multiple_of(SECTOR_SIZE) || size > i64::MAX as u64 {
        false => Ok(()),
        true => Err(invalid(format!(
            "{}: a disk size of {size} bytes is not valid; use a positive multiple of 512 below 2^63",
            path.display()
        ))),
    }
}
