//! Logs of another size: what they hold is kept, wherever in the ring it is.

use std::ops::Range;

use walvisor_storage::{EngineKind, ErrorKind, Retention, StoreOptions, resize_log};

use crate::support::{MIB, TestDisk, all, commit, flip, flush, port, read, refused, small, write};

/// The number behind the last segment file's.
fn end(place: &TestDisk) -> usize {
    let files = place.files("segment-");
    (0..files.len().max(64))
        .rev()
        .find(|at| files.contains(&place.segment(*at as u32)))
        .unwrap()
        + 1
}

fn resized(place: &TestDisk, mib: u64) -> walvisor_storage::Result<u64> {
    resize_log(&place.log(), mib * MIB).map(|done| done.size / MIB)
}

/// Writes of 64 KiB that are not copied: number `n` is at 128 `n` sectors.
fn filled(place: &TestDisk, numbers: Range<u8>) -> TestDisk {
    let store = place.open();
    let mut port = port(&store, 0);
    for number in numbers {
        write(&mut port, u64::from(number) * 128, number, 128);
    }
    flush(&mut port);
    place.crash()
}

fn holds(place: &TestDisk, numbers: Range<u8>) {
    let store = place.open();
    for number in numbers {
        let data = read(&mut port(&store, 0), u64::from(number) * 128, 128);
        assert!(all(&data, number), "{number}");
    }
    store.close().unwrap();
}

#[test]
fn a_log_grows_and_shrinks_and_keeps_what_it_holds() {
    let place = TestDisk::new();
    let grown = resize_log(&place.log(), 19 * MIB + 1).unwrap();
    assert_eq!((grown.old_size, grown.size), (4 * MIB, 20 * MIB));
    assert_eq!(place.report().max_segments, 20);
    // 4 MiB in a ring of 20 segments: no checkpoint begins, and 5 are in use.
    let killed = filled(&place, 1..64);
    let before = (killed.report(), end(&killed));
    assert!(before.0.records == 63 && before.0.segments >= 5);
    let command = format!("walvisor disk checkpoint {}", killed.disk.display());
    assert_eq!(
        refused(resized(&killed, 4), &command),
        ErrorKind::InvalidInput
    );
    assert_eq!((killed.report(), end(&killed)), before);
    assert_eq!(resized(&killed, 6).unwrap(), 6);
    assert_eq!(killed.report().records, 63);
    assert!(end(&killed) <= 6);
    holds(&killed, 1..64);
    // Everything is in the image now.
    assert_eq!(resized(&killed, 4).unwrap(), 4);
    assert!(end(&killed) <= 4);
    holds(&killed, 1..64);
}

/// What the log holds is in its last files, and takes the places of free ones.
#[test]
fn a_live_segment_takes_the_place_of_a_free_one() {
    let place = TestDisk::new();
    resized(&place, 12).unwrap();
    let store = place.open();
    let disk = &store.disks()[0];
    // Segments are used in turn, so after each checkpoint others are.
    let mut tried = 0;
    for number in 1..120_u8 {
        commit(disk, u64::from(number) * 128 % 16384, number, 128);
        if number % 20 == 0 {
            disk.checkpoint().unwrap();
        }
        if number % 8 != 0 {
            continue;
        }
        let killed = place.crash();
        let files = end(&killed);
        let before = killed.exported(&killed.disk).unwrap();
        if resized(&killed, 4).is_ok() {
            tried += u32::from(files > 4);
            assert!(end(&killed) <= 4);
        }
        assert!(killed.exported(&killed.disk).unwrap() == before, "{number}");
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
        place.try_open(&options).unwrap().close().unwrap();
        u64::from(place.report().max_segments)
    };
    assert_eq!(open(Some(Retention::Bytes(8 * MIB))), 12);
    for size in [4, 8, 11] {
        for part in [
            "keeping 8388608 bytes of history",
            "takes a log of 12582912 bytes",
            "walvisor disk retain",
        ] {
            assert_eq!(
                refused(resized(&place, size), part),
                ErrorKind::InvalidInput
            );
        }
    }
    for size in [20, 12, 15] {
        assert_eq!(resized(&place, size).unwrap(), size);
        assert_eq!(open(None), size);
    }
    assert_eq!(open(Some(Retention::Nothing)), 15);
    resized(&place, 4).unwrap();
    assert_eq!(open(None), 4);
}

/// A log that got room for more history while it was in use has files that only this room allows:
/// either slot of the control file knows of it.
#[test]
fn rot_of_a_control_slot_disowns_no_segment() {
    let place = TestDisk::new();
    let store = place.open();
    let disk = &store.disks()[0];
    disk.set_retain(Retention::Bytes(8 * MIB)).unwrap();
    for number in 0..96_u8 {
        commit(disk, u64::from(number) * 128, number, 128);
    }
    let killed = place.crash();
    assert!(end(&killed) > 5);
    store.close().unwrap();
    let control = killed.log().join("control");
    for slot in [0, 65536] {
        flip(&control, slot + 100);
        assert_eq!(killed.report().last_lsn, 96, "slot at {slot}");
        flip(&control, slot + 100);
    }
    holds(&killed, 0..96);
}

#[test]
fn a_size_that_no_log_can_have_is_refused() {
    let place = TestDisk::new();
    for size in [0, 3 * MIB, (65536 << 20) + 1, u64::MAX] {
        let kind = refused(resize_log(&place.log(), size), "use 4194304 to 68719476736");
        assert_eq!(kind, ErrorKind::InvalidInput);
    }
    let none = resize_log(&place.top, 8 * MIB);
    assert_eq!(refused(none, ""), ErrorKind::NotFound);
    let store = place.open();
    assert_eq!(refused(resized(&place, 8), ""), ErrorKind::Locked);
    store.close().unwrap();
}
