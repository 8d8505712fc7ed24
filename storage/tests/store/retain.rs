//! A log that keeps history: any state in it comes back, and the base images follow at its begin.


use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::support::{TestDisk, fill, flush, read, run, wait_until, write};
use walvisor_storage::{
    Allocation, Backend, Disk, DiskOptions, ErrorKind, LogHistory, Operation, Point, Retention,
    Store, StoreOptions, create_disk, disk_changes, export_disk, inspect, leave_log, resize_disk,
    restore_disk,
};

const SIZE: u64 = 2 << 20;
const BLOCKS: u64 = SIZE / 4096;
const SEGMENT: u64 = 256 << 10;

fn options(retain: Retention) -> StoreOptions {
    StoreOptions {
        segment_size: SEGMENT,
        max_segments: 8,
        retain: Some(retain),
        ..StoreOptions::default()
    }
}

fn create(place: &TestDisk, retain: Retention) {
    create_disk(&place.disk, SIZE, &place.log(), &options(retain)).unwrap();
}

fn open(place: &TestDisk, retain: Option<Retention>) -> Store {
    let options = StoreOptions {
        retain,
        ..options(Retention::Nothing)
    };
    Store::open(&place.log(), &[DiskOptions::new(&place.disk)], &options).unwrap()
}

/// The byte of a block after each record: record N writes block N * 7, or discards it.
fn byte(lsn: u64) -> u8 {
    match lsn % 5 {
        0 => 0,
        _ => (lsn % 251) as u8 + 1,
    }
}

fn block(lsn: u64) -> u64 {
    lsn * 7 % BLOCKS
}

/// Makes records `lsns` of a disk, each durable before the next few begin.
fn make(disk: &Disk, lsns: std::ops::RangeInclusive<u64>) {
    let mut port = disk.open_port().unwrap();
    for lsn in lsns {
        let sector = block(lsn) * 8;
        let operation = match byte(lsn) {
            0 => Operation::Discard { sector, sectors: 8 },
            byte => Operation::Write {
                sector,
                data: fill(byte, 8),
            },
        };
        run(&mut port, operation).unwrap();
        if lsn % 20 == 0 {
            flush(&mut port);
        }
    }
    flush(&mut port);
}

/// The disk after a record.
fn state(lsn: u64) -> Vec<u8> {
    let mut bytes = vec![0; SIZE as usize];
    for lsn in 1..=lsn {
        let at = (block(lsn) * 4096) as usize;
        bytes[at..at + 4096].fill(byte(lsn));
    }
    bytes
}

fn at(place: &TestDisk, lsn: u64) -> Result<Vec<u8>, walvisor_storage::Error> {
    let new = place.disk.with_extension("new");
    restore_disk(
        &place.disk,
        &place.log(),
        Point::Lsn(lsn),
        &new,
        None,
        &mut |_, _| {},
    )?;
    let bytes = std::fs::read(&new).unwrap();
    std::fs::remove_file(new).unwrap();
    Ok(bytes)
}

/// The oldest state that comes back; it and some of the later ones are as they were.
fn horizon(place: &TestDisk, newest: u64) -> u64 {
    let is_there = |lsn: u64| match at(place, lsn) {
        Ok(bytes) => {
            assert!(bytes == state(lsn), "LSN {lsn}");
            true
        }
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
            false
        }
    };
    let (mut gone, mut there) = (0, newest);
    assert!(is_there(newest));
    if is_there(0) {
        return 0;
    }
    while there - gone > 1 {
        let middle = gone.midpoint(there);
        if is_there(middle) {
            there = middle
        } else {
            gone = middle
        }
    }
    for lsn in (there..newest).step_by(97) {
        assert!(is_there(lsn), "LSN {lsn}");
    }
    there
}

fn export(place: &TestDisk) -> Vec<u8> {
    let new = place.disk.with_extension("export");
    export_disk(&place.disk, &place.log(), &new, false, None, &mut |_, _| {}).unwrap();
    let bytes = std::fs::read(&new).unwrap();
    std::fs::remove_file(new).unwrap();
    bytes
}

#[test]
fn a_log_keeps_the_bytes_that_it_is_to_keep() {
    let place = TestDisk::empty();
    let kept = 1 << 20;
    create(&place, Retention::Bytes(kept));
    let mut newest = 0;
    // The log goes round several times, and what it keeps is set once.
    for life in 0..4 {
        let store = open(&place, None);
        make(&store.disks()[0], newest + 1..=newest + 1000);
        newest += 1000;
        store.close().unwrap();
        let horizon = horizon(&place, newest);
        // Each record is a batch: a header, and mostly a payload.
        let bytes = (newest - horizon) * 8192;
        assert!(horizon == 0 || bytes > kept, "{bytes} bytes are kept");
        assert!(life < 2 || horizon > 0, "it keeps everything");
        assert_eq!(export(&place), state(newest));
    }
    // The whole log goes to the image when nothing is to be kept any more.
    open(&place, Some(Retention::Nothing)).close().unwrap();
    assert_eq!(std::fs::read(&place.disk).unwrap(), state(newest));
    assert_eq!(horizon(&place, newest), newest);
}

#[test]
fn a_full_log_gives_up_the_oldest_history_and_writes_go_on() {
    let place = TestDisk::empty();
    create(&place, Retention::All);
    let store = open(&place, None);
    make(&store.disks()[0], 1..=3000);
    let counters = store.log_counters();
    assert!(counters.checkpoints > 0);
    // A kill at any time.
    let killed = place.crash();
    store.close().unwrap();
    let all = horizon(&place, 3000);
    // The last segment always stays.
    assert!(0 < all && all < 3000, "{all}");
    assert!(horizon(&killed, 3000) <= all);
    // The open may need room, and fold more.
    drop(open(&killed, None));
    assert_eq!(export(&killed), state(3000));
    horizon(&killed, 3000);
}

/// A checkpoint that somebody asks for copies everything, and what was kept is gone.
#[test]
fn a_checkpoint_gives_up_the_history() {
    let place = TestDisk::empty();
    create(&place, Retention::All);
    let store = open(&place, None);
    make(&store.disks()[0], 1..=50);
    store.disks()[0].checkpoint().unwrap();
    make(&store.disks()[0], 51..=70);
    store.close().unwrap();
    assert_eq!(horizon(&place, 70), 50);
}

/// The bytes that a damaged record had cannot be brought back, so the states that need them are
/// given up. What the disk has now is not affected.
#[test]
fn damage_in_the_history_costs_the_history_alone() {
    let place = TestDisk::empty();
    create(&place, Retention::All);
    let store = open(&place, None);
    let mut port = store.disks()[0].open_port().unwrap();
    // The first record is overwritten at once.
    write(&mut port, 0, 0x77, 8);
    flush(&mut port);
    write(&mut port, 0, 0x78, 8);
    flush(&mut port);
    let segment = place.log().join("segment-00000");
    let log = std::fs::read(&segment).unwrap();
    let found = log
        .windows(4096)
        .position(|bytes| bytes.iter().all(|&byte| byte == 0x77));
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(&segment)
        .unwrap();
    file.write_all_at(&[0x70], found.expect("the record") as u64)
        .unwrap();
    for number in 0..1500 {
        write(&mut port, 8 + number % 400 * 8, (number % 200) as u8 + 1, 8);
    }
    flush(&mut port);
    assert_eq!(read(&mut port, 0, 8)[..], [0x78; 4096]);
    drop(port);
    store.close().unwrap();
    let bytes = export(&place);
    assert_eq!(bytes[..4096], [0x78; 4096]);
    let report = inspect(&place.disk, &place.log()).unwrap();
    assert!(report.log.unwrap().damaged.is_empty());
}

/// What a log in use tells of its history is what comes back after it was closed, and what is told
/// of it then.
#[test]
fn the_log_tells_which_history_it_has() {
    let place = TestDisk::empty();
    create(&place, Retention::Bytes(1 << 20));
    let tell = |lsns, snapshot: Option<&str>| {
        let store = open(&place, None);
        let disk = store.disks()[0].clone();
        make(&disk, lsns);
        if let Some(name) = snapshot {
            disk.snapshot(name.parse().unwrap()).unwrap();
        }
        store.close().unwrap();
        disk.history()
    };
    let told = tell(1..=20, None);
    assert_eq!(told.horizon.lsn, 0);
    assert_eq!(
        (told.retain, told.pinned_bytes),
        (Retention::Bytes(1 << 20), 0)
    );
    let told = tell(21..=1000, Some("held"));
    let oldest = told.horizon.lsn;
    assert_eq!(oldest, horizon(&place, 1000));
    assert!(told.horizon.cid > 0 && told.horizon.unix_us > 0);
    assert!((1 << 20..told.room_bytes).contains(&told.kept_bytes));
    assert_eq!(told.snapshots.len(), 1);
    let later = inspect(&place.disk, &place.log()).unwrap();
    let later = later.log.unwrap().history;
    assert_eq!(later.horizon.lsn, oldest);
    // The record at the horizon may have left the log.
    assert!(later.horizon.cid >= told.horizon.cid && later.horizon.unix_us >= told.horizon.unix_us);
    assert!(later.index_bytes > 0 && told.index_bytes > 0);
    let (horizon, index_bytes) = (later.horizon, later.index_bytes);
    let told = LogHistory {
        horizon,
        index_bytes,
        ..told
    };
    assert_eq!(later, told);
    // The base images can go past the snapshot.
    assert_eq!(tell(1001..=1020, None).pinned_bytes, 0);
}

/// What a log keeps takes segment files beside those that it had, and only once.
#[test]
fn the_log_gets_room_for_the_bytes_that_it_keeps() {
    let place = TestDisk::empty();
    create(&place, Retention::Nothing);
    let most = |place: &Path| {
        inspect(place, &place.with_extension("img.wal"))
            .unwrap()
            .log
            .unwrap()
            .max_segments
    };
    let disk = place.disk.as_path();
    assert_eq!(most(disk), 8);
    for (retain, wanted) in [(10, 18), (10, 18), (4, 18), (12, 26)] {
        open(&place, Some(Retention::Bytes(retain * SEGMENT)))
            .close()
            .unwrap();
        assert_eq!(most(disk), wanted, "{retain}");
    }
    let options = StoreOptions {
        retain: Some(Retention::Bytes(1 << 40)),
        ..options(Retention::Nothing)
    };
    let opened = Store::open(&place.log(), &[DiskOptions::new(disk)], &options);
    let error = opened.err().expect("too much");
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("can keep at most"), "{error}");
}

#[test]
fn a_snapshot_stays_until_it_is_deleted() {
    let place = TestDisk::empty();
    create(&place, Retention::Nothing);
    let store = open(&place, None);
    let disk = &store.disks()[0];
    make(disk, 1..=40);
    let (first, second) = ("first".parse().unwrap(), "second".parse().unwrap());
    let made = disk.snapshot(first).unwrap();
    assert_eq!((made.name, made.lsn), (first, 40));
    assert_eq!(
        disk.snapshot(first).unwrap_err().kind(),
        ErrorKind::AlreadyExists
    );
    make(disk, 41..=90);
    disk.snapshot(second).unwrap();
    make(disk, 91..=100);
    store.close().unwrap();
    let looked = |name, lsn| {
        let new = place.disk.with_extension("new");
        let point = Point::Snapshot(name);
        restore_disk(&place.disk, &place.log(), point, &new, None, &mut |_, _| {})?;
        let bytes = std::fs::read(&new).unwrap();
        std::fs::remove_file(new).unwrap();
        assert!(bytes == state(lsn));
        Ok::<_, walvisor_storage::Error>(())
    };
    looked(first, 40).unwrap();
    looked(second, 90).unwrap();
    let store = open(&place, None);
    let disk = &store.disks()[0];
    // The base images go past the snapshots, and what these need is saved.
    disk.checkpoint().unwrap();
    assert_eq!(disk.history().horizon.lsn, 100);
    let names: Vec<_> = disk
        .snapshots()
        .iter()
        .map(|snapshot| snapshot.name)
        .collect();
    assert_eq!(names, [first, second]);
    disk.delete_snapshot(first).unwrap();
    assert_eq!(
        disk.delete_snapshot(first).unwrap_err().kind(),
        ErrorKind::NotFound
    );
    make(disk, 101..=150);
    store.close().unwrap();
    looked(second, 90).unwrap();
    let error = looked(first, 40).unwrap_err().to_string();
    assert!(
        error.contains("no snapshot 'first': the log has second"),
        "{error}"
    );
    assert_ne!(saved_files(&place), 0);
    let store = open(&place, None);
    store.disks()[0].delete_snapshot(second).unwrap();
    store.disks()[0].checkpoint().unwrap();
    store.close().unwrap();
    assert_eq!(saved_files(&place), 0);
    assert_eq!(std::fs::read(&place.disk).unwrap(), state(150));
}

fn saved_files(place: &TestDisk) -> usize {
    let names = std::fs::read_dir(place.log()).unwrap();
    let names = names.map(|entry| entry.unwrap().file_name());
    names
        .filter(|name| name.to_str().unwrap().starts_with("saved-"))
        .count()
}

/// Snapshots stay however often the log goes round, cost no more than what has changed since, and
/// are seen by looks too.
#[test]
fn a_log_goes_round_under_its_snapshots() {
    let place = TestDisk::empty();
    create(&place, Retention::Nothing);
    let mut store = open(&place, None);
    let names = ["a", "b", "c", "d"].map(|name| name.parse().unwrap());
    let mut lsn = 0;
    for (name, more) in names.into_iter().zip([30, 400, 25, 900]) {
        let disk = &store.disks()[0];
        make(disk, lsn + 1..=lsn + more);
        lsn += more;
        assert_eq!(disk.snapshot(name).unwrap().lsn, lsn);
        if more == 25 {
            store.close().unwrap();
            store = open(&place, None);
        }
    }
    let disk = store.disks()[0].clone();
    make(&disk, lsn + 1..=lsn + 1500);
    // The older ones need what was saved for the one that is deleted.
    disk.delete_snapshot(names[1]).unwrap();
    make(&disk, lsn + 1501..=lsn + 1600);
    let lsns = [30, 430, 455, 1355];
    let kept = || [0, 2, 3].into_iter();
    for at in kept() {
        let look = disk.look(Point::Snapshot(names[at]), None).unwrap();
        let mut queue = look.open_queue().unwrap();
        let (sectors, mut seen) = (SIZE as u32 / 512, Vec::new());
        let read = Operation::Read { sector: 0, sectors };
        queue.submit(1, read);
        queue.kick();
        while seen.is_empty() {
            queue.completions(&mut seen);
        }
        let bytes = seen.remove(0).result.unwrap().unwrap();
        assert!(bytes[..] == state(lsns[at])[..], "{at}");
    }
    let told = disk.history();
    assert!(told.horizon.lsn > lsn, "{told:?}");
    // No more than the disk, a file's header, and one header for each batch.
    for snapshot in &told.snapshots {
        assert!(
            (1..SIZE * 5 / 4).contains(&snapshot.saved_bytes),
            "{told:?}"
        );
    }
    drop(disk);
    store.close().unwrap();
    for at in kept() {
        let new = place.disk.with_extension("new");
        let point = Point::Snapshot(names[at]);
        restore_disk(&place.disk, &place.log(), point, &new, None, &mut |_, _| {}).unwrap();
        assert!(std::fs::read(&new).unwrap() == state(lsns[at]), "{at}");
        std::fs::remove_file(new).unwrap();
        // What has changed between two snapshots, or since: exactly what differs may be left out by
        // no change.
        for to in kept().filter(|to| *to > at).map(Some).chain([None]) {
            let until = to.map(|to| Point::Snapshot(names[to]));
            let changes = disk_changes(&place.disk, &place.log(), point, until, None).unwrap();
            let (from, now) = (lsns[at], to.map_or(lsn + 1600, |to| lsns[to]));
            let mut wanted: Vec<u64> = (from + 1..=now).map(block).collect();
            wanted.sort_unstable();
            wanted.dedup();
            let found = changes.ranges.iter();
            let found =
                found.flat_map(|range| (range.offset..range.offset + range.len).step_by(4096));
            let found: Vec<u64> = found.map(|offset| offset / 4096).collect();
            assert!(found == wanted, "{at} {to:?}");
            let bytes = state(now);
            for range in changes
                .ranges
                .iter()
                .filter(|range| range.now != Allocation::Data)
            {
                let (first, end) = (range.offset as usize, (range.offset + range.len) as usize);
                assert!(bytes[first..end].iter().all(|byte| *byte == 0), "{range:?}");
            }
        }
    }
}

/// A snapshot of one disk costs nothing for what others write, and is none of the others.
#[test]
fn a_snapshot_of_one_disk_keeps_nothing_of_another() {
    let (place, other) = (TestDisk::empty(), TestDisk::empty());
    create(&place, Retention::Nothing);
    create_disk(
        &other.disk,
        SIZE,
        &place.log(),
        &options(Retention::Nothing),
    )
    .unwrap();
    let both = [&place.disk, &other.disk].map(DiskOptions::new);
    let store = Store::open(&place.log(), &both, &options(Retention::Nothing)).unwrap();
    let [quiet, busy] = [0, 1].map(|at| store.disks()[at].clone());
    make(&quiet, 1..=50);
    let alone = "alone".parse().unwrap();
    assert_eq!(quiet.snapshot_alone(alone).unwrap().disk_id, Some(1));
    make(&busy, 1..=3000);
    drop((quiet, busy));
    store.close().unwrap();
    let saved = |store: &Store| store.disks()[0].history().snapshots[0].saved_bytes;
    let store = Store::open(&place.log(), &both, &options(Retention::Nothing)).unwrap();
    store.disks()[0].checkpoint().unwrap();
    let idle = saved(&store);
    assert!(idle <= 3 * 4096, "{idle}");
    let refused = store.disks()[1].look(Point::Snapshot(alone), None);
    let error = refused.err().expect("it is of the other").to_string();
    assert!(error.contains("another disk only"), "{error}");
    // These overwrite the blocks of the first ten, of which two were discarded.
    make(&store.disks()[0], 513..=522);
    store.disks()[0].checkpoint().unwrap();
    let changed = saved(&store);
    assert!(
        (idle + 8 * 4096..idle + 20 * 4096).contains(&changed),
        "{changed}"
    );
    store.close().unwrap();
    let new = place.disk.with_extension("new");
    let point = Point::Snapshot(alone);
    restore_disk(&place.disk, &place.log(), point, &new, None, &mut |_, _| {}).unwrap();
    assert!(std::fs::read(&new).unwrap() == state(50));
    // What would lose it is refused.
    let error = resize_disk(&place.disk, SIZE / 2, &place.log(), true, &[]).unwrap_err();
    assert!(error.to_string().contains("need it: alone"), "{error}");
    let error = leave_log(&place.disk, &place.log(), &[]).unwrap_err();
    assert!(error.to_string().contains("need it: alone"), "{error}");
}

/// A log that is full of what a look needs refuses writes, and takes them again once the look has
/// ended.
#[test]
fn writes_fail_while_a_look_needs_the_whole_log() {
    let place = TestDisk::empty();
    create(&place, Retention::Nothing);
    let store = open(&place, None);
    let disk = &store.disks()[0];
    make(disk, 1..=10);
    let look = disk.look(Point::Newest, None).unwrap();
    let mut port = disk.open_port().unwrap();
    let one = |port: &mut _, number: u64| {
        let sector = number % BLOCKS * 8;
        run(
            port,
            Operation::Write {
                sector,
                data: fill(9, 8),
            },
        )?;
        run(port, Operation::Flush).map(drop)
    };
    let failed = (0..2000).find(|&number| one(&mut port, number).is_err());
    assert!(failed.is_some_and(|written| written > 100), "{failed:?}");
    wait_until("no_space", || {
        let says_why = disk.condition().name() == "no_space";
        assert!(says_why || one(&mut port, 5).is_err());
        says_why
    });
    drop(look);
    wait_until("a write that succeeds", || one(&mut port, 5).is_ok());
    drop(port);
    store.close().unwrap();
}

#[test]
fn how_much_is_kept_changes_while_the_log_is_in_use() {
    let place = TestDisk::empty();
    create(&place, Retention::Nothing);
    let store = open(&place, None);
    let disk = &store.disks()[0];
    disk.set_retain(Retention::Bytes(1 << 20)).unwrap();
    make(disk, 1..=1000);
    store.close().unwrap();
    assert!(horizon(&place, 1000) <= 1000 - (1 << 20) / 8192);
    let store = open(&place, None);
    assert_eq!(store.disks()[0].retain(), Retention::Bytes(1 << 20));
    store.disks()[0].set_retain(Retention::Nothing).unwrap();
    store.close().unwrap();
    assert_eq!(std::fs::read(&place.disk).unwrap(), state(1000));
}

/// What copies everything to the base images would end the history, and is refused until that is
/// done on purpose.
#[test]
fn a_disk_with_history_is_not_shrunk_and_does_not_leave_its_log() {
    let place = TestDisk::empty();
    create(&place, Retention::All);
    let store = open(&place, None);
    make(&store.disks()[0], 1..=50);
    store.close().unwrap();
    let shrink = || resize_disk(&place.disk, SIZE / 2, &place.log(), true, &[]).map(drop);
    let leave = || leave_log(&place.disk, &place.log(), &[]).map(drop);
    for refused in [shrink(), leave()] {
        let error = refused.unwrap_err().to_string();
        assert!(
            error.contains("end it with 'walvisor disk checkpoint"),
            "{error}"
        );
    }
    assert!(at(&place, 20).unwrap() == state(20));
    let store = open(&place, None);
    store.disks()[0].checkpoint().unwrap();
    store.close().unwrap();
    shrink().unwrap();
    assert!(export(&place) == state(50)[..SIZE as usize / 2]);
    leave().unwrap();
    assert!(std::fs::read(&place.disk).unwrap() == state(50)[..SIZE as usize / 2]);
}

/// A disk that leaves a log that keeps history stays there with its records, and comes back with
/// all of them.
#[test]
fn a_disk_with_history_leaves_and_comes_back() {
    let place = TestDisk::empty();
    create(&place, Retention::All);
    let other = place.disk.with_extension("other");
    create_disk(&other, SIZE, &place.log(), &options(Retention::All)).unwrap();
    let disks = [&place.disk, &other].map(DiskOptions::new);
    let mut store = Store::open(&place.log(), &disks, &options(Retention::All)).unwrap();
    make(&store.disks()[0], 1..=30);
    let mut left = store.disks()[0].open_port().unwrap();
    store.remove_disk(&place.disk).unwrap();
    let sector = 0;
    let data = fill(1, 8);
    assert!(run(&mut left, Operation::Write { sector, data }).is_err());
    let again = store.add_disk(&disks[0]).err().unwrap();
    assert_eq!(again.kind(), ErrorKind::Locked, "{again}");
    drop(left);
    make(&store.add_disk(&disks[0]).unwrap().clone(), 31..=50);
    store.remove_disk(&place.disk).unwrap();
    store.close().unwrap();
    for lsn in [0, 17, 30, 31, 50] {
        assert!(at(&place, lsn).unwrap() == state(lsn), "LSN {lsn}");
    }
    // It has records in the log, but nobody uses it when the log is opened.
    let [gone, here] = disks.clone();
    let detached = DiskOptions::detached(gone.path);
    let mut store = Store::open(&place.log(), &[here, detached], &StoreOptions::default()).unwrap();
    make(&store.add_disk(&disks[0]).unwrap().clone(), 51..=60);
    store.close().unwrap();
    for lsn in [0, 50, 60] {
        assert!(at(&place, lsn).unwrap() == state(lsn), "LSN {lsn}");
    }
}
