//! The disk behind a device, and the interface of its queues.

use std::any::Any;
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;

use crate::{
    Change, Completion, Condition, Extent, LogCounters, MAX_REQUEST_BYTES, Operation, PastPoint,
    Transfer,
};
#[cfg(doc)]
use crate::{Failure, SECTOR_SIZE};

/// What a backend really implements (promise 6: a device offers only features that its backend
/// has).
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
    /// A WRITE_ZEROES without `unmap` leaves no copy of the sectors' old contents, neither on the
    /// medium nor in a log, once a later FLUSH has completed. Together with [`flush`](Self::flush)
    /// and [`write_zeroes`](Self::write_zeroes) that is SECURE_ERASE.
    pub secure_erase: bool,
}

/// When to answer a change (a write, discard or write of zeroes) that is not durable yet, for
/// clients that outlive this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Answer {
    /// Once it survives this process: a client that reconnects after a kill finds it, and the
    /// client's next FLUSH covers it.
    #[default]
    Written,
    /// At once. It may be only in this process's memory, and a kill loses it.
    Memory,
}

/// A disk on which any number of queues can be opened: what every disk can do. What only some can
/// do is a trait of its own, which a disk that has it returns from the method of that name.
pub trait Backend: Send + Sync {
    /// Capacity in sectors of 512 bytes.
    fn sectors(&self) -> u64;

    /// What the disk really implements.
    fn capabilities(&self) -> Capabilities;

    /// Whether writes complete before they are durable (writeback). `false` is writethrough.
    fn write_cache(&self) -> bool;

    /// Turns the volatile write cache on (writeback) or off (writethrough). Requests submitted
    /// after the call follow the new mode. After it is turned off, the next write or FLUSH makes
    /// everything written so far durable.
    fn set_write_cache(&self, on: bool);

    /// Sets the disk's part of what it shares with other disks, such as the room of a log, relative
    /// to theirs; 100 unless set.
    fn set_weight(&self, weight: u16) {
        let _ = weight;
    }

    /// Opens a queue for one worker.
    ///
    /// # Errors
    /// If the system refuses a descriptor, a ring or a thread.
    fn open_queue(&self) -> io::Result<Box<dyn BackendQueue>>;

    /// Whether a queue's [`submit`](BackendQueue::submit) reads in its caller's thread, so that the
    /// thread's other users wait for the medium too.
    fn blocks(&self) -> bool {
        false
    }

    /// Longest READ or WRITE in bytes, a multiple of [`SECTOR_SIZE`]; a longer one fails with
    /// [`Failure::TooLarge`].
    fn max_request_bytes(&self) -> usize {
        MAX_REQUEST_BYTES
    }

    /// Longest WRITE in bytes that a crash leaves whole or not at all, a multiple of
    /// [`SECTOR_SIZE`] and no more than [`max_request_bytes`](Self::max_request_bytes). It may
    /// begin at any sector. 0: the disk promises that of no WRITE.
    fn max_atomic_bytes(&self) -> usize {
        0
    }

    /// The disk, if it can change its size while it is in use.
    fn resizable(&self) -> Option<&dyn Resizable> {
        None
    }

    /// The disk, if it knows which parts of it hold data.
    fn mapped(&self) -> Option<&dyn Mapped> {
        None
    }

    /// The disk, if it knows what has changed since points in its past.
    fn tracked(&self) -> Option<&dyn Tracked> {
        None
    }

    /// The disk, if its newest bytes are in a log.
    fn logged(&self) -> Option<&dyn Logged> {
        None
    }

    /// The disk's condition.
    fn condition(&self) -> Condition {
        Condition::Ok
    }

    /// Fails requests that still wait for another machine after a few seconds. For an owner that
    /// waits for requests in flight.
    fn limit_waits(&self) {}

    /// From now on, fails requests that would wait for something that may never come, such as space
    /// in a file system; also [limits waits](Self::limit_waits). For an owner that is shutting down
    /// and waits for requests in flight.
    fn end_pauses(&self) {}

    /// Whether, at the owner's request, FLUSH does nothing and writes may never become durable.
    fn is_unsafe(&self) -> bool {
        false
    }
}

/// A disk that can change its size while it is in use.
pub trait Resizable {
    /// Grows the disk to `bytes` while it is in use; requests submitted after the call may use all
    /// of it.
    ///
    /// # Errors
    /// If the disk can't have this size, or would shrink.
    fn grow(&self, bytes: u64) -> io::Result<()>;
}

/// A disk that knows which parts of it hold data.
pub trait Mapped {
    /// Which parts of the disk from `sector` on hold data: between 1 and `most` consecutive
    /// extents, `sectors` sectors in all or fewer. The range must be on the disk and not empty.
    ///
    /// # Errors
    /// If the medium cannot be queried.
    fn extents(&self, sector: u64, sectors: u64, most: usize) -> io::Result<Vec<Extent>>;
}

/// A disk that knows what has changed since points in its past.
pub trait Tracked {
    /// The points in the past since which the disk knows what has changed.
    fn past_points(&self) -> Vec<PastPoint>;

    /// Which parts of the disk from `sector` on were written since the [point](Self::past_points)
    /// with this number, even if with the same bytes: consecutive ranges, as from
    /// [`Mapped::extents`]. What is written during the call may be reported either way.
    ///
    /// # Errors
    /// [`NotFound`](io::ErrorKind::NotFound) if there is no such point (any more); or if the medium
    /// can't be read.
    fn changes(
        &self,
        since: u64,
        sector: u64,
        sectors: u64,
        most: usize,
    ) -> io::Result<Vec<Change>>;
}

/// A disk whose newest bytes are in a log. It is [`Any`], so that the program that has opened it
/// finds its own type again.
pub trait Logged: Any {
    /// Copies the contents of the disk's log to its base image.
    ///
    /// # Errors
    /// If the log has failed or the copy fails.
    fn checkpoint(&self) -> io::Result<()>;

    /// Copies the disk, as of one moment, to `target`, an empty file open for writing, while the
    /// disk is in use. All changes completed before the call are in the copy. `progress` gets the
    /// number of bytes passed so far and the disk's size, and returns `false` to end the export.
    ///
    /// # Errors
    /// If the disk can't be read, the file can't be written, or `progress` has ended the export.
    /// The file is then incomplete.
    fn export(
        &self,
        target: File,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> io::Result<Transfer>;

    /// Counters of the disk's log.
    fn log_counters(&self) -> LogCounters;

    /// The directory of the disk's log. The disks on one log return the same path, and only they
    /// do.
    fn log_dir(&self) -> &Path;
}

/// One queue of a disk. Owned and called by one thread.
///
/// A FLUSH, or a write in writethrough mode, completes later, without blocking other requests. A
/// queue that is not polled must hold up no other queue: whatever work a call takes on for all, it
/// finishes before it returns.
pub trait BackendQueue: Send {
    /// Sets how many clients share the queue, where each waits for its FLUSH before it goes on; 1
    /// unless set.
    fn set_clients(&mut self, clients: usize) {
        let _ = clients;
    }

    /// Submits one request. Its completion carries `token`. Never blocks on a sync.
    fn submit(&mut self, token: u64, operation: Operation);

    /// Requests a completion, with `token`, for when the writes that this queue has completed so
    /// far survive this process, though not yet a power cut; it carries a failure if they never
    /// will. `true`: they already do, and there is no completion. [`kick`](BackendQueue::kick)
    /// starts any work that this needs.
    ///
    /// The default is for a queue whose completed writes always survive the process, such as a
    /// file's.
    fn notify_written(&mut self, token: u64) -> bool {
        let _ = token;
        true
    }

    /// Starts everything submitted since the last call.
    fn kick(&mut self);

    /// As [`kick`](Self::kick), from a thread with nothing to do until one of this queue's requests
    /// ends. The queue may then carry out a quick operation in the calling thread, which saves two
    /// thread switches.
    fn kick_alone(&mut self) {
        self.kick();
    }

    /// Readable when [`completions`](Self::completions) may return some. An
    /// [`OwnedFd`](std::os::fd::OwnedFd) is borrowed with `as_fd`, an `EventFd` with
    /// [`descriptor`](crate::descriptor).
    fn event(&self) -> BorrowedFd<'_>;

    /// Appends ended requests to `done`, in the order in which they ended, and clears the event.
    /// Call it after [`kick`](Self::kick) too: a request may end at once, without the event.
    fn completions(&mut self, done: &mut Vec<Completion>);
}
