//! A driver that breaks the rules forces itself to reset the device, and harms no other user.

use virtio_bindings::virtio_blk::*;
use walvisor_devices::backend::ram::RamDisk;

use crate::driver::*;
use crate::gate::{Gate, once_asleep};

on_every_transport!(
    requests_in_flight_end_when_their_queue_breaks,
    a_queue_that_breaks_while_a_pause_drains_it_stays_broken,
    // With vhost-user each ring has an error signal of its own.
    ;
    a_queue_that_broke_stays_so_over_a_pause,
);

fn requests_in_flight_end_when_their_queue_breaks(kind: Kind) {
    let gate = Gate::new(RamDisk::new(64));
    let mut driver = Driver::start(kind, gate.clone(), config(1), EVERYTHING);
    for sector in 0..4 {
        driver.post(0, VIRTIO_BLK_T_OUT, sector, &pattern(sector, 512), 0);
    }
    driver.kick(0);
    wait_until("4 requests", || gate.submitted() == 4);
    // One batch of two valid chains and an invalid one between them.
    driver.post(0, VIRTIO_BLK_T_OUT, 4, &pattern(4, 512), 0);
    driver.rings[0].offer(u16::MAX);
    driver.post(0, VIRTIO_BLK_T_OUT, 5, &pattern(5, 512), 0);
    driver.rings[0].publish();
    driver.registers.notify(0);
    driver.wait_for_needs_reset();
    assert_eq!(gate.submitted(), 5);
    gate.open();
    driver.registers.set_status(0);
    assert_eq!((gate.queues(), gate.leaked()), (0, 0));
    driver.initialise(EVERYTHING);
    assert_eq!(driver.read(0, 4, 512), pattern(4, 512));
    assert_eq!(driver.read(0, 5, 512), [0; 512]);
}

fn a_queue_that_broke_stays_so_over_a_pause(kind: Kind) {
    let mut driver = Driver::start(kind, RamDisk::new(64), config(2), EVERYTHING);
    driver.break_queue(0);
    driver.registers.pause();
    driver.registers.resume();
    let requests = driver.counts().requests;
    driver.post(0, VIRTIO_BLK_T_FLUSH, 0, &[], 0);
    driver.rings[0].publish();
    driver.registers.notify(0);
    std::thread::sleep(A_WHILE / 5);
    assert_eq!(driver.rings[0].used_index(), 0);
    assert_eq!(driver.counts().requests, requests);
    // The other queue still works.
    driver.post(1, VIRTIO_BLK_T_FLUSH, 0, &[], 0);
    driver.kick(1);
    wait_until("an answer", || driver.rings[1].used_index() == 1);
    // The error of a second queue changes nothing in the device's status.
    driver.rings[1].offer(u16::MAX);
    driver.rings[1].publish();
    let errors = driver.counts().errors;
    driver.registers.notify(1);
    wait_until("the second error", || driver.counts().errors > errors);
    std::thread::sleep(A_WHILE);
    assert_eq!(driver.registers.take_config_interrupts(), 0);
    driver.initialise(EVERYTHING);
    driver.flush(0);
}

fn a_queue_that_breaks_while_a_pause_drains_it_stays_broken(kind: Kind) {
    let gate = Gate::new(RamDisk::new(64));
    gate.open();
    let mut driver = Driver::start(kind, gate.clone(), config(1), EVERYTHING);
    // The worker stands in the submission of a valid chain, and has not seen the invalid one behind
    // it.
    let release = gate.hold_up();
    driver.post(0, VIRTIO_BLK_T_FLUSH, 0, &[], 0);
    driver.rings[0].offer(u16::MAX);
    driver.rings[0].publish();
    driver.registers.notify(0);
    wait_until("a submission", || gate.submitted() == 1);
    let releases = once_asleep(move || release.send(()).expect("the worker waits"));
    driver.registers.pause();
    releases.join().expect("the worker was released");
    assert_ne!(driver.registers.status() & NEEDS_RESET, 0);
    let opened = gate.opened();
    driver.registers.resume();
    // The end of another pause shows that the resumption is over.
    driver.registers.pause();
    assert_eq!(gate.opened(), opened, "the queue was not started again");
    driver.registers.resume();
    driver.initialise(EVERYTHING);
    driver.flush(0);
}
