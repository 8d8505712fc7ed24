//! `walvisor disk list`: the disks of a log, or of all logs in a directory. Reads their control
//! files only, whether or not they are in use.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Value, json};
use walvisor_storage::{LogRoot, has_log, log_writer};

use super::path::print;
use crate::commands::CommandError;
use crate::commands::ctl::answer::text;
use crate::size::human_size;
use crate::table::Table;

/// The arguments of `walvisor disk list`.
#[derive(Args, Debug)]
pub(super) struct ListArguments {
    /// A log, or a directory with logs.
    #[arg(value_name = "DIR", default_value = ".")]
    directory: PathBuf,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Carries out `walvisor disk list`.
///
/// # Errors
/// If there is no such directory, or a log can't be read. The disks of the others are listed.
pub(super) fn list(arguments: &ListArguments) -> Result<(), CommandError> {
    let logs = logs_in(&arguments.directory)?;
    let (mut disks, mut failed) = (Vec::new(), Ok(()));
    for log in &logs {
        match disks_of(log) {
            Ok(found) => disks.extend(found),
            Err(error) => failed = Err(CommandError::failed(error)),
        }
    }
    if arguments.json {
        print(format_args!("{}\n", json!({ "disks": disks })));
    } else {
        print(format_args!("{}", table(&disks)));
    }
    failed
}

/// This directory if it is a log, else the logs in it, by name.
fn logs_in(directory: &Path) -> Result<Vec<PathBuf>, CommandError> {
    if has_log(directory) {
        return Ok(vec![directory.to_owned()]);
    }
    let failed = |error| {
        CommandError::Failed(format!(
            "{}: {error}: name a log, or a directory with logs",
            directory.display()
        ))
    };
    let mut logs = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        // As a user would type it.
        let path = match directory.to_str() {
            Some(".") => PathBuf::from(name),
            _ => directory.join(name),
        };
        logs.extend(has_log(&path).then_some(path));
    }
    logs.sort();
    Ok(logs)
}

/// The disks of a log.
fn disks_of(log: &Path) -> Result<Vec<Value>, walvisor_storage::Error> {
    let root = LogRoot::read(log)?;
    let snapshots = root.snapshots();
    let disks = root.images().into_iter().map(|image| {
        let of_disk = snapshots
            .iter()
            .filter(|snapshot| snapshot.disk_id.is_none_or(|disk| disk == image.disk_id));
        let names: Vec<_> = of_disk.map(|snapshot| snapshot.name.as_str()).collect();
        json!({
            "disk": image.path,
            "size_bytes": image.bytes,
            "image": if image.path.exists() { "there" } else { "missing" },
            "log": log,
            "process": log_writer(log),
            "snapshots": names,
        })
    });
    Ok(disks.collect())
}

fn table(disks: &[Value]) -> String {
    let mut table = Table::new(&["DISK", "SIZE", "IMAGE", "LOG", "IN USE BY", "SNAPSHOTS"]);
    for disk in disks {
        let process = disk["process"].as_u64();
        table.row(vec![
            text(&disk["disk"]),
            human_size(disk["size_bytes"].as_u64().unwrap_or(0)),
            text(&disk["image"]),
            text(&disk["log"]),
            process.map_or_else(|| "nobody".to_owned(), |pid| format!("process {pid}")),
            disk["snapshots"].as_array().map_or(0, Vec::len).to_string(),
        ]);
    }
    table.for_stdout()
}
