//! One ring as a front-end sets it up, and the descriptors that go with it.

use std::fs::File;
use std::os::fd::{FromRawFd, IntoRawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmm_sys_util::eventfd::EventFd;

use super::outcome::{Outcome, refused};
use super::signal::{Bell, Signal, is_event};
use crate::block::Worker;
use crate::interrupt::Interrupt;
use crate::metrics::BlockMetrics;

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
    pub(super) fn new(size: u16, metrics: Arc<BlockMetrics>, bell: Arc<Bell>) -> Self {
        Self {
            size,
            addresses: None,
            next_available: 0,
            kick: None,
            enabled: false,
            signals: Arc::new(Signals {
                call: Mutex::new(None),
                error: Mutex::new(None),
                bell,
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
    call: Mutex<Option<Signal>>,
    error: Mutex<Option<Signal>>,
    bell: Arc<Bell>,
    metrics: Arc<BlockMetrics>,
}

impl Signals {
    /// SET_VRING_CALL.
    pub(super) fn set_call(&self, file: Option<File>) -> Outcome<()> {
        self.set(&self.call, file)?;
        self.remind();
        Ok(())
    }

    /// Rings for whatever may have been used while nobody could be told, perhaps by the back-end before this one.
    pub(super) fn remind(&self) {
        self.ring(&self.call);
    }

    /// SET_VRING_ERR.
    pub(super) fn set_error(&self, file: Option<File>) -> Outcome<()> {
        self.set(&self.error, file)
    }

    fn set(&self, signal: &Mutex<Option<Signal>>, file: Option<File>) -> Outcome<()> {
        let new = file.map(|file| Signal::new(file, &self.bell)).transpose()?;
        // Closed when the lock is free again.
        let _old = std::mem::replace(&mut *lock(signal), new);
        Ok(())
    }

    fn ring(&self, signal: &Mutex<Option<Signal>>) -> bool {
        let signal = lock(signal);
        signal
            .as_ref()
            .is_some_and(|signal| signal.ring(&self.bell))
    }
}

impl Interrupt for Signals {
    fn queue(&self, _queue: u16) {
        if self.ring(&self.call) {
            self.metrics.interrupt_sent();
        }
    }

    /// The ring is broken.
    fn config(&self) {
        self.ring(&self.error);
    }

    fn reset(&self) {}
}

fn lock(signal: &Mutex<Option<Signal>>) -> MutexGuard<'_, Option<Signal>> {
    signal.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes a descriptor that a worker is to wait for. It must be an event descriptor: the end of a pipe, say, would wake
/// the worker for ever, and a file system of the front-end's could keep whoever asks it.
pub(super) fn doorbell(file: File) -> Outcome<EventFd> {
    match is_event(&file)? {
        // SAFETY: `file` gives its descriptor away, and nothing else owns it.
        true => Ok(unsafe { EventFd::from_raw_fd(file.into_raw_fd()) }),
        false => Err(refused("a kick descriptor is no event descriptor")),
    }
}
