//! The flush of a disk beside its device, or when that has gone.

use walvisor_devices::backend::{Backend, Operation};

use super::readiness;

/// Makes everything written to `backend` durable.
///
/// # Errors
/// Why that failed, in one line.
pub fn flush(backend: &dyn Backend) -> Result<(), String> {
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
