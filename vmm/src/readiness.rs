//! Waiting until one of several descriptors is readable.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Instant;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use vmm_sys_util::eventfd::EventFd;

/// `event` as a borrowed descriptor.
pub fn descriptor(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: `event` owns the descriptor, and the borrow ends before it does.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

/// Waits until at least one of `fds` is readable or at its end, and says which.
///
/// # Errors
/// If the system refuses to wait.
pub fn wait<const N: usize>(fds: [BorrowedFd<'_>; N]) -> io::Result<[bool; N]> {
    wait_until(fds, None)
}

/// As [`wait`], but no longer than until `end`: none is readable then.
///
/// # Errors
/// If the system refuses to wait.
pub fn wait_until<const N: usize>(
    fds: [BorrowedFd<'_>; N],
    end: Option<Instant>,
) -> io::Result<[bool; N]> {
    let mut polled = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let left = left.map(|left| Timespec::try_from(left).unwrap_or_default());
        match poll(&mut polled, left.as_ref()) {
            Ok(_) => return Ok(polled.each_ref().map(|fd| !fd.revents().is_empty())),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
