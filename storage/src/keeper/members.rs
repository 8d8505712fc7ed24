//! Disks join and leave a log in use. One that leaves gets a checkpoint of its own, after which its
//! entry in the control file says that its records are void. Other disks are not copied. If the log
//! keeps history, nothing is copied: the disk is detached and its records stay in the log, as with
//! a disk that was opened as a detached one.

use std::path::{Path, PathBuf};

use zerocopy::little_endian::U64;

use crate::catalog::log_location::LogLocation;
use crate::catalog::options::DiskOptions;
use crate::checkpoint::copy::CopyOutcome;
use crate::error::{Error, ErrorKind, Result};
use crate::keeper::Keeper;
use crate::keeper::checkpoint::settle;
use crate::keeper::copy_back::CopyBack;
use crate::keeper::machine::CopyEvent;
use crate::log::disk_state::DiskState;
use crate::log::orders::DiskAdoption;
use crate::log::pipeline::{MarkCommit, Modification};
use crate::medium::filesystem::{OpenMode, files};
use crate::mutant::{Mutant, planted};
use crate::sync::Arc;
use crate::sync::atomic::Ordering;

impl Keeper {
    /// Adds a disk. `path`: its image's, with links resolved.
    pub(super) fn add(
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
                self.refuse_other_file(&self.disks[place], &options.path)?;
                return self.reattach(place, options);
            }
            let disk = self.disks[place].clone();
            self.remove(&disk, false)?;
        }
        let appended = self.log.lock().pipeline.appended();
        // The disk's past may begin here, so a power cut must not take this state back.
        self.drain_for_order(appended)?;
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

    /// Refuses a file at the path of a detached disk if it is another one than the disk's image,
    /// which is open.
    fn refuse_other_file(&self, disk: &DiskState, path: &Path) -> Result<()> {
        let there = files()
            .open(path, OpenMode::Read)
            .and_then(|file| file.inode());
        let there = there.map_err(|error| Error::io("open the disk", path, error))?;
        let held = disk.base.file().inode();
        let held = held.map_err(|error| Error::io("identify the disk", path, error))?;
        if (held.device, held.number) == (there.device, there.number) {
            return Ok(());
        }
        let (path, dir) = (path.display(), self.log.dir.display());
        Err(Error::new(
            ErrorKind::WrongLog,
            format!(
                "{path}: another file than the image of the disk that was here, of which the log in \
                 {dir} keeps records; put that image back, or choose another path, or, once the log \
                 is closed, discard those records with: walvisor disk discard {path} --log {dir}"
            ),
        ))
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
}
