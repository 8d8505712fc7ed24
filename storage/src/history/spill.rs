//! Images that fail: their disks' bytes go to [spill files](crate::log::spill), and back once that
//! works again.
//!
//! A log with one disk has none: nobody else waits for the room that its image doesn't free.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

use crate::checkpoint::copy::{CopyOutcome, FailedImage, FrozenLayer, ImageFailures, copy};
use crate::checkpoint::pace::CopyPace;
use crate::error::{Error, ErrorKind, Result};
use crate::format::Control;
use crate::history::keeper::{Keeper, announce_writes, settle};
use crate::log::disk_state::DiskState;
use crate::log::spill::{Spill, SpillPaths, is_spill};
use crate::medium::cost::MediumCost;
use crate::medium::filesystem::remove_leftover;
use crate::medium::holes::DataRanges;
use crate::mutant::{Mutant, planted};
use crate::sync::{self, Arc};
use crate::{Buffer, SECTOR_SIZE};

/// Least pause before an image that failed is tried again.
const RETRY: Duration = Duration::from_secs(1);
/// An attempt that failed, or a part that was copied, is followed by a pause of so many times as
/// long as it took: the keeper does nothing else meanwhile.
const PAUSE_AFTER_FAILURE: u32 = 20;
const PAUSE_AFTER_PART: u32 = 4;
/// A part that took less is followed by the next one.
const QUICK: Duration = Duration::from_millis(50);
/// Most sectors copied back at a time. The keeper does nothing else meanwhile, and the image may be
/// slow.
const STEP: u64 = (256 << 10) / SECTOR_SIZE;

/// Copying a spill file back to its image.
#[derive(Default)]
pub(crate) struct CopyBack {
    /// The control file says that the image is being written.
    announced: bool,
    /// Sectors that are left.
    rest: VecDeque<Range<u64>>,
    /// When to go on.
    retry: Option<Instant>,
}

impl Keeper {
    /// Copies layers to their images, and to spill files where an image fails.
    ///
    /// # Errors
    /// As [`copy`]; or an image fails and there is no spill file for it.
    pub(super) fn copy_or_spill(
        &mut self,
        layers: &[FrozenLayer],
        mut pace: CopyPace,
        medium: MediumCost,
    ) -> Result<CopyOutcome> {
        let log = self.log.clone();
        let (mut layers, mut damaged) = (layers.to_vec(), Vec::new());
        loop {
            let mut failures = ImageFailures {
                slow_counts: self.disks.len() > 1,
                found: Vec::new(),
            };
            let urgent_work = |meanwhile: &mut dyn FnMut()| self.do_urgent_work(meanwhile);
            let over = || log.lock().keeper.is_over();
            let copied = copy(
                &log,
                &layers,
                pace,
                medium,
                &mut failures,
                urgent_work,
                over,
            );
            match copied? {
                CopyOutcome::Complete(mut found) => damaged.append(&mut found),
                CopyOutcome::TimeUp(mut found) => {
                    damaged.append(&mut found);
                    return Ok(CopyOutcome::TimeUp(damaged));
                }
            }
            let failed = failures.found;
            if failed.is_empty() {
                return Ok(CopyOutcome::Complete(damaged));
            }
            let has_failed =
                |disk: &DiskState| failed.iter().any(|failed| failed.disk.id == disk.id);
            // Their damage is found again.
            damaged.retain(|extents| !has_failed(&extents.disk));
            layers.retain(|(disk, _)| has_failed(disk));
            failed
                .into_iter()
                .try_for_each(|failed| self.begin_spill(failed))?;
            pace = CopyPace::new(&log, &mut log.lock(), true);
        }
    }

    /// Gives a disk a spill file.
    fn begin_spill(&mut self, FailedImage { disk, error }: FailedImage) -> Result<()> {
        if self.disks.len() < 2 {
            return Err(error);
        }
        let spill = match self.make_spill(&disk) {
            Ok(spill) => spill,
            Err(why) => {
                tracing::warn!("{}: no spill file for it: {why}", disk.path.display());
                return Err(error);
            }
        };
        disk.base.set_spill(Some(Arc::new(spill)));
        self.new_generations
            .retain(|(other, _)| other.id != disk.id);
        if disk.note_trouble(&error) {
            tracing::error!(
                "{error}; what it lacks goes to a spill file in {} until it can be written again; other \
                 disks go on",
                self.log.dir.display()
            );
        }
        Ok(())
    }

    fn make_spill(&mut self, disk: &DiskState) -> Result<Spill> {
        self.log.medium.check_place()?;
        let (files, bytes) = (self.log.medium.files(), disk.sectors() * SECTOR_SIZE);
        let paths = SpillPaths::new(&self.log.dir, &disk.uuid);
        let spill = Spill::create(&*files, paths, (self.log.uuid, disk.uuid), bytes)?;
        // Only now that there is a map: from here on, an open needs one.
        let room = self.control.control.clone().set_spilled(disk.id, true);
        room.map_err(|error| error.of_file(&self.log.dir))?;
        // If nobody knew whether the medium says so, the next attempt must not remove these files.
        let spilled = |control: &mut Control| {
            control.set_spilled(disk.id, true).expect("there is room");
        };
        if planted(Mutant::SpillUnsure) {
            self.control.change(spilled)
        } else {
            self.change_certainly(spilled)
        }?;
        // In the other slot too: if the newer one rots, an open must not take the image for
        // complete. If this fails, the next write of the control file does it.
        let _ = self.control.write();
        Ok(spill)
    }

    /// Makes the spill files as long as their disks.
    pub(super) fn grow_spills(&self, layers: &[FrozenLayer]) -> Result<()> {
        layers
            .iter()
            .try_for_each(|(disk, _)| match disk.base.spill() {
                Some(spill) => spill.grow(disk.sectors() * SECTOR_SIZE),
                None => Ok(()),
            })
    }

    /// Whether a disk has a spill file.
    pub(super) fn has_spills(&self) -> bool {
        self.spilled().next().is_some()
    }

    /// The disks that have a spill file.
    fn spilled(&self) -> impl Iterator<Item = &Arc<DiskState>> {
        self.disks.iter().filter(|disk| disk.base.is_spilled())
    }

    /// Copies spill files back, as long as nothing else is to do. What fails is noted, and tried
    /// again after a pause.
    pub(super) fn copy_spills_back(&mut self) {
        let due = self.spilled().filter(|disk| self.pause_of(disk).is_zero());
        for disk in due.cloned().collect::<Vec<_>>() {
            // Noted, and tried again.
            let _ = self.copy_spill_back(&disk);
        }
    }

    /// How long the copy back of a disk pauses yet.
    fn pause_of(&self, disk: &DiskState) -> Duration {
        let retry = self.copies_back.get(&disk.id).and_then(|back| back.retry);
        retry.map_or(Duration::ZERO, |retry| {
            retry.saturating_duration_since(sync::now())
        })
    }

    /// How long the keeper may sleep before it goes on copying spill files back.
    pub(super) fn until_copy_back(&self) -> Duration {
        let pauses = self.spilled().map(|disk| self.pause_of(disk));
        pauses.min().unwrap_or(Duration::ZERO)
    }

    /// Copies a disk's spill file back, whatever else is to do, and returns once its image has
    /// everything.
    ///
    /// # Errors
    /// If the image still fails, or the time limit for closing ran out.
    pub(super) fn bring_up_to_date(&mut self, disk: &Arc<DiskState>) -> Result<()> {
        while !self.copy_spill_back(disk)? {
            self.refuse_over()?;
            if !self.log.lock().keeper.stop {
                // Other disks need their room. What fails there is reported elsewhere.
                let _ = self.step(false);
            }
        }
        Ok(())
    }

    /// Copies a part of a disk's spill file back: all, unless there is something else to do.
    /// Returns whether the image has everything.
    fn copy_spill_back(&mut self, disk: &Arc<DiskState>) -> Result<bool> {
        let Some(spill) = disk.base.spill() else {
            return Ok(true);
        };
        let mut back = self.copies_back.remove(&disk.id).unwrap_or_default();
        let begun = sync::now();
        let copied = self.copy_parts_back(disk, &spill, &mut back);
        let took = sync::now() - begun;
        match &copied {
            Ok(true) => return Ok(true),
            Ok(false) if took < QUICK => back.retry = None,
            Ok(false) => back.retry = sync::now().checked_add(took * PAUSE_AFTER_PART),
            Err(error) => {
                disk.note_trouble(error);
                // A failed sync may have dropped what was copied so far, and the next one would not
                // tell.
                back.rest.clear();
                spill.count_all_as_written();
                let pause = RETRY.max(took * PAUSE_AFTER_FAILURE);
                back.retry = sync::now().checked_add(pause);
            }
        }
        self.copies_back.insert(disk.id, back);
        copied
    }

    fn copy_parts_back(
        &mut self,
        disk: &Arc<DiskState>,
        spill: &Spill,
        CopyBack {
            announced, rest, ..
        }: &mut CopyBack,
    ) -> Result<bool> {
        if !*announced {
            self.announce_copy_back(disk)?;
            *announced = true;
        }
        let begun = sync::now();
        loop {
            if rest.is_empty() {
                // Also what was spilled since this began.
                rest.extend(spill.take_written());
            }
            let Some(range) = rest.pop_front() else {
                break;
            };
            let part = range.start..range.end.min(range.start + STEP);
            copy_sectors(disk, spill, part.clone())?;
            if part.end < range.end {
                rest.push_front(part.end..range.end);
            }
            let state = self.log.lock();
            let keeper = &state.keeper;
            // If copies fail, this may be what makes room.
            let wanted = keeper.checkpoint || state.ring.is_short() || state.ring.holds_back();
            let busy = wanted && !self.step_failed;
            if busy || keeper.stop || !keeper.orders.is_empty() || sync::now() - begun > QUICK {
                return Ok(false);
            }
        }
        self.end_spill(disk, spill)?;
        Ok(true)
    }

    /// Notes in the control file that a disk's image is about to be written.
    fn announce_copy_back(&mut self, disk: &DiskState) -> Result<()> {
        self.control.change_both(|control| {
            announce_writes(control, disk, |entry| entry.cut_samples(0));
        })
    }

    /// The image has everything: makes that durable, and removes the spill file.
    fn end_spill(&mut self, disk: &Arc<DiskState>, spill: &Spill) -> Result<()> {
        if !planted(Mutant::CopyBackUnsynced) {
            disk.mark(true)?;
        }
        // The samples must be of what is on the medium. A sync that failed earlier may have left
        // other bytes in the cache.
        if !planted(Mutant::CopyBackTrustsCache) {
            let settled = disk.base.file().drop_cache();
            settled.map_err(|error| Error::io("sync the base image", &disk.path, error))?;
        }
        let image = [(disk.clone(), [None, None])];
        // Nothing may be added to the file while an open might ignore it.
        self.change_certainly(|control| {
            let cleared = control.set_spilled(disk.id, false);
            cleared.expect("there is an entry");
            settle(control, &image);
        })?;
        disk.base.set_spill(None);
        // A copy that is tried again has not announced that it writes to this image.
        self.copying = None;
        // As long as one slot names them, the files stay.
        if self.control.write().is_ok() {
            spill.paths().remove(&*self.log.medium.files());
        }
        if disk.end_trouble() {
            let path = disk.path.display();
            tracing::warn!("{path}: its image can be written again, and has everything");
        }
        Ok(())
    }

    /// Brings all images up to date for a close, as far as that works. Returns whether it did.
    pub(super) fn end_spills(&mut self) -> bool {
        for disk in self.disks.clone() {
            if let Err(error) = self.bring_up_to_date(&disk) {
                tracing::warn!(
                    "{}: closed while its image lacks bytes; they are in a spill file in {}: {error}",
                    disk.path.display(),
                    self.log.dir.display()
                );
            }
        }
        !self.has_spills()
    }

    /// Removes spill files that the control file doesn't name: a crash came before it did, or after
    /// it no longer did. Notes the trouble of disks that have one.
    pub(crate) fn remove_stale_spills(&self) {
        let (dir, files, control) = (
            &self.log.dir,
            self.log.medium.files(),
            &self.control.control,
        );
        let needed = control
            .disks
            .iter()
            .filter(|entry| control.is_spilled(entry.id.get()));
        let needed: Vec<_> = needed
            .map(|entry| SpillPaths::new(dir, &entry.disk))
            .collect();
        let names = files.names(dir).unwrap_or_default().into_iter();
        for name in names.filter(|name| is_spill(name)) {
            if !needed.iter().any(|paths| paths.has(&name)) {
                remove_leftover(&*files, &dir.join(name));
            }
        }
        for (disk, spill) in self
            .disks
            .iter()
            .filter_map(|disk| Some((disk, disk.base.spill()?)))
        {
            let (path, bytes) = (disk.path.display(), spill.bytes());
            let message = format!(
                "{path}: its image failed before, and lacks {bytes} bytes that are in a spill file"
            );
            tracing::warn!("{message}; they are copied back once the image can be written");
            disk.note_trouble(&Error::new(ErrorKind::Io, message));
        }
    }
}

/// Copies these sectors from a spill file to the disk's image.
fn copy_sectors(disk: &DiskState, spill: &Spill, sectors: Range<u64>) -> Result<()> {
    let (from, to) = (spill.data(), disk.base.file());
    let bytes = sectors.start * SECTOR_SIZE..sectors.end * SECTOR_SIZE;
    let failed = |error| {
        let doing = format!("write the base image at sector {}", sectors.start);
        Error::io(&doing, &disk.path, error)
    };
    let mut at = bytes.start;
    for data in DataRanges::new(from.host(), &spill.paths().data, bytes.clone(), u64::MAX) {
        let data = data?;
        if at < data.start {
            to.zero_range(at, data.start - at, true).map_err(failed)?;
        }
        let mut buffer = Buffer::for_overwrite((data.end - data.start) as usize);
        let read = from.read_exact_at(&mut buffer, data.start);
        read.map_err(|error| Error::io("read the spill file", &spill.paths().data, error))?;
        to.write_all_at(&buffer, data.start).map_err(failed)?;
        at = data.end;
    }
    if at < bytes.end {
        to.zero_range(at, bytes.end - at, true).map_err(failed)?;
    }
    Ok(())
}
