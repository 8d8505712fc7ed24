//! A log and its disks on a simulated medium: creating, opening and reading them.

use std::cell::RefCell;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use zerocopy::little_endian::U64;

use super::files::SimulatedMedium;
use super::medium::{LOG, StoredFiles, World};
use super::names::DIRECTORY;
use super::oracle::{DiskContents, ReadableContents, value_of};
use crate::catalog::control::{ControlFile, open_control, read_control};
use crate::catalog::options::{CacheMode, DiskOptions, FullLogPolicy};
use crate::catalog::retention::Retention;
use crate::disk::handle::Disk;
use crate::format::{Control, ControlHeader, DecodeResult, DiskEntry, decode_spill_map};
use crate::keeper::Keeper;
use crate::log::clock::LogClock;
use crate::log::group_commit::{Group, Leader};
use crate::log::state::Log;
use crate::medium::file::{AppendResult, AppendStats, Appender, Engine, Io, SyncScope};
use crate::medium::lock::Access;
use crate::medium::mark::hex;
use crate::mutant::PLANTED;
use crate::store::attach::OpenBase;
use crate::store::open::open_log;
use crate::store::rewind::rewind;
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, Event, Mutex};
use crate::{
    Backend, BackendQueue, Buffer, CommitWait, Failure, MarkText, Operation, Point, Port,
    RewindReport, StoreOptions, create_disk,
};

/// The sizes of a log and its disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Shape {
    pub disks: usize,
    /// Sectors of each disk.
    pub sectors: u64,
    /// Size of a segment file in bytes.
    pub segment_size: u64,
    pub max_segments: u32,
}

impl Shape {
    /// A log of one disk, with segments of 64 KiB.
    pub(super) const fn one_disk(sectors: u64, max_segments: u32) -> Self {
        Self {
            disks: 1,
            sectors,
            segment_size: 64 << 10,
            max_segments,
        }
    }

    /// Whether the log has room for much more than a history of usual length writes.
    pub(super) fn is_large(&self) -> bool {
        self.max_segments > 8
    }

    /// A log of two disks, with segments of 64 KiB.
    #[cfg(not(feature = "shuttle"))]
    pub(super) const fn two_disks(sectors: u64, max_segments: u32) -> Self {
        Self {
            disks: 2,
            ..Self::one_disk(sectors, max_segments)
        }
    }
}

/// A log's shape, and the medium that it is on.
pub(super) struct Fixture {
    pub medium: SimulatedMedium,
    pub shape: Shape,
    /// Whether base images are moved now and then, so that the next control writes change many
    /// sectors.
    pub moves: bool,
    /// How much history the log keeps.
    pub retain: Retention,
    pub on_full: FullLogPolicy,
    pub spill_limit: Option<u64>,
    /// The disks that have left the log.
    pub left: Vec<bool>,
    /// The next opening finds the base images where they are.
    pub stays: bool,
}

/// An open store without threads.
pub(super) struct RunningStore {
    /// The open disks, and the number of each in the fixture.
    pub disks: Vec<Disk>,
    pub places: Vec<usize>,
    pub keeper: Keeper,
    writer: RefCell<SteppedWriter>,
}

/// The log's writer, which takes one step at a time.
struct SteppedWriter {
    medium: SimulatedMedium,
    leader: Leader,
    engine: Box<dyn Engine>,
    under_way: Option<Group>,
}

impl SteppedWriter {
    fn step(&mut self) {
        let Some(group) = self.under_way.take() else {
            if self.leader.deadline().is_some() && self.medium.lock().is_over() {
                self.leader.end_delay();
            }
            match self.leader.begin() {
                Some((io, group)) if is_cached(&io) => {
                    let ran = self.medium.append(io);
                    if self.leader.end(group, ran, true) {
                        self.step();
                    }
                }
                Some((io, group)) => {
                    self.under_way = Some(group);
                    self.engine.submit(0, io);
                }
                None => {}
            }
            return;
        };
        let mut ended = Vec::new();
        self.engine.poll(&mut ended);
        let Some(end) = ended.pop() else {
            self.under_way = Some(group);
            return;
        };
        let ran = AppendResult {
            result: end.result.map(|_| AppendStats::DIRECT),
            list: Vec::new(),
        };
        if self.leader.end(group, ran, true) {
            self.step();
        }
    }
}

/// Whether an operation is one of the page cache, which does not wait for the medium.
fn is_cached(io: &Io) -> bool {
    let sync = match io {
        Io::WriteBack(_) => return true,
        Io::Append { sync, .. } => sync,
        _ => return false,
    };
    matches!(sync, SyncScope::Later)
}

impl Fixture {
    /// Creates a new log with empty disks.
    pub(super) fn new(mut world: World, shape: Shape) -> Self {
        let made = made(shape, world.without_attributes);
        (world.files, world.names) = (made.files, made.names);
        let world = Arc::new(Mutex::new(world));
        Self {
            medium: SimulatedMedium { world },
            shape,
            moves: false,
            retain: Retention::Nothing,
            on_full: FullLogPolicy::Fail,
            spill_limit: None,
            left: vec![false; shape.disks],
            stays: false,
        }
    }

    /// The same log on another medium.
    pub(super) fn with(&self, mut world: World) -> Self {
        (world.locked, world.shared) = Default::default();
        let world = Arc::new(Mutex::new(world));
        Self {
            medium: SimulatedMedium { world },
            shape: self.shape,
            moves: self.moves,
            retain: self.retain,
            on_full: self.on_full,
            spill_limit: self.spill_limit,
            left: self.left.clone(),
            stays: self.stays,
        }
    }

    /// Recovers the log; `through`: in writethrough mode. `commit_wait` is never adaptive: adaptive
    /// waits look at the clock, so a seed would not reproduce the same run.
    pub(super) fn open(
        &self,
        through: bool,
        commit_wait: CommitWait,
    ) -> crate::Result<RunningStore> {
        let options = StoreOptions {
            commit_wait,
            // Sometimes so little that writes wait for checkpoints.
            index_memory: if self.medium.lock().random.one_in(4) {
                1000
            } else {
                StoreOptions::default().index_memory
            },
            retain: Some(self.retain),
            on_full: self.on_full,
            spill_limit: self.spill_limit,
            ..StoreOptions::default()
        };
        if self.moves && self.medium.lock().random.one_in(3) && !self.stays {
            self.move_images();
        }
        let cache = if through {
            CacheMode::Writethrough
        } else {
            CacheMode::Writeback
        };
        let disk = |disk: &usize| DiskOptions {
            cache,
            ..DiskOptions::new(self.image(*disk))
        };
        let places: Vec<_> = (0..self.shape.disks)
            .filter(|disk| !self.left[*disk])
            .collect();
        let mut disks: Vec<_> = places.iter().map(disk).collect();
        // The log may still have records of a disk that has left it in use.
        let left = (0..self.shape.disks).filter(|disk| self.left[*disk]);
        disks.extend(left.map(|disk| DiskOptions::detached(self.image(disk))));
        let medium = Box::new(self.medium.clone());
        let _files = self.medium.enter();
        let opened = open_log(medium, Path::new(LOG), &disks, &options, &mut |_, _| {});
        let mut running = RunningStore::new(&self.medium, opened?);
        running.places = places;
        Ok(running)
    }

    /// Restores a disk in place, to an LSN.
    pub(super) fn rewind(&self, disk: usize, to: u64) -> crate::Result<RewindReport> {
        let (log, image) = (Path::new(LOG), DiskOptions::new(self.image(disk)));
        let _files = self.medium.enter();
        let control = open_control(log, Access::Log)?;
        let base = OpenBase::open(&image, Access::Write, Path::new(LOG), true)?;
        rewind(
            Box::new(self.medium.clone()),
            log,
            control,
            base,
            Point::Lsn(to),
        )
    }

    /// The path of a disk's image.
    pub(super) fn image(&self, disk: usize) -> PathBuf {
        let world = self.medium.lock();
        let mut paths = image_paths(disk).into_iter();
        let path = paths.find(|path| world.names.get(path).is_some());
        path.expect("an image")
    }

    /// The images of all other disks.
    pub(super) fn other_images(&self, disk: usize) -> Vec<PathBuf> {
        let others = (0..self.shape.disks).filter(|other| *other != disk);
        others.map(|other| self.image(other)).collect()
    }

    /// The entry of a disk in the log's table, if it has one.
    pub(super) fn entry<'a>(&self, control: &'a Control, disk: usize) -> Option<&'a DiskEntry> {
        let path = self.image(disk);
        let world = self.medium.lock();
        let file = world.names.get(&path)?;
        let mark = world.files[file].mark();
        drop(world);
        let find = |is: &dyn Fn(&DiskEntry) -> bool| control.disks.iter().find(|entry| is(entry));
        // An image that was moved while closed is recognized by its mark, or by its inode if it
        // never got one.
        find(&|entry| mark.is_some_and(|mark| mark.disk == entry.disk))
            .or_else(|| find(&|entry| entry.path(Path::new("/")) == path))
            .or_else(|| find(&|entry| mark.is_none() && entry.inode.get() == 1 + file as u64))
    }

    /// Moves the images to another directory.
    fn move_images(&self) {
        for disk in 0..self.shape.disks {
            let from = self.image(disk);
            let to = image_paths(disk).into_iter().find(|path| *path != from);
            self.medium
                .lock()
                .names
                .move_file(&from, &to.expect("two paths"));
        }
    }

    /// The contents of the base images and their spill files, without the log.
    pub(super) fn bases(&self) -> DiskContents {
        // Neither a planned fault nor a power cut is for the judge.
        let mut world = self.medium.lock();
        let (planned, cut) = (world.fail_read.take(), std::mem::take(&mut world.crashed));
        drop(world);
        let control = control_of(&self.medium);
        let mut world = self.medium.lock();
        (world.fail_read, world.crashed) = (planned, cut);
        drop(world);
        let control = control.ok().map(|control| control.control);
        let values = |disk: usize| {
            let path = self.image(disk);
            let entry = control
                .as_ref()
                .and_then(|control| self.entry(control, disk));
            let world = self.medium.lock();
            let mut values: Vec<_> = world.bytes(&path).sectors().map(value_of).collect();
            if let (Some(control), Some(entry)) = (&control, entry)
                && control.is_spilled(entry.id.get())
            {
                let name = format!("spill-{}", hex(&entry.disk));
                let at = |name: String| world.bytes(&Path::new(LOG).join(name)).to_vec();
                let map = at(format!("{name}.map"));
                let DecodeResult::Valid(map) =
                    decode_spill_map(&control.header.log, &entry.disk, &map)
                else {
                    panic!("a committed map");
                };
                let data = at(name);
                for range in map {
                    let first = range.sector.get() as usize;
                    for sector in first..first + range.sectors.get() as usize {
                        values[sector] = value_of(&data[sector * 512..][..512]);
                    }
                }
            }
            values
        };
        (0..self.shape.disks).map(values).collect()
    }

    /// Cuts power: any part of the unsynced bytes is left.
    pub(super) fn lose_power(&self) {
        let after = self.medium.lock().after_crash();
        *self.medium.lock() = after;
    }
}

impl RunningStore {
    /// An open store on `medium`.
    pub(super) fn new(medium: &SimulatedMedium, opened: (Arc<Log>, Vec<Disk>, Keeper)) -> Self {
        let (log, disks, keeper) = opened;
        let event = Event::new().expect("an event");
        let writer = SteppedWriter {
            medium: medium.clone(),
            leader: Leader::new(log, None),
            engine: medium.simulated(&event).expect("an engine"),
            under_way: None,
        };
        Self {
            places: (0..disks.len()).collect(),
            disks,
            keeper,
            writer: RefCell::new(writer),
        }
    }

    /// The log.
    pub(super) fn log(&self) -> &Arc<Log> {
        &self.keeper.log
    }

    /// The open disk of this number.
    pub(super) fn disk(&self, disk: usize) -> Option<&Disk> {
        let place = self.places.iter().position(|place| *place == disk)?;
        Some(&self.disks[place])
    }

    /// The LSN of the newest point of the disks.
    pub(super) fn newest_point(&self) -> u64 {
        self.log().lock().pipeline.appended()
    }

    /// Lets the log's writer take one step.
    pub(super) fn step_writer(&self) {
        self.writer.borrow_mut().step();
    }

    /// Lets the log's writer finish the group that it has begun.
    pub(super) fn finish_writer(&self) {
        let mut writer = self.writer.borrow_mut();
        while writer.under_way.is_some() {
            writer.step();
        }
    }

    /// The LSN of the newest record. Panics if the log's state breaks an invariant.
    pub(super) fn appended(&self) -> u64 {
        let log = self.log();
        let state = log.lock();
        state.check(log);
        state.pipeline.appended()
    }

    /// Whether the log has failed.
    pub(super) fn poisoned(&self) -> bool {
        self.log().poisoned.load(Ordering::Relaxed)
    }

    /// Reads all disks completely.
    pub(super) fn read(&self) -> Result<DiskContents, Failure> {
        let read_disk = |disk: &Disk| {
            let mut port = disk.open_port().expect("a port");
            let whole = Operation::Read {
                sector: 0,
                sectors: disk.sectors() as u32,
            };
            let data = end(self, &mut port, whole)?.expect("data of a read");
            Ok(data.chunks(512).map(value_of).collect())
        };
        self.disks.iter().map(read_disk).collect()
    }

    /// Reads all disks sector by sector; sectors that can't be read are `None`.
    pub(super) fn read_sectors(&self) -> ReadableContents {
        let read_disk = |disk: &Disk| {
            let mut port = disk.open_port().expect("a port");
            let mut sector = |sector| {
                let sectors = 1;
                let data = end(self, &mut port, Operation::Read { sector, sectors }).ok()?;
                Some(value_of(&data.expect("data of a read")))
            };
            (0..disk.sectors()).map(&mut sector).collect()
        };
        self.disks.iter().map(read_disk).collect()
    }
}

/// The control file, as the medium has it.
pub(super) fn control_of(medium: &SimulatedMedium) -> crate::Result<ControlFile> {
    read_control(medium.file("control"), "control".into(), "/".into())
}

/// The paths that a disk's image may have. They differ so much that a change from one to the other
/// changes many sectors of the control file.
fn image_paths(disk: usize) -> [PathBuf; 2] {
    let name = format!("base-{disk}");
    [Path::new("/").join(&name), elsewhere().join(name)]
}

fn elsewhere() -> PathBuf {
    Path::new("/").join("elsewhere-".repeat(20))
}

/// A new log with empty disks, as it is on the medium. It is built once for each shape and thread.
fn made(shape: Shape, without_attributes: bool) -> StoredFiles {
    thread_local! {
        static MADE: RefCell<HashMap<(Shape, bool), StoredFiles>> = RefCell::default();
    }
    let key = (shape, without_attributes);
    if let Some(made) = MADE.with_borrow(|made| made.get(&key).cloned()) {
        return made;
    }
    // The log is built by a store without planted faults.
    let planted = PLANTED.take();
    let mut world = World::new(1);
    world.without_attributes = without_attributes;
    world.names.set(&elsewhere(), DIRECTORY);
    world.names.sync(Path::new("/"));
    let medium = SimulatedMedium {
        world: Arc::new(Mutex::new(world)),
    };
    let options = StoreOptions {
        segment_size: shape.segment_size,
        max_segments: shape.max_segments,
        ..StoreOptions::default()
    };
    let files = medium.enter();
    for disk in 0..shape.disks {
        let [path, _] = image_paths(disk);
        create_disk(&path, shape.sectors * 512, Path::new(LOG), &options).expect("a new disk");
    }
    drop(files);
    PLANTED.set(planted);
    let made = medium.lock().stored();
    MADE.with_borrow_mut(|all| all.insert(key, made.clone()));
    made
}

/// Runs one request to its end, with no other under way.
fn end(
    running: &RunningStore,
    port: &mut Port,
    operation: Operation,
) -> Result<Option<Buffer>, Failure> {
    port.submit(0, operation);
    let mut done = Vec::new();
    for _ in 0..100_000 {
        port.kick();
        running.step_writer();
        port.completions(&mut done);
        if let Some(end) = done.pop() {
            return end.result;
        }
    }
    panic!("a request alone never ends");
}

/// Carries out a request, with one step of the keeper for each of the port.
#[cfg(not(feature = "shuttle"))]
pub(super) fn carry_out(
    running: &mut RunningStore,
    port: &mut Port,
    operation: Operation,
) -> Result<Option<Buffer>, Failure> {
    port.submit(1, operation);
    let mut done = Vec::new();
    for _ in 0..1000 {
        port.kick();
        running.step_writer();
        port.completions(&mut done);
        if let Some(end) = done.pop() {
            return end.result;
        }
        if running.disks[0].log.lock().is_idle() {
            // If the keeper fails, the request gets the error.
            let _ = running.keeper.step(false);
        }
    }
    panic!("a request is never answered");
}

/// The text of a history's mark.
pub(super) fn mark_text(number: u32) -> MarkText {
    format!("mark {number}").parse().expect("a short line")
}

/// A buffer of `sectors` sectors filled with a value.
pub(super) fn filled(value: u32, sectors: u64) -> Buffer {
    Buffer::from(&value.to_le_bytes().repeat(sectors as usize * 128)[..])
}

/// A header change that did not reach the medium does not count: a retried checkpoint must note
/// again how far it copies.
#[test]
fn a_control_write_that_fails_changes_nothing() {
    let shape = Shape::one_disk(8, 4);
    let fixture = Fixture::new(World::new(1), shape);
    let mut control = control_of(&fixture.medium).unwrap();
    let before = control.control.header;
    {
        let mut world = fixture.medium.lock();
        (world.fail_sync, world.fail_control) = (Some(0), true);
    }
    let copying = |header: &mut ControlHeader| header.copying_lsn = U64::new(9);
    assert!(control.update(copying).is_err());
    assert_eq!(control.control.header.copying_lsn, before.copying_lsn);
    assert_eq!(control.control.header.generation, before.generation);
    control.update(copying).unwrap();
    let read = control_of(&fixture.medium).unwrap();
    assert_eq!(read.control.header.copying_lsn.get(), 9);
}

/// After the clock was an hour ahead and is right again, later records still do not get earlier
/// times than older ones, whether or not the log was reopened.
#[test]
fn times_in_a_log_never_go_back() {
    let shape = Shape::one_disk(64, 16);
    let fixture = Fixture::new(World::new(1), shape);
    let commit = |running: &mut RunningStore, value| {
        // The keeper makes room, and the records stay in the log.
        running.disks[0].log.lock().keeper.checkpoint = false;
        running.keeper.step(false).unwrap();
        let mut port = running.disks[0].open_port().expect("a port");
        let data = filled(value, 8);
        end(running, &mut port, Operation::Write { sector: 0, data }).unwrap();
        end(running, &mut port, Operation::Flush).unwrap();
    };
    let mut ahead = 0;
    for opened in 0..3 {
        let mut running = fixture.open(false, CommitWait::NONE).unwrap();
        commit(&mut running, 2 * opened);
        if opened == 0 {
            let mut state = running.disks[0].log.lock();
            ahead = state.clock.next().unix_us + 3_600_000_000;
            state.clock = LogClock::stopped(ahead);
        }
        commit(&mut running, 2 * opened + 1);
        drop(running);
        fixture.medium.lock().restart();
    }
    let control = control_of(&fixture.medium).unwrap();
    let mut times = Vec::new();
    crate::recovery::scan::scan(
        &fixture.medium,
        Path::new(LOG),
        &control.control,
        crate::recovery::contents::VerifyScope::All,
        &mut |found| times.push(found.batch.unix_us.get()),
        &mut |_, _| {},
    )
    .unwrap();
    assert!(times.len() == 6 && times[0] < ahead, "{times:?}");
    assert!(times[1..].iter().all(|&time| time == ahead), "{times:?}");
}

/// A run with a clock a year ahead, between two with the right time: nothing expires, and
/// afterwards times are right again.
#[test]
#[cfg(not(feature = "shuttle"))]
fn a_run_with_a_clock_that_is_ahead_spoils_no_time() {
    const YEAR: u64 = 365 * 86_400_000_000;
    let mut fixture = Fixture::new(World::new(2), Shape::one_disk(64, 64));
    fixture.retain = Retention::Time(std::time::Duration::from_secs(3600));
    let mut times = Vec::new();
    for run in 0..3 {
        let mut running = fixture.open(false, CommitWait::NONE).unwrap();
        running.keeper.step(false).unwrap();
        if run == 1 {
            let ahead = crate::log::clock::ClockReading::now().wall + YEAR;
            running.disks[0].log.lock().clock = LogClock::stopped(ahead);
        }
        let mut port = running.disks[0].open_port().unwrap();
        for sector in 0..8 {
            let data = filled(run, 32);
            carry_out(&mut running, &mut port, Operation::Write { sector, data }).unwrap();
            carry_out(&mut running, &mut port, Operation::Flush).unwrap();
        }
        running.finish_writer();
        let mut state = running.disks[0].log.lock();
        let now = state.clock.now();
        let hour = |hours: u64| now.passed + hours * 3_600_000_000 + 1_000_000;
        let (retain, all) = (state.keeper.retain, u64::MAX);
        let freed = |now| state.ring.expired(retain, now, true, all);
        let (count, early) = freed(now.passed);
        assert!(
            count > 0 && early == count,
            "run {run}: {early} of {count} stay"
        );
        let (count, early) = freed(hour(1));
        assert!(
            count > 0 && early == 0,
            "run {run}: {early} of {count} stay"
        );
        times.push(now.unix_us);
        let horizon = state.horizon.unix_us;
        assert!(run == 1 || horizon <= now.unix_us, "run {run}");
        drop(state);
        drop((port, running));
        fixture.medium.lock().restart();
    }
    assert!(times[1] > times[2] + YEAR / 2 && times[2] >= times[0]);
    let control = control_of(&fixture.medium).unwrap().control;
    // The newest record of the first run, though the second run has been since.
    let at = |time: u64| {
        let (log, disk) = (Path::new(LOG), control.disks[0].id.get());
        let read = |visit: &mut dyn FnMut(&crate::Commit)| {
            crate::recovery::scan::scan(
                &fixture.medium,
                log,
                &control,
                crate::recovery::contents::VerifyScope::Tail,
                &mut |found| visit(&found.commit()),
                &mut |_, _| {},
            )
            .map(drop)
        };
        Point::Time(time).resolve(log, &control, disk, read)
    };
    assert_eq!(at(times[0]).unwrap(), 8);
    assert_eq!(at(times[2]).unwrap(), 24);
    assert!(at(times[0] - 60_000_000).is_err());
}

/// Each step of a history panics if the log's parts do not fit together.
#[test]
#[cfg(not(feature = "shuttle"))]
fn every_step_checks_the_state_of_the_log() {
    use crate::log::pipeline::tests::panics;
    use crate::log::state::LogState;

    let shape = Shape::one_disk(64, 16);
    type Fault = fn(&Log, &mut LogState);
    let broken: [(&str, Fault); 3] = [
        ("applied 9", |_, state| state.pipeline.set_applied(9)),
        ("written watermark", |log, _| {
            log.written.store(9, Ordering::Release)
        }),
        ("is freed before", |_, state| {
            state.ring.end_tail();
            state.ring.retire(1);
        }),
    ];
    for (message, change) in broken {
        // Everything is dropped while the panic unwinds, with the log's lock poisoned.
        panics(message, || {
            let fixture = Fixture::new(World::new(1), shape);
            let mut running = fixture.open(false, CommitWait::NONE).unwrap();
            running.keeper.step(false).unwrap();
            let mut port = running.disks[0].open_port().unwrap();
            let data = filled(1, 8);
            end(&running, &mut port, Operation::Write { sector: 0, data }).unwrap();
            assert!(!port.notify_written(7));
            let mut done = Vec::new();
            while done.is_empty() {
                port.completions(&mut done);
            }
            running.step_writer();
            let log = running.disks[0].log.clone();
            change(&log, &mut log.lock());
            running.step_writer();
        });
    }
}
