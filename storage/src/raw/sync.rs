//! Syncs of a raw image: one thread runs one sync at a time, for all requests that wait.
//!
//! ```text
//!   queue ─┐                                       ┌─▶ mailbox of the queue
//!   queue ─┼─▶ all waiters  ─▶ fdatasync ─▶ ended ─┼─▶ mailbox of the queue
//!   grow  ─┘     (the next ones wait meanwhile)    └─▶ caller
//! ```
//! The kernel reports each write-back error once per open file, and all queues share one. Of two
//! concurrent syncs, one would get the error and the other would report success. With one sync at a
//! time, every waiter gets the error.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use rustix::io::Errno;

use super::shared::{RawMailbox, RawShared};
use crate::{Completion, Failure};

/// A waiter for a sync.
#[derive(Debug)]
enum SyncWaiter {
    /// A request of a queue.
    Request {
        token: u64,
        mailbox: Arc<RawMailbox>,
    },
    /// A thread.
    Caller(Sender<Result<(), Failure>>),
}

impl SyncWaiter {
    fn complete(self, result: Result<(), Failure>) {
        match self {
            Self::Request { token, mailbox } => mailbox.put(Completion {
                token,
                result: result.map(|()| None),
            }),
            // The caller may be gone.
            Self::Caller(answer) => drop(answer.send(result)),
        }
    }
}

/// The sync thread. Dropping it first serves the waiters, then joins the thread.
#[derive(Debug)]
pub(super) struct Syncer {
    /// `None` only while dropping.
    waiters: Option<Sender<SyncWaiter>>,
    thread: Option<JoinHandle<()>>,
}

impl Syncer {
    pub(super) fn start(shared: &Arc<RawShared>) -> io::Result<Self> {
        let (waiters, come) = channel();
        let shared = Arc::clone(shared);
        let thread = thread::Builder::new()
            .name("raw-sync".into())
            .spawn(move || run(&shared, &come))?;
        Ok(Self {
            waiters: Some(waiters),
            thread: Some(thread),
        })
    }

    /// Makes everything written before the call durable, then completes request `token` in the
    /// mailbox.
    pub(super) fn submit(&self, token: u64, mailbox: &Arc<RawMailbox>) {
        let mailbox = Arc::clone(mailbox);
        self.send(SyncWaiter::Request { token, mailbox });
    }

    /// Blocks until everything written before the call is durable.
    pub(super) fn wait(&self) -> Result<(), Failure> {
        let (answer, answered) = channel();
        self.send(SyncWaiter::Caller(answer));
        answered.recv().unwrap_or(Err(Failure::Io))
    }

    fn send(&self, waiter: SyncWaiter) {
        let Some(waiters) = &self.waiters else {
            return;
        };
        // Fails if the thread has panicked, which was printed.
        if let Err(refused) = waiters.send(waiter) {
            refused.0.complete(Err(Failure::Io));
        }
    }
}

impl Drop for Syncer {
    fn drop(&mut self) {
        self.waiters = None;
        if let Some(thread) = self.thread.take() {
            // A panic in it has been printed already.
            let _ = thread.join();
        }
    }
}

fn run(shared: &RawShared, waiters: &Receiver<SyncWaiter>) {
    let mut served = Vec::new();
    while let Ok(first) = waiters.recv() {
        // All waiters taken here came before the sync begins.
        served.push(first);
        served.extend(waiters.try_iter());
        let result = sync(shared);
        served.drain(..).for_each(|waiter| waiter.complete(result));
    }
}

/// Syncs the file. An error is final, because the kernel would not report it to the next sync.
fn sync(shared: &RawShared) -> Result<(), Failure> {
    while !shared.has_failed() {
        match rustix::fs::fdatasync(shared.fd()) {
            Ok(()) => return Ok(()),
            // Interrupted before the sync began.
            Err(Errno::INTR) => {}
            Err(error) => shared.sync_failed(error),
        }
    }
    Err(Failure::Io)
}
