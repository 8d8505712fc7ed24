//! A disk as a device of the driver.

use std::io;
use std::sync::Arc;

use super::control::{ControlDevice, DeviceError, KernelDevice, StepContext};
use super::layout::Parameters;
use super::worker::{QueueServers, WorkerPool};
use crate::backend::{Backend, SECTOR_SIZE};
use crate::control::{DeviceControl, Gate};
use crate::metrics::BlockMetrics;
use crate::throttle::Throttle;

/// A disk for the kernel's block layer.
pub struct Device {
    pub(super) name: String,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) metrics: Arc<BlockMetrics>,
    pub(super) gate: Arc<Gate>,
    pub(super) throttle: Arc<Throttle>,
    /// Whether changes are answered only when they outlive the process.
    pub(super) answer_written: bool,
    block_size: u32,
}

impl Device {
    /// Presents `backend` as a block device with logical blocks of `block_size` bytes, 512 or 4096.
    /// Log messages call it `name`. `answer_written`: a change is answered once it survives this
    /// process, which a device that waits for the next server needs.
    pub fn new(
        backend: Arc<dyn Backend>,
        name: &str,
        block_size: u32,
        answer_written: bool,
    ) -> Self {
        Self {
            name: name.to_owned(),
            backend,
            metrics: Arc::default(),
            gate: Arc::default(),
            throttle: Arc::default(),
            answer_written,
            block_size,
        }
    }

    /// The limits of the device.
    pub fn throttle(&self) -> Arc<Throttle> {
        Arc::clone(&self.throttle)
    }

    /// Serves the disk as `kernel`, from the threads of `pool`. The kernel lets nobody use it
    /// before [`ServedDevice::start`].
    ///
    /// # Errors
    /// If a device that waited is one that this disk does not fit, or the system refuses.
    pub fn serve(
        mut self,
        mut kernel: KernelDevice,
        pool: &WorkerPool,
    ) -> Result<ServedDevice, DeviceError> {
        let wanted = Parameters::of(&*self.backend, self.block_size);
        let told = kernel.configure(&wanted)?;
        let queues = kernel.take_queues();
        self.metrics = Arc::new(BlockMetrics::of_queues(queues.len()));
        let control = Arc::new(DiskControl {
            backend: Arc::clone(&self.backend),
            gate: Arc::clone(&self.gate),
            flushes: told.has_volatile_cache(),
            kernel: kernel.handle(),
            name: self.name.clone(),
        });
        let grown = told.sectors < wanted.sectors;
        let servers = QueueServers::start(&self, queues, pool).during("serve its queues")?;
        Ok(ServedDevice {
            device: self,
            servers: Some(servers),
            kernel,
            control,
            grown,
        })
    }
}

/// A device that is served. Dropping it before [`start`](Self::start) takes a new device out of the
/// kernel again; one that waited goes on waiting.
pub struct ServedDevice {
    device: Device,
    /// Before `kernel`: the driver wants all files closed.
    servers: Option<QueueServers>,
    kernel: KernelDevice,
    control: Arc<DiskControl>,
    /// The disk is larger than the device that waited for it.
    grown: bool,
}

impl ServedDevice {
    /// The path of the disk.
    pub fn path(&self) -> String {
        self.kernel.path()
    }

    /// The device's counters. Wakes by the kernel count as doorbells, system calls with answers as
    /// interrupts.
    pub fn metrics(&self) -> Arc<BlockMetrics> {
        Arc::clone(&self.device.metrics)
    }

    /// A handle with which the owner controls the device while it is in use.
    pub fn control(&self) -> Arc<dyn DeviceControl> {
        Arc::clone(&self.control) as _
    }

    /// Lets programs use the disk. Those that waited for a device go on.
    ///
    /// # Errors
    /// If the kernel refuses, or the queues are no longer served.
    pub fn start(&mut self) -> Result<(), DeviceError> {
        let servers = self.servers.as_ref();
        self.kernel
            .start(|| servers.is_some_and(|servers| !servers.have_ended()))?;
        if std::mem::take(&mut self.grown) {
            self.control.capacity_changed();
        }
        Ok(())
    }

    /// Takes the disk out of the kernel. Requests in flight are answered first.
    ///
    /// # Errors
    /// If the kernel refuses. The disk is then served as before.
    pub fn remove(&mut self) -> Result<(), DeviceError> {
        // A pause would hold up the requests that the kernel waits for.
        self.device.gate.open();
        self.kernel.stop()
    }
}

impl Drop for ServedDevice {
    fn drop(&mut self) {
        self.servers = None;
    }
}

/// The control handle of a device.
struct DiskControl {
    backend: Arc<dyn Backend>,
    gate: Arc<Gate>,
    /// Whether the kernel sends FLUSHes.
    flushes: bool,
    /// The device's number, and what commands it.
    kernel: (u32, Arc<ControlDevice>),
    name: String,
}

impl DeviceControl for DiskControl {
    fn capacity_changed(&self) {
        let (number, control) = &self.kernel;
        match control.resize(*number, self.backend.sectors()) {
            Ok(true) => {}
            Ok(false) => tracing::warn!(
                "disk '{}': its device keeps its size until it is removed and served again: this \
                 kernel's ublk can't resize (Linux 6.16 can)",
                self.name
            ),
            Err(error) => tracing::warn!(
                "disk '{}': its device keeps its size ({} bytes now): {error}",
                self.name,
                self.backend.sectors() * SECTOR_SIZE
            ),
        }
    }

    fn resize_obstacle(&self) -> Option<&'static str> {
        let (_, control) = &self.kernel;
        (!control.can_resize()).then_some(
            "this kernel's ublk can't resize its device (Linux 6.16 can): stop the daemon, run \
             'walvisor disk resize', and serve the disk again",
        )
    }

    /// A kernel that believes in writethrough never flushes.
    fn set_write_cache(&self, on: bool) -> bool {
        if self.backend.capabilities().write_cache_toggle && (self.flushes || !on) {
            self.backend.set_write_cache(on);
        }
        self.backend.write_cache()
    }

    fn pause(&self) -> io::Result<()> {
        self.gate.pause()
    }

    fn resume(&self) {
        self.gate.open();
    }
}
