//! Messages from other threads to a worker: new connections, results of extent queries, and the command to stop.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::connection::Connection;
use super::extent_mapper::ExtentStatus;
use crate::control::GateWatcher;
use crate::event_loop::MessageSender;

/// What made a worker's event loop wake up: a descriptor that it watches.
#[derive(Clone, Copy, Debug)]
pub(super) enum WorkerEvent {
    /// The completion event of this session's queue.
    DiskSession(usize),
    /// The limits' timer of this session.
    Timer(usize),
    /// A client's socket.
    Client(usize),
}

/// A message to a worker.
pub(super) enum WorkerMessage {
    /// A client to serve.
    Connection(Box<Connection>),
    /// The result of a query to an export's `ExtentMapper`.
    Extents(ExtentAnswer),
    /// An export's gate has opened or closed, or an export is being removed.
    Gate,
    /// No more connections will arrive; the worker ends when its clients are gone.
    Closed,
    /// No more connections will arrive, and the worker has to end those it has.
    Stop,
}

/// The result of an extent query, for the request with this token in this session.
pub(super) struct ExtentAnswer {
    pub(super) session: usize,
    pub(super) token: usize,
    pub(super) extents: io::Result<Vec<Vec<ExtentStatus>>>,
}

/// The sending end of a worker's messages.
pub(super) struct WorkerInbox {
    sender: MessageSender<WorkerEvent, WorkerMessage>,
    /// Number of the worker's connections.
    pub(super) load: AtomicUsize,
}

impl WorkerInbox {
    pub(super) fn new(sender: MessageSender<WorkerEvent, WorkerMessage>) -> Self {
        let load = AtomicUsize::new(0);
        Self { sender, load }
    }

    pub(super) fn add_connection(&self, connection: Connection) {
        self.load.fetch_add(1, Ordering::Relaxed);
        self.send(WorkerMessage::Connection(Box::new(connection)));
    }

    /// Sends a message. It is lost if the worker has ended.
    pub(super) fn send(&self, message: WorkerMessage) {
        self.sender.send(message);
    }
}

impl GateWatcher for WorkerInbox {
    fn wake(&self) {
        self.send(WorkerMessage::Gate);
    }
}
