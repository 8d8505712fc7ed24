//! State shared by all queues of a disk.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use rustix::io::Errno;

use crate::sync::Event;
use crate::{Completion, Image, Trouble};

/// State shared by all queues of a disk.
#[derive(Debug)]
pub(super) struct RawShared {
    pub(super) image: Image,
    pub(super) no_sync: bool,
    /// Capacity. It grows while the disk is open.
    pub(super) sectors: AtomicU64,
    pub(super) write_cache: AtomicBool,
    /// Set once a sync has failed. Its data may be lost, and a second sync would not report that,
    /// because the kernel reports each error only once. So until the disk is opened again, every
    /// request that could hide the loss fails.
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
    pub(super) event: Event,
}

impl RawMailbox {
    pub(super) fn put(&self, completion: Completion) {
        locked(&self.ended).push(completion);
        self.event.signal();
    }
}

impl RawShared {
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.image.file().as_fd()
    }

    pub(super) fn sectors(&self) -> u64 {
        self.sectors.load(Ordering::Acquire)
    }

    /// Whether a sync follows each write before it completes.
    pub(super) fn syncs_each_write(&self) -> bool {
        !self.write_cache.load(Ordering::Acquire) && !self.no_sync
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
