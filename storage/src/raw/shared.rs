//! State shared by all queues of a disk, and the interface of the engines that carry out their tasks.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::io::Errno;
use vmm_sys_util::eventfd::EventFd;

use super::task::{RawStep, RawTask};
use crate::{
    Buffer, Completion, Failure, Image, MAX_REQUEST_BYTES, Operation, SECTOR_SIZE, Trouble,
};

/// State shared by all queues of a disk.
#[derive(Debug)]
pub(super) struct RawShared {
    pub(super) image: Image,
    pub(super) no_sync: bool,
    /// Capacity. It grows while the disk is open.
    pub(super) sectors: AtomicU64,
    pub(super) write_cache: AtomicBool,
    /// Set once a sync has failed. Its data may be lost, and a second sync would not report that, because the kernel
    /// reports each error only once. So until the disk is opened again, every request that could hide the loss fails.
    pub(super) failed: OnceLock<Trouble>,
    /// Held while the file grows.
    pub(super) growing: Mutex<()>,
}

/// Locks `mutex`. What these locks guard is consistent even after a panic.
pub(super) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A queue's completions from other threads.
#[derive(Debug)]
pub(super) struct RawMailbox {
    pub(super) ended: Mutex<Vec<Completion>>,
    pub(super) event: EventFd,
}

impl RawMailbox {
    pub(super) fn put(&self, completion: Completion) {
        locked(&self.ended).push(completion);
        // If the counter is full, the event is readable already.
        let _ = self.event.write(1);
    }
}

impl RawShared {
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

    /// Checks `operation` and returns the work that it needs.
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
                // The client gets the buffer only if the read fills it.
                let data = Buffer::try_for_overwrite(len as usize).map_err(|_| Failure::Io)?;
                RawStep::read(offset, data)
            }
            Operation::Write { sector, data } => {
                if data.len() > MAX_REQUEST_BYTES
                    || !data.len().is_multiple_of(SECTOR_SIZE as usize)
                {
                    return Err(Failure::TooLarge);
                }
                let (offset, _) = self.range(sector, data.len() as u64 / SECTOR_SIZE)?;
                RawStep::write(offset, data)
            }
            Operation::Discard { sector, sectors } => {
                let (offset, len) = self.range(sector, sectors.into())?;
                RawStep::zeroes(offset, len, true)
            }
            Operation::WriteZeroes {
                sector,
                sectors,
                unmap,
            } => {
                let (offset, len) = self.range(sector, sectors.into())?;
                RawStep::zeroes(offset, len, unmap)
            }
            // Nothing was written, or nobody wants durability.
            Operation::Flush if self.image.read_only() || self.no_sync => {
                return Ok(Work::Nothing);
            }
            Operation::Flush => return Ok(Work::Sync),
        }))
    }

    /// The completion of a task, for the client.
    pub(super) fn end(&self, task: RawTask, result: io::Result<()>) -> Completion {
        let RawTask { token, step, .. } = task;
        let result = match (result, step) {
            (Ok(()), RawStep::Read { buffer, .. }) => Ok(Some(buffer)),
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
        self.failed.get().is_some()
    }

    /// Records a failed sync. To be called before any waiter gets the error.
    pub(super) fn sync_failed(&self, error: Errno) {
        // Only the first failure counts.
        let _ = self.failed.set(Trouble::now(error, true));
        let path = self.image.path().display();
        tracing::error!(
            "{path}: fdatasync failed: {error}; writes fail until the disk is opened again"
        );
    }
}

/// The work that a request needs.
pub(super) enum Work {
    /// Move bytes.
    Move(RawStep),
    /// Make durable what was written.
    Sync,
    /// None.
    Nothing,
}

/// Carries out tasks. Dropping it waits for those in the kernel.
pub(super) trait TaskRunner: Send {
    /// Takes a task; it may start now or at the next [`enter`](Self::enter).
    fn submit(&mut self, task: RawTask);
    /// Starts every task submitted.
    fn enter(&mut self);
    /// Appends ended tasks, with their results, to `moved`. The mailbox's event is set whenever one ends.
    fn poll(&mut self, moved: &mut Vec<(RawTask, io::Result<()>)>);
}
