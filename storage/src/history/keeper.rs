//! The log's housekeeper: one thread that makes segments ready before they are needed, and does
//! checkpoints. Its states are those of [`machine`](crate::history::machine).
//!
//! A checkpoint, for all disks of the log at one LSN *C* (the newest record when it begins):
//! 1. freeze every disk's index, and make everything up to *C* durable in the log;
//! 2. note *C* in the control file, copy the frozen extents to the base images and sync those
//!    ([`copy`](crate::checkpoint::copy));
//! 3. write the control file: checkpoint LSN *C*, first sequence still needed; sync it;
//! 4. drop the frozen indexes and recycle the segments that no reader holds any more.
//!
//! A close with a time limit may cut step 2 short. That leaves what a kill would leave, except that
//! the whole log is durable: nothing is recycled, the images stay marked as open, and the next open
//! goes on.
//!
//! A log with history does this only for its oldest segments, see [`fold`](crate::history::fold).
//!
//! Records above *C* are never copied, so a crash at any point leaves base images that the log,
//! replayed from the previous checkpoint LSN, brings to the same state.
//!
//! Disks join and leave a log in use. One that leaves gets a checkpoint of its own, after which its
//! entry in the control file says that its records are void. Other disks are not copied. If the log
//! keeps history, nothing is copied: the disk is detached and its records stay in the log, as with
//! a disk that was opened as a detached one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use zerocopy::little_endian::U64;

use crate::SECTOR_SIZE;
use crate::catalog::control::ControlFile;
use crate::catalog::identity::{written, written_parts};
use crate::catalog::log_location::LogLocation;
use crate::catalog::options::DiskOptions;
use crate::catalog::retention::Retention;
use crate::catalog::snapshot::{Snapshot, SnapshotName};
use crate::checkpoint::copy::{CopyOutcome, DamagedExtents, FrozenLayer, UnansweredIo};
use crate::checkpoint::pace::CopyPace;
use crate::error::{Error, ErrorKind, Result, invalid};
use crate::format::{Control, DiskEntry};
use crate::history::machine::{CopyEvent, Phase};
use crate::history::saved_file::SavedFileWriter;
use crate::history::spill::CopyBack;
use crate::history::troubles::Troubles;
use crate::index::{ExtentMap, Location};
use crate::log::admission::RoomNeed;
use crate::log::commit::Commit;
use crate::log::committer::{Committer, Leader};
use crate::log::disk_state::DiskState;
use crate::log::holds::{HeldLog, HoldOwner, OpenHold};
use crate::log::orders::{DiskAdoption, KeeperOrder, KeeperTask};
use crate::log::pipeline::{MarkCommit, Modification};
use crate::log::state::{Log, LogState};
use crate::medium::cost::MediumCost;
use crate::medium::file::set_size;
use crate::mutant::{Mutant, planted};
use crate::sync::atomic::Ordering;
use crate::sync::{self, Arc, Weak};

/// A checkpoint of more extents than this measures the medium first, with 200 reads.
const MUCH_WORK: usize = if cfg!(test) { 0 } else { 1000 };
/// How many pauses of a millisecond closing waits for readers that hold room it needs.
const AWAITED_RESTS: u32 = 1000;
/// How often the keeper checks whether an export that keeps it from making room gives way.
const EXPORT_CHECK: Duration = Duration::from_millis(100);
/// Pause before a failed checkpoint is tried again.
const RETRY: Duration = Duration::from_secs(1);
/// More than the longest tick of a kernel's clock.
const TICK: Duration = Duration::from_millis(20);

/// A disk whose image is getting a new generation, and two parts that the checkpoint writes to it,
/// by byte offset and length.
type NewGeneration = (Arc<DiskState>, [Option<(u64, u64)>; 2]);

/// Notes in the control file that a disk's image is about to be written. `forget` drops the samples
/// that may change.
pub(super) fn announce_writes(
    control: &mut Control,
    disk: &DiskState,
    forget: impl FnOnce(&mut DiskEntry),
) {
    if let Some(entry) = control.disk_mut(disk.id) {
        if entry.generation == entry.next_generation {
            entry.announce(1);
        }
        forget(entry);
        let next = entry.next_generation.get();
        disk.generation.store(next, Ordering::Relaxed);
    }
    control.set_written(disk.id, 0);
}

/// Notes in the control file that the images now have their announced generation.
pub(super) fn settle(control: &mut Control, new_generations: &[NewGeneration]) {
    for (disk, parts) in new_generations {
        if let Some(entry) = control.disk_mut(disk.id) {
            entry.settle();
            entry.take_samples(disk.base.file().as_ref(), *parts);
        }
        control.set_written(disk.id, written(disk.base.file().as_ref()));
    }
}

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
    phase: Phase,
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
            phase: Phase::Idle,
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
            self.close_overdue_looks();
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

    /// How much the log needs room that an export keeps it from making.
    fn need_beside_exports(&self, state: &LogState) -> RoomNeed {
        if state.keeper.holds.has_export() {
            self.log.room_need(state)
        } else {
            RoomNeed::None
        }
    }

    /// Closes the looks of exports that should have given way by now.
    pub(crate) fn close_overdue_looks(&self) {
        let state = self.log.lock();
        let need = self.need_beside_exports(&state);
        if need == RoomNeed::None {
            return;
        }
        let looks = state.keeper.export_looks.iter().filter_map(Weak::upgrade);
        let looks: Vec<_> = looks.collect();
        drop(state);
        looks.iter().for_each(|look| look.close_if_overdue(need));
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
            while idle(&state) && self.need_beside_exports(&state) == RoomNeed::None {
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

    /// Retires the oldest `count` segments, and frees those that no reader holds.
    fn recycle(&self, count: usize) {
        let oldest = self.log.lock().ring.oldest(count);
        oldest.iter().for_each(|(segment, _)| segment.free_pages());
        drop(oldest);
        self.log.lock().ring.retire(count);
        self.reclaim();
    }

    /// Copies the log to the base images. `closing`: no port writes any more, so all segments
    /// become free. `hurry`: a caller is waiting. Returns `false` if the time limit for closing ran
    /// out; the checkpoint is then unfinished.
    pub(super) fn checkpoint(&mut self, closing: bool, hurry: bool) -> Result<bool> {
        self.fold_for_room()?;
        // Layers left frozen by an earlier attempt come first; when closing, newer records follow.
        if self.frozen_at.is_some() && closing {
            self.await_readers();
            if !self.checkpoint_once(false, hurry)? {
                return Ok(false);
            }
            if self.frozen_at.is_some() {
                return Err(self.being_read());
            }
        }
        if closing {
            self.await_readers();
        }
        if !self.fold_to_snapshots()? {
            return Ok(false);
        }
        self.checkpoint_once(closing, hurry)
    }

    /// Waits until nobody holds room that closing needs: the log's writer while it writes a
    /// summary, or a read in flight. The medium may never answer, so the wait is bounded.
    pub(super) fn await_readers(&self) {
        for _ in 0..AWAITED_RESTS {
            if !self.log.lock().ring.waits_for_readers() {
                return;
            }
            self.pause_and_reclaim();
        }
    }

    fn being_read(&self) -> Error {
        let dir = self.log.dir.display();
        Error::new(
            ErrorKind::Io,
            format!("{dir}: closed while a disk is being read"),
        )
    }

    /// Makes everything up to `lsn` durable in the log, if necessary in the ring's last segment.
    /// The next write of the control file records how far the log is durable.
    pub(super) fn drain(&mut self, lsn: u64) -> Result<()> {
        let needed = self.log.lock().ring.has_none_free();
        let preallocated = if needed {
            self.log.preallocate_segment(false, || {})
        } else {
            Ok(())
        };
        let mut state = self.log.lock();
        state.keeper.draining = Some(lsn);
        let had_failed = state.keeper.failed;
        // Writers that may use the last segment can find room now.
        state.ring.end_starving();
        drop(state);
        let flushed = self.committer.flush(lsn, &mut self.leader);
        let mut state = self.log.lock();
        state.keeper.draining = None;
        if flushed.is_ok() {
            // The lack of room was only temporary.
            state.keeper.failed = had_failed;
            self.control.control.header.durable_lsn = U64::new(state.pipeline.durable());
        }
        drop(state);
        match (flushed, preallocated) {
            (Ok(()), _) => Ok(()),
            (Err(_), Err(error)) => Err(error),
            (Err(_), Ok(())) => Err(Error::new(
                ErrorKind::Io,
                format!("{}: the log can't be made durable", self.log.dir.display()),
            )),
        }
    }

    /// After everything else was copied: keeps the damaged extents in the frozen layers, except
    /// those that durable records have since overwritten. The next attempt has nothing else to
    /// copy.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`] if damaged extents are left. The checkpoint is then unfinished.
    fn keep_damaged(&self, damaged: Vec<DamagedExtents>) -> Result<()> {
        if damaged.is_empty() {
            return Ok(());
        }
        let mut failed = Ok(());
        // Under the log's lock, no record can come between the index and `last_lsn`.
        let state = self.log.lock();
        for disk in &self.disks {
            let mut index = disk.index_mut();
            index.frozen = None;
            let Some(extents) = damaged.iter().find(|extents| extents.disk.id == disk.id) else {
                continue;
            };
            let newest_is_durable =
                disk.last_lsn.load(Ordering::Acquire) <= state.pipeline.durable();
            let nothing = ExtentMap::default();
            let newer = if newest_is_durable {
                &index.active
            } else {
                &nothing
            };
            let left = extents.layer.without(newer);
            if !left.is_empty() {
                index.frozen = Some(Arc::new(left));
                failed = failed.and(Err(extents.to_error()));
            }
        }
        drop(state);
        failed
    }

    /// The frozen layers that are not empty, with their disks.
    fn layers(&self) -> Vec<FrozenLayer> {
        let disks = self.disks.iter();
        let layers = disks.filter_map(|disk| Some((disk.clone(), disk.index().frozen.clone()?)));
        layers.filter(|(_, layer)| !layer.is_empty()).collect()
    }

    /// Notes in the control file that from now on the base images may hold records up to `lsn`, and
    /// that the images about to be written are getting a new generation.
    fn announce(&mut self, lsn: u64, layers: &[FrozenLayer]) -> Result<()> {
        if self.copying == Some(lsn) {
            return Ok(());
        }
        // Not every copy has drained the log, and the copying LSN proves no more than this.
        self.control.control.header.durable_lsn = U64::new(self.log.lock().pipeline.durable());
        // What goes to a spill file changes no image.
        let written = || layers.iter().filter(|(disk, _)| !disk.base.is_spilled());
        // In both slots: if one rots, the other still says that the base images may be ahead of a
        // damaged log.
        self.control.change_both(|control| {
            // An earlier, unfinished checkpoint may have copied more.
            let copying = control.header.copying_lsn.get().max(lsn);
            control.header.copying_lsn = U64::new(copying);
            for (disk, layer) in written() {
                announce_writes(control, disk, |entry| entry.forget_samples(layer));
            }
        })?;
        let parts = written().map(|(_, layer)| written_parts(layer));
        let disks = written().map(|(disk, _)| disk.clone());
        self.new_generations = disks.zip(parts).collect();
        self.copying = Some(lsn);
        self.log.lock().pass_horizon(self.control.control.horizon());
        Ok(())
    }

    /// What operations cost the medium. Measured once, the first time it matters for much work, and
    /// never while closing.
    fn medium_cost(&mut self, layers: &[FrozenLayer]) -> MediumCost {
        let state = self.log.lock();
        let (closing, segment) = (state.keeper.stop, state.ring.live().next().cloned());
        drop(state);
        let mut pieces = layers.iter().flat_map(|(_, layer)| layer.iter());
        let much = pieces.nth(MUCH_WORK).is_some();
        let (log, measured) = (&self.log, &mut self.cost);
        match segment.filter(|_| measured.is_none() && much && !closing) {
            Some(segment) => *measured.insert(log.medium.cost(&segment, log.segment_size)),
            None => measured.unwrap_or(MediumCost::USUAL),
        }
    }

    /// Makes the records up to `lsn`, the newest one in the frozen layers, durable, and copies the
    /// layers. The caller settles and ends the copy.
    pub(super) fn copy_frozen(&mut self, lsn: u64, hurry: bool) -> Result<CopyOutcome> {
        self.enter(CopyEvent::Begun);
        let pace = CopyPace::new(&self.log, &mut self.log.lock(), hurry);
        let copied = self.copy_at(lsn, pace);
        self.end_pace();
        copied
    }

    fn copy_at(&mut self, lsn: u64, pace: CopyPace) -> Result<CopyOutcome> {
        if !planted(Mutant::CopyBeforeDurable) {
            self.drain(lsn)?;
        }
        let layers = self.layers();
        self.copy_layers(lsn, &layers, pace)
    }

    /// Copies layers of durable records up to `lsn`. The copy has begun.
    pub(super) fn copy_layers(
        &mut self,
        lsn: u64,
        layers: &[FrozenLayer],
        mut pace: CopyPace,
    ) -> Result<CopyOutcome> {
        self.enter(CopyEvent::Drained);
        let medium = self.medium_cost(layers);
        pace.set_rate(medium.rate);
        if !self.save_for_snapshots(lsn, layers, &mut pace, medium)? {
            return Ok(CopyOutcome::TimeUp(Vec::new()));
        }
        self.enter(CopyEvent::Saved);
        self.announce(lsn, layers)?;
        self.enter(CopyEvent::Announced);
        self.grow_spills(layers)?;
        let copied = self.copy_or_spill(layers, pace, medium)?;
        if let CopyOutcome::Complete(_) = copied {
            self.enter(CopyEvent::Copied);
        }
        Ok(copied)
    }

    /// Goes on to the phase after this event.
    pub(super) fn enter(&mut self, event: CopyEvent) {
        self.phase = self.phase.next(event);
        if event == CopyEvent::Ended && self.log.lock().ring.end_copy() {
            self.log.wake_ports();
        }
    }

    /// What it is doing.
    pub(crate) fn phase(&self) -> Phase {
        self.phase
    }

    /// Does what can't wait for the end of a copy. `meanwhile` is called between the steps.
    pub(super) fn do_urgent_work(&mut self, meanwhile: &mut dyn FnMut()) {
        // A growing ring needs its next segment. A failure is retried, and reported, after the
        // copy.
        if !self.log.lock().ring.cannot_grow() {
            let _ = self.log.preallocate_segment(true, meanwhile);
        }
        self.serve_orders();
    }

    /// However the copy ended, it no longer holds up writers.
    pub(super) fn end_pace(&self) {
        if self.log.lock().ring.allow(None) {
            self.log.wake_ports();
        }
    }

    /// One checkpoint up to one LSN, see [`checkpoint`](Self::checkpoint).
    pub(super) fn checkpoint_once(&mut self, closing: bool, hurry: bool) -> Result<bool> {
        let mut state = self.log.lock();
        if state.pipeline.unapplied() > 0 && state.keeper.is_over() {
            return Ok(false);
        }
        if state.ring.waits_for_readers() {
            // Readers hold room that this checkpoint may need, each for one read, so try again
            // soon. (Waiting here would never end, because only this thread reclaims segments.)
            state.keeper.checkpoint = true;
            return if closing {
                Err(self.being_read())
            } else {
                Ok(true)
            };
        }
        let newest = state.pipeline.appended();
        let until = self.frozen_at.unwrap_or(newest);
        // Closing does not wait for the replica.
        let for_replica = state.keeper.holds.held_for_replica(until);
        let for_replica = for_replica.filter(|_| !closing);
        if let Some(lsn) = for_replica.or(state.keeper.holds.held_here())
            && lsn < until
        {
            let briefly = for_replica.is_some() || state.keeper.holds.all_end_soon();
            drop(state);
            if briefly && !hurry && !closing {
                // What holds it asks for a checkpoint when it ends.
                return Ok(true);
            }
            return Err(self.held_error("the log can't be copied to the base images", lsn));
        }
        let lsn = *self.frozen_at.get_or_insert_with(|| {
            for disk in &self.disks {
                let frozen = disk.index_mut().freeze();
                debug_assert!(frozen, "no checkpoint is under way");
            }
            newest
        });
        let (cid, unix_us) = (state.pipeline.next_cid() - 1, state.clock.now().unix_us);
        drop(state);
        let done = self.copy_and_settle(Commit { lsn, cid, unix_us }, closing, hurry);
        self.enter(CopyEvent::Ended);
        done
    }

    fn copy_and_settle(&mut self, newest: Commit, closing: bool, hurry: bool) -> Result<bool> {
        match self.copy_frozen(newest.lsn, hurry)? {
            CopyOutcome::Complete(damaged) => self.keep_damaged(damaged)?,
            CopyOutcome::TimeUp(damaged) => {
                if let Some(extents) = damaged.first() {
                    return Err(extents.to_error());
                }
                if !planted(Mutant::CutTakenForWhole) {
                    return Ok(false);
                }
            }
        }
        if closing {
            self.log.lock().ring.end_tail();
        }
        self.end_checkpoint(newest, |keeper| {
            for disk in &keeper.disks {
                disk.index_mut().frozen = None;
            }
            keeper.frozen_at = None;
        })?;
        Ok(true)
    }

    /// Ends a checkpoint: the base images durably hold everything up to `horizon`. `drop_copied`
    /// drops what was copied from the indexes.
    pub(super) fn end_checkpoint(
        &mut self,
        horizon: Commit,
        drop_copied: impl FnOnce(&mut Self),
    ) -> Result<()> {
        let lsn = horizon.lsn;
        let state = self.log.lock();
        let (freed, first_sequence) = state.ring.find_freeable(lsn);
        let (next_lsn, next_cid) = (state.pipeline.next_lsn(), state.pipeline.next_cid());
        drop(state);
        if planted(Mutant::RecycleEarly) {
            self.recycle(freed);
        }
        let noted = self.control.change(|control| {
            let header = &mut control.header;
            header.first_sequence = U64::new(first_sequence);
            header.next_lsn = U64::new(next_lsn);
            header.next_cid = U64::new(next_cid);
            control.set_checkpoint(lsn);
            settle(control, &self.new_generations);
        });
        if noted.is_err() {
            // The write may have reached the medium all the same, so the next attempt announces its
            // writes again.
            self.copying = None;
        }
        noted?;
        self.new_generations.clear();
        // Only now that the control file no longer needs them may segments be reused and layers
        // dropped. (A new segment names its predecessor, which must stay in `live` until the
        // control file no longer refers to it.)
        drop_copied(self);
        let mut state = self.log.lock();
        state.pipeline.set_applied(lsn);
        state.keeper.holds.pass(lsn);
        state.horizon = horizon;
        drop(state);
        if !planted(Mutant::RecycleEarly) {
            self.recycle(freed);
        }
        self.log.wake_ports();
        self.log
            .counters
            .checkpoints
            .fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Carries out the orders, first come first served; in the middle of a copy only those that are
    /// quick.
    pub(crate) fn serve_orders(&mut self) {
        let phase = self.phase();
        let mut state = self.log.lock();
        let orders = &mut state.keeper.orders;
        let admitted = orders.extract_if(.., |order| phase.admits(&order.task));
        let admitted: Vec<_> = admitted.collect();
        drop(state);
        admitted.into_iter().for_each(|order| self.serve(order));
    }

    fn serve(&mut self, KeeperOrder { task, answer }: KeeperOrder) {
        let phase = self.phase();
        let done = match task {
            KeeperTask::Checkpoint(lsn) => self.checkpoint_to(lsn, false),
            KeeperTask::CopyBack(disk) => self.bring_up_to_date(&disk),
            KeeperTask::Grow(disk, size) => self.grow(&disk, size),
            KeeperTask::Add(options, path, adopt, added) => {
                self.add((&options, &path), adopt).map(|disk| {
                    // The caller may be gone.
                    let _ = added.send(disk);
                })
            }
            KeeperTask::Remove(disk, keeps_records) => self.remove(&disk, keeps_records),
            KeeperTask::Snapshot(name, disk_id) => self.snapshot(name, disk_id),
            KeeperTask::KeepPoint(point) => self.keep_point(&point),
            KeeperTask::DeleteSnapshot(name) => {
                self.change_history(|control| Snapshot::remove(name, control))
            }
            KeeperTask::SetRetention(retain) => self.set_retention(retain),
            KeeperTask::Members(members) => {
                // The caller may be gone.
                let _ = members.send(self.control.members());
                Ok(())
            }
            KeeperTask::Look(disk, owner, held) => self.hold(&disk, owner).map(|looked| {
                // The caller may be gone.
                let _ = held.send(looked);
            }),
            KeeperTask::Rewind(disk, request, rewound) => {
                self.rewind(&disk, request).map(|lsn| {
                    // The caller may be gone.
                    let _ = rewound.send(lsn);
                })
            }
        };
        assert_eq!(
            self.phase(),
            phase,
            "an order leaves the keeper where it was"
        );
        // The caller may be gone.
        let _ = answer.send(done);
    }

    /// Makes everything written so far durable, and names the resulting state of all disks, or of
    /// one.
    pub(crate) fn snapshot(&mut self, name: SnapshotName, disk_id: Option<u32>) -> Result<()> {
        // A log that needs room gets it afterwards, so that a snapshot takes no longer than a sync.
        let mut state = self.log.lock();
        let (lsn, unix_us) = (state.pipeline.appended(), state.clock.now().unix_us);
        drop(state);
        self.drain(lsn)?;
        let cid = self.log.lock().pipeline.next_cid() - 1;
        let snapshot = Snapshot {
            name,
            lsn,
            cid,
            unix_us,
            disk_id,
            saved_bytes: 0,
        };
        self.change_history(|control| snapshot.add(control))
    }

    /// Keeps a point in the past as a snapshot does.
    fn keep_point(&mut self, point: &Snapshot) -> Result<()> {
        let control = &self.control.control;
        let reached = control.header.checkpoint_lsn.get();
        // A copy that was begun before goes on to its own LSN.
        if let Some(lsn) = self.frozen_at
            && (reached + 1..lsn).contains(&point.lsn)
        {
            return Err(Error::new(
                ErrorKind::NotFound,
                format!(
                    "{}: LSN {} can't be exported: the log is being copied to the images up to LSN \
                     {lsn}; export a point from there on",
                    self.log.dir.display(),
                    point.lsn,
                ),
            ));
        }
        self.change_history(|control| point.add(control))
    }

    /// Makes everything written so far durable, and holds what a look at the disk reads. The base
    /// images do not change until the hold is dropped. A checkpoint that is due comes first, so
    /// that a series of looks can't keep it off for ever. If it fails, whatever it copied is still
    /// in the log, so a look at the remaining points sees the same.
    pub(crate) fn hold(&mut self, disk: &DiskState, owner: HoldOwner) -> Result<HeldLog> {
        self.refuse_failed()?;
        let state = self.log.lock();
        let due = state.keeper.checkpoint && !state.keeper.holds.has_open();
        drop(state);
        if due {
            // If this fails, the keeper retries and reports it.
            let _ = self.step(false);
        }
        if let Some(lsn) = self.frozen_at.filter(|_| owner == HoldOwner::Rewind) {
            self.checkpoint_to(lsn, true)?;
        }
        let state = self.log.lock();
        if disk.detached.load(Ordering::Relaxed) {
            let path = disk.path.display();
            let message =
                format!("{path}: the disk has left its log; open it again, then look at it");
            return Err(Error::new(ErrorKind::NotFound, message));
        }
        let newest = state.pipeline.appended();
        drop(state);
        let hold = OpenHold::new(&self.log, owner);
        self.drain(newest)?;
        let control = self.control.control.clone();
        let applied = control.header.checkpoint_lsn.get();
        let segments = self.log.lock().ring.oldest(usize::MAX).into_iter();
        let mut segments: Vec<_> = segments
            .map(|(segment, last)| (segment, last.lsn))
            .collect();
        let last = segments
            .iter()
            .position(|&(_, last_lsn)| last_lsn >= newest);
        segments.truncate(last.map_or(segments.len(), |last| last + 1));
        segments.retain(|&(_, last_lsn)| last_lsn > applied);
        Ok(HeldLog {
            segments,
            newest,
            control,
            hold,
        })
    }

    /// Changes what the log keeps of its history.
    pub(crate) fn change_history(
        &mut self,
        change: impl FnOnce(&mut Control) -> Result<()>,
    ) -> Result<()> {
        let mut changed = self.control.control.clone();
        change(&mut changed).map_err(|error| error.of_file(&self.log.dir))?;
        let most = changed.header.max_segments;
        let before = self.control.control.header.max_segments;
        let enlarged = most != before;
        let more = most.get().saturating_sub(before.get());
        self.log.reserve_checksums(more).map_err(|bytes| {
            let dir = self.log.dir.display();
            invalid(format!(
                "{dir}: the checksums of a log with so much history need {bytes} bytes more memory \
                 than is free: retain less, or give the daemon a larger --memory-limit"
            ))
        })?;
        self.control.change(|control| {
            control.header.max_segments = most;
            (control.history, control.snapshots) = (changed.history, changed.snapshots);
        })?;
        if enlarged {
            // In both slots: if one rots, the other must not disown the segment files that are made
            // now.
            self.control.write()?;
        }
        let control = &self.control.control;
        let mut state = self.log.lock();
        state.ring.enlarge(control.header.max_segments.get());
        state.keeper.retain = Retention::of(&control.history);
        // Segments may have become free, or a stuck log may have room.
        state.keeper.checkpoint = true;
        drop(state);
        self.remove_saved();
        Ok(())
    }

    /// Brings the base images up to `lsn`; `exactly`: to one LSN, and they hold no part of a later
    /// checkpoint that failed.
    fn checkpoint_to(&mut self, lsn: u64, exactly: bool) -> Result<()> {
        loop {
            let done = self.step(true);
            let mixed = exactly && self.frozen_at.is_some();
            if self.log.lock().pipeline.applied() >= lsn && !mixed {
                return Ok(());
            }
            done?;
            self.refuse_over()?;
            // An unfinished checkpoint came first, or a reader holds room that this one needs.
            self.pause_and_reclaim();
        }
    }

    /// Refuses an order once the time limit for closing has run out.
    pub(super) fn refuse_over(&self) -> Result<()> {
        if self.log.lock().keeper.is_over() {
            return Err(self.log.closed());
        }
        Ok(())
    }

    /// Takes the steps of [`resize`](crate::offline::resize), with the same outcome wherever a
    /// crash cuts them. Requests see the new size last: by then, recovery is certain to find what
    /// they write beyond the old one.
    pub(crate) fn grow(&mut self, disk: &DiskState, size: u64) -> Result<()> {
        let mut set = |size: u64, resizing: u8| {
            self.control.change(|control| {
                if let Some(entry) = control.disk_mut(disk.id) {
                    (entry.size, entry.resizing) = (U64::new(size), resizing);
                }
                // Changing the length counts as a write.
                let written = match resizing {
                    0 if !disk.base.is_spilled() => written(disk.base.file().as_ref()),
                    _ => 0,
                };
                control.set_written(disk.id, written);
            })
        };
        let old_size = disk.sectors() * SECTOR_SIZE;
        if size == old_size {
            return Ok(());
        }
        set(old_size, 1)?;
        let sized = set_size(disk.base.file().as_ref(), &disk.path, size);
        if let (Err(_), Some(spill)) = (&sized, disk.base.spill()) {
            // Its sync may have taken the error of what was being copied back.
            spill.count_all_as_written();
        }
        sized?;
        set(size, 0)?;
        disk.sectors.store(size / SECTOR_SIZE, Ordering::Release);
        Ok(())
    }

    fn set_retention(&mut self, retain: Retention) -> Result<()> {
        let state = self.log.lock();
        if let Some(replica) = &state.replica {
            let checked = replica.check_retention(retain);
            checked.map_err(|error| error.of_file(&self.log.dir))?;
        }
        drop(state);
        self.change_history(|control| retain.set(control))?;
        // The log may have more room for what its replica lacks.
        self.log.wake_ports();
        Ok(())
    }

    /// Adds a disk. `path`: its image's, with links resolved.
    fn add(
        &mut self,
        (options, path): (&DiskOptions, &Path),
        adopt: DiskAdoption,
    ) -> Result<Arc<DiskState>> {
        self.refuse_failed()?;
        let mut state = self.log.lock();
        // What the disk wrote when it was on the log before may be on its way to the replica.
        let durable = state.pipeline.durable();
        if let Some(replica) = &mut state.replica {
            replica.raise_floor(durable);
        }
        drop(state);
        let detached = |disk: &Arc<DiskState>| {
            disk.detached.load(Ordering::Relaxed) && self.image_path(disk) == path
        };
        if let Some(place) = self.disks.iter().position(detached) {
            if self.log.lock().keeps_history() {
                return self.reattach(place, options);
            }
            let disk = self.disks[place].clone();
            self.remove(&disk, false)?;
        }
        let appended = self.log.lock().pipeline.appended();
        // The disk's past may begin here, so a power cut must not take this state back.
        self.drain(appended)?;
        let disk = adopt(&mut self.control, &self.disks, appended)?;
        disk.index_mut().count_in(&self.log.counters.index);
        self.note_spill(&disk);
        self.disks.push(disk.clone());
        self.limit_spills();
        self.give_lsn_to_changes(&disk)?;
        Ok(disk)
    }

    /// Gives the state of a disk whose records were discarded, or whose image was replaced, an LSN
    /// of its own: that of a mark. `disk`: any disk of the log.
    pub(crate) fn give_lsn_to_changes(&self, disk: &Arc<DiskState>) -> Result<()> {
        let mut state = self.log.lock();
        if self.control.control.newest_change() <= state.pipeline.appended() {
            return Ok(());
        }
        let text = "a disk has another image".parse()?;
        let mark = Modification::mark(&text, MarkCommit::default());
        let at = state.pipeline.append(disk, mark);
        disk.last_lsn.store(at, Ordering::Release);
        Ok(())
    }

    /// Reopens a detached disk.
    fn reattach(&mut self, place: usize, options: &DiskOptions) -> Result<Arc<DiskState>> {
        let disk = &mut self.disks[place];
        let Some(state) = Arc::get_mut(disk) else {
            return Err(Error::new(
                ErrorKind::Locked,
                format!("{}: still in use; try again", disk.path.display()),
            ));
        };
        state.set_options(options);
        Ok(disk.clone())
    }

    /// Brings a disk's base image up to date, marks it as closed and forgets the disk; or, if the
    /// log keeps history, detaches it. On failure, the disk stays as it was. `keeps_records`:
    /// leaves the image as it is, and its disk's newest bytes in a spill file.
    pub(crate) fn remove(&mut self, disk: &Arc<DiskState>, keeps_records: bool) -> Result<()> {
        self.refuse_failed()?;
        let state = self.log.lock();
        let was_detached = disk.detached.swap(true, Ordering::Relaxed);
        let keeps_history = state.keeps_history();
        drop(state);
        let removed = if keeps_history {
            self.drain(disk.last_lsn.load(Ordering::Acquire))
        } else if keeps_records {
            self.spill_records(disk)
        } else {
            // Mark it as closed only after the control file says that the log has no records for
            // it.
            self.copy_records(disk)
                .and_then(|()| self.bring_up_to_date(disk))
                .and_then(|()| self.mark_closed(disk))
        };
        if let Err(error) = removed {
            disk.detached.store(was_detached, Ordering::Relaxed);
            return Err(error);
        }
        if !keeps_history {
            self.disks.retain(|other| other.id != disk.id);
            self.log.lock().room.forget(disk.id);
            self.reclaim();
        }
        Ok(())
    }

    /// Puts all records of a leaving disk into its spill file, and stops copying that back.
    fn spill_records(&mut self, disk: &Arc<DiskState>) -> Result<()> {
        if !disk.base.is_spilled() {
            self.use_spill(disk)?;
        }
        // Copying back would write to the image, and could end the spill file.
        self.copies_back.insert(disk.id, CopyBack::stopped());
        let copied = self.copy_records(disk);
        self.copies_back.remove(&disk.id);
        if let (Err(_), Some(spill)) = (&copied, disk.base.spill()) {
            // Nobody knows how far an earlier copy got.
            spill.count_all_as_written();
        }
        copied
    }

    /// The path of an open disk's image, with links resolved. Asks no file system, which may not
    /// answer.
    fn image_path(&self, disk: &DiskState) -> PathBuf {
        let entry = self.control.control.disk(disk.id);
        entry.map_or_else(PathBuf::new, |entry| entry.path(&self.control.home))
    }

    /// Marks the image of a leaving disk as closed. If that fails, marks it as open again: more
    /// records may follow, and a log with records for a closed image can't be opened. If that fails
    /// too, poisons the log, so that no record follows.
    fn mark_closed(&self, disk: &DiskState) -> Result<()> {
        let closed = disk.mark(false).map(drop);
        if closed.is_err()
            && let Err(error) = disk.mark(true)
        {
            self.log.poison(&std::io::Error::other(error));
        }
        if closed.is_ok() {
            // It is complete, and may be used with another log.
            LogLocation::remove(disk.base.file().as_ref());
        }
        closed
    }

    /// Copies all records of a leaving disk.
    fn copy_records(&mut self, disk: &Arc<DiskState>) -> Result<()> {
        if planted(Mutant::RemoveUncopied) {
            return Ok(());
        }
        loop {
            let state = self.log.lock();
            let index = disk.index();
            let rewound = self.control.control.rewound(disk.id);
            if index.active.is_empty() && index.frozen.is_none() && rewound.is_none() {
                return Ok(());
            }
            // This frees no segment. If few are unused, a full checkpoint is needed anyway, and it
            // must find the last segment unused.
            let few = state.ring.unused_bytes() <= 2 * self.log.segment_size;
            let waits = state.ring.waits_for_readers();
            drop((index, state));
            if !few && !waits && self.frozen_at.is_none() {
                return self.copy_alone(disk);
            }
            self.step(true)?;
            self.refuse_over()?;
            self.pause_and_reclaim();
        }
    }

    /// Copies the records of this disk only, and makes them void.
    fn copy_alone(&mut self, disk: &Arc<DiskState>) -> Result<()> {
        let lsn = disk.last_lsn.load(Ordering::Acquire);
        disk.index_mut().freeze();
        let copied = self.void_frozen(disk, lsn);
        self.enter(CopyEvent::Ended);
        // The next copy must be announced again, even if it ends with the same record.
        self.copying = None;
        self.new_generations.clear();
        let mut index = disk.index_mut();
        match copied {
            Ok(()) => index.frozen = None,
            Err(_) => index.thaw(),
        }
        copied
    }

    fn void_frozen(&mut self, disk: &DiskState, lsn: u64) -> Result<()> {
        match self.copy_frozen(lsn, true)? {
            CopyOutcome::Complete(damaged) | CopyOutcome::TimeUp(damaged)
                if !damaged.is_empty() =>
            {
                return Err(damaged[0].to_error());
            }
            CopyOutcome::Complete(_) => {}
            CopyOutcome::TimeUp(_) => return Err(self.log.closed()),
        }
        self.control.change(|control| {
            settle(control, &self.new_generations);
            // What a rewind has undone must not come back, nor what the disk left behind when it
            // left the log before.
            let rewound = control.rewound(disk.id).unwrap_or(0);
            if let Some(entry) = control.disk_mut(disk.id) {
                let void_lsn = entry.void_lsn.get().max(rewound).max(lsn);
                entry.void_lsn = U64::new(void_lsn);
            }
        })
    }

    /// Makes everything durable and copies it to the base images, within the time limit. No port
    /// may use the log any more. Returns whether the base images have everything; otherwise the log
    /// keeps it.
    ///
    /// # Errors
    /// If the log had failed or the copy fails.
    pub(crate) fn close(&mut self) -> Result<bool> {
        self.reclaim();
        self.refuse_failed()?;
        // If this fails, the records are safe all the same.
        let ended = self.end_exports();
        // Into the log first, where it is safe even if the checkpoint fails.
        let newest = self.log.lock().pipeline.appended();
        if !planted(Mutant::CutUndrained) && self.drain(newest).is_err() {
            self.refuse_failed()?;
            // The log was full: of what an earlier checkpoint has not copied, or of history that a
            // look or snapshot needed until now.
            if self.frozen_at.is_some() {
                self.await_readers();
                self.checkpoint_once(false, true)?;
            }
            self.fold_for_room()?;
            self.await_readers();
            self.drain(newest)?;
        }
        ended?;
        if planted(Mutant::ClosedEarly) {
            self.disks
                .iter()
                .try_for_each(|disk| disk.mark(false).map(drop))?;
        }
        let keeps = {
            let state = self.log.lock();
            state.keeps_history() && state.pipeline.unapplied() > 0
        };
        let copied = if keeps {
            Ok(false)
        } else {
            self.checkpoint(true, true)
        };
        let spilled = !self.end_spills();
        let whole = match copied {
            // What was copied back may have made room.
            Err(_) if !spilled => self.checkpoint(true, true)?,
            copied => copied?,
        };
        if !whole {
            // Records in the control file that the log is durable.
            self.control.write()?;
            self.report_remainder(keeps);
        }
        self.await_new_mtime();
        if !whole && !planted(Mutant::CutMarkedClosed) {
            return Ok(false);
        }
        // Only after the control file says that the log has no records for them.
        let mut complete = self.disks.iter().filter(|disk| !disk.base.is_spilled());
        complete.try_for_each(|disk| disk.mark(false).map(drop))?;
        Ok(whole && !spilled)
    }

    /// Removes the points that are kept for exports, which then fail. Returns whether there were
    /// any.
    pub(super) fn end_exports(&mut self) -> Result<bool> {
        let mut snapshots = self.control.control.snapshots.iter();
        let exported = snapshots.any(Snapshot::is_of_export);
        if exported {
            self.change_history(Snapshot::remove_exports)?;
        }
        Ok(exported)
    }

    /// If there are snapshots, waits until a write by another program would get a later mtime than
    /// the log's last write. File times have the resolution of the kernel's tick.
    fn await_new_mtime(&self) {
        if self.control.control.snapshots.is_empty() {
            return;
        }
        for disk in &self.disks {
            let written = match written(disk.base.file().as_ref()) {
                0 => continue,
                nanoseconds => UNIX_EPOCH + Duration::from_nanos(nanoseconds),
            };
            // Don't wait for a clock that was set back.
            let passed = written.elapsed().unwrap_or(TICK);
            sync::sleep(TICK.saturating_sub(passed));
        }
    }

    /// Logs what closing left in the log. `keeps`: on purpose.
    fn report_remainder(&self, keeps: bool) {
        let dir = self.log.dir.display();
        if keeps {
            tracing::info!(
                "log {dir}: closed; it keeps its disks' history, and so their newest bytes"
            );
            return;
        }
        let left = self.disks.iter().map(|disk| {
            let index = disk.index();
            let older = index
                .frozen
                .as_ref()
                .map(|frozen| frozen.without(&index.active));
            bytes(&index.active) + older.as_ref().map_or(0, bytes)
        });
        let bytes: u64 = left.sum();
        tracing::warn!(
            "log {dir}: closed with {bytes} bytes that are not in the base images yet; they stay \
             in the log, and the next open goes on copying them ('walvisor disk checkpoint' copies \
             everything)"
        );
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

/// Bytes of data in a layer, zeroes excluded.
fn bytes(layer: &ExtentMap) -> u64 {
    let data = layer
        .iter()
        .filter(|piece| !matches!(piece.place, Some(Location::Zero { .. })));
    data.map(|piece| piece.sectors * SECTOR_SIZE).sum()
}
