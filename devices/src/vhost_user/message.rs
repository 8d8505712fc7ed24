//! Messages on the socket: a header, a payload, and descriptors as ancillary data.
//!
//! ```text
//!  request u32 │ flags u32: version 1, REPLY 4, NEED_REPLY 8 │ size u32 │ payload, native byte order
//! ```

use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use super::outcome::{Outcome, SessionEnd, refuse};
use super::owner::OwnerRequest;
use crate::event_loop::EventSet;
use crate::listen::{Waiter, WakeReason};

const HEADER: usize = 12;
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// The longest payload that is accepted, in bytes: enough for a memory table of 32 regions, or a
/// configuration space with its header.
const MAX_PAYLOAD: usize = 4096;
/// The most descriptors that come with one message.
const MAX_FILES: usize = 32;

/// A message from the front-end.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) request: u32,
    /// Whether the front-end waits for an acknowledgement, if REPLY_ACK was negotiated.
    pub(super) need_reply: bool,
    pub(super) payload: Vec<u8>,
    pub(super) files: Vec<File>,
}

impl Message {
    /// The 32-bit field at byte `at` of the payload.
    pub(super) fn u32(&self, at: usize) -> Outcome<u32> {
        self.bytes(at).map(u32::from_ne_bytes)
    }

    /// The 64-bit field at byte `at` of the payload.
    pub(super) fn u64(&self, at: usize) -> Outcome<u64> {
        self.bytes(at).map(u64::from_ne_bytes)
    }

    /// The 16-bit field at byte `at` of the payload.
    pub(super) fn u16(&self, at: usize) -> Outcome<u16> {
        self.bytes(at).map(u16::from_ne_bytes)
    }

    fn bytes<const N: usize>(&self, at: usize) -> Outcome<[u8; N]> {
        let bytes = self.payload.get(at..).and_then(<[u8]>::first_chunk);
        bytes.copied().ok_or_else(|| {
            let (request, len) = (self.request, self.payload.len());
            refuse(format!("message {request} ends after {len} bytes"))
        })
    }

    /// Takes the only descriptor that came with the message, if any.
    pub(super) fn take_file(&mut self) -> Outcome<Option<File>> {
        if self.files.len() > 1 {
            let request = self.request;
            return Err(refuse(format!(
                "message {request} comes with more than one descriptor"
            )));
        }
        Ok(self.files.pop())
    }
}

/// A front-end's non-blocking socket. A wait on it also ends when the server stops.
pub(super) struct Channel<'a> {
    socket: BorrowedFd<'a>,
    waiter: &'a mut Waiter<OwnerRequest>,
}

impl<'a> Channel<'a> {
    pub(super) fn new(
        socket: BorrowedFd<'a>,
        waiter: &'a mut Waiter<OwnerRequest>,
    ) -> Outcome<Self> {
        waiter.watch(socket)?;
        Ok(Self { socket, waiter })
    }

    /// Waits for a request of the owner; `None`: a message from the front-end has arrived.
    pub(super) fn wait_for_request(&mut self) -> Outcome<Option<OwnerRequest>> {
        next_request(self.waiter, self.socket)
    }

    /// Receives the front-end's next message.
    pub(super) fn receive(&mut self) -> Outcome<Message> {
        let mut header = [0; HEADER];
        let mut files = Vec::new();
        self.fill(&mut header, &mut files, true)?;
        let field = |at: usize| {
            let bytes = header[at..].first_chunk().copied();
            u32::from_ne_bytes(bytes.unwrap_or_default())
        };
        let (request, flags, size) = (field(0), field(4), field(8) as usize);
        if flags & VERSION_MASK != VERSION || flags & !(VERSION_MASK | NEED_REPLY) != 0 {
            return Err(refuse(format!(
                "an invalid message header: flags {flags:#x}"
            )));
        }
        if size > MAX_PAYLOAD {
            return Err(refuse(format!(
                "message {request} is {size} bytes, more than {MAX_PAYLOAD}"
            )));
        }
        let mut payload = vec![0; size];
        self.fill(&mut payload, &mut files, false)?;
        Ok(Message {
            request,
            need_reply: flags & NEED_REPLY != 0,
            payload,
            files,
        })
    }

    /// Reads until `bytes` is full. `first`: a message starts here, so the end of the stream is not
    /// an error.
    fn fill(&mut self, bytes: &mut [u8], files: &mut Vec<File>, first: bool) -> Outcome<()> {
        let mut done = 0;
        while done < bytes.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let received = recvmsg(
                self.socket,
                &mut [IoSliceMut::new(&mut bytes[done..])],
                &mut control,
                RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
            );
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    files.extend(rights.map(File::from));
                }
            }
            match received {
                Ok(received) if received.bytes == 0 && first && done == 0 => {
                    return Err(SessionEnd::Gone);
                }
                Ok(received) if received.bytes == 0 => {
                    return Err(refuse("it left in the middle of a message"));
                }
                Ok(_) if files.len() > MAX_FILES => {
                    return Err(refuse("a message has too many descriptors"));
                }
                Ok(received) => done += received.bytes,
                Err(Errno::AGAIN) => self.wait(EventSet::IN)?,
                Err(Errno::INTR) => {}
                Err(Errno::CONNRESET) => return Err(SessionEnd::Gone),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Answers `request`.
    pub(super) fn reply(
        &mut self,
        request: u32,
        payload: &[u8],
        file: Option<&File>,
    ) -> Outcome<()> {
        let mut bytes = Vec::with_capacity(HEADER + payload.len());
        for field in [request, VERSION | REPLY, payload.len() as u32] {
            bytes.extend_from_slice(&field.to_ne_bytes());
        }
        bytes.extend_from_slice(payload);
        let fds: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
        let mut done = 0;
        while done < bytes.len() {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if done == 0 && !fds.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(&fds));
            }
            let slices = [IoSlice::new(&bytes[done..])];
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match sendmsg(self.socket, &slices, &mut control, flags) {
                Ok(sent) => done += sent,
                Err(Errno::AGAIN) => self.wait(EventSet::OUT)?,
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(SessionEnd::Gone),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Waits in the middle of a message. Requests of the owner are left for later.
    fn wait(&mut self, what: EventSet) -> Outcome<()> {
        loop {
            match self.waiter.wait(self.socket, what, None)? {
                WakeReason::Stopped => return Err(SessionEnd::Gone),
                WakeReason::Ready => return Ok(()),
                WakeReason::Message | WakeReason::TimedOut => {}
            }
        }
    }
}

/// Waits for a request of the owner; `None`: `fd`, which is watched, has become readable.
pub(super) fn next_request(
    waiter: &mut Waiter<OwnerRequest>,
    fd: impl AsFd,
) -> Outcome<Option<OwnerRequest>> {
    loop {
        if let Some(request) = waiter.message() {
            return Ok(Some(request));
        }
        match waiter.wait(&fd, EventSet::IN, None)? {
            WakeReason::Stopped => return Err(SessionEnd::Gone),
            WakeReason::Ready => return Ok(None),
            WakeReason::Message | WakeReason::TimedOut => {}
        }
    }
}

impl Drop for Channel<'_> {
    fn drop(&mut self) {
        self.waiter.unwatch(self.socket);
    }
}

/// Sends a request without payload to a front-end, over the channel that it has provided for that.
/// Never waits: a front-end whose socket buffer is full misses the request.
pub(super) fn send_to_front_end(channel: &File, request: u32) -> Result<(), Errno> {
    let mut bytes = [0; HEADER];
    for (at, field) in [(0, request), (4, VERSION), (8, 0)] {
        bytes[at..at + 4].copy_from_slice(&field.to_ne_bytes());
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    let mut control = SendAncillaryBuffer::default();
    sendmsg(channel, &[IoSlice::new(&bytes)], &mut control, flags).map(drop)
}
