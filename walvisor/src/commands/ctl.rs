//! `walvisor ctl`: controls a running `walvisor run` or `walvisor serve`, or asks for its
//! statistics.

pub(super) mod answer;

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use walvisor_storage::scratch_file;

use self::answer::{printable, text};
use super::CommandError;
use super::disk::{receive_transfer, report_transfer};
use super::serve::nbd::unix_uri;
use super::serve::saving::{self, ServedPool};
use super::socket::bind;
use super::socket_names::SocketNames;
use crate::control_socket::{
    CONTROL_MODE, ControlCommand, LookRequest, StatsFormat, ask, ask_with,
};
use crate::disk_spec::DiskCommand;
use crate::size::human_size;

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
        ControlCommand::Look(wanted) => return look(socket, wanted, *json),
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

fn absolute(path: &Path) -> PathBuf {
    std::path::absolute(path).unwrap_or_else(|_| path.to_owned())
}

/// Makes a socket, and lets the other process serve a look there. A child removes the socket's name
/// when the look has ended, because the other process may lack the right to.
fn look(control: &Path, wanted: &LookRequest, json: bool) -> Result<(), CommandError> {
    let (listener, name) = bind(&wanted.socket, CONTROL_MODE)?;
    let mut names = SocketNames::default();
    names.add(name);
    let scratch = wanted.scratch.then(scratch_file).transpose()?;
    let kept = names.give_away().map_err(CommandError::failed)?;
    let mut files = vec![listener.as_fd()];
    files.extend(scratch.as_ref().map(AsFd::as_fd));
    files.extend(kept.as_ref().map(AsFd::as_fd));
    let command = ControlCommand::Look(LookRequest {
        socket: absolute(&wanted.socket),
        ..wanted.clone()
    });
    let answer = ask_with(control, &command, &files, &mut |_, _| {});
    let answer = answer.map_err(CommandError::Failed)?;
    let socket = text(&answer["socket"]);
    let uri = unix_uri(Path::new(&socket), &text(&answer["export"]));
    let line = if json {
        let mut answer = answer;
        answer["uri"] = uri.into();
        format!("{answer}\n")
    } else {
        format!(
            "serving {} as of {}: {} at {uri}\n",
            text(&answer["disk"]),
            text(&answer["at"]),
            human_size(answer["size_bytes"].as_u64().unwrap_or(0)),
        )
    };
    let _ = std::io::stdout().write_all(line.as_bytes());
    Ok(())
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
    let served = ServedPool {
        config: Path::new(answer["config"].as_str().unwrap_or_default()),
        kind: kinds.next().unwrap_or(DiskCommand::Serve),
        disks: disks().map(|disk| text(&disk["spec"])).collect(),
    };
    let saved = saving::save(file, &served)?;
    // A daemon that has ended meanwhile reads the file when it starts.
    let _ = config(disks().map(|disk| text(&disk["disk"])).collect());
    let line = if json {
        let done = json!({ "config": file, "added": saved.added, "removed": saved.removed });
        format!("{done}\n")
    } else {
        let parts = [("added", saved.added), ("removed", saved.removed)];
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
    let (done, answer) = receive_transfer(output, force, |file, progress| {
        let answer = ask_with(socket, command, &[file.as_fd()], progress);
        answer.map_err(CommandError::Failed)
    })?;
    let disk = text(&answer["disk"]);
    let said = format!("{}: exported {disk}", output.display());
    report_transfer(json, Path::new(&disk), ("raw", output), done, &said);
    Ok(())
}
