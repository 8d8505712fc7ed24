//! The two disks of the demo, each with a log of its own, so that their syncs are counted apart.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use walvisor_devices::block::BlockConfig;
use walvisor_storage::{DiskOptions, Store, StoreOptions, create_disk, default_log_dir};

use super::DemoError;
use crate::disk_spec::TransportKind;
use crate::vm::DiskConfig;

/// Names of the disks, which are also those of the transports in the guest's reports.
const DISKS: [(&str, TransportKind); 2] =
    [("mmio", TransportKind::Mmio), ("pci", TransportKind::Pci)];
/// Bytes of a disk; the guest uses the first 8 MiB.
const DISK_SIZE: u64 = 64 << 20;
/// Small segments: they are filled with zeroes when they are made, and the job is short.
const SEGMENT_SIZE: u64 = 16 << 20;
const QUEUES: u16 = 4;
const QUEUE_SIZE: u16 = 128;

/// Open disks.
pub struct DemoDisks {
    open: Vec<(&'static str, TransportKind, PathBuf, Store)>,
}

/// The image of a disk that was closed: a plain raw file.
pub struct ClosedImage {
    /// The disk's name.
    pub name: &'static str,
    /// The image.
    pub path: PathBuf,
}

impl DemoDisks {
    /// Makes the disks and their logs in `directory`.
    ///
    /// # Errors
    /// As [`create_disk`] and [`Store::open`].
    pub fn create(directory: &Path) -> Result<Self, DemoError> {
        let options = StoreOptions {
            segment_size: SEGMENT_SIZE,
            ..Default::default()
        };
        let mut open = Vec::new();
        for (name, transport) in DISKS {
            let path = directory.join(format!("{name}.img"));
            let log = default_log_dir(&path);
            create_disk(&path, DISK_SIZE, &log, &options)?;
            let store = Store::open(&log, &[DiskOptions::new(&path)], &options)?;
            open.push((name, transport, path, store));
        }
        Ok(Self { open })
    }

    /// What a VM needs to attach them.
    pub fn configs(&self) -> impl Iterator<Item = DiskConfig> {
        self.open.iter().flat_map(|(name, transport, _, store)| {
            store.disks().iter().map(move |disk| DiskConfig {
                limits: walvisor_devices::throttle::Limits::default(),
                name: (*name).to_owned(),
                backend: Arc::new(disk.clone()),
                transport: *transport,
                device: BlockConfig {
                    queues: QUEUES,
                    queue_size: QUEUE_SIZE,
                    serial: format!("walvisor-{name}"),
                    ..BlockConfig::default()
                },
            })
        })
    }

    /// Copies the logs to the images and closes them. The VM must be gone.
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
