//! A raw image as a backend: what goes to it goes to the file, and FLUSH is an fdatasync. No log, no grouping.
//!
//! ```text
//!   RawQueue ──▶ Task: read, write, zeroes, sync ──▶ io_uring, one a queue                       (raw/ring.rs)
//!      ▲                                      └──▶ else two threads: one moves bytes, one syncs  (raw/threads.rs)
//!      └──── completions ◀── event descriptor
//! ```
//! What it promises is what the file system does: a FLUSH makes every request completed before it durable. A crash may
//! leave a write in part, which a disk with a log never does.

mod ring;
mod task;
mod threads;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::fd::{AsRawFd, RawFd};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};
use walvisor_storage::{EngineKind, Image};

use super::{
    Backend, BackendQueue, Buffer, Capabilities, Completion, Extent, Failure, MAX_REQUEST_BYTES,
    Operation, SECTOR_SIZE,
};
use ring::Ring;
use task::{Step, Task};
use threads::Threads;

/// When a write completes, and what a FLUSH does.
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
    shared: Arc<Shared>,
    uring: bool,
}

/// What all queues of a disk know.
#[derive(Debug)]
struct Shared {
    image: Image,
    no_sync: bool,
    /// Capacity. It grows while the disk is open.
    sectors: AtomicU64,
    write_cache: AtomicBool,
    /// A sync has failed. What it was to make durable may be lost, and a second one would not tell: the kernel reports
    /// each error once. So every request that could hide that fails until the disk is opened again.
    failed: AtomicBool,
    /// Held while the file gets longer.
    growing: Mutex<()>,
}

impl RawDisk {
    /// A disk that is `image`, as long as that was when it was opened, with io_uring if the kernel has it.
    pub fn new(image: Image, cache: RawCache) -> Self {
        let uring = match ring::probe() {
            Ok(()) => true,
            Err(error) => {
                tracing::info!("io_uring is not usable ({error}): raw disks use threads");
                false
            }
        };
        Self::build(image, cache, uring)
    }

    /// The same with one engine and no other.
    ///
    /// # Errors
    /// With [`EngineKind::IoUring`], if the kernel has no io_uring, or one that lacks an operation that is needed (Linux 5.6).
    pub fn with_engine(image: Image, cache: RawCache, engine: EngineKind) -> io::Result<Self> {
        match engine {
            EngineKind::Auto => Ok(Self::new(image, cache)),
            EngineKind::Blocking => Ok(Self::build(image, cache, false)),
            EngineKind::IoUring => ring::probe().map(|()| Self::build(image, cache, true)),
        }
    }

    fn build(image: Image, cache: RawCache, uring: bool) -> Self {
        let shared = Shared {
            no_sync: cache == RawCache::Unsafe,
            sectors: AtomicU64::new(image.bytes() / SECTOR_SIZE),
            write_cache: AtomicBool::new(cache != RawCache::Writethrough),
            failed: AtomicBool::new(false),
            growing: Mutex::new(()),
            image,
        };
        Self {
            shared: Arc::new(shared),
            uring,
        }
    }
}

impl Shared {
    fn fd(&self) -> BorrowedFd<'_> {
        self.image.file().as_fd()
    }

    fn raw_fd(&self) -> RawFd {
        self.image.file().as_raw_fd()
    }

    fn sectors(&self) -> u64 {
        self.sectors.load(Ordering::Acquire)
    }

    /// The byte range of a request.
    fn range(&self, sector: u64, sectors: u64) -> Result<(u64, u64), Failure> {
        match sector.checked_add(sectors) {
            Some(end) if sectors > 0 && end <= self.sectors() => {
                Ok((sector * SECTOR_SIZE, sectors * SECTOR_SIZE))
            }
            _ => Err(Failure::OutOfRange),
        }
    }

    /// What `operation` takes; `None`: nothing.
    fn begin(&self, operation: Operation) -> Result<Option<Step>, Failure> {
        let changes = !matches!(operation, Operation::Read { .. } | Operation::Flush);
        if changes && self.image.read_only() {
            return Err(Failure::ReadOnly);
        }
        let reads = matches!(operation, Operation::Read { .. });
        if !reads && !self.no_sync && self.failed.load(Ordering::Acquire) {
            return Err(Failure::Io);
        }
        Ok(Some(match operation {
            Operation::Read { sector, sectors } => {
                let (offset, len) = self.range(sector, sectors.into())?;
                if len > MAX_REQUEST_BYTES as u64 {
                    return Err(Failure::TooLarge);
                }
                // Filled to its end, or not given to anybody.
                Step::read(offset, Buffer::for_overwrite(len as usize))
            }
            Operation::Write { sector, data } => {
                if data.len() > MAX_REQUEST_BYTES
                    || !data.len().is_multiple_of(SECTOR_SIZE as usize)
                {
                    return Err(Failure::TooLarge);
                }
                let (offset, _) = self.range(sector, data.len() as u64 / SECTOR_SIZE)?;
                Step::write(offset, data)
            }
            Operation::Discard { sector, sectors } => {
                let (offset, len) = self.range(sector, sectors.into())?;
                Step::zeroes(offset, len, true)
            }
            Operation::WriteZeroes {
                sector,
                sectors,
                unmap,
            } => {
                let (offset, len) = self.range(sector, sectors.into())?;
                Step::zeroes(offset, len, unmap)
            }
            // Nothing was written, or nobody wants to know.
            Operation::Flush if self.image.read_only() || self.no_sync => return Ok(None),
            Operation::Flush => Step::Sync,
        }))
    }

    /// How a task ended, for the client. A sync that failed is remembered.
    fn end(&self, task: Task, result: io::Result<()>) -> Completion {
        let Task { token, step, .. } = task;
        let result = match (result, step) {
            (Ok(()), Step::Read { buffer, .. }) => Ok(Some(buffer)),
            (Ok(()), _) => Ok(None),
            (Err(error), step) => {
                let (path, name) = (self.image.path().display(), step.name());
                match step {
                    Step::Sync if !self.failed.swap(true, Ordering::AcqRel) => tracing::error!(
                        "{path}: {name} failed: {error}: no write is taken until the disk is opened again"
                    ),
                    _ => tracing::warn!("{path}: {name} failed: {error}"),
                }
                Err(Failure::Io)
            }
        };
        Completion { token, result }
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
            // ZERO_RANGE leaves what was there in blocks that the file system gives back or marks as unwritten.
            secure_erase: false,
        }
    }

    fn write_cache(&self) -> bool {
        self.shared.write_cache.load(Ordering::Acquire)
    }

    fn set_write_cache(&self, on: bool) {
        // An fdatasync is of the whole file: the first one makes all earlier writes durable, too.
        self.shared.write_cache.store(on, Ordering::Release);
    }

    fn open_queue(&self) -> io::Result<Box<dyn BackendQueue>> {
        let event = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?;
        let mover: Box<dyn Mover> = match self.uring {
            true => Box::new(Ring::new(&event, &self.shared)?),
            false => Box::new(Threads::new(&event, &self.shared)?),
        };
        Ok(Box::new(RawQueue {
            shared: Arc::clone(&self.shared),
            mover,
            event,
            done: Vec::new(),
        }))
    }

    fn extents(&self, sector: u64, sectors: u64, most: usize) -> io::Result<Vec<Extent>> {
        let told = self.shared.image.extents(sector, sectors, most);
        told.map_err(io::Error::other)
    }

    fn grow(&self, bytes: u64) -> io::Result<()> {
        let shared = &self.shared;
        let refuse = |kind, why: &'static str| Err(io::Error::new(kind, why));
        if shared.image.read_only() {
            return refuse(io::ErrorKind::Unsupported, "the disk is read-only");
        }
        let _growing = shared
            .growing
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if !bytes.is_multiple_of(SECTOR_SIZE) || bytes / SECTOR_SIZE < shared.sectors() {
            let why = "a disk's size is a multiple of 512, and no less than it was";
            return refuse(io::ErrorKind::InvalidInput, why);
        }
        shared.image.grow(bytes)?;
        shared.sectors.store(bytes / SECTOR_SIZE, Ordering::Release);
        Ok(())
    }
}

/// What carries tasks out. Dropping it waits for those that the kernel has.
trait Mover: Send {
    /// Takes a task; it may start now or at the next [`enter`](Self::enter).
    fn submit(&mut self, task: Task);
    /// Starts everything submitted.
    fn enter(&mut self);
    /// Appends what has ended to `done`. The event given at creation is written at each end.
    fn poll(&mut self, done: &mut Vec<Completion>);
}

/// One queue's way to a raw disk.
struct RawQueue {
    shared: Arc<Shared>,
    mover: Box<dyn Mover>,
    event: EventFd,
    /// What has ended without the medium.
    done: Vec<Completion>,
}

impl BackendQueue for RawQueue {
    fn submit(&mut self, token: u64, operation: Operation) {
        let durably = !self.shared.write_cache.load(Ordering::Acquire) && !self.shared.no_sync;
        match self.shared.begin(operation) {
            Ok(Some(step)) => self.mover.submit(Task {
                token,
                step,
                durably,
            }),
            Ok(None) => self.done.push(Completion {
                token,
                result: Ok(None),
            }),
            Err(failure) => self.done.push(Completion {
                token,
                result: Err(failure),
            }),
        }
    }

    fn kick(&mut self) {
        self.mover.enter();
    }

    fn event(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as `self.event`, which the borrow keeps alive.
        unsafe { BorrowedFd::borrow_raw(self.event.as_raw_fd()) }
    }

    fn completions(&mut self, done: &mut Vec<Completion>) {
        // Before looking: what ends later writes it again.
        let _ = self.event.read();
        done.append(&mut self.done);
        self.mover.poll(done);
    }
}

#[cfg(test)]
mod tests;
