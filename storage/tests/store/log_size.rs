//! Logs of another size: what they hold is kept, wherever in the ring it is.

use crate::support::{TestDisk, flush, read, small, write};
use walvisor_storage::{
    DiskOptions, EngineKind, ErrorKind, Retention, Store, StoreOptions, default_log_dir, resize_log,
};

const MIB: u64 = 1 << 20;

/// The numbers of the segment files.
fn segments(place: &TestDisk) -> Vec<u32> {
    let names = std::fs::read_dir(place.log()).unwrap();
    let number = |name: std::ffi::OsString| {
        let number = name.to_str()?.strip_prefix("segment-")?;
        number.parse().ok()
    };
    let mut found: Vec<u32> = names
        .filter_map(|entry| number(entry.unwrap().file_name()))
        .collect();
    found.sort_unstable();
    found
}

/// Writes of 64 KiB that are not copied: number `n` is at 128 `n` sectors.
fn fill(place: &TestDisk, options: &StoreOptions, numbers: std::ops::Range<u8>) -> TestDisk {
    let disks = [DiskOptions::new(&place.disk)];
    let store = Store::open(&place.log(), &disks, options).unwrap();
    let mut port = store.disks()[0].open_port().unwrap();
    for number in numbers {
        write(&mut port, u64::from(number) * 128, number, 128);
    }
    flush(&mut port);
    place.crash()
}

fn holds(place: &TestDisk, numbers: std::ops::Range<u8>) {
    let disks = [DiskOptions::new(&place.disk)];
    let store = Store::open(&place.log(), &disks, &small(EngineKind::Auto)).unwrap();
    let mut port = store.disks()[0].open_port().unwrap();
    for number in numbers {
        let data = read(&mut port, u64::from(number) * 128, 128);
        assert!(data.iter().all(|&byte| byte == number), "{number}");
    }
    drop(port);
    store.close().unwrap();
}

#[test]
fn a_log_grows_and_shrinks_and_keeps_what_it_holds() {
    let place = TestDisk::new();
    let grown = resize_log(&place.log(), 19 * MIB + 1).unwrap();
    assert_eq!((grown.old_size, grown.size), (4 * MIB, 20 * MIB));
    assert_eq!(place.report().max_segments, 20);
    // 4 MiB in a ring of 20 segments: no checkpoint begins, and 5 are in use.
    let killed = fill(&place, &small(EngineKind::Auto), 1..64);
    let live = killed.report();
    assert!(live.records == 63 && live.segments >= 5, "{live:?}");
    let before = segments(&killed);
    let error = resize_log(&killed.log(), 4 * MIB).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    let text = error.to_string();
    let command = format!("walvisor disk checkpoint {}", killed.disk.display());
    assert!(text.contains(&command), "{text}");
    assert_eq!((killed.report(), segments(&killed)), (live, before));
    let shrunk = resize_log(&killed.log(), 6 * MIB).unwrap();
    assert_eq!((shrunk.old_size, shrunk.size), (20 * MIB, 6 * MIB));
    assert_eq!(killed.report().records, 63);
    assert!(segments(&killed).last() < Some(&6));
    holds(&killed, 1..64);
    // Everything is in the image now.
    assert_eq!(resize_log(&killed.log(), 4 * MIB).unwrap().size, 4 * MIB);
    assert!(segments(&killed).last() < Some(&4));
    holds(&killed, 1..64);
}

/// What the log holds is in its last files, and takes the places of free ones.
#[test]
fn a_live_segment_takes_the_place_of_a_free_one() {
    let place = TestDisk::new();
    resize_log(&place.log(), 12 * MIB).unwrap();
    let options = small(EngineKind::Auto);
    let disks = [DiskOptions::new(&place.disk)];
    let store = Store::open(&place.log(), &disks, &options).unwrap();
    let mut port = store.disks()[0].open_port().unwrap();
    // Segments are used in turn, so after each checkpoint others are.
    let mut tried = 0;
    for number in 1..120_u8 {
        write(&mut port, u64::from(number) * 128 % 16384, number, 128);
        if number % 20 == 0 {
            store.disks()[0].checkpoint().unwrap();
        }
        flush(&mut port);
        if number % 8 != 0 {
            continue;
        }
        let killed = place.crash();
        let files = segments(&killed).len() as u64;
        let want = |place: &TestDisk| {
            let raw = place.disk.with_extension("raw");
            walvisor_storage::export_disk(
                &place.disk,
                &default_log_dir(&place.disk),
                &raw,
                true,
                None,
                &mut |_, _| {},
            )
            .unwrap();
            std::fs::read(raw).unwrap()
        };
        let before = want(&killed);
        if resize_log(&killed.log(), 4 * MIB).is_ok() {
            tried += u32::from(files > 4);
            assert!(segments(&killed).last() < Some(&4));
        }
        assert!(want(&killed) == before, "{number}");
        holds(&killed, 0..0);
        assert!(std::fs::read(&killed.disk).unwrap() == before, "{number}");
    }
    assert!(tried > 0, "{tried}");
}

/// A size that the next open would undo is refused. One that is not refused stays.
#[test]
fn a_log_that_keeps_bytes_is_not_made_smaller_than_these() {
    let place = TestDisk::new();
    let open = |retain| {
        let options = StoreOptions {
            retain,
            ..small(EngineKind::Auto)
        };
        let store = Store::open(&place.log(), &[DiskOptions::new(&place.disk)], &options);
        store.unwrap().close().unwrap();
        place.report().max_segments
    };
    assert_eq!(open(Some(Retention::Bytes(8 * MIB))), 12);
    for size in [4, 8, 11] {
        let error = resize_log(&place.log(), size * MIB).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{size}");
        let text = error.to_string();
        assert!(text.contains("keeping 8388608 bytes of history"), "{text}");
        assert!(text.contains("takes a log of 12582912 bytes"), "{text}");
        assert!(text.contains("set-retain"), "{text}");
    }
    for size in [20, 12, 15] {
        assert_eq!(
            resize_log(&place.log(), size * MIB).unwrap().size,
            size * MIB
        );
        assert_eq!(open(None), size as u32);
    }
    assert_eq!(open(Some(Retention::Nothing)), 15);
    resize_log(&place.log(), 4 * MIB).unwrap();
    assert_eq!(open(None), 4);
}

/// A log that got room for more history while it was in use has files that only this room allows:
/// either slot of the control file knows of it.
#[test]
fn rot_of_a_control_slot_disowns_no_segment() {
    let place = TestDisk::new();
    let store = place.open();
    store.disks()[0]
        .set_retain(Retention::Bytes(8 * MIB))
        .unwrap();
    let mut port = store.disks()[0].open_port().unwrap();
    for number in 0..96_u8 {
        write(&mut port, u64::from(number) * 128, number, 128);
        flush(&mut port);
    }
    let killed = place.crash();
    assert!(segments(&killed).last() > Some(&4));
    drop(port);
    store.close().unwrap();
    let control = killed.log().join("control");
    let good = std::fs::read(&control).unwrap();
    for slot in 0..2 {
        let mut bad = good.clone();
        bad[slot * 65536 + 100] ^= 1;
        std::fs::write(&control, bad).unwrap();
        assert_eq!(killed.report().last_lsn, 96, "slot {slot}");
    }
    std::fs::write(&control, good).unwrap();
    holds(&killed, 0..96);
}

#[test]
fn a_size_that_no_log_can_have_is_refused() {
    let place = TestDisk::new();
    for size in [0, 3 * MIB, (65536 << 20) + 1, u64::MAX] {
        let error = resize_log(&place.log(), size).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{size}");
        assert!(error.to_string().contains("use 4194304 to 68719476736"));
    }
    let error = resize_log(place.disk.parent().unwrap(), 8 * MIB).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let store = place.open();
    let error = resize_log(&place.log(), 8 * MIB).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Locked);
    store.close().unwrap();
}
