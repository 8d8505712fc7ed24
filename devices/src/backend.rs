//! The disk behind a device, and one queue's interface to it, as frontends call them.
//!
//! ```text
//!   virtio queue worker ──submit──▶ BackendQueue ──▶ the disk (write-ahead log, raw image, RAM)
//!          ▲                             │
//!          └────── completions ◀── event ┘      one queue, one thread, one event descriptor
//! ```

mod disk;
mod flush;
pub mod ram;
#[cfg(feature = "raw")]
pub mod raw;
#[cfg(feature = "wal")]
mod wal;

pub use disk::{Answer, Backend, BackendQueue, Capabilities};
pub use flush::flush;
pub use walvisor_storage::{
    Allocation, Buffer, Completion, Extent, Failure, LogCounters, MAX_REQUEST_BYTES, Operation,
    SECTOR_SIZE,
};
