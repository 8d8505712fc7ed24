//! The flush of a disk by a caller that has no queue of it: beside its device, or after the device is gone.

use std::io;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use walvisor_storage::Operation;

use super::disk::Backend;

/// Makes durable everything that was written to `backend` before. Opens a queue for it and waits for the medium. For a
/// backend without FLUSH it does nothing.
///
/// # Errors
/// If the system refuses a queue, or the flush fails.
pub fn flush(backend: &dyn Backend) -> io::Result<()> {
    if !backend.capabilities().flush {
        return Ok(());
    }
    let mut queue = backend.open_queue()?;
    queue.submit(0, Operation::Flush);
    queue.kick();
    let mut done = Vec::new();
    loop {
        queue.completions(&mut done);
        if let Some(completion) = done.pop() {
            return completion
                .result
                .map(drop)
                .map_err(|failure| io::Error::other(failure.to_string()));
        }
        let mut event = [PollFd::from_borrowed_fd(queue.event(), PollFlags::IN)];
        match poll(&mut event, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
