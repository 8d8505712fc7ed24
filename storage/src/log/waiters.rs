//! Waiters of the log: requests that complete once records are durable, or once they are *written*.
//!
//! A written record survives this process, but not a power cut.
//!
//! A client that connects again after this process was killed does not repeat a write that was
//! answered. So this process answers its writes only when their batch is in its segment: on the
//! device, perhaps in the device's volatile cache, or in the kernel's page cache where the file
//! system refuses O_DIRECT. The next start finds the writes there and makes them durable before it
//! serves any client.
//!
//! One batch at a time is written for these waiters, by the port that finds none running; waiters
//! that come in the meantime share the next one. The thread that ends a batch, a port's or the
//! log's leader, looks for the next.

use std::sync::OnceLock;

use smallvec::SmallVec;

use crate::log::sharing::SharingCounters;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Arc, Event, Mutex, Weak};
use crate::{Completion, Failure};

/// A port's reads. A read in flight pins the segments it reads, so any thread may end reads that
/// the medium has answered.
pub(crate) trait PortReads: Send + Sync {
    /// Ends the reads that the medium has answered, unless the port is doing so right now. The port
    /// finds their completions later.
    fn reap(&self);
}

/// How a port gets completions from groups that other threads ran.
pub(crate) struct Mailbox {
    pub completions: Mutex<Vec<Completion>>,
    pub event: Event,
    /// Counts the syncs of the port's disk.
    pub sharing: Arc<SharingCounters>,
    /// The port has to look at the log again.
    pub called: AtomicBool,
    /// Its FLUSHes never wait for a replica.
    pub local: bool,
    /// The port's reads, if it makes any.
    pub reads: OnceLock<Weak<dyn PortReads>>,
    /// The port's waiters in the log, and how many its owner says can wait at a time. Changed only
    /// under the log's lock.
    waiting: AtomicUsize,
    clients: AtomicUsize,
}

impl Mailbox {
    pub(crate) fn new(event: Event, sharing: Arc<SharingCounters>) -> Self {
        Self {
            completions: Mutex::default(),
            event,
            sharing,
            called: AtomicBool::new(false),
            local: false,
            reads: OnceLock::new(),
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

/// Completes waiters and wakes each of their ports once, except `own`, whose thread is the caller
/// and looks next. All completions are delivered before the first port is woken, so no port wakes
/// up to half of them.
pub(crate) fn deliver(
    waiters: impl Iterator<Item = Waiter>,
    result: Result<(), Failure>,
    own: Option<&Arc<Mailbox>>,
) {
    // Few groups have waiters of more ports, so usually nothing is allocated.
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

/// The waiters of a log, and its ports.
#[derive(Default)]
pub(crate) struct Waiters {
    /// Waiters for `durable`, in the order in which they came.
    durable: Vec<Waiter>,
    /// Waiters for `written`.
    written: Vec<Waiter>,
    /// The highest LSN that any waiter has waited for to be written.
    newest_written: u64,
    ports: Vec<Weak<Mailbox>>,
    /// How many clients wait for `durable`, over all ports, and how many there are.
    waiting_clients: usize,
    clients: usize,
}

impl Waiters {
    /// Adds a port that `clients` clients use.
    pub(crate) fn add_port(&mut self, port: &Arc<Mailbox>, clients: usize) {
        self.ports.push(Arc::downgrade(port));
        self.set_clients(port, clients);
    }

    /// Sets the number of clients that use a port from now on.
    pub(crate) fn set_clients(&mut self, port: &Mailbox, clients: usize) {
        let before = port.clients.swap(clients, Ordering::Relaxed);
        let waiting = port.waiting.load(Ordering::Relaxed);
        self.clients = self.clients - before + clients;
        self.waiting_clients = self.waiting_clients - waiting.min(before) + waiting.min(clients);
    }

    /// Removes a port that is going away. Its waiters get no completion.
    pub(crate) fn remove_port(&mut self, port: &Arc<Mailbox>) {
        let own = |waiter: &mut Waiter| Arc::ptr_eq(&waiter.mailbox, port);
        drop(self.take(own));
        self.set_clients(port, 0);
    }

    /// The open ports.
    pub(crate) fn ports(&mut self) -> Vec<Arc<Mailbox>> {
        self.ports.retain(|port| port.strong_count() > 0);
        self.ports.iter().filter_map(Weak::upgrade).collect()
    }

    /// Adds a waiter for `durable`.
    pub(crate) fn join(&mut self, waiter: Waiter) {
        let clients = waiter.mailbox.clients.load(Ordering::Relaxed);
        if waiter.mailbox.waiting.fetch_add(1, Ordering::Relaxed) < clients {
            self.waiting_clients += 1;
        }
        self.durable.push(waiter);
    }

    /// Adds a waiter for `written`.
    pub(crate) fn join_written(&mut self, waiter: Waiter) {
        self.newest_written = self.newest_written.max(waiter.lsn);
        self.written.push(waiter);
    }

    /// The highest LSN that any waiter has waited for to be written.
    pub(crate) fn newest_written(&self) -> u64 {
        self.newest_written
    }

    /// The LSNs of the waiters for `durable`, in the order in which they came.
    pub(crate) fn lsns(&self) -> impl ExactSizeIterator<Item = u64> {
        self.durable.iter().map(|waiter| waiter.lsn)
    }

    /// Whether the only waiter for `durable` is `port`'s.
    pub(crate) fn is_only(&self, port: &Arc<Mailbox>) -> bool {
        matches!(&self.durable[..], [waiter] if Arc::ptr_eq(&waiter.mailbox, port))
    }

    /// Whether all clients wait for `durable`, so that no other can join.
    pub(crate) fn is_complete(&self) -> bool {
        self.waiting_clients >= self.clients
    }

    /// Moves those of the oldest `most` waiters that `durable` now covers to `served`. Returns how
    /// many.
    pub(crate) fn serve(&mut self, durable: u64, most: usize, served: &mut Vec<Waiter>) -> usize {
        let (before, most) = (served.len(), self.durable.len().min(most));
        served.extend(
            self.durable
                .extract_if(..most, |waiter| waiter.lsn <= durable),
        );
        for waiter in &served[before..] {
            leave(&mut self.waiting_clients, waiter);
        }
        served.len() - before
    }

    /// Moves the waiters that `written` now covers to `served`.
    pub(crate) fn serve_written(&mut self, written: u64, served: &mut Vec<Waiter>) {
        let covered = |waiter: &mut Waiter| waiter.lsn <= written;
        served.extend(self.written.extract_if(.., covered));
    }

    /// Removes and returns the waiters of both kinds for which `chosen` returns true.
    pub(crate) fn take(&mut self, chosen: impl Fn(&mut Waiter) -> bool) -> Vec<Waiter> {
        let mut taken: Vec<Waiter> = self.durable.extract_if(.., &chosen).collect();
        for waiter in &taken {
            leave(&mut self.waiting_clients, waiter);
        }
        taken.extend(self.written.extract_if(.., chosen));
        taken
    }

    /// Panics if an invariant does not hold, given the log's watermarks. `each`: every waiter for
    /// `durable` gets a sync of its own, even if nothing new is to be made durable.
    pub(crate) fn check(&self, durable: u64, written: u64, each: bool) {
        assert!(
            each || self.lsns().all(|lsn| lsn > durable),
            "a waiter for what is durable"
        );
        let unwritten = |waiter: &Waiter| waiter.lsn > written && waiter.lsn <= self.newest_written;
        assert!(
            self.written.iter().all(unwritten),
            "a waiter for what is written"
        );
        let (mut all, mut waiting_clients, mut clients) = (0, 0, 0);
        for port in self.ports.iter().filter_map(Weak::upgrade) {
            let waiting = port.waiting.load(Ordering::Relaxed);
            let own = |waiter: &&Waiter| Arc::ptr_eq(&waiter.mailbox, &port);
            let found = self.durable.iter().filter(own).count();
            assert_eq!(waiting, found, "waiters of a port");
            let most = port.clients.load(Ordering::Relaxed);
            all += waiting;
            waiting_clients += waiting.min(most);
            clients += most;
        }
        assert_eq!(self.durable.len(), all, "waiters of no open port");
        let counted = (self.waiting_clients, self.clients);
        assert_eq!(counted, (waiting_clients, clients), "clients");
    }
}

/// Updates the count of waiting clients for a waiter that was removed.
fn leave(waiting_clients: &mut usize, waiter: &Waiter) {
    let clients = waiter.mailbox.clients.load(Ordering::Relaxed);
    if waiter.mailbox.waiting.fetch_sub(1, Ordering::Relaxed) <= clients {
        *waiting_clients -= 1;
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;
    use crate::log::pipeline::tests::panics;

    /// Two ports, of two clients and of none. Of each a waiter for record 5 and one for 6; the
    /// first also waits for 8 to be written.
    fn waiters() -> (Waiters, [Arc<Mailbox>; 2]) {
        let ports = [(); 2].map(|()| Arc::new(Mailbox::new(Event::new().unwrap(), Arc::default())));
        let mut waiters = Waiters::default();
        let waiter = |lsn, port: &Arc<Mailbox>| Waiter {
            lsn,
            token: lsn,
            mailbox: port.clone(),
        };
        for (port, clients) in ports.iter().zip([2, 0]) {
            waiters.add_port(port, clients);
            waiters.join(waiter(5, port));
            waiters.join(waiter(6, port));
        }
        waiters.join_written(waiter(8, &ports[0]));
        waiters.check(4, 7, false);
        (waiters, ports)
    }

    #[test]
    fn waiters_are_served_as_the_watermarks_pass_them() {
        let (mut waiters, ports) = waiters();
        assert!(waiters.is_complete());
        let mut served = Vec::new();
        assert_eq!(waiters.serve(5, usize::MAX, &mut served), 2);
        waiters.check(5, 7, false);
        assert!(!waiters.is_complete());
        waiters.serve_written(8, &mut served);
        waiters.check(5, 8, false);
        assert_eq!(served.len(), 3);
        waiters.set_clients(&ports[0], 1);
        assert!(waiters.is_complete());
        waiters.remove_port(&ports[0]);
        waiters.check(5, 8, false);
        assert_eq!(waiters.lsns().collect::<Vec<_>>(), [6]);
    }

    #[test]
    fn every_broken_invariant_is_noticed() {
        type Fault = fn(&mut Waiters);
        let broken: [(&str, Fault); 7] = [
            ("what is durable", |waiters| waiters.durable[0].lsn = 4),
            ("what is written", |waiters| waiters.written[0].lsn = 7),
            ("what is written", |waiters| waiters.newest_written = 7),
            ("waiters of a port", |waiters| {
                waiters.durable.pop();
            }),
            ("waiters of no open port", |waiters| waiters.ports.clear()),
            ("clients", |waiters| waiters.waiting_clients = 3),
            ("clients", |waiters| waiters.clients = 3),
        ];
        for (message, change) in broken {
            let (mut waiters, _ports) = waiters();
            change(&mut waiters);
            panics(message, || waiters.check(4, 7, false));
        }
    }
}
