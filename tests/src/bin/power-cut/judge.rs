//! Judges a power cut: the file system recovers, `disk check`, `disk export` and `disk checkpoint`
//! run, and the results are compared with every promise.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::process::Command;

use nix::mount::{MsFlags, mount, umount};
use walvisor_storage::{DiskOptions, Store, StoreOptions, export_disk, inspect};

use crate::history::{History, Mark, Promise, Promises, hash, in_order};
use crate::log_writes::Log;
use crate::points::{Medium, Point};
use crate::record::{MOUNT, RAW_DISK, image, imported, log_of};

/// One in this many points runs the commands instead of the library calls that they make.
const COMMANDS_EACH: usize = 16;

/// The first and the last state that a client's region may be in, by the client's number.
type StateRanges = BTreeMap<usize, (usize, usize)>;

/// The inputs of judging.
pub struct Judge<'a> {
    pub log: &'a Log,
    pub history: &'a History,
    pub walvisor: &'a Path,
    /// The block device that gets the content of the medium after a power cut.
    pub data: &'a Path,
    pub bytes: usize,
}

impl Judge<'_> {
    /// Judges points, in the order of [`Point::place`], and passes the violations of each to
    /// `each`, until `each` returns `false`.
    pub fn judge(
        &self,
        points: &[Point],
        mut each: impl FnMut(&Point, &[String]) -> bool,
    ) -> io::Result<()> {
        let mut medium = Medium::new(self.log, self.bytes);
        std::fs::create_dir_all(MOUNT)?;
        for (number, point) in points.iter().enumerate() {
            medium.present(point, self.data)?;
            let marks = self.log.entries[..point.happened()].iter();
            let marks = marks.filter_map(|entry| Mark::parse(&entry.mark));
            let promises = Promises::of(marks);
            let commands = number % COMMANDS_EACH == 0;
            if !each(point, &self.recover(&promises, commands)) {
                break;
            }
        }
        Ok(())
    }

    /// The violations on the device.
    fn recover(&self, promises: &Promises, commands: bool) -> Vec<String> {
        let no_options = None::<&str>;
        let flags = MsFlags::empty();
        if let Err(error) = mount(
            Some(self.data),
            MOUNT,
            Some(self.history.file_system.as_str()),
            flags,
            no_options,
        ) {
            return vec![format!(
                "{} cannot be mounted: {error}",
                self.history.file_system
            )];
        }
        let mut broken = Vec::new();
        let mut found = BTreeMap::new();
        let mut exports = Vec::new();
        for (name, promise) in &promises.disks {
            if name == RAW_DISK {
                // It promises neither an order nor whole writes: only that what was flushed is
                // there.
                match std::fs::read(image(name)) {
                    Ok(bytes) => {
                        let none = &mut BTreeMap::new();
                        self.compare(name, promise, promises, &bytes, none, &mut broken);
                    }
                    Err(_) if promise.size.is_none() => {}
                    Err(error) => broken.push(format!("{name}: {error}")),
                }
                continue;
            }
            let export = Path::new("/run").join(name);
            let exported = check(name)
                .and_then(|()| {
                    if commands {
                        self.command("check", name, None::<&str>)
                    } else {
                        Ok(())
                    }
                })
                .and_then(|()| self.export(name, &export, commands))
                .and_then(|()| std::fs::read(&export).map_err(|error| error.to_string()));
            match exported {
                Ok(bytes) => {
                    self.compare(name, promise, promises, &bytes, &mut found, &mut broken);
                    exports.push((name, bytes));
                }
                // A disk that no program has reported as made may be incomplete.
                Err(_) if promise.size.is_none() => {}
                Err(error) => broken.push(format!("{name}: {error}")),
            }
            let _ = std::fs::remove_file(&export);
        }
        self.order(&found, &mut broken);
        if broken.is_empty() && !exports.is_empty() {
            let names: Vec<_> = exports.iter().map(|(name, _)| name.as_str()).collect();
            if let Err(error) = self.checkpoint(&names, commands) {
                broken.push(error);
            }
            for (name, export) in exports {
                match std::fs::read(image(name)) {
                    Ok(bytes) if bytes == export => {}
                    Ok(_) => broken.push(format!("{name}: its image is not what was exported")),
                    Err(error) => broken.push(format!("{name}: {error}")),
                }
            }
        }
        if let Err(error) = umount(MOUNT) {
            broken.push(format!("cannot unmount: {error}"));
        }
        broken
    }

    fn compare(
        &self,
        name: &str,
        promise: &Promise,
        promises: &Promises,
        bytes: &[u8],
        found: &mut StateRanges,
        broken: &mut Vec<String>,
    ) {
        let size = bytes.len() as u64;
        if ![promise.size, promise.wanted].contains(&Some(size)) {
            broken.push(format!("{name}: {size} bytes, of {promise:?}"));
            return;
        }
        let mut end = 0;
        for (client, chain) in self.history.chains.iter().enumerate() {
            if chain.disk != *name {
                continue;
            }
            end = chain.offset + chain.len;
            let now = hash(&bytes[chain.offset..end]);
            let acknowledged = promises.acknowledged.get(&client).copied().unwrap_or(0);
            if let Some(states) = chain.find(acknowledged, now) {
                found.insert(client, states);
                continue;
            }
            let earlier = chain.find(0, now);
            broken.push(format!(
                "{name}: client {client}: acknowledged state {acknowledged}, found {}",
                earlier.map_or("none of its states".to_owned(), |(_, last)| format!(
                    "state {last}"
                ))
            ));
        }
        // Beyond the clients' regions the disk is as it was made, and a range that was cut off once
        // stays zero.
        let made = match name {
            "a.img" | "c.img" => Vec::new(),
            _ => imported(self.history.seed),
        };
        let kept = made
            .len()
            .min(promise.smallest.unwrap_or(size) as usize)
            .max(end);
        let kept = kept.min(bytes.len());
        let as_made = made.is_empty() || bytes[end..kept] == made[end..kept];
        let behind = if made.is_empty() { end } else { kept };
        if !as_made || bytes[behind..].iter().any(|&byte| byte != 0) {
            broken.push(format!("{name}: changed where nobody wrote"));
        }
    }

    /// Checks that the states of all clients of a log form a prefix of their operations.
    fn order(&self, found: &StateRanges, broken: &mut Vec<String>) {
        let chains = &self.history.chains;
        for (&one, &(_, last)) in found {
            for (&other, &(first, _)) in found {
                let (ones, others) = (&chains[one], &chains[other]);
                let shared = log_of(&ones.disk) == log_of(&others.disk);
                if shared && !in_order(ones, last, others, first) {
                    broken.push(format!(
                        "no prefix: {} is in state {first} of client {other}, {} in state {last} \
                         of client {one}, which had done more before",
                        others.disk, ones.disk
                    ));
                }
            }
        }
    }

    /// Runs `walvisor disk ACTION` with these arguments.
    fn command<A: AsRef<OsStr>>(
        &self,
        action: &str,
        name: &str,
        arguments: impl IntoIterator<Item = A>,
    ) -> Result<(), String> {
        let mut command = Command::new(self.walvisor);
        command.args(["disk", action, name]).args(arguments);
        command.arg("--log").arg(log_of(name)).current_dir(MOUNT);
        let output = command.output().map_err(|error| error.to_string())?;
        if output.status.success() {
            Ok(())
        } else {
            Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
        }
    }

    fn export(&self, name: &str, to: &Path, command: bool) -> Result<(), String> {
        if command {
            return self.command("export", name, [to]);
        }
        let exported = export_disk(&image(name), &log_of(name), to, true, None, &mut |_, _| {});
        exported.map(drop).map_err(|error| error.to_string())
    }

    /// Copies the content of these disks' logs to their images.
    fn checkpoint(&self, names: &[&str], commands: bool) -> Result<(), String> {
        if commands {
            // The log may hold records of its other disks too.
            return names.iter().try_for_each(|name| {
                let shares = |other: &&&str| *other != name && log_of(other) == log_of(name);
                let others = names.iter().filter(shares);
                let detached = others.flat_map(|other| ["--detached", *other]);
                self.command("checkpoint", name, detached)
            });
        }
        let mut logs = BTreeMap::new();
        for name in names {
            let disks: &mut Vec<_> = logs.entry(log_of(name)).or_default();
            disks.push(DiskOptions::new(image(name)));
        }
        logs.iter().try_for_each(|(log, disks)| {
            let store = Store::open(log, disks, &StoreOptions::default());
            let closed = store.and_then(Store::close);
            closed.map_err(|error| error.to_string())
        })
    }
}

fn check(name: &str) -> Result<(), String> {
    let report = inspect(&image(name), &log_of(name)).map_err(|error| error.to_string())?;
    match report.log {
        Some(_) => Ok(()),
        None => Err("it has lost its log".to_owned()),
    }
}
