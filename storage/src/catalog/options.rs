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
    /// Segment size of a new log in bytes: a multiple of 4096, from 64 KiB to 1 GiB. Default 64
    /// MiB. Requests longer than a quarter of it are refused.
    pub segment_size: u64,
    /// Most segment files of a new log: 4 to 65536. Default 32.
    pub max_segments: u32,
    /// The I/O engine.
    pub engine: EngineKind,
    /// Whether one sync serves every waiting FLUSH. If off, each FLUSH costs a sync of its own, for
    /// comparison only. Default on.
    pub group_commit: bool,
    /// How long a commit group may wait for more to join it. Default: adaptive.
    pub commit_wait: CommitWait,
    /// Whether each record gets a write of its own, in LSN order, before the sync that the group
    /// shares. For comparison only: it shows what one write for the whole group gains. With one
    /// record per waiting client, that is one write per client. The resulting log is the same.
    /// Default off.
    pub write_per_waiter: bool,
    /// Added to the time of each sync of the log, to measure the effect of a slower medium. Default
    /// zero.
    pub sync_latency: Duration,
    /// Most operations per second on the log's segments, like the limit of a small cloud volume. A
    /// sync is one operation, a write is one per started 256 KiB, and a write that also syncs is
    /// both. Checkpoints and reads are free. With this or `operation_latency`, one thread does all
    /// writes of the log, so that no other thread is delayed. Default: no limit.
    pub operations_per_second: Option<NonZeroU32>,
    /// Added to the time of each write to the log's segments and of each sync of them. Default
    /// zero.
    pub operation_latency: Duration,
    /// How long closing may copy the log to the base images. What is not copied by then stays in
    /// the log, and the next open goes on copying. Zero: nothing is copied. Default: everything,
    /// however long it takes.
    pub close_time: Option<Duration>,
    /// Memory limit in bytes, at least 1, for a log's index, which says where the log has the
    /// newest bytes of each sector. It takes about 17 bytes for each written range until a
    /// checkpoint has copied that to the base image. At half of the limit the log is copied; at the
    /// limit, writes wait for that. (Checksums take another 4 bytes for each 4 KiB in the log, and
    /// 8 for each batch.) Looks, and what is kept in memory for snapshots, with the checksums of
    /// what is saved, may take as much again, or 1 MiB if that is more; beyond that they are
    /// refused. Default 64 MiB.
    pub index_memory: u64,
    /// How much history the log retains. Default: unchanged; nothing for a new log. To retain a
    /// number of bytes, the log may get that many more bytes of segment files.
    pub retain: Option<Retention>,
    /// What happens to requests that need room while the log is full and can't be emptied for lack
    /// of space. Default: they fail.
    pub on_full: FullLogPolicy,
    /// The log keeps every record until [`Disk::replicate`](crate::Disk::replicate) says what its
    /// replica needs; for a replica with a [limit](crate::ReplicaOptions::limit). Default `false`.
    pub await_replica: bool,
    /// Most bytes of a disk that a spill file takes while the disk's image can't be written. Beyond
    /// that, and what the log has by then, only this disk's writes do as `on_full` says. They do so
    /// too once the log's file system has less space left than the log's size, or the maps of spill
    /// files take half as much memory as `index_memory`. Default: no other limit.
    pub spill_limit: Option<u64>,
    /// Threads that read a log when it is opened, and copy an image when it is imported. Default:
    /// one per processor.
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
            await_replica: false,
            spill_limit: None,
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

/// What happens to requests that need room while a log is full and can't be emptied, because a file
/// system has no space. The log retries every second either way.
///
/// A request that failed so may have been carried out all the same, or be carried out later: write
/// it again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FullLogPolicy {
    /// They fail.
    #[default]
    Fail,
    /// They wait until there is space. Reads go on.
    Pause,
}

/// How long a commit group may wait for more FLUSHes, and writes in writethrough mode, to join. The
/// default is adaptive: at most half as long as a sync, and only while that makes groups larger.
///
/// No group waits once every client has a FLUSH in it: each open [`Port`](crate::Port) is one,
/// unless it [says otherwise](crate::BackendQueue::set_clients).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommitWait {
    /// The longest wait; zero for none. `None`: adaptive, or 100 ms if a `count` is given.
    pub longest: Option<Duration>,
    /// A group starts as soon as this many FLUSHes are waiting. `None`: as many as the last group
    /// served, plus those that came in the meantime.
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
    /// What FLUSH and a completed WRITE promise.
    pub cache: CacheMode,
    /// Whether the image is known to be raw.
    pub format: ImageFormat,
    /// Nobody uses the disk: its image is opened only if the log holds records of it, which a
    /// checkpoint then copies there. A log opens no image but those that it is given, whatever its
    /// table says.
    pub detached: bool,
}

impl DiskOptions {
    /// A writable writeback disk.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            read_only: false,
            cache: CacheMode::Writeback,
            format: ImageFormat::Unknown,
            detached: false,
        }
    }

    /// A disk that nobody uses: see [`detached`](Self::detached).
    pub fn detached(path: impl Into<PathBuf>) -> Self {
        Self {
            read_only: true,
            detached: true,
            ..Self::new(path)
        }
    }
}

/// What is known about an image's format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ImageFormat {
    /// Nothing. An image that was never a disk on a log is refused if it starts like a qcow2, VMDK,
    /// VDI, VHD, VHDX, QED or LUKS image.
    #[default]
    Unknown,
    /// It is raw, whatever its first bytes are.
    Raw,
}

/// The default log directory of a disk: `disk.img.wal` for `disk.img`.
pub fn default_log_dir(disk: &Path) -> PathBuf {
    let mut name = disk.as_os_str().to_owned();
    name.push(".wal");
    name.into()
}

/// What FLUSH and a completed WRITE promise.
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
            "a segment size of {size} bytes is not valid; use a multiple of 4096 from 64 KiB to 1 \
             GiB"
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
    if size == 0 || !size.is_multiple_of(SECTOR_SIZE) || size > i64::MAX as u64 {
        Err(invalid(format!(
            "{}: a disk size of {size} bytes is not valid; use a positive multiple of 512 below \
             2^63",
            path.display()
        )))
    } else {
        Ok(())
    }
}
