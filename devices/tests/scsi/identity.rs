//! INQUIRY, VPD pages, READ CAPACITY, REPORT LUNS: an initiator's first commands.

use std::sync::Arc;

use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::scsi::{LogicalUnit, UnitError};

use crate::driver::*;

fn vpd(bench: &mut Bench, page: u8) -> Vec<u8> {
    let bytes = bench.receive(&[0x12, 1, page, 1, 0, 0], 256);
    assert_eq!(bytes[..2], [0, page]);
    let len = u16::from_be_bytes([bytes[2], bytes[3]]);
    assert_eq!(bytes.len(), 4 + usize::from(len));
    bytes
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(bytes[at..at + 2].try_into().unwrap())
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap())
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap())
}

#[test]
fn standard_data() {
    let mut bench = Bench::ram(1 << 20, 512);
    let bytes = bench.receive(&[0x12, 0, 0, 1, 0, 0], 256);
    assert_eq!(bytes.len(), 96);
    // A disk; SPC-4; response data format 2; length; CMDQUE.
    assert_eq!(bytes[..8], [0, 0, 6, 2, 91, 0, 0, 2]);
    assert_eq!(&bytes[8..32], b"WALVISORVirtual disk    ");
    assert!(bytes[32..36].iter().all(|byte| (0x20..0x7f).contains(byte)));
    // SAM-5, SPC-4, SBC-3, SPC-5, SBC-4.
    assert_eq!(bytes[58..68], [0, 0xa0, 4, 0x60, 4, 0xc0, 5, 0xc0, 6, 0]);
    for len in [0_u8, 4, 36, 96] {
        let part = bench.receive(&[0x12, 0, 0, 0, len, 0], 256);
        assert_eq!(part, bytes[..len.into()]);
        assert_eq!(bench.receive(&[0x12, 0, 0, 1, 0, 0], len.into()), part);
    }
}

#[test]
fn serial_number_and_designators() {
    let mut bench = Bench::ram(1 << 20, 512);
    assert_eq!(vpd(&mut bench, 0)[4..], [0, 0x80, 0x83, 0xb0, 0xb1, 0xb2]);
    assert_eq!(&vpd(&mut bench, 0x80)[4..], b"test-0001");
    let page = vpd(&mut bench, 0x83);
    assert_eq!(page[4..8], [2, 1, 0, 17]);
    assert_eq!(&page[8..25], b"WALVISORtest-0001");
    assert_eq!(page[25..29], [1, 3, 0, 8]);
    assert_eq!((page[29] >> 4, page.len()), (3, 37), "locally assigned");

    let unit =
        |serial: &str| LogicalUnit::new(Arc::new(RamDisk::new(8)), serial, 512).expect("a unit");
    assert_eq!(unit("a\n\u{fc}b c").serial(), "a__b c");
    assert_eq!(
        unit(&"x".repeat(100)).serial().len(),
        LogicalUnit::MAX_SERIAL_BYTES
    );
    let mut other = Bench::over(Arc::new(RamDisk::new(8)), 512);
    other.unit = unit("test-0002");
    assert_ne!(vpd(&mut other, 0x83)[29..], page[29..]);
}

#[test]
fn limits_are_what_the_backend_does() {
    for block_size in [512_u32, 4096] {
        // A log with segments of 1 MiB takes requests of a quarter of that.
        for (mut bench, most) in [
            (Bench::ram(4 << 20, block_size), 16 << 20),
            (Bench::wal(4 << 20, block_size), 256 << 10),
        ] {
            assert_eq!(bench.unit.max_transfer_bytes(), most as usize);
            let page = vpd(&mut bench, 0xb0);
            assert_eq!(page.len(), 64);
            assert_eq!(page[4..6], [1, 255.min(most / block_size) as u8]);
            assert_eq!(u32::from(u16_at(&page, 6)), 4096 / block_size);
            assert_eq!(u32_at(&page, 8), most / block_size);
            assert_eq!(u32_at(&page, 12), most.min(1 << 20) / block_size);
            let unmap = if block_size == 512 { 1 << 20 } else { 1 << 19 };
            assert_eq!(u32_at(&page, 20), unmap);
            assert_eq!(u32_at(&page, 24), 256);
            assert_eq!(u32_at(&page, 28), 4096 / block_size);
            assert_eq!(u32_at(&page, 32), 1 << 31);
            assert_eq!(u64_at(&page, 36), (256 << 20) / u64::from(block_size));
            // A request one block longer is refused.
            let blocks = most / block_size;
            let refused = bench.refused(&cdb16(0x88, 0, 0, blocks + 1), &[]);
            let beyond = u64::from(blocks + 1) > bench.unit.blocks();
            let expected = if beyond { OUT_OF_RANGE } else { INVALID_CDB };
            assert_eq!(refused.code, expected);
            if !beyond {
                assert_eq!(refused.cdb, Some((10, None)));
                let bytes = pattern(3, most as usize);
                bench.write(1, &bytes);
                assert_eq!(bench.read(1, blocks), bytes);
            }
        }
    }
    let mut bench = Bench::ram(1 << 20, 512);
    let page = vpd(&mut bench, 0xb1);
    assert_eq!((page.len(), u16_at(&page, 4)), (64, 1));
    assert_eq!(vpd(&mut bench, 0xb2)[4..], [0, 0xe4, 2, 0]);
}

#[test]
fn a_disk_that_discards_nothing_says_so() {
    let mut bench = Bench::over(Arc::new(RamDisk::read_only(&[7; 4096])), 512);
    assert_eq!(vpd(&mut bench, 0xb2)[4..], [0; 4]);
    let limits = vpd(&mut bench, 0xb0);
    assert!(limits[20..36].iter().all(|&byte| byte == 0));
    let capacity = bench.receive(&[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0], 32);
    assert_eq!(capacity[14], 0);
    assert_eq!(
        bench.refused(&[0x42, 0, 0, 0, 0, 0, 0, 0, 0, 0], &[]).code,
        INVALID_OPCODE
    );
    assert_eq!(bench.read(0, 8), [7; 4096]);
}

#[test]
fn capacity() {
    for block_size in [512_u32, 4096] {
        let mut bench = Bench::ram((1 << 20) + 512, block_size);
        let last = (1 << 20) / block_size - u32::from(block_size > 512);
        let short = bench.receive(&cdb10(0x25, 0, 0, 0), 64);
        assert_eq!(
            (short.len(), u32_at(&short, 0), u32_at(&short, 4)),
            (8, last, block_size)
        );
        let mut cdb = cdb16(0x9e, 0x10, 0, 32);
        let long = bench.receive(&cdb, 64);
        assert_eq!(long.len(), 32);
        assert_eq!(
            (u64_at(&long, 0), u32_at(&long, 8)),
            (last.into(), block_size)
        );
        assert_eq!(
            long[12..16],
            [0, if block_size == 512 { 3 } else { 0 }, 0xc0, 0]
        );
        assert!(long[16..].iter().all(|&byte| byte == 0));
        cdb[13] = 12;
        assert_eq!(bench.receive(&cdb, 64), long[..12]);
        // The last block can be read, and the block after it cannot.
        bench.read(last.into(), 1);
        bench.refuses(&cdb10(0x28, 0, last, 2), &[], OUT_OF_RANGE, None);
    }
}

#[test]
fn a_unit_has_blocks() {
    let new = |sectors, block_size| {
        LogicalUnit::new(Arc::new(RamDisk::new(sectors)), "", block_size).err()
    };
    assert_eq!(new(8, 4096), None);
    assert_eq!(new(7, 4096), Some(UnitError::TooSmall(4096)));
    assert_eq!(new(0, 512), Some(UnitError::TooSmall(512)));
    for size in [0, 1, 1024, 8192] {
        assert_eq!(new(64, size), Some(UnitError::BlockSize(size)));
    }
}

#[test]
fn there_is_one_unit() {
    let mut bench = Bench::ram(1 << 20, 512);
    let cdb = |select| [0xa0, 0, select, 0, 0, 0, 0, 0, 1, 0, 0, 0];
    let one = [[0, 0, 0, 8, 0, 0, 0, 0], [0; 8]].concat();
    assert_eq!(bench.receive(&cdb(0), 64), one);
    assert_eq!(bench.receive(&cdb(2), 64), one);
    assert_eq!(bench.receive(&cdb(1), 64), [0; 8]);
    bench.refuses(&cdb(3), &[], INVALID_CDB, Some((2, None)));
}
