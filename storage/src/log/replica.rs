//! Replication: how far a replica of the log is, and who waits for it.
//!
//! ```text
//!   appended ──▶ written ──▶ durable here ──▶ acknowledged by the replica: the FLUSH completes
//!   └────────────── backlog: writes wait while it is at its limit ──┘
//! ```
//! Groups share the round trip as they share a sync: one acknowledgement completes every FLUSH that
//! it covers. Only requests of ports wait for the replica; the keeper does not.

use std::collections::VecDeque;

use crate::Failure;
use crate::catalog::retention::Retention;
use crate::error::{Error, ErrorKind, Result, invalid};
use crate::log::state::{Log, LogState};
use crate::log::waiters::{Mailbox, Waiter, deliver};
use crate::size::show_size;
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, MutexGuard, Weak};

/// What the owner of a replica is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaCall {
    /// A request begins to wait until the replica has the records up to this LSN, which are durable
    /// here. It may be told more than once.
    Waits(u64),
    /// Somebody waits for all requests to end, for instance to close a disk. If requests still wait
    /// for the replica after a few seconds, [end that](LogReplica::end_waits).
    Drains,
}

/// What waits for a replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplicaOptions {
    /// A FLUSH of any disk of the log completes only once the replica has its records; so does a
    /// write with FUA, or of a write-through disk.
    pub sync: bool,
    /// Writes wait while the replica lacks this many bytes of log, headers included, or as many as
    /// the log has room for. The log keeps what the replica lacks, until the log is closed. At
    /// least 1 MiB; the log must [keep history](Retention).
    pub limit: Option<u64>,
}

/// Most places in the log that are known of a backlog.
const MOST_MARKS: usize = 256;

/// How much of the log the replica lacks, as far as is known: from the newest mark that it has
/// acknowledged.
#[derive(Default)]
struct Backlog {
    /// LSNs, and where in the log the batches end that they are the last ones of. Oldest first.
    marks: VecDeque<(u64, u64)>,
    /// Where the log begins, by the count of [`SegmentRing::end`](super::ring::SegmentRing::end),
    /// which counts from the opening.
    before: u64,
    /// The replica has everything up to here.
    kept: u64,
}

impl Backlog {
    fn note_batch(&mut self, lsn: u64, end: u64) {
        self.marks.push_back((lsn, self.before + end));
        if self.marks.len() > MOST_MARKS {
            let mut number = 0;
            self.marks.retain(|_| {
                number += 1;
                number % 2 == 1
            });
        }
    }

    fn acknowledge(&mut self, lsn: u64) {
        while let Some((_, end)) = self.marks.pop_front_if(|mark| mark.0 <= lsn) {
            self.kept = end;
        }
    }

    fn bytes(&self, end: u64) -> u64 {
        self.before + end - self.kept
    }
}

type Owner = dyn Fn(ReplicaCall) + Send + Sync;

/// What a log knows of its replica.
pub(crate) struct ReplicaState {
    owner: Arc<Owner>,
    options: ReplicaOptions,
    backlog: Backlog,
    /// Requests fail that would wait.
    refuses: bool,
    /// The replica has every record up to this LSN.
    acknowledged: u64,
    /// A FLUSH waits for this LSN at least: an earlier process may have written up to here, or a
    /// disk that has come back.
    floor: u64,
    /// No acknowledgement is expected.
    lost: bool,
    /// Waiters whose records are durable here, and perhaps not there.
    waiters: Vec<Waiter>,
}

impl ReplicaState {
    fn must_wait(&self, waiter: &Waiter) -> bool {
        waiter.lsn.max(self.floor) > self.acknowledged && !waiter.mailbox.local
    }

    /// Whether FLUSHes wait for it.
    pub(crate) fn is_sync(&self) -> bool {
        self.options.sync
    }

    /// A batch is about to be written. `end`: where the log then ends.
    pub(crate) fn note_batch(&mut self, lsn: u64, end: u64) {
        self.backlog.note_batch(lsn, end);
    }

    /// Whether a write waits. `end`: where the log ends once all that is pending is written.
    /// `room`: the most bytes of log that nobody needs but the replica.
    pub(crate) fn holds_back(&self, end: u64, room: u64) -> bool {
        let at_limit = |limit: u64| self.backlog.bytes(end) >= limit.min(room);
        !self.lost && self.options.limit.is_some_and(at_limit)
    }

    /// The log keeps everything after this LSN for the replica. `None`: nothing.
    fn needs(&self) -> Option<u64> {
        let limited = !self.lost && self.options.limit.is_some();
        limited.then_some(self.acknowledged)
    }

    /// Whether writes fail that would wait for the replica.
    pub(crate) fn refuses_writes(&self) -> bool {
        self.refuses && !self.lost && self.options.limit.is_some()
    }

    /// Refuses a retention with which the log can't keep what the replica lacks.
    pub(crate) fn check_retention(&self, retain: Retention) -> Result<()> {
        if self.lost {
            return Ok(());
        }
        self.options.check(retain)
    }

    /// From now on, a FLUSH waits for this LSN at least.
    pub(crate) fn raise_floor(&mut self, lsn: u64) {
        self.floor = self.floor.max(lsn);
    }

    /// Forgets the waiters of a port that is going away.
    pub(crate) fn remove_port(&mut self, port: &Arc<Mailbox>) {
        self.waiters
            .retain(|waiter| !Arc::ptr_eq(&waiter.mailbox, port));
    }

    /// The newest record that a request waits for.
    fn newest_waiter(&self) -> Option<u64> {
        self.waiters.iter().map(|waiter| waiter.lsn).max()
    }

    /// Removes and returns all waiters.
    pub(crate) fn take_waiters(&mut self) -> Vec<Waiter> {
        std::mem::take(&mut self.waiters)
    }
}

impl ReplicaOptions {
    /// The smallest [`limit`](Self::limit).
    const LEAST_LIMIT: u64 = 1 << 20;

    fn check(&self, retain: Retention) -> Result<()> {
        let Some(limit) = self.limit else {
            return Ok(());
        };
        if limit < Self::LEAST_LIMIT {
            return Err(invalid(format!(
                "a replica that may lack {limit} bytes of log: give it at least {}",
                show_size(Self::LEAST_LIMIT)
            )));
        }
        if retain == Retention::Nothing {
            return Err(invalid(
                "with retain=off a log that is closed drops what its replica, or archive, lacks, so \
                 that can't be limited; set retain=1h, for example"
                    .to_owned(),
            ));
        }
        Ok(())
    }
}

impl LogState {
    /// The log keeps what its replica needs.
    fn keep_for_replica(&mut self) {
        let needs = self.replica.as_ref().and_then(ReplicaState::needs);
        self.keeper.holds.set_replica(needs);
    }
}

impl Log {
    /// Takes the waiters that the replica has not acknowledged out of the first `count` of
    /// `served`, whose records are durable here. They wait for the replica.
    pub(crate) fn hold_for_replica(&self, served: &mut Vec<Waiter>, count: usize) {
        let mut state = self.lock();
        let Some(replica) = &mut state.replica else {
            return;
        };
        let held = served.extract_if(..count, |waiter| replica.must_wait(waiter));
        let held: Vec<_> = held.collect();
        if held.is_empty() {
            return;
        }
        // A log that has failed since has failed its waiters already.
        if replica.lost || replica.refuses || self.poisoned.load(Ordering::Acquire) {
            drop(state);
            self.refuse_waiters(held);
            return;
        }
        let floor = replica.floor;
        replica
            .waiters
            .extend(held.into_iter().map(|waiter| Waiter {
                lsn: waiter.lsn.max(floor),
                ..waiter
            }));
        let (owner, newest) = (replica.owner.clone(), replica.newest_waiter());
        drop(state);
        newest
            .into_iter()
            .for_each(|lsn| owner(ReplicaCall::Waits(lsn)));
    }

    /// Tells the owner of the replica that a write waits for it.
    pub(crate) fn tell_of_backlog(&self, state: MutexGuard<'_, LogState>) {
        let durable = state.pipeline.durable();
        let owner = state.replica.as_ref().map(|replica| replica.owner.clone());
        drop(state);
        if let Some(owner) = owner {
            owner(ReplicaCall::Waits(durable));
        }
    }

    /// Lets requests wait for the replica for some seconds more at most.
    pub(crate) fn limit_waits(&self) {
        let state = self.lock();
        let owner = state.replica.as_ref().map(|replica| replica.owner.clone());
        drop(state);
        if let Some(owner) = owner {
            owner(ReplicaCall::Drains);
        }
    }
}

/// A replica of a log, see [`Disk::replicate`](crate::Disk::replicate). Dropping it is as
/// [`lose`](Self::lose). It does not keep the log open.
pub struct LogReplica(Weak<Log>);

impl LogReplica {
    /// Tells a log of its replica.
    pub(crate) fn of(log: &Arc<Log>, options: ReplicaOptions, owner: Arc<Owner>) -> Result<Self> {
        let mut state = log.lock();
        let dir = log.dir.display();
        if state.replica.is_some() {
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                format!("{dir}: the log has a replica"),
            ));
        }
        let checked = options.check(state.keeper.retain);
        checked.map_err(|error| error.of_file(&log.dir))?;
        let mut backlog = Backlog {
            // What is in the log already counts, until the replica says that it has it.
            before: state.ring.live_bytes(),
            ..Backlog::default()
        };
        backlog.note_batch(state.pipeline.appended(), state.ring.end());
        // A replica lacks nothing of an empty log.
        backlog.acknowledge(0);
        state.replica = Some(ReplicaState {
            owner,
            options,
            backlog,
            refuses: false,
            acknowledged: 0,
            floor: state.pipeline.durable(),
            lost: false,
            waiters: Vec::new(),
        });
        state.keep_for_replica();
        Ok(Self(Arc::downgrade(log)))
    }

    /// Looks at the state, or changes it. A log that is closed has nothing to look at.
    fn with<T: Default>(&self, look: impl FnOnce(&mut ReplicaState) -> T) -> T {
        let log = self.0.upgrade();
        let state = log.as_ref().map(|log| log.lock());
        let looked = state.and_then(|mut state| state.replica.as_mut().map(look));
        looked.unwrap_or_default()
    }

    /// The replica has every record up to `lsn`, and keeps them when it loses power: every FLUSH
    /// of these records completes. A lower LSN than an earlier one completes none. Requests may
    /// wait for a replica again that was [lost](Self::lose).
    pub fn acknowledge(&self, lsn: u64) {
        let served: Vec<_> = self.with(|replica| {
            replica.lost = false;
            replica.acknowledged = replica.acknowledged.max(lsn);
            let acknowledged = replica.acknowledged;
            replica.backlog.acknowledge(acknowledged);
            let covered = |waiter: &mut Waiter| waiter.lsn <= acknowledged;
            replica.waiters.extract_if(.., covered).collect()
        });
        deliver(served.into_iter(), Ok(()), None);
        self.wake_writers();
    }

    /// Fails the requests that wait for the replica, now and until they may
    /// [wait again](Self::wait_again).
    pub fn end_waits(&self) {
        let waiters = self.with(|replica| {
            replica.refuses = true;
            replica.take_waiters()
        });
        deliver(waiters.into_iter(), Err(Failure::Io), None);
        if let Some(log) = self.0.upgrade() {
            log.refuse_stuck();
        }
    }

    /// Requests may wait again.
    pub fn wait_again(&self) {
        self.with(|replica| replica.refuses = false);
    }

    /// The replica is gone, or can't get what it lacks. With [`sync`](ReplicaOptions::sync), each
    /// FLUSH of records that it has not acknowledged fails, now and later. Reads and writes go on,
    /// with no limit, in another segment, and the log keeps nothing for the replica. The next
    /// [acknowledgement](Self::acknowledge), if one ever comes, ends that.
    pub fn lose(&self) {
        let waiters = self.with(|replica| {
            replica.lost = true;
            replica.take_waiters()
        });
        deliver(waiters.into_iter(), Err(Failure::Io), None);
        if let Some(log) = self.0.upgrade() {
            log.lock().ring.leave_tail();
        }
        self.wake_writers();
    }

    /// What the log keeps for the replica has changed: lets writes that waited try again, and the
    /// keeper make room.
    fn wake_writers(&self) {
        let Some(log) = self.0.upgrade() else {
            return;
        };
        let mut state = log.lock();
        let limit = state
            .replica
            .as_ref()
            .and_then(|replica| replica.options.limit);
        if limit.is_none() {
            return;
        }
        state.keep_for_replica();
        log.call_keeper(&mut state);
        drop(state);
        log.wake_ports();
    }

    /// Bytes of log, headers included, that the replica lacks. What was in the log before it had a
    /// replica counts until that is acknowledged as a whole. `None`: the log is closed.
    pub fn backlog_bytes(&self) -> Option<u64> {
        let log = self.0.upgrade()?;
        let state = log.lock();
        let end = state.expected_end();
        let replica = state.replica.as_ref()?;
        Some(replica.backlog.bytes(end))
    }

    /// Whether writes wait for the replica: it lacks as much as it may, or what it lacks keeps the
    /// log from making room.
    pub fn holds_back(&self) -> bool {
        let Some(log) = self.0.upgrade() else {
            return false;
        };
        let state = log.lock();
        let newest = state.pipeline.appended();
        let holds = state.keeper.holds.held_for_replica(newest).is_some();
        state.is_backlogged() || holds && (log.index_is_full() || state.ring.is_starved())
    }

    /// The newest record that the replica has acknowledged.
    pub fn acknowledged(&self) -> u64 {
        self.with(|replica| replica.acknowledged)
    }

    /// The newest record that a request waits for; `None`: none waits.
    pub fn awaited(&self) -> Option<u64> {
        self.with(|replica| replica.newest_waiter())
    }

    /// Requests that wait for the replica.
    pub fn waiting(&self) -> usize {
        self.with(|replica| replica.waiters.len())
    }
}

impl Drop for LogReplica {
    fn drop(&mut self) {
        self.lose();
    }
}
