//! Closing takes bounded time: what is not copied by then stays in the log.

use std::time::Duration;

use walvisor_storage::{BlockingDisk, EngineKind, ErrorKind, Image, Store, StoreOptions};

use crate::support::{
    TestDisk, all, commit, has_attributes, port, refused, small, wait_until, write,
};

/// Writes of a test, each to a block of 4 KiB that is adjacent to no other. They fill less than
/// half of the ring.
const BLOCKS: u64 = 60;

fn open(place: &TestDisk, close_time: Duration) -> Store {
    let options = StoreOptions {
        close_time: Some(close_time),
        ..small(EngineKind::Auto)
    };
    place.try_open(&options).unwrap()
}

/// Without time to copy, a close leaves everything in the log, durable, whether or not it was
/// flushed. The next open accepts the image and copies everything by itself.
#[test]
fn a_close_without_time_leaves_everything_in_the_log() {
    let place = TestDisk::new();
    let store = open(&place, Duration::ZERO);
    let mut port = port(&store, 0);
    for block in 0..BLOCKS {
        write(&mut port, block * 16, 3, 8);
    }
    drop(port);
    store.close().unwrap();
    let report = place.report();
    assert_eq!(report.records, BLOCKS, "{report:?}");
    assert!(!report.torn_tail && report.damaged.is_empty(), "{report:?}");
    assert!(all(&std::fs::read(&place.disk).unwrap(), 0));
    if has_attributes(&place.top) {
        let opened = Image::open(&place.disk, true);
        assert_eq!(refused(opened, ""), ErrorKind::WrongLog);
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
        assert!(all(bytes, if block % 2 == 0 { 3 } else { 0 }), "{block}");
    }
}

/// A store that may take its time copies everything that others have left.
#[test]
fn a_close_with_time_enough_copies_what_was_left() {
    let place = TestDisk::new();
    for (close_time, records) in [(Duration::ZERO, 1), (Duration::MAX, 0)] {
        let store = open(&place, close_time);
        commit(&store.disks()[0], 0, 7, 8);
        Store::close_all(vec![store]).unwrap();
        assert_eq!(place.report().records.min(1), records);
    }
    assert!(all(&std::fs::read(&place.disk).unwrap()[..4096], 7));
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
