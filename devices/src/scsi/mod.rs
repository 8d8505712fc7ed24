//! A SCSI block device server (SAM-5, SPC-5, SBC-4), independent of the transport that delivers the
//! CDBs.
//!
//! ```text
//!   transport ──CDB, DataBuffer──▶ Task::new      find the command, check the CDB                   command.rs
//!      ▲                             │            answer at once, or a job: a few backend operations  inquiry.rs, …
//!      │ TaskOutcome  ┌ TaskStep ◀ Task::next                                                        task.rs
//!      │              ▼                           commands that must not overlap wait                order.rs
//!      └───────── BackendQueue ──▶ Task::complete data, or sense                                     sense.rs
//! ```
//!
//! Every command is fully checked before its first operation is submitted. Its data is copied once,
//! between the transport's memory and the backend's [`Buffer`](crate::backend::Buffer).
//!
//! # How a transport runs a command
//!
//! ```
//! use std::cell::RefCell;
//! use std::sync::Arc;
//! use walvisor_devices::backend::{Backend, ram::RamDisk};
//! use walvisor_devices::scsi::{DataBuffer, LogicalUnit, Status, Task, TaskStep};
//!
//! /// A transport's memory.
//! struct Memory(RefCell<Vec<u8>>);
//!
//! impl DataBuffer for Memory {
//!     fn len(&self) -> usize {
//!         self.0.borrow().len()
//!     }
//!     fn read(&self, offset: usize, into: &mut [u8]) {
//!         into.copy_from_slice(&self.0.borrow()[offset..][..into.len()]);
//!     }
//!     fn write(&self, offset: usize, from: &[u8]) {
//!         self.0.borrow_mut()[offset..][..from.len()].copy_from_slice(from);
//!     }
//! }
//!
//! let disk: Arc<dyn Backend> = Arc::new(RamDisk::new(2048));
//! let mut queue = disk.open_queue()?;
//! let unit = LogicalUnit::new(disk, "a serial number", 512)?;
//! let data = Memory(RefCell::new(vec![0xff; 512]));
//! let read_10 = [0x28, 0, 0, 0, 0, 7, 0, 0, 1, 0];
//! let mut task = Task::new(&unit, &read_10, &data);
//! let outcome = loop {
//!     match task.next(&unit, &data) {
//!         TaskStep::Submit(operation) => queue.submit(0, operation),
//!         // A transport does other work here until the queue's `event` is readable.
//!         TaskStep::InFlight => {
//!             queue.kick();
//!             let mut done = Vec::new();
//!             queue.completions(&mut done);
//!             for completion in done {
//!                 task.complete(&unit, &data, completion.result);
//!             }
//!         }
//!         TaskStep::LookUp { .. } => unreachable!("only GET LBA STATUS looks extents up"),
//!         TaskStep::Blocked => unreachable!("there is no other task: see below"),
//!         TaskStep::Done => break task.outcome(),
//!     }
//! };
//! assert_eq!((outcome.status, outcome.data_in), (Status::Good, Some(512)));
//! assert_eq!(data.0.into_inner(), [0; 512]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Whenever a task of a unit ends, the [blocked](TaskStep::Blocked) tasks of the unit have to be
//! retried, the oldest first. A unit's tasks may run in any number of threads, as long as each
//! thread learns when a task of another thread ends. A task may be dropped only while none of its
//! operations is in flight.
//!
//! # Choices that the standards leave open
//!
//! - **Lengths**: a Data-In Buffer shorter than the CDB asks for gets as much as fits, with GOOD;
//!   the transport knows both lengths and reports the residual. A command whose Data-Out Buffer is
//!   too short is refused, and nothing is written. Excess data is ignored, except by WRITE SAME and
//!   COMPARE AND WRITE, where it shows that the initiator divides the buffer differently.
//! - **Reserved bits** of a CDB must be zero; otherwise the command gets CHECK CONDITION with the
//!   byte and the bit. The same goes for features that this server lacks (protection information,
//!   groups, NACA, ANCHOR).
//! - **Reservations** are refused as unknown commands. They belong to I_T nexuses, which a
//!   user-space transport such as TCMU does not report. With TCMU the kernel handles them before
//!   they reach this server.
//! - **IMMED** is accepted, but the status is sent only when the work is done.

mod capacity;
mod command;
mod control;
mod data;
mod inquiry;
mod io;
mod job;
mod mode;
mod order;
mod plan;
mod provisioning;
mod sense;
mod task;
mod transfer;
mod unit;
mod unit_queue;
mod verify;

pub(crate) use inquiry::{answer_for_absent_unit, refuse_attribute};
pub(crate) use transfer::{CdbTransfer, transfer_of};
pub(crate) use unit_queue::{EndedCommand, SharedUnit, UnitQueue};

pub use data::DataBuffer;
pub use sense::{SenseData, Status};
pub use task::{Task, TaskOutcome, TaskStep};
pub use unit::{LogicalUnit, UnitError};
