//! Parts of servers: listeners, threads that all end when the server stops, and waits that end then too.
//!
//! ```
//! use std::os::unix::net::UnixStream;
//! use std::thread;
//! use walvisor_devices::event_loop::EventSet;
//! use walvisor_devices::listen::{Stop, Threads, Waited, Waiter};
//!
//! let (ours, _theirs) = UnixStream::pair()?;
//! let stop = Stop::new()?;
//! let mut waiter = Waiter::new(&ours, &stop)?;
//! let mut threads = Threads::new("the example");
//! threads.start(thread::Builder::new(), move || {
//!     // Nobody writes to the socket: only the stop ends this wait.
//!     let waited = waiter.wait(&ours, EventSet::IN, None).unwrap();
//!     assert_eq!(waited, Waited::Stopped);
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

use crate::event_loop::{Event, EventLoop, EventSet, Remote};

/// How long a listener pauses after the system has refused it a client, for instance for lack of descriptors.
const REST: Duration = Duration::from_millis(100);

/// Stops any number of threads. Its descriptor is readable once they have to end.
#[derive(Clone, Debug)]
pub struct Stop(Arc<OwnedFd>);

impl Stop {
    /// # Errors
    /// If the system refuses a descriptor.
    pub fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(event)))
    }

    /// Stops all threads that wait, now and later.
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

/// Why a [`Waiter`] returned, the most urgent reason last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Waited {
    /// The time limit has passed.
    Late,
    /// The descriptor is ready, or at its end of file.
    Ready,
    /// A message has arrived.
    Told,
    /// The thread has to end.
    Stopped,
}

/// Waits for one descriptor at a time. A message or the end of the thread ends the wait too.
pub struct Waiter<M = ()> {
    events: EventLoop<Waited, M>,
    happened: Vec<Event<Waited, M>>,
    messages: VecDeque<M>,
    /// The events for which the descriptor is watched; `None`: it is always ready, as regular files are.
    watched: Option<EventSet>,
}

impl Waiter {
    /// A waiter for `fd` that gets no messages. See [`watch`](Self::watch).
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
        events.watch(stop, Waited::Stopped, EventSet::IN)?;
        Ok(Self {
            events,
            happened: Vec::new(),
            messages: VecDeque::new(),
            watched: None,
        })
    }

    /// Sends messages to this waiter.
    pub fn remote(&self) -> Remote<Waited, M> {
        self.events.remote()
    }

    /// The oldest message not taken yet.
    pub fn message(&mut self) -> Option<M> {
        self.messages.pop_front()
    }

    /// Waits for `fd` from now on, until [`unwatch`](Self::unwatch) or until it is closed.
    ///
    /// # Errors
    /// If the system refuses to watch it.
    pub fn watch(&mut self, fd: impl AsFd) -> io::Result<()> {
        self.watched = match self.events.watch(fd, Waited::Ready, EventSet::IN) {
            Ok(()) => Some(EventSet::IN),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => None,
            Err(error) => return Err(error),
        };
        Ok(())
    }

    /// Stops waiting for `fd`, which is still open.
    pub fn unwatch(&mut self, fd: impl AsFd) {
        if let Err(error) = self.events.unwatch(fd) {
            tracing::debug!("a descriptor was not watched: {error}");
        }
    }

    /// Waits until `wanted` is true of `fd`, which is watched, at most until `end`.
    ///
    /// # Errors
    /// If the system refuses to wait.
    pub fn wait(
        &mut self,
        fd: impl AsFd,
        wanted: EventSet,
        end: Option<Instant>,
    ) -> io::Result<Waited> {
        let always = self.watched.is_none();
        if self.watched.is_some_and(|watched| watched != wanted) {
            self.events.rewatch(fd, wanted)?;
            self.watched = Some(wanted);
        }
        loop {
            let left = match always {
                true => Some(Duration::ZERO),
                false => end.map(|end| end.saturating_duration_since(Instant::now())),
            };
            self.events.wait(left, &mut self.happened)?;
            let mut waited = always.then_some(Waited::Ready);
            for event in self.happened.drain(..) {
                let what = match event {
                    Event::Ready(what, _) => what,
                    Event::Message(message) => {
                        self.messages.push_back(message);
                        Waited::Told
                    }
                };
                waited = waited.max(Some(what));
            }
            match waited {
                Some(waited) => return Ok(waited),
                None if left == Some(Duration::ZERO) => return Ok(Waited::Late),
                None => {}
            }
        }
    }
}

/// Threads of one owner. Dropping it joins them.
pub struct Threads {
    /// The owner's name in messages.
    owner: &'static str,
    threads: Vec<JoinHandle<()>>,
}

impl Threads {
    /// Starts without threads.
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

/// Accepts clients until `stop` is set, and gives each to `serve`. `listener` is non-blocking; `place` is its name in
/// messages.
pub fn accept_each<L: AsFd, T>(
    listener: &L,
    stop: &Stop,
    place: &str,
    accept: impl Fn(&L) -> io::Result<T>,
    mut serve: impl FnMut(T),
) {
    let mut accepting = || {
        let mut waiter = Waiter::new(listener, stop)?;
        while waiter.wait(listener, EventSet::IN, None)? == Waited::Ready {
            if let Some(client) = accepted(accept(listener), place) {
                serve(client);
            }
        }
        Ok(())
    };
    if let Err::<(), io::Error>(error) = accepting() {
        tracing::error!("{place}: no more clients are accepted: {error}");
    }
}

/// The client that a listener at `place` has accepted; `None` if there is none. If the system refuses one, that is
/// logged, and the listener pauses for 0.1 s, because it stays readable and would be tried again at once.
pub fn accepted<T>(outcome: io::Result<T>, place: impl Display) -> Option<T> {
    outcome
        .inspect_err(|error| {
            use ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
            if !matches!(error.kind(), ConnectionAborted | Interrupted | WouldBlock) {
                tracing::warn!("{place}: a client could not be accepted: {error}");
                thread::sleep(REST);
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
    fn a_wait_ends_with_its_descriptor_its_time_or_the_server() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let stop = Stop::new().unwrap();
        let mut waiter = Waiter::new(&ours, &stop).unwrap();
        let mut wait = |wanted, end| waiter.wait(&ours, wanted, end).unwrap();
        let now = Some(Instant::now());
        assert_eq!(wait(EventSet::IN, now), Waited::Late);
        assert_eq!(wait(EventSet::OUT, None), Waited::Ready);
        assert_eq!(wait(EventSet::IN, now), Waited::Late);
        drop(theirs);
        assert_eq!(wait(EventSet::IN, None), Waited::Ready);
        stop.tell();
        assert_eq!(wait(EventSet::IN, None), Waited::Stopped);
    }

    #[test]
    fn a_file_is_always_ready_until_the_server_ends() {
        let file = File::open("/dev/null").unwrap();
        let stop = Stop::new().unwrap();
        let mut waiter = Waiter::new(&file, &stop).unwrap();
        let mut wait = || waiter.wait(&file, EventSet::IN, None).unwrap();
        assert_eq!([wait(), wait()], [Waited::Ready; 2]);
        stop.tell();
        assert_eq!(wait(), Waited::Stopped);
    }
}
