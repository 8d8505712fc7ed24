//! A link that ends.

use std::io::Write;

use crate::driver::*;

on_both_transports!(a_link_that_ends_goes_down,);

/// Waits until the driver sees the link down.
fn expect_down(driver: &mut Driver, generation: u32) {
    wait_until("the link to go down", || {
        driver.read_config::<2>(6) == [0, 0]
    });
    wait_until("an interrupt", || {
        driver.registers.take_config_interrupts() > 0
    });
    assert_ne!(driver.registers.generation(), generation);
    // Frames are lost, as on a cable that is unplugged, and the driver gets its buffers back.
    let drops = driver.metrics.counts().send_drops;
    driver.send(&frame(2, 60));
    assert_eq!(driver.metrics.counts().send_drops, drops + 1);
    assert_eq!(driver.registers.status() & NEEDS_RESET, 0);
}

fn a_link_that_ends_goes_down(kind: Kind) {
    for sends in [false, true] {
        let (mut driver, peer) = Driver::start(kind, config(), EVERYTHING);
        let generation = driver.registers.generation();
        assert_eq!(driver.read_config::<2>(6), [1, 0]);
        drop(peer);
        if sends {
            driver.send(&frame(1, 60));
        }
        expect_down(&mut driver, generation);
        // It stays down over a reset, which announces nothing.
        driver.initialise(EVERYTHING);
        assert_eq!(driver.read_config::<2>(6), [0, 0]);
        assert_eq!(driver.registers.status() & NEEDS_RESET, 0);
    }
}

#[test]
fn a_link_that_is_out_of_step_goes_down() {
    let (mut driver, mut peer) = Driver::start(Kind::Mmio, config(), EVERYTHING);
    let generation = driver.registers.generation();
    peer.0.write_all(&[0xff; 100]).unwrap();
    let buffers = [driver.post_buffer(2048)];
    driver.kick(RECEIVE);
    expect_down(&mut driver, generation);
    let _ = buffers;
    assert!(driver.rings[RECEIVE].pop_used().is_none());
}
