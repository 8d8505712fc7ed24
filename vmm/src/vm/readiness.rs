//! Waiting until one of several descriptors is readable.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::event::{PollFd, PollFlags, poll};
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
    let mut polled = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
    loop {
        match poll(&mut polled, None) {
            Ok(_) => return Ok(polled.each_ref().map(|fd| !fd.revents().is_empty())),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
