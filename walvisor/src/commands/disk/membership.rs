//! `walvisor disk leave` and `move-log`: take a disk out of its log, or to another log.

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use walvisor_storage::{self as storage, Retention, StoreOptions};

use super::path::{DetachedImages, DiskPath, print};
use crate::commands::CommandError;
use crate::point::retain_text;

/// The arguments of `walvisor disk leave`.
#[derive(Debug, Args)]
pub(super) struct LeaveArguments {
    #[command(flatten)]
    disk: DiskPath,
    #[command(flatten)]
    detached: DetachedImages,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// The arguments of `walvisor disk move-log`.
#[derive(Debug, Args)]
pub(super) struct MoveArguments {
    #[command(flatten)]
    disk: DiskPath,
    /// The directory of the other log.
    new: PathBuf,
    #[command(flatten)]
    detached: DetachedImages,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Carries out `walvisor disk leave`.
pub(super) fn leave(arguments: &LeaveArguments) -> Result<(), CommandError> {
    let LeaveArguments {
        disk,
        detached,
        json,
    } = arguments;
    let (path, log) = (&disk.path, disk.log());
    let left = storage::leave_log(path, &log, &detached.images).map_err(CommandError::failed)?;
    if *json {
        print(format_args!(
            "{}\n",
            json!({ "disk": path, "log": log, "disks_left": left })
        ));
        return Ok(());
    }
    let (name, log) = (path.display(), log.display());
    match left.len() {
        0 => print(format_args!(
            "{name}: a raw image now; the log in {log} has no more disks: remove that directory\n"
        )),
        count => print(format_args!(
            "{name}: a raw image now; disks left on the log in {log}: {count}\n"
        )),
    }
    Ok(())
}

/// Carries out `walvisor disk move-log`.
pub(super) fn move_log(arguments: &MoveArguments) -> Result<(), CommandError> {
    let MoveArguments {
        disk,
        new,
        detached,
        json,
    } = arguments;
    let path = &disk.path;
    let had_past = retention(path, &disk.log()).is_some_and(|kept| kept != Retention::Nothing);
    let (log, options) = (disk.log(), StoreOptions::default());
    storage::move_to_log(path, &log, new, &options, &detached.images)
        .map_err(CommandError::failed)?;
    let kept = retention(path, new).unwrap_or(Retention::Nothing);
    if *json {
        let retain = kept.to_string();
        print(format_args!(
            "{}\n",
            json!({ "disk": path, "log": new, "retain": retain })
        ));
        return Ok(());
    }
    let past = if had_past {
        "; what it was before the move is no longer kept"
    } else {
        ""
    };
    print(format_args!(
        "{}: on the log in {1} now, which keeps {2}{past}; open it with log={1}\n",
        path.display(),
        new.display(),
        retain_text(kept),
    ));
    Ok(())
}

/// How much history the log of a disk keeps, if the disk has that log and nobody uses it.
fn retention(path: &Path, log: &Path) -> Option<Retention> {
    let report = storage::inspect(path, log).ok()?;
    Some(report.log?.history.retain)
}
