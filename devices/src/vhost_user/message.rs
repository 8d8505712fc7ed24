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

/// What comes next on a connection.
pub(super) enum NextEvent {
    /// The front-end has sent a whole message.
    Message(Message),
    /// The owner requests something.
    Owner(OwnerRequest),
}

/// A front-end's non-blocking socket. Half a message, or replies that the front-end does not read,
/// delay nobody but the front-end: they wait here.
pub(super) struct Channel<'a> {
    socket: BorrowedFd<'a>,
    waiter: &'a mut Waiter<OwnerRequest>,
    incoming: IncomingMessage,
    outgoing: OutgoingReply,
}

/// What has arrived of a message.
#[derive(Default)]
struct IncomingMessage {
    bytes: Vec<u8>,
    files: Vec<File>,
}

/// What was not sent yet of a reply.
#[derive(Default)]
struct OutgoingReply {
    bytes: Vec<u8>,
    /// Goes with the first byte.
    file: Option<File>,
}

impl IncomingMessage {
    fn field(&self, at: usize) -> u32 {
        let bytes = self.bytes.get(at..).and_then(<[u8]>::first_chunk);
        bytes.copied().map_or(0, u32::from_ne_bytes)
    }

    /// The message's length, as far as it is known.
    fn length(&self) -> Outcome<usize> {
        if self.bytes.len() < HEADER {
            return Ok(HEADER);
        }
        let (request, flags, size) = (self.field(0), self.field(4), self.field(8) as usize);
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
        Ok(HEADER + size)
    }

    /// Takes the message, which is whole.
    fn take(&mut self) -> Message {
        let message = Message {
            request: self.field(0),
            need_reply: self.field(4) & NEED_REPLY != 0,
            payload: self.bytes.split_off(HEADER),
            files: std::mem::take(&mut self.files),
        };
        self.bytes.clear();
        message
    }
}

impl<'a> Channel<'a> {
    pub(super) fn new(
        socket: BorrowedFd<'a>,
        waiter: &'a mut Waiter<OwnerRequest>,
    ) -> Outcome<Self> {
        waiter.watch(socket)?;
        Ok(Self {
            socket,
            waiter,
            incoming: IncomingMessage::default(),
            outgoing: OutgoingReply::default(),
        })
    }

    /// Waits for what comes next. Messages that follow one whose reply is not sent have to wait.
    pub(super) fn next(&mut self) -> Outcome<NextEvent> {
        loop {
            let sends = !self.outgoing.bytes.is_empty();
            let wanted = if sends { EventSet::OUT } else { EventSet::IN };
            if let Some(request) = next_request(self.waiter, self.socket, wanted)? {
                return Ok(NextEvent::Owner(request));
            }
            if sends {
                self.send()?;
            } else if let Some(message) = self.receive()? {
                return Ok(NextEvent::Message(message));
            }
        }
    }

    /// Receives the front-end's next message; `None`: it is not whole yet.
    fn receive(&mut self) -> Outcome<Option<Message>> {
        let Self {
            incoming, socket, ..
        } = self;
        loop {
            let (done, length) = (incoming.bytes.len(), incoming.length()?);
            if done == length {
                return Ok(Some(incoming.take()));
            }
            incoming.bytes.resize(length, 0);
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
            let mut control = RecvAncillaryBuffer::new(&mut space);
            let received = recvmsg(
                *socket,
                &mut [IoSliceMut::new(&mut incoming.bytes[done..])],
                &mut control,
                RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT,
            );
            for message in control.drain() {
                if let RecvAncillaryMessage::ScmRights(rights) = message {
                    incoming.files.extend(rights.map(File::from));
                }
            }
            let count = received.as_ref().map_or(0, |received| received.bytes);
            incoming.bytes.truncate(done + count);
            match received {
                Ok(_) if count == 0 && done == 0 => return Err(SessionEnd::Gone),
                Ok(_) if count == 0 => return Err(refuse("it left in the middle of a message")),
                Ok(_) if incoming.files.len() > MAX_FILES => {
                    return Err(refuse("a message has too many descriptors"));
                }
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::CONNRESET) => return Err(SessionEnd::Gone),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Answers `request`, now or when the front-end reads.
    pub(super) fn reply(
        &mut self,
        request: u32,
        payload: &[u8],
        file: Option<File>,
    ) -> Outcome<()> {
        let bytes = &mut self.outgoing.bytes;
        for field in [request, VERSION | REPLY, payload.len() as u32] {
            bytes.extend_from_slice(&field.to_ne_bytes());
        }
        bytes.extend_from_slice(payload);
        self.outgoing.file = file;
        self.send()
    }

    /// Sends as much of a reply as the front-end takes.
    fn send(&mut self) -> Outcome<()> {
        let OutgoingReply { bytes, file } = &mut self.outgoing;
        while !bytes.is_empty() {
            let fds: Vec<_> = file.iter().map(|file| file.as_fd()).collect();
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() {
                control.push(SendAncillaryMessage::ScmRights(&fds));
            }
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match sendmsg(self.socket, &[IoSlice::new(bytes)], &mut control, flags) {
                Ok(sent) => {
                    bytes.drain(..sent);
                    *file = None;
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::PIPE | Errno::CONNRESET) => return Err(SessionEnd::Gone),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Waits for a request of the owner; `None`: one of the events `wanted` applies to `fd`, which is
/// watched.
pub(super) fn next_request(
    waiter: &mut Waiter<OwnerRequest>,
    fd: impl AsFd,
    wanted: EventSet,
) -> Outcome<Option<OwnerRequest>> {
    loop {
        if let Some(request) = waiter.message() {
            return Ok(Some(request));
        }
        match waiter.wait(&fd, wanted, None)? {
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
