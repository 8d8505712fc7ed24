//! Closing takes bounded time: what is not copied by then stays in the log.

use std::time::Duration;

use crate::support::{TestDisk, flush, read, small, wait_until, write};
use walvisor_storage::{
    BlockingDisk, DiskOptions, EngineKind, ErrorKind, Image, Store, StoreOptions,
};

/// Writes of a test, each to a block of 4 KiB that is adjacent to no other. They fill less than
/// half of the ring.
const BLOCKS: u64 = 60;

fn open(place: &TestDisk, close_time: Duration) -> Store {
    let options = StoreOptions {
        close_time: Some(close_time),
        ..small(EngineKind::Auto)
    };
    Store::open(&place.log(), &[DiskOptions::new(&place.disk)], &options).unwrap()
}

/// Without time to copy, a close leaves everything in the log, durable, whether or not it was
/// flushed. The next open accepts the image and copies everything by itself.
#[test]
fn a_close_without_time_leaves_everything_in_the_log() {
    let place = TestDisk::new();
    let store = open(&place, Duration::ZERO);
    let mut port = store.disks()[0].open_port().unwrap();
    for block in 0..BLOCKS {
        write(&mut port, block * 16, 3, 8);
    }
    drop(port);
    store.close().unwrap();
    let report = place.report();
    assert_eq!(report.records, BLOCKS, "{report:?}");
    assert!(!report.torn_tail && report.damaged.is_empty(), "{report:?}");
    assert!(
        std::fs::read(&place.disk)
            .unwrap()
            .iter()
            .all(|&byte| byte == 0)
    );
    if crate::support::mark(&place.disk).is_some() {
        let error = Image::open(&place.disk, true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WrongLog);
    }
    // Nobody writes, so the ring never fills: the log is copied because it was left.
    let store = open(&place, Duration::ZERO);
    wait_until("a checkpoint", || store.log_counters().checkpoints > 0);
    // With nothing left to copy, a close without time is whole.
    store.close().unwrap();
    assert_eq!(place.report().records, 0);
    drop(Image::open(&place.disk, true).unwrap());
    let image = std::fs::read(&place.disk).unwrap();
    let blocks = image.chunks(4096).take(2 * BLOCKS as usize).enumerate();
    for (block, bytes) in blocks {
        let expected = [if block % 2 == 0 { 3 } else { 0 }; 4096];
        assert!(bytes == expected, "{block}");
    }
}

/// A store that may take its time copies everything that others have left.
#[test]
fn a_close_with_time_enough_copies_what_was_left() {
    let place = TestDisk::new();
    for (close_time, records) in [(Duration::ZERO, 1), (Duration::MAX, 0)] {
        let store = open(&place, close_time);
        let mut port = store.disks()[0].open_port().unwrap();
        write(&mut port, 0, 7, 8);
        flush(&mut port);
        drop(port);
        Store::close_all(vec![store]).unwrap();
        assert_eq!(place.report().records.min(1), records);
    }
    assert_eq!(std::fs::read(&place.disk).unwrap()[..4096], [7; 4096]);
}

/// A checkpoint that a caller waits for while the log is closed copies everything or fails; nothing
/// is lost.
#[test]
fn a_checkpoint_under_way_is_cut_by_the_close() {
    for _ in 0..20 {
        let place = TestDisk::new();
        let store = open(&place, Duration::ZERO);
        let disk = store.disks()[0].clone();
        let mut port = disk.open_port().unwrap();
        for block in 0..BLOCKS {
            // Blocks that are not adjacent are copied one by one.
            write(&mut port, block * 16, 9, 8);
        }
        drop(port);
        std::thread::scope(|scope| {
            let copied = scope.spawn(move || disk.checkpoint());
            store.close().unwrap();
            let copied = copied.join().unwrap();
            assert_eq!(copied.is_ok(), place.report().records == 0, "{copied:?}");
        });
        let store = open(&place, Duration::MAX);
        let mut port = store.disks()[0].open_port().unwrap();
        for block in 0..BLOCKS {
            assert_eq!(read(&mut port, block * 16, 8)[..], [9; 4096]);
        }
        drop(port);
        store.close().unwrap();
    }
}

/// A handle that blocks and outlives the store gets errors: its requests don't wait for a log that
/// is gone.
#[test]
fn a_blocking_handle_of_a_closed_store_gets_errors_and_does_not_wait() {
    for never_used in [false, true] {
        let place = TestDisk::new();
        let store = open(&place, Duration::from_secs(60));
        let disk = BlockingDisk::new(store.disks()[0].clone());
        if !never_used {
            disk.write(&[7; 512], 0).unwrap();
        }
        store.close().unwrap();
        let (ended, ends) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let (write, flush) = (disk.write(&[8; 512], 0), disk.flush());
            ended.send((write, flush)).unwrap();
        });
        let limit = Duration::from_secs(60);
        let (write, flush) = ends.recv_timeout(limit).expect("requests end");
        assert!(write.is_err() && flush.is_err(), "{never_used}");
    }
}
