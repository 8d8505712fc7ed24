//! A checkpoint, for all disks of the log at one LSN *C* (the newest record when it begins):
//! 1. freeze every disk's index, and make everything up to *C* durable in the log;
//! 2. note *C* in the control file, copy the frozen extents to the base images and sync those
//!    ([`copy`](crate::checkpoint::copy));
//! 3. write the control file: checkpoint LSN *C*, first sequence still needed; sync it;
//! 4. drop the frozen indexes and recycle the segments that no reader holds any more.
//!
//! Records above *C* are never copied, so a crash at any point leaves base images that the log,
//! replayed from the previous checkpoint LSN, brings to the same state.

use zerocopy::little_endian::U64;

use crate::catalog::identity::{written, written_parts};
use crate::checkpoint::copy::{CopyOutcome, DamagedExtents, FrozenLayer};
use crate::checkpoint::pace::CopyPace;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Control, DiskEntry};
use crate::index::ExtentMap;
use crate::keeper::machine::{CopyEvent, CopyPhase};
use crate::keeper::{Keeper, NewGeneration};
use crate::log::commit::Commit;
use crate::log::disk_state::DiskState;
use crate::medium::cost::MediumCost;
use crate::mutant::{Mutant, any_planted, planted};
use crate::sync::Arc;
use crate::sync::atomic::Ordering;

/// A checkpoint of more extents than this measures the medium first, with 200 reads.
const MUCH_WORK: usize = if cfg!(test) { 0 } else { 1000 };
/// How many pauses of a millisecond closing waits for readers that hold room it needs.
const AWAITED_RESTS: u32 = 1000;

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

impl Keeper {
    /// Retires the oldest `count` segments, and frees those that no reader holds.
    fn recycle(&self, count: usize) {
        let state = self.log.lock();
        let (oldest, applied) = (state.ring.oldest(count), state.pipeline.applied());
        drop(state);
        assert!(
            oldest.iter().all(|(_, last)| last.lsn <= applied) || any_planted(),
            "a segment is freed once its records are in the images"
        );
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

    /// As [`drain`](Self::drain), for an order. If not even the keeper finds room, the order fails,
    /// and no write that waits.
    pub(super) fn drain_for_order(&mut self, lsn: u64) -> Result<()> {
        let mut state = self.log.lock();
        if state.pipeline.batched() < lsn {
            state.keeper.draining = Some(lsn);
            let fits = self.log.finds_room(&state);
            state.keeper.draining = None;
            if !fits {
                let dir = self.log.dir.display();
                let message = format!(
                    "{dir}: the log is full, and writes wait for its room; try again once it has some"
                );
                return Err(Error::new(ErrorKind::Io, message));
            }
        }
        drop(state);
        self.drain(lsn)
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
        let durable = self.log.lock().pipeline.durable();
        assert!(
            lsn <= durable || any_planted(),
            "only durable records are copied"
        );
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
    pub(crate) fn phase(&self) -> CopyPhase {
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
        assert!(
            state.pipeline.applied() <= lsn && lsn <= state.pipeline.appended() || any_planted(),
            "the images move ahead, and not past the log"
        );
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

    /// Brings the base images up to `lsn`; `exactly`: to one LSN, and they hold no part of a later
    /// checkpoint that failed.
    pub(super) fn checkpoint_to(&mut self, lsn: u64, exactly: bool) -> Result<()> {
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
}
