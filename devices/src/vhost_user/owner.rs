//! What the owner of a disk wants of the thread that serves it: sent here, done there between two messages.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use crate::control::{CacheSwitch, DeviceControl};
use crate::event_loop::Remote;
use crate::listen::Waited;

/// How long a front-end may keep the thread from resting: only one that stops in the middle of a message, or does not read
/// its replies, does so at all.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is wanted.
#[derive(Debug)]
pub(super) enum Wish {
    /// The configuration space may have changed.
    Announce,
    /// No ring is to run; and who is told when none does.
    Rest(Sender<()>),
    /// Rings may run.
    Resume,
}

/// The disk in use, for its owner.
pub(super) struct ServiceControl {
    pub(super) thread: Remote<Waited, Wish>,
    pub(super) cache: Arc<CacheSwitch>,
}

impl DeviceControl for ServiceControl {
    fn capacity_changed(&self) {
        self.thread.send(Wish::Announce);
    }

    fn set_write_cache(&self, on: bool) -> bool {
        self.cache.set_for_owner(on)
    }

    fn pause(&self) -> io::Result<()> {
        let (rests, resting) = channel();
        self.thread.send(Wish::Rest(rests));
        match resting.recv_timeout(PATIENCE) {
            // A thread that has ended runs no ring.
            Ok(()) | Err(RecvTimeoutError::Disconnected) => Ok(()),
            Err(RecvTimeoutError::Timeout) => {
                self.resume();
                let why = "its front-end has stopped in the middle of a message, or does not read its replies";
                Err(io::Error::new(io::ErrorKind::TimedOut, why))
            }
        }
    }

    fn resume(&self) {
        self.thread.send(Wish::Resume);
    }
}
