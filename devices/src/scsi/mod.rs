//! A SCSI block device server: commands as CDBs, whatever transport brings them (SAM-5, SPC-5, SBC-4).
//!
//! ```text
//!   transport ──CDB, DataBuffer──▶ Task::new      find the command, check the CDB               command.rs
//!      ▲                             │            answer at once, or a job: a few backend steps  inquiry.rs, …
//!      │ Outcome      ┌─ Step ◀── Task::next                                                     task.rs
//!      │              ▼                           commands that must not overlap wait            order.rs
//!      └───────── BackendQueue ──▶ Task::ended    data, or sense                                 sense.rs
//! ```
//!
//! Every command is checked in full before its first step is submitted. Its data is copied once, between the
//! transport's memory and the backend's [`Buffer`](crate::backend::Buffer).
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
//!                 task.ended(&unit, &data, completion.result);
//!             }
//!         }
//!         TaskStep::Blocked => unreachable!("there is no other task: see below"),
//!         TaskStep::Done => break task.outcome(),
//!     }
//! };
//! assert_eq!((outcome.status, outcome.data_in), (Status::Good, Some(512)));
//! assert_eq!(data.0.into_inner(), [0; 512]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A task that is [blocked](TaskStep::Blocked) goes on, first come first, whenever another task of the unit is over.
//! A unit's tasks may run in any number of threads, as long as each thread is notified when a task of another thread is
//! over. A task may be dropped only while none of its operations is in flight.
//!
//! # Choices where the standards leave one
//!
//! - **Lengths**: a Data-In Buffer shorter than the CDB asks for gets as much as fits, with GOOD; the transport knows
//!   both lengths and reports the residual. A command with too short a Data-Out Buffer is refused, and nothing is
//!   written. The rest of too long a one is ignored, except by WRITE SAME and COMPARE AND WRITE, because there it shows
//!   that the initiator divides the buffer differently.
//! - **Reserved bits** of a CDB must be zero; otherwise the command gets CHECK CONDITION with the byte and the bit. The
//!   same holds for features that this server lacks (protection information, groups, NACA, ANCHOR): it does not ignore
//!   them.
//! - **Reservations** are refused as unknown commands. They belong to I_T nexuses, which a transport in user space such
//!   as TCMU does not report. With TCMU the kernel answers them before they reach this server.
//! - **IMMED** is accepted, but status comes only when the work is done: later than it might, but true.

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
mod unit;
mod verify;

pub use data::DataBuffer;
pub use sense::{SenseData, Status};
pub use task::{Task, TaskOutcome, TaskStep};
pub use unit::{LogicalUnit, UnitError};
