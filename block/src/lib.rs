//! What front-ends and disks share: requests, the buffers that carry their bytes, and the interface of a disk.
//!
//! ```text
//!   front-end (virtio-blk, SCSI, NBD) ──submit──▶ BackendQueue ──▶ the disk (write-ahead log, raw image, RAM)
//!          ▲                                           │
//!          └─────────────── completions ◀──── event ───┘      one queue, one thread, one event descriptor
//! ```
//! A disk implements [`Backend`] and [`BackendQueue`]. This crate has no front-end and no disk, except the one in
//! memory ([`ram`]). `docs/glossary.md` explains the terms.
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
mod buffer;
mod condition;
mod descriptor;
mod memory;
pub mod ram;
mod request;
mod schedule;

pub use backend::{
    Answer, Backend, BackendQueue, Capabilities, Logged, Mapped, Resizable, Tracked, flush,
};
pub use buffer::{BUFFER_ALIGN, Buffer, OutOfMemory, SharedBuffer};
pub use condition::{Condition, Trouble};
pub use descriptor::descriptor;
pub use memory::{MemoryBudget, MemoryCharge, MemoryClient, MemoryReservation};
pub use request::{
    Allocation, Change, Completion, Extent, Failure, GROUP_SIZE_CLASSES, LogCounters,
    MAX_REQUEST_BYTES, Operation, PastPoint, SECTOR_SIZE, Transfer,
};
pub use schedule::request_short_slices;

/// For its `EventFd`, which most disks use as a queue's event, see [`descriptor`].
pub use vmm_sys_util;
