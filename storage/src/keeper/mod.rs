//! The log's housekeeper: one thread that makes segments ready before they are needed, and does
//! checkpoints. Its states are those of [`machine`](crate::keeper::machine).
//!
//! A log with history [folds](fold) its oldest segments only.

pub(crate) mod checkpoint;
mod close;
mod copy_back;
mod fold;
mod machine;
mod members;
mod orders;
mod rewind;
pub(crate) mod saved_file;
mod saving;
mod troubles;

use std::collections::BTreeMap;
use std::time::Duration;

use crate::catalog::control::ControlFile;
use crate::checkpoint::copy::UnansweredIo;
use crate::error::{Error, ErrorKind, Result};
use crate::format::Control;
use crate::keeper::copy_back::CopyBack;
use crate::keeper::machine::CopyPhase;
use crate::keeper::saved_file::SavedFileWriter;
use crate::keeper::troubles::Troubles;
use crate::log::admission::RoomNeed;
use crate::log::disk_state::DiskState;
use crate::log::group_commit::{Committer, Leader};
use crate::log::state::{Log, LogState};
use crate::medium::cost::MediumCost;
use crate::sync::atomic::Ordering;
use crate::sync::{self, Arc};

/// How often the keeper checks whether an export that keeps it from making room gives way.
const EXPORT_CHECK: Duration = Duration::from_millis(100);
/// Pause before a failed checkpoint is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// A disk whose image is getting a new generation, and two parts that the checkpoint writes to it,
/// by byte offset and length.
type NewGeneration = (Arc<DiskState>, [Option<(u64, u64)>; 2]);

/// See the module's documentation.
pub(crate) struct Keeper {
    pub(crate) log: Arc<Log>,
    pub(crate) disks: Vec<Arc<DiskState>>,
    pub(crate) control: ControlFile,
    committer: Committer,
    leader: Leader,
    /// The LSN of frozen indexes left by recovery or by a failed checkpoint.
    pub(crate) frozen_at: Option<u64>,
    /// What operations cost the medium, once measured.
    cost: Option<MediumCost>,
    /// The `copying_lsn` in both slots of the control file, if this keeper wrote it.
    pub(super) copying: Option<u64>,
    /// The disks whose images get a new generation in this checkpoint, and parts that it writes.
    pub(super) new_generations: Vec<NewGeneration>,
    /// What it is doing.
    phase: CopyPhase,
    /// The saved files that this keeper's copies add to.
    pub(super) saving: Option<SavedFileWriter>,
    /// The LSN of the snapshot whose saved records this keeper has made durable, and how many there
    /// are.
    pub(super) saved: (u64, u32),
    /// What is being copied back from spill files, by disk number.
    pub(super) copies_back: BTreeMap<u32, CopyBack>,
    /// I/O on images that copies gave up waiting for.
    pub(super) unanswered: Vec<UnansweredIo>,
    /// It was reported that the log has no room for all the history it should keep.
    pub(super) shortened: bool,
    /// It was reported that history which must stay has almost filled the log.
    pub(super) crowded: bool,
}
impl Keeper {
    /// `frozen_at`: the last LSN in frozen indexes left by recovery, if there are any.
    pub(crate) fn new(
        log: Arc<Log>,
        disks: Vec<Arc<DiskState>>,
        control: ControlFile,
        frozen_at: Option<u64>,
    ) -> Result<Self> {
        let committer = Committer::of_keeper(log.clone())
            .map_err(|e| Error::io("open the log", &log.dir, e))?;
        Ok(Self {
            leader: Leader::new(log.clone(), None),
            log,
            disks,
            control,
            committer,
            frozen_at,
            cost: None,
            copying: None,
            new_generations: Vec::new(),
            phase: CopyPhase::Idle,
            saving: None,
            saved: (0, 0),
            copies_back: BTreeMap::new(),
            unanswered: Vec::new(),
            shortened: false,
            crowded: false,
        })
    }

    /// The thread's body. When told to stop, it closes the log and returns.
    pub(crate) fn run(mut self) -> Result<()> {
        let mut troubles = Troubles::default();
        let mut paused = false;
        self.log.prepare_caches();
        loop {
            if self.wait(&mut paused) {
                let closed = self.close();
                // The keeper is going away and can make no more room for a port that is still open.
                self.log.refuse(self.log.lock());
                return closed.map(drop);
            }
            self.serve_orders();
            self.end_overdue_holds();
            // A failed checkpoint waits for its retry. A segment file that is needed is made all
            // the same.
            let done = if paused {
                // This may make room.
                self.copy_spills_back();
                self.log.preallocate_segment(false, || {})
            } else {
                self.step(false)
            };
            // What an export held up was not tried.
            let partly = paused || self.log.lock().keeper.holds.all_end_soon();
            if let Some(line) = troubles.report(&self.log, &done, partly) {
                tracing::error!("{line}");
            }
            paused |= done.is_err();
            if self.log.lock().ring.has_readers() {
                // A reader holds a segment only for one read, so look again soon.
                self.pause_and_reclaim();
            }
        }
    }

    /// How much the log needs room that an export or a reader keeps it from making.
    fn need_beside_yielding(&self, state: &LogState) -> RoomNeed {
        if state.keeper.holds.has_yielding() {
            self.log.room_need(state)
        } else {
            RoomNeed::None
        }
    }

    /// Ends the holds of exports and readers that should have given way by now.
    pub(crate) fn end_overdue_holds(&self) {
        let state = self.log.lock();
        let need = self.need_beside_yielding(&state);
        if need == RoomNeed::None {
            return;
        }
        let holds = state.keeper.yielding();
        drop(state);
        holds.iter().for_each(|hold| hold.end_if_overdue(need));
    }

    /// Ends the holds of readers, because files that they read are about to change.
    pub(crate) fn end_readings(&self) {
        let holds = self.log.lock().keeper.yielding();
        holds.iter().for_each(|hold| hold.end_if_reader());
    }

    /// Gives readers time to end, then reclaims the segments that they held.
    pub(crate) fn pause_and_reclaim(&self) {
        sync::sleep(Duration::from_millis(1));
        self.reclaim();
    }

    /// Sleeps until there is work. Returns whether the keeper should stop. `paused`: an attempt has
    /// just failed; cleared once the next one may be made.
    fn wait(&self, paused: &mut bool) -> bool {
        let urgent = |state: &LogState| {
            let keeper = &state.keeper;
            keeper.stop || !keeper.orders.is_empty() || state.ring.is_short()
        };
        let idle = |state: &LogState| {
            !urgent(state) && !state.keeper.checkpoint && !state.ring.has_readers()
        };
        let mut state = self.log.lock();
        let wanted = &self.log.keeper_wanted;
        if *paused {
            let lock = &self.log.state;
            state = sync::wait_timeout_while(wanted, lock, state, RETRY, |state| !urgent(state));
            *paused = urgent(&state);
        } else if self.has_spills() || !self.unanswered.is_empty() {
            let (lock, pause) = (&self.log.state, self.until_copy_back());
            state = sync::wait_timeout_while(wanted, lock, state, pause, |state| idle(state));
        } else {
            while idle(&state) && self.need_beside_yielding(&state) == RoomNeed::None {
                state = wanted.wait(state).expect("log state lock");
            }
            if idle(&state) {
                let lock = &self.log.state;
                state = sync::wait_timeout_while(wanted, lock, state, EXPORT_CHECK, |s| idle(s));
            }
        }
        state.keeper.stop
    }

    /// Does the work that is due. `forced`: checkpoints even if no checkpoint is due.
    ///
    /// # Errors
    /// If a segment can't be made or a checkpoint fails. Nothing is lost; the work stays due.
    pub(crate) fn step(&mut self, forced: bool) -> Result<()> {
        self.reclaim();
        let preallocated = self.log.preallocate_segment(false, || {});
        // Cleared before the checkpoint starts: a request that comes while it runs asks for another
        // one.
        let mut state = self.log.lock();
        let due = std::mem::take(&mut state.keeper.checkpoint) || forced;
        let folds = state.keeps_history() && !forced;
        // During a checkpoint nobody knows whether the ring is stuck, so requests that need room
        // wait for the result.
        state.keeper.failed &= !due;
        drop(state);
        let mut copied = Ok(());
        if due {
            // A checkpoint that ran out of time is left to the close.
            let done = if folds {
                self.fold()
            } else {
                self.checkpoint(false, forced).map(drop)
            };
            let mut state = self.log.lock();
            state.keeper.failed = state.keeper.refuses_after(&done);
            state.keeper.checkpoint |= done.is_err();
            drop(state);
            if done.is_err() {
                self.log.refuse_stuck();
            }
            copied = done;
        }
        self.copy_spills_back();
        copied.and(preallocated)
    }

    /// Changes the control file, or makes sure that it has not changed.
    ///
    /// # Errors
    /// If it can't be written. If what the medium has is unknown then, the log is poisoned: what
    /// follows depends on it.
    pub(super) fn change_certainly(&mut self, change: impl FnOnce(&mut Control)) -> Result<()> {
        let changed = self.control.change(change);
        if changed.is_err()
            && let Err(unknown) = self.control.write()
        {
            self.log.poison(&std::io::Error::other(unknown));
        }
        changed
    }

    /// Refuses an order once the log has failed.
    pub(super) fn refuse_failed(&self) -> Result<()> {
        if self.log.poisoned.load(Ordering::Acquire) {
            Err(Error::new(
                ErrorKind::Io,
                format!(
                    "{}: the log had failed; reopen it to recover what was acknowledged",
                    self.log.dir.display()
                ),
            ))
        } else {
            Ok(())
        }
    }

    /// Frees retired segments that no reader holds any more.
    pub(super) fn reclaim(&self) {
        let mut state = self.log.lock();
        if state.ring.has_readers() {
            drop(state);
            self.log.reap_reads();
            state = self.log.lock();
        }
        let more = state.ring.reclaim();
        state.check(&self.log);
        drop(state);
        if more {
            self.log.wake_for_segments();
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        for mut io in self.unanswered.drain(..) {
            if !io.have_ended() {
                io.abandon();
            }
        }
        let mut state = self.log.lock();
        state.keeper.gone = true;
        // Dropping an order closes its channel, which tells the waiting caller.
        state.keeper.orders.clear();
    }
}
