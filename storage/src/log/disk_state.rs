//! An open disk as all threads of its log see it.

use std::path::PathBuf;

use crate::catalog::options::{CacheMode, DiskOptions};
use crate::catalog::rewind::Timeline;
use crate::error::{Error, Result};
use crate::format::{DiskEntry, Rewind, Uuid};
use crate::index::Index;
use crate::log::image::DiskImage;
use crate::log::sharing::SharingCounters;
use crate::medium::mark::ImageMark;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard};
use crate::{Condition, SECTOR_SIZE, Trouble};

/// A disk as all threads see it.
#[derive(Debug)]
pub(crate) struct DiskState {
    pub id: u32,
    pub uuid: Uuid,
    pub path: PathBuf,
    /// Capacity. It grows while the disk is open.
    pub sectors: AtomicU64,
    pub base: Arc<DiskImage>,
    /// The generation in the base image's mark, or in the mark that will be written next.
    pub generation: AtomicU64,
    pub read_only: bool,
    pub no_flush: bool,
    pub write_cache: AtomicBool,
    /// The disk was opened as a detached one, or is leaving the log: it takes no more records.
    /// Changed under the log's lock.
    pub detached: AtomicBool,
    /// Records up to this LSN were discarded, or copied before the disk came back to the log.
    pub void_lsn: u64,
    /// The disk has no past before this LSN: it was not on the log, or had another image.
    pub since_lsn: u64,
    /// The disk is being restored in place, so its records wait. Changed under the log's lock.
    pub rewinding: AtomicBool,
    /// The rewinds of the disk.
    pub rewinds: Mutex<Vec<Rewind>>,
    /// The disk's newest record: what a FLUSH has to wait for.
    pub last_lsn: AtomicU64,
    pub index: RwLock<Index>,
    /// Why the image can't be brought up to date, while that is so.
    pub image_trouble: Mutex<Option<Trouble>>,
    /// The image's spill file may take no more, so writes fail or wait.
    pub spill_full: AtomicBool,
    /// Counts how the disk's FLUSHes share syncs.
    pub sharing: Arc<SharingCounters>,
}

impl DiskState {
    /// The state of a disk from its control file entry; `base` is the image that belongs to the
    /// entry.
    pub(crate) fn new(entry: &DiskEntry, options: &DiskOptions, base: DiskImage) -> Self {
        Self {
            id: entry.id.get(),
            uuid: entry.disk,
            path: options.path.clone(),
            sectors: AtomicU64::new(entry.size.get() / SECTOR_SIZE),
            base: Arc::new(base),
            generation: AtomicU64::new(entry.next_generation.get()),
            read_only: options.read_only,
            no_flush: options.cache == CacheMode::Unsafe,
            write_cache: AtomicBool::new(options.cache != CacheMode::Writethrough),
            detached: AtomicBool::new(false),
            void_lsn: entry.void_lsn.get(),
            since_lsn: 0,
            rewinding: AtomicBool::new(false),
            rewinds: Mutex::default(),
            last_lsn: AtomicU64::new(0),
            index: RwLock::default(),
            image_trouble: Mutex::default(),
            spill_full: AtomicBool::new(false),
            sharing: Arc::new(SharingCounters::new(entry.id.get())),
        }
    }

    /// Reattaches a detached disk. `options` name its image.
    pub(crate) fn set_options(&mut self, options: &DiskOptions) {
        let asked = options.clone();
        self.path = asked.path;
        self.read_only = asked.read_only;
        self.no_flush = asked.cache == CacheMode::Unsafe;
        self.write_cache = AtomicBool::new(asked.cache != CacheMode::Writethrough);
        self.detached = AtomicBool::new(false);
    }

    /// Writes the base image's mark, and makes the mark and all earlier writes to the image
    /// durable. Returns whether the image's file system has extended attributes.
    pub(crate) fn mark(&self, open: bool) -> Result<bool> {
        let mark = ImageMark {
            disk: self.uuid,
            generation: self.generation.load(Ordering::Relaxed),
            open,
        };
        let marked = self.base.file().write_mark(Some(&mark));
        let marked = marked.map_err(|error| Error::io("mark", &self.path, error))?;
        let synced = self.base.file().sync_all();
        synced.map_err(|error| Error::io("sync the base image", &self.path, error))?;
        Ok(marked)
    }

    /// Notes that the image can't be brought up to date. Returns whether that is new.
    pub(crate) fn note_trouble(&self, error: &Error) -> bool {
        let mut trouble = self.image_trouble.lock().expect("trouble lock");
        let now = Trouble::now(error, false);
        let since = trouble.as_ref().map_or(now.since, |known| known.since);
        trouble.replace(Trouble { since, ..now }).is_none()
    }

    /// Notes that the image is up to date. Returns whether it had been in trouble.
    pub(crate) fn end_trouble(&self) -> bool {
        self.image_trouble
            .lock()
            .expect("trouble lock")
            .take()
            .is_some()
    }

    /// The condition of the image.
    pub(crate) fn condition(&self) -> Condition {
        let mut trouble = self.image_trouble.lock().expect("trouble lock").clone();
        if let Some(trouble) = &mut trouble
            && self.spill_full.load(Ordering::Relaxed)
        {
            trouble.error += "; its spill file is full";
        }
        trouble.map_or(Condition::Ok, Condition::CopyFailing)
    }

    /// True if no rewind, discard or change of image lies between this LSN and now.
    pub(crate) fn comes_from(&self, lsn: u64) -> bool {
        let rewinds = self.rewinds.lock().expect("rewinds lock");
        let timeline = |until| Timeline::new(rewinds.iter(), self.void_lsn, until);
        self.void_lsn.max(self.since_lsn) <= lsn && timeline(lsn).leads_to(&timeline(u64::MAX), lsn)
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
