//! An open disk: what its ports share.

use std::path::PathBuf;

use crate::catalog::invalid;
use crate::error::{Error, Result};
use crate::file::DataFile;
use crate::format::{DiskEntry, Uuid};
use crate::identity::Mark;
use crate::index::Index;
use crate::log::Log;
use crate::mutant::{Mutant, planted};
use crate::orders::Task;
use crate::port::Port;
use crate::resize::{Resize, check_size};
use crate::store::DiskOptions;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};
use crate::{LogCounters, SECTOR_SIZE};

/// What FLUSH and a completed WRITE mean.
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

/// The disk as all threads see it.
#[derive(Debug)]
pub(crate) struct DiskState {
    pub id: u32,
    pub uuid: Uuid,
    pub path: PathBuf,
    /// Capacity. It grows while the disk is open.
    pub sectors: AtomicU64,
    pub base: Arc<dyn DataFile>,
    /// What the base image's mark says, or will say when it is written next.
    pub generation: AtomicU64,
    pub read_only: bool,
    pub no_flush: bool,
    pub write_cache: AtomicBool,
    /// The newest record of this disk: what a FLUSH of it has to wait for.
    pub last_lsn: AtomicU64,
    pub index: RwLock<Index>,
}

impl DiskState {
    /// Of an image that belongs to the entry.
    pub(crate) fn new(entry: &DiskEntry, options: &DiskOptions, base: Arc<dyn DataFile>) -> Self {
        Self {
            id: entry.id.get(),
            uuid: entry.disk,
            path: options.path.clone(),
            sectors: AtomicU64::new(entry.size.get() / SECTOR_SIZE),
            base,
            generation: AtomicU64::new(entry.next_generation.get()),
            read_only: options.read_only,
            no_flush: options.cache == CacheMode::Unsafe,
            write_cache: AtomicBool::new(options.cache != CacheMode::Writethrough),
            last_lsn: AtomicU64::new(0),
            index: RwLock::default(),
        }
    }

    /// Gives the base image its mark, and makes that and all that was written to the image durable. Returns whether its
    /// file system has attributes.
    pub(crate) fn mark(&self, open: bool) -> Result<bool> {
        let mark = Mark {
            disk: self.uuid,
            generation: self.generation.load(Ordering::Relaxed),
            open,
        };
        let marked = self.base.write_mark(Some(&mark));
        let marked = marked.map_err(|error| Error::io("mark", &self.path, error))?;
        let synced = match planted(Mutant::MarkUnsynced) {
            true => Ok(()),
            false => self.base.sync_all(),
        };
        synced.map_err(|error| Error::io("sync the base image", &self.path, error))?;
        Ok(marked)
    }

    pub(crate) fn sectors(&self) -> u64 {
        self.sectors.load(Ordering::Acquire)
    }

    pub(crate) fn index(&self) -> RwLockReadGuard<'_, Index> {
        self.index.read().expect("index lock")
    }

    pub(crate) fn index_mut(&self) -> RwLockWriteGuard<'_, Index> {
        self.index.write().expect("index lock")
    }
}

/// An open disk of a [`Store`](crate::Store). Cheap to clone; all clones are one disk.
#[derive(Clone)]
pub struct Disk {
    pub(crate) log: Arc<Log>,
    pub(crate) state: Arc<DiskState>,
}

impl Disk {
    /// Capacity in sectors of 512 bytes.
    pub fn sectors(&self) -> u64 {
        self.state.sectors()
    }

    /// Whether writes are refused.
    pub fn read_only(&self) -> bool {
        self.state.read_only
    }

    /// Whether WRITEs complete before they are durable.
    pub fn write_cache(&self) -> bool {
        self.state.write_cache.load(Ordering::Acquire)
    }

    /// Turns writeback on or off for requests submitted from now on.
    pub fn set_write_cache(&self, on: bool) {
        self.state.write_cache.store(on, Ordering::Release);
    }

    /// Whether a [`Port`] reads in the thread that submits: so with the blocking engine.
    pub fn reads_block(&self) -> bool {
        self.log.medium.blocks()
    }

    /// Longest READ or WRITE in bytes: [`MAX_REQUEST_BYTES`](crate::MAX_REQUEST_BYTES), less where the log's segments
    /// are small.
    pub fn max_request_bytes(&self) -> usize {
        self.log.max_request_bytes()
    }

    /// Opens a way in for one thread.
    ///
    /// # Errors
    /// If the system refuses a ring, a thread or a descriptor.
    pub fn open_port(&self) -> Result<Port> {
        Port::new(self)
            .map_err(|error| Error::io("open a queue on the disk", &self.state.path, error))
    }

    /// Copies all that has been written so far to the base images of the disk's log, while requests go on. Returns the
    /// LSN up to which they hold everything now.
    ///
    /// # Errors
    /// If the log had failed, is being closed, or the copy fails. Nothing is lost.
    pub fn checkpoint(&self) -> Result<u64> {
        let newest = self.log.lock().appended;
        self.log.order(Task::Checkpoint(newest))?;
        Ok(newest)
    }

    /// Makes the disk longer while it is in use: `size` in bytes. What is new reads as zeroes. A crash leaves the old or
    /// the new size. A live disk does not shrink: see [`resize_disk`](crate::resize_disk).
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind) if the size is no multiple of 512, below the present one or more
    /// than the file system holds; or the files cannot be changed. The disk is as it was then.
    pub fn grow(&self, size: u64) -> Result<Resize> {
        let disk = Arc::clone(&self.state);
        check_size(&disk.path, size)?;
        let old_size = disk.sectors() * SECTOR_SIZE;
        if size < old_size {
            return Err(invalid(format!(
                "{}: in use, so it cannot shrink from {old_size} to {size} bytes: stop its user, then 'walvisor disk resize'",
                disk.path.display()
            )));
        }
        self.log.order(Task::Grow(disk, size))?;
        Ok(Resize { old_size, size })
    }

    /// What the disk's log has done since it was opened.
    pub fn log_counters(&self) -> LogCounters {
        self.log.counters.snapshot()
    }
}
