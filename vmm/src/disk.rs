//! A disk that is open, and the disks and network devices that a guest or clients use.

use std::sync::Arc;

use walvisor_devices::backend::Backend;
use walvisor_devices::block::{BlockConfig, BlockMetrics};
use walvisor_devices::control::DeviceControl;
use walvisor_devices::net::NetMetrics;
use walvisor_devices::throttle::{Limits, Throttle};

/// An open disk and the configuration of its device.
#[derive(Clone)]
pub struct OpenDisk {
    /// The disk's name in messages and metrics.
    pub name: String,
    /// The backend that keeps its data.
    pub backend: Arc<dyn Backend>,
    /// The virtio device through which it is seen.
    pub kind: DeviceKind,
    /// The configuration of that device.
    pub device: BlockConfig,
    /// Limits on its requests and bytes per second.
    pub limits: Limits,
}

impl OpenDisk {
    /// A disk whose device has the default configuration, without limits.
    pub fn new(name: &str, backend: Arc<dyn Backend>) -> Self {
        Self {
            name: name.to_owned(),
            backend,
            kind: DeviceKind::default(),
            device: BlockConfig::default(),
            limits: Limits::default(),
        }
    }
}

/// The virtio device through which a guest or a front-end sees a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceKind {
    /// virtio-blk.
    #[default]
    Blk,
    /// virtio-scsi: a logical unit.
    Scsi,
}

/// A disk in use. Its counters stay readable after its device is gone.
#[derive(Clone)]
pub struct DiskInUse {
    /// The disk's name in messages, metrics and control requests.
    pub name: String,
    /// Its transport or protocol: `mmio`, `pci`, `nbd`, `vhost-user`, `tcmu`,
    /// `ublk`.
    pub transport: &'static str,
    /// The backend that keeps its data.
    pub backend: Arc<dyn Backend>,
    /// Counts and latencies of its requests.
    pub metrics: Arc<BlockMetrics>,
    /// Enforces its limits.
    pub throttle: Arc<Throttle>,
    /// Tells the device's users of changes, and pauses it. Does nothing once the device is gone.
    pub device: Arc<dyn DeviceControl>,
}

/// A network device in use. Its counters stay readable after the device is gone.
#[derive(Clone)]
pub struct NetworkInUse {
    /// Its transport: `mmio` or `pci`.
    pub transport: &'static str,
    /// Counts of its frames.
    pub metrics: Arc<NetMetrics>,
}

/// The virtio transport through which the guest reaches the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportKind {
    /// virtio-mmio, version 2.
    #[default]
    Mmio,
    /// virtio-pci, modern, with MSI-X.
    Pci,
}

impl TransportKind {
    /// The transport's name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mmio => "mmio",
            Self::Pci => "pci",
        }
    }
}

/// How doorbells and interrupts travel between the guest and the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Notifications {
    /// KVM turns a doorbell into a signal of an eventfd (ioeventfd), and a signal of another into
    /// an interrupt (irqfd). No vCPU exits to user space.
    #[default]
    Eventfds,
    /// A doorbell makes its vCPU exit to user space, and an interrupt takes an ioctl (KVM_IRQ_LINE,
    /// KVM_SIGNAL_MSI).
    Exits,
}
