//! Damage in a log with restores.

use std::os::unix::fs::FileExt;

use walvisor_storage::{ErrorKind, Point, Retention, dump_records, inspect, rewind_disk};

use super::bench::{Bench, SECTORS};
use crate::support::{flush, write};

/// Of the control file's two slots, either one knows the restore; without both the log is refused.
#[test]
fn damage_in_the_control_file_does_not_bring_back_what_was_undone() {
    let mut bench = Bench::new(Retention::All);
    bench.work(30);
    bench.back(0, 12);
    let control = bench.log().join("control");
    let good = std::fs::read(&control).unwrap();
    let flip = |slot: u64, at: u64| {
        let file = std::fs::File::options()
            .read(true)
            .write(true)
            .open(&control)
            .unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, slot * 65536 + at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], slot * 65536 + at)
            .unwrap();
    };
    // In the rewind's entry, which follows two disks.
    let at = 96 + 2 * 624 + 16 + 8;
    for slot in [0, 1] {
        for byte in [0, 8, 16, 24] {
            flip(slot, at + byte);
            assert!(bench.exported(0) == bench.states[&12][0], "slot {slot}");
            std::fs::write(&control, &good).unwrap();
        }
    }
    flip(0, at);
    flip(1, at);
    let error = rewind_disk(&bench.disk(0), &bench.log(), Point::Lsn(5)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Damaged, "{error}");
    std::fs::write(&control, &good).unwrap();
    bench.check();
}

/// Bytes of a record that rotted are an error of what needs them: not of the disk once they are
/// undone, and again of a point that has them.
#[test]
fn rot_in_what_was_undone_is_rot_only_there() {
    let bench = Bench::new(Retention::All);
    let store = bench.open();
    let mut port = store.disks()[0].open_port().unwrap();
    for byte in [1, 2] {
        for sector in (0..SECTORS).step_by(16) {
            write(&mut port, sector, byte, 16);
        }
    }
    flush(&mut port);
    // A later header tells that all before it was durable: a damaged end could be one that was
    // never acknowledged.
    write(&mut port, 0, 2, 16);
    flush(&mut port);
    drop(port);
    store.close().unwrap();
    let mut place = None;
    dump_records(&bench.log(), &mut |record| {
        if record.lsn == 20 {
            place = Some((record.segment.to_owned(), record.offset));
        }
    })
    .unwrap();
    let (segment, offset) = place.unwrap();
    let file = std::fs::File::options().write(true).open(segment).unwrap();
    file.write_all_at(&[99], offset + 5).unwrap();
    assert!(bench.restored(0, Point::Newest).is_err());
    let done = rewind_disk(&bench.disk(0), &bench.log(), Point::Lsn(16)).unwrap();
    assert_eq!((done.undone, done.from_lsn), (17, 33));
    assert!(bench.exported(0) == vec![1; SECTORS as usize * 512]);
    assert!(
        inspect(&bench.disk(0), &bench.log())
            .unwrap()
            .log
            .unwrap()
            .damaged
            .is_empty()
    );
    assert!(bench.restored(0, Point::Lsn(33)).is_err());
    // Nothing needs it to end the history.
    let store = bench.open();
    store.disks()[0].checkpoint().unwrap();
    store.close().unwrap();
    assert!(std::fs::read(bench.disk(0)).unwrap() == vec![1; SECTORS as usize * 512]);
}
