//! Properties of a disk in use.

use std::any::Any;
use std::io;

use walvisor_devices::backend::{Backend, LogCounters};

/// The cache mode in force, after the driver's features, its `writeback` register and the disk's
/// owner.
pub fn cache_in_force(backend: &dyn Backend) -> &'static str {
    match (backend.is_unsafe(), backend.write_cache()) {
        (true, _) => "unsafe",
        (false, true) => "writeback",
        (false, false) => "writethrough",
    }
}

/// The store's disk; `None` if the disk has no log, or is a look at the past.
pub fn logged(backend: &dyn Backend) -> Option<&walvisor_storage::Disk> {
    let logged: &dyn Any = backend.logged()?;
    logged.downcast_ref()
}

/// The directory of the disk's log, in messages and metrics.
pub fn log_name(backend: &dyn Backend) -> Option<String> {
    let logged = backend.logged()?;
    Some(logged.log_dir().display().to_string())
}

/// The counters of the disk's log.
pub fn log_counters(backend: &dyn Backend) -> Option<LogCounters> {
    Some(backend.logged()?.log_counters())
}

/// Changes the size of the disk.
///
/// # Errors
/// If the disk can't have this size, or its size is fixed.
pub fn grow(backend: &dyn Backend, bytes: u64) -> io::Result<()> {
    let fixed = || {
        let kind = io::ErrorKind::Unsupported;
        io::Error::new(kind, "this kind of disk cannot change its size")
    };
    backend.resizable().ok_or_else(fixed)?.grow(bytes)
}
