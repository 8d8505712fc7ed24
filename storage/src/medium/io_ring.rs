//! An io_uring: one system call starts all operations of a turn, and completions are read without one.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue};
use rustix::io::Errno;
use slab::Slab;

/// Submission entries; the kernel gives twice as many completion entries.
const ENTRIES: u32 = 256;
/// Most entries in flight, so that the completion queue never overflows.
const IN_FLIGHT: usize = 2 * ENTRIES as usize;

/// Checks that the kernel has io_uring with the operations used in this crate (Linux 5.6).
pub(crate) fn probe() -> io::Result<()> {
    let ring = IoUring::new(4)?;
    let mut probe = io_uring::Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let needed = [
        opcode::Read::CODE,
        opcode::Write::CODE,
        opcode::Writev::CODE,
        opcode::Fallocate::CODE,
    ];
    if needed.iter().all(|&code| probe.is_supported(code)) {
        Ok(())
    } else {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "the kernel's io_uring lacks a required operation",
        ))
    }
}

/// A ring and its operations. Dropping it waits for those in the kernel.
pub(crate) struct IoRing<T> {
    ring: IoUring,
    /// By key, every operation with an entry in `waiting`, in the submission queue or in the kernel.
    operations: Slab<T>,
    /// Entries that did not fit the submission queue.
    waiting: VecDeque<squeue::Entry>,
    /// Entries put into the submission queue and not completed.
    open: usize,
}

impl<T> IoRing<T> {
    /// A ring that signals the eventfd `event` whenever an operation ends.
    pub(crate) fn new(event: &impl AsRawFd) -> io::Result<Self> {
        // Linux 5.19: completions do not interrupt a running thread; its next system call takes them.
        let cooperative = IoUring::builder().setup_coop_taskrun().build(ENTRIES);
        let ring = cooperative.or_else(|_| IoUring::new(ENTRIES))?;
        ring.submitter().register_eventfd(event.as_raw_fd())?;
        Ok(Self {
            ring,
            operations: Slab::new(),
            waiting: VecDeque::new(),
            open: 0,
        })
    }

    /// Takes an operation, which `entry` describes; it starts at the next [`enter`](Self::enter).
    ///
    /// # Safety
    /// The operation owns all memory that the entry names, and that memory stays where it is when the operation is
    /// moved. The entry's file stays open until the operation has ended or the ring is dropped.
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
        // SAFETY: the caller of `submit` promised that the entry is valid as long as its operation is in `operations`,
        // and the operation leaves that only when its completion has come.
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
                // The kernel is short of memory. With entries in flight, a completion will make `next_ended` retry;
                // without any, nothing would, so wait here.
                Err(_) if self.open > self.ring.submission().len() => return,
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// The next operation that has ended, with the number of bytes that it moved. Starts everything submitted before
    /// it returns `None`.
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

impl<T> Drop for IoRing<T> {
    fn drop(&mut self) {
        // The kernel may still use the memory of submitted operations: wait for each. The others never start.
        loop {
            self.open -= self.ring.completion().count();
            if self.open == 0 {
                return;
            }
            if let Err(error) = self.ring.submit_and_wait(1)
                && error.raw_os_error() != Some(libc::EINTR)
            {
                // Leak rather than free memory that the kernel may use.
                tracing::error!("io_uring can't be drained: {error}");
                return std::mem::forget(std::mem::take(&mut self.operations));
            }
        }
    }
}
