//! Every state that two disks of one log had since their base images can be looked at, copied and
//! compared, while the log is in use and while it is not.

use std::path::PathBuf;
use std::thread;

use walvisor_storage::{
    Allocation, Backend, ChangedRange, DiskOptions, ErrorKind, Failure, FullLogPolicy, Look,
    Operation, Point, ReadHold, ReadableLog, Retention, Store, StoreOptions, Tracked, clone_disk,
    disk_changes, dump_records, inspect,
};

use crate::bench::{BYTES, Bench, SECTORS};
use crate::support::{
    ENGINES, MemoryFs, Random, SIZE, TestDisk, all, check_look, commit, discard, flush, modify,
    port, put, put_in, read, refused, run, small, snapshot, wait_until, zeroes,
};

/// The LSN of the base images.
const BASE: u64 = 60;
const NEWEST: u64 = BASE + 90;

/// Two disks with records behind their base images, whose log is in use or was killed.
fn disks(in_use: bool) -> Bench {
    let mut bench = Bench::new(Retention::All);
    bench.open();
    bench.change(BASE as usize);
    bench.disk(0).checkpoint().unwrap();
    bench.change((NEWEST - BASE) as usize);
    if !in_use {
        bench.kill();
    }
    bench
}

fn each_use(test: impl Fn(&mut Bench)) {
    for in_use in [true, false] {
        test(&mut disks(in_use));
    }
}

/// The bytes of the images, and of the log's files while nobody uses it: a log in use makes its next
/// segment at a moment of its own.
fn files(bench: &Bench) -> Vec<Vec<u8>> {
    let mut paths = bench.place.disks();
    if bench.store.is_none() {
        paths.extend(bench.place.files(""));
    }
    let read = |path: &PathBuf| std::fs::read(path).unwrap();
    paths.iter().map(read).collect()
}

#[test]
fn all_points_are_looked_at_at_once() {
    each_use(|bench| {
        let mut looks = Vec::new();
        for lsn in BASE..=NEWEST {
            for disk in 0..2 {
                looks.push((disk, lsn, bench.look(disk, Point::Lsn(lsn)).unwrap()));
            }
        }
        let check = |bench: &mut Bench, looks: &[(usize, u64, Look)], told| {
            for (disk, lsn, look) in looks {
                bench.check_look(look, *disk, *lsn, told);
            }
        };
        check(bench, &looks, "at once");
        if bench.store.is_none() {
            // Nobody writes to the disks and the log meanwhile.
            let opened = bench.place.try_open(&bench.place.options);
            assert_eq!(refused(opened, ""), ErrorKind::Locked);
            drop(looks);
            return bench.check();
        }
        bench.change(100);
        // What would change the base images is refused.
        refused(bench.disk(0).checkpoint(), "an open look holds the log");
        assert_eq!(bench.horizon(), BASE);
        // The first that are dropped leave the others what they need.
        looks.drain(..20);
        bench.change(20);
        check(bench, &looks, "after more writes");
        looks.clear();
        bench.change(600);
        assert!(bench.horizon() > BASE, "the log goes round");
        let gone = bench.look(0, Point::Lsn(BASE));
        assert_eq!(refused(gone, ""), ErrorKind::NotFound);
        let look = bench.look(1, Point::Newest).unwrap();
        bench.check_look(&look, 1, bench.newest, "the newest");
    });
}

/// A look at damaged records, with either engine, is in `damage_below_a_point_...`.
#[test]
fn points_that_are_not_there_are_refused_and_nothing_changes() {
    each_use(|bench| {
        let before = bench.control();
        let newest = format!("the newest is lsn:{NEWEST}");
        for (at, part) in [
            (Point::Lsn(0), ""),
            (Point::Lsn(BASE - 1), ""),
            (Point::Lsn(NEWEST + 1), &*newest),
            (Point::Cid(1 << 40), &newest),
            (Point::Time(1), "the oldest are LSN 60"),
            (snapshot("none"), "no snapshot 'none'"),
        ] {
            for disk in 0..2 {
                let mut kinds = vec![
                    refused(bench.look(disk, at), part),
                    refused(bench.rewind(disk, at), part),
                ];
                if bench.store.is_none() {
                    let (place, path) = (&bench.place, &bench.place.disks()[disk]);
                    let [new, log] = ["new", "new.wal"].map(|name| place.at(name));
                    let (options, none) = (&place.options, &mut |_, _| {});
                    let source = place.source(path, Some(at));
                    let cloned = clone_disk(&source, &new, &log, options, none);
                    kinds.push(refused(cloned, part));
                    assert!(!new.exists() && !log.exists());
                    kinds.push(refused(bench.as_of(disk, at), part));
                    kinds.push(refused(place.changes(path, at, None), part));
                }
                assert!(
                    kinds.iter().all(|kind| *kind == ErrorKind::NotFound),
                    "{kinds:?}"
                );
            }
        }
        assert!(bench.control() == before);
    });
}

/// Snapshots, times, a disk that has grown, one that has left, and a log that was closed.
#[test]
fn looks_in_use_stay_whatever_becomes_of_their_disk() {
    let mut bench = disks(true);
    let name = "early".parse().unwrap();
    bench.disk(0).snapshot(name).unwrap();
    bench.change(10);
    let looks = [
        (NEWEST, bench.look(0, snapshot("early")).unwrap()),
        (bench.newest, bench.look(0, Point::Time(u64::MAX)).unwrap()),
    ];
    let check = |bench: &mut Bench, told| {
        for (lsn, look) in &looks {
            bench.check_look(look, 0, *lsn, told);
        }
    };
    check(&mut bench, "named");
    bench.disk(0).grow(2 * BYTES as u64).unwrap();
    let grown = bench.look(0, snapshot("early")).unwrap();
    let mut state = bench.states[&NEWEST][0].clone();
    state.resize(2 * BYTES, 0);
    check_look(&mut Random(5), &grown, &state, "grown");
    check(&mut bench, "after the growth");
    // A kill leaves nothing of them.
    let killed = bench.place.crash();
    assert!(killed.files("saved-").is_empty());
    killed.open().close().unwrap();

    let left = bench.disk(0).clone();
    bench
        .store
        .as_mut()
        .unwrap()
        .remove_disk(&bench.place.disk)
        .unwrap();
    check(&mut bench, "after the removal");
    refused(left.look(Point::Newest, None), "has left its log");
    let other = bench.disk(0).clone();
    bench.close();
    check(&mut bench, "after the close");
    refused(other.look(Point::Newest, None), "being closed");
}

/// A log that is full of what a look needs refuses writes, and takes them again once the look is
/// dropped.
#[test]
fn writes_fail_while_a_look_needs_the_whole_log() {
    for retain in [Retention::All, Retention::Nothing] {
        let mut bench = Bench::new(retain);
        bench.open();
        bench.change(20);
        let looks = [20, 11].map(|lsn| (lsn, bench.look(0, Point::Lsn(lsn)).unwrap()));
        let disk = bench.disk(1).clone();
        let mut port = disk.open_port().unwrap();
        let mut one =
            || run(&mut port, put_in(8, 7, 8)).and_then(|_| run(&mut port, Operation::Flush));
        let written = (0..4000).find(|_| one().is_err());
        assert!(written > Some(100), "{written:?}");
        wait_until("no_space", || disk.condition().name() == "no_space");
        for (lsn, look) in &looks {
            bench.check_look(look, 0, *lsn, "on a full log");
        }
        drop(looks);
        wait_until("a write that succeeds", || one().is_ok());
        drop(port);
        bench.close();
    }
}

#[test]
fn a_look_cannot_be_written() {
    let bench = disks(false);
    let look = bench.look(0, Point::Lsn(BASE)).unwrap();
    assert!(look.capabilities().read_only);
    let mut queue = look.open_queue().unwrap();
    for operation in [put_in(0, 1, 1), discard(0, 1), zeroes(0, 1, false)] {
        assert_eq!(run(&mut *queue, operation).unwrap_err(), Failure::ReadOnly);
    }
    assert!(run(&mut *queue, Operation::Flush).unwrap().is_none());
    for (sector, sectors) in [(0, 0), (SECTORS, 1), (u64::MAX, 2)] {
        let failure = run(&mut *queue, Operation::Read { sector, sectors }).unwrap_err();
        assert_eq!(failure, Failure::OutOfRange);
    }
}

/// Writes, discards and zeroes of two queues are read back, over the past, and nothing of them
/// stays.
#[test]
fn what_is_written_to_a_look_is_thrown_away() {
    each_use(|bench| {
        let before = files(bench);
        for engine in ENGINES {
            bench.place.options.engine = engine;
            for lsn in (BASE..=NEWEST).step_by(17) {
                let look = bench.scratch(0, Point::Lsn(lsn));
                assert!(!look.capabilities().read_only && look.is_unsafe());
                let mut queues = [(); 2].map(|()| look.open_queue().unwrap());
                let (mut random, mut state) = (Random(lsn), bench.states[&lsn][0].clone());
                for _ in 0..60 {
                    let queue = &mut *queues[random.below(2) as usize];
                    assert!(
                        run(queue, modify(&mut random, &mut state))
                            .unwrap()
                            .is_none()
                    );
                    if random.one_in(8) {
                        run(queue, Operation::Flush).unwrap();
                    }
                }
                check_look(&mut random, &look, &state, &format!("LSN {lsn}"));
                let failure = run(&mut *queues[0], put_in(SECTORS, 1, 1)).unwrap_err();
                assert_eq!(failure, Failure::OutOfRange);
                let plain = bench.look(0, Point::Lsn(lsn)).unwrap();
                bench.check_look(&plain, 0, lsn, "beside it");
            }
        }
        assert!(files(bench) == before);
    });
}

/// A write for which the scratch file has no space fails as a whole, and all other requests go on.
#[test]
fn a_write_that_finds_no_space_changes_nothing() {
    let Some(small) = MemoryFs::tmpfs("size=1m") else {
        return;
    };
    let mut bench = disks(false);
    let full = (1 << 20) - (64 << 10);
    std::fs::write(small.path().join("filler"), vec![1; full]).unwrap();
    for engine in ENGINES {
        bench.place.options.engine = engine;
        let path = small.path().join("scratch");
        let mut options = std::fs::File::options();
        let scratch = options.read(true).write(true).create_new(true).open(&path);
        std::fs::remove_file(&path).unwrap();
        let at = Point::Lsn(BASE);
        let look = bench
            .place
            .look(&bench.place.disk, at, Some(scratch.unwrap()))
            .unwrap();
        let mut queue = look.open_queue().unwrap();
        let mut state = bench.states[&BASE][0].clone();
        let mut write = |sector: u64, byte: u8, sectors: usize| {
            let written = run(&mut *queue, put_in(sector, byte, sectors));
            if written.is_ok() {
                state[sector as usize * 512..][..sectors * 512].fill(byte);
            }
            written.map(drop)
        };
        write(0, 1, 32).unwrap();
        // Half of this write has its space already.
        assert_eq!(write(16, 2, 200), Err(Failure::Io));
        write(8, 3, 16).unwrap();
        check_look(&mut Random(5), &look, &state, "no space");
        // A discard gives space back.
        run(&mut *queue, discard(0, 32)).unwrap();
        run(&mut *queue, put_in(64, 4, 64)).unwrap();
    }
}

/// A byte of the log that the medium has changed is never data.
#[test]
fn damage_below_a_point_is_an_error_of_the_reads_that_need_it() {
    let mut bench = disks(false);
    let mut found = None;
    dump_records(&bench.place.log(), &mut |record| {
        if record.payload_bytes > 0 && !record.in_base && record.disk.ends_with("a") {
            let place = (
                record.lsn,
                record.sector,
                record.segment.to_owned(),
                record.offset,
            );
            found.get_or_insert(place);
        }
    })
    .unwrap();
    let (lsn, sector, segment, offset) = found.unwrap();
    let byte = bench.states[&lsn][0][sector as usize * 512];
    put(&segment, offset + 100, &[!byte]);
    for engine in ENGINES {
        bench.place.options.engine = engine;
        let look = bench.look(0, Point::Lsn(lsn)).unwrap();
        let mut queue = look.open_queue().unwrap();
        let sectors = 1;
        let failed = run(&mut *queue, Operation::Read { sector, sectors });
        assert_eq!(failed.unwrap_err(), Failure::Io);
        // The base image has what was there before, and the other disk is not affected.
        for (disk, lsn) in [(0, lsn - 1), (1, NEWEST)] {
            let look = bench.look(disk, Point::Lsn(lsn)).unwrap();
            bench.check_look(&look, disk, lsn, "not affected");
        }
    }
    // The point is not restored, and leaves nothing; the one before is.
    let kind = refused(bench.as_of(0, Point::Lsn(lsn)), "damaged at byte");
    assert_eq!(kind, ErrorKind::Damaged);
    assert!(!bench.place.at("restored").exists());
    let before = bench.as_of(0, Point::Lsn(lsn - 1)).unwrap();
    assert!(before == bench.states[&(lsn - 1)][0]);
}

/// A clone is a disk of its own: it has the state of the point, takes writes, and the other disk
/// stays as it is. The newest state is that of a restore in place.
#[test]
fn a_clone_of_any_point_is_a_disk_of_its_own() {
    let mut bench = disks(false);
    bench.back(0, NEWEST - 40);
    let before = files(&bench);
    let newest = bench.newest;
    let points = [BASE, NEWEST - 20, NEWEST, newest].map(|lsn| (Some(Point::Lsn(lsn)), lsn));
    for (number, (at, lsn)) in points.into_iter().chain([(None, newest)]).enumerate() {
        let place = &bench.place;
        let [new, log, left] =
            ["", "-log", ".walvisor-part"].map(|end| place.at(&format!("new-{number}{end}")));
        // What an interrupted clone left.
        std::fs::write(&left, vec![9; 1 << 20]).unwrap();
        let clone = || {
            let (options, none) = (&place.options, &mut |_, _| {});
            clone_disk(&place.source(&place.disk, at), &new, &log, options, none)
        };
        let done = clone().unwrap();
        assert!(done.size == BYTES as u64 && done.copied <= done.size && !left.exists());
        let mut state = bench.states[&lsn][0].clone();
        let store = Store::open(&log, &[DiskOptions::new(&new)], &place.options).unwrap();
        let mut queue = port(&store, 0);
        assert!(
            read(&mut queue, 0, SECTORS as u32)[..] == state,
            "LSN {lsn}"
        );
        run(&mut queue, modify(&mut Random(9), &mut state)).unwrap();
        drop(queue);
        store.close().unwrap();
        assert!(std::fs::read(&new).unwrap() == state);
        // What exists is not replaced.
        assert_eq!(refused(clone(), ""), ErrorKind::AlreadyExists);
    }
    assert!(files(&bench) == before);
}

/// What changed between any two points is what the records between them touched, sector by sector.
#[test]
fn changes_are_what_the_records_touched() {
    let bench = disks(false);
    let changes = |disk: usize, from: u64, to: Option<u64>| {
        let (disk, to) = (&bench.place.disks()[disk], to.map(Point::Lsn));
        bench.place.changes(disk, Point::Lsn(from), to)
    };
    for disk in 0..2 {
        let pairs = (BASE..=NEWEST).flat_map(|from| {
            let to = (from..=NEWEST).step_by(1 + (from as usize * 7) % 23);
            to.map(move |to| (from, Some(to))).chain([(from, None)])
        });
        for (from, to) in pairs {
            let found = changes(disk, from, to).unwrap();
            let to = to.unwrap_or(NEWEST);
            let ends = (found.size, found.from_lsn, found.to_lsn);
            assert_eq!(ends, (BYTES as u64, from, to));
            let mut model = vec![None; SECTORS as usize];
            let records = bench.touched.range(from + 1..to + 1);
            for (_, (_, sectors, now)) in records.filter(|(_, record)| record.0 == disk) {
                model[sectors.start as usize..sectors.end as usize].fill(Some(*now));
            }
            let mut last: Option<ChangedRange> = None;
            for range in found.ranges {
                if let Some(last) = last {
                    let end = last.offset + last.len;
                    assert!(end < range.offset || end == range.offset && last.now != range.now);
                }
                let first = (range.offset / 512) as usize;
                let sectors = &mut model[first..first + (range.len / 512) as usize];
                assert!(range.len > 0 && sectors.iter().all(|now| *now == Some(range.now)));
                sectors.fill(None);
                last = Some(range);
            }
            assert!(model.iter().all(Option::is_none), "{from}..{to}");
        }
    }
    let kind = refused(changes(0, BASE + 5, Some(BASE + 4)), "");
    assert_eq!(kind, ErrorKind::InvalidInput);
    assert_eq!(
        refused(changes(0, BASE, Some(NEWEST + 1)), ""),
        ErrorKind::NotFound
    );
}

/// What a restore in place undid has changed, too. What differs has changed, and nothing has that
/// is said to be zero and is not.
#[test]
fn changes_over_a_restore_miss_nothing() {
    let mut bench = Bench::new(Retention::All);
    bench.work(30);
    let done = bench.back(0, 12);
    bench.work(10);
    let changes = |from, to| {
        let to = Some(Point::Lsn(to));
        bench
            .place
            .changes(&bench.place.disk, Point::Lsn(from), to)
            .unwrap()
            .ranges
    };
    let points: Vec<u64> = bench.states.keys().copied().step_by(3).collect();
    for &from in &points {
        for &to in points.iter().filter(|to| **to >= from) {
            let (then, now) = (&bench.states[&from][0], &bench.states[&to][0]);
            let mut changed = vec![false; SECTORS as usize];
            for range in changes(from, to) {
                let bytes = range.offset as usize..(range.offset + range.len) as usize;
                changed[bytes.start / 512..bytes.end / 512].fill(true);
                assert!(
                    range.now == Allocation::Data || all(&now[bytes], 0),
                    "{from} to {to}"
                );
            }
            for (sector, changed) in changed.into_iter().enumerate() {
                let range = sector * 512..(sector + 1) * 512;
                let differs = then[range.clone()] != now[range];
                assert!(changed || !differs, "{from} to {to}: sector {sector}");
            }
        }
    }
    assert!(changes(12, done.lsn.unwrap()).is_empty());
    assert!(changes(done.from_lsn, done.from_lsn).is_empty());
}

/// The bitmap that doors show: of a disk in use before and after a kill, and of a look at the past.
/// The base images have passed the oldest snapshot.
#[test]
fn what_has_changed_since_each_snapshot_is_told_exactly() {
    let mut bench = Bench::new(Retention::Nothing);
    bench.open();
    let mut since = Vec::new();
    for name in ["a", "b", "c"] {
        bench.change(40);
        since.push(bench.disk(0).snapshot(name.parse().unwrap()).unwrap().lsn);
        if name == "a" {
            bench.change(40);
            bench.disk(0).checkpoint().unwrap();
        }
    }
    let check = |bench: &Bench, disk: &dyn Tracked, until: u64| {
        let points: Vec<_> = disk
            .past_points()
            .iter()
            .map(|point| point.number)
            .collect();
        assert_eq!(points, since);
        for lsn in &since {
            let mut wanted = vec![false; SECTORS as usize];
            let records = bench
                .touched
                .iter()
                .filter(|(at, _)| (lsn + 1..=until).contains(at));
            for (_, (_, sectors, _)) in records.filter(|(_, record)| record.0 == 0) {
                wanted[sectors.start as usize..sectors.end as usize].fill(true);
            }
            let mut told = Vec::new();
            while told.len() < SECTORS as usize {
                let at = told.len() as u64;
                let changes = disk.changes(*lsn, at, SECTORS - at, 7).unwrap();
                assert!((1..=7).contains(&changes.len()));
                for change in changes {
                    assert!(change.sectors > 0);
                    told.extend((0..change.sectors).map(|_| change.changed));
                }
            }
            assert!(told == wanted, "since LSN {lsn}");
        }
    };
    bench.change(40);
    check(&bench, bench.disk(0), bench.newest);
    assert!(bench.disk(0).changes(1, 0, 8, 1).is_err());
    bench.close();
    let look = bench.look(0, snapshot("c")).unwrap();
    check(&bench, &look, since[2]);
    drop(look);
    bench.open();
    check(&bench, bench.disk(0), bench.newest);
    flush(&mut port(bench.store(), 0));
}

/// It fails no write, and holds up none for long.
#[test]
fn a_log_that_another_process_reads_gives_way() {
    for engine in ENGINES {
        let place = TestDisk::made(&["disk.img"], SIZE, small(engine));
        let store = place.open();
        let disk = &store.disks()[0];
        commit(disk, 0, 1, 8);
        let hold = disk.hold_to_read().unwrap();
        let log = place.log();
        let held = || ReadableLog::held(&log, hold.newest_lsn());
        let report = inspect(&place.disk, held()).unwrap();
        assert!(report.is_clean() && report.log.unwrap().last_lsn == 1);
        let changes = disk_changes(&place.disk, held(), Point::Lsn(0), None, None).unwrap();
        assert_eq!((changes.to_lsn, changes.ranges.len()), (1, 1));
        assert!(hold.is_kept());
        // More than the log has room for, by several readers.
        let others: Vec<_> = (0..3).map(|_| disk.hold_to_read().unwrap()).collect();
        for round in 0..96 {
            commit(disk, round * 128, 2, 128);
        }
        assert!(!hold.is_kept() && !others.iter().any(ReadHold::is_kept));
        // What changes the files does not wait.
        let hold = disk.hold_to_read().unwrap();
        disk.checkpoint().unwrap();
        assert!(!hold.is_kept());
        let hold = disk.hold_to_read().unwrap();
        disk.grow(2 * SIZE).unwrap();
        assert!(!hold.is_kept());
        let _hold = disk.hold_to_read().unwrap();
        store.close().unwrap();
        assert_eq!(place.report().records, 0);
    }
}

/// With `on_full=pause` a write waits for a look. What is asked of the log meanwhile fails alone.
#[test]
fn orders_to_a_full_log_fail_no_write_that_waits() {
    for engine in ENGINES {
        let options = StoreOptions {
            on_full: FullLogPolicy::Pause,
            ..small(engine)
        };
        let place = TestDisk::made(&["disk.img"], SIZE, options);
        let store = place.open();
        let disk = &store.disks()[0];
        commit(disk, 0, 1, 8);
        let look = disk.look(Point::Newest, None).unwrap();
        thread::scope(|scope| {
            // More than the log has room for.
            let writes = || (0..96).for_each(|round| commit(disk, round * 128, 2, 128));
            let writer = scope.spawn(writes);
            wait_until("the log is full", || disk.condition().name() == "no_space");
            // Each makes a write durable that waits, as long as the log's last segment has room.
            let (mut number, mut refused) = (0, 0);
            while refused < 3 && !writer.is_finished() {
                number += 1;
                let name = format!("s{number}").parse().unwrap();
                refused += u32::from(disk.snapshot(name).is_err());
                refused += u32::from(disk.look(Point::Newest, None).is_err());
            }
            assert!(!writer.is_finished(), "a write failed");
            drop(look);
            writer.join().expect("a write failed");
        });
        store.close().unwrap();
    }
}
