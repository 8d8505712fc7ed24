//! A log that keeps history: any state in it comes back, and the base images follow at its begin.

use walvisor_storage::{Allocation, ErrorKind, LogHistory, Retention, StoreOptions};

use crate::bench::Bench;
use crate::support::{commit, flush, port, put, read, refused, write};

const SEGMENT: u64 = 64 << 10;

fn bench(retain: Retention) -> Bench {
    Bench::with(StoreOptions {
        segment_size: SEGMENT,
        max_segments: 8,
        retain: Some(retain),
        ..StoreOptions::default()
    })
}

/// The log goes round several times, and what it keeps is set once. A kill loses nothing of it.
#[test]
fn a_log_keeps_what_it_is_to_keep_and_gives_up_the_oldest() {
    const KEPT: u64 = 4 * SEGMENT;
    // A full log that is to keep all gives up the oldest; its last segment always stays. The bytes
    // of the log include ends of segments that the next batch did not fit: less than half of each,
    // which is the most that a batch has, however many records a busy machine makes one.
    for (retain, least) in [
        (Retention::Bytes(KEPT), (KEPT - SEGMENT) / 2),
        (Retention::All, 0),
    ] {
        let mut bench = bench(retain);
        for life in 0..4 {
            bench.open();
            bench.change(150);
            // The check opens a killed log, which may need room.
            let killed = life == 2;
            if killed {
                bench.kill()
            } else {
                bench.close()
            }
            bench.check();
            let (horizon, mut bytes) = (bench.horizon(), 0);
            // Each record is a batch at most: a header, and mostly a payload.
            for (_, (_, sectors, now)) in bench.touched.range(horizon + 1..) {
                let payload = (sectors.end - sectors.start) * 512;
                let written = u64::from(*now == Allocation::Data);
                bytes += 4096 + written * payload.next_multiple_of(4096);
            }
            let enough = horizon == 0 || bytes > least || killed && least == 0;
            assert!(enough, "{retain}: {bytes} bytes are kept");
            assert!(life < 2 || horizon > 0, "it keeps everything");
        }
        // The whole log goes to the images when nothing is to be kept, also while it is in use.
        bench.open();
        bench
            .disk(0)
            .set_retain(Retention::Bytes(2 * KEPT))
            .unwrap();
        bench.close();
        bench.open();
        assert_eq!(bench.disk(0).retain(), Retention::Bytes(2 * KEPT));
        bench.disk(0).set_retain(Retention::Nothing).unwrap();
        bench.close();
        assert_eq!(bench.horizon(), bench.newest);
        assert!([0, 1].map(|disk| bench.image(disk)) == bench.states[&bench.newest]);
    }
}

/// The bytes that a damaged record had cannot be brought back, so the states that need them are
/// given up. What the disk has now is not affected.
#[test]
fn damage_in_the_history_costs_the_history_alone() {
    let place = bench(Retention::All).place;
    let store = place.open();
    // The first record is overwritten at once.
    commit(&store.disks()[0], 0, 0x77, 8);
    commit(&store.disks()[0], 0, 0x78, 8);
    let log = std::fs::read(place.segment(0)).unwrap();
    let found = log.windows(4096).position(|bytes| bytes == [0x77; 4096]);
    put(
        &place.segment(0),
        found.expect("the record") as u64,
        &[0x70],
    );
    let mut port = port(&store, 0);
    for number in 0..1500 {
        write(&mut port, 8 + number % 31 * 8, (number % 200) as u8 + 1, 8);
    }
    flush(&mut port);
    assert_eq!(read(&mut port, 0, 8)[..], [0x78; 4096]);
    drop(port);
    store.close().unwrap();
    assert_eq!(place.exported(&place.disk).unwrap()[..4096], [0x78; 4096]);
    assert!(place.report().damaged.is_empty());
}

/// What a log in use tells of its history is what comes back after it was closed, and what is told
/// of it then.
#[test]
fn the_log_tells_which_history_it_has() {
    const KEPT: u64 = 4 * SEGMENT;
    let mut bench = bench(Retention::Bytes(KEPT));
    let tell = |bench: &mut Bench, count, snapshot: bool| {
        bench.open();
        bench.change(count);
        let disk = bench.disk(0).clone();
        if snapshot {
            disk.snapshot("held".parse().unwrap()).unwrap();
        }
        bench.close();
        disk.history()
    };
    let told = tell(&mut bench, 20, false);
    assert_eq!(told.horizon.lsn, 0);
    let kept = (told.retain, told.pinned_bytes);
    assert_eq!(kept, (Retention::Bytes(KEPT), 0));
    let told = tell(&mut bench, 400, true);
    assert!(told.horizon.cid > 0 && told.horizon.unix_us > 0);
    assert!((KEPT..told.room_bytes).contains(&told.kept_bytes));
    assert_eq!(told.snapshots.len(), 1);
    let later = bench.place.report().history;
    assert_eq!(later.horizon.lsn, told.horizon.lsn);
    // The record at the horizon may have left the log.
    assert!(later.horizon.cid >= told.horizon.cid && later.horizon.unix_us >= told.horizon.unix_us);
    assert!(later.index_bytes > 0 && told.index_bytes > 0);
    let told = LogHistory {
        horizon: later.horizon,
        index_bytes: later.index_bytes,
        ..told
    };
    assert_eq!(later, told);
    bench.check();
    // The base images can go past the snapshot.
    assert_eq!(tell(&mut bench, 20, false).pinned_bytes, 0);
}

/// What a log keeps takes segment files beside those that it had, and only once.
#[test]
fn the_log_gets_room_for_the_bytes_that_it_keeps() {
    let place = bench(Retention::Nothing).place;
    assert_eq!(place.report().max_segments, 8);
    let open = |retain| {
        let options = StoreOptions {
            retain: Some(Retention::Bytes(retain)),
            ..place.options
        };
        place.try_open(&options)
    };
    for (retain, wanted) in [(10, 18), (10, 18), (4, 18), (12, 26)] {
        open(retain * SEGMENT).unwrap().close().unwrap();
        assert_eq!(place.report().max_segments, wanted, "{retain}");
    }
    let kind = refused(open(1 << 40), "can keep at most");
    assert_eq!(kind, ErrorKind::InvalidInput);
}
