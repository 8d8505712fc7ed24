//! `walvisor serve vhost-user`: serves disks as virtio-blk devices to other VMMs.

use std::collections::HashMap;
use std::io;
use std::num::NonZero;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use walvisor_devices::backend::SECTOR_SIZE;
use walvisor_devices::block::{VirtioBlock, WorkerPool};
use walvisor_devices::vhost_user::{Server, Service};

use super::daemon::{DaemonArguments, Ending, announce, conclude};
use super::members::{Exposure, Membership, SharedLogs};
use crate::commands::CommandError;
use crate::commands::socket::{self, Sockets};
use crate::commands::socket_file::LateName;
use crate::commands::socket_names::SocketNames;
use crate::control_socket::{Added, NotRemoved};
use crate::disk::{DiskInUse, OpenDisk};
use crate::disk_spec::{DiskCommand, DiskSpec, MAX_QUEUES};
use crate::disks::{self, disk_name};
use crate::metrics::DiskMetrics;
use crate::seccomp::Duty;

/// Serves until a signal asks to stop.
pub(super) fn run(arguments: &DaemonArguments, started: Instant) -> Result<(), CommandError> {
    let specs = &arguments.disks;
    let mut sockets = Sockets::take(arguments.mode)?;
    let places = places(specs).map_err(CommandError::Usage)?;
    disks::check(specs).map_err(CommandError::Usage)?;
    let metrics = arguments.process.metrics()?;
    // The names are declared first, so that they are removed after everything that listens at them is dropped.
    let mut names = SocketNames::default();
    let ending = Ending::prepare(arguments, &mut names, DiskCommand::VhostUser, started)?;
    // The sockets are bound before the disks are opened, which may take long after a crash: early front-ends
    // wait, and are not refused.
    let bound = places
        .iter()
        .map(|place| sockets.unix(place, &mut names))
        .collect::<Result<Vec<_>, _>>()?;
    sockets.finish()?;
    let scratch = arguments.restrict(&mut names, |_| ())?;
    let (open, logs) =
        disks::open(specs, default_queues(), scratch).map_err(CommandError::failed)?;
    let logs = SharedLogs::new(logs);
    let served = arguments
        .filter(Duty::VhostUser)
        .and_then(|()| serve(arguments, open, &places, bound, &logs, ending));
    drop(names);
    conclude(served, metrics, &logs)
}

/// As many queues as this machine has CPUs: a front-end uses no more than its guest has CPUs, and an unused
/// queue costs nothing.
fn default_queues() -> u8 {
    let cpus = thread::available_parallelism().map_or(1, NonZero::get);
    u8::try_from(cpus.min(MAX_QUEUES.into())).unwrap_or(1)
}

/// Serves open disks until a signal comes. Returns the metrics of the disks.
fn serve(
    arguments: &DaemonArguments,
    disks: Vec<OpenDisk>,
    places: &[PathBuf],
    bound: Vec<UnixListener>,
    logs: &SharedLogs,
    ending: Ending,
) -> Result<Vec<DiskMetrics>, CommandError> {
    let (mut services, mut lines) = (Vec::new(), String::new());
    let mut controlled = Vec::new();
    let workers = Arc::new(WorkerPool::default());
    let mut sockets = HashMap::new();
    for ((disk, place), listener) in disks.iter().zip(places).zip(bound) {
        let kept = listener.try_clone().map_err(CommandError::failed)?;
        let kept = OwnSocket {
            listener: kept,
            _name: None,
        };
        sockets.insert(disk.name.clone(), kept);
        let (service, in_use) = service(disk, listener, &workers).map_err(CommandError::failed)?;
        let bytes = disk.backend.sectors() * SECTOR_SIZE;
        let socket = shown(place);
        lines.push_str(&format!(
            "serving {}: {bytes} bytes at {socket}\n",
            disk.name
        ));
        controlled.push(in_use);
        services.push(service);
    }
    drop(disks);
    let server = Server::start(services).map_err(CommandError::failed)?;
    announce(&lines);
    let exposure = FrontEnds {
        server,
        workers,
        mode: arguments.mode,
        sockets,
    };
    let (specs, dirs) = (&arguments.disks, &arguments.disk_dirs);
    let members = Membership::new(exposure, specs, dirs, logs, default_queues());
    ending.wait(controlled, Some(Box::new(members)))
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
    let in_use = DiskInUse {
        name: disk.name.clone(),
        transport: DiskCommand::VhostUser.name(),
        backend: Arc::clone(&disk.backend),
        metrics,
        throttle,
        device: service.control(),
    };
    Ok((service, in_use))
}

/// The address of a socket, for people.
fn shown(place: &Path) -> String {
    let socket = std::path::absolute(place).unwrap_or_else(|_| place.to_owned());
    socket.display().to_string()
}

/// The server, and the sockets of disks that were added.
struct FrontEnds {
    server: Server,
    workers: Arc<WorkerPool>,
    /// Permissions of the sockets.
    mode: u32,
    /// By the disk's name. Behind the server, so that nobody listens when a name is removed.
    sockets: HashMap<String, OwnSocket>,
}

/// The socket of a disk. A disk that cannot be closed is served again where it was.
struct OwnSocket {
    listener: UnixListener,
    /// The name in the file system, if the disk was added.
    _name: Option<LateName>,
}

impl Exposure for FrontEnds {
    fn check(&self, spec: &DiskSpec, _others: &[DiskSpec]) -> Result<Option<PathBuf>, String> {
        let place = places(std::slice::from_ref(spec))?.remove(0);
        match place.symlink_metadata().is_ok() {
            false => Ok(Some(place)),
            true => Err(format!(
                "socket '{}': the path exists: remove it if nothing listens there, or name another path",
                place.display()
            )),
        }
    }

    fn add(&mut self, spec: &DiskSpec, disk: &OpenDisk) -> Result<Added, String> {
        let place = places(std::slice::from_ref(spec))?.remove(0);
        let socket = match self.sockets.remove(&disk.name) {
            Some(socket) => socket,
            None => {
                let (listener, name) = socket::bind_late(&place, self.mode)?;
                let _name = Some(name);
                OwnSocket { listener, _name }
            }
        };
        let failed = |error: io::Error| format!("disk '{}': {error}", disk.name);
        let listener = socket.listener.try_clone().map_err(failed)?;
        let (service, in_use) = service(disk, listener, &self.workers)?;
        self.server.add(service).map_err(failed)?;
        self.sockets.insert(disk.name.clone(), socket);
        Ok(Added {
            disk: in_use,
            place: shown(&place),
        })
    }

    fn remove(&mut self, spec: &DiskSpec) -> Result<(), NotRemoved> {
        self.server.remove(&disk_name(spec));
        Ok(())
    }

    fn forget(&mut self, spec: &DiskSpec) {
        self.sockets.remove(&disk_name(spec));
    }
}

/// The socket of each disk. Refuses two disks with the same socket.
fn places(specs: &[DiskSpec]) -> Result<Vec<PathBuf>, String> {
    let mut places: Vec<PathBuf> = Vec::new();
    for spec in specs {
        let name = spec.name();
        let Some(socket) = spec.socket.as_deref() else {
            return Err(format!(
                "disk '{name}': give socket=PATH, where to serve it"
            ));
        };
        let place = disks::real_path(socket);
        if places.contains(&place) {
            return Err(format!(
                "disk '{name}': another disk is served at {}: a socket serves one disk, name another",
                Path::display(socket)
            ));
        }
        places.push(place);
    }
    Ok(places)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_disk_has_a_socket_of_its_own() {
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
        for (texts, part) in [
            (&["path=a"][..], "socket=PATH"),
            (&["path=a,socket=s", "path=b,socket=./s"], "name another"),
        ] {
            let error = places(texts).unwrap_err();
            assert!(error.contains(part), "{texts:?}: {error}");
        }
    }
}
