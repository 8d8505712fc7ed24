//! `walvisor disk`: makes, inspects and changes disks, without a guest.

mod changes;
mod list;
mod look;
mod membership;
mod path;
mod snapshot;
mod transfer;

use std::path::Path;

use clap::{Args, Subcommand};
pub(super) use path::print;
use path::{DetachedImages, DiskPath, SharedDisk};
use serde_json::json;
pub(super) use transfer::{report as report_transfer, transfer_of};
use walvisor_storage::{self as storage, DiskReport, Retention, SnapshotName, Store, StoreOptions};

use super::CommandError;
use super::owner::cannot_look;
use super::threads::Threads;
use crate::control_socket::ControlCommand;
use crate::point::{
    history_json, history_text, refuse_checkpoint, retain_text, snapshot_json, time_text,
};
use crate::size::{human_size, parse_size, show_size};

/// The segments of a log that is smaller than eight of the usual size, in bytes.
const SMALL_SEGMENT: u64 = 16 << 20;

/// Arguments of `walvisor disk`.
#[derive(Debug, Args)]
pub struct DiskArguments {
    #[command(subcommand)]
    action: DiskAction,
}

/// What to do with a disk.
#[derive(Debug, Subcommand)]
enum DiskAction {
    /// Create a disk: a sparse base image, with its own log or on an existing one.
    Create {
        #[command(flatten)]
        disk: DiskPath,
        /// Size in bytes, a multiple of 512; K, M, G, T, P and E are powers of 1024, KB, MB and so
        /// on of 1000.
        #[arg(long, value_parser = parse_size)]
        size: u64,
        #[command(flatten)]
        new_log: NewLog,
    },
    /// List the disks of a log, or of the logs in a directory.
    List(list::ListArguments),
    /// Show a disk and its log.
    Info {
        #[command(flatten)]
        shared: SharedDisk,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Verify every checksum of the log; change nothing.
    Check {
        #[command(flatten)]
        shared: SharedDisk,
        /// Replaced by 'walvisor disk discard'.
        #[arg(long, hide = true)]
        discard_log: bool,
        #[command(flatten)]
        threads: Threads,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Give up the log's records of a disk and take its image as it is, if the image that the
    /// records belong to is lost. Other disks of the log keep their records. Without --yes, only
    /// tells what would be lost.
    Discard {
        #[command(flatten)]
        disk: DiskPath,
        /// Do it.
        #[arg(long)]
        yes: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Take the image at a path for its disk's, with the log's records over it, although it was copied
    /// without its extended attributes or another program has written to it. Without --yes, only
    /// tells what the log holds.
    Adopt {
        #[command(flatten)]
        disk: DiskPath,
        /// Do it.
        #[arg(long)]
        yes: bool,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
    /// Copy the log to the base image, which is then a plain raw image.
    Checkpoint {
        #[command(flatten)]
        shared: SharedDisk,
        /// Do it although the log keeps history, which is lost then, of all its disks.
        #[arg(long)]
        give_up_history: bool,
        #[command(flatten)]
        detached: DetachedImages,
    },
    /// Create a disk from a raw image.
    Import(transfer::ImportArguments),
    /// Copy the disk's current contents to a raw image; the disk is not changed.
    Export(transfer::ExportArguments),
    /// Copy the disk as of a point of its history to a raw image, or make the disk itself what it
    /// was.
    Restore(transfer::RestoreArguments),
    /// Create a disk from another one, as of now or a point of its history. They share blocks if
    /// the file system can; else all is copied, with --serve while the new disk is in use.
    Clone(transfer::CloneArguments),
    /// Serve a disk as of a point, over NBD, read-only without --scratch, until its last client is
    /// gone.
    Look(look::LookArguments),
    /// Show which parts of a disk changed between two points of its history.
    Changes(changes::ChangesArguments),
    /// Name the current state of all disks of the disk's log; the log keeps what is needed to
    /// restore it.
    Snapshot(snapshot::MakeArguments),
    /// List the snapshots of the disk's log, oldest first.
    Snapshots(snapshot::SnapshotsArguments),
    /// Delete a snapshot.
    SnapshotDelete(snapshot::SnapshotArguments),
    /// Change how much history the disk's log keeps.
    Retain(snapshot::RetainArguments),
    /// List the points of a disk's history: its snapshots, marks and newest commits, and how far
    /// back it goes.
    Points(snapshot::PointsArguments),
    /// Write a mark into the disk's log: a text that names this moment, which 'log dump' shows.
    Mark(snapshot::MarkArguments),
    /// Change the size of a disk.
    Resize(transfer::ResizeArguments),
    /// Take a disk out of its log: its image is then a plain raw image, and the log's other disks
    /// are not changed.
    Leave(membership::LeaveArguments),
    /// Move a disk to another log, which is made if it does not exist; a raw image without a log
    /// joins that log.
    MoveLog(membership::MoveArguments),
}

/// What a new disk says of its log.
#[derive(Debug, Args)]
struct NewLog {
    /// How much history the log keeps, for all its disks: off, all, a time such as 24h or 15m, or a
    /// size such as 50G [default: off, or as an existing log is set].
    #[arg(long)]
    retain: Option<Retention>,
    /// The size that the log may grow to, if there is none yet, at least 64M [default: 2G];
    /// 'walvisor log resize' changes it later.
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    log_size: Option<u64>,
}

impl NewLog {
    /// The options with which the log is made, or joined.
    ///
    /// # Errors
    /// If the log has a size already, or can't have the one that is asked for.
    fn options(&self, disk: &DiskPath) -> Result<StoreOptions, CommandError> {
        let mut options = StoreOptions {
            retain: self.retain,
            ..StoreOptions::default()
        };
        let Some(size) = self.log_size else {
            return Ok(options);
        };
        let log = disk.named_log();
        if storage::has_log(&log) {
            let log = log.display();
            return Err(CommandError::Failed(format!(
                "--log-size: there is a log at {log} already: leave --log-size out, and change its \
                 size with: walvisor log resize {log} --size SIZE"
            )));
        }
        let segments = |bytes: u64| u32::try_from(size.div_ceil(bytes)).unwrap_or(u32::MAX);
        // A request is at most a quarter of a segment.
        if segments(options.segment_size) < 8 {
            options.segment_size = SMALL_SEGMENT;
        }
        options.max_segments = segments(options.segment_size);
        if options.max_segments < 4 {
            return Err(CommandError::Usage(format!(
                "--log-size: {} is too small: give at least 64M",
                show_size(size)
            )));
        }
        Ok(options)
    }

    /// Says how much history the log keeps, if that was asked for.
    fn report(&self, disk: &DiskPath) {
        if let Some(kept) = self.retain {
            let (path, log) = (disk.path.display(), disk.named_log());
            let (log, kept) = (log.display(), retain_text(kept));
            print(format_args!("{path}: its log {log} keeps {kept}\n"));
        }
    }
}

/// Carries out `walvisor disk`.
///
/// # Errors
/// One line: what, where, what to do.
pub fn run(arguments: &DiskArguments) -> Result<(), CommandError> {
    match &arguments.action {
        DiskAction::Create {
            disk,
            size,
            new_log,
        } => {
            let options = new_log.options(disk)?;
            storage::create_disk(&disk.path, *size, &disk.named_log(), &options)
                .map_err(CommandError::failed)?;
            new_log.report(disk);
            Ok(())
        }
        DiskAction::List(arguments) => list::list(arguments),
        DiskAction::Info { shared, json } => info(shared, *json),
        DiskAction::Check {
            shared,
            discard_log: true,
            ..
        } => Err(CommandError::Usage(format!(
            "--discard-log: a check changes nothing; to give up a disk's records: walvisor disk \
             discard {}",
            shared.disk.path.display()
        ))),
        DiskAction::Check {
            shared,
            threads,
            json,
            ..
        } => check(shared, *threads, *json),
        DiskAction::Discard { disk, yes, json } => discard(disk, *yes, *json),
        DiskAction::Adopt { disk, yes, json } => adopt(disk, *yes, *json),
        DiskAction::Checkpoint {
            shared,
            give_up_history,
            detached,
        } => checkpoint(shared, *give_up_history, detached),
        DiskAction::Import(arguments) => transfer::import(arguments),
        DiskAction::Export(arguments) => transfer::export(arguments),
        DiskAction::Restore(arguments) => transfer::restore(arguments),
        DiskAction::Clone(arguments) => transfer::clone(arguments),
        DiskAction::Look(arguments) => look::look(arguments),
        DiskAction::Changes(arguments) => changes::run(arguments),
        DiskAction::Snapshot(arguments) => snapshot::make(arguments),
        DiskAction::Snapshots(arguments) => snapshot::list(arguments),
        DiskAction::SnapshotDelete(arguments) => snapshot::delete(arguments),
        DiskAction::Retain(arguments) => snapshot::retain(arguments),
        DiskAction::Points(arguments) => snapshot::points(arguments),
        DiskAction::Mark(arguments) => snapshot::mark(arguments),
        DiskAction::Resize(arguments) => transfer::resize(arguments),
        DiskAction::Leave(arguments) => membership::leave(arguments),
        DiskAction::MoveLog(arguments) => membership::move_log(arguments),
    }
}

/// Prints a line of a report.
macro_rules! say {
    ($($text:tt)*) => { print(format_args!("{}\n", format_args!($($text)*))) };
}

fn info(shared: &SharedDisk, json: bool) -> Result<(), CommandError> {
    let (report, disk) = (shared.inspect(None)?, &shared.disk);
    if json {
        say!("{}", to_json(&disk.path, &disk.log(), &report));
        return Ok(());
    }
    say!("disk       {}", disk.path.display());
    say!(
        "size       {} ({} allocated)",
        human_size(report.size),
        human_size(report.allocated)
    );
    if report.unfetched > 0 {
        say!(
            "lacks      {}, which 'walvisor archive restore' or 'disk clone --serve' is to fetch",
            human_size(report.unfetched)
        );
    }
    if report.spilled > 0 {
        say!(
            "lacks      {}, which a spill file beside the log has: the image could not be written",
            human_size(report.spilled)
        );
    }
    let Some(log) = report.log else {
        say!("log        none: {}", without_log(&report));
        return Ok(());
    };
    say!("log        {}", disk.log().display());
    say!(
        "segments   {} of at most {}, {} each",
        log.segments,
        log.max_segments,
        human_size(log.segment_size)
    );
    say!(
        "last LSN   {} ({} in the base image)",
        log.last_lsn,
        log.checkpoint_lsn
    );
    say!(
        "unapplied  {} records, {}",
        log.records,
        human_size(log.payload_bytes)
    );
    say!("history    {}", history_text(&history_json(&log.history)));
    for snapshot in &log.history.snapshots {
        say!(
            "snapshot   {} (lsn:{}, {})",
            snapshot.name,
            snapshot.lsn,
            time_text(snapshot.unix_us)
        );
    }
    for path in log.disks {
        say!("serves     {}", path.display());
    }
    Ok(())
}

/// Describes an image without a log.
fn without_log(report: &DiskReport) -> &'static str {
    if report.marked {
        "a raw image of a disk that was closed, with all bytes in the image"
    } else {
        "a raw image without a log or a mark; if it is a copy of a disk that was not closed, its \
         newest bytes are missing"
    }
}

fn check(shared: &SharedDisk, threads: Threads, json: bool) -> Result<(), CommandError> {
    let report = shared.inspect(threads.get())?;
    let disk = &shared.disk;
    let name = disk.path.display();
    let damaged = report.log.iter().flat_map(|log| &log.damaged);
    let damaged: Vec<_> = damaged.collect();
    if let Some(first) = damaged.first() {
        if json {
            say!("{}", to_json(&disk.path, &disk.log(), &report));
        }
        for block in damaged.iter().filter(|_| !json) {
            say!(
                "{}: damaged: sectors {} to {}, written by LSN {} ({}, byte {})",
                block.disk.display(),
                block.sector,
                block.sector + block.sectors - 1,
                block.lsn,
                block.segment.display(),
                block.offset,
            );
        }
        return Err(CommandError::Failed(format!(
            "{}: damaged: {} blocks in {} are not what was written; reads of them fail until the \
             guest overwrites them, or restore the disk from a copy",
            first.disk.display(),
            damaged.len(),
            disk.log().display(),
        )));
    }
    let headers = report.log.iter().flat_map(|log| &log.damaged_headers);
    if let Some(first) = headers.clone().next() {
        if json {
            say!("{}", to_json(&disk.path, &disk.log(), &report));
        }
        for header in headers.clone().filter(|_| !json) {
            say!(
                "{}: damaged: the batch header at byte {}",
                header.segment.display(),
                header.offset
            );
        }
        return Err(CommandError::Failed(format!(
            "{}: damaged: {} batch headers are not what was written; summaries have copies of \
             them, so no record is lost: 'walvisor disk checkpoint' copies the records to the base \
             image",
            first.segment.display(),
            headers.count(),
        )));
    }
    let faults = report.log.iter().flat_map(|log| &log.snapshot_faults);
    if faults.clone().next().is_some() {
        if json {
            say!("{}", to_json(&disk.path, &disk.log(), &report));
        }
        for fault in faults.clone().filter(|_| !json) {
            let names: Vec<_> = fault.snapshots.iter().map(|name| name.as_str()).collect();
            say!("{name}: snapshots {}: {}", names.join(", "), fault.what);
        }
        return Err(CommandError::Failed(format!(
            "{name}: its snapshots have {} faults, and the disk as it is now has none: put the \
             files back that are named, or delete the snapshots",
            faults.count(),
        )));
    }
    if report.unfetched > 0 {
        if json {
            say!("{}", to_json(&disk.path, &disk.log(), &report));
        }
        return Err(not_whole(disk, report.unfetched));
    }
    match (&report.log, json) {
        (_, true) => say!("{}", to_json(&disk.path, &disk.log(), &report)),
        (None, _) => say!(
            "{name}: {}: {}",
            if report.marked {
                "clean"
            } else {
                "nothing to verify"
            },
            without_log(&report)
        ),
        (Some(log), _) => say!(
            "{name}: clean: {} batches verified; {} records ({}) in the log, the rest in the \
             base image{}",
            log.batches,
            log.records,
            human_size(log.payload_bytes),
            if log.torn_tail {
                "; a write that was never acknowledged is dropped"
            } else {
                ""
            },
        ),
    }
    Ok(())
}

fn adopt(disk: &DiskPath, yes: bool, json: bool) -> Result<(), CommandError> {
    let (name, log) = (disk.path.display(), disk.named_log());
    let (held, lost) = if yes {
        let held = storage::adopt_image(&disk.path, &log).map_err(CommandError::failed)?;
        (held, None)
    } else {
        storage::plan_adoption(&disk.path, &log).map_err(cannot_look)?
    };
    let (Some(records), Some(bytes)) = (held.records, held.payload_bytes) else {
        return Err(CommandError::Failed(format!(
            "{name}: there is no log at {}; name its log with --log DIR",
            log.display()
        )));
    };
    let records = format!(
        "{records} records ({}) in the log {}",
        human_size(bytes),
        log.display()
    );
    if !yes {
        let lost = lost.map_or_else(String::new, |names| {
            let names = names.iter().map(SnapshotName::as_str);
            let names = match names.collect::<Vec<_>>().as_slice() {
                [] => String::new(),
                names => format!(", without the snapshots {}", names.join(", ")),
            };
            format!(
                "; its bytes are not those that the log left, so its history starts over{names}"
            )
        });
        return Err(CommandError::Failed(format!(
            "{name}: nothing is adopted yet: disk {} would be this image and {records}{lost}; if \
             another image is its own, it would be a mix of both; to do it, add --yes",
            held.disk
        )));
    }
    if json {
        let line = json!({
            "disk": disk.path,
            "uuid": held.disk,
            "records": held.records,
            "bytes": held.payload_bytes,
        });
        print(format_args!("{line}\n"));
    } else {
        print(format_args!(
            "{name}: disk {} is this image and {records}\n",
            held.disk
        ));
    }
    Ok(())
}

fn discard(disk: &DiskPath, yes: bool, json: bool) -> Result<(), CommandError> {
    let (name, log) = (disk.path.display(), disk.named_log());
    if !yes {
        let plan = storage::plan_discard(&disk.path, &log).map_err(cannot_look)?;
        let what = match (plan.records, plan.payload_bytes) {
            (Some(records), Some(bytes)) => {
                format!(
                    "{records} records ({}) in the log {}",
                    human_size(bytes),
                    log.display()
                )
            }
            _ => "the mark that says that its newest bytes are in a log, which is gone".to_owned(),
        };
        return Err(CommandError::Failed(format!(
            "{name}: nothing is discarded yet: disk {} would lose {what}, for good; to do it, add \
             --yes",
            plan.disk
        )));
    }
    let done = storage::discard_log(&disk.path, &log).map_err(CommandError::failed)?;
    if json {
        print(format_args!(
            "{}\n",
            json!({
                "disk": disk.path,
                "uuid": done.disk,
                "discarded_records": done.records,
                "discarded_bytes": done.payload_bytes,
                "image_fits": done.image_fits,
            })
        ));
        return Ok(());
    }
    let what = match (done.records, done.payload_bytes) {
        (Some(records), Some(bytes)) => format!(
            "discarded {records} records ({}) in the log {}",
            human_size(bytes),
            log.display()
        ),
        _ => format!("nothing to discard: there is no log at {}", log.display()),
    };
    let then = if done.image_fits {
        "the disk now has the image's contents"
    } else {
        "the disk has no image: put one there"
    };
    print(format_args!("{name}: disk {}: {what}; {then}\n", done.disk));
    Ok(())
}

/// The error for an image that lacks so many bytes.
fn not_whole(disk: &DiskPath, unfetched: u64) -> CommandError {
    CommandError::Failed(format!(
        "{}: not whole: 'walvisor archive restore' has still to fetch {} of the image; wait until it \
         ends, or run it again if it was ended too early",
        disk.path.display(),
        human_size(unfetched)
    ))
}

fn checkpoint(
    shared: &SharedDisk,
    give_up_history: bool,
    detached: &DetachedImages,
) -> Result<(), CommandError> {
    if let Some((owner, disk)) = shared.owner() {
        let request = ControlCommand::Checkpoint {
            disk,
            give_up_history,
        };
        return owner.ask(&request).map(drop);
    }
    let disk = &shared.disk;
    let log = disk.log();
    let report = storage::inspect(&disk.path, &log).map_err(CommandError::failed)?;
    if report.unfetched > 0 {
        return Err(not_whole(disk, report.unfetched));
    }
    // A disk without a log is already what a checkpoint leaves, a plain raw image, so no log is
    // made.
    let Some(report) = report.log else {
        return Ok(());
    };
    if !give_up_history {
        let names = report.disks.iter().map(|path| path.display().to_string());
        refuse_checkpoint(&report.history, names.collect())
            .map_err(|error| CommandError::Failed(format!("{}: {error}", disk.path.display())))?;
    }
    let store = Store::open(&log, &detached.with(&disk.path), &StoreOptions::default());
    let store = store.map_err(CommandError::failed)?;
    // A log that keeps history copies everything only if asked.
    store.disks()[0]
        .checkpoint()
        .map_err(CommandError::failed)?;
    store.close().map_err(CommandError::failed)
}

fn to_json(path: &Path, log_dir: &Path, report: &DiskReport) -> serde_json::Value {
    let log = report.log.as_ref().map(|log| {
        json!({
            "path": log_dir,
            "segments": log.segments,
            "max_segments": log.max_segments,
            "segment_bytes": log.segment_size,
            "batches": log.batches,
            "records": log.records,
            "payload_bytes": log.payload_bytes,
            "checkpoint_lsn": log.checkpoint_lsn,
            "last_lsn": log.last_lsn,
            "retain": log.history.retain.to_string(),
            "history": history_json(&log.history),
            "snapshots": log.history.snapshots.iter().map(snapshot_json).collect::<Vec<_>>(),
            "torn_tail": log.torn_tail,
            "disks": log.disks,
            "damaged": log.damaged.iter().map(|block| json!({
                "disk": block.disk,
                "sector": block.sector,
                "sectors": block.sectors,
                "lsn": block.lsn,
                "segment": block.segment,
                "offset": block.offset,
            })).collect::<Vec<_>>(),
            "damaged_headers": log.damaged_headers.iter().map(|header| json!({
                "segment": header.segment,
                "offset": header.offset,
            })).collect::<Vec<_>>(),
            "snapshot_faults": log.snapshot_faults.iter().map(|fault| json!({
                "snapshots": fault.snapshots.iter().map(|name| name.as_str()).collect::<Vec<_>>(),
                "what": fault.what,
            })).collect::<Vec<_>>(),
        })
    });
    json!({
        "disk": path,
        "size_bytes": report.size,
        "allocated_bytes": report.allocated,
        "spilled_bytes": report.spilled,
        "unfetched_bytes": report.unfetched,
        "marked": report.marked,
        "clean": report.is_clean(),
        "log": log,
    })
}
