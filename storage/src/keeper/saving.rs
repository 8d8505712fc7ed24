//! Saving what snapshots need from the base images, before a copy overwrites it. See
//! [`saved`](crate::view::saved).

use zerocopy::little_endian::U32;

use crate::catalog::snapshot::Snapshot;
use crate::checkpoint::copy::{self, FrozenLayer};
use crate::checkpoint::pace::CopyPace;
use crate::error::Result;
use crate::keeper::Keeper;
use crate::keeper::machine::CopyEvent;
use crate::keeper::saved_file::SavedFileWriter;
use crate::log::disk_state::DiskState;
use crate::medium::cost::MediumCost;
use crate::medium::filesystem::remove_leftover;
use crate::mutant::{Mutant, planted};
use crate::view::saved;

/// How an attempt to save what snapshots need ended.
enum SaveOutcome {
    /// Everything is saved, and durable.
    Complete,
    /// The time limit for closing ran out.
    TimeUp,
    /// The snapshot and its files were deleted in the meantime.
    Deleted,
}

impl Keeper {
    /// Saves what snapshots need from the base images before these layers, of records up to
    /// `until`, are copied. Counts as part of the copy's work for `pace`. Returns `false` if the
    /// time limit for closing ran out before everything was saved.
    ///
    /// Quick orders are served between saved parts, see [`machine`](crate::keeper::machine).
    ///
    /// # Errors
    /// If a base image can't be read, or a saved file or the control file can't be written.
    pub(super) fn save_for_snapshots(
        &mut self,
        until: u64,
        layers: &[FrozenLayer],
        pace: &mut CopyPace,
        medium: MediumCost,
    ) -> Result<bool> {
        loop {
            match self.try_to_save(until, layers, pace, medium) {
                Ok(SaveOutcome::Complete) => return Ok(true),
                Ok(SaveOutcome::TimeUp) => return Ok(false),
                // Older snapshots may need the same in files of their own.
                Ok(SaveOutcome::Deleted) => {}
                // An export must not stop the disks.
                Err(error) if self.end_exports()? => {
                    let dir = self.log.dir.display();
                    tracing::warn!(
                        "log {dir}: exports end, because what they need can't be saved: {error}"
                    );
                }
                Err(error) => return Err(error),
            }
            self.enter(CopyEvent::SnapshotDeleted);
        }
    }

    /// Saves for the newest snapshot that exists when this is called.
    fn try_to_save(
        &mut self,
        until: u64,
        layers: &[FrozenLayer],
        pace: &mut CopyPace,
        medium: MediumCost,
    ) -> Result<SaveOutcome> {
        let control = &self.control.control;
        let reached = control.header.checkpoint_lsn.get();
        let snapshots = control.snapshots.iter();
        let snapshots = snapshots
            .filter(|entry| !(planted(Mutant::ExportUnsaved) && Snapshot::is_of_export(entry)))
            .map(|entry| entry.lsn.get());
        let newest = snapshots.filter(|lsn| *lsn <= reached).max();
        let Some(lsn) = newest.filter(|lsn| *lsn < until) else {
            self.saving = None;
            return Ok(SaveOutcome::Complete);
        };
        let known = self.saving.take().filter(|saving| saving.lsn == lsn);
        let mut saving = match known {
            Some(saving) => saving,
            None => {
                // A failed write of the control file may be durable all the same: what it names
                // must stay.
                let tried = if self.saved.0 == lsn { self.saved.1 } else { 0 };
                let count = control.saved(lsn).max(tried);
                match SavedFileWriter::open(&self.log, &control.header.log, lsn, count)? {
                    Some(saving) => saving,
                    None => return Ok(SaveOutcome::TimeUp),
                }
            }
        };
        // Older snapshots continue in these files.
        let mut older = control.snapshots.clone();
        older.retain(|entry| entry.lsn.get() <= lsn);
        let disks = control.disks.iter();
        // Not a disk whose records were discarded since.
        let whole = disks.filter(|disk| disk.void_lsn.get() <= lsn);
        // Nor one that has another image now.
        let ids = whole.map(|disk| disk.id.get());
        let ids = ids.filter(|id| control.since(*id) <= lsn);
        let unlisted = |id: &u32| {
            let mut older = older.iter();
            older.any(|entry| entry.lsn == lsn && entry.saved == 0 && entry.has(*id))
        };
        for id in ids.filter(unlisted) {
            saving.push(id, 0..0, None)?;
        }
        let needed = |disk: &DiskState| {
            let mut older = older.iter();
            older.any(|entry| entry.has(disk.id) && disk.since_lsn <= entry.lsn.get())
        };
        let Some(ranges) = saving.find_unsaved(layers, needed)? else {
            self.saving = Some(saving);
            return Ok(SaveOutcome::TimeUp);
        };
        let cost = ranges.cost(medium.operation);
        if cost > 0 {
            pace.plan(cost + copy::cost(layers, medium));
        }
        let operation = medium.operation;
        let whole = saving.save(ranges, pace, operation, &mut || {
            self.do_urgent_work(&mut || {})
        })?;
        pace.end_saving(cost);
        let mut entries = self.control.control.snapshots.iter();
        if !entries.any(|entry| entry.lsn == lsn) {
            return Ok(SaveOutcome::Deleted);
        }
        saving.write()?;
        saving.sync()?;
        let count = saving.count;
        self.saved = (lsn, count);
        if count > self.control.control.saved(lsn) {
            // In both slots: if one rots, the other must know of everything saved.
            for _ in 0..2 {
                self.control.change(|control| {
                    let entries = control.snapshots.iter_mut();
                    for entry in entries.filter(|entry| entry.lsn == lsn) {
                        entry.saved = U32::new(count);
                    }
                })?;
            }
        }
        self.saving = Some(saving);
        self.note_saved();
        if whole {
            Ok(SaveOutcome::Complete)
        } else {
            Ok(SaveOutcome::TimeUp)
        }
    }

    /// Publishes how much is saved for each snapshot.
    pub(super) fn note_saved(&self) {
        let (dir, files) = (&self.log.dir, self.log.medium.files());
        let (snapshots, bytes) = saved::snapshots(&*files, dir, &self.control.control);
        let mut state = self.log.lock();
        state.keeper.saved = self.control.control.saved_files();
        state.keeper.holds.set_snapshots(&self.control.control);
        (state.keeper.snapshots, state.keeper.saved_bytes) = (snapshots, bytes);
    }

    /// Removes the saved files that no snapshot needs any more.
    pub(crate) fn remove_saved(&mut self) {
        let (dir, files) = (&self.log.dir, self.log.medium.files());
        let entries = &self.control.control.snapshots;
        let needed = |lsn| entries.iter().any(|entry| entry.lsn == lsn);
        for name in files.names(dir).unwrap_or_default() {
            if saved::lsn_of(dir, &name).is_some_and(|lsn| !needed(lsn)) {
                remove_leftover(&*files, &dir.join(name));
            }
        }
        let gone = |saving: &mut SavedFileWriter| !needed(saving.lsn);
        self.saving.take_if(gone);
        self.note_saved();
    }
}
