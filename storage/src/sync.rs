//! Threads, locks and events: the standard library's, or in the interleaving tests those of `shuttle`, which decides
//! at each of their operations which thread runs next.

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
pub(crate) use scheduled::{now, sleep, wait_timeout_while};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

/// A flag that a thread sleeps on until another thread sets it. It stays set until it is cleared, so no wake-up is
/// lost. Waking is faster than with a descriptor.
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

/// The same as a descriptor, which a thread can poll among others. A signal stays until it is cleared, so none is lost.
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
#[cfg(not(all(test, feature = "shuttle")))]
pub(crate) fn sleep(time: Duration) {
    thread::sleep(time);
}

/// The current time.
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

    /// The clock advances by this much whenever it is read, so that one seed gives one run.
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
