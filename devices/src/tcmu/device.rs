//! A disk as a device of target_core_user.

use std::io;
use std::sync::Arc;

use crate::backend::Backend;
use crate::control::{DeviceControl, Gate};
use crate::metrics::BlockMetrics;
use crate::scsi::{LogicalUnit, UnitError};
use crate::throttle::Throttle;

/// A disk for the kernel's SCSI target. [`Worker::start`](super::Worker::start) serves it.
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
    /// Presents `backend` as a SCSI disk with logical blocks of `block_size` bytes. Log messages
    /// call it `name`; for `serial` see [`LogicalUnit::new`].
    ///
    /// # Errors
    /// If the disk cannot have blocks of this size.
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

    /// Makes the worker call `hook` with whether the disk has a volatile write cache, when it
    /// starts and at each change. It calls the hook with `true` before it answers the first write
    /// that relies on the cache, and with `false` only after every earlier write is durable.
    pub fn on_write_cache(&mut self, hook: Box<dyn Fn(bool) + Send + Sync>) {
        self.write_cache = hook.into();
    }

    /// The disk as a SCSI logical unit.
    pub fn unit(&self) -> &LogicalUnit {
        &self.unit
    }

    /// The device's counters. Commands count as requests, events of the kernel as doorbells, writes
    /// to the UIO device as interrupts.
    pub fn metrics(&self) -> Arc<BlockMetrics> {
        Arc::clone(&self.metrics)
    }

    /// The limits of the device.
    pub fn throttle(&self) -> Arc<Throttle> {
        Arc::clone(&self.throttle)
    }

    /// A handle with which the owner controls the device while it is in use.
    pub fn control(&self) -> Arc<dyn DeviceControl> {
        Arc::new(DiskControl {
            unit: Arc::clone(&self.unit),
            gate: Arc::clone(&self.gate),
        })
    }
}

/// The control handle of a device.
struct DiskControl {
    unit: Arc<LogicalUnit>,
    gate: Arc<Gate>,
}

impl DeviceControl for DiskControl {
    /// The next command gets UNIT ATTENTION (CAPACITY DATA HAS CHANGED). Initiators read the new
    /// capacity when they rescan.
    fn capacity_changed(&self) {
        self.unit.capacity_changed();
    }

    /// Only an initiator may turn writeback on (MODE SELECT, caching page): an initiator that has
    /// seen writethrough never flushes.
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
