//! A correct driver, over either transport.

use crate::guest::{Guest, QUEUE_SIZE, QUEUES, SECTOR, buffers, rings};
use crate::input::Input;
use crate::registers::{FEATURES_OK, Register};

/// A device's registers, accessed in the way of its transport.
pub trait Bus {
    /// The driver's memory.
    fn guest(&mut self) -> &mut Guest;
    /// Reads a register.
    fn get(&mut self, register: Register) -> u32;
    /// Writes a register.
    fn set(&mut self, register: Register, value: u32);
    /// Rings a queue's doorbell.
    fn notify(&mut self, queue: u16);
}

/// ACKNOWLEDGE and DRIVER; those and FEATURES_OK; those and DRIVER_OK.
const STATUS: [u32; 3] = [3, 11, 15];

/// Takes the device from reset to DRIVER_OK, with the offered features among `wanted` and queues of
/// `size` descriptors (virtio 1.2, 3.1.1).
pub fn start(bus: &mut impl Bus, wanted: u64, size: u16) {
    let [found, accepted, live] = STATUS;
    bus.set(Register::Status, 0);
    bus.guest().clear_rings();
    bus.set(Register::Status, found);
    for half in 0..2 {
        bus.set(Register::DeviceSelect, half);
        let offered = bus.get(Register::DeviceFeatures);
        bus.set(Register::DriverSelect, half);
        let wanted = (wanted >> (half * 32)) as u32;
        bus.set(Register::DriverFeatures, offered & wanted);
    }
    bus.set(Register::Status, accepted);
    for queue in 0..QUEUES {
        set_up_queue(bus, queue, size);
    }
    bus.set(Register::Status, live);
}

/// Sets up a queue and enables it.
pub fn set_up_queue(bus: &mut impl Bus, queue: u16, size: u16) {
    bus.set(Register::QueueSelect, queue.into());
    bus.set(Register::QueueSize, size.into());
    for (ring, address) in rings(queue).into_iter().enumerate() {
        bus.set(Register::Address(ring, 0), address as u32);
        bus.set(Register::Address(ring, 1), (address >> 32) as u32);
    }
    bus.set(Register::Ready, 1);
}

/// Submits a request of the input's choice, and does not wait for it.
pub fn request(bus: &mut impl Bus, input: &mut Input) {
    let queue = u16::from(input.byte()) % QUEUES;
    let size = input.of(&[QUEUE_SIZE, 8, 4]);
    let kind = input.of(&[0, 1, 4, 8, 11, 13, 14, 99]);
    let sector = input.pick(&[1 << 55, u64::MAX, 63], |byte| byte % 66);
    let len = input.of(&[
        512,
        1024,
        0,
        16,
        20,
        2048,
        0x8000,
        u32::MAX,
        1 << 20,
        0xffff_fe00,
    ]);
    bus.guest().offer(queue, size, kind, sector, len);
    bus.notify(queue);
}

/// Checks that the device works after a reset, whatever its state was: each queue writes a sector
/// and reads it back.
pub fn finish(bus: &mut impl Bus) {
    bus.set(Register::Status, 0);
    assert_eq!(bus.get(Register::Status), 0, "the device does not reset");
    start(bus, u64::MAX, QUEUE_SIZE);
    assert_eq!(
        bus.get(Register::Status),
        STATUS[2],
        "the device does not start"
    );
    for queue in 0..QUEUES {
        let [_, data, status] = buffers(queue);
        let sector = [0xa5 ^ queue as u8; SECTOR];
        for (kind, before, after) in [(1, sector, sector), (0, [0; SECTOR], sector)] {
            bus.guest().write(data, &before);
            bus.guest().write(status, &[0xff]);
            bus.guest()
                .offer(queue, QUEUE_SIZE, kind, queue.into(), SECTOR as u32);
            bus.notify(queue);
            // libFuzzer's timeout finds a hang.
            while !bus.guest().all_used(queue) {
                std::thread::yield_now();
            }
            assert_eq!(bus.guest().read(status, 1), [0], "a good request");
            assert_eq!(bus.guest().read(data, SECTOR), after, "its data");
        }
    }
    bus.set(Register::Status, 0);
}

/// Writes a register with its proper width, in any order and with any value.
pub fn any_register(bus: &mut impl Bus, input: &mut Input) {
    let register = match input.byte() % 12 {
        0 => Register::DeviceSelect,
        1 => Register::DriverSelect,
        2 => Register::DriverFeatures,
        3 => Register::QueueSelect,
        4 => Register::QueueSize,
        5 => Register::Ready,
        6 => Register::QueueReset,
        7 => Register::Status,
        8 => {
            let queue = u16::from(input.byte()) % QUEUES;
            let size = input.of(&[QUEUE_SIZE, 8, 4]);
            return set_up_queue(bus, queue, size);
        }
        ring => Register::Address(usize::from(ring) - 9, usize::from(input.byte() & 1)),
    };
    let value = value(input);
    bus.set(register, value);
}

/// A value of the input's choice: one with a meaning, or any.
pub fn value(input: &mut Input) -> u32 {
    const TELLING: [u32; 28] = [
        0,
        1,
        2,
        3,
        FEATURES_OK as u32,
        11,
        15,
        64,
        128,
        0x100,
        4,
        16,
        32,
        1024,
        0x8000,
        0xffff,
        0x1_0000,
        0x100,
        0x300,
        0x400,
        0x900,
        0xb00,
        0xc00,
        0xffff_fff0,
        u32::MAX,
        0x7ff0,
        0xfff0,
        0x104,
    ];
    let byte = input.byte();
    match TELLING.get(usize::from(byte)) {
        Some(value) => *value,
        None => u32::from_le_bytes(input.bytes()),
    }
}

/// Writes any bytes near the start of the memory, where the rings are.
pub fn scribble(guest: &mut Guest, input: &mut Input) {
    guest.forget_quiet();
    let at = u64::from(u16::from_le_bytes(input.bytes())) & 0xfff;
    let len = input.byte();
    let bytes: Vec<u8> = (0..len).map(|_| input.byte()).collect();
    guest.write(at, &bytes);
}

/// Features for a driver to accept.
pub fn features(input: &mut Input) -> u64 {
    match input.byte() {
        0 => u64::MAX,
        // Only VERSION_1; without FLUSH; without RING_RESET; without EVENT_IDX.
        1 => 1 << 32,
        2 => !(1 << 9),
        3 => !(1 << 40),
        4 => !(1 << 29),
        _ => u64::from_le_bytes(input.bytes()),
    }
}
