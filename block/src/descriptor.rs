//! Event descriptors of `vmm-sys-util`, which do not implement [`AsFd`](std::os::fd::AsFd).

use std::os::fd::{AsRawFd, BorrowedFd};

use vmm_sys_util::eventfd::EventFd;

/// `event` as a borrowed descriptor, for [`BackendQueue::event`](crate::BackendQueue::event) and
/// for event loops.
pub fn descriptor(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: `event` owns the descriptor, and the borrow ends before it does.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}
