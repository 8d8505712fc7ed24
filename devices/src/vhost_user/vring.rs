//! A ring as a front-end sets it up, with its event descriptors.

use std::fs::File;
use std::os::fd::{FromRawFd, IntoRawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vmm_sys_util::eventfd::EventFd;

use super::outcome::{Outcome, refuse};
use super::signal::{EventNotifier, Signal, is_event};
use crate::interrupt::Interrupt;
use crate::metrics::InterruptCounter;
use crate::virtio::QueueHandle;

/// A ring. It runs while it has everything it needs.
pub(super) struct Vring {
    /// Number of descriptors.
    pub(super) size: u16,
    /// Descriptor table, available ring and used ring, in the front-end's addresses.
    pub(super) addresses: Option<[u64; 3]>,
    /// Index of the next available chain while the ring does not run.
    pub(super) next_available: u16,
    /// The descriptor that the front-end signals for new chains. Without one the ring is stopped.
    pub(super) kick: Option<EventFd>,
    /// Set by SET_VRING_ENABLE.
    pub(super) enabled: bool,
    /// The descriptors with which to signal the front-end.
    pub(super) signals: Arc<VringSignals>,
    /// The worker that serves the ring while it runs.
    pub(super) worker: Option<QueueHandle>,
    /// Whether the ring met an error. Pausing and resuming the disk does not clear this.
    pub(super) broken: bool,
}

impl Vring {
    pub(super) fn new(
        size: u16,
        metrics: Arc<dyn InterruptCounter>,
        notifier: Arc<EventNotifier>,
    ) -> Self {
        Self {
            size,
            addresses: None,
            next_available: 0,
            kick: None,
            enabled: false,
            signals: Arc::new(VringSignals {
                call: Mutex::new(None),
                error: Mutex::new(None),
                notifier,
                metrics,
            }),
            worker: None,
            broken: false,
        }
    }

    /// Drains the ring for the owner: chains already taken are completed, the others stay
    /// available.
    pub(super) fn pause(&mut self) {
        if let Some(drained) = self.worker.take().map(QueueHandle::stop) {
            self.next_available = drained.next_avail.unwrap_or(self.next_available);
            self.broken |= drained.broken;
        }
    }

    /// Drains the ring for the front-end, which may start it again even after an error.
    pub(super) fn stop(&mut self) {
        self.pause();
        self.broken = false;
    }
}

/// The descriptors that signal used chains and errors to a front-end.
pub(super) struct VringSignals {
    call: Mutex<Option<Signal>>,
    error: Mutex<Option<Signal>>,
    notifier: Arc<EventNotifier>,
    metrics: Arc<dyn InterruptCounter>,
}

impl VringSignals {
    /// SET_VRING_CALL.
    pub(super) fn set_call(&self, file: Option<File>) -> Outcome<()> {
        self.set(&self.call, file)?;
        self.signal_used();
        Ok(())
    }

    /// Signals used chains, in case some were used while there was no call descriptor, or by the
    /// previous back-end.
    pub(super) fn signal_used(&self) {
        self.ring(&self.call);
    }

    /// SET_VRING_ERR.
    pub(super) fn set_error(&self, file: Option<File>) -> Outcome<()> {
        self.set(&self.error, file)
    }

    fn set(&self, signal: &Mutex<Option<Signal>>, file: Option<File>) -> Outcome<()> {
        let new = file.map(Signal::new).transpose()?;
        // Drops the old signal only after the lock is released.
        let _old = std::mem::replace(&mut *lock(signal), new);
        Ok(())
    }

    fn ring(&self, signal: &Mutex<Option<Signal>>) -> bool {
        let signal = lock(signal);
        signal
            .as_ref()
            .is_some_and(|signal| signal.ring(&self.notifier))
    }
}

impl Interrupt for VringSignals {
    fn queue(&self, _queue: u16) {
        if self.ring(&self.call) {
            self.metrics.count_interrupt();
        }
    }

    /// Signals that the ring is broken.
    fn config(&self) {
        self.ring(&self.error);
    }

    fn reset(&self) {}
}

fn lock(signal: &Mutex<Option<Signal>>) -> MutexGuard<'_, Option<Signal>> {
    signal.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Turns a descriptor into a doorbell that a worker can wait on. Only event descriptors will do: a
/// closed pipe, for example, would wake the worker forever, and a file on a file system of the
/// front-end could block any thread that uses it.
pub(super) fn doorbell(file: File) -> Outcome<EventFd> {
    if !is_event(&file)? {
        return Err(refuse("a kick descriptor is not an event descriptor"));
    }
    // SAFETY: `file` gives its descriptor away, and nothing else owns it.
    Ok(unsafe { EventFd::from_raw_fd(file.into_raw_fd()) })
}
