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

use std::collections::BTreeMap;
use std::time::Duration;

use zerocopy::little_endian::U64;

use crate::catalog::control::ControlFile;
use crate::catalog::identity::{written, written_parts};
use crate::checkpoint::copy::{CopyOutcome, DamagedExtents, FrozenLayer, UnansweredIo};
use crate::checkpoint::pace::CopyPace;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Control, DiskEntry};
use crate::history::machine::{CopyEvent, Phase};
use crate::history::saved_file::SavedFileWriter;
use crate::history::spill::CopyBack;
use crate::history::troubles::Troubles;
use crate::index::ExtentMap;
use crate::log::commit::Commit;
use crate::log::committer::{Committer, Leader};
use crate::log::disk_state::DiskState;
use crate::log::state::{Log, LogState};
use crate::medium::cost::MediumCost;
use crate::mutant::{Mutant, planted};
use crate::sync::atomic::Ordering;
use crate::sync::{self, Arc};

/// A checkpoint of more extents than this measures the medium first, with 200 reads.
const MUCH_WORK: usize = if cfg!(test) { 0 } else { 1000 };
/// How many pauses of a millisecond closing waits for readers that hold room it needs.
const AWAITED_RESTS: u32 = 1000;
/// Pause before a failed checkpoint is tried again.
const RETRY: Duration = Duration::from_secs(1);

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
        let committer = Committer::new(log.clone(), 0, Arc::default())
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
            // A failed checkpoint waits for its retry. A segment file that is needed is made all
            // the same.
            let done = if paused {
                // This may make room.
                self.copy_spills_back();
                self.log.preallocate_segment(false, || {})
            } else {
                self.step(false)
            };
            if let Some(line) = troubles.report(&self.log, &done, paused) {
                tracing::error!("{line}");
            }
            paused |= done.is_err();
            if self.log.lock().ring.has_readers() {
                // A reader holds a segment only for one read, so look again soon.
                self.pause_and_reclaim();
            }
        }
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
            while idle(&state) {
                state = wanted.wait(state).expect("log state lock");
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
            self.control.control.durable_lsn = U64::new(state.pipeline.durable());
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
        let reach = self.reach(lsn);
        // Not every copy has drained the log, and the copying LSN proves no more than this.
        self.control.control.durable_lsn = U64::new(self.log.lock().pipeline.durable());
        // What goes to a spill file changes no image.
        let written = || layers.iter().filter(|(disk, _)| !disk.base.is_spilled());
        // In both slots: if one rots, the other still says that the base images may be ahead of a
        // damaged log.
        self.control.change_both(|control| {
            // The copy includes the rewinds that follow. An earlier, unfinished checkpoint may have
            // copied more.
            let copying = control.header.copying_lsn.get().max(reach);
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
        if let Some(lsn) = state.keeper.held()
            && lsn < self.control.control.with_rewinds(until)
        {
            drop(state);
            return Err(self.pinned_error("the log can't be copied to the base images", lsn));
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

    /// Ends a checkpoint: the base images durably hold everything up to `horizon`, and the rewinds
    /// that follow it, see [`reach`](Self::reach). `drop_copied` drops what was copied from the
    /// indexes.
    pub(super) fn end_checkpoint(
        &mut self,
        horizon: Commit,
        drop_copied: impl FnOnce(&mut Self),
    ) -> Result<()> {
        let lsn = horizon.lsn;
        let reached = self.reach(lsn);
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
            control.set_checkpoint(reached);
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
        state.keeper.reached = reached;
        state.horizon = Commit {
            lsn: reached,
            ..horizon
        };
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
