//! Disks that are created, imported, adopted, resized, used and closed, with power lost at any
//! point.
//!
//! After a cut, each action is finished or has not begun: a disk being created or imported is
//! absent or complete, and one being resized has its old or its new size and loses no byte. After a
//! close everything is in the base image. An action that returned before the cut is durable. The
//! next opening is cut too, up to twice.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use walvisor_testkit::Random;

use super::files::SimulatedMedium;
use super::fixture::{RunningStore, carry_out, filled};
use super::medium::{LOG, World};
use super::oracle::{Violation, value_of};
use crate::catalog::options::DiskOptions;
use crate::disk::handle::Disk;
use crate::log::orders::{KeeperOrder, KeeperTask};
use crate::store::discard::discard_log;
use crate::store::log_size::resize_log;
use crate::store::members::{add_task, leave_log, move_to_log};
use crate::store::open::open_log;
use crate::sync::{Arc, Mutex, mpsc};
use crate::{
    CommitWait, Error, ErrorKind, Operation, Port, StoreOptions, create_disk, import_disk,
    resize_disk,
};

/// The value of each sector of a disk.
type SectorValues = Vec<u32>;

/// Counters of a run, which show whether it tried what it should.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub made: u64,
    pub imported: u64,
    /// Existing images that got a log when they were opened.
    pub adopted: u64,
    pub resized: u64,
    /// Disks that were grown while they were open.
    pub grown: u64,
    pub closed: u64,
    /// Closes that left changes in the log.
    pub cut_closes: u64,
    pub cuts: u64,
    pub kills: u64,
    /// Openings that were cut.
    pub cut_openings: u64,
    /// Disks that were absent after a cut during their creation.
    pub absent: u64,
    /// Disks left by a cut with the oldest contents they might have.
    pub oldest: u64,
    /// Logs that got another size.
    pub log_sizes: u64,
    /// Disks that moved to another log, and back.
    pub moved: u64,
    /// Disks that left their log, and came back as raw images.
    pub left: u64,
    /// Disks whose records were discarded.
    pub given_up: u64,
    /// Disks that left a log in use, and came back.
    pub removed: u64,
}

impl super::Total for Totals {
    fn add(&mut self, other: &Self) {
        self.made += other.made;
        self.imported += other.imported;
        self.adopted += other.adopted;
        self.resized += other.resized;
        self.grown += other.grown;
        self.closed += other.closed;
        self.cut_closes += other.cut_closes;
        self.cuts += other.cuts;
        self.kills += other.kills;
        self.cut_openings += other.cut_openings;
        self.absent += other.absent;
        self.oldest += other.oldest;
        self.log_sizes += other.log_sizes;
        self.moved += other.moved;
        self.left += other.left;
        self.given_up += other.given_up;
        self.removed += other.removed;
    }
}

/// A disk, and the contents that it may have. The last of them has all changes.
#[derive(Clone, Debug)]
pub(super) struct KnownDisk {
    path: PathBuf,
    may_hold: Vec<SectorValues>,
}

impl KnownDisk {
    /// All changes are durable: only the newest contents are possible.
    fn settle(&mut self) {
        self.may_hold.drain(..self.may_hold.len() - 1);
    }
}

/// A run: the medium and the disks on it.
pub(super) struct SimulatedRun {
    random: Random,
    pub medium: SimulatedMedium,
    pub disks: Vec<KnownDisk>,
    next_value: u32,
    totals: Totals,
}

impl SimulatedRun {
    pub(super) fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let mut world = World::new(random.next());
        world.without_attributes = random.one_in(4);
        Self::on(world, random, Vec::new())
    }

    /// A life that begins with these disks on a medium.
    pub(super) fn on(world: World, random: Random, disks: Vec<KnownDisk>) -> Self {
        let world = Arc::new(Mutex::new(world));
        Self {
            random,
            medium: SimulatedMedium { world },
            disks,
            next_value: 0,
            totals: Totals::default(),
        }
    }

    /// Runs the life to its end.
    pub(super) fn run(mut self) -> Result<Totals, Violation> {
        let _files = self.medium.enter();
        for _ in 0..2 + self.random.below(5) {
            if self.random.one_in(2) {
                let most = if self.random.one_in(2) { 12 } else { 80 };
                let ticks = self.random.below(most);
                self.medium.lock().ticks = Some(ticks);
            }
            if self.random.one_in(8) {
                let count = self.random.below(8);
                self.medium.lock().fail_sync = Some(count);
            }
            match self.random.below(9) {
                _ if self.disks.is_empty() && self.random.one_in(3) => self.adopt()?,
                _ if self.disks.is_empty() => self.make()?,
                0 if self.disks.len() < 3 => self.make()?,
                1 | 2 => self.resize()?,
                3 => self.move_there_and_back()?,
                4 => self.leave_and_join()?,
                5 => self.give_up_or_resize_log()?,
                _ => self.work()?,
            }
            self.end_process();
            self.cut_openings(None)?;
            self.verify()?;
            self.end_process();
        }
        Ok(self.totals)
    }

    /// Cuts power, or kills the process.
    fn end_process(&mut self) {
        let mut world = self.medium.lock();
        self.totals.cuts += u64::from(world.crashed);
        if self.random.one_in(3) {
            self.totals.kills += 1;
            world.restart();
        } else {
            let after = world.after_crash();
            *world = after;
        }
    }

    /// Excuses an error after a power cut or a failed sync.
    fn excuse<T>(&self, what: &str, done: Result<T, Error>) -> Result<Option<T>, Violation> {
        let world = self.medium.lock();
        match done {
            Ok(done) => Ok(Some(done)),
            Err(_) if world.crashed || world.failed => Ok(None),
            Err(error) => Err(format!("{what} failed for no reason: {error}")),
        }
    }

    fn sectors(&mut self) -> u64 {
        1 + self.random.below(40)
    }

    fn value(&mut self) -> u32 {
        self.next_value += 1;
        self.next_value
    }

    fn values(&mut self, count: u64) -> SectorValues {
        (0..count).map(|_| self.value()).collect()
    }

    /// Adds a durable file with these contents.
    fn put(&self, path: &Path, contents: &SectorValues) {
        let bytes = contents.iter().flat_map(|&value| filled(value, 1).to_vec());
        self.medium.lock().put_file(path, bytes.collect());
    }

    fn there(&self, path: &Path) -> bool {
        self.medium.lock().names.get(path).is_some()
    }

    /// Creates a disk, or imports one.
    fn make(&mut self) -> Result<(), Violation> {
        let path = PathBuf::from(format!("/disk-{}", self.disks.len()));
        let sectors = self.sectors();
        let import = self.random.one_in(2);
        let contents = if import {
            self.values(sectors)
        } else {
            vec![0; sectors as usize]
        };
        self.put(Path::new(RAW), &contents);
        let done = make_one(&path, sectors, import);
        let done = self.excuse("making a disk", done)?.is_some();
        self.totals.made += u64::from(done && !import);
        self.totals.imported += u64::from(done && import);
        self.end_process();
        self.cut_openings(Some(&path))?;
        if !done && !self.there(&path) {
            // Leftovers of the attempt are in no other disk's way, and the next attempt reuses
            // them.
            self.totals.absent += 1;
            self.verify()?;
            make_one(&path, sectors, import)
                .map_err(|error| format!("a disk whose making was cut can't be made: {error}"))?;
        }
        // From now on the disk must stay, since an opener may rely on it.
        self.know(path, contents);
        self.verify()
    }

    pub(super) fn know(&mut self, path: PathBuf, contents: SectorValues) {
        let may_hold = vec![contents];
        self.disks.push(KnownDisk { path, may_hold });
    }

    /// Uses an existing image that has no log.
    fn adopt(&mut self) -> Result<(), Violation> {
        let path = PathBuf::from("/disk-0");
        let sectors = self.sectors();
        let contents = self.values(sectors);
        self.put(&path, &contents);
        self.know(path, contents);
        self.totals.adopted += 1;
        self.work()
    }

    /// Resizes a disk that is not in use.
    fn resize(&mut self) -> Result<(), Violation> {
        let sectors = self.sectors() as usize;
        let which = self.random.below(self.disks.len() as u64) as usize;
        let lose_data = self.random.one_in(2);
        let disk = &self.disks[which];
        let old = disk.may_hold[0].clone();
        let size = sectors as u64 * 512;
        let others = self.other_images(which);
        let done = resize_disk(&disk.path, size, Path::new(LOG), lose_data, &others);
        let loses = old.iter().skip(sectors).any(|&value| value != 0);
        let refused = |error: &Error| error.kind() == ErrorKind::InvalidInput;
        if done.as_ref().is_err_and(refused) && loses && !lose_data {
            return Ok(());
        }
        let done = self.excuse("a resize", done)?.is_some();
        if done && loses && !lose_data {
            return Err("a resize lost data unasked".into());
        }
        self.totals.resized += u64::from(done);
        self.disks[which].resize(sectors, done);
        Ok(())
    }

    /// Runs a command on a log that is not in use. If it is cut, the process ends, and the same
    /// command continues.
    fn run_to_end<T>(
        &mut self,
        what: &str,
        command: impl Fn() -> Result<T, Error>,
    ) -> Result<T, Violation> {
        let done = command();
        if let Some(done) = self.excuse(what, done)? {
            return Ok(done);
        }
        self.end_process();
        command().map_err(|error| format!("{what} was cut, and does not go on: {error}"))
    }

    /// A disk moves to another log and back. The images have all bytes then.
    fn move_there_and_back(&mut self) -> Result<(), Violation> {
        let (which, path) = self.some_disk();
        let others = self.other_images(which);
        let (log, other) = (Path::new(LOG), Path::new("/other-log"));
        let there = || move_to_log(&path, log, other, &options(), &others);
        self.run_to_end("moving to another log", there)?;
        let back = || move_to_log(&path, other, log, &options(), &[]);
        self.run_to_end("moving back", back)?;
        self.totals.moved += 1;
        Ok(())
    }

    /// A disk leaves its log, and comes back as a raw image.
    fn leave_and_join(&mut self) -> Result<(), Violation> {
        let (which, path) = self.some_disk();
        // Cut after the log has forgotten the disk, it has left.
        let left = leave_log(&path, Path::new(LOG), &self.other_images(which));
        if self.excuse("leaving the log", left)?.is_none() {
            self.end_process();
        } else {
            self.totals.left += 1;
        }
        let (nowhere, log) = (Path::new("/nowhere"), Path::new(LOG));
        self.run_to_end("joining the log", || {
            move_to_log(&path, nowhere, log, &options(), &[])
        })
    }

    /// The images of all other disks.
    fn other_images(&self, which: usize) -> Vec<PathBuf> {
        let mut others: Vec<_> = self.disks.iter().map(|disk| disk.path.clone()).collect();
        others.remove(which);
        others
    }

    fn some_disk(&mut self) -> (usize, PathBuf) {
        let which = self.random.below(self.disks.len() as u64) as usize;
        (which, self.disks[which].path.clone())
    }

    /// The log gets another size, or a disk's records are discarded, so that the disk is what its
    /// image has.
    fn give_up_or_resize_log(&mut self) -> Result<(), Violation> {
        if self.random.one_in(2) {
            let size = (4 + self.random.below(6)) << 16;
            let done = resize_log(Path::new(LOG), size);
            let refused = |error: &Error| error.kind() == ErrorKind::InvalidInput;
            if !done.as_ref().is_err_and(refused) {
                let done = self.excuse("a resize of the log", done)?.is_some();
                self.totals.log_sizes += u64::from(done);
            }
            return Ok(());
        }
        let (which, path) = self.some_disk();
        let log = Path::new(LOG);
        self.run_to_end("giving up records", || discard_log(&path, log))?;
        self.totals.given_up += 1;
        let world = self.medium.lock();
        let image = world.contents(&path);
        drop(world);
        let image = image.chunks(512).map(value_of).collect();
        self.disks[which].may_hold = vec![image];
        Ok(())
    }

    /// Opens the disks at `paths`.
    fn open_all<'a>(
        &self,
        paths: impl Iterator<Item = &'a PathBuf>,
    ) -> Result<RunningStore, Error> {
        let disks: Vec<_> = paths.map(DiskOptions::new).collect();
        let medium = Box::new(self.medium.clone());
        let opened = open_log(medium, Path::new(LOG), &disks, &options(), &mut |_, _| {});
        opened.map(|opened| RunningStore::new(&self.medium, opened))
    }

    fn open(&self) -> Result<RunningStore, Error> {
        self.open_all(self.disks.iter().map(|disk| &disk.path))
    }

    /// Opens all disks, writes to one and grows it, flushes, does checkpoints, and closes.
    fn work(&mut self) -> Result<(), Violation> {
        let opened = self.open();
        let Some(mut running) = self.excuse("opening", opened)? else {
            return Ok(());
        };
        let which = self.random.below(running.disks.len() as u64) as usize;
        let mut port = running.disks[which].open_port().expect("a port");
        let mut done = true;
        for _ in 0..self.random.below(12) {
            done = done && self.step(which, &mut running, &mut port)?;
            let idle = running.log().lock().is_idle();
            // The last disk, which has no port then.
            if done && idle && which + 1 < running.disks.len() && self.random.one_in(2) {
                done = self.remove_and_add(&mut running)?;
            }
        }
        drop(port);
        if done && self.random.one_in(2) {
            self.close(which, running)
        } else {
            Ok(())
        }
    }

    /// A disk leaves the log in use, and comes back. Returns `false` if that was cut.
    fn remove_and_add(&mut self, running: &mut RunningStore) -> Result<bool, Violation> {
        let last = running.disks.len() - 1;
        let Some(disk) = running.disks.pop_if(|_| last > 0) else {
            return Ok(true);
        };
        let mut order = |task| {
            let (answer, answered) = mpsc::channel();
            let order = KeeperOrder { task, answer };
            running.log().lock().keeper.orders.push(order);
            running.keeper.serve_orders();
            answered.try_recv().expect("an answer")
        };
        let removed = order(KeeperTask::Remove(disk.state, false));
        if self.excuse("removing a disk", removed)?.is_none() {
            return Ok(false);
        }
        self.disks[last].settle();
        let options = DiskOptions::new(&self.disks[last].path);
        let (added, adding) = mpsc::channel();
        let added = add_task(&disk.log, &options, added).and_then(order);
        if self.excuse("adding a disk", added)?.is_none() {
            return Ok(false);
        }
        self.totals.removed += 1;
        let state = adding.try_recv().expect("a disk");
        let log = disk.log;
        running.disks.push(Disk { log, state });
        Ok(true)
    }

    /// Takes one step with an open disk. Returns `false` if it failed because of a cut or a failed
    /// sync. A failed checkpoint counts as done, since the disk's contents do not depend on it.
    fn step(
        &mut self,
        which: usize,
        running: &mut RunningStore,
        port: &mut Port,
    ) -> Result<bool, Violation> {
        let newest = self.disks[which].may_hold.last().expect("some");
        let len = newest.len() as u64;
        match self.random.below(12) {
            0 => {
                let more = self.random.below(8);
                let state = running.disks[which].state.clone();
                let grown = running.keeper.grow(&state, (len + more) * 512);
                let grown = self.excuse("growing", grown)?.is_some();
                self.totals.grown += u64::from(grown && more > 0);
                self.disks[which].resize((len + more) as usize, grown);
                return Ok(grown);
            }
            // The checkpoint waits for groups begun by others, of which there may be none with one
            // thread.
            1 if running.disks[which].log.lock().is_idle() => {
                let copied = running.keeper.step(true);
                self.excuse("a checkpoint", copied)?;
                return Ok(true);
            }
            2..5 => {
                if carry_out(running, port, Operation::Flush).is_ok() {
                    self.disks[which].settle();
                    return Ok(true);
                }
            }
            _ => {
                let mut contents = newest.clone();
                let sectors = 1 + self.random.below(len.min(8));
                let sector = self.random.below(len - sectors + 1);
                let value = self.value();
                contents[sector as usize..(sector + sectors) as usize].fill(value);
                self.disks[which].may_hold.push(contents);
                let data = filled(value, sectors);
                if carry_out(running, port, Operation::Write { sector, data }).is_ok() {
                    return Ok(true);
                }
            }
        }
        let world = self.medium.lock();
        if world.crashed || world.failed {
            Ok(false)
        } else {
            Err("a request failed for no reason".into())
        }
    }

    /// After a close the base images alone have everything, even after a power loss; after one that
    /// was cut, the base images and the log.
    fn close(&mut self, which: usize, mut running: RunningStore) -> Result<(), Violation> {
        if self.random.one_in(2) {
            let steps = self.random.below(4);
            running.disks[which].log.lock().keeper.copy_steps = Some(steps);
        }
        let closed = running.keeper.close();
        let Some(whole) = self.excuse("closing", closed)? else {
            return Ok(());
        };
        self.disks[which].settle();
        drop(running);
        self.end_process();
        if !whole {
            self.totals.cut_closes += 1;
            return Ok(());
        }
        self.totals.closed += 1;
        self.check_bases()
    }

    pub(super) fn check_bases(&self) -> Result<(), Violation> {
        for disk in &self.disks {
            let world = self.medium.lock();
            let file = world.names.get(&disk.path);
            let file = &world.files[file.ok_or("a closed disk is gone")?];
            let found: SectorValues = file.current.to_vec().chunks(512).map(value_of).collect();
            if found != disk.may_hold[0] {
                return Err(format!("{}: closed, and not whole", disk.path.display()));
            }
            if file.mark().is_some_and(|mark| mark.open) {
                return Err(format!(
                    "{}: closed, and marked as open",
                    disk.path.display()
                ));
            }
        }
        Ok(())
    }

    /// Opens all disks up to twice, losing power or being killed in between. `new`: a disk that may
    /// exist too.
    fn cut_openings(&mut self, new: Option<&Path>) -> Result<(), Violation> {
        for _ in 0..self.random.below(3) {
            let new = new.filter(|path| self.there(path)).map(Path::to_owned);
            let known = self.disks.iter().map(|disk| &disk.path);
            let paths: Vec<_> = known.chain(&new).cloned().collect();
            if paths.is_empty() {
                return Ok(());
            }
            let ticks = self.random.below(24);
            self.medium.lock().ticks = Some(ticks);
            let opened = self.open_all(paths.iter());
            if let Some(mut running) = self.excuse("opening", opened)?
                && self.random.one_in(2)
            {
                let copied = running.keeper.step(true);
                self.excuse("a checkpoint", copied)?;
            }
            self.totals.cut_openings += u64::from(self.medium.lock().crashed);
            self.end_process();
        }
        Ok(())
    }

    /// Verifies that all disks can be opened and have contents that they may have.
    pub(super) fn verify(&mut self) -> Result<(), Violation> {
        if self.disks.is_empty() {
            return Ok(());
        }
        let opened = self.open();
        let running = opened.map_err(|error| format!("opening refused: {error}"))?;
        let found = running.read();
        let found = found.map_err(|failure| format!("reading: {failure}"))?;
        for (found, known) in found.into_iter().zip(&mut self.disks) {
            let Some(place) = known.may_hold.iter().rposition(|held| *held == found) else {
                return Err(format!(
                    "{}: {} sectors, and not what it may hold: {found:?} is none of {:?}",
                    known.path.display(),
                    found.len(),
                    known.may_hold
                ));
            };
            self.totals.oldest += u64::from(place == 0 && known.may_hold.len() > 1);
            known.may_hold = vec![found];
        }
        Ok(())
    }
}

impl KnownDisk {
    /// The disk has another size, or may have it if the resize is not `done`.
    fn resize(&mut self, sectors: usize, done: bool) {
        let mut resized = self.may_hold.clone();
        resized.iter_mut().for_each(|held| held.resize(sectors, 0));
        if done {
            self.may_hold = resized
        } else {
            self.may_hold.extend(resized)
        }
    }
}

/// The image that is imported.
const RAW: &str = "/raw";

fn options() -> StoreOptions {
    StoreOptions {
        segment_size: 64 << 10,
        max_segments: 4,
        commit_wait: CommitWait::NONE,
        threads: NonZeroUsize::new(1),
        ..StoreOptions::default()
    }
}

fn make_one(path: &Path, sectors: u64, import: bool) -> Result<(), Error> {
    let (log, options) = (Path::new(LOG), options());
    if import {
        import_disk(path, Path::new(RAW), log, &options, &mut |_, _| {}).map(drop)
    } else {
        create_disk(path, sectors * 512, log, &options)
    }
}
