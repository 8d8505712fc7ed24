//! The flush of a disk that no longer has a device.

use walvisor_devices::backend::{Backend, Operation};

use super::readiness;

/// Makes everything written to `backend` durable.
pub(super) fn flush(backend: &dyn Backend) -> Result<(), String> {
    if !backend.capabilities().flush {
        return Ok(());
    }
    let mut queue = backend.open_queue().map_err(|error| error.to_string())?;
    queue.submit(0, Operation::Flush);
    queue.kick();
    let mut done = Vec::new();
    loop {
        queue.completions(&mut done);
        if let Some(completion) = done.pop() {
            return completion
                .result
                .map(drop)
                .map_err(|failure| failure.to_string());
        }
        readiness::wait([queue.event()]).map_err(|error| error.to_string())?;
    }
}
