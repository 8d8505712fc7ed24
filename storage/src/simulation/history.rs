//! One random history: its requests, and when power is lost.

use std::collections::HashMap;
use std::time::Duration;

use walvisor_testkit::Random;

use super::clients::Clients;
use super::fixture::{Fixture, RunningStore, Shape, control_of, filled, mark_text};
use super::live::{LiveHandles, LogTimes, TestClocks};
use super::medium::World;
use super::offline::Backup;
use super::oracle::{DiskContents, Oracle, RestoredState, Violation, agrees, difference, readable};
use super::point_exports::has_kept_point;
use super::trace;
use crate::catalog::retention::Retention;
use crate::catalog::snapshot::{Snapshot, SnapshotName};
use crate::error::ErrorKind;
use crate::format::{BLOCK, BatchHeader, DecodeResult, SegmentHeader};
use crate::{CommitWait, Operation};

/// Sectors of each disk.
pub(super) const SECTORS: u64 = 96;

/// Counters of a run, which show whether it tried what it should.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub requests: u64,
    pub flushes: u64,
    pub crashes: u64,
    pub recovery_crashes: u64,
    pub checkpoints: u64,
    pub lost_records: u64,
    pub poisoned: u64,
    pub closes: u64,
    /// Closes that left changes in the log.
    pub cut_closes: u64,
    pub faults: u64,
    /// Requests that failed because there was no space.
    pub refused: u64,
    /// Processes that were killed, with the cache left to the next process.
    pub kills: u64,
    /// Stores that went on with what they had recovered, without another power cut.
    pub worked_on: u64,
    /// Writes that were in flight in a process when it was killed, and ended later.
    pub late_writes: u64,
    /// Control slots that a power cut left with only some of the sectors last written to them.
    pub torn_slots: u64,
    /// Parts of the page cache that could not be written back.
    pub failed_write_backs: u64,
    /// Kills after which every change that was completed as written had to be there.
    pub kept: u64,
    /// Looks at the disks as they were after an earlier record.
    pub looked_back: u64,
    /// Of these, looks at a log with a snapshot.
    pub pinned: u64,
    /// Looks at snapshots that the base images have moved past.
    pub saved: u64,
    /// Disks that were restored in place.
    pub rewound: u64,
    /// Of these, restores during which power was lost.
    pub cut_rewinds: u64,
    /// Looks at states from before a restore in place or an earlier crash.
    pub seen_again: u64,
    /// Marks that were found after a crash.
    pub marks: u64,
    /// Looks at a disk that is not in use, by the code that makes copies.
    pub looks_at_the_past: u64,
    /// Steps of the wall clock.
    pub clock_steps: u64,
    /// Half hours that passed.
    pub half_hours: u64,
    /// Records that were written by a clock that was set back since, and is believed.
    pub went_back: u64,
    /// Parts of the history that the keeper dropped because their time was up.
    pub expired: u64,
    /// Looks at disks in use.
    pub live_looks: u64,
    /// Views of a log in use by another process, for which it was held.
    pub held_views: u64,
    /// Of these, looks at times.
    pub looks_at_times: u64,
    /// Points refused because the base images have moved past them.
    pub refused_points: u64,
    /// Exports of points of disks in use that began.
    pub point_exports: u64,
    /// Times that such an export gave way.
    pub gave_way: u64,
    /// Times that the keeper closed its look.
    pub overdue_looks: u64,
    /// Times that it went on after that.
    pub looked_again: u64,
    /// Of these, exports that came to their end.
    pub points_exported: u64,
    /// Processes that ended and left the point of an export.
    pub points_left: u64,
    /// Restores in place of disks in use.
    pub live_rewinds: u64,
    /// Of these, restores of which only the next process learns whether they count.
    pub live_rewinds_cut: u64,
    /// Snapshots that were deleted while the log was in use.
    pub deleted: u64,
    /// Of these, snapshots that were deleted within a copy.
    pub deleted_in_copies: u64,
    /// Of these, snapshots at which a look was open.
    pub deleted_in_use: u64,
    /// Disks that left the log while it was in use.
    pub removed: u64,
    /// Of these, disks that a log with history has only detached.
    pub detached: u64,
    /// Of these, disks whose newest bytes a spill file has, and not their images.
    pub removed_spilled: u64,
    /// Of these, disks that the same process opened again.
    pub added_spilled: u64,
    /// Of these, disks that a later process opened.
    pub opened_spilled: u64,
    /// Disks that came to the log while it was in use.
    pub added: u64,
    /// Of these, raw images.
    pub joined_live: u64,
    /// Commands on a log that is not in use that a fault has ended.
    pub commands_cut: u64,
    /// Commands that were refused for a good reason.
    pub commands_refused: u64,
    /// Logs that were made larger.
    pub logs_grown: u64,
    /// Logs that were made smaller.
    pub logs_shrunk: u64,
    /// Disks whose records were discarded.
    pub given_up: u64,
    /// Disks that left a log that is not in use.
    pub left: u64,
    /// Raw images that came to it.
    pub joined: u64,
    /// Disks that moved to another log, and back.
    pub moved: u64,
    /// Images that were replaced while the log had no records of their disks.
    pub replaced: u64,
    /// Of these, images of disks with saved files.
    pub replaced_saved: u64,
    /// Looks at disks whose images were replaced since, that were refused.
    pub refused_replaced: u64,
    /// Of these, looks that would have read saved files.
    pub refused_saved: u64,
    /// Ports that were dropped between a request and its completion.
    pub dropped: u64,
    /// Ports that were owed something and never polled again, while all others became idle.
    pub abandoned: u64,
    /// Ports that were polled again only when all others had become idle.
    pub slept: u64,
    /// Of these, ports that were not polled for more than a thousand steps.
    pub slept_long: u64,
}

impl super::Total for Totals {
    fn add(&mut self, other: &Self) {
        self.requests += other.requests;
        self.flushes += other.flushes;
        self.crashes += other.crashes;
        self.recovery_crashes += other.recovery_crashes;
        self.checkpoints += other.checkpoints;
        self.lost_records += other.lost_records;
        self.poisoned += other.poisoned;
        self.closes += other.closes;
        self.cut_closes += other.cut_closes;
        self.faults += other.faults;
        self.refused += other.refused;
        self.kills += other.kills;
        self.worked_on += other.worked_on;
        self.late_writes += other.late_writes;
        self.torn_slots += other.torn_slots;
        self.failed_write_backs += other.failed_write_backs;
        self.kept += other.kept;
        self.looked_back += other.looked_back;
        self.pinned += other.pinned;
        self.saved += other.saved;
        self.rewound += other.rewound;
        self.cut_rewinds += other.cut_rewinds;
        self.seen_again += other.seen_again;
        self.marks += other.marks;
        self.looks_at_the_past += other.looks_at_the_past;
        self.clock_steps += other.clock_steps;
        self.half_hours += other.half_hours;
        self.went_back += other.went_back;
        self.expired += other.expired;
        self.live_looks += other.live_looks;
        self.held_views += other.held_views;
        self.looks_at_times += other.looks_at_times;
        self.refused_points += other.refused_points;
        self.point_exports += other.point_exports;
        self.gave_way += other.gave_way;
        self.overdue_looks += other.overdue_looks;
        self.looked_again += other.looked_again;
        self.points_exported += other.points_exported;
        self.points_left += other.points_left;
        self.live_rewinds += other.live_rewinds;
        self.live_rewinds_cut += other.live_rewinds_cut;
        self.deleted += other.deleted;
        self.deleted_in_copies += other.deleted_in_copies;
        self.deleted_in_use += other.deleted_in_use;
        self.removed += other.removed;
        self.detached += other.detached;
        self.removed_spilled += other.removed_spilled;
        self.added_spilled += other.added_spilled;
        self.opened_spilled += other.opened_spilled;
        self.added += other.added;
        self.joined_live += other.joined_live;
        self.commands_cut += other.commands_cut;
        self.commands_refused += other.commands_refused;
        self.logs_grown += other.logs_grown;
        self.logs_shrunk += other.logs_shrunk;
        self.given_up += other.given_up;
        self.left += other.left;
        self.joined += other.joined;
        self.moved += other.moved;
        self.replaced += other.replaced;
        self.replaced_saved += other.replaced_saved;
        self.refused_replaced += other.refused_replaced;
        self.refused_saved += other.refused_saved;
        self.dropped += other.dropped;
        self.abandoned += other.abandoned;
        self.slept += other.slept;
        self.slept_long += other.slept_long;
    }
}

impl Totals {
    /// Asserts that enough of so many histories did each of the things that half of them do beside
    /// requests and crashes.
    pub(super) fn assert_lively(&self, count: u64) {
        let often = [
            self.looks_at_the_past,
            self.clock_steps,
            self.half_hours,
            self.live_looks,
            self.held_views,
            self.point_exports,
            self.points_exported,
            self.live_rewinds,
            self.deleted,
            self.removed,
            self.added,
            self.commands_cut,
            self.logs_grown,
            self.logs_shrunk,
            self.given_up,
            self.left,
            self.joined,
            self.moved,
            self.replaced,
            self.dropped,
            self.abandoned,
            self.slept,
        ];
        let sometimes = [
            self.looks_at_times,
            self.live_rewinds_cut,
            self.deleted_in_use,
            self.deleted_in_copies,
            self.detached,
            self.commands_refused,
            self.refused_points,
            self.went_back,
            self.gave_way,
            self.looked_again,
            self.points_left,
            self.removed_spilled,
            self.replaced_saved,
            self.refused_replaced,
            self.refused_saved,
        ];
        let rarely = [
            self.joined_live,
            self.expired,
            self.overdue_looks,
            self.added_spilled,
            self.opened_spilled,
            self.slept_long,
        ];
        let sometimes = sometimes.iter().all(|&times| times > 0);
        let rarely = sometimes && (count < 10_000 || rarely.iter().all(|&times| times > 0));
        assert!(
            often.iter().all(|&times| times > count / 100) && rarely,
            "too little was done: {self:?}"
        );
    }

    /// The same for histories that keep history.
    pub(super) fn assert_keeping(&self, count: u64) {
        let often = [
            self.looks_at_the_past,
            self.clock_steps,
            self.half_hours,
            self.live_looks,
            self.held_views,
            self.point_exports,
            self.points_exported,
            self.gave_way,
            self.points_left,
            self.live_rewinds,
            self.deleted,
            self.detached,
            self.removed,
            self.added,
            self.commands_cut,
            self.logs_grown,
            self.given_up,
            self.replaced,
            self.refused_replaced,
            self.dropped,
            self.abandoned,
            self.slept,
        ];
        let sometimes = [
            self.looks_at_times,
            self.looked_again,
            self.replaced_saved,
            self.refused_saved,
        ];
        // A log with history lets few disks go.
        let rarely = [self.left, self.joined, self.moved, self.expired];
        let sometimes = sometimes.iter().all(|&times| times > 0);
        let rarely = sometimes && (count < 5_000 || rarely.iter().all(|&times| times > 0));
        assert!(
            often.iter().all(|&times| times > count / 100) && rarely,
            "too little was done: {self:?}"
        );
    }
}

pub(super) struct History {
    pub random: Random,
    pub fixture: Fixture,
    pub oracle: Oracle,
    /// The LSN of the oracle's first change.
    pub first_lsn: u64,
    next_value: u32,
    /// The sequence with which each salt was seen.
    salts: HashMap<u64, u64>,
    /// The log's snapshots.
    pub pins: Vec<Snapshot>,
    /// The log always keeps history, and all of it is looked at.
    pub keeps: bool,
    /// What the disks were as of LSNs before the oracle's first change.
    pub past: Vec<(u64, DiskContents)>,
    /// Decides what is done beside requests, checkpoints and crashes, if anything is.
    pub acts: Random,
    pub lively: bool,
    pub in_use: LiveHandles,
    /// Snapshots of which nobody knows whether they are deleted.
    pub unpinned: Vec<SnapshotName>,
    pub clock: TestClocks,
    pub times: LogTimes,
    /// The LSN that came next when each disk last joined the log.
    pub joined: Vec<u64>,
    /// The LSN that came next when each disk last got another image.
    pub replaced: Vec<u64>,
    /// The disks that have left a log in use with their records in a spill file.
    pub kept_apart: Vec<bool>,
    /// Copies of images that were closed.
    pub backups: Vec<Backup>,
    /// Each disk whose records were discarded, and the newest LSN then. At that LSN the log has the
    /// disk without them, as from then on; the oracle does not say which is right.
    pub given_up: Vec<(usize, u64)>,
    pub totals: Totals,
}

impl History {
    pub(super) fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let mut acts = Random(!seed);
        let lively = acts.one_in(2);
        let disks = 1 + random.below(2) as usize;
        let world = World::new(random.next());
        let mut shape = Shape {
            disks,
            sectors: SECTORS,
            segment_size: 64 << 10,
            max_segments: 4 + random.below(3) as u32,
        };
        if lively && acts.one_in(8) {
            shape.max_segments += 8;
        }
        let mut fixture = Fixture::new(world, shape);
        fixture.moves = true;
        Self {
            random,
            oracle: Oracle::new(fixture.bases()),
            fixture,
            first_lsn: 1,
            next_value: 0,
            salts: HashMap::new(),
            pins: Vec::new(),
            past: Vec::new(),
            keeps: false,
            acts,
            lively,
            in_use: LiveHandles::default(),
            unpinned: Vec::new(),
            clock: TestClocks::new(),
            times: LogTimes::default(),
            joined: vec![0; disks],
            replaced: vec![0; disks],
            kept_apart: vec![false; disks],
            backups: Vec::new(),
            given_up: Vec::new(),
            totals: Totals::default(),
        }
    }

    /// A history whose log always keeps history, with snapshots in half of its openings.
    pub(super) fn keeping(seed: u64) -> Self {
        let mut history = Self::new(seed);
        history.keeps = true;
        history
    }

    /// Runs the history to its end.
    pub(super) fn run(mut self) -> Result<Totals, Violation> {
        let incarnations = 1 + self.random.below(3);
        let mut running = None;
        for _ in 0..incarnations {
            let opened = match running.take() {
                Some(running) => running,
                None => self
                    .open()
                    .map_err(|error| format!("opening a good log failed: {error}"))?,
            };
            running = self.incarnation(opened)?;
        }
        let world = self.fixture.medium.lock();
        self.totals.late_writes = world.late_writes;
        self.totals.torn_slots = world.torn_slots;
        self.totals.failed_write_backs = world.failed_write_backs;
        drop(world);
        Ok(self.totals)
    }

    /// Opens the log with random options.
    fn open(&mut self) -> crate::Result<RunningStore> {
        let through = self.random.one_in(4);
        self.oracle.written = self.random.one_in(2);
        let wait = if self.random.one_in(3) {
            CommitWait {
                longest: Some(Duration::from_micros(1)),
                count: Some(2 + self.random.below(3) as u32),
            }
        } else {
            CommitWait::NONE
        };
        // Let the base images pass a restore in place more often.
        let often = self.keeps || self.totals.rewound > 0;
        self.fixture.retain = match self.random.below(if often { 2 } else { 6 }) {
            0 => Retention::All,
            1 => Retention::Bytes((1 + self.random.below(3)) << 16),
            _ => Retention::Nothing,
        };
        let large = self.fixture.shape.is_large();
        if self.lively && self.acts.one_in(if large { 2 } else { 6 }) {
            let time = match self.acts.below(2) {
                0 => Duration::from_millis(1 + self.acts.below(200)),
                _ => Duration::from_secs(60 * (1 + self.acts.below(60))),
            };
            self.fixture.retain = Retention::Time(time);
        }
        let mut running = self.fixture.open(through, wait)?;
        if large {
            // Otherwise only lack of room, not time, takes history from a log this small.
            running.log().lock().ring.most_freed = 3;
        }
        self.find_pins(&running.keeper.control.control)?;
        for pin in std::mem::take(&mut self.pins) {
            if self.random.one_in(2) {
                self.pins.push(pin)
            } else {
                running
                    .keeper
                    .change_history(|control| Snapshot::remove(pin.name, control))?
            }
        }
        let wanted = self.random.one_in(if self.keeps { 2 } else { 6 });
        let state = running.log().lock();
        // A full log has no room for the mark of a disk with another image.
        let marked = state.pipeline.durable() < state.pipeline.appended();
        drop(state);
        if wanted && !marked {
            self.snapshot(&mut running)?;
        }
        Ok(running)
    }

    /// Makes a snapshot of all disks, or of the first one.
    fn snapshot(&mut self, running: &mut RunningStore) -> crate::Result<()> {
        self.next_value += 1;
        let name: SnapshotName = format!("pin{}", self.next_value).parse()?;
        let alone = self.random.one_in(3).then_some(running.disks[0].state.id);
        let made = running.keeper.snapshot(name, alone);
        // Even if this failed, it may exist.
        if let Ok(made) = Snapshot::find(name, &running.keeper.control.control) {
            self.pins.push(made);
        }
        made
    }

    /// Kills the process, or cuts power; returns `true` if only the process was killed.
    pub(super) fn end_process(&mut self) -> bool {
        let killed = self.random.one_in(3);
        trace(|| format!("the process ends, killed: {killed}"));
        if killed {
            // The cache is kept, unsynced.
            self.totals.kills += 1;
            self.fixture.medium.lock().restart();
        } else {
            self.fixture.lose_power();
        }
        killed
    }

    /// Only a process has ended and nothing was lost, so every change that was completed as written
    /// is there, and durable once recovered.
    fn expect_written(&mut self) {
        self.oracle.killed();
        self.totals.kept += 1;
    }

    /// Works, and loses power or closes; then reopens the log and judges it. Returns the log if it
    /// is still open then.
    fn incarnation(
        &mut self,
        mut running: RunningStore,
    ) -> Result<Option<RunningStore>, Violation> {
        let crash = !self.random.one_in(5);
        if crash {
            // Enough to fill a large log.
            let longer = if self.fixture.shape.is_large() { 8 } else { 1 };
            let (ticks, control) = (self.random.below(80 * longer), self.random.one_in(6));
            let mut world = self.fixture.medium.lock();
            if control {
                world.cut_control = Some(ticks / 13)
            } else {
                world.ticks = Some(ticks)
            }
        }
        if self.random.one_in(if crash { 8 } else { 3 }) {
            let (count, control) = (self.random.below(8), self.random.one_in(2));
            let mut world = self.fixture.medium.lock();
            (world.fail_sync, world.fail_control) =
                (Some(if control { count / 3 } else { count }), control);
        }
        self.plan_faults();
        self.first_lsn = running.log().lock().pipeline.next_lsn();
        self.times = LogTimes::default();
        let clients = self.work(&mut running)?;
        let crashed = self.fixture.medium.lock().crashed;
        let closed = if crashed {
            None
        } else {
            self.close(&mut running, &clients)?
        };
        self.in_use = LiveHandles::default();
        drop((clients, running));
        match closed {
            Some(true) => {
                self.totals.closes += 1;
                self.oracle.closed(&self.fixture.bases())?;
            }
            Some(false) => {
                self.totals.cut_closes += 1;
                self.oracle.left();
            }
            None => self.totals.crashes += 1,
        }
        let failed = self.fixture.medium.lock().failed;
        self.totals.faults += u64::from(failed);
        // A failed sync may drop the bytes it should have written from the cache.
        let mut kept = self.end_process() && !failed;
        let control = control_of(&self.fixture.medium);
        let control = control.map_err(|error| format!("the control file: {error}"))?;
        let left = control.unconfirmed.as_ref().is_some_and(has_kept_point);
        self.totals.points_left += u64::from(left);
        self.oracle.settle();
        // Recovery loses power too, up to twice.
        for _ in 0..self.random.below(3) {
            let (ticks, control) = (self.random.below(20), self.random.one_in(6));
            {
                let mut world = self.fixture.medium.lock();
                if control {
                    world.cut_control = Some(ticks / 5)
                } else {
                    world.ticks = Some(ticks)
                }
            }
            self.plan_faults();
            let opened = self.fixture.open(false, CommitWait::NONE);
            if let Err(error) = &opened {
                let world = self.fixture.medium.lock();
                // A read error during recovery is not damage.
                let io = error.kind() == ErrorKind::Io;
                if !(world.crashed || world.failed && io) {
                    return Err(format!("recovery failed: {error}"));
                }
            }
            if let Ok(mut running) = opened {
                if kept {
                    self.expect_written();
                }
                let _ = running.keeper.step(true);
            }
            let failed = self.fixture.medium.lock().failed;
            self.totals.faults += u64::from(failed);
            self.totals.recovery_crashes += u64::from(self.fixture.medium.lock().crashed);
            kept &= self.end_process() && !failed;
        }
        if kept {
            self.expect_written();
        }
        self.judge(kept)
    }

    /// Closes the log, often with only a few steps of copying, of which a checkpoint that is under
    /// way may take some. Returns whether the base images have everything; `None` if closing fails.
    fn close(
        &mut self,
        running: &mut RunningStore,
        clients: &Clients,
    ) -> Result<Option<bool>, Violation> {
        if self.random.one_in(4) {
            let steps = self.random.below(8);
            running.log().lock().keeper.copy_steps = Some(steps);
            if self.random.one_in(2) {
                let _ = running.keeper.step(true);
            }
        }
        let closed = running.keeper.close();
        if let Err(error) = &closed
            && clients.away.is_some()
        {
            self.excuse(running, "closing beside a port that nobody polls", error)?;
        }
        Ok(closed.ok())
    }

    /// Plans small faults: writes end short, or a read, a write or a sync fails once at a random
    /// time.
    fn plan_faults(&mut self) {
        let (kind, after) = (self.random.below(14), self.random.below(20));
        let mut world = self.fixture.medium.lock();
        match kind {
            0 => world.fail_read = Some(after),
            1 => world.fail_write = Some(after),
            2 | 3 => world.short_writes = true,
            4 if world.fail_sync.is_none() => world.fail_sync = Some(after / 2),
            5 | 6 => world.fail_write_back = Some(after / 8),
            _ => {}
        }
    }

    /// Opens what is left and finds which prefix it is. That must be durable from now on, and the
    /// next incarnation begins there: after a power cut, after a kill, or at once in the opened
    /// log, which is then returned.
    fn judge(&mut self, kept: bool) -> Result<Option<RunningStore>, Violation> {
        self.look_back()?;
        let rewound = self.rewind(kept)?;
        self.find_marks()?;
        let given_up = self.run_commands(kept)?;
        if self.lively {
            self.look_again()?;
            self.look_at_the_past()?;
        }
        for disk in 0..self.kept_apart.len() {
            let apart = std::mem::take(&mut self.kept_apart[disk]) && self.has_spilled(disk)?;
            self.totals.opened_spilled += u64::from(apart);
        }
        let running = self
            .open()
            .map_err(|error| format!("recovery refused a legal crash: {error}"))?;
        self.fixture.stays = false;
        let next_lsn = running.log().lock().pipeline.next_lsn();
        self.check_numbers(next_lsn)?;
        if has_kept_point(&running.keeper.control.control) {
            return Err("a point is kept for an export of a process that is gone".into());
        }
        if running.newest_point() == 0 {
            // An image that another one replaces before the first durable record is the disk as of
            // LSN 0.
            self.past.clear();
        }
        let joined = self.joined.iter_mut();
        // A disk that could not join may be known to the log all the same.
        let joined = joined.zip(&self.fixture.left).filter(|(_, left)| !**left);
        let joined = joined.map(|(joined, _)| joined).chain(&mut self.replaced);
        joined.for_each(|joined| *joined = (*joined).min(next_lsn));
        let read = running
            .read()
            .map_err(|failure| format!("reading after recovery: {failure}"))?;
        // Disks that have left the log are what their images have.
        let mut found = self.fixture.bases();
        for (disk, values) in running.places.iter().zip(read) {
            found[*disk] = values;
        }
        // So are those whose records were discarded; the log has nothing of them.
        let mut seen = readable(&found);
        for disk in given_up {
            let image = self.image_values(disk);
            if found[disk] != image {
                return Err(format!(
                    "records of disk {disk} that were given up are back: {:?} for {image:?}",
                    found[disk]
                ));
            }
            seen[disk].fill(None);
        }
        match rewound {
            Some(RestoredState { may_be, .. })
                if may_be.iter().any(|state| agrees(state, &seen)) => {}
            Some(RestoredState { may_be, certain }) if certain => {
                return Err(format!(
                    "after a restore in place the disks differ: {}",
                    difference(&seen, &may_be[0])
                ));
            }
            _ => self.totals.lost_records += self.oracle.judge_readable(&seen)? as u64,
        }
        // Not `next_lsn - 1`: a rewind may get the LSN of a record that was lost, which is no
        // longer that of a point.
        // The mark of a disk with another image is not durable yet.
        let newest = running.newest_point();
        if running.log().lock().pipeline.durable() == newest {
            self.past.push((newest, found.clone()));
        }
        let written = self.oracle.written;
        self.oracle = Oracle::new(found);
        self.oracle.written = written;
        if self.random.one_in(3) {
            self.totals.worked_on += 1;
            return Ok(Some(running));
        }
        drop(running);
        self.end_process();
        Ok(None)
    }

    /// Numbers seen on the medium, LSNs and salts, are never reused.
    fn check_numbers(&mut self, next_lsn: u64) -> Result<(), Violation> {
        let segments = self.fixture.medium.lock().segments();
        for (name, bytes) in segments {
            // Without its header a segment's batches can't be taken for part of the log.
            let DecodeResult::Valid(life) = SegmentHeader::decode(&bytes) else {
                continue;
            };
            let (salt, sequence) = (life.salt.get(), life.sequence.get());
            if *self.salts.entry(salt).or_insert(sequence) != sequence {
                return Err(format!("{name} has the salt {salt} of another sequence"));
            }
            for block in bytes.chunks(BLOCK) {
                let Some((header, len)) = BatchHeader::peek(block) else {
                    continue;
                };
                let ours = header.salt == life.salt
                    && len <= BLOCK
                    && header.records(&block[..len]).is_some();
                let first = header.first_lsn.get();
                if ours && first >= next_lsn {
                    return Err(format!(
                        "LSN {first} stands in {name} and would be given out again"
                    ));
                }
            }
        }
        Ok(())
    }

    /// Submits requests and serves them until all have ended. Returns the ports, of which one may
    /// have been left for good.
    pub(super) fn work(&mut self, running: &mut RunningStore) -> Result<Clients, Violation> {
        let ports = 1 + self.random.below(3) as usize;
        let mut clients = Clients::open(running, ports, self.random.one_in(2));
        // The steps during which there is no space; the second number says whether base images, the
        // log or both are full.
        let full = self.random.one_in(6).then(|| {
            let from = self.random.below(200);
            let until = if self.random.one_in(3) {
                u64::MAX
            } else {
                from + self.random.below(2000)
            };
            (from..until, 1 + self.random.below(3))
        });
        // A few requests, or enough to go around the ring.
        let often = self.totals.rewound > 0 || self.fixture.shape.is_large();
        let many = if often { 2 } else { 8 };
        let requests = if full.is_some() || self.random.one_in(many) {
            150
        } else {
            3 + self.random.below(25)
        };
        let mut absence = self.plan_absence(ports, requests);
        let mut submitted = 0;
        let mut pause = 0u64;
        for step in 0..20_000u64 {
            if self.fixture.medium.lock().crashed {
                break;
            }
            self.note_time(running);
            self.clock.pass(1000);
            let none_left = full.as_ref().filter(|(when, _)| when.contains(&step));
            let scarce = none_left.map_or(0, |(_, scarce)| *scarce);
            {
                let mut world = self.fixture.medium.lock();
                (world.base_full, world.log_full) = (scarce & 1 > 0, scarce & 2 > 0);
            }
            // A log that may not free anything gets full.
            if scarce > 0 || running.keeper.must_keep() {
                self.oracle.excused = u64::MAX;
            }
            pause = pause.saturating_sub(1);
            let most = self.keep_away(&mut absence, &mut clients, running, step, submitted)?;
            let done = submitted == requests || clients.all_closed() && self.acts.one_in(40);
            if done && self.oracle.idle() {
                break;
            }
            if self.lively {
                self.go_on(running)?;
                let idle = pause == 0 && running.log().lock().is_idle();
                if idle && self.acts.one_in(6) {
                    self.act(running, &mut clients)?;
                }
            }
            let which = self.random.below(ports as u64) as usize;
            match self.random.below(8) {
                0..4 if submitted < most.unwrap_or(requests) && clients.is_open(which) => {
                    submitted += 1;
                    if self.oracle.excused > 0 {
                        // A change that was refused at once must end before the next one gets its
                        // place in the order.
                        self.serve(&mut clients, which, running)?;
                    }
                    self.submit(&mut clients, which, running);
                }
                // The keeper's turn: it makes segments, and a checkpoint when one is due or by
                // chance. The keeper blocks until the records that it waits for are durable: with
                // one thread it has to lead that group itself.
                7 if pause == 0 && running.log().lock().is_idle() => {
                    let forced = self.random.one_in(4) && !running.keeper.must_keep();
                    let named = self.pins.len() < 4 && self.random.one_in(8);
                    let done = if named {
                        self.snapshot(running)
                    } else {
                        self.step_keeper(running, forced)?
                    };
                    match done {
                        // The shortage is over for requests that come from now on.
                        Ok(()) if scarce == 0 && !named => {
                            self.oracle.excused = self.oracle.excused.min(clients.newest())
                        }
                        // A snapshot first makes room if necessary; whether that failed is not its
                        // result.
                        Ok(()) if running.log().lock().keeper.failed => {
                            self.oracle.excused = u64::MAX;
                        }
                        Ok(()) => {}
                        // The keeper retries a second later: many requests may come until then.
                        Err(error) => {
                            let world = self.fixture.medium.lock();
                            // A full log may refuse a snapshot, and what a look has just pinned
                            // can't be freed.
                            if self.oracle.excused == 0
                                && !named
                                && !running.keeper.must_keep()
                                && !world.failed
                                && !world.failed_read
                                && !world.crashed
                            {
                                return Err(format!("the keeper failed for no reason: {error}"));
                            }
                            self.oracle.excused = u64::MAX;
                            pause = self.random.below(300);
                        }
                    }
                }
                _ => self.serve(&mut clients, which, running)?,
            }
        }
        running.finish_writer();
        self.totals.refused += self.oracle.refused;
        let crashed = self.fixture.medium.lock().crashed;
        if !crashed && !self.oracle.idle() {
            return Err(match clients.away {
                Some(_) => "a port that nobody polls stops another",
                None => "requests were never answered",
            }
            .into());
        }
        if !crashed && !running.poisoned() && !running.log().lock().is_idle() {
            return Err("a port holds a batch".into());
        }
        self.totals.checkpoints += running.log().counters.snapshot().checkpoints;
        self.totals.poisoned += u64::from(running.poisoned() && !crashed);
        Ok(clients)
    }

    pub(super) fn serve(
        &mut self,
        clients: &mut Clients,
        which: usize,
        running: &RunningStore,
    ) -> Result<(), Violation> {
        let oracle = &mut self.oracle;
        let done = clients.poll(oracle, running, which);
        Clients::complete(oracle, running, &self.fixture, which, done)
    }

    pub(super) fn submit(&mut self, clients: &mut Clients, which: usize, running: &RunningStore) {
        let sectors = 1 + self.random.below(8);
        // Few sectors, so that requests overlap.
        let sector = self.random.below(SECTORS - sectors);
        let short = sectors as u32;
        let operation = match self.random.below(11) {
            10 => {
                self.next_value += 1;
                let text = mark_text(self.next_value);
                clients.mark(&mut self.oracle, running, which, self.next_value, &text);
                return;
            }
            0..5 => {
                self.next_value += 1;
                Operation::Write {
                    sector,
                    data: filled(self.next_value, sectors),
                }
            }
            5 => Operation::Discard {
                sector,
                sectors: short,
            },
            6 => Operation::WriteZeroes {
                sector,
                sectors: short,
                unmap: self.random.one_in(2),
            },
            7 | 8 => Operation::Flush,
            _ => Operation::Read {
                sector,
                sectors: short,
            },
        };
        self.totals.requests += 1;
        self.totals.flushes += u64::from(matches!(operation, Operation::Flush));
        clients.submit(&mut self.oracle, running, which, operation);
    }
}
