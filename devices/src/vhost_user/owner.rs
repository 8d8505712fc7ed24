//! What the owner of a disk wants of the thread that serves it: sent here, done there between two messages.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::Duration;

use super::outcome::{Ended, Outcome};
use crate::control::{CacheSwitch, DeviceControl};
use crate::event_loop::{Event, EventLoop, EventSet, Remote};

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

/// What the thread is sent.
#[derive(Debug)]
pub(super) enum Mail {
    Wish(Wish),
    /// The server is to stop.
    Stop,
}

/// The thread's side: it waits for its listener, or for its front-end's socket, and hears of wishes meanwhile.
pub(super) struct Inbox {
    events: EventLoop<(), Mail>,
    happened: Vec<Event<(), Mail>>,
    /// What the descriptor is watched for.
    watched: EventSet,
    wishes: VecDeque<Wish>,
    stopping: bool,
}

impl Inbox {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            events: EventLoop::new()?,
            happened: Vec::new(),
            watched: EventSet::empty(),
            wishes: VecDeque::new(),
            stopping: false,
        })
    }

    pub(super) fn remote(&self) -> Remote<(), Mail> {
        self.events.remote()
    }

    /// Waits for this descriptor from here on, and for no other.
    pub(super) fn watch(&mut self, fd: impl AsFd) -> io::Result<()> {
        self.watched = EventSet::IN;
        self.events.watch(fd, (), self.watched)
    }

    /// Waits for it no longer.
    pub(super) fn unwatch(&mut self, fd: impl AsFd) {
        if let Err(error) = self.events.unwatch(fd) {
            tracing::debug!("vhost-user: a socket was not watched: {error}");
        }
    }

    /// The next wish, or `None`: something can be read from `fd`, which is watched.
    pub(super) fn next(&mut self, fd: impl AsFd) -> Outcome<Option<Wish>> {
        while self.wishes.is_empty() {
            if self.wait_once(&fd, EventSet::IN)? && self.wishes.is_empty() {
                return Ok(None);
            }
        }
        Ok(self.wishes.pop_front())
    }

    /// Waits until `wanted` is true of `fd`, which is watched. Wishes have to wait.
    pub(super) fn wait(&mut self, fd: impl AsFd, wanted: EventSet) -> Outcome<()> {
        while !self.wait_once(&fd, wanted)? {}
        Ok(())
    }

    /// Waits until something happens. Whether `wanted` is true of `fd` then.
    fn wait_once(&mut self, fd: impl AsFd, wanted: EventSet) -> Outcome<bool> {
        if self.watched != wanted {
            self.events.rewatch(fd, wanted)?;
            self.watched = wanted;
        }
        if !self.stopping {
            self.events.wait(None, &mut self.happened)?;
        }
        let mut ready = false;
        for event in self.happened.drain(..) {
            match event {
                Event::Ready((), _) => ready = true,
                Event::Message(Mail::Wish(wish)) => self.wishes.push_back(wish),
                Event::Message(Mail::Stop) => self.stopping = true,
            }
        }
        match self.stopping {
            true => Err(Ended::Gone),
            false => Ok(ready),
        }
    }
}

/// The disk in use, for its owner.
pub(super) struct ServiceControl {
    pub(super) thread: Remote<(), Mail>,
    pub(super) cache: Arc<CacheSwitch>,
}

impl ServiceControl {
    fn tell(&self, wish: Wish) {
        self.thread.send(Mail::Wish(wish));
    }
}

impl DeviceControl for ServiceControl {
    fn capacity_changed(&self) {
        self.tell(Wish::Announce);
    }

    fn set_write_cache(&self, on: bool) -> bool {
        self.cache.set_for_owner(on)
    }

    fn pause(&self) -> io::Result<()> {
        let (rests, resting) = channel();
        self.tell(Wish::Rest(rests));
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
        self.tell(Wish::Resume);
    }
}
