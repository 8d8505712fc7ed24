//! A driver that breaks the rules forces itself to reset the device, and harms no other user.

use std::sync::Arc;

use vm_memory::{Bytes, GuestAddress};
use walvisor_devices::backend::Backend;
use walvisor_devices::backend::ram::RamDisk;

use crate::driver::*;

on_both_transports!(broken_chains_need_a_reset, rings_of_random_bytes_do_no_harm,);

fn disks() -> Vec<Arc<dyn Backend>> {
    vec![Arc::new(RamDisk::new(64)), Arc::new(RamDisk::new(64))]
}

/// Breaks a queue with `offence`, and checks that a reset makes it work again.
fn expect_reset(kind: Kind, queue: usize, what: &str, offence: impl Fn(&mut Driver, u64)) {
    let mut driver = start(kind, disks(), 1, EVERYTHING);
    write(&mut driver, 0, 5, &pattern(5, 512));
    let scratch = driver.allocate(1 << 20);
    let used = driver.rings[queue].used_index();
    offence(&mut driver, scratch.0);
    driver.rings[queue].publish();
    driver.registers.notify(queue as u16);
    // The event queue looks at its chains when there is an event.
    driver.metrics[1].control.capacity_changed();
    driver.wait_for_needs_reset();
    assert_eq!(driver.rings[queue].used_index(), used, "{what}");
    driver.initialise(EVERYTHING);
    clear_attentions(&mut driver);
    assert_eq!(read(&mut driver, 0, 5, 512), pattern(5, 512), "{what}");
}

fn broken_chains_need_a_reset(kind: Kind) {
    let of_requests: [(&str, RingEdit); 5] = [
        ("a header that is short by a byte", |ring, at| {
            ring.set_descriptor(0, at, 50, NEXT, 1);
            ring.set_descriptor(1, at + 4096, 108, WRITE, 0);
        }),
        ("no room for a response", |ring, at| {
            ring.set_descriptor(0, at, 51, 0, 0);
        }),
        ("room for a response that is short by a byte", |ring, at| {
            ring.set_descriptor(0, at, 51, NEXT, 1);
            ring.set_descriptor(1, at + 4096, 107, WRITE, 0);
        }),
        ("a header outside memory", |ring, at| {
            ring.set_descriptor(0, MEMORY_END - 20, 51, NEXT, 1);
            ring.set_descriptor(1, at + 4096, 108, WRITE, 0);
        }),
        ("a response outside memory", |ring, at| {
            ring.set_descriptor(0, at, 51, NEXT, 1);
            ring.set_descriptor(1, MEMORY_END - 100, 108, WRITE, 0);
        }),
    ];
    let of_control: [(&str, RingEdit); 3] = [
        ("a request of 3 bytes", |ring, at| {
            ring.set_descriptor(0, at, 3, NEXT, 1);
            ring.set_descriptor(1, at + 4096, 5, WRITE, 0);
        }),
        ("a function of 23 bytes", |ring, at| {
            ring.set_descriptor(0, at, 23, NEXT, 1);
            ring.set_descriptor(1, at + 4096, 1, WRITE, 0);
        }),
        ("a function without room for a response", |ring, at| {
            ring.set_descriptor(0, at, 24, 0, 0);
        }),
    ];
    let of_events: [(&str, RingEdit); 1] = [("a buffer outside memory", |ring, _| {
        ring.set_descriptor(0, MEMORY_END - 8, 16, WRITE, 0);
    })];
    let own: [&[(&str, RingEdit)]; 3] = [&of_control, &of_events, &of_requests];
    for (queue, own) in own.into_iter().enumerate() {
        for (what, offence) in own {
            expect_reset(kind, queue, what, |driver, scratch| {
                offence(&driver.rings[queue], scratch);
                driver.rings[queue].offer(0);
            });
        }
        expect_reset(kind, queue, "head 65535", |driver, _| {
            driver.rings[queue].offer(u16::MAX);
        });
    }
}

fn rings_of_random_bytes_do_no_harm(kind: Kind) {
    let mut driver = start(kind, disks(), 2, EVERYTHING);
    let mut random = Random(7);
    let page = driver.allocate(0x10000);
    for round in 0..1000 {
        // Headers of commands and functions, with addresses that are mostly right.
        for at in 0..8 {
            let mut bytes: Vec<u8> = (0..64).map(|_| random.below(256) as u8).collect();
            let unit = random.below(9) as u8 / 4;
            bytes[..8].copy_from_slice(&lun(unit));
            bytes[16] = random.below(24).saturating_sub(20) as u8;
            let opcodes = [0x28, 0x2a, 0x12, 0x89, 0x42, 0x93, 0xa0, 0x9e, 0x35];
            bytes[19] = opcodes[random.below(9) as usize];
            bytes[20..].fill(0);
            bytes[27] = random.below(3) as u8;
            if at % 4 == 0 {
                // A function.
                bytes[..8].copy_from_slice(&[0, 0, 0, 0, random.below(9) as u8, 0, 0, 0]);
                bytes[8..16].copy_from_slice(&lun(unit));
            }
            let at = GuestAddress(page.0 + at * 0x1000);
            driver.memory.write_slice(&bytes, at).unwrap();
        }
        for queue in 0..4 {
            // Chains of a readable part and one or two writable ones, mostly of the right length.
            for chain in 0..12 {
                let wild = random.below(100) == 0;
                let first = chain * 4;
                let lens = if queue == 0 {
                    [24, 1, 5, 0]
                } else {
                    [51, 512, 108, 512]
                };
                let of_chain = [0, 1, 2, 3].map(|place: u16| {
                    let at = page.0 + (random.below(8) + u64::from(place / 2) * 8) * 0x1000;
                    let odd = [0, 1, 24, 51, 107, 620, 4096, u32::MAX];
                    match random.below(if wild { 3 } else { 2000 }) {
                        0 => (random.below(u64::MAX), lens[usize::from(place)]),
                        1 => (at, odd[random.below(8) as usize]),
                        _ => (at, lens[usize::from(place)]),
                    }
                });
                let out = random.below(2) == 0;
                let places: &[u16] = match (queue, out) {
                    (0, _) => &[0, 2],
                    (1, _) => &[2],
                    (_, true) => &[0, 1, 2],
                    (_, false) => &[0, 2, 3],
                };
                for (step, &place) in places.iter().enumerate() {
                    let (at, len) = of_chain[usize::from(place)];
                    let write = if place >= 2 { WRITE } else { 0 };
                    let last = step + 1 == places.len() && !wild;
                    let next = if last { 0 } else { NEXT };
                    let index = first + step as u16;
                    driver.rings[queue].set_descriptor(index, at, len, write | next, index + 1);
                }
                driver.rings[queue].offer(first);
            }
            driver.rings[queue].publish();
            driver.registers.notify(queue as u16);
        }
        driver.metrics[random.below(2) as usize]
            .control
            .capacity_changed();
        wait_until("the end of the round", || {
            let ended = |ring: &Ring| ring.used_index() == ring.available_index();
            let status = driver.registers.status();
            driver.rings[REQUESTS..].iter().all(ended) || status & NEEDS_RESET != 0
        });
        if round % 2 == 1 {
            driver.initialise(EVERYTHING);
        }
    }
    driver.initialise(EVERYTHING);
    clear_attentions(&mut driver);
    write(&mut driver, 1, 5, &pattern(5, 512));
    assert_eq!(read(&mut driver, 1, 5, 512), pattern(5, 512));
    let counts = driver.metrics[0].metrics.counts();
    assert!(
        counts.requests > 300 && counts.reads > 10 && counts.writes > 10,
        "the test has attacked: {counts:?}"
    );
}
