//! The owner's control of a device while a driver uses it.

use std::thread;
use std::time::Duration;

use virtio_bindings::virtio_blk::*;
use walvisor_devices::backend::Backend;
use walvisor_devices::backend::ram::RamDisk;

use crate::driver::*;
use crate::gate::Gate;

on_every_transport!(
    a_paused_device_finishes_what_it_has_taken_and_takes_no_more,
    a_device_that_is_paused_and_resumed_loses_nothing,
    a_driver_hears_of_more_capacity,
    the_owner_makes_writes_stable_whatever_the_driver_believes,
    no_driver_that_counts_on_writethrough_gets_writeback,
);

fn a_paused_device_finishes_what_it_has_taken_and_takes_no_more(kind: Kind) {
    let gate = Gate::new(RamDisk::new(1024));
    let mut driver = Driver::start(kind, gate.clone(), config(2), EVERYTHING);
    let mut posted = Vec::new();
    for queue in 0..2 {
        posted.push(driver.post(queue, VIRTIO_BLK_T_OUT, queue as u64, &pattern(1, 512), 0));
        driver.kick(queue);
    }
    wait_until("2 requests", || gate.submitted() == 2);
    let opener = gate.open_once_asleep(Duration::ZERO);
    driver.registers.pause();
    opener.join().expect("the opener");
    assert_eq!((gate.queues(), gate.leaked()), (0, 0));
    let used: Vec<u16> = driver.rings.iter().map(Ring::used_index).collect();
    assert_eq!(used, [1, 1], "what was taken is answered");

    let waiting = driver.post(0, VIRTIO_BLK_T_FLUSH, 0, &[], 0);
    driver.kick(0);
    thread::sleep(A_WHILE);
    assert_eq!((gate.submitted(), driver.rings[0].used_index()), (2, 1));
    // A second pause changes nothing.
    driver.registers.pause();

    driver.registers.resume();
    for (queue, posted) in posted.iter().enumerate() {
        let (_, written) = driver.next_used(queue);
        assert_eq!(driver.answer(posted, written).status, OK);
    }
    let (_, written) = driver.next_used(0);
    assert_eq!(driver.answer(&waiting, written).status, OK);
    driver.registers.resume();
    driver.flush(1);
}

fn a_device_that_is_paused_and_resumed_loses_nothing(kind: Kind) {
    let mut driver = Driver::start(kind, RamDisk::new(4096), config(2), EVERYTHING);
    for round in 0..200 {
        let queue = (round % 2) as usize;
        let posted = driver.post(queue, VIRTIO_BLK_T_OUT, round, &pattern(round, 512), 0);
        driver.kick(queue);
        driver.registers.pause();
        driver.registers.resume();
        let (_, written) = driver.next_used(queue);
        assert_eq!(driver.answer(&posted, written).status, OK);
    }
    for round in 0..200 {
        assert_eq!(driver.read(0, round, 512), pattern(round, 512));
    }
    // A reset between pause and resume works as any other.
    driver.registers.pause();
    driver.registers.set_status(0);
    driver.registers.resume();
    driver.initialise(EVERYTHING);
    assert_eq!(driver.read(1, 7, 512), pattern(7, 512));
}

fn a_driver_hears_of_more_capacity(kind: Kind) {
    let gate = Gate::new(RamDisk::new(64));
    gate.open();
    gate.set_sectors(32);
    let mut driver = Driver::start(kind, gate.clone(), config(1), EVERYTHING);
    assert_eq!(u64::from_le_bytes(driver.read_config(0)), 32);
    gate.set_sectors(64);
    driver.registers.capacity_changed();
    assert_eq!(u64::from_le_bytes(driver.read_config(0)), 64);
    assert_eq!(driver.request(0, VIRTIO_BLK_T_IN, 63, &[], 512).status, OK);
}

fn the_owner_makes_writes_stable_whatever_the_driver_believes(kind: Kind) {
    let disk = RamDisk::with_power_loss(64, true);
    let mut driver = Driver::start(kind, disk.clone(), config(1), EVERYTHING);
    assert!(!driver.registers.set_write_cache(false));
    // The driver still sees writeback and goes on flushing, which does no harm.
    assert_eq!(driver.read_config::<1>(32), [1]);
    driver.write(0, 0, &[1; 512]);
    disk.power_loss();
    assert_eq!(driver.read(0, 0, 512), [1; 512]);
    driver.registers.write_config(32, &[1]);
    assert!(!disk.write_cache(), "the owner has the last word");
    assert!(driver.registers.set_write_cache(true));
    assert!(disk.write_cache());
    // The owner's choice also holds after a reset.
    driver.registers.set_write_cache(false);
    driver.initialise(EVERYTHING);
    assert_eq!(driver.read_config::<1>(32), [0]);
    assert!(!disk.write_cache());
}

fn no_driver_that_counts_on_writethrough_gets_writeback(kind: Kind) {
    let disk = RamDisk::with_power_loss(64, true);
    let mut driver = Driver::start(
        kind,
        disk.clone(),
        config(1),
        EVERYTHING & !FLUSH & !CONFIG_WCE,
    );
    assert!(!driver.registers.set_write_cache(true), "it cannot flush");
    driver.initialise(EVERYTHING);
    assert!(disk.write_cache());
    driver.registers.write_config(32, &[0]);
    assert!(
        !driver.registers.set_write_cache(true),
        "it has asked for it"
    );
    driver.registers.write_config(32, &[1]);
    assert!(disk.write_cache());
}
