//! Every request type, in every layout that a driver may use (virtio 1.2, 5.2.6).

use virtio_bindings::virtio_blk::*;
use vm_memory::{Bytes, GuestAddress};
use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::block::BlockConfig;
use walvisor_testkit::wait_until;

use crate::driver::*;
use crate::gate::Gate;

const SECTORS: u64 = 8192;

on_every_transport!(
    the_serial_is_the_identity,
    what_is_written_is_read,
    a_buffer_may_cross_regions_of_memory,
    a_chain_as_long_as_the_queue_works,
    several_queues_keep_their_requests_apart,
    a_read_only_disk_reads_and_flushes,
    a_long_read_beside_another_disk_comes_in_parts,
);

fn start(kind: Kind) -> Driver {
    Driver::start(kind, RamDisk::new(SECTORS), config(1), EVERYTHING)
}

/// Requests of the other disk come between the parts.
fn a_long_read_beside_another_disk_comes_in_parts(kind: Kind) {
    let gate = Gate::new(RamDisk::new(SECTORS));
    gate.open();
    let mut long = Driver::start(kind, gate.clone(), config(1), EVERYTHING);
    let mut other = start(kind);
    let data = pattern(0, 1 << 20);
    long.write(0, 0, &data);
    // A disk counts as having work for a while only, which may be over on a slow machine.
    wait_until("a read in parts", || {
        other.write(0, 0, &[7; 512]);
        let before = gate.submitted();
        assert_eq!(long.read(0, 0, data.len()), data);
        gate.submitted() - before == 8
    });
    assert_eq!(long.counts().errors, 0);
}

fn what_is_written_is_read(kind: Kind) {
    let mut driver = start(kind);
    for (sector, sectors) in [(0, 1), (7, 8), (SECTORS - 1, 1), (100, 2048)] {
        let data = pattern(sector, sectors * 512);
        driver.write(0, sector, &data);
        driver.flush(0);
        assert_eq!(driver.read(0, sector, data.len()), data);
    }
    let counts = driver.counts();
    assert_eq!(
        (counts.requests, counts.reads, counts.writes, counts.flushes),
        (12, 4, 4, 4)
    );
    assert_eq!(
        (counts.bytes_read, counts.bytes_written),
        (2058 * 512, 2058 * 512)
    );
    assert_eq!(counts.errors, 0);
    // The worker counts each doorbell soon, even if it has already taken the request. A request
    // made before the device asks for its doorbell needs none.
    assert!((1..=12).contains(&driver.kicks), "{}", driver.kicks);
    wait_until("the doorbells", || {
        driver.counts().doorbells == driver.kicks
    });
}

fn the_serial_is_the_identity(kind: Kind) {
    let mut driver = start(kind);
    let answer = driver.request(0, VIRTIO_BLK_T_GET_ID, 0, &[], 20);
    assert_eq!(answer.data, b"serial-of-a-disk\0\0\0\0");
    assert_eq!((answer.status, answer.written), (OK, 21));
    let answer = driver.request(0, VIRTIO_BLK_T_GET_ID, 0, &[], 6);
    assert_eq!(
        (answer.status, answer.data.as_slice(), answer.written),
        (OK, &b"serial"[..], 7)
    );
    // The device writes 20 bytes. It does not write the rest of a longer buffer, and does not claim
    // to.
    let answer = driver.request(0, VIRTIO_BLK_T_GET_ID, 0, &[], 64);
    assert_eq!((answer.status, answer.written), (OK, 20));

    let full = BlockConfig {
        serial: "01234567890123456789".into(),
        ..config(1)
    };
    let mut driver = Driver::start(kind, RamDisk::new(8), full, EVERYTHING);
    let answer = driver.request(0, VIRTIO_BLK_T_GET_ID, 0, &[], 20);
    assert_eq!(answer.data, b"01234567890123456789");
}

fn several_queues_keep_their_requests_apart(kind: Kind) {
    const QUEUES: usize = 4;
    const DEPTH: u64 = 16;
    let gate = Gate::new(RamDisk::new(SECTORS));
    gate.open();
    let mut driver = Driver::start(kind, gate.clone(), config(QUEUES as u16), EVERYTHING);
    assert_eq!(gate.queues(), QUEUES as u64);
    for round in 0..20 {
        // All queues write their own sectors at the same time; then each queue reads another
        // queue's.
        for write in [true, false] {
            let mut posted = Vec::new();
            for queue in 0..QUEUES {
                for slot in 0..DEPTH {
                    let owner = if write { queue } else { (queue + 1) % QUEUES };
                    let sector = owner as u64 * 1000 + slot * 8;
                    let data = pattern(round << 32 | sector, 4096);
                    let post = if write {
                        driver.post(queue, VIRTIO_BLK_T_OUT, sector, &data, 0)
                    } else {
                        driver.post(queue, VIRTIO_BLK_T_IN, sector, &[], 4096)
                    };
                    posted.push((queue, post, data));
                }
            }
            for queue in 0..QUEUES {
                driver.kick(queue);
            }
            for queue in 0..QUEUES {
                for _ in 0..DEPTH {
                    let (head, written) = driver.next_used(queue);
                    let (_, post, data) = posted
                        .iter()
                        .find(|(owner, post, _)| *owner == queue && post.head == head)
                        .expect("a head that was posted");
                    let answer = driver.answer(post, written);
                    assert_eq!(answer.status, OK);
                    if !write {
                        assert_eq!(answer.data, *data);
                    }
                }
            }
        }
        // Start over with fresh rings now and then, because the driver never frees pages.
        if round % 5 == 4 {
            driver = Driver::start(kind, gate.clone(), config(QUEUES as u16), EVERYTHING);
        }
    }
    assert_eq!(gate.leaked(), 0);
}

fn a_read_only_disk_reads_and_flushes(kind: Kind) {
    let contents = pattern(3, 4096);
    let mut driver = Driver::start(kind, RamDisk::read_only(&contents), config(1), EVERYTHING);
    assert_eq!(driver.read(0, 0, 4096), contents);
    assert_eq!(
        driver.request(0, VIRTIO_BLK_T_OUT, 0, &[0; 512], 0).status,
        IOERR
    );
    let answer = driver.request(0, VIRTIO_BLK_T_WRITE_ZEROES, 0, &segment(0, 8, 0), 0);
    assert_eq!(answer.status, UNSUPP);
    driver.flush(0);
    assert_eq!(driver.read(0, 0, 4096), contents);
}

fn a_buffer_may_cross_regions_of_memory(kind: Kind) {
    let mut driver = start(kind);
    let border = GuestAddress(REGION - 300);
    driver
        .memory
        .write_slice(&pattern(8, 512), border)
        .expect("data");
    let (_, header, _) = driver.lay_out(VIRTIO_BLK_T_OUT, 1, &[], 0);
    let status = driver.allocate(1);
    driver.rings[0].add(&[
        Piece::readable(header, 16),
        Piece::readable(border, 512),
        Piece::writable(status, 1),
    ]);
    driver.kick(0);
    driver.next_used(0);
    assert_eq!(driver.memory.read_obj::<u8>(status).expect("status"), OK);
    assert_eq!(driver.read(0, 1, 512), pattern(8, 512));
}

fn a_chain_as_long_as_the_queue_works(kind: Kind) {
    let mut driver = start(kind);
    let size = driver.rings[0].size as usize;
    for indirect in [false, true] {
        let data = pattern(11 + u64::from(indirect), (size - 2) * 512);
        let (posted, readable, writable) = driver.lay_out(VIRTIO_BLK_T_OUT, 0, &data, 0);
        let mut pieces = vec![Piece::readable(readable, 16)];
        for at in (0..data.len() as u64).step_by(512) {
            pieces.push(Piece::readable(GuestAddress(readable.0 + 16 + at), 512));
        }
        pieces.push(Piece::writable(writable, 1));
        assert_eq!(pieces.len(), size);
        if indirect {
            let table = driver.allocate(size * 16);
            driver.rings[0].add_indirect(&pieces, table);
        } else {
            driver.rings[0].add(&pieces);
            assert_eq!(driver.rings[0].free_descriptors(), 0);
        }
        driver.kick(0);
        let (_, written) = driver.next_used(0);
        assert_eq!(driver.answer(&posted, written).status, OK);
        assert_eq!(driver.read(0, 0, data.len()), data);
    }
}
