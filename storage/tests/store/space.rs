//! File systems that really fill up: a tmpfs, if this process may mount one.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use crate::support::{MemoryFs, fill, flush, read, run, wait_until};
use walvisor_storage::{
    Backend, BackendQueue, Condition, DiskOptions, EngineKind, Failure, FullLogPolicy, Operation,
    Port, Store, StoreOptions, create_disk,
};

const MIB: u64 = 1 << 20;
/// Sectors of a write.
const SECTORS: u64 = 128;

fn open(disk: &Path, log: &Path, size: u64, engine: EngineKind) -> Store {
    let options = StoreOptions {
        segment_size: MIB,
        max_segments: 6,
        engine,
        ..StoreOptions::default()
    };
    create_disk(disk, size, log, &options).unwrap();
    Store::open(log, &[DiskOptions::new(disk)], &options).unwrap()
}

fn write(port: &mut Port, number: u64) -> Result<(), Failure> {
    let data = fill(number as u8, SECTORS as usize);
    let sector = number * SECTORS;
    run(port, Operation::Write { sector, data })?;
    run(port, Operation::Flush).map(drop)
}

/// Waits until the disk's condition is so: the log tries each second.
#[track_caller]
fn wait_for(store: &Store, is_so: impl Fn(&Condition) -> bool) {
    let began = Instant::now();
    while !is_so(&store.disks()[0].condition()) {
        let condition = store.disks()[0].condition();
        assert!(began.elapsed() < Duration::from_secs(600), "{condition:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_full_file_system_of_the_base_image_is_survived() {
    for engine in [EngineKind::Auto, EngineKind::Blocking] {
        let Some(small) = MemoryFs::tmpfs("size=4m") else {
            return;
        };
        let dir = tempfile::tempdir().unwrap();
        let disk = small.path().join("disk.img");
        let store = open(&disk, &dir.path().join("log"), 64 * MIB, engine);
        let mut port = store.disks()[0].open_port().unwrap();
        assert_eq!(store.disks()[0].condition(), Condition::Ok);
        let (mut written, began) = (0, SystemTime::now());
        while write(&mut port, written).is_ok() {
            written += 1;
            assert!(written < 64 * MIB / (SECTORS * 512), "never full");
        }
        // At least what fits the log alone, except for its last segment.
        assert!(written * SECTORS * 512 >= 4 * MIB, "{written} writes");
        let refused = run(&mut port, Operation::Flush).map(drop);
        assert_eq!(refused, Err(Failure::Io));
        let mut since = Vec::new();
        for _ in 0..2 {
            wait_for(
                &store,
                |condition| matches!(condition, Condition::NoSpace(trouble) if trouble.refuses_writes),
            );
            let condition = store.disks()[0].condition();
            let trouble = condition.trouble().expect("there is no space");
            assert!(trouble.error.contains("disk.img"), "{}", trouble.error);
            since.push(trouble.since);
            std::thread::sleep(Duration::from_millis(1500));
        }
        assert!(began <= since[0] && since[0] == since[1], "when it began");
        for number in 0..written {
            let data = read(&mut port, number * SECTORS, SECTORS as u32);
            assert!(data.iter().all(|&byte| byte == number as u8));
        }
        small.remount("size=128m");
        // The next attempt to empty the log, a second later at most, succeeds. Until then there may
        // be a little room in the ring's last segment, left by the attempt before.
        wait_for(&store, |condition| *condition == Condition::Ok);
        let all = written + 100;
        for number in written..all {
            wait_until("room", || write(&mut port, number).is_ok());
        }
        drop(port);
        store.close().unwrap();
        let image = std::fs::read(&disk).unwrap();
        let blocks = image.chunks((SECTORS * 512) as usize).take(all as usize);
        for (number, block) in blocks.enumerate() {
            assert!(block.iter().all(|&byte| byte == number as u8), "{number}");
        }
    }
}

/// A disk whose image's file system has space for less than what is written, and whose log lets
/// writes wait for space; with a port, the writes that have ended, and the number of those that
/// wait.
fn paused(small: &MemoryFs, log: &Path) -> (Store, Port, usize) {
    const WRITES: usize = 300;
    let disk = small.path().join("disk.img");
    let options = StoreOptions {
        segment_size: MIB,
        max_segments: 6,
        on_full: FullLogPolicy::Pause,
        ..StoreOptions::default()
    };
    create_disk(&disk, 64 * MIB, log, &options).unwrap();
    let store = Store::open(log, &[DiskOptions::new(&disk)], &options).unwrap();
    let mut port = store.disks()[0].open_port().unwrap();
    for number in 0..WRITES as u64 {
        let data = fill(number as u8, SECTORS as usize);
        let sector = number * SECTORS;
        port.submit(number, Operation::Write { sector, data });
    }
    port.submit(WRITES as u64, Operation::Flush);
    port.kick();
    let (mut done, began) = (Vec::new(), Instant::now());
    loop {
        port.completions(&mut done);
        match store.disks()[0].condition() {
            Condition::NoSpace(trouble) if trouble.pauses_writes => {
                assert!(!trouble.refuses_writes);
                break;
            }
            condition => assert!(began.elapsed() < Duration::from_secs(120), "{condition:?}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    port.completions(&mut done);
    assert!(done.iter().all(|ended| ended.result.is_ok()));
    let waiting = WRITES + 1 - done.len();
    assert!(waiting > 50, "{waiting}");
    (store, port, waiting)
}

/// Writes and FLUSHes wait for space, reads go on, and what waited is carried out as soon as there
/// is space.
#[test]
fn requests_wait_for_space() {
    let Some(small) = MemoryFs::tmpfs("size=4m") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let (store, mut port, waiting) = paused(&small, &dir.path().join("log"));
    let mut reader = store.disks()[0].open_port().unwrap();
    let data = read(&mut reader, SECTORS, SECTORS as u32);
    assert!(data.iter().all(|&byte| byte == 1));
    drop(reader);
    small.remount("size=128m");
    let done = crate::support::wait(&mut port, waiting);
    assert!(done.iter().all(|ended| ended.result.is_ok()));
    drop(port);
    store.close().unwrap();
    let image = std::fs::read(small.path().join("disk.img")).unwrap();
    let blocks = image.chunks((SECTORS * 512) as usize).take(300);
    for (number, block) in blocks.enumerate() {
        assert!(block.iter().all(|&byte| byte == number as u8), "{number}");
    }
}

/// Requests that wait for space do not hold up the end: they fail, and closing tells why.
#[test]
fn requests_that_wait_for_space_end_with_their_owner() {
    let Some(small) = MemoryFs::tmpfs("size=4m") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let (store, mut port, waiting) = paused(&small, &log);
    store.disks()[0].end_pauses();
    let done = crate::support::wait(&mut port, waiting);
    let failed = done.iter().filter(|ended| ended.result.is_err()).count();
    assert!(failed > 0);
    drop(port);
    let error = store.close().unwrap_err().to_string();
    assert!(error.contains("No space left on device"), "{error}");
    small.remount("size=128m");
    let disks = [DiskOptions::new(small.path().join("disk.img"))];
    let store = Store::open(&log, &disks, &StoreOptions::default()).unwrap();
    store.close().unwrap();
}

/// If only some of the ring's segments can be created, they make up the ring; no partial segment
/// file is left.
#[test]
fn a_full_file_system_of_the_log_makes_the_ring_smaller() {
    let Some(small) = MemoryFs::tmpfs("size=4m") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let disk: PathBuf = dir.path().join("disk.img");
    let log = small.path().join("log");
    let store = open(&disk, &log, 64 * MIB, EngineKind::Auto);
    let mut port = store.disks()[0].open_port().unwrap();
    for number in 0..300 {
        write(&mut port, number).unwrap();
    }
    flush(&mut port);
    wait_for(
        &store,
        |condition| matches!(condition, Condition::NoSpace(trouble) if !trouble.refuses_writes),
    );
    let mut segments = 0;
    for entry in std::fs::read_dir(&log).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if name.starts_with("segment-") && !name.ends_with(".new") {
            assert_eq!(entry.metadata().unwrap().len(), MIB, "{name}");
            segments += 1;
        }
    }
    assert!((2..4).contains(&segments), "{segments}");
    drop(port);
    store.close().unwrap();
    let image = std::fs::read(&disk).unwrap();
    let blocks = image.chunks((SECTORS * 512) as usize).take(300);
    for (number, block) in blocks.enumerate() {
        assert!(block.iter().all(|&byte| byte == number as u8), "{number}");
    }
}
