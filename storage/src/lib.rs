//! The write-ahead-logged block store. Knows no virtio and no KVM.
//!
//! ```text
//!   Disk ──open_port──▶ Port (one per thread)
//!                        │ write, discard, flush            │ read
//!                        ▼                                  ▼
//!                  log: records ─ batch ─ sync        index: log over base
//!                        │       (group commit)
//!                        ▼
//!                  keeper: checkpoint to the base image, recycle segments
//! ```
//! What a disk promises:
//! 1. *Stable means stable*: a WRITE completed before a FLUSH was submitted survives power loss once that
//!    FLUSH completes; in writethrough mode each WRITE is durable before it completes.
//! 2. *All-or-nothing*: after a crash each request is entirely there or entirely absent.
//! 3. *Prefix*: what a crash leaves is a prefix of the LSN order.
//! 4. *Never old data for new*: damage below the durable LSN is reported, never skipped.
//! 5. *An error is final*: after a failed log write or sync the log is poisoned until reopened.

mod allocation;
mod buffer;
mod catalog;
mod committer;
mod copy;
mod counters;
mod disk;
mod dump;
mod engine;
mod error;
mod file;
mod format;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod gather;
mod group;
#[cfg(test)]
#[path = "../tests/support/heap.rs"]
mod heap;
mod image;
mod index;
mod keeper;
mod log;
mod mutant;
mod orders;
mod port;
mod recovery;
mod request;
mod resize;
mod schedule;
mod segment;
#[cfg(test)]
mod simulation;
mod store;
mod sync;
mod transfer;
mod view;
mod window;
mod writer;

pub use allocation::{Allocation, Extent};
pub(crate) use buffer::SharedBuffer;
pub use buffer::{BUFFER_ALIGN, Buffer};
pub use catalog::log_images;
pub use counters::{GROUP_SIZE_CLASSES, LogCounters};
pub use disk::{CacheMode, Disk};
pub use dump::{LogGroup, LogRecord, RecordKind, dump_groups, dump_records};
pub use engine::EngineKind;
pub use error::{Error, ErrorKind, Result};
pub use gather::CommitWait;
pub use image::Image;
pub use port::Port;
pub use request::{Completion, Failure, MAX_REQUEST_BYTES, Operation, SECTOR_SIZE};
pub use resize::{Resize, resize_disk};
pub use schedule::short_slice;
pub use store::{
    DiskOptions, DiskReport, LogReport, Store, StoreOptions, create_disk, default_log_dir, inspect,
};
pub use transfer::{Progress, Transfer, export_disk, import_disk};
