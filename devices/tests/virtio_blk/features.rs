//! Features that follow from the backend and the configuration, and their effects (virtio 1.2,
//! 5.2.3 to 5.2.6, 6).

use std::time::Instant;

use virtio_bindings::virtio_blk::*;
use walvisor_devices::backend::Backend;
use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::block::BlockConfig;
use walvisor_storage::{DiskOptions, Store, StoreOptions, create_disk, default_log_dir};

use crate::driver::*;
use crate::gate::Gate;

on_every_transport!(
    blocks_of_4096_bytes_are_told_and_sectors_still_work,
    the_largest_request_of_the_log_is_told_and_works,
    a_backend_with_small_requests_is_never_asked_for_more,
    a_secure_erase_overwrites_and_is_flushed,
    a_log_offers_no_secure_erase_and_no_lifetime,
    in_order_a_read_waits_for_the_flush_before_it,
    in_order_the_chains_that_wait_are_bounded,
    without_in_order_a_read_overtakes_a_flush,
    workers_keep_to_their_processors,
    a_polled_ring_needs_no_doorbell,
);

// Not in `virtio-bindings`.
const LIFETIME: u32 = 15;
const GET_LIFETIME: u32 = 10;

fn has(features: u64, bit: u32) -> bool {
    features >> bit & 1 != 0
}

fn u32_at(driver: &mut Driver, at: u64) -> u32 {
    u32::from_le_bytes(driver.read_config(at))
}

fn blocks_of_4096_bytes_are_told_and_sectors_still_work(kind: Kind) {
    let blocks = BlockConfig {
        block_size: 4096,
        ..config(1)
    };
    let mut driver = Driver::start(kind, RamDisk::new(64), blocks, EVERYTHING);
    assert_eq!(u32_at(&mut driver, 20), 4096, "blk_size");
    // The physical block equals the logical one, and is the minimum I/O size.
    assert_eq!(driver.read_config::<4>(24), [0, 0, 1, 0], "topology");
    // These fields stay in sectors of 512 bytes (5.2.4).
    assert_eq!(u32_at(&mut driver, 44), 8, "discard_sector_alignment");
    assert_eq!(u64::from_le_bytes(driver.read_config(0)), 64, "capacity");
    driver.write(0, 3, &pattern(3, 512));
    assert_eq!(driver.read(0, 3, 512), pattern(3, 512));
}

#[test]
fn a_resize_to_half_a_block_tells_whole_ones() {
    let gate = Gate::new(RamDisk::new(64));
    gate.open();
    gate.set_sectors(32);
    let blocks = BlockConfig {
        block_size: 4096,
        ..config(1)
    };
    let mut driver = Driver::start(Kind::Mmio, gate.clone(), blocks, EVERYTHING);
    gate.set_sectors(39);
    driver.registers.capacity_changed();
    assert_eq!(driver.registers.take_config_interrupts(), 0);
    gate.set_sectors(47);
    driver.registers.capacity_changed();
    assert_eq!(driver.registers.take_config_interrupts(), 1);
    assert_eq!(u64::from_le_bytes(driver.read_config(0)), 40);
}

/// A write-ahead-logged disk of 8 MiB in `directory`.
fn store(directory: &tempfile::TempDir, segment_size: u64) -> Store {
    let path = directory.path().join("disk.img");
    let log = default_log_dir(&path);
    let options = StoreOptions {
        segment_size,
        ..StoreOptions::default()
    };
    create_disk(&path, 8 << 20, &log, &options).expect("a disk");
    Store::open(&log, &[DiskOptions::new(&path)], &options).expect("a store")
}

/// Reads size_max and seg_max.
fn limits(driver: &mut Driver) -> (u32, u32) {
    (u32_at(driver, 8), u32_at(driver, 12))
}

fn the_largest_request_of_the_log_is_told_and_works(kind: Kind) {
    let directory = tempfile::tempdir().expect("a directory");
    let store = store(&directory, 1 << 20);
    let disk = store.disks()[0].clone();
    let longest = Backend::max_request_bytes(&disk);
    assert!(longest < 1 << 20, "a request lies in one segment");
    let mut driver = Driver::start(kind, disk, config(1), EVERYTHING);
    let (size_max, seg_max) = limits(&mut driver);
    let largest = size_max as usize * seg_max as usize;
    assert!(largest <= longest && largest > longest / 3, "{largest}");
    assert!(size_max >= 4096);
    let data = pattern(5, largest);
    driver.write(0, 8, &data);
    driver.flush(0);
    assert_eq!(driver.read(0, 8, largest), data);
    let beyond = longest + 512;
    let answer = driver.request(0, VIRTIO_BLK_T_OUT, 0, &vec![1; beyond], 0);
    assert_eq!(answer.status, IOERR);
    drop(driver);
    store.close().expect("closed");
}

fn a_backend_with_small_requests_is_never_asked_for_more(kind: Kind) {
    let gate = Gate::new(RamDisk::new(4096));
    gate.open();
    gate.set_max_request(20 << 10);
    let mut driver = Driver::start(kind, gate.clone(), config(1), EVERYTHING);
    let (size_max, seg_max) = limits(&mut driver);
    assert_eq!((size_max, seg_max), (4096, 5));
    driver.write(0, 0, &pattern(1, 20 << 10));
    assert_eq!(driver.read(0, 0, 20 << 10), pattern(1, 20 << 10));
    for kind in [VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_IN] {
        let (out, room) = if kind == VIRTIO_BLK_T_OUT {
            (21 << 10, 0)
        } else {
            (0, 21 << 10)
        };
        let answer = driver.request(0, kind, 0, &vec![0; out], room);
        assert_eq!(answer.status, IOERR);
    }
    assert_eq!(gate.submitted(), 2);
}

fn a_secure_erase_overwrites_and_is_flushed(kind: Kind) {
    let gate = Gate::new(RamDisk::new(4096));
    gate.open();
    let mut driver = Driver::start(kind, gate.clone(), config(1), EVERYTHING);
    assert!(has(driver.features, VIRTIO_BLK_F_SECURE_ERASE));
    driver.write(0, 0, &[0x5a; 1 << 20]);
    let before = gate.submitted();
    let answer = driver.request(0, VIRTIO_BLK_T_SECURE_ERASE, 0, &segment(8, 1024, 0), 0);
    assert_eq!((answer.status, answer.written), (OK, 1));
    assert_eq!(gate.submitted() - before, 2, "zeroes, and a FLUSH");
    assert_eq!(driver.read(0, 8, 1024 * 512), vec![0; 1024 * 512]);
    assert_eq!(driver.read(0, 0, 8 * 512), [0x5a; 8 * 512]);
    assert_eq!(driver.counts().secure_erases, 1);
    // A volatile cache frees old contents without erasing them, so such a disk does not offer the
    // feature.
    let volatile = RamDisk::with_power_loss(64, true);
    let mut driver = Driver::attach(kind, volatile, config(1));
    let offered = driver.registers.device_features();
    assert!(!has(offered, VIRTIO_BLK_F_SECURE_ERASE));
    assert_eq!(driver.read_config::<12>(60), [0; 12]);
}

fn a_log_offers_no_secure_erase_and_no_lifetime(kind: Kind) {
    let directory = tempfile::tempdir().expect("a directory");
    let store = store(&directory, 1 << 20);
    let mut driver = Driver::start(kind, store.disks()[0].clone(), config(1), EVERYTHING);
    for (bit, expected) in [
        (VIRTIO_BLK_F_SECURE_ERASE, false),
        (LIFETIME, false),
        (VIRTIO_BLK_F_DISCARD, true),
        (VIRTIO_BLK_F_WRITE_ZEROES, true),
        (VIRTIO_BLK_F_CONFIG_WCE, true),
    ] {
        assert_eq!(has(driver.features, bit), expected, "bit {bit}");
    }
    driver.write(0, 0, &[7; 4096]);
    let answer = driver.request(0, VIRTIO_BLK_T_SECURE_ERASE, 0, &segment(0, 8, 0), 0);
    assert_eq!(answer.status, UNSUPP);
    let answer = driver.request(0, GET_LIFETIME, 0, &[], 6);
    assert_eq!(answer.status, UNSUPP);
    assert_eq!(driver.read(0, 0, 4096), [7; 4096], "nothing was erased");
    drop(driver);
    store.close().expect("closed");
}

/// A device that offers IN_ORDER, with a FLUSH in flight and three reads and one unknown request
/// behind it.
fn behind_a_flush(kind: Kind, wanted: u64) -> (Driver, Gate, Vec<u16>) {
    let gate = Gate::new(RamDisk::new(64));
    gate.hold_flushes();
    let offering = BlockConfig {
        in_order: true,
        ..config(1)
    };
    let mut driver = Driver::start(kind, gate.clone(), offering, wanted);
    assert_eq!(driver.features & IN_ORDER, wanted & IN_ORDER);
    let mut heads = vec![driver.post(0, VIRTIO_BLK_T_FLUSH, 0, &[], 0).head];
    for sector in 0..3 {
        heads.push(driver.post(0, VIRTIO_BLK_T_IN, sector, &[], 512).head);
    }
    heads.push(driver.post(0, 99, 0, &[], 16).head);
    driver.kick(0);
    wait_until("four requests", || gate.submitted() == 4);
    (driver, gate, heads)
}

fn in_order_a_read_waits_for_the_flush_before_it(kind: Kind) {
    let (mut driver, gate, heads) = behind_a_flush(kind, EVERYTHING);
    std::thread::sleep(A_WHILE);
    assert_eq!(driver.rings[0].used_index(), 0, "nothing overtakes");
    gate.open();
    for head in heads {
        assert_eq!(driver.next_used(0).0, head);
    }
    driver.flush(0);
}

fn without_in_order_a_read_overtakes_a_flush(kind: Kind) {
    let (mut driver, gate, heads) = behind_a_flush(kind, EVERYTHING & !IN_ORDER);
    let mut early: Vec<u16> = (0..4).map(|_| driver.next_used(0).0).collect();
    early.sort_unstable();
    let mut reads = heads[1..].to_vec();
    reads.sort_unstable();
    assert_eq!(early, reads);
    gate.open();
    assert_eq!(driver.next_used(0).0, heads[0]);
    // A device not configured for IN_ORDER does not offer it.
    let mut plain = Driver::attach(kind, RamDisk::new(8), config(1));
    assert_eq!(plain.registers.device_features() & IN_ORDER, 0);
}

fn in_order_the_chains_that_wait_are_bounded(kind: Kind) {
    let (mut driver, gate, _) = behind_a_flush(kind, EVERYTHING);
    let size = driver.rings[0].size;
    let read = driver.post(0, VIRTIO_BLK_T_IN, 0, &[], 512);
    driver.kick(0);
    // The driver offers one chain more often than there are descriptors, while the first chain is
    // still in flight.
    for _ in 0..20 {
        for _ in 0..size / 2 {
            driver.rings[0].offer(read.head);
        }
        driver.rings[0].publish();
        driver.registers.notify(0);
        std::thread::sleep(A_WHILE / 10);
    }
    assert!(gate.submitted() <= size.into(), "{}", gate.submitted());
    gate.open();
    driver.initialise(EVERYTHING);
    driver.flush(0);
    assert_eq!(gate.leaked(), 0);
}

/// The processors that threads named `name` of this process may run on.
fn processors(name: &str) -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").expect("threads");
    let mut found = Vec::new();
    for task in tasks.flatten() {
        // A thread that has just ended does not count.
        let Ok(status) = std::fs::read_to_string(task.path().join("status")) else {
            continue;
        };
        let field = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            line.map_or("", str::trim).to_owned()
        };
        if field("Name:") == name {
            found.push(field("Cpus_allowed_list:"));
        }
    }
    found
}

fn workers_keep_to_their_processors(kind: Kind) {
    let allowed = rustix::thread::sched_getaffinity(None).expect("an affinity");
    let cpus: Vec<u16> = (0..1024)
        .filter(|&cpu| allowed.is_set(usize::from(cpu)))
        .collect();
    let last = *cpus.last().expect("a processor");
    let pinned = BlockConfig {
        worker_cpus: vec![last, cpus[0]],
        ..config(8)
    };
    let mut driver = Driver::start(kind, RamDisk::new(64), pinned, EVERYTHING);
    driver.flush(7);
    driver.flush(6);
    // Other tests' workers have the same names, but none of them is pinned to these processors.
    for (name, cpu) in [("virtio-blk-q7", cpus[0]), ("virtio-blk-q6", last)] {
        // A listing of threads may miss some while others end.
        wait_until(name, || processors(name).contains(&cpu.to_string()));
    }
}

fn a_polled_ring_needs_no_doorbell(kind: Kind) {
    for features in [EVERYTHING, EVERYTHING & !EVENT_IDX] {
        let poll = walvisor_devices::block::MAX_POLL;
        let polled = BlockConfig { poll, ..config(1) };
        let mut driver = Driver::start(kind, RamDisk::new(64), polled, features);
        // On a busy machine few requests follow the previous one so soon.
        let (mut rounds, mut at_once, mut before) = (0, 0, None::<Instant>);
        while rounds < 500 || at_once < 10 {
            assert!(rounds < 6000, "only {at_once} requests in time");
            let post = driver.post(0, VIRTIO_BLK_T_OUT, rounds % 64, &[rounds as u8; 512], 0);
            let began = Instant::now();
            let rung = driver.kick(0);
            // The worker has polled the ring since it answered the previous request, and still
            // does.
            if before.is_some_and(|before| before.elapsed() < poll) {
                assert!(!rung, "a doorbell for request {rounds}");
                at_once += 1;
            }
            before = Some(began);
            let (_, written) = driver.next_used(0);
            assert_eq!(driver.answer(&post, written).status, OK);
            rounds += 1;
        }
        let counts = driver.counts();
        assert_eq!((counts.requests, counts.errors), (rounds, 0));
        assert!(counts.poll_ns > 0);
        // A worker that has stopped polling is woken by a doorbell.
        for _ in 0..3 {
            let before = driver.kicks;
            wait_until("a worker that sleeps", || {
                std::thread::sleep(A_WHILE);
                driver.flush(0);
                driver.kicks > before
            });
        }
    }
    // Off by default.
    let mut driver = Driver::start(kind, RamDisk::new(64), config(1), EVERYTHING);
    driver.flush(0);
    assert_eq!(driver.counts().poll_ns, 0);
}
