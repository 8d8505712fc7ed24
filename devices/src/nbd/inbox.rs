//! Messages from other threads to a worker: connections, answers about a disk's extents, and the order to stop.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::connection::Connection;
use super::mapper::Status;
use crate::control::Wake;
use crate::event_loop::Remote;

/// A descriptor that a worker watches.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source {
    /// The completion event of this session's queue.
    DiskSession(usize),
    /// The timer of the limits of this session's disk.
    Timer(usize),
    /// A client's socket.
    Client(usize),
}

/// A message to a worker.
pub(super) enum Mail {
    /// A client to serve.
    Connection(Box<Connection>),
    /// The answer of an export's `Mapper`.
    Answer(Mapped),
    /// An export's gate has opened or closed, or an export is being removed.
    Gate,
    /// No more connections will arrive; the worker ends when its clients are gone.
    Closed,
    /// No more connections will arrive, and the worker is to end those it has.
    Stop,
}

/// What is told of a disk's parts: the answer to the request with this token at this session.
pub(super) struct Mapped {
    pub(super) session: usize,
    pub(super) token: usize,
    pub(super) extents: io::Result<Vec<Vec<Status>>>,
}

/// The sending end of a worker's messages.
pub(super) struct Inbox {
    remote: Remote<Source, Mail>,
    /// How many connections the worker has.
    pub(super) load: AtomicUsize,
}

impl Inbox {
    pub(super) fn new(remote: Remote<Source, Mail>) -> Self {
        let load = AtomicUsize::new(0);
        Self { remote, load }
    }

    pub(super) fn put(&self, connection: Connection) {
        self.load.fetch_add(1, Ordering::Relaxed);
        self.send(Mail::Connection(Box::new(connection)));
    }

    /// Sends a message. It is lost if the worker has ended.
    pub(super) fn send(&self, mail: Mail) {
        self.remote.send(mail);
    }
}

impl Wake for Inbox {
    fn wake(&self) {
        self.send(Mail::Gate);
    }
}
