//! Passing open descriptors between processes, with bytes, over a Unix socket (SCM_RIGHTS).

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Most descriptors that are passed at a time.
const MOST_FILES: usize = 4;

/// Sends bytes, and descriptors with the first byte. Returns how many bytes were sent.
///
/// # Errors
/// If the system refuses.
///
/// # Panics
/// If there are more than four descriptors.
pub(crate) fn send(
    socket: impl AsFd,
    bytes: &[u8],
    files: &[BorrowedFd<'_>],
) -> rustix::io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        let fits = control.push(SendAncillaryMessage::ScmRights(files));
        assert!(fits, "at most {MOST_FILES} descriptors");
    }
    let slices = [IoSlice::new(bytes)];
    sendmsg(socket, &slices, &mut control, SendFlags::NOSIGNAL)
}

/// Receives bytes, and the first descriptors that come with them; the system closes those beyond
/// four. Returns how many bytes came.
///
/// # Errors
/// If the system refuses.
pub(crate) fn receive(
    socket: impl AsFd,
    bytes: &mut [u8],
) -> rustix::io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MOST_FILES))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let slices = &mut [IoSliceMut::new(bytes)];
    let received = recvmsg(socket, slices, &mut control, RecvFlags::CMSG_CLOEXEC)?;
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            files.extend(rights);
        }
    }
    Ok((received.bytes, files))
}
