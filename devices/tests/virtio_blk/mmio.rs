//! Properties of virtio-mmio alone (virtio 1.2, 4.2.2).

use std::sync::Arc;

use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::block::VirtioBlock;
use walvisor_devices::transport::MmioTransport;

use crate::driver::*;

fn device(queues: u16) -> MmioDriver {
    let disk = Arc::new(RamDisk::new(64));
    MmioDriver::new(
        VirtioBlock::new(disk, config(queues)).expect("a device"),
        guest_memory(),
    )
}

fn live() -> Driver {
    Driver::start(Kind::Mmio, RamDisk::new(64), config(1), EVERYTHING)
}

#[test]
fn registers_of_identity_are_what_they_must_be() {
    let mut device = device(1);
    for (register, value) in [(0x000, 0x7472_6976), (0x004, 2), (0x008, 2)] {
        device.set(register, !value);
        assert_eq!(device.get(register), value, "{register:#x}");
    }
}

#[test]
fn registers_that_do_not_exist_read_as_the_specification_says() {
    let mut device = device(1);
    for offset in [0xb0, 0xb4, 0xb8, 0xbc] {
        assert_eq!(
            device.get(offset),
            u32::MAX,
            "no shared memory region: {offset:#x}"
        );
    }
    // Write-only and reserved registers, and QueueReset, whose feature is not negotiated.
    for offset in [
        0x14, 0x20, 0x24, 0x30, 0x38, 0x50, 0x64, 0x80, 0xa4, 0xc0, 0xf8,
    ] {
        device.set(offset, 0);
        assert_eq!(device.get(offset), 0, "{offset:#x}");
    }
    for select in [2, 3, u32::MAX] {
        device.set(0x14, select);
        assert_eq!(device.get(0x10), 0, "feature bits {select} * 32");
    }
    let mut data = [0xaa; 4];
    device
        .transport
        .read(MmioTransport::<Memory>::SIZE + 0x1000, &mut data);
    device.transport.read(u64::MAX, &mut data);
    device.transport.write(u64::MAX, &data);
    device.transport.write(1 << 32, &data);
}

#[test]
fn sizes_and_selectors_do_not_wrap_at_16_bits() {
    let mut device = device(1);
    device.set(0x30, 0x1_0000);
    assert_eq!(device.get(0x34), 0, "queue 65536 does not exist");
    device.set(0x44, 1);
    device.set(0x30, 0);
    assert_eq!(device.get(0x44), 0, "queue 0 was not touched");
    device.set(0x50, 0x1_0000);
}

#[test]
fn each_batch_is_an_edge_even_before_the_one_before_is_acknowledged() {
    let mut driver = live();
    for round in 1..=5 {
        let used = driver.rings[0].last_used();
        driver.rings[0].set_used_event(used);
        driver.flush(0);
        wait_until("an edge each", || driver.counts().interrupts == round);
    }
}

#[test]
fn a_queue_that_is_not_ready_is_not_looked_at() {
    let mut driver = live();
    driver.write(0, 1, &[1; 512]);
    let requests = driver.counts().requests;
    let size = driver.rings[0].size;
    // 4.2.2.1: a disabled queue does not run, even with chains in its ring and doorbells.
    driver.registers.disable_queue(0);
    driver.post(
        0,
        virtio_bindings::virtio_blk::VIRTIO_BLK_T_FLUSH,
        0,
        &[],
        0,
    );
    driver.kick(0);
    driver.registers.notify(0);
    std::thread::sleep(A_WHILE);
    assert_eq!(driver.counts().requests, requests);
    // Another ring of another size works in place of the old one, from index 0 on.
    let at = driver.allocate(Ring::bytes(size / 2));
    let ring = Ring::new(driver.memory.clone(), size / 2, at, true);
    driver.registers.set_queue(0, size / 2, ring.addresses());
    driver.rings[0] = ring;
    assert_eq!(driver.read(0, 1, 512), [1; 512]);
}
