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

use std::collections::BTreeSet;
use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};

use toml_edit::{DocumentMut, Item, Table, TomlError, Value};

use super::daemon::announce;
use super::hotplug::Hotplug;
use super::pool::{self, DiskOrigin, PoolDisk};
use crate::commands::CommandError;
use crate::commands::ctl::answer::removed_line;
use crate::commands::process::MetricsAddress;
use crate::control_socket::{AddedDisk, ControlledProcess};
use crate::disk_spec::{DiskCommand, DiskSpec, DiskSpecError, WrittenDisk};
use crate::landlock::AllowedPaths;
use crate::plan::Plan;
use crate::size::{human_size, parse_size};

/// The file that describes the disks of a daemon.
pub(super) struct PoolFile {
    path: PathBuf,
    /// The file, and before it, if it is a link, all links on the way to it.
    places: Vec<PathBuf>,
    /// The door of a disk that names none.
    kind: DiskCommand,
    process: ProcessKeys,
    /// The keys for disks that lack them, as the file had them at the start.
    pub(super) defaults: Vec<(String, String)>,
}

/// What the file says of the process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct ProcessKeys {
    memory_limit: Option<u64>,
    metrics_listen: Option<MetricsAddress>,
}

/// What the file says.
pub(super) struct PoolText {
    process: ProcessKeys,
    /// The keys for disks that lack them.
    pub(super) defaults: Vec<(String, String)>,
    pub(super) disks: Vec<WrittenDisk>,
}

impl PoolText {
    /// Plans to serve what it says beside `others`.
    ///
    /// # Errors
    /// If no daemon could.
    pub(super) fn plan(&self, others: &[PoolDisk]) -> Result<Plan, String> {
        let all: Vec<_> = others.iter().cloned().chain(self.pool_disks()).collect();
        pool::plan(&all, self.process.memory_limit)
    }

    fn pool_disks(&self) -> impl Iterator<Item = PoolDisk> {
        let disks = self.disks.iter().cloned();
        disks.map(|disk| PoolDisk::new(disk, DiskOrigin::File))
    }
}

impl PoolFile {
    /// Reads the file, and adds its disks to `disks`. Returns the plan of all.
    ///
    /// # Errors
    /// If it can't be read, is not TOML, or no daemon could serve what it says.
    pub(super) fn open(
        path: &Path,
        kind: DiskCommand,
        disks: &mut Vec<PoolDisk>,
    ) -> Result<(Self, Plan), CommandError> {
        let in_file = |error: String| CommandError::Failed(format!("{}: {error}", path.display()));
        let text = read(path, kind).map_err(in_file)?;
        let plan = text.plan(disks).map_err(in_file)?;
        disks.extend(text.pool_disks());
        let path = std::path::absolute(path).map_err(CommandError::failed)?;
        let file = Self {
            places: links(&path),
            path,
            kind,
            process: text.process,
            defaults: text.defaults,
        };
        Ok((file, plan))
    }

    /// Where the file is. An absolute path.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The paths that the process reads: that of the file, and of what it links to.
    pub(super) fn places(&self) -> &[PathBuf] {
        &self.places
    }

    /// The memory limit of the process, if the file sets one.
    pub(super) fn memory_limit(&self) -> Option<u64> {
        self.process.memory_limit
    }

    /// Where metrics are served, if the file says so.
    pub(super) fn metrics_listen(&self) -> Option<&MetricsAddress> {
        self.process.metrics_listen.as_ref()
    }

    /// Where the file and its links may be replaced.
    fn directories(&self) -> impl Iterator<Item = &Path> {
        self.places.iter().filter_map(|place| place.parent())
    }

    /// Allows reading the file again. Editors and administrators replace the file, or a link to it,
    /// so this allows whole directories.
    pub(super) fn allow(&self, paths: &mut AllowedPaths) {
        self.directories().for_each(|place| paths.read(place));
    }

    /// Reads the file again, and adds and removes disks to match it. A file with an error changes
    /// nothing.
    pub(super) fn reload(&mut self, controlled: &ControlledProcess, hotplug: &Hotplug) {
        let file = self.path.display();
        match self.try_reload(controlled, hotplug) {
            Ok(()) => {
                let disks = hotplug.lock().disks.len();
                announce(&format!("{file}: read again: {disks} disks\n"));
            }
            Err(error) => tracing::error!("{file}: {error}; the disks stay as they are"),
        }
    }

    /// See [`reload`](Self::reload). First comes all that can fail without a trace: checks, and
    /// opening what is new.
    ///
    /// # Errors
    /// One line. Nothing has changed then.
    fn try_reload(&self, controlled: &ControlledProcess, hotplug: &Hotplug) -> Result<(), String> {
        let file = self.path.display();
        // A pipe may never end, and this thread hears requests to stop.
        if fs::metadata(&self.path).is_ok_and(|found| !found.is_file()) {
            return Err("not a regular file; put one there".to_owned());
        }
        let text = read(&self.path, self.kind).map_err(|error| self.explain(error))?;
        let wanted: Vec<_> = text.pool_disks().collect();
        let has = |disks: &[PoolDisk], disk: &PoolDisk| disks.iter().any(|other| other.is(disk));
        // What the file has never had stays.
        let served = hotplug.lock().disks.clone();
        let (leaving, staying): (Vec<_>, Vec<_>) = served
            .into_iter()
            .partition(|disk| disk.origin == DiskOrigin::File && !has(&wanted, disk));
        let of_file =
            |disk: &PoolDisk| disk.origin != DiskOrigin::CommandLine && has(&wanted, disk);
        let others = staying.iter().filter(|disk| !of_file(disk)).cloned();
        text.plan(&others.collect::<Vec<_>>())?;
        let coming: Vec<_> = wanted.iter().filter(|disk| !has(&staying, disk)).collect();
        if !coming.is_empty() {
            let running = controlled.refuse_while_paused();
            running.map_err(|error| error.to_string())?;
        }
        leaving
            .iter()
            .try_for_each(|disk| hotplug.check_removed(disk))?;
        let opened = coming
            .into_iter()
            .map(|disk| hotplug.open(disk.clone(), &leaving, None));
        let opened = opened.collect::<Result<Vec<_>, _>>()?;
        // The name of a disk that leaves is free only then.
        let (later, now): (Vec<_>, Vec<_>) = opened
            .into_iter()
            .partition(|disk| disk.waits_for(&leaving));
        hotplug
            .serve(now)?
            .into_iter()
            .for_each(|disk| list(controlled, disk));

        if text.process != self.process {
            tracing::warn!(
                "{file}: memory-limit or metrics-listen has changed; it takes effect at the next \
                 start"
            );
        }
        let mut served = hotplug.lock();
        served.defaults = text.defaults;
        let differ = served.take_over(&wanted);
        drop(served);
        for name in differ {
            tracing::warn!(
                "{file}: the keys of disk '{name}' have changed; they take effect at the next start"
            );
        }
        for PoolDisk { name, .. } in &leaving {
            match controlled.remove_disk(name, false) {
                Ok(answer) => announce(&removed_line(&answer)),
                Err(error) => tracing::error!("{file}: {error}; the rest is carried out"),
            }
        }
        for disk in later {
            match disk.serve() {
                Ok(added) => list(controlled, added),
                Err(error) => tracing::error!("{file}: {error}; the rest is carried out"),
            }
        }
        Ok(())
    }

    /// Says why a file that was there at the start can't be read any more.
    fn explain(&self, error: String) -> String {
        let Ok(real) = self.path.canonicalize() else {
            return error;
        };
        let places = self
            .directories()
            .filter_map(|place| place.canonicalize().ok());
        let places: BTreeSet<_> = places.collect();
        if places.iter().any(|place| real.starts_with(place)) {
            return error;
        }
        let places: Vec<_> = places
            .iter()
            .map(|place| place.display().to_string())
            .collect();
        format!(
            "{error}: it is now {}, and this daemon reads it only from where it and its links were \
             at the start, {}: put it there, or start the daemon again",
            real.display(),
            places.join(", ")
        )
    }
}

/// A path, and while it is a link, that to which it leads.
fn links(path: &Path) -> Vec<PathBuf> {
    let mut places = vec![path.to_owned()];
    // The kernel follows 40.
    for place in 0..40 {
        let from = &places[place];
        let Ok(to) = fs::read_link(from) else {
            break;
        };
        places.push(from.parent().unwrap_or(from).join(to));
    }
    places
}

/// Makes a disk that the file has brought reachable for requests.
fn list(controlled: &ControlledProcess, added: AddedDisk) {
    let answer = controlled.list_added(added);
    let text = |key: &str| answer[key].as_str().unwrap_or_default();
    let size = human_size(answer["size_bytes"].as_u64().unwrap_or(0));
    announce(&format!(
        "serving {}: {size} at {}\n",
        text("disk"),
        text("place")
    ));
}

/// Carries out `walvisor config check`. Returns the number of disks.
///
/// # Errors
/// If a daemon could not serve them.
pub(in crate::commands) fn check(path: &Path) -> Result<usize, CommandError> {
    let (_, plan) = PoolFile::open(path, DiskCommand::Serve, &mut Vec::new())?;
    Ok(plan.disks.len())
}

/// What the file describes.
fn read(path: &Path, kind: DiskCommand) -> Result<PoolText, String> {
    let text = fs::read_to_string(path).map_err(|error| error.to_string())?;
    parse(&text, kind)
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
        let named = |error: DiskSpecError| match table.get("path").and_then(Item::as_str) {
            Some(path) => format!("[[disk]] number {number} ('{path}'): {error}"),
            None => format!("[[disk]] number {number}: {error}"),
        };
        WrittenDisk::new(keys, kind).map_err(named)
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
