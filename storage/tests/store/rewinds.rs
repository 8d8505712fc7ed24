//! Disks that are restored in place, while their log is in use and while it is not.

use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use walvisor_storage::{
    DiskOptions, ErrorKind, Point, RecordKind, Retention, Store, StoreOptions, Tracked,
    adopt_image, dump_records, inspect, leave_log, move_to_log, resize_disk, rewind_disk,
};

use crate::bench::{BYTES, Bench, SECTORS};
use crate::support::{MIB, all, commit, flip, flush, put, read, refused, snapshot, write};

/// A restore, its undo, a restore of what was restored, and back to the base image: the other disk
/// stays as it is, and work goes on in between, whatever is between two steps.
#[test]
fn a_disk_goes_back_and_forth_and_the_other_stays() {
    let between: [fn(&mut Bench); 3] = [
        |_| {},
        |bench| {
            bench.close();
            bench.check();
            bench.open();
        },
        |bench| {
            bench.kill();
            bench.check();
            bench.open();
        },
    ];
    // In use from the first step to the last, closed or killed between two steps; and commands on a
    // log that is not in use.
    for (between, closed) in between
        .into_iter()
        .zip([false; 3])
        .chain([(between[0], true)])
    {
        let mut bench = Bench::new(Retention::All);
        bench.open();
        let step = |bench: &mut Bench, count: usize, backs: &[(usize, u64)]| {
            bench.change(count);
            between(bench);
            if closed {
                bench.close();
            }
            let done = backs.iter().map(|&(disk, lsn)| bench.back(disk, lsn));
            let done = done.last().unwrap();
            bench.check();
            if closed {
                bench.open();
            }
            done
        };
        let done = step(&mut bench, 40, &[(0, 20)]);
        assert!(done.undone > 0 && done.redone == 0);
        // The undo: what was written since is void in its turn.
        let undo = step(&mut bench, 15, &[(0, done.from_lsn)]);
        assert!(undo.redone == done.undone && undo.undone > 0);
        // Into the middle of what the first restore undid, of the other disk, and twice with
        // nothing between.
        step(&mut bench, 10, &[(1, 30), (0, 25), (1, 10)]);
        // To what the base image is.
        step(&mut bench, 20, &[(0, 0)]);
        // To just after a restore, by its own LSN.
        step(&mut bench, 5, &[(0, done.lsn.unwrap())]);
        // To where the disk is.
        for at in [Point::Newest, Point::Lsn(bench.newest)] {
            let done = bench.rewind(0, at).unwrap();
            assert_eq!(
                (done.lsn, done.undone, done.to_lsn),
                (None, 0, bench.newest)
            );
        }
        bench.close();
        bench.check();
    }
}

/// A disk without history, one that another process or nobody has, and one that is only read.
#[test]
fn what_cannot_be_restored_is_refused() {
    let mut bench = Bench::new(Retention::All);
    let disk = bench.place.disk.clone();
    let kind = refused(bench.rewind(0, Point::Lsn(0)), "retain=24h");
    assert_eq!(kind, ErrorKind::NotFound);
    bench.open();
    refused(bench.rewind(0, Point::Newest), "no history");
    bench.change(20);
    let process = format!("process {}", std::process::id());
    let locked = rewind_disk(&disk, &bench.place.log(), Point::Lsn(5));
    assert_eq!(refused(locked, &process), ErrorKind::Locked);
    bench.close();
    let none = rewind_disk(&disk, &bench.place.at("none"), Point::Lsn(5));
    assert_eq!(refused(none, ""), ErrorKind::NotFound);
    let read_only = DiskOptions {
        read_only: true,
        ..DiskOptions::new(&disk)
    };
    let disks = [read_only, DiskOptions::detached(&bench.place.disks()[1])];
    let store = Store::open(&bench.place.log(), &disks, &bench.place.options).unwrap();
    let kind = refused(store.disks()[0].rewind(Point::Lsn(12)), "");
    assert_eq!(kind, ErrorKind::InvalidInput);
    store.close().unwrap();
    bench.open();
    bench.disk(0).checkpoint().unwrap();
    bench.close();
    refused(bench.rewind(0, Point::Lsn(5)), "no history");
    bench.check();
}

/// Each restore is one moment for those who read or write the disk, and the other disk goes on.
#[test]
fn restores_beside_writers_are_one_moment() {
    // With room for all that is written here.
    let mut bench = Bench::with(StoreOptions {
        segment_size: MIB,
        max_segments: 64,
        retain: Some(Retention::All),
        ..StoreOptions::default()
    });
    bench.open();
    let [restored, other] = [bench.disk(0), bench.disk(1)];
    let mut port = restored.open_port().unwrap();
    write(&mut port, 0, 1, 8);
    let first = restored.mark(&"before".parse().unwrap()).unwrap().lsn;
    write(&mut port, 0, 2, 8);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut port = other.open_port().unwrap();
            for round in 0..2000 {
                let (sector, byte) = (round % 16 * 8, round as u8);
                write(&mut port, sector, byte, 8);
                assert!(all(&read(&mut port, sector, 8), byte));
            }
        });
        let mut restores = 0;
        while restores < 2 || !writer.is_finished() {
            let byte = restores % 2 + 1;
            let to = first + u64::from(byte) - 1;
            let done = restored.rewind(Point::Lsn(to)).unwrap();
            assert_eq!((done.lsn.is_some(), done.to_lsn), (true, to));
            assert!(all(&read(&mut port, 0, 8), byte));
            restores = (restores + 1) % 100;
        }
    });
    // A writer of the disk itself gets an answer for each request.
    drop(port);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut port = restored.open_port().unwrap();
            (0..500).for_each(|round| write(&mut port, 8, round as u8, 8));
        });
        while !writer.is_finished() {
            if let Err(error) = restored.rewind(Point::Lsn(first)) {
                assert_eq!(error.kind(), ErrorKind::Locked, "{error}");
            }
        }
    });
    bench.close();
}

/// A restore is a record of the log, what it undid is told as undone, and snapshots that do
/// not lead to the disk as it is are no points for changes.
#[test]
fn the_log_tells_of_restores() {
    let mut bench = Bench::new(Retention::All);
    bench.open();
    bench.change(20);
    bench.back(0, 12);
    let shown = bench.disk(0).snapshot("here".parse().unwrap()).unwrap();
    assert_eq!(shown.lsn, 21);
    bench.back(0, 20);
    assert!(bench.disk(0).past_points().is_empty());
    assert_eq!(bench.disk(1).past_points().len(), 1);
    bench.change(20);
    // The base images can't be as of it.
    refused(bench.disk(0).checkpoint(), "snapshot 'here'");
    bench.back(0, 30);
    bench.close();
    let (mut restores, mut undone) = (Vec::new(), 0);
    dump_records(&bench.place.log(), &mut |record| {
        let (first, lsn) = (record.disk.ends_with("a"), record.lsn);
        if let RecordKind::Rewind(to) = record.kind {
            assert!(first);
            restores.push((lsn, to));
        }
        assert_eq!(record.undone, first && (31..43).contains(&lsn), "{lsn}");
        undone += u64::from(record.undone);
    })
    .unwrap();
    assert_eq!(restores, [(21, 12), (22, 20), (43, 30)]);
    assert!(undone > 0);
    bench.check();
}

/// A time after the restore is the restored disk, one before it is what it was then.
#[test]
fn a_restore_has_its_place_in_time() {
    let mut bench = Bench::new(Retention::All);
    // Times are compared in microseconds.
    let micros = || {
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap()
            .as_micros() as u64
    };
    let past = |time| while micros() <= time {};
    let now = || {
        past(micros());
        let now = micros();
        past(now);
        Point::Time(now)
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
        assert!(
            bench.as_of(0, at).unwrap() == bench.states[&lsn][0],
            "{lsn}"
        );
    }
    assert_eq!(bench.rewind(0, between).unwrap().to_lsn, 21);
    bench.check();
}

#[test]
fn a_snapshot_is_a_point_and_stays_one() {
    let mut bench = Bench::new(Retention::Nothing);
    bench.open();
    bench.change(20);
    bench.disk(0).snapshot("early".parse().unwrap()).unwrap();
    bench.change(20);
    bench.disk(0).snapshot("late".parse().unwrap()).unwrap();
    bench.close();
    let done = bench.rewind(0, snapshot("early")).unwrap();
    assert_eq!((done.to_lsn, done.from_lsn), (20, 40));
    // A snapshot right after the restore has it, although no record follows.
    bench.open();
    let shown = bench.disk(0).snapshot("after".parse().unwrap()).unwrap();
    assert_eq!(shown.lsn, done.lsn.unwrap());
    // What has changed since the snapshots is known of those that led here.
    let points = bench.disk(0).past_points();
    let names: Vec<_> = points.iter().map(|point| point.name.as_str()).collect();
    assert_eq!(names, ["early", "after"]);
    assert_eq!(bench.disk(1).past_points().len(), 3);
    bench.change(10);
    let changed = bench.disk(0).changes(shown.lsn, 0, SECTORS, 1000).unwrap();
    let mut touched = vec![false; SECTORS as usize];
    for (_, (disk, sectors, _)) in bench.touched.range(shown.lsn + 1..) {
        touched[sectors.start as usize..sectors.end as usize]
            .iter_mut()
            .for_each(|touched| *touched |= *disk == 0);
    }
    let told = changed.iter();
    let told = told.flat_map(|change| (0..change.sectors).map(|_| change.changed));
    assert!(told.eq(touched));
    assert!(bench.disk(0).changes(40, 0, SECTORS, 1000).is_err());
    bench.close();
    for (name, lsn) in [("early", 20), ("late", 40), ("after", 41)] {
        let bytes = bench.as_of(0, snapshot(name)).unwrap();
        assert!(bytes == bench.states[&lsn][0], "{name}");
    }
    assert_eq!(bench.rewind(0, snapshot("late")).unwrap().to_lsn, 40);
    bench.check();
    // Nothing is copied while they are there.
    assert_eq!(bench.horizon(), 0);
}

/// A checkpoint of everything ends the history, with its restores.
#[test]
fn a_checkpoint_drops_the_restores() {
    let mut bench = Bench::new(Retention::All);
    bench.work(30);
    bench.back(0, 10);
    bench.open();
    bench.change(10);
    bench.disk(0).checkpoint().unwrap();
    bench.close();
    assert_eq!(bench.horizon(), bench.newest);
    bench.check();
    assert!([0, 1].map(|disk| bench.image(disk)) == bench.states[&bench.newest]);
}

/// A disk with history, whether it was restored or not, grows, but is not shrunk, given another log
/// or taken out of its own, which would end that history, until this is done on purpose.
#[test]
fn a_disk_with_history_is_not_shrunk_and_does_not_leave() {
    for restored in [false, true] {
        let mut bench = Bench::new(Retention::All);
        bench.work(30);
        if restored {
            // To the base image: no record counts.
            bench.back(0, 0);
        }
        let (disk, log, other) = (
            &bench.place.disk,
            &bench.place.log(),
            bench.place.at("other"),
        );
        let others = [bench.place.disks()[1].clone()];
        let resize = |bytes, shrink| resize_disk(disk, bytes, log, shrink, &others).map(drop);
        let leave = || leave_log(disk, log, &others).map(drop);
        let options = StoreOptions::default();
        let to_other = move_to_log(disk, log, &other, &options, &others).map(drop);
        for done in [resize(BYTES as u64 / 2, true), leave(), to_other] {
            refused(done, "walvisor disk checkpoint");
        }
        resize(4 * BYTES as u64, false).unwrap();
        let bytes = bench.as_of(0, Point::Lsn(30)).unwrap();
        assert!(bytes[..BYTES] == bench.states[&30][0]);
        let store = bench.place.open();
        store.disks()[0].checkpoint().unwrap();
        store.close().unwrap();
        resize(BYTES as u64 / 2, true).unwrap();
        leave().unwrap();
        assert!(bench.image(0) == bench.states[&bench.newest][0][..BYTES / 2]);
    }
}

/// The segment and the byte offset of the last batch, whose record has no payload.
fn last_batch(bench: &Bench) -> (PathBuf, u64) {
    let mut batch = None;
    dump_records(&bench.place.log(), &mut |last| {
        batch = Some((last.segment.to_owned(), last.offset - 4096));
    })
    .unwrap();
    batch.expect("a record")
}

/// Either slot of the control file says that the restore, the log's last record, was durable: damage
/// to it is never taken for a torn write.
#[test]
fn damage_to_a_restore_does_not_bring_back_what_was_undone() {
    let mut bench = Bench::new(Retention::All);
    bench.work(30);
    bench.back(0, 12);
    let (control, good) = (bench.place.log().join("control"), bench.control());
    let (segment, batch) = last_batch(&bench);
    for slot in [0, 65536] {
        flip(&control, slot + 64);
        assert!(bench.exported(0) == bench.states[&12][0], "slot at {slot}");
        // The checksum, the kind, and the LSN that it goes back to.
        for byte in [12, 96 + 4, 96 + 8] {
            flip(&segment, batch + byte);
            let kind = refused(bench.as_of(0, Point::Newest), "");
            assert_eq!(kind, ErrorKind::Damaged);
            flip(&segment, batch + byte);
        }
        std::fs::write(&control, &good).unwrap();
    }
    for slot in [0, 65536] {
        flip(&control, slot + 64);
    }
    let kind = refused(bench.rewind(0, Point::Lsn(5)), "");
    assert_eq!(kind, ErrorKind::Damaged);
    std::fs::write(&control, &good).unwrap();
    bench.check();
}

/// A restore goes back to an LSN before its own that the images have not passed. With another one,
/// whatever its checksum, the log is damaged.
#[test]
fn impossible_rewinds_are_damage() {
    let mut bench = Bench::new(Retention::All);
    bench.open();
    bench.change(10);
    bench.disk(0).checkpoint().unwrap();
    bench.change(20);
    bench.close();
    let horizon = bench.horizon();
    assert!(horizon > 0);
    let at = bench.back(0, bench.newest - 9).lsn.unwrap();
    let (segment, batch) = last_batch(&bench);
    let whole = std::fs::read(&segment).unwrap()[batch as usize..][..96 + 20].to_vec();
    for (to, damaged) in [
        (horizon - 1, true),
        (horizon, false),
        (at - 1, false),
        (at, true),
        (at + 1, true),
        (u64::MAX, true),
    ] {
        let mut header = whole.clone();
        header[96 + 8..96 + 16].copy_from_slice(&to.to_le_bytes());
        header[12..16].fill(0);
        let crc = crc32c::crc32c(&header);
        header[12..16].copy_from_slice(&crc.to_le_bytes());
        put(&segment, batch, &header);
        match bench.as_of(0, Point::Newest) {
            Ok(_) => assert!(!damaged, "to {to}"),
            Err(error) => {
                assert!(damaged, "to {to}: {error}");
                assert_eq!(error.kind(), ErrorKind::Damaged, "to {to}");
            }
        }
    }
}

/// Each image that is taken for the disk's own takes an LSN. A snapshot that follows is of the last.
#[test]
fn a_snapshot_after_some_changes_of_the_image_is_of_the_last() {
    let mut bench = Bench::new(Retention::All);
    bench.work(10);
    let (disk, log) = (bench.place.disks()[0].clone(), bench.place.log());
    for days in 1..4 {
        let image = std::fs::File::options().write(true).open(&disk).unwrap();
        let time = SystemTime::now() - Duration::from_secs(days * 86_400);
        image.set_modified(time).unwrap();
        drop(image);
        adopt_image(&disk, &log).unwrap();
        // Before the log is opened, no record has the LSN of the change.
        let changed = inspect(&disk, &log).unwrap().log.unwrap().last_lsn + days;
        assert!(bench.as_of(0, Point::Lsn(changed)).unwrap() == bench.exported(0));
        assert!(bench.as_of(0, Point::Lsn(changed + 1)).is_err());
    }
    let store = bench.place.open();
    let shown = store.disks()[0].snapshot("last".parse().unwrap()).unwrap();
    store.close().unwrap();
    let bytes = bench.as_of(0, snapshot("last")).unwrap();
    assert!(bytes == bench.exported(0), "{shown:?}");
}

/// Whoever uses the log after restores of a closed disk can write, also if nothing can make room
/// because a snapshot lies between the two points of a restore.
#[test]
fn restores_of_a_closed_disk_do_not_fill_its_log() {
    for pinned in [false, true] {
        let mut bench = Bench::with(StoreOptions {
            segment_size: 64 << 10,
            max_segments: 6,
            retain: Some(Retention::All),
            ..StoreOptions::default()
        });
        bench.open();
        bench.change(10);
        if pinned {
            let made = bench.disk(0).snapshot("between".parse().unwrap());
            made.unwrap();
        }
        bench.change(2);
        bench.close();
        let newest = bench.newest;
        let mut restores = 0..10;
        let refused = restores.find_map(|round| {
            let at = Point::Lsn(round % 2 * newest);
            bench.rewind(0, at).err()
        });
        let refused = refused.expect("the log has an end").to_string();
        assert!(refused.contains("walvisor log resize"), "{refused}");
        assert!(restores.start > 2, "{restores:?}");
        let store = bench.place.open();
        commit(&store.disks()[0], 0, 7, 8);
        commit(&store.disks()[0], 0, 8, 8);
        store.close().unwrap();
    }
}

/// Bytes of a record that rotted are an error of what needs them: not of the disk once they are
/// undone, and again of a point that has them.
#[test]
fn rot_in_what_was_undone_is_rot_only_there() {
    let mut bench = Bench::new(Retention::All);
    bench.open();
    for byte in [1, 2] {
        for sector in (0..SECTORS).step_by(16) {
            write(&mut bench.disk(0).open_port().unwrap(), sector, byte, 16);
        }
    }
    flush(&mut bench.disk(0).open_port().unwrap());
    // A later header tells that all before it was durable: a damaged end could be one that was
    // never acknowledged.
    commit(bench.disk(0), 0, 2, 16);
    bench.close();
    let (disk, log) = (&bench.place.disk, &bench.place.log());
    dump_records(log, &mut |record| {
        if record.lsn == 20 {
            put(record.segment, record.offset + 5, &[99]);
        }
    })
    .unwrap();
    assert!(bench.as_of(0, Point::Newest).is_err());
    let done = rewind_disk(disk, log, Point::Lsn(16)).unwrap();
    assert_eq!((done.undone, done.from_lsn), (17, 33));
    assert!(all(&bench.exported(0), 1));
    assert!(inspect(disk, log).unwrap().log.unwrap().damaged.is_empty());
    assert!(bench.as_of(0, Point::Lsn(33)).is_err());
    // Nothing needs it to end the history.
    bench.open();
    bench.disk(0).checkpoint().unwrap();
    bench.close();
    assert!(all(&bench.image(0), 1));
}

/// A disk without a record that counts still has its history: another image is not taken in its
/// place.
#[test]
fn another_image_is_not_taken_for_a_restored_disk() {
    let mut bench = Bench::new(Retention::All);
    bench.work(30);
    bench.back(0, 0);
    std::fs::remove_file(&bench.place.disk).unwrap();
    std::fs::write(&bench.place.disk, vec![1; BYTES]).unwrap();
    let opened = bench.place.try_open(&bench.place.options);
    assert_eq!(refused(opened, ""), ErrorKind::WrongLog);
    let kind = refused(bench.rewind(0, Point::Lsn(20)), "");
    assert_eq!(kind, ErrorKind::WrongLog);
}
