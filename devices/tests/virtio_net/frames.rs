//! Frames in both directions, and what the device says of itself.

use crate::driver::*;

on_both_transports!(
    a_frame_goes_each_way,
    the_device_says_what_it_is,
    frames_wait_for_buffers,
    frames_wait_for_a_slow_link,
    a_reset_in_the_middle_of_a_frame_leaves_the_stream_in_step,
);

fn a_frame_goes_each_way(kind: Kind) {
    for (wanted, len) in [(EVERYTHING, 60), (MAC, 1514), (EVENT_IDX, 14), (0, 1518)] {
        let (mut driver, mut peer) = Driver::start(kind, config(), wanted);
        let to_guest = frame(1, len);
        let buffers = [driver.post_buffer(2048)];
        driver.kick(RECEIVE);
        peer.send(&to_guest);
        assert_eq!(driver.receive(&buffers), to_guest);
        let from_guest = frame(2, len);
        driver.send(&from_guest);
        assert_eq!(peer.receive(), from_guest);
        let counts = driver.metrics.counts();
        assert_eq!((counts.frames_received, counts.frames_sent), (1, 1));
        let bytes = len as u64;
        assert_eq!((counts.bytes_received, counts.bytes_sent), (bytes, bytes));
        assert_eq!((counts.receive_drops, counts.send_drops), (0, 0));
    }
}

fn the_device_says_what_it_is(kind: Kind) {
    let (mut driver, _peer) = Driver::attach(kind, config());
    let offered = driver.registers.device_features();
    let ring_reset = 1 << 40;
    assert_eq!(
        offered,
        VERSION_1 | EVENT_IDX | INDIRECT | MAC | MTU | STATUS | ring_reset
    );
    let space = [
        0x02, 0x11, 0x22, 0x33, 0x44, 0x55, // MAC
        1, 0, // the link is up
        1, 0, // one queue pair
        0xdc, 0x05, // 1500
        0, 0, 0, 0,
    ];
    assert_eq!(driver.read_config::<16>(0), space);
    // No field can be written.
    driver.initialise(EVERYTHING);
    for offset in 0..12 {
        driver.registers.write_config(offset, &[0xaa]);
    }
    assert_eq!(driver.read_config::<16>(0), space);
    assert_eq!(driver.read_config::<2>(10), [0xdc, 0x05]);
}

fn frames_wait_for_buffers(kind: Kind) {
    let (mut driver, mut peer) = Driver::start(kind, config(), EVERYTHING);
    let frames = 500;
    let sender = std::thread::spawn(move || {
        for number in 0..frames {
            peer.send(&frame(number, 100 + number as usize));
        }
        peer
    });
    for number in 0..frames {
        let buffers = [driver.post_buffer(2048)];
        driver.kick(RECEIVE);
        assert_eq!(
            driver.receive(&buffers),
            frame(number, 100 + number as usize)
        );
    }
    drop(sender.join().unwrap());
    assert_eq!(driver.metrics.counts().receive_drops, 0);
}

/// A frame that the ring takes while nobody may read it.
fn post_numbered(driver: &mut Driver, number: u32) {
    driver.post_frame(&[0; HEADER], &frame(number, 1500));
    driver.kick(TRANSMIT);
}

fn frames_wait_for_a_slow_link(kind: Kind) {
    let (mut driver, mut peer) = Driver::start(kind, config(), EVERYTHING);
    // More than the socket, the device and the ring hold.
    let frames = 2000;
    let reader = std::thread::spawn(move || {
        std::thread::sleep(A_WHILE);
        for number in 0..frames {
            assert_eq!(peer.receive(), frame(number, 1500), "frame {number}");
        }
        peer
    });
    for number in 0..frames {
        while driver.rings[TRANSMIT].pop_used().is_some() {}
        if driver.rings[TRANSMIT].free_descriptors() == 0 {
            driver.wait_used(TRANSMIT);
        }
        post_numbered(&mut driver, number);
    }
    drop(reader.join().unwrap());
    assert_eq!(driver.metrics.counts().send_drops, 0);
}

/// Sends frames until the link takes no more for a while.
fn fill_the_link(driver: &mut Driver) {
    for number in 0.. {
        if driver.rings[TRANSMIT].free_descriptors() == 0 {
            std::thread::sleep(A_WHILE);
            if driver.rings[TRANSMIT].pop_used().is_none() {
                break;
            }
        }
        while driver.rings[TRANSMIT].pop_used().is_some() {}
        post_numbered(driver, number);
    }
}

fn a_reset_in_the_middle_of_a_frame_leaves_the_stream_in_step(kind: Kind) {
    let (mut driver, mut peer) = Driver::start(kind, config(), EVERYTHING);
    fill_the_link(&mut driver);
    driver.initialise(EVERYTHING);
    let last = frame(77, 99);
    driver.post_frame(&[0; HEADER], &last);
    driver.kick(TRANSMIT);
    // All frames that the device has taken come whole, and then the one after the reset.
    let mut taken = 0;
    loop {
        let received = peer.receive();
        if received == last {
            break;
        }
        assert_eq!(received, frame(taken, 1500), "frame {taken}");
        taken += 1;
    }
    assert!(taken > 0);
    let sent = driver.metrics.counts().frames_sent;
    assert_eq!(sent, u64::from(taken) + 1);
}

#[test]
fn flags_and_fields_without_a_meaning_are_ignored() {
    let (mut driver, mut peer) = Driver::start(Kind::Mmio, config(), EVERYTHING);
    // DATA_VALID, RSC_INFO and bits that have no name; lengths and offsets of offloads;
    // num_buffers.
    let header = [0xfe, 0, 9, 9, 9, 9, 0xff, 0xff, 0xff, 0xff, 7, 7];
    let head = driver.post_frame(&header, &frame(4, 60));
    driver.kick(TRANSMIT);
    assert_eq!(driver.wait_used(TRANSMIT), (head, 0));
    assert_eq!(peer.receive(), frame(4, 60));
}

#[test]
fn a_larger_mtu_lets_larger_frames_pass() {
    let mtu = 65520;
    let (mut driver, mut peer) = Driver::start(
        Kind::Mmio,
        walvisor_devices::net::NetConfig { mtu, ..config() },
        EVERYTHING,
    );
    assert_eq!(driver.read_config(10), mtu.to_le_bytes());
    let largest = frame(3, usize::from(mtu) + 14);
    driver.send(&largest);
    assert_eq!(peer.receive(), largest);
    let buffers = [driver.post_buffer(HEADER + largest.len())];
    driver.kick(RECEIVE);
    peer.send(&largest);
    assert_eq!(driver.receive(&buffers), largest);
}
