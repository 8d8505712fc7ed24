//! `walvisor serve vhost-user`: serves disks as virtio-blk devices to other VMMs.

use std::num::NonZero;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use walvisor_devices::backend::SECTOR_SIZE;
use walvisor_devices::block::{VirtioBlock, WorkerPool};
use walvisor_devices::vhost_user::{Server, Service};

use super::daemon::{DaemonArguments, Ending, announce, conclude};
use crate::commands::CommandError;
use crate::commands::socket::Sockets;
use crate::commands::socket_names::SocketNames;
use crate::disk::{DiskInUse, OpenDisk};
use crate::disk_spec::{DiskCommand, DiskSpec, MAX_QUEUES};
use crate::disks;
use crate::metrics::DiskMetrics;
use crate::seccomp::{self, Duty};

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
    raise_descriptor_limit();
    // The sockets are bound before the disks are opened, which may take long after a crash: early front-ends
    // wait, and are not refused.
    let bound = places
        .iter()
        .map(|place| sockets.unix(place, &mut names))
        .collect::<Result<Vec<_>, _>>()?;
    sockets.finish()?;
    arguments.restrict(&mut names, |_| ())?;
    let (open, logs) = disks::open(specs, default_queues()).map_err(CommandError::failed)?;
    let served = seccomp::restrict(arguments.process.seccomp, Duty::VhostUser)
        .map_err(CommandError::failed)
        .and_then(|()| serve(&open, &places, bound, ending));
    drop(names);
    conclude(served, metrics, open, logs)
}

/// Raises the limit on descriptors. A front-end may bring some hundreds of them, and must not use up those that
/// the logs need.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(
            "the limit of open files stays at {:?}: {error}",
            limit.current
        );
    }
}

/// As many queues as this machine has CPUs: a front-end uses no more than its guest has CPUs, and an unused
/// queue costs nothing.
fn default_queues() -> u8 {
    let cpus = thread::available_parallelism().map_or(1, NonZero::get);
    u8::try_from(cpus.min(MAX_QUEUES.into())).unwrap_or(1)
}

/// Serves open disks until a signal comes. Returns the metrics of the disks.
fn serve(
    disks: &[OpenDisk],
    places: &[PathBuf],
    bound: Vec<UnixListener>,
    ending: Ending,
) -> Result<Vec<DiskMetrics>, CommandError> {
    let (mut services, mut lines) = (Vec::new(), String::new());
    let mut controlled = Vec::new();
    let workers = Arc::new(WorkerPool::default());
    for ((disk, place), listener) in disks.iter().zip(places).zip(bound) {
        let mut device = VirtioBlock::new(Arc::clone(&disk.backend), disk.device.clone())
            .map_err(CommandError::failed)?;
        device.serve_with(Arc::clone(&workers));
        let bytes = disk.backend.sectors() * SECTOR_SIZE;
        let socket = std::path::absolute(place).unwrap_or_else(|_| place.clone());
        lines.push_str(&format!(
            "serving {}: {bytes} bytes at {}\n",
            disk.name,
            socket.display()
        ));
        let (metrics, throttle) = (device.metrics(), device.throttle());
        throttle.set(disk.limits);
        let service = Service::new(listener, device, &disk.name).map_err(CommandError::failed)?;
        controlled.push(DiskInUse {
            name: disk.name.clone(),
            transport: DiskCommand::VhostUser.name(),
            backend: Arc::clone(&disk.backend),
            metrics,
            throttle,
            device: service.control(),
        });
        services.push(service);
    }
    let server = Server::start(services).map_err(CommandError::failed)?;
    announce(&lines);
    let ended = ending.wait(controlled.clone());
    server.stop();
    ended.map(|()| controlled.iter().map(DiskMetrics::from).collect())
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
