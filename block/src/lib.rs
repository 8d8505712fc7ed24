#![doc = include_str!("../README.md")]
//!
//! The terms are those of `docs/glossary.md` in the repository.
//!
//! # Writing a `Backend` itself
//!
//! A disk whose requests end later, in the program's own event loop for instance, implements
//! [`Backend`] and [`BackendQueue`]. A queue, with a disk that ends each request at once:
//!
//! ```
//! use walvisor_block::ram::RamDisk;
//! use walvisor_block::{Backend, Buffer, Operation};
//!
//! let disk = RamDisk::new(2048);
//! let mut queue = disk.open_queue()?;
//! let data = Buffer::from(&[7; 512][..]);
//! queue.submit(1, Operation::Write { sector: 5, data });
//! queue.submit(2, Operation::Read { sector: 5, sectors: 1 });
//! queue.kick();
//! // A disk whose requests end later says so with the queue's `event`.
//! let mut done = Vec::new();
//! queue.completions(&mut done);
//! let read = done.pop().unwrap();
//! assert_eq!(read.token, 2);
//! assert_eq!(read.result.unwrap().unwrap()[..], [7; 512]);
//! # std::io::Result::Ok(())
//! ```

mod backend;
mod blocking;
mod buffer;
mod condition;
mod descriptor;
mod memory;
pub mod ram;
mod request;
mod schedule;
mod stall;
mod threaded;

pub use backend::{
    Answer, Backend, BackendQueue, Capabilities, Logged, Mapped, Resizable, Tracked,
};
pub use blocking::{BlockingDisk, flush};
pub use buffer::{BUFFER_ALIGN, Buffer, OutOfMemory, SharedBuffer};
pub use condition::{Condition, Trouble};
pub use descriptor::descriptor;
pub use memory::{MemoryBudget, MemoryCharge, MemoryClient, MemoryReservation};
pub use request::{
    Allocation, Change, Completion, Extent, Failure, GROUP_SIZE_CLASSES, LogCounters,
    MAX_REQUEST_BYTES, Operation, PastPoint, SECTOR_SIZE, Transfer, check_range,
};
pub use schedule::request_short_slices;
pub use stall::{StallCause, StallCounts};
pub use threaded::{SyncBackend, ThreadedDisk};

/// For its `EventFd`, which most disks use as a queue's event, see [`descriptor`].
pub use vmm_sys_util;
