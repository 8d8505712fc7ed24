//! `walvisor ctl`: controls a running `walvisor run` or `walvisor serve`, or asks for its
//! statistics.

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use clap::{Args, Subcommand};
use serde_json::Value;
use walvisor_storage::{Transfer, receive_image, scratch_file};

use super::CommandError;
use super::disk::report_transfer;
use super::serve::nbd::unix_uri;
use super::socket::bind;
use super::socket_names::SocketNames;
use crate::control_socket::{
    CONTROL_MODE, CacheChoice, ControlCommand, Format, LimitChange, LookRequest, ask, ask_with,
};
use crate::metrics::unix_us;
use crate::point::history_text;
use crate::progress::with_bar;
use crate::size::parse_size;

/// The arguments of `walvisor ctl`.
#[derive(Args, Debug)]
pub struct CtlArguments {
    /// The other process's --control socket
    pub socket: PathBuf,
    /// What is wanted.
    #[command(subcommand)]
    pub request: CtlRequest,
}

/// The requests.
#[derive(Debug, Subcommand)]
pub enum CtlRequest {
    /// Show counters and the current state
    Stats {
        /// As JSON
        #[arg(long, conflicts_with = "prometheus")]
        json: bool,
        /// As Prometheus text
        #[arg(long)]
        prometheus: bool,
    },
    /// Stop the vCPUs, and wait until the disks have no requests in flight
    Pause,
    /// Continue after a pause
    Resume,
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
        /// Print JSON
        #[arg(long)]
        json: bool,
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
    /// The disk's name in stats: its serial=, else its path=; optional if there is only one disk
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
        CtlRequest::Stats {
            prometheus: true, ..
        } => ControlCommand::Stats(Format::Prometheus),
        CtlRequest::Stats { .. } => ControlCommand::Stats(Format::Json),
        CtlRequest::Pause => ControlCommand::Pause,
        CtlRequest::Resume => ControlCommand::Resume,
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
            json,
        } => {
            let command = ControlCommand::Export {
                disk: named(disk),
                at: at.clone(),
            };
            return export(&arguments.socket, &command, output, *force, *json);
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
        CtlRequest::Restore { at, disk } => ControlCommand::Restore {
            disk: named(disk),
            at: at.clone(),
        },
        CtlRequest::Mark { text, disk } => ControlCommand::Mark {
            disk: named(disk),
            text: text.clone(),
        },
        CtlRequest::SetRetain { retain, disk } => ControlCommand::SetRetain {
            disk: named(disk),
            retain: retain.clone(),
        },
        CtlRequest::AddDisk { spec } => ControlCommand::AddDisk { spec: spec.clone() },
        CtlRequest::RemoveDisk { name } => ControlCommand::RemoveDisk { disk: name.clone() },
        CtlRequest::Look(wanted) => return look(&arguments.socket, wanted),
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
    let text = match &arguments.request {
        CtlRequest::Stats {
            prometheus: true, ..
        } => answer["text"].as_str().unwrap_or_default().to_owned(),
        CtlRequest::Stats { json: false, .. } => table(&answer),
        _ => format!("{answer}\n"),
    };
    // A failed write is fine: the reader has closed the pipe.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(())
}

fn absolute(path: &Path) -> String {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    path.to_string_lossy().into_owned()
}

/// Makes a socket, and lets the other process serve a look there. A child removes the socket's name
/// when the look has ended, because the other process may lack the right to.
fn look(control: &Path, wanted: &LookArguments) -> Result<(), CommandError> {
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
    let line = format!(
        "serving {} as of {}: {} bytes at {}\n",
        text(&answer["disk"]),
        text(&answer["at"]),
        answer["size_bytes"],
        unix_uri(Path::new(&socket), &text(&answer["export"]))
    );
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

/// A value without quotes.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// The values of these keys.
fn list(of: &Value, keys: &[&str]) -> String {
    let parts: Vec<_> = keys
        .iter()
        .map(|key| format!("{key} {}", of[key]))
        .collect();
    parts.join(", ")
}

/// The condition of a disk: one word, or its trouble.
fn condition_text(condition: &Value) -> String {
    let name = text(&condition["name"]).replace('_', " ");
    let Some(since) = condition["since_unix_us"].as_u64() else {
        return name;
    };
    let seconds = unix_us(SystemTime::now()).saturating_sub(since) / 1_000_000;
    let error = text(&condition["error"]);
    match (&condition["pauses_writes"], &condition["refuses_writes"]) {
        (Value::Bool(true), _) => format!("paused: {name} for {seconds} s: {error}"),
        (_, Value::Bool(true)) => format!("{name} for {seconds} s, writes fail: {error}"),
        _ => format!("{name} for {seconds} s, writes go on: {error}"),
    }
}

/// A disk as lines of text.
fn disk_lines(disk: &Value, indent: &str) -> String {
    let requests = [
        "requests",
        "reads",
        "writes",
        "flushes",
        "discards",
        "write_zeroes",
        "errors",
    ];
    let traffic = ["read_bytes", "written_bytes", "doorbells", "interrupts"];
    format!(
        "{indent}disk {}: {} bytes, {}, {}{}, {}\n{indent}  {}\n{indent}  {}\n",
        text(&disk["name"]),
        disk["size_bytes"],
        text(&disk["transport"]),
        text(&disk["cache"]),
        match disk["read_only"].as_bool() {
            Some(true) => ", read-only",
            _ => "",
        },
        condition_text(&disk["condition"]),
        list(disk, &requests),
        list(disk, &traffic),
    )
}

/// The statistics as a table.
fn table(stats: &Value) -> String {
    let seconds = stats["uptime_us"].as_u64().unwrap_or(0) / 1_000_000;
    let mut lines = format!(
        "{} {}: {}, up {seconds} s\n",
        text(&stats["kind"]),
        stats["pid"],
        text(&stats["state"])
    );
    let mib = |value: &Value| value.as_u64().map(|bytes| bytes >> 20);
    if let (Some(used), Some(limit)) = (
        mib(&stats["memory"]["used_bytes"]),
        mib(&stats["memory"]["limit_bytes"]),
    ) {
        lines += &format!("  memory: {used} of {limit} MiB\n");
    }
    if let Some(exits) = stats["exits"].as_object() {
        let sum = |counts: &Value| -> u64 {
            let counts = counts.as_array().into_iter().flatten();
            counts.filter_map(Value::as_u64).sum()
        };
        let parts: Vec<_> = exits
            .iter()
            .map(|(reason, counts)| format!("{reason} {}", sum(counts)))
            .collect();
        lines += &format!(
            "  exits of {} vCPUs: {}\n",
            stats["vcpus"],
            parts.join(", ")
        );
    }
    let all = |key: &str| stats[key].as_array().cloned().unwrap_or_default();
    let (disks, logs) = (all("disks"), all("logs"));
    for log in &logs {
        let counters = [
            "flushes",
            "groups",
            "syncs",
            "log_bytes",
            "checkpoints",
            "base_bytes",
        ];
        lines += &format!("log {}: {}\n", text(&log["path"]), list(log, &counters));
        if log["history"].is_object() {
            lines += &format!("  history: {}\n", history_text(&log["history"]));
        }
        for disk in disks
            .iter()
            .filter(|disk| disk["log"]["path"] == log["path"])
        {
            lines += &disk_lines(disk, "  ");
        }
    }
    for disk in disks.iter().filter(|disk| !disk["log"].is_object()) {
        lines += &disk_lines(disk, "");
    }
    lines
}
