//! Looks at a disk while it is in use: each shows the disk as of its point, whatever is written and
//! copied meanwhile.


use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::support::{Random, TestDisk, check_look, fill, flush, modify, read, run, wait_until};
use walvisor_storage::{
    Backend, DiskOptions, ErrorKind, Look, Operation, Point, Port, Retention, Store, StoreOptions,
    create_disk, scratch_file,
};

const SIZE: u64 = 128 << 10;

fn options(retain: Retention, max_segments: u32) -> StoreOptions {
    StoreOptions {
        segment_size: 256 << 10,
        max_segments,
        retain: Some(retain),
        ..StoreOptions::default()
    }
}

fn open(place: &TestDisk, options: &StoreOptions) -> Store {
    if !place.disk.exists() {
        create_disk(&place.disk, SIZE, &place.log(), options).unwrap();
    }
    Store::open(&place.log(), &[DiskOptions::new(&place.disk)], options).unwrap()
}

/// What a disk was after each of its records, by LSN.
struct Oracle {
    random: Random,
    states: Vec<Vec<u8>>,
}

impl Oracle {
    fn new() -> Self {
        let states = vec![vec![0; SIZE as usize]];
        let random = Random(17);
        Self { random, states }
    }

    fn newest(&self) -> &Vec<u8> {
        self.states.last().unwrap()
    }

    /// Makes so many records, all durable at the end: a look waits for what a port has begun to
    /// write, and nobody serves the port meanwhile.
    fn make(&mut self, port: &mut Port, count: usize) {
        for _ in 0..count {
            let mut state = self.newest().clone();
            run(port, modify(&mut self.random, &mut state)).unwrap();
            self.states.push(state);
            if self.random.below(4) == 0 {
                flush(port);
            }
        }
        flush(port);
    }

    fn check(&mut self, looks: &[(usize, Look)], told: &str) {
        for (lsn, look) in looks {
            check_look(
                &mut self.random,
                look,
                &self.states[*lsn],
                &format!("LSN {lsn}, {told}"),
            );
        }
    }
}

/// Waits until a write and its FLUSH succeed.
fn until_writable(port: &mut Port) {
    let one = |port: &mut Port| {
        let data = fill(7, 8);
        run(port, Operation::Write { sector: 8, data })?;
        run(port, Operation::Flush)
    };
    wait_until("a write that succeeds", || one(port).is_ok());
}

/// Writes until the log is full. Returns how many writes succeeded.
fn fill_up(port: &mut Port) -> u64 {
    let failed = (0..4000).find(|number| {
        let (sector, data) = (number % 32 * 8, fill(9, 8));
        run(port, Operation::Write { sector, data })
            .and_then(|_| run(port, Operation::Flush))
            .is_err()
    });
    failed.expect("the log never became full")
}

#[test]
fn ten_looks_at_once_show_their_points_beside_a_writer() {
    for retain in [Retention::All, Retention::Nothing] {
        let place = TestDisk::empty();
        let store = open(&place, &options(retain, 64));
        let disk = &store.disks()[0];
        let mut port = disk.open_port().unwrap();
        let mut oracle = Oracle::new();
        oracle.make(&mut port, 300);
        let mut looks = Vec::new();
        for lsn in (0..300).step_by(33) {
            looks.push((lsn, disk.look(Point::Lsn(lsn as u64), None).unwrap()));
            oracle.make(&mut port, 5);
        }
        assert_eq!(looks.len(), 10);
        let newest = oracle.states.len() - 1;
        looks.push((newest, disk.look(Point::Newest, None).unwrap()));
        oracle.check(&looks, "at once");
        oracle.make(&mut port, 300);
        oracle.check(&looks, "after more writes");
        // What would change the base image is refused.
        let error = disk.checkpoint().unwrap_err().to_string();
        assert!(error.contains("a look at a disk needs the log"), "{error}");
        oracle.check(&looks, "after a checkpoint");
        let folded = |store: &Store| store.log_counters().checkpoints;
        let before = folded(&store);
        assert_eq!(before, 0, "the base image has changed");

        // The first that is dropped leaves the others what they need.
        looks.remove(0);
        oracle.make(&mut port, 100);
        oracle.check(&looks, "after one is gone");
        looks.clear();
        // The log goes round.
        oracle.make(&mut port, 4000);
        assert!(folded(&store) > 0);
        let error = disk.look(Point::Lsn(33), None).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        let newest = oracle.states.len() - 1;
        for lsn in [newest, newest - 20] {
            if let Ok(look) = disk.look(Point::Lsn(lsn as u64), None) {
                oracle.check(&[(lsn, look)], "at the end");
            }
        }
        let look = disk.look(Point::Newest, None).unwrap();
        oracle.check(&[(newest, look)], "the newest");
        drop(port);
        disk.checkpoint().unwrap();
        store.close().unwrap();
        assert!(std::fs::read(&place.disk).unwrap() == *oracle.newest());
    }
}

/// The byte of all blocks that record `lsn` writes, and which block.
fn record(lsn: u64) -> (u8, u64) {
    ((lsn % 251) as u8 + 1, lsn * 7 % (SIZE / 4096))
}

/// Whoever writes meanwhile: a look at the newest point has all that had completed, and is the disk
/// after one record.
#[test]
fn a_look_at_the_newest_point_is_one_state() {
    let place = TestDisk::empty();
    let store = open(&place, &options(Retention::All, 64));
    let disk = &store.disks()[0];
    let (made, end) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut port = disk.open_port().unwrap();
            for lsn in 1.. {
                if end.load(Ordering::Relaxed) > 0 {
                    break;
                }
                let (byte, block) = record(lsn);
                let again = |port: &mut Port| {
                    let (sector, data) = (block * 8, fill(byte, 8));
                    run(port, Operation::Write { sector, data }).is_err()
                };
                // While a look is open the log may become full.
                while again(&mut port) {
                    std::thread::yield_now();
                }
                made.store(lsn, Ordering::SeqCst);
            }
        });
        let (mut state, mut at) = (vec![0; SIZE as usize], 0);
        for _ in 0..40 {
            let least = made.load(Ordering::SeqCst);
            let look = disk.look(Point::Newest, None).unwrap();
            let most = made.load(Ordering::SeqCst) + 1;
            let mut queue = look.open_queue().unwrap();
            let seen = read(&mut *queue, 0, (SIZE / 512) as u32);
            let found = loop {
                if at >= least && state[..] == seen[..] {
                    break true;
                }
                if at > most {
                    break false;
                }
                at += 1;
                let (byte, block) = record(at);
                state[block as usize * 4096..][..4096].fill(byte);
            };
            end.fetch_add(u64::from(!found), Ordering::Relaxed);
            assert!(
                found,
                "neither of the states after records {least} to {most}"
            );
        }
        end.store(1, Ordering::Relaxed);
    });
    store.close().unwrap();
}

/// A log that is full of what a look needs refuses writes, and takes them again once the look is
/// dropped.
#[test]
fn writes_fail_while_a_look_needs_the_whole_log() {
    for retain in [Retention::All, Retention::Nothing] {
        let place = TestDisk::empty();
        let store = open(&place, &options(retain, 8));
        let disk = &store.disks()[0];
        let mut port = disk.open_port().unwrap();
        let mut oracle = Oracle::new();
        oracle.make(&mut port, 20);
        let looks = [
            (20, disk.look(Point::Newest, None).unwrap()),
            (11, disk.look(Point::Lsn(11), None).unwrap()),
        ];
        assert!(fill_up(&mut port) > 100);
        wait_until("no_space", || disk.condition().name() == "no_space");
        oracle.check(&looks, "on a full log");
        drop(looks);
        until_writable(&mut port);
        drop(port);
        store.close().unwrap();
    }
}

/// The names in the directory of a log. A segment that is still being made counts as made.
fn names(log: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(log).unwrap();
    let name = |entry: std::fs::DirEntry| entry.file_name().into_string().unwrap();
    let names = entries.map(|entry| name(entry.unwrap()));
    let mut names: Vec<_> = names
        .map(|name| name.trim_end_matches(".new").to_owned())
        .collect();
    names.sort();
    names
}

/// Looks leave nothing behind when their process is killed, and what they held back is copied then.
/// The same goes for a store that is closed before them.
#[test]
fn looks_end_with_their_process_and_their_store() {
    let place = TestDisk::empty();
    let options = options(Retention::Nothing, 64);
    let store = open(&place, &options);
    let disk = store.disks()[0].clone();
    let mut port = disk.open_port().unwrap();
    let mut oracle = Oracle::new();
    oracle.make(&mut port, 50);
    let before = names(&place.log());
    let looks: Vec<_> = (0..4)
        .map(|number| {
            (
                50 - number,
                disk.look(Point::Lsn(50 - number as u64), None).unwrap(),
            )
        })
        .collect();
    let killed = place.crash();
    let mut left = names(&killed.log());
    // The log may have made its next segments meanwhile.
    left.retain(|name| !name.starts_with("segment-") || before.contains(name));
    assert_eq!(left, before);
    let again = open(&killed, &options);
    again.close().unwrap();
    assert!(std::fs::read(&killed.disk).unwrap() == *oracle.newest());

    drop(port);
    store.close().unwrap();
    oracle.check(&looks, "after the close");
    let error = disk.look(Point::Newest, None).err().unwrap().to_string();
    assert!(error.contains("being closed"), "{error}");
    drop((looks, disk));
    // The log kept what the looks needed.
    open(&place, &options).close().unwrap();
    assert!(std::fs::read(&place.disk).unwrap() == *oracle.newest());
}

/// A disk whose log keeps history is exported as it is or was, while it is written.
#[test]
fn an_export_takes_no_history() {
    let place = TestDisk::empty();
    let store = open(&place, &options(Retention::All, 64));
    let disk = &store.disks()[0];
    let mut port = disk.open_port().unwrap();
    let mut oracle = Oracle::new();
    oracle.make(&mut port, 60);
    let path = place.disk.with_extension("export");
    for (at, lsn) in [(None, 60), (Some(Point::Lsn(31)), 31)] {
        let target = std::fs::File::create_new(&path).unwrap();
        let mut passed = 0;
        let mut tell = |at, size| {
            assert!(passed <= at && size == SIZE);
            passed = at;
            true
        };
        let done = match at {
            Some(at) => disk.export_at(at, target, &mut tell).unwrap(),
            None => disk.export(target, &mut tell).unwrap(),
        };
        assert_eq!((done.size, passed), (SIZE, SIZE));
        assert!(std::fs::read(&path).unwrap() == oracle.states[lsn]);
        let full = std::fs::File::options().write(true).open(&path).unwrap();
        let error = disk.export(full, &mut |_, _| true).unwrap_err().to_string();
        assert!(error.contains("not an empty regular file"), "{error}");
        std::fs::remove_file(&path).unwrap();
    }
    let target = std::fs::File::create_new(&path).unwrap();
    let error = disk.export(target, &mut |_, _| false).unwrap_err();
    assert!(error.to_string().contains("it was given up"), "{error}");
    // Nothing was copied to the base image, and nothing is held back any more.
    assert_eq!(store.log_counters().checkpoints, 0);
    oracle.make(&mut port, 4000);
    drop(port);
    store.close().unwrap();
}

/// What is written to a look is seen there alone.
#[test]
fn a_look_with_a_scratch_file_takes_writes() {
    let place = TestDisk::empty();
    let store = open(&place, &options(Retention::All, 64));
    let disk = &store.disks()[0];
    let mut port = disk.open_port().unwrap();
    let mut oracle = Oracle::new();
    oracle.make(&mut port, 40);
    let scratch = || Some(scratch_file().unwrap());
    let looks = [30, 40].map(|lsn| disk.look(Point::Lsn(lsn), scratch()).unwrap());
    let plain = [(30, disk.look(Point::Lsn(30), None).unwrap())];
    for (look, lsn) in looks.iter().zip([30, 40]) {
        let mut state = oracle.states[lsn].clone();
        let mut queue = look.open_queue().unwrap();
        for _ in 0..60 {
            run(&mut *queue, modify(&mut Random(lsn as u64), &mut state)).unwrap();
        }
        drop(queue);
        check_look(&mut oracle.random, look, &state, "scratch");
    }
    oracle.make(&mut port, 10);
    oracle.check(&plain, "beside scratch");
    let newest = disk.look(Point::Newest, None).unwrap();
    oracle.check(&[(50, newest)], "the disk itself");
    drop((looks, plain, port));
    store.close().unwrap();
}

/// Looks at snapshots, at times, and at points that are not there; a disk that has grown, and one
/// that has left.
#[test]
fn points_are_found_and_refused_as_for_a_disk_that_is_not_in_use() {
    let place = TestDisk::empty();
    let mut store = open(&place, &options(Retention::All, 64));
    let disk = store.disks()[0].clone();
    let empty = disk.look(Point::Newest, None).unwrap();
    let mut oracle = Oracle::new();
    oracle.check(&[(0, empty)], "empty");
    let mut port = disk.open_port().unwrap();
    oracle.make(&mut port, 10);
    let name = "early".parse().unwrap();
    disk.snapshot(name).unwrap();
    oracle.make(&mut port, 10);
    let looks = [
        (10, disk.look(Point::Snapshot(name), None).unwrap()),
        (20, disk.look(Point::Time(u64::MAX), None).unwrap()),
    ];
    oracle.check(&looks, "named");
    for (point, part) in [
        (Point::Lsn(21), "the newest is lsn:20"),
        (Point::Cid(1 << 40), "the newest is lsn:20"),
        (Point::Time(1), "the oldest are LSN 0"),
        (
            Point::Snapshot("late".parse().unwrap()),
            "the log has early",
        ),
    ] {
        let error = disk.look(point, None).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        assert!(error.to_string().contains(part), "{error}");
    }
    disk.grow(2 * SIZE).unwrap();
    let grown = disk.look(Point::Snapshot(name), None).unwrap();
    let mut state = oracle.states[10].clone();
    state.resize(2 * SIZE as usize, 0);
    check_look(&mut oracle.random, &grown, &state, "grown");
    oracle.check(&looks, "after the growth");
    drop(port);
    store.remove_disk(&place.disk).unwrap();
    oracle.check(&looks, "after the removal");
    let error = disk.look(Point::Newest, None).err().unwrap();
    assert!(error.to_string().contains("has left its log"), "{error}");
    drop((looks, grown));
    store.close().unwrap();
}
