//! `walvisor disk import`, `export`, `restore`, `clone` and `resize`.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Value, json};
use walvisor_storage::{self as storage, ImageFormat, Point, StoreOptions};

use super::NewLog;
use super::path::{DetachedImages, DiskPath, SharedDisk, print};
use crate::commands::CommandError;
use crate::commands::owner::{LogOwner, ask_owner};
use crate::commands::threads::Threads;
use crate::control_socket::{ControlCommand, DiskChoice};
use crate::point::rewound_json;
use crate::progress::with_bar;
use crate::size::{human_size, parse_size};

/// The arguments of `walvisor disk import`.
#[derive(Debug, Args)]
pub(super) struct ImportArguments {
    #[command(flatten)]
    disk: DiskPath,
    /// The raw image, or block device, to copy.
    raw: PathBuf,
    /// The format of RAW: raw, whatever its first bytes look like.
    #[arg(long, value_parser = ["raw"])]
    format: Option<String>,
    #[command(flatten)]
    new_log: NewLog,
    #[command(flatten)]
    threads: Threads,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The arguments of `walvisor disk export`.
#[derive(Debug, Args)]
pub(super) struct ExportArguments {
    #[command(flatten)]
    shared: SharedDisk,
    /// The raw image to create.
    raw: PathBuf,
    /// Replace RAW if it exists.
    #[arg(long)]
    force: bool,
    /// Put the log's records over the image whatever the marks of both say.
    #[arg(long)]
    log_wins: bool,
    /// Write zeroes for what can't be read, print a list of it, and fail at the end.
    #[arg(long)]
    salvage: bool,
    #[command(flatten)]
    threads: Threads,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The arguments of `walvisor disk restore`.
#[derive(Debug, Args)]
pub(super) struct RestoreArguments {
    #[command(flatten)]
    shared: SharedDisk,
    /// The point: cid:N or lsn:N (`walvisor log dump` shows both), a time such as 12:03, 'yesterday
    /// 12:03' or 2026-11-22T12:03:00Z, or a time before now such as -15m.
    #[arg(long, allow_hyphen_values = true)]
    at: Point,
    /// The raw image to create.
    #[arg(long, short, value_name = "NEW", required_unless_present = "in_place")]
    output: Option<PathBuf>,
    /// Make the disk itself what it was, at once. The command prints how to undo that, which works
    /// as long as the log keeps the current state.
    #[arg(long, conflicts_with = "output")]
    in_place: bool,
    #[command(flatten)]
    threads: Threads,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The arguments of `walvisor disk clone`.
#[derive(Debug, Args)]
pub(super) struct CloneArguments {
    #[command(flatten)]
    shared: SharedDisk,
    /// The base image of the disk to create.
    new: PathBuf,
    /// The new disk's log directory [default: NEW.wal].
    #[arg(long, value_name = "DIR")]
    new_log: Option<PathBuf>,
    /// The point: cid:N or lsn:N (`walvisor log dump` shows both), a time such as 12:03, 'yesterday
    /// 12:03' or 2026-11-22T12:03:00Z, or a time before now such as -15m [default: the disk as it
    /// is].
    #[arg(long, allow_hyphen_values = true)]
    at: Option<Point>,
    /// Let the new disk be used at once, and copy what its requests wait for before the rest. Keep
    /// this running until it ends: without it, what was not copied can't be read. Meanwhile nobody
    /// can write to the source. Say it again if it was ended too early.
    #[arg(long)]
    serve: bool,
    #[command(flatten)]
    threads: Threads,
    /// Print JSON; with --serve, a line when the disk can be used and one at the end.
    #[arg(long)]
    json: bool,
}

/// The arguments of `walvisor disk resize`.
#[derive(Debug, Args)]
pub(super) struct ResizeArguments {
    #[command(flatten)]
    shared: SharedDisk,
    /// New size in bytes, a multiple of 512; K, M, G, T, P and E are powers of 1024, KB, MB and so
    /// on of 1000.
    #[arg(long, value_parser = parse_size)]
    size: u64,
    /// Shrink the disk even if data is lost.
    #[arg(long)]
    shrink: bool,
    #[command(flatten)]
    detached: DetachedImages,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Reports a copy between a disk and another file, which JSON calls `key`.
pub(in crate::commands) fn report(
    json: bool,
    disk: &Path,
    (key, other): (&str, &Path),
    done: storage::Transfer,
    said: &str,
) {
    if json {
        print(format_args!("{}\n", to_json(disk, (key, other), done)));
        return;
    }
    print(format_args!(
        "{said}: {}, {} of them copied{}\n",
        human_size(done.size),
        human_size(done.copied),
        if done.shared {
            ", the others shared by the file system"
        } else {
            ""
        }
    ))
}

/// The report of a copy as JSON.
fn to_json(disk: &Path, (key, other): (&str, &Path), done: storage::Transfer) -> Value {
    json!({
        "disk": disk,
        key: other,
        "size_bytes": done.size,
        "copied_bytes": done.copied,
        "shared": done.shared,
    })
}

/// Carries out `walvisor disk import`.
pub(super) fn import(arguments: &ImportArguments) -> Result<(), CommandError> {
    let ImportArguments {
        disk,
        raw,
        format,
        new_log,
        threads,
        json,
    } = arguments;
    let options = StoreOptions {
        threads: threads.get(),
        ..new_log.options(disk)?
    };
    let known = match format {
        Some(_) => ImageFormat::Raw,
        None => ImageFormat::Unknown,
    };
    let done = with_bar("importing", |progress| {
        storage::import_disk_as(
            &disk.path,
            raw,
            known,
            &disk.named_log(),
            &options,
            progress,
        )
    })
    .map_err(CommandError::failed)?;
    let said = format!("{}: imported {}", disk.path.display(), raw.display());
    report(*json, &disk.path, ("raw", raw), done, &said);
    if !json {
        new_log.report(disk);
    }
    Ok(())
}

/// Lets the process that has the disk open write a new image of it, as of a point or now. `output`:
/// its path, and whether to replace what is there.
fn copy_in_use(
    (owner, choice): (&LogOwner, Option<DiskChoice>),
    disk: &DiskPath,
    at: Option<Point>,
    (output, force): (&Path, bool),
) -> Result<storage::Transfer, CommandError> {
    let mode = disk.path.metadata().map(|image| image.mode() & 0o666);
    with_bar("exporting", |progress| {
        storage::receive_image(output, force, |file| {
            // As that of a copy of a closed disk.
            let mode = mode.map(Permissions::from_mode);
            let set = mode.and_then(|mode| file.set_permissions(mode));
            set.map_err(|error| CommandError::Failed(format!("{}: {error}", output.display())))?;
            owner.copy(choice, at, file, progress)
        })
    })
}

/// What a process says that it has copied.
pub(in crate::commands) fn transfer_of(answer: &Value) -> storage::Transfer {
    let bytes = |key: &str| answer[key].as_u64().unwrap_or(0);
    storage::Transfer {
        size: bytes("size_bytes"),
        copied: bytes("copied_bytes"),
        shared: false,
    }
}

/// Carries out `walvisor disk export`.
pub(super) fn export(arguments: &ExportArguments) -> Result<(), CommandError> {
    let ExportArguments {
        shared,
        raw,
        force,
        log_wins,
        salvage,
        threads,
        json,
    } = arguments;
    let disk = &shared.disk;
    let said = format!("{}: exported {}", raw.display(), disk.path.display());
    if !*log_wins
        && !*salvage
        && let Some((owner, choice)) = shared.owner()
    {
        let done = copy_in_use((&owner, choice), disk, None, (raw, *force))?;
        report(*json, &disk.path, ("raw", raw), done, &said);
        return Ok(());
    }
    let options = storage::RescueOptions {
        replace: *force,
        log_wins: *log_wins,
        salvage: *salvage,
    };
    let (done, unreadable) = with_bar("exporting", |progress| {
        let (log, threads) = (disk.log(), threads.get());
        storage::rescue_disk(&disk.path, &log, raw, options, threads, progress)
    })
    .map_err(CommandError::failed)?;
    let (name, copy) = (disk.path.display(), raw.display());
    match (*json, *salvage) {
        (true, true) => {
            let mut told = to_json(&disk.path, ("raw", raw), done);
            let ranges = unreadable.iter().map(|range| {
                json!({ "sector": range.sector, "sectors": range.sectors, "why": range.why })
            });
            told["unreadable"] = ranges.collect();
            print(format_args!("{told}\n"));
        }
        _ => report(*json, &disk.path, ("raw", raw), done, &said),
    }
    for range in unreadable.iter().filter(|_| !json) {
        let storage::UnreadableSectors {
            sector,
            sectors,
            why,
        } = range;
        let last = sector + sectors - 1;
        print(format_args!(
            "{name}: unreadable: sectors {sector} to {last} ({why})\n"
        ));
    }
    let sectors: u64 = unreadable.iter().map(|range| range.sectors).sum();
    if sectors > 0 {
        return Err(CommandError::Failed(format!(
            "{copy}: not all of {name}: {} could not be read and are zeroes here",
            human_size(sectors * storage::SECTOR_SIZE)
        )));
    }
    Ok(())
}

/// Carries out `walvisor disk restore`.
pub(super) fn restore(arguments: &RestoreArguments) -> Result<(), CommandError> {
    let RestoreArguments {
        shared,
        at,
        output,
        in_place: _,
        threads,
        json,
    } = arguments;
    let disk = &shared.disk;
    let Some(output) = output else {
        return restore_in_place(shared, *at, *json);
    };
    let said = format!("{}: restored {}", output.display(), disk.path.display());
    if let Some((owner, choice)) = shared.owner() {
        let done = copy_in_use((&owner, choice), disk, Some(*at), (output, false))?;
        report(*json, &disk.path, ("raw", output), done, &said);
        return Ok(());
    }
    let done = with_bar("restoring", |progress| {
        storage::restore_disk(
            &disk.path,
            &disk.log(),
            *at,
            output,
            threads.get(),
            progress,
        )
    })
    .map_err(CommandError::failed)?;
    report(*json, &disk.path, ("raw", output), done, &said);
    Ok(())
}

/// Carries out `walvisor disk restore --in-place`.
fn restore_in_place(shared: &SharedDisk, at: Point, json: bool) -> Result<(), CommandError> {
    let disk = &shared.disk;
    let mut done = match shared.owner() {
        Some((owner, disk)) => owner.ask(&ControlCommand::Restore {
            at: at.to_string(),
            disk,
        })?,
        None => {
            let done = storage::rewind_disk(&disk.path, &disk.log(), at);
            rewound_json(&done.map_err(|error| ask_owner(error, "restore"))?)
        }
    };
    let path = disk.path.display();
    let log = if disk.log() == storage::default_log_dir(&disk.path) {
        String::new()
    } else {
        format!(" --log {}", disk.log().display())
    };
    let undo = format!(
        "walvisor disk restore {path}{log} --at lsn:{} --in-place",
        done["from_lsn"]
    );
    let changed = !done["lsn"].is_null();
    if json {
        done["disk"] = json!(disk.path);
        done["undo"] = json!(changed.then_some(undo));
        print(format_args!("{done}\n"));
        return Ok(());
    }
    let to_lsn = &done["to_lsn"];
    if !changed {
        print(format_args!(
            "{path}: the disk already is as of LSN {to_lsn}: nothing to do\n"
        ));
        return Ok(());
    }
    let back = match done["redone_records"].as_u64() {
        None | Some(0) => String::new(),
        Some(redone) => format!(", and {redone} are back"),
    };
    print(format_args!(
        "{path}: restored in place as of LSN {to_lsn}: {} records are undone{back}\nto undo \
         this: {undo}\n",
        done["undone_records"]
    ));
    Ok(())
}

/// Carries out `walvisor disk clone`.
pub(super) fn clone(arguments: &CloneArguments) -> Result<(), CommandError> {
    let CloneArguments {
        shared,
        new,
        new_log,
        at,
        serve,
        threads,
        json,
    } = arguments;
    let disk = &shared.disk;
    let new_log = new_log
        .clone()
        .unwrap_or_else(|| storage::default_log_dir(new));
    let options = StoreOptions {
        threads: threads.get(),
        ..StoreOptions::default()
    };
    let source = storage::CloneSource {
        path: disk.path.clone(),
        log_dir: disk.log(),
        at: *at,
    };
    let path = disk.path.display();
    let said = format!("{}: cloned {path}", new.display());
    if let Some((owner, choice)) = shared.owner() {
        if *serve {
            return Err(CommandError::Usage(format!(
                "--serve: another process has {path} open, and nobody may write to the source \
                 meanwhile: clone it without --serve, or end that process first"
            )));
        }
        let done = with_bar("cloning", |progress| {
            storage::receive_clone(&source, new, &new_log, &options, |file| {
                owner.copy(choice, *at, file, progress)
            })
        })?;
        report(*json, &disk.path, ("new", new), done, &said);
        return Ok(());
    }
    let ready = || match json {
        true => print(format_args!(
            "{}\n",
            json!({ "disk": disk.path, "new": new, "ready": true })
        )),
        false => print(format_args!(
            "{}: can be used now, and is filled from {path} meanwhile\n",
            new.display()
        )),
    };
    let done = with_bar("cloning", |progress| match serve {
        true => storage::serve_clone(&source, new, &new_log, &options, ready, progress),
        false => storage::clone_disk(&source, new, &new_log, &options, progress),
    })
    .map_err(CommandError::failed)?;
    report(*json, &disk.path, ("new", new), done, &said);
    Ok(())
}

/// Carries out `walvisor disk resize`.
pub(super) fn resize(arguments: &ResizeArguments) -> Result<(), CommandError> {
    let (path, log) = (&arguments.shared.disk.path, arguments.shared.disk.log());
    // Only a closed disk shrinks.
    let owner = arguments.shared.owner().filter(|_| !arguments.shrink);
    let mut done = match owner {
        Some((owner, disk)) => owner.ask(&ControlCommand::Resize {
            disk,
            size_bytes: arguments.size,
        })?,
        None => {
            let storage::Resize { old_size, size } = storage::resize_disk(
                path,
                arguments.size,
                &log,
                arguments.shrink,
                &arguments.detached.images,
            )
            .map_err(CommandError::failed)?;
            json!({ "size_bytes": size, "old_size_bytes": old_size })
        }
    };
    if arguments.json {
        done["disk"] = json!(path);
        print(format_args!("{done}\n"))
    } else {
        let size = |key: &str| human_size(done[key].as_u64().unwrap_or(0));
        print(format_args!(
            "{}: {} now, {} before\n",
            path.display(),
            size("size_bytes"),
            size("old_size_bytes")
        ))
    }
    Ok(())
}
