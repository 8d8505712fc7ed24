//! A driver that breaks the rules has to reset the device.

use crate::driver::*;

on_both_transports!(a_queue_that_breaks_needs_a_reset,);

/// That frames still pass in both directions.
fn expect_service(driver: &mut Driver, peer: &mut Peer) {
    driver.send(&frame(5, 60));
    assert_eq!(peer.receive(), frame(5, 60));
    let buffers = [driver.post_buffer(2048)];
    driver.kick(RECEIVE);
    peer.send(&frame(6, 60));
    assert_eq!(driver.receive(&buffers), frame(6, 60));
}

fn a_queue_that_breaks_needs_a_reset(kind: Kind) {
    let (mut driver, mut peer) = Driver::start(kind, config(), EVERYTHING);
    for queue in [RECEIVE, TRANSMIT] {
        peer.send(&frame(1, 60));
        driver.break_queue(queue);
        assert!(driver.rings[queue].pop_used().is_none());
        driver.initialise(EVERYTHING);
        // The frame that found no buffer waits.
        let buffers = [driver.post_buffer(2048)];
        driver.kick(RECEIVE);
        assert_eq!(driver.receive(&buffers), frame(1, 60));
        expect_service(&mut driver, &mut peer);
    }
}

#[test]
fn one_queue_breaks_and_the_other_goes_on() {
    let (mut driver, mut peer) = Driver::start(Kind::Mmio, config(), EVERYTHING);
    driver.break_queue(TRANSMIT);
    let buffers = [driver.post_buffer(2048)];
    driver.kick(RECEIVE);
    peer.send(&frame(1, 60));
    assert_eq!(driver.receive(&buffers), frame(1, 60));
}
