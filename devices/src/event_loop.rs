//! The event loop of every thread that waits on descriptors, on rust-vmm's `event-manager`.
//!
//! ```text
//!   descriptor ─┐                     ┌─ Event::Ready(key, what), …
//!   descriptor ─┼─▶ EventLoop::wait ──┤                                  one list, handled by the thread that waits
//!   sender ─────┘                     └─ Event::Message(message), …
//! ```
//! `event-manager` calls a subscriber for each ready descriptor. Most threads here need to know all
//! ready descriptors before they act on the first: they take requests from all queues, then submit
//! them all, then answer them all. So a loop has one subscriber, which only collects what is ready,
//! and [`EventLoop::wait`] returns the list. Messages from other threads arrive through the
//! manager's remote endpoint. They come after all descriptors in the list, so a message that adds
//! or removes a descriptor cannot change the meaning of an event before it.
//!
//! The manager waits in whole milliseconds; timeouts are rounded up. A thread that needs a finer
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
//! let sender = events.sender();
//! theirs.write_all(b"ready")?;
//! std::thread::spawn(move || sender.send("from another thread")).join().unwrap();
//! let mut list = Vec::new();
//! events.wait(None, &mut list)?;
//! assert!(matches!(
//!     list[..],
//!     [Event::Ready('s', EventSet::IN), Event::Message("from another thread")]
//! ));
//! # std::io::Result::Ok(())
//! ```

use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::time::Duration;

use event_manager::{
    Error, EventManager, EventOps, Events, MutEventSubscriber, RemoteEndpoint, SubscriberId,
    SubscriberOps,
};

pub use event_manager::EventSet;

/// The most descriptors that one wait reports. The next wait reports the rest.
const MAX_READY: usize = 64;

/// What ended a wait.
#[derive(Debug)]
pub enum Event<K, M> {
    /// The descriptor with this key is ready.
    Ready(K, EventSet),
    /// Another thread has sent this message.
    Message(M),
}

/// Descriptors that one thread watches, each with a key of type `K`, and an inbox for messages of
/// type `M`.
#[derive(Debug)]
pub struct EventLoop<K, M> {
    manager: EventManager<ReadyList<K, M>>,
    subscriber: SubscriberId,
}

/// The only subscriber of a loop.
#[derive(Debug)]
struct ReadyList<K, M> {
    /// The keys of the watched descriptors, indexed by descriptor. The system hands out the lowest
    /// free number, so the vector is short.
    keys: Vec<Option<K>>,
    events: Vec<Event<K, M>>,
}

impl<K: Copy, M> MutEventSubscriber for ReadyList<K, M> {
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
    /// If the system refuses a descriptor. A loop needs two.
    pub fn new() -> io::Result<Self> {
        let mut manager = EventManager::new_with_capacity(MAX_READY).map_err(io_error)?;
        let subscriber = manager.add_subscriber(ReadyList {
            keys: Vec::new(),
            events: Vec::new(),
        });
        Ok(Self {
            manager,
            subscriber,
        })
    }

    /// A handle for sending messages to this loop.
    pub fn sender(&self) -> MessageSender<K, M> {
        MessageSender {
            endpoint: self.manager.remote_endpoint(),
            subscriber: self.subscriber,
        }
    }

    /// Watches a descriptor: the loop reports it with `key` when one of `events` applies to it, or
    /// when it hangs up. [`unwatch`](Self::unwatch) it before closing it: the system keeps
    /// reporting a descriptor that is open elsewhere, in this process or another.
    ///
    /// # Errors
    /// `AlreadyExists` if it is watched already; `PermissionDenied` if it is always ready, as
    /// regular files and `/dev/null` are. Otherwise the system's error.
    pub fn watch(&mut self, fd: impl AsFd, key: K, events: EventSet) -> io::Result<()> {
        let fd = fd.as_fd().as_raw_fd();
        self.ops()
            .add(Events::new_raw(fd, events))
            .map_err(io_error)?;
        let (keys, at) = (&mut self.ready_list().keys, fd as usize);
        if keys.len() <= at {
            keys.resize(at + 1, None);
        }
        keys[at] = Some(key);
        Ok(())
    }

    /// Changes the events that a watched descriptor is reported for.
    ///
    /// # Errors
    /// If it is not watched, or the system refuses.
    pub fn rewatch(&mut self, fd: impl AsFd, events: EventSet) -> io::Result<()> {
        let fd = fd.as_fd().as_raw_fd();
        self.ops()
            .modify(Events::new_raw(fd, events))
            .map_err(io_error)
    }

    /// Stops watching a descriptor.
    ///
    /// # Errors
    /// If it is not watched.
    pub fn unwatch(&mut self, fd: impl AsFd) -> io::Result<()> {
        let fd = fd.as_fd().as_raw_fd();
        self.ops().remove(Events::empty_raw(fd)).map_err(io_error)?;
        self.ready_list().keys[fd as usize] = None;
        Ok(())
    }

    /// Stops watching all descriptors whose keys match.
    pub(crate) fn unwatch_all(&mut self, matches: impl Fn(&K) -> bool) {
        let keys = &mut self.ready_list().keys;
        let matching = keys.iter_mut().enumerate().filter_map(|(fd, key)| {
            let found = key.take_if(|key| matches(key));
            found.map(|_| fd as RawFd)
        });
        for fd in matching.collect::<Vec<_>>() {
            // Fails if the descriptor was closed; then the system has forgotten it too.
            let _ = self.ops().remove(Events::empty_raw(fd));
        }
    }

    /// Waits until a descriptor is ready or a message arrives, at most for `timeout`, rounded up to
    /// milliseconds. Replaces the contents of `events` with the new ones. A signal may end the wait
    /// early, with no events.
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
            .map_err(io_error)?;
        std::mem::swap(&mut self.ready_list().events, events);
        Ok(())
    }

    fn ready_list(&mut self) -> &mut ReadyList<K, M> {
        let list = self.manager.subscriber_mut(self.subscriber);
        list.expect("the loop's subscriber is never removed")
    }

    fn ops(&mut self) -> EventOps<'_> {
        let ops = self.manager.event_ops(self.subscriber);
        ops.expect("the loop's subscriber is never removed")
    }
}

/// Sends messages to an event loop, from any thread.
#[derive(Debug)]
pub struct MessageSender<K, M> {
    endpoint: RemoteEndpoint<ReadyList<K, M>>,
    subscriber: SubscriberId,
}

impl<K: Copy, M: Send + 'static> MessageSender<K, M> {
    /// Wakes the loop with `message`. `false`: the loop is gone, and `message` was dropped. A loop
    /// that ends later drops the messages that it has not read.
    pub fn send(&self, message: M) -> bool {
        let subscriber = self.subscriber;
        let sent = self.endpoint.fire(move |manager| {
            if let Ok(list) = manager.subscriber_mut(subscriber) {
                list.events.push(Event::Message(message));
            }
        });
        sent.is_ok()
    }
}

fn io_error(error: Error) -> io::Error {
    match error {
        Error::Epoll(errno) | Error::EventFd(errno) => errno.into(),
        Error::FdAlreadyRegistered => io::ErrorKind::AlreadyExists.into(),
        error => io::Error::other(error),
    }
}

#[cfg(test)]
mod tests;
