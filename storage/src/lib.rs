//! The write-ahead-logged block store. It knows nothing of virtio or KVM.
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
//! 3. *Prefix*: the records that survive a crash are a prefix of the LSN order.
//! 4. *Never old data for new*: damage below the durable LSN is reported, never skipped.
//! 5. *An error is final*: after a failed log write or sync the log is poisoned until reopened.
//!
//! The folders are layers. Each imports only from itself and from those behind it in this list: `store` (opening,
//! closing, and all work on disks that are not in use), `disk` (ports), `checkpoint`, `recovery`, `log`, `catalog`
//! (the control file, options, which image is which disk), `index`, `medium` (files, segments, engines), and the
//! modules outside the folders.
//!
//! Without the feature `engine`, which is on by default, there is no store: only the types of requests
//! ([`Operation`], [`Completion`] and what they are made of), for frontends over disks of another kind.

mod buffer;
mod request;
mod schedule;

// The store: without the feature `engine` all of these modules are left out.
#[cfg(feature = "engine")]
mod catalog;
#[cfg(feature = "engine")]
mod checkpoint;
#[cfg(feature = "engine")]
mod disk;
#[cfg(feature = "engine")]
mod error;
#[cfg(feature = "engine")]
mod format;
#[cfg(all(feature = "engine", any(test, fuzzing)))]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(all(feature = "engine", test))]
#[path = "../tests/support/heap.rs"]
mod heap;
#[cfg(feature = "engine")]
mod index;
#[cfg(feature = "engine")]
mod log;
#[cfg(feature = "engine")]
mod medium;
#[cfg(feature = "engine")]
mod mutant;
#[cfg(feature = "engine")]
mod parallel;
#[cfg(feature = "engine")]
mod recovery;
#[cfg(all(feature = "engine", test))]
mod simulation;
#[cfg(feature = "engine")]
mod store;
#[cfg(feature = "engine")]
mod sync;

pub use buffer::{BUFFER_ALIGN, Buffer};
pub use request::{
    Allocation, Completion, Extent, Failure, GROUP_SIZE_CLASSES, LogCounters, MAX_REQUEST_BYTES,
    Operation, SECTOR_SIZE,
};
pub use schedule::short_slice;
#[cfg(feature = "engine")]
pub use {
    catalog::control::log_images,
    catalog::options::{CacheMode, CommitWait, DiskOptions, Resize, StoreOptions, default_log_dir},
    disk::handle::Disk,
    disk::port::Port,
    error::{Error, ErrorKind, Result},
    medium::engine::EngineKind,
    medium::pace::Pace,
    parallel::Progress,
    store::create::create_disk,
    store::discard::{Discarded, discard_log},
    store::dump::{LogGroup, LogRecord, RecordKind, dump_groups, dump_records},
    store::image::Image,
    store::inspect::{DamagedSectors, DiskReport, LogReport, inspect, inspect_telling},
    store::open::Store,
    store::resize::resize_disk,
    store::transfer::{Transfer, export_disk, import_disk},
};

#[cfg(feature = "engine")]
pub(crate) use buffer::SharedBuffer;
