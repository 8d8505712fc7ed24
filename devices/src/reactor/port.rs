//! A source's queue of its disk, behind the disk's limits.

use std::io;
use std::sync::Arc;

use super::{COMPLETIONS, RELEASE, Turn};
use crate::backend::{Backend, BackendQueue, Completion, Operation};
use crate::event_loop::EventSet;
use crate::throttle::{QueueLimits, Throttle, bytes_of};

/// A source's queue of its disk.
pub(crate) struct DiskPort {
    queue: Box<dyn BackendQueue>,
    limits: QueueLimits,
    throttle: Arc<Throttle>,
    /// Whether anything was submitted since the last kick.
    submitted: bool,
}

impl DiskPort {
    /// Opens a queue.
    ///
    /// # Errors
    /// If the disk or the system refuses.
    pub(crate) fn open(backend: &dyn Backend, throttle: &Arc<Throttle>) -> io::Result<Self> {
        Ok(Self {
            queue: backend.open_queue()?,
            limits: QueueLimits::new(throttle)?,
            throttle: Arc::clone(throttle),
            submitted: false,
        })
    }

    pub(crate) fn throttle(&self) -> &Arc<Throttle> {
        &self.throttle
    }

    /// Watches the queue's descriptors, for the events [`COMPLETIONS`] and [`RELEASE`].
    pub(crate) fn watch(&self, turn: &mut Turn<'_>) -> io::Result<()> {
        turn.watch(self.queue.event(), COMPLETIONS, EventSet::IN)?;
        turn.watch(self.limits.timer(), RELEASE, EventSet::IN)
    }

    /// Handles those events. Taking the completions clears theirs.
    pub(crate) fn ready(&mut self, event: usize) {
        if event == RELEASE {
            self.limits.release(&mut *self.queue);
            self.submitted = true;
        }
    }

    /// Whether the disk's limits hold requests. Then further ones would be held too.
    pub(crate) fn is_holding(&self) -> bool {
        self.limits.is_holding()
    }

    /// Whether the disk has limits, or they still hold requests.
    pub(crate) fn is_limited(&self) -> bool {
        self.limits.in_force()
    }

    /// Submits a request, now or when the disk's limits allow it.
    pub(crate) fn submit(&mut self, token: u64, operation: Operation) {
        let bytes = bytes_of(&operation);
        self.submit_first(token, operation, bytes);
    }

    /// As [`submit`](Self::submit), of the first part of a request of `bytes`: the limits count
    /// that as one. The others are [not limited](Self::submit_unlimited).
    pub(crate) fn submit_first(&mut self, token: u64, operation: Operation, bytes: u64) {
        if self.is_limited() {
            let queue = &mut *self.queue;
            self.limits.submit(queue, token, operation, bytes);
        } else {
            self.queue.submit(token, operation);
        }
        self.count();
    }

    /// Submits a request that follows one which the limits have let pass.
    pub(crate) fn submit_unlimited(&mut self, token: u64, operation: Operation) {
        self.queue.submit(token, operation);
        self.count();
    }

    fn count(&mut self) {
        self.submitted = true;
        self.limits.submitted();
    }

    /// See [`BackendQueue::notify_written`].
    pub(crate) fn notify_written(&mut self, token: u64) -> bool {
        let written = self.queue.notify_written(token);
        if !written {
            self.count();
        }
        written
    }

    /// See [`BackendQueue::set_clients`].
    pub(crate) fn set_clients(&mut self, clients: usize) {
        self.queue.set_clients(clients);
    }

    /// Whether anything was submitted since the last kick.
    pub(crate) fn has_submitted(&self) -> bool {
        self.submitted
    }

    /// Starts what was submitted. `alone`: the thread has nothing to do until the queue's only
    /// request ends.
    pub(crate) fn kick(&mut self, alone: bool) {
        if std::mem::take(&mut self.submitted) {
            if alone {
                self.queue.kick_alone();
            } else {
                self.queue.kick();
            }
        }
    }

    /// See [`BackendQueue::completions`].
    pub(crate) fn completions(&mut self, done: &mut Vec<Completion>) {
        let before = done.len();
        self.queue.completions(done);
        self.limits.completed(done.len() - before);
    }
}
