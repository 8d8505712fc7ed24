//! What is done to a log in use in a random history, beside its requests: looks, exports, restores
//! in place, snapshots that are deleted while they are in use, disks that leave and come back, and
//! steps of the clock.
//!
//! All of these are mixed with each other and with faults. As long as it is open, a look or an
//! export shows what the oracle knows about its LSN, whatever is copied, deleted or restored
//! meanwhile. A point is refused only if the base images have moved past it.

use std::fs::File;
use std::path::Path;

use rustix::fs::MemfdFlags;

use super::clients::Clients;
use super::fixture::RunningStore;
use super::history::{History, SECTORS};
use super::medium::LOG;
use super::oracle::{DiskContents, Violation, value_of};
use super::point_exports::PointExport;
use super::trace;
use crate::SECTOR_SIZE;
use crate::catalog::options::{CacheMode, DiskOptions};
use crate::catalog::readable::ReadableLog;
use crate::catalog::retention::Retention;
use crate::catalog::snapshot::{Snapshot, SnapshotName};
use crate::disk::handle::Disk;
use crate::error::{Error, ErrorKind, Result};
use crate::format::Control;
use crate::log::clock::{CLOCKS, ClockReading};
use crate::log::commit::Commit;
use crate::log::disk_state::DiskState;
use crate::log::holds::{HeldLog, HoldOwner};
use crate::log::orders::RewindRequest;
use crate::log::orders::{KeeperOrder, KeeperTask};
use crate::recovery::live::read_live;
use crate::recovery::scan::FoundRecord;
use crate::store::members::add_task;
use crate::store::view::{DataPlace, Layers, View};
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, mpsc};
use crate::view::look::Look;
use crate::view::point::Point;
use crate::view::rewind_plan::RewindReport;

/// Looks that are open at a time, at most.
const LOOKS: usize = 3;
const HOUR: u64 = 3_600_000_000;

/// The clocks of a history.
pub(super) struct TestClocks {
    now: ClockReading,
    /// The most that the wall clock was ahead of the steady clock.
    ahead: u64,
    /// The wall clock was set back.
    pub set_back: bool,
}

impl TestClocks {
    pub(super) fn new() -> Self {
        let now = ClockReading {
            wall: 1_800_000_000_000_000,
            steady: HOUR,
        };
        let mut clock = Self {
            now,
            ahead: 0,
            set_back: false,
        };
        clock.show();
        clock
    }

    /// Sets the time for this thread.
    fn show(&mut self) {
        self.ahead = self.ahead.max(self.now.wall - self.now.steady);
        CLOCKS.set(Some(self.now));
    }

    /// The latest time that the wall clock could show if it had never been set back.
    pub(super) fn latest(&self) -> u64 {
        self.now.steady + self.ahead
    }

    /// Time passes.
    pub(super) fn pass(&mut self, micros: u64) {
        self.now.wall += micros;
        self.now.steady += micros;
        self.show();
    }
}

impl Drop for TestClocks {
    fn drop(&mut self) {
        CLOCKS.set(None);
    }
}

/// When something happened in a process, by the steady clock.
#[derive(Default)]
pub(super) struct LogTimes {
    /// The newest record at some times.
    appended: Vec<(u64, u64)>,
    /// The last record of each full segment, and when it was first seen.
    full: Vec<(u64, u64)>,
}

/// What decides whether history expires.
struct ExpiryState {
    retain: Retention,
    applied: u64,
    /// How many segments it takes that their time is up.
    enough: usize,
    due: bool,
    /// Only its time takes history from the log, and nothing keeps it there.
    is_free: bool,
}

impl ExpiryState {
    fn of(running: &RunningStore) -> Self {
        let log = running.log();
        let copying = |disk: &Disk| disk.state.index().frozen.is_some();
        let copying = running.disks.iter().any(copying);
        let state = log.lock();
        let pressed = state.is_pressed() || log.index_is_heavy();
        let held = state.keeper.holds.held().is_some() || state.ring.waits_for_readers();
        let rewound = !running.keeper.control.control.rewinds.is_empty();
        Self {
            retain: state.keeper.retain,
            applied: state.pipeline.applied(),
            enough: state.ring.step(state.keeper.retain),
            due: state.keeper.checkpoint,
            is_free: !(copying || pressed || held || rewound),
        }
    }
}

/// What is open on a log in use, beside its ports.
#[derive(Default)]
pub(super) struct LiveHandles {
    looks: Vec<OpenLook>,
    pub point_export: Option<PointExport>,
    rewind: Option<PlannedRestore>,
}

impl LiveHandles {
    /// Whether anything is open of this disk.
    fn has(&self, disk: usize) -> bool {
        self.looks.iter().any(|look| look.disk == disk)
            || self.point_export.iter().any(|export| export.disk == disk)
            || self.rewind.iter().any(|rewind| rewind.disk == disk)
    }
}

/// A look, and what it must show.
struct OpenLook {
    look: Look,
    disk: usize,
    lsn: u64,
    shows: Vec<u32>,
}

/// A restore in place that the keeper has not carried out yet.
struct PlannedRestore {
    disk: usize,
    state: Arc<DiskState>,
    to: u64,
    then: Vec<u32>,
    rewinding: RewindRequest,
    /// It pins the base images.
    _held: HeldLog,
}

/// Whether a log may refuse a disk at the LSN of a point: the base image has moved past it, and no
/// saved file has its old contents.
fn has_passed(control: &Control, disk_id: u32, lsn: u64) -> bool {
    let entry = control.disk(disk_id);
    let void = entry.map_or(0, |entry| entry.void_lsn.get());
    let saved = control.has_saved(lsn, disk_id);
    let copying = control.header.copying_lsn.get();
    lsn < control.applied_lsn(disk_id).max(copying) && !(saved && void <= lsn)
}

/// The sectors of a disk of a history.
pub(super) fn values(layers: Layers<'_>) -> Result<Vec<u32>> {
    let size = SECTORS * SECTOR_SIZE;
    let mut bytes = vec![0; size as usize];
    for part in layers.data(0..size, u64::MAX) {
        let (range, data) = part?;
        if matches!(data, DataPlace::Zero) {
            continue;
        }
        layers.read(range, &data, &mut |at, some: &[u8]| {
            bytes[at as usize..][..some.len()].copy_from_slice(some);
            Ok(true)
        })?;
    }
    Ok(bytes.chunks(SECTOR_SIZE as usize).map(value_of).collect())
}

/// An empty file in memory.
pub(super) fn file_in_memory() -> File {
    let file = rustix::fs::memfd_create("export", MemfdFlags::CLOEXEC);
    file.expect("a file in memory").into()
}

impl History {
    /// What the disks were as of an LSN, if the oracle knows that.
    pub(super) fn as_of(&self, lsn: u64) -> Option<DiskContents> {
        if lsn >= self.first_lsn {
            return Some(self.after(lsn));
        }
        let known = self.past.iter().find(|(past, _)| *past == lsn);
        known.map(|(_, contents)| contents.clone())
    }

    /// Whether a log may refuse a disk at the LSN of a point.
    pub(super) fn may_refuse(&self, control: &Control, disk: usize, lsn: u64) -> bool {
        let entry = self.fixture.entry(control, disk);
        // A snapshot that was made while the disk was not on the log does not have it.
        lsn < self.joined[disk]
            || entry.is_none_or(|entry| has_passed(control, entry.id.get(), lsn))
    }

    /// Whether the oracle can't tell what the log has of a disk at an LSN: its records were
    /// discarded then, or it was not on the log.
    pub(super) fn is_unknown(&self, disk: usize, lsn: u64) -> bool {
        lsn < self.joined[disk] || self.given_up.contains(&(disk, lsn))
    }

    /// Whether a disk's state at an LSN may be gone with its image, which was replaced since. A
    /// snapshot never shows something else, but may be refused. A bare LSN may belong to the
    /// present image.
    pub(super) fn is_replaced(&self, disk: usize, lsn: u64) -> bool {
        lsn < self.replaced[disk]
    }

    /// A random point, and what the disks were then. The base images may have moved past it.
    pub(super) fn some_point(&mut self, running: &RunningStore) -> Option<(u64, DiskContents)> {
        let (first, newest) = (self.first_lsn, running.appended());
        let here = newest >= first && (self.past.is_empty() || !self.acts.one_in(3));
        if here {
            let lsn = first + self.acts.below(newest + 1 - first);
            return Some((lsn, self.after(lsn)));
        }
        let some = self.acts.below(self.past.len().max(1) as u64);
        self.past.get(some as usize).cloned()
    }

    /// An error that a fault excuses, or a log that is full or has to keep what it has.
    pub(super) fn excuse(
        &mut self,
        running: &RunningStore,
        what: &str,
        error: &Error,
    ) -> std::result::Result<(), Violation> {
        let world = self.fixture.medium.lock();
        let fault = world.crashed || world.failed || world.failed_read || running.poisoned();
        drop(world);
        // The keeper may need more room than the last segment has, even if nobody waits for room
        // yet.
        let fault = fault || running.log().lock().ring.is_used_up();
        if !fault && self.oracle.excused == 0 && !running.keeper.must_keep() {
            return Err(format!("{what} failed for no reason: {error}"));
        }
        trace(|| format!("{what}: {error}"));
        self.oracle.excused = u64::MAX;
        Ok(())
    }

    /// Does something beside the requests. Nothing of the log is in flight.
    pub(super) fn act(
        &mut self,
        running: &mut RunningStore,
        clients: &mut Clients,
    ) -> std::result::Result<(), Violation> {
        let medium = self.fixture.medium.clone();
        let _files = medium.enter();
        // The keeper waits for readers, which have no thread of their own here.
        let free = !self.oracle.reads();
        let absent = running.places.len() < self.fixture.shape.disks;
        match self.acts.below(12) {
            0 if self.acts.one_in(2) => self.pass_half_an_hour(running),
            0 => self.step_clock(),
            _ if absent && self.acts.one_in(3) => self.add_live(running, clients)?,
            _ if free && self.in_use.point_export.is_some() && self.acts.one_in(2) => {
                self.resume_point_export(running)?
            }
            // The reads of an absent port may never end, and an export ends all the same.
            _ if clients.away.is_some() && self.export_obstructs(running) => {
                self.end_point_export(running)?
            }
            1..4 if free => self.begin_look(running)?,
            4 => self.end_look(),
            5 if free && self.in_use.point_export.is_none() => self.begin_point_export(running)?,
            6..9 if free => self.plan_or_rewind(running)?,
            // What is planned holds the log, and the reads of an absent port may never end.
            6..9 if clients.away.is_some() => drop(self.in_use.rewind.take()),
            9 | 10 => self.delete_in_use(running)?,
            11 if free => self.remove_live(running, clients)?,
            _ => {}
        }
        if running.log().lock().keeper.failed {
            self.oracle.excused = u64::MAX;
        }
        Ok(())
    }

    /// Goes on with the export, and looks at what is open.
    pub(super) fn go_on(&mut self, running: &RunningStore) -> std::result::Result<(), Violation> {
        if self.in_use.point_export.is_some() && self.acts.one_in(4) {
            self.copy_point(running)?;
        }
        if self.acts.one_in(8)
            && let Some(place) = (self.in_use.looks.len() as u64).checked_sub(1)
        {
            let looked = self.acts.below(place + 1) as usize;
            self.check(looked)?;
        }
        Ok(())
    }

    /// The wall clock is set forward by a year or a day, or back by an hour.
    fn step_clock(&mut self) {
        let clock = &mut self.clock;
        match self.acts.below(3) {
            0 => clock.now.wall += 365 * 24 * HOUR,
            1 => clock.now.wall += 24 * HOUR,
            _ => {
                clock.now.wall -= HOUR;
                clock.set_back = true;
            }
        }
        clock.show();
        self.totals.clock_steps += 1;
    }

    /// Half an hour passes: a jump of the clock is believed, and history expires.
    fn pass_half_an_hour(&mut self, running: &RunningStore) {
        // What was appended since the last step is older than that.
        self.note_time(running);
        self.clock.pass(HOUR / 2);
        self.totals.half_hours += 1;
    }

    /// Notes when records were appended, and when segments were full, since the last call.
    pub(super) fn note_time(&mut self, running: &RunningStore) {
        let now = self.clock.now.steady;
        let state = running.log().lock();
        let newest = state.pipeline.appended();
        let times = &mut self.times;
        if newest
            > times
                .appended
                .last()
                .map_or(self.first_lsn - 1, |(lsn, _)| *lsn)
        {
            times.appended.push((newest, now));
        }
        let known = times.full.last().map_or(0, |(lsn, _)| *lsn);
        let full = state.ring.sealed_ends().filter(|end| *end > known);
        times.full.extend(full.map(|end| (end, now)));
    }

    /// The keeper does what is due. If the log has room, it drops the segments whose time is up,
    /// once there are enough of them, and no record before its time.
    pub(super) fn step_keeper(
        &mut self,
        running: &mut RunningStore,
        forced: bool,
    ) -> std::result::Result<Result<()>, Violation> {
        // A large log is there to let time be up before it is full.
        let forced = forced && (!self.fixture.shape.is_large() || self.acts.one_in(64));
        let before = ExpiryState::of(running);
        let done = running.keeper.step(forced);
        let after = ExpiryState::of(running);
        let Retention::Time(time) = before.retain else {
            return Ok(done);
        };
        if forced || !before.is_free || !after.is_free {
            return Ok(done);
        }
        let now = self.clock.now.steady;
        let is_up = |at: u64| u128::from(now - at) > time.as_micros();
        if after.applied > before.applied && after.applied >= self.first_lsn {
            let appended = &self.times.appended;
            let place = appended.partition_point(|(lsn, _)| *lsn < after.applied);
            if appended.get(place).is_some_and(|(_, at)| !is_up(*at)) {
                return Err(format!(
                    "LSN {} has left a log that has room and keeps {time:?}",
                    after.applied
                ));
            }
            self.totals.expired += 1;
        }
        let full = self.times.full.iter();
        let left = full.filter(|(end, at)| *end > after.applied && is_up(*at));
        let due = before.due && !after.due && done.is_ok();
        if due && left.count() >= before.enough {
            return Err(format!(
                "{} segments stay in a log that keeps {time:?}",
                before.enough
            ));
        }
        Ok(done)
    }

    /// Opens a look at a disk: at an LSN, at a snapshot, or at a time.
    fn begin_look(&mut self, running: &mut RunningStore) -> std::result::Result<(), Violation> {
        if self.in_use.looks.len() == LOOKS {
            return Ok(());
        }
        let which = self.acts.below(running.disks.len() as u64) as usize;
        let (live, disk) = (running.disks[which].clone(), running.places[which]);
        let Some((lsn, then)) = self.some_point(running) else {
            return Ok(());
        };
        let held = match running.keeper.hold(&live.state, HoldOwner::Look) {
            Ok(held) => held,
            Err(error) => return self.excuse(running, "a look", &error),
        };
        let control = held.control.clone();
        let named = self.pins.iter().find(|pin| pin.lsn == lsn).copied();
        let (point, lsn, then) = match self.acts.below(3) {
            0 if named.is_some_and(|pin| pin.has(live.state.id)) => {
                let name = named.expect("a snapshot").name;
                (Point::Snapshot(name), lsn, then)
            }
            1 => match self.time_of(&live, &held) {
                Ok(Some((time, lsn))) => match self.as_of(lsn) {
                    Some(then) => (Point::Time(time), lsn, then),
                    None => return Ok(()),
                },
                Ok(None) => return Ok(()),
                Err(error) => return self.excuse(running, "reading the log", &error),
            },
            _ => (Point::Lsn(lsn), lsn, then),
        };
        // Another process, for which the log is held.
        let durable = running.log().lock().pipeline.durable();
        let log = ReadableLog::held(Path::new(LOG), durable);
        let options = DiskOptions::new(self.fixture.image(disk));
        let view = View::open_at(&options, log, point, None);
        let shown = view.and_then(|view| values(view.layers()));
        self.totals.held_views += u64::from(shown.is_ok());
        if let Some(error) = self.judge_view(&control, (disk, lsn, &then[disk]), shown)? {
            return self.excuse(running, &format!("a view of LSN {lsn}"), &error);
        }
        match Look::in_use(&live.log, &live.state, point, held, None) {
            Ok(look) => {
                self.totals.live_looks += 1;
                self.totals.looks_at_times += u64::from(matches!(point, Point::Time(_)));
                let snapshot = self.has_snapshot(&control, disk, lsn);
                let replaced = self.is_replaced(disk, lsn) && !snapshot;
                if replaced || self.is_unknown(disk, lsn) {
                    return Ok(());
                }
                let shows = then[disk].clone();
                self.in_use.looks.push(OpenLook {
                    look,
                    disk,
                    lsn,
                    shows,
                });
                self.check(self.in_use.looks.len() - 1)
            }
            Err(error)
                if error.kind() == ErrorKind::NotFound && self.may_refuse(&control, disk, lsn) =>
            {
                self.totals.refused_points += 1;
                Ok(())
            }
            Err(_) if self.is_replaced(disk, lsn) => {
                self.count_refused(&control, disk, lsn);
                Ok(())
            }
            Err(error) => self.excuse(running, &format!("a look at LSN {lsn}"), &error),
        }
    }

    /// The time of one of a disk's records in the log, and the last point up to that time. `None`:
    /// the log has no record.
    fn time_of(&mut self, live: &Disk, held: &HeldLog) -> Result<Option<(u64, u64)>> {
        let (mut commits, control): (Vec<Commit>, _) = (Vec::new(), &held.control);
        let visit = &mut |found: FoundRecord<'_>| commits.push(found.commit());
        read_live(&held.segments, held.newest, control, 1, visit)?;
        // No record was written later than the next one.
        let mut lowest = u64::MAX;
        for commit in commits.iter_mut().rev() {
            lowest = lowest.min(commit.unix_us);
            commit.unix_us = lowest;
        }
        let horizon = control.applied_lsn(live.state.id);
        commits.retain(|commit| commit.lsn > horizon.max(control.header.copying_lsn.get()));
        if commits.is_empty() {
            return Ok(None);
        }
        let some = self.acts.below(commits.len() as u64) as usize;
        let time = commits[some].unix_us;
        let last = commits.iter().rev().find(|commit| commit.unix_us <= time);
        let last = last.map_or(0, |commit| commit.lsn);
        Ok(Some((time, last)))
    }

    /// Whether a look shows what it must.
    fn check(&self, place: usize) -> std::result::Result<(), Violation> {
        let looked = &self.in_use.looks[place];
        match values(looked.look.layers()) {
            Ok(shown) if shown == looked.shows => Ok(()),
            Ok(shown) => Err(format!(
                "a look at disk {} as of LSN {} shows {shown:?} for {:?}",
                looked.disk, looked.lsn, looked.shows
            )),
            Err(error) => {
                let world = self.fixture.medium.lock();
                if world.crashed || world.failed_read {
                    Ok(())
                } else {
                    Err(format!("a look failed for no reason: {error}"))
                }
            }
        }
    }

    fn end_look(&mut self) {
        if let Some(last) = (self.in_use.looks.len() as u64).checked_sub(1) {
            let place = self.acts.below(last + 1) as usize;
            drop(self.in_use.looks.swap_remove(place));
        }
    }

    /// Plans a restore in place, or carries one out that was planned before.
    fn plan_or_rewind(&mut self, running: &mut RunningStore) -> std::result::Result<(), Violation> {
        match self.in_use.rewind.take() {
            Some(planned) => return self.rewind_live(running, planned),
            None => self.plan_rewind(running)?,
        }
        // Otherwise requests come between.
        match self.in_use.rewind.take_if(|_| !self.acts.one_in(3)) {
            Some(planned) => self.rewind_live(running, planned),
            None => Ok(()),
        }
    }

    fn plan_rewind(&mut self, running: &mut RunningStore) -> std::result::Result<(), Violation> {
        let which = self.acts.below(running.disks.len() as u64) as usize;
        let (live, disk) = (running.disks[which].clone(), running.places[which]);
        let Some((lsn, then)) = self.some_point(running) else {
            return Ok(());
        };
        let newest = live.state.last_lsn.load(Ordering::Acquire);
        let held = match running.keeper.hold(&live.state, HoldOwner::Rewind) {
            Ok(held) => held,
            Err(error) => return self.excuse(running, "planning a restore in place", &error),
        };
        match RewindReport::plan(&live.log, &live.state, Point::Lsn(lsn), newest, &held) {
            Ok(_) if self.is_unknown(disk, lsn) || self.is_replaced(disk, lsn) => Ok(()),
            Ok((_, Some(rewinding))) => {
                self.in_use.rewind = Some(PlannedRestore {
                    disk,
                    state: live.state,
                    to: lsn,
                    then: then[disk].clone(),
                    rewinding,
                    _held: held,
                });
                Ok(())
            }
            Ok((_, None)) if self.oracle.newest()[disk] == then[disk] => Ok(()),
            Ok((_, None)) => Err(format!(
                "a restore of disk {disk} to LSN {lsn} is taken for one that changes nothing"
            )),
            // It may be a snapshot that the base images have moved past, or the log may have no
            // record of the disk.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::InvalidInput) => {
                Ok(())
            }
            Err(error) => self.excuse(running, "planning a restore in place", &error),
        }
    }

    fn rewind_live(
        &mut self,
        running: &mut RunningStore,
        planned: PlannedRestore,
    ) -> std::result::Result<(), Violation> {
        let PlannedRestore {
            disk,
            state,
            to,
            then,
            rewinding,
            _held,
        } = planned;
        let (before, newest) = (running.appended(), rewinding.newest);
        let done = running.keeper.rewind(&state, rewinding);
        let crashed = self.fixture.medium.lock().crashed;
        let marked = running.appended() > before;
        let unknown = crashed || running.poisoned();
        match &done {
            Ok(_) => {
                trace(|| format!("disk {disk} is restored in place to LSN {to}"));
                self.totals.live_rewinds += 1;
                self.oracle.restored(disk, &then, Some(true));
            }
            Err(_) if marked => {
                self.totals.live_rewinds_cut += u64::from(unknown);
                let counts = if unknown { None } else { Some(false) };
                self.oracle.restored(disk, &then, counts);
            }
            Err(_) => {}
        }
        let Err(error) = done else {
            return Ok(());
        };
        let written = state.last_lsn.load(Ordering::Acquire) != newest;
        let detached = state.detached.load(Ordering::Relaxed);
        match error.kind() {
            ErrorKind::Locked if written || detached => Ok(()),
            _ => self.excuse(running, "a restore in place", &error),
        }
    }

    /// Orders the keeper to do something, and lets it do that at once.
    pub(super) fn order(running: &mut RunningStore, task: KeeperTask) -> Result<()> {
        let (answer, answered) = mpsc::channel();
        let order = KeeperOrder { task, answer };
        running.log().lock().keeper.orders.push(order);
        running.keeper.serve_orders();
        answered.try_recv().expect("an answer")
    }

    /// Deletes a snapshot, perhaps while a copy is under way that saves for it. Looks at it may be
    /// open.
    fn delete_in_use(&mut self, running: &mut RunningStore) -> std::result::Result<(), Violation> {
        let Some(last) = (self.pins.len() as u64).checked_sub(1) else {
            return Ok(());
        };
        let pin = self.pins[self.acts.below(last + 1) as usize];
        let within = self.acts.one_in(2) && !running.keeper.must_keep() && !self.oracle.reads();
        let deleted = if within {
            let (answer, answered) = mpsc::channel();
            let task = KeeperTask::DeleteSnapshot(pin.name);
            let order = KeeperOrder { task, answer };
            running.log().lock().keeper.orders.push(order);
            if let Err(error) = running.keeper.step(true) {
                self.excuse(running, "a checkpoint", &error)?;
            }
            let at_once = answered.try_recv();
            self.totals.deleted_in_copies += u64::from(at_once.is_ok());
            at_once.unwrap_or_else(|_| {
                running.keeper.serve_orders();
                answered.try_recv().expect("an answer")
            })
        } else {
            Self::order(running, KeeperTask::DeleteSnapshot(pin.name))
        };
        let looks = &self.in_use.looks;
        match deleted {
            Ok(()) => {
                self.totals.deleted += 1;
                self.totals.deleted_in_use += u64::from(looks.iter().any(|l| l.lsn == pin.lsn));
                self.pins.retain(|other| other.name != pin.name);
                Ok(())
            }
            Err(error) => {
                self.unpinned.push(pin.name);
                self.excuse(running, "deleting a snapshot", &error)
            }
        }
    }

    /// A disk leaves the log, which has another one, often without a write to its image: then a
    /// spill file has its newest bytes. Its requests have ended; looks, exports and restores of it
    /// go on.
    fn remove_live(
        &mut self,
        running: &mut RunningStore,
        clients: &mut Clients,
    ) -> std::result::Result<(), Violation> {
        let which = self.acts.below(running.disks.len() as u64) as usize;
        let disk = running.places[which];
        if running.disks.len() < 2 || self.oracle.uses(disk) {
            return Ok(());
        }
        let keeps_history = running.log().lock().keeps_history();
        let state = running.disks[which].state.clone();
        let (id, keeps_records) = (state.id, !self.acts.one_in(4));
        if let Err(error) = Self::order(running, KeeperTask::Remove(state, keeps_records)) {
            return self.excuse(running, "removing a disk", &error);
        }
        trace(|| {
            format!(
                "disk {disk} has left the log in use, history kept: {keeps_history}, records \
                 kept: {keeps_records}"
            )
        });
        self.totals.removed += 1;
        if running.keeper.control.control.is_spilled(id) {
            self.totals.removed_spilled += 1;
            self.kept_apart[disk] = true;
        } else if keeps_records && !keeps_history {
            return Err(format!(
                "disk {disk} left, and its records were copied back"
            ));
        }
        running.disks.remove(which);
        running.places.remove(which);
        clients.close(disk);
        // A disk without data in the log leaves at once, even if its mark is still pending.
        self.oracle.drained(disk, keeps_history);
        if keeps_history {
            self.totals.detached += 1;
            return Ok(());
        }
        if self.fixture.bases()[disk] == self.oracle.newest()[disk] {
            Ok(())
        } else {
            Err(format!(
                "disk {disk} has left the log, and its image is not whole"
            ))
        }
    }

    /// A disk comes to the log: one that has left it in use, or a raw image that belonged to it
    /// before.
    fn add_live(
        &mut self,
        running: &mut RunningStore,
        clients: &mut Clients,
    ) -> std::result::Result<(), Violation> {
        let absent = (0..self.fixture.shape.disks).find(|disk| !running.places.contains(disk));
        let Some(disk) = absent.filter(|disk| !self.in_use.has(*disk)) else {
            return Ok(());
        };
        let cache = if self.acts.one_in(4) {
            CacheMode::Writethrough
        } else {
            CacheMode::Writeback
        };
        let options = DiskOptions {
            cache,
            ..DiskOptions::new(self.fixture.image(disk))
        };
        let (added, adding) = mpsc::channel();
        let (task, before) = (add_task(running.log(), &options, added), running.appended());
        if let Err(error) = task.and_then(|task| Self::order(running, task)) {
            return self.excuse(running, "adding a disk", &error);
        }
        trace(|| format!("disk {disk} has come to the log in use"));
        (before..running.appended()).for_each(|_| self.oracle.came(disk));
        self.totals.added += 1;
        self.totals.added_spilled += u64::from(std::mem::take(&mut self.kept_apart[disk]));
        if std::mem::take(&mut self.fixture.left[disk]) {
            self.totals.joined_live += 1;
            self.joined[disk] = running.log().lock().pipeline.next_lsn();
        }
        running.disks.push(Disk {
            log: running.log().clone(),
            state: adding.try_recv().expect("a disk"),
        });
        running.places.push(disk);
        clients.reopen(running, disk);
        Ok(())
    }

    /// Whether the log has a snapshot of a disk at an LSN, of those that it must have.
    pub(super) fn has_snapshot(&self, control: &Control, disk: usize, lsn: u64) -> bool {
        let entry = self.fixture.entry(control, disk);
        let id = entry.map(|entry| entry.id.get());
        let of_disk = |pin: &Snapshot| pin.disk_id.is_none() || pin.disk_id == id;
        let mut pins = self.pins.iter().filter(|pin| pin.lsn == lsn);
        pins.any(|pin| of_disk(pin) && Snapshot::find(pin.name, control).is_ok())
    }

    /// The snapshots that the log has, of those that it must have.
    pub(super) fn find_pins(&mut self, control: &Control) -> Result<()> {
        let unpinned: Vec<SnapshotName> = std::mem::take(&mut self.unpinned);
        for pin in std::mem::take(&mut self.pins) {
            match Snapshot::find(pin.name, control) {
                Ok(_) => self.pins.push(pin),
                Err(_) if unpinned.contains(&pin.name) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::super::fixture::{Fixture, Shape, carry_out, filled};
    use super::super::medium::World;
    use super::*;
    use crate::{CommitWait, Operation};

    const SHAPE: Shape = Shape::two_disks(64, 8);

    /// Wherever a sync fails while a disk leaves a log in use, the disk has either left, or stays
    /// and can be used as before, and what is then written to it is there for the next process.
    #[test]
    fn a_disk_that_could_not_leave_a_log_in_use_is_used_as_before() {
        let (mut stayed, mut left) = (0, 0);
        for failing in 0..16 {
            let fixture = Fixture::new(World::new(1 + failing), SHAPE);
            let mut running = fixture.open(false, CommitWait::NONE).unwrap();
            running.keeper.step(false).unwrap();
            let write = |running: &mut RunningStore, value| {
                let mut port = running.disks[1].open_port().unwrap();
                let data = filled(value, 8);
                let written = carry_out(running, &mut port, Operation::Write { sector: 8, data });
                written.and_then(|_| carry_out(running, &mut port, Operation::Flush))
            };
            write(&mut running, 1).unwrap();
            running.finish_writer();
            fixture.medium.lock().fail_sync = Some(failing);
            let task = KeeperTask::Remove(running.disks[1].state.clone(), false);
            let removed = History::order(&mut running, task);
            let stays = removed.is_err() && !running.poisoned();
            fixture.medium.lock().fail_sync = None;
            if stays {
                write(&mut running, 2).unwrap();
                running.finish_writer();
            }
            (stayed, left) = (stayed + u32::from(stays), left + u32::from(removed.is_ok()));
            drop(running);
            fixture.lose_power();
            let running = fixture.open(false, CommitWait::NONE);
            let running = running.unwrap_or_else(|error| panic!("sync {failing}: {error}"));
            let newest = if stays { 2 } else { 1 };
            assert_eq!(running.read().unwrap()[1][8..16], [newest; 8], "{failing}");
        }
        assert!(stayed > 2 && left > 2, "{stayed} stayed, {left} left");
    }
}
