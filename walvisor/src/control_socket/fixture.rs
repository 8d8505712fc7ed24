//! Daemons that tests control without a client or a device.

use std::sync::{Arc, Mutex, Weak};
use std::time::Instant;

use vm_memory::GuestMemoryMmap;
use walvisor_devices::backend::Backend;
use walvisor_devices::transport::MmioTransport;
use walvisor_vmm::disk::DiskInUse;

use super::{ControlledProcess, Power};
use crate::disk_spec::DiskCommand;

/// A disk whose device is gone.
pub(crate) fn disk(name: &str, backend: impl Backend + 'static) -> DiskInUse {
    DiskInUse {
        name: name.to_owned(),
        transport: "nbd",
        backend: Arc::new(backend),
        metrics: Arc::default(),
        throttle: Arc::default(),
        device: Arc::new(Weak::<Mutex<MmioTransport<Arc<GuestMemoryMmap>>>>::new()),
    }
}

/// A daemon that goes on after it was told to end.
pub(crate) fn daemon(disks: Vec<DiskInUse>) -> ControlledProcess {
    let power = Power::Daemon {
        end: Box::new(|| ()),
        hotplug: None,
    };
    ControlledProcess::new(DiskCommand::Nbd, Instant::now(), disks, power)
}
