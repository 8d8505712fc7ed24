//! A front-end that sends raw bytes: for messages that no library would send.

use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

pub const GET_FEATURES: u32 = 1;
pub const SET_FEATURES: u32 = 2;
pub const SET_MEM_TABLE: u32 = 5;
pub const SET_VRING_NUM: u32 = 8;
pub const SET_VRING_ADDR: u32 = 9;
pub const SET_VRING_BASE: u32 = 10;
pub const SET_VRING_KICK: u32 = 12;
pub const SET_VRING_CALL: u32 = 13;
pub const SET_VRING_ERR: u32 = 14;
pub const SET_PROTOCOL_FEATURES: u32 = 16;
pub const SET_VRING_ENABLE: u32 = 18;
pub const GET_CONFIG: u32 = 24;
pub const SET_CONFIG: u32 = 25;
pub const GET_INFLIGHT_FD: u32 = 31;
pub const SET_INFLIGHT_FD: u32 = 32;
pub const ADD_MEM_REG: u32 = 37;
pub const REM_MEM_REG: u32 = 38;

/// VERSION_1 and VHOST_USER_F_PROTOCOL_FEATURES.
pub const FEATURES: u64 = 1 << 32 | 1 << 30;

pub struct FrontEnd {
    pub socket: UnixStream,
}

impl FrontEnd {
    pub fn connect(path: &Path) -> Self {
        let socket = UnixStream::connect(path).expect("the daemon listens");
        socket
            .set_read_timeout(Some(Duration::from_secs(120)))
            .unwrap();
        Self { socket }
    }

    pub fn send(&mut self, bytes: &[u8]) {
        // The daemon may have closed the connection already; the test checks for that.
        let _ = self.socket.write_all(bytes);
    }

    /// Sends a message with a payload of 64-bit fields.
    pub fn fields(&mut self, request: u32, fields: &[u64]) {
        self.message(request, &payload(fields), &[]);
    }

    pub fn message(&mut self, request: u32, payload: &[u8], files: &[BorrowedFd<'_>]) {
        let mut bytes = header(request, payload.len() as u32).to_vec();
        bytes.extend_from_slice(payload);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(40))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(files)));
        }
        let slices = [IoSlice::new(&bytes)];
        let _ = sendmsg(&self.socket, &slices, &mut control, SendFlags::NOSIGNAL);
    }

    /// The payload of the next reply, which must be to `request`.
    #[track_caller]
    pub fn reply(&mut self, request: u32) -> Vec<u8> {
        let mut head = [0; 12];
        self.socket.read_exact(&mut head).expect("a reply");
        let field = |at: usize| u32::from_ne_bytes(head[at..at + 4].try_into().unwrap());
        assert_eq!((field(0), field(4)), (request, 5));
        let mut payload = vec![0; field(8) as usize];
        self.socket.read_exact(&mut payload).unwrap();
        payload
    }

    /// Sectors of the disk, according to its configuration space.
    pub fn capacity(&mut self) -> u64 {
        let mut piece = vec![0; 20];
        piece[4] = 8;
        self.message(GET_CONFIG, &piece, &[]);
        let reply = self.reply(GET_CONFIG);
        u64::from_le_bytes(reply[12..].try_into().unwrap())
    }

    /// Waits until the daemon closes the connection, and discards its last messages. `false`: it
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
        self.message(
            SET_MEM_TABLE,
            &payload(&[1, 0, 0x1000, 0, 0]),
            &[file.as_fd()],
        );
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

pub fn header(request: u32, size: u32) -> [u8; 12] {
    let mut bytes = [0; 12];
    bytes[..4].copy_from_slice(&request.to_ne_bytes());
    bytes[4] = 1;
    bytes[8..].copy_from_slice(&size.to_ne_bytes());
    bytes
}

/// Two 32-bit fields as one of 64.
pub fn pair(first: u32, second: u32) -> u64 {
    u64::from(second) << 32 | u64::from(first)
}

pub fn payload(fields: &[u64]) -> Vec<u8> {
    fields
        .iter()
        .flat_map(|field| field.to_ne_bytes())
        .collect()
}

pub fn memory(bytes: u64) -> File {
    let file = File::from(memfd_create("memory", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(bytes).unwrap();
    file
}
