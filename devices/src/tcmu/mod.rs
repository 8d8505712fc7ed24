//! TCMU, LIO's user-space back end (target_core_user): the kernel's SCSI target asks this process for a disk.
//!
//! ```text
//!   initiator ─▶ fabric (tcm_loop, vhost, iSCSI …) ─▶ target core ─▶ target_core_user
//!                                                                       │ ▲
//!                             shared memory: mailbox, ring, data area   │ │   a UIO device: 4 bytes read tell of commands,
//!                                                                       ▼ │   4 bytes written of answers
//!   Ring     entries out, in order; answers in, in any order              ring.rs, layout.rs, memory.rs
//! ```
//! The ring knows neither SCSI nor disks, and needs no kernel: its tests have a model of the other side.

#[cfg(any(test, fuzzing))]
pub mod kernel;
mod layout;
mod memory;
mod ring;
#[cfg(test)]
mod tests;

pub use memory::{CommandData, Mapping};
pub use ring::{Command, Entry, EntryProblem, Response, Ring, RingError, Ticket};
