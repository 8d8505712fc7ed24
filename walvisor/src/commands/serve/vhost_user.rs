//! The vhost-user door: each disk is a virtio-blk device for another VMM.

use std::collections::HashMap;
use std::io;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use walvisor_devices::block::{VirtioBlock, WorkerPool};
use walvisor_devices::vhost_user::{Server, Service, survive_truncated_memory};
use walvisor_vmm::disk::{DiskInUse, OpenDisk};

use super::door::Door;
use crate::commands::CommandError;
use crate::commands::socket::{self, Sockets};
use crate::commands::socket_file::LateName;
use crate::commands::socket_names::SocketNames;
use crate::control_socket::{AddedDisk, RemovalError};
use crate::disk_spec::{DiskCommand, DiskSpec};
use crate::disks::{self, disk_name};

/// The vhost-user server, and the sockets of its disks.
pub(super) struct VhostUserDoor {
    server: Option<Server>,
    /// The services to start the server with.
    services: Vec<Service>,
    workers: Arc<WorkerPool>,
    /// Permissions of the sockets.
    mode: u32,
    /// By path. A removed disk's socket stays until the disk is closed, in case it must be served
    /// again.
    sockets: HashMap<PathBuf, OwnSocket>,
}

/// The socket of a disk.
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

    fn check_added(
        &self,
        spec: &DiskSpec,
        _others: &[DiskSpec],
    ) -> Result<Option<PathBuf>, String> {
        let place = place(spec)?;
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
        let failed = |error: io::Error| format!("disk '{}': {error}", disk.name);
        let listener = socket.listener.try_clone().map_err(failed)?;
        let (service, in_use) = service(disk, listener, &self.workers)?;
        match &self.server {
            None => self.services.push(service),
            Some(server) => server.add(service).map_err(failed)?,
        }
        let shown = shown(&place);
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
        self.server = Some(server.map_err(CommandError::failed)?);
        Ok(())
    }

    fn remove(&mut self, spec: &DiskSpec) -> Result<(), RemovalError> {
        if let Some(server) = &self.server {
            server.remove(&disk_name(spec));
        }
        Ok(())
    }

    fn forget(&mut self, spec: &DiskSpec) {
        if let Ok(place) = place(spec) {
            self.sockets.remove(&place);
        }
    }

    /// Drops the sockets after the server: nobody may listen any more when a name is removed.
    fn stop(&mut self) -> Result<(), CommandError> {
        self.services.clear();
        self.server = None;
        self.sockets.clear();
        Ok(())
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

/// The address of a socket, to print.
fn shown(place: &Path) -> String {
    let socket = std::path::absolute(place).unwrap_or_else(|_| place.to_owned());
    socket.display().to_string()
}

/// The socket of each disk. Refuses two disks with the same socket.
fn places(specs: &[DiskSpec]) -> Result<Vec<PathBuf>, String> {
    let mut places: Vec<PathBuf> = Vec::new();
    for spec in specs {
        let place = place(spec)?;
        if places.contains(&place) {
            return Err(format!(
                "disk '{}': another disk is served at {}, and a socket serves one disk: name \
                 another",
                spec.name(),
                place.display()
            ));
        }
        places.push(place);
    }
    Ok(places)
}

/// The socket of a disk, with links resolved.
fn place(spec: &DiskSpec) -> Result<PathBuf, String> {
    match &spec.socket {
        Some(socket) => Ok(disks::real_path(socket)),
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
        for (texts, part) in [
            (&["path=a"][..], "give socket=PATH"),
            (&["path=a,socket=s", "path=b,socket=./s"], "name another"),
        ] {
            let error = places(texts).unwrap_err();
            assert!(error.contains(part), "{texts:?}: {error}");
        }
    }
}
