//! Requests and answers as lines of JSON.

use std::collections::BTreeMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use clap::builder::{BoolValueParser, TypedValueParser};
use clap::{ArgAction, Args, Subcommand, ValueEnum};
use serde::de::value::{MapAccessDeserializer, MapDeserializer};
use serde::de::{self, Deserializer, IntoDeserializer};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value, json};
use walvisor_devices::throttle::MAX_WEIGHT;
use walvisor_storage::Point;

use super::lines::{MAX_DEPTH, depth};
use crate::point::unix_us;
use crate::size::parse_size;

/// Why a request failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct ControlError {
    class: &'static str,
    text: String,
}

impl ControlError {
    /// The request is wrong, or failed.
    pub fn new(text: impl Display) -> Self {
        Self::of("GenericError", text)
    }

    /// A request about the disk of this name failed.
    pub(super) fn at_disk(name: &str, error: impl Display) -> Self {
        Self::new(format_args!("disk '{name}': {error}"))
    }

    /// There is no such command.
    fn unknown_command(text: impl Display) -> Self {
        Self::of("CommandNotFound", text)
    }

    /// There is no such disk.
    pub fn no_such_disk(text: impl Display) -> Self {
        Self::of("DeviceNotFound", text)
    }

    fn of(class: &'static str, text: impl Display) -> Self {
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
pub enum StatsFormat {
    /// As JSON.
    #[default]
    Json,
    /// As Prometheus text, in `text`.
    Prometheus,
}

impl StatsFormat {
    /// What `--prometheus` asks for.
    fn of_flag(prometheus: bool) -> Self {
        if prometheus {
            Self::Prometheus
        } else {
            Self::Json
        }
    }
}

/// The cache modes that a disk in use can be set to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum CacheChoice {
    /// A completed write may be in memory until a FLUSH
    Writeback,
    /// A write completes when it is durable
    Writethrough,
}

/// What `--disk` is.
const DISK: &str = "The disk's name in stats (its serial=, else its path=), or that of its export; \
                    optional if there is only one disk, or only one log for a request about a log";

/// Which disk: its name, as `--disk` takes it, or its image and its log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum DiskChoice {
    /// The name.
    Name(String),
    /// Absolute paths. However they are written, they count as what they name.
    Image {
        /// The image.
        #[serde(serialize_with = "lossy")]
        image: PathBuf,
        /// The log's directory.
        #[serde(serialize_with = "lossy")]
        log: PathBuf,
    },
}

impl From<&str> for DiskChoice {
    fn from(name: &str) -> Self {
        Self::Name(name.to_owned())
    }
}

/// A change of a disk's limits. A limit that is not given stays, and 0 removes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, Args)]
#[serde(deny_unknown_fields)]
pub struct LimitChange {
    /// Which disk.
    #[arg(long, value_name = "NAME", help = DISK)]
    pub disk: Option<String>,
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

/// What to look at, and where. The descriptor of a listening socket comes with the request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Args)]
#[serde(deny_unknown_fields)]
pub struct LookRequest {
    /// Which disk.
    #[arg(long, value_name = "NAME", help = DISK)]
    pub disk: Option<DiskChoice>,
    /// The point: cid:N, lsn:N, snapshot:NAME, a time such as 12:03, 'yesterday 12:03' or
    /// 2026-11-22T12:03:00Z, a time before now such as -15m, or newest
    #[arg(
        long,
        value_name = "AT",
        default_value = NEWEST,
        allow_hyphen_values = true,
        value_parser = point_text
    )]
    #[serde(default = "newest")]
    pub at: String,
    /// The Unix socket to create for NBD clients; only this user can connect. Several looks can be
    /// open, each on its own
    #[arg(long, value_name = "SOCKET")]
    #[serde(serialize_with = "lossy")]
    pub socket: PathBuf,
    /// Allow writes, which go to an unnamed file in TMPDIR or /var/tmp that is gone when the look
    /// ends
    #[arg(long)]
    #[serde(default)]
    pub scratch: bool,
    /// Keep the look open when its last client is gone
    #[arg(long)]
    #[serde(default)]
    pub keep: bool,
}

/// A request: a line of the protocol, and a subcommand of `walvisor ctl`. What only the client uses
/// is not in the line, and what only the line has is no argument of the subcommand. A hidden
/// subcommand is what `walvisor disk` asks for, for clients that see the socket and not the disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Subcommand)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum ControlCommand {
    /// Show counters and the current state
    Stats {
        /// As Prometheus text
        #[arg(
            long = "prometheus",
            conflicts_with = "json",
            action = ArgAction::SetTrue,
            value_parser = BoolValueParser::new().map(StatsFormat::of_flag)
        )]
        #[serde(default)]
        format: StatsFormat,
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
    #[command(hide = true)]
    Resize {
        /// Which disk.
        #[arg(long, value_name = "NAME", help = DISK)]
        disk: Option<DiskChoice>,
        /// Its new size, with K, M, G or T
        #[arg(long = "size", value_name = "SIZE", value_parser = parse_size)]
        size_bytes: u64,
    },
    /// Change the cache mode of a disk in use
    #[serde(rename = "cache")]
    #[command(name = "cache", alias = "set-cache")]
    SetCache {
        /// The mode
        #[arg(value_enum, value_name = "MODE")]
        cache: CacheChoice,
        /// Which disk.
        #[arg(long, value_name = "NAME", help = DISK)]
        disk: Option<String>,
    },
    /// Set or remove limits of a disk; limits that are not named stay
    #[serde(rename = "limits")]
    #[command(name = "limits", alias = "set-limit")]
    SetLimit(LimitChange),
    /// Copy the log to the base images, while requests go on
    #[command(hide = true)]
    Checkpoint {
        /// Which disk: all of its log are copied. Without one, all logs.
        #[arg(long, value_name = "NAME", help = DISK)]
        disk: Option<DiskChoice>,
        /// Do it although the log keeps history, which is lost then, of all its disks
        #[arg(long)]
        #[serde(default)]
        give_up_history: bool,
    },
    /// Copy a disk, as of one moment, to a new raw image, while requests go on
    #[command(hide = true)]
    Export {
        /// Which disk.
        #[arg(long, value_name = "NAME", help = DISK)]
        disk: Option<DiskChoice>,
        /// The point to export instead of now, as for 'look'
        #[arg(long, value_name = "AT", allow_hyphen_values = true, value_parser = point_text)]
        at: Option<String>,
        /// The raw image to create
        #[arg(long, short, value_name = "FILE")]
        #[serde(skip)]
        output: PathBuf,
        /// Replace FILE if it exists
        #[arg(long)]
        #[serde(skip)]
        force: bool,
    },
    /// Name the current state of all disks of the disk's log; the log keeps what is needed to
    /// restore it
    #[command(hide = true)]
    Snapshot {
        /// The snapshot's name
        #[arg(value_name = "NAME")]
        name: String,
        /// Of this disk only: the log keeps nothing of its other disks for the snapshot
        #[arg(long)]
        #[serde(default)]
        alone: bool,
        /// Which disk.
        #[arg(long, value_name = "NAME", help = DISK)]
        disk: Option<DiskChoice>,
    },
    /// List the snapshots of the disk's log, and how much history it keeps
    #[command(hide = true)]
    Snapshots {
        /// Which disk.
        #[arg(long, value_name = "NAME", help = DISK)]
        disk: Option<DiskChoice>,
    },
    /// Delete a snapshot of the disk's log
    #[command(hide = true)]
    SnapshotDelete {
        /// The snapshot's name
        #[arg(value_name = "NAME")]
        name: String,
        /// Which disk.
        #[arg(long, value_name = "NAME", help = DISK)]
        disk: Option<DiskChoice>,
    },
    /// Hold a log for the client to read, until the client leaves: 'walvisor disk' and 'walvisor
    /// log' ask for it.
    #[command(skip)]
    Hold {
        /// The log's directory, an absolute path.
        #[serde(serialize_with = "lossy")]
        log: PathBuf,
    },
    /// Make a paused disk what it was at a point, at once; its current contents stay a point of the
    /// log. Whoever uses the disk must read it again
    #[command(hide = true)]
    Restore {
        /// The point, as for 'look'
        #[arg(long, value_name = "AT", allow_hyphen_values = true, value_parser = point_text)]
        at: String,
        /// Which disk.
        #[arg(long, value_name = "NAME", help = DISK)]
        disk: Option<DiskChoice>,
    },
    /// Write a mark into the disk's log: a text that names this moment, which 'log dump' shows
    #[command(hide = true)]
    Mark {
        /// One line of 1 to 256 bytes, without control characters
        text: String,
        /// Which disk.
        #[arg(long, value_name = "NAME", help = DISK)]
        disk: Option<DiskChoice>,
    },
    /// Change how much history the disk's log keeps: off, all, a time such as 24h, or a size such
    /// as 50G
    #[command(hide = true)]
    SetRetain {
        /// How much
        retain: String,
        /// Which disk.
        #[arg(long, value_name = "NAME", help = DISK)]
        disk: Option<DiskChoice>,
        /// Do it although it is less than the log keeps now, of all its disks
        #[arg(long)]
        #[serde(default)]
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
        #[arg(value_name = "NAME")]
        disk: String,
        /// Leave the image as it is, even if it fails or does not answer: what it lacks stays in a
        /// file beside the log until the disk is added again
        #[arg(long)]
        #[serde(default)]
        keep_records: bool,
    },
    /// Write to the daemon's configuration file which disks it serves
    #[command(name = "save-config", alias = "save")]
    Config {
        /// The file of its --config
        #[serde(skip)]
        file: PathBuf,
        /// The disks that the file describes by now.
        #[arg(skip)]
        #[serde(default)]
        saved: Vec<String>,
    },
    /// Serve a disk in use as of a point, over NBD, read-only without --scratch, until its last
    /// client is gone
    #[command(hide = true)]
    Look(LookRequest),
    /// End a look
    Unlook {
        /// Its socket, or its disk's name
        #[arg(value_name = "SOCKET")]
        #[serde(serialize_with = "lossy")]
        look: PathBuf,
    },
    /// List the open looks
    Looks {},
    /// List the exports under way, and how far they are
    Exports {},
    /// End the exports of a disk; what they have copied is removed
    ExportCancel {
        /// The disk's name in stats
        #[arg(value_name = "NAME")]
        disk: String,
    },
    /// Shut down: press the guest's power button, or stop serving, then flush and close the disks
    Shutdown {
        /// Stop the guest without asking it to power off
        #[arg(long)]
        #[serde(default)]
        now: bool,
    },
}

/// A size that may be zero.
fn parse_rate(text: &str) -> Result<u64, String> {
    match text {
        "0" => Ok(0),
        text => parse_size(text).map_err(|error| error.to_string()),
    }
}

/// A point in the form that means the same wherever it is read: a time on this machine's clock
/// becomes one of UTC.
fn point_text(text: &str) -> walvisor_storage::Result<String> {
    text.parse().map(|point: Point| point.to_string())
}

/// The point that is now.
pub(super) const NEWEST: &str = "newest";

fn newest() -> String {
    NEWEST.to_owned()
}

/// Writes a path with replacements for what is not UTF-8.
fn lossy<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&path.display())
}

/// What serde knows instead of a name: those of all commands, or of the arguments of one.
#[derive(Debug, thiserror::Error)]
#[error("there are {}", .0.join(", "))]
struct KnownNames(&'static [&'static str]);

impl de::Error for KnownNames {
    fn custom<T: Display>(_: T) -> Self {
        Self(&[])
    }

    fn unknown_variant(_: &str, names: &'static [&'static str]) -> Self {
        Self(names)
    }

    fn unknown_field(_: &str, names: &'static [&'static str]) -> Self {
        Self(names)
    }
}

impl ControlCommand {
    /// The names of all commands.
    pub fn names() -> &'static [&'static str] {
        Self::known("".into_deserializer())
    }

    /// The names of a command's arguments.
    pub fn arguments(name: &str) -> &'static [&'static str] {
        let nameless = BTreeMap::from([("", "")]);
        let command = MapDeserializer::new([(name, nameless)].into_iter());
        Self::known(MapAccessDeserializer::new(command))
    }

    /// The names that serde expects in place of one.
    fn known<'a>(wrong: impl Deserializer<'a, Error = KnownNames>) -> &'static [&'static str] {
        match Self::deserialize(wrong) {
            Err(KnownNames(names)) => names,
            Ok(_) => &[],
        }
    }

    /// The request as a line, without its line end.
    pub fn to_line(&self) -> String {
        let command = json!(self);
        let mut parts = command.as_object().into_iter().flatten();
        let (name, arguments) = parts.next().expect("a name and its arguments");
        json!({ "execute": name, "arguments": arguments }).to_string()
    }

    fn from_parts(name: &str, arguments: Map<String, Value>) -> Result<Self, ControlError> {
        let names = Self::names();
        if !names.contains(&name) {
            let name: String = name.chars().take(80).collect();
            return Err(ControlError::unknown_command(format_args!(
                "unknown command '{name}': {}",
                KnownNames(names)
            )));
        }
        let command = Map::from_iter([(name.to_owned(), arguments.into())]);
        serde_json::from_value(command.into())
            .map_err(|error| ControlError::new(format_args!("arguments of {name}: {error}")))
    }
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
