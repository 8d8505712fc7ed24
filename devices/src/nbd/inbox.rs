//! What other threads bring to a worker: connections, and how disks are kept.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

use super::connection::Connection;
use crate::backend::Extent;
use crate::control::Wake;

/// Where a worker gets its connections from, and the answers to what it has had asked.
pub(super) struct Inbox {
    mail: Mutex<Mail>,
    event: OwnedFd,
    /// Connections that the worker has.
    pub(super) load: AtomicUsize,
}

/// What lies in an inbox.
#[derive(Default)]
pub(super) struct Mail {
    pub(super) connections: Vec<Connection>,
    pub(super) answers: Vec<Mapped>,
    /// No more connections will come.
    pub(super) closed: bool,
}

/// How a disk is kept: the answer to the request of this token at this desk.
pub(super) struct Mapped {
    pub(super) desk: usize,
    pub(super) token: usize,
    pub(super) extents: io::Result<Vec<Extent>>,
}

impl Inbox {
    /// # Errors
    /// If the system refuses a descriptor.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            mail: Mutex::default(),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            load: AtomicUsize::new(0),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Mail> {
        // Lists and a flag are right between any two steps.
        self.mail.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn put(&self, connection: Connection) {
        self.load.fetch_add(1, Ordering::Relaxed);
        self.lock().connections.push(connection);
        self.ring();
    }

    pub(super) fn answer(&self, answer: Mapped) {
        self.lock().answers.push(answer);
        self.ring();
    }

    pub(super) fn close(&self) {
        self.lock().closed = true;
        self.ring();
    }

    /// Takes what is there.
    pub(super) fn open(&self) -> Mail {
        // Cleared first: who comes from here on rings again.
        let _ = rustix::io::read(&self.event, &mut [0; 8]);
        let mut mail = self.lock();
        Mail {
            connections: std::mem::take(&mut mail.connections),
            answers: std::mem::take(&mut mail.answers),
            closed: mail.closed,
        }
    }

    fn ring(&self) {
        // A full counter is readable all the same.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }
}

impl AsFd for Inbox {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

impl Wake for Inbox {
    fn wake(&self) {
        self.ring();
    }
}
