//! The vhost-user path: a daemon, and a virtio driver in this process.

use std::path::PathBuf;
use std::time::Duration;

use walvisor::commands::CommandError;
use walvisor::processor_time::of_host;
use walvisor_tests::vhost_user_client::{NotificationCounts, VhostUserClient};

use super::place::Directories;
use crate::daemon::{Daemon, spec};
use crate::load::measured::Measurement;
use crate::load::point::{BackendKind, DISK_BYTES, Point, QUEUES};
use crate::load::vhost_user::drive;

/// A daemon, and the directory of its sockets.
pub struct VhostUserDoor {
    daemon: Daemon,
    sockets: PathBuf,
}

impl VhostUserDoor {
    /// Serves the disks of `backends`.
    ///
    /// # Errors
    /// If the disks cannot be made or served.
    pub fn open(place: &Directories, backends: &[BackendKind]) -> Result<Self, CommandError> {
        let image = place.image("vhost-user", backends)?;
        let socket = |backend| place.sockets().join(socket_name(backend));
        let specs: Vec<String> = backends
            .iter()
            .map(|&backend| spec(backend, &image, &socket(backend)) + &format!(",queues={QUEUES}"))
            .collect();
        Ok(Self {
            daemon: Daemon::start("vhost-user", &specs, place.images(), place.sockets())?,
            sockets: place.sockets().to_owned(),
        })
    }

    /// Measures `point` once.
    ///
    /// # Errors
    /// If a request fails or the daemon has ended.
    pub fn measure(&mut self, point: &Point, turn: Duration) -> Result<Measurement, CommandError> {
        if point.counts_syncs() {
            self.daemon.checkpoint()?;
        }
        let socket = self.sockets.join(socket_name(point.backend));
        let failed = |error: std::io::Error| CommandError::Failed(format!("vhost-user: {error}"));
        let mut client = VhostUserClient::connect(&socket, point.queues.into()).map_err(failed)?;
        let write_cache = client.write_cache().map_err(failed)?;
        client.start_counting().map_err(failed)?;
        let (before, cpu, host) = (
            self.daemon.disk(point.backend)?,
            self.daemon.cpu(),
            of_host(),
        );
        let loops = (point.job, point.queues.into(), point.iodepth.into());
        let clients = std::slice::from_mut(&mut client);
        let tally = drive(clients, loops, DISK_BYTES, turn).map_err(failed)?;
        let (cpu_after, host_after) = (self.daemon.cpu(), of_host());
        let after = self.daemon.disk(point.backend)?;
        let NotificationCounts {
            doorbells,
            interrupts,
        } = client.notices();
        Ok(Measurement {
            cpu: cpu_after.zip(cpu).map(|(after, before)| after - before),
            host_cpu: host_after.zip(host).map(|(after, before)| after - before),
            doorbells: Some(doorbells),
            interrupts: Some(interrupts),
            syncs: after.syncs - before.syncs,
            write_cache,
            ..tally.measured()
        })
    }
}

fn socket_name(backend: BackendKind) -> String {
    format!("vhost-user-{}.sock", backend.name())
}
