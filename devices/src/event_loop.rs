//! The event loop of every thread that waits on descriptors, on rust-vmm's `event-manager`.
//!
//! ```text
//!   descriptor ─┐                     ┌─ Event::Ready(key, what), …
//!   descriptor ─┼─▶ EventLoop::wait ──┤                                  one list, worked off by the thread that waits
//!   Remote ─────┘                     └─ Event::Message(message), …
//! ```
//! `event-manager` calls a subscriber for each ready descriptor. Most threads here have to know all ready descriptors
//! before they act on one: they take requests from all queues, submit them all, and answer them all. So a loop has one
//! subscriber, which only notes what is ready, and [`EventLoop::wait`] returns its notes. Messages from other threads
//! come through the manager's remote endpoint. They follow all descriptors in the list, so a message that removes or
//! adds a descriptor cannot change the meaning of an event before it.
//!
//! The manager waits in whole milliseconds, and a timeout is rounded up to the next one. A thread that needs a finer
//! timeout watches a timer (`timerfd_create`), as the limits of disks do.
//!
//! ```
//! use std::io::Write;
//! use std::os::unix::net::UnixStream;
//! use walvisor_devices::event_loop::{Event, EventLoop, EventSet};
//!
//! let (ours, mut theirs) = UnixStream::pair()?;
//! let mut events = EventLoop::<char, &str>::new()?;
//! events.watch(&ours, 's', EventSet::IN)?;
//! let remote = events.remote();
//! theirs.write_all(b"ready")?;
//! std::thread::spawn(move || remote.send("from another thread")).join().unwrap();
//! let mut happened = Vec::new();
//! events.wait(None, &mut happened)?;
//! assert!(matches!(
//!     happened[..],
//!     [Event::Ready('s', EventSet::IN), Event::Message("from another thread")]
//! ));
//! # std::io::Result::Ok(())
//! ```

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use event_manager::{
    Error, EventManager, EventOps, Events, MutEventSubscriber, RemoteEndpoint, SubscriberId,
    SubscriberOps,
};

pub use event_manager::EventSet;

/// The most descriptors that one wait reports. The next wait reports the others.
const MOST_READY: usize = 64;

/// An event that a thread has waited for.
#[derive(Debug)]
pub enum Event<K, M> {
    /// The descriptor with this key is ready.
    Ready(K, EventSet),
    /// Another thread has sent this message.
    Message(M),
}

/// Descriptors that one thread watches, each with a key of type `K`, and an inbox for messages of type `M`.
#[derive(Debug)]
pub struct EventLoop<K, M> {
    manager: EventManager<Notes<K, M>>,
    notes: SubscriberId,
}

/// The one subscriber of a loop.
#[derive(Debug)]
struct Notes<K, M> {
    /// The keys of watched descriptors, by descriptor. The system gives out the lowest free number, so the list is
    /// short.
    keys: Vec<Option<K>>,
    events: Vec<Event<K, M>>,
}

impl<K: Copy, M> MutEventSubscriber for Notes<K, M> {
    fn process(&mut self, events: Events, _: &mut EventOps<'_>) {
        if let Some(Some(key)) = self.keys.get(events.fd() as usize) {
            self.events.push(Event::Ready(*key, events.event_set()));
        }
    }

    fn init(&mut self, _: &mut EventOps<'_>) {}
}

impl<K: Copy, M: Send + 'static> EventLoop<K, M> {
    /// A loop that watches nothing yet.
    ///
    /// # Errors
    /// If the system refuses a descriptor: a loop needs two.
    pub fn new() -> io::Result<Self> {
        let mut manager = EventManager::new_with_capacity(MOST_READY).map_err(system)?;
        let notes = manager.add_subscriber(Notes {
            keys: Vec::new(),
            events: Vec::new(),
        });
        Ok(Self { manager, notes })
    }

    /// Sends messages to this loop.
    pub fn remote(&self) -> Remote<K, M> {
        Remote {
            endpoint: self.manager.remote_endpoint(),
            notes: self.notes,
        }
    }

    /// Watches a descriptor: the loop reports it with `key` when one of `events` is true of it, or when it is at its
    /// end. [`unwatch`](Self::unwatch) it before it is closed: if another process or thread holds it open too, the
    /// system goes on reporting it.
    ///
    /// # Errors
    /// `AlreadyExists` if it is watched already; `PermissionDenied` if it cannot be waited for: regular files and
    /// `/dev/null` are always ready. Otherwise the system's error.
    pub fn watch(&mut self, fd: impl AsFd, key: K, events: EventSet) -> io::Result<()> {
        let fd = fd.as_fd().as_raw_fd();
        self.ops()
            .add(Events::new_raw(fd, events))
            .map_err(system)?;
        let (keys, at) = (&mut self.notes().keys, fd as usize);
        if keys.len() <= at {
            keys.resize(at + 1, None);
        }
        keys[at] = Some(key);
        Ok(())
    }

    /// Changes the events for which a watched descriptor is reported.
    ///
    /// # Errors
    /// If it is not watched, or the system refuses.
    pub fn rewatch(&mut self, fd: impl AsFd, events: EventSet) -> io::Result<()> {
        let fd = fd.as_fd().as_raw_fd();
        self.ops()
            .modify(Events::new_raw(fd, events))
            .map_err(system)
    }

    /// Stops watching a descriptor.
    ///
    /// # Errors
    /// If it is not watched.
    pub fn unwatch(&mut self, fd: impl AsFd) -> io::Result<()> {
        let fd = fd.as_fd().as_raw_fd();
        self.ops().remove(Events::empty_raw(fd)).map_err(system)?;
        self.notes().keys[fd as usize] = None;
        Ok(())
    }

    /// Waits until a descriptor is ready or a message arrives, at most for `timeout`, rounded up to milliseconds.
    /// Replaces the contents of `events` with what happened. A signal may end the wait early, with no events.
    ///
    /// # Errors
    /// If the system refuses to wait.
    pub fn wait(
        &mut self,
        timeout: Option<Duration>,
        events: &mut Vec<Event<K, M>>,
    ) -> io::Result<()> {
        events.clear();
        let milliseconds = timeout.map_or(-1, |timeout| {
            i32::try_from(timeout.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX)
        });
        self.manager
            .run_with_timeout(milliseconds)
            .map_err(system)?;
        std::mem::swap(&mut self.notes().events, events);
        Ok(())
    }

    fn notes(&mut self) -> &mut Notes<K, M> {
        let notes = self.manager.subscriber_mut(self.notes);
        notes.expect("the loop's subscriber is never removed")
    }

    fn ops(&mut self) -> EventOps<'_> {
        let ops = self.manager.event_ops(self.notes);
        ops.expect("the loop's subscriber is never removed")
    }
}

/// Sends messages to a loop, from any thread.
#[derive(Debug)]
pub struct Remote<K, M> {
    endpoint: RemoteEndpoint<Notes<K, M>>,
    notes: SubscriberId,
}

impl<K: Copy, M: Send + 'static> Remote<K, M> {
    /// Wakes the loop with `message`. `false`: the loop is gone, and `message` was dropped. A loop that ends later
    /// drops the messages that it has not read.
    pub fn send(&self, message: M) -> bool {
        let notes = self.notes;
        let sent = self.endpoint.fire(move |manager| {
            if let Ok(notes) = manager.subscriber_mut(notes) {
                notes.events.push(Event::Message(message));
            }
        });
        sent.is_ok()
    }
}

fn system(error: Error) -> io::Error {
    match error {
        Error::Epoll(errno) | Error::EventFd(errno) => errno.into(),
        Error::FdAlreadyRegistered => io::ErrorKind::AlreadyExists.into(),
        error => io::Error::other(error),
    }
}

#[cfg(test)]
mod tests;
