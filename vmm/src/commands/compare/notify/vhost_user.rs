//! The vhost-user path: a daemon, and a virtio driver in this process.

use std::path::PathBuf;
use std::time::Duration;

use super::CommandError;
use super::daemon::{Daemon, spec};
use super::loops::{Loops, Next, Tally};
use super::measured::Measured;
use super::place::Place;
use super::point::{BLOCK, Backend, DISK_BYTES, Job, Point, QUEUES};
use crate::processor_time::of_host;
use crate::vhost_user_client::{Notices, VhostUserClient};

/// No request takes this long on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// A daemon, and where it serves.
pub struct VhostUserDoor {
    daemon: Daemon,
    sockets: PathBuf,
}

impl VhostUserDoor {
    /// Serves the disks of `backends`.
    ///
    /// # Errors
    /// If the disks cannot be made or served.
    pub fn open(place: &Place, backends: &[Backend]) -> Result<Self, CommandError> {
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
    /// If a request fails or the daemon is gone.
    pub fn measure(&mut self, point: &Point, turn: Duration) -> Result<Measured, CommandError> {
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
        let Notices {
            doorbells,
            interrupts,
        } = client.notices();
        Ok(Measured {
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

fn socket_name(backend: Backend) -> String {
    format!("vhost-user-{}.sock", backend.name())
}

/// Closed loops over `queues` queues of each of `clients`, `depth` requests in flight each, over disks of `bytes` bytes, in this
/// thread.
///
/// # Errors
/// If a request fails, or none ends for half a minute.
pub fn drive(
    clients: &mut [VhostUserClient],
    (job, queues, depth): (Job, usize, usize),
    bytes: u64,
    turn: Duration,
) -> std::io::Result<Tally> {
    let each = queues * depth;
    let mut running = clients.len() * each;
    let mut loops = Loops::new(job, running, bytes, turn, 1);
    let data = [0x5a; BLOCK];
    let submit = |client: &mut VhostUserClient, slot: usize, next: Next| {
        let queue = slot / depth;
        match next {
            Next::Read(offset) => client.read(queue, slot, offset, BLOCK),
            Next::Write(offset) => client.write(queue, slot, offset, &data),
            Next::Flush => client.flush(queue, slot),
        }
    };
    for (at, client) in clients.iter_mut().enumerate() {
        for slot in 0..each {
            submit(client, slot, loops.begin(at * each + slot))?;
        }
        (0..queues).try_for_each(|queue| client.kick(queue))?;
    }
    while running > 0 {
        let mut any = false;
        for (at, client) in clients.iter_mut().enumerate() {
            for queue in 0..queues {
                let ended = client.ended(queue);
                for &(slot, status) in &ended {
                    if status != 0 {
                        return Err(std::io::Error::from_raw_os_error(-status));
                    }
                    match loops.ended(at * each + slot) {
                        Some(next) => submit(client, slot, next)?,
                        None => running -= 1,
                    }
                }
                if !ended.is_empty() {
                    any = true;
                    client.kick(queue)?;
                }
            }
        }
        if !any {
            VhostUserClient::wait_for_any(clients, PATIENCE)?;
        }
    }
    Ok(loops.tally())
}
