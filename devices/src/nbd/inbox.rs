//! What other threads bring to a worker: connections, how disks are kept, and the end.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::connection::Connection;
use crate::backend::Extent;
use crate::control::Wake;
use crate::event_loop::Remote;

/// A descriptor that a worker watches.
#[derive(Clone, Copy, Debug)]
pub(super) enum Source {
    /// The disk of this desk has something to say.
    Desk(usize),
    /// A client's socket.
    Client(usize),
}

/// What a worker is sent.
pub(super) enum Mail {
    /// A client to serve.
    Connection(Box<Connection>),
    /// The answer to a question.
    Answer(Mapped),
    /// A gate has opened, or closed.
    Gate,
    /// No more connections will come.
    Closed,
    /// The same, and those that there are end.
    Stop,
}

/// How a disk is kept: the answer to the request of this token at this desk.
pub(super) struct Mapped {
    pub(super) desk: usize,
    pub(super) token: usize,
    pub(super) extents: io::Result<Vec<Extent>>,
}

/// The way to a worker.
pub(super) struct Inbox {
    remote: Remote<Source, Mail>,
    /// Connections that the worker has.
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

    /// A worker that is gone needs to know nothing.
    pub(super) fn send(&self, mail: Mail) {
        self.remote.send(mail);
    }
}

impl Wake for Inbox {
    fn wake(&self) {
        self.send(Mail::Gate);
    }
}
