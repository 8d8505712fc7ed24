//! `walvisor disk snapshot`, `snapshots`, `snapshot-delete` and `mark`: snapshots and marks of a
//! disk, whether or not it is in use.

use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use walvisor_storage::{self as storage, MarkText, Retention, SnapshotName, Store, StoreOptions};

use super::path::{DetachedImages, DiskPath, SharedDisk, print};
use crate::commands::CommandError;
use crate::commands::ctl::answer::{points as points_text, shown};
use crate::commands::owner::cannot_look;
use crate::commands::threads::Threads;
use crate::control_socket::ControlCommand;
use crate::point::{mark_json, points_json, set_retention, snapshot_json, time_text};
use crate::size::human_size;

/// The arguments of `walvisor disk snapshot`.
#[derive(Args, Debug)]
pub(super) struct MakeArguments {
    #[command(flatten)]
    snapshot: SnapshotArguments,
    /// Of this disk only: the log keeps nothing of its other disks for the snapshot.
    #[arg(long)]
    alone: bool,
}

/// The arguments of `walvisor disk snapshot-delete`.
#[derive(Args, Debug)]
pub(super) struct SnapshotArguments {
    #[command(flatten)]
    shared: SharedDisk,
    #[command(flatten)]
    detached: DetachedImages,
    /// Its name: 1 to 64 of the characters A-Z, a-z, 0-9, '.', '_' and '-'.
    name: SnapshotName,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The arguments of `walvisor disk snapshots`.
#[derive(Args, Debug)]
pub(super) struct SnapshotsArguments {
    #[command(flatten)]
    shared: SharedDisk,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The arguments of `walvisor disk retain`.
#[derive(Args, Debug)]
pub(super) struct RetainArguments {
    #[command(flatten)]
    shared: SharedDisk,
    #[command(flatten)]
    detached: DetachedImages,
    /// How much: off, all, a time such as 24h, or a size such as 50G.
    retain: Retention,
    /// Do it although it is less than the log keeps now, of all its disks.
    #[arg(long)]
    give_up_history: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The arguments of `walvisor disk points`.
#[derive(Args, Debug)]
pub(super) struct PointsArguments {
    #[command(flatten)]
    shared: SharedDisk,
    /// How many of the newest commits; older ones with marks are listed too, as many.
    #[arg(long = "newest", value_name = "N", default_value_t = 20)]
    most: usize,
    #[command(flatten)]
    threads: Threads,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The arguments of `walvisor disk mark`.
#[derive(Args, Debug)]
pub(super) struct MarkArguments {
    #[command(flatten)]
    shared: SharedDisk,
    #[command(flatten)]
    detached: DetachedImages,
    /// Its text: one line of 1 to 256 bytes, without control characters.
    text: MarkText,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Changes how much history the log keeps.
pub(super) fn retain(arguments: &RetainArguments) -> Result<(), CommandError> {
    let RetainArguments {
        shared,
        detached,
        retain,
        give_up_history,
        json,
    } = arguments;
    let (disk, give_up_history) = (&shared.disk, *give_up_history);
    let owner = shared.owner();
    let request = |disk| ControlCommand::SetRetain {
        disk,
        retain: retain.to_string(),
        give_up_history,
    };
    let answer = match owner {
        Some((owner, disk)) => owner.ask(&request(disk))?,
        None => change(disk, detached, |open| {
            let names = || {
                let members = open.members().into_iter().flatten();
                let names = members.map(|(_, path)| path.display().to_string());
                names.collect()
            };
            set_retention(open, json!(disk.log()), *retain, give_up_history, names)
        })?
        .map_err(|why| CommandError::Failed(format!("{}: {why}", disk.path.display())))?,
    };
    if *json {
        print(format_args!("{answer}\n"));
    } else {
        print(format_args!("{}", shown(&request(None), &answer)));
    }
    Ok(())
}

/// Lists the points of a disk's history.
pub(super) fn points(arguments: &PointsArguments) -> Result<(), CommandError> {
    let PointsArguments {
        shared,
        most,
        threads,
        json,
    } = arguments;
    let disk = &shared.disk;
    let points = shared.read(|path, log| storage::disk_points(path, log, *most, threads.get()));
    let mut points = points_json(&points?);
    points["disk"] = json!(disk.path);
    points["log"] = json!(disk.log());
    if *json {
        print(format_args!("{points}\n"));
    } else {
        print(format_args!("{}", points_text(&points)));
    }
    Ok(())
}

/// Opens the disk for one change of its log's history.
fn change<T>(
    disk: &DiskPath,
    detached: &DetachedImages,
    change: impl FnOnce(&storage::Disk) -> storage::Result<T>,
) -> Result<T, CommandError> {
    let options = StoreOptions {
        // What the log holds can stay there.
        close_time: Some(Duration::ZERO),
        ..StoreOptions::default()
    };
    let store = Store::open(&disk.log(), &detached.with(&disk.path), &options);
    let store = store.map_err(cannot_look)?;
    let changed = change(&store.disks()[0]).map_err(CommandError::failed)?;
    store.close().map_err(CommandError::failed)?;
    Ok(changed)
}

/// Makes a snapshot.
pub(super) fn make(arguments: &MakeArguments) -> Result<(), CommandError> {
    let MakeArguments { snapshot, alone } = arguments;
    let SnapshotArguments {
        shared,
        detached,
        name,
        json,
    } = snapshot;
    let disk = &shared.disk;
    let made = match shared.owner() {
        Some((owner, disk)) => owner.ask(&ControlCommand::Snapshot {
            name: name.as_str().to_owned(),
            alone: *alone,
            disk,
        })?,
        None => snapshot_json(&change(disk, detached, |disk| {
            if *alone {
                disk.snapshot_alone(*name)
            } else {
                disk.snapshot(*name)
            }
        })?),
    };
    if *json {
        print(format_args!("{made}\n"))
    } else {
        print(format_args!(
            "{}: snapshot '{name}' at lsn:{} of cid:{}\n",
            disk.path.display(),
            made["lsn"],
            made["cid"]
        ))
    }
    Ok(())
}

/// Writes a mark. A log that keeps no history would lose it with the next checkpoint.
pub(super) fn mark(arguments: &MarkArguments) -> Result<(), CommandError> {
    let MarkArguments {
        shared,
        detached,
        text,
        json,
    } = arguments;
    let disk = &shared.disk;
    let keeps =
        |disk: &storage::Disk| disk.retain() != Retention::Nothing || !disk.snapshots().is_empty();
    let made = match shared.owner() {
        Some((owner, disk)) => {
            let text = text.to_string();
            Some(owner.ask(&ControlCommand::Mark { text, disk })?)
        }
        None => change(disk, detached, |disk| {
            let mark = || disk.mark(text);
            keeps(disk).then(mark).transpose()
        })?
        .map(|made| mark_json(text, &made)),
    };
    let Some(made) = made else {
        return Err(CommandError::Failed(format!(
            "{}: its log keeps no history, so a mark would be gone when the disk is opened next: \
             open it once with retain=24h, or make a snapshot first",
            disk.path.display()
        )));
    };
    if *json {
        print(format_args!("{made}\n"))
    } else {
        print(format_args!(
            "{}: marked lsn:{} of cid:{}\n",
            disk.path.display(),
            made["lsn"],
            made["cid"]
        ))
    }
    Ok(())
}

/// Deletes a snapshot.
pub(super) fn delete(arguments: &SnapshotArguments) -> Result<(), CommandError> {
    let SnapshotArguments {
        shared,
        detached,
        name,
        json,
    } = arguments;
    let deleted = match shared.owner() {
        Some((owner, disk)) => {
            let name = name.as_str().to_owned();
            owner.ask(&ControlCommand::SnapshotDelete { name, disk })?
        }
        None => {
            change(&shared.disk, detached, |disk| disk.delete_snapshot(*name))?;
            json!({ "deleted": name.as_str() })
        }
    };
    if *json {
        print(format_args!("{deleted}\n"));
    }
    Ok(())
}

/// Lists the snapshots.
pub(super) fn list(arguments: &SnapshotsArguments) -> Result<(), CommandError> {
    let SnapshotsArguments { shared, json } = arguments;
    let report = shared.inspect(None)?;
    let snapshots = report.log.iter().flat_map(|log| &log.history.snapshots);
    let snapshots: Vec<_> = snapshots.map(snapshot_json).collect();
    if *json {
        print(format_args!("{}\n", Value::from(snapshots)));
        return Ok(());
    }
    for snapshot in snapshots {
        let number = |key: &str| snapshot[key].as_u64();
        let of = number("disk_id");
        let alone = of.map_or_else(String::new, |id| format!("  of disk {id} alone"));
        print(format_args!(
            "{}  {}  lsn:{}  cid:{}  {} saved{alone}\n",
            snapshot["name"].as_str().unwrap_or_default(),
            time_text(number("unix_us").unwrap_or(0)),
            snapshot["lsn"],
            snapshot["cid"],
            human_size(number("saved_bytes").unwrap_or(0))
        ));
    }
    Ok(())
}
