//! An io_uring: one system call starts all operations of a turn, and completions are read without
//! one.
//!
//! A ring carries out only the operations of this crate, whatever a thread puts into it: it is made
//! disabled, restricted, and enabled then. A system call filter can't see what is in a ring, so a
//! process with such a filter makes its rings before ([`prepare_rings`]) and may make none
//! afterwards.

use std::collections::VecDeque;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use io_uring::register::Restriction;
use io_uring::squeue::Flags;
use io_uring::{IoUring, opcode, squeue};
use rustix::io::Errno;
use slab::Slab;

/// Submission entries; the kernel gives twice as many completion entries.
const ENTRIES: u32 = 256;
/// Most entries in flight, so that the completion queue never overflows.
const IN_FLIGHT: usize = 2 * ENTRIES as usize;

/// The operations that a ring carries out.
const OPERATIONS: [u8; 4] = [
    opcode::Read::CODE,
    opcode::Write::CODE,
    opcode::Writev::CODE,
    opcode::Fallocate::CODE,
];
/// What can be changed about a ring: IORING_REGISTER_EVENTFD and IORING_UNREGISTER_EVENTFD
/// (linux/io_uring.h).
const REGISTRATIONS: [u8; 2] = [4, 5];

/// Rings that are not in use.
struct RingPool {
    idle: Vec<IoUring>,
    /// Most rings in `idle`.
    most: usize,
}

static POOL: Mutex<RingPool> = Mutex::new(RingPool {
    idle: Vec::new(),
    most: 0,
});

fn pool() -> std::sync::MutexGuard<'static, RingPool> {
    POOL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Checks that the kernel has io_uring with restrictions (Linux 5.10) and the operations of this
/// crate.
pub(crate) fn probe() -> io::Result<()> {
    // A process that may not make rings any more has asked before.
    static PROBED: OnceLock<std::result::Result<(), Option<i32>>> = OnceLock::new();
    let probed = PROBED.get_or_init(|| try_probe().map_err(|error| error.raw_os_error()));
    probed.map_err(|code| {
        let lacks = || {
            io::Error::new(
                io::ErrorKind::Unsupported,
                "the kernel's io_uring lacks a required operation",
            )
        };
        code.map_or_else(lacks, io::Error::from_raw_os_error)
    })
}

fn try_probe() -> io::Result<()> {
    let ring = IoUring::new(4)?;
    let mut probe = io_uring::Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    make().map(drop)?;
    if OPERATIONS.iter().all(|&code| probe.is_supported(code)) {
        Ok(())
    } else {
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// Makes rings for ports that will be opened later, up to `count` that are not in use. For a
/// process that gives up the right to make rings. Ports that find none use system calls. Returns
/// how many there are.
pub fn prepare_rings(count: usize) -> usize {
    if probe().is_err() {
        return 0;
    }
    let mut pool = pool();
    pool.most = count;
    while pool.idle.len() < count {
        // Memory or descriptors are short.
        let Ok(ring) = make() else { break };
        pool.idle.push(ring);
    }
    pool.idle.len()
}

/// A ring that can do nothing but [`OPERATIONS`].
fn make() -> io::Result<IoUring> {
    // Linux 5.19: completions do not interrupt a running thread; its next system call takes them.
    let cooperative = IoUring::builder()
        .setup_r_disabled()
        .setup_coop_taskrun()
        .build(ENTRIES);
    let ring = cooperative.or_else(|_| IoUring::builder().setup_r_disabled().build(ENTRIES))?;
    let operations = OPERATIONS.map(Restriction::sqe_op);
    let mut allowed: Vec<_> = operations
        .into_iter()
        .chain(REGISTRATIONS.map(Restriction::register_op))
        .chain([Restriction::sqe_flags_allowed(Flags::ASYNC.bits())])
        .collect();
    ring.submitter().register_restrictions(&mut allowed)?;
    ring.submitter().register_enable_rings()?;
    Ok(ring)
}

/// A ring and its operations. Dropping it waits for those in the kernel.
pub(crate) struct IoRing<T> {
    /// Taken when this is dropped.
    ring: ManuallyDrop<IoUring>,
    /// By key, every operation with an entry in `waiting`, in the submission queue or in the
    /// kernel.
    operations: Slab<T>,
    /// Entries that did not fit the submission queue.
    waiting: VecDeque<squeue::Entry>,
    /// Entries put into the submission queue and not completed.
    open: usize,
}

impl<T> IoRing<T> {
    /// A ring that signals the eventfd `event` whenever an operation ends.
    pub(crate) fn new(event: &impl AsRawFd) -> io::Result<Self> {
        let prepared = pool().idle.pop();
        let ring = prepared.map_or_else(make, Ok)?;
        ring.submitter().register_eventfd(event.as_raw_fd())?;
        Ok(Self {
            ring: ManuallyDrop::new(ring),
            operations: Slab::new(),
            waiting: VecDeque::new(),
            open: 0,
        })
    }

    /// Takes an operation, which `entry` describes; it starts at the next [`enter`](Self::enter).
    ///
    /// # Safety
    /// The operation owns all memory that the entry names, and that memory stays where it is when
    /// the operation is moved. The entry's file stays open until the operation has ended or the
    /// ring is dropped.
    pub(crate) unsafe fn submit(&mut self, operation: T, entry: squeue::Entry) {
        let entry = entry.user_data(self.operations.insert(operation) as u64);
        if !self.waiting.is_empty() || !self.push(&entry) {
            self.waiting.push_back(entry);
        }
    }

    /// Moves entries from `waiting` to the submission queue while there is room.
    fn fill(&mut self) {
        while let Some(entry) = self.waiting.pop_front() {
            if !self.push(&entry) {
                return self.waiting.push_front(entry);
            }
        }
    }

    /// Puts an entry into the submission queue, if there is room.
    fn push(&mut self, entry: &squeue::Entry) -> bool {
        let mut queue = self.ring.submission();
        if self.open >= IN_FLIGHT || queue.is_full() {
            return false;
        }
        // SAFETY: the caller of `submit` promised that the entry is valid as long as its operation
        // is in `operations`, and the operation leaves that only when its completion has come.
        unsafe { queue.push(entry).expect("room was checked") };
        self.open += 1;
        true
    }

    /// Starts everything submitted.
    pub(crate) fn enter(&mut self) {
        self.fill();
        loop {
            if self.ring.submission().is_empty() {
                return;
            }
            match self.ring.submit() {
                Ok(_) => self.fill(),
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                // The kernel is short of memory. With entries in flight, a completion will make
                // `next_ended` retry; without any, nothing would, so wait here.
                Err(_) if self.open > self.ring.submission().len() => return,
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// The next operation that has ended, with the number of bytes that it moved. Starts everything
    /// submitted before it returns `None`.
    pub(crate) fn next_ended(&mut self) -> Option<(T, Result<usize, Errno>)> {
        let mut entry = self.ring.completion().next();
        if entry.is_none() {
            self.enter();
            entry = self.ring.completion().next();
        }
        let entry = entry?;
        self.open -= 1;
        let moved = usize::try_from(entry.result());
        let moved = moved.map_err(|_| Errno::from_raw_os_error(-entry.result()));
        Some((self.operations.remove(entry.user_data() as usize), moved))
    }
}

impl<T> IoRing<T> {
    /// Waits for every operation in the kernel, which may still use its memory. The others never
    /// start.
    fn drain(&mut self) -> io::Result<()> {
        loop {
            self.open -= self.ring.completion().count();
            if self.open == 0 {
                return Ok(());
            }
            match self.ring.submit_and_wait(1) {
                Err(error) if error.raw_os_error() != Some(libc::EINTR) => return Err(error),
                _ => {}
            }
        }
    }
}

impl<T> Drop for IoRing<T> {
    fn drop(&mut self) {
        let drained = self.drain();
        // SAFETY: nothing uses the field after this.
        let ring = unsafe { ManuallyDrop::take(&mut self.ring) };
        if let Err(error) = drained {
            // Leak rather than free memory that the kernel may use.
            tracing::error!("io_uring can't be drained: {error}");
            return std::mem::forget(std::mem::take(&mut self.operations));
        }
        let released = ring.submitter().unregister_eventfd();
        let mut pool = pool();
        if released.is_ok() && pool.idle.len() < pool.most {
            pool.idle.push(ring);
        }
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;

    /// The result of one entry of a ring.
    fn result(ring: &mut IoUring, entry: squeue::Entry) -> i32 {
        // SAFETY: whatever the entry names lives until its completion has come.
        unsafe { ring.submission().push(&entry).unwrap() };
        ring.submit_and_wait(1).unwrap();
        ring.completion().next().unwrap().result()
    }

    #[test]
    fn a_ring_does_nothing_but_the_operations_of_this_crate() {
        if let Err(error) = probe() {
            return println!("skipped: no io_uring here: {error}");
        }
        let mut ring = make().unwrap();
        let file = tempfile::tempfile().unwrap();
        let fd = io_uring::types::Fd(file.as_raw_fd());
        let here = io_uring::types::Fd(libc::AT_FDCWD);
        let path = c"/etc/passwd".as_ptr();
        let forbidden = [
            opcode::Nop::new().build(),
            opcode::Socket::new(libc::AF_UNIX, libc::SOCK_STREAM, 0).build(),
            opcode::Connect::new(fd, std::ptr::null(), 0).build(),
            opcode::OpenAt::new(here, path).build(),
            opcode::Splice::new(fd, 0, fd, 0, 1).build(),
            opcode::UnlinkAt::new(here, path).build(),
            opcode::Close::new(fd).build(),
        ];
        for entry in forbidden {
            assert_eq!(result(&mut ring, entry), -libc::EACCES);
        }
        let bytes = *b"bytes";
        let write = || opcode::Write::new(fd, bytes.as_ptr(), bytes.len() as u32).build();
        assert_eq!(result(&mut ring, write()), bytes.len() as i32);
        let linked = write().flags(squeue::Flags::IO_LINK);
        assert_eq!(result(&mut ring, linked), -libc::EACCES);
        let mut probe = io_uring::Probe::new();
        assert!(ring.submitter().register_probe(&mut probe).is_err());
        assert!(ring.submitter().register_files(&[0]).is_err());
    }
}
