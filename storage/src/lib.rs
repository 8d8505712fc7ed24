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
//!
//! Without the feature `engine`, which is on by default, there is no store: only the types of requests ([`Operation`],
//! [`Completion`] and what they are made of), for frontends over another disk.

mod buffer;
mod request;
mod schedule;

// The store: all that is left out without the feature `engine`.
#[cfg(feature = "engine")]
mod ahead;
#[cfg(feature = "engine")]
mod allocation;
#[cfg(feature = "engine")]
mod attach;
#[cfg(feature = "engine")]
mod checksum;
#[cfg(feature = "engine")]
mod committer;
#[cfg(feature = "engine")]
mod control;
#[cfg(feature = "engine")]
mod copy;
#[cfg(feature = "engine")]
mod counters;
#[cfg(feature = "engine")]
mod create;
#[cfg(feature = "engine")]
mod discard;
#[cfg(feature = "engine")]
mod disk;
#[cfg(feature = "engine")]
mod disk_state;
#[cfg(feature = "engine")]
mod dump;
#[cfg(feature = "engine")]
mod engine;
#[cfg(feature = "engine")]
mod error;
#[cfg(feature = "engine")]
mod file;
#[cfg(feature = "engine")]
mod filesystem;
#[cfg(feature = "engine")]
mod format;
#[cfg(all(feature = "engine", any(test, fuzzing)))]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(feature = "engine")]
mod gather;
#[cfg(feature = "engine")]
mod group;
#[cfg(all(feature = "engine", test))]
#[path = "../tests/support/heap.rs"]
mod heap;
#[cfg(feature = "engine")]
mod holes;
#[cfg(feature = "engine")]
mod identity;
#[cfg(feature = "engine")]
mod image;
#[cfg(feature = "engine")]
mod index;
#[cfg(feature = "engine")]
mod inspect;
#[cfg(feature = "engine")]
mod keeper;
#[cfg(feature = "engine")]
mod lock;
#[cfg(feature = "engine")]
mod log;
#[cfg(feature = "engine")]
mod mark;
#[cfg(feature = "engine")]
mod medium;
#[cfg(feature = "engine")]
mod mutant;
#[cfg(feature = "engine")]
mod options;
#[cfg(feature = "engine")]
mod orders;
#[cfg(feature = "engine")]
mod pace;
#[cfg(feature = "engine")]
mod parallel;
#[cfg(feature = "engine")]
mod part;
#[cfg(feature = "engine")]
mod port;
#[cfg(feature = "engine")]
mod recovery;
#[cfg(feature = "engine")]
mod replay;
#[cfg(feature = "engine")]
mod resize;
#[cfg(feature = "engine")]
mod segment;
#[cfg(all(feature = "engine", test))]
mod simulation;
#[cfg(feature = "engine")]
mod stamp;
#[cfg(feature = "engine")]
mod store;
#[cfg(feature = "engine")]
mod sync;
#[cfg(feature = "engine")]
mod transfer;
#[cfg(feature = "engine")]
mod view;
#[cfg(feature = "engine")]
mod waiters;
#[cfg(feature = "engine")]
mod window;
#[cfg(feature = "engine")]
mod writer;

pub use buffer::{BUFFER_ALIGN, Buffer};
pub use request::{
    Allocation, Completion, Extent, Failure, GROUP_SIZE_CLASSES, LogCounters, MAX_REQUEST_BYTES,
    Operation, SECTOR_SIZE,
};
pub use schedule::short_slice;
#[cfg(feature = "engine")]
pub use {
    control::log_images,
    create::create_disk,
    discard::{Discarded, discard_log},
    disk::Disk,
    dump::{LogGroup, LogRecord, RecordKind, dump_groups, dump_records},
    engine::EngineKind,
    error::{Error, ErrorKind, Result},
    gather::CommitWait,
    image::Image,
    inspect::{DamagedSectors, DiskReport, LogReport, inspect, inspect_telling},
    options::{CacheMode, DiskOptions, Resize, StoreOptions, default_log_dir},
    pace::Pace,
    parallel::Progress,
    port::Port,
    resize::resize_disk,
    store::Store,
    transfer::{Transfer, export_disk, import_disk},
};

#[cfg(feature = "engine")]
pub(crate) use buffer::SharedBuffer;
