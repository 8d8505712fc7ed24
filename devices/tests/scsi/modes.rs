//! MODE SENSE and MODE SELECT, and the effects of the latter.

use std::sync::Arc;

use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::scsi::Status;

use crate::driver::*;

/// MODE SENSE (6) of a page; `values` is its PC field.
fn sense(bench: &mut Bench, values: u8, page: u8) -> Vec<u8> {
    bench.receive(&[0x1a, 0, values << 6 | page, 0, 255, 0], 255)
}

/// MODE SELECT (6) of a parameter list.
fn select(list: &[u8]) -> [u8; 6] {
    [0x15, 0x10, 0, 0, list.len() as u8, 0]
}

fn caching(wce: bool) -> Vec<u8> {
    let mut list = vec![0; 24];
    list[4..7].copy_from_slice(&[8, 18, u8::from(wce) << 2]);
    list
}

fn control(d_sense: bool) -> Vec<u8> {
    let mut list = vec![0; 16];
    list[4..8].copy_from_slice(&[0x0a, 10, u8::from(d_sense) << 2, 0x10]);
    list[12..14].copy_from_slice(&[0xff, 0xff]);
    list
}

#[test]
fn pages_headers_and_block_descriptors() {
    let mut bench = Bench::ram(1 << 20, 512);
    let all = sense(&mut bench, 0, 0x3f);
    // Length, DPOFUA, a descriptor of 2048 blocks of 512 bytes.
    assert_eq!(all[..12], [43, 0, 0x10, 8, 0, 0, 8, 0, 0, 0, 2, 0]);
    assert_eq!(all[12..15], [8, 18, 4]);
    assert_eq!(all[32..42], [0x0a, 10, 0, 0x10, 0, 0, 0, 0, 0xff, 0xff]);
    assert_eq!(all.len(), 44);
    let changeable = sense(&mut bench, 1, 0x3f);
    let mut expected = vec![0; 32];
    expected[..3].copy_from_slice(&[8, 18, 4]);
    expected[20..23].copy_from_slice(&[0x0a, 10, 4]);
    assert_eq!(changeable[12..], expected);
    assert_eq!(sense(&mut bench, 2, 0x3f), all);
    assert_eq!(
        bench.receive(&[0x1a, 8, 0x0a, 0, 255, 0], 255)[..5],
        [15, 0, 0x10, 0, 0x0a]
    );
    assert_eq!(
        bench.receive(&[0x1a, 8, 0x3f, 0xff, 255, 0], 255)[4..],
        all[12..]
    );
    assert_eq!(bench.receive(&[0x1a, 0, 0x3f, 0, 7, 0], 255), all[..7]);

    let long = bench.receive(&[0x5a, 0x10, 0x08, 0, 0, 0, 0, 1, 0, 0], 256);
    assert_eq!(long[..8], [0, 42, 0, 0x10, 1, 0, 0, 16]);
    assert_eq!(
        long[8..24],
        [0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 2, 0]
    );
    assert_eq!(long[24..], all[12..32]);
    let short = bench.receive(&[0x5a, 0, 0x08, 0, 0, 0, 0, 1, 0, 0], 256);
    assert_eq!(short[..8], [0, 34, 0, 0x10, 0, 0, 0, 8]);

    let mut bench = Bench::over(Arc::new(RamDisk::read_only(&[0; 4096])), 512);
    assert_eq!(sense(&mut bench, 0, 8)[2], 0x90, "WP");
}

#[test]
fn the_write_cache_is_switched_live() {
    for mut bench in Bench::each(1 << 20, 512) {
        let can = bench.unit.backend().capabilities();
        assert!(can.write_cache_toggle);
        for on in [false, false, true, false, true] {
            let list = caching(on);
            bench.send(&select(&list), &list);
            assert_eq!(bench.unit.backend().write_cache(), on);
            assert_eq!(sense(&mut bench, 0, 8)[14], u8::from(on) << 2);
            assert_eq!(sense(&mut bench, 2, 8)[14], 4, "the default stays");
        }
    }
}

#[test]
fn turning_the_cache_off_puts_it_onto_the_medium() {
    let disk = RamDisk::with_power_loss(64, true);
    let mut bench = Bench::over(Arc::new(disk.clone()), 512);
    bench.write(3, &[9; 512]);
    let list = caching(false);
    bench.send(&select(&list), &list);
    disk.power_loss();
    assert_eq!(bench.read(3, 1), [9; 512]);

    let mut bench = Bench::over(Arc::new(RamDisk::with_power_loss(64, false)), 512);
    let list = caching(false);
    bench.refuses(&select(&list), &list, INVALID_LIST, Some((6, Some(2))));
    assert_eq!(sense(&mut bench, 1, 8)[14], 0, "and says so before");
}

#[test]
fn d_sense_chooses_the_format_of_sense_data() {
    let mut bench = Bench::ram(1 << 20, 512);
    let bad = cdb10(0x28, 0x80, 0, 1);
    let list = control(true);
    bench.send(&select(&list), &list);
    let outcome = bench.run(&bad, &Data::default());
    assert_eq!(outcome.status, Status::CheckCondition);
    let sense = outcome.sense.expect("sense data");
    assert_eq!(
        *sense,
        [0x72, 5, 0x24, 0, 0, 0, 0, 8, 2, 6, 0, 0, 0xcf, 0, 1, 0]
    );
    let list = control(false);
    bench.send(&select(&list), &list);
    assert_eq!(bench.refused(&bad, &[]).cdb, Some((1, Some(7))));
}

/// MODE SELECT accepts unchanged what MODE SENSE returns, for each page and for both together.
#[test]
fn what_was_sensed_can_be_selected() {
    let mut bench = Bench::ram(1 << 20, 4096);
    let mut list = sense(&mut bench, 0, 0x3f);
    list[14] = 0;
    list[12] |= 0x80;
    bench.send(&select(&list), &list);
    assert!(!bench.unit.backend().write_cache());
    let mut list = bench.receive(&[0x5a, 0x10, 0x3f, 0, 0, 0, 0, 1, 0, 0], 256);
    list[26] = 4;
    bench.send(&[0x55, 0x10, 0, 0, 0, 0, 0, 0, list.len() as u8, 0], &list);
    assert!(bench.unit.backend().write_cache());
    // An empty list, and a list of only a header.
    bench.good(&[0x15, 0x10, 0, 0, 0, 0]);
    bench.send(&[0x15, 0x10, 0, 0, 4, 0], &[0; 4]);
}

#[test]
fn lists_that_are_wrong_change_nothing() {
    let mut bench = Bench::ram(1 << 20, 512);
    let with = |mut list: Vec<u8>, at: usize, byte: u8| {
        list[at] = byte;
        list
    };
    let both = |wrong: Vec<u8>| [&caching(false)[..], &wrong[4..]].concat();
    let descriptor = |blocks: u32, size: u32| {
        let (blocks, size) = (blocks.to_be_bytes(), size.to_be_bytes());
        [&[0, 0, 0, 8], &blocks[..], &size, &caching(false)[4..]].concat()
    };
    let list = descriptor(0, 512);
    bench.send(&select(&list), &list);
    let list = caching(true);
    bench.send(&select(&list), &list);
    for (list, byte, bit) in [
        (with(caching(false), 1, 2), 1, None),
        (with(caching(false), 3, 7), 3, None),
        (descriptor(5, 512), 4, None),
        (descriptor(2048, 4096), 8, None),
        (with(caching(false), 4, 0x48), 4, Some(6)),
        (with(caching(false), 4, 0x1c), 4, Some(6)),
        (with(caching(false), 5, 10), 5, None),
        (with(caching(false), 6, 0x01), 6, Some(0)),
        (with(caching(false), 16, 0x20), 16, Some(5)),
        (both(with(control(false), 8, 0x08)), 28, Some(3)),
        (both(with(control(false), 7, 0x00)), 27, Some(4)),
        (both(with(control(false), 12, 0x7f)), 32, Some(7)),
    ] {
        bench.refuses(&select(&list), &list, INVALID_LIST, Some((byte, bit)));
    }
    let cut = |list: Vec<u8>, len: usize| list[..len].to_vec();
    for list in [
        cut(caching(false), 3),
        cut(caching(false), 5),
        cut(caching(false), 23),
        cut(descriptor(2048, 512), 11),
        both(cut(control(false), 15)),
    ] {
        assert_eq!(bench.refused(&select(&list), &list).code, LIST_LENGTH);
    }
    // The CDB announces a longer list than the initiator sends.
    let refused = bench.refused(&[0x15, 0x10, 0, 0, 24, 0], &caching(false)[..23]);
    assert_eq!(refused.code, LIST_LENGTH);
    for (cdb, at) in [
        ([0x15, 0x00, 0, 0, 24, 0], (1, Some(4))),
        ([0x15, 0x11, 0, 0, 24, 0], (1, Some(0))),
        ([0x1a, 0, 0x02, 0, 255, 0], (2, Some(5))),
        ([0x1a, 0, 0x08, 1, 255, 0], (3, None)),
    ] {
        bench.refuses(&cdb, &caching(false), INVALID_CDB, Some(at));
    }
    bench.refuses(&[0x1a, 0, 0xc8, 0, 255, 0], &[], SAVING, None);
    assert!(bench.unit.backend().write_cache());
}
