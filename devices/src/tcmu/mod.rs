//! TCMU, LIO's user-space back end (target_core_user): this process serves disks to the kernel's
//! SCSI target.
//!
//! ```text
//!   initiator ─▶ fabric (tcm_loop, vhost, iSCSI …) ─▶ target core ─▶ target_core_user
//!                                                                       │ ▲
//!                             shared memory: mailbox, ring, data area   │ │   UIO device: 4 bytes read report commands,
//!                                                                       ▼ │   4 bytes written report responses
//!   CommandRing   takes entries in order, answers them in any order       ring.rs, layout.rs, memory.rs
//!   Worker   a thread per device: an event loop over UIO and backend      worker.rs, device.rs
//!   Task     a SCSI command as a few operations                           crate::scsi
//! ```
//! The ring knows neither SCSI nor disks, and needs no kernel: its tests run against a model of the
//! kernel's side. This module does not create devices in configfs.
//!
//! Why neither a crate nor libtcmu: there is no such crate, and libtcmu is a C library with a
//! callback per command, which wakes the kernel for every single response.
//!
//! A program creates the device in configfs, finds its UIO device and the length of its memory
//! there, and serves it:
//!
//! ```no_run
//! use std::fs::File;
//! use std::sync::Arc;
//! use walvisor_devices::backend::ram::RamDisk;
//! use walvisor_devices::tcmu::{CommandRing, Device, Mapping, Worker};
//!
//! let device = Device::new(Arc::new(RamDisk::new(2048)), "disk", "a serial number", 512)?;
//! let uio = File::options().read(true).write(true).open("/dev/uio0")?;
//! let memory = Mapping::of_device(&uio, 1 << 20)?;
//! let ring = CommandRing::open(Arc::new(memory))?;
//! let worker = Worker::start(&device, ring, uio.into())?;
//! worker.stop();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod device;
#[cfg(test)]
mod kernel;
mod layout;
mod memory;
mod ring;
#[cfg(test)]
mod tests;
mod worker;

pub use device::Device;
pub use memory::{CommandData, Mapping};
pub use ring::{Command, CommandRing, Entry, EntryProblem, Response, RingError, Ticket};
pub use worker::Worker;
