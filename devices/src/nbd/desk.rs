//! One worker's port to one disk.

use std::sync::Arc;
use std::time::Instant;

use slab::Slab;

use super::export::{Export, Used};
use super::inbox::{Inbox, Mail, Mapped};
use super::protocol::command;
use super::request::PendingRequest;
use crate::backend::{Answer, BackendQueue};
use crate::latency::OperationKind;
use crate::throttle::QueueLimits;

/// A port to one disk, shared by the worker's connections to that disk.
pub(super) struct Desk {
    pub(super) queue: Box<dyn BackendQueue>,
    pub(super) limits: QueueLimits,
    /// Behind the queue, so that the queue is closed before the use of the export ends.
    pub(super) export: Used,
    pub(super) part: usize,
    /// Requests in flight by token, each with its client's key and the time when the worker took it.
    pub(super) in_flight: Slab<(usize, PendingRequest, Instant)>,
    pub(super) clients: usize,
    /// Something was submitted since the last kick.
    pub(super) submitted: bool,
    /// The queue's event has fired: there may be completions.
    pub(super) rung: bool,
}

impl Desk {
    /// Adjusts the number of clients.
    pub(super) fn count(&mut self, more: isize) {
        self.clients = self.clients.saturating_add_signed(more);
        self.queue.set_clients(self.clients);
    }

    /// Starts a request that is in [`in_flight`](Self::in_flight). `key` is this desk's key in the worker of `inbox`.
    pub(super) fn begin(&mut self, key: usize, token: usize, inbox: &Arc<Inbox>) {
        let pending = self.in_flight.get(token);
        match pending.and_then(|(_, pending, _)| pending.question()) {
            Some(question) => {
                let inbox = Arc::clone(inbox);
                let asker = Box::new(move |extents| {
                    inbox.send(Mail::Answer(Mapped {
                        desk: key,
                        token,
                        extents,
                    }));
                });
                let Export {
                    mapper, backend, ..
                } = &**self.export;
                mapper.ask(backend, question, asker);
            }
            // A request without a question always has a first step.
            None => drop(self.step(token)),
        }
    }

    /// Submits the next step of a request; `false`: all its steps have been submitted.
    pub(super) fn step(&mut self, token: usize) -> bool {
        let pending = self.in_flight.get_mut(token);
        let Some(operation) = pending.and_then(|(_, pending, _)| pending.step(self.part)) else {
            return false;
        };
        match self.limits.in_force() {
            false => self.queue.submit(token as u64, operation),
            true => {
                let queue = &mut *self.queue;
                self.limits.submit(queue, token as u64, operation);
            }
        }
        self.submitted = true;
        true
    }

    /// Whether a request whose steps have ended must be answered later, once its changes are written.
    pub(super) fn waits(&mut self, token: usize) -> bool {
        let pending = self.in_flight.get_mut(token);
        let asks = pending.is_some_and(|(_, pending, _)| pending.take_unasked())
            && self.export.answer == Answer::Written;
        let waits = asks && !self.queue.notify_written(token as u64);
        self.submitted |= waits;
        waits
    }
}

impl Drop for Desk {
    /// Requests still in flight here were abandoned after an error. They leave the gate without a reply.
    fn drop(&mut self) {
        for _ in self.in_flight.drain() {
            self.export.gate.leave();
        }
    }
}

/// The kind of operation that a command's latency counts as.
pub(super) fn kind(command: u16) -> Option<OperationKind> {
    match command {
        command::READ => Some(OperationKind::Read),
        command::WRITE => Some(OperationKind::Write),
        command::FLUSH => Some(OperationKind::Flush),
        command::TRIM => Some(OperationKind::Discard),
        command::WRITE_ZEROES => Some(OperationKind::WriteZeroes),
        _ => None,
    }
}
