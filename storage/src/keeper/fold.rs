//! Folding: a log that keeps history copies only its oldest segments to the base images.
//!
//! ```text
//!   base images ─ horizon ──▶ oldest segments │ segments that are kept ......... │ tail
//!                             └── folded ─────┘    any state in here can be seen
//! ```
//! The index only knows the newest bytes of each sector. The base images have to become what the
//! disks were at the end of the folded segments, so those segments' summaries are read again to
//! find out what they hold. Then the index drops its extents in them, and reads go to the base
//! images.

use std::collections::BTreeMap;

use crate::catalog::retention::Retention;
use crate::catalog::snapshot::Snapshot;
use crate::checkpoint::copy::{CopyOutcome, FrozenLayer};
use crate::checkpoint::pace::CopyPace;
use crate::error::{Error, ErrorKind, Result};
use crate::index::{IndexBuilder, Location, Piece};
use crate::keeper::Keeper;
use crate::keeper::machine::CopyEvent;
use crate::log::commit::Commit;
use crate::log::holds::{HoldOwner, Holds};
use crate::log::state::LogState;
use crate::medium::file::Segment;
use crate::mutant::{Mutant, any_planted, planted};
use crate::recovery::live::read_live;
use crate::recovery::replay::place;
use crate::recovery::scan::FoundRecord;
use crate::sync::Arc;
use crate::tracepoints;

/// The log warns once history that must stay takes this many percent of its room or of its index
/// memory.
const WARN_PERCENT: u128 = 80;

/// Who needs the records after this LSN, and what to do about it.
fn who_needs(holds: &Holds, lsn: u64) -> String {
    match holds.owner_of(lsn) {
        Some(HoldOwner::Replica) => {
            "its archive lacks what comes after it; wait until the archive has it".to_owned()
        }
        Some(HoldOwner::KeptPoint(_) | HoldOwner::Export | HoldOwner::Rewind) => {
            "an export, or a restore in place, needs the log; wait until it has ended, or end the \
             export (export-cancel)"
                .to_owned()
        }
        Some(HoldOwner::Reader) => {
            "another process reads the log ('walvisor disk info', for instance); wait until it has \
             ended"
                .to_owned()
        }
        Some(HoldOwner::Snapshot(name)) => {
            format!("snapshot '{name}' needs the log; delete it with 'snapshot-delete {name}'")
        }
        Some(HoldOwner::Look) | None => {
            "an open look holds the log; close it with 'ctl unlook'".to_owned()
        }
    }
}

/// Pieces that the index forgets at a time, while requests wait.
const FORGOTTEN: usize = 512;

/// Segments to fold: everything up to `last`.
struct FoldRange {
    segments: Vec<(Arc<Segment>, Commit)>,
    last: Commit,
}

impl Keeper {
    /// Folds segments until the log has room and keeps no more than its retention.
    ///
    /// # Errors
    /// If copying fails, or if snapshots need what has to go.
    pub(super) fn fold(&mut self) -> Result<()> {
        // An unfinished full checkpoint comes first, because its layer is still in the index.
        if self.frozen_at.is_some() {
            return self.checkpoint(false, false).map(drop);
        }
        let log = self.log.clone();
        loop {
            // The last fold held what it freed.
            self.reclaim();
            let mut state = log.lock();
            if state.ring.waits_for_readers() {
                // They hold the room for one read only.
                state.keeper.checkpoint = true;
                return Ok(());
            }
            let newest = state.pipeline.appended();
            let for_replica = state.keeper.holds.held_for_replica(newest);
            let held = for_replica.or(state.keeper.holds.held_here());
            let briefly = for_replica.is_some() || state.keeper.holds.all_end_soon();
            let index = log.counters.index.bytes();
            self.warn_if_crowded(&state, index);
            let heavy = log.index_is_heavy();
            let starved = state.ring.is_starved();
            let pressed = heavy || state.is_pressed();
            let Some(range) = self.next_range(&mut state, pressed) else {
                let full = starved || log.index_is_full();
                let (is_read, retain) = (state.ring.has_readers(), state.keeper.retain);
                // Readers hold what would make room, for one read only.
                state.keeper.checkpoint |= full && is_read;
                drop(state);
                return match held {
                    // Writers wait until that has ended.
                    Some(_) if briefly => Ok(()),
                    Some(lsn) if full => {
                        Err(self.held_error("no segment of the log can be freed", lsn))
                    }
                    // Everything is in the last segment.
                    None if heavy || full && !is_read => {
                        let shortened = !matches!(retain, Retention::Nothing | Retention::All);
                        self.note_shortened(shortened);
                        self.checkpoint(false, false).map(drop)
                    }
                    _ => Ok(()),
                };
            };
            let pace = CopyPace::new(&log, &mut state, false);
            drop(state);
            if !self.fold_range(range, pace)? {
                return Ok(());
            }
            let mut state = log.lock();
            if !state.keeper.orders.is_empty() {
                // Serve orders between two folds.
                state.keeper.checkpoint = true;
                return Ok(());
            }
        }
    }

    /// Folds segments if none is free and none can be made: a full checkpoint needs one for the
    /// pending records.
    ///
    /// # Errors
    /// As [`fold`](Self::fold).
    pub(super) fn fold_for_room(&mut self) -> Result<()> {
        let log = self.log.clone();
        while self.frozen_at.is_none() {
            let mut state = log.lock();
            if !state.ring.is_used_up() || state.ring.waits_for_readers() {
                break;
            }
            let Some(range) = self.next_range(&mut state, true) else {
                break;
            };
            let pace = CopyPace::new(&log, &mut state, true);
            drop(state);
            if !self.fold_range(range, pace)? {
                break;
            }
        }
        Ok(())
    }

    /// The segments to fold now, if any. Reports once if history is dropped earlier than its
    /// retention says.
    fn next_range(&mut self, state: &mut LogState, pressed: bool) -> Option<FoldRange> {
        let retain = state.keeper.retain;
        let held = if planted(Mutant::FoldPassesHold) {
            u64::MAX
        } else {
            state.keeper.holds.held().unwrap_or(u64::MAX)
        };
        let now = state.clock.now().passed;
        let (wanted, early) = state.ring.expired(retain, now, pressed, held);
        let (count, more) = self.without_split_rewinds(state, wanted, pressed, held);
        let early = early + more;
        self.note_shortened(early > 0 && retain != Retention::All);
        let segments = state.ring.oldest(count);
        let last = segments.last()?.1;
        let stop = self.stop_before(last.lsn);
        stop.map_or(Some(FoldRange { segments, last }), |stop| {
            Some(self.range_up_to(stop, state))
        })
    }

    /// Reports once that history is dropped earlier than its retention says.
    fn note_shortened(&mut self, shortened: bool) {
        if shortened && !self.shortened {
            tracing::warn!(
                "log {}: it has no room for all the history it should keep, so the oldest goes; \
                 make it larger with 'walvisor log resize'",
                self.log.dir.display()
            );
        }
        self.shortened |= shortened;
    }

    /// Whether something must stay in the log, for the simulation.
    #[cfg(test)]
    pub(crate) fn must_keep(&self) -> bool {
        self.log.lock().keeper.holds.held().is_some()
    }

    /// The oldest snapshot between the base images' state and this LSN. The base images must stop
    /// at it before they move on; from then on, what it needs is saved before it is overwritten.
    fn stop_before(&self, lsn: u64) -> Option<Snapshot> {
        let control = &self.control.control;
        let between = control.header.checkpoint_lsn.get() + 1..lsn;
        Snapshot::all(control)
            .into_iter()
            .filter(|snapshot| between.contains(&snapshot.lsn))
            // Those stay in the log.
            .filter(|snapshot| !control.splits_rewind(snapshot.lsn))
            .min_by_key(|snapshot| snapshot.lsn)
            .filter(|_| !planted(Mutant::FoldPassesHold))
    }

    /// The segments with the records up to a snapshot.
    fn range_up_to(&self, snapshot: Snapshot, state: &LogState) -> FoldRange {
        let lsn = snapshot.lsn;
        let mut segments = state.ring.oldest(usize::MAX);
        let end = segments.iter().position(|(_, last)| last.lsn >= lsn);
        segments.truncate(end.map_or(segments.len(), |end| end + 1));
        FoldRange {
            segments,
            last: Commit {
                lsn,
                cid: snapshot.cid,
                unix_us: snapshot.unix_us,
            },
        }
    }

    /// Moves the base images from one snapshot to the next, as far as possible. Returns `false` if
    /// the time limit for closing ran out.
    pub(super) fn fold_to_snapshots(&mut self) -> Result<bool> {
        while self.frozen_at.is_none() {
            let log = self.log.clone();
            let mut state = log.lock();
            let newest = state.pipeline.appended();
            let held = state.keeper.holds.held().unwrap_or(u64::MAX);
            let stop = self.stop_before(newest).filter(|stop| stop.lsn <= held);
            let Some(stop) = stop else {
                break;
            };
            let range = self.range_up_to(stop, &state);
            let pace = CopyPace::new(&log, &mut state, true);
            drop(state);
            if !self.fold_range(range, pace)? {
                return Ok(self.frozen_at.is_none() && !self.log.lock().keeper.is_over());
            }
        }
        Ok(true)
    }

    /// How many of the oldest segments to fold if `wanted` should be, without splitting a rewind:
    /// fewer; or, if that would be none and the log is pressed for room, more. Also returns how
    /// many more.
    fn without_split_rewinds(
        &self,
        state: &LogState,
        wanted: usize,
        pressed: bool,
        held: u64,
    ) -> (usize, usize) {
        let control = &self.control.control;
        if control.rewinds.is_empty() {
            return (wanted, 0);
        }
        let fits = |lsn| lsn <= held && !control.splits_rewind(lsn);
        let (mut fewer, mut more) = (0, None);
        for (count, lsn) in (1..).zip(state.ring.sealed_ends()) {
            if !fits(lsn) {
                continue;
            }
            if count <= wanted {
                fewer = count;
            } else {
                more = more.or(Some(count));
            }
        }
        match (fewer, more) {
            (0, Some(more)) if pressed => (more, more - wanted),
            _ => (fewer, 0),
        }
    }

    /// Warns once when history that must stay has almost filled the log or its index memory, and
    /// again after it was better in between.
    fn warn_if_crowded(&mut self, state: &LogState, index: u64) {
        let (log, most, held) = (
            &self.log,
            state.ring.most(),
            state.keeper.holds.held_firmly(),
        );
        let used = state.held_segments();
        let parts = [
            (used as u64, most as u64, "room"),
            (index, log.index_limit, "memory for the index"),
        ];
        let part = |(used, all, what)| (used as u128 * 100 / u128::from(u64::max(all, 1)), what);
        let fullest = parts.map(part).into_iter().max();
        let crowded = fullest.filter(|(percent, _)| *percent >= WARN_PERCENT);
        let crowded = crowded.zip(held);
        if let Some(((percent, what), lsn)) = crowded.filter(|_| !self.crowded) {
            tracing::warn!(
                "log {}: history that must stay takes {percent} % of its {what}, and writes fail \
                 at 100 %: {}",
                log.dir.display(),
                who_needs(&state.keeper.holds, lsn)
            );
        }
        self.crowded = crowded.is_some();
    }

    /// The error for something that can't be done because the records after this LSN must stay.
    pub(super) fn held_error(&self, what: &str, lsn: u64) -> Error {
        let who = who_needs(&self.log.lock().keeper.holds, lsn);
        Error::full(format!("{}: {what}: {who}", self.log.dir.display()))
    }

    /// Returns whether the segments were folded. Otherwise the log is closing, or everything was
    /// copied instead.
    fn fold_range(&mut self, range: FoldRange, pace: CopyPace) -> Result<bool> {
        let (lsn, segments) = (range.last.lsn, range.segments.len());
        let control = &self.control.control;
        assert!(
            control.header.checkpoint_lsn.get() <= lsn || any_planted(),
            "a fold never takes the images back"
        );
        assert!(
            !control.splits_rewind(lsn) || any_planted(),
            "the images do not stop inside a rewind"
        );
        tracepoints::fold(lsn, segments);
        let folded = self.copy_and_forget(range, pace);
        tracepoints::folded(lsn, matches!(folded, Ok(true)));
        folded
    }

    fn copy_and_forget(&mut self, range: FoldRange, pace: CopyPace) -> Result<bool> {
        self.enter(CopyEvent::Begun);
        let copied = self.copy_range(&range, pace);
        self.end_pace();
        let (folded, damaged) = match copied {
            Ok((layers, CopyOutcome::Complete(damaged))) => match damaged.first() {
                Some(extents) => (Ok(false), Some(extents.to_error())),
                None => {
                    let forget = |keeper: &mut Self| keeper.forget(&layers, &range);
                    let settled = self.end_checkpoint(range.last, forget);
                    (settled.map(|()| true), None)
                }
            },
            // The log is closing.
            Ok((_, CopyOutcome::TimeUp(_))) => (Ok(false), None),
            Err(error) if error.kind() == ErrorKind::Damaged => (Ok(false), Some(error)),
            Err(error) => (Err(error), None),
        };
        self.enter(CopyEvent::Ended);
        damaged.map_or(folded, |error| self.give_up(&error))
    }

    /// Copies the combined effect of the segments on each disk.
    fn copy_range(
        &mut self,
        range: &FoldRange,
        pace: CopyPace,
    ) -> Result<(Vec<FrozenLayer>, CopyOutcome)> {
        let lsn = range.last.lsn;
        if self.log.lock().pipeline.durable() < lsn {
            self.drain(lsn)?;
        }
        let layers = self.layers_of(range)?;
        let copied = self.copy_layers(lsn, &layers, pace)?;
        Ok((layers, copied))
    }

    /// Removes what was copied from the indexes.
    fn forget(&self, layers: &[FrozenLayer], range: &FoldRange) {
        for (disk, layer) in layers {
            let mut pieces = layer.iter();
            loop {
                let some: Vec<Piece> = pieces.by_ref().take(FORGOTTEN).collect();
                if some.is_empty() {
                    break;
                }
                disk.index_mut().active.forget(&some);
                // A thread waiting for the index holds the log's lock. Without this, the present
                // thread would retake the index before the other one wakes up.
                drop(self.log.lock());
            }
        }
        let whole = range.segments.iter();
        let whole = whole.filter(|(_, last)| last.lsn <= range.last.lsn);
        let segments: Vec<_> = whole.map(|(segment, _)| segment.clone()).collect();
        for disk in &self.disks {
            disk.index_mut().active.release(&segments);
        }
    }

    /// Gives up the history by copying everything: a part of it can't be read, and the disks' state
    /// between there and the record that overwrote it is lost.
    ///
    /// # Errors
    /// If snapshots need the history, or if the damaged part was not overwritten.
    fn give_up(&mut self, error: &Error) -> Result<bool> {
        let dir = self.log.dir.display();
        // Snapshots that the base images have moved past have what they need in saved files.
        if self.log.lock().keeper.holds.kept().is_some() {
            return Err(Error::new(
                ErrorKind::Damaged,
                format!("{error}; folding the log in {dir} would lose its snapshots and looks"),
            ));
        }
        let state = self.log.lock();
        let newest = state.pipeline.appended();
        let for_replica = state.keeper.holds.held_for_replica(newest);
        drop(state);
        if for_replica.is_some() {
            return Err(Error::new(
                ErrorKind::Damaged,
                format!("{error}; folding the log in {dir} waits until its archive has the rest"),
            ));
        }
        tracing::error!("{error}; so the log in {dir} drops its history");
        self.checkpoint_once(false, false).and(Ok(false))
    }

    /// The combined effect of these segments' records on each disk.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`] if a record can't be read.
    fn layers_of(&self, range: &FoldRange) -> Result<Vec<FrozenLayer>> {
        let control = &self.control.control;
        let mut builders: BTreeMap<u32, IndexBuilder> = BTreeMap::new();
        let visit = &mut |found: FoundRecord<'_>| {
            // What counts now also counted at the end of these segments, because no rewind is
            // split.
            if !found.counts {
                return;
            }
            let descriptor = found.descriptor;
            let place = place(descriptor, found.lsn, found.segment, found.offset);
            if matches!(place, Location::Zero { .. }) && planted(Mutant::FoldSkipsZeroes) {
                return;
            }
            let (sector, sectors) = (descriptor.sector.get(), descriptor.sectors.get());
            let builder = builders.entry(descriptor.disk_id.get()).or_default();
            builder.add(sector, sectors, place);
        };
        // Their records up to the last one are durable, and the keeper's thread does nothing else
        // meanwhile.
        let segments = range.segments.iter();
        let segments: Vec<_> = segments
            .map(|(segment, last)| (segment.clone(), last.lsn))
            .collect();
        let until = match segments.last() {
            Some((_, last_lsn)) if *last_lsn > range.last.lsn => range.last.lsn,
            _ => u64::MAX,
        };
        read_live(&segments, until, control, 1, visit)?;
        let disk = |id: u32| self.disks.iter().find(|disk| disk.id == id).cloned();
        let layers = builders.into_iter().map(|(id, builder)| {
            let disk = disk(id).ok_or_else(|| {
                let dir = self.log.dir.display();
                let message =
                    format!("{dir}: damaged: it has records of disk {id}, but no such disk");
                Error::new(ErrorKind::Damaged, message)
            })?;
            let layer = builder.finish()?;
            let end = layer.iter().map(|piece| piece.sector + piece.sectors).max();
            if end.is_some_and(|end| end > disk.sectors()) {
                let path = disk.path.display();
                let message = format!("{path}: damaged: the log has records beyond its end");
                return Err(Error::new(ErrorKind::Damaged, message));
            }
            Ok((disk, Arc::new(layer)))
        });
        layers.collect()
    }
}
