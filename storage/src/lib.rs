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
//! `raw` (raw images), `offline` (opening, closing, and all work on disks that are not in use),
//! `disk` (ports), `history` (the keeper, looks, snapshots, restores in place), `checkpoint`,
//! `recovery`, `log`, `catalog` (the control file, options, which image is which disk), `index`,
//! `medium` (files, segments, engines), and the modules outside the folders.
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
mod disk;
mod error;
mod format;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(test)]
#[path = "../tests/support/heap.rs"]
mod heap;
mod history;
mod index;
mod log;
mod medium;
mod mutant;
mod offline;
mod parallel;
mod raw;
mod recovery;
#[cfg(test)]
mod simulation;
mod size;
mod sync;
mod tracepoints;

pub use walvisor_block::{
    Allocation, BUFFER_ALIGN, Backend, BackendQueue, BlockingDisk, Buffer, Capabilities, Change,
    Completion, Condition, Extent, Failure, GROUP_SIZE_CLASSES, LogCounters, Logged,
    MAX_REQUEST_BYTES, Mapped, Operation, PastPoint, Resizable, SECTOR_SIZE, StallCause,
    StallCounts, Tracked, Transfer, Trouble, flush,
};
pub use {
    catalog::control::has_log,
    catalog::mark_text::MarkText,
    catalog::options::{
        CacheMode, CommitWait, DiskOptions, FullLogPolicy, ImageFormat, Resize, StoreOptions,
        default_log_dir,
    },
    catalog::retention::Retention,
    catalog::snapshot::{Snapshot, SnapshotName},
    disk::handle::Disk,
    disk::port::Port,
    error::{Error, ErrorKind, Result},
    history::horizon::LogHistory,
    history::look::Look,
    history::point::Point,
    history::rewind_plan::RewindReport,
    history::scratch::scratch_file,
    log::commit::Commit,
    log::replica::{LogReplica, ReplicaCall, ReplicaOptions},
    log::sharing::{SyncPartner, SyncSharing},
    medium::engine::EngineKind,
    medium::fetch_map::FetchMap,
    medium::io_ring::prepare_rings,
    medium::pace::Pace,
    offline::changes::{ChangedRange, Changes, disk_changes},
    offline::clone::{CloneSource, clone_disk, serve_clone},
    offline::create::create_disk,
    offline::discard::{HeldRecords, adopt_image, discard_log, plan_adoption, plan_discard},
    offline::dump::{LogGroup, LogMark, LogRecord, RecordKind, dump_groups, dump_records},
    offline::fetcher::{ChunkSource, FetchOptions, FetchRemedy, FetchReport, Fetcher},
    offline::follow::{FollowStep, LogFollower, LogPiece, LogPlace, PieceChecker, cut_piece},
    offline::image::Image,
    offline::inspect::{
        DamagedHeader, DamagedSectors, DiskReport, LogReport, SnapshotFault, inspect,
        inspect_with_progress,
    },
    offline::live_points::DiskPoints,
    offline::log_root::{
        AssembledLog, ImageReader, LockedLog, LogParts, LogRoot, RootImage, segment_path,
        write_segment,
    },
    offline::log_size::resize_log,
    offline::members::{leave_log, move_to_log},
    offline::open::Store,
    offline::resize::resize_disk,
    offline::rewind::rewind_disk,
    offline::transfer::{
        RescueOptions, UnreadableSectors, export_disk, import_disk, import_disk_as, receive_image,
        rescue_disk, restore_disk,
    },
    parallel::Progress,
    raw::{RawCache, RawDisk},
    size::{SIZE, parse_size, show_size},
};

pub(crate) use walvisor_block::{SharedBuffer, check_range};
