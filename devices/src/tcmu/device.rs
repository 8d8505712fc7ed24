//! A disk as a device of target_core_user.

use std::io;
use std::sync::Arc;

use crate::backend::Backend;
use crate::control::{DeviceControl, Gate};
use crate::metrics::BlockMetrics;
use crate::scsi::{LogicalUnit, UnitError};
use crate::throttle::Throttle;

/// A disk that the kernel asks for. [`Worker::start`](super::Worker::start) serves it.
pub struct Device {
    pub(super) name: String,
    pub(super) unit: Arc<LogicalUnit>,
    pub(super) metrics: Arc<BlockMetrics>,
    pub(super) gate: Arc<Gate>,
    pub(super) throttle: Arc<Throttle>,
    pub(super) write_cache: WriteCacheHook,
}

/// Called with whether the disk has a volatile write cache.
pub(super) type WriteCacheHook = Arc<dyn Fn(bool) + Send + Sync>;

impl Device {
    /// Presents `backend` as a SCSI disk with logical blocks of `block_size` bytes. `name` is what messages call it;
    /// for `serial` see [`LogicalUnit::new`].
    ///
    /// # Errors
    /// If the disk cannot have such blocks.
    pub fn new(
        backend: Arc<dyn Backend>,
        name: &str,
        serial: &str,
        block_size: u32,
    ) -> Result<Self, UnitError> {
        Ok(Self {
            name: name.to_owned(),
            unit: Arc::new(LogicalUnit::new(backend, serial, block_size)?),
            metrics: Arc::new(BlockMetrics::of_queues(1)),
            gate: Arc::default(),
            throttle: Arc::default(),
            write_cache: Arc::new(|_| ()),
        })
    }

    /// Lets `told` know whether the disk has a volatile write cache: when serving begins, and whenever that changes. That there
    /// is one is told before a write is answered that goes by it; that there is none any more, once everything written
    /// before is durable.
    pub fn on_write_cache(&mut self, told: Box<dyn Fn(bool) + Send + Sync>) {
        self.write_cache = told.into();
    }

    /// The disk as SCSI shows it.
    pub fn unit(&self) -> &LogicalUnit {
        &self.unit
    }

    /// What the kernel has asked for so far: commands as requests, the kernel's events as doorbells, writes to the UIO
    /// device as interrupts.
    pub fn metrics(&self) -> Arc<BlockMetrics> {
        Arc::clone(&self.metrics)
    }

    /// The limits of the device.
    pub fn throttle(&self) -> Arc<Throttle> {
        Arc::clone(&self.throttle)
    }

    /// The device in use, for its owner.
    pub fn control(&self) -> Arc<dyn DeviceControl> {
        Arc::new(Controls {
            unit: Arc::clone(&self.unit),
            gate: Arc::clone(&self.gate),
        })
    }
}

/// A device as its owner sees it.
struct Controls {
    unit: Arc<LogicalUnit>,
    gate: Arc<Gate>,
}

impl DeviceControl for Controls {
    /// The next command hears of it (UNIT ATTENTION, CAPACITY DATA HAS CHANGED), and initiators ask for the new capacity
    /// when they are told to rescan.
    fn capacity_changed(&self) {
        self.unit.capacity_changed();
    }

    /// Writeback is for an initiator to ask for (MODE SELECT, caching page): one that was told of writethrough never
    /// flushes.
    fn set_write_cache(&self, on: bool) -> bool {
        let backend = self.unit.backend();
        if !on && backend.capabilities().write_cache_toggle {
            backend.set_write_cache(false);
        }
        backend.write_cache()
    }

    fn pause(&self) -> io::Result<()> {
        self.gate.close();
        Ok(())
    }

    fn resume(&self) {
        self.gate.open();
    }
}
