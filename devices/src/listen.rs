//! What servers are made of: listeners, threads that all end when the server is to stop, and waits that end then too.

use std::collections::VecDeque;
use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use crate::event_loop::{Event, EventLoop, EventSet, Remote};

/// How long a listener rests when the system has no descriptors left.
const REST: Duration = Duration::from_millis(100);

/// Tells any number of threads that they are to end. Its descriptor is readable from then on.
#[derive(Clone, Debug)]
pub struct Stop(Arc<OwnedFd>);

impl Stop {
    /// # Errors
    /// If the system refuses a descriptor.
    pub fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self(Arc::new(event)))
    }

    /// Tells all who wait, and all who will.
    pub fn tell(&self) {
        // A full counter is readable all the same.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }
}

impl AsFd for Stop {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// What a [`Waiter`] has waited for, the most urgent last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Waited {
    /// The time is over.
    Late,
    /// The descriptor is ready, or at its end.
    Ready,
    /// A message has come.
    Told,
    /// The thread is to end.
    Stopped,
}

/// Waits for one descriptor at a time, unless a message comes first or the thread is to end.
pub struct Waiter<M = ()> {
    events: EventLoop<Waited, M>,
    happened: Vec<Event<Waited, M>>,
    messages: VecDeque<M>,
    /// What the descriptor is watched for; `None`: it is always ready, as regular files are.
    watched: Option<EventSet>,
}

impl Waiter {
    /// Waits for `fd`, and for no message. See [`watch`](Self::watch).
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
    /// Waits for `stop` and for messages, and for no descriptor yet.
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

    /// The way for messages.
    pub fn remote(&self) -> Remote<Waited, M> {
        self.events.remote()
    }

    /// The oldest message that was not taken.
    pub fn message(&mut self) -> Option<M> {
        self.messages.pop_front()
    }

    /// Waits for `fd` from here on, until [`unwatch`](Self::unwatch) or its own end.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn watch(&mut self, fd: impl AsFd) -> io::Result<()> {
        self.watched = match self.events.watch(fd, Waited::Ready, EventSet::IN) {
            Ok(()) => Some(EventSet::IN),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => None,
            Err(error) => return Err(error),
        };
        Ok(())
    }

    /// Waits for `fd`, which is still open, no longer.
    pub fn unwatch(&mut self, fd: impl AsFd) {
        if let Err(error) = self.events.unwatch(fd) {
            tracing::debug!("a descriptor was not watched: {error}");
        }
    }

    /// Waits until `wanted` is true of `fd`, which is watched, until `end` at most.
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

/// Threads of one owner. Dropping it waits for them.
pub struct Threads {
    /// What messages call him.
    owner: &'static str,
    threads: Vec<JoinHandle<()>>,
}

impl Threads {
    /// None yet.
    pub fn new(owner: &'static str) -> Self {
        let threads = Vec::new();
        Self { owner, threads }
    }

    /// Number of those that have not ended.
    pub fn count(&mut self) -> usize {
        for ended in self.threads.extract_if(.., |thread| thread.is_finished()) {
            join(ended, self.owner);
        }
        self.threads.len()
    }

    /// Starts one.
    ///
    /// # Errors
    /// If the system refuses it.
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

/// Waits for a thread of `owner`'s, and tells if it has panicked.
pub fn join(thread: JoinHandle<()>, owner: &str) {
    if thread.join().is_err() {
        tracing::error!("a thread of {owner} has panicked");
    }
}

/// Accepts clients until `stop` is told: gives each to `serve`. `listener` does not block; `place` is what messages call it.
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
        tracing::error!("{place}: nobody more is accepted: {error}");
    }
}

/// The client that a listener at `place` has accepted; `None`: there is none after all. If the system refuses one, that is
/// told, and the listener rests for 0.1 s: it stays readable, and would be asked again at once.
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
