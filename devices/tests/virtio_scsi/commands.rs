//! Commands, and what they are answered with (virtio 1.2, 5.6.6.1).

use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress};
use walvisor_devices::backend::Backend;
use walvisor_devices::backend::ram::RamDisk;

use crate::driver::*;

on_both_transports!(
    every_unit_has_its_own_blocks,
    a_buffer_of_another_length_is_told,
    what_cannot_be_carried_out_is_refused,
    failures_come_with_sense_data,
    the_driver_chooses_the_sizes_of_cdb_and_sense_data,
    attributes_that_units_lack_are_refused,
    long_requests_pass_and_longer_ones_are_refused,
);

fn two_disks() -> Vec<Arc<dyn Backend>> {
    vec![Arc::new(RamDisk::new(64)), Arc::new(RamDisk::new(128))]
}

fn every_unit_has_its_own_blocks(kind: Kind) {
    let mut driver = start(kind, two_disks(), 2, EVERYTHING);
    let errors = [0, 1].map(|unit: usize| driver.metrics[unit].metrics.counts().errors);
    write(&mut driver, 0, 7, &pattern(1, 1024));
    write(&mut driver, 1, 7, &pattern(2, 1024));
    assert_eq!(read(&mut driver, 0, 7, 1024), pattern(1, 1024));
    assert_eq!(read(&mut driver, 1, 7, 1024), pattern(2, 1024));
    // READ CAPACITY (10): the last block.
    for (unit, last) in [(0, 63_u32), (1, 127)] {
        let answer = driver.command(lun(unit), &cdb_10(0x25, 0, 0), &[], 8);
        assert_eq!(answer.data[..4], last.to_be_bytes());
        let counts = driver.metrics[usize::from(unit)].metrics.counts();
        assert_eq!((counts.reads, counts.writes), (1, 1));
        assert_eq!(counts.errors, errors[usize::from(unit)]);
        assert_eq!((counts.bytes_read, counts.bytes_written), (1024, 1024));
    }
    // The other request queue.
    let posted = driver.post_command(REQUESTS + 1, lun(1), 9, &read_10(7, 1), &[], 512);
    driver.kick(REQUESTS + 1);
    let (_, written) = driver.next_used(REQUESTS + 1);
    let answer = driver.command_answer(&posted, written);
    assert_eq!(answer.data, pattern(2, 1024)[..512]);
}

fn a_buffer_of_another_length_is_told(kind: Kind) {
    let mut driver = start(kind, two_disks(), 1, EVERYTHING);
    // CDB, bytes out, bytes in, response, residual.
    let inquiry = |allocation: u8| [0x12, 0, 0, 0, allocation, 0];
    type Row<'a> = (&'a [u8], usize, usize, u8, u32);
    let rows: [Row<'_>; 12] = [
        (&read_10(0, 2), 0, 1024, OK, 0),
        (&read_10(0, 2), 0, 1536, OK, 512),
        (&read_10(0, 2), 0, 512, OVERRUN, 512),
        (&read_10(0, 2), 1024, 0, OVERRUN, 1024),
        (&read_10(0, 0), 0, 512, OK, 512),
        (&write_10(0, 2), 1024, 0, OK, 0),
        (&write_10(0, 2), 1536, 0, OK, 512),
        (&write_10(0, 2), 1023, 0, OVERRUN, 1023),
        (&write_10(0, 2), 0, 1024, OVERRUN, 1024),
        (&inquiry(36), 0, 255, OK, 219),
        (&inquiry(255), 0, 36, OVERRUN, 36),
        (&[0; 6], 0, 16, OK, 16),
    ];
    for (cdb, out, data_in, response, residual) in rows {
        let answer = driver.command(lun(0), cdb, &vec![0; out], data_in);
        assert_eq!(
            (answer.response, answer.status, answer.residual),
            (response, 0, residual),
            "{cdb:02x?} with {out} bytes out and {data_in} in"
        );
        let moved = data_in as u32 - if data_in > 0 { residual } else { 0 };
        assert_eq!(answer.written, 108 + moved, "{cdb:02x?}");
    }
    // What a target says of a unit that it lacks doesn't go into the driver's data either.
    for cdb in [inquiry(36), [0x03, 0, 0, 0, 18, 0]] {
        let answer = driver.command(lun(5), &cdb, &[0x5a; 512], 0);
        assert_eq!((answer.verdict(), answer.residual), ((OVERRUN, 0), 512));
        assert_eq!(answer.written, 108, "{cdb:02x?}");
    }
}

fn what_cannot_be_carried_out_is_refused(kind: Kind) {
    let mut driver = start(kind, two_disks(), 1, EVERYTHING);
    // Both directions: INOUT is not offered.
    let answer = driver.command(lun(0), &write_10(0, 1), &[1; 512], 512);
    assert_eq!((answer.verdict(), answer.residual), ((FAILURE, 0), 1024));
    // Data outside guest memory, in either direction.
    for (cdb, writable) in [(read_10(0, 1), true), (write_10(0, 1), false)] {
        for address in [MEMORY_END - 100, MEMORY_END, u64::MAX - 100] {
            let header = driver.allocate(0x1000);
            let mut bytes = [&lun(0)[..], &[0; 11], &cdb].concat();
            bytes.resize(19 + CDB, 0);
            driver.memory.write_slice(&bytes, header).unwrap();
            let response = driver.allocate(0x1000);
            let mut pieces = vec![
                Piece::readable(header, bytes.len() as u32),
                Piece::writable(response, 108),
            ];
            let data = Piece {
                address: GuestAddress(address),
                len: 512,
                writable,
            };
            pieces.insert(if writable { 2 } else { 1 }, data);
            driver.rings[REQUESTS].add(&pieces);
            driver.kick(REQUESTS);
            assert_eq!(driver.next_used(REQUESTS).1, 108, "{address:#x}");
            let mut answer = [0; 12];
            driver.memory.read_slice(&mut answer, response).unwrap();
            assert_eq!(answer[11], FAILURE, "{address:#x}");
        }
    }
    assert_eq!(
        read(&mut driver, 0, 0, 512),
        [0; 512],
        "nothing was written"
    );
}

fn failures_come_with_sense_data(kind: Kind) {
    let mut driver = start(kind, two_disks(), 1, EVERYTHING);
    let errors = driver.metrics[0].metrics.counts().errors;
    let answer = driver.command(lun(0), &read_10(64, 1), &[], 512);
    assert_eq!((answer.verdict(), answer.residual), ((OK, CHECK), 512));
    // Fixed format: ILLEGAL REQUEST, LOGICAL BLOCK ADDRESS OUT OF RANGE.
    assert_eq!((answer.sense.len(), answer.sense[2]), (18, 5));
    assert_eq!((answer.code(), answer.written), ([0x21, 0], 108));
    let answer = driver.command(lun(0), &write_10(64, 1), &[1; 512], 0);
    assert_eq!((answer.verdict(), answer.residual), ((OK, CHECK), 512));
    let answer = driver.command(lun(1), &[0xff; 16], &[], 0);
    assert_eq!((answer.verdict(), answer.code()), ((OK, CHECK), [0x20, 0]));
    assert_eq!(driver.metrics[0].metrics.counts().errors, errors + 2);
}

fn the_driver_chooses_the_sizes_of_cdb_and_sense_data(kind: Kind) {
    let mut driver = start(kind, two_disks(), 1, EVERYTHING);
    driver.negotiate(EVERYTHING);
    let sizes = |driver: &mut Driver| {
        let bytes: [u8; 8] = driver.read_config(20);
        [0, 4].map(|at| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()))
    };
    assert_eq!(sizes(&mut driver), [96, 32]);
    for (offset, value) in [
        (24, 0),
        (24, 253),
        (20, 253),
        (24, u32::MAX),
        (28, 7),
        (0, 9),
    ] {
        driver.registers.write_config(offset, &value.to_le_bytes());
    }
    driver.registers.write_config(24, &[8]);
    assert_eq!(
        sizes(&mut driver),
        [96, 32],
        "what is not taken changes nothing"
    );
    driver.registers.write_config(24, &16_u32.to_le_bytes());
    driver.registers.write_config(20, &8_u32.to_le_bytes());
    assert_eq!(sizes(&mut driver), [8, 16]);
    // Without a reset, which would restore the sizes.
    driver.rings.clear();
    for queue in 0..3 {
        let pages = driver.allocate(Ring::bytes(64));
        let ring = Ring::new(Arc::clone(&driver.memory), 64, pages, true);
        driver.registers.set_queue(queue, 64, ring.addresses());
        driver.rings.push(ring);
    }
    let status = driver.registers.status();
    driver.registers.set_status(status | DRIVER_OK);
    let at = driver.allocate(0x1000);
    let mut header = [&lun(0)[..], &[0; 11], &read_10(64, 1)].concat();
    header.resize(19 + 16, 0);
    driver.memory.write_slice(&header, at).unwrap();
    let response = GuestAddress(at.0 + 0x800);
    let pieces = [Piece::readable(at, 35), Piece::writable(response, 20 + 512)];
    for _ in 0..2 {
        driver.rings[REQUESTS].add(&pieces);
        driver.kick(REQUESTS);
        assert_eq!(driver.next_used(REQUESTS).1, 20);
    }
    let mut bytes = [0; 20];
    driver.memory.read_slice(&mut bytes, response).unwrap();
    // 8 bytes of sense data fit: the key of ILLEGAL REQUEST is in byte 2.
    assert_eq!((bytes[0], bytes[10], bytes[11]), (8, CHECK, OK));
    assert_eq!(bytes[12 + 2], 5);
    driver.initialise(EVERYTHING);
    assert_eq!(sizes(&mut driver), [96, 32], "a reset restores them");
}

fn attributes_that_units_lack_are_refused(kind: Kind) {
    let mut driver = start(kind, two_disks(), 1, EVERYTHING);
    for (attribute, code) in [
        (0, None),
        (1, Some([0x49, 0])),
        (2, None),
        (3, Some([0x49, 0])),
    ] {
        let mut header = [&lun(0)[..], &[0; 11], &read_10(0, 1)].concat();
        header[16] = attribute;
        header.resize(19 + CDB, 0);
        let posted = driver.post_header(REQUESTS, &header, &[], 512);
        driver.kick(REQUESTS);
        let (_, written) = driver.next_used(REQUESTS);
        let answer = driver.command_answer(&posted, written);
        let found = (answer.status == CHECK).then(|| answer.code());
        assert_eq!(
            (answer.response, found),
            (OK, code),
            "attribute {attribute}"
        );
    }
}

fn long_requests_pass_and_longer_ones_are_refused(kind: Kind) {
    let disk = RamDisk::new(1 << 16);
    let limit = disk.max_request_bytes();
    let mut driver = start(kind, vec![Arc::new(disk)], 1, EVERYTHING);
    let sectors: [u8; 4] = driver.read_config(8);
    assert_eq!(u32::from_le_bytes(sectors) as usize, limit / 512);
    let data = pattern(3, 1 << 20);
    write(&mut driver, 0, 5, &data);
    assert_eq!(read(&mut driver, 0, 5, 1 << 20), data);
    let blocks = (limit / 512 + 1) as u16;
    let answer = driver.command(lun(0), &read_10(0, blocks), &[], limit + 512);
    // INVALID FIELD IN CDB.
    assert_eq!((answer.verdict(), answer.code()), ((OK, CHECK), [0x24, 0]));
}
