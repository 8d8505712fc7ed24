//! `walvisor ctl`: controls a running `walvisor run` or `walvisor serve`, or asks for its
//! statistics.

pub(super) mod answer;

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use walvisor_storage as storage;

use self::answer::{printable, text};
use super::CommandError;
use super::disk::{report_transfer, transfer_of};
use super::look::{absolute, look_in_use};
use super::serve::saving::{self, ServedPool};
use crate::control_socket::{ControlCommand, StatsFormat, ask, ask_with};
use crate::disk_spec::DiskCommand;
use crate::progress::with_bar;

/// The arguments of `walvisor ctl`.
#[derive(Args, Debug)]
pub struct CtlArguments {
    /// The other process's --control socket
    pub socket: PathBuf,
    /// Print the answer as JSON
    #[arg(long, global = true)]
    pub json: bool,
    /// What is wanted.
    #[command(subcommand)]
    pub request: ControlCommand,
}

/// Sends the request, and prints its answer.
///
/// # Errors
/// If no process answers, or the request failed.
pub fn run(arguments: &CtlArguments) -> Result<(), CommandError> {
    let CtlArguments {
        socket,
        json,
        request,
    } = arguments;
    let unlook;
    let request = match request {
        ControlCommand::Export { output, force, .. } => {
            return export(socket, request, output, *force, *json);
        }
        ControlCommand::Config { file, .. } => return save(socket, file, *json),
        ControlCommand::Look(wanted) => {
            return look_in_use(wanted, (*json, None), |command, files| {
                let answer = ask_with(socket, command, files, &mut |_, _| {});
                answer.map_err(CommandError::Failed)
            });
        }
        ControlCommand::Unlook { look } if is_socket(look) => {
            let look = absolute(look);
            unlook = ControlCommand::Unlook { look };
            &unlook
        }
        request => request,
    };
    let answer = ask(socket, request).map_err(CommandError::Failed)?;
    let shown = match request {
        ControlCommand::Stats {
            format: StatsFormat::Prometheus,
        } => text(&answer["text"]),
        _ if *json => format!("{answer}\n"),
        request => answer::shown(request, &answer),
    };
    // A failed write is fine: the reader has closed the pipe.
    let _ = std::io::stdout().write_all(shown.as_bytes());
    Ok(())
}

fn is_socket(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|found| found.file_type().is_socket())
}

/// Writes to a daemon's configuration file which disks it serves.
fn save(socket: &Path, file: &Path, json: bool) -> Result<(), CommandError> {
    let config = |saved| {
        let file = file.to_owned();
        ask(socket, &ControlCommand::Config { file, saved })
    };
    let answer = config(Vec::new()).map_err(CommandError::Failed)?;
    let kinds = DiskCommand::DOORS.into_iter().chain([DiskCommand::Serve]);
    let mut kinds = kinds.filter(|kind| answer["kind"] == kind.name());
    let disks = || answer["disks"].as_array().into_iter().flatten();
    let detached = answer["detached"].as_array().into_iter().flatten();
    let served = ServedPool {
        config: Path::new(answer["config"].as_str().unwrap_or_default()),
        kind: kinds.next().unwrap_or(DiskCommand::Serve),
        disks: disks()
            .map(|disk| (text(&disk["spec"]), disk["log"].as_str().map(PathBuf::from)))
            .collect(),
        detached: detached
            .map(|left| (text(&left["log"]).into(), text(&left["image"])))
            .collect(),
    };
    let saved = saving::save(file, &served)?;
    // A daemon that has ended meanwhile reads the file when it starts.
    let _ = config(disks().map(|disk| text(&disk["disk"])).collect());
    let line = if json {
        let done = json!({
            "config": file,
            "added": saved.added,
            "removed": saved.removed,
            "detached": saved.detached,
        });
        format!("{done}\n")
    } else {
        let parts = [
            ("added", saved.added),
            ("removed", saved.removed),
            ("detached", saved.detached),
            (
                "its log needs detached= on the command line:",
                saved.unnamed,
            ),
        ];
        let parts = parts.into_iter().filter(|(_, names)| !names.is_empty());
        let parts: Vec<_> = parts
            .map(|(how, names)| format!("{how} {}", names.join(", ")))
            .collect();
        let file = file.display();
        printable(&match &parts[..] {
            [] => format!("{file}: nothing to save"),
            parts => format!("{file}: {}", parts.join("; ")),
        })
    };
    let _ = std::io::stdout().write_all(line.as_bytes());
    Ok(())
}

/// Lets the other process write a new image, which gets its name once it is complete.
fn export(
    socket: &Path,
    command: &ControlCommand,
    output: &Path,
    force: bool,
    json: bool,
) -> Result<(), CommandError> {
    let answer = with_bar("exporting", |progress| {
        storage::receive_image(output, force, |file| {
            ask_with(socket, command, &[file.as_fd()], progress).map_err(CommandError::Failed)
        })
    })?;
    let done = transfer_of(&answer);
    let disk = text(&answer["disk"]);
    let said = format!("{}: exported {disk}", output.display());
    report_transfer(json, Path::new(&disk), ("raw", output), done, &said);
    Ok(())
}
