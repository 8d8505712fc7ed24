//! When a write is stable (virtio 1.2, 5.2.5.2 and 5.2.6.2), tested by power loss.

use virtio_bindings::virtio_blk::*;
use walvisor_devices::backend::Backend;
use walvisor_devices::backend::ram::RamDisk;

use crate::driver::*;

on_every_transport!(
    a_flush_makes_writes_stable_and_nothing_else_does,
    without_flush_every_write_is_stable,
    without_flush_every_write_is_stable_on_a_disk_that_cannot_be_switched,
    writeback_is_switched_while_running,
    config_wce_without_flush_starts_as_writethrough,
    a_reset_returns_to_the_configured_mode,
    a_disk_configured_as_writethrough_stays_so,
);

fn start(kind: Kind, disk: &RamDisk, features: u64) -> Driver {
    Driver::start(kind, disk.clone(), config(1), features)
}

fn a_flush_makes_writes_stable_and_nothing_else_does(kind: Kind) {
    let disk = RamDisk::with_power_loss(64, true);
    let mut driver = start(kind, &disk, EVERYTHING);
    driver.write(0, 0, &[1; 512]);
    driver.flush(0);
    driver.write(0, 0, &[2; 512]);
    driver.write(0, 1, &[2; 512]);
    assert_eq!(driver.read(0, 0, 1024), [2; 1024]);
    disk.power_loss();
    assert_eq!(driver.read(0, 0, 512), [1; 512]);
    assert_eq!(driver.read(0, 1, 512), [0; 512]);
}

fn without_flush_every_write_is_stable(kind: Kind) {
    let disk = RamDisk::with_power_loss(64, true);
    let mut driver = start(kind, &disk, EVERYTHING & !FLUSH & !CONFIG_WCE);
    assert!(!disk.write_cache());
    every_change_survives(&mut driver, &disk);
}

fn without_flush_every_write_is_stable_on_a_disk_that_cannot_be_switched(kind: Kind) {
    let disk = RamDisk::with_power_loss(64, false);
    let mut driver = start(kind, &disk, EVERYTHING & !FLUSH);
    assert_eq!(driver.features & CONFIG_WCE, 0, "not offered");
    assert!(disk.write_cache());
    every_change_survives(&mut driver, &disk);
    assert_eq!(driver.counts().flushes, 0, "the driver has sent none");
    // With FLUSH negotiated, the same disk has a volatile cache.
    let mut driver = start(kind, &disk, EVERYTHING);
    driver.write(0, 0, &[8; 512]);
    disk.power_loss();
    assert_ne!(driver.read(0, 0, 512), [8; 512]);
}

fn every_change_survives(driver: &mut Driver, disk: &RamDisk) {
    for round in 1..5 {
        driver.write(0, 0, &[round; 4096]);
        disk.power_loss();
        assert_eq!(driver.read(0, 0, 4096), [round; 4096]);
        let request = if round % 2 == 0 {
            VIRTIO_BLK_T_DISCARD
        } else {
            VIRTIO_BLK_T_WRITE_ZEROES
        };
        assert_eq!(
            driver.request(0, request, 0, &segment(0, 4, 0), 0).status,
            OK
        );
        disk.power_loss();
        assert_eq!(driver.read(0, 0, 2048), [0; 2048]);
        assert_eq!(driver.read(0, 4, 2048), [round; 2048]);
    }
}

fn writeback_is_switched_while_running(kind: Kind) {
    let disk = RamDisk::with_power_loss(64, true);
    let mut driver = start(kind, &disk, EVERYTHING);
    assert_eq!(driver.read_config::<1>(32), [1]);
    driver.write(0, 0, &[1; 512]);
    driver.registers.write_config(32, &[0]);
    assert_eq!(driver.read_config::<1>(32), [0]);
    driver.write(0, 1, &[1; 512]);
    disk.power_loss();
    assert_eq!(
        driver.read(0, 0, 512),
        [1; 512],
        "written in writeback mode, flushed by the switch"
    );
    assert_eq!(
        driver.read(0, 1, 512),
        [1; 512],
        "written in writethrough mode"
    );
    driver.registers.write_config(32, &[1]);
    assert_eq!(driver.read_config::<1>(32), [1]);
    driver.write(0, 2, &[1; 512]);
    disk.power_loss();
    assert_eq!(
        driver.read(0, 2, 512),
        [0; 512],
        "written in writeback mode, not flushed"
    );
}

fn config_wce_without_flush_starts_as_writethrough(kind: Kind) {
    let disk = RamDisk::with_power_loss(64, true);
    let mut driver = start(kind, &disk, EVERYTHING & !FLUSH);
    assert_ne!(driver.features & CONFIG_WCE, 0);
    assert_eq!(driver.read_config::<1>(32), [0], "5.2.5.2");
    every_change_survives(&mut driver, &disk);
    driver.registers.write_config(32, &[1]);
    driver.write(0, 9, &[1; 512]);
    disk.power_loss();
    assert_eq!(
        driver.read(0, 9, 512),
        [0; 512],
        "the driver has asked for it"
    );
}

fn a_reset_returns_to_the_configured_mode(kind: Kind) {
    let disk = RamDisk::with_power_loss(64, true);
    let mut driver = start(kind, &disk, EVERYTHING & !FLUSH);
    assert!(!disk.write_cache());
    driver.initialise(EVERYTHING);
    assert_eq!(driver.read_config::<1>(32), [1]);
    driver.registers.write_config(32, &[0]);
    assert!(!disk.write_cache());
    driver.registers.set_status(0);
    assert!(disk.write_cache());
}

fn a_disk_configured_as_writethrough_stays_so(kind: Kind) {
    let disk = RamDisk::with_power_loss(64, true);
    disk.set_write_cache(false);
    let mut driver = start(kind, &disk, EVERYTHING);
    assert_eq!(driver.read_config::<1>(32), [0]);
    every_change_survives(&mut driver, &disk);
    driver.registers.write_config(32, &[1]);
    assert!(disk.write_cache(), "the driver may switch it");
    driver.initialise(EVERYTHING);
    assert_eq!(driver.read_config::<1>(32), [0]);
}
