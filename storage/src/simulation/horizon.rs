//! The horizon that a log reports is a valid point, even during or after an interrupted checkpoint.

use std::path::Path;

use super::fixture::{Fixture, Shape, carry_out, control_of, filled};
use super::medium::{LOG, World};
use crate::format::Control;
use crate::recovery::contents::VerifyScope;
use crate::recovery::scan::scan;
use crate::{CommitWait, LogHistory, Operation, Point, Result, Retention};

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
        let mut port = running.disks[0].open_port().unwrap();
        for value in 1..6 {
            let (sector, data) = (8, filled(value, 8));
            carry_out(&mut running, &mut port, Operation::Write { sector, data }).unwrap();
            carry_out(&mut running, &mut port, Operation::Flush).unwrap();
        }
        running.finish_writer();
        fixture.medium.lock().ticks = Some(ticks);
        let done = running.keeper.step(true);
        whole = done.is_ok();
        let told = LogHistory::of(&running.disks[0].log);
        drop((port, running));
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
