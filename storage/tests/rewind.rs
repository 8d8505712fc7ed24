//! Disks that are restored in place: what they are then, what can be undone, and when it can't be any more.

mod support;

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::time::Duration;

use support::{Random, copy_image, copy_log, fill, flush, modify, read, wait_all, write};
use walvisor_storage::{
    Allocation, Backend, BackendQueue, Changed, DiskOptions, ErrorKind, LogRecord, Operation,
    Point, Port, Result, Retain, Rewound, Store, StoreOptions, clone_disk, create_disk,
    discard_log, disk_changes, dump_records, export_disk, inspect, leave_log, move_to_log,
    resize_disk, restore_disk, rewind_disk,
};

const NAMES: [&str; 2] = ["a", "b"];
const SECTORS: u64 = 256;

/// Runs a request of one of the ports to its end. The others are served too: one may be leading a group.
fn run_beside(ports: &mut [Port], which: usize, operation: Operation) {
    ports[which].submit(1, operation);
    ports[which].kick();
    let mut all: Vec<_> = ports.iter_mut().collect();
    wait_all(&mut all, 1).remove(0).result.unwrap();
}

/// Two disks of one log, and what they were as of each LSN.
struct Bench {
    dir: tempfile::TempDir,
    options: StoreOptions,
    random: Random,
    /// As of the newest LSN: that of a record, or of a restore in place.
    newest: u64,
    states: BTreeMap<u64, [Vec<u8>; 2]>,
}

impl Bench {
    fn new(retain: Retain) -> Self {
        Self::with(StoreOptions {
            segment_size: 64 << 10,
            max_segments: 64,
            retain: Some(retain),
            ..StoreOptions::default()
        })
    }

    fn with(options: StoreOptions) -> Self {
        let bench = Self {
            dir: tempfile::tempdir().unwrap(),
            options,
            random: Random(7),
            newest: 0,
            states: [(0, [(); 2].map(|()| vec![0; (SECTORS * 512) as usize]))].into(),
        };
        for disk in 0..2 {
            let (log, options) = (bench.log(), &bench.options);
            create_disk(&bench.disk(disk), SECTORS * 512, &log, options).unwrap();
        }
        bench
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("log")
    }

    fn disk(&self, number: usize) -> PathBuf {
        self.dir.path().join(NAMES[number])
    }

    fn open(&self) -> Store {
        let disks = [0, 1].map(|disk| DiskOptions::new(self.disk(disk)));
        let options = StoreOptions {
            retain: None,
            ..self.options
        };
        Store::open(&self.log(), &disks, &options).unwrap()
    }

    /// Makes random records of either disk, all durable at the end.
    fn change(&mut self, store: &Store, count: usize) {
        let mut ports: Vec<_> = store
            .disks()
            .iter()
            .map(|disk| disk.open_port().unwrap())
            .collect();
        for _ in 0..count {
            let mut state = self.states[&self.newest].clone();
            let disk = self.random.below(2) as usize;
            let operation = modify(&mut self.random, &mut state[disk]);
            run_beside(&mut ports, disk, operation);
            self.newest += 1;
            self.states.insert(self.newest, state);
        }
        (0..2).for_each(|disk| run_beside(&mut ports, disk, Operation::Flush));
    }

    /// Opens the log, makes records, and closes it.
    fn work(&mut self, count: usize) {
        let store = self.open();
        self.change(&store, count);
        store.close().unwrap();
    }

    /// Works, and is killed: the log and the images as they are while the store is open take the places of these.
    fn work_killed(&mut self, count: usize) {
        let store = self.open();
        self.change(&store, count);
        let copy = tempfile::tempdir().unwrap();
        std::fs::create_dir(copy.path().join("log")).unwrap();
        copy_log(&self.log(), &copy.path().join("log"));
        for name in NAMES {
            copy_image(&self.dir.path().join(name), &copy.path().join(name));
        }
        drop(store);
        self.dir = copy;
    }

    fn rewind(&mut self, disk: usize, at: Point) -> Result<Rewound> {
        let done = rewind_disk(&self.disk(disk), &self.log(), at)?;
        assert_eq!(done.from_lsn, self.newest);
        if let Some(lsn) = done.lsn {
            assert_eq!(lsn, self.newest + 1);
            let mut state = self.states[&self.newest].clone();
            state[disk] = self.states[&done.to_lsn][disk].clone();
            self.newest = lsn;
            self.states.insert(lsn, state);
        }
        Ok(done)
    }

    fn back(&mut self, disk: usize, lsn: u64) -> Rewound {
        let done = self.rewind(disk, Point::Lsn(lsn)).unwrap();
        assert_eq!(done.to_lsn, lsn);
        done
    }

    fn restored(&self, disk: usize, at: Point) -> Result<Vec<u8>> {
        let new = self.dir.path().join("new");
        restore_disk(
            &self.disk(disk),
            &self.log(),
            at,
            &new,
            None,
            &mut |_, _| {},
        )?;
        let bytes = std::fs::read(&new).unwrap();
        std::fs::remove_file(&new).unwrap();
        Ok(bytes)
    }

    fn exported(&self, disk: usize) -> Vec<u8> {
        let new = self.dir.path().join("new");
        export_disk(
            &self.disk(disk),
            &self.log(),
            &new,
            false,
            None,
            &mut |_, _| {},
        )
        .unwrap();
        let bytes = std::fs::read(&new).unwrap();
        std::fs::remove_file(&new).unwrap();
        bytes
    }

    fn horizon(&self) -> u64 {
        let report = inspect(&self.disk(0), &self.log()).unwrap().log.unwrap();
        assert_eq!(report.history.horizon.lsn, report.checkpoint_lsn);
        report.checkpoint_lsn
    }

    /// Every state since the horizon comes back, none before it, and the disks are as they should be now.
    fn check(&self) {
        self.check_some(1);
    }

    fn check_some(&self, step: usize) {
        let horizon = self.horizon();
        let now = &self.states[&self.newest];
        for disk in 0..2 {
            assert!(self.exported(disk) == now[disk], "disk {disk} now");
            for (&lsn, state) in self.states.range(horizon..).step_by(step) {
                let told = format!("disk {disk} as of LSN {lsn}, the horizon is {horizon}");
                let bytes = self.restored(disk, Point::Lsn(lsn));
                assert!(bytes.unwrap() == state[disk], "{told}");
            }
            if let Some((&lsn, _)) = self.states.range(..horizon).next_back() {
                let error = self.restored(disk, Point::Lsn(lsn)).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
            }
        }
        let store = self.open();
        for (disk, state) in store.disks().iter().zip(now) {
            let bytes = read(&mut disk.open_port().unwrap(), 0, SECTORS as u32);
            assert!(bytes[..] == state[..]);
        }
        store.close().unwrap();
    }
}

/// A restore, its undo, a restore of what was restored, and back to the base image: other disks stay as they are, and work
/// goes on in between.
#[test]
fn a_disk_goes_back_and_forth_and_the_other_stays() {
    for killed in [false, true] {
        let mut bench = Bench::new(Retain::All);
        let work = |bench: &mut Bench, count| match killed {
            true => bench.work_killed(count),
            false => bench.work(count),
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
        // Into the middle of what the first restore undid, of the other disk, and twice with nothing between.
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
    let mut bench = Bench::new(Retain::All);
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
    let mut bench = Bench::new(Retain::All);
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
    let mut bench = Bench::new(Retain::All);
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

/// The base images go past a restore as a whole, however the log goes round, and never stop where they would have what it
/// undid.
#[test]
fn folds_pass_a_restore_as_a_whole() {
    for (retain, segments) in [(Retain::Bytes(256 << 10), 12), (Retain::All, 8)] {
        let mut bench = Bench::with(StoreOptions {
            segment_size: 64 << 10,
            max_segments: segments,
            retain: Some(retain),
            ..StoreOptions::default()
        });
        let mut passed = 0;
        let mut points = Vec::new();
        // How far a log that is closed has been folded depends on its threads.
        for round in 0.. {
            if round >= 12 && passed > 2 {
                break;
            }
            assert!(round < 200, "{passed} restores were passed");
            bench.work(50);
            let horizon = bench.horizon();
            let split = |&&(to, at): &&(u64, u64)| to < horizon && horizon < at;
            assert_eq!(points.iter().find(split), None, "{horizon}");
            passed += points.iter().filter(|(_, at)| *at <= horizon).count();
            points.retain(|(_, at)| *at > horizon);
            if bench.newest - horizon < 20 {
                continue;
            }
            let back = 1 + bench.random.below(60);
            let to = bench.newest.saturating_sub(back).max(horizon);
            let done = bench.back(round % 2, to);
            points.extend(done.lsn.map(|lsn| (to, lsn)));
            bench.check_some(17);
        }
    }
}

/// A checkpoint of everything ends the history, with its restores, and the slot is of the older version again.
#[test]
fn a_checkpoint_drops_the_restores() {
    let version = |bench: &Bench| {
        let control = std::fs::read(bench.log().join("control")).unwrap();
        [control[8], control[65536 + 8]]
    };
    let mut bench = Bench::new(Retain::All);
    bench.work(30);
    assert_eq!(version(&bench), [2, 2]);
    bench.back(0, 10);
    // Both slots know it.
    assert_eq!(version(&bench), [3, 3]);
    for count in [0, 10] {
        let store = bench.open();
        bench.change(&store, count);
        store.disks()[0].checkpoint().unwrap();
        store.close().unwrap();
        assert!(version(&bench).contains(&2));
        assert_eq!(bench.horizon(), bench.newest);
        bench.check();
        for disk in 0..2 {
            let image = std::fs::read(bench.disk(disk)).unwrap();
            assert!(image == bench.states[&bench.newest][disk]);
        }
        bench.work(10);
        bench.check();
        bench.back(1, bench.newest - 5);
    }
}

/// A log that keeps nothing on purpose: after a kill the disk is restored, and the next opening copies that.
#[test]
fn a_log_without_history_is_restored_after_a_kill() {
    let mut bench = Bench::new(Retain::Nothing);
    bench.work_killed(40);
    let done = bench.back(0, 12);
    bench.back(0, done.from_lsn);
    bench.back(0, 12);
    assert!(bench.exported(0) == bench.states[&12][0]);
    bench.work(0);
    assert_eq!(bench.horizon(), bench.newest);
    bench.check();
    // With room for no more than a part of it to be copied.
    bench.options.close_time = Some(Duration::ZERO);
    bench.work_killed(30);
    bench.back(1, bench.horizon());
    bench.work_killed(3);
    // A copy may have begun, so only the newest state is certain to be there.
    for disk in 0..2 {
        assert!(bench.exported(disk) == bench.states[&bench.newest][disk]);
    }
    bench.work(3);
    bench.work(0);
    for disk in 0..2 {
        assert!(bench.exported(disk) == bench.states[&bench.newest][disk]);
    }
}

#[test]
fn a_snapshot_is_a_point_and_stays_one() {
    let mut bench = Bench::new(Retain::Nothing);
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
    let points = Backend::past_points(&store.disks()[0]);
    let names: Vec<_> = points.iter().map(|point| point.name.as_str()).collect();
    assert_eq!(names, ["early", "after"]);
    let points = Backend::past_points(&store.disks()[1]);
    assert_eq!(points.len(), 3);
    bench.change(&store, 10);
    let changed = Backend::changes(&store.disks()[0], shown.lsn, 0, SECTORS, 1000).unwrap();
    let known = disk_touched(&bench, shown.lsn);
    let mut at = 0;
    for change in changed {
        for sector in at..at + change.sectors {
            assert_eq!(change.changed, known[sector as usize], "sector {sector}");
        }
        at += change.sectors;
    }
    assert!(Backend::changes(&store.disks()[0], 40, 0, SECTORS, 1000).is_err());
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

/// What a restore undid has changed, too, and nothing else has.
#[test]
fn changes_over_a_restore_are_exact() {
    let mut bench = Bench::new(Retain::All);
    bench.work(30);
    let done = bench.back(0, 12);
    bench.work(10);
    let changes = |from, to| {
        let to = Some(Point::Lsn(to));
        disk_changes(&bench.disk(0), &bench.log(), Point::Lsn(from), to, None).unwrap()
    };
    let points: Vec<u64> = bench.states.keys().copied().step_by(3).collect();
    for &from in &points {
        for &to in points.iter().filter(|to| **to >= from) {
            let (then, now) = (&bench.states[&from][0], &bench.states[&to][0]);
            let mut changed = vec![false; SECTORS as usize];
            for Changed {
                offset,
                len,
                now: what,
            } in changes(from, to).ranges
            {
                let range = offset as usize..(offset + len) as usize;
                changed[range.start / 512..range.end / 512].fill(true);
                let zero = now[range].iter().all(|&byte| byte == 0);
                assert!(what == Allocation::Data || zero, "{from} to {to}: {offset}");
            }
            for (sector, changed) in changed.into_iter().enumerate() {
                let range = sector * 512..(sector + 1) * 512;
                let differs = then[range.clone()] != now[range];
                assert!(changed || !differs, "{from} to {to}: sector {sector}");
            }
        }
    }
    assert!(changes(12, done.lsn.unwrap()).ranges.is_empty());
    assert!(changes(done.from_lsn, done.from_lsn).ranges.is_empty());
}

/// Records that were undone are told as such.
#[test]
fn a_dump_tells_what_was_undone() {
    let mut bench = Bench::new(Retain::All);
    bench.work(30);
    bench.back(0, 12);
    let mut undone = Vec::new();
    dump_records(&bench.log(), &mut |record| {
        assert!(!record.in_base);
        let wanted = record.disk.ends_with("a") && record.lsn > 12;
        assert_eq!(record.undone, wanted, "{}", record.lsn);
        undone.extend(record.undone.then_some(record.lsn));
    })
    .unwrap();
    assert!(!undone.is_empty());
}

#[test]
fn a_clone_is_of_the_restored_disk() {
    let mut bench = Bench::new(Retain::All);
    bench.work(30);
    bench.back(0, 12);
    for (at, lsn) in [(None, 31), (Some(Point::Lsn(25)), 25)] {
        let [new, log] = ["clone", "clone-log"].map(|name| bench.dir.path().join(name));
        let options = StoreOptions::default();
        let progress = &mut |_, _| {};
        clone_disk(
            &bench.disk(0),
            &bench.log(),
            at,
            &new,
            &log,
            &options,
            progress,
        )
        .unwrap();
        assert!(std::fs::read(&new).unwrap() == bench.states[&lsn][0]);
        std::fs::remove_file(new).unwrap();
        std::fs::remove_dir_all(log).unwrap();
    }
}

/// A restored disk grows, but is not shrunk, given another log or taken out of its own as long as its history may come back.
#[test]
fn a_restored_disk_is_not_shrunk_and_does_not_leave() {
    let mut bench = Bench::new(Retain::All);
    bench.work(30);
    // To the base image: no record counts.
    let done = bench.back(0, 0);
    let shrink = || resize_disk(&bench.disk(0), SECTORS * 256, &bench.log(), true).map(drop);
    let leave = || leave_log(&bench.disk(0), &bench.log()).map(drop);
    let other = bench.dir.path().join("other");
    let to_other = || {
        let options = StoreOptions::default();
        move_to_log(&bench.disk(0), &bench.log(), &other, &options).map(drop)
    };
    for refused in [shrink(), leave(), to_other()] {
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("walvisor disk checkpoint"), "{error}");
    }
    bench.check();
    resize_disk(&bench.disk(0), SECTORS * 1024, &bench.log(), false).unwrap();
    let bytes = bench.restored(0, Point::Lsn(done.from_lsn)).unwrap();
    assert!(bytes[..SECTORS as usize * 512] == bench.states[&done.from_lsn][0]);
    let store = bench.open();
    store.disks()[0].checkpoint().unwrap();
    store.close().unwrap();
    shrink().unwrap();
    leave().unwrap();
    assert!(
        std::fs::read(bench.disk(0))
            .unwrap()
            .iter()
            .all(|&byte| byte == 0)
    );
}

/// A disk that leaves a log in use takes what it is now with it; what was undone does not come back with it.
#[test]
fn a_restored_disk_leaves_a_log_in_use_and_comes_back() {
    for to in [0, 12] {
        let mut bench = Bench::new(Retain::Nothing);
        bench.work_killed(30);
        bench.back(0, to);
        let options = DiskOptions::new(bench.disk(0));
        let mut store = bench.open();
        store.remove_disk(&bench.disk(0)).unwrap();
        let image = std::fs::read(bench.disk(0)).unwrap();
        assert!(image == bench.states[&to][0]);
        store.add_disk(&options).unwrap();
        store.close().unwrap();
        bench.check();
    }
    // A log that keeps history keeps the disk's, too.
    let mut bench = Bench::new(Retain::All);
    bench.work(30);
    let done = bench.back(0, 12);
    let mut store = bench.open();
    store.remove_disk(&bench.disk(0)).unwrap();
    store.close().unwrap();
    bench.check();
    bench.back(0, done.from_lsn);
    bench.check();
}

#[test]
fn what_is_discarded_does_not_come_back() {
    let mut bench = Bench::new(Retain::All);
    bench.work(30);
    bench.back(0, 12);
    let discarded = discard_log(&bench.disk(0), &bench.log()).unwrap();
    assert!(discarded.records.unwrap() > 0);
    let error = rewind_disk(&bench.disk(0), &bench.log(), Point::Lsn(20)).unwrap_err();
    assert!(error.to_string().contains("no history"), "{error}");
    assert!(bench.exported(0).iter().all(|&byte| byte == 0));
    assert!(bench.exported(1) == bench.states[&bench.newest][1]);
    let store = bench.open();
    let mut port = store.disks()[0].open_port().unwrap();
    assert!(
        read(&mut port, 0, SECTORS as u32)
            .iter()
            .all(|&byte| byte == 0)
    );
    write(&mut port, 8, 7, 8);
    drop(port);
    store.disks()[0].checkpoint().unwrap();
    store.close().unwrap();
    let image = std::fs::read(bench.disk(0)).unwrap();
    assert!(image[8 * 512..16 * 512] == fill(7, 8)[..]);
    assert!(std::fs::read(bench.disk(1)).unwrap() == bench.states[&bench.newest][1]);
}

/// A disk without a record that counts still has its history: another image is not taken in its place.
#[test]
fn another_image_is_not_taken_for_a_restored_disk() {
    let mut bench = Bench::new(Retain::All);
    bench.work(30);
    bench.back(0, 0);
    std::fs::remove_file(bench.disk(0)).unwrap();
    std::fs::write(bench.disk(0), vec![1; SECTORS as usize * 512]).unwrap();
    let disks = [DiskOptions::new(bench.disk(0))];
    let error = Store::open(&bench.log(), &disks, &bench.options)
        .err()
        .unwrap();
    assert_eq!(error.kind(), ErrorKind::WrongLog, "{error}");
    let error = rewind_disk(&bench.disk(0), &bench.log(), Point::Lsn(20)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WrongLog, "{error}");
}

/// Of the control file's two slots, either one knows the restore; without both the log is refused.
#[test]
fn damage_in_the_control_file_does_not_bring_back_what_was_undone() {
    let mut bench = Bench::new(Retain::All);
    bench.work(30);
    bench.back(0, 12);
    let control = bench.log().join("control");
    let good = std::fs::read(&control).unwrap();
    let flip = |slot: u64, at: u64| {
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .open(&control)
            .unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, slot * 65536 + at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], slot * 65536 + at)
            .unwrap();
    };
    // In the rewind's entry, which follows two disks.
    let at = 96 + 2 * 624 + 16 + 8;
    for slot in [0, 1] {
        for byte in [0, 8, 16, 24] {
            flip(slot, at + byte);
            assert!(bench.exported(0) == bench.states[&12][0], "slot {slot}");
            std::fs::write(&control, &good).unwrap();
        }
    }
    flip(0, at);
    flip(1, at);
    let error = rewind_disk(&bench.disk(0), &bench.log(), Point::Lsn(5)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Damaged, "{error}");
    std::fs::write(&control, &good).unwrap();
    bench.check();
}

/// Bytes of a record that rotted are an error of what needs them: not of the disk once they are undone, and again of a point
/// that has them.
#[test]
fn rot_in_what_was_undone_is_rot_only_there() {
    let bench = Bench::new(Retain::All);
    let store = bench.open();
    let mut port = store.disks()[0].open_port().unwrap();
    for byte in [1, 2] {
        for sector in (0..SECTORS).step_by(16) {
            write(&mut port, sector, byte, 16);
        }
    }
    flush(&mut port);
    // A later header tells that all before it was durable: a damaged end could be one that was never acknowledged.
    write(&mut port, 0, 2, 16);
    flush(&mut port);
    drop(port);
    store.close().unwrap();
    let mut place = None;
    dump_records(&bench.log(), &mut |record| {
        if record.lsn == 20 {
            place = Some((record.segment.to_owned(), record.offset));
        }
    })
    .unwrap();
    let (segment, offset) = place.unwrap();
    let file = std::fs::File::options().write(true).open(segment).unwrap();
    file.write_all_at(&[99], offset + 5).unwrap();
    assert!(bench.restored(0, Point::Newest).is_err());
    let done = rewind_disk(&bench.disk(0), &bench.log(), Point::Lsn(16)).unwrap();
    assert_eq!((done.undone, done.from_lsn), (17, 33));
    assert!(bench.exported(0) == vec![1; SECTORS as usize * 512]);
    assert!(
        inspect(&bench.disk(0), &bench.log())
            .unwrap()
            .log
            .unwrap()
            .damaged
            .is_empty()
    );
    assert!(bench.restored(0, Point::Lsn(33)).is_err());
    // Nothing needs it to end the history.
    let store = bench.open();
    store.disks()[0].checkpoint().unwrap();
    store.close().unwrap();
    assert!(std::fs::read(bench.disk(0)).unwrap() == vec![1; SECTORS as usize * 512]);
}
