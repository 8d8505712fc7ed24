//! Features, status and configuration space (virtio 1.2, 2.1, 2.2, 2.5, 5.2.3 to 5.2.5).

use std::sync::Arc;

use virtio_bindings::virtio_blk::*;
use walvisor_devices::backend::MAX_REQUEST_BYTES;
use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::block::{BlockConfig, BlockError, VirtioBlock};

use crate::driver::*;
use crate::gate::Gate;

on_both_transports!(
    every_feature_is_offered_and_may_be_refused,
    the_configuration_space_says_what_the_disk_is,
    a_resize_changes_the_generation_and_interrupts,
);

fn every_feature_is_offered_and_may_be_refused(kind: Kind) {
    let expected = [
        VIRTIO_BLK_F_SIZE_MAX,
        VIRTIO_BLK_F_SEG_MAX,
        VIRTIO_BLK_F_BLK_SIZE,
        VIRTIO_BLK_F_FLUSH,
        VIRTIO_BLK_F_TOPOLOGY,
        VIRTIO_BLK_F_CONFIG_WCE,
        VIRTIO_BLK_F_MQ,
        VIRTIO_BLK_F_DISCARD,
        VIRTIO_BLK_F_WRITE_ZEROES,
        VIRTIO_BLK_F_SECURE_ERASE,
    ];
    let expected = expected
        .iter()
        .fold(VERSION_1 | EVENT_IDX | INDIRECT | RING_RESET, |set, bit| {
            set | 1 << bit
        });
    let mut driver = Driver::start(kind, RamDisk::new(64), config(2), EVERYTHING);
    assert_eq!(driver.features, expected);
    driver.write(1, 3, &pattern(1, 512));
    // A driver that accepts nothing but VERSION_1.
    driver.initialise(VERSION_1);
    assert_eq!(driver.features, VERSION_1);
    assert_eq!(driver.read(0, 3, 512), pattern(1, 512));

    let mut driver = Driver::attach(kind, RamDisk::read_only(&[1; 512]), config(1));
    let offered = driver.registers.device_features();
    assert_ne!(offered & 1 << VIRTIO_BLK_F_RO, 0);
    let changes = 1 << VIRTIO_BLK_F_DISCARD | 1 << VIRTIO_BLK_F_WRITE_ZEROES | 1 << VIRTIO_BLK_F_MQ;
    assert_eq!(offered & changes, 0);
}

fn the_configuration_space_says_what_the_disk_is(kind: Kind) {
    let gate = Gate::new(RamDisk::new(8));
    gate.set_sectors(0x1_2345_6789);
    let mut driver = Driver::attach(kind, gate, config(3));
    driver.negotiate(EVERYTHING);
    let u32_at = |driver: &mut Driver, at| u32::from_le_bytes(driver.read_config(at));
    assert_eq!(u64::from_le_bytes(driver.read_config(0)), 0x1_2345_6789);
    let (size_max, seg_max) = (u32_at(&mut driver, 8), u32_at(&mut driver, 12));
    assert_eq!(seg_max, 62);
    assert!(u64::from(size_max) * u64::from(seg_max) <= MAX_REQUEST_BYTES as u64);
    assert_eq!(u32_at(&mut driver, 20), 512, "blk_size");
    assert_eq!(
        driver.read_config::<4>(24),
        [3, 0, 8, 0],
        "topology: 4096-byte physical blocks"
    );
    assert_eq!(driver.read_config::<2>(32), [1, 0], "writeback");
    assert_eq!(u16::from_le_bytes(driver.read_config(34)), 3, "num_queues");
    assert_eq!(u32_at(&mut driver, 40), 1, "max_discard_seg");
    assert_eq!(u32_at(&mut driver, 52), 1, "max_write_zeroes_seg");
    assert_eq!(
        driver.read_config::<4>(56),
        [1, 0, 0, 0],
        "write_zeroes_may_unmap"
    );
    // Reads work in any width, and give zeroes beyond the end.
    assert_eq!(driver.read_config::<1>(1), [0x67]);
    assert_eq!(driver.read_config::<2>(1), [0x67, 0x45]);
    assert_eq!(u32_at(&mut driver, 64), 1, "max_secure_erase_seg");
    assert_eq!(u32_at(&mut driver, 68), 8, "secure_erase_sector_alignment");
    assert_eq!(driver.read_config::<8>(70), [0; 8]);
    assert_eq!(driver.read_config::<4>(0xe00), [0; 4]);
}

fn a_resize_changes_the_generation_and_interrupts(kind: Kind) {
    let gate = Gate::new(RamDisk::new(64));
    gate.open();
    gate.set_sectors(32);
    let mut driver = Driver::start(kind, gate.clone(), config(1), EVERYTHING);
    driver.read_config::<8>(0);
    let generation = driver.registers.generation();
    driver.registers.capacity_changed();
    assert_eq!(
        driver.registers.generation(),
        generation,
        "nothing has changed"
    );
    assert_eq!(driver.registers.take_config_interrupts(), 0);
    assert_eq!(
        driver.request(0, VIRTIO_BLK_T_IN, 32, &[], 512).status,
        IOERR
    );

    gate.set_sectors(64);
    driver.registers.capacity_changed();
    assert_ne!(driver.registers.generation(), generation);
    assert_eq!(driver.registers.take_config_interrupts(), 1);
    assert_eq!(u64::from_le_bytes(driver.read_config(0)), 64);
    assert_eq!(driver.request(0, VIRTIO_BLK_T_IN, 63, &[], 512).status, OK);
    // However often the configuration changes, even 256 times in 8 bits, the generation differs
    // from the one last read.
    let generation = driver.registers.generation();
    for round in 0..256 {
        gate.set_sectors(16 + round % 2);
        driver.registers.capacity_changed();
    }
    assert_ne!(driver.registers.generation(), generation);
    assert!(driver.registers.take_config_interrupts() > 0);
}

#[test]
fn a_device_that_makes_no_sense_is_refused_in_one_line() {
    let refuse = |backend: Gate, change: fn(&mut BlockConfig)| {
        let mut config = config(1);
        change(&mut config);
        let error = VirtioBlock::new(Arc::new(backend), config).err();
        error.map(|error| error.to_string())
    };
    let disk = |sectors| Gate::new(RamDisk::new(sectors));
    type Change = fn(&mut BlockConfig);
    let wrong: [(u64, Change, &str); 16] = [
        (8, |it| it.queues = 0, "queues=0"),
        (8, |it| it.queues = 257, "queues=257"),
        (8, |it| it.queue_size = 0, "queue-size=0"),
        (8, |it| it.queue_size = 2, "queue-size=2"),
        (8, |it| it.queue_size = 3, "queue-size=3"),
        (8, |it| it.queue_size = 100, "queue-size=100"),
        (8, |it| it.queue_size = 2048, "queue-size=2048"),
        (8, |it| it.queue_size = u16::MAX, "queue-size=65535"),
        (8, |it| it.serial = "x".repeat(21), "20 bytes"),
        (17, |it| it.block_size = 4096, "block-size=4096"),
        (17, |it| it.block_size = 4096, "17 sectors"),
        (16, |it| it.block_size = 0, "512 or 4096"),
        (16, |it| it.block_size = 511, "512 or 4096"),
        (16, |it| it.block_size = 1024, "512 or 4096"),
        (16, |it| it.block_size = 8192, "512 or 4096"),
        (16, |it| it.block_size = u32::MAX, "512 or 4096"),
    ];
    for (sectors, change, part) in wrong {
        let message = refuse(disk(sectors), change).expect(part);
        assert!(message.contains(part), "{part}: {message}");
        assert!(!message.contains('\n'), "{message}");
    }
    assert_eq!(refuse(disk(16), |it| it.block_size = 4096), None);
    let allowed = rustix::thread::sched_getaffinity(None).expect("an affinity");
    if !allowed.is_set(1023) {
        let message = refuse(disk(8), |it| it.worker_cpus = vec![1023]);
        assert!(message.expect("no such processor").contains("CPU 1023"));
    }
    let huge = disk(8);
    huge.set_sectors(1 << 55);
    let refused = VirtioBlock::new(Arc::new(huge), config(1));
    assert!(matches!(refused, Err(BlockError::Capacity(_))));
}
