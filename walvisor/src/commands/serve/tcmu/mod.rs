//! The TCMU door: disks of the kernel's SCSI target.

mod backstore_spec;
mod disks;

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;

use clap::Args;
use serde_json::json;
use walvisor_devices::listen::{Stop, Threads};
use walvisor_vmm::disk::OpenDisk;

use self::backstore_spec::{backstore_name, backstore_specs, wwn};
use self::disks::TargetDisks;
use super::daemon::{DaemonArguments, announce};
use super::door::{Door, Removal};
use crate::commands::CommandError;
use crate::commands::socket::Sockets;
use crate::commands::socket_names::SocketNames;
use crate::control_socket::{AddedDisk, RemovalError};
use crate::disk_spec::{DiskCommand, DiskSpec};
use crate::landlock::AllowedPaths;
use crate::lio::{Backstore, Events, LioDisk, LioTarget, TargetExport, Uio};

/// The arguments of `walvisor serve tcmu`.
#[derive(Args, Debug)]
pub struct TcmuArguments {
    /// The arguments of every daemon.
    #[command(flatten)]
    pub daemon: DaemonArguments,
    /// List walvisor's disks in the kernel's target, served or not, and exit
    #[arg(long, conflicts_with_all = ["disks", "config"])]
    pub list: bool,
    /// With --list: print JSON
    #[arg(long, requires = "list")]
    pub json: bool,
    /// Remove disks that a killed daemon has left in the kernel's target, with their LUNs, and exit
    #[arg(
        long,
        value_name = "NAME",
        num_args = 0..,
        conflicts_with_all = ["disks", "config", "list"]
    )]
    pub remove: Option<Vec<String>>,
    /// With --remove: remove all such disks
    #[arg(long, requires = "remove")]
    pub all: bool,
}

/// Carries out `walvisor serve tcmu`.
pub(super) fn run(arguments: &TcmuArguments, started: Instant) -> Result<(), CommandError> {
    if arguments.list {
        return list(arguments.json);
    }
    if let Some(names) = &arguments.remove {
        return remove(names, arguments.all);
    }
    arguments.daemon.run(DiskCommand::Tcmu, started)
}

/// The kernel's target, and this process's disks in it.
pub(super) struct TcmuDoor {
    /// Disks may be added later.
    grows: bool,
    target: Option<LioTarget>,
    /// Disks that are in the target and not served yet, by name.
    unserved: HashMap<String, LioDisk>,
    disks: TargetDisks,
    /// Reports changes in configfs. `None`: nothing does, or the listener has taken it.
    events: Option<Events>,
    listener: Option<ChangeListener>,
    /// Back stores that stay in the target for the next process.
    kept_backstores: Vec<Backstore>,
}

/// A thread that listens for changes in configfs. Dropping it ends the thread.
struct ChangeListener {
    stop: Stop,
    _thread: Threads,
}

impl Drop for ChangeListener {
    fn drop(&mut self) {
        self.stop.tell();
    }
}

impl TcmuDoor {
    /// `grows`: disks may be added later.
    pub(super) fn new(grows: bool) -> Self {
        Self {
            grows,
            target: None,
            unserved: HashMap::new(),
            disks: TargetDisks::default(),
            events: None,
            listener: None,
            kept_backstores: Vec::new(),
        }
    }
}

impl Door for TcmuDoor {
    fn name_key(&self) -> &'static str {
        "name"
    }

    fn name(&self, spec: &DiskSpec) -> String {
        backstore_name(spec).unwrap_or_else(|_| spec.name())
    }

    fn check(&self, specs: &[DiskSpec]) -> Result<(), String> {
        backstore_specs(specs).map(drop)
    }

    /// Makes the back stores, or takes over those of an earlier process, whose initiators wait
    /// meanwhile instead of getting errors.
    fn bind(
        &mut self,
        specs: &[DiskSpec],
        _sockets: &mut Sockets,
        _names: &mut SocketNames,
    ) -> Result<(), CommandError> {
        let mut target = LioTarget::open().map_err(CommandError::failed)?;
        if self.grows {
            target.hand_over().map_err(CommandError::failed)?;
        }
        let all = backstore_specs(specs).map_err(CommandError::Usage)?;
        for (spec, backstore) in specs.iter().zip(all) {
            let disk = LioDisk::raise(&target, &backstore, spec.fabric, &wwn(spec, &backstore));
            let disk = disk.map_err(CommandError::failed)?;
            self.unserved.insert(backstore.name, disk);
        }
        self.target = Some(target);
        // Starts after the back stores are made, so that it does not report this process's own
        // changes.
        let events = Events::listen()
            .inspect_err(|error| tracing::warn!("changes in configfs are not noticed: {error}"));
        self.events = events.ok();
        Ok(())
    }

    fn allow(&self, paths: &mut AllowedPaths) {
        let Some(target) = &self.target else {
            return;
        };
        for disk in self.unserved.values() {
            allow_disk(paths, target, disk);
        }
        if self.grows {
            // The number of a back store, and with it its directory, is not known before it is
            // made.
            let parents = target.disk_parents();
            parents.iter().for_each(|parent| paths.build(parent));
            paths.read(target.devices());
        }
    }

    fn check_added(&self, spec: &DiskSpec, others: &[DiskSpec]) -> Result<Option<PathBuf>, String> {
        let all: Vec<_> = others.iter().chain([spec]).cloned().collect();
        backstore_specs(&all).map(|_| None)
    }

    fn add(&mut self, spec: &DiskSpec, disk: &OpenDisk) -> Result<AddedDisk, String> {
        let backstore = backstore_specs(std::slice::from_ref(spec))?.remove(0);
        let lio = match (self.unserved.remove(&backstore.name), &self.target) {
            (Some(raised), _) => raised,
            (None, Some(target)) => {
                let lio = LioDisk::raise(target, &backstore, spec.fabric, &wwn(spec, &backstore));
                lio.map_err(|error| error.to_string())?
            }
            (None, None) => return Err("the kernel's target is not open".to_owned()),
        };
        let (disk, place) = self.disks.serve(spec, &backstore, disk, lio)?;
        Ok(AddedDisk { disk, place })
    }

    fn start(&mut self) -> Result<(), CommandError> {
        assert!(self.unserved.is_empty(), "disks are served first");
        let Some(events) = self.events.take() else {
            return Ok(());
        };
        let stop = Stop::new().map_err(CommandError::failed)?;
        let (disks, stopped) = (self.disks.clone(), stop.clone());
        let mut thread = Threads::new("TCMU");
        let named = thread::Builder::new().name("tcmu-events".into());
        let started = thread.start(named, move || disks.listen(&events, &stopped));
        started.map_err(CommandError::failed)?;
        let _thread = thread;
        self.listener = Some(ChangeListener { stop, _thread });
        Ok(())
    }

    fn check_removed(&self, spec: &DiskSpec) -> Result<(), String> {
        let exported = self.disks.other_export(&self.name(spec));
        exported.map_or(Ok(()), |other| Err(exported_by(&other)))
    }

    fn remove(&mut self, spec: &DiskSpec) -> Result<Removal, RemovalError> {
        let (disks, name) = (self.disks.clone(), self.name(spec));
        Ok(Box::new(move || {
            let removed = disks.remove(&name);
            removed.map(drop).map_err(|(other, disk)| RemovalError {
                reason: exported_by(&other),
                disk: Some(disk),
            })
        }))
    }

    fn stop(&mut self) -> Result<(), CommandError> {
        self.listener = None;
        // Disks that were never served are taken down too.
        self.unserved.clear();
        self.kept_backstores = self.disks.dismantle().map_err(CommandError::failed)?;
        Ok(())
    }

    /// Marks the back stores durable: no completed write is in memory only any more, so the next
    /// process can take them over.
    fn logs_closed(&mut self) -> Result<(), CommandError> {
        std::mem::take(&mut self.kept_backstores)
            .iter()
            .try_for_each(|store| store.set_durable(true))
            .map_err(CommandError::failed)
    }
}

/// Why a disk stays.
fn exported_by(other: &TargetExport) -> String {
    format!("it is exported by {}: remove that LUN first", other.place())
}

/// Allows the directories of configfs that a disk needs, while it is served and when it is taken
/// down.
fn allow_disk(paths: &mut AllowedPaths, target: &LioTarget, disk: &LioDisk) {
    let directory = disk.store().directory();
    let hba = directory.parent().unwrap_or(directory);
    paths.configure(hba);
    paths.dismantle(hba.parent().unwrap_or(hba));
    for export in disk.exports() {
        paths.configure(&export.fabric().join(export.wwn()));
        paths.dismantle(export.fabric());
    }
    // The process also looks up other exports of the disk, and the kernel's name for the disk.
    paths.read(&target.root());
    paths.read(Path::new("/sys/bus/scsi"));
    paths.read(Path::new("/sys/devices"));
}

/// Lists the back stores in the target.
fn list(as_json: bool) -> Result<(), CommandError> {
    let target = LioTarget::open().map_err(CommandError::failed)?;
    let stores = Backstore::ours(&target);
    let rows = stores.iter().map(|store| {
        let exports = TargetExport::of(store);
        let places: Vec<_> = exports.iter().map(TargetExport::place).collect();
        let disks: Vec<_> = exports.iter().filter_map(TargetExport::disk_now).collect();
        (store, places, disks, Uio::server(store))
    });
    if as_json {
        let rows: Vec<_> = rows
            .map(|(store, places, disks, server)| {
                json!({
                    "name": store.name,
                    "image": store.image(),
                    "size_bytes": store.size(),
                    "path": store.directory().display().to_string(),
                    "exports": places,
                    "disks": disks,
                    "pid": server,
                })
            })
            .collect();
        announce(&format!("{}\n", serde_json::Value::from(rows)));
        return Ok(());
    }
    for (store, places, disks, server) in rows {
        let size = store.size().unwrap_or(0);
        let image = store.image().unwrap_or_default();
        let seen = [disks, places].concat();
        let seen = if seen.is_empty() {
            "not exported".to_owned()
        } else {
            seen.join(", ")
        };
        let served = match server {
            Some(process) => format!("served by process {process}"),
            None => "not served".to_owned(),
        };
        announce(&format!(
            "{}: {size} bytes of {image}; {seen}; {served}\n",
            store.name
        ));
    }
    Ok(())
}

/// Removes back stores that no process serves.
fn remove(names: &[String], all: bool) -> Result<(), CommandError> {
    if names.is_empty() != all {
        return Err(CommandError::Usage(
            "--remove needs names of disks ('--list' shows them), or --all, and not both"
                .to_owned(),
        ));
    }
    let target = LioTarget::open().map_err(CommandError::failed)?;
    let ours = Backstore::ours(&target);
    let mut chosen = Vec::new();
    for name in names {
        let found = ours.iter().find(|store| store.name == *name);
        chosen.push(found.ok_or_else(|| {
            CommandError::Failed(format!(
                "walvisor has no disk '{name}' in the kernel's target: '--list' shows its disks"
            ))
        })?);
    }
    if all {
        chosen.extend(&ours);
    }
    let mut outcome = Ok(());
    for store in chosen {
        match LioDisk::clear(store) {
            Ok(()) => announce(&format!("removed {}\n", store.name)),
            Err(error) if outcome.is_ok() => outcome = Err(CommandError::failed(error)),
            Err(error) => tracing::error!("{error}"),
        }
    }
    outcome
}
