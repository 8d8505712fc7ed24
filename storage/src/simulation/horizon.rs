//! The horizon that a log reports is a valid point, even during or after an interrupted checkpoint.

use std::path::Path;

use super::fixture::{Fixture, RunningStore, Shape, carry_out, control_of, filled};
use super::history::{History, SECTORS};
use super::live::values;
use super::medium::{LOG, World};
use crate::copy::live_export::point_to_keep;
use crate::error::ErrorKind;
use crate::format::Control;
use crate::log::holds::HoldOwner;
use crate::log::orders::KeeperTask;
use crate::recovery::contents::VerifyScope;
use crate::recovery::scan::scan;
use crate::store::view::View;
use crate::view::look::Look;
use crate::{CommitWait, DiskOptions, LogHistory, Operation, Point, Result, Retention};

/// The LSN to which the disk is restored at a point, given what is on the medium.
fn resolve(fixture: &Fixture, control: &Control, point: Point) -> Result<u64> {
    let (log, disk) = (Path::new(LOG), control.disks[0].id.get());
    point.resolve(log, control, disk, |visit| {
        let visit = &mut |found: crate::recovery::scan::FoundRecord<'_>| visit(&found.commit());
        let (tail, none) = (VerifyScope::Tail, &mut |_, _| {});
        scan(&fixture.medium, log, control, tail, visit, none).map(drop)
    })
}

fn is_a_point(fixture: &Fixture, control: &Control, told: &LogHistory, when: &str) {
    let lsn = told.horizon.lsn;
    let found = resolve(fixture, control, Point::Lsn(lsn));
    assert_eq!(found.map_err(|error| error.to_string()), Ok(lsn), "{when}");
    if lsn > 0 {
        let error = resolve(fixture, control, Point::Lsn(lsn - 1));
        assert!(error.is_err(), "{when}: LSN {} comes back too", lsn - 1);
    }
}

#[test]
fn the_reported_horizon_is_a_point_wherever_a_checkpoint_is_cut() {
    let mut fixture = Fixture::new(World::new(1), Shape::one_disk(64, 8));
    fixture.retain = Retention::All;
    let (mut copying, mut whole) = (0, false);
    for ticks in 0.. {
        let fixture = Fixture {
            retain: Retention::All,
            ..fixture.with(fixture.medium.lock().clone())
        };
        let mut running = fixture.open(false, CommitWait::NONE).unwrap();
        running.keeper.step(false).unwrap();
        (1..6).for_each(|value| write(&mut running, 0, value));
        fixture.medium.lock().ticks = Some(ticks);
        let done = running.keeper.step(true);
        whole = done.is_ok();
        let told = LogHistory::of(&running.disks[0].log);
        drop(running);
        fixture.medium.lock().restart();
        // What the killed process reported.
        let control = control_of(&fixture.medium).unwrap().control;
        let when = format!("after {ticks} operations");
        if whole || told.horizon.lsn > 0 {
            is_a_point(&fixture, &control, &told, &when);
        }
        copying += u32::from(control.header.copying_lsn > control.header.checkpoint_lsn);
        // What 'disk info' reports, and the next process.
        let (log, none) = (Path::new(LOG), &mut |_, _| {});
        let tail = VerifyScope::Tail;
        let found = scan(&fixture.medium, log, &control, tail, &mut |_| {}, none);
        let told = LogHistory {
            horizon: found.unwrap().horizon,
            ..told
        };
        is_a_point(&fixture, &control, &told, &when);
        let running = fixture.open(false, CommitWait::NONE).unwrap();
        let told = LogHistory::of(&running.disks[0].log);
        let control = running.keeper.control.control.clone();
        // The scans below lock the segments.
        drop(running);
        is_a_point(&fixture, &control, &told, &when);
        if whole {
            break;
        }
    }
    assert!(whole && copying > 3, "{copying} cuts within the copy");
}

/// Writes a sector of a disk, and flushes it.
fn write(running: &mut RunningStore, disk: usize, value: u32) {
    let mut port = running.disks[disk].open_port().unwrap();
    let (sector, data) = (8, filled(value, 8));
    carry_out(running, &mut port, Operation::Write { sector, data }).unwrap();
    carry_out(running, &mut port, Operation::Flush).unwrap();
    drop(port);
    running.finish_writer();
}

/// Opens a log, writes to both disks, and makes a snapshot of the first one only. Returns its LSN.
fn open_with_snapshot(fixture: &Fixture) -> (RunningStore, u64) {
    let mut running = fixture.open(false, CommitWait::NONE).unwrap();
    running.keeper.step(false).unwrap();
    write(&mut running, 0, 1);
    write(&mut running, 1, 2);
    let lsn = running.appended();
    let (alone, name) = (running.disks[0].state.id, "alone".parse().unwrap());
    running.keeper.snapshot(name, Some(alone)).unwrap();
    (running, lsn)
}

/// The checkpoint saves what the snapshot needs before the horizon moves.
#[test]
fn a_snapshot_of_another_disk_hides_no_point_wherever_a_checkpoint_is_cut() {
    let fixture = Fixture::new(World::new(2), Shape::two_disks(SECTORS, 8));
    let mut saved = 0;
    for ticks in 0.. {
        let fixture = fixture.with(fixture.medium.lock().clone());
        let (mut running, lsn) = open_with_snapshot(&fixture);
        write(&mut running, 0, 3);
        fixture.medium.lock().ticks = Some(ticks);
        let _cut = running.keeper.step(true);
        drop(running);
        fixture.medium.lock().restart();
        let control = control_of(&fixture.medium).unwrap().control;
        if control.horizon() > lsn {
            break;
        }
        saved += u32::from(control.saved(lsn) > 0);
        let _files = fixture.medium.enter();
        let options = DiskOptions::new(fixture.image(1));
        let shown = View::open_at(&options, Path::new(LOG), Point::Lsn(lsn), None)
            .and_then(|view| values(view.layers()));
        let shown = shown.unwrap_or_else(|error| panic!("after {ticks} operations: {error}"));
        assert_eq!(shown[8], 2, "after {ticks} operations");
    }
    assert!(saved > 0, "no cut between what was saved and the horizon");
}

/// The saved files at the LSN list the disk of the snapshot only.
#[test]
fn a_point_is_kept_beside_the_saved_snapshot_of_another_disk() {
    let fixture = Fixture::new(World::new(4), Shape::two_disks(SECTORS, 8));
    let mut saved = 0;
    for ticks in 0.. {
        let fixture = fixture.with(fixture.medium.lock().clone());
        let (mut running, lsn) = open_with_snapshot(&fixture);
        running.keeper.step(true).unwrap();
        write(&mut running, 0, 3);
        fixture.medium.lock().ticks = Some(ticks);
        let whole = running.keeper.step(true).is_ok();
        drop(running);
        fixture.medium.lock().restart();
        if whole {
            break;
        }
        let mut running = fixture.open(false, CommitWait::NONE).unwrap();
        let control = running.keeper.control.control.clone();
        if control.horizon() > lsn {
            continue;
        }
        saved += u32::from(control.saved(lsn) > 0);
        let other = running.disks[1].clone();
        let held = running
            .keeper
            .hold(&other.state, HoldOwner::Export)
            .unwrap();
        let point = point_to_keep(&other, Point::Lsn(lsn), &held).unwrap();
        drop(held);
        History::order(&mut running, KeeperTask::KeepPoint(point)).unwrap();
        for value in [4, 5] {
            let held = running.keeper.hold(&other.state, HoldOwner::Look).unwrap();
            let at = Point::Snapshot(point.name);
            let look = Look::in_use(&other.log, &other.state, at, held, None);
            let shown = look.and_then(|look| values(look.layers()));
            let shown = shown.unwrap_or_else(|error| panic!("after {ticks} operations: {error}"));
            assert_eq!(shown[8], 2, "after {ticks} operations");
            // The image moves past the point.
            write(&mut running, 1, value);
            running.keeper.step(true).unwrap();
        }
    }
    assert!(saved > 0, "no cut between what was saved and the horizon");
}

/// The copy goes on to its own LSN, and would pass the point in the middle of the export.
#[test]
fn an_export_does_not_begin_inside_a_copy_that_failed() {
    let begun = (0..20).filter(|after| {
        let fixture = Fixture::new(World::new(3), Shape::one_disk(SECTORS, 8));
        let mut running = fixture.open(false, CommitWait::NONE).unwrap();
        running.keeper.step(false).unwrap();
        let disk = running.disks[0].clone();
        (1..4).for_each(|value| write(&mut running, 0, value));
        let newest = running.appended();
        fixture.medium.lock().fail_write = Some(*after);
        let failed = running.keeper.step(true).is_err();
        let announced = running.keeper.control.control.header.copying_lsn > 0;
        if !failed || announced || running.keeper.frozen_at != Some(newest) {
            return false;
        }
        // Not at once.
        disk.log.lock().keeper.checkpoint = false;
        let held = running.keeper.hold(&disk.state, HoldOwner::Export).unwrap();
        let mut keep = |at| {
            let point = point_to_keep(&disk, at, &held).unwrap();
            History::order(&mut running, KeeperTask::KeepPoint(point))
        };
        let refused = keep(Point::Lsn(newest - 1)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NotFound, "{refused}");
        assert!(
            refused
                .to_string()
                .contains(&format!("up to LSN {newest};"))
        );
        keep(Point::Newest).unwrap();
        true
    });
    assert!(begun.count() > 0);
}
