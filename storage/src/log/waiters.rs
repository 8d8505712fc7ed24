//! Waiters of the log: they wait until records are durable, or until these are *written*, and get a completion then.
//!
//! A written record outlives this process, but not a power cut.
//!
//! A client that connects again after this process was killed does not repeat a write that was answered. So this
//! process answers its writes only when their batch is in its segment: on the device, perhaps in the device's
//! volatile cache, or in the kernel's page cache where the file system refuses O_DIRECT. The next start finds the
//! writes there and makes them durable before it serves any client.
//!
//! One batch at a time is written for these waiters, by the port that finds none under way; waiters that come
//! meanwhile share the next one. The thread that ends a batch, a port's or the log's leader, looks for the next.

use smallvec::SmallVec;

use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Arc, Event, Mutex};
use crate::{Completion, Failure};

/// Where completions of other threads' groups reach a port.
pub(crate) struct Mailbox {
    pub completions: Mutex<Vec<Completion>>,
    pub event: Event,
    /// The port has to look at the log again.
    pub called: AtomicBool,
    /// The port's waiters in the log, and how many its owner says may wait at a time. Changed under the log's lock
    /// only.
    pub waiting: AtomicUsize,
    pub clients: AtomicUsize,
}

impl Mailbox {
    pub(crate) fn new(event: Event) -> Self {
        Self {
            completions: Mutex::default(),
            event,
            called: AtomicBool::new(false),
            waiting: AtomicUsize::new(0),
            clients: AtomicUsize::new(0),
        }
    }

    /// Makes the port look at the log again.
    pub(crate) fn wake(&self) {
        self.called.store(true, Ordering::Release);
        self.event.signal();
    }
}

/// A request that waits for `durable`, or for `written`, to reach an LSN.
pub(crate) struct Waiter {
    pub lsn: u64,
    pub token: u64,
    pub mailbox: Arc<Mailbox>,
}

/// Gives waiters their completions, and wakes each of their ports once, except `own`: its thread is the caller, which
/// looks next. All completions are delivered before the first port is woken, so that no port is woken for a part of
/// them.
pub(crate) fn deliver(
    waiters: impl Iterator<Item = Waiter>,
    result: Result<(), Failure>,
    own: Option<&Arc<Mailbox>>,
) {
    // Few groups have waiters of more ports: so usually no memory is allocated.
    let mut woken: SmallVec<[Arc<Mailbox>; 32]> = SmallVec::new();
    for waiter in waiters {
        let mailbox = &waiter.mailbox;
        let mut completions = mailbox.completions.lock().expect("mailbox lock");
        let first = completions.is_empty();
        completions.push(Completion {
            token: waiter.token,
            result: result.map(|()| None),
        });
        drop(completions);
        if first && own.is_none_or(|own| !Arc::ptr_eq(own, mailbox)) {
            woken.push(waiter.mailbox);
        }
    }
    woken.iter().for_each(|mailbox| mailbox.event.signal());
}

/// The waiters for `written` to reach an LSN.
#[derive(Default)]
pub(crate) struct WrittenWaiters {
    waiters: Vec<Waiter>,
    /// The highest LSN that any waiter has waited for.
    pub newest: u64,
}

impl WrittenWaiters {
    pub(crate) fn join(&mut self, waiter: Waiter) {
        self.newest = self.newest.max(waiter.lsn);
        self.waiters.push(waiter);
    }

    /// Removes and returns the waiters for which `chosen` returns true.
    pub(crate) fn take(
        &mut self,
        chosen: impl FnMut(&mut Waiter) -> bool,
    ) -> impl Iterator<Item = Waiter> {
        self.waiters.extract_if(.., chosen)
    }
}
