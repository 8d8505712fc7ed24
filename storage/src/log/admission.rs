//! Whether a record may be appended, and the cause if it may not.
//!
//! ```text
//!   Committer::append ──▶ admit ─────────▶ Go; Wait(cause): the port parks the request; Fail(cause)
//!   ctl stats, metrics ─▶ condition_of ──▶ the cause that hinders each write, and its trouble
//!   the keeper, exports ▶ room_need ─────▶ None, Soon or Now
//! ```
//! Whoever ends the cause of a wait wakes the ports: the log's leader when a group ends, the keeper
//! when it has made room or has restored a disk, the replica when it has acknowledged more.

use crate::log::disk_state::DiskState;
use crate::log::pipeline::Modification;
use crate::log::replica::ReplicaState;
use crate::log::room::shared_memory;
use crate::log::state::{Log, LogState, PENDING_LIMIT};
use crate::log::waiters::Waiter;
use crate::sync::atomic::Ordering;
use crate::{Condition, StallCause};

/// The answer to a record that is to be appended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    Go,
    /// Its port is woken once that is over.
    Wait(StallCause),
    Fail(StallCause),
}

impl Admission {
    /// Of a write that meets these causes, each with whether it fails the write. The first one that
    /// does counts before those for which the write waits.
    fn of(causes: impl Iterator<Item = (StallCause, bool)>) -> Self {
        let mut admission = Self::Go;
        for (cause, fails) in causes {
            if fails {
                return Self::Fail(cause);
            }
            if admission == Self::Go {
                admission = Self::Wait(cause);
            }
        }
        admission
    }
}

/// How much the log needs room that only a copy to the base images can make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RoomNeed {
    None,
    /// Writers will wait for it soon.
    Soon,
    /// Writers are waiting for it.
    Now,
}

impl Log {
    /// Whether this record of a disk may be appended.
    pub(crate) fn admit(
        &self,
        state: &mut LogState,
        disk: &DiskState,
        change: &Modification,
    ) -> Admission {
        state.room.want(disk.id);
        // Half a segment at most: all pending records must fit the ring's last segment, which is
        // reserved for the keeper.
        let most = PENDING_LIMIT.min(self.segment_size as usize / 2);
        let met = Obstacles {
            pending: state.pipeline.bytes() >= most,
            index: self.index_is_full(),
            spill: disk.spill_full.load(Ordering::Relaxed),
            // A mark is small, and its caller can't do anything else meanwhile.
            replica: change.mark.is_none() && state.is_backlogged(),
            restore: disk.rewinding.load(Ordering::Relaxed),
            // Once the log is closing, no record may follow the ones that the final checkpoint
            // copies.
            closing: state.keeper.stop,
            detached: disk.detached.load(Ordering::Relaxed),
        };
        if met != Obstacles::default() {
            return self.admit_hindered(state, met);
        }
        if self.gives_way(state, disk.id, change.pending_bytes(), most) {
            Admission::Wait(StallCause::Share)
        } else {
            Admission::Go
        }
    }

    #[cold]
    fn admit_hindered(&self, state: &LogState, met: Obstacles) -> Admission {
        let fails = |cause| match cause {
            StallCause::LogFull | StallCause::PendingFull => state.is_stuck(),
            StallCause::IndexFull => state.keeper.failed || state.refuses_backlog(),
            StallCause::SpillFull => !state.keeper.pauses,
            StallCause::Replica => state.refuses_backlog(),
            StallCause::Closing => met.detached,
            StallCause::Restore | StallCause::Share => false,
        };
        let causes = met.causes(state).map(|cause| (cause, fails(cause)));
        let admission = Admission::of(causes);
        // The others wake the ports themselves.
        if let Admission::Wait(cause) = admission
            && !matches!(cause, StallCause::SpillFull | StallCause::Replica)
        {
            self.held_back.store(true, Ordering::Relaxed);
        }
        admission
    }

    /// Whether a disk's next record, of `bytes`, waits because the disk has used more than its part
    /// of the log's room. `most`: how many bytes may be pending.
    fn gives_way(&self, state: &mut LogState, disk_id: u32, bytes: usize, most: usize) -> bool {
        let has_memory = state.pipeline.bytes() < shared_memory(most);
        let more = state.pipeline.queued_bytes() + bytes;
        let has_room = state.ring.leaves_reserve(more as u64);
        // If no room can be made, who wants some is to fail, not to wait.
        let goes_on = state.keeper.failed || has_memory && has_room;
        if goes_on || !state.room.is_beyond(disk_id) {
            return false;
        }
        if !has_memory {
            self.held_back.store(true, Ordering::Relaxed);
        }
        if !has_room {
            state.ring.await_room();
        }
        true
    }

    /// The condition of one of the log's disks: what has failed, with what that means for a write;
    /// else what a write waits for that may take long.
    pub(crate) fn condition_of(&self, disk: &DiskState) -> Condition {
        let of_disk = disk.condition();
        // A thread that panicked with the lock may have left other fields half changed, but not
        // these.
        let state = self.state.lock();
        let state = state.unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(failure) = &state.failure {
            return Condition::ReadOnly(failure.clone());
        }
        let trouble = match &state.keeper.trouble {
            Condition::Ok => of_disk,
            trouble => trouble.clone(),
        };
        match (trouble, self.stall(&state, disk)) {
            (Condition::Ok, Admission::Go) => Condition::Ok,
            (Condition::Ok, Admission::Wait(cause) | Admission::Fail(cause)) => {
                Condition::Stalled(cause)
            }
            (trouble, stall) => {
                let fails = matches!(stall, Admission::Fail(_));
                trouble.with_writes(fails, matches!(stall, Admission::Wait(_)))
            }
        }
    }

    /// What each write of a disk meets that needs room. As [`admit`](Self::admit), but an attempt of
    /// the keeper's counts as failed until the next one has ended.
    fn stall(&self, state: &LogState, disk: &DiskState) -> Admission {
        let (keeper, ring) = (&state.keeper, &state.ring);
        let troubled = keeper.trouble != Condition::Ok;
        let no_room_comes = troubled && !keeper.pauses_for_space();
        let spill = disk.spill_full.load(Ordering::Relaxed);
        let full = ring.is_full() || !troubled && ring.holds_back();
        let causes = [
            (spill, StallCause::SpillFull, !keeper.pauses),
            (full, StallCause::LogFull, no_room_comes),
            (self.index_is_full(), StallCause::IndexFull, no_room_comes),
            (
                state.is_backlogged(),
                StallCause::Replica,
                state.refuses_backlog(),
            ),
        ];
        let met = causes.into_iter().filter(|(met, ..)| *met);
        Admission::of(met.map(|(_, cause, fails)| (cause, fails)))
    }

    /// Whether the index has used so much of its memory that the oldest extents should go.
    pub(crate) fn index_is_heavy(&self) -> bool {
        self.counters.index.bytes() >= self.index_limit / 2
    }

    /// Whether the index has no room, so that writers wait.
    pub(crate) fn index_is_full(&self) -> bool {
        self.counters.index.bytes() >= self.index_limit
    }

    /// Whether the log needs room.
    pub(crate) fn room_need(&self, state: &LogState) -> RoomNeed {
        if state.ring.is_full() || self.index_is_full() {
            RoomNeed::Now
        } else if state.is_pressed() || self.index_is_heavy() {
            RoomNeed::Soon
        } else {
            RoomNeed::None
        }
    }

    /// Less has to stay in the log: makes the keeper look whether segments have become free, or a
    /// stuck log has room.
    pub(crate) fn call_keeper(&self, state: &mut LogState) {
        let needed = self.room_need(state) != RoomNeed::None;
        state.keeper.checkpoint |= needed || state.needs_room();
        self.keeper_wanted.notify_one();
    }

    /// Fails the waiters that a stuck ring cannot serve, and wakes all ports.
    pub(crate) fn refuse_stuck(&self) {
        let mut state = self.lock();
        let stuck = state.take_stuck();
        drop(state);
        self.refuse_waiters(stuck);
        self.wake_ports();
    }

    /// Fails requests that wait for space, now and from now on, as without
    /// [`FullLogPolicy::Pause`](crate::catalog::options::FullLogPolicy).
    pub(crate) fn end_pauses(&self) {
        let mut state = self.lock();
        let paused_for_space = state.keeper.pauses_for_space();
        let paused = std::mem::take(&mut state.keeper.pauses);
        state.keeper.failed |= paused_for_space;
        drop(state);
        if paused {
            self.refuse_stuck();
        }
        self.limit_waits();
    }
}

/// What a record that is to be appended meets.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Obstacles {
    pending: bool,
    index: bool,
    spill: bool,
    replica: bool,
    restore: bool,
    closing: bool,
    detached: bool,
}

impl Obstacles {
    fn causes(self, state: &LogState) -> impl Iterator<Item = StallCause> {
        let no_room = state.ring.holds_back() || state.ring.is_starved();
        let causes = [
            (self.pending && no_room, StallCause::LogFull),
            (self.pending && !no_room, StallCause::PendingFull),
            (self.index, StallCause::IndexFull),
            (self.spill, StallCause::SpillFull),
            (self.replica, StallCause::Replica),
            (self.restore, StallCause::Restore),
            (self.closing || self.detached, StallCause::Closing),
        ];
        causes
            .into_iter()
            .filter_map(|(met, cause)| met.then_some(cause))
    }
}

impl LogState {
    /// Whether writes wait, because the log's replica lacks as much as it may.
    pub(crate) fn is_backlogged(&self) -> bool {
        let (end, room) = (self.expected_end(), self.ring.room_for_backlog());
        let replica = self.replica.as_ref();
        replica.is_some_and(|replica| replica.holds_back(end, room))
    }

    /// Whether writes fail that would wait for the replica.
    pub(crate) fn refuses_backlog(&self) -> bool {
        self.replica
            .as_ref()
            .is_some_and(ReplicaState::refuses_writes)
    }

    /// Whether a log with history needs the room of its oldest segments.
    pub(crate) fn is_pressed(&self) -> bool {
        self.ring.is_starved() || self.ring.is_running_out(self.keeper.retain)
    }

    /// Whether the keeper should free segments, now that another one is in use.
    pub(crate) fn needs_room(&self) -> bool {
        self.keeps_history() || self.ring.is_half_used()
    }

    /// Whether the ring is full and can't be emptied, or not before the replica has more, and nobody
    /// may wait for that now. Until that changes, requests that need room fail.
    pub(crate) fn is_stuck(&self) -> bool {
        let newest = self.pipeline.appended();
        let refuses =
            || self.refuses_backlog() && self.keeper.holds.held_for_replica(newest).is_some();
        self.ring.is_starved() && (self.keeper.failed || refuses())
    }

    /// If the ring is stuck, takes the waiters for records that are in no batch yet. The records
    /// stay, and become durable at some unknown time.
    pub(crate) fn take_stuck(&mut self) -> Vec<Waiter> {
        let batched = self.pipeline.batched();
        if self.is_stuck() {
            self.waiters.take(|waiter| waiter.lsn > batched)
        } else {
            Vec::new()
        }
    }
}
