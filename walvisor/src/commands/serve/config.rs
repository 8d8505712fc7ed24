//! `--config FILE`: the disks of a daemon as a TOML file, one table for each, with the keys of
//! `--disk`.
//!
//! ```toml
//! [defaults]                    # a disk takes those that fit its door and backend
//! memory-limit = "2G"           # of the process
//! metrics-listen = "127.0.0.1:9790"
//! door = "nbd"
//! socket = "/run/walvisor/pool/nbd.sock"
//! log = "/var/lib/walvisor/pool.wal"
//!
//! [[disk]]
//! path = "/var/lib/walvisor/a.img"
//!
//! [[disk]]
//! path = "/var/lib/walvisor/b.img"
//! readonly = true
//! ```

use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};

use toml_edit::{DocumentMut, Item, Table, TomlError, Value};
use walvisor_devices::nbd::Tls;

use super::daemon::announce;
use super::door::Doors;
use super::hotplug::Hotplug;
use crate::commands::CommandError;
use crate::commands::process::MetricsAddress;
use crate::control_socket::ControlledProcess;
use crate::disk_spec::{DiskCommand, DiskSpec};
use crate::disks;
use crate::landlock::AllowedPaths;
use crate::size::{human_size, parse_size};

/// The file that describes the disks of a daemon, as of the last reading.
pub(super) struct PoolFile {
    path: PathBuf,
    /// The door of a disk that names none.
    kind: DiskCommand,
    process: ProcessKeys,
    disks: Vec<PoolDisk>,
}

/// What the file says of the process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ProcessKeys {
    memory_limit: Option<u64>,
    metrics_listen: Option<MetricsAddress>,
}

/// A disk of the file.
#[derive(Clone)]
pub(super) struct PoolDisk {
    /// The texts of the file, defaults included. They are compared instead of the spec, because a
    /// point such as `-15m` parses differently each time.
    keys: Vec<(String, String)>,
    pub(super) spec: DiskSpec,
}

/// What the file says.
pub(super) struct PoolText {
    process: ProcessKeys,
    /// The keys for disks that lack them.
    pub(super) defaults: Vec<(String, String)>,
    pub(super) disks: Vec<PoolDisk>,
}

impl PoolFile {
    /// Reads the file.
    ///
    /// # Errors
    /// If it can't be read, is not TOML, or has a disk that is wrong.
    pub(super) fn open(path: &Path, kind: DiskCommand) -> Result<Self, CommandError> {
        let PoolText { process, disks, .. } = read(path, kind)?;
        let path = std::path::absolute(path).map_err(CommandError::failed)?;
        Ok(Self {
            path,
            kind,
            process,
            disks,
        })
    }

    /// Where the file is. An absolute path.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The memory limit of the process, if the file sets one.
    pub(super) fn memory_limit(&self) -> Option<u64> {
        self.process.memory_limit
    }

    /// Where metrics are served, if the file says so.
    pub(super) fn metrics_listen(&self) -> Option<&MetricsAddress> {
        self.process.metrics_listen.as_ref()
    }

    /// The disks.
    pub(super) fn disks(&self) -> impl Iterator<Item = &DiskSpec> {
        self.disks.iter().map(|disk| &disk.spec)
    }

    /// Allows reading the file again. Editors replace the file, so this allows its whole directory.
    pub(super) fn allow(&self, paths: &mut AllowedPaths) {
        paths.read(self.path.parent().unwrap_or(&self.path));
    }

    /// Reads the file again, and adds and removes disks to match it. A file with an error changes
    /// nothing. The next call retries the disks that could not be added or removed.
    pub(super) fn reload(&mut self, controlled: &ControlledProcess, hotplug: &Hotplug) {
        let wanted = match read(&self.path, self.kind) {
            Ok(PoolText { process, disks, .. }) => {
                if process != self.process {
                    tracing::warn!(
                        "{}: memory-limit or metrics-listen has changed; it takes effect at the \
                         next start",
                        self.path.display()
                    );
                }
                disks
            }
            Err(error) => {
                tracing::error!("{error}; the disks stay as they are");
                return;
            }
        };
        let name = |disk: &PoolDisk| hotplug.lock().doors.name(&disk.spec);
        // 'walvisor ctl' may have added and removed disks since.
        let served = hotplug.lock().names();
        let names: Vec<_> = wanted.iter().map(name).collect();
        let mut failed = 0;
        let mut kept = Vec::new();
        for disk in std::mem::take(&mut self.disks) {
            let name = name(&disk);
            if !served.contains(&name) {
                continue;
            }
            if let Some(place) = names.iter().position(|other| *other == name) {
                if wanted[place].keys != disk.keys {
                    tracing::warn!(
                        "{}: the keys of disk '{name}' have changed; they take effect at the next \
                         start",
                        self.path.display()
                    );
                }
                kept.push(disk);
            } else if let Err(error) = controlled.remove_disk(&name, false) {
                tracing::error!("{error}");
                failed += 1;
                kept.push(disk);
            }
        }
        let known: Vec<_> = kept.iter().map(name).collect();
        let mut count = 0;
        for (disk, name) in wanted.into_iter().zip(names) {
            if known.contains(&name) {
                continue;
            }
            if served.contains(&name) {
                kept.push(disk);
                continue;
            }
            match controlled.add_disk(&disk.spec) {
                Ok(added) => {
                    let place = added["place"].as_str().unwrap_or_default();
                    let size = human_size(added["size_bytes"].as_u64().unwrap_or(0));
                    announce(&format!("serving {name}: {size} at {place}\n"));
                    kept.push(disk);
                    count += 1;
                }
                Err(error) => {
                    tracing::error!("{error}");
                    failed += 1;
                }
            }
        }
        tracing::info!(
            "{}: read again: {count} disks added, {failed} failed",
            self.path.display(),
        );
        self.disks = kept;
    }
}

/// Carries out `walvisor config check`. Returns the number of disks.
///
/// # Errors
/// If a daemon could not serve them.
pub(in crate::commands) fn check(path: &Path) -> Result<usize, CommandError> {
    let pool = PoolFile::open(path, DiskCommand::Serve)?;
    let specs: Vec<_> = pool.disks().cloned().collect();
    let in_file = |error: String| CommandError::Failed(format!("{}: {error}", path.display()));
    let doors = Doors::new(&specs, 0o600, false, &Tls::Off);
    doors.check(&specs).map_err(in_file)?;
    disks::check(&specs).map_err(in_file)?;
    Ok(specs.len())
}

/// What the file describes.
fn read(path: &Path, kind: DiskCommand) -> Result<PoolText, CommandError> {
    let in_file = |error: String| CommandError::Failed(format!("{}: {error}", path.display()));
    let text = fs::read_to_string(path).map_err(|error| in_file(error.to_string()))?;
    parse(&text, kind).map_err(in_file)
}

pub(super) fn parse(text: &str, kind: DiskCommand) -> Result<PoolText, String> {
    let mut file: DocumentMut = text.parse().map_err(|error: TomlError| {
        let before = &text[..error.span().map_or(0, |span| span.start)];
        let line = before.matches('\n').count() + 1;
        format!("line {line}: {}", error.message().replace('\n', ", "))
    })?;
    let known = ["defaults", "disk"];
    if let Some((key, _)) = file.iter().find(|(key, _)| !known.contains(key)) {
        return Err(format!(
            "unknown key '{key}': give a table [defaults], and a table [[disk]] for each disk"
        ));
    }
    let defaults = file.remove("defaults").map(Item::into_table).transpose();
    let defaults = defaults.map_err(|_| "'defaults' is not a table: write [defaults]")?;
    let defaults = keys(&defaults.unwrap_or_default());
    let defaults = defaults.map_err(|error| format!("[defaults]: {error}"))?;
    let (mut process, mut defaults_of_disks) = (ProcessKeys::default(), Vec::new());
    for (key, text) in defaults {
        let failed = |error: &dyn Display| format!("[defaults]: {key}: {error}");
        match key.as_str() {
            "memory-limit" => {
                let limit = parse_size(&text).map_err(|error| failed(&error))?;
                process.memory_limit = Some(limit);
            }
            "metrics-listen" => {
                let address = text.parse().map_err(|error: String| failed(&error))?;
                process.metrics_listen = Some(address);
            }
            _ => defaults_of_disks.push((key, text)),
        }
    }
    let defaults = defaults_of_disks;
    let tables = file.remove("disk");
    if tables.as_ref().is_some_and(Item::is_table) {
        return Err("[disk] is one table, and disks are a list: write [[disk]]".to_owned());
    }
    let tables = tables.and_then(|tables| tables.into_array_of_tables().ok());
    let tables = tables.filter(|tables| !tables.is_empty());
    let tables = tables.ok_or("no disk: give a table [[disk]] for each")?;
    let disk = |(index, table): (usize, &Table)| {
        let number = index + 1;
        let own = keys(table).map_err(|error| format!("[[disk]] number {number}: {error}"))?;
        let keys = DiskSpec::with_defaults(&own, &defaults, kind);
        let named = |error| match table.get("path").and_then(Item::as_str) {
            Some(path) => format!("[[disk]] number {number} ('{path}'): {error}"),
            None => format!("[[disk]] number {number}: {error}"),
        };
        let spec = DiskSpec::from_keys(&keys, kind).map_err(named)?;
        Ok(PoolDisk { keys, spec })
    };
    let disks: Result<_, String> = tables.iter().enumerate().map(disk).collect();
    Ok(PoolText {
        process,
        disks: disks?,
        defaults,
    })
}

/// The keys of a table, with their values as texts of `--disk`.
fn keys(table: &Table) -> Result<Vec<(String, String)>, String> {
    let text = |(key, value): (&str, &Item)| {
        let text = match value.as_value() {
            Some(Value::String(text)) => text.value().clone(),
            Some(Value::Integer(number)) => number.value().to_string(),
            Some(Value::Boolean(on)) => if *on.value() { "on" } else { "off" }.to_owned(),
            _ => {
                return Err(format!(
                    "{key}: give a string, a whole number, true or false"
                ));
            }
        };
        Ok((key.to_owned(), text))
    };
    table.iter().map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_takes_the_defaults_that_fit_it() {
        let PoolText {
            process, disks, ..
        } = parse(
            "[defaults]\nmemory-limit = '2G'\nmetrics-listen = '[::1]:9790'\ndoor = 'nbd'\nsocket = 's'\nlog = 'pool.wal'\nclose-seconds = 5\n\
             [[disk]]\npath = 'a.img'\nreadonly = true\n\
             [[disk]]\npath = 'b.img'\nport = 10809\n\
             [[disk]]\npath = 'c.img'\ndoor = 'tcmu'\n\
             [[disk]]\nbackend = 'ram'\nsize = '1M'\n",
            DiskCommand::Serve,
        )
        .unwrap();
        let specs = [
            "path=a.img,readonly=on,door=nbd,socket=s,log=pool.wal,close-seconds=5",
            "path=b.img,port=10809,door=nbd,log=pool.wal,close-seconds=5",
            "path=c.img,door=tcmu,log=pool.wal,close-seconds=5",
            "backend=ram,size=1M,door=nbd,socket=s",
        ]
        .map(|text| DiskSpec::parse(text, DiskCommand::Serve).unwrap());
        let listen = MetricsAddress::Tcp("[::1]:9790".parse().unwrap());
        assert_eq!(
            (process.memory_limit, process.metrics_listen),
            (Some(2 << 30), Some(listen))
        );
        assert_eq!(disks.len(), specs.len());
        for (disk, spec) in disks.iter().zip(specs) {
            assert_eq!(disk.spec, spec);
        }
    }

    #[test]
    fn an_error_names_the_disk_or_the_line() {
        for (text, kind, part) in [
            ("[[disk]]\npath = ", DiskCommand::Nbd, "line 2: "),
            ("[pool]\n", DiskCommand::Nbd, "unknown key 'pool'"),
            ("", DiskCommand::Nbd, "no disk: give"),
            ("[disk]\npath = 'a'\n", DiskCommand::Nbd, "write [[disk]]"),
            ("defaults = 1\n", DiskCommand::Nbd, "write [defaults]"),
            (
                "[defaults]\ncashe = 'unsafe'\n[[disk]]\npath = 'a'\nsocket = 's'\n",
                DiskCommand::Nbd,
                "unknown key 'cashe'",
            ),
            (
                "[defaults]\nmemory-limit = 'much'\n[[disk]]\npath = 'a'\n",
                DiskCommand::Nbd,
                "[defaults]: memory-limit: 'much' is not a size",
            ),
            (
                "[defaults]\nmetrics-listen = 9790\n[[disk]]\npath = 'a'\n",
                DiskCommand::Nbd,
                "[defaults]: metrics-listen: '9790' is neither unix:PATH nor",
            ),
            (
                "[[disk]]\npath = 'a'\nsocket = 's'\n[[disk]]\npath = 'b'\nqueues = 2\n",
                DiskCommand::Nbd,
                "[[disk]] number 2 ('b'): queues= is for ",
            ),
            (
                "[[disk]]\npath = 'a'\n",
                DiskCommand::Serve,
                "number 1 ('a'): a disk needs a door",
            ),
            (
                "[[disk]]\npath = ['a']\n",
                DiskCommand::Nbd,
                "number 1: path: give a string",
            ),
        ] {
            let error = parse(text, kind).err().unwrap();
            assert!(
                error.contains(part) && !error.contains('\n'),
                "{text}: {error}"
            );
        }
    }
}
