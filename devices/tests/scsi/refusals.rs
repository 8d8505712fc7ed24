//! Errors that every command checks for: addresses, write protection, a unit that is not ready,
//! truncated CDBs.

use std::sync::Arc;

use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::scsi::{Status, Task};

use crate::driver::*;

const BLOCKS: u64 = 2048;

/// Every command that names blocks, with an address and a number of them. WRITE ATOMIC is not
/// there on a disk in memory.
fn named(lba: u64, blocks: u32) -> Vec<Vec<u8>> {
    let short = u32::try_from(lba).ok();
    let mut cdbs = Vec::new();
    if let (Some(lba), Ok(blocks)) = (short, u16::try_from(blocks)) {
        if lba < 1 << 21 && (1..256).contains(&blocks) {
            for opcode in [0x08, 0x0a] {
                let lba = lba.to_be_bytes();
                cdbs.push(vec![opcode, lba[1], lba[2], lba[3], blocks as u8, 0]);
            }
        }
        for opcode in [0x28, 0x2a, 0x2e, 0x2f, 0x35, 0x41] {
            cdbs.push(cdb10(opcode, 0, lba, blocks).to_vec());
        }
    }
    if let Some(lba) = short {
        for opcode in [0xa8, 0xaa, 0xae, 0xaf] {
            cdbs.push(cdb12(opcode, 0, lba, blocks).to_vec());
        }
    }
    for opcode in [0x88, 0x8a, 0x8e, 0x8f, 0x91, 0x93] {
        cdbs.push(cdb16(opcode, 0, lba, blocks).to_vec());
    }
    if let Ok(blocks) = u8::try_from(blocks) {
        cdbs.push(compare_and_write(0, lba, blocks).to_vec());
    }
    cdbs
}

#[test]
fn no_command_reaches_beyond_the_disk() {
    for block_size in [512, 4096] {
        let mut bench = Bench::ram(BLOCKS * u64::from(block_size), block_size);
        let mut tried = 0;
        for (lba, blocks) in [
            (BLOCKS, 1),
            (BLOCKS - 1, 2),
            (BLOCKS + 1, 0),
            (0, BLOCKS as u32 + 1),
            (u32::MAX.into(), 1),
            (u32::MAX.into(), u32::MAX),
            (1 << 32, 1),
            // The numbers of bytes, of sectors and of blocks of these wrap.
            (1 << 52, 1),
            (1 << 55, 8),
            (1 << 61, 1),
            (u64::MAX, 1),
            (u64::MAX, u32::MAX),
        ] {
            for cdb in named(lba, blocks) {
                bench.refuses(&cdb, &[0; 8192], OUT_OF_RANGE, None);
                tried += 1;
            }
        }
        assert!(tried > 100);
    }
}

#[test]
fn a_read_only_disk_is_write_protected() {
    let mut bench = Bench::over(Arc::new(RamDisk::read_only(&pattern(1, 4096))), 512);
    for cdb in named(0, 1) {
        let outcome = bench.run(&cdb, &Data::new(pattern(1, 1024)));
        let writes = !matches!(
            cdb[0],
            0x08 | 0x28 | 0x88 | 0xa8 | 0x2f | 0x8f | 0xaf | 0x35 | 0x91
        );
        if writes {
            assert_eq!(fixed(&outcome).code, WRITE_PROTECTED, "{cdb:02x?}");
        } else {
            assert_eq!(outcome.status, Status::Good, "{cdb:02x?}");
        }
    }
    assert_eq!(bench.read(0, 8), pattern(1, 4096));
}

#[test]
fn a_stopped_unit_is_not_ready() {
    let disk = RamDisk::with_power_loss(64, true);
    let mut bench = Bench::over(Arc::new(disk.clone()), 512);
    bench.write(5, &[5; 512]);
    bench.good(&[0x1b, 1, 0, 0, 0, 0]);
    disk.power_loss();
    for cdb in [
        &[0x00, 0, 0, 0, 0, 0][..],
        &cdb10(0x28, 0, 5, 1),
        &cdb10(0x35, 0, 0, 0),
        &cdb10(0x25, 0, 0, 0),
        &cdb16(0x9e, 0x10, 0, 32),
    ] {
        assert_eq!(bench.refused(cdb, &[0; 512]).code, NOT_READY);
    }
    // These commands do not need the medium.
    bench.receive(&[0x12, 0, 0, 0, 96, 0], 96);
    bench.receive(&[0x1a, 0, 0x3f, 0, 96, 0], 96);
    let sense = bench.receive(&[0x03, 0, 0, 0, 32, 0], 32);
    assert_eq!(
        (sense.len(), sense[2], &sense[12..14]),
        (18, 2, &[4, 2][..])
    );
    bench.good(&[0x1b, 0, 0, 0, 1, 0]);
    bench.good(&[0x00, 0, 0, 0, 0, 0]);
    assert_eq!(bench.read(5, 1), [5; 512], "stopping flushes");
    bench.write(6, &[6; 512]);
    bench.good(&[0x1b, 0, 0, 0, 4, 0]);
    disk.power_loss();
    bench.good(&[0x1b, 0, 0, 0, 5, 0]);
    assert_eq!(bench.read(6, 1), [0; 512], "not with NO_FLUSH");
    for (bits, at) in [(0x02, 1), (0x10, 4), (0x31, 5)] {
        let cdb = [0x1b, 0, 0, 0, bits, 0];
        bench.refuses(&cdb, &[], INVALID_CDB, Some((4, Some(at))));
    }
}

#[test]
fn a_change_of_capacity_is_told_once() {
    let mut bench = Bench::raw(1 << 20, 512);
    assert_eq!(bench.receive(&[0x03, 0, 0, 0, 18, 0], 18)[2], 0, "no sense");
    let backend = bench.unit.backend();
    let resizable = backend.resizable().expect("a raw disk");
    resizable.grow(2 << 20).expect("room");
    bench.unit.capacity_changed();
    // These commands do not report the unit attention condition.
    bench.receive(&[0x12, 0, 0, 0, 96, 0], 96);
    bench.receive(&[0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0], 96);
    assert_eq!(
        bench.refused(&[0x1f, 0, 0, 0, 0, 0], &[]).code,
        INVALID_OPCODE
    );
    // The next command reports it and is not carried out.
    bench.refuses(&cdb10(0x2a, 0, 0, 1), &[9; 512], CAPACITY_CHANGED, None);
    assert_eq!(bench.read(0, 1), [0; 512]);
    assert_eq!(
        bench.receive(&cdb10(0x25, 0, 0, 0), 8)[..4],
        4095_u32.to_be_bytes()
    );
    bench.write(4095, &[1; 512]);
    // REQUEST SENSE clears it too, in either format.
    bench.unit.capacity_changed();
    bench.unit.capacity_changed();
    let sense = bench.receive(&[0x03, 1, 0, 0, 252, 0], 252);
    assert_eq!(sense, [0x72, 6, 0x2a, 9, 0, 0, 0, 0]);
    bench.good(&[0x00, 0, 0, 0, 0, 0]);
}

/// For every truncated CDB the server reports the first missing field, and reads nothing beyond the
/// CDB.
#[test]
fn cdbs_that_are_cut_off() {
    let mut bench = Bench::ram(1 << 20, 512);
    assert_eq!(bench.refused(&[], &[]).code, INVALID_OPCODE);
    for cdb in [
        &cdb10(0x28, 0, 0, 1)[..],
        &cdb16(0x8a, 0, 0, 1),
        &cdb12(0xa8, 0, 0, 1),
        &[0x12, 0, 0, 0, 96, 0],
        &cdb16(0x9e, 0x10, 0, 32),
    ] {
        for len in 2..cdb.len() {
            bench.refuses(
                &cdb[..len],
                &[0; 512],
                INVALID_CDB,
                Some((len as u16, None)),
            );
        }
        // Bytes after the command's CDB are ignored.
        let mut long = cdb.to_vec();
        long.resize(32, 0xff);
        let outcome = bench.run(&long, &Data::new([0; 512]));
        assert_eq!(outcome.status, Status::Good);
    }
}

/// The compiler lets a transport move tasks and units between threads.
#[test]
fn tasks_and_units_go_where_the_transport_wants_them() {
    fn send<T: Send>() {}
    fn sync<T: Sync>() {}
    send::<Task>();
    send::<walvisor_devices::scsi::LogicalUnit>();
    sync::<walvisor_devices::scsi::LogicalUnit>();
}
