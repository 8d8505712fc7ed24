//! A driver that breaks the rules forces itself to reset the device, and harms no other user.

use std::path::Path;

use virtio_bindings::virtio_blk::*;
use vm_memory::{Bytes, GuestAddress};
use walvisor_devices::backend::ram::RamDisk;

use crate::driver::*;
use crate::gate::Gate;

on_every_transport!(
    broken_chains_need_a_reset,
    broken_indices_need_a_reset,
    requests_in_flight_end_when_their_queue_breaks,
    a_queue_that_breaks_while_a_pause_drains_it_stays_broken,
    // With vhost-user, a front-end with such addresses is disconnected, and each ring has an error
    // signal of its own.
    ; the_other_queues_go_on,
    a_queue_that_broke_stays_so_over_a_pause,
);

/// Breaks queue 0 with `offence`, and checks that a reset, and nothing else, makes it work again.
fn expect_reset(kind: Kind, what: &str, offence: impl Fn(&mut Driver, GuestAddress)) {
    let gate = Gate::new(RamDisk::new(64));
    gate.open();
    let mut driver = Driver::start(kind, gate.clone(), config(1), EVERYTHING);
    driver.write(0, 5, &pattern(5, 512));
    let scratch = driver.allocate(1 << 20);
    driver
        .memory
        .write_obj(VIRTIO_BLK_T_FLUSH, scratch)
        .expect("a header");
    let used = driver.rings[0].used_index();
    offence(&mut driver, scratch);
    driver.rings[0].publish();
    driver.registers.notify(0);
    driver.wait_for_needs_reset();
    assert_eq!(
        driver.rings[0].used_index(),
        used,
        "{what}: nothing was answered"
    );
    assert_eq!(gate.submitted(), 1, "{what}: nothing was done");
    // The queue does nothing until the reset.
    driver.registers.notify(0);
    std::thread::sleep(A_WHILE / 10);
    assert_eq!(driver.rings[0].used_index(), used, "{what}");
    assert_eq!(
        driver.registers.take_config_interrupts(),
        0,
        "{what}: said once"
    );
    driver.initialise(EVERYTHING);
    assert_eq!(driver.read(0, 5, 512), pattern(5, 512), "{what}");
}

fn broken_chains_need_a_reset(kind: Kind) {
    // Chains that are wrong for a block device only.
    let offences: [(&str, RingEdit); 4] = [
        ("no device-writable descriptor", |ring, at| {
            ring.set_descriptor(0, at, 16, 0, 0);
        }),
        ("only an empty device-writable descriptor", |ring, at| {
            ring.set_descriptor(0, at, 16, NEXT, 1);
            ring.set_descriptor(1, at, 0, WRITE, 0);
        }),
        ("a status byte outside memory", |ring, at| {
            // The request is a FLUSH, which must not be carried out either.
            ring.set_descriptor(0, at, 16, NEXT, 1);
            ring.set_descriptor(1, MEMORY_END, 1, WRITE, 0);
        }),
        ("a status byte beyond 2^64", |ring, at| {
            ring.set_descriptor(0, at, 16, NEXT, 1);
            ring.set_descriptor(1, u64::MAX - 10, 100, WRITE, 0);
        }),
    ];
    for (what, offence) in BROKEN_CHAINS.into_iter().chain(offences) {
        expect_reset(kind, what, |driver, scratch| {
            offence(&driver.rings[0], scratch.0);
            driver.rings[0].offer(0);
        });
    }
}

fn broken_indices_need_a_reset(kind: Kind) {
    expect_reset(kind, "a head beyond the table", |driver, _| {
        let size = driver.rings[0].size;
        driver.rings[0].offer(size);
    });
    expect_reset(kind, "head 65535", |driver, _| {
        driver.rings[0].offer(u16::MAX)
    });
    for ahead in [65u16, 1000, 32768, u16::MAX] {
        let gate = Gate::new(RamDisk::new(64));
        gate.open();
        let mut driver = Driver::start(kind, gate, config(1), EVERYTHING);
        driver.rings[0].store_index(ahead);
        driver.registers.notify(0);
        driver.wait_for_needs_reset();
        assert_eq!(driver.counts().requests, 0, "{ahead} chains ahead");
        driver.initialise(EVERYTHING);
        driver.flush(0);
    }
}

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
    driver.rings[0].offer(u16::MAX);
    driver.rings[0].publish();
    driver.registers.notify(0);
    driver.wait_for_needs_reset();
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
    let pausing = std::fs::read_link("/proc/thread-self").expect("this thread");
    let releases = std::thread::spawn(move || {
        wait_until("the pause to wait for the worker", || asleep(&pausing));
        release.send(()).expect("the worker waits");
    });
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

/// Whether a thread, named by its directory below `/proc`, is asleep.
fn asleep(thread: &Path) -> bool {
    let stat = std::fs::read_to_string(Path::new("/proc").join(thread).join("stat"));
    let stat = stat.expect("the state of a thread");
    // The state follows the name, which is in parentheses.
    stat.rsplit_once(") ")
        .is_some_and(|(_, state)| state.starts_with('S'))
}

fn the_other_queues_go_on(kind: Kind) {
    let mut driver = Driver::start(kind, RamDisk::new(64), config(2), EVERYTHING);
    driver.rings[0].offer(u16::MAX);
    driver.rings[0].publish();
    driver.registers.notify(0);
    driver.wait_for_needs_reset();
    let post = driver.post(1, VIRTIO_BLK_T_FLUSH, 0, &[], 0);
    driver.kick(1);
    wait_until("an answer", || driver.rings[1].used_index() == 1);
    assert_eq!(driver.answer(&post, 1).status, OK);
    // The error of a second queue changes nothing in the device's status.
    driver.rings[1].offer(u16::MAX);
    driver.rings[1].publish();
    let errors = driver.counts().errors;
    driver.registers.notify(1);
    wait_until("the second error", || driver.counts().errors > errors);
    std::thread::sleep(A_WHILE);
    assert_eq!(driver.registers.take_config_interrupts(), 0);
}
