//! A driver or a link that breaks the rules: frames are dropped and counted, or the driver has to
//! reset the device.

use vm_memory::{Bytes, GuestAddress};

use crate::driver::*;

on_both_transports!(
    frames_of_a_wrong_length_are_dropped,
    frames_for_a_buffer_that_is_too_small_are_dropped,
    a_queue_that_breaks_needs_a_reset,
);

/// That frames still pass in both directions.
fn expect_service(driver: &mut Driver, peer: &mut Peer) {
    driver.send(&frame(5, 60));
    assert_eq!(peer.receive(), frame(5, 60));
    let buffers = [driver.post_buffer(2048)];
    driver.kick(RECEIVE);
    peer.send(&frame(6, 60));
    assert_eq!(driver.receive(&buffers), frame(6, 60));
}

fn frames_of_a_wrong_length_are_dropped(kind: Kind) {
    let (mut driver, mut peer) = Driver::start(kind, config(), EVERYTHING);
    let lengths = [0, 1, 11, 12, 13, 25, 12 + 1519, 12 + 65536, 1 << 20];
    let mut drops = 0;
    for len in lengths {
        let at = driver.allocate(len.max(1));
        let head = driver.rings[TRANSMIT].add(&[Piece::readable(at, len as u32)]);
        driver.kick(TRANSMIT);
        assert_eq!(driver.wait_used(TRANSMIT), (head, 0));
        drops += 1;
        assert_eq!(driver.metrics.counts().send_drops, drops, "{len} bytes");
    }
    // Memory that is not there, a chain without a readable byte, and headers that ask for what was
    // not negotiated.
    let at = driver.allocate(4096);
    for piece in [
        Piece::readable(GuestAddress(MEMORY_END - 20), 100),
        Piece::readable(GuestAddress(u64::MAX - 50), 100),
        Piece::writable(at, 100),
    ] {
        let head = driver.rings[TRANSMIT].add(&[piece]);
        driver.kick(TRANSMIT);
        assert_eq!(driver.wait_used(TRANSMIT), (head, 0));
        drops += 1;
    }
    for (byte, value) in [(0, 1), (0, 0x81), (1, 1), (1, 0xff)] {
        let mut header = [0; HEADER];
        header[byte] = value;
        let head = driver.post_frame(&header, &frame(1, 60), 1 << 20);
        driver.kick(TRANSMIT);
        assert_eq!(driver.wait_used(TRANSMIT), (head, 0));
        drops += 1;
    }
    assert_eq!(driver.metrics.counts().send_drops, drops);
    assert_eq!(driver.metrics.counts().frames_sent, 0);
    expect_service(&mut driver, &mut peer);
}

fn frames_for_a_buffer_that_is_too_small_are_dropped(kind: Kind) {
    let (mut driver, mut peer) = Driver::start(kind, config(), EVERYTHING);
    let at = driver.allocate(4096);
    let outside = GuestAddress(MEMORY_END - 20);
    for (drops, piece) in (1..).zip([
        Piece::writable(at, 1),
        Piece::writable(at, HEADER as u32),
        Piece::writable(at, HEADER as u32 + 59),
        Piece::readable(at, 2048),
        Piece::writable(outside, 2048),
        Piece::writable(GuestAddress(u64::MAX - 100), 2048),
    ]) {
        let head = driver.rings[RECEIVE].add(&[piece]);
        driver.kick(RECEIVE);
        peer.send(&frame(1, 60));
        assert_eq!(driver.wait_used(RECEIVE), (head, 0));
        assert_eq!(driver.metrics.counts().receive_drops, drops);
    }
    // A buffer that is just large enough.
    let buffers = [driver.post_buffer(HEADER + 60)];
    driver.kick(RECEIVE);
    peer.send(&frame(2, 60));
    assert_eq!(driver.receive(&buffers), frame(2, 60));
    expect_service(&mut driver, &mut peer);
}

fn a_queue_that_breaks_needs_a_reset(kind: Kind) {
    let (mut driver, mut peer) = Driver::start(kind, config(), EVERYTHING);
    for queue in [RECEIVE, TRANSMIT] {
        driver.rings[queue].offer(u16::MAX);
        driver.rings[queue].publish();
        driver.registers.notify(queue as u16);
        peer.send(&frame(1, 60));
        driver.wait_for_needs_reset();
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
    driver.rings[TRANSMIT].offer(u16::MAX);
    driver.rings[TRANSMIT].publish();
    driver.registers.notify(TRANSMIT as u16);
    driver.wait_for_needs_reset();
    let buffers = [driver.post_buffer(2048)];
    driver.kick(RECEIVE);
    peer.send(&frame(1, 60));
    assert_eq!(driver.receive(&buffers), frame(1, 60));
}

#[test]
fn rings_of_random_bytes_do_no_harm() {
    let (mut driver, mut peer) = Driver::start(Kind::Mmio, config(), EVERYTHING);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for _ in 0..200 {
        for queue in [RECEIVE, TRANSMIT] {
            for index in 0..64 {
                let value = random();
                let address = if value & 1 == 0 {
                    value >> 8 & (MEMORY_END - 1)
                } else {
                    value
                };
                let len = random() as u32 >> (random() % 32);
                let (flags, next) = (random() as u16 & 7, random() as u16 % 80);
                driver.rings[queue].set_descriptor(index, address, len, flags, next);
            }
            for _ in 0..random() % 70 {
                let head = random() as u16 % 70;
                driver.rings[queue].offer(head);
            }
            driver.rings[queue].publish();
            driver.registers.notify(queue as u16);
        }
        peer.0.set_nonblocking(true).unwrap();
        for len in 14..30 {
            let bytes = [&(len as u32).to_be_bytes()[..], &frame(7, len)].concat();
            // A stream that is full has enough for now, but a part of a frame would end it.
            if std::io::Write::write(&mut peer.0, &bytes).is_ok_and(|sent| sent < bytes.len()) {
                panic!("a part of a frame");
            }
        }
        // What the device has sent out of random memory.
        let mut sink = [0; 4096];
        while std::io::Read::read(&mut peer.0, &mut sink).is_ok_and(|read| read > 0) {}
        peer.0.set_nonblocking(false).unwrap();
    }
    driver.initialise(EVERYTHING);
    driver
        .memory
        .write_slice(&[0; 16], GuestAddress(0))
        .expect("memory is there");
    // Frames that are still on their way come first.
    let marker = frame(1234, 200);
    std::thread::scope(|scope| {
        // The stream may be full of frames, which leave it as buffers are posted.
        scope.spawn(|| peer.send(&marker));
        wait_until("the frame after all others", || {
            let buffers = [driver.post_buffer(2048)];
            driver.kick(RECEIVE);
            driver.receive(&buffers) == marker
        });
    });
}

#[test]
fn a_frame_of_the_link_that_is_too_long_is_dropped() {
    let (mut driver, mut peer) = Driver::start(Kind::Mmio, config(), EVERYTHING);
    let buffers = [driver.post_buffer(1 << 20), driver.post_buffer(1 << 20)];
    driver.kick(RECEIVE);
    for len in [1519, 9000, 65535, 65553] {
        peer.send(&frame(1, len));
    }
    peer.send(&frame(2, 1518));
    assert_eq!(driver.receive(&buffers), frame(2, 1518));
    assert_eq!(driver.metrics.counts().receive_drops, 4);
    peer.send(&frame(3, 0));
    assert_eq!(driver.receive(&buffers), frame(3, 0));
}
