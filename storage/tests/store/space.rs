//! File systems that really fill up: a tmpfs, if this process may mount one.

use std::path::Path;
use std::time::SystemTime;

use walvisor_storage::{
    Backend, BackendQueue, Condition, EngineKind, Failure, FullLogPolicy, Operation, Port, Result,
    Store, StoreOptions, create_disk,
};

use crate::support::{
    ENGINES, MIB, MemoryFs, all, flush, port, put_in, read, refused, run, wait, wait_until,
};

/// Sectors of a write.
const SECTORS: u64 = 128;
const WRITE: usize = SECTORS as usize * 512;

fn options(engine: EngineKind, on_full: FullLogPolicy) -> StoreOptions {
    StoreOptions {
        segment_size: MIB,
        max_segments: 6,
        engine,
        on_full,
        ..StoreOptions::default()
    }
}

fn try_open(disk: &Path, log: &Path, options: &StoreOptions) -> Result<Store> {
    Store::open(log, &[walvisor_storage::DiskOptions::new(disk)], options)
}

fn made(disk: &Path, log: &Path, options: &StoreOptions) -> Store {
    create_disk(disk, 64 * MIB, log, options).unwrap();
    try_open(disk, log, options).unwrap()
}

fn number(number: u64) -> Operation {
    put_in(number * SECTORS, number as u8, SECTORS as usize)
}

fn write(port: &mut Port, at: u64) -> std::result::Result<(), Failure> {
    run(port, number(at))?;
    run(port, Operation::Flush).map(drop)
}

/// The image has all of so many writes.
#[track_caller]
fn has(disk: &Path, writes: u64) {
    let image = std::fs::read(disk).unwrap();
    for (number, block) in image.chunks(WRITE).take(writes as usize).enumerate() {
        assert!(all(block, number as u8), "{number}");
    }
}

/// Waits until the disk's condition is so: the log tries each second.
#[track_caller]
fn wait_for(store: &Store, is_so: impl Fn(&Condition) -> bool) {
    wait_until("the condition", || is_so(&store.disks()[0].condition()));
}

/// Whether writes are refused for want of space.
fn refuses(condition: &Condition) -> bool {
    matches!(condition, Condition::NoSpace(trouble) if trouble.refuses_writes)
}

#[test]
fn a_full_file_system_of_the_base_image_is_survived() {
    for engine in ENGINES {
        let Some(small) = MemoryFs::tmpfs("size=4m") else {
            return;
        };
        let dir = tempfile::tempdir().unwrap();
        let disk = small.path().join("disk.img");
        let options = options(engine, FullLogPolicy::Fail);
        let store = made(&disk, &dir.path().join("log"), &options);
        let mut queue = port(&store, 0);
        assert_eq!(store.disks()[0].condition(), Condition::Ok);
        let (mut written, began) = (0, SystemTime::now());
        while write(&mut queue, written).is_ok() {
            written += 1;
            assert!(written * WRITE as u64 <= 64 * MIB, "never full");
        }
        // At least what fits the log alone, except for its last segment.
        assert!(written * WRITE as u64 >= 4 * MIB, "{written} writes");
        let flushed = run(&mut queue, Operation::Flush).map(drop);
        assert_eq!(flushed, Err(Failure::Io));
        let mut since = Vec::new();
        for _ in 0..2 {
            wait_for(&store, refuses);
            let condition = store.disks()[0].condition();
            let trouble = condition.trouble().expect("there is no space");
            assert!(trouble.error.contains("disk.img"), "{}", trouble.error);
            since.push(trouble.since);
            // Another attempt.
            refused(store.disks()[0].checkpoint(), "No space left on device");
        }
        assert!(began <= since[0] && since[0] == since[1], "when it began");
        for number in 0..written {
            let data = read(&mut queue, number * SECTORS, SECTORS as u32);
            assert!(all(&data, number as u8));
        }
        small.remount("size=128m");
        // The next attempt to empty the log, a second later at most, succeeds. Until then there may
        // be a little room in the ring's last segment, left by the attempt before.
        wait_for(&store, |condition| *condition == Condition::Ok);
        for number in written..written + 100 {
            wait_until("room", || write(&mut queue, number).is_ok());
        }
        drop(queue);
        store.close().unwrap();
        has(&disk, written + 100);
    }
}

/// Writes and FLUSHes wait for space, reads go on, and what waited is carried out as soon as there
/// is space. If their owner wants them to end, they fail, and closing tells why.
#[test]
fn requests_wait_for_space_until_there_is_some_or_they_have_to_end() {
    const WRITES: u64 = 300;
    for ends in [false, true] {
        let Some(small) = MemoryFs::tmpfs("size=4m") else {
            return;
        };
        let dir = tempfile::tempdir().unwrap();
        let (disk, log) = (small.path().join("disk.img"), dir.path().join("log"));
        let options = options(EngineKind::Auto, FullLogPolicy::Pause);
        let store = made(&disk, &log, &options);
        let mut queue = port(&store, 0);
        (0..WRITES).for_each(|at| queue.submit(at, number(at)));
        queue.submit(WRITES, Operation::Flush);
        queue.kick();
        let mut done = Vec::new();
        wait_until("writes that wait for space", || {
            queue.completions(&mut done);
            let condition = store.disks()[0].condition();
            matches!(condition, Condition::NoSpace(trouble)
                if trouble.pauses_writes && !trouble.refuses_writes)
        });
        queue.completions(&mut done);
        assert!(done.iter().all(|ended| ended.result.is_ok()));
        let waiting = WRITES as usize + 1 - done.len();
        assert!(waiting > 50, "{waiting}");
        let mut reader = port(&store, 0);
        assert!(all(&read(&mut reader, SECTORS, SECTORS as u32), 1));
        drop(reader);
        if ends {
            store.disks()[0].end_pauses();
        } else {
            small.remount("size=128m");
        }
        let done = wait(&mut queue, waiting);
        let failed = done.iter().filter(|ended| ended.result.is_err()).count();
        assert_eq!(failed > 0, ends);
        drop(queue);
        if ends {
            refused(store.close(), "No space left on device");
            small.remount("size=128m");
            try_open(&disk, &log, &StoreOptions::default())
                .unwrap()
                .close()
                .unwrap();
        } else {
            store.close().unwrap();
            has(&disk, WRITES);
        }
    }
}

/// If only some of the ring's segments can be created, they make up the ring; no partial segment
/// file is left.
#[test]
fn a_full_file_system_of_the_log_makes_the_ring_smaller() {
    let Some(small) = MemoryFs::tmpfs("size=4m") else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    let (disk, log) = (dir.path().join("disk.img"), small.path().join("log"));
    let store = made(&disk, &log, &options(EngineKind::Auto, FullLogPolicy::Fail));
    let mut queue = port(&store, 0);
    for number in 0..120 {
        write(&mut queue, number).unwrap();
    }
    flush(&mut queue);
    let goes_on = |condition: &Condition| matches!(condition, Condition::NoSpace(trouble) if !trouble.refuses_writes);
    wait_for(&store, goes_on);
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
    drop(queue);
    store.close().unwrap();
    has(&disk, 120);
}
