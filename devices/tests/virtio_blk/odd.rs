//! Drivers that do what is allowed but rare, and drivers that break the rules: the device's
//! behaviour stays defined.

use std::thread;

use virtio_bindings::virtio_blk::*;
use vm_memory::{Bytes, GuestAddress};
use walvisor_devices::backend::ram::RamDisk;

use crate::driver::*;
use crate::gate::Gate;

on_every_transport!(
    the_device_writes_only_what_it_may,
    indirect_descriptors_are_followed_in_every_legal_place,
    with_event_idx_the_flags_mean_nothing_and_without_it_the_event_does,
    doorbells_without_a_request_do_no_harm,
    chains_before_driver_ok_are_left_alone,
    ;
    the_configuration_is_read_at_every_width_and_offset_from_the_start,
    features_are_negotiated_anew_after_a_reset,
    a_doorbell_of_a_queue_that_is_not_ready_does_nothing,
    a_reset_between_any_two_steps_leaves_a_device_that_works,
);

const LIVE: u8 = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK;

fn live(kind: Kind) -> Driver {
    Driver::start(kind, RamDisk::new(64), config(1), EVERYTHING)
}

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
    let mut driver = live(kind);
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

fn with_event_idx_the_flags_mean_nothing_and_without_it_the_event_does(kind: Kind) {
    for event_idx in [true, false] {
        let features = if event_idx {
            EVERYTHING
        } else {
            EVERYTHING & !EVENT_IDX
        };
        let mut driver = Driver::start(kind, RamDisk::new(64), config(1), features);
        // 2.7.7.1: the field that is in use asks for an interrupt each time, and the ignored one
        // asks for none.
        driver.rings[0].set_no_interrupt(event_idx);
        for round in 1..=5u64 {
            let used = driver.rings[0].last_used();
            let event = if event_idx { used } else { used + 1000 };
            driver.rings[0].set_used_event(event);
            driver.flush(0);
            wait_until("an interrupt", || driver.counts().interrupts == round);
            // 2.7.10.1: 0 with EVENT_IDX, else 0 or 1.
            assert!(driver.rings[0].used_flags() <= u16::from(!event_idx));
        }
        // Now the field in use asks for no interrupt, and the ignored one for each.
        driver.rings[0].set_no_interrupt(!event_idx);
        for _ in 0..5 {
            let used = driver.rings[0].last_used();
            let event = if event_idx { used + 1000 } else { used };
            driver.rings[0].set_used_event(event);
            driver.flush(0);
        }
        thread::sleep(A_WHILE);
        assert_eq!(driver.counts().interrupts, 5);
    }
}

fn doorbells_without_a_request_do_no_harm(kind: Kind) {
    let mut driver = live(kind);
    for round in 0..1000 {
        driver.registers.notify(0);
        if round % 100 == 0 {
            driver.flush(0);
        }
    }
    wait_until("the last doorbell", || driver.counts().doorbells >= 1000);
    let counts = driver.counts();
    assert_eq!((counts.requests, counts.errors), (10, 0));
    assert_eq!(driver.registers.status() & NEEDS_RESET, 0);
}

fn chains_before_driver_ok_are_left_alone(kind: Kind) {
    let gate = Gate::new(RamDisk::new(64));
    gate.open();
    let mut driver = Driver::attach(kind, gate.clone(), config(1));
    driver.negotiate(EVERYTHING);
    let at = driver.allocate(Ring::bytes(64));
    let ring = Ring::new(driver.memory.clone(), 64, at, true);
    driver.registers.set_queue(0, 64, ring.addresses());
    driver.rings.push(ring);
    let post = driver.post(0, VIRTIO_BLK_T_FLUSH, 0, &[], 0);
    driver.rings[0].publish();
    driver.registers.notify(0);
    thread::sleep(A_WHILE);
    assert_eq!(
        (gate.submitted(), driver.counts().interrupts),
        (0, 0),
        "2.1.2"
    );
    assert_eq!(driver.rings[0].used_index(), 0);
    driver.registers.set_status(LIVE);
    let (_, written) = driver.next_used(0);
    assert_eq!(driver.answer(&post, written).status, OK);
}

fn the_configuration_is_read_at_every_width_and_offset_from_the_start(kind: Kind) {
    let mut driver = Driver::attach(kind, RamDisk::new(0x1234), config(3));
    // 2.5.3: readable before any negotiation, including the fields of offered features.
    let whole: Vec<u8> = (0..96).map(|at| driver.read_config::<1>(at)[0]).collect();
    assert_eq!(whole[..8], 0x1234u64.to_le_bytes());
    assert_eq!(whole[34..36], [3, 0], "num_queues");
    assert_eq!(whole[33], 0, "5.2.5.2: unused0");
    assert_eq!(whole[57..60], [0; 3], "5.2.5.2: unused1");
    assert_eq!(whole[72..], [0; 24], "nothing behind the last field");
    for at in 0..88usize {
        let here = |len: usize| &whole[at..at + len];
        assert_eq!(driver.read_config::<2>(at as u64), here(2), "{at}");
        assert_eq!(driver.read_config::<3>(at as u64), here(3), "{at}");
        assert_eq!(driver.read_config::<4>(at as u64), here(4), "{at}");
        assert_eq!(driver.read_config::<8>(at as u64), here(8), "{at}");
    }
    // The last access inside the window, and accesses that run beyond it.
    for at in [0xef8, 0xefc, 0xeff] {
        assert_eq!(driver.read_config::<8>(at), [0; 8]);
        driver.registers.write_config(at, &[0xff; 8]);
    }
    driver.initialise(EVERYTHING);
    driver.flush(2);
}

fn features_are_negotiated_anew_after_a_reset(kind: Kind) {
    let disk = RamDisk::new(64);
    let mut driver = Driver::attach(kind, disk, config(2));
    let all = driver.registers.device_features();
    for round in 0..20 {
        let wanted = if round % 2 == 0 {
            all
        } else {
            VERSION_1 | FLUSH
        };
        driver.initialise(wanted);
        // The earlier negotiation has no effect any more: on requests, rings or the cache mode.
        let discard = driver.request(0, VIRTIO_BLK_T_DISCARD, 0, &segment(0, 8, 0), 0);
        assert_eq!(discard.status, if round % 2 == 0 { OK } else { UNSUPP });
        driver.registers.write_config(32, &[0]);
        let writeback = driver.read_config::<1>(32);
        assert_eq!(writeback, [(round % 2) as u8], "round {round}");
        driver.write(1, round, &pattern(round, 512));
        assert_eq!(driver.read(0, round, 512), pattern(round, 512));
    }
    // Without a reset in between, the driver's second choice is ignored (3.1.1).
    driver.registers.set_driver_features(all);
    let status = driver.registers.status();
    driver.registers.set_status(status | FEATURES_OK);
    let discard = driver.request(0, VIRTIO_BLK_T_DISCARD, 0, &segment(0, 8, 0), 0);
    assert_eq!(discard.status, UNSUPP);
}

fn a_doorbell_of_a_queue_that_is_not_ready_does_nothing(kind: Kind) {
    let gate = Gate::new(RamDisk::new(64));
    gate.open();
    let mut driver = Driver::attach(kind, gate.clone(), config(3));
    driver.registers.notify(1);
    driver.negotiate(EVERYTHING);
    for queue in [0, 2] {
        let at = driver.allocate(Ring::bytes(64));
        let ring = Ring::new(driver.memory.clone(), 64, at, true);
        driver.rings.push(ring);
        if queue == 0 {
            let addresses = driver.rings[0].addresses();
            driver.registers.set_queue(0, 64, addresses);
        }
    }
    driver.registers.set_status(LIVE);
    for queue in [1, 2, 3, 1000, u16::MAX] {
        driver.registers.notify(queue);
    }
    driver.flush(0);
    assert_eq!((gate.queues(), gate.submitted()), (1, 1));
    assert_eq!(driver.registers.status(), LIVE);
    // A queue enabled later, on a live device, works; doorbells rung before that have no effect.
    let addresses = driver.rings[1].addresses();
    driver.registers.set_queue(2, 64, addresses);
    let (posted, header, status) = driver.lay_out(VIRTIO_BLK_T_FLUSH, 0, &[], 0);
    driver.rings[1].add(&[Piece::readable(header, 16), Piece::writable(status, 1)]);
    driver.rings[1].publish();
    driver.registers.notify(2);
    wait_until("an answer", || driver.rings[1].used_index() == 1);
    assert_eq!(driver.answer(&posted, 1).status, OK);
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
