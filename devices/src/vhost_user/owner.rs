//! What the owner of a disk wants of the thread that serves it: said here, done there between two messages.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use crate::control::{CacheSwitch, DeviceControl};

/// How long a front-end may keep the thread from resting: only one that stops in the middle of a message, or does not read
/// its replies, does so at all.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is wanted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Wishes {
    /// The configuration space may have changed: once.
    pub(super) announce: bool,
    /// No ring is to run.
    pub(super) rest: bool,
}

/// Both sides of it.
pub(super) struct Owner {
    event: OwnedFd,
    state: Mutex<State>,
    rests: Condvar,
}

#[derive(Default)]
struct State {
    wishes: Wishes,
    /// No ring runs, and none will.
    resting: bool,
    /// Nobody serves the disk any more.
    over: bool,
}

impl Owner {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            state: Mutex::default(),
            rests: Condvar::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Flags are right between any two steps.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Readable when there are new wishes.
    pub(super) fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// The thread hears what is wanted.
    pub(super) fn hear(&self) -> Wishes {
        // Cleared first: what comes from here on is told again.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        let mut state = self.lock();
        let heard = state.wishes;
        state.wishes.announce = false;
        // From here on it may not be so.
        state.resting &= heard.rest;
        heard
    }

    /// The thread has done so.
    pub(super) fn rests(&self, resting: bool) {
        self.lock().resting = resting;
        self.rests.notify_all();
    }

    /// The thread ends.
    pub(super) fn over(&self) {
        self.lock().over = true;
        self.rests.notify_all();
    }

    fn tell(&self, change: impl FnOnce(&mut Wishes)) {
        change(&mut self.lock().wishes);
        // A full counter is readable all the same.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }
}

/// The disk in use, for its owner.
pub(super) struct ServiceControl {
    pub(super) owner: Arc<Owner>,
    pub(super) cache: Arc<CacheSwitch>,
}

impl DeviceControl for ServiceControl {
    fn capacity_changed(&self) {
        self.owner.tell(|wishes| wishes.announce = true);
    }

    fn set_write_cache(&self, on: bool) -> bool {
        self.cache.set_for_owner(on)
    }

    fn pause(&self) -> io::Result<()> {
        self.owner.tell(|wishes| wishes.rest = true);
        let waiting = |state: &mut State| !state.resting && !state.over;
        let state = self.owner.lock();
        let waited = self
            .owner
            .rests
            .wait_timeout_while(state, PATIENCE, waiting);
        let (state, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        drop(state);
        if waited.timed_out() {
            self.resume();
            let why = "its front-end has stopped in the middle of a message, or does not read its replies";
            return Err(io::Error::new(io::ErrorKind::TimedOut, why));
        }
        Ok(())
    }

    fn resume(&self) {
        self.owner.tell(|wishes| wishes.rest = false);
    }
}
