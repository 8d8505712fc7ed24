//! The NBD path: a daemon, and a client in this process with a thread and a connection for each queue.

use std::io;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use walvisor::commands::CommandError;
use walvisor::processor_time::of_host;

use super::place::Directories;
use crate::daemon::{Daemon, spec};
use crate::load::loops::{Loops, Tally};
use crate::load::measured::Measurement;
use crate::load::nbd::{NbdClient, SEND_FLUSH};
use crate::load::point::{BackendKind, DISK_BYTES, Point};

/// A daemon, and the path of its socket.
pub struct NbdDoor {
    daemon: Daemon,
    socket: PathBuf,
}

impl NbdDoor {
    /// Serves the disks of `backends` under their names.
    ///
    /// # Errors
    /// If the disks cannot be made or served.
    pub fn open(place: &Directories, backends: &[BackendKind]) -> Result<Self, CommandError> {
        let image = place.image("nbd", backends)?;
        let socket = place.sockets().join("nbd.sock");
        let specs: Vec<String> = backends
            .iter()
            .map(|&backend| spec(backend, &image, &socket))
            .collect();
        let daemon = Daemon::start("nbd", &specs, place.images(), place.sockets())?;
        Ok(Self { daemon, socket })
    }

    /// Measures `point` once.
    ///
    /// # Errors
    /// If a request fails or the daemon has ended.
    pub fn measure(&mut self, point: &Point, turn: Duration) -> Result<Measurement, CommandError> {
        if point.counts_syncs() {
            self.daemon.checkpoint()?;
        }
        let failed = |error: io::Error| CommandError::Failed(format!("nbd: {error}"));
        let mut clients = Vec::new();
        let mut sends_flush = true;
        for _ in 0..point.queues {
            let (client, flags) =
                NbdClient::connect(&self.socket, point.backend.name()).map_err(failed)?;
            sends_flush &= flags & SEND_FLUSH != 0;
            clients.push(client);
        }
        let (before, cpu, host) = (
            self.daemon.disk(point.backend)?,
            self.daemon.cpu(),
            of_host(),
        );
        let began = Instant::now();
        let tallies: Vec<io::Result<Tally>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (1..)
                .zip(clients)
                .map(|(seed, client)| {
                    scope.spawn(move || {
                        let depth = usize::from(point.iodepth);
                        client.drive(Loops::new(point.job, depth, DISK_BYTES, turn, seed))
                    })
                })
                .collect();
            let joined = threads.into_iter().map(|thread| thread.join());
            joined
                .map(|done| done.expect("a client's thread"))
                .collect()
        });
        let time = began.elapsed();
        let (cpu_after, host_after) = (self.daemon.cpu(), of_host());
        let after = self.daemon.disk(point.backend)?;
        let mut all = Tally::default();
        for tally in tallies {
            all.histogram.add(&tally.map_err(failed)?.histogram);
        }
        all.time = time;
        Ok(Measurement {
            cpu: cpu_after.zip(cpu).map(|(after, before)| after - before),
            host_cpu: host_after.zip(host).map(|(after, before)| after - before),
            syncs: after.syncs - before.syncs,
            // The protocol says whether there is a cache to flush. Only the daemon says whether it is on.
            write_cache: sends_flush && after.writeback,
            ..all.measured()
        })
    }
}
