//! The log that disks share: what its lock guards, appending records, and failing for good.
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

/// Bytes of payload that may wait in memory for the log; above it appends wait (backpressure). As much as a fast
/// device has in flight and no more: with 32 MiB sequential appends were a quarter slower, since what is copied in
/// goes to memory that the processor's caches have long given up.
pub(crate) const PENDING_LIMIT: usize = 4 << 20;
/// Most records that may wait for a checkpoint. Each takes an extent of the index or two, about 40 bytes: this
/// bounds memory where payloads do not, against a guest that only discards.
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

    /// The checksums of its payload.
    pub(crate) fn checksums(&self) -> &[u32] {
        self.payload
            .as_ref()
            .map_or(&[], |payload| &payload.checksums)
    }

    /// What it counts for among the pending bytes. Without a payload it still takes a descriptor: memory stays
    /// bounded.
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
    /// Its sync is part of the same operation.
    pub synced: bool,
    pub ended: bool,
}

/// Where the next batch goes.
pub(crate) struct Tail {
    pub segment: Arc<Segment>,
    pub salt: u64,
    pub offset: u64,
    pub previous_crc: u32,
    /// Bytes of the segment header while it is not written yet: it goes out with the first batch.
    pub header: Option<Buffer>,
}

/// What the log's lock guards. Held for memory operations only, never across I/O.
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
    /// Those who wait for `durable`.
    pub waiters: Vec<Waiter>,
    /// Those who wait for `written`.
    pub awaiting: WrittenWaiters,
    /// Clients of all ports who wait, and all that there are.
    pub waiting_clients: usize,
    pub open_clients: usize,
    /// Batches being written, and those written behind one that still is, in the log's order.
    pub writing: VecDeque<Writing>,
    /// Bytes of log up to where the next batch goes, since it was opened. What segments leave unused counts too.
    pub end: u64,
    /// Somebody leads, and looks again when what is under way has ended.
    pub led: bool,
    pub gather: Gather,
    pub tail: Option<Tail>,
    /// Segments in use, oldest first; the tail's is the last.
    pub live: VecDeque<Live>,
    /// The one that was freed first is used first.
    pub free: VecDeque<Arc<Segment>>,
    /// Segments that hold batches written since the last sync, those being written left out.
    pub unsynced: Vec<Arc<Segment>>,
    /// The pending records fit no segment, and none is to come: a checkpoint has to free one.
    pub starved: bool,
    pub ports: Vec<Weak<Mailbox>>,
    /// For the keeper.
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

    /// So many clients use a port from now on.
    pub(crate) fn set_clients(&mut self, port: &Mailbox, clients: usize) {
        let before = port.clients.swap(clients, Ordering::Relaxed);
        let waiting = port.waiting.load(Ordering::Relaxed);
        self.open_clients = self.open_clients - before + clients;
        self.waiting_clients = self.waiting_clients - waiting.min(before) + waiting.min(clients);
    }

    /// Takes those waiters away that `chosen` chooses.
    pub(crate) fn take_waiters(&mut self, chosen: impl FnMut(&mut Waiter) -> bool) -> Vec<Waiter> {
        let taken: Vec<Waiter> = self.waiters.extract_if(.., chosen).collect();
        taken.iter().for_each(|waiter| self.leave(waiter));
        taken
    }

    /// A waiter is no longer among the waiters.
    pub(crate) fn leave(&mut self, waiter: &Waiter) {
        let clients = waiter.mailbox.clients.load(Ordering::Relaxed);
        if waiter.mailbox.waiting.fetch_sub(1, Ordering::Relaxed) <= clients {
            self.waiting_clients -= 1;
        }
    }

    /// The next batch is one that a checkpoint waits for.
    pub(crate) fn is_draining(&self) -> bool {
        self.keeper.draining.is_some_and(|lsn| self.batched < lsn)
    }

    /// Somebody waits for the keeper, who is not to give way to others then.
    pub(crate) fn is_pressing(&self) -> bool {
        self.starved || self.keeper.stop || !self.keeper.orders.is_empty()
    }

    /// The ring is full and can't be emptied. What would need room fails until that has changed.
    pub(crate) fn is_stuck(&self) -> bool {
        self.starved && self.keeper.failed
    }

    /// Those who wait for records that are not on their way to the ring, if it is stuck: nobody knows when those will
    /// be durable, though they stay and will be.
    pub(crate) fn take_stuck(&mut self) -> Vec<Waiter> {
        if !self.is_stuck() {
            return Vec::new();
        }
        // Not the keeper's own, which would wait for ever.
        let forgotten =
            |waiter: &Waiter| planted(Mutant::StuckWaitersForgotten) && waiter.token > 0;
        let batched = self.batched;
        let mut stuck = self.take_waiters(|waiter| waiter.lsn > batched && !forgotten(waiter));
        stuck.extend(self.awaiting.take(|waiter| waiter.lsn > batched));
        stuck
    }

    /// In debug builds: panics unless this is a state that can be.
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

    /// Nothing is in flight.
    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.writing.is_empty() && !self.led
    }
}

/// What the keeper thread is asked to do.
#[derive(Default)]
pub(crate) struct KeeperState {
    pub stop: bool,
    pub checkpoint: bool,
    /// A checkpoint waits for pending records: they may use the ring's last segment.
    pub draining: Option<u64>,
    /// Number of segment files made so far.
    pub files: u32,
    /// The last attempt to make a segment file failed: what is there is the whole ring until one succeeds.
    pub cramped: bool,
    /// The last attempt to make room failed, by a checkpoint or by a segment file.
    pub failed: bool,
    /// What somebody waits for.
    pub orders: Vec<Order>,
    /// There is no keeper any more.
    pub gone: bool,
}

/// Why a record was not appended.
pub(crate) enum Refused {
    /// Too much waits for the log. The payload, to be tried again when woken.
    HeldBack(Option<Payload>),
    /// The ring is full and can't be emptied.
    Stuck,
}

/// What is the same for the life of the open log.
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
    /// Ports hold back requests until pending bytes fall.
    pub held_back: AtomicBool,
    pub counters: Counters,
    pub state: Mutex<State>,
    /// What the log's writer sleeps on.
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
            // A thread that panics already may clean up; it can't make things worse.
            Err(poisoned) if std::thread::panicking() => poisoned.into_inner(),
            // Somebody panicked while holding the lock: a bug that has been printed. What it guards may be half
            // changed, so going on would risk the promises.
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
        // Half a segment at most, so that whatever is pending fits the keeper's last segment.
        let full = state.pending_bytes >= PENDING_LIMIT.min(self.segment_size as usize / 2);
        let many = unapplied >= UNAPPLIED_LIMIT;
        if (full && state.is_stuck()) || (many && state.keeper.failed) {
            return Err(Refused::Stuck);
        }
        // Once closing has begun nothing may come behind what it copies; who is held back learns of the end.
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
        // Under the log's lock, so that the index sees records in LSN order.
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
        // The first failure counts: those behind it have nobody to tell.
        if self.poisoned.load(Ordering::Acquire) {
            return;
        }
        tracing::error!(
            "{}: the log failed ({error}); its disks are read-only until reopened",
            self.dir.display()
        );
        self.refuse(state);
    }

    /// Tells those who wait in vain for a ring that is stuck.
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
            // All but the keeper's own, which would wait for ever.
            waiters.retain(|waiter| waiter.token == 0);
        }
        // What was not written stays readable through the index, and will never be durable.
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

/// Fails the log if the thread panics before this is dropped: what the thread was about to do nobody else does, and those
/// who wait for it would wait for ever.
pub(crate) struct FailOnPanic<'a> {
    log: &'a Log,
    /// It panicked before: whoever cleans up after a panic elsewhere does no harm.
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
    /// Has the keeper carry out `task`, and waits for that.
    ///
    /// # Errors
    /// As the task; or the log is being closed.
    pub(crate) fn order(&self, task: Task) -> error::Result<()> {
        let (answer, answered) = mpsc::channel();
        let mut state = self.lock();
        // Before this is looked at again, the keeper takes its leave under the same lock.
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
