//! Restored disks that are resized, leave their log, or are given up.

use walvisor_storage::{
    DiskOptions, ErrorKind, Point, Retention, Store, StoreOptions, discard_log, leave_log,
    move_to_log, resize_disk, rewind_disk,
};

use super::bench::{Bench, SECTORS};
use crate::support::{fill, read, write};

/// A restored disk grows, but is not shrunk, given another log or taken out of its own as long as
/// its history may come back.
#[test]
fn a_restored_disk_is_not_shrunk_and_does_not_leave() {
    let mut bench = Bench::new(Retention::All);
    bench.work(30);
    // To the base image: no record counts.
    let done = bench.back(0, 0);
    let others = [bench.disk(1)];
    let shrink =
        || resize_disk(&bench.disk(0), SECTORS * 256, &bench.log(), true, &others).map(drop);
    let leave = || leave_log(&bench.disk(0), &bench.log(), &others).map(drop);
    let other = bench.dir.path().join("other");
    let to_other = || {
        let options = StoreOptions::default();
        move_to_log(&bench.disk(0), &bench.log(), &other, &options, &others).map(drop)
    };
    for refused in [shrink(), leave(), to_other()] {
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("walvisor disk checkpoint"), "{error}");
    }
    bench.check();
    resize_disk(&bench.disk(0), SECTORS * 1024, &bench.log(), false, &others).unwrap();
    let bytes = bench.restored(0, Point::Lsn(done.from_lsn)).unwrap();
    assert!(bytes[..SECTORS as usize * 512] == bench.states[&done.from_lsn][0]);
    let store = bench.open();
    store.disks()[0].checkpoint().unwrap();
    store.close().unwrap();
    shrink().unwrap();
    leave().unwrap();
    assert!(
        std::fs::read(bench.disk(0))
            .unwrap()
            .iter()
            .all(|&byte| byte == 0)
    );
}

/// A disk that leaves a log in use takes what it is now with it; what was undone does not come back
/// with it.
#[test]
fn a_restored_disk_leaves_a_log_in_use_and_comes_back() {
    for to in [0, 12] {
        let mut bench = Bench::new(Retention::Nothing);
        bench.work_killed(30);
        bench.back(0, to);
        let options = DiskOptions::new(bench.disk(0));
        let mut store = bench.open();
        store.remove_disk(&bench.disk(0)).unwrap();
        let image = std::fs::read(bench.disk(0)).unwrap();
        assert!(image == bench.states[&to][0]);
        store.add_disk(&options).unwrap();
        store.close().unwrap();
        bench.check();
    }
    // A log that keeps history keeps the disk's, too.
    let mut bench = Bench::new(Retention::All);
    bench.work(30);
    let done = bench.back(0, 12);
    let mut store = bench.open();
    store.remove_disk(&bench.disk(0)).unwrap();
    store.close().unwrap();
    bench.check();
    bench.back(0, done.from_lsn);
    bench.check();
}

#[test]
fn what_is_discarded_does_not_come_back() {
    let mut bench = Bench::new(Retention::All);
    bench.work(30);
    bench.back(0, 12);
    let discarded = discard_log(&bench.disk(0), &bench.log()).unwrap();
    assert!(discarded.records.unwrap() > 0);
    let error = rewind_disk(&bench.disk(0), &bench.log(), Point::Lsn(20)).unwrap_err();
    assert!(error.to_string().contains("no history"), "{error}");
    assert!(bench.exported(0).iter().all(|&byte| byte == 0));
    assert!(bench.exported(1) == bench.states[&bench.newest][1]);
    let store = bench.open();
    let mut port = store.disks()[0].open_port().unwrap();
    assert!(
        read(&mut port, 0, SECTORS as u32)
            .iter()
            .all(|&byte| byte == 0)
    );
    write(&mut port, 8, 7, 8);
    drop(port);
    store.disks()[0].checkpoint().unwrap();
    store.close().unwrap();
    let image = std::fs::read(bench.disk(0)).unwrap();
    assert!(image[8 * 512..16 * 512] == fill(7, 8)[..]);
    assert!(std::fs::read(bench.disk(1)).unwrap() == bench.states[&bench.newest][1]);
}

/// A disk without a record that counts still has its history: another image is not taken in its
/// place.
#[test]
fn another_image_is_not_taken_for_a_restored_disk() {
    let mut bench = Bench::new(Retention::All);
    bench.work(30);
    bench.back(0, 0);
    std::fs::remove_file(bench.disk(0)).unwrap();
    std::fs::write(bench.disk(0), vec![1; SECTORS as usize * 512]).unwrap();
    let disks = [DiskOptions::new(bench.disk(0))];
    let error = Store::open(&bench.log(), &disks, &bench.options)
        .err()
        .unwrap();
    assert_eq!(error.kind(), ErrorKind::WrongLog, "{error}");
    let error = rewind_disk(&bench.disk(0), &bench.log(), Point::Lsn(20)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::WrongLog, "{error}");
}
