//! A client that sends raw bytes: for messages that no library would send, and for extended
//! headers, still rare.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

pub const READ: u16 = 0;
pub const WRITE: u16 = 1;
pub const FLUSH: u16 = 3;
pub const WRITE_ZEROES: u16 = 6;
pub const BLOCK_STATUS: u16 = 7;

const OPTION: u64 = 0x4948_4156_454f_5054;
/// NBD_CMD_FLAG_PAYLOAD_LEN: with extended headers, a write carries its payload.
const PAYLOAD_LEN: u16 = 1 << 5;

/// A reply to a request in extended framing.
#[derive(Debug)]
pub struct Reply {
    pub kind: u16,
    pub cookie: u64,
    pub offset: u64,
    pub data: Vec<u8>,
}

pub struct RawClient {
    pub socket: UnixStream,
}

impl RawClient {
    /// Connects, and exchanges greetings.
    pub fn greet(path: &Path) -> Self {
        let socket = UnixStream::connect(path).expect("the server listens");
        socket
            .set_read_timeout(Some(Duration::from_secs(120)))
            .unwrap();
        let mut client = Self { socket };
        assert_eq!(client.take(18), b"NBDMAGICIHAVEOPT\x00\x03");
        client.send(&3_u32.to_be_bytes());
        client
    }

    /// Connects, and negotiates extended headers and base:allocation, up to the transmission phase,
    /// with the only export.
    pub fn extended(path: &Path) -> Self {
        Self::extended_to(path, "")
    }

    /// The same with the export of this name.
    pub fn extended_to(path: &Path, export: &str) -> Self {
        let named = [&(export.len() as u32).to_be_bytes(), export.as_bytes()].concat();
        let mut client = Self::greet(path);
        client.option(11, &[]);
        assert_eq!(client.option_reply(), (11, 1, vec![]));
        let mut query = named.clone();
        query.extend(1_u32.to_be_bytes());
        query.extend(15_u32.to_be_bytes());
        query.extend(b"base:allocation");
        client.option(10, &query);
        let (option, kind, _) = client.option_reply();
        assert_eq!((option, kind), (10, 4));
        assert_eq!(client.option_reply(), (10, 1, vec![]));
        client.option(7, &[&named[..], &[0; 2]].concat());
        while client.option_reply().1 == 3 {}
        client
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).expect("the server reads");
    }

    pub fn take(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.socket
            .read_exact(&mut bytes)
            .expect("the server answers");
        bytes
    }

    pub fn option(&mut self, option: u32, data: &[u8]) {
        let mut bytes = Vec::from(OPTION.to_be_bytes());
        bytes.extend(option.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        self.send(&bytes);
    }

    /// The next option reply: option, type, data.
    pub fn option_reply(&mut self) -> (u32, u32, Vec<u8>) {
        let header = self.take(20);
        assert_eq!(header[..8], 0x0003_e889_0455_65a9_u64.to_be_bytes());
        let word = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
        (word(8), word(12), self.take(word(16) as usize))
    }

    /// Sends a request in extended framing.
    pub fn request(&mut self, flags: u16, command: u16, cookie: u64, offset: u64, length: u64) {
        self.send(&header(flags, command, cookie, offset, length));
    }

    pub fn reply(&mut self) -> Reply {
        let header = self.take(32);
        assert_eq!(header[..6], [0x6e, 0x8a, 0x27, 0x8c, 0, 1], "{header:x?}");
        let long = |at: usize| u64::from_be_bytes(header[at..at + 8].try_into().unwrap());
        Reply {
            kind: u16::from_be_bytes([header[6], header[7]]),
            cookie: long(8),
            offset: long(16),
            data: self.take(long(24) as usize),
        }
    }

    /// Sends a request with its payload, and waits for the reply. `false`: the connection has ended
    /// before that.
    pub fn try_request(&mut self, command: u16, cookie: u64, offset: u64, data: &[u8]) -> bool {
        let flags = if command == WRITE { PAYLOAD_LEN } else { 0 };
        let request = header(flags, command, cookie, offset, data.len() as u64);
        let mut reply = [0; 32];
        let mut exchange = || {
            self.socket.write_all(&[&request, data].concat())?;
            self.socket.read_exact(&mut reply)
        };
        let answered = exchange().is_ok();
        assert!(
            !answered || reply[6..16] == [&[0; 2], &cookie.to_be_bytes()[..]].concat(),
            "{reply:x?}"
        );
        answered
    }

    /// Writes `data` at `offset`, and waits for the reply.
    #[track_caller]
    pub fn write(&mut self, cookie: u64, offset: u64, data: &[u8]) {
        self.request(PAYLOAD_LEN, WRITE, cookie, offset, data.len() as u64);
        self.send(data);
        assert_eq!(self.reply().kind, 0);
    }

    /// Flushes, and waits for the reply.
    #[track_caller]
    pub fn flush(&mut self, cookie: u64) {
        self.request(0, FLUSH, cookie, 0, 0);
        assert_eq!(self.reply().kind, 0);
    }

    /// Waits until the server closes the connection. `false`: it did not in time.
    pub fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        match self.socket.read_to_end(&mut rest) {
            Ok(_) => true,
            Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

/// A request in extended framing, without its payload.
fn header(flags: u16, command: u16, cookie: u64, offset: u64, length: u64) -> Vec<u8> {
    let mut bytes = Vec::from(0x21e4_1c71_u32.to_be_bytes());
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    for field in [cookie, offset, length] {
        bytes.extend(field.to_be_bytes());
    }
    bytes
}
