//! Requests of a disk's owner to the thread that serves the disk, which handles them between two
//! front-end messages, or in the middle of one.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};

use crate::control::{CacheSwitch, DeviceControl, PAUSE_TIME, silent_disk};
use crate::event_loop::MessageSender;
use crate::listen::WakeReason;

/// A request of the owner.
#[derive(Debug)]
pub(super) enum OwnerRequest {
    /// Check whether the capacity has changed.
    CapacityChanged,
    /// Stop all rings. The thread sends on this channel once they have stopped.
    Pause(Sender<()>),
    /// Let rings run again.
    Resume,
}

/// The owner's control of a disk in use.
pub(super) struct ServiceControl {
    pub(super) thread: MessageSender<WakeReason, OwnerRequest>,
    pub(super) cache: Arc<CacheSwitch>,
}

impl DeviceControl for ServiceControl {
    fn capacity_changed(&self) {
        self.thread.send(OwnerRequest::CapacityChanged);
    }

    fn set_write_cache(&self, on: bool) -> bool {
        self.cache.set_for_owner(on)
    }

    fn pause(&self) -> io::Result<()> {
        let (sender, receiver) = channel();
        self.thread.send(OwnerRequest::Pause(sender));
        match receiver.recv_timeout(PAUSE_TIME) {
            // A thread that has ended runs no ring.
            Ok(()) | Err(RecvTimeoutError::Disconnected) => Ok(()),
            Err(RecvTimeoutError::Timeout) => {
                self.resume();
                Err(silent_disk())
            }
        }
    }

    fn resume(&self) {
        self.thread.send(OwnerRequest::Resume);
    }
}
