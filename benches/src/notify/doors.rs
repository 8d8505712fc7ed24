//! The doors of the paths: the embedded guest in a VM of this process, with one transport and one
//! kind of notification, and daemons over vhost-user and NBD with clients in this process.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};
use walvisor::commands::CommandError;
use walvisor::demo::{self, DemoError};
use walvisor::disk_spec::{Notifications, TransportKind};
use walvisor::processor_time::of_host;
use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::backend::{Backend, SECTOR_SIZE};
use walvisor_devices::block::BlockConfig;
use walvisor_guest::contract::Load;
use walvisor_storage::{DiskOptions, Store, StoreOptions, default_log_dir};
use walvisor_testkit::nbd::SEND_FLUSH;
use walvisor_testkit::vhost_user_client::VhostUserClient;
use walvisor_vmm::disk::OpenDisk;
use walvisor_vmm::vm::DiskConfig;

use crate::bench::{Matrix, Side, Turn};
use crate::bench_dirs::{BenchDirs, make_disk};
use crate::blocks::BLOCK;
use crate::daemon::Daemon;
use crate::exits::{add_exits, check_cache};
use crate::load::loops::{LoadJob, Tally, figures};
use crate::load::nbd::{NbdClient, drive_all};
use crate::load::vhost_user::drive;
use crate::serve::serve;
use crate::session::Session;

/// What keeps the data: memory, or an image and a log.
pub const BACKENDS: [&str; 2] = ["ram", "wal"];
/// Bytes of each disk.
const DISK_BYTES: u64 = 64 << 20;
/// Queues of each disk. A job may use fewer.
const QUEUES: u16 = 4;

/// Whether the embedded guest uses this path.
pub fn is_of_guest(path: &str) -> bool {
    !matches!(path, "vhost-user" | "nbd")
}

/// What a side does in a turn.
#[derive(Debug, Deserialize)]
struct Work {
    backend: String,
    job: LoadJob,
    iodepth: u8,
    queues: u8,
}

impl Work {
    /// Whether syncs are counted. If so, a checkpoint precedes the job, whose first FLUSH would
    /// otherwise also sync the writes of earlier jobs, in any number of the log's segments.
    fn counts_syncs(&self) -> bool {
        self.backend == "wal" && self.job == LoadJob::WriteFsync
    }
}

/// The doors that are open. Each has disks of its own.
pub struct Doors<'a> {
    place: &'a BenchDirs,
    turn: Duration,
    guest: Option<GuestDoor>,
    vhost_user: Option<Daemon>,
    nbd: Option<Daemon>,
}

/// The figures of a turn, and whether the write cache was on.
type Measured = (Turn, bool);

impl<'a> Doors<'a> {
    /// Opens the doors of all sides, for turns of length `turn`.
    ///
    /// # Errors
    /// If the disks cannot be made or served, or there is no usable KVM.
    pub fn open(
        place: &'a BenchDirs,
        matrices: &[Matrix],
        turn: Duration,
    ) -> Result<Self, CommandError> {
        let side_of = |door: &dyn Fn(&str) -> bool| {
            let mut sides = matrices.iter().flat_map(Matrix::sides);
            sides.find(|side| door(&side.side))
        };
        let make = |image: &str| {
            let (log, options) = (format!("{image}.wal"), StoreOptions::default());
            make_disk(place.images(), "raw", DISK_BYTES, (image, &log), &options)
        };
        let start = |door: &str| -> Result<Option<Daemon>, CommandError> {
            let Some(side) = side_of(&|name| name == door) else {
                return Ok(None);
            };
            make(&format!("{door}.img"))?;
            let sockets = BACKENDS.map(|backend| socket(place, door, backend));
            let daemons = serve(side, door, place.images(), place.sockets(), &sockets)?;
            Ok(daemons.into_iter().next())
        };
        let guest = match side_of(&is_of_guest) {
            None => None,
            Some(_) => {
                make("guest.img")?;
                Some(GuestDoor {
                    ram: Arc::new(RamDisk::new(DISK_BYTES / SECTOR_SIZE)),
                    store: open_store(place, "guest.img")?,
                    ticks: demo::ticks(turn).map_err(CommandError::failed)?,
                })
            }
        };
        Ok(Self {
            place,
            turn,
            guest,
            vhost_user: start("vhost-user")?,
            nbd: start("nbd")?,
        })
    }

    /// Takes the turn of a side.
    ///
    /// # Errors
    /// If the VM or the daemon does not run, a request fails, or the write cache is off.
    pub fn measure(&mut self, side: &Side, session: &Session) -> Result<Turn, CommandError> {
        let (work, path): (Work, &str) = (side.plan(), &side.side);
        let closed = || CommandError::Failed(format!("{path} is not open"));
        let (turn, write_cache) = match path {
            "vhost-user" => self.vhost_user(self.vhost_user.as_ref().ok_or_else(closed)?, &work),
            "nbd" => self.nbd(self.nbd.as_ref().ok_or_else(closed)?, &work, session),
            _ => self.guest.as_mut().ok_or_else(closed)?.measure(path, &work),
        }?;
        check_cache(&side.name, &work.backend, write_cache)?;
        Ok(turn)
    }

    fn vhost_user(&self, daemon: &Daemon, work: &Work) -> Result<Measured, CommandError> {
        let failed = |error: std::io::Error| CommandError::Failed(format!("vhost-user: {error}"));
        let socket = socket(self.place, "vhost-user", &work.backend);
        let client = VhostUserClient::try_connect(&socket, work.queues.into());
        let mut client = client.map_err(failed)?;
        let write_cache = client.write_cache().map_err(failed)?;
        client.start_counting().map_err(failed)?;
        let loops = (work.job, work.queues.into(), work.iodepth.into());
        let mut turn = measure_daemon(daemon, work, || {
            let clients = std::slice::from_mut(&mut client);
            drive(clients, loops, DISK_BYTES, self.turn).map_err(failed)
        })?;
        let counts = client.notices();
        let requests = turn.get("requests").unwrap_or(0.0).max(1.0);
        turn.0["doorbells_per_request"] = json!(counts.doorbells as f64 / requests);
        turn.0["interrupts_per_request"] = json!(counts.interrupts as f64 / requests);
        Ok((turn, write_cache))
    }

    fn nbd(
        &self,
        daemon: &Daemon,
        work: &Work,
        session: &Session,
    ) -> Result<Measured, CommandError> {
        let failed = |error: std::io::Error| CommandError::Failed(format!("nbd: {error}"));
        let socket = socket(self.place, "nbd", &work.backend);
        let mut clients = Vec::new();
        let mut sends_flush = true;
        for _ in 0..work.queues {
            let (client, flags) = NbdClient::connect(&socket, &work.backend).map_err(failed)?;
            sends_flush &= flags & SEND_FLUSH != 0;
            clients.push(client);
        }
        let loops = (work.job.into(), work.iodepth.into(), DISK_BYTES);
        let turn = measure_daemon(daemon, work, || {
            drive_all(clients, loops, self.turn, session).map_err(failed)
        })?;
        // The protocol says whether there is a cache to flush. Only the daemon says whether it is
        // on.
        let writeback = daemon.counters(&work.backend)?["cache"] == "writeback";
        Ok((turn, sends_flush && writeback))
    }
}

fn socket(place: &BenchDirs, door: &str, backend: &str) -> PathBuf {
    place.sockets().join(format!("{door}-{backend}.sock"))
}

/// The figures of a client's job, with the processor time and the syncs that it cost.
fn measure_daemon(
    daemon: &Daemon,
    work: &Work,
    job: impl FnOnce() -> Result<Tally, CommandError>,
) -> Result<Turn, CommandError> {
    if work.counts_syncs() {
        daemon.checkpoint()?;
    }
    let syncs = || -> Result<u64, CommandError> {
        let disk = daemon.counters(&work.backend)?;
        Ok(disk["log"]["syncs"].as_u64().unwrap_or(0))
    };
    let (syncs_before, cpu, host) = (syncs()?, daemon.cpu(), of_host());
    let tally = job()?;
    let (cpu_after, host_after) = (daemon.cpu(), of_host());
    let took = |after: Option<Duration>, before: Option<Duration>| {
        after.zip(before).map(|(after, before)| after - before)
    };
    Ok(Turn(with_costs(
        tally.figures(),
        took(cpu_after, cpu),
        took(host_after, host),
        syncs()? - syncs_before,
    )))
}

/// Adds what a request cost: processor time of the disk's own threads and of the whole machine, and
/// syncs of the log.
fn with_costs(
    mut figures: Value,
    cpu: Option<Duration>,
    host_cpu: Option<Duration>,
    syncs: u64,
) -> Value {
    let requests = figures["requests"].as_f64().unwrap_or(0.0).max(1.0);
    let each = |time: Duration| time.as_secs_f64() * 1e6 / requests;
    figures["vmm_cpu_us_per_request"] = json!(cpu.map(each));
    figures["host_cpu_us_per_request"] = json!(host_cpu.map(each));
    figures["syncs_per_request"] = json!(syncs as f64 / requests);
    figures
}

/// Opens a disk that has a log of its own.
fn open_store(place: &BenchDirs, image: &str) -> Result<Store, CommandError> {
    let path = place.images().join(image);
    let (log, options) = (default_log_dir(&path), StoreOptions::default());
    Store::open(&log, &[DiskOptions::new(&path)], &options).map_err(CommandError::failed)
}

/// The disks of the guests. All four paths use the same two, in turns.
struct GuestDoor {
    ram: Arc<RamDisk>,
    /// The disk with a log.
    store: Store,
    ticks: u64,
}

impl GuestDoor {
    fn measure(&mut self, path: &str, work: &Work) -> Result<Measured, CommandError> {
        let transport = match path {
            "mmio" | "mmio-exits" => TransportKind::Mmio,
            _ => TransportKind::Pci,
        };
        let notifications = match path {
            "mmio" | "pci" => Notifications::Eventfds,
            _ => Notifications::Exits,
        };
        let logged = &self.store.disks()[0];
        if work.counts_syncs() {
            logged.checkpoint().map_err(CommandError::failed)?;
        }
        let backend: Arc<dyn Backend> = match work.backend.as_str() {
            "wal" => Arc::new(logged.clone()),
            _ => Arc::clone(&self.ram) as _,
        };
        let disk = DiskConfig {
            disk: OpenDisk {
                device: BlockConfig {
                    queues: QUEUES,
                    ..BlockConfig::default()
                },
                ..OpenDisk::new(&work.backend, backend)
            },
            transport,
            notifications,
        };
        let load = Load {
            pci: transport == TransportKind::Pci,
            kind: work.job.kind(),
            iodepth: work.iodepth,
            queues: work.queues,
            ticks: self.ticks,
            requests: u64::MAX,
        };
        // The VM blocks termination signals in its thread for good. The session needs them in this
        // thread, so the VM gets a thread of its own.
        let report = std::thread::scope(|scope| {
            let vm = scope.spawn(move || demo::run_load(disk, load));
            vm.join()
                .unwrap_or_else(|_| Err(DemoError::Ended("panicked".to_owned())))
        });
        let report = report.map_err(CommandError::failed)?;
        let requests = report.counts.bytes / BLOCK as u64;
        let each = |count: u64| count as f64 / requests.max(1) as f64;
        let within = [report.p50, report.p99, report.p999];
        let mut figures = with_costs(
            figures(requests, report.time, within),
            Some(report.cpu),
            report.host_cpu,
            report.syncs,
        );
        figures["doorbells_per_request"] = json!(each(report.counts.doorbells));
        figures["interrupts_per_request"] = json!(each(report.counts.interrupts));
        let exits = report.exits.iter();
        let exits = exits.map(|(&kind, &count)| (kind.to_owned(), each(count)));
        add_exits(&mut figures, &exits.collect());
        Ok((Turn(figures), report.write_cache))
    }
}
