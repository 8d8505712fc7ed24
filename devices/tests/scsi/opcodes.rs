//! REPORT SUPPORTED OPERATION CODES compared with what the server really does.

use std::collections::BTreeMap;
use std::sync::Arc;

use walvisor_devices::backend::ram::RamDisk;

use crate::driver::*;

fn cdb(options: u8, opcode: u8, action: u16) -> [u8; 12] {
    let action = action.to_be_bytes();
    [
        0xa3, 0x0c, options, opcode, action[0], action[1], 0, 0, 0x10, 0, 0, 0,
    ]
}

/// The CDB usage data of each command, by opcode and service action.
fn usages(bench: &mut Bench) -> BTreeMap<(u8, Option<u8>), Vec<u8>> {
    let list = bench.receive(&cdb(0, 0, 0), 4096);
    let len = u32::from_be_bytes(list[..4].try_into().unwrap());
    assert_eq!(list.len(), 4 + len as usize);
    let mut usages = BTreeMap::new();
    for entry in list[4..].chunks(8) {
        let action = (entry[5] & 1 != 0).then_some(entry[3]);
        let options = if action.is_some() { 2 } else { 1 };
        let one = cdb(options, entry[0], action.unwrap_or(0).into());
        let one = bench.receive(&one, 64);
        assert_eq!(one[..2], [0, 3]);
        assert_eq!(usize::from(one[3]), one.len() - 4);
        assert_eq!(one[3], entry[7]);
        assert_eq!(one[4], entry[0]);
        assert!(
            usages
                .insert((entry[0], action), one[4..].to_vec())
                .is_none()
        );
    }
    usages
}

/// For every command, each bit that it does not use is refused with its position.
#[test]
fn bits_that_are_not_in_the_usage_data_are_refused_where_they_are() {
    // All commands: those of a disk in memory, and WRITE ATOMIC.
    assert_eq!(usages(&mut Bench::ram(1 << 20, 512)).len(), 33);
    let mut bench = Bench::wal(1 << 20, 512);
    let usages = usages(&mut bench);
    assert_eq!(usages.len(), 34);
    let mut refused = 0;
    for ((opcode, action), usage) in usages {
        for (at, used) in usage.iter().enumerate().skip(1) {
            for bit in (0..8).filter(|bit| used & 1 << bit == 0) {
                if at == 1 && bit < 5 && action.is_some() {
                    continue;
                }
                let mut cdb = vec![0; usage.len()];
                cdb[0] = opcode;
                cdb[1] = action.unwrap_or(0);
                cdb[at] |= 1 << bit;
                bench.refuses(&cdb, &[], INVALID_CDB, Some((at as u16, Some(bit))));
                refused += 1;
            }
        }
    }
    assert!(refused > 900, "{refused}");
}

#[test]
fn opcodes_that_are_not_listed_are_not_there() {
    let mut bench = Bench::ram(1 << 20, 512);
    let known: Vec<u8> = usages(&mut bench)
        .into_keys()
        .map(|(opcode, _)| opcode)
        .collect();
    for opcode in 0..=255 {
        let support = bench.receive(&cdb(3, opcode, 0), 64)[1];
        if known.contains(&opcode) {
            continue;
        }
        assert_eq!(support, 1);
        let cdb = cdb16(opcode, 0, 0, 0);
        bench.refuses(&cdb, &[], INVALID_OPCODE, Some((0, None)));
    }
    // RESERVE, RELEASE, PERSISTENT RESERVE IN and OUT are among the unknown ones: the transport
    // handles them.
    for opcode in [0x16, 0x17, 0x5e, 0x5f] {
        assert!(!known.contains(&opcode));
    }
    for (opcode, actions) in [(0x9e_u8, &[0x10, 0x12][..]), (0xa3, &[0x0c])] {
        for action in (0..0x20).filter(|action| !actions.contains(action)) {
            let cdb = cdb16(opcode, action, 0, 0);
            bench.refuses(&cdb, &[], INVALID_CDB, Some((1, Some(4))));
        }
    }
}

#[test]
fn what_cannot_be_unmapped_is_not_offered() {
    let mut bench = Bench::over(Arc::new(RamDisk::read_only(&[0; 4096])), 512);
    let usages = usages(&mut bench);
    assert!(!usages.contains_key(&(0x42, None)));
    assert_eq!(usages[&(0x93, None)][1], 0x01);
    assert_eq!(usages[&(0x41, None)][1], 0x00);
    let mut bench = Bench::ram(1 << 20, 512);
    let usages = self::usages(&mut bench);
    assert_eq!(usages[&(0x93, None)][1], 0x09);
    assert_eq!(usages[&(0x42, None)][7..9], [0xff, 0xff]);
}

#[test]
fn reporting_options() {
    let mut bench = Bench::ram(1 << 20, 512);
    // With command timeouts descriptors, which hold no timeouts.
    let plain = bench.receive(&cdb(0, 0, 0), 4096);
    let timed = bench.receive(&cdb(0x80, 0, 0), 4096);
    let commands = (plain.len() - 4) / 8;
    assert_eq!(timed.len(), 4 + commands * 20);
    assert_eq!((timed[9] & 2, timed[12..14].to_vec()), (2, vec![0, 10]));
    let one = bench.receive(&cdb(0x81, 0x00, 0), 64);
    assert_eq!(
        one,
        [&[0, 0x83, 0, 6][..], &[0; 6], &[0, 10], &[0; 10]].concat()
    );
    // By opcode, by opcode and service action, and by either.
    assert_eq!(
        bench.receive(&cdb(3, 0x9e, 0x10), 64)[..6],
        [0, 3, 0, 16, 0x9e, 0x10]
    );
    assert_eq!(
        bench.receive(&cdb(3, 0x28, 0), 64)[..5],
        [0, 3, 0, 10, 0x28]
    );
    for absent in [
        cdb(3, 0x9e, 0x11),
        cdb(2, 0x9e, 0x0110),
        cdb(3, 0x28, 1),
        cdb(1, 0xff, 0),
    ] {
        assert_eq!(bench.receive(&absent, 64), [0, 1, 0, 0]);
    }
    for wrong in [cdb(1, 0x9e, 0), cdb(2, 0x28, 0), cdb(4, 0, 0), cdb(7, 0, 0)] {
        bench.refuses(&wrong, &[], INVALID_CDB, Some((2, Some(2))));
    }
    assert_eq!(bench.receive(&cdb(0, 0, 0), 5), plain[..5]);
}
