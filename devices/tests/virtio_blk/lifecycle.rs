//! Reset, shutdown and bounded memory, with requests in flight (virtio 1.2, 2.4).

use std::thread;
use std::time::{Duration, Instant};

use virtio_bindings::virtio_blk::*;
use vm_memory::Bytes;
use walvisor_devices::backend::ram::RamDisk;

use crate::driver::*;
use crate::gate::Gate;

on_every_transport!(
    a_reset_waits_for_what_is_in_flight,
    dropping_a_device_waits_for_what_is_in_flight,
    bytes_in_flight_are_bounded,
    requests_in_flight_are_bounded,
    chains_offered_before_the_first_doorbell_are_served,
    ;
    a_reset_between_any_two_steps_leaves_a_device_that_works,
);

const LIVE: u8 = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK;

fn a_reset_waits_for_what_is_in_flight(kind: Kind) {
    // Over vhost-user a reset begins in a thread of the server, at a moment that nobody sees. So
    // the requests may end before it.
    let mut times = [0, 4, 20, 100].into_iter().map(|factor| factor * A_WHILE);
    let came = times.find_map(|time| reset_in_flight(kind, time));
    let (gate, mut driver) = came.expect("a reset while requests are in flight");

    // Doorbells of a device that is not live do nothing.
    let used: Vec<u16> = driver.rings.iter().map(Ring::used_index).collect();
    driver.post(0, VIRTIO_BLK_T_FLUSH, 0, &[], 0);
    driver.kick(0);
    driver.registers.notify(1);
    thread::sleep(A_WHILE);
    assert_eq!(gate.submitted(), 16);
    let later: Vec<u16> = driver.rings.iter().map(Ring::used_index).collect();
    assert_eq!(later, used);

    driver.initialise(EVERYTHING);
    assert_eq!(driver.read(1, 7, 512), pattern(7, 512));
}

/// Resets a device with 16 writes in flight, which end `time` after somebody waits for them. `None`
/// if they have ended before the reset.
fn reset_in_flight(kind: Kind, time: Duration) -> Option<(Gate, Driver)> {
    let gate = Gate::new(RamDisk::new(1024));
    let mut driver = Driver::start(kind, gate.clone(), config(2), EVERYTHING);
    for queue in 0..2 {
        for sector in 0..8 {
            driver.post(queue, VIRTIO_BLK_T_OUT, sector, &pattern(sector, 512), 0);
        }
        driver.kick(queue);
    }
    wait_until("16 requests", || gate.submitted() == 16);
    let opener = gate.open_once_asleep(time);
    driver.registers.set_status(0);
    let done = Instant::now();
    let opened = opener.join().expect("the opener");
    assert!(done > opened, "the reset did not wait");
    assert_eq!(driver.registers.status(), 0);
    assert_eq!(
        (gate.queues(), gate.leaked()),
        (0, 0),
        "every worker is gone, nothing was lost"
    );
    let silent = driver.registers.take_queue_interrupts(0) == 0;
    assert!(
        silent || kind == Kind::VhostUser,
        "a reset device interrupts nobody"
    );
    silent.then_some((gate, driver))
}

fn dropping_a_device_waits_for_what_is_in_flight(kind: Kind) {
    let disk = RamDisk::new(1024);
    let gate = Gate::new(disk.clone());
    let mut driver = Driver::start(kind, gate.clone(), config(4), EVERYTHING);
    for queue in 0..4 {
        driver.post(
            queue,
            VIRTIO_BLK_T_OUT,
            queue as u64,
            &pattern(queue as u64, 512),
            0,
        );
        driver.kick(queue);
    }
    wait_until("4 requests", || gate.submitted() == 4);
    let opened = gate.open_once_asleep(Duration::ZERO);
    drop(driver);
    let done = Instant::now();
    assert!(
        done > opened.join().expect("the opener"),
        "the drop did not wait"
    );
    assert_eq!((gate.queues(), gate.leaked()), (0, 0));
    let mut driver = Driver::start(kind, disk, config(1), EVERYTHING);
    assert_eq!(driver.read(0, 3, 512), pattern(3, 512));
}

fn bytes_in_flight_are_bounded(kind: Kind) {
    const MIB: u32 = 1 << 20;
    let gate = Gate::new(RamDisk::new(64 << 11));
    let mut driver = Driver::start(kind, gate.clone(), config(1), EVERYTHING);
    let shared = driver.allocate(8 * MIB as usize);
    let mut statuses = Vec::new();
    for _ in 0..12 {
        let (_, header, _) = driver.lay_out(VIRTIO_BLK_T_IN, 0, &[], 0);
        let status = driver.allocate(1);
        driver.rings[0].add(&[
            Piece::readable(header, 16),
            Piece::writable(shared, 8 * MIB),
            Piece::writable(status, 1),
        ]);
        statuses.push(status);
    }
    driver.kick(0);
    wait_until("the first request", || gate.submitted() > 0);
    thread::sleep(A_WHILE);
    // Further doorbells have no effect, because 32 MiB are in flight, or less beside the disks of
    // other tests.
    driver.registers.notify(0);
    thread::sleep(A_WHILE);
    assert!((1..=4).contains(&gate.submitted()));
    gate.open();
    for _ in 0..12 {
        let (_, written) = driver.next_used(0);
        assert_eq!(written, 8 * MIB + 1);
    }
    // The doorbell works again.
    driver.flush(0);
}

fn requests_in_flight_are_bounded(kind: Kind) {
    let gate = Gate::new(RamDisk::new(64));
    let mut driver = Driver::start(kind, gate.clone(), config(1), EVERYTHING);
    let size = driver.rings[0].size;
    // A driver offers one chain again and again without waiting, far more often than it may.
    let post = driver.post(0, VIRTIO_BLK_T_FLUSH, 0, &[], 0);
    driver.kick(0);
    for _ in 0..20 {
        for _ in 0..size - 1 {
            driver.rings[0].offer(post.head);
        }
        driver.rings[0].publish();
        driver.registers.notify(0);
        thread::sleep(A_WHILE / 10);
    }
    assert!(
        gate.submitted() <= u64::from(size),
        "{} requests in flight",
        gate.submitted()
    );
    gate.open();
    driver.initialise(EVERYTHING);
    driver.flush(0);
    assert_eq!(gate.leaked(), 0);
}

fn chains_offered_before_the_first_doorbell_are_served(kind: Kind) {
    let mut driver = Driver::attach(kind, RamDisk::new(64), config(1));
    driver.negotiate(EVERYTHING);
    let at = driver.allocate(Ring::bytes(64));
    let mut ring = Ring::new(driver.memory.clone(), 64, at, true);
    let (posted, header, status) = driver.lay_out(VIRTIO_BLK_T_FLUSH, 0, &[], 0);
    ring.add(&[Piece::readable(header, 16), Piece::writable(status, 1)]);
    ring.publish();
    // The driver has left garbage in the field in which the device asks for doorbells.
    ring.set_avail_event(0x7777);
    driver.registers.set_queue(0, 64, ring.addresses());
    driver.rings.push(ring);
    driver.registers.set_status(LIVE);
    let (_, written) = driver.next_used(0);
    assert_eq!(driver.answer(&posted, written).status, OK);
    wait_until("avail_event", || driver.rings[0].avail_event() == 1);
    driver.flush(0);
}

fn a_reset_between_any_two_steps_leaves_a_device_that_works(kind: Kind) {
    let gate = Gate::new(RamDisk::new(64));
    gate.open();
    let mut driver = Driver::attach(kind, gate.clone(), config(2));
    let offered = driver.registers.device_features();
    let at = driver.allocate(Ring::bytes(64));
    let ring = Ring::new(driver.memory.clone(), 64, at, true);
    type Step = Box<dyn Fn(&mut Driver)>;
    let addresses = ring.addresses();
    let steps: Vec<Step> = vec![
        Box::new(|driver| driver.registers.set_status(ACKNOWLEDGE)),
        Box::new(|driver| driver.registers.set_status(ACKNOWLEDGE | DRIVER)),
        Box::new(move |driver| driver.registers.set_driver_features(offered)),
        Box::new(|driver| {
            let status = ACKNOWLEDGE | DRIVER | FEATURES_OK;
            driver.registers.set_status(status);
        }),
        Box::new(move |driver| driver.registers.set_queue(1, 64, addresses)),
        Box::new(|driver| driver.registers.set_status(LIVE)),
        Box::new(|driver| {
            driver.post(0, VIRTIO_BLK_T_FLUSH, 0, &[], 0);
            driver.rings[0].publish();
        }),
        Box::new(|driver| driver.registers.notify(1)),
        Box::new(|driver| driver.registers.reset_queue(1)),
    ];
    for ended in 0..=steps.len() {
        driver.registers.set_status(0);
        driver
            .memory
            .write_slice(&vec![0; Ring::bytes(64)], at)
            .expect("an empty ring");
        driver.rings = vec![Ring::new(driver.memory.clone(), 64, at, true)];
        for step in &steps[..ended] {
            step(&mut driver);
        }
        driver.registers.set_status(0);
        assert_eq!(
            (driver.registers.status(), gate.queues()),
            (0, 0),
            "{ended}"
        );
        assert!(!driver.registers.queue_enabled(1), "{ended}");
        driver.initialise(EVERYTHING);
        driver.write(1, ended as u64, &pattern(ended as u64, 512));
        assert_eq!(
            driver.read(0, ended as u64, 512),
            pattern(ended as u64, 512)
        );
    }
    assert_eq!(gate.leaked(), 0);
}
