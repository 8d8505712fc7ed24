//! Properties of virtio-mmio alone (virtio 1.2, 4.2.2).

use virtio_bindings::virtio_blk::*;
use walvisor_devices::backend::ram::RamDisk;

use crate::driver::*;

fn live() -> Driver {
    Driver::start(Kind::Mmio, RamDisk::new(64), config(1), EVERYTHING)
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
    driver.post(0, VIRTIO_BLK_T_FLUSH, 0, &[], 0);
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
