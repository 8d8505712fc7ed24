//! What all queues of a disk know, and what carries their tasks out.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;
use vmm_sys_util::eventfd::EventFd;
use walvisor_storage::{
    Buffer, Completion, Failure, Image, MAX_REQUEST_BYTES, Operation, SECTOR_SIZE,
};

use super::task::{Step, Task};

/// What all queues of a disk know.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) image: Image,
    pub(super) no_sync: bool,
    /// Capacity. It grows while the disk is open.
    pub(super) sectors: AtomicU64,
    pub(super) write_cache: AtomicBool,
    /// A sync has failed. What it was to make durable may be lost, and a second one would not tell: the kernel reports
    /// each error once. So every request that could hide that fails until the disk is opened again.
    pub(super) failed: AtomicBool,
    /// Held while the file gets longer.
    pub(super) growing: Mutex<()>,
}

/// What is behind the locks here is right between any two steps.
pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Where a queue hears of what others have ended for it.
#[derive(Debug)]
pub(super) struct Mailbox {
    pub(super) ended: Mutex<Vec<Completion>>,
    pub(super) event: EventFd,
}

impl Mailbox {
    pub(super) fn put(&self, completion: Completion) {
        locked(&self.ended).push(completion);
        // A full counter is readable all the same.
        let _ = self.event.write(1);
    }
}

impl Shared {
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.image.file().as_fd()
    }

    pub(super) fn raw_fd(&self) -> RawFd {
        self.image.file().as_raw_fd()
    }

    pub(super) fn sectors(&self) -> u64 {
        self.sectors.load(Ordering::Acquire)
    }

    /// The byte range of a request.
    pub(super) fn range(&self, sector: u64, sectors: u64) -> Result<(u64, u64), Failure> {
        match sector.checked_add(sectors) {
            Some(end) if sectors > 0 && end <= self.sectors() => {
                Ok((sector * SECTOR_SIZE, sectors * SECTOR_SIZE))
            }
            _ => Err(Failure::OutOfRange),
        }
    }

    /// What `operation` takes.
    pub(super) fn begin(&self, operation: Operation) -> Result<Work, Failure> {
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
    pub(super) fn end(&self, task: Task, result: io::Result<()>) -> Completion {
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

    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// A sync has failed: remembered before anybody is told.
    pub(super) fn sync_failed(&self, error: Errno) {
        self.failed.store(true, Ordering::Release);
        let path = self.image.path().display();
        tracing::error!(
            "{path}: fdatasync failed: {error}: no write is taken until the disk is opened again"
        );
    }
}

/// What a request takes.
pub(super) enum Work {
    /// Bytes are moved.
    Move(Step),
    /// What was written is made durable.
    Sync,
    /// Nothing.
    Nothing,
}

/// What carries tasks out. Dropping it waits for those that the kernel has.
pub(super) trait Mover: Send {
    /// Takes a task; it may start now or at the next [`enter`](Self::enter).
    fn submit(&mut self, task: Task);
    /// Starts everything submitted.
    fn enter(&mut self);
    /// Appends what has been carried out to `moved`, with how. The mailbox's event is written at each end.
    fn poll(&mut self, moved: &mut Vec<(Task, io::Result<()>)>);
}
