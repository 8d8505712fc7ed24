//! What frontends and disks share: requests, the buffers that carry their bytes, and the interface of a disk.
//!
//! ```text
//!   frontend (virtio-blk, SCSI, NBD) ──submit──▶ BackendQueue ──▶ the disk (write-ahead log, raw image, RAM)
//!          ▲                                          │
//!          └────────────── completions ◀──── event ───┘      one queue, one thread, one event descriptor
//! ```
//! A disk implements [`Backend`] and [`BackendQueue`]. This crate knows neither a frontend nor a disk, but for the
//! one in memory ([`ram`]).

mod backend;
mod buffer;
pub mod ram;
mod request;
mod schedule;

pub use backend::{Answer, Backend, BackendQueue, Capabilities, flush};
pub use buffer::{BUFFER_ALIGN, Buffer, SharedBuffer};
pub use request::{
    Allocation, Completion, Extent, Failure, GROUP_SIZE_CLASSES, LogCounters, MAX_REQUEST_BYTES,
    Operation, SECTOR_SIZE,
};
pub use schedule::short_slice;
