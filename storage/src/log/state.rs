//! The log that disks share: the state under its lock, appending records, and permanent failure.
//!
//! ```text
//!  ports ──append──▶ pending records ──group──▶ batches ──write──▶ segment ──sync──▶ durable
//!        (LSN given here)             (`crate::log::group`: several written at once, one sync at a time)
//!        appended ──────────────────▶ batched ────────────────▶ written ───────────▶ durable
//! ```

use std::collections::VecDeque;
use std::path::PathBuf;

use crate::error::{self, Error, ErrorKind};
use crate::format::{Kind, Uuid};
use crate::index::Place;
use crate::log::counters::Counters;
use crate::log::disk_state::DiskState;
use crate::log::gather::Gather;
use crate::log::orders::{Order, Task};
use crate::log::stamp::Stamps;
use crate::log::waiters::{Mailbox, Waiter, WrittenWaiters, deliver};
use crate::medium::checksum::Payload;
use crate::medium::directory::Medium;
use crate::medium::segment::Segment;
use crate::mutant::{Mutant, any_planted, planted};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Call, Condvar, Mutex, MutexGuard, Weak, mpsc};
use crate::{Buffer, Failure, MAX_REQUEST_BYTES};

/// Bytes of payload that may wait in memory for the log; above this limit appends wait (backpressure). The limit is
/// what a fast device has in flight and no more: with 32 MiB sequential appends were a quarter slower, since payloads
/// are then copied into memory that the processor's caches have long evicted.
pub(crate) const PENDING_LIMIT: usize = 4 << 20;
/// Most records that may wait for a checkpoint. Each takes one or two index extents, about 40 bytes. A guest that
/// only discards adds no payloads, so this limit bounds the memory that it can use.
pub(crate) const UNAPPLIED_LIMIT: u64 = 1 << 20;

/// A record that has an LSN and waits to be written.
pub(crate) struct Record {
    pub disk: Arc<DiskState>,
    pub lsn: u64,
    pub kind: Kind,
    pub sector: u64,
    pub sectors: u32,
    pub payload: Option<Payload>,
}

impl Record {
    pub(crate) fn payload_len(&self) -> usize {
        self.payload
            .as_ref()
            .map_or(0, |payload| payload.bytes.len())
    }

    /// The checksums of the record's payload.
    pub(crate) fn checksums(&self) -> &[u32] {
        self.payload
            .as_ref()
            .map_or(&[], |payload| &payload.checksums)
    }

    /// The record's share of the pending bytes. A record without a payload counts too, since it takes a descriptor:
    /// so memory stays bounded.
    pub(crate) fn pending_bytes(&self) -> usize {
        self.payload_len().max(512)
    }
}

/// A segment in use, with the LSN of its last record so far.
pub(crate) struct Live {
    pub segment: Arc<Segment>,
    pub sequence: u64,
    pub last_lsn: u64,
}

/// A batch on its way to its segment.
pub(crate) struct Writing {
    pub last_lsn: u64,
    pub segment: Arc<Segment>,
    /// The sync of the batch is part of the same operation as its write.
    pub synced: bool,
    pub ended: bool,
}

/// The position in the log at which the next batch is written.
pub(crate) struct Tail {
    pub segment: Arc<Segment>,
    pub salt: u64,
    pub offset: u64,
    pub previous_crc: u32,
    /// The segment header while it is not written yet; it is written together with the first batch.
    pub header: Option<Buffer>,
}

/// The state that the log's lock guards. A thread holds the lock for memory operations only, never across I/O.
pub(crate) struct State {
    pub next_lsn: u64,
    /// LSN of the newest record, pending ones included. Below `next_lsn - 1` after a torn tail was dropped.
    pub appended: u64,
    /// LSN of the newest record that was put into a batch.
    pub batched: u64,
    /// All records up to this LSN are in the base images.
    pub applied: u64,
    pub next_cid: u64,
    pub stamps: Stamps,
    pub next_sequence: u64,
    pub pending: VecDeque<Record>,
    /// Bytes of pending records, and of those being written.
    pub pending_bytes: usize,
    /// Bytes of pending records alone.
    pub queued_bytes: usize,
    /// Waiters for `durable`.
    pub waiters: Vec<Waiter>,
    /// Waiters for `written`.
    pub awaiting: WrittenWaiters,
    /// The number of waiting clients, and of all clients, of all ports.
    pub waiting_clients: usize,
    pub open_clients: usize,
    /// Batches being written, and written batches behind one that is still being written, in the log's order.
    pub writing: VecDeque<Writing>,
    /// Bytes of log from its opening to the position of the next batch. Unused ends of segments count too.
    pub end: u64,
    /// A leader is at work; it looks at the log again when its operation has ended.
    pub led: bool,
    pub gather: Gather,
    pub tail: Option<Tail>,
    /// Segments in use, oldest first; the tail's is the last.
    pub live: VecDeque<Live>,
    /// Free segments; the one that was freed first is used first.
    pub free: VecDeque<Arc<Segment>>,
    /// Segments that hold batches written since the last sync; batches still being written do not count.
    pub unsynced: Vec<Arc<Segment>>,
    /// The pending records fit no segment, and no new segment file is to come: a checkpoint has to free a segment.
    pub starved: bool,
    pub ports: Vec<Weak<Mailbox>>,
    /// Requests to the keeper thread, and what it has achieved.
    pub keeper: KeeperState,
}

impl State {
    pub(crate) fn join(&mut self, waiter: Waiter) {
        let clients = waiter.mailbox.clients.load(Ordering::Relaxed);
        if waiter.mailbox.waiting.fetch_add(1, Ordering::Relaxed) < clients {
            self.waiting_clients += 1;
        }
        self.waiters.push(waiter);
    }

    /// Sets the number of clients that use a port from now on.
    pub(crate) fn set_clients(&mut self, port: &Mailbox, clients: usize) {
        let before = port.clients.swap(clients, Ordering::Relaxed);
        let waiting = port.waiting.load(Ordering::Relaxed);
        self.open_clients = self.open_clients - before + clients;
        self.waiting_clients = self.waiting_clients - waiting.min(before) + waiting.min(clients);
    }

    /// Removes and returns the waiters for which `chosen` returns true.
    pub(crate) fn take_waiters(&mut self, chosen: impl FnMut(&mut Waiter) -> bool) -> Vec<Waiter> {
        let taken: Vec<Waiter> = self.waiters.extract_if(.., chosen).collect();
        taken.iter().for_each(|waiter| self.leave(waiter));
        taken
    }

    /// Updates the counts for a waiter that was removed from `waiters`.
    pub(crate) fn leave(&mut self, waiter: &Waiter) {
        let clients = waiter.mailbox.clients.load(Ordering::Relaxed);
        if waiter.mailbox.waiting.fetch_sub(1, Ordering::Relaxed) <= clients {
            self.waiting_clients -= 1;
        }
    }

    /// Whether a checkpoint waits for the next batch.
    pub(crate) fn is_draining(&self) -> bool {
        self.keeper.draining.is_some_and(|lsn| self.batched < lsn)
    }

    /// Whether the log, its owner or an order's caller waits for the keeper, which then must not yield the medium to
    /// others.
    pub(crate) fn is_pressing(&self) -> bool {
        self.starved || self.keeper.stop || !self.keeper.orders.is_empty()
    }

    /// Whether the ring is full and can't be emptied. Requests that need room in the ring fail until that has
    /// changed.
    pub(crate) fn is_stuck(&self) -> bool {
        self.starved && self.keeper.failed
    }

    /// If the ring is stuck, removes and returns the waiters for records that are in no batch yet. Those records stay
    /// and will become durable, but at an unknown time.
    pub(crate) fn take_stuck(&mut self) -> Vec<Waiter> {
        if !self.is_stuck() {
            return Vec::new();
        }
        // The planted fault spares the keeper's own waiter (token 0), which would wait for ever.
        let forgotten =
            |waiter: &Waiter| planted(Mutant::StuckWaitersForgotten) && waiter.token > 0;
        let batched = self.batched;
        let mut stuck = self.take_waiters(|waiter| waiter.lsn > batched && !forgotten(waiter));
        stuck.extend(self.awaiting.take(|waiter| waiter.lsn > batched));
        stuck
    }

    /// In debug builds: panics if the state breaks an invariant.
    pub(crate) fn check(&self, log: &Log) {
        if !cfg!(debug_assertions) || any_planted() || std::thread::panicking() {
            return;
        }
        let durable = log.durable.load(Ordering::Acquire);
        let written = log.written.load(Ordering::Acquire);
        assert!(
            durable <= written && written <= self.batched && self.batched <= self.appended,
            "durable {durable}, written {written}, batched {}, appended {}",
            self.batched,
            self.appended
        );
        assert!(self.appended < self.next_lsn && self.applied <= durable);
    }

    /// Whether nothing is in flight.
    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.writing.is_empty() && !self.led
    }
}

/// Requests to the keeper thread, and what it has achieved.
#[derive(Default)]
pub(crate) struct KeeperState {
    pub stop: bool,
    pub checkpoint: bool,
    /// A checkpoint waits for the pending records up to this LSN: they may use the ring's last segment.
    pub draining: Option<u64>,
    /// Number of segment files made so far.
    pub files: u32,
    /// The last attempt to make a segment file failed: until one succeeds, the existing files are the whole ring.
    pub cramped: bool,
    /// The last attempt to make room, by a checkpoint or by a new segment file, failed.
    pub failed: bool,
    /// Orders whose callers wait for the keeper.
    pub orders: Vec<Order>,
    /// The keeper thread has ended.
    pub gone: bool,
}

/// Why a record was not appended.
pub(crate) enum Refused {
    /// Too much waits for the log. The port gets the payload back, and tries again when it is woken.
    HeldBack(Option<Payload>),
    /// The ring is full and can't be emptied.
    Stuck,
}

/// An open log: its constants, its watermarks, its counters, and the state under its lock.
pub(crate) struct Log {
    pub dir: PathBuf,
    pub uuid: Uuid,
    pub segment_size: u64,
    pub max_segments: u32,
    pub medium: Box<dyn Medium>,
    /// The leader makes every batch, not only those that sync.
    pub leader_alone: bool,
    /// Most waiters that one group serves: no limit, or 1 without group commit.
    pub most_served: usize,
    pub durable: AtomicU64,
    pub written: AtomicU64,
    pub poisoned: AtomicBool,
    /// Ports hold back requests until the pending bytes fall.
    pub held_back: AtomicBool,
    pub counters: Counters,
    pub state: Mutex<State>,
    /// The writer thread sleeps on this.
    pub leader_called: Call,
    pub keeper_wanted: Condvar,
}

impl Log {
    /// The longest payload that a record can have, in bytes.
    pub(crate) fn max_request_bytes(&self) -> usize {
        MAX_REQUEST_BYTES.min(self.segment_size as usize / 4)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        match self.state.lock() {
            Ok(state) => state,
            // A thread that is panicking already may clean up; it can't make things worse.
            Err(poisoned) if std::thread::panicking() => poisoned.into_inner(),
            // Another thread panicked while it held the lock: a bug whose message has been printed. The state may be
            // half changed, so going on would risk the promises.
            Err(_) => panic!("the log's state was left half changed"),
        }
    }

    /// Gives a record of a port its LSN, makes it visible to readers and queues it for the log.
    ///
    /// # Errors
    /// If too much is pending or waits for a checkpoint.
    pub(crate) fn append(
        &self,
        disk: &Arc<DiskState>,
        kind: Kind,
        sector: u64,
        sectors: u32,
        payload: Option<Payload>,
    ) -> Result<u64, Refused> {
        let mut state = self.lock();
        let unapplied = state.appended - state.applied;
        if unapplied >= UNAPPLIED_LIMIT / 2 && !state.keeper.checkpoint {
            state.keeper.checkpoint = true;
            self.keeper_wanted.notify_one();
        }
        // Half a segment at most, so that all pending records fit the ring's last segment, which is the keeper's.
        let full = state.pending_bytes >= PENDING_LIMIT.min(self.segment_size as usize / 2);
        let many = unapplied >= UNAPPLIED_LIMIT;
        if (full && state.is_stuck()) || (many && state.keeper.failed) {
            return Err(Refused::Stuck);
        }
        // Once closing has begun, no record may come behind those that its checkpoint copies.
        if full || many || state.keeper.stop {
            self.held_back.store(true, Ordering::Relaxed);
            return Err(Refused::HeldBack(payload));
        }
        let lsn = state.next_lsn;
        state.next_lsn += 1;
        state.appended = lsn;
        let place = match &payload {
            Some(payload) => Place::Memory {
                payload: payload.bytes.clone(),
                offset: 0,
            },
            None => Place::Zero {
                unmap: kind == Kind::Discard,
            },
        };
        // The index changes under the log's lock, so that it sees records in LSN order.
        if !(kind == Kind::Discard && planted(Mutant::IndexSkipsDiscard)) {
            disk.index_mut()
                .active
                .insert(sector, u64::from(sectors), lsn, place);
        }
        disk.last_lsn.store(lsn, Ordering::Release);
        let record = Record {
            disk: disk.clone(),
            lsn,
            kind,
            sector,
            sectors,
            payload,
        };
        state.pending_bytes += record.pending_bytes();
        state.queued_bytes += record.pending_bytes();
        state.pending.push_back(record);
        Ok(lsn)
    }

    /// Promise 5: a failed write or sync of the log is final. Every waiter gets an error, now and later.
    pub(crate) fn poison(&self, error: &std::io::Error) {
        let state = self.lock();
        // Only the first failure counts: it gave every waiter its error.
        if self.poisoned.load(Ordering::Acquire) {
            return;
        }
        tracing::error!(
            "{}: the log failed ({error}); its disks are read-only until reopened",
            self.dir.display()
        );
        self.refuse(state);
    }

    /// Fails the waiters that a stuck ring cannot serve, and wakes all ports.
    pub(crate) fn refuse_stuck(&self) {
        let mut state = self.lock();
        let stuck = state.take_stuck();
        drop(state);
        self.refuse_waiters(stuck);
        self.wake_ports();
    }

    /// Gives these waiters an error.
    pub(crate) fn refuse_waiters(&self, waiters: Vec<Waiter>) {
        deliver(waiters.into_iter(), Err(Failure::Io), None);
    }

    /// Every request that waits, or comes later, gets an error; reads go on.
    pub(crate) fn refuse(&self, mut state: MutexGuard<'_, State>) {
        self.poisoned.store(true, Ordering::Release);
        state.writing.clear();
        let mut waiters = state.take_waiters(|_| true);
        waiters.extend(state.awaiting.take(|_| true));
        if planted(Mutant::WaiterLostOnError) {
            // The planted fault keeps only the keeper's own waiter (token 0), which would wait for ever.
            waiters.retain(|waiter| waiter.token == 0);
        }
        // Records that were not written stay readable through the index, but never become durable.
        state.pending.clear();
        drop(state);
        self.refuse_waiters(waiters);
        self.wake_ports();
    }

    /// Makes all ports, and the leader, look at the log again.
    pub(crate) fn wake_ports(&self) {
        let ports = live_ports(&mut self.lock());
        ports.iter().for_each(|port| port.wake());
        self.call_leader();
    }

    /// Makes the leader look at the log again.
    pub(crate) fn call_leader(&self) {
        self.leader_called.make();
    }
}

/// Fails the log if the thread panics before this is dropped: no other thread does what this one was about to do, so
/// its waiters would wait for ever.
pub(crate) struct FailOnPanic<'a> {
    log: &'a Log,
    /// The thread was panicking before: cleaning up after a panic elsewhere does no harm.
    before: bool,
}

impl<'a> FailOnPanic<'a> {
    pub(crate) fn new(log: &'a Log) -> Self {
        Self {
            log,
            before: std::thread::panicking(),
        }
    }
}

impl Drop for FailOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.before {
            let thread = std::thread::current();
            let name = thread.name().unwrap_or("without a name");
            let panicked = format!("its thread {name} has panicked");
            self.log.poison(&std::io::Error::other(panicked));
        }
    }
}

pub(crate) fn live_ports(state: &mut State) -> Vec<Arc<Mailbox>> {
    state.ports.retain(|port| port.strong_count() > 0);
    state.ports.iter().filter_map(Weak::upgrade).collect()
}

impl Log {
    /// Orders the keeper to carry out `task`, and waits until it has.
    ///
    /// # Errors
    /// Those of the task; or the log is being closed.
    pub(crate) fn order(&self, task: Task) -> error::Result<()> {
        let (answer, answered) = mpsc::channel();
        let mut state = self.lock();
        // The keeper sets `gone`, and drops the orders left, under the same lock: so every order is answered or
        // refused.
        if !state.keeper.gone && !state.keeper.stop {
            state.keeper.orders.push(Order { task, answer });
            self.keeper_wanted.notify_all();
        } else {
            drop(answer);
        }
        drop(state);
        answered.recv().unwrap_or_else(|_| {
            Err(Error::new(
                ErrorKind::Io,
                format!("{}: the log is being closed", self.dir.display()),
            ))
        })
    }
}
