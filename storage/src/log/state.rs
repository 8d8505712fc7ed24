//! The log that disks share: the state under its lock, and permanent failure.
//!
//! ```text
//!  ports ──append──▶ pending records ──group──▶ batches ──write──▶ segment ──sync──▶ durable
//!        (LSN given here)             (`crate::log::group_commit`: several written at once, one sync at a time)
//!        appended ──────────────────▶ batched ────────────────▶ written ───────────▶ durable
//! ```

use std::path::PathBuf;
use std::time::Duration;

use walvisor_block::{MemoryBudget, MemoryReservation};

use crate::catalog::retention::Retention;
use crate::error::{self, Error, ErrorKind};
use crate::format::Uuid;
use crate::index::ExtentLimit;
use crate::log::clock::LogClock;
use crate::log::commit::{Commit, PositionCache, SavedExtentsCache};
use crate::log::commit_delay::CommitDelay;
use crate::log::counters::Counters;
use crate::log::orders::{KeeperOrder, KeeperState, KeeperTask};
use crate::log::pipeline::Pipeline;
use crate::log::replica::ReplicaState;
use crate::log::ring::SegmentRing;
use crate::log::room::RoomShares;
use crate::log::waiters::{Waiter, Waiters, deliver};
use crate::medium::directory::Medium;
use crate::medium::file::Appender;
use crate::mutant::{any_planted, is_forgotten};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{self, Arc, Condvar, Mutex, MutexGuard, WakeFlag, mpsc};
use crate::{Failure, MAX_REQUEST_BYTES, Trouble};

/// Payload bytes that may be pending in memory; beyond that, appends wait (backpressure). The limit
/// is what a fast device keeps in flight, and no more: with 32 MiB, sequential appends were a
/// quarter slower, because payloads were copied into memory that the processor's caches had long
/// evicted.
pub(crate) const PENDING_LIMIT: usize = 4 << 20;

/// Of a segment, one byte in this many is the memory of its checksums: 4 for each 4096.
const CHECKSUMS_SHARE: u64 = 1024;

/// The state guarded by the log's lock. The lock is never held across I/O.
pub(crate) struct LogState {
    pub pipeline: Pipeline,
    pub ring: SegmentRing,
    pub room: RoomShares,
    pub waiters: Waiters,
    /// A replica that FLUSHes wait for.
    pub replica: Option<ReplicaState>,
    pub commit_delay: CommitDelay,
    pub keeper: KeeperState,
    pub clock: LogClock,
    /// See [`LogHistory::horizon`](crate::LogHistory::horizon).
    pub horizon: Commit,
    /// Why the log failed for good.
    pub failure: Option<Trouble>,
    /// A leader is at work; it looks at the log again after its operation.
    pub led: bool,
}

impl LogState {
    /// The state of a log that is being opened.
    pub(crate) fn new(
        pipeline: Pipeline,
        ring: SegmentRing,
        commit_delay: CommitDelay,
        clock: LogClock,
    ) -> Self {
        let keeper = KeeperState {
            // Copy soon what an earlier process left in the log, not only when the log fills up.
            checkpoint: pipeline.unapplied() > 0,
            ..KeeperState::default()
        };
        Self {
            pipeline,
            ring,
            room: RoomShares::default(),
            waiters: Waiters::default(),
            replica: None,
            commit_delay,
            keeper,
            clock,
            horizon: Commit::default(),
            failure: None,
            led: false,
        }
    }

    /// The time of the next batch. No older record has a later time.
    pub(crate) fn next_timestamp(&mut self) -> u64 {
        let stamp = self.clock.next();
        self.ring.note_time(stamp);
        self.horizon.unix_us = self.horizon.unix_us.min(stamp.unix_us);
        stamp.unix_us
    }

    /// From now on, the base images may hold records up to this LSN.
    pub(crate) fn pass_horizon(&mut self, lsn: u64) {
        let there = self.ring.oldest(usize::MAX).into_iter();
        let mut there = there.map(|(_, last)| last).filter(|last| last.lsn <= lsn);
        // The newest segment end at or below it, unless that is older than what is known.
        let newest = there.next_back().unwrap_or(self.horizon);
        let known = if newest.lsn > self.horizon.lsn {
            newest
        } else {
            self.horizon
        };
        self.horizon = Commit { lsn, ..known };
    }

    /// Whether a checkpoint waits for the next batch.
    pub(crate) fn is_draining(&self) -> bool {
        let batched = self.pipeline.batched();
        self.keeper.draining.is_some_and(|lsn| batched < lsn)
    }

    /// Whether the log, its owner or the caller of an order is waiting for the keeper, which then
    /// must not yield the medium.
    pub(crate) fn is_pressing(&self) -> bool {
        self.ring.is_starved() || self.keeper.stop || !self.keeper.orders.is_empty()
    }

    /// Whether the log keeps records that a checkpoint could copy to the base images.
    pub(crate) fn keeps_history(&self) -> bool {
        self.keeper.retain != Retention::Nothing || self.keeper.holds.kept().is_some()
    }

    /// Whether FLUSHes wait for a replica.
    pub(crate) fn awaits_replica(&self) -> bool {
        self.replica.as_ref().is_some_and(ReplicaState::is_sync)
    }

    /// Where the log ends once all that is pending is written.
    pub(crate) fn expected_end(&self) -> u64 {
        self.ring.end() + self.pipeline.bytes() as u64
    }

    /// How many segments must stay for a snapshot, a look or the replica.
    pub(crate) fn held_segments(&self) -> usize {
        self.keeper
            .holds
            .held()
            .map_or(0, |lsn| self.ring.newer(lsn))
    }

    /// In debug builds: panics if the state breaks an invariant.
    pub(crate) fn check(&self, log: &Log) {
        if !cfg!(debug_assertions) || any_planted() || std::thread::panicking() {
            return;
        }
        // Nothing moves any more once the log has failed.
        if log.poisoned.load(Ordering::Acquire) {
            return;
        }
        let (pipeline, ring) = (&self.pipeline, &self.ring);
        let (written, durable) = (pipeline.written(), pipeline.durable());
        pipeline.check();
        ring.check(pipeline.batched());
        self.waiters.check(durable, written, log.most_served == 1);
        let published = log.written.load(Ordering::Acquire);
        assert_eq!(published, written, "the written watermark");
        let mut segments = pipeline.segments();
        assert!(
            segments.all(|segment| ring.live().any(|live| Arc::ptr_eq(live, segment))),
            "a segment is freed before what it holds is durable"
        );
    }

    /// Whether nothing is in flight.
    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.pipeline.writing() == 0 && !self.led
    }
}

/// An open log: its constants, its watermarks, its counters, and the state under its lock.
pub(crate) struct Log {
    pub dir: PathBuf,
    pub uuid: Uuid,
    pub segment_size: u64,
    pub medium: Box<dyn Medium>,
    /// How the leader appends.
    pub appender: Box<dyn Appender>,
    /// The leader builds every batch, not only those that sync.
    pub leader_alone: bool,
    /// How long closing may copy the log to the base images; `None`: as long as it takes.
    pub close_time: Option<Duration>,
    /// See [`StoreOptions::index_memory`](crate::StoreOptions::index_memory).
    pub index_limit: u64,
    /// Most bytes in the spill file of a disk.
    pub spill_limit: Option<u64>,
    /// Most waiters that one group serves: no limit, or 1 without group commit.
    pub most_served: usize,
    /// [`Pipeline::written`], for ports that look without the lock.
    pub written: AtomicU64,
    pub poisoned: AtomicBool,
    /// Ports hold back requests until the pending bytes fall.
    pub held_back: AtomicBool,
    /// Counts the reads of all disks.
    pub reads: AtomicU64,
    pub counters: Counters,
    /// The memory of the segments' checksums.
    pub checksum_memory: Mutex<Vec<MemoryReservation>>,
    /// Where the records after snapshots begin, as far as that was asked for.
    pub positions: PositionCache,
    /// What has changed since snapshots that the base images have moved past.
    pub saved_since: SavedExtentsCache,
    pub state: Mutex<LogState>,
    /// The writer thread sleeps on this.
    pub leader_called: WakeFlag,
    pub keeper_wanted: Condvar,
}

impl Log {
    /// The longest payload that a record can have, in bytes.
    pub(crate) fn max_request_bytes(&self) -> usize {
        MAX_REQUEST_BYTES.min(self.segment_size as usize / 4)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, LogState> {
        match self.state.lock() {
            Ok(state) => state,
            // Already panicking: cleaning up can't make things worse.
            Err(poisoned) if std::thread::panicking() => poisoned.into_inner(),
            // Another thread panicked while holding the lock: a bug, already reported. The state
            // may be half changed, so going on would risk the promises.
            Err(_) => panic!("the log's state was left half changed"),
        }
    }

    /// Promise 5: a failed write or sync of the log is final. Every waiter gets an error, now and
    /// later.
    pub(crate) fn poison(&self, error: &std::io::Error) {
        let mut state = self.lock();
        // Only the first failure counts; it already gave every waiter its error.
        if self.poisoned.load(Ordering::Acquire) {
            return;
        }
        tracing::error!(
            "{}: the log failed ({error}); its disks are read-only until reopened",
            self.dir.display()
        );
        state.failure = Some(Trouble::now(error, true));
        self.refuse(state);
    }

    /// Takes memory of the process's for the checksums of so many segments more.
    ///
    /// # Errors
    /// There is not so much: the bytes that it needs.
    pub(crate) fn reserve_checksums(&self, segments: u32) -> Result<(), u64> {
        let bytes = u64::from(segments) * self.segment_size / CHECKSUMS_SHARE;
        if bytes == 0 {
            return Ok(());
        }
        let memory = MemoryBudget::of_process().reserve(bytes).ok_or(bytes)?;
        let mut own = self.checksum_memory.lock().expect("memory lock");
        own.push(memory);
        Ok(())
    }

    /// The memory limit of extents kept beside the index.
    pub(crate) fn beside_limit(&self) -> ExtentLimit {
        ExtentLimit::beside(&self.counters.beside_index, self.index_limit, &self.dir)
    }

    /// Gives these waiters an error.
    pub(crate) fn refuse_waiters(&self, waiters: Vec<Waiter>) {
        let failed = self.poisoned.load(Ordering::Acquire);
        let waiters = waiters.into_iter();
        let waiters = waiters.filter(|waiter| !is_forgotten(waiter.token, failed));
        deliver(waiters, Err(Failure::Io), None);
    }

    /// Fails every request, waiting or to come; reads go on.
    pub(crate) fn refuse(&self, mut state: MutexGuard<'_, LogState>) {
        self.poisoned.store(true, Ordering::Release);
        let mut waiters = state.waiters.take(|_| true);
        let replica = state.replica.as_mut();
        waiters.extend(replica.map(ReplicaState::take_waiters).unwrap_or_default());
        // Unwritten records stay readable through the index, but never become durable.
        state.pipeline.fail();
        state.ring.drop_pending_summaries();
        drop(state);
        self.refuse_waiters(waiters);
        self.wake_ports();
    }

    /// Ends the reads that the medium has answered, on all ports. A port that nobody polls would
    /// otherwise pin segments for ever.
    pub(crate) fn reap_reads(&self) {
        let ports = self.lock().waiters.ports();
        let reads = ports.iter().filter_map(|port| port.reads.get()?.upgrade());
        reads.for_each(|reads| reads.reap());
    }

    /// Makes all ports, and the leader, look at the log again.
    pub(crate) fn wake_ports(&self) {
        let ports = self.lock().waiters.ports();
        ports.iter().for_each(|port| port.wake());
        self.call_leader();
    }

    /// Makes the leader look at the log again.
    pub(crate) fn call_leader(&self) {
        self.leader_called.set();
    }
}

/// Poisons the log if the thread panics before this is dropped. Nobody else would do what this
/// thread was about to do, and its waiters would wait for ever.
pub(crate) struct PanicGuard<'a> {
    log: &'a Log,
    /// The thread was panicking already: cleaning up after a panic elsewhere does no harm.
    before: bool,
}

impl<'a> PanicGuard<'a> {
    pub(crate) fn new(log: &'a Log) -> Self {
        Self {
            log,
            before: std::thread::panicking(),
        }
    }
}

impl Drop for PanicGuard<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.before {
            let thread = std::thread::current();
            let name = thread.name().unwrap_or("without a name");
            let panicked = format!("its thread {name} has panicked");
            self.log.poison(&std::io::Error::other(panicked));
        }
    }
}

impl Log {
    /// Tells the keeper to close the log. The time limit for closing starts now.
    pub(crate) fn stop_keeper(&self) {
        let mut state = self.lock();
        if !std::mem::replace(&mut state.keeper.stop, true) {
            let time = self.close_time;
            state.keeper.copy_until = time.and_then(|time| sync::now().checked_add(time));
        }
        self.keeper_wanted.notify_all();
    }

    /// Orders the keeper to carry out `task`, and waits until it has.
    ///
    /// # Errors
    /// Those of the task; or the log is being closed.
    pub(crate) fn order(&self, task: KeeperTask) -> error::Result<()> {
        let (answer, answered) = mpsc::channel();
        let mut state = self.lock();
        // The keeper sets `gone` and drops the remaining orders under the same lock, so every order
        // is answered or refused.
        if !state.keeper.gone && !state.keeper.stop {
            state.keeper.orders.push(KeeperOrder { task, answer });
            self.keeper_wanted.notify_all();
        } else {
            drop(answer);
        }
        let gone = self.no_keeper_error(&state);
        drop(state);
        answered.recv().unwrap_or(Err(gone))
    }

    /// The error for a caller whom the closing keeper can't answer.
    pub(crate) fn closed(&self) -> Error {
        let dir = self.dir.display();
        Error::new(ErrorKind::Io, format!("{dir}: the log is being closed"))
    }

    /// The error for a caller that finds no keeper.
    pub(crate) fn no_keeper_error(&self, state: &LogState) -> Error {
        let reading = state.keeper.gone && !state.keeper.stop;
        let why = if reading {
            "open for reading only"
        } else {
            "being closed"
        };
        let dir = self.dir.display();
        Error::new(ErrorKind::Io, format!("{dir}: the log is {why}"))
    }
}
