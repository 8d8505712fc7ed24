//! TCMU, LIO's user-space back end (target_core_user): the kernel's SCSI target asks this process for a disk.
//!
//! ```text
//!   initiator ─▶ fabric (tcm_loop, vhost, iSCSI …) ─▶ target core ─▶ target_core_user
//!                                                                       │ ▲
//!                             shared memory: mailbox, ring, data area   │ │   a UIO device: 4 bytes read tell of commands,
//!                                                                       ▼ │   4 bytes written of answers
//!   Ring     entries out, in order; answers in, in any order              ring.rs, layout.rs, memory.rs
//!   Worker   a thread a device: an event loop over UIO device and backend worker.rs, device.rs
//!   Task     a SCSI command as a few operations                            crate::scsi
//! ```
//! The ring knows neither SCSI nor disks, and needs no kernel: its tests have a model of the other side. How a device comes
//! to be, in configfs, is no business of this module either.
//!
//! Not from a crate, nor over libtcmu: of the former there is none, and the latter is C that takes a callback a command and
//! wakes the kernel once for each.

mod device;
#[cfg(any(test, fuzzing))]
pub mod kernel;
mod layout;
mod memory;
mod ring;
#[cfg(test)]
mod tests;
mod worker;

pub use device::Device;
pub use memory::{CommandData, Mapping};
pub use ring::{Command, Entry, EntryProblem, Response, Ring, RingError, Ticket};
pub use worker::Worker;
