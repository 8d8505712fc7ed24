//! Doorbells and interrupts: their number, and that none is missing (virtio 1.2, 2.7.7, 2.7.10).

use virtio_bindings::virtio_blk::*;
use walvisor_devices::backend::ram::RamDisk;

use crate::driver::*;
use crate::gate::Gate;

on_every_transport!(
    a_batch_is_one_doorbell_one_kick_and_one_interrupt,
    an_interrupt_is_never_missing,
    a_doorbell_is_never_missing,
    the_used_index_moves_once_per_batch,
);

fn a_batch_is_one_doorbell_one_kick_and_one_interrupt(kind: Kind) {
    for features in [EVERYTHING, EVERYTHING & !EVENT_IDX] {
        let gate = Gate::new(RamDisk::new(1024));
        let mut driver = Driver::start(kind, gate.clone(), config(1), features);
        let posted: Vec<PostedRequest> = (0..16)
            .map(|sector| driver.post(0, VIRTIO_BLK_T_OUT, sector, &pattern(sector, 512), 0))
            .collect();
        // The worker may be awake and looking at the ring already, and then asks for no doorbell.
        let rung = driver.kick(0);
        wait_until("16 requests", || gate.submitted() == 16);
        wait_until("the end of the batch", || gate.kicks() > 0);
        assert_eq!(gate.kicks(), 1, "one batch");
        assert_eq!(
            driver.registers.take_queue_interrupts(0),
            0,
            "nothing has ended"
        );
        gate.open();
        for post in posted {
            let (head, written) = driver.next_used(0);
            assert_eq!(head, post.head, "in the order they ended");
            assert_eq!(driver.answer(&post, written).status, OK);
        }
        wait_until("the interrupt", || driver.counts().interrupts > 0);
        std::thread::sleep(A_WHILE);
        assert_eq!(driver.registers.take_queue_interrupts(0), 1);
        wait_until("the doorbell", || {
            driver.counts().doorbells == u64::from(rung)
        });
        let counts = driver.counts();
        assert_eq!((counts.requests, counts.interrupts), (16, 1));
    }
}

/// The driver sleeps until it is interrupted, so a missing interrupt would make it sleep forever.
/// More than 2^16 used elements, so that the indices wrap.
fn an_interrupt_is_never_missing(kind: Kind) {
    let mut driver = Driver::start(kind, RamDisk::new(64), config(1), EVERYTHING);
    for sector in 0..16 {
        driver.post(0, VIRTIO_BLK_T_IN, sector, &[], 512);
    }
    let (mut ended, mut interrupts) = (0u32, 0);
    driver.rings[0].set_used_event(0);
    driver.kick(0);
    while ended < 70_000 {
        wait_until("an interrupt", || {
            interrupts += driver.registers.take_queue_interrupts(0);
            driver.rings[0].used_index() != driver.rings[0].last_used() && interrupts > 0
        });
        interrupts = 0;
        loop {
            while driver.rings[0].used_index() != driver.rings[0].last_used() {
                let (head, _) = driver.rings[0]
                    .take_used_keep_chain()
                    .expect("a used chain");
                ended += 1;
                driver.rings[0].offer(head);
            }
            driver.kick(0);
            // Ask for the next interrupt, then look again: one may have come in between.
            let last = driver.rings[0].last_used();
            driver.rings[0].set_used_event(last);
            if driver.rings[0].used_index() == last {
                break;
            }
        }
    }
    assert!(driver.counts().interrupts < u64::from(ended), "batches");
    assert_eq!(driver.registers.status() & NEEDS_RESET, 0);
}

/// The driver rings only when the device has asked for it.
fn a_doorbell_is_never_missing(kind: Kind) {
    for features in [EVERYTHING, EVERYTHING & !EVENT_IDX] {
        let mut driver = Driver::start(kind, RamDisk::new(64), config(1), features);
        let mut rings = 0;
        let mut random = Random(77);
        let post = driver.post(0, VIRTIO_BLK_T_IN, 0, &[], 512);
        rings += u64::from(driver.kick(0));
        driver.next_used_keep_chain(0);
        for _ in 0..20_000 {
            driver.rings[0].offer(post.head);
            rings += u64::from(driver.kick(0));
            for _ in 0..random.below(200) {
                std::hint::spin_loop();
            }
            driver.next_used_keep_chain(0);
        }
        wait_until("every doorbell", || driver.counts().doorbells == rings);
        assert_eq!(driver.counts().requests, 20_001);
    }
}

fn the_used_index_moves_once_per_batch(kind: Kind) {
    let gate = Gate::new(RamDisk::new(64));
    let mut driver = Driver::start(kind, gate.clone(), config(1), EVERYTHING);
    for sector in 0..20 {
        driver.post(0, VIRTIO_BLK_T_IN, sector, &[], 512);
    }
    driver.kick(0);
    wait_until("20 requests", || gate.submitted() == 20);
    assert_eq!(driver.rings[0].used_index(), 0);
    gate.open();
    let ring = &driver.rings[0];
    let mut seen = 0;
    wait_until("the index", || {
        seen = ring.used_index();
        seen != 0
    });
    assert_eq!(seen, 20, "never in between");
}
