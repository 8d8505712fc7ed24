//! Random rings: the device's answers do not matter, but it must neither panic nor hang, and it must
//! work after a reset.

use std::time::Duration;

use vm_memory::{Bytes, GuestAddress};
use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::block::BlockConfig;

use crate::driver::*;
use crate::gate::Gate;

on_both_transports!(random_rings_do_no_harm,);

fn random_rings_do_no_harm(kind: Kind) {
    let gate = Gate::new(RamDisk::new(64));
    gate.open();
    // With every option that changes how a worker processes a ring.
    let config = BlockConfig {
        in_order: true,
        poll: Duration::from_micros(20),
        ..config(1)
    };
    let mut driver = Driver::attach(kind, gate.clone(), config);
    let (mut served, mut broken) = (0, 0);
    for seed in 1..=300 {
        let mut random = Random(seed * 0x1234_5677);
        driver.initialise(match seed % 3 {
            0 => EVERYTHING & !IN_ORDER,
            1 => EVERYTHING & !EVENT_IDX,
            _ => EVERYTHING,
        });
        let scratch = driver.allocate(0x4000).0;
        for at in (0..0x4000).step_by(16) {
            // Some valid headers, and bytes that could be descriptors.
            let kind = random.below(16) as u32;
            let header = [
                kind.to_le_bytes(),
                [0; 4],
                (random.below(70) as u32).to_le_bytes(),
                [0; 4],
            ];
            driver
                .memory
                .write_slice(header.as_flattened(), GuestAddress(scratch + at))
                .expect("write");
        }
        let tidy = random.below(2) == 0;
        for index in 0..64 {
            let (mut flags, mut next) = (random.below(8) as u16, random.below(66) as u16);
            let mut len = [0, 1, 16, 17, 512, 513, 4096, u32::MAX][random.below(8) as usize];
            let mut address = scratch + random.below(0x400) * 16;
            if tidy {
                // Chains of three: header, data, status.
                flags = [1, 1 | (random.below(2) as u16 * 2), 2][index as usize % 3];
                next = index + 1;
                len = [16, 512, 1][index as usize % 3];
            } else if random.below(10) == 0 {
                address = random.next();
            }
            driver.rings[0].set_descriptor(index, address, len, flags, next);
        }
        let offered = random.below(20);
        for _ in 0..offered {
            let head = if tidy {
                random.below(21) as u16 * 3
            } else {
                random.below(65) as u16
            };
            driver.rings[0].offer(head);
        }
        let before = driver.counts();
        driver.rings[0].publish();
        driver.registers.notify(0);
        wait_until("the doorbell to be seen", || {
            driver.counts().doorbells > before.doorbells
        });
        if seed % 4 > 0 && offered > 0 {
            // The reset comes while the worker is busy, not before it has begun.
            wait_until("a chain or an error", || {
                driver.counts().requests > before.requests
                    || driver.registers.status() & NEEDS_RESET != 0
            });
        }
        if random.below(2) == 0 {
            driver.registers.reset_queue(0);
            wait_until("the end of the queue's reset", || {
                !driver.registers.queue_resetting(0)
            });
        }
        driver.registers.set_status(0);
        assert_eq!((gate.queues(), gate.leaked()), (0, 0), "seed {seed}");
        let after = driver.counts();
        served += after.requests - before.requests;
        broken += after.errors - before.errors;
    }
    assert!(
        served > 1000,
        "the rings made sense too rarely: {served} requests"
    );
    assert!(
        broken > 100,
        "the rings made sense too often: {broken} errors"
    );
    driver.initialise(EVERYTHING);
    driver.write(0, 0, &[1; 512]);
}
