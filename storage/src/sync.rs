//! Threads, locks and events: the standard library's, or in the interleaving tests those of
//! `shuttle`, which decides at each of their operations which thread runs next.

use std::io;
use std::os::fd::BorrowedFd;
#[cfg(not(all(test, feature = "shuttle")))]
use std::time::Duration;
use std::time::Instant;

#[cfg(all(test, feature = "shuttle"))]
pub(crate) use shuttle::{sync::*, thread};
#[cfg(not(all(test, feature = "shuttle")))]
pub(crate) use std::{sync::*, thread};

#[cfg(not(all(test, feature = "shuttle")))]
use rustix::event::{PollFd, PollFlags, Timespec};
#[cfg(all(test, feature = "shuttle"))]
pub(crate) use scheduled::{sleep, wait_timeout_while};
#[cfg(test)]
pub(crate) use stepped::now;
#[cfg(all(test, not(feature = "shuttle")))]
pub(crate) use stepped::sleep;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// A flag that a thread sleeps on until another thread sets it. It stays set until it is cleared,
/// so no wake-up is lost. Waking is faster than with a descriptor.
#[derive(Debug, Default)]
pub(crate) struct WakeFlag {
    called: Mutex<bool>,
    changed: Condvar,
}

impl WakeFlag {
    /// Wakes the thread that sleeps on this, now or next.
    pub(crate) fn set(&self) {
        if !std::mem::replace(&mut *self.called.lock().expect("wake flag lock"), true) {
            self.changed.notify_all();
        }
    }

    /// Clears the flag.
    pub(crate) fn clear(&self) {
        *self.called.lock().expect("wake flag lock") = false;
    }

    /// Sleeps until the flag is set, or until the time `over`; may return early.
    pub(crate) fn sleep_until(&self, over: Option<Instant>) {
        let left = over.map(|over| over.saturating_duration_since(now()));
        let called = self.called.lock().expect("wake flag lock");
        match left {
            Some(left) if left.is_zero() => {}
            Some(left) => drop(wait_timeout_while(
                &self.changed,
                &self.called,
                called,
                left,
                |called| !*called,
            )),
            None => drop(self.changed.wait_while(called, |called| !*called)),
        }
    }
}

/// The same as a descriptor, which a thread can poll among others. A signal stays until it is
/// cleared, so none is lost.
#[derive(Debug)]
pub(crate) struct Event {
    fd: EventFd,
    /// `shuttle` could not schedule a thread that waits for a descriptor.
    #[cfg(all(test, feature = "shuttle"))]
    call: Arc<WakeFlag>,
}

impl Event {
    /// # Errors
    /// If the system refuses a descriptor.
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self {
            fd: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
            #[cfg(all(test, feature = "shuttle"))]
            call: Arc::default(),
        })
    }

    /// Another handle on the same event.
    ///
    /// # Errors
    /// If the system refuses a descriptor.
    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        Ok(Self {
            fd: self.fd.try_clone()?,
            #[cfg(all(test, feature = "shuttle"))]
            call: self.call.clone(),
        })
    }

    /// A descriptor that is readable while the event is signalled, for threads that poll several.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        walvisor_block::descriptor(&self.fd)
    }
}

#[cfg(not(all(test, feature = "shuttle")))]
impl Event {
    /// Wakes the thread that sleeps on this, now or next.
    pub(crate) fn signal(&self) {
        // Fails only if the counter is at its limit, and then the event is signalled already.
        drop(self.fd.write(1));
    }

    /// Clears the signal.
    pub(crate) fn clear(&self) {
        drop(self.fd.read());
    }

    /// Sleeps until signalled, or until the time `over`; may return early.
    pub(crate) fn sleep_until(&self, over: Option<Instant>) {
        let left = over.map(|over| over.saturating_duration_since(now()));
        #[cfg(test)]
        if left.is_some_and(|left| stepped::advance(left).is_some()) {
            return;
        }
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut fds = [PollFd::from_borrowed_fd(self.fd(), PollFlags::IN)];
        // An interrupted wait is a spurious wake-up: the caller checks, and sleeps again.
        let _ = rustix::event::poll(&mut fds, left.as_ref());
    }
}

#[cfg(all(test, feature = "shuttle"))]
impl Event {
    pub(crate) fn signal(&self) {
        self.call.set();
    }

    pub(crate) fn clear(&self) {
        self.call.clear();
    }

    pub(crate) fn sleep_until(&self, over: Option<Instant>) {
        self.call.sleep_until(over);
    }
}

/// Sleeps for `time`.
#[cfg(not(test))]
pub(crate) fn sleep(time: Duration) {
    thread::sleep(time);
}

/// The current time.
#[cfg(not(test))]
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
    #[cfg(test)]
    if stepped::advance(timeout).is_some() {
        return guard;
    }
    let waited = condvar.wait_timeout_while(guard, timeout, |guarded| condition(guarded));
    waited.expect("lock").0
}

/// A clock that only the thread's own reads and sleeps advance, so that one seed gives one run on
/// any machine.
#[cfg(test)]
pub(crate) mod stepped {
    use std::cell::Cell;
    use std::marker::PhantomData;
    use std::time::{Duration, Instant};

    /// How much one look at the clock takes.
    const TICK: Duration = Duration::from_micros(100);

    std::thread_local! {
        static NOW: Cell<Option<Instant>> = const { Cell::new(None) };
    }

    /// While this lives, the thread has such a clock, and may not wait for another thread.
    #[must_use]
    pub(crate) struct SteppedClock {
        outer: Option<Instant>,
        /// The clock is the thread's.
        _not_send: PhantomData<*const ()>,
    }

    impl SteppedClock {
        /// Starts at the current time.
        pub(crate) fn start() -> Self {
            Self {
                outer: NOW.replace(Some(Instant::now())),
                _not_send: PhantomData,
            }
        }
    }

    impl Drop for SteppedClock {
        fn drop(&mut self) {
            NOW.set(self.outer);
        }
    }

    /// The current time.
    pub(crate) fn now() -> Instant {
        if cfg!(feature = "shuttle") && NOW.get().is_none() {
            NOW.set(Some(Instant::now()));
        }
        advance(TICK).unwrap_or_else(Instant::now)
    }

    /// Sleeps for `time`.
    #[cfg(not(feature = "shuttle"))]
    pub(crate) fn sleep(time: Duration) {
        if advance(time).is_none() {
            std::thread::sleep(time);
        }
    }

    /// Advances the thread's clock, if it has one, and returns the new time.
    pub(super) fn advance(time: Duration) -> Option<Instant> {
        let now = NOW.get()? + time;
        NOW.set(Some(now));
        Some(now)
    }
}

#[cfg(all(test, feature = "shuttle"))]
mod scheduled {
    use std::time::Duration;

    use super::{Condvar, Mutex, MutexGuard, thread};

    /// No real sleeping: any wait may end as soon as other threads had a chance to run.
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
