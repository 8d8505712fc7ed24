//! A disk as a device of target_core_user.

use std::sync::Arc;

use crate::backend::Backend;
use crate::control::DeviceControl;
use crate::metrics::BlockMetrics;
use crate::scsi::{LogicalUnit, SharedUnit, UnitError};
use crate::throttle::Throttle;

/// A disk for the kernel's SCSI target. [`Worker::start`](super::Worker::start) serves it.
pub struct Device {
    pub(super) name: String,
    pub(super) shared: SharedUnit,
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
            shared: SharedUnit::new(LogicalUnit::new(backend, serial, block_size)?, 1),
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
        &self.shared.unit
    }

    /// The device's counters. Commands count as requests, events of the kernel as doorbells, writes
    /// to the UIO device as interrupts.
    pub fn metrics(&self) -> Arc<BlockMetrics> {
        Arc::clone(&self.shared.metrics)
    }

    /// The limits of the device.
    pub fn throttle(&self) -> Arc<Throttle> {
        Arc::clone(&self.shared.throttle)
    }

    /// A handle with which the owner controls the device while it is in use.
    pub fn control(&self) -> Arc<dyn DeviceControl> {
        Arc::new(self.shared.clone())
    }
}
