//! To which points a disk is restored, and from which.

use std::time::Duration;

use walvisor_storage::{
    ErrorKind, LogRecord, Point, Retention, Tracked, dump_records, rewind_disk,
};

use super::bench::{Bench, SECTORS};
use crate::support::copy_log;

/// A restore, its undo, a restore of what was restored, and back to the base image: other disks
/// stay as they are, and work goes on in between.
#[test]
fn a_disk_goes_back_and_forth_and_the_other_stays() {
    for killed in [false, true] {
        let mut bench = Bench::new(Retention::All);
        let work = |bench: &mut Bench, count| {
            if killed {
                bench.work_killed(count)
            } else {
                bench.work(count)
            }
        };
        work(&mut bench, 40);
        bench.check();
        let done = bench.back(0, 20);
        assert!(done.undone > 0 && done.redone == 0);
        bench.check();
        work(&mut bench, 15);
        bench.check();
        // The undo: what was written since is void in its turn.
        let undo = bench.back(0, done.from_lsn);
        assert!(undo.redone == done.undone && undo.undone > 0);
        bench.check();
        work(&mut bench, 10);
        // Into the middle of what the first restore undid, of the other disk, and twice with
        // nothing between.
        bench.back(1, 30);
        bench.back(0, 25);
        bench.back(1, 10);
        bench.check();
        work(&mut bench, 20);
        // To what the base image is.
        bench.back(0, 0);
        bench.check();
        work(&mut bench, 5);
        bench.check();
        // To just after a restore, by its own LSN.
        bench.back(0, done.lsn.unwrap());
        bench.check();
    }
}

#[test]
fn a_restore_to_where_the_disk_is_changes_nothing() {
    let mut bench = Bench::new(Retention::All);
    bench.work(20);
    let before = std::fs::read(bench.log().join("control")).unwrap();
    for at in [Point::Newest, Point::Lsn(20)] {
        let done = bench.rewind(0, at).unwrap();
        assert_eq!((done.lsn, done.undone, done.to_lsn), (None, 0, 20));
    }
    assert!(std::fs::read(bench.log().join("control")).unwrap() == before);
    let done = bench.back(0, 5);
    assert_eq!(bench.rewind(0, Point::Lsn(5)).unwrap().lsn, None);
    assert_eq!(bench.rewind(0, Point::Newest).unwrap().lsn, None);
    assert_eq!(bench.back(0, done.from_lsn).undone, 0);
    bench.check();
}

#[test]
fn points_that_are_not_there_are_refused_and_nothing_changes() {
    let mut bench = Bench::new(Retention::All);
    let error = rewind_disk(&bench.disk(0), &bench.log(), Point::Lsn(0)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(error.to_string().contains("retain=24h"), "{error}");
    bench.work(20);
    let before = std::fs::read(bench.log().join("control")).unwrap();
    let name = "none".parse().unwrap();
    for (at, told) in [
        (Point::Lsn(21), "the newest is lsn:20"),
        (Point::Cid(1000), "the newest is lsn:20"),
        (Point::Time(1), "the oldest are LSN 0"),
        (Point::Snapshot(name), "no snapshot 'none'"),
    ] {
        let error = bench.rewind(0, at).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        assert!(error.to_string().contains(told), "{error}");
    }
    let store = bench.open();
    let error = rewind_disk(&bench.disk(0), &bench.log(), Point::Lsn(5)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Locked, "{error}");
    let process = format!("process {}", std::process::id());
    assert!(error.to_string().contains(&process), "{error}");
    store.close().unwrap();
    let none = bench.dir.path().join("none");
    let error = rewind_disk(&bench.disk(0), &none, Point::Lsn(5)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let store = bench.open();
    store.disks()[0].checkpoint().unwrap();
    store.close().unwrap();
    let error = bench.rewind(0, Point::Lsn(5)).unwrap_err();
    assert!(error.to_string().contains("no history"), "{error}");
    assert!(std::fs::read(bench.log().join("control")).unwrap() != before);
    bench.check();
}

/// A time after the restore is the restored disk, one before it is what it was then.
#[test]
fn a_restore_has_its_place_in_time() {
    let mut bench = Bench::new(Retention::All);
    let now = || {
        // Times are compared in microseconds.
        std::thread::sleep(Duration::from_millis(2));
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        std::thread::sleep(Duration::from_millis(2));
        Point::Time(now.unwrap().as_micros() as u64)
    };
    bench.work(20);
    let before = now();
    bench.back(0, 5);
    let between = now();
    bench.back(0, 10);
    let after = now();
    bench.work(10);
    for (at, lsn) in [
        (before, 20),
        (between, 21),
        (after, 22),
        (Point::Newest, 32),
    ] {
        let bytes = bench.restored(0, at).unwrap();
        assert!(bytes == bench.states[&lsn][0], "{lsn}");
    }
    assert_eq!(bench.rewind(0, between).unwrap().to_lsn, 21);
    bench.check();
}

#[test]
fn a_snapshot_is_a_point_and_stays_one() {
    let mut bench = Bench::new(Retention::Nothing);
    let store = bench.open();
    bench.change(&store, 20);
    let [early, late, after] = ["early", "late", "after"].map(|name| name.parse().unwrap());
    store.disks()[0].snapshot(early).unwrap();
    bench.change(&store, 20);
    store.disks()[0].snapshot(late).unwrap();
    store.close().unwrap();
    let done = bench.rewind(0, Point::Snapshot(early)).unwrap();
    assert_eq!((done.to_lsn, done.from_lsn), (20, 40));
    // A snapshot right after the restore has it, although no record follows.
    let store = bench.open();
    let shown = store.disks()[0].snapshot(after).unwrap();
    assert_eq!(shown.lsn, done.lsn.unwrap());
    // What has changed since the snapshots is known of those that led here.
    let points = Tracked::past_points(&store.disks()[0]);
    let names: Vec<_> = points.iter().map(|point| point.name.as_str()).collect();
    assert_eq!(names, ["early", "after"]);
    let points = Tracked::past_points(&store.disks()[1]);
    assert_eq!(points.len(), 3);
    bench.change(&store, 10);
    let changed = Tracked::changes(&store.disks()[0], shown.lsn, 0, SECTORS, 1000).unwrap();
    let known = disk_touched(&bench, shown.lsn);
    let mut at = 0;
    for change in changed {
        for sector in at..at + change.sectors {
            assert_eq!(change.changed, known[sector as usize], "sector {sector}");
        }
        at += change.sectors;
    }
    assert!(Tracked::changes(&store.disks()[0], 40, 0, SECTORS, 1000).is_err());
    store.close().unwrap();
    for (name, lsn) in [(early, 20), (late, 40), (after, 41)] {
        let bytes = bench.restored(0, Point::Snapshot(name)).unwrap();
        assert!(bytes == bench.states[&lsn][0], "{name}");
    }
    assert_eq!(bench.rewind(0, Point::Snapshot(late)).unwrap().to_lsn, 40);
    bench.check();
    // Nothing is copied while they are there.
    assert_eq!(bench.horizon(), 0);
}

/// The sectors of the first disk that records behind an LSN touched.
fn disk_touched(bench: &Bench, lsn: u64) -> Vec<bool> {
    let mut touched = vec![false; SECTORS as usize];
    let copy = tempfile::tempdir().unwrap();
    copy_log(&bench.log(), copy.path());
    let visit = &mut |record: &LogRecord<'_>| {
        if record.lsn > lsn && record.disk.ends_with("a") {
            let first = record.sector as usize;
            touched[first..first + record.sectors as usize].fill(true);
        }
    };
    dump_records(copy.path(), visit).unwrap();
    touched
}
