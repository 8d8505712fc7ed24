//! `walvisor serve tcmu`: serves disks to this machine's own kernel, through its SCSI target.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use clap::Args;
use serde_json::json;
use walvisor_devices::backend::{Backend, MAX_REQUEST_BYTES, SECTOR_SIZE};
use walvisor_devices::control::DeviceControl;
use walvisor_devices::event_loop::EventSet;
use walvisor_devices::listen::{Stop, Waited, Waiter};
use walvisor_devices::tcmu::Device;

use super::daemon::{DaemonArguments, Ending, announce, conclude};
use super::members::SharedLogs;
use crate::commands::CommandError;
use crate::commands::socket_names::SocketNames;
use crate::disk::{DiskInUse, OpenDisk};
use crate::disk_spec::{BackendKind, DiskCache, DiskCommand, DiskSpec, is_backstore_name};
use crate::disks;
use crate::landlock::Places;
use crate::lio::{Backstore, Change, Events, Standing, Target, TargetExport, Uio, Wanted};
use crate::metrics::DiskMetrics;
use crate::seccomp::Duty;

/// The arguments of `walvisor serve tcmu`.
#[derive(Args, Debug)]
pub struct TcmuArguments {
    /// What every daemon takes.
    #[command(flatten)]
    pub daemon: DaemonArguments,
    /// List walvisor's disks in the kernel's target, served or not, and exit
    #[arg(long, conflicts_with = "disks")]
    pub list: bool,
    /// With --list: print JSON
    #[arg(long, requires = "list")]
    pub json: bool,
    /// Remove disks that a killed daemon has left in the kernel's target, with their LUNs, and exit
    #[arg(long, value_name = "NAME", num_args = 0.., conflicts_with_all = ["disks", "list"])]
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
    let arguments = &arguments.daemon;
    let specs = &arguments.disks;
    let wanted = wanted(specs).map_err(CommandError::Usage)?;
    disks::check(specs).map_err(CommandError::Usage)?;
    let metrics = arguments.process.metrics()?;
    // The names are declared first, so that they are removed after everything that listens at them is dropped.
    let mut names = SocketNames::default();
    let ending = Ending::prepare(arguments, &mut names, DiskCommand::Tcmu, started)?;
    let target = Target::open().map_err(CommandError::failed)?;
    // The back stores are raised before the disks are opened, which may take long after a crash: initiators of
    // an earlier process wait, and get no errors.
    let raised = specs.iter().zip(&wanted).map(|(spec, wanted)| {
        let fabric = spec.fabric;
        Standing::raise(&target, wanted, fabric, &wwn(spec, wanted))
    });
    let mut standing = raised
        .collect::<Result<Vec<_>, _>>()
        .map_err(CommandError::failed)?;
    // The listener starts after the back stores are raised, so that it does not hear of this process's own
    // changes.
    let events = Events::listen()
        .inspect_err(|error| tracing::warn!("changes in configfs are not noticed: {error}"));
    let scratch = arguments.restrict(&mut names, |places| {
        standing
            .iter()
            .for_each(|disk| reach(places, &target, disk));
    })?;
    let (open, logs) = disks::open(specs, 1, scratch).map_err(CommandError::failed)?;
    let logs = SharedLogs::new(logs);
    let served = arguments
        .filter(Duty::Tcmu)
        .and_then(|()| serve(specs, &wanted, &open, &mut standing, events.ok(), ending));
    let down: Vec<_> = standing.into_iter().map(Standing::dismantle).collect();
    let down: Result<Vec<_>, _> = down.into_iter().collect();
    let (served, stays) = match (served, down) {
        (served, Ok(stays)) => (served, stays),
        (served, Err(error)) => (served.and(Err(CommandError::failed(error))), Vec::new()),
    };
    drop(open);
    conclude(served, metrics, &logs)?;
    // Now that the logs are closed, no completed write is in memory only, so the next process can take over
    // these back stores.
    for (store, spec) in stays.into_iter().zip(specs) {
        if let Some(store) = store.filter(|_| outlives(spec)) {
            store.set_durable(true).map_err(CommandError::failed)?;
        }
    }
    Ok(())
}

/// Whether the durable writes of a disk outlive the process.
fn outlives(spec: &DiskSpec) -> bool {
    spec.backend != BackendKind::Ram && spec.cache != DiskCache::Unsafe
}

/// The directories of configfs that a standing disk needs, while it is served and when it is taken down.
fn reach(places: &mut Places, target: &Target, disk: &Standing) {
    let directory = disk.store().directory();
    let hba = directory.parent().unwrap_or(directory);
    places.configure(hba);
    places.dismantle(hba.parent().unwrap_or(hba));
    for export in disk.exports() {
        places.configure(&export.fabric().join(export.wwn()));
        places.dismantle(export.fabric());
    }
    // The process also looks up other exports of the disk, and the kernel's name for the disk.
    places.read(&target.root());
    places.read(Path::new("/sys/bus/scsi"));
    places.read(Path::new("/sys/devices"));
}

/// Serves open disks until a signal comes. Returns the metrics of the disks.
fn serve(
    specs: &[DiskSpec],
    wanted: &[Wanted],
    disks: &[OpenDisk],
    standing: &mut [Standing],
    events: Option<Events>,
    ending: Ending,
) -> Result<Vec<DiskMetrics>, CommandError> {
    let (mut lines, mut controlled) = (String::new(), Vec::new());
    let mut changed = Vec::new();
    let members = specs.iter().zip(wanted).zip(disks).zip(standing);
    for (((spec, wanted), disk), standing) in members {
        let (backend, block_size) = (Arc::clone(&disk.backend), wanted.block_size);
        let mut device = Device::new(backend, &wanted.name, &wanted.serial, block_size)
            .map_err(|error| CommandError::Failed(format!("disk '{}': {error}", disk.name)))?;
        let store = standing.store().clone();
        let kept = outlives(spec);
        device.on_write_cache(Box::new(move |on| {
            if let Err(error) = store.set_durable(kept && !on) {
                tracing::warn!("{error}");
            }
        }));
        device.throttle().set(disk.limits);
        let bytes = disk.backend.sectors() * SECTOR_SIZE;
        standing
            .serve(&device, bytes)
            .map_err(CommandError::failed)?;
        let line = format!(
            "serving {}: {bytes} bytes at {}\n",
            wanted.name,
            place(standing)
        );
        lines.push_str(&line);
        let store = standing.store();
        changed.push(Changeable {
            uio: format!("tcm-user/{}/{}/", store.hba, store.name),
            name: wanted.name.clone(),
            backend: Arc::clone(&disk.backend),
            device: device.control(),
        });
        controlled.push(DiskInUse {
            name: wanted.name.clone(),
            transport: DiskCommand::Tcmu.name(),
            backend: Arc::clone(&disk.backend),
            metrics: device.metrics(),
            throttle: device.throttle(),
            device: Arc::new(Sized {
                store: store.clone(),
                backend: Arc::clone(&disk.backend),
                device: device.control(),
            }),
        });
    }
    announce(&lines);
    let stop = Stop::new().map_err(CommandError::failed)?;
    thread::scope(|scope| {
        if let Some(events) = &events {
            scope.spawn(|| listen(events, &changed, &stop));
        }
        let ended = ending.wait(controlled, None);
        stop.tell();
        ended
    })
}

/// The address where initiators find a disk, for people.
fn place(standing: &Standing) -> String {
    match standing.exports().first() {
        Some(export) => match export.disk() {
            Some(disk) => format!("{disk} ({})", export.place()),
            None => export.place(),
        },
        None => standing.store().directory().display().to_string(),
    }
}

/// A disk's device that also reports size changes to the kernel.
struct Sized {
    store: Backstore,
    backend: Arc<dyn Backend>,
    device: Arc<dyn DeviceControl>,
}

impl DeviceControl for Sized {
    fn capacity_changed(&self) {
        self.device.capacity_changed();
        let bytes = self.backend.sectors() * SECTOR_SIZE;
        if let Err(error) = self.store.set_size(bytes) {
            tracing::warn!("{error}");
        }
    }

    fn set_write_cache(&self, on: bool) -> bool {
        self.device.set_write_cache(on)
    }

    fn pause(&self) -> io::Result<()> {
        self.device.pause()
    }

    fn resume(&self) {
        self.device.resume();
    }
}

/// A disk that an administrator can change through configfs.
struct Changeable {
    /// The start of the name of its UIO device.
    uio: String,
    name: String,
    backend: Arc<dyn Backend>,
    device: Arc<dyn DeviceControl>,
}

impl Changeable {
    fn change(&self, change: Change) {
        let Self { name, backend, .. } = self;
        match change {
            Change::Size(bytes) if bytes == backend.sectors() * SECTOR_SIZE => {}
            Change::Size(bytes) => match backend.grow(bytes) {
                Ok(()) => self.device.capacity_changed(),
                Err(error) => tracing::warn!(
                    "disk '{name}' stays as it is, whatever configfs says now: a dev_size of {bytes}: {error}"
                ),
            },
            Change::WriteCache(on) => {
                if self.device.set_write_cache(on) != on {
                    tracing::warn!(
                        "disk '{name}' keeps its cache mode, whatever configfs says now: initiators that know it as it is \
                         would not flush; one of them can ask for writeback (MODE SELECT)"
                    );
                }
            }
            Change::Config(config) => tracing::warn!(
                "disk '{name}' stays what it is: its dev_config was set to '{config}', and it is served from the image \
                 that it was started with"
            ),
        }
    }
}

/// Carries out the changes that an administrator makes in configfs, until `stop` is signalled.
fn listen(events: &Events, disks: &[Changeable], stop: &Stop) {
    let listening = || {
        let mut waiter = Waiter::new(events, stop)?;
        while waiter.wait(events, EventSet::IN, None)? == Waited::Ready {
            let (device, change) = match events.next() {
                Ok(Some(event)) => event,
                Ok(None) => continue,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            if let Some(disk) = disks.iter().find(|disk| device.starts_with(&disk.uio)) {
                disk.change(change);
            }
        }
        Ok(())
    };
    if let Err(error) = listening() {
        tracing::warn!("changes in configfs are no longer noticed: {error}");
    }
}

/// The wanted properties of each disk's back store. Refuses disks with equal names.
fn wanted(specs: &[DiskSpec]) -> Result<Vec<Wanted>, String> {
    let mut all: Vec<Wanted> = Vec::new();
    for spec in specs {
        let image = match &spec.path {
            Some(path) => disks::real_path(path).display().to_string(),
            None => "ram".to_owned(),
        };
        let name = backstore_name(spec)?;
        if all.iter().any(|other| other.name == name) {
            return Err(format!(
                "two disks are called '{name}': give one of them another name="
            ));
        }
        let serial = spec.serial.clone();
        all.push(Wanted {
            serial: serial.unwrap_or_else(|| format!("{:016x}", identity(&name, &image))),
            name,
            image,
            block_size: spec.block_size,
            max_blocks: MAX_REQUEST_BYTES as u32 / spec.block_size,
            timeout: spec.command_timeout,
        });
    }
    Ok(all)
}

/// The name of a disk's back store: as given, or its image's file name without `.img`.
fn backstore_name(spec: &DiskSpec) -> Result<String, String> {
    if let Some(name) = &spec.backstore {
        return Ok(name.clone());
    }
    let stem = spec.path.as_deref().and_then(Path::file_stem);
    let name = stem.map_or("ram".into(), |stem| stem.to_string_lossy());
    match is_backstore_name(&name) {
        true => Ok(name.into_owned()),
        false => Err(format!(
            "disk '{}': '{name}' is not a valid name for a back store: give a name=",
            spec.name()
        )),
    }
}

/// The target's name in its fabric: NAA 5, LIO's company id, and a number that differs between disks.
fn wwn(spec: &DiskSpec, wanted: &Wanted) -> String {
    let own = identity(&wanted.name, &wanted.image) & 0xf_ffff_ffff;
    spec.wwn
        .clone()
        .unwrap_or_else(|| format!("naa.5001405{own:09x}"))
}

/// A number that is the same for the same disk at every start (FNV-1a).
fn identity(name: &str, image: &str) -> u64 {
    let bytes = name.bytes().chain([0]).chain(image.bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Lists the back stores in the target.
fn list(as_json: bool) -> Result<(), CommandError> {
    let target = Target::open().map_err(CommandError::failed)?;
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
            "exported by none".to_owned()
        } else {
            seen.join(", ")
        };
        let served = match server {
            Some(process) => format!("served by process {process}"),
            None => "served by none".to_owned(),
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
            "--remove takes the names of disks ('--list' shows them), or --all".to_owned(),
        ));
    }
    let target = Target::open().map_err(CommandError::failed)?;
    let ours = Backstore::ours(&target);
    let mut chosen = Vec::new();
    for name in names {
        let found = ours.iter().find(|store| store.name == *name);
        chosen.push(found.ok_or_else(|| {
            CommandError::Failed(format!(
                "the kernel's target has no disk '{name}' of walvisor: '--list' shows its disks"
            ))
        })?);
    }
    if all {
        chosen.extend(&ours);
    }
    let mut outcome = Ok(());
    for store in chosen {
        match Standing::clear(store) {
            Ok(()) => announce(&format!("removed {}\n", store.name)),
            Err(error) if outcome.is_ok() => outcome = Err(CommandError::failed(error)),
            Err(error) => tracing::error!("{error}"),
        }
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(texts: &[&str]) -> Result<Vec<Wanted>, String> {
        let specs: Vec<DiskSpec> = texts
            .iter()
            .map(|text| DiskSpec::parse(text, DiskCommand::Tcmu).unwrap())
            .collect();
        wanted(&specs)
    }

    #[test]
    fn disks_have_names_and_identities_of_their_own() {
        let disks = named(&[
            "path=/x/a.img,block-size=4096",
            "path=/y/a.img,name=other,serial=S",
            "backend=ram,size=1M,fabric=vhost",
        ])
        .unwrap();
        let names: Vec<_> = disks.iter().map(|disk| disk.name.as_str()).collect();
        assert_eq!(names, ["a", "other", "ram"]);
        assert_eq!((disks[1].serial.as_str(), disks[0].serial.len()), ("S", 16));
        assert_ne!(disks[0].serial, disks[2].serial);
        assert_eq!(disks[0].max_blocks as usize * 4096, MAX_REQUEST_BYTES);
        let spec = DiskSpec::parse("path=/x/a.img", DiskCommand::Tcmu).unwrap();
        let first = wwn(&spec, &disks[0]);
        assert_eq!((first.len(), &first[..11]), (20, "naa.5001405"));
        assert_eq!(first, wwn(&spec, &disks[0]));
        assert_ne!(first, wwn(&spec, &disks[1]));
    }

    #[test]
    fn what_cannot_stand_in_the_target_is_told() {
        for (texts, part) in [
            (&["path=x/a.img", "path=y/a.img"][..], "called 'a'"),
            (&["path=ä.img"], "give a name="),
        ] {
            let error = named(texts).unwrap_err();
            assert!(error.contains(part), "{texts:?}: {error}");
        }
    }
}
