//! Disks that are restored in place while their log is in use.

use walvisor_storage::{
    DiskOptions, ErrorKind, Point, Retention, Store, StoreOptions, Tracked, dump_records,
};

use super::bench::{Bench, SECTORS};
use crate::support::{read, write};

impl Bench {
    /// Restores a disk of an open log.
    fn back_in_use(&mut self, store: &Store, disk: usize, lsn: u64) -> u64 {
        let done = store.disks()[disk].rewind(Point::Lsn(lsn)).unwrap();
        assert_eq!((done.to_lsn, done.from_lsn), (lsn, self.newest));
        self.note_restore(disk, &done);
        done.from_lsn
    }

    fn check_in_use(&self, store: &Store) {
        for (disk, state) in store.disks().iter().zip(&self.states[&self.newest]) {
            let bytes = read(&mut disk.open_port().unwrap(), 0, SECTORS as u32);
            assert!(bytes[..] == state[..]);
        }
    }
}

/// As of a disk that is not in use: there and back, with writes between, whatever follows: a close,
/// a kill, or more of the same.
#[test]
fn a_disk_goes_back_and_forth_while_its_log_is_in_use() {
    for killed in [false, true] {
        let mut bench = Bench::new(Retention::All);
        let store = bench.open();
        bench.change(&store, 40);
        let undo = bench.back_in_use(&store, 0, 20);
        bench.check_in_use(&store);
        bench.change(&store, 15);
        bench.back_in_use(&store, 1, 30);
        bench.check_in_use(&store);
        bench.back_in_use(&store, 0, undo);
        bench.change(&store, 10);
        bench.back_in_use(&store, 0, 0);
        bench.check_in_use(&store);
        if killed {
            let _dir = bench.take_copy();
            drop(store);
        } else {
            bench.change(&store, 5);
            store.close().unwrap();
        }
        bench.check();
        // Restores of a disk that is not in use, and of one that is, follow each other.
        bench.back(0, 25);
        let store = bench.open();
        bench.back_in_use(&store, 0, 41);
        bench.change(&store, 10);
        store.close().unwrap();
        bench.check();
    }
}

/// Folding copies what counts, and never stops between the two points of a restore.
#[test]
fn folds_pass_a_restore_in_use_as_a_whole() {
    let mut bench = Bench::new(Retention::Bytes(256 << 10));
    bench.options.max_segments = 12;
    let store = bench.open();
    let mut restores: Vec<(u64, u64)> = Vec::new();
    let mut passed = 0;
    for round in 0.. {
        if passed > 2 {
            break;
        }
        assert!(round < 200, "{passed} restores were passed");
        bench.change(&store, 50);
        let horizon = store.disks()[0].history().horizon.lsn;
        let split = |&&(to, at): &&(u64, u64)| to < horizon && horizon < at;
        assert_eq!(restores.iter().find(split), None, "{horizon}");
        passed += restores.iter().filter(|(_, at)| *at <= horizon).count();
        restores.retain(|(_, at)| *at > horizon);
        let back = 1 + bench.random.below(30);
        let to = bench.newest.saturating_sub(back);
        if let Ok(done) = store.disks()[round % 2].rewind(Point::Lsn(to)) {
            bench.note_restore(round % 2, &done);
            restores.extend(done.lsn.map(|at| (to, at)));
        }
        bench.check_in_use(&store);
    }
    store.close().unwrap();
    bench.check_some(7);
}

/// Each restore is one moment for those who read or write the disk, and the other disk goes on.
#[test]
fn restores_beside_writers_are_one_moment() {
    // With room for all that is written here.
    let bench = Bench::with(StoreOptions {
        segment_size: 1 << 20,
        max_segments: 64,
        retain: Some(Retention::All),
        ..StoreOptions::default()
    });
    let store = bench.open();
    let [restored, other] = [&store.disks()[0], &store.disks()[1]];
    let mut port = restored.open_port().unwrap();
    write(&mut port, 0, 1, 8);
    let first = restored.mark(&"before".parse().unwrap()).unwrap().lsn;
    write(&mut port, 0, 2, 8);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut port = other.open_port().unwrap();
            for round in 0..2000 {
                let (sector, byte) = (round % 16 * 8, round as u8);
                write(&mut port, sector, byte, 8);
                assert!(read(&mut port, sector, 8).iter().all(|&read| read == byte));
            }
        });
        let mut restores = 0;
        while !writer.is_finished() {
            let byte = restores % 2 + 1;
            let to = first + u64::from(byte) - 1;
            let done = restored.rewind(Point::Lsn(to)).unwrap();
            assert_eq!((done.lsn.is_some(), done.to_lsn), (true, to));
            assert!(read(&mut port, 0, 8).iter().all(|&read| read == byte));
            restores += 1;
        }
        assert!(restores > 0);
    });
    // A writer of the disk itself gets an answer for each request.
    drop(port);
    let (mut done, mut refused) = (0, 0);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut port = restored.open_port().unwrap();
            (0..500).for_each(|round| write(&mut port, 8, round as u8, 8));
        });
        while !writer.is_finished() {
            match restored.rewind(Point::Lsn(first)) {
                Ok(_) => done += 1,
                Err(error) => {
                    assert_eq!(error.kind(), ErrorKind::Locked, "{error}");
                    refused += 1;
                }
            }
        }
    });
    assert!(done + refused > 0);
    store.close().unwrap();
}

/// What can't be restored is refused, and nothing changes; what is restored is told in the log.
#[test]
fn a_restore_in_use_is_refused_or_told() {
    let mut bench = Bench::new(Retention::All);
    let store = bench.open();
    let error = store.disks()[0].rewind(Point::Newest).unwrap_err();
    assert!(error.to_string().contains("no history"), "{error}");
    bench.change(&store, 20);
    for (at, told) in [
        (Point::Lsn(21), "the newest is lsn:20"),
        (
            Point::Snapshot("none".parse().unwrap()),
            "no snapshot 'none'",
        ),
    ] {
        let error = store.disks()[0].rewind(at).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        assert!(error.to_string().contains(told), "{error}");
    }
    assert_eq!(store.disks()[0].rewind(Point::Newest).unwrap().lsn, None);
    bench.back_in_use(&store, 0, 12);
    // The snapshots that do not lead to the disk as it is are no points for changes.
    let snapshot = store.disks()[0].snapshot("here".parse().unwrap()).unwrap();
    assert_eq!(snapshot.lsn, 21);
    bench.back_in_use(&store, 0, 20);
    assert!(Tracked::past_points(&store.disks()[0]).is_empty());
    assert_eq!(Tracked::past_points(&store.disks()[1]).len(), 1);
    // And they stay, since the base images can't be as of them.
    bench.change(&store, 20);
    let error = store.disks()[0].checkpoint().unwrap_err();
    assert!(error.to_string().contains("snapshot 'here'"), "{error}");
    store.close().unwrap();
    let mut marks = Vec::new();
    dump_records(&bench.log(), &mut |record| {
        marks.extend(record.text.map(|text| (record.lsn, text.to_string())));
    })
    .unwrap();
    let told = |lsn: u64, to: u64| (lsn, format!("restored in place as of LSN {to}"));
    assert_eq!(marks, [told(21, 12), told(22, 20)]);
    let read_only = DiskOptions {
        read_only: true,
        ..DiskOptions::new(bench.disk(0))
    };
    let store = Store::open(
        &bench.log(),
        &[read_only, DiskOptions::detached(bench.disk(1))],
        &bench.options,
    )
    .unwrap();
    let error = store.disks()[0].rewind(Point::Lsn(12)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    store.close().unwrap();
    bench.check();
}
