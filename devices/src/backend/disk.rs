//! The disk behind a device, and one queue's way to it.

use std::io;
use std::os::fd::BorrowedFd;

use walvisor_storage::{Allocation, Completion, Extent, LogCounters, MAX_REQUEST_BYTES, Operation};
#[cfg(doc)]
use walvisor_storage::{Failure, SECTOR_SIZE};

/// What a backend really does (promise 6: a feature bit is offered only if this says so).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// WRITE, DISCARD and WRITE_ZEROES fail with [`Failure::ReadOnly`].
    pub read_only: bool,
    /// FLUSH makes completed writes durable, and a volatile cache exists for it to flush.
    pub flush: bool,
    /// [`Backend::set_write_cache`] works.
    pub write_cache_toggle: bool,
    /// DISCARD works.
    pub discard: bool,
    /// WRITE_ZEROES works.
    pub write_zeroes: bool,
    /// A WRITE_ZEROES without `unmap`, once a FLUSH after it has completed, leaves no copy of what the sectors held
    /// before, neither on the medium nor in a log. Together with [`flush`](Self::flush) and
    /// [`write_zeroes`](Self::write_zeroes) that is SECURE_ERASE.
    pub secure_erase: bool,
}

/// When a write (a discard, zeroes) is answered that is not yet durable, where clients outlive this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Answer {
    /// When it outlives this process: a client that connects again after a kill finds it, and its FLUSH there covers it.
    #[default]
    Written,
    /// At once. It may be in this process's memory alone, which a kill loses.
    Memory,
}

/// A disk that any number of queues can be opened on.
pub trait Backend: Send + Sync {
    /// Capacity in sectors of 512 bytes.
    fn sectors(&self) -> u64;

    /// What the disk really does.
    fn capabilities(&self) -> Capabilities;

    /// Whether writes complete before they are durable (writeback). `false` is writethrough.
    fn write_cache(&self) -> bool;

    /// Turns the volatile write cache on (writeback) or off (writethrough). Requests submitted after
    /// the call follow the new mode; turning it off makes everything written so far durable with the
    /// next write or FLUSH.
    fn set_write_cache(&self, on: bool);

    /// Opens a way in for one queue worker.
    ///
    /// # Errors
    /// If the system refuses a descriptor, a ring or a thread.
    fn open_queue(&self) -> io::Result<Box<dyn BackendQueue>>;

    /// Whether a queue's [`submit`](BackendQueue::submit) reads in its caller's thread, so that others who share the
    /// queue wait for the medium too.
    fn blocks(&self) -> bool {
        false
    }

    /// Longest READ or WRITE in bytes, a multiple of [`SECTOR_SIZE`]; a longer one fails with [`Failure::TooLarge`].
    fn max_request_bytes(&self) -> usize {
        MAX_REQUEST_BYTES
    }

    /// How the disk keeps what begins at `sector`: extents that follow each other, at least one and at most `most`
    /// (at least 1), of `sectors` sectors in all or fewer. The range lies on the disk and is not empty. A backend that
    /// cannot tell says that all of it is data.
    ///
    /// # Errors
    /// If the medium cannot be asked.
    fn extents(&self, sector: u64, sectors: u64, most: usize) -> io::Result<Vec<Extent>> {
        let (_, _) = (sector, most);
        let allocation = Allocation::Data;
        Ok(vec![Extent {
            sectors,
            allocation,
        }])
    }

    /// Makes the disk longer while it is in use, to `bytes`; requests submitted after the call reach all of it.
    ///
    /// # Errors
    /// If `bytes` is no size that the disk can have, or less than it has; `Unsupported` from a backend of one size.
    fn grow(&self, bytes: u64) -> io::Result<()> {
        let _ = bytes;
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "a disk of this kind keeps its size",
        ))
    }

    /// Copies what the disk's log holds to its base image; nothing, where there is no log.
    ///
    /// # Errors
    /// If the log has failed or the copy fails.
    fn checkpoint(&self) -> io::Result<()> {
        Ok(())
    }

    /// What the disk's log has done so far, where it has one.
    fn log_counters(&self) -> Option<LogCounters> {
        None
    }
}

/// One queue's way to a disk. Owned and called by one thread.
///
/// A FLUSH, and a write in writethrough mode, completes later without blocking the requests beside it.
pub trait BackendQueue: Send {
    /// Tells how many clients share the queue, each of which waits for its FLUSH before it goes on; 1 unless told.
    fn set_clients(&mut self, clients: usize) {
        let _ = clients;
    }

    /// Hands in one request. Its completion carries `token`. Never blocks on the medium's sync.
    fn submit(&mut self, token: u64, operation: Operation);

    /// Asks for word once the writes that this queue has completed so far outlive this process, though not yet a power
    /// cut: a completion that carries `token` comes then, or with it why they will not. `true`: they do already, and
    /// none comes. [`kick`](BackendQueue::kick) starts what it takes.
    ///
    /// A queue that completes no write sooner, such as a file's, has nothing to do.
    fn when_written(&mut self, token: u64) -> bool {
        let _ = token;
        true
    }

    /// Ends a batch: whatever was submitted since the last call is started now.
    fn kick(&mut self);

    /// Readable when [`completions`](Self::completions) may have something to give.
    fn event(&self) -> BorrowedFd<'_>;

    /// Appends the requests that have ended to `done`, in the order they ended, and clears the event.
    /// Call it after [`kick`](Self::kick) too: a request may end at once, without the event.
    fn completions(&mut self, done: &mut Vec<Completion>);
}
