//! A worker's use of one disk, shared by its connections to that disk.

use std::sync::Arc;
use std::time::Instant;

use slab::Slab;

use super::export::{Export, ExportGuard};
use super::inbox::{ExtentAnswer, WorkerInbox, WorkerMessage};
use super::protocol::command;
use super::request::PendingRequest;
use crate::backend::{Answer, BackendQueue};
use crate::latency::OperationKind;
use crate::throttle::QueueLimits;

/// A queue of one disk, shared by the worker's connections to that disk.
pub(super) struct DiskSession {
    pub(super) queue: Box<dyn BackendQueue>,
    pub(super) limits: QueueLimits,
    /// Declared after the queue: the queue must be closed before the export may be removed.
    pub(super) export: ExportGuard,
    /// The most bytes of one step.
    pub(super) max_step: usize,
    /// Requests in flight by token, each with its client's key and the time when the worker took it.
    pub(super) in_flight: Slab<(usize, PendingRequest, Instant)>,
    pub(super) clients: usize,
    /// Whether anything was submitted since the last kick.
    pub(super) submitted: bool,
    /// Whether the queue's event has fired: there may be completions.
    pub(super) signalled: bool,
}

impl DiskSession {
    /// Adds `more` to the number of clients.
    pub(super) fn add_clients(&mut self, more: isize) {
        self.clients = self.clients.saturating_add_signed(more);
        self.queue.set_clients(self.clients);
    }

    /// Starts a request of [`in_flight`](Self::in_flight). `key` is this session's key in the worker that reads `inbox`.
    pub(super) fn begin(&mut self, key: usize, token: usize, inbox: &Arc<WorkerInbox>) {
        let pending = self.in_flight.get(token);
        match pending.and_then(|(_, pending, _)| pending.query()) {
            Some(query) => {
                let inbox = Arc::clone(inbox);
                let callback = Box::new(move |extents| {
                    inbox.send(WorkerMessage::Extents(ExtentAnswer {
                        session: key,
                        token,
                        extents,
                    }));
                });
                let Export {
                    mapper, backend, ..
                } = &**self.export;
                mapper.ask(backend, query, callback);
            }
            // A request without a query always has a first step.
            None => drop(self.submit_step(token)),
        }
    }

    /// Submits the next step of a request; `false`: all its steps have been submitted.
    pub(super) fn submit_step(&mut self, token: usize) -> bool {
        let pending = self.in_flight.get_mut(token);
        let Some(operation) = pending.and_then(|(_, pending, _)| pending.next_step(self.max_step))
        else {
            return false;
        };
        if self.limits.in_force() {
            let queue = &mut *self.queue;
            self.limits.submit(queue, token as u64, operation);
        } else {
            self.queue.submit(token as u64, operation);
        }
        self.submitted = true;
        true
    }

    /// Whether the answer to a request whose steps are done has to wait until its changes are written.
    pub(super) fn waits_for_write(&mut self, token: usize) -> bool {
        let pending = self.in_flight.get_mut(token);
        let await_written = pending.is_some_and(|(_, pending, _)| pending.take_await_written())
            && self.export.answer == Answer::Written;
        let waits = await_written && !self.queue.notify_written(token as u64);
        self.submitted |= waits;
        waits
    }
}

impl Drop for DiskSession {
    /// Requests still in flight were abandoned after an error. They leave the gate without a reply.
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
