//! A disk that is open, and a disk that a guest or clients use.

use std::any::Any;
use std::sync::Arc;

use walvisor_devices::backend::Backend;
use walvisor_devices::block::{BlockConfig, BlockMetrics};
use walvisor_devices::control::DeviceControl;
use walvisor_devices::throttle::{Limits, Throttle};

/// An open disk and the configuration of its device.
pub struct OpenDisk {
    /// The disk's name in messages and metrics.
    pub name: String,
    /// The backend that keeps its data.
    pub backend: Arc<dyn Backend>,
    /// The configuration of its virtio-blk device.
    pub device: BlockConfig,
    /// The limits on its use.
    pub limits: Limits,
}

/// A disk in use. Its counters stay readable after its device is gone.
#[derive(Clone)]
pub struct DiskInUse {
    /// The disk's name in messages, metrics and control requests.
    pub name: String,
    /// Its transport or protocol: `mmio`, `pci`, `nbd`, `vhost-user`, `tcmu`.
    pub transport: &'static str,
    /// The backend that keeps its data.
    pub backend: Arc<dyn Backend>,
    /// Counts and latencies of its requests.
    pub metrics: Arc<BlockMetrics>,
    /// Enforces the limits on its use.
    pub throttle: Arc<Throttle>,
    /// Reports changes to its users, and pauses it, while its device exists.
    pub device: Arc<dyn DeviceControl>,
}

/// The cache mode in force: what the driver's features, its `writeback` register and the disk's owner have led to.
pub fn cache_in_force(backend: &dyn Backend) -> &'static str {
    match (backend.is_unsafe(), backend.write_cache()) {
        (true, _) => "unsafe",
        (false, true) => "writeback",
        (false, false) => "writethrough",
    }
}

/// The disk, as one that has a log; `None`: it has none, or is a look at the past.
pub fn logged(backend: &dyn Backend) -> Option<&walvisor_storage::Disk> {
    let backend: &dyn Any = backend;
    backend.downcast_ref()
}

/// The directory of the disk's log, in messages and metrics.
pub fn log_name(backend: &dyn Backend) -> Option<String> {
    backend.log_dir().map(|dir| dir.display().to_string())
}
