//! An open disk as all threads of its log see it.

use std::path::PathBuf;

use crate::SECTOR_SIZE;
use crate::catalog::options::{CacheMode, DiskOptions};
use crate::error::{Error, Result};
use crate::format::{DiskEntry, Uuid};
use crate::index::Index;
use crate::medium::file::DataFile;
use crate::medium::mark::Mark;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The disk as all threads see it.
#[derive(Debug)]
pub(crate) struct DiskState {
    pub id: u32,
    pub uuid: Uuid,
    pub path: PathBuf,
    /// Capacity. It grows while the disk is open.
    pub sectors: AtomicU64,
    pub base: Arc<dyn DataFile>,
    /// The generation in the base image's mark, or in the mark that is written next.
    pub generation: AtomicU64,
    pub read_only: bool,
    pub no_flush: bool,
    pub write_cache: AtomicBool,
    /// The newest record of this disk: what a FLUSH of it has to wait for.
    pub last_lsn: AtomicU64,
    pub index: RwLock<Index>,
}

impl DiskState {
    /// The state of a disk from its control file entry; `base` is the image that belongs to the entry.
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

    /// Writes the base image's mark, and makes the mark and all earlier writes to the image durable. Returns whether
    /// the image's file system has extended attributes.
    pub(crate) fn mark(&self, open: bool) -> Result<bool> {
        let mark = Mark {
            disk: self.uuid,
            generation: self.generation.load(Ordering::Relaxed),
            open,
        };
        let marked = self.base.write_mark(Some(&mark));
        let marked = marked.map_err(|error| Error::io("mark", &self.path, error))?;
        let synced = self.base.sync_all();
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
