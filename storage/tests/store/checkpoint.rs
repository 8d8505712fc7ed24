//! How many bytes a checkpoint writes, and how much memory the index takes until then.

use crate::support::{
    SIZE, TestDisk, all, commit, discard, flush, port, put_in, read, refused, run, wait,
};
use walvisor_storage::{
    Backend, BackendQueue, ErrorKind, LogCounters, Logged, Operation, StoreOptions, inspect,
};

const BLOCK: u64 = 4096;
/// Writes between two FLUSHes.
const BURST: u64 = 64;

/// A log of 16 MiB.
fn small() -> StoreOptions {
    StoreOptions {
        segment_size: 1 << 20,
        max_segments: 16,
        ..StoreOptions::default()
    }
}

/// Writes `count` blocks of 4 KiB, the i-th to block `place(i)`, and closes. Returns the counters,
/// and the most memory that the index took.
fn written(
    options: &StoreOptions,
    count: u64,
    blocks: u64,
    place: impl Fn(u64) -> u64,
) -> (LogCounters, u64) {
    let made = TestDisk::made(&["disk.img"], blocks * BLOCK, *options);
    let store = made.open();
    let disk = store.disks()[0].clone();
    let mut port = port(&store, 0);
    let mut most = 0;
    for first in (0..count).step_by(BURST as usize) {
        for i in first..first + BURST {
            port.submit(i, put_in(place(i) * BLOCK / 512, i as u8, 8));
        }
        wait(&mut port, BURST as usize);
        flush(&mut port);
        most = most.max(disk.log_counters().index_bytes);
    }
    drop(port);
    store.close().unwrap();
    (disk.log_counters(), most)
}

/// The goals: at most 2.05 bytes for each byte that is written once, and close to 1.1 for a few
/// blocks that are overwritten repeatedly.
#[test]
fn overwritten_blocks_are_copied_once() {
    let count = 8192;
    let bytes = (count * BLOCK) as f64;
    let (uniform, _) = written(&small(), count, count, |i| (i * 2_654_435_761) % count);
    println!("uniform: {uniform:?}");
    assert_eq!(uniform.base_bytes, count * BLOCK);
    assert!((uniform.log_bytes + uniform.base_bytes) as f64 / bytes <= 2.05);
    let (hot, _) = written(&small(), count, 64, |i| i % 64);
    println!("hot: {hot:?}");
    // Each checkpoint copies the hot blocks once. The number of checkpoints depends on when the
    // keeper gets to run: four at best, each 0.8 % of all bytes written. Three times as many are
    // still little compared to copying every write.
    assert!(hot.base_bytes <= hot.checkpoints * 64 * BLOCK);
    assert!((hot.log_bytes + hot.base_bytes) as f64 / bytes <= 1.17);
}

/// Writes wait for checkpoints where the index takes too much memory, however much room the log
/// has.
#[test]
fn an_index_takes_no_more_memory_than_it_may() {
    let (count, limit) = (8192, 16 << 10);
    let most = |index_memory| {
        let options = StoreOptions {
            index_memory,
            max_segments: 128,
            ..small()
        };
        written(&options, count, count, |i| (i * 2_654_435_761) % count)
    };
    let (little, most_little) = most(limit);
    let (usual, most_usual) = most(64 << 20);
    println!("{limit}: {most_little}, {little:?}\nusual: {most_usual}, {usual:?}");
    // One insertion may split a leaf of 4 KiB.
    let (most, all) = (limit + 2 * BLOCK, 16 * count);
    assert!(most_little <= most && little.checkpoints >= all / most);
    assert!(most_usual >= all && usual.checkpoints == 1);
    assert_eq!((little.index_bytes, usual.index_bytes), (0, 0));
}

/// Adjacent sectors go to the base image together, even if they were written at different times. A
/// discard of several parts makes one hole.
#[test]
fn neighbours_are_copied_together() {
    let place = TestDisk::new();
    let store = place.open();
    let disk = store.disks()[0].clone();
    let mut port = port(&store, 0);
    let order = (0..64).map(|i| i * 37 % 64);
    for i in order {
        port.submit(i, put_in(i, i as u8, 1));
    }
    for i in 8..16 {
        port.submit(100 + i, discard(i * 8, 8));
    }
    wait(&mut port, 64 + 8);
    drop(port);
    store.close().unwrap();
    let counters = disk.log_counters();
    assert_eq!((counters.base_bytes, counters.base_writes), (64 * 512, 2));
    let image = std::fs::read(&place.disk).unwrap();
    let sectors = image.chunks(512).take(64).enumerate();
    for (i, sector) in sectors {
        assert!(all(sector, i as u8), "sector {i}");
    }
}

#[test]
fn a_checkpoint_in_use_brings_the_base_image_up_to_date() {
    let place = TestDisk::new();
    let store = place.open();
    let disk = store.disks()[0].clone();
    for round in 1..=3 {
        commit(&disk, 8, round, 8);
        // Without new records there is nothing to wait for.
        let lsns = [(); 2].map(|()| disk.checkpoint().unwrap());
        assert_eq!(lsns, [u64::from(round); 2]);
        assert!(all(&std::fs::read(&place.disk).unwrap()[4096..8192], round));
    }
    store.close().unwrap();
    refused(disk.checkpoint(), "being closed");
    assert!(disk.grow(2 * SIZE).is_err());
}

#[test]
fn a_disk_grows_in_use_and_what_is_new_survives_a_crash() {
    let place = TestDisk::new();
    let store = place.open();
    let (disk, beyond, last) = (&store.disks()[0], SIZE / 512, 4 * SIZE / 512 - 8);
    commit(disk, 0, 1, 8);
    let mut queue = port(&store, 0);
    let read_beyond = Operation::Read {
        sector: beyond,
        sectors: 8,
    };
    assert!(run(&mut queue, read_beyond).is_err(), "behind the end");
    let resized = disk.grow(4 * SIZE).unwrap();
    assert_eq!((resized.old_size, resized.size), (SIZE, 4 * SIZE));
    assert_eq!(disk.sectors(), 4 * beyond);
    assert!(all(&read(&mut queue, beyond, 8), 0));
    commit(disk, last, 2, 8);
    for (size, part) in [
        (2 * SIZE, "cannot shrink"),
        (4 * SIZE + 1, "multiple of 512"),
    ] {
        assert_eq!(refused(disk.grow(size), part), ErrorKind::InvalidInput);
    }
    disk.grow(4 * SIZE).unwrap();
    let killed = place.crash().open();
    assert_eq!(killed.disks()[0].sectors(), 4 * beyond);
    let mut crashed = port(&killed, 0);
    assert!(all(&read(&mut crashed, 0, 8), 1) && all(&read(&mut crashed, last, 8), 2));
    drop(queue);
    store.close().unwrap();
    assert_eq!(place.disk.metadata().unwrap().len(), 4 * SIZE);
    assert_eq!(inspect(&place.disk, &place.log()).unwrap().size, 4 * SIZE);
}
