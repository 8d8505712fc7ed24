//! Drivers that do what is allowed but rare, and drivers that break the rules: the device's
//! behaviour stays defined.

use virtio_bindings::virtio_blk::*;
use vm_memory::{Bytes, GuestAddress};
use walvisor_devices::backend::ram::RamDisk;

use crate::driver::*;
use crate::gate::Gate;

on_every_transport!(
    the_device_writes_only_what_it_may,
    indirect_descriptors_are_followed_in_every_legal_place,
    ;
    a_reset_between_any_two_steps_leaves_a_device_that_works,
);

const LIVE: u8 = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK;

fn the_device_writes_only_what_it_may(kind: Kind) {
    for features in [EVERYTHING, VERSION_1] {
        let mut driver = Driver::start(kind, RamDisk::new(64), config(1), features);
        let data = pattern(4, 1024);
        let (posted, readable, writable) = driver.lay_out(VIRTIO_BLK_T_OUT, 2, &data, 0);
        // Readable and writable buffers lie side by side, with bytes around them that the device
        // must not touch.
        driver.rings[0].add(&[
            Piece::readable(readable, 16 + 1024),
            Piece::writable(writable, 1),
        ]);
        let mut header = [0; 16 + 1024];
        driver
            .memory
            .read_slice(&mut header, readable)
            .expect("bytes");
        driver.kick(0);
        let rings = driver.rings[0].driver_bytes();
        let (_, written) = driver.next_used(0);
        assert_eq!(driver.answer(&posted, written).status, OK);
        assert_eq!(driver.rings[0].driver_bytes(), rings, "2.7.5.1, 2.7.6");
        let mut after = [0; 16 + 1024];
        driver
            .memory
            .read_slice(&mut after, readable)
            .expect("bytes");
        assert_eq!(after, header, "2.7.5.1: a device-readable buffer");

        // A read fills its buffer and changes no byte beside it.
        let (_, header, _) = driver.lay_out(VIRTIO_BLK_T_IN, 2, &[], 0);
        let page = driver.allocate(4096);
        driver
            .memory
            .write_slice(&[0xa5; 4096], page)
            .expect("bytes");
        driver.rings[0].add(&[
            Piece::readable(header, 16),
            Piece::writable(GuestAddress(page.0 + 100), 1024),
            Piece::writable(GuestAddress(page.0 + 2000), 1),
        ]);
        driver.kick(0);
        let (_, written) = driver.next_used(0);
        assert_eq!(written, 1025);
        let mut bytes = vec![0; 4096];
        driver
            .memory
            .read_slice(&mut bytes, page)
            .expect("the page");
        let mut expected = vec![0xa5; 4096];
        expected[100..1124].copy_from_slice(&data);
        expected[2000] = OK;
        assert_eq!(bytes, expected);
    }
}

fn indirect_descriptors_are_followed_in_every_legal_place(kind: Kind) {
    let mut driver = Driver::start(kind, RamDisk::new(64), config(1), EVERYTHING);
    driver.write(0, 0, &pattern(6, 512));
    let table = driver.allocate(4096).0;
    // 2.7.5.3.2: the write-only flag of a descriptor that refers to a table is ignored; zero, one
    // or two chained descriptors may come before it.
    for (before, flags) in [(0, 0), (0, WRITE), (1, 0), (1, WRITE), (2, 0), (2, WRITE)] {
        let (posted, readable, writable) = driver.lay_out(VIRTIO_BLK_T_IN, 0, &[], 512);
        let parts = [
            (readable.0, 8, 0),
            (readable.0 + 8, 8, 0),
            (writable.0, 512, WRITE),
            (writable.0 + 512, 1, WRITE),
        ];
        for (index, &(address, len, write)) in (0u16..).zip(&parts) {
            if index < before {
                let ring = &driver.rings[0];
                ring.set_descriptor(index, address, len, write | NEXT, index + 1);
            } else {
                let link = if index == 3 { 0 } else { NEXT };
                let ring = &driver.rings[0];
                let within = index - before;
                ring.write_descriptor(table, within, address, len, write | link, within + 1);
            }
        }
        let len = u32::from(4 - before) * 16;
        driver.rings[0].set_descriptor(before, table, len, INDIRECT_TABLE | flags, 0);
        driver.rings[0].offer(0);
        driver.kick(0);
        let (head, written) = driver.next_used_keep_chain(0);
        let answer = driver.answer(&posted, written);
        assert_eq!(
            (head, answer.status, written),
            (0, OK, 513),
            "{before} before"
        );
        assert_eq!(answer.data, pattern(6, 512));
    }
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
