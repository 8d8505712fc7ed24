//! Properties of a disk in use.

use std::any::Any;

use walvisor_devices::backend::Backend;

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
    let backend: &dyn Any = backend;
    backend.downcast_ref()
}

/// The directory of the disk's log, in messages and metrics.
pub fn log_name(backend: &dyn Backend) -> Option<String> {
    backend.log_dir().map(|dir| dir.display().to_string())
}
