//! Exports of a disk whose log keeps history, beside a guest that fills the log faster than the
//! export copies: the copy is the disk at one moment, and no write fails.

use std::fs::File;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use walvisor_storage::{
    Disk, EngineKind, Point, Port, Result, Retention, Store, StoreOptions, Transfer,
};
use walvisor_testkit::MemoryFs;

use crate::support::{
    Random, TestDisk, flush, modify, port, put_in, refused, run, small, snapshot, taken, wait_until,
};

const SIZE: usize = 1 << 20;
/// Bytes of each write that fills the log, and of the whole log.
const WRITE: usize = 64 << 10;
const ROOM: u64 = 8 * (256 << 10);
const NOTHING_AND_ALL: [Retention; 2] = [Retention::Nothing, Retention::All];

/// A disk with random contents, in part in its image and in part in its log, and what it contains.
fn disk_within(fs: Option<MemoryFs>, retain: Retention) -> (TestDisk, Store, Vec<u8>) {
    let options = StoreOptions {
        segment_size: ROOM / 8,
        max_segments: 8,
        retain: Some(Retention::Nothing),
        ..small(EngineKind::Auto)
    };
    let mut place = TestDisk::within(fs, &["disk.img"], options);
    place.make(SIZE as u64);
    let (mut random, mut state) = (Random(23), vec![0; SIZE]);
    let store = place.open();
    change(&store, &mut random, &mut state);
    store.close().unwrap();
    place.options.retain = Some(retain);
    let store = place.open();
    change(&store, &mut random, &mut state);
    (place, store, state)
}

fn disk(retain: Retention) -> (TestDisk, Store, Vec<u8>) {
    disk_within(None, retain)
}

fn change(store: &Store, random: &mut Random, state: &mut [u8]) {
    let mut port = port(store, 0);
    (0..60).for_each(|_| drop(run(&mut port, modify(random, state)).unwrap()));
    flush(&mut port);
}

fn target(place: &TestDisk) -> File {
    File::create_new(place.at("export")).unwrap()
}

fn is_clean(place: &TestDisk, disk: &Disk) -> bool {
    disk.snapshots().is_empty() && place.files("saved-").is_empty()
}

/// A guest that fills the log.
#[derive(Default)]
struct Guest {
    begun: AtomicBool,
    ended: AtomicBool,
    bytes: AtomicU64,
}

impl Guest {
    fn write(&self, port: &mut Port) {
        wait_until("the guest to begin", || self.begun.load(Ordering::Relaxed));
        for number in 0.. {
            if self.ended.load(Ordering::Relaxed) {
                break;
            }
            overwrite(port, number);
            self.bytes.fetch_add(WRITE as u64, Ordering::Relaxed);
        }
    }

    fn begin(&self) {
        self.begun.store(true, Ordering::Relaxed);
    }

    fn written(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Waits until it has written so much more.
    fn goes_on(&self, bytes: u64, beside: &str) {
        let goal = self.written() + bytes;
        wait_until(&format!("a guest that writes beside {beside}"), || {
            self.written() > goal
        });
    }
}

/// Writes to the disk, in turn everywhere.
fn overwrite(port: &mut Port, number: u64) {
    let sector = number % (SIZE / WRITE) as u64 * (WRITE / 512) as u64;
    run(port, put_in(sector, number as u8, WRITE / 512)).unwrap();
    flush(port);
}

/// Ends the guest, also when the test fails.
struct EndGuard<'a>(&'a Guest);

impl Drop for EndGuard<'_> {
    fn drop(&mut self) {
        self.0.begin();
        self.0.ended.store(true, Ordering::Relaxed);
    }
}

/// Exports the disk, and calls `each` after each part. After the first call a guest begins to
/// write, and each part waits for it for a moment, unless the log is full.
fn export_beside_writer(
    disk: &Disk,
    at: Option<Point>,
    target: File,
    each: &mut dyn FnMut(&Guest) -> bool,
) -> Result<Transfer> {
    let guest = Guest::default();
    std::thread::scope(|scope| {
        let end = EndGuard(&guest);
        let writer = scope.spawn(|| guest.write(&mut disk.open_port().unwrap()));
        let mut progress = |_, _| {
            let goes_on = each(&guest);
            guest.begin();
            let goal = guest.written() + ROOM / 8;
            let limit = Instant::now() + Duration::from_millis(50);
            while guest.written() < goal && Instant::now() < limit {
                std::thread::yield_now();
            }
            goes_on
        };
        let done = match at {
            Some(at) => disk.export_at(at, target, &mut progress),
            None => disk.export(target, &mut progress),
        };
        // However the export ended, the log still takes writes.
        guest.begin();
        guest.goes_on(2 * ROOM, "an export that has ended");
        drop(end);
        writer.join().expect("no write fails");
        done
    })
}

/// The thread of an export may be stopped, or be in code that does not return.
#[test]
fn an_export_that_does_nothing_holds_up_no_writer() {
    let hour = Retention::Time(Duration::from_secs(3600));
    for retain in [Retention::Nothing, hour] {
        let (place, store, state) = disk(retain);
        let disk = &store.disks()[0];
        let mut called = 0;
        let mut each = |guest: &Guest| {
            called += 1;
            if called == 3 {
                guest.goes_on(2 * ROOM, "a stopped export");
            }
            true
        };
        let done = export_beside_writer(disk, None, target(&place), &mut each).unwrap();
        assert!(called > 3 && done.size == SIZE as u64);
        assert!(taken(&place.at("export")) == state, "{retain:?}");
        assert!(is_clean(&place, disk));
        store.close().unwrap();
    }
}

#[test]
fn a_past_point_is_exported_beside_a_guest_that_fills_the_log() {
    let (place, store, state) = disk(Retention::All);
    let (disk, name) = (&store.disks()[0], "now".parse().unwrap());
    disk.snapshot(name).unwrap();
    change(&store, &mut Random(5), &mut state.clone());
    let mut calls = 0;
    let mut each = |_: &Guest| {
        calls += 1;
        if calls == 3 {
            // The export holds the records that it needs.
            disk.delete_snapshot(name).unwrap();
        }
        true
    };
    export_beside_writer(disk, Some(snapshot("now")), target(&place), &mut each).unwrap();
    assert!(taken(&place.at("export")) == state && is_clean(&place, disk));
    store.close().unwrap();
}

/// A disk whose log keeps history is exported as it is, and keeps its history.
#[test]
fn an_export_takes_no_history() {
    let (place, store, state) = disk(Retention::All);
    let (disk, mut passed) = (&store.disks()[0], 0);
    let horizon = disk.history().horizon.lsn;
    let mut tell = |at, size| {
        assert!(passed <= at && size == SIZE as u64);
        passed = at;
        true
    };
    disk.export(target(&place), &mut tell).unwrap();
    assert_eq!(passed, SIZE as u64);
    let full = File::options().write(true).open(place.at("export"));
    let again = disk.export(full.unwrap(), &mut |_, _| true);
    refused(again, "not an empty regular file");
    assert!(taken(&place.at("export")) == state);
    assert_eq!(disk.history().horizon.lsn, horizon);
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
/// guest has written more than the log holds; or the export is given up meanwhile.
#[test]
fn a_target_that_does_not_answer_holds_up_no_writer() {
    let Some((_image, fs)) = small_fs() else {
        return;
    };
    let path = fs.path().join("export");
    for (retain, calls) in NOTHING_AND_ALL.into_iter().zip([0, 3]) {
        let (_place, store, state) = disk(retain);
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
        export_beside_writer(&store.disks()[0], None, target, &mut each).unwrap();
        assert!(called > calls);
        assert!(taken(&path) == state, "{retain:?}, {calls}");
        store.close().unwrap();
    }
    let (_place, store, _) = disk(Retention::Nothing);
    let target = File::create_new(&path).unwrap();
    let frozen = fs.freeze();
    let given_up = export_beside_writer(&store.disks()[0], None, target, &mut |_| false);
    refused(given_up, "it was given up");
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
    for retain in NOTHING_AND_ALL {
        let Some(small) = MemoryFs::tmpfs("size=16m") else {
            return;
        };
        let (place, store, _) = disk_within(Some(small), retain);
        // The log and the image get all their blocks.
        let mut port = port(&store, 0);
        (0..3 * ROOM / WRITE as u64).for_each(|number| overwrite(&mut port, number));
        drop(port);
        let free = rustix::fs::statvfs(&place.top).unwrap();
        let free = (free.f_bavail * free.f_frsize) as usize;
        std::fs::write(place.at("filler"), vec![1; free - (64 << 10)]).unwrap();
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
        let done = export_beside_writer(&store.disks()[0], None, target, &mut each);
        refused(done, "could not be saved");
        assert!(is_clean(&place, &store.disks()[0]));
        taken(&place.at("filler"));
        taken(&path);
        store.close().unwrap();
    }
}

#[test]
fn an_export_that_is_given_up_leaves_nothing() {
    let (place, store, _) = disk(Retention::All);
    let saved = || !place.files("saved-").is_empty();
    let disk = &store.disks()[0];
    let done = export_beside_writer(disk, None, target(&place), &mut |_| !saved());
    refused(done, "it was given up");
    wait_until("the saved files to go", || is_clean(&place, disk));
    store.close().unwrap();
}

/// What lies between the two points of a restore in place can't leave the log, so the export has to
/// end.
#[test]
fn an_export_ends_when_a_restore_in_place_leaves_no_room_for_it() {
    let (place, store, _) = disk(Retention::All);
    let disk = &store.disks()[0];
    let horizon = disk.history().horizon.lsn;
    let mut restored = false;
    let mut each = |_: &Guest| {
        if !std::mem::replace(&mut restored, true) {
            disk.rewind(Point::Lsn(horizon)).unwrap();
        }
        true
    };
    let done = export_beside_writer(disk, None, target(&place), &mut each);
    refused(done, "restored in place");
    assert!(disk.snapshots().is_empty());
    store.close().unwrap();
}
