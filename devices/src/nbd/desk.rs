//! The way of one thread to one disk.

use std::sync::Arc;
use std::time::Instant;

use slab::Slab;

use super::export::Export;
use super::inbox::{Inbox, Mail, Mapped};
use super::protocol::command;
use super::request::Pending;
use crate::backend::Answer;
use crate::latency::OperationKind;
use crate::throttle::ThrottledQueue;

/// The way to one disk, which the connections of a thread share.
pub(super) struct Desk {
    pub(super) export: Arc<Export>,
    pub(super) queue: ThrottledQueue,
    pub(super) part: usize,
    /// Requests in flight by token, each with its client's key and when it was read.
    pub(super) in_flight: Slab<(usize, Pending, Instant)>,
    pub(super) clients: usize,
    /// Something was submitted since the last kick.
    pub(super) submitted: bool,
    /// Something may have ended.
    pub(super) rung: bool,
}

impl Desk {
    /// Clients come or go.
    pub(super) fn count(&mut self, more: isize) {
        self.clients = self.clients.saturating_add_signed(more);
        self.queue.set_clients(self.clients);
    }

    /// Takes up a request that was put in flight at this desk, `key` of the inbox's worker.
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
                } = &*self.export;
                mapper.ask(backend, question, asker);
            }
            // There is always a first step.
            None => drop(self.step(token)),
        }
    }

    /// Submits the next step of a request; `false`: there is none.
    pub(super) fn step(&mut self, token: usize) -> bool {
        let pending = self.in_flight.get_mut(token);
        let Some(operation) = pending.and_then(|(_, pending, _)| pending.step(self.part)) else {
            return false;
        };
        self.queue.submit(token as u64, operation);
        self.submitted = true;
        true
    }

    /// Whether a request whose steps have ended is answered later, when what it has changed is written.
    pub(super) fn waits(&mut self, token: usize) -> bool {
        let pending = self.in_flight.get_mut(token);
        let asks = pending.is_some_and(|(_, pending, _)| pending.take_unasked())
            && self.export.answer == Answer::Written;
        let waits = asks && !self.queue.when_written(token as u64);
        self.submitted |= waits;
        waits
    }
}

impl Drop for Desk {
    /// What is still in flight, after an error, nobody will hear of.
    fn drop(&mut self) {
        for _ in self.in_flight.drain() {
            self.export.gate.leave();
        }
    }
}

/// What a command counts as.
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
