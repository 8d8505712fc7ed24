//! A disk that is open, and a disk that is in use by a guest or by clients.

use std::sync::Arc;

use walvisor_devices::backend::Backend;
use walvisor_devices::block::{BlockConfig, BlockMetrics};
use walvisor_devices::control::DeviceControl;
use walvisor_devices::throttle::{Limits, Throttle};

/// A disk that is open, and how it is to look.
pub struct OpenDisk {
    /// What messages and metrics call it.
    pub name: String,
    /// What keeps its data.
    pub backend: Arc<dyn Backend>,
    /// How a device over it looks.
    pub device: BlockConfig,
    /// How much of it may be used.
    pub limits: Limits,
}

/// A disk in use. Its counters stay readable when its device is gone.
#[derive(Clone)]
pub struct DiskInUse {
    /// What messages, metrics and control requests call it.
    pub name: String,
    /// How it is reached: `mmio`, `pci`, `nbd`, `vhost-user`, `tcmu`.
    pub transport: &'static str,
    /// What keeps its data.
    pub backend: Arc<dyn Backend>,
    /// What was asked of it.
    pub metrics: Arc<BlockMetrics>,
    /// How much of it may be used.
    pub throttle: Arc<Throttle>,
    /// How its users are told of changes, while its device is there.
    pub device: Arc<dyn DeviceControl>,
}
