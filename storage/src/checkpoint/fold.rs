//! Folding: a log that keeps history copies only its oldest segments to the base images.
//!
//! ```text
//!   base images ─ horizon ──▶ oldest segments │ segments that are kept ......... │ tail
//!                             └── folded ─────┘    any state in here can be seen
//! ```
//! The index knows the newest bytes of each sector, wherever they are in the log. The base images have to become what the
//! disks were at the end of the folded segments, so these are read once more: their summaries say what they hold. The index
//! then drops what it had in them, and reads go to the base images.

use std::collections::BTreeMap;

use crate::catalog::snapshot::Snapshot;
use crate::checkpoint::copy::{CopyOutcome, FrozenLayer};
use crate::checkpoint::keeper::Keeper;
use crate::checkpoint::pace::CopyPace;
use crate::error::{Error, ErrorKind, Result};
use crate::index::{IndexBuilder, Piece, Place};
use crate::log::history::Commit;
use crate::log::state::LogState;
use crate::medium::file::Segment;
use crate::mutant::{Mutant, planted};
use crate::recovery::live::read_live;
use crate::recovery::replay::place;
use crate::recovery::scan::FoundRecord;
use crate::sync::Arc;

/// How much of the log's room, or of its index's memory, history that must stay takes when the log warns, in percent.
const WARN_PERCENT: u128 = 80;

/// Who needs what comes behind this LSN, and what to do about it.
fn who_needs(staying: &[Snapshot], lsn: u64) -> String {
    match staying.iter().find(|snapshot| snapshot.lsn == lsn) {
        Some(Snapshot { name, .. }) => {
            format!("snapshot '{name}' needs the log; delete it with 'snapshot-delete {name}'")
        }
        None => "a look at a disk needs the log; end it (unlook)".to_owned(),
    }
}

/// Pieces that the index forgets at a time: requests wait for that.
const FORGOTTEN: usize = 512;

/// Segments that are to be folded: all up to this record.
struct FoldRange {
    segments: Vec<(Arc<Segment>, Commit)>,
    last: Commit,
}

impl Keeper {
    /// Folds segments until the log has room and keeps no more than it is to keep.
    ///
    /// # Errors
    /// If copying fails, or if snapshots keep what has to go.
    pub(super) fn fold(&mut self) -> Result<()> {
        // An attempt at a whole checkpoint that failed comes first: the index has a layer for it.
        if self.frozen_at.is_some() {
            return self.checkpoint(false, false).map(drop);
        }
        let log = self.log.clone();
        loop {
            let mut state = log.lock();
            if state.ring.waits_for_readers() {
                // They hold the room only for the time of one read.
                state.keeper.checkpoint = true;
                return Ok(());
            }
            let (retain, pinned) = (state.keeper.retain, state.keeper.held());
            let index = log.counters.index.bytes();
            self.warn_if_crowded(&state, index);
            let heavy = index >= log.index_limit / 2;
            let starved = state.ring.is_starved();
            let pressed = heavy || starved || state.ring.is_running_out(retain);
            let Some(range) = self.next_range(&mut state, pressed) else {
                drop(state);
                return match pinned {
                    Some(lsn) if starved || index >= log.index_limit => {
                        Err(self.pinned_error("no segment of the log can be freed", lsn))
                    }
                    // All of it is in the last segment.
                    None if heavy => self.checkpoint(false, false).map(drop),
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
                // Orders come between two folds.
                state.keeper.checkpoint = true;
                return Ok(());
            }
        }
    }

    /// Folds segments if none is free and none is to come: a checkpoint of everything needs one for the pending records.
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

    /// The segments that are to be folded now, if any. Reports once that history goes earlier than it was to.
    fn next_range(&mut self, state: &mut LogState, pressed: bool) -> Option<FoldRange> {
        let retain = state.keeper.retain;
        let pinned = match planted(Mutant::FoldPassesPin) {
            true => u64::MAX,
            false => state.keeper.held().unwrap_or(u64::MAX),
        };
        let now = state.clock.now().passed;
        let (wanted, early) = state.ring.expired(retain, now, pressed, pinned);
        let (count, more) = self.without_split_rewinds(state, wanted, pressed, pinned);
        let early = early + more;
        let shortened = early > 0 && retain != crate::Retention::All;
        if shortened && !self.shortened {
            tracing::warn!(
                "log {}: it has no room for all the history that it is to keep: the oldest goes; make it larger with \
                 'walvisor log resize'",
                self.log.dir.display()
            );
        }
        self.shortened |= shortened;
        let segments = state.ring.oldest(count);
        let last = segments.last()?.1;
        let stop = self.stop_before(self.control.control.with_rewinds(last.lsn));
        stop.map_or(Some(FoldRange { segments, last }), |stop| {
            Some(self.range_up_to(stop, state))
        })
    }

    /// Whether there is something that must stay in the log, for the simulation.
    #[cfg(test)]
    pub(crate) fn must_keep(&self) -> bool {
        self.log.lock().keeper.held().is_some()
    }

    /// The oldest snapshot between what the base images are as of and this LSN. They are to be as of it before they go on: from then
    /// on what it needs is saved before it is overwritten.
    fn stop_before(&self, lsn: u64) -> Option<Snapshot> {
        let control = &self.control.control;
        let between = control.header.checkpoint_lsn.get() + 1..lsn;
        Snapshot::all(control)
            .into_iter()
            .filter(|snapshot| between.contains(&snapshot.lsn))
            // These stay in the log.
            .filter(|snapshot| !control.splits_rewind(snapshot.lsn))
            .min_by_key(|snapshot| snapshot.lsn)
            .filter(|_| !planted(Mutant::FoldPassesPin))
    }

    /// What the base images are as of once the records up to this LSN are copied: the rewinds that follow count too, but only up to the
    /// first snapshot. Otherwise there would be two snapshots in the past of the images, and files saved for the newer one alone: the
    /// older one would be lost.
    pub(super) fn reach(&self, lsn: u64) -> u64 {
        let reached = self.control.control.with_rewinds(lsn);
        let stop = self.stop_before(reached).map(|snapshot| snapshot.lsn);
        stop.filter(|stop| *stop >= lsn).unwrap_or(reached)
    }

    /// The segments with the records up to a snapshot.
    fn range_up_to(&self, snapshot: Snapshot, state: &LogState) -> FoldRange {
        let lsn = self.control.control.without_rewinds(snapshot.lsn);
        // Rewinds that the base images have passed are not known any more.
        let lsn = lsn.min(state.pipeline.appended());
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

    /// Brings the base images from one snapshot to the next, as far as there are any and nothing else keeps them from it. Returns `false`
    /// if the time that closing may take is over.
    pub(super) fn fold_to_snapshots(&mut self) -> Result<bool> {
        while self.frozen_at.is_none() {
            let log = self.log.clone();
            let mut state = log.lock();
            let newest = self.control.control.with_rewinds(state.pipeline.appended());
            let held = state.keeper.held().unwrap_or(u64::MAX);
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

    /// How many of the oldest segments are folded if so many are to be: no rewind is split. If the log is pressed for room and
    /// fewer would be none, more. With the number of those that are more.
    fn without_split_rewinds(
        &self,
        state: &LogState,
        wanted: usize,
        pressed: bool,
        pinned: u64,
    ) -> (usize, usize) {
        let control = &self.control.control;
        if control.rewinds.is_empty() {
            return (wanted, 0);
        }
        let fits = |lsn| {
            let lsn = control.with_rewinds(lsn);
            lsn <= pinned && !control.splits_rewind(lsn)
        };
        let (mut fewer, mut more) = (0, None);
        for (count, lsn) in (1..).zip(state.ring.sealed_ends()) {
            match count <= wanted {
                _ if !fits(lsn) => {}
                true => fewer = count,
                false => more = more.or(Some(count)),
            }
        }
        match (fewer, more) {
            (0, Some(more)) if pressed => (more, more - wanted),
            _ => (fewer, 0),
        }
    }

    /// Warns once when what must stay of the history has almost filled the log, or the memory of its index; again if that was
    /// over meanwhile.
    fn warn_if_crowded(&mut self, state: &LogState, index: u64) {
        let (log, most, held) = (&self.log, state.ring.most(), state.keeper.held());
        let used = state.held_segments();
        let parts = [
            (used as u64, most as u64, "room"),
            (index, log.index_limit, "memory for the index"),
        ];
        let part = |(used, all, what)| (used as u128 * 100 / u128::from(u64::max(all, 1)), what);
        let fullest = parts.map(part).into_iter().max();
        let pinned = fullest.filter(|(percent, _)| *percent >= WARN_PERCENT);
        let pinned = pinned.zip(held);
        if let Some(((percent, what), lsn)) = pinned.filter(|_| !self.crowded) {
            tracing::warn!(
                "log {}: history that must stay takes {percent} % of its {what}, and writes fail at 100 %: {}",
                log.dir.display(),
                who_needs(&state.keeper.staying, lsn)
            );
        }
        self.crowded = pinned.is_some();
    }

    /// The error that says that something can't be done because of what comes behind this LSN.
    pub(super) fn pinned_error(&self, what: &str, lsn: u64) -> Error {
        let who = who_needs(&self.log.lock().keeper.staying, lsn);
        Error::full(format!("{}: {what}: {who}", self.log.dir.display()))
    }

    /// Returns whether the segments are folded. Otherwise the log is being closed, or everything was copied in their place.
    fn fold_range(&mut self, range: FoldRange, pace: CopyPace) -> Result<bool> {
        let copied = self.copy_range(&range, pace);
        self.end_pace();
        let layers = match copied {
            Ok((layers, CopyOutcome::Complete(damaged))) => match damaged.first() {
                Some(extents) => return self.give_up(&extents.to_error()),
                None => layers,
            },
            // The log is being closed.
            Ok((_, CopyOutcome::TimeUp(_))) => return Ok(false),
            Err(error) if error.kind() == ErrorKind::Damaged => return self.give_up(&error),
            Err(error) => return Err(error),
        };
        self.end_checkpoint(range.last, |keeper| keeper.forget(&layers, &range))?;
        Ok(true)
    }

    /// Copies what the segments left of each disk.
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

    /// Takes what was copied out of the indexes.
    fn forget(&self, layers: &[FrozenLayer], range: &FoldRange) {
        for (disk, layer) in layers {
            let mut pieces = layer.iter();
            loop {
                let some: Vec<Piece> = pieces.by_ref().take(FORGOTTEN).collect();
                if some.is_empty() {
                    break;
                }
                disk.index_mut().active.forget(&some);
                // Who waits for the index has the log's lock. This thread would take the index again before that thread wakes up.
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

    /// Copies everything: a part of the history can't be read, and what the disks were between it and the record that
    /// replaced it will never be known.
    ///
    /// # Errors
    /// If snapshots need the history, or if it was not replaced.
    fn give_up(&mut self, error: &Error) -> Result<bool> {
        let dir = self.log.dir.display();
        // What snapshots need of the base images is saved, if these have come that far.
        if self.log.lock().keeper.pinned().is_some() {
            return Err(Error::new(
                ErrorKind::Damaged,
                format!(
                    "{error}; the log in {dir} can't be folded without its snapshots and looks being lost"
                ),
            ));
        }
        tracing::error!("{error}; so the log in {dir} gives up the history that it keeps");
        self.checkpoint_once(false, false).and(Ok(false))
    }

    /// What the records of these segments, which are in the log only, leave of each disk.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`] if a record can't be read.
    fn layers_of(&self, range: &FoldRange) -> Result<Vec<FrozenLayer>> {
        let control = &self.control.control;
        let mut builders: BTreeMap<u32, IndexBuilder> = BTreeMap::new();
        let visit = &mut |found: FoundRecord<'_>| {
            // What counts now is also what counted as of the end of these segments: no rewind is split.
            if !found.counts || found.is_mark() {
                return;
            }
            let descriptor = found.descriptor;
            let place = place(descriptor, found.lsn, found.segment, found.offset);
            if matches!(place, Place::Zero { .. }) && planted(Mutant::FoldSkipsZeroes) {
                return;
            }
            let (sector, sectors) = (descriptor.sector.get(), descriptor.sectors.get());
            let builder = builders.entry(descriptor.disk_id.get()).or_default();
            builder.add(sector, sectors, place);
        };
        // Their records up to the last one are durable. The keeper's thread does nothing else meanwhile.
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
                    format!("{dir}: damaged: records of disk {id}, which this log does not have");
                Error::new(ErrorKind::Damaged, message)
            })?;
            Ok((disk, Arc::new(builder.finish())))
        });
        layers.collect()
    }
}
