//! A small `index-memory` bounds what snapshots and looks take, however much has changed.

use std::thread;

use walvisor_storage::{
    BackendQueue, DiskOptions, Look, Point, Store, StoreOptions, Tracked, create_disk,
};

use crate::support::{flush, only, refused, wait, write, zeroes};

/// Blocks of 4096 bytes that change, each apart from the others.
const BLOCKS: u64 = 450_000;
const LIMIT: u64 = 1 << 20;
/// In the environment of a process that runs this test alone.
const ALONE: &str = "WALVISOR_TEST_ALONE";
/// The index and what is beside it may take as much each; the rest is for buffers, threads and the
/// allocator.
const MOST: u64 = 2 * LIMIT + (32 << 20);

/// The most memory that this process had resident so far, in bytes.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.unwrap().trim().trim_end_matches(" kB");
    kib.parse::<u64>().unwrap() * 1024
}

#[test]
fn looks_and_snapshots_take_little_memory_however_much_has_changed() {
    // What other tests take must not count.
    if std::env::var_os(ALONE).is_none() {
        let name = "memory::looks_and_snapshots_take_little_memory_however_much_has_changed";
        let status = only(name).env(ALONE, "1").status().unwrap();
        return assert!(status.success());
    }
    let dir = tempfile::tempdir().unwrap();
    let (path, log) = (dir.path().join("disk.img"), dir.path().join("log"));
    let options = StoreOptions {
        segment_size: 1 << 20,
        max_segments: 256,
        index_memory: LIMIT,
        ..StoreOptions::default()
    };
    create_disk(&path, BLOCKS * 8192, &log, &options).unwrap();
    let store = Store::open(&log, &[DiskOptions::new(&path)], &options).unwrap();
    let disk = &store.disks()[0];
    let mut port = disk.open_port().unwrap();
    // Some data to be saved.
    for part in 0..256 {
        write(&mut port, part * 256, 1, 256);
    }
    flush(&mut port);
    disk.checkpoint().unwrap();
    let monday = Point::Snapshot("monday".parse().unwrap());
    let lsn = disk.snapshot("monday".parse().unwrap()).unwrap().lsn;
    let before = peak();
    for first in (0..BLOCKS).step_by(1000) {
        for number in first..first + 1000 {
            port.submit(number, zeroes(number * 7919 % BLOCKS * 16, 8, true));
        }
        wait(&mut port, 1000);
    }
    flush(&mut port);
    disk.checkpoint().unwrap();
    let written = peak();
    // At once, so that they would take the more memory together.
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| refused(disk.look(monday, None), "index-memory"));
        }
    });
    let changes = disk.changes(lsn, 0, BLOCKS * 16, 8);
    assert!(changes.is_err_and(|error| error.to_string().contains("index-memory")));
    let looked = peak();
    let [written, looked] = [written, looked].map(|peak| peak - before);
    println!("{written} bytes more after the writes, {looked} with looks");
    assert!(looked <= MOST, "{written} and {looked} bytes");
    drop(port);
    store.close().unwrap();
    // Nor does a look at the closed disk take more than it is given.
    let open =
        |options: &StoreOptions| Look::open(&DiskOptions::new(&path), &log, monday, None, options);
    refused(open(&options), "index-memory");
    open(&StoreOptions::default()).unwrap();
}
