//! Requests and answers as lines of JSON.

use std::time::SystemTime;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use walvisor_devices::throttle::MAX_WEIGHT;

use super::lines::{MAX_DEPTH, depth};
use crate::point::unix_us;

/// How many commits `points` lists by default, and at most.
pub const FEW_POINTS: usize = 20;
/// See [`FEW_POINTS`].
pub const MOST_POINTS: usize = 10_000;

/// The names of all commands.
pub const COMMANDS: [&str; 24] = [
    "stats",
    "pause",
    "resume",
    "resize",
    "set-cache",
    "set-limit",
    "checkpoint",
    "export",
    "snapshot",
    "snapshots",
    "snapshot-delete",
    "points",
    "restore",
    "mark",
    "set-retain",
    "look",
    "unlook",
    "looks",
    "exports",
    "export-cancel",
    "add-disk",
    "remove-disk",
    "config",
    "shutdown",
];

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct ControlError {
    class: &'static str,
    text: String,
}

impl ControlError {
    /// The request is wrong, or failed.
    pub fn new(text: impl std::fmt::Display) -> Self {
        Self::of("GenericError", text)
    }

    /// There is no such command.
    fn unknown_command(text: impl std::fmt::Display) -> Self {
        Self::of("CommandNotFound", text)
    }

    /// There is no such disk.
    pub fn no_such_disk(text: impl std::fmt::Display) -> Self {
        Self::of("DeviceNotFound", text)
    }

    fn of(class: &'static str, text: impl std::fmt::Display) -> Self {
        let text = text.to_string().replace('\n', " ");
        Self { class, text }
    }

    fn to_json(&self) -> Value {
        json!({ "class": self.class, "desc": self.text })
    }
}

/// The format of statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// As JSON.
    #[default]
    Json,
    /// As Prometheus text, in `text`.
    Prometheus,
}

/// The cache modes that a disk in use can be set to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum CacheChoice {
    /// A completed write may be in memory until a FLUSH
    Writeback,
    /// A write completes when it is durable
    Writethrough,
}

/// A change of a disk's limits. A limit that is not given stays, and 0 removes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::Args)]
#[serde(deny_unknown_fields)]
pub struct LimitChange {
    /// Operations per second; 0: no limit
    #[arg(long, value_name = "N")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ops_per_second: Option<u64>,
    /// Operations that may pass at once after an idle time [default: the limit of one second]
    #[arg(long, value_name = "N")]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ops_burst: Option<u64>,
    /// Bytes read and written per second, with K, M or G; 0: no limit
    #[arg(long, value_name = "SIZE", value_parser = parse_rate)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_per_second: Option<u64>,
    /// Bytes that may pass at once after an idle time, with K, M or G [default: the limit of one
    /// second]
    #[arg(long, value_name = "SIZE", value_parser = parse_rate)]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_burst: Option<u64>,
    /// Part of a thread beside other disks that have work, 1 to 1000
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(MAX_WEIGHT)))]
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u16>,
}

/// A size that may be zero.
fn parse_rate(text: &str) -> Result<u64, String> {
    match text {
        "0" => Ok(0),
        text => crate::size::parse_size(text).map_err(|error| error.to_string()),
    }
}

/// What to look at, and where.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LookRequest {
    /// The disk's name.
    pub disk: Option<String>,
    /// The point, as `at=` accepts it.
    #[serde(default = "newest")]
    pub at: String,
    /// Where the socket that comes with the request is bound. It identifies the look.
    pub socket: String,
    /// The look can be written. The descriptor of an empty file for the writes follows that of the
    /// socket.
    #[serde(default)]
    pub scratch: bool,
    /// The look stays open when its last client is gone.
    #[serde(default)]
    pub keep: bool,
}

fn newest() -> String {
    "newest".to_owned()
}

/// A request. Its disk may be left out if there is only one or, if the request is about a log, if
/// there is only one log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlCommand {
    /// Report counters and the current state.
    Stats(Format),
    /// Stop the vCPUs, and wait until the disks have no requests in flight.
    Pause {
        /// Pause only this disk; the vCPUs go on.
        disk: Option<String>,
    },
    /// Continue after a pause.
    Resume {
        /// Let only this disk go on.
        disk: Option<String>,
    },
    /// Grow a disk.
    Resize {
        /// Its name.
        disk: Option<String>,
        /// Its new size in bytes.
        size_bytes: u64,
    },
    /// Change the cache mode of a disk.
    SetCache {
        /// Its name.
        disk: Option<String>,
        /// The mode.
        cache: CacheChoice,
    },
    /// Change the limits of a disk.
    SetLimit {
        /// Its name.
        disk: Option<String>,
        /// The limits.
        limits: LimitChange,
    },
    /// Copy the log to the base images: of one disk's log, or of all logs.
    Checkpoint {
        /// The disk's name.
        disk: Option<String>,
        /// Do it although its log keeps history, which is lost then.
        give_up_history: bool,
    },
    /// Copy a disk, as of one moment, to the file whose descriptor comes with the request.
    Export {
        /// Its name.
        disk: Option<String>,
        /// The point, as `at=` accepts it; `None`: now.
        at: Option<String>,
    },
    /// Name the current state of all disks of a disk's log, or of this disk only.
    Snapshot {
        /// The disk's name.
        disk: Option<String>,
        /// The snapshot's name.
        name: String,
        /// Of this disk only.
        alone: bool,
    },
    /// Report the snapshots of a disk's log, and how much history it keeps.
    Snapshots {
        /// The disk's name.
        disk: Option<String>,
    },
    /// Delete a snapshot of a disk's log.
    SnapshotDelete {
        /// The disk's name.
        disk: Option<String>,
        /// The snapshot's name.
        name: String,
    },
    /// Report the points of a disk's history.
    Points {
        /// The disk's name.
        disk: Option<String>,
        /// How many of the newest commits to list.
        most: usize,
    },
    /// Make a paused disk what it was at a point.
    Restore {
        /// The disk's name.
        disk: Option<String>,
        /// The point, as `at=` takes it.
        at: String,
    },
    /// Write a mark into a disk's log.
    Mark {
        /// The disk's name.
        disk: Option<String>,
        /// Its text.
        text: String,
    },
    /// Change how much history a disk's log keeps.
    SetRetain {
        /// The disk's name.
        disk: Option<String>,
        /// How much, as the key `retain=` accepts it.
        retain: String,
        /// Whether history that is kept now may be lost by it.
        give_up_history: bool,
    },
    /// Open another disk and serve it.
    AddDisk {
        /// The disk, as on the command line of the daemon.
        spec: String,
    },
    /// Stop serving a disk and close it.
    RemoveDisk {
        /// Its name.
        disk: String,
        /// What its image lacks stays beside the log, and the image is left as it is.
        keep_records: bool,
    },
    /// Report the daemon's configuration file, and the disks that it has to describe.
    Config {
        /// The disks that it describes by now.
        saved: Vec<String>,
    },
    /// Serve a disk as of a point, on the listening socket whose descriptor comes with the request.
    Look(LookRequest),
    /// End a look.
    Unlook {
        /// Its socket, or its disk's name.
        look: String,
    },
    /// Report the open looks.
    Looks,
    /// Report the exports under way.
    Exports,
    /// End the exports of a disk.
    ExportCancel {
        /// Its name.
        disk: String,
    },
    /// End the process.
    Shutdown {
        /// Whether to end without asking the guest to power off.
        now: bool,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Envelope {
    execute: String,
    #[serde(default)]
    arguments: Map<String, Value>,
    #[serde(default)]
    id: Option<Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NoArguments {}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StatsArguments {
    #[serde(default)]
    format: Format,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DiskOnly {
    disk: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CheckpointArguments {
    disk: Option<String>,
    #[serde(default)]
    give_up_history: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExportArguments {
    disk: Option<String>,
    at: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SnapshotArguments {
    disk: Option<String>,
    name: String,
    #[serde(default)]
    alone: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SnapshotDeleteArguments {
    disk: Option<String>,
    name: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PointsArguments {
    disk: Option<String>,
    #[serde(default = "few")]
    most: usize,
}

/// How many commits `points` lists if the client names no number.
fn few() -> usize {
    FEW_POINTS
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RestoreArguments {
    disk: Option<String>,
    at: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MarkArguments {
    disk: Option<String>,
    text: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RetainArguments {
    disk: Option<String>,
    retain: String,
    #[serde(default)]
    give_up_history: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct UnlookArguments {
    look: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ResizeArguments {
    disk: Option<String>,
    size_bytes: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CacheArguments {
    disk: Option<String>,
    cache: CacheChoice,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AddArguments {
    spec: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RemoveArguments {
    disk: String,
    #[serde(default)]
    keep_records: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConfigArguments {
    #[serde(default)]
    saved: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NamedDisk {
    disk: String,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ShutdownArguments {
    #[serde(default)]
    now: bool,
}

impl ControlCommand {
    /// The request as a line, without its line end.
    pub fn to_line(&self) -> String {
        let (name, arguments) = match self {
            Self::Stats(format) => ("stats", json!({ "format": format })),
            Self::Pause { disk } => ("pause", json!({ "disk": disk })),
            Self::Resume { disk } => ("resume", json!({ "disk": disk })),
            Self::Resize { disk, size_bytes } => {
                ("resize", json!({ "disk": disk, "size_bytes": size_bytes }))
            }
            Self::SetCache { disk, cache } => {
                ("set-cache", json!({ "disk": disk, "cache": cache }))
            }
            Self::SetLimit { disk, limits } => {
                let mut arguments = json!(limits);
                arguments["disk"] = json!(disk);
                ("set-limit", arguments)
            }
            Self::Checkpoint {
                disk,
                give_up_history,
            } => {
                let arguments = json!({ "disk": disk, "give_up_history": give_up_history });
                ("checkpoint", arguments)
            }
            Self::Export { disk, at } => ("export", json!({ "disk": disk, "at": at })),
            Self::Snapshot { disk, name, alone } => {
                let arguments = json!({ "disk": disk, "name": name, "alone": alone });
                ("snapshot", arguments)
            }
            Self::Snapshots { disk } => ("snapshots", json!({ "disk": disk })),
            Self::SnapshotDelete { disk, name } => {
                ("snapshot-delete", json!({ "disk": disk, "name": name }))
            }
            Self::Points { disk, most } => ("points", json!({ "disk": disk, "most": most })),
            Self::Restore { disk, at } => ("restore", json!({ "disk": disk, "at": at })),
            Self::Mark { disk, text } => ("mark", json!({ "disk": disk, "text": text })),
            Self::SetRetain {
                disk,
                retain,
                give_up_history,
            } => (
                "set-retain",
                json!({ "disk": disk, "retain": retain, "give_up_history": give_up_history }),
            ),
            Self::AddDisk { spec } => ("add-disk", json!({ "spec": spec })),
            Self::RemoveDisk { disk, keep_records } => (
                "remove-disk",
                json!({ "disk": disk, "keep_records": keep_records }),
            ),
            Self::Config { saved } => ("config", json!({ "saved": saved })),
            Self::Look(request) => ("look", json!(request)),
            Self::Unlook { look } => ("unlook", json!({ "look": look })),
            Self::Looks => ("looks", json!({})),
            Self::Exports => ("exports", json!({})),
            Self::ExportCancel { disk } => ("export-cancel", json!({ "disk": disk })),
            Self::Shutdown { now } => ("shutdown", json!({ "now": now })),
        };
        json!({ "execute": name, "arguments": arguments }).to_string()
    }

    fn from_parts(name: &str, mut arguments: Map<String, Value>) -> Result<Self, ControlError> {
        fn read<T: DeserializeOwned>(
            name: &str,
            arguments: Map<String, Value>,
        ) -> Result<T, ControlError> {
            serde_json::from_value(Value::Object(arguments))
                .map_err(|error| ControlError::new(format_args!("arguments of {name}: {error}")))
        }
        if !COMMANDS.contains(&name) {
            let name: String = name.chars().take(80).collect();
            return Err(ControlError::unknown_command(format_args!(
                "unknown command '{name}': there are {}",
                COMMANDS.join(", ")
            )));
        }
        Ok(match name {
            "stats" => Self::Stats(read::<StatsArguments>(name, arguments)?.format),
            "pause" => {
                let DiskOnly { disk } = read(name, arguments)?;
                Self::Pause { disk }
            }
            "resume" => {
                let DiskOnly { disk } = read(name, arguments)?;
                Self::Resume { disk }
            }
            "resize" => {
                let ResizeArguments { disk, size_bytes } = read(name, arguments)?;
                Self::Resize { disk, size_bytes }
            }
            "set-cache" => {
                let CacheArguments { disk, cache } = read(name, arguments)?;
                Self::SetCache { disk, cache }
            }
            "set-limit" => {
                let disk = arguments.remove("disk").unwrap_or_default();
                let disk = serde_json::from_value(disk).map_err(|error| {
                    ControlError::new(format_args!("arguments of {name}: disk: {error}"))
                })?;
                let limits = read(name, arguments)?;
                Self::SetLimit { disk, limits }
            }
            "checkpoint" => {
                let CheckpointArguments {
                    disk,
                    give_up_history,
                } = read(name, arguments)?;
                Self::Checkpoint {
                    disk,
                    give_up_history,
                }
            }
            "export" => {
                let ExportArguments { disk, at } = read(name, arguments)?;
                Self::Export { disk, at }
            }
            "snapshot" => {
                let SnapshotArguments { disk, name, alone } = read(name, arguments)?;
                Self::Snapshot { disk, name, alone }
            }
            "snapshot-delete" => {
                let SnapshotDeleteArguments { disk, name } = read(name, arguments)?;
                Self::SnapshotDelete { disk, name }
            }
            "snapshots" => {
                let DiskOnly { disk } = read(name, arguments)?;
                Self::Snapshots { disk }
            }
            "points" => {
                let PointsArguments { disk, most } = read(name, arguments)?;
                if most > MOST_POINTS {
                    return Err(ControlError::new(format_args!(
                        "points: most {most}: give at most {MOST_POINTS}"
                    )));
                }
                Self::Points { disk, most }
            }
            "restore" => {
                let RestoreArguments { disk, at } = read(name, arguments)?;
                Self::Restore { disk, at }
            }
            "mark" => {
                let MarkArguments { disk, text } = read(name, arguments)?;
                Self::Mark { disk, text }
            }
            "set-retain" => {
                let RetainArguments {
                    disk,
                    retain,
                    give_up_history,
                } = read(name, arguments)?;
                Self::SetRetain {
                    disk,
                    retain,
                    give_up_history,
                }
            }
            "add-disk" => {
                let AddArguments { spec } = read(name, arguments)?;
                Self::AddDisk { spec }
            }
            "remove-disk" => {
                let RemoveArguments { disk, keep_records } = read(name, arguments)?;
                Self::RemoveDisk { disk, keep_records }
            }
            "config" => {
                let ConfigArguments { saved } = read(name, arguments)?;
                Self::Config { saved }
            }
            "look" => Self::Look(read(name, arguments)?),
            "unlook" => {
                let UnlookArguments { look } = read(name, arguments)?;
                Self::Unlook { look }
            }
            "looks" => read(name, arguments).map(|NoArguments {}| Self::Looks)?,
            "exports" => read(name, arguments).map(|NoArguments {}| Self::Exports)?,
            "export-cancel" => {
                let NamedDisk { disk } = read(name, arguments)?;
                Self::ExportCancel { disk }
            }
            "shutdown" => {
                let ShutdownArguments { now } = read(name, arguments)?;
                Self::Shutdown { now }
            }
            _ => unreachable!("the list of commands has no other"),
        })
    }
}

/// A line that a client has sent.
pub(super) struct ControlRequest {
    /// The id that the answer carries too.
    id: Option<Value>,
    /// The command, or why the line holds none.
    pub(super) command: Result<ControlCommand, ControlError>,
}

impl ControlRequest {
    /// Parses a line.
    pub(super) fn parse(line: &[u8]) -> Self {
        // The parser calls itself for each level, and so does all that is done with a value.
        if depth(line) > MAX_DEPTH {
            return Self::refused(ControlError::new(format_args!(
                "not a request: its arrays and objects are nested more than {MAX_DEPTH} deep: no \
                 command takes that"
            )));
        }
        match serde_json::from_slice::<Envelope>(line) {
            Ok(Envelope {
                execute,
                arguments,
                id,
            }) => Self {
                id,
                command: ControlCommand::from_parts(&execute, arguments),
            },
            Err(error) => Self::refused(ControlError::new(format_args!(
                "not a request: {error}; send a line such as {{\"execute\": \"stats\"}}"
            ))),
        }
    }

    /// A request whose line cannot be read at all.
    pub(super) fn refused(error: ControlError) -> Self {
        Self {
            id: None,
            command: Err(error),
        }
    }

    /// The line that answers the request, with its line end.
    pub(super) fn answer(&self, outcome: Result<Value, ControlError>) -> Vec<u8> {
        let mut answer = match outcome {
            Ok(value) => json!({ "return": value }),
            Err(error) => json!({ "error": error.to_json() }),
        };
        if let Some(id) = &self.id {
            answer["id"] = id.clone();
        }
        let mut line = answer.to_string().into_bytes();
        line.push(b'\n');
        line
    }
}

/// The event that tells a client how far its export is, as a line with its line end.
pub(super) fn export_progress(passed: u64, total: u64) -> Vec<u8> {
    let now = unix_us(SystemTime::now());
    let event = json!({
        "event": "EXPORT_PROGRESS",
        "data": { "passed_bytes": passed, "total_bytes": total },
        "timestamp": { "seconds": now / 1_000_000, "microseconds": now % 1_000_000 },
    });
    format!("{event}\n").into_bytes()
}

#[cfg(test)]
mod tests;
