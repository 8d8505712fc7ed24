//! A vhost-user front-end that sends any bytes, also those that no library would send
//! (`docs/interop/vhost-user.rst` of QEMU).

use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use crate::PATIENCE;

/// Declares the requests, which have their names and numbers from the specification.
macro_rules! requests {
    ($($name:ident = $number:literal,)*) => {
        $(#[doc = concat!("The request VHOST_USER_", stringify!($name), ".")] pub const $name: u32 = $number;)*
    };
}

requests! {
    GET_FEATURES = 1,
    SET_FEATURES = 2,
    SET_MEM_TABLE = 5,
    SET_VRING_NUM = 8,
    SET_VRING_ADDR = 9,
    SET_VRING_BASE = 10,
    SET_VRING_KICK = 12,
    SET_VRING_CALL = 13,
    SET_VRING_ERR = 14,
    SET_PROTOCOL_FEATURES = 16,
    GET_QUEUE_NUM = 17,
    SET_VRING_ENABLE = 18,
    SET_BACKEND_REQ_FD = 21,
    GET_CONFIG = 24,
    SET_CONFIG = 25,
    GET_INFLIGHT_FD = 31,
    SET_INFLIGHT_FD = 32,
    RESET_DEVICE = 34,
    ADD_MEM_REG = 37,
    REM_MEM_REG = 38,
}

/// VERSION_1 and VHOST_USER_F_PROTOCOL_FEATURES.
pub const FEATURES: u64 = 1 << 32 | 1 << 30;
/// The flags of a request: the protocol's version.
pub const VERSION: u32 = 1;
/// The flag of a request that gets an acknowledgement, with the protocol feature REPLY_ACK.
pub const NEED_REPLY: u32 = 1 << 3;

/// A connection to a back-end.
pub struct FrontEnd {
    /// The connection itself. A read that takes longer than [`PATIENCE`] fails.
    pub socket: UnixStream,
}

impl FrontEnd {
    /// Connects, and sends nothing.
    #[track_caller]
    #[must_use]
    pub fn connect(path: &Path) -> Self {
        let socket = UnixStream::connect(path).expect("the back-end listens");
        socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        Self { socket }
    }

    /// Sends bytes, which need not be a message. The back-end may have closed the connection
    /// already: the test checks for that.
    pub fn send(&mut self, bytes: &[u8]) {
        let _ = self.socket.write_all(bytes);
    }

    /// Sends a message with a payload of 64-bit fields.
    pub fn fields(&mut self, request: u32, fields: &[u64]) {
        self.message(request, &payload(fields), &[]);
    }

    /// Sends a message with descriptors.
    pub fn message(&mut self, request: u32, payload: &[u8], files: &[BorrowedFd<'_>]) {
        self.flagged(request, VERSION, payload, files);
    }

    /// Sends a message with these flags in its header. As [`send`](Self::send) it ignores a closed
    /// connection.
    pub fn flagged(&mut self, request: u32, flags: u32, payload: &[u8], files: &[BorrowedFd<'_>]) {
        let mut bytes = header(request, payload.len() as u32).to_vec();
        bytes[4..8].copy_from_slice(&flags.to_ne_bytes());
        bytes.extend_from_slice(payload);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(40))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(files.is_empty() || control.push(SendAncillaryMessage::ScmRights(files)));
        let slices = [IoSlice::new(&bytes)];
        let _ = sendmsg(&self.socket, &slices, &mut control, SendFlags::NOSIGNAL);
    }

    /// The payload of the next reply.
    #[track_caller]
    pub fn reply(&mut self, request: u32) -> Vec<u8> {
        let mut head = [0; 12];
        self.socket.read_exact(&mut head).expect("a reply");
        let field = |at: usize| u32::from_ne_bytes(head[at..at + 4].try_into().expect("4 bytes"));
        assert_eq!((field(0), field(4)), (request, 5));
        let mut payload = vec![0; field(8) as usize];
        self.socket.read_exact(&mut payload).expect("a payload");
        payload
    }

    /// Sends a message, and returns the payload of its reply.
    #[track_caller]
    pub fn ask(&mut self, request: u32, payload: &[u8]) -> Vec<u8> {
        self.message(request, payload, &[]);
        self.reply(request)
    }

    /// Sends a message that gets only an acknowledgement, and waits for it.
    #[track_caller]
    pub fn tell(&mut self, request: u32, payload: &[u8], files: &[BorrowedFd<'_>]) {
        self.flagged(request, VERSION | NEED_REPLY, payload, files);
        assert_eq!(self.reply(request), [0; 8], "request {request}");
    }

    /// Bytes of the configuration space.
    #[track_caller]
    pub fn config(&mut self, offset: u32, len: u32) -> Vec<u8> {
        let mut payload = config_header(offset, len);
        payload.resize(12 + len as usize, 0);
        self.ask(GET_CONFIG, &payload).split_off(12)
    }

    /// Sectors of the disk, according to its configuration space.
    #[track_caller]
    pub fn capacity(&mut self) -> u64 {
        let bytes = self.config(0, 8);
        u64::from_le_bytes(bytes.try_into().expect("8 bytes"))
    }

    /// Waits until the back-end closes the connection, and discards its last messages. `false`: it
    /// did not in time.
    pub fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.socket.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }

    /// Shares a page of memory at address 0 of the guest and of the front-end.
    pub fn share_page(&mut self, file: &File) {
        let region = payload(&[1, 0, 0x1000, 0, 0]);
        self.message(SET_MEM_TABLE, &region, &[file.as_fd()]);
    }

    /// Sets up ring 0 with 4 descriptors in that page, and starts it.
    pub fn start_ring(&mut self, kick: &OwnedFd, error: &OwnedFd) {
        self.fields(SET_FEATURES, &[FEATURES]);
        self.fields(SET_VRING_NUM, &[pair(0, 4)]);
        self.fields(SET_VRING_BASE, &[pair(0, 0)]);
        self.fields(SET_VRING_ADDR, &[0, 0, 0x200, 0x100, 0]);
        self.message(SET_VRING_ERR, &payload(&[0]), &[error.as_fd()]);
        self.message(SET_VRING_KICK, &payload(&[0]), &[kick.as_fd()]);
        self.fields(SET_VRING_ENABLE, &[pair(0, 1)]);
    }
}

/// The header of a message whose payload has `size` bytes.
#[must_use]
pub fn header(request: u32, size: u32) -> [u8; 12] {
    let fields = [request, VERSION, size].map(u32::to_ne_bytes);
    fields.concat().try_into().expect("12 bytes")
}

/// What a payload that reads or writes the configuration space begins with.
#[must_use]
pub fn config_header(offset: u32, len: u32) -> Vec<u8> {
    [offset, len, 0].map(u32::to_ne_bytes).concat()
}

/// Two 32-bit fields as one of 64.
#[must_use]
pub fn pair(first: u32, second: u32) -> u64 {
    u64::from(second) << 32 | u64::from(first)
}

/// A payload of 64-bit fields.
#[must_use]
pub fn payload(fields: &[u64]) -> Vec<u8> {
    fields
        .iter()
        .flat_map(|field| field.to_ne_bytes())
        .collect()
}

/// Memory that can be shared.
#[must_use]
pub fn memory(bytes: u64) -> File {
    let fd = memfd_create("memory", MemfdFlags::CLOEXEC).expect("a file in memory");
    let file = File::from(fd);
    file.set_len(bytes).expect("room");
    file
}
