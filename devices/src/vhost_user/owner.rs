//! Messages from a disk's owner to the thread that serves the disk. The thread handles them between front-end messages.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use crate::control::{CacheSwitch, DeviceControl};
use crate::event_loop::MessageSender;
use crate::listen::WakeReason;

/// How long a front-end may delay a pause. Only a front-end that stops in the middle of a message, or does not read its
/// replies, delays it at all.
const PATIENCE: Duration = Duration::from_secs(10);

/// A message from the owner.
#[derive(Debug)]
pub(super) enum Wish {
    /// The configuration space may have changed.
    Announce,
    /// All rings must stop; the thread reports on this channel when they have.
    Rest(Sender<()>),
    /// Rings may run again.
    Resume,
}

/// The control handle of a disk in use, for its owner.
pub(super) struct ServiceControl {
    pub(super) thread: MessageSender<WakeReason, Wish>,
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
