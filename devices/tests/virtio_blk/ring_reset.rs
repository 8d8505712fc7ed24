//! The reset of a single queue (virtio 1.2, 2.6.1, 4.1.4.3 and 4.2.2).

use std::time::Duration;

use virtio_bindings::virtio_blk::*;
use walvisor_devices::backend::ram::RamDisk;

use crate::driver::*;
use crate::gate::Gate;

on_both_transports!(
    a_queue_reset_goes_on_until_its_requests_have_ended,
    a_device_reset_ends_a_queue_reset,
    a_queue_that_never_ran_can_be_reset,
    a_queue_reset_while_the_device_is_paused_begins_anew,
    a_queue_with_a_broken_ring_can_be_reset_and_the_device_still_asks_for_a_reset,
);

/// Sets `queue` up again with `size` descriptors in fresh memory.
fn set_up(driver: &mut Driver, queue: usize, size: u16) {
    let at = driver.allocate(Ring::bytes(size));
    let event_idx = driver.features & EVENT_IDX != 0;
    let ring = Ring::new(driver.memory.clone(), size, at, event_idx);
    driver
        .registers
        .set_queue(queue as u16, size, ring.addresses());
    driver.rings[queue] = ring;
}

fn wait_for_reset(driver: &mut Driver, queue: u16) {
    wait_until("the end of the reset", || {
        !driver.registers.queue_resetting(queue)
    });
    assert!(!driver.registers.queue_enabled(queue));
}

fn a_queue_reset_goes_on_until_its_requests_have_ended(kind: Kind) {
    let gate = Gate::new(RamDisk::new(64));
    gate.hold_flushes();
    let mut driver = Driver::start(kind, gate.clone(), config(2), EVERYTHING);
    driver.rings[1].set_used_event(1000);
    driver.post(0, VIRTIO_BLK_T_FLUSH, 0, &[], 0);
    driver.kick(0);
    wait_until("a request", || gate.submitted() == 1);
    // The reset returns at once, because no register access waits for the disk.
    driver.registers.reset_queue(0);
    assert!(driver.registers.queue_resetting(0));
    assert!(!driver.registers.queue_resetting(1));
    // The queue does not run any more, and it cannot be enabled before the reset has ended.
    driver.post(0, VIRTIO_BLK_T_IN, 0, &[], 512);
    driver.kick(0);
    driver.registers.notify(0);
    driver.registers.enable_queue(0);
    assert!(driver.registers.queue_resetting(0) && !driver.registers.queue_enabled(0));
    assert_eq!(driver.read(1, 0, 512), [0; 512], "the other queue goes on");
    assert_eq!(gate.submitted(), 2);
    gate.open();
    wait_for_reset(&mut driver, 0);
    assert_eq!(gate.queues(), 1);
    assert_eq!(driver.registers.take_queue_interrupts(0), 0, "silent");
    let used = driver.rings[0].used_index();
    driver.registers.notify(0);
    std::thread::sleep(A_WHILE);
    assert_eq!((driver.rings[0].used_index(), gate.submitted()), (used, 2));
    set_up(&mut driver, 0, 64);
    // Both rings begin at index 0 again, and so do the interrupts.
    driver.rings[0].set_used_event(0);
    driver.flush(0);
    wait_until("an interrupt", || {
        driver.registers.take_queue_interrupts(0) > 0
    });
    assert_eq!(gate.leaked(), 0);
}

fn a_device_reset_ends_a_queue_reset(kind: Kind) {
    let gate = Gate::new(RamDisk::new(64));
    let mut driver = Driver::start(kind, gate.clone(), config(1), EVERYTHING);
    driver.post(0, VIRTIO_BLK_T_FLUSH, 0, &[], 0);
    driver.kick(0);
    wait_until("a request", || gate.submitted() == 1);
    driver.registers.reset_queue(0);
    let opener = gate.open_once_asleep(Duration::ZERO);
    driver.registers.set_status(0);
    assert_eq!((gate.queues(), gate.leaked()), (0, 0), "drained");
    assert!(!driver.registers.queue_resetting(0) && !driver.registers.queue_enabled(0));
    opener.join().expect("the opener");
    driver.initialise(EVERYTHING);
    driver.flush(0);
}

fn a_queue_that_never_ran_can_be_reset(kind: Kind) {
    let mut driver = Driver::attach(kind, RamDisk::new(64), config(2));
    driver.negotiate(EVERYTHING);
    let at = driver.allocate(Ring::bytes(64));
    let ring = Ring::new(driver.memory.clone(), 64, at, true);
    driver.registers.set_queue(0, 64, ring.addresses());
    driver.registers.reset_queue(0);
    wait_for_reset(&mut driver, 0);
    driver.rings.push(ring);
    driver
        .registers
        .set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK);
    driver.registers.notify(0);
    std::thread::sleep(A_WHILE / 10);
    assert_eq!(driver.counts().requests, 0);
    set_up(&mut driver, 0, 32);
    driver.flush(0);
}

fn a_queue_reset_while_the_device_is_paused_begins_anew(kind: Kind) {
    let mut driver = Driver::start(kind, RamDisk::new(64), config(2), EVERYTHING);
    for sector in 0..5 {
        driver.write(0, sector, &pattern(sector, 512));
    }
    driver.registers.pause();
    driver.registers.reset_queue(0);
    wait_for_reset(&mut driver, 0);
    set_up(&mut driver, 0, 32);
    let waiting = driver.post(0, VIRTIO_BLK_T_IN, 4, &[], 512);
    driver.kick(0);
    std::thread::sleep(A_WHILE / 10);
    assert_eq!(driver.rings[0].used_index(), 0, "paused");
    driver.registers.resume();
    // The queue starts at index 0, not at the old ring's index.
    let (head, written) = driver.next_used(0);
    assert_eq!(head, waiting.head);
    let answer = driver.answer(&waiting, written);
    assert_eq!((answer.status, answer.data), (OK, pattern(4, 512)));
    driver.flush(1);
    // A pause ends a reset that is still going on, because it drains the queue.
    driver.registers.pause();
    driver.registers.reset_queue(1);
    assert!(!driver.registers.queue_resetting(1) && !driver.registers.queue_enabled(1));
    driver.registers.resume();
    driver.flush(0);
}

fn a_queue_with_a_broken_ring_can_be_reset_and_the_device_still_asks_for_a_reset(kind: Kind) {
    let mut driver = Driver::start(kind, RamDisk::new(64), config(2), EVERYTHING);
    driver.break_queue(0);
    driver.registers.reset_queue(0);
    wait_for_reset(&mut driver, 0);
    assert_ne!(driver.registers.status() & NEEDS_RESET, 0);
    driver.initialise(EVERYTHING);
    driver.flush(0);
}
