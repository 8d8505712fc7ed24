//! Exports from a log that keeps history, in a random history: a hidden snapshot keeps the point,
//! and the look at it is closed whenever the log needs room.
//!
//! What is copied is what the disk was at the point, whatever is folded, restored or deleted in
//! between. A process that is killed leaves the hidden snapshot, and the next one must not know it.

use std::fs::File;
use std::os::unix::fs::FileExt;

use super::fixture::RunningStore;
use super::history::{History, SECTORS};
use super::live::file_in_memory;
use super::oracle::{Violation, value_of};
use super::trace;
use crate::SECTOR_SIZE;
use crate::catalog::snapshot::{Snapshot, SnapshotName};
use crate::copy::live_export::{TargetWork, point_to_keep, refuse_obstruction};
use crate::copy::yielding_look::YieldingLook;
use crate::disk::handle::Disk;
use crate::error::{Error, ErrorKind};
use crate::format::Control;
use crate::log::admission::RoomNeed;
use crate::log::holds::HoldOwner;
use crate::log::orders::KeeperTask;
use crate::log::state::Log;
use crate::sync;
use crate::sync::atomic::Ordering;
use crate::view::look::Look;
use crate::view::point::Point;

const SIZE: u64 = SECTORS * SECTOR_SIZE;

/// An export that is under way, and what it must have in the end.
pub(super) struct PointExport {
    pub disk: usize,
    live: Disk,
    name: SnapshotName,
    lsn: u64,
    /// Closed while it gives way, and at its end.
    look: YieldingLook,
    passed: u64,
    file: File,
    shows: Vec<u32>,
    ended: bool,
}

fn needs_room(log: &Log) -> bool {
    log.room_need(&log.lock()) != RoomNeed::None
}

/// Whether a log has a point that is kept for an export.
pub(super) fn has_kept_point(control: &Control) -> bool {
    let all = Snapshot::all(control);
    all.iter().any(|snapshot| snapshot.name.is_of_export())
}

impl PointExport {
    /// Copies the next part, or gives way. Returns whether it gives way.
    fn step(&mut self, gives_way: bool) -> crate::Result<bool> {
        if gives_way {
            self.look.close();
            TargetWork::Sync.carry_out(&self.file)?;
            return Ok(true);
        }
        match self.look.next(self.passed..SIZE)? {
            Some(Some(part)) => {
                TargetWork::Copy(part.data).carry_out(&self.file)?;
                self.passed = part.end;
            }
            Some(None) => self.ended = true,
            None => {}
        }
        Ok(false)
    }
}

impl History {
    /// Begins an export of a point of a disk.
    pub(super) fn begin_point_export(
        &mut self,
        running: &mut RunningStore,
    ) -> Result<(), Violation> {
        let which = self.acts.below(running.disks.len() as u64) as usize;
        let (live, disk) = (running.disks[which].clone(), running.places[which]);
        let point = if self.acts.one_in(2) {
            let newest = running.newest_point();
            self.as_of(newest).map(|then| (newest, then))
        } else {
            self.some_point(running)
        };
        let Some((lsn, then)) = point else {
            return Ok(());
        };
        let held = match running.keeper.hold(&live.state, HoldOwner::Export) {
            Ok(held) => held,
            Err(error) => return self.excuse(running, "an export", &error),
        };
        let point = match point_to_keep(&live, Point::Lsn(lsn), &held) {
            Ok(_) if self.is_unknown(disk, lsn) || self.is_replaced(disk, lsn) => return Ok(()),
            Ok(point) => point,
            Err(error)
                if error.kind() == ErrorKind::NotFound
                    && self.may_refuse(&held.control, disk, lsn) =>
            {
                self.totals.refused_points += 1;
                return Ok(());
            }
            Err(_) if self.is_replaced(disk, lsn) => return Ok(()),
            Err(error) => return self.excuse(running, "an export", &error),
        };
        if let Err(error) = Self::order(running, KeeperTask::KeepPoint(point)) {
            // A copy that was begun before ends after the point.
            let passes = running.keeper.frozen_at.is_some_and(|end| lsn <= end);
            if error.kind() == ErrorKind::NotFound && passes {
                self.totals.refused_points += 1;
                return Ok(());
            }
            return self.excuse(running, "keeping a point", &error);
        }
        let may_refuse = self.may_refuse(&held.control, disk, lsn);
        let look = Look::at(&live.log, &live.state, point.lsn, held, None);
        // The disk's records were discarded before they were saved for a snapshot.
        let refused = |error: &Error| error.kind() == ErrorKind::NotFound && may_refuse;
        if look.as_ref().is_err_and(refused) {
            self.totals.refused_points += 1;
            let deleted = Self::order(running, KeeperTask::DeleteSnapshot(point.name));
            return deleted.or_else(|error| self.excuse(running, "letting go of a point", &error));
        }
        self.totals.point_exports += 1;
        trace(|| format!("an export of disk {disk} as of LSN {lsn} begins"));
        let file = file_in_memory();
        let fit = TargetWork::Size(SIZE).carry_out(&file);
        fit.expect("a new file is fit");
        self.in_use.point_export = Some(PointExport {
            disk,
            live,
            name: point.name,
            lsn,
            look: YieldingLook::new(running.log()),
            passed: 0,
            file,
            shows: then[disk].clone(),
            ended: false,
        });
        self.go_on_at(running, look)?;
        // Most of a small disk is copied at once: then nothing has to be saved for it.
        if self.acts.one_in(2) {
            self.give_way();
        }
        Ok(())
    }

    /// Closes the look of the export.
    fn give_way(&mut self) {
        if let Some(export) = &self.in_use.point_export
            && export.look.is_open()
        {
            export.look.close();
            self.totals.gave_way += 1;
        }
    }

    /// The thread of the export does nothing, so that the keeper closes its look if the log needs
    /// room.
    fn stall_export(&mut self, running: &RunningStore) {
        let is_open = |history: &Self| {
            let export = history.in_use.point_export.as_ref();
            export.is_some_and(|export| export.look.is_open())
        };
        let was_open = is_open(self);
        running.keeper.end_overdue_holds();
        self.totals.overdue_looks += u64::from(was_open && !is_open(self));
    }

    /// Goes on with another look, or ends the export if there is none.
    fn go_on_at(
        &mut self,
        running: &mut RunningStore,
        look: crate::Result<Look>,
    ) -> Result<(), Violation> {
        match (look, &mut self.in_use.point_export) {
            (Ok(look), Some(export)) => export.look.open(look, sync::now()),
            (Ok(_), None) => {}
            (Err(error), _) => {
                self.excuse(running, "a look for an export", &error)?;
                self.end_point_export(running)?;
            }
        }
        Ok(())
    }

    /// Copies the next part of an export of a point, unless the log needs room; compares the whole
    /// at its end.
    pub(super) fn copy_point(&mut self, running: &RunningStore) -> Result<(), Violation> {
        if self.acts.one_in(8) {
            self.stall_export(running);
        }
        let pressed = needs_room(running.log()) && self.acts.one_in(2);
        let gives_way = pressed || self.acts.one_in(4);
        let Some(export) = &mut self.in_use.point_export else {
            return Ok(());
        };
        if !export.look.is_open() {
            return Ok(());
        }
        match export.step(gives_way) {
            Ok(given) => self.totals.gave_way += u64::from(given),
            Err(error) => {
                export.look.close();
                export.ended = true;
                let world = self.fixture.medium.lock();
                if world.crashed || world.failed_read {
                    return Ok(());
                }
                return Err(format!(
                    "an export of a point failed for no reason: {error}"
                ));
            }
        }
        if !export.ended {
            return Ok(());
        }
        export.look.close();
        self.totals.points_exported += 1;
        let mut copy = vec![0; SIZE as usize];
        let read = export.file.read_exact_at(&mut copy, 0);
        read.expect("the whole file");
        let copy: Vec<u32> = copy.chunks(SECTOR_SIZE as usize).map(value_of).collect();
        if copy == export.shows {
            Ok(())
        } else {
            Err(format!(
                "an export of disk {} as of LSN {} has {copy:?} for {:?}",
                export.disk, export.lsn, export.shows
            ))
        }
    }

    /// Looks at the point again after an export gave way, or lets go of it.
    pub(super) fn resume_point_export(
        &mut self,
        running: &mut RunningStore,
    ) -> Result<(), Violation> {
        let Some(export) = &self.in_use.point_export else {
            return Ok(());
        };
        let (live, name) = (export.live.clone(), export.name);
        let detached = live.state.detached.load(Ordering::Relaxed);
        let obstructs = self.export_obstructs(running);
        if export.ended || detached || obstructs || self.acts.one_in(20) {
            return self.end_point_export(running);
        }
        let waits = needs_room(running.log()) || self.acts.one_in(2);
        if export.look.is_open() || waits && self.acts.one_in(2) {
            return Ok(());
        }
        let held = running.keeper.hold(&live.state, HoldOwner::Export);
        let at = Point::Snapshot(name);
        let look = held.and_then(|held| Look::in_use(&live.log, &live.state, at, held, None));
        self.totals.looked_again += u64::from(look.is_ok());
        self.go_on_at(running, look)
    }

    /// Whether the log can't make room because of the point of the export.
    pub(super) fn export_obstructs(&self, running: &RunningStore) -> bool {
        let mut export = self.in_use.point_export.iter();
        export.any(|export| refuse_obstruction(running.log(), export.name).is_err())
    }

    /// Lets go of the point of an export.
    pub(super) fn end_point_export(&mut self, running: &mut RunningStore) -> Result<(), Violation> {
        let Some(PointExport { name, .. }) = self.in_use.point_export.take() else {
            return Ok(());
        };
        match Self::order(running, KeeperTask::DeleteSnapshot(name)) {
            Ok(()) => Ok(()),
            Err(error) => self.excuse(running, "letting go of a point", &error),
        }
    }
}
