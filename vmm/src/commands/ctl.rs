//! `walvisor ctl`: controls a running `walvisor run` or `walvisor serve`, or asks for its statistics.

use std::io::Write;
use std::path::PathBuf;
use std::time::SystemTime;

use clap::{Args, Subcommand};
use serde_json::Value;

use super::CommandError;
use crate::control_socket::{CacheChoice, ControlCommand, Format, LimitChange, ask};
use crate::metrics::unix_us;
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
    /// Stop the vCPUs, and wait for the disks' requests in flight
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
    /// Copy logs to the base images, while requests go on
    Checkpoint {
        /// Which disk
        #[command(flatten)]
        disk: DiskName,
    },
    /// Shut down: press the guest's power button, or stop serving; flush and close the disks
    Shutdown {
        /// Stop the guest without asking it
        #[arg(long)]
        now: bool,
    },
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
        CtlRequest::Checkpoint { disk } => ControlCommand::Checkpoint { disk: named(disk) },
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
    // A failed write is ignored: the reader has closed the pipe.
    let _ = std::io::stdout().write_all(text.as_bytes());
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

/// How a disk is: one word, or its trouble.
fn condition(told: &Value) -> String {
    let name = text(&told["name"]).replace('_', " ");
    let Some(since) = told["since_unix_us"].as_u64() else {
        return name;
    };
    let seconds = unix_us(SystemTime::now()).saturating_sub(since) / 1_000_000;
    let writes = match told["refuses_writes"].as_bool() {
        Some(true) => "writes fail",
        _ => "writes go on",
    };
    format!("{name} for {seconds} s, {writes}: {}", text(&told["error"]))
}

/// A disk, for people.
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
        condition(&disk["condition"]),
        list(disk, &requests),
        list(disk, &traffic),
    )
}

/// The statistics as a table for people.
fn table(stats: &Value) -> String {
    let seconds = stats["uptime_us"].as_u64().unwrap_or(0) / 1_000_000;
    let mut lines = format!(
        "{} {}: {}, up {seconds} s\n",
        text(&stats["kind"]),
        stats["pid"],
        text(&stats["state"])
    );
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
