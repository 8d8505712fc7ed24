//! `walvisor ctl`: controls a running `walvisor run` or `walvisor serve`, or asks for its
//! statistics.

pub(super) mod answer;

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use serde_json::json;
use walvisor_storage::{Transfer, receive_image, scratch_file};

use self::answer::{printable, text};
use super::CommandError;
use super::disk::report_transfer;
use super::serve::nbd::unix_uri;
use super::serve::saving::{self, ServedPool};
use super::socket::bind;
use super::socket_names::SocketNames;
use crate::control_socket::{
    CONTROL_MODE, CacheChoice, ControlCommand, FEW_POINTS, Format, LimitChange, LookRequest,
    MOST_POINTS, ask, ask_with,
};
use crate::disk_spec::DiskCommand;
use crate::progress::with_bar;
use crate::size::{human_size, parse_size};

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
    pub request: CtlRequest,
}

/// The requests.
#[derive(Debug, Subcommand)]
pub enum CtlRequest {
    /// Show counters and the current state
    Stats {
        /// As Prometheus text
        #[arg(long, conflicts_with = "json")]
        prometheus: bool,
    },
    /// Stop the vCPUs, and wait until the disks have no requests in flight
    Pause {
        /// Pause only this disk; the vCPUs and the other disks go on
        #[arg(long, value_name = "NAME")]
        disk: Option<String>,
    },
    /// Continue after a pause
    Resume {
        /// Let only this disk go on
        #[arg(long, value_name = "NAME")]
        disk: Option<String>,
    },
    /// Grow a disk in use
    Resize {
        /// Which disk
        #[command(flatten)]
        disk: DiskName,
        /// Its new size, with K, M, G or T
        #[arg(long, value_name = "SIZE", value_parser = parse_size)]
        size: u64,
    },
    /// Change the cache mode of a disk in use
    SetCache {
        /// The mode
        #[arg(value_enum)]
        mode: CacheChoice,
        /// Which disk
        #[command(flatten)]
        disk: DiskName,
    },
    /// Set or remove limits of a disk; limits that are not named stay
    SetLimit {
        /// Which disk
        #[command(flatten)]
        disk: DiskName,
        /// The limits
        #[command(flatten)]
        limits: LimitChange,
    },
    /// Copy the log to the base images, while requests go on
    Checkpoint {
        /// Which disk: all of its log are copied
        #[command(flatten)]
        disk: DiskName,
        /// Do it although the log keeps history, which is lost then, of all its disks
        #[arg(long)]
        give_up_history: bool,
    },
    /// Copy a disk, as of one moment, to a new raw image, while requests go on
    Export {
        /// Which disk
        #[command(flatten)]
        disk: DiskName,
        /// The point to export instead of now, as for 'look'
        #[arg(long, value_name = "AT", allow_hyphen_values = true)]
        at: Option<String>,
        /// The raw image to create
        #[arg(long, short, value_name = "FILE")]
        output: PathBuf,
        /// Replace FILE if it exists
        #[arg(long)]
        force: bool,
    },
    /// Name the current state of all disks of the disk's log; the log keeps what is needed to
    /// restore it
    Snapshot {
        /// The snapshot's name
        #[arg(value_name = "NAME")]
        snapshot: String,
        /// Of this disk only: the log keeps nothing of its other disks for the snapshot
        #[arg(long)]
        alone: bool,
        /// Which disk
        #[command(flatten)]
        disk: DiskName,
    },
    /// List the snapshots of the disk's log, and how much history it keeps
    Snapshots {
        /// Which disk
        #[command(flatten)]
        disk: DiskName,
    },
    /// Delete a snapshot of the disk's log
    SnapshotDelete {
        /// The snapshot's name
        #[arg(value_name = "NAME")]
        snapshot: String,
        /// Which disk
        #[command(flatten)]
        disk: DiskName,
    },
    /// List the points of a disk's history: its snapshots, marks and newest commits, and how far
    /// back it goes
    Points {
        /// Which disk
        #[command(flatten)]
        disk: DiskName,
        /// How many of the newest commits; older ones with marks are listed too, as many
        #[arg(long, value_name = "N", default_value_t = FEW_POINTS, value_parser = at_most_points)]
        newest: usize,
    },
    /// Make a paused disk what it was at a point, at once; its current contents stay a point of the
    /// log. Whoever uses the disk must read it again
    Restore {
        /// The point, as for 'look'
        #[arg(long, value_name = "AT", allow_hyphen_values = true)]
        at: String,
        /// Which disk
        #[command(flatten)]
        disk: DiskName,
    },
    /// Write a mark into the disk's log: a text that names this moment, which 'log dump' shows
    Mark {
        /// One line of 1 to 256 bytes, without control characters
        text: String,
        /// Which disk
        #[command(flatten)]
        disk: DiskName,
    },
    /// Change how much history the disk's log keeps: off, all, a time such as 24h, or a size such
    /// as 50G
    SetRetain {
        /// How much
        retain: String,
        /// Which disk
        #[command(flatten)]
        disk: DiskName,
        /// Do it although it is less than the log keeps now, of all its disks
        #[arg(long)]
        give_up_history: bool,
    },
    /// Open another disk and serve it; for daemons that were started with --disk-dir
    AddDisk {
        /// The disk, as on the daemon's command line; paths are the daemon's
        spec: String,
    },
    /// Stop serving a disk and close it: its clients get their outstanding replies and are
    /// disconnected
    RemoveDisk {
        /// The disk's name in stats
        name: String,
        /// Leave the image as it is, even if it fails or does not answer: what it lacks stays in a
        /// file beside the log until the disk is added again
        #[arg(long)]
        keep_records: bool,
    },
    /// Write to the daemon's configuration file which disks it serves
    Save {
        /// The file of its --config
        file: PathBuf,
    },
    /// Serve a disk in use as of a point, over NBD, read-only without --scratch, until its last
    /// client is gone
    Look(LookArguments),
    /// End a look
    Unlook {
        /// Its socket, or its disk's name
        #[arg(value_name = "SOCKET")]
        look: PathBuf,
    },
    /// List the open looks
    Looks,
    /// List the exports under way, and how far they are
    Exports,
    /// End the exports of a disk; what they have copied is removed
    ExportCancel {
        /// The disk's name in stats
        name: String,
    },
    /// Shut down: press the guest's power button, or stop serving, then flush and close the disks
    Shutdown {
        /// Stop the guest without asking it to power off
        #[arg(long)]
        now: bool,
    },
}

/// Parses the argument of `points --newest`.
fn at_most_points(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| *number <= MOST_POINTS);
    number.ok_or_else(|| format!("give a number up to {MOST_POINTS}"))
}

/// What to look at, and where.
#[derive(Args, Debug)]
pub struct LookArguments {
    /// Which disk
    #[command(flatten)]
    disk: DiskName,
    /// The point: cid:N, lsn:N, snapshot:NAME, time:2026-11-22T12:03:00Z, a time before now such as
    /// -15m, or newest
    #[arg(
        long,
        value_name = "AT",
        default_value = "newest",
        allow_hyphen_values = true
    )]
    at: String,
    /// The Unix socket to create for NBD clients; only this user can connect. Several looks can be
    /// open, each on its own
    #[arg(long = "socket", value_name = "SOCKET")]
    at_socket: PathBuf,
    /// Allow writes, which go to an unnamed file in TMPDIR or /var/tmp that is gone when the look
    /// ends
    #[arg(long)]
    scratch: bool,
    /// Keep the look open when its last client is gone
    #[arg(long)]
    keep: bool,
}

/// Which disk.
#[derive(Args, Debug)]
pub struct DiskName {
    /// The disk's name in stats (its serial=, else its path=), or that of its export; optional if
    /// there is only one disk, or only one log for a request about a log
    #[arg(long = "disk", value_name = "NAME")]
    name: Option<String>,
}

/// Sends the request, and prints its answer.
///
/// # Errors
/// If no process answers, or the request failed.
pub fn run(arguments: &CtlArguments) -> Result<(), CommandError> {
    let named = |disk: &DiskName| disk.name.clone();
    let command = match &arguments.request {
        CtlRequest::Stats { prometheus: true } => ControlCommand::Stats(Format::Prometheus),
        CtlRequest::Stats { .. } => ControlCommand::Stats(Format::Json),
        CtlRequest::Pause { disk } => ControlCommand::Pause { disk: disk.clone() },
        CtlRequest::Resume { disk } => ControlCommand::Resume { disk: disk.clone() },
        CtlRequest::Resize { disk, size } => ControlCommand::Resize {
            disk: named(disk),
            size_bytes: *size,
        },
        CtlRequest::SetCache { disk, mode } => ControlCommand::SetCache {
            disk: named(disk),
            cache: *mode,
        },
        CtlRequest::SetLimit { disk, limits } => ControlCommand::SetLimit {
            disk: named(disk),
            limits: *limits,
        },
        CtlRequest::Checkpoint {
            disk,
            give_up_history,
        } => ControlCommand::Checkpoint {
            disk: named(disk),
            give_up_history: *give_up_history,
        },
        CtlRequest::Export {
            disk,
            at,
            output,
            force,
        } => {
            let command = ControlCommand::Export {
                disk: named(disk),
                at: at.clone(),
            };
            return export(&arguments.socket, &command, output, *force, arguments.json);
        }
        CtlRequest::Snapshot {
            snapshot,
            alone,
            disk,
        } => ControlCommand::Snapshot {
            disk: named(disk),
            name: snapshot.clone(),
            alone: *alone,
        },
        CtlRequest::Snapshots { disk } => ControlCommand::Snapshots { disk: named(disk) },
        CtlRequest::SnapshotDelete { snapshot, disk } => ControlCommand::SnapshotDelete {
            disk: named(disk),
            name: snapshot.clone(),
        },
        CtlRequest::Points { disk, newest } => ControlCommand::Points {
            disk: named(disk),
            most: *newest,
        },
        CtlRequest::Restore { at, disk } => ControlCommand::Restore {
            disk: named(disk),
            at: at.clone(),
        },
        CtlRequest::Mark { text, disk } => ControlCommand::Mark {
            disk: named(disk),
            text: text.clone(),
        },
        CtlRequest::SetRetain {
            retain,
            disk,
            give_up_history,
        } => ControlCommand::SetRetain {
            disk: named(disk),
            retain: retain.clone(),
            give_up_history: *give_up_history,
        },
        CtlRequest::AddDisk { spec } => ControlCommand::AddDisk { spec: spec.clone() },
        CtlRequest::RemoveDisk { name, keep_records } => ControlCommand::RemoveDisk {
            disk: name.clone(),
            keep_records: *keep_records,
        },
        CtlRequest::Save { file } => return save(&arguments.socket, file, arguments.json),
        CtlRequest::Look(wanted) => return look(&arguments.socket, wanted, arguments.json),
        CtlRequest::Unlook { look } => ControlCommand::Unlook {
            look: match look.metadata().map(|found| found.file_type().is_socket()) {
                Ok(true) => absolute(look),
                _ => look.to_string_lossy().into_owned(),
            },
        },
        CtlRequest::Looks => ControlCommand::Looks,
        CtlRequest::Exports => ControlCommand::Exports,
        CtlRequest::ExportCancel { name } => ControlCommand::ExportCancel { disk: name.clone() },
        CtlRequest::Shutdown { now } => ControlCommand::Shutdown { now: *now },
    };
    let answer = ask(&arguments.socket, &command).map_err(CommandError::Failed)?;
    let shown = match &arguments.request {
        CtlRequest::Stats { prometheus: true } => text(&answer["text"]),
        _ if arguments.json => format!("{answer}\n"),
        request => answer::shown(request, &answer),
    };
    // A failed write is fine: the reader has closed the pipe.
    let _ = std::io::stdout().write_all(shown.as_bytes());
    Ok(())
}

fn absolute(path: &Path) -> String {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    path.to_string_lossy().into_owned()
}

/// Makes a socket, and lets the other process serve a look there. A child removes the socket's name
/// when the look has ended, because the other process may lack the right to.
fn look(control: &Path, wanted: &LookArguments, json: bool) -> Result<(), CommandError> {
    let (listener, name) = bind(&wanted.at_socket, CONTROL_MODE)?;
    let mut names = SocketNames::default();
    names.add(name);
    let scratch = wanted.scratch.then(scratch_file).transpose()?;
    let kept = names.give_away().map_err(CommandError::failed)?;
    let mut files = vec![listener.as_fd()];
    files.extend(scratch.as_ref().map(AsFd::as_fd));
    files.extend(kept.as_ref().map(AsFd::as_fd));
    let command = ControlCommand::Look(LookRequest {
        disk: wanted.disk.name.clone(),
        at: wanted.at.clone(),
        socket: absolute(&wanted.at_socket),
        scratch: wanted.scratch,
        keep: wanted.keep,
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
    let config = |saved| ask(socket, &ControlCommand::Config { saved });
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
    let answer = receive_image(output, force, |file| {
        let answer = with_bar("exporting", |progress| {
            ask_with(socket, command, &[file.as_fd()], progress)
        });
        answer.map_err(CommandError::Failed)
    })?;
    let bytes = |key: &str| answer[key].as_u64().unwrap_or(0);
    let done = Transfer {
        size: bytes("size_bytes"),
        copied: bytes("copied_bytes"),
        shared: false,
    };
    let disk = text(&answer["disk"]);
    let said = format!("{}: exported {disk}", output.display());
    report_transfer(json, Path::new(&disk), ("raw", output), done, &said);
    Ok(())
}
