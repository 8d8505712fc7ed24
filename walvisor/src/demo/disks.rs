//! The two disks of the demo, each with its own log, so that their syncs are counted separately.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use walvisor_devices::block::{BlockConfig, MAX_QUEUE_SIZE};
use walvisor_storage::{DiskOptions, Store, StoreOptions, create_disk, default_log_dir};
use walvisor_vmm::disk::OpenDisk;
use walvisor_vmm::vm::DiskConfig;

use super::error::DemoError;
use crate::disk_spec::{Notifications, TransportKind};
use walvisor_guest::contract::Task;

/// Names of the disks, which the guest's reports also use for the transports.
pub const NAMES: [&str; 2] = ["mmio", "pci"];
const TRANSPORTS: [TransportKind; 2] = [TransportKind::Mmio, TransportKind::Pci];
/// Bytes of a disk; the guest uses the first 8 MiB.
const DISK_SIZE: u64 = 64 << 20;
/// Segments are small: each is filled with zeroes when it is made, and the job is short.
const SEGMENT_SIZE: u64 = 16 << 20;
const QUEUES: u16 = 4;
const QUEUE_SIZE: u16 = 128;

/// The configuration of a disk's device for `task`. For the conformance task the device offers
/// every feature that a write-ahead-logged disk can have.
pub fn device(name: &str, task: Task) -> BlockConfig {
    let trial = task == Task::Conformance;
    BlockConfig {
        queues: QUEUES,
        queue_size: if trial { MAX_QUEUE_SIZE } else { QUEUE_SIZE },
        serial: format!("walvisor-{name}"),
        in_order: trial,
        ..BlockConfig::default()
    }
}

/// Open disks.
pub struct DemoDisks {
    open: Vec<(&'static str, TransportKind, PathBuf, Store)>,
    task: Task,
}

/// The image of a closed disk: a plain raw file.
pub struct ClosedImage {
    /// The disk's name.
    pub name: &'static str,
    /// The image.
    pub path: PathBuf,
}

impl DemoDisks {
    /// Makes the disks for `task` and their logs in `directory`.
    ///
    /// # Errors
    /// As [`create_disk`] and [`Store::open`].
    pub fn create(directory: &Path, task: Task) -> Result<Self, DemoError> {
        let options = StoreOptions {
            segment_size: SEGMENT_SIZE,
            ..Default::default()
        };
        let mut open = Vec::new();
        for (name, transport) in NAMES.into_iter().zip(TRANSPORTS) {
            let path = directory.join(format!("{name}.img"));
            let log = default_log_dir(&path);
            create_disk(&path, DISK_SIZE, &log, &options)?;
            let store = Store::open(&log, &[DiskOptions::new(&path)], &options)?;
            open.push((name, transport, path, store));
        }
        Ok(Self { open, task })
    }

    /// The configurations with which a VM attaches the disks.
    pub fn configs(&self) -> impl Iterator<Item = DiskConfig> {
        let task = self.task;
        self.open
            .iter()
            .flat_map(move |(name, transport, _, store)| {
                store.disks().iter().map(move |disk| DiskConfig {
                    disk: OpenDisk {
                        device: device(name, task),
                        ..OpenDisk::new(name, Arc::new(disk.clone()))
                    },
                    transport: *transport,
                    notifications: Notifications::default(),
                })
            })
    }

    /// Copies the logs to the images and closes them. The VM must have been dropped.
    ///
    /// # Errors
    /// As [`Store::close`].
    pub fn close(self) -> Result<Vec<ClosedImage>, DemoError> {
        let close = |(name, _, path, store): (_, _, _, Store)| {
            store.close()?;
            Ok(ClosedImage { name, path })
        };
        self.open.into_iter().map(close).collect()
    }
}
