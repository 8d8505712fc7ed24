//! One ring as a front-end sets it up, and the descriptors that go with it.

use std::fs::{self, File};
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd};
use std::os::unix::fs::FileTypeExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use vmm_sys_util::eventfd::EventFd;

use super::{Outcome, refused};
use crate::block::{BlockMetrics, Worker};
use crate::interrupt::Interrupt;

/// A ring. It runs while it has everything it needs.
pub(super) struct Vring {
    /// Number of descriptors.
    pub(super) size: u16,
    /// Descriptor table, available ring and used ring, in the front-end's addresses.
    pub(super) addresses: Option<[u64; 3]>,
    /// Index of the next available chain while the ring does not run.
    pub(super) next_available: u16,
    /// What the front-end rings; without it the ring is stopped.
    pub(super) kick: Option<EventFd>,
    /// SET_VRING_ENABLE.
    pub(super) enabled: bool,
    /// How the front-end is told.
    pub(super) signals: Arc<Signals>,
    /// Who serves the ring.
    pub(super) worker: Option<Worker>,
}

impl Vring {
    pub(super) fn new(size: u16, metrics: Arc<BlockMetrics>) -> Self {
        Self {
            size,
            addresses: None,
            next_available: 0,
            kick: None,
            enabled: false,
            signals: Arc::new(Signals {
                call: Mutex::new(None),
                error: Mutex::new(None),
                metrics,
            }),
            worker: None,
        }
    }

    /// Drains the ring: what was taken is answered, the rest stays available.
    pub(super) fn pause(&mut self) {
        if let Some(worker) = self.worker.take() {
            self.next_available = worker.stop().unwrap_or(self.next_available);
        }
    }
}

/// The descriptors with which a front-end is told of used chains and of errors.
pub(super) struct Signals {
    call: Mutex<Option<File>>,
    error: Mutex<Option<File>>,
    metrics: Arc<BlockMetrics>,
}

impl Signals {
    /// SET_VRING_CALL.
    pub(super) fn set_call(&self, file: Option<File>) -> Outcome<()> {
        *lock(&self.call) = file.map(signal).transpose()?;
        self.remind();
        Ok(())
    }

    /// Rings for whatever may have been used while nobody could be told, perhaps by the back-end before this one.
    pub(super) fn remind(&self) {
        ring(&lock(&self.call));
    }

    /// SET_VRING_ERR.
    pub(super) fn set_error(&self, file: Option<File>) -> Outcome<()> {
        *lock(&self.error) = file.map(signal).transpose()?;
        Ok(())
    }
}

impl Interrupt for Signals {
    fn queue(&self, _queue: u16) {
        if ring(&lock(&self.call)) {
            self.metrics.interrupt_sent();
        }
    }

    /// The ring is broken.
    fn config(&self) {
        ring(&lock(&self.error));
    }

    fn reset(&self) {}
}

fn lock(file: &Mutex<Option<File>>) -> MutexGuard<'_, Option<File>> {
    file.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Adds 1 to what may be an event descriptor. One that has no room has been rung and not been looked at: a write would
/// wait, and nothing here waits for a front-end.
fn ring(file: &Option<File>) -> bool {
    let Some(file) = file else {
        return false;
    };
    let mut fds = [PollFd::new(file, PollFlags::OUT)];
    let room = poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
        && fds[0].revents().contains(PollFlags::OUT);
    room && rustix::io::write(file, &1_u64.to_ne_bytes()).is_ok()
}

/// Takes a descriptor that is to be written to: an event descriptor, a pipe or a socket, but no file or device, a write
/// to which could take any time.
fn signal(file: File) -> Outcome<File> {
    let kind = file
        .metadata()
        .map_err(|error| refused(format!("a call descriptor: {error}")))?
        .file_type();
    if kind.is_file() || kind.is_dir() || kind.is_block_device() || kind.is_char_device() {
        return Err(refused("a call descriptor is a file, not an event"));
    }
    Ok(file)
}

/// Takes a descriptor that a worker is to wait for. It must be an event descriptor: the end of a pipe, say, would wake
/// the worker for ever.
pub(super) fn doorbell(file: File) -> Outcome<EventFd> {
    let link = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    if link.is_ok_and(|link| link.as_os_str() != "anon_inode:[eventfd]") {
        return Err(refused("a kick descriptor is no event descriptor"));
    }
    // Whoever else reads it must not make the worker wait.
    rustix::fs::fcntl_setfl(&file, OFlags::NONBLOCK)
        .map_err(|error| refused(format!("a kick descriptor: {error}")))?;
    // SAFETY: `file` gives its descriptor away, and nothing else owns it.
    Ok(unsafe { EventFd::from_raw_fd(file.into_raw_fd()) })
}
