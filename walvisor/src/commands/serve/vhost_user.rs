//! The vhost-user door: each disk is a virtio-blk device for another VMM, or a logical unit of a
//! virtio-scsi device, which has all disks of its socket.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use walvisor_devices::block::{BlockMetrics, VirtioBlock, WorkerPool};
use walvisor_devices::control::DeviceControl;
use walvisor_devices::throttle::Throttle;
use walvisor_devices::vhost_user::{Server, Service, survive_truncated_memory};
use walvisor_devices::virtio_scsi::{ScsiError, ScsiUnit, VirtioScsi};
use walvisor_vmm::disk::{DeviceKind, DiskInUse, OpenDisk};

use super::door::{Door, Removal};
use crate::commands::CommandError;
use crate::commands::socket::{self, Sockets};
use crate::commands::socket_file::LateName;
use crate::commands::socket_names::SocketNames;
use crate::control_socket::{AddedDisk, RemovalError};
use crate::disk_spec::{DiskCommand, DiskSpec};
use crate::disks::{self, disk_name};
use crate::plan::real_path;

/// The vhost-user server, and the sockets of its disks.
pub(super) struct VhostUserDoor {
    server: Option<Arc<Server>>,
    /// The disks to start the server with.
    services: Vec<Service>,
    /// The targets to start the server with, by socket.
    targets: BTreeMap<PathBuf, SocketTarget>,
    /// The units of each target, by socket.
    units: HashMap<PathBuf, Vec<DiskInUse>>,
    workers: Arc<WorkerPool>,
    /// Permissions of the sockets.
    mode: u32,
    /// By path. A removed disk's socket stays until the disk is closed, in case it must be served
    /// again.
    sockets: HashMap<PathBuf, OwnSocket>,
}

/// A SCSI target that is not served yet: disks may join it.
struct SocketTarget {
    device: VirtioScsi,
    /// The name of its first disk, which the server knows it by.
    name: String,
}

/// The socket of a disk, or of a target.
struct OwnSocket {
    listener: UnixListener,
    /// The name in the file system, if the disk was added to the running daemon.
    _name: Option<LateName>,
}

impl VhostUserDoor {
    /// `mode`: the permissions of the sockets.
    pub(super) fn new(mode: u32) -> Self {
        Self {
            server: None,
            services: Vec::new(),
            targets: BTreeMap::new(),
            units: HashMap::new(),
            workers: Arc::default(),
            mode,
            sockets: HashMap::new(),
        }
    }
}

impl Door for VhostUserDoor {
    fn check(&self, specs: &[DiskSpec]) -> Result<(), String> {
        places(specs).map(drop)
    }

    fn bind(
        &mut self,
        specs: &[DiskSpec],
        sockets: &mut Sockets,
        names: &mut SocketNames,
    ) -> Result<(), CommandError> {
        let places = places(specs).map_err(CommandError::Usage)?;
        for place in places {
            let listener = sockets.unix(&place, names)?;
            let socket = OwnSocket {
                listener,
                _name: None,
            };
            self.sockets.insert(place, socket);
        }
        Ok(())
    }

    fn check_added(&self, spec: &DiskSpec, others: &[DiskSpec]) -> Result<Option<PathBuf>, String> {
        let place = place(spec)?;
        let shared = others.iter().any(|other| is_at(other, &place));
        if shared && spec.device == DeviceKind::Scsi {
            return Err(format!(
                "disk '{}': the disks of a SCSI target are there from its start: give this one a \
                 socket= of its own, or start the daemon with it",
                spec.name()
            ));
        }
        if place.symlink_metadata().is_ok() {
            return Err(format!(
                "socket '{}': the path exists: remove it if nothing listens there, \
                 or name another path",
                place.display()
            ));
        }
        Ok(Some(place))
    }

    fn add(&mut self, spec: &DiskSpec, disk: &OpenDisk) -> Result<AddedDisk, String> {
        let place = place(spec)?;
        let socket = match self.sockets.remove(&place) {
            Some(socket) => socket,
            None => {
                let (listener, name) = socket::bind_late(&place, self.mode)?;
                let _name = Some(name);
                OwnSocket { listener, _name }
            }
        };
        let failed = |error: &dyn std::fmt::Display| format!("disk '{}': {error}", disk.name);
        let shown = shown(&place);
        let in_use = match disk.kind {
            DeviceKind::Blk => {
                let listener = socket
                    .listener
                    .try_clone()
                    .map_err(|error| failed(&error))?;
                let (service, in_use) = service(disk, listener, &self.workers)?;
                match &self.server {
                    None => self.services.push(service),
                    Some(server) => server.add(service).map_err(|error| failed(&error))?,
                }
                in_use
            }
            DeviceKind::Scsi => {
                let unit = self
                    .add_unit(disk, &place)
                    .map_err(|error| failed(&error))?;
                if let Some(server) = &self.server
                    && let Some(target) = self.targets.remove(&place)
                {
                    let started = target.start(&socket, server);
                    started.map_err(|error| failed(&error))?;
                }
                unit.throttle.set(disk.limits);
                let in_use = in_use(disk, unit.metrics, unit.throttle, unit.control);
                let units = self.units.entry(place.clone()).or_default();
                units.push(in_use.clone());
                in_use
            }
        };
        self.sockets.insert(place, socket);
        Ok(AddedDisk {
            disk: in_use,
            place: shown,
        })
    }

    fn start(&mut self) -> Result<(), CommandError> {
        assert!(self.server.is_none(), "a door is opened once");
        survive_truncated_memory().map_err(CommandError::failed)?;
        let server = Server::start(std::mem::take(&mut self.services));
        let server = server.map_err(CommandError::failed)?;
        for (place, target) in std::mem::take(&mut self.targets) {
            let socket = &self.sockets[&place];
            target
                .start(socket, &server)
                .map_err(CommandError::failed)?;
        }
        self.server = Some(Arc::new(server));
        Ok(())
    }

    fn check_removed(&self, spec: &DiskSpec) -> Result<(), String> {
        let place = place(spec)?;
        let others = self.units.get(&place).map_or(0, |units| units.len() - 1);
        if others == 0 {
            return Ok(());
        }
        Err(format!(
            "its SCSI target at {} has {others} more, and they come and go together: stop the \
             daemon, and start it without this disk",
            place.display()
        ))
    }

    fn remove(&mut self, spec: &DiskSpec) -> Result<Removal, RemovalError> {
        let (place, name) = (place(spec).unwrap_or_default(), disk_name(spec));
        let units = self.units.get(&place).into_iter().flatten();
        self.check_removed(spec).map_err(|reason| RemovalError {
            reason,
            disk: units.clone().find(|unit| unit.name == name).cloned(),
        })?;
        self.units.remove(&place);
        let server = self.server.clone();
        Ok(Box::new(move || {
            if let Some(server) = server {
                server.remove(&name);
            }
            Ok(())
        }))
    }

    fn forget(&mut self, spec: &DiskSpec) {
        if let Ok(place) = place(spec) {
            self.sockets.remove(&place);
        }
    }

    /// Drops the sockets after the server: nobody may listen any more when a name is removed.
    fn stop(&mut self) -> Result<(), CommandError> {
        self.services.clear();
        self.targets.clear();
        self.units.clear();
        self.server = None;
        self.sockets.clear();
        Ok(())
    }
}

impl VhostUserDoor {
    /// Makes a disk the next unit of the target at its socket.
    fn add_unit(&mut self, disk: &OpenDisk, place: &Path) -> Result<ScsiUnit, ScsiError> {
        let backend = Arc::clone(&disk.backend);
        if let Some(target) = self.targets.get_mut(place) {
            return target.device.add_unit(backend, &disk.device);
        }
        let mut device = VirtioScsi::new(backend, disk.device.clone())?;
        device.serve_with(Arc::clone(&self.workers));
        let (unit, name) = (device.first_unit(), disk.name.clone());
        let target = SocketTarget { device, name };
        self.targets.insert(place.to_owned(), target);
        Ok(unit)
    }
}

impl SocketTarget {
    fn start(self, socket: &OwnSocket, server: &Server) -> io::Result<()> {
        let listener = socket.listener.try_clone()?;
        server.add(Service::new(listener, self.device, &self.name)?)
    }
}

/// The handle of a disk.
fn in_use(
    disk: &OpenDisk,
    metrics: Arc<BlockMetrics>,
    throttle: Arc<Throttle>,
    device: Arc<dyn DeviceControl>,
) -> DiskInUse {
    DiskInUse {
        name: disk.name.clone(),
        transport: DiskCommand::VhostUser.name(),
        backend: Arc::clone(&disk.backend),
        metrics,
        throttle,
        device,
    }
}

/// The service of a disk, and its handle.
fn service(
    disk: &OpenDisk,
    listener: UnixListener,
    workers: &Arc<WorkerPool>,
) -> Result<(Service, DiskInUse), String> {
    let backend = Arc::clone(&disk.backend);
    let mut device =
        VirtioBlock::new(backend, disk.device.clone()).map_err(|error| error.to_string())?;
    device.serve_with(Arc::clone(workers));
    let (metrics, throttle) = (device.metrics(), device.throttle());
    throttle.set(disk.limits);
    let service = Service::new(listener, device, &disk.name).map_err(|error| error.to_string())?;
    let in_use = in_use(disk, metrics, throttle, service.control());
    Ok((service, in_use))
}

/// The address of a socket, to print.
fn shown(place: &Path) -> String {
    let socket = std::path::absolute(place).unwrap_or_else(|_| place.to_owned());
    socket.display().to_string()
}

/// The sockets of the disks. Refuses disks that can't share theirs.
fn places(specs: &[DiskSpec]) -> Result<Vec<PathBuf>, String> {
    let mut places: Vec<(PathBuf, &DiskSpec)> = Vec::new();
    for spec in specs {
        let place = place(spec)?;
        match places.iter().find(|(other, _)| *other == place) {
            None => places.push((place, spec)),
            Some((_, first)) => check_shared(spec, first, specs, &place)?,
        }
    }
    Ok(places.into_iter().map(|(place, _)| place).collect())
}

/// Refuses a disk that can't join the target of `first` at the same socket.
fn check_shared(
    spec: &DiskSpec,
    first: &DiskSpec,
    specs: &[DiskSpec],
    place: &Path,
) -> Result<(), String> {
    let (name, place) = (spec.name(), place.display());
    if [spec.device, first.device] != [DeviceKind::Scsi; 2] {
        return Err(format!(
            "disk '{name}': another disk is served at {place}, and a socket serves one disk: name \
             another, or give both device=scsi"
        ));
    }
    let serials = specs.iter().filter(|other| other.socket.is_some());
    let same = serials.filter(|other| disks::serial(other) == disks::serial(spec));
    if same.count() > 1 {
        return Err(format!(
            "disk '{name}': another disk has the serial number '{}', and initiators would take the \
             two for one: give it another serial=",
            disks::serial(spec)
        ));
    }
    let usual = DiskSpec::default();
    let queues = |spec: &DiskSpec| {
        (
            spec.queues,
            spec.queue_size,
            spec.worker_cpus.clone(),
            spec.poll,
        )
    };
    let said = |spec: &DiskSpec| (queues(spec), spec.answer);
    if said(spec) != said(first) && said(spec) != said(&usual) {
        return Err(format!(
            "disk '{name}': queues=, queue-size=, worker-cpus=, poll-usec= and answer= belong to \
             the target at {place}: give them to its first disk only"
        ));
    }
    Ok(())
}

/// Whether a disk is served at `socket`.
fn is_at(spec: &DiskSpec, socket: &Path) -> bool {
    place(spec).is_ok_and(|place| place == socket)
}

/// The socket of a disk, with links resolved.
fn place(spec: &DiskSpec) -> Result<PathBuf, String> {
    match &spec.socket {
        Some(socket) => Ok(real_path(socket)),
        None => Err(format!(
            "disk '{}' has no socket to be served at: give socket=PATH",
            spec.name()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_disk_needs_its_own_socket() {
        let places = |texts: &[&str]| {
            let specs: Vec<DiskSpec> = texts
                .iter()
                .map(|text| DiskSpec::parse(text, DiskCommand::VhostUser).unwrap())
                .collect();
            places(&specs)
        };
        assert_eq!(
            places(&["path=a,socket=s", "path=b,socket=t,queues=4"])
                .unwrap()
                .len(),
            2
        );
        let target = [
            "path=a,socket=s,device=scsi,queues=4",
            "path=b,socket=./s,device=scsi",
        ];
        assert_eq!(places(&target).unwrap().len(), 1);
        for (texts, part) in [
            (&["path=a"][..], "give socket=PATH"),
            (&["path=a,socket=s", "path=b,socket=./s"], "name another"),
            (
                &["path=a,socket=s,device=scsi", "path=b,socket=s"],
                "give both device=scsi",
            ),
            (
                &[
                    "path=a,socket=s,device=scsi",
                    "path=b,socket=s,device=scsi,queues=2",
                ],
                "to its first disk only",
            ),
            (
                &[
                    "path=a,socket=s,device=scsi,serial=x",
                    "path=b,socket=s,device=scsi,serial=x",
                ],
                "give it another serial=",
            ),
        ] {
            let error = places(texts).unwrap_err();
            assert!(error.contains(part), "{texts:?}: {error}");
        }
    }
}
