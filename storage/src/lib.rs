#![doc = include_str!("../README.md")]
//!
//! The terms are those of `docs/glossary.md` in the repository.
//!
//! # Where things are
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
//! A [`Disk`] is a [`Backend`] and a [`Port`] is a [`BackendQueue`] of `walvisor-block`, whose
//! types are part of this API. [`RawDisk`], a raw image without a log, and [`Look`], a disk as it
//! was at a point in its history, are backends too.
//!
//! The folders are layers. Each imports only from itself and from those after it in this list:
//! `raw` (raw images), `copy` (import, export, restore, clone), `store` (opening, closing, and the
//! other work on disks that are not in use), `disk` (ports), `keeper` (when the log is copied to
//! the images, orders, restores in place), `view` (a disk at a moment), `checkpoint`, `recovery`,
//! `log`, `catalog` (the control file, options, which image is which disk), `index`, `medium`
//! (files, segments, engines), and the modules outside the folders.
//!
//! A port, one write, and a FLUSH, after which the write survives a power loss:
//!
//! ```standalone_crate
//! use walvisor_storage::{
//!     BackendQueue, Buffer, DiskOptions, Operation, Store, StoreOptions, create_disk, default_log_dir, flush,
//! };
//!
//! # let dir = tempfile::tempdir()?;
//! # std::env::set_current_dir(&dir)?;
//! let (path, options) = ("disk.img".as_ref(), StoreOptions::default());
//! let log = default_log_dir(path);
//! create_disk(path, 1 << 20, &log, &options)?;
//! let store = Store::open(&log, &[DiskOptions::new(path)], &options)?;
//! let disk = &store.disks()[0];
//! let mut port = disk.open_port()?;
//! let data = Buffer::from(&[7; 512][..]);
//! port.submit(0, Operation::Write { sector: 3, data });
//! port.kick();
//! flush(disk)?;
//! drop(port);
//! store.close()?;
//! assert_eq!(std::fs::read(path)?[3 * 512..4 * 512], [7; 512]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod catalog;
mod checkpoint;
mod copy;
mod disk;
mod error;
mod format;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(test)]
#[path = "../tests/support/heap.rs"]
mod heap;
mod index;
mod keeper;
mod log;
mod medium;
mod mutant;
mod parallel;
mod raw;
mod recovery;
#[cfg(test)]
mod simulation;
mod size;
mod store;
mod sync;
mod tracepoints;
mod view;

pub use walvisor_block::{
    Allocation, BUFFER_ALIGN, Backend, BackendQueue, BlockingDisk, Buffer, Capabilities, Change,
    Completion, Condition, Extent, Failure, GROUP_SIZE_CLASSES, LogCounters, Logged,
    MAX_REQUEST_BYTES, Mapped, Operation, PastPoint, Resizable, SECTOR_SIZE, StallCause,
    StallCounts, Tracked, Transfer, Trouble, flush,
};
pub use {
    catalog::control::{has_log, log_writer},
    catalog::log_location::log_dir_of,
    catalog::mark_text::MarkText,
    catalog::options::{
        CacheMode, CommitWait, DiskOptions, FullLogPolicy, ImageFormat, Resize, StoreOptions,
        default_log_dir,
    },
    catalog::readable::ReadableLog,
    catalog::retention::Retention,
    catalog::snapshot::{Snapshot, SnapshotName},
    copy::clone::{CloneSource, clone_disk, receive_clone, serve_clone},
    copy::fetcher::{ChunkSource, FetchOptions, FetchRemedy, FetchReport, Fetcher},
    copy::transfer::{
        RescueOptions, UnreadableSectors, export_disk, import_disk, import_disk_as, receive_image,
        rescue_disk, restore_disk,
    },
    disk::handle::{Disk, ReadHold},
    disk::port::Port,
    error::{Error, ErrorKind, Result},
    log::commit::Commit,
    log::replica::{LogReplica, ReplicaCall, ReplicaOptions},
    log::sharing::{SyncPartner, SyncSharing},
    medium::engine::EngineKind,
    medium::fetch_map::FetchMap,
    medium::io_ring::prepare_rings,
    medium::pace::Pace,
    parallel::Progress,
    raw::{RawCache, RawDisk},
    size::{SIZE, parse_size, show_size},
    store::changes::{ChangedRange, Changes, disk_changes},
    store::create::create_disk,
    store::discard::{HeldRecords, adopt_image, discard_log, plan_adoption, plan_discard},
    store::dump::{LogGroup, LogMark, LogRecord, RecordKind, dump_groups, dump_records},
    store::follow::{FollowStep, LogFollower, LogPiece, LogPlace, PieceChecker, cut_piece},
    store::image::Image,
    store::inspect::{
        DamagedHeader, DamagedSectors, DiskReport, LogReport, SnapshotFault, inspect,
        inspect_with_progress,
    },
    store::log_root::{
        AssembledLog, ImageReader, LockedLog, LogParts, LogRoot, RootImage, segment_path,
        write_segment,
    },
    store::log_size::resize_log,
    store::members::{leave_log, move_to_log},
    store::open::Store,
    store::points::{DiskPoints, disk_points},
    store::resize::resize_disk,
    store::rewind::rewind_disk,
    view::horizon::LogHistory,
    view::look::Look,
    view::point::Point,
    view::rewind_plan::RewindReport,
    view::scratch::scratch_file,
};

pub(crate) use walvisor_block::{SharedBuffer, check_range};
