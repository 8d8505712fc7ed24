//! Synchronous replication: a FLUSH completes once its records are durable here and in a replica.
//!
//! ```text
//!   appended ──▶ written ──▶ durable here ──▶ acknowledged by the replica: the FLUSH completes
//! ```
//! Groups share the round trip as they share a sync: one acknowledgement completes every FLUSH that
//! it covers. Only requests of ports wait for the replica; the keeper does not.

use crate::Failure;
use crate::log::state::Log;
use crate::log::waiters::{Mailbox, Waiter, deliver};
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, Weak};

/// What the owner of a replica is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplicaCall {
    /// A FLUSH begins to wait.
    Waits,
    /// Somebody waits for all requests to end, for instance to close a disk. If FLUSHes still wait
    /// after a few seconds, [fail](SyncReplica::fail_waiting) them.
    Drains,
}

type Owner = dyn Fn(ReplicaCall) + Send + Sync;

/// What a log knows of its replica.
pub(crate) struct ReplicaState {
    owner: Arc<Owner>,
    /// The replica has every record up to this LSN.
    acknowledged: u64,
    /// A FLUSH waits for this LSN at least: an earlier process may have written up to here, or a
    /// disk that has come back.
    floor: u64,
    /// No acknowledgement will come any more.
    lost: bool,
    /// Waiters whose records are durable here, and perhaps not there.
    waiters: Vec<Waiter>,
}

impl ReplicaState {
    fn must_wait(&self, waiter: &Waiter) -> bool {
        waiter.lsn.max(self.floor) > self.acknowledged && !waiter.mailbox.local
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

    /// Removes and returns all waiters.
    pub(crate) fn take_waiters(&mut self) -> Vec<Waiter> {
        std::mem::take(&mut self.waiters)
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
        if replica.lost || self.poisoned.load(Ordering::Acquire) {
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
        let owner = replica.owner.clone();
        drop(state);
        owner(ReplicaCall::Waits);
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

/// A replica of a log that a FLUSH waits for, see
/// [`Disk::replicate`](crate::Disk::replicate). Dropping it is as [`lose`](Self::lose). It
/// does not keep the log open.
pub struct SyncReplica(Weak<Log>);

impl SyncReplica {
    /// Makes the FLUSHes of a log wait for a replica. `None`: they do already.
    pub(crate) fn of(log: &Arc<Log>, owner: Arc<Owner>) -> Option<Self> {
        let mut state = log.lock();
        if state.replica.is_some() {
            return None;
        }
        state.replica = Some(ReplicaState {
            owner,
            acknowledged: 0,
            floor: state.pipeline.durable(),
            lost: false,
            waiters: Vec::new(),
        });
        Some(Self(Arc::downgrade(log)))
    }

    /// Looks at the state, or changes it. A log that is closed has nothing to look at.
    fn with<T: Default>(&self, look: impl FnOnce(&mut ReplicaState) -> T) -> T {
        let log = self.0.upgrade();
        let state = log.as_ref().map(|log| log.lock());
        let looked = state.and_then(|mut state| state.replica.as_mut().map(look));
        looked.unwrap_or_default()
    }

    /// The replica has every record up to `lsn`, and keeps them when it loses power: every FLUSH
    /// of these records completes. A lower LSN than an earlier one changes nothing.
    pub fn acknowledge(&self, lsn: u64) {
        let served: Vec<_> = self.with(|replica| {
            replica.acknowledged = replica.acknowledged.max(lsn);
            let acknowledged = replica.acknowledged;
            let covered = |waiter: &mut Waiter| waiter.lsn <= acknowledged;
            replica.waiters.extract_if(.., covered).collect()
        });
        deliver(served.into_iter(), Ok(()), None);
    }

    /// Fails the FLUSHes that wait now.
    pub fn fail_waiting(&self) {
        let waiters = self.with(ReplicaState::take_waiters);
        deliver(waiters.into_iter(), Err(Failure::Io), None);
    }

    /// The replica is gone for good: each FLUSH of records that it has not acknowledged fails, now
    /// and later. Reads go on, and so do writes without a FLUSH.
    pub fn lose(&self) {
        self.with(|replica| replica.lost = true);
        self.fail_waiting();
    }

    /// The newest record that the replica has acknowledged.
    pub fn acknowledged(&self) -> u64 {
        self.with(|replica| replica.acknowledged)
    }

    /// The newest record that a request waits for; `None`: none waits.
    pub fn awaited(&self) -> Option<u64> {
        self.with(|replica| replica.waiters.iter().map(|waiter| waiter.lsn).max())
    }

    /// Requests that wait for the replica.
    pub fn waiting(&self) -> usize {
        self.with(|replica| replica.waiters.len())
    }
}

impl Drop for SyncReplica {
    fn drop(&mut self) {
        self.lose();
    }
}
