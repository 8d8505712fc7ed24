//! A raw image as a backend: what goes to it goes to the file, and FLUSH is an fdatasync, which it shares only with those
//! that wait at the same time. No log.
//!
//! ```text
//!   RawQueue ──▶ Task: read, write, zeroes ──▶ io_uring, one a queue       (raw/ring.rs)
//!      ▲           │                      └──▶ else a thread, one a queue  (raw/threads.rs)
//!      │           └──▶ sync ──▶ a thread, one a disk                      (raw/sync.rs)
//!      └──── completions ◀── mailbox, event descriptor
//! ```
//! What it promises is what the file system does: a FLUSH makes every request completed before it durable. A crash may
//! leave a write in part, which a disk with a log never does.

mod ring;
mod sync;
mod task;
mod threads;

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::fd::{AsRawFd, RawFd};
use rustix::io::Errno;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};
use walvisor_storage::{EngineKind, Image};

use super::{
    Backend, BackendQueue, Buffer, Capabilities, Completion, Extent, Failure, MAX_REQUEST_BYTES,
    Operation, SECTOR_SIZE,
};
use ring::Ring;
use sync::Syncer;
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
    /// There once it is needed.
    syncer: Mutex<Option<Arc<Syncer>>>,
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
            syncer: Mutex::default(),
        }
    }

    /// Who syncs the image for all queues.
    fn syncer(&self) -> io::Result<Arc<Syncer>> {
        let mut syncer = locked(&self.syncer);
        if let Some(syncer) = &*syncer {
            return Ok(Arc::clone(syncer));
        }
        let started = Arc::new(Syncer::start(&self.shared)?);
        Ok(Arc::clone(syncer.insert(started)))
    }
}

/// What is behind the locks here is right between any two steps.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where a queue hears of what others have ended for it.
#[derive(Debug)]
struct Mailbox {
    ended: Mutex<Vec<Completion>>,
    event: EventFd,
}

impl Mailbox {
    fn put(&self, completion: Completion) {
        locked(&self.ended).push(completion);
        // A full counter is readable all the same.
        let _ = self.event.write(1);
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

    /// What `operation` takes.
    fn begin(&self, operation: Operation) -> Result<Work, Failure> {
        let changes = !matches!(operation, Operation::Read { .. } | Operation::Flush);
        if changes && self.image.read_only() {
            return Err(Failure::ReadOnly);
        }
        let reads = matches!(operation, Operation::Read { .. });
        if !reads && !self.no_sync && self.has_failed() {
            return Err(Failure::Io);
        }
        Ok(Work::Move(match operation {
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
            Operation::Flush if self.image.read_only() || self.no_sync => {
                return Ok(Work::Nothing);
            }
            Operation::Flush => return Ok(Work::Sync),
        }))
    }

    /// How a task ended, for the client.
    fn end(&self, task: Task, result: io::Result<()>) -> Completion {
        let Task { token, step, .. } = task;
        let result = match (result, step) {
            (Ok(()), Step::Read { buffer, .. }) => Ok(Some(buffer)),
            (Ok(()), _) => Ok(None),
            (Err(error), step) => {
                let (path, name) = (self.image.path().display(), step.name());
                tracing::warn!("{path}: {name} failed: {error}");
                Err(Failure::Io)
            }
        };
        Completion { token, result }
    }

    fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// A sync has failed: remembered before anybody is told.
    fn sync_failed(&self, error: Errno) {
        self.failed.store(true, Ordering::Release);
        let path = self.image.path().display();
        tracing::error!(
            "{path}: fdatasync failed: {error}: no write is taken until the disk is opened again"
        );
    }
}

/// What a request takes.
enum Work {
    /// Bytes are moved.
    Move(Step),
    /// What was written is made durable.
    Sync,
    /// Nothing.
    Nothing,
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
        let mailbox = Arc::new(Mailbox {
            ended: Mutex::default(),
            event: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
        });
        let mover: Box<dyn Mover> = match self.uring {
            true => Box::new(Ring::new(&mailbox.event, &self.shared)?),
            false => Box::new(Threads::new(&mailbox, &self.shared)?),
        };
        Ok(Box::new(RawQueue {
            syncer: self.syncer()?,
            shared: Arc::clone(&self.shared),
            mover,
            mailbox,
            moved: Vec::new(),
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
        let _growing = locked(&shared.growing);
        if !bytes.is_multiple_of(SECTOR_SIZE) || bytes / SECTOR_SIZE < shared.sectors() {
            let why = "a disk's size is a multiple of 512, and no less than it was";
            return refuse(io::ErrorKind::InvalidInput, why);
        }
        shared.image.file().set_len(bytes)?;
        let synced = self.syncer()?.wait();
        synced.map_err(|_| io::Error::other("its new length was not made durable"))?;
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
    /// Appends what has been carried out to `moved`, with how. The mailbox's event is written at each end.
    fn poll(&mut self, moved: &mut Vec<(Task, io::Result<()>)>);
}

/// One queue's way to a raw disk.
struct RawQueue {
    shared: Arc<Shared>,
    mover: Box<dyn Mover>,
    syncer: Arc<Syncer>,
    mailbox: Arc<Mailbox>,
    /// Tasks being looked at; empty between calls, kept for its memory.
    moved: Vec<(Task, io::Result<()>)>,
    /// What has ended without the medium.
    done: Vec<Completion>,
}

impl BackendQueue for RawQueue {
    fn submit(&mut self, token: u64, operation: Operation) {
        let durably = !self.shared.write_cache.load(Ordering::Acquire) && !self.shared.no_sync;
        let result = match self.shared.begin(operation) {
            Ok(Work::Move(step)) => {
                let durably = durably && !matches!(step, Step::Read { .. });
                return self.mover.submit(Task {
                    token,
                    step,
                    durably,
                });
            }
            Ok(Work::Sync) => return self.syncer.submit(token, &self.mailbox),
            Ok(Work::Nothing) => Ok(None),
            Err(failure) => Err(failure),
        };
        self.done.push(Completion { token, result });
    }

    fn kick(&mut self) {
        self.mover.enter();
    }

    fn event(&self) -> BorrowedFd<'_> {
        // SAFETY: the descriptor is open as long as the mailbox, which the borrow keeps alive.
        unsafe { BorrowedFd::borrow_raw(self.mailbox.event.as_raw_fd()) }
    }

    fn completions(&mut self, done: &mut Vec<Completion>) {
        // Before looking: what ends later writes it again.
        let _ = self.mailbox.event.read();
        done.append(&mut self.done);
        self.mover.poll(&mut self.moved);
        for (task, result) in self.moved.drain(..) {
            match result {
                Ok(()) if task.durably => self.syncer.submit(task.token, &self.mailbox),
                result => done.push(self.shared.end(task, result)),
            }
        }
        done.append(&mut locked(&self.mailbox.ended));
    }
}

#[cfg(test)]
mod tests;
