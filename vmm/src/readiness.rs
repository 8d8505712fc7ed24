//! Event descriptors of `vmm-sys-util` in a form that an event loop can watch: they do not implement
//! [`AsFd`](std::os::fd::AsFd).

use std::os::fd::{AsRawFd, BorrowedFd};

use vmm_sys_util::eventfd::EventFd;

/// `event` as a borrowed descriptor.
pub fn descriptor(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: `event` owns the descriptor, and the borrow ends before it does.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}
