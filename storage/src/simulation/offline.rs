//! Commands on a log that is not in use, between two opens in a random history: the log changes its
//! size, records are discarded, and disks leave, come back and move to another log. Power is lost
//! in the middle, and I/O fails.
//!
//! None of them loses a byte, except that discarded records are gone all at once: the disk is then
//! what its image has. Wherever a command is cut, the same command continues.

use std::collections::BTreeSet;
use std::path::Path;

use super::fixture::{RunningStore, control_of};
use super::history::{History, SECTORS};
use super::live::values;
use super::medium::LOG;
use super::oracle::{Violation, value_of};
use super::trace;
use crate::catalog::control::open_control;
use crate::catalog::options::DiskOptions;
use crate::catalog::retention::Retention;
use crate::catalog::snapshot::Snapshot;
use crate::error::{Error, ErrorKind, Result};
use crate::format::Control;
use crate::log::holds::Holds;
use crate::medium::directory::directory;
use crate::medium::engine::EngineKind;
use crate::medium::lock::Access;
use crate::medium::mark::ImageMark;
use crate::recovery::replay::read_log_until;
use crate::recovery::scan::learn_rewinds;
use crate::store::discard::discard_log;
use crate::store::log_size::resize_log;
use crate::store::members::{leave_log, move_to_log};
use crate::store::open::open_log;
use crate::store::view::View;
use crate::view::point::Point;
use crate::{CommitWait, StoreOptions};

/// The directory of the other log. Its name sorts after that of the history's log.
const OTHER: &str = "/other-log";
/// No log is here.
const NOWHERE: &str = "/nowhere";

/// A copy of an image that was closed.
#[derive(Clone)]
pub(super) struct Backup {
    disk: usize,
    bytes: Vec<u8>,
    mark: Option<ImageMark>,
}

/// How a command has ended.
enum CommandOutcome<T> {
    Done(T),
    /// It was refused for a valid reason.
    Refused,
    /// A fault has ended it.
    Cut,
}

fn options() -> StoreOptions {
    StoreOptions {
        segment_size: 64 << 10,
        max_segments: 4,
        commit_wait: CommitWait::NONE,
        ..StoreOptions::default()
    }
}

/// Whether a log may refuse to let a disk leave, because that would end its history.
fn keeps(control: &Control) -> bool {
    Retention::of(&control.history) != Retention::Nothing || !Snapshot::all(control).is_empty()
}

impl History {
    /// Runs up to two commands. `kept`: what a killed process left must survive, so power is not
    /// lost and nothing fails. Returns the disks whose records were discarded.
    pub(super) fn run_commands(
        &mut self,
        kept: bool,
    ) -> std::result::Result<BTreeSet<usize>, Violation> {
        let mut given_up = BTreeSet::new();
        if !self.lively {
            return Ok(given_up);
        }
        for _ in 0..self.acts.below(3) {
            let disk = self.acts.below(self.fixture.shape.disks as u64) as usize;
            match self.acts.below(6) {
                5 => self.replace_image(disk, kept, &mut given_up)?,
                0 => self.resize_log(kept)?,
                1 => self.discard(disk, kept, &mut given_up)?,
                2 => self.leave(disk, kept)?,
                3 => self.join(disk, kept)?,
                _ => self.move_there_and_back(disk, kept)?,
            }
        }
        for disk in 0..self.fixture.shape.disks {
            let last = self.fixture.left.iter().all(|left| *left);
            if last || !self.acts.one_in(3) {
                self.join(disk, kept)?;
            }
        }
        Ok(given_up)
    }

    /// Runs a command, perhaps with a fault, after which the process ends.
    fn run_command<T>(
        &mut self,
        kept: bool,
        what: &str,
        run: impl FnOnce() -> Result<T>,
        may_refuse: impl FnOnce(&Error) -> bool,
    ) -> std::result::Result<CommandOutcome<T>, Violation> {
        if !kept && self.acts.one_in(2) {
            let (ticks, after) = (self.acts.below(40), self.acts.below(12));
            let mut world = self.fixture.medium.lock();
            match self.acts.below(6) {
                0 => world.fail_read = Some(after),
                1 => world.fail_write = Some(after),
                2 => world.fail_sync = Some(after / 2),
                3 => world.cut_control = Some(ticks / 8),
                _ => world.ticks = Some(ticks),
            }
        }
        let done = {
            let _files = self.fixture.medium.enter();
            run()
        };
        let world = self.fixture.medium.lock();
        let (crashed, fault) = (
            world.crashed,
            world.crashed || world.failed || world.failed_read,
        );
        drop(world);
        let ran = match done {
            Ok(done) => CommandOutcome::Done(done),
            Err(_) if fault => CommandOutcome::Cut,
            Err(error) if may_refuse(&error) => CommandOutcome::Refused,
            Err(error) => return Err(format!("{what} failed for no reason: {error}")),
        };
        let ended = match &ran {
            CommandOutcome::Done(_) => "done",
            CommandOutcome::Refused => "refused",
            CommandOutcome::Cut => "cut",
        };
        trace(|| format!("{what}: {ended}, power lost: {crashed}"));
        self.totals.commands_cut += u64::from(matches!(ran, CommandOutcome::Cut));
        self.totals.commands_refused += u64::from(matches!(ran, CommandOutcome::Refused));
        if !kept && (crashed || fault || self.acts.one_in(2)) {
            self.end_process();
        } else {
            self.fixture.medium.lock().restart();
        }
        if matches!(ran, CommandOutcome::Cut) {
            // What the control file has now counts from here on.
            let _files = self.fixture.medium.enter();
            let confirmed = open_control(Path::new(LOG), Access::Log);
            let confirmed = confirmed.and_then(|mut control| control.confirm());
            confirmed.map_err(|error| format!("after {what} was cut: {error}"))?;
        }
        Ok(ran)
    }

    /// The control file of the log, with the rewinds in its records.
    fn control(&self) -> std::result::Result<Control, Violation> {
        let medium = &self.fixture.medium;
        let read = control_of(medium).and_then(|control| {
            let mut control = control.control;
            learn_rewinds(medium, Path::new(LOG), &mut control)?;
            Ok(control)
        });
        read.map_err(|error| format!("the control file: {error}"))
    }

    fn resize_log(&mut self, kept: bool) -> std::result::Result<(), Violation> {
        let count = 4 + self.acts.below(9);
        // It is rounded up.
        let size = (count << 16) - self.acts.below(1000);
        let old = self.control()?.header.max_segments.get();
        let run = move || resize_log(Path::new(LOG), size);
        let refused =
            |error: &Error| error.kind() == ErrorKind::InvalidInput && count < u64::from(old);
        if let CommandOutcome::Done(done) =
            self.run_command(kept, "a resize of the log", run, refused)?
        {
            self.totals.logs_grown += u64::from(done.size > done.old_size);
            self.totals.logs_shrunk += u64::from(done.size < done.old_size);
            let most = self.control()?.header.max_segments.get();
            let files = self.fixture.medium.lock().segments();
            // The leftover of a process that was cut while making a segment is not a segment.
            let mut made = files.iter().filter(|(name, _)| !name.ends_with(".new"));
            let beyond = made.any(|(name, _)| *name >= format!("segment-{most:05}"));
            if u64::from(most) != count || beyond {
                return Err(format!(
                    "a log of {most} segments has {} files",
                    files.len()
                ));
            }
        }
        Ok(())
    }

    /// Discards a disk's records.
    fn discard(
        &mut self,
        disk: usize,
        kept: bool,
        given_up: &mut BTreeSet<usize>,
    ) -> std::result::Result<(), Violation> {
        // Otherwise most of what is there would be discarded.
        if self.fixture.left[disk] || self.acts.one_in(2) {
            return Ok(());
        }
        let void = |history: &Self| {
            let control = history.control()?;
            let entry = history.fixture.entry(&control, disk);
            Ok::<_, Violation>(entry.map(|entry| entry.void_lsn.get()))
        };
        let (before, image) = (void(self)?, self.fixture.image(disk));
        let spilled = self.has_spilled(disk)?;
        let run = || discard_log(&image, Path::new(LOG));
        let done = match self.run_command(kept, "giving up records", run, |_| false)? {
            CommandOutcome::Done(done) if !done.image_fits => {
                return Err(format!("the image of disk {disk} is not its own"));
            }
            CommandOutcome::Done(_) => true,
            CommandOutcome::Refused => false,
            CommandOutcome::Cut => void(self)? != before,
        };
        if done {
            self.totals.given_up += 1;
            given_up.insert(disk);
            let newest = void(self)?.unwrap_or(0);
            self.given_up.push((disk, newest));
            if spilled {
                // Its past needs what was in the spill file.
                self.replaced[disk] = u64::MAX;
            }
        }
        Ok(())
    }

    /// Whether a disk's image lacks bytes that are in a spill file.
    pub(super) fn has_spilled(&self, disk: usize) -> std::result::Result<bool, Violation> {
        let control = self.control()?;
        let entry = self.fixture.entry(&control, disk);
        Ok(entry.is_some_and(|entry| control.is_spilled(entry.id.get())))
    }

    /// Whether the log's table has the images' present paths; an interrupted process may have left
    /// others.
    fn knows_paths(&self, control: &Control) -> bool {
        (0..self.fixture.shape.disks).all(|disk| {
            let entry = self.fixture.entry(control, disk);
            let path = |entry: &crate::format::DiskEntry| entry.path(Path::new("/"));
            self.fixture.left[disk] || entry.map(path) == Some(self.fixture.image(disk))
        })
    }

    /// A disk leaves the log.
    fn leave(&mut self, disk: usize, kept: bool) -> std::result::Result<(), Violation> {
        let control = self.control()?;
        if self.fixture.left[disk] || !self.knows_paths(&control) {
            return Ok(());
        }
        let (image, others) = (self.fixture.image(disk), self.fixture.other_images(disk));
        let mut cuts = 0;
        loop {
            // A cut may have brought a snapshot back that a killed process had deleted.
            let control = self.control()?;
            let run = || leave_log(&image, Path::new(LOG), &others).map(drop);
            let refused =
                |error: &Error| error.kind() == ErrorKind::InvalidInput && keeps(&control);
            // The second attempt is not cut.
            let ran = self.run_command(kept || cuts > 0, "leaving the log", run, refused)?;
            let control = self.control()?;
            let known = self.fixture.entry(&control, disk).is_some();
            match ran {
                CommandOutcome::Done(()) if known => {
                    return Err(format!("disk {disk} has left the log, which has it still"));
                }
                CommandOutcome::Refused if !known => {
                    return Err(format!(
                        "disk {disk} was refused to leave the log, and has left"
                    ));
                }
                CommandOutcome::Cut
                    if known && self.knows_paths(&control) && self.acts.one_in(2) =>
                {
                    cuts += 1;
                    continue;
                }
                // Without a mark, the log identifies the image by its path, and its past may be
                // gone.
                CommandOutcome::Cut if known => {
                    self.fixture.stays = true;
                    self.replaced[disk] = u64::MAX;
                }
                CommandOutcome::Done(()) | CommandOutcome::Cut => {
                    self.totals.left += 1;
                    self.fixture.left[disk] = true;
                    self.joined[disk] = u64::MAX;
                }
                // The first attempt may have taken its mark.
                CommandOutcome::Refused if cuts > 0 => {
                    self.fixture.stays = true;
                    self.replaced[disk] = u64::MAX;
                }
                CommandOutcome::Refused => {}
            }
            return Ok(());
        }
    }

    /// A disk that has left the log comes back, as a raw image.
    fn join(&mut self, disk: usize, kept: bool) -> std::result::Result<(), Violation> {
        if !self.fixture.left[disk] {
            return Ok(());
        }
        let image = self.fixture.image(disk);
        self.run_to_end(kept, "joining the log", || {
            move_to_log(&image, Path::new(NOWHERE), Path::new(LOG), &options(), &[])
        })?;
        self.totals.joined += 1;
        self.fixture.left[disk] = false;
        // The next process knows.
        self.joined[disk] = u64::MAX;
        Ok(())
    }

    /// Runs a command that must succeed, once more if it is cut.
    fn run_to_end(
        &mut self,
        kept: bool,
        what: &str,
        run: impl Fn() -> Result<()>,
    ) -> std::result::Result<(), Violation> {
        if let CommandOutcome::Cut = self.run_command(kept, what, &run, |_| false)? {
            self.run_command(true, what, &run, |_| false)?;
        }
        Ok(())
    }

    /// A disk moves to another log, is used there, and moves back.
    fn move_there_and_back(
        &mut self,
        disk: usize,
        kept: bool,
    ) -> std::result::Result<(), Violation> {
        let control = self.control()?;
        if self.fixture.left[disk] || !self.knows_paths(&control) {
            return Ok(());
        }
        let (image, others) = (self.fixture.image(disk), self.fixture.other_images(disk));
        let (log, other) = (Path::new(LOG), Path::new(OTHER));
        let there = || move_to_log(&image, log, other, &options(), &others);
        let refused = |control: Control| {
            move |error: &Error| error.kind() == ErrorKind::InvalidInput && keeps(&control)
        };
        let mut ran = self.run_command(kept, "moving to another log", there, refused(control))?;
        if let CommandOutcome::Cut = ran {
            // The cut may have taken the newest paths of other images from the log. Only an open
            // with all disks has them. A disk that has moved already is in it no more.
            let now = self.control()?;
            let moved = self.fixture.entry(&now, disk).is_none();
            if moved || self.knows_paths(&now) {
                let again = "moving on to another log";
                ran = self.run_command(true, again, there, refused(now))?;
            } else {
                ran = CommandOutcome::Refused;
            }
        }
        match ran {
            CommandOutcome::Done(()) => {}
            CommandOutcome::Refused => {
                // A first attempt may have taken its mark, and its past with it.
                self.fixture.stays = true;
                self.replaced[disk] = u64::MAX;
                return Ok(());
            }
            CommandOutcome::Cut => return Err("a command was cut without a fault".into()),
        }
        if self.acts.one_in(2) {
            self.use_on_the_other_log(disk)?;
        }
        let back = || move_to_log(&image, other, log, &options(), &[]);
        self.run_to_end(kept, "moving back", back)?;
        self.joined[disk] = u64::MAX;
        self.totals.moved += 1;
        Ok(())
    }

    /// On the other log a disk is what its image has.
    fn use_on_the_other_log(&mut self, disk: usize) -> std::result::Result<(), Violation> {
        let broken = |error| format!("on the other log: {error}");
        let wanted = self.fixture.bases()[disk].clone();
        let _files = self.fixture.medium.enter();
        let medium = Box::new(directory(Path::new(OTHER), EngineKind::Blocking));
        let disks = [DiskOptions::new(self.fixture.image(disk))];
        let opened = open_log(medium, Path::new(OTHER), &disks, &options(), &mut |_, _| {});
        let mut running = RunningStore::new(&self.fixture.medium, opened.map_err(broken)?);
        let found = running
            .read()
            .map_err(|failure| format!("on the other log: {failure}"))?;
        running.keeper.close().map_err(broken)?;
        if found[0] == wanted {
            Ok(())
        } else {
            Err(format!(
                "on the other log disk {disk} differs from its image"
            ))
        }
    }

    /// Looks at a disk that is not in use, at a point that the log had, by the code that makes
    /// copies.
    pub(super) fn look_at_the_past(&mut self) -> std::result::Result<(), Violation> {
        let disk = self.acts.below(self.fixture.shape.disks as u64) as usize;
        let all = self.past.len() as u64;
        if all == 0 || self.fixture.left[disk] {
            return Ok(());
        }
        let (lsn, then) = self.past[self.acts.below(all) as usize].clone();
        self.look_at(disk, lsn, &then[disk])
    }

    /// Looks at a disk that is not in use as of an LSN, when it was `then`.
    fn look_at(
        &mut self,
        disk: usize,
        lsn: u64,
        then: &[u32],
    ) -> std::result::Result<(), Violation> {
        let control = self.control()?;
        if self.fixture.entry(&control, disk).is_none() {
            return Err(format!("the log has no disk {disk}"));
        }
        let options = DiskOptions::new(self.fixture.image(disk));
        let _files = self.fixture.medium.enter();
        let view = View::open_at(&options, Path::new(LOG), Point::Lsn(lsn), None);
        let shown = view.and_then(|view| values(view.layers()));
        self.totals.looks_at_the_past += u64::from(shown.is_ok());
        self.judge_view(&control, (disk, lsn, then), shown)?
            .map_or(Ok(()), |error| {
                Err(format!("a look at LSN {lsn} failed for no reason: {error}"))
            })
    }

    /// Whether a disk as of an LSN may be shown like this. Returns an error that only a fault
    /// excuses.
    pub(super) fn judge_view(
        &mut self,
        control: &Control,
        (disk, lsn, then): (usize, u64, &[u32]),
        shown: Result<Vec<u32>>,
    ) -> std::result::Result<Option<Error>, Violation> {
        let snapshot = self.has_snapshot(control, disk, lsn);
        match shown {
            Ok(shown) if shown == then => Ok(None),
            Ok(_) if self.is_unknown(disk, lsn) => Ok(None),
            Ok(_) if self.is_replaced(disk, lsn) && !snapshot => Ok(None),
            Ok(shown) => Err(format!(
                "disk {disk} as of LSN {lsn} is {shown:?} for {then:?}"
            )),
            Err(error)
                if error.kind() == ErrorKind::NotFound && self.may_refuse(control, disk, lsn) =>
            {
                self.totals.refused_points += 1;
                Ok(None)
            }
            Err(_) if self.is_replaced(disk, lsn) => {
                self.count_refused(control, disk, lsn);
                Ok(None)
            }
            Err(error) => Ok(Some(error)),
        }
    }

    /// A look at a disk whose image was replaced was refused.
    pub(super) fn count_refused(&mut self, control: &Control, disk: usize, lsn: u64) {
        let entry = self.fixture.entry(control, disk);
        let saved = entry.is_some_and(|entry| control.has_saved(lsn, entry.id.get()));
        self.totals.refused_replaced += 1;
        self.totals.refused_saved += u64::from(saved);
    }

    /// Four bytes that no write of the history has.
    fn strange(&mut self) -> [u8; 4] {
        (self.acts.next() as u32 | 1 << 31).to_le_bytes()
    }

    /// Copies the whole log to the images, and closes it.
    fn copy_everything(&mut self, kept: bool) -> std::result::Result<(), Violation> {
        let control = self.control()?;
        let disk = |disk: usize| {
            let image = self.fixture.image(disk);
            if self.fixture.left[disk] {
                DiskOptions::detached(image)
            } else {
                DiskOptions::new(image)
            }
        };
        let disks: Vec<_> = (0..self.fixture.shape.disks).map(disk).collect();
        let log = Path::new(LOG);
        let run = || {
            let medium = Box::new(directory(log, EngineKind::Blocking));
            let options = StoreOptions::default();
            let (_log, _disks, mut keeper) =
                open_log(medium, log, &disks, &options, &mut |_, _| {})?;
            keeper.step(true)?;
            keeper.close().map(drop)
        };
        // A snapshot inside a restore in place needs the log.
        let held = Holds::of(&control).held().is_some();
        self.run_command(kept, "copying everything", run, |_| held)
            .map(drop)
    }

    /// Whether the image of a disk has everything, and nothing has opened it since.
    fn is_complete(&self, disk: usize) -> std::result::Result<bool, Violation> {
        let mut control = self.control()?;
        let Some(entry) = self.fixture.entry(&control, disk).copied() else {
            return Ok(false);
        };
        let medium = &self.fixture.medium;
        let read = read_log_until(medium, Path::new(LOG), &mut control, u64::MAX);
        let (_, records) = read.map_err(|error| format!("reading the log: {error}"))?;
        let path = self.fixture.image(disk);
        let world = medium.lock();
        let file = world.names.get(&path).expect("an image");
        let closed = world.files[file].mark().is_some_and(|mark| !mark.open);
        Ok(closed && !records.contains_key(&entry.id.get()))
    }

    /// Changes the image of a disk without records in the log: another program writes to it, or it
    /// is replaced by an older copy or by an unrelated image. That is the disk from now on.
    fn replace_image(
        &mut self,
        disk: usize,
        kept: bool,
        given_up: &mut BTreeSet<usize>,
    ) -> std::result::Result<(), Violation> {
        if self.fixture.left[disk] || !self.knows_paths(&self.control()?) {
            return Ok(());
        }
        if !self.is_complete(disk)? {
            self.copy_everything(kept)?;
        }
        // A path that is in the page cache only may be lost, and an unrelated image is identified
        // by nothing else.
        let confirmed = {
            let _files = self.fixture.medium.enter();
            open_control(Path::new(LOG), Access::Log).and_then(|mut control| control.confirm())
        };
        confirmed.map_err(|error| format!("before an image is replaced: {error}"))?;
        let control = self.control()?;
        if !self.is_complete(disk)? || !self.knows_paths(&control) {
            return Ok(());
        }
        let strange = self.strange();
        let path = self.fixture.image(disk);
        let mut world = self.fixture.medium.lock();
        let file = world.names.get(&path).expect("an image");
        let mark = world.files[file].mark();
        let now = Backup {
            disk,
            bytes: world.contents(&path),
            mark,
        };
        let known_as = mark.map(|mark| (mark.disk, mark.generation));
        let older = self.backups.iter().rfind(|backup| backup.disk == disk);
        let next = match (self.acts.below(3), older) {
            (0, Some(older)) => older.clone(),
            (1, _) => Backup {
                disk,
                bytes: strange.repeat(now.bytes.len() / 4),
                mark: None,
            },
            _ => {
                let mut bytes = now.bytes.clone();
                let sector = self.acts.below(SECTORS) as usize;
                bytes[sector * 512..][..512].copy_from_slice(&strange.repeat(128));
                Backup { disk, bytes, mark }
            }
        };
        world.replace_image(file, &next.bytes, next.mark);
        drop(world);
        trace(|| format!("disk {disk} has another image"));
        if self.acts.one_in(2) {
            self.backups.push(now);
        }
        self.totals.replaced += 1;
        self.replaced[disk] = u64::MAX;
        given_up.insert(disk);
        // An older or unrelated image is the disk's only at its path.
        self.fixture.stays |= next.mark.map(|mark| (mark.disk, mark.generation)) != known_as;
        self.look_behind(&control, disk)
    }

    /// Looks at the snapshots of a disk whose image was just replaced, which have saved files.
    fn look_behind(
        &mut self,
        control: &Control,
        disk: usize,
    ) -> std::result::Result<(), Violation> {
        let Some(id) = self
            .fixture
            .entry(control, disk)
            .map(|entry| entry.id.get())
        else {
            return Ok(());
        };
        let saved = |lsn: &u64| control.has_saved(*lsn, id);
        let lsns: BTreeSet<u64> = self.pins.iter().map(|pin| pin.lsn).filter(saved).collect();
        self.totals.replaced_saved += u64::from(!lsns.is_empty());
        for lsn in lsns {
            if let Some((_, then)) = self.past.iter().find(|(past, _)| *past == lsn) {
                let then = then[disk].clone();
                self.look_at(disk, lsn, &then)?;
            }
        }
        Ok(())
    }

    /// The sectors of an image.
    pub(super) fn image_values(&self, disk: usize) -> Vec<u32> {
        let path = self.fixture.image(disk);
        let bytes = self.fixture.medium.lock().contents(&path);
        let values: Vec<u32> = bytes.chunks(512).map(value_of).collect();
        debug_assert_eq!(values.len() as u64, SECTORS);
        values
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::super::fixture::{Fixture, Shape, carry_out, filled};
    use super::super::medium::World;
    use super::super::oracle::DiskContents;
    use super::*;
    use crate::{BackendQueue, Operation};

    const SHAPE: Shape = Shape::two_disks(64, 8);

    /// A log that a killed process left with durable records of both disks, and what these are.
    fn killed(seed: u64) -> (Fixture, DiskContents) {
        let fixture = Fixture::new(World::new(seed), SHAPE);
        let mut running = fixture.open(false, CommitWait::NONE).unwrap();
        running.keeper.step(false).unwrap();
        for disk in 0..2 {
            let mut port = running.disks[disk].open_port().unwrap();
            for number in 1..4 {
                let (sector, data) = (number * 8, filled(1 + number as u32, 8));
                carry_out(&mut running, &mut port, Operation::Write { sector, data }).unwrap();
            }
            carry_out(&mut running, &mut port, Operation::Flush).unwrap();
            port.kick();
        }
        running.finish_writer();
        let contents = running.read().unwrap();
        drop(running);
        fixture.medium.lock().restart();
        (fixture, contents)
    }

    /// The next process is cut while it opens the log; then a disk's records are discarded, and
    /// power is lost during that too. The disk can still be opened, with its records or with what
    /// its image has.
    #[test]
    fn a_disk_opens_wherever_discarding_its_records_is_cut() {
        let (mut whole, mut gone) = (0, 0);
        let cuts = (0..24).flat_map(|o| (0..14).map(move |d| (o, d)));
        for ((opening, discarding), kill) in cuts.flat_map(|cut| [(cut, false), (cut, true)]) {
            let (fixture, contents) = killed(1 + opening);
            fixture.medium.lock().ticks = Some(opening);
            drop(fixture.open(false, CommitWait::NONE));
            if kill {
                fixture.medium.lock().restart()
            } else {
                fixture.lose_power()
            }
            let image = fixture.image(0);
            fixture.medium.lock().ticks = Some(discarding);
            let files = fixture.medium.enter();
            let done = discard_log(&image, Path::new(LOG));
            drop(files);
            fixture.lose_power();
            let told = format!("cut at {opening} and {discarding}, kill: {kill}");
            let running = fixture.open(false, CommitWait::NONE);
            let running = running.unwrap_or_else(|error| panic!("{told}: {error}"));
            let found = running.read().unwrap();
            let image = fixture.bases()[0].clone();
            assert!(found[0] == contents[0] || found[0] == image, "{told}");
            assert!(done.is_err() || found[0] == image, "{told}");
            assert_eq!(found[1], contents[1], "{told}");
            whole += u32::from(found[0] == contents[0]);
            gone += u32::from(found[0] == image);
        }
        assert!(whole > 30 && gone > 30, "{whole} whole, {gone} gone");
    }

    /// A log's newest numbers may belong to a torn write, so that no record has them. A disk whose
    /// records were discarded up to there can leave the log.
    #[test]
    fn a_disk_leaves_its_log_after_its_records_were_discarded() {
        let mut torn = 0;
        for seed in 1..60 {
            let fixture = Fixture::new(World::new(seed), SHAPE);
            let mut running = fixture.open(false, CommitWait::NONE).unwrap();
            running.keeper.step(false).unwrap();
            let mut port = running.disks[0].open_port().unwrap();
            for number in 1..8 {
                let (sector, data) = (number % 2 * 8, filled(number as u32, 8));
                carry_out(&mut running, &mut port, Operation::Write { sector, data }).unwrap();
                port.kick();
            }
            drop(port);
            running.finish_writer();
            drop(running);
            fixture.lose_power();
            let image = fixture.image(0);
            let _files = fixture.medium.enter();
            discard_log(&image, Path::new(LOG)).unwrap();
            let control = control_of(&fixture.medium).unwrap().control;
            torn += u32::from(control.disks[0].void_lsn.get() > 0);
            let others = leave_log(&image, Path::new(LOG), &fixture.other_images(0));
            let others = others.unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            assert_eq!(others, [fixture.image(1)], "seed {seed}");
        }
        assert!(torn > 5, "{torn}");
    }

    /// A process was killed while a raw image was joining a log. The same command must not report
    /// success before a power cut can't undo it.
    #[test]
    fn an_image_has_joined_a_log_once_the_command_says_so() {
        for (seed, ticks) in (1..9).flat_map(|seed| (0..20).map(move |ticks| (seed, ticks))) {
            let fixture = Fixture::new(World::new(seed), SHAPE);
            let image = fixture.image(0);
            let _files = fixture.medium.enter();
            let (nowhere, log) = (Path::new(NOWHERE), Path::new(LOG));
            let join = || move_to_log(&image, nowhere, log, &options(), &[]);
            leave_log(&image, log, &fixture.other_images(0)).unwrap();
            fixture.medium.lock().ticks = Some(ticks);
            drop(join());
            fixture.medium.lock().restart();
            join().unwrap();
            fixture.lose_power();
            let opened = fixture.open(false, CommitWait::NONE);
            assert!(opened.is_ok(), "seed {seed}, {ticks}: {:?}", opened.err());
        }
    }
}
