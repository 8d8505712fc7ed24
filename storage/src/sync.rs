//! Threads, locks and events: the standard library's, or in the interleaving tests those of `shuttle`, which decides
//! at each of them who runs next.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
#[cfg(not(all(test, feature = "shuttle")))]
use std::time::Duration;
use std::time::Instant;

#[cfg(all(test, feature = "shuttle"))]
pub(crate) use shuttle::{sync::*, thread};
#[cfg(not(all(test, feature = "shuttle")))]
pub(crate) use std::{sync::*, thread};

use rustix::event::{PollFd, PollFlags, Timespec};
#[cfg(all(test, feature = "shuttle"))]
pub(crate) use scheduled::{now, sleep, wait_timeout_while};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// What a thread sleeps on until another signals it. A signal is kept until it is cleared, so none is lost.
#[derive(Debug)]
pub(crate) struct Event {
    /// `None`: nobody polls it among other things, and its thread is sooner awake.
    fd: Option<EventFd>,
    /// Of an event without a descriptor, and of all under `shuttle`, which could not schedule who reads one.
    signalled: Arc<(Mutex<bool>, Condvar)>,
}

impl Event {
    /// # Errors
    /// If the system refuses a descriptor.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            fd: Some(EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?),
            signalled: Arc::default(),
        })
    }

    /// One that has no descriptor.
    pub(crate) fn internal() -> Self {
        Self {
            fd: None,
            signalled: Arc::default(),
        }
    }

    /// Another handle on the same event.
    ///
    /// # Errors
    /// If the system refuses a descriptor.
    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            fd: self.fd.as_ref().map(EventFd::try_clone).transpose()?,
            signalled: self.signalled.clone(),
        })
    }

    /// Readable while signalled, for whoever polls it among other things.
    ///
    /// # Panics
    /// If it is [`internal`](Self::internal).
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        let fd = self.fd.as_ref().expect("an event with a descriptor");
        // SAFETY: the descriptor is open as long as `self.fd`, which the borrow keeps alive.
        unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) }
    }

    /// Whether the descriptor is what is signalled.
    fn polled(&self) -> Option<&EventFd> {
        self.fd
            .as_ref()
            .filter(|_| !cfg!(all(test, feature = "shuttle")))
    }

    fn set(&self, signalled: bool) {
        *self.signalled.0.lock().expect("event") = signalled;
    }

    /// Wakes who sleeps, now or next.
    pub(crate) fn signal(&self) {
        match self.polled() {
            // Fails only if the counter is at its limit: then the event is signalled already.
            Some(fd) => drop(fd.write(1)),
            None => {
                self.set(true);
                self.signalled.1.notify_all();
            }
        }
    }

    /// Takes the signal back.
    pub(crate) fn clear(&self) {
        match self.polled() {
            Some(fd) => drop(fd.read()),
            None => self.set(false),
        }
    }

    /// Sleeps until signalled or until it is `over`, or shorter.
    pub(crate) fn sleep_until(&self, over: Option<Instant>) {
        let left = over.map(|over| over.saturating_duration_since(now()));
        if left.is_some_and(|left| left.is_zero()) {
            return;
        }
        if self.polled().is_some() {
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let mut fds = [PollFd::from_borrowed_fd(self.fd(), PollFlags::IN)];
            // An interrupted wait is a wake-up like any other: the caller looks and sleeps again.
            let _ = rustix::event::poll(&mut fds, left.as_ref());
            return;
        }
        let (lock, condvar) = &*self.signalled;
        let signalled = lock.lock().expect("event");
        match left {
            Some(left) => drop(wait_timeout_while(condvar, lock, signalled, left, |set| {
                !*set
            })),
            None => drop(condvar.wait_while(signalled, |set| !*set)),
        }
    }
}

/// Lets `time` pass.
#[cfg(not(all(test, feature = "shuttle")))]
pub(crate) fn sleep(time: Duration) {
    thread::sleep(time);
}

/// What time it is.
#[cfg(not(all(test, feature = "shuttle")))]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// Waits on `condvar` for at most `timeout` while `condition` holds. `guard` is a lock of `_mutex`.
#[cfg(not(all(test, feature = "shuttle")))]
pub(crate) fn wait_timeout_while<'a, T>(
    condvar: &Condvar,
    _mutex: &'a Mutex<T>,
    guard: MutexGuard<'a, T>,
    timeout: Duration,
    condition: impl Fn(&T) -> bool,
) -> MutexGuard<'a, T> {
    let waited = condvar.wait_timeout_while(guard, timeout, |guarded| condition(guarded));
    waited.expect("lock").0
}

#[cfg(all(test, feature = "shuttle"))]
mod scheduled {
    use std::cell::Cell;
    use std::time::{Duration, Instant};

    use super::{Condvar, Mutex, MutexGuard, thread};

    /// Time goes on by so much whenever somebody looks: one seed gives one run.
    const TICK: Duration = Duration::from_micros(100);

    std::thread_local! {
        static NOW: Cell<Option<Instant>> = const { Cell::new(None) };
    }

    /// See [`TICK`].
    pub(crate) fn now() -> Instant {
        let now = NOW.get().unwrap_or_else(Instant::now) + TICK;
        NOW.set(Some(now));
        now
    }

    /// Nobody sleeps by the clock: every wait may be over as soon as others had a chance to run.
    pub(crate) fn sleep(_time: Duration) {
        thread::yield_now();
    }

    /// See [`sleep`].
    pub(crate) fn wait_timeout_while<'a, T>(
        _condvar: &Condvar,
        mutex: &'a Mutex<T>,
        guard: MutexGuard<'a, T>,
        _timeout: Duration,
        _condition: impl Fn(&T) -> bool,
    ) -> MutexGuard<'a, T> {
        drop(guard);
        thread::yield_now();
        mutex.lock().expect("lock")
    }
}
