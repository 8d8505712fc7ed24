//! UNMAP, WRITE SAME and GET LBA STATUS.

use crate::driver::*;

const BYTES: u64 = 4 << 20;

fn unmap(len: u16) -> [u8; 10] {
    cdb10(0x42, 0, 0, len)
}

fn benches() -> Vec<Bench> {
    let sizes = [512, 4096].into_iter();
    sizes.flat_map(|size| Bench::each(BYTES, size)).collect()
}

#[test]
fn unmapped_blocks_read_as_zeroes() {
    for mut bench in benches() {
        let size = bench.unit.block_size() as usize;
        let bytes = pattern(1, 60 * size);
        bench.write(0, &bytes);
        // 40 ranges, one of them empty, two of them equal: more than may run side by side.
        let mut ranges: Vec<(u64, u32)> = (0..37).map(|at| (at + 1, 1)).collect();
        ranges.extend([(50, 0), (40, 5), (40, 5)]);
        let list = unmap_list(&ranges);
        bench.send(&unmap(list.len() as u16), &list);
        let after = bench.read(0, 60);
        for block in 0..60 {
            let gone = (1..38).contains(&block) || (40..45).contains(&block);
            let expected = if gone {
                vec![0; size]
            } else {
                bytes[block * size..][..size].to_vec()
            };
            assert_eq!(after[block * size..][..size], expected, "block {block}");
        }
    }
}

#[test]
fn unmap_lists_are_checked_before_anything_is_unmapped() {
    let mut bench = Bench::ram(BYTES, 512);
    let bytes = pattern(2, 64 * 512);
    bench.write(0, &bytes);
    bench.good(&unmap(0));
    let empty = unmap_list(&[]);
    bench.send(&unmap(8), &empty);
    // An empty range may lie at the end of the disk.
    let list = unmap_list(&[(8192, 0)]);
    bench.send(&unmap(24), &list);

    for len in [1, 7] {
        assert_eq!(bench.refused(&unmap(len), &[0; 7]).code, LIST_LENGTH);
    }
    let list = unmap_list(&[(0, 8), (8, 8)]);
    assert_eq!(bench.refused(&unmap(40), &list[..39]).code, LIST_LENGTH);
    assert_eq!(
        bench.refused(&unmap(39), &list).code,
        LIST_LENGTH,
        "descriptors cut off"
    );
    for range in [
        (8191, 2),
        (8193, 0),
        (u64::MAX, 1),
        (u64::MAX, u32::MAX),
        (0, 8193),
    ] {
        let list = unmap_list(&[(0, 8), range]);
        bench.refuses(&unmap(40), &list, OUT_OF_RANGE, None);
    }
    let many = unmap_list(&[(0, 1); 257]);
    let cdb = unmap(many.len() as u16);
    bench.refuses(&cdb, &many, INVALID_LIST, Some((2, None)));
    assert_eq!(bench.read(0, 64), bytes);
    let anchor = cdb10(0x42, 1, 0, 40);
    bench.refuses(&anchor, &list, INVALID_CDB, Some((1, Some(0))));

    // A list whose UNMAP DATA LENGTH ends within its last descriptor.
    let mut list = unmap_list(&[(0, 1), (1, 1)]);
    list[3] = 31;
    bench.send(&unmap(40), &list);
    assert_eq!(bench.read(0, 2), [&[0; 512], &bytes[512..1024]].concat());

    // More blocks than one command may unmap, on a disk that has them.
    let mut bench = Bench::ram(8 << 30, 4096);
    let most = (2 << 30) / 4096;
    let list = unmap_list(&[(0, most - 1), (0, 1)]);
    bench.send(&unmap(40), &list);
    let list = unmap_list(&[(0, most), (0, 1)]);
    bench.refuses(&unmap(40), &list, INVALID_LIST, Some((32, None)));
}

#[test]
fn one_block_is_written_again_and_again() {
    for mut bench in benches() {
        let size = bench.unit.block_size() as usize;
        let block = pattern(3, size);
        let before = pattern(4, 8 * size);
        bench.write(0, &before);
        bench.send(&cdb10(0x41, 0, 2, 3), &block);
        let after = bench.read(0, 8);
        assert_eq!(after[..2 * size], before[..2 * size]);
        assert_eq!(after[2 * size..5 * size], block.repeat(3));
        assert_eq!(after[5 * size..], before[5 * size..]);
        // Longer than one write of a WRITE SAME, and with UNMAP, which does not change the data
        // read.
        let blocks = (3 << 20) / size as u32 + 5;
        bench.send(&cdb16(0x93, 8, 7, blocks), &block);
        assert_eq!(bench.read(7, 9), block.repeat(9));
        let end = 7 + u64::from(blocks);
        let tail = bench.read(end - 2, 3);
        assert_eq!(tail, [block.repeat(2), vec![0; size]].concat());
        // Zeroes in four ways.
        for (at, (cdb, data)) in [
            (cdb16(0x93, 0, 7, 4), vec![0; size]),
            (cdb16(0x93, 8, 11, 4), vec![0; size]),
            (cdb16(0x93, 1, 15, 4), vec![]),
            (cdb16(0x93, 9, 19, 4), vec![]),
        ]
        .into_iter()
        .enumerate()
        {
            bench.send(&cdb, &data);
            let lba = 7 + 4 * at as u64;
            assert_eq!(
                bench.read(lba, 5),
                [vec![0; 4 * size], block.clone()].concat()
            );
        }
    }
}

#[test]
fn write_same_has_limits() {
    let mut bench = Bench::ram(1 << 30, 512);
    let most = (256 << 20) / 512;
    bench.send(&cdb16(0x93, 9, 0, most), &[]);
    for (cdb, at) in [
        (&cdb16(0x93, 9, 0, most + 1)[..], (10, None)),
        (&cdb16(0x93, 9, 0, 0), (10, None)),
        (&cdb10(0x41, 8, 0, 0), (7, None)),
        (&cdb16(0x93, 0x10, 0, 1), (1, Some(4))),
        (&cdb10(0x41, 0x10, 0, 1), (1, Some(4))),
        (&cdb10(0x41, 0x01, 0, 1), (1, Some(0))),
        (&cdb16(0x93, 0x20, 0, 1), (1, Some(5))),
    ] {
        bench.refuses(cdb, &[0; 512], INVALID_CDB, Some(at));
    }
    bench.refuses(&cdb16(0x93, 9, (1 << 21) - 1, 2), &[], OUT_OF_RANGE, None);
}

/// Status and range of each descriptor.
fn status(bench: &mut Bench, lba: u64, room: u32) -> Vec<(u8, u64, u32)> {
    let bytes = bench.receive(&cdb16(0x9e, 0x12, lba, room), room as usize);
    let len = u32::from_be_bytes(bytes[..4].try_into().unwrap());
    assert_eq!(bytes.len(), len as usize + 4);
    let descriptors = bytes[8..].chunks(16).map(|bytes| {
        let lba = u64::from_be_bytes(bytes[..8].try_into().unwrap());
        let blocks = u32::from_be_bytes(bytes[8..12].try_into().unwrap());
        (bytes[12], lba, blocks)
    });
    descriptors.collect()
}

#[test]
fn status_tells_what_is_unmapped() {
    for block_size in [512, 4096] {
        let mut bench = Bench::wal(BYTES, block_size);
        let blocks = bench.unit.blocks();
        let per = 4096 / block_size;
        let size = block_size as usize;
        bench.write(u64::from(16 * per), &pattern(1, 16 * per as usize * size));
        let list = unmap_list(&[((20 * per).into(), 4 * per)]);
        bench.send(&unmap(24), &list);
        let at = |blocks: u32| u64::from(blocks * per);
        let all = [
            (1, 0, 16 * per),
            (0, at(16), 4 * per),
            (1, at(20), 4 * per),
            (0, at(24), 8 * per),
            (1, at(32), blocks as u32 - 32 * per),
        ];
        assert_eq!(status(&mut bench, 0, 4096), all);
        assert_eq!(status(&mut bench, at(22), 4096)[0], (1, at(22), 2 * per));
        assert_eq!(status(&mut bench, 0, 40), all[..2]);
        bench.refuses(&cdb16(0x9e, 0x12, blocks, 64), &[], OUT_OF_RANGE, None);
    }
    // A disk that does not know its allocation reports all of it as mapped.
    let mut bench = Bench::ram(BYTES, 512);
    assert_eq!(status(&mut bench, 5, 64), [(0, 5, 8187)]);
}
