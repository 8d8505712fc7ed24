//! The virtio-scsi driver of the tests' kit, with a target of this crate over two transports.

#[path = "../virtio_blk/driver/mmio.rs"]
mod mmio;
#[path = "../virtio_blk/driver/vhost_user.rs"]
mod vhost_user;

use std::sync::Arc;

use walvisor_devices::backend::Backend;
use walvisor_devices::block::BlockConfig;
use walvisor_devices::control::ControlTransport;
use walvisor_devices::transport::MmioTransport;
use walvisor_devices::virtio_scsi::{ScsiUnit, VirtioScsi};

use mmio::{MmioDriver, OwnedTransport};
use vhost_user::serve;
pub use walvisor_testkit::virtio::scsi::*;
pub use walvisor_testkit::virtio::*;
pub use walvisor_testkit::{pattern, wait_until};

/// Every feature that the device offers.
pub const EVERYTHING: u64 = u64::MAX;

/// VIRTIO_SCSI_S_*.
pub const OK: u8 = 0;
pub const OVERRUN: u8 = 1;
pub const ABORTED: u8 = 2;
pub const BAD_TARGET: u8 = 3;
pub const RESET: u8 = 4;
pub const FAILURE: u8 = 9;
pub const FUNCTION_SUCCEEDED: u8 = 10;
pub const FUNCTION_REJECTED: u8 = 11;
pub const INCORRECT_LUN: u8 = 12;
/// CHECK CONDITION.
pub const CHECK: u8 = 2;

/// The transports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Mmio,
    VhostUser,
}

/// One test for each transport.
macro_rules! on_both_transports {
    ($($name:ident,)*) => {
        mod mmio {
            $(#[test] fn $name() { super::$name($crate::driver::Kind::Mmio); })*
        }
        mod vhost_user {
            $(#[test] fn $name() { super::$name($crate::driver::Kind::VhostUser); })*
        }
    };
}

/// A driver with a target of its own, and the handles of its units.
pub type Driver = BlockDriver<Vec<ScsiUnit>>;

/// A unit has an owner of its own, which the tests call instead.
impl OwnedTransport for MmioTransport<Memory, VirtioScsi> {
    fn control(&mut self) -> &mut dyn ControlTransport {
        unreachable!("each unit has its own control")
    }
}

/// A target with these disks, and the handles of its units.
fn target(
    disks: Vec<Arc<dyn Backend>>,
    queues: u16,
    queue_size: u16,
) -> (VirtioScsi, Vec<ScsiUnit>) {
    let config = |number: usize| BlockConfig {
        queues,
        queue_size,
        serial: format!("unit {number}"),
        ..BlockConfig::default()
    };
    let mut disks = disks.into_iter().enumerate();
    let (_, first) = disks.next().expect("a disk");
    let mut target = VirtioScsi::new(first, config(0)).expect("a target");
    let mut units = vec![target.first_unit()];
    for (number, disk) in disks {
        units.push(target.add_unit(disk, &config(number)).expect("a unit"));
    }
    (target, units)
}

/// A live target, with those of the `wanted` features that it offers.
pub fn start(kind: Kind, disks: Vec<Arc<dyn Backend>>, queues: u16, wanted: u64) -> Driver {
    start_sized(kind, disks, queues, 64, wanted)
}

/// The same, with rings of `queue_size` descriptors.
pub fn start_sized(
    kind: Kind,
    disks: Vec<Arc<dyn Backend>>,
    queues: u16,
    queue_size: u16,
    wanted: u64,
) -> Driver {
    let memory = guest_memory();
    let (device, units) = target(disks, queues, queue_size);
    let registers: Box<dyn Registers> = match kind {
        Kind::Mmio => Box::new(MmioDriver::new(device, Arc::clone(&memory))),
        Kind::VhostUser => {
            let control = Arc::clone(&units[0].control);
            Box::new(serve(device, &memory, 4, |_| control))
        }
    };
    let mut driver = Driver::new(registers, memory, units);
    driver.initialise(wanted);
    clear_attentions(&mut driver);
    driver
}

/// Takes the unit attention conditions that the initialisation has left.
pub fn clear_attentions(driver: &mut Driver) {
    for unit in 0..driver.metrics.len() {
        while driver.command(lun(unit as u8), &[0; 6], &[], 0).verdict() != (OK, 0) {}
    }
}

pub fn read_10(lba: u32, blocks: u16) -> [u8; 10] {
    cdb_10(0x28, lba, blocks)
}

pub fn write_10(lba: u32, blocks: u16) -> [u8; 10] {
    cdb_10(0x2a, lba, blocks)
}

pub fn cdb_10(opcode: u8, lba: u32, blocks: u16) -> [u8; 10] {
    let mut cdb = [0; 10];
    cdb[0] = opcode;
    cdb[2..6].copy_from_slice(&lba.to_be_bytes());
    cdb[7..9].copy_from_slice(&blocks.to_be_bytes());
    cdb
}

#[track_caller]
pub fn write(driver: &mut Driver, unit: u8, lba: u32, data: &[u8]) {
    let blocks = (data.len() / 512) as u16;
    let answer = driver.command(lun(unit), &write_10(lba, blocks), data, 0);
    assert_eq!(
        (answer.verdict(), answer.residual, answer.written),
        ((OK, 0), 0, 108)
    );
}

#[track_caller]
pub fn read(driver: &mut Driver, unit: u8, lba: u32, len: usize) -> Vec<u8> {
    let answer = driver.command(lun(unit), &read_10(lba, (len / 512) as u16), &[], len);
    assert_eq!(answer.verdict(), (OK, 0));
    assert_eq!((answer.residual, answer.written), (0, 108 + len as u32));
    answer.data
}
