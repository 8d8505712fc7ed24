//! Those who wait for the log: until records are durable, or until they are *written*, and how they learn of it.
//!
//! What is written outlives this process, but not a power cut.
//!
//! A client that connects again after this process was killed does not repeat a write that was answered. So its writes
//! are answered when their batch is in its segment: on the device, perhaps in the device's volatile cache, or in the
//! kernel's page cache where the file system refuses O_DIRECT. The next start finds them there and makes them durable
//! before it serves anybody.
//!
//! One batch at a time is written for those who wait, by the port that finds none under way; those who come meanwhile
//! share the next one. Whoever ends a batch looks for the next, the log's leader too.

use smallvec::SmallVec;

use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Arc, Event, Mutex};
use crate::{Completion, Failure};

/// Where completions of other threads' groups reach a port.
pub(crate) struct Mailbox {
    pub completions: Mutex<Vec<Completion>>,
    pub event: Event,
    /// Its port is to look at the log again.
    pub called: AtomicBool,
    /// Its waiters in the log, and how many may wait at a time by what its owner says. Changed under the log's lock only.
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

/// Someone who waits for `durable`, or for `written`, to reach an LSN.
pub(crate) struct Waiter {
    pub lsn: u64,
    pub token: u64,
    pub mailbox: Arc<Mailbox>,
}

/// Gives waiters their completion, and wakes each of their ports once: not `own`, whose thread is here and looks next.
/// All have theirs before the first is woken, so that none is woken for a part.
pub(crate) fn deliver(
    waiters: impl Iterator<Item = Waiter>,
    result: Result<(), Failure>,
    own: Option<&Arc<Mailbox>>,
) {
    // Few have more ports: no memory is allocated then.
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

/// Those who wait for `written` to reach an LSN.
#[derive(Default)]
pub(crate) struct WrittenWaiters {
    waiters: Vec<Waiter>,
    /// The highest LSN that any of them has waited for.
    pub newest: u64,
}

impl WrittenWaiters {
    pub(crate) fn join(&mut self, waiter: Waiter) {
        self.newest = self.newest.max(waiter.lsn);
        self.waiters.push(waiter);
    }

    /// Takes those away that `chosen` chooses.
    pub(crate) fn take(
        &mut self,
        chosen: impl FnMut(&mut Waiter) -> bool,
    ) -> impl Iterator<Item = Waiter> {
        self.waiters.extract_if(.., chosen)
    }
}
