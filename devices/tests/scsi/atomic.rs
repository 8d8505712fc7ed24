//! WRITE ATOMIC, and what is promised of it on each kind of disk.

use std::sync::Arc;

use walvisor_devices::backend::Backend;
use walvisor_storage::{Point, Store, scratch_file};

use crate::driver::*;

const BYTES: u64 = 4 << 20;
/// A log with segments of 1 MiB takes records of a quarter of that.
const RECORD: u32 = 256 << 10;

/// MAXIMUM ATOMIC TRANSFER LENGTH, alignment, granularity, and the two fields of boundaries.
fn atomic_limits(bench: &mut Bench) -> [u32; 5] {
    let page = bench.receive(&[0x12, 1, 0xb0, 0, 64, 0], 64);
    let field = |at: usize| u32::from_be_bytes(page[at..at + 4].try_into().unwrap());
    [44, 48, 52, 56, 60].map(field)
}

/// Whether REPORT SUPPORTED OPERATION CODES has it.
fn is_reported(bench: &mut Bench) -> bool {
    let one = [0xa3, 0x0c, 1, 0x9c, 0, 0, 0, 0, 0, 64, 0, 0];
    bench.receive(&one, 64)[1] == 3
}

#[test]
fn the_promise_is_one_record_of_the_log() {
    for size in [512, 4096] {
        let mut bench = Bench::wal(BYTES, size);
        assert_eq!(atomic_limits(&mut bench), [RECORD / size, 0, 1, 0, 0]);
        assert!(is_reported(&mut bench));
    }
}

#[test]
fn other_disks_promise_nothing() {
    let look = |store: &Store, scratch| -> Arc<dyn Backend> {
        Arc::new(
            store.disks()[0]
                .look(Point::Newest, scratch)
                .expect("a look"),
        )
    };
    for size in [512, 4096] {
        for mut bench in [
            Bench::ram(BYTES, size),
            Bench::raw(BYTES, size),
            Bench::of_log(BYTES, size, |store| look(store, None)),
            Bench::of_log(BYTES, size, |store| {
                look(store, Some(scratch_file().expect("a file")))
            }),
        ] {
            assert_eq!(atomic_limits(&mut bench), [0; 5]);
            assert!(!is_reported(&mut bench));
            let block = vec![7; size as usize];
            bench.refuses(
                &write_atomic(0, 0, 1),
                &block,
                INVALID_OPCODE,
                Some((0, None)),
            );
        }
    }
}

#[test]
fn a_write_is_one_operation_up_to_the_limit() {
    for size in [512, 4096] {
        let mut bench = Bench::wal(BYTES, size);
        let most = RECORD / size;
        for (lba, blocks) in [(0, 1), (3, 16), (5, most), (BYTES as u32 / size - 1, 1)] {
            for flags in [0, 0x18] {
                let bytes = pattern(u64::from(lba + flags), (blocks * size) as usize);
                let cdb = write_atomic(flags as u8, lba.into(), blocks as u16);
                bench.send(&cdb, &bytes);
                assert_eq!(bench.read(lba.into(), blocks), bytes);
            }
        }
        bench.good(&write_atomic(0, 9, 0));
    }
}

#[test]
fn what_is_not_promised_is_refused_and_writes_nothing() {
    for size in [512, 4096] {
        let mut bench = Bench::wal(BYTES, size);
        let (most, end) = ((RECORD / size) as u16, BYTES / u64::from(size));
        let data = vec![7; (RECORD + size) as usize];
        let mut boundary = write_atomic(0, 0, 8);
        boundary[11] = 8;
        for (cdb, code, field) in [
            (write_atomic(0, 0, most + 1), INVALID_CDB, Some((12, None))),
            (write_atomic(0, 0, u16::MAX), OUT_OF_RANGE, None),
            (boundary, INVALID_CDB, Some((11, Some(3)))),
            (write_atomic(0x20, 0, 1), INVALID_CDB, Some((1, Some(5)))),
            (write_atomic(0, end - 1, 2), OUT_OF_RANGE, None),
            (write_atomic(0, u64::MAX, 1), OUT_OF_RANGE, None),
        ] {
            bench.refuses(&cdb, &data, code, field);
        }
        let short = &data[..8 * size as usize - 1];
        bench.refuses(&write_atomic(0, 0, 8), short, INVALID_CDB, Some((12, None)));
        assert!(bench.read(0, u32::from(most)).iter().all(|&byte| byte == 0));
    }
}
