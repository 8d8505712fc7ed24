//! Images that fail: their disks' bytes go to [spill files](crate::log::spill), and back once that
//! works again.
//!
//! A log with one disk has none: nobody else waits for the room that its image doesn't free.

use std::ops::Range;
use std::time::{Duration, Instant};

use crate::checkpoint::copy::{
    CopyOutcome, FailedImage, FrozenLayer, ImageFailures, LONGEST_SILENCE, SHORT, copy,
};
use crate::checkpoint::pace::CopyPace;
use crate::error::{Error, ErrorKind, Result};
use crate::format::Control;
use crate::keeper::Keeper;
use crate::keeper::checkpoint::{announce_writes, settle};
use crate::log::disk_state::DiskState;
use crate::log::file_thread::FileAnswer;
use crate::log::spill::{Spill, SpillPaths, is_spill};
use crate::medium::cost::MediumCost;
use crate::medium::filesystem::remove_leftover;
use crate::medium::holes::DataRanges;
use crate::mutant::{Mutant, planted};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{self, Arc};
use crate::{Buffer, SECTOR_SIZE};

/// Pause before an image that failed is tried again.
const RETRY: Duration = Duration::from_secs(1);
/// Longer than any removal of a disk takes.
const LONG: Duration = Duration::from_secs(24 * 60 * 60);
/// Pause between two looks at a running copy.
const LOOK: Duration = Duration::from_millis(20);
/// Most sectors copied back at a time.
const STEP: u64 = (256 << 10) / SECTOR_SIZE;

/// Copying a spill file back to its image, in the image's own thread.
#[derive(Default)]
pub(crate) struct CopyBack {
    /// The control file says that the image is being written.
    announced: bool,
    /// What the thread does now.
    round: Option<CopyRound>,
    /// When to try again after a failure.
    retry: Option<Instant>,
}

impl CopyBack {
    /// No copy begins while this is a disk's.
    pub(super) fn stopped() -> Self {
        Self {
            retry: sync::now().checked_add(LONG),
            ..Self::default()
        }
    }
}

/// One pass over what the image lacks.
struct CopyRound {
    answer: FileAnswer<Result<()>>,
    control: Arc<RoundControl>,
    /// The parts that were copied, and when this was last seen to change.
    seen: (u64, Instant),
}

/// What the keeper and the image's thread tell each other.
#[derive(Default)]
struct RoundControl {
    parts: AtomicU64,
    /// A caller is waiting: no pauses.
    hurry: AtomicBool,
    /// Nobody is waiting any more: it ends after the part at hand.
    stop: AtomicBool,
}

impl CopyRound {
    /// How long the image has not answered.
    fn silence(&mut self) -> Duration {
        let (parts, now) = (self.control.parts.load(Ordering::Relaxed), sync::now());
        if parts != self.seen.0 {
            self.seen = (parts, now);
        }
        now - self.seen.1
    }
}

impl Drop for CopyRound {
    fn drop(&mut self) {
        self.control.stop.store(true, Ordering::Relaxed);
    }
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
                unanswered: Vec::new(),
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
            self.unanswered.append(&mut failures.unanswered);
            match copied? {
                CopyOutcome::Complete(mut found) => damaged.append(&mut found),
                CopyOutcome::TimeUp(mut found) => {
                    damaged.append(&mut found);
                    return Ok(CopyOutcome::TimeUp(damaged));
                }
            }
            let failed = failures.found;
            if failed.is_empty() {
                self.limit_spills();
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
        if let Err(why) = self.use_spill(&disk) {
            tracing::warn!("{}: no spill file for it: {why}", disk.path.display());
            return Err(error);
        }
        if disk.note_trouble(&error) {
            tracing::error!(
                "{error}; what it lacks goes to a spill file in {} until it can be written again; \
                 other disks go on",
                self.log.dir.display()
            );
        }
        Ok(())
    }

    /// Makes a spill file for a disk, and uses it from now on.
    pub(super) fn use_spill(&mut self, disk: &DiskState) -> Result<()> {
        let spill = self.make_spill(disk)?;
        spill.count_in(&self.log.counters.beside_index);
        disk.base.set_spill(Some(Arc::new(spill)));
        self.new_generations
            .retain(|(other, _)| other.id != disk.id);
        Ok(())
    }

    fn make_spill(&mut self, disk: &DiskState) -> Result<Spill> {
        self.log.medium.check_place()?;
        let (files, bytes) = (self.log.medium.files(), disk.sectors() * SECTOR_SIZE);
        let paths = SpillPaths::new(&self.log.dir, &disk.uuid);
        let spill = Spill::create(&*files, paths, (self.log.uuid, disk.uuid), bytes)?;
        // It may have been made in another directory that took the log's place meanwhile.
        self.log.medium.check_place()?;
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

    /// Refuses more writes of disks whose spill files may take no more, or takes them again.
    pub(super) fn limit_spills(&self) {
        let spills = || {
            self.disks
                .iter()
                .filter_map(|disk| Some((disk, disk.base.spill()?)))
        };
        let count = spills().count() as u64;
        for (disk, spill) in spills() {
            let why = self.why_full(&spill, count);
            let was_full = disk.spill_full.swap(why.is_some(), Ordering::Relaxed);
            let path = disk.path.display();
            match why {
                Some(why) if !was_full => tracing::error!(
                    "{path}: its spill file {why}; its writes {} until its image can be written, \
                     or there is room; other disks go on",
                    if self.log.lock().keeper.pauses {
                        "wait"
                    } else {
                        "fail"
                    }
                ),
                None if was_full => {
                    tracing::warn!("{path}: its spill file has room, so it takes writes again");
                    self.log.wake_ports();
                }
                _ => {}
            }
        }
    }

    /// Why a spill file, one of `count`, may take no more.
    fn why_full(&self, spill: &Spill, count: u64) -> Option<String> {
        let log = &self.log;
        if let Some(limit) = log.spill_limit.filter(|limit| spill.bytes() >= *limit) {
            return Some(format!("has reached spill-limit={limit}"));
        }
        // What the log has of this disk must still find room, and the log itself may grow.
        let reserve = log.lock().ring.most() as u64 * log.segment_size;
        match spill.free_space() {
            Ok(free) if free < reserve => {
                return Some(format!(
                    "leaves {free} bytes in the file system, which is less than the log's size"
                ));
            }
            Ok(_) => {}
            Err(error) => tracing::warn!("{error}"),
        }
        let (taken, most) = (spill.map_bytes(), log.beside_limit().most / 2 / count);
        (taken > most).then(|| format!("takes {taken} bytes of memory, of {most} for its map"))
    }

    /// Goes on copying spill files back. What fails is noted, and tried again after a pause.
    pub(super) fn copy_spills_back(&mut self) {
        self.forget_answered();
        let is_full = |disk: &Arc<DiskState>| disk.spill_full.load(Ordering::Relaxed);
        if self.spilled().any(is_full) {
            self.limit_spills();
        }
        let due = self.spilled().filter(|disk| self.pause_of(disk).is_zero());
        let due: Vec<_> = due.cloned().collect();
        if !due.is_empty() {
            self.end_readings();
        }
        for disk in due {
            // Noted, and tried again.
            let _ = self.copy_spill_back(&disk, false);
        }
    }

    /// How long the copy back of a disk pauses yet.
    fn pause_of(&self, disk: &DiskState) -> Duration {
        let retry = self.copies_back.get(&disk.id).and_then(|back| back.retry);
        retry.map_or(Duration::ZERO, |retry| {
            retry.saturating_duration_since(sync::now())
        })
    }

    /// How long the keeper may sleep before it looks at the copies of spill files again.
    pub(super) fn until_copy_back(&self) -> Duration {
        let pauses = self.spilled().map(|disk| self.pause_of(disk));
        pauses.min().unwrap_or(RETRY).max(LOOK)
    }

    /// Copies a disk's spill file back, whatever else is to do, and returns once its image has
    /// everything.
    ///
    /// # Errors
    /// If the image still fails, or does not answer, or the time limit for closing ran out.
    pub(super) fn bring_up_to_date(&mut self, disk: &Arc<DiskState>) -> Result<()> {
        loop {
            self.forget_answered();
            if self.copy_spill_back(disk, true)? {
                return Ok(());
            }
            self.refuse_over()?;
            let back = self.copies_back.get_mut(&disk.id);
            let round = back.and_then(|back| back.round.as_mut());
            let silence = round.map_or(Duration::ZERO, CopyRound::silence);
            if silence > LONGEST_SILENCE {
                return Err(no_answer(disk, silence));
            }
            if !self.log.lock().keeper.stop {
                // Other disks need their room. What fails there is reported elsewhere.
                let _ = self.step(false);
                self.refuse_pausing(disk)?;
            }
            sync::sleep(SHORT);
        }
    }

    /// Forgets I/O that copies gave up waiting for, once it has ended.
    fn forget_answered(&mut self) {
        self.unanswered.retain_mut(|io| !io.have_ended());
    }

    /// Refuses to wait for a copy that has failed, and is tried again later.
    fn refuse_pausing(&self, disk: &DiskState) -> Result<()> {
        let condition = disk.condition();
        match condition.trouble() {
            Some(trouble) if !self.pause_of(disk).is_zero() => {
                Err(Error::new(ErrorKind::Io, trouble.error.clone()))
            }
            _ => Ok(()),
        }
    }

    /// Goes on copying a disk's spill file back. Returns whether the image has everything.
    fn copy_spill_back(&mut self, disk: &Arc<DiskState>, hurry: bool) -> Result<bool> {
        let Some(spill) = disk.base.spill() else {
            return Ok(true);
        };
        let mut back = self.copies_back.remove(&disk.id).unwrap_or_default();
        let copied = self.copy_round(disk, &spill, &mut back, hurry);
        match &copied {
            Ok(true) => return Ok(true),
            Ok(false) => back.retry = None,
            Err(error) => {
                disk.note_trouble(error);
                // A failed sync may have dropped what was copied so far, and the next one would not
                // tell.
                back.round = None;
                spill.count_all_as_written();
                back.retry = sync::now().checked_add(RETRY);
            }
        }
        self.copies_back.insert(disk.id, back);
        copied
    }

    /// Begins a pass over what the image lacks, or looks at the one under way. The last pass finds
    /// nothing that was spilled meanwhile.
    fn copy_round(
        &mut self,
        disk: &Arc<DiskState>,
        spill: &Arc<Spill>,
        back: &mut CopyBack,
        hurry: bool,
    ) -> Result<bool> {
        if self.unanswered.iter().any(|io| io.has(disk.id)) {
            return Err(no_answer(disk, Duration::ZERO));
        }
        loop {
            if let Some(round) = &mut back.round {
                round.control.hurry.store(hurry, Ordering::Relaxed);
                let Some(ended) = round.answer.take() else {
                    let silence = round.silence();
                    if silence > LONGEST_SILENCE {
                        disk.note_trouble(&no_answer(disk, silence));
                    }
                    return Ok(false);
                };
                back.round = None;
                ended?;
                if !spill.has_written() {
                    self.end_spill(disk, spill)?;
                    return Ok(true);
                }
            }
            if !back.announced {
                self.announce_copy_back(disk)?;
                back.announced = true;
            }
            let control = Arc::new(RoundControl::default());
            control.hurry.store(hurry, Ordering::Relaxed);
            let ranges = spill.take_written();
            let (state, from, told) = (disk.clone(), spill.clone(), control.clone());
            let begun = disk
                .base
                .begin(move || copy_back(&state, &from, ranges, &told));
            let answer =
                begun.map_err(|error| Error::io("write the base image", &disk.path, error))?;
            back.round = Some(CopyRound {
                answer,
                control,
                seen: (0, sync::now()),
            });
        }
    }

    /// Notes in the control file that a disk's image is about to be written.
    fn announce_copy_back(&mut self, disk: &DiskState) -> Result<()> {
        self.control.change_both(|control| {
            announce_writes(control, disk, |entry| entry.cut_samples(0));
        })
    }

    /// The image durably has everything: removes the spill file.
    fn end_spill(&mut self, disk: &Arc<DiskState>, spill: &Spill) -> Result<()> {
        let image = [(disk.clone(), [None, None])];
        // Nothing may be added to the file while an open might ignore it.
        self.change_certainly(|control| {
            let cleared = control.set_spilled(disk.id, false);
            cleared.expect("there is an entry");
            settle(control, &image);
        })?;
        disk.base.set_spill(None);
        if disk.spill_full.swap(false, Ordering::Relaxed) {
            self.log.wake_ports();
        }
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
                    "{}: closed while its image lacks bytes; they are in a spill file in {}: \
                     {error}",
                    disk.path.display(),
                    self.log.dir.display()
                );
            }
        }
        !self.has_spills()
    }

    /// Removes spill files that a crash has left: the control file does not name them. Notes the
    /// trouble of disks that have one.
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
        self.disks.iter().for_each(|disk| self.note_spill(disk));
        self.limit_spills();
    }

    /// Notes that an image which is opened lacks what is in a spill file, if so.
    pub(super) fn note_spill(&self, disk: &DiskState) {
        if let Some(spill) = disk.base.spill() {
            spill.count_in(&self.log.counters.beside_index);
            let (path, bytes) = (disk.path.display(), spill.bytes());
            let message = format!("{path}: its image lacks {bytes} bytes that are in a spill file");
            tracing::warn!("{message}; they are copied back once the image can be written");
            disk.note_trouble(&Error::new(ErrorKind::Io, message));
        }
    }
}

/// The error for an image that has not answered for this long; zero: nobody knows how long.
fn no_answer(disk: &DiskState, silence: Duration) -> Error {
    let path = disk.path.display();
    let long = match silence.as_secs() {
        0 => "earlier writes".to_owned(),
        seconds => format!("a write for {seconds} s"),
    };
    let message = format!("{path}: its image has not answered {long}");
    Error::new(ErrorKind::Io, message)
}

/// Copies these ranges of sectors from a spill file to the disk's image, and makes them durable.
fn copy_back(
    disk: &DiskState,
    spill: &Spill,
    ranges: Vec<Range<u64>>,
    control: &RoundControl,
) -> Result<()> {
    for range in ranges {
        let starts = range.clone().step_by(STEP as usize);
        for part in starts.map(|start| start..range.end.min(start + STEP)) {
            if control.stop.load(Ordering::Relaxed) {
                let path = disk.path.display();
                let message = format!("{path}: copying its spill file back was broken off");
                return Err(Error::new(ErrorKind::Io, message));
            }
            let begun = sync::now();
            copy_sectors(disk, spill, part)?;
            control.parts.fetch_add(1, Ordering::Relaxed);
            if !control.hurry.load(Ordering::Relaxed) {
                // Half of the time is for others that use the medium.
                sync::sleep(sync::now() - begun);
            }
        }
    }
    if !planted(Mutant::CopyBackUnsynced) {
        disk.mark(true)?;
    }
    control.parts.fetch_add(1, Ordering::Relaxed);
    // The samples must be of what is on the medium. A sync that failed earlier may have left other
    // bytes in the cache.
    if !planted(Mutant::CopyBackTrustsCache) {
        let settled = disk.base.file().drop_cache();
        settled.map_err(|error| Error::io("sync the base image", &disk.path, error))?;
    }
    Ok(())
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
