//! Exports of a disk whose log keeps history, beside a guest that fills the log faster than the
//! export copies: the copy is the disk at one moment, and no write fails.

use std::fs::File;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::support::{Random, TestDisk, fill, flush, modify, run, wait_until};
use walvisor_storage::{
    Disk, DiskOptions, Error, Operation, Point, Port, Retention, Store, StoreOptions, Transfer,
    create_disk,
};
use walvisor_testkit::MemoryFs;

const SIZE: usize = 1 << 20;
/// Bytes of each write that fills the log, and of the whole log.
const WRITE: usize = 64 << 10;
const ROOM: u64 = 8 * SEGMENT;
const SEGMENT: u64 = 256 << 10;

fn options(retain: Retention) -> StoreOptions {
    StoreOptions {
        segment_size: SEGMENT,
        max_segments: 8,
        retain: Some(retain),
        ..StoreOptions::default()
    }
}

fn open(place: &TestDisk, retain: Retention) -> Store {
    if !place.disk.exists() {
        create_disk(&place.disk, SIZE as u64, &place.log(), &options(retain)).unwrap();
    }
    Store::open(
        &place.log(),
        &[DiskOptions::new(&place.disk)],
        &options(retain),
    )
    .unwrap()
}

/// A disk with random contents, in part in its image and in part in its log, and what it contains.
fn modified(place: &TestDisk, retain: Retention) -> (Store, Vec<u8>) {
    let (mut random, mut state) = (Random(23), vec![0; SIZE]);
    let store = open(place, Retention::Nothing);
    change(
        &mut store.disks()[0].open_port().unwrap(),
        &mut random,
        &mut state,
    );
    store.close().unwrap();
    let store = open(place, retain);
    change(
        &mut store.disks()[0].open_port().unwrap(),
        &mut random,
        &mut state,
    );
    (store, state)
}

fn change(port: &mut Port, random: &mut Random, state: &mut [u8]) {
    (0..60).for_each(|_| drop(run(port, modify(random, state)).unwrap()));
    flush(port);
}

fn saved_files(place: &TestDisk) -> usize {
    let names = std::fs::read_dir(place.log()).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.starts_with("saved-")).count()
}

/// A guest that fills the log.
#[derive(Default)]
struct Guest {
    begun: AtomicBool,
    held: AtomicBool,
    stands: AtomicBool,
    ended: AtomicBool,
    bytes: AtomicU64,
}

impl Guest {
    fn write(&self, port: &mut Port) {
        let mut number = 0;
        while !self.ended.load(Ordering::Relaxed) {
            let waits = !self.begun.load(Ordering::Relaxed) || self.held.load(Ordering::Acquire);
            self.stands.store(waits, Ordering::Release);
            if waits {
                std::thread::sleep(Duration::from_millis(1));
                continue;
            }
            let sector = number % (SIZE / WRITE) as u64 * (WRITE / 512) as u64;
            let data = fill(number as u8, WRITE / 512);
            run(port, Operation::Write { sector, data }).unwrap();
            run(port, Operation::Flush).unwrap();
            number += 1;
            self.bytes.fetch_add(WRITE as u64, Ordering::Relaxed);
        }
    }

    fn written(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Whether it has come to a stop. While it waits for room in the log, it can't.
    fn stand_still(&self) -> bool {
        self.held.store(true, Ordering::Release);
        let limit = Instant::now() + Duration::from_millis(50);
        while !self.stands.load(Ordering::Acquire) && Instant::now() < limit {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.stands.load(Ordering::Acquire)
    }

    fn go_on(&self) {
        self.held.store(false, Ordering::Release);
    }
}

/// Ends the guest, also when the test fails.
struct EndGuard<'a>(&'a Guest);

impl Drop for EndGuard<'_> {
    fn drop(&mut self) {
        self.0.ended.store(true, Ordering::Relaxed);
    }
}

/// Exports the disk, and calls `each` after each part. After the first call a guest begins to
/// write, and each part waits for it, unless the log is full.
fn export_beside_writer(
    disk: &Disk,
    at: Option<Point>,
    target: File,
    each: &mut dyn FnMut(&Guest) -> bool,
) -> Result<Transfer, Error> {
    let guest = Guest::default();
    std::thread::scope(|scope| {
        let end = EndGuard(&guest);
        let writer = scope.spawn(|| guest.write(&mut disk.open_port().unwrap()));
        let mut progress = |_, _| {
            let goes_on = each(&guest);
            guest.begun.store(true, Ordering::Relaxed);
            let goal = guest.written() + ROOM / 8;
            let limit = Instant::now() + Duration::from_millis(50);
            while guest.written() < goal && Instant::now() < limit {
                std::thread::sleep(Duration::from_millis(1));
            }
            goes_on
        };
        let done = match at {
            Some(at) => disk.export_at(at, target, &mut progress),
            None => disk.export(target, &mut progress),
        };
        guest.begun.store(true, Ordering::Relaxed);
        // However the export ended, writes go on.
        let goal = guest.written() + 2 * ROOM;
        wait_until("writes to go on", || {
            guest.written() > goal || writer.is_finished()
        });
        drop(end);
        writer.join().expect("no write fails");
        done
    })
}

#[test]
fn an_export_gives_way_to_a_guest_that_fills_the_log() {
    for retain in [Retention::All, Retention::Time(Duration::from_secs(3600))] {
        let place = TestDisk::empty();
        let (store, state) = modified(&place, retain);
        let disk = &store.disks()[0];
        let before = store.log_counters().checkpoints;
        let path = place.disk.with_extension("export");
        let target = File::create_new(&path).unwrap();
        let done = export_beside_writer(disk, None, target, &mut |_| true).unwrap();
        assert_eq!(done.size, SIZE as u64);
        assert!(std::fs::read(&path).unwrap() == state, "{retain:?}");
        assert!(store.log_counters().checkpoints > before);
        assert!(disk.snapshots().is_empty());
        assert_eq!(saved_files(&place), 0);
        store.close().unwrap();
    }
}

#[test]
fn a_past_point_is_exported_beside_a_guest_that_fills_the_log() {
    let place = TestDisk::empty();
    let (store, state) = modified(&place, Retention::All);
    let disk = &store.disks()[0];
    let at = Point::Snapshot("now".parse().unwrap());
    disk.snapshot("now".parse().unwrap()).unwrap();
    let (mut random, mut later) = (Random(5), state.clone());
    change(&mut disk.open_port().unwrap(), &mut random, &mut later);
    let path = place.disk.with_extension("export");
    let mut calls = 0;
    let mut each = |_: &Guest| {
        calls += 1;
        if calls == 3 {
            // The export keeps what it needs by itself.
            disk.delete_snapshot("now".parse().unwrap()).unwrap();
        }
        true
    };
    let target = File::create_new(&path).unwrap();
    export_beside_writer(disk, Some(at), target, &mut each).unwrap();
    assert!(std::fs::read(&path).unwrap() == state);
    assert!(disk.snapshots().is_empty());
    store.close().unwrap();
}

/// An ext4 file system, and the directory of its image. `None`: none can be had, and
/// `skipped: why` was printed.
fn small_fs() -> Option<(tempfile::TempDir, MemoryFs)> {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("fs");
    File::create_new(&image).unwrap().set_len(16 << 20).unwrap();
    let made = Command::new("mkfs.ext4").arg("-q").arg(&image).status();
    if !made.is_ok_and(|made| made.success()) {
        println!("skipped: no mkfs.ext4");
        return None;
    }
    let fs = MemoryFs::ext4(&image, "rw")?;
    Some((dir, fs))
}

/// The file system of the target is frozen before the export begins, or in the middle, until the
/// guest has written more than the log holds.
#[test]
fn a_target_that_does_not_answer_holds_up_no_writer() {
    let Some((_image, fs)) = small_fs() else {
        return;
    };
    for retain in [Retention::Nothing, Retention::All] {
        for calls in [0, 3] {
            let place = TestDisk::empty();
            let (store, state) = modified(&place, retain);
            let path = fs.path().join("export");
            let target = File::create_new(&path).unwrap();
            let mut frozen = (calls == 0).then(|| fs.freeze());
            let (mut called, mut goal) = (0, 2 * ROOM);
            let limit = Instant::now() + Duration::from_secs(100);
            let mut each = |guest: &Guest| {
                called += 1;
                if called == calls {
                    goal += guest.written();
                    frozen = Some(fs.freeze());
                }
                assert!(Instant::now() < limit, "the guest stands still");
                if guest.written() > goal {
                    frozen = None;
                }
                true
            };
            let done = export_beside_writer(&store.disks()[0], None, target, &mut each).unwrap();
            assert_eq!(done.size, SIZE as u64);
            assert!(called > calls && goal >= 2 * ROOM);
            assert!(
                std::fs::read(&path).unwrap() == state,
                "{retain:?}, {calls}"
            );
            std::fs::remove_file(&path).unwrap();
            store.close().unwrap();
        }
    }
}

#[test]
fn an_export_of_which_the_target_does_not_answer_can_be_given_up() {
    let Some((_image, fs)) = small_fs() else {
        return;
    };
    let place = TestDisk::empty();
    let (store, _) = modified(&place, Retention::Nothing);
    let target = File::create_new(fs.path().join("export")).unwrap();
    let frozen = fs.freeze();
    let mut each = |_: &Guest| false;
    let error = export_beside_writer(&store.disks()[0], None, target, &mut each).unwrap_err();
    assert!(error.to_string().contains("it was given up"), "{error}");
    store.close().unwrap();
    drop(frozen);
}

/// The guest overwrites the whole disk while the target does not answer, and the log's file system
/// has 64 KiB left for that.
#[test]
fn an_export_ends_when_what_it_needs_finds_no_space() {
    let Some((_image, slow)) = small_fs() else {
        return;
    };
    let Some(small) = MemoryFs::tmpfs("size=16m") else {
        return;
    };
    for retain in [Retention::Nothing, Retention::All] {
        let place = TestDisk::empty_in(small.path());
        let (store, _) = modified(&place, retain);
        let disk = &store.disks()[0];
        // The log and the image get all their blocks.
        let mut port = disk.open_port().unwrap();
        for number in 0..3 * ROOM / WRITE as u64 {
            let sector = number % (SIZE / WRITE) as u64 * (WRITE / 512) as u64;
            let data = fill(number as u8, WRITE / 512);
            run(&mut port, Operation::Write { sector, data }).unwrap();
            flush(&mut port);
        }
        drop(port);
        let free = rustix::fs::statvfs(small.path()).unwrap();
        let free = (free.f_bavail * free.f_frsize) as usize;
        let filler = small.path().join("filler");
        std::fs::write(&filler, vec![1; free - (64 << 10)]).unwrap();
        let path = slow.path().join("export");
        let target = File::create_new(&path).unwrap();
        let mut frozen = Some(slow.freeze());
        let limit = Instant::now() + Duration::from_secs(100);
        let mut each = |guest: &Guest| {
            assert!(Instant::now() < limit, "the guest stands still");
            if guest.written() > 2 * ROOM {
                frozen = None;
            }
            true
        };
        let error = export_beside_writer(disk, None, target, &mut each).unwrap_err();
        assert!(error.to_string().contains("could not be saved"), "{error}");
        assert_eq!(saved_files(&place), 0);
        std::fs::remove_file(&filler).unwrap();
        std::fs::remove_file(&path).unwrap();
        store.close().unwrap();
    }
}

#[test]
fn an_export_that_is_given_up_leaves_nothing() {
    let place = TestDisk::empty();
    let (store, _) = modified(&place, Retention::All);
    let disk = &store.disks()[0];
    let target = File::create_new(place.disk.with_extension("export")).unwrap();
    let saved = || saved_files(&place) > 0;
    let mut each = |_: &Guest| !saved();
    let error = export_beside_writer(disk, None, target, &mut each).unwrap_err();
    assert!(error.to_string().contains("it was given up"), "{error}");
    wait_until("the saved files to go", || !saved());
    assert!(disk.snapshots().is_empty());
    store.close().unwrap();
}

#[test]
fn a_kill_during_an_export_leaves_nothing() {
    let place = TestDisk::empty();
    let (store, _) = modified(&place, Retention::All);
    let disk = &store.disks()[0];
    let target = File::create_new(place.disk.with_extension("export")).unwrap();
    let mut crashed = None;
    let mut each = |guest: &Guest| {
        if crashed.is_none() && saved_files(&place) > 0 && guest.stand_still() {
            crashed = Some(place.crash());
            guest.go_on();
        }
        true
    };
    export_beside_writer(disk, None, target, &mut each).unwrap();
    store.close().unwrap();
    let crashed = crashed.expect("the guest overwrites what is not copied yet");
    assert!(crashed.report().history.snapshots.is_empty());
    let store = open(&crashed, Retention::All);
    assert!(store.disks()[0].snapshots().is_empty());
    assert_eq!(saved_files(&crashed), 0);
    let mut port = store.disks()[0].open_port().unwrap();
    run(
        &mut port,
        Operation::Write {
            sector: 0,
            data: fill(1, 8),
        },
    )
    .unwrap();
    flush(&mut port);
    drop(port);
    store.close().unwrap();
}

/// What lies between the two points of a restore in place can't leave the log, so the export has to
/// end.
#[test]
fn an_export_ends_when_a_restore_in_place_leaves_no_room_for_it() {
    let place = TestDisk::empty();
    let (store, _) = modified(&place, Retention::All);
    let disk = &store.disks()[0];
    let horizon = disk.history().horizon.lsn;
    let target = File::create_new(place.disk.with_extension("export")).unwrap();
    let mut restored = false;
    let mut each = |_: &Guest| {
        if !restored {
            disk.rewind(Point::Lsn(horizon)).unwrap();
            restored = true;
        }
        true
    };
    let done = export_beside_writer(disk, None, target, &mut each);
    let error = done.unwrap_err().to_string();
    assert!(error.contains("restored in place"), "{error}");
    assert!(disk.snapshots().is_empty());
    store.close().unwrap();
}

/// The thread of an export may be stopped, or be in code that does not return.
#[test]
fn an_export_that_does_nothing_holds_up_no_writer() {
    for retain in [Retention::Nothing, Retention::All] {
        let place = TestDisk::empty();
        let (store, state) = modified(&place, retain);
        let path = place.disk.with_extension("export");
        let target = File::create_new(&path).unwrap();
        let mut called = 0;
        let mut each = |guest: &Guest| {
            called += 1;
            if called == 3 {
                let goal = guest.written() + 2 * ROOM;
                wait_until("a guest that goes on beside a stopped export", || {
                    guest.written() > goal
                });
            }
            true
        };
        export_beside_writer(&store.disks()[0], None, target, &mut each).unwrap();
        assert!(called > 3);
        assert!(std::fs::read(&path).unwrap() == state, "{retain:?}");
        store.close().unwrap();
    }
}

/// Whoever reads a point, slowly or not at all, holds up no writer, and sees the point.
#[test]
fn a_reader_of_a_point_gives_way_to_a_guest_that_fills_the_log() {
    for retain in [Retention::Nothing, Retention::All] {
        let place = TestDisk::empty();
        let (store, state) = modified(&place, retain);
        let disk = &store.disks()[0];
        let mut reader = disk.reader_at(Point::Newest).unwrap();
        assert_eq!(reader.bytes(), SIZE as u64);
        for (at, len) in [
            (0, 511),
            (1, 512),
            (SIZE as u64, 512),
            (u64::MAX - 511, 1024),
        ] {
            assert!(
                reader.read(&mut vec![0; len], at, &mut || true).is_err(),
                "{at} {len}"
            );
        }
        let mut port = disk.open_port().unwrap();
        let guest = Guest::default();
        guest.begun.store(true, Ordering::Relaxed);
        std::thread::scope(|scope| {
            scope.spawn(|| guest.write(&mut port));
            let _end = EndGuard(&guest);
            wait_until("a guest that goes on beside a stopped reader", || {
                guest.written() > ROOM
            });
            wait_until("a guest that goes on beside a silent reader", || {
                reader.give_way().unwrap();
                guest.written() > 2 * ROOM
            });
            let mut random = Random(7);
            while guest.written() < 6 * ROOM {
                let at = random.below(SIZE as u64 / 512) as usize * 512;
                let len = (random.below(200) as usize + 1) * 512;
                let mut bytes = vec![7; len.min(SIZE - at)];
                reader.read(&mut bytes, at as u64, &mut || true).unwrap();
                assert!(bytes == state[at..at + bytes.len()], "{at}");
            }
            let mut all = vec![7; SIZE];
            reader.read(&mut all, 0, &mut || true).unwrap();
            assert!(all == state);
            let goal = guest.written() + 2 * ROOM;
            wait_until("a guest that goes on beside a reader at its end", || {
                guest.written() > goal
            });
        });
        drop((port, reader));
        assert_eq!(saved_files(&place), 0);
        store.close().unwrap();
    }
}
