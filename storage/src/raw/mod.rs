//! A raw image as a backend, without a log: requests go to the file, and FLUSH is an fdatasync,
//! shared by requests that wait at the same time.
//!
//! ```text
//!   RawQueue ──▶ Engine: read, write, zeroes           (medium/engine/)
//!      ▲  └────▶ sync ──▶ a thread, one a disk         (sync.rs)
//!      └──── completions ◀── mailbox, event descriptor
//! ```
//! It promises what the file system does: a FLUSH makes every request completed before it durable.
//! A crash may leave a torn write, which a disk with a log never does.

mod queue;
mod shared;
mod sync;

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use queue::RawQueue;
use shared::{RawMailbox, RawShared, locked};
use sync::Syncer;

use crate::medium::engine::{create, probe};
use crate::sync::Event;
use crate::{
    Backend, BackendQueue, Capabilities, Condition, EngineKind, Extent, Image, Mapped, Resizable,
    SECTOR_SIZE,
};

/// When a write completes, and whether a FLUSH syncs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RawCache {
    /// Writes complete before they are durable; FLUSH makes them so.
    #[default]
    Writeback,
    /// An fdatasync follows each write before it completes.
    Writethrough,
    /// Nothing is ever synced: for throw-away guests.
    Unsafe,
}

/// A disk that is a raw image.
#[derive(Debug)]
pub struct RawDisk {
    shared: Arc<RawShared>,
    /// io_uring or threads.
    engine: EngineKind,
    /// `None` until it is first needed.
    syncer: Mutex<Option<Arc<Syncer>>>,
}

impl RawDisk {
    /// A disk over `image`, with the image's size at its opening. Uses io_uring if the kernel has
    /// it.
    pub fn new(image: Image, cache: RawCache) -> Self {
        let engine = probe(EngineKind::Auto).unwrap_or(EngineKind::Blocking);
        Self::build(image, cache, engine)
    }

    /// As [`new`](Self::new), but with the engine given.
    ///
    /// # Errors
    /// With [`EngineKind::IoUring`], if the kernel has no io_uring, or its io_uring lacks a needed
    /// operation (Linux 5.10).
    pub fn with_engine(image: Image, cache: RawCache, engine: EngineKind) -> io::Result<Self> {
        Ok(Self::build(image, cache, probe(engine)?))
    }

    fn build(image: Image, cache: RawCache, engine: EngineKind) -> Self {
        let shared = RawShared {
            no_sync: cache == RawCache::Unsafe,
            sectors: AtomicU64::new(image.bytes() / SECTOR_SIZE),
            write_cache: AtomicBool::new(cache != RawCache::Writethrough),
            failed: OnceLock::new(),
            growing: Mutex::new(()),
            image,
        };
        Self {
            shared: Arc::new(shared),
            engine,
            syncer: Mutex::default(),
        }
    }

    /// The thread that syncs the image for all queues.
    fn syncer(&self) -> io::Result<Arc<Syncer>> {
        let mut syncer = locked(&self.syncer);
        if let Some(syncer) = &*syncer {
            return Ok(Arc::clone(syncer));
        }
        let started = Arc::new(Syncer::start(&self.shared)?);
        Ok(Arc::clone(syncer.insert(started)))
    }
}

impl Backend for RawDisk {
    fn sectors(&self) -> u64 {
        self.shared.sectors()
    }

    fn capabilities(&self) -> Capabilities {
        let writable = !self.shared.image.read_only();
        Capabilities {
            read_only: !writable,
            flush: true,
            write_cache_toggle: writable,
            discard: writable,
            write_zeroes: writable,
            // ZERO_RANGE leaves the old data in blocks that the file system frees or marks as
            // unwritten.
            secure_erase: false,
        }
    }

    fn write_cache(&self) -> bool {
        self.shared.write_cache.load(Ordering::Acquire)
    }

    fn set_write_cache(&self, on: bool) {
        // An fdatasync covers the whole file, so the first one also makes all earlier writes
        // durable.
        self.shared.write_cache.store(on, Ordering::Release);
    }

    fn open_queue(&self) -> io::Result<Box<dyn BackendQueue>> {
        let event = Event::new()?;
        let engine = create(self.engine, &event)?;
        let mailbox = Arc::new(RawMailbox {
            ended: Mutex::default(),
            event,
        });
        Ok(Box::new(RawQueue::new(
            Arc::clone(&self.shared),
            engine,
            self.syncer()?,
            mailbox,
        )))
    }

    fn resizable(&self) -> Option<&dyn Resizable> {
        Some(self)
    }

    fn mapped(&self) -> Option<&dyn Mapped> {
        Some(self)
    }

    fn condition(&self) -> Condition {
        let failed = self.shared.failed.get();
        failed.map_or(Condition::Ok, |failed| Condition::ReadOnly(failed.clone()))
    }

    fn is_unsafe(&self) -> bool {
        self.shared.no_sync
    }
}

impl Resizable for RawDisk {
    fn grow(&self, bytes: u64) -> io::Result<()> {
        let shared = &self.shared;
        let refuse = |kind, why: &'static str| Err(io::Error::new(kind, why));
        if shared.image.read_only() {
            return refuse(io::ErrorKind::Unsupported, "the disk is read-only");
        }
        let _growing = locked(&shared.growing);
        if !bytes.is_multiple_of(SECTOR_SIZE) || bytes / SECTOR_SIZE < shared.sectors() {
            let why = "the new size must be a multiple of 512, and not smaller than the old one";
            return refuse(io::ErrorKind::InvalidInput, why);
        }
        shared.image.file().set_len(bytes)?;
        let synced = self.syncer()?.wait();
        synced.map_err(|_| io::Error::other("the new length could not be made durable"))?;
        shared.sectors.store(bytes / SECTOR_SIZE, Ordering::Release);
        Ok(())
    }
}

impl Mapped for RawDisk {
    fn extents(&self, sector: u64, sectors: u64, most: usize) -> io::Result<Vec<Extent>> {
        let told = self.shared.image.extents(sector, sectors, most);
        told.map_err(io::Error::other)
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests;
