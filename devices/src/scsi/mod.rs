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
//! ```text
//! let mut task = Task::new(&unit, cdb, &data);
//! loop {
//!     match task.next(&unit, &data) {
//!         Step::Submit(operation) => queue.submit(token, operation),
//!         Step::InFlight => break,  // `ended` for each completion of the token, then `next` again
//!         Step::Blocked => break,   // `next` again whenever another task of the unit is over, first come first
//!         Step::Done => { answer(task.outcome()); break }
//!     }
//! }
//! ```
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
