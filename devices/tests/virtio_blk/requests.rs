//! Every request type, in every layout that a driver may use (virtio 1.2, 5.2.6).

use std::fs::File;

use virtio_bindings::virtio_blk::*;
use vm_memory::{Bytes, GuestAddress};
use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::block::BlockConfig;
use walvisor_storage::{Image, RawCache, RawDisk};
use walvisor_testkit::wait_until;

use crate::driver::*;
use crate::gate::Gate;

const SECTORS: u64 = 8192;

on_every_transport!(
    the_serial_is_the_identity,
    several_queues_keep_their_requests_apart,
    ranges_beyond_the_disk_are_errors,
    the_largest_request_works_and_a_larger_one_is_an_error,
    a_read_only_disk_reads_and_flushes,
    a_long_read_beside_another_disk_comes_in_parts,
);

/// The same for properties of every disk: over memory, and over a raw image.
macro_rules! on_every_disk {
    ($($name:ident,)*) => {
        mod ram {
            $(fn $name(kind: crate::driver::Kind) { super::$name(super::start(kind)); })*
            on_every_transport!($($name,)*);
        }
        mod raw {
            $(fn $name(kind: crate::driver::Kind) { super::$name(super::start_raw(kind)); })*
            on_every_transport!($($name,)*);
        }
    };
}

on_every_disk!(
    what_is_written_is_read,
    descriptors_may_end_anywhere,
    buffers_outside_guest_memory_are_errors,
    a_chain_as_long_as_the_queue_works,
);

fn start(kind: Kind) -> Driver {
    Driver::start(kind, RamDisk::new(SECTORS), config(1), EVERYTHING)
}

fn start_raw(kind: Kind) -> Driver {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("disk.img");
    let file = File::create(&path).expect("an image");
    file.set_len(SECTORS * 512).expect("an image");
    let image = Image::open(&path, false).expect("an image");
    // The image's name is removed with the directory, and the file is closed with the device.
    let disk = RawDisk::new(image, RawCache::Writeback);
    Driver::start(kind, disk, config(1), EVERYTHING)
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

fn what_is_written_is_read(mut driver: Driver) {
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

/// Cuts `[address, address + len)` at random places; empty pieces included.
fn cut(
    random: &mut Random,
    address: GuestAddress,
    len: u32,
    most: u64,
) -> Vec<(GuestAddress, u32)> {
    let mut cuts: Vec<u32> = (0..random.below(most))
        .map(|_| random.below(u64::from(len) + 1) as u32)
        .collect();
    cuts.extend([0, len]);
    cuts.sort_unstable();
    cuts.windows(2)
        .map(|pair| {
            (
                GuestAddress(address.0 + u64::from(pair[0])),
                pair[1] - pair[0],
            )
        })
        .collect()
}

fn descriptors_may_end_anywhere(mut driver: Driver) {
    let mut random = Random(0x5eed);
    let mut disk = vec![0; 32 * 512];
    for round in 0..600 {
        let sector = random.below(24);
        let len = (1 + random.below(8)) as usize * 512;
        let from = sector as usize * 512;
        let write = random.below(2) == 0;
        let out = if write {
            pattern(round, len)
        } else {
            Vec::new()
        };
        let (request, data_in) = if write {
            (VIRTIO_BLK_T_OUT, 0)
        } else {
            (VIRTIO_BLK_T_IN, len)
        };
        let (posted, readable, writable) = driver.lay_out(request, sector, &out, data_in);
        let readable = cut(&mut random, readable, 16 + out.len() as u32, 12);
        let writable = cut(&mut random, writable, data_in as u32 + 1, 12);
        let pieces: Vec<Piece> = readable
            .into_iter()
            .map(|(address, len)| Piece::readable(address, len))
            .chain(
                writable
                    .into_iter()
                    .map(|(address, len)| Piece::writable(address, len)),
            )
            .collect();
        let head = if random.below(2) == 0 {
            let table = driver.allocate(pieces.len() * 16);
            driver.rings[0].add_indirect(&pieces, table)
        } else {
            driver.rings[0].add(&pieces)
        };
        driver.kick(0);
        let (used, written) = driver.next_used(0);
        assert_eq!(used, head);
        let answer = driver.answer(&posted, written);
        assert_eq!(
            (answer.status, answer.written),
            (OK, data_in as u32 + 1),
            "round {round}"
        );
        if write {
            disk[from..from + len].copy_from_slice(&out);
        } else {
            assert_eq!(answer.data, disk[from..from + len], "round {round}");
        }
    }
    assert_eq!(driver.read(0, 0, disk.len()), disk);
    assert_eq!(driver.counts().errors, 0);
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

fn ranges_beyond_the_disk_are_errors(kind: Kind) {
    let gate = Gate::new(RamDisk::new(SECTORS));
    gate.open();
    let mut driver = Driver::start(kind, gate.clone(), config(1), EVERYTHING);
    driver.write(0, 0, &[1; 512]);
    let sectors = [
        SECTORS,
        SECTORS + 1,
        1 << 32,
        1 << 54,
        1 << 55,
        1 << 63,
        u64::MAX,
    ];
    for sector in sectors.into_iter().chain([SECTORS - 1]) {
        // Two sectors, so that the last one is beyond the end in every case.
        let answer = driver.request(0, VIRTIO_BLK_T_IN, sector, &[], 1024);
        assert_eq!(
            (answer.status, answer.written),
            (IOERR, 0),
            "read of {sector:#x}"
        );
        assert_eq!(
            driver
                .request(0, VIRTIO_BLK_T_OUT, sector, &[2; 1024], 0)
                .status,
            IOERR
        );
        for erase in [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
            let answer = driver.request(0, erase, 0, &segment(sector, 2, 0), 0);
            assert_eq!(answer.status, IOERR, "{erase} of {sector:#x}");
        }
    }
    for erase in [VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES] {
        for (sector, sectors) in [(0, u32::MAX), (0, 0), (u64::MAX, u32::MAX)] {
            let answer = driver.request(0, erase, 0, &segment(sector, sectors, 0), 0);
            assert_eq!(
                answer.status, IOERR,
                "{erase} of {sector:#x} + {sectors:#x}"
            );
        }
    }
    assert_eq!(gate.submitted(), 1, "the backend has never heard of them");
    // sector << 9 wraps to 0 for 2^55: nothing must have landed there.
    assert_eq!(driver.read(0, 0, 512), [1; 512]);
    assert_eq!(driver.counts().errors, 38);
}

fn the_largest_request_works_and_a_larger_one_is_an_error(kind: Kind) {
    const MIB: u32 = 1 << 20;
    let gate = Gate::new(RamDisk::new(64 << 11));
    gate.open();
    let mut driver = Driver::start(kind, gate.clone(), config(1), EVERYTHING);
    // Every piece is the same mebibyte of guest memory.
    let shared = driver.allocate(MIB as usize);
    for (pieces, extra, expected) in [
        (16, 0, OK),
        (16, 512, IOERR),
        (17, 0, IOERR),
        (60, 0, IOERR),
    ] {
        for write in [true, false] {
            driver
                .memory
                .write_slice(&pattern(9, MIB as usize), shared)
                .expect("data");
            let request = if write {
                VIRTIO_BLK_T_OUT
            } else {
                VIRTIO_BLK_T_IN
            };
            let (posted, header, _) = driver.lay_out(request, 0, &[], 0);
            let piece = if write {
                Piece::readable
            } else {
                Piece::writable
            };
            let mut chain = vec![Piece::readable(header, 16)];
            chain.extend((0..pieces).map(|_| piece(shared, MIB)));
            if extra > 0 {
                chain.push(piece(shared, extra));
            }
            let answer = driver.answer(&posted, 0);
            assert_eq!(answer.status, UNANSWERED);
            let status = driver.allocate(1);
            driver.memory.write_obj(UNANSWERED, status).expect("status");
            chain.push(Piece::writable(status, 1));
            driver.rings[0].add(&chain);
            let before = gate.submitted();
            driver.kick(0);
            let (_, written) = driver.next_used(0);
            assert_eq!(
                driver.memory.read_obj::<u8>(status).expect("status"),
                expected
            );
            // What is too large never reaches the backend.
            assert_eq!(gate.submitted() > before, expected == OK);
            if !write {
                let all = if expected == OK { pieces * MIB + 1 } else { 0 };
                assert_eq!(written, all, "{pieces} MiB + {extra}");
            }
        }
    }
    let mut data = vec![0; MIB as usize];
    driver.memory.read_slice(&mut data, shared).expect("data");
    assert_eq!(data, pattern(9, MIB as usize));
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

fn buffers_outside_guest_memory_are_errors(mut driver: Driver) {
    driver.write(0, 0, &[5; 1024]);
    let nowhere = [
        MEMORY_END - 256,
        MEMORY_END,
        1 << 40,
        u64::MAX - 100,
        u64::MAX,
    ];
    for address in nowhere.map(GuestAddress) {
        for write in [true, false] {
            let request = if write {
                VIRTIO_BLK_T_OUT
            } else {
                VIRTIO_BLK_T_IN
            };
            let (posted, header, _) = driver.lay_out(request, 0, &[], 0);
            let piece = if write {
                Piece::readable
            } else {
                Piece::writable
            };
            let status = driver.allocate(1);
            driver.rings[0].add(&[
                Piece::readable(header, 16),
                piece(address, 512),
                Piece::writable(status, 1),
            ]);
            driver.kick(0);
            let (_, written) = driver.next_used(0);
            assert_eq!(driver.memory.read_obj::<u8>(status).expect("status"), IOERR);
            assert_eq!(written, u32::from(write), "{posted:?}");
        }
        // A missing header, or half a header.
        let address = GuestAddress(address.0.max(MEMORY_END - 8));
        let status = driver.allocate(1);
        driver.rings[0].add(&[Piece::readable(address, 512), Piece::writable(status, 1)]);
        driver.kick(0);
        driver.next_used(0);
        assert_eq!(driver.memory.read_obj::<u8>(status).expect("status"), IOERR);
    }
    // A buffer across the border of two regions lies inside guest memory.
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
    assert_eq!(driver.read(0, 0, 512), [5; 512]);
    assert_eq!(driver.read(0, 1, 512), pattern(8, 512));
}

fn a_chain_as_long_as_the_queue_works(mut driver: Driver) {
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
