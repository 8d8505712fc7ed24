//! The paths of `walvisor run`: the embedded guest in a VM of this process, with one transport and one kind of
//! notification.

use std::sync::Arc;
use std::time::Duration;

use walvisor::commands::CommandError;
use walvisor::demo::{self, DemoError};
use walvisor::disk_spec::{Notifications, TransportKind};
use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::backend::{Backend, SECTOR_SIZE};
use walvisor_devices::block::BlockConfig;
use walvisor_devices::throttle::Limits;
use walvisor_guest::contract::Load;
use walvisor_storage::Store;
use walvisor_vmm::disk::OpenDisk;
use walvisor_vmm::vm::DiskConfig;

use super::place::Directories;
use crate::load::measured::Measurement;
use crate::load::point::{BLOCK, BackendKind, DISK_BYTES, Path, Point, QUEUES};

/// The source of the requests on these paths, as tables name it.
pub const EMBEDDED_GUEST: &str = "embedded guest";

/// The disks of the guests. All four paths use the same two, in turns.
pub struct GuestDoor {
    ram: Arc<RamDisk>,
    /// The disk with a log, if that backend is measured.
    store: Option<Store>,
    ticks: u64,
}

impl GuestDoor {
    /// Creates the disks of `backends`, for turns of length `turn`.
    ///
    /// # Errors
    /// If they cannot be made, or there is no usable KVM.
    pub fn open(
        place: &Directories,
        backends: &[BackendKind],
        turn: Duration,
    ) -> Result<Self, CommandError> {
        let ticks = demo::ticks(turn).map_err(CommandError::failed)?;
        let wal = backends.contains(&BackendKind::Wal);
        Ok(Self {
            ram: Arc::new(RamDisk::new(DISK_BYTES / SECTOR_SIZE)),
            store: wal.then(|| place.store("guest")).transpose()?,
            ticks,
        })
    }

    /// Measures `point` on `path` once.
    ///
    /// # Errors
    /// If the VM does not run, or a request fails.
    pub fn measure(&mut self, path: Path, point: &Point) -> Result<Measurement, CommandError> {
        let (transport, notifications) = match path {
            Path::Mmio => (TransportKind::Mmio, Notifications::Eventfds),
            Path::MmioExits => (TransportKind::Mmio, Notifications::Exits),
            Path::Pci => (TransportKind::Pci, Notifications::Eventfds),
            _ => (TransportKind::Pci, Notifications::Exits),
        };
        if point.counts_syncs()
            && let Some(store) = &self.store
        {
            let done = store.disks()[0].checkpoint();
            done.map_err(CommandError::failed)?;
        }
        let backend: Arc<dyn Backend> = match (&self.store, point.backend) {
            (Some(store), BackendKind::Wal) => Arc::new(store.disks()[0].clone()),
            _ => Arc::clone(&self.ram) as _,
        };
        let disk = DiskConfig {
            disk: OpenDisk {
                name: point.backend.name().to_owned(),
                backend,
                device: BlockConfig {
                    queues: QUEUES,
                    ..BlockConfig::default()
                },
                limits: Limits::default(),
            },
            transport,
            notifications,
        };
        let load = Load {
            pci: transport == TransportKind::Pci,
            kind: point.job.kind(),
            iodepth: point.iodepth,
            queues: point.queues,
            ticks: self.ticks,
            requests: u64::MAX,
        };
        // The VM blocks termination signals in its thread for good. The session needs them in this thread, so the VM gets a
        // thread of its own.
        let report = std::thread::scope(|scope| {
            let vm = scope.spawn(move || demo::run_load(disk, load));
            vm.join()
                .unwrap_or_else(|_| Err(DemoError::Ended("panicked".to_owned())))
        });
        let report = report.map_err(CommandError::failed)?;
        Ok(Measurement {
            requests: report.counts.bytes / BLOCK as u64,
            time: report.time,
            p50: report.p50,
            p99: report.p99,
            p999: report.p999,
            cpu: Some(report.cpu),
            host_cpu: report.host_cpu,
            exits: report.exits,
            doorbells: Some(report.counts.doorbells),
            interrupts: Some(report.counts.interrupts),
            syncs: report.syncs,
            write_cache: report.write_cache,
        })
    }
}
