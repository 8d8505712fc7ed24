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
//! Every command is judged in full before the first step of it is submitted, and its data is copied once: between the
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
//! A unit's tasks may be run in any number of threads, as long as each hears when a task of another one is over. A task is
//! dropped only while none of its operations is in flight.
//!
//! # Which rules where the standards leave a choice
//!
//! - **Lengths**: a Data-In Buffer shorter than what the CDB asks for gets as much as fits, with GOOD; the transport
//!   knows both lengths and reports the residual. A Data-Out Buffer shorter than that is refused, and nothing is written;
//!   of a longer one the rest is passed over, but for WRITE SAME and COMPARE AND WRITE, where it shows that the initiator
//!   divides it in another way.
//! - **Reserved bits** of a CDB must be zero: CHECK CONDITION with the byte and the bit. So must what this server does not
//!   do (protection information, groups, NACA, ANCHOR), instead of being passed over.
//! - **Reservations** are refused as unknown commands: they belong to I_T nexuses, and of these a transport in user space
//!   such as TCMU tells nothing. There the kernel answers them before they come here.
//! - **IMMED** is taken, and status comes when the work is done: later than it might, and true.

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
pub use task::{Outcome, Step, Task};
pub use unit::{LogicalUnit, UnitError};
