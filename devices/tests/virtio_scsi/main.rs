//! virtio-scsi from the driver's side, over vhost-user and over MMIO.

#[macro_use]
mod driver;

mod commands;
#[path = "../virtio_blk/gate.rs"]
#[expect(dead_code, reason = "some of it is for virtio-blk alone")]
mod gate;
mod management;
mod units;
