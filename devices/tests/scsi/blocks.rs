//! Commands that move blocks, over every kind of disk and both block sizes.

use crate::driver::*;

const BYTES: u64 = 4 << 20;

fn benches() -> Vec<Bench> {
    let sizes = [512, 4096].into_iter();
    sizes.flat_map(|size| Bench::each(BYTES, size)).collect()
}

#[test]
fn a_length_of_zero_is_256_blocks_in_six_bytes_and_none_in_more() {
    let mut bench = Bench::ram(BYTES, 512);
    let all = pattern(1, 256 * 512);
    bench.send(&[0x0a, 0, 1, 0, 0, 0], &all);
    assert_eq!(bench.receive(&[0x08, 0, 1, 0, 0, 0], 256 * 512), all);
    assert_eq!(bench.read(256, 256), all);
    for cdb in [
        &cdb10(0x2a, 0, 8192, 0)[..],
        &cdb12(0xaa, 0, 8192, 0),
        &cdb16(0x8a, 8, 8192, 0),
    ] {
        bench.good(cdb);
    }
    for cdb in [&cdb10(0x28, 0, 8192, 0)[..], &cdb16(0x88, 8, 8192, 0)] {
        assert!(bench.receive(cdb, 512).is_empty());
    }
}

/// A write with FUA is durable, as is every write before a SYNCHRONIZE CACHE; a power loss drops
/// the others.
#[test]
fn what_is_forced_to_the_medium_survives_power_loss() {
    use std::sync::Arc;
    use walvisor_devices::backend::ram::RamDisk;
    const FUA: u8 = 0x08;
    let disk = RamDisk::with_power_loss(1024, true);
    let mut bench = Bench::over(Arc::new(disk.clone()), 512);
    let block = |seed| pattern(seed, 512);
    bench.send(&cdb10(0x2a, FUA, 0, 1), &block(1));
    bench.send(&cdb10(0x2a, 0, 1, 1), &block(2));
    disk.power_loss();
    assert_eq!(bench.read(0, 2), [block(1), vec![0; 512]].concat());

    for (at, sync) in [&cdb10(0x35, 0, 0, 0)[..], &cdb16(0x91, 2, 5, 1)]
        .into_iter()
        .enumerate()
    {
        bench.send(&cdb10(0x2a, 0, 2 + at as u32, 1), &block(3));
        bench.good(sync);
        disk.power_loss();
        assert_eq!(bench.read(2 + at as u64, 1), block(3));
    }
    // COMPARE AND WRITE with FUA, and WRITE AND VERIFY, which is always durable.
    bench.send(
        &compare_and_write(FUA, 0, 1),
        &[block(1), block(4)].concat(),
    );
    bench.send(&cdb10(0x2e, 0, 8, 1), &block(5));
    // A read with FUA first makes durable what it reads.
    bench.send(&cdb10(0x2a, 0, 9, 1), &block(6));
    assert_eq!(bench.receive(&cdb10(0x28, FUA, 9, 1), 512), block(6));
    disk.power_loss();
    assert_eq!(bench.read(0, 1), block(4));
    assert_eq!(bench.read(8, 2), [block(5), block(6)].concat());
}

/// Too short a Data-In Buffer gets as much as fits. With too short a Data-Out Buffer nothing is
/// written.
#[test]
fn lengths_that_do_not_agree() {
    for mut bench in benches() {
        let size = bench.unit.block_size() as usize;
        let bytes = pattern(4, 4 * size);
        bench.write(0, &bytes);
        for room in [0, 1, size - 1, size, size + 1, 4 * size, 4 * size + 100] {
            let got = bench.receive(&cdb10(0x28, 0, 0, 4), room);
            assert_eq!(got, bytes[..room.min(4 * size)]);
        }
        let long = pattern(5, 4 * size + 9);
        bench.send(&cdb10(0x2a, 0, 0, 4), &long);
        assert_eq!(bench.read(0, 4), long[..4 * size]);
        for (cdb, at, needed) in [
            (&cdb10(0x2a, 0, 0, 4)[..], 7, 4 * size),
            (&[0x0a, 0, 0, 0, 4, 0], 4, 4 * size),
            (&cdb12(0xaa, 0, 0, 4), 6, 4 * size),
            (&cdb16(0x8a, 0, 0, 4), 10, 4 * size),
            (&cdb10(0x2e, 0, 0, 4), 7, 4 * size),
            (&cdb10(0x2f, 2, 0, 4), 7, 4 * size),
            (&cdb10(0x2f, 6, 0, 4), 7, size),
            (&cdb10(0x41, 0, 0, 4), 7, size),
            (&cdb16(0x93, 8, 0, 4), 10, size),
            (&compare_and_write(0, 0, 4), 13, 8 * size),
        ] {
            for len in [0, needed - 1] {
                bench.refuses(cdb, &vec![7; len], INVALID_CDB, Some((at, None)));
            }
        }
        for (cdb, at, len) in [
            (&cdb10(0x41, 0, 0, 4)[..], 7, 2 * size),
            (&cdb16(0x93, 8, 0, 4), 10, size + 1),
            (&compare_and_write(0, 0, 1), 13, 4 * size),
        ] {
            bench.refuses(cdb, &vec![7; len], INVALID_CDB, Some((at, None)));
        }
        assert_eq!(bench.read(0, 4), long[..4 * size]);
    }
}
