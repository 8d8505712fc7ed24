//! Building blocks of servers: accept loops, threads, and waits, all of which end when the server
//! stops.
//!
//! ```
//! use std::os::unix::net::UnixStream;
//! use std::thread;
//! use walvisor_devices::event_loop::EventSet;
//! use walvisor_devices::listen::{Stop, Threads, Waiter, WakeReason};
//!
//! let (ours, _theirs) = UnixStream::pair()?;
//! let stop = Stop::new()?;
//! let mut waiter = Waiter::new(&ours, &stop)?;
//! let mut threads = Threads::new("the example");
//! threads.start(thread::Builder::new(), move || {
//!     // Nobody writes to the socket: only the stop ends this wait.
//!     let reason = waiter.wait(&ours, EventSet::IN, None).unwrap();
//!     assert_eq!(reason, WakeReason::Stopped);
//! })?;
//! stop.tell();
//! drop(threads); // joins
//! # std::io::Result::Ok(())
//! ```

use std::collections::VecDeque;
use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use crate::event_loop::{Event, EventLoop, EventSet, MessageSender};

/// How long a listener pauses after a failed accept, for instance for lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Stops any number of threads. Its descriptor becomes readable when they have to end.
#[derive(Clone, Debug)]
pub struct Stop(Arc<OwnedFd>);

impl Stop {
    /// # Errors
    /// If the system refuses a descriptor.
    pub fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(event)))
    }

    /// Stops all threads that wait for it, now or later.
    pub fn tell(&self) {
        // If the counter is full, the descriptor is readable already.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

impl AsFd for Stop {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Why a wait has ended, the most urgent reason last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WakeReason {
    /// The deadline has passed.
    TimedOut,
    /// The descriptor is ready, or at its end of file.
    Ready,
    /// A message has arrived.
    Message,
    /// The thread has to end.
    Stopped,
}

/// Waits for one descriptor at a time. A message or the stop ends the wait too.
pub struct Waiter<M = ()> {
    events: EventLoop<WakeReason, M>,
    ready: Vec<Event<WakeReason, M>>,
    messages: VecDeque<M>,
    /// The events that the descriptor is watched for; `None`: it is always ready, as regular files
    /// are.
    watched: Option<EventSet>,
}

impl Waiter {
    /// A waiter for `fd` that receives no messages. See [`watch`](Self::watch).
    ///
    /// # Errors
    /// If the system refuses a descriptor.
    pub fn new(fd: impl AsFd, stop: &Stop) -> io::Result<Self> {
        let mut waiter = Self::idle(stop)?;
        waiter.watch(fd)?;
        Ok(waiter)
    }
}

impl<M: Send + 'static> Waiter<M> {
    /// A waiter for `stop` and for messages, with no descriptor yet.
    ///
    /// # Errors
    /// If the system refuses a descriptor.
    pub fn idle(stop: &Stop) -> io::Result<Self> {
        let mut events = EventLoop::new()?;
        events.watch(stop, WakeReason::Stopped, EventSet::IN)?;
        Ok(Self {
            events,
            ready: Vec::new(),
            messages: VecDeque::new(),
            watched: None,
        })
    }

    /// A handle for sending messages to this waiter.
    pub fn sender(&self) -> MessageSender<WakeReason, M> {
        self.events.sender()
    }

    /// Takes the oldest message.
    pub fn message(&mut self) -> Option<M> {
        self.messages.pop_front()
    }

    /// Waits for `fd` from now on, until [`unwatch`](Self::unwatch) or until it is closed.
    ///
    /// # Errors
    /// If the system refuses to watch it.
    pub fn watch(&mut self, fd: impl AsFd) -> io::Result<()> {
        self.watched = match self.events.watch(fd, WakeReason::Ready, EventSet::IN) {
            Ok(()) => Some(EventSet::IN),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => None,
            Err(error) => return Err(error),
        };
        Ok(())
    }

    /// Stops waiting for `fd`, which must still be open.
    pub fn unwatch(&mut self, fd: impl AsFd) {
        if let Err(error) = self.events.unwatch(fd) {
            tracing::debug!("a descriptor was not watched: {error}");
        }
    }

    /// Waits until one of the events `wanted` applies to `fd`, which is watched, at most until
    /// `deadline`.
    ///
    /// # Errors
    /// If the system refuses to wait.
    pub fn wait(
        &mut self,
        fd: impl AsFd,
        wanted: EventSet,
        deadline: Option<Instant>,
    ) -> io::Result<WakeReason> {
        let always_ready = self.watched.is_none();
        if self.watched.is_some_and(|watched| watched != wanted) {
            self.events.rewatch(fd, wanted)?;
            self.watched = Some(wanted);
        }
        loop {
            let left = if always_ready {
                Some(Duration::ZERO)
            } else {
                deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()))
            };
            self.events.wait(left, &mut self.ready)?;
            let mut reason = always_ready.then_some(WakeReason::Ready);
            for event in self.ready.drain(..) {
                let new = match event {
                    Event::Ready(new, _) => new,
                    Event::Message(message) => {
                        self.messages.push_back(message);
                        WakeReason::Message
                    }
                };
                reason = reason.max(Some(new));
            }
            match reason {
                Some(reason) => return Ok(reason),
                None if left == Some(Duration::ZERO) => return Ok(WakeReason::TimedOut),
                None => {}
            }
        }
    }
}

/// Threads of one owner. Dropping this joins them.
pub struct Threads {
    /// The owner's name in log messages.
    owner: &'static str,
    threads: Vec<JoinHandle<()>>,
}

impl Threads {
    /// No threads yet. `owner` is the owner's name in log messages.
    pub fn new(owner: &'static str) -> Self {
        let threads = Vec::new();
        Self { owner, threads }
    }

    /// Number of threads that have not ended.
    pub fn count(&mut self) -> usize {
        for ended in self.threads.extract_if(.., |thread| thread.is_finished()) {
            join(ended, self.owner);
        }
        self.threads.len()
    }

    /// Starts a thread.
    ///
    /// # Errors
    /// If the system refuses the thread.
    pub fn start(
        &mut self,
        thread: thread::Builder,
        job: impl FnOnce() + Send + 'static,
    ) -> io::Result<()> {
        self.count();
        self.threads.push(thread.spawn(job)?);
        Ok(())
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        for thread in self.threads.drain(..) {
            join(thread, self.owner);
        }
    }
}

/// Joins a thread of `owner`, and logs an error if it has panicked.
pub fn join(thread: JoinHandle<()>, owner: &str) {
    if thread.join().is_err() {
        tracing::error!("a thread of {owner} has panicked");
    }
}

/// Accepts clients until `stop` is signalled, and passes each to `serve`. `listener` is
/// non-blocking; `place` is its name in log messages.
pub fn accept_each<L: AsFd, T>(
    listener: &L,
    stop: &Stop,
    place: &str,
    accept: impl Fn(&L) -> io::Result<T>,
    mut serve: impl FnMut(T),
) {
    let mut accept_all = || {
        let mut waiter = Waiter::new(listener, stop)?;
        while waiter.wait(listener, EventSet::IN, None)? == WakeReason::Ready {
            if let Some(client) = check_accept(accept(listener), place) {
                serve(client);
            }
        }
        Ok(())
    };
    if let Err::<(), io::Error>(error) = accept_all() {
        tracing::error!("{place}: no more clients are accepted: {error}");
    }
}

/// The client that an accept at `place` has returned; `None` if there is none. An error of the
/// system is logged, and the thread pauses for 0.1 s: the listener stays readable, so the next
/// accept would follow, and fail, at once.
pub fn check_accept<T>(outcome: io::Result<T>, place: impl Display) -> Option<T> {
    outcome
        .inspect_err(|error| {
            use ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
            if !matches!(error.kind(), ConnectionAborted | Interrupted | WouldBlock) {
                tracing::warn!("{place}: a client could not be accepted: {error}");
                thread::sleep(ACCEPT_PAUSE);
            }
        })
        .ok()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_wait_ends_at_an_event_at_its_deadline_or_at_the_stop() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let stop = Stop::new().unwrap();
        let mut waiter = Waiter::new(&ours, &stop).unwrap();
        let mut wait = |wanted, end| waiter.wait(&ours, wanted, end).unwrap();
        let now = Some(Instant::now());
        assert_eq!(wait(EventSet::IN, now), WakeReason::TimedOut);
        assert_eq!(wait(EventSet::OUT, None), WakeReason::Ready);
        assert_eq!(wait(EventSet::IN, now), WakeReason::TimedOut);
        drop(theirs);
        assert_eq!(wait(EventSet::IN, None), WakeReason::Ready);
        stop.tell();
        assert_eq!(wait(EventSet::IN, None), WakeReason::Stopped);
    }

    #[test]
    fn a_regular_file_is_ready_until_the_stop() {
        let file = File::open("/dev/null").unwrap();
        let stop = Stop::new().unwrap();
        let mut waiter = Waiter::new(&file, &stop).unwrap();
        let mut wait = || waiter.wait(&file, EventSet::IN, None).unwrap();
        assert_eq!([wait(), wait()], [WakeReason::Ready; 2]);
        stop.tell();
        assert_eq!(wait(), WakeReason::Stopped);
    }
}
