//! NBD from the client's side (the protocol's `doc/proto.md`): its messages, a client whose calls
//! may fail, and one that sends any bytes and panics.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use crate::PATIENCE;

/// The command READ.
pub const READ: u16 = 0;
/// The command WRITE.
pub const WRITE: u16 = 1;
/// The command FLUSH.
pub const FLUSH: u16 = 3;
/// The command TRIM.
pub const TRIM: u16 = 4;
/// The command WRITE_ZEROES.
pub const WRITE_ZEROES: u16 = 6;
/// The command BLOCK_STATUS.
pub const BLOCK_STATUS: u16 = 7;

/// NBD_CMD_FLAG_PAYLOAD_LEN: with extended headers, a write carries its payload.
pub const PAYLOAD_LEN: u16 = 1 << 5;
/// Of the transmission flags: the server supports FLUSH, so it has a write cache.
pub const SEND_FLUSH: u16 = 1 << 2;
/// Of the transmission flags: a write with FUA is durable when it is answered.
pub const SEND_FUA: u16 = 1 << 3;

const GREETING: &[u8; 16] = b"NBDMAGICIHAVEOPT";
/// Fixed newstyle, no zeroes.
const CLIENT_FLAGS: u32 = 3;
const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;
const EXPORT_NAME: u32 = 1;
const GO: u32 = 7;
const ACK: u32 = 1;
const INFO: u32 = 3;
const SIMPLE_REPLY: u32 = 0x6744_6698;
/// Longest option reply that is accepted.
const LONGEST_OPTION_REPLY: u32 = 64 << 10;

/// Exchanges greetings, and returns the server's flags.
///
/// # Errors
/// If there is no NBD server.
pub fn greet(stream: &mut (impl Read + Write)) -> io::Result<u16> {
    if &take::<16>(stream)? != GREETING {
        return Err(io::Error::other("no NBD server answers there"));
    }
    let flags = u16::from_be_bytes(take(stream)?);
    stream.write_all(&CLIENT_FLAGS.to_be_bytes())?;
    Ok(flags)
}

/// An option with its data.
#[must_use]
pub fn option(option: u32, data: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::from(b"IHAVEOPT");
    bytes.extend(option.to_be_bytes());
    bytes.extend((data.len() as u32).to_be_bytes());
    bytes.extend(data);
    bytes
}

/// The next option reply: option, type, data.
///
/// # Errors
/// If none comes, or it is no option reply.
pub fn option_reply(stream: &mut impl Read) -> io::Result<(u32, u32, Vec<u8>)> {
    let magic = u64::from_be_bytes(take(stream)?);
    let [option, kind, length] =
        [take(stream)?, take(stream)?, take(stream)?].map(u32::from_be_bytes);
    if magic != OPTION_REPLY || length > LONGEST_OPTION_REPLY {
        return Err(io::Error::other("the server's handshake is invalid"));
    }
    let mut data = vec![0; length as usize];
    stream.read_exact(&mut data)?;
    Ok((option, kind, data))
}

/// Chooses an export with NBD_OPT_GO, without requests for information, and returns its
/// transmission flags.
///
/// # Errors
/// If there is no such export.
pub fn go(stream: &mut (impl Read + Write), export: &str) -> io::Result<u16> {
    stream.write_all(&option(GO, &[&name(export)[..], &[0; 2]].concat()))?;
    let mut flags = None;
    loop {
        let (_, kind, data) = option_reply(stream)?;
        match (kind, data.as_slice()) {
            (ACK, _) => {
                return flags.ok_or_else(|| io::Error::other("the server sends no flags"));
            }
            // NBD_INFO_EXPORT: its number, the size, and the flags.
            (INFO, &[0, 0, .., high, low]) => flags = Some(u16::from_be_bytes([high, low])),
            (INFO, _) => {}
            (kind, _) => {
                return Err(io::Error::other(format!("the server refuses ({kind:#x})")));
            }
        }
    }
}

/// The name of an export, with its length.
#[must_use]
pub fn name(export: &str) -> Vec<u8> {
    [&(export.len() as u32).to_be_bytes(), export.as_bytes()].concat()
}

/// A request with a compact header, without its payload.
#[must_use]
pub fn request(flags: u16, command: u16, cookie: u64, offset: u64, length: u32) -> [u8; 28] {
    let mut bytes = [0; 28];
    bytes[..4].copy_from_slice(&0x2560_9513_u32.to_be_bytes());
    bytes[4..6].copy_from_slice(&flags.to_be_bytes());
    bytes[6..8].copy_from_slice(&command.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..24].copy_from_slice(&offset.to_be_bytes());
    bytes[24..].copy_from_slice(&length.to_be_bytes());
    bytes
}

/// A request with an extended header, without its payload.
#[must_use]
pub fn extended_request(
    flags: u16,
    command: u16,
    cookie: u64,
    offset: u64,
    length: u64,
) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes[..28].copy_from_slice(&request(flags, command, cookie, offset, 0));
    bytes[..4].copy_from_slice(&0x21e4_1c71_u32.to_be_bytes());
    bytes[24..].copy_from_slice(&length.to_be_bytes());
    bytes
}

/// The next simple reply: error and cookie.
///
/// # Errors
/// If none comes, or it is no simple reply.
pub fn simple_reply(stream: &mut impl Read) -> io::Result<(u32, u64)> {
    let magic = u32::from_be_bytes(take(stream)?);
    let error = u32::from_be_bytes(take(stream)?);
    let cookie = u64::from_be_bytes(take(stream)?);
    if magic != SIMPLE_REPLY {
        return Err(io::Error::other("the server's reply is invalid"));
    }
    Ok((error, cookie))
}

fn take<const N: usize>(stream: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

/// A connection without structured replies.
pub struct SimpleClient {
    /// The connection. A read that takes longer than [`PATIENCE`] fails.
    pub stream: UnixStream,
    /// The transmission flags.
    pub flags: u16,
}

impl SimpleClient {
    /// Connects, and chooses an export with NBD_OPT_EXPORT_NAME.
    ///
    /// # Errors
    /// If there is no server, or it has no such export.
    pub fn connect(socket: &Path, export: &str) -> io::Result<Self> {
        let mut stream = UnixStream::connect(socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        greet(&mut stream)?;
        stream.write_all(&option(EXPORT_NAME, export.as_bytes()))?;
        // The export's size, and the flags.
        let [.., high, low] = take::<10>(&mut stream)?;
        let flags = u16::from_be_bytes([high, low]);
        Ok(Self { stream, flags })
    }

    /// Carries out a command. `data` holds the data of a WRITE and receives the data of a READ, and
    /// its length is the request's length. For other commands the length is `len`. With `fua` the
    /// request is durable when it ends.
    ///
    /// # Errors
    /// The server's error, or that there is no server any more.
    pub fn end(
        &mut self,
        command: u16,
        offset: u64,
        len: usize,
        data: &mut [u8],
        fua: bool,
    ) -> io::Result<()> {
        const COOKIE: u64 = 7;
        let mut message = request(fua.into(), command, COOKIE, offset, len as u32).to_vec();
        if command == WRITE {
            message.extend(&*data);
        }
        self.stream.write_all(&message)?;
        match simple_reply(&mut self.stream)? {
            (0, COOKIE) if command == READ => self.stream.read_exact(data),
            (0, COOKIE) => Ok(()),
            // The protocol's error numbers are those of Linux.
            (error, COOKIE) => Err(io::Error::from_raw_os_error(error as i32)),
            (_, cookie) => Err(io::Error::other(format!("a reply to {cookie:#x}"))),
        }
    }
}

/// A reply to a request in extended framing.
#[derive(Debug)]
pub struct Reply {
    /// Its type; 0 is NBD_REPLY_TYPE_NONE.
    pub kind: u16,
    /// The request's cookie.
    pub cookie: u64,
    /// The request's offset.
    pub offset: u64,
    /// The payload.
    pub data: Vec<u8>,
}

/// A client that sends any bytes, and panics if the server does not answer.
pub struct RawClient {
    /// The connection. A read that takes longer than [`PATIENCE`] fails.
    pub socket: UnixStream,
}

impl RawClient {
    /// Connects, and exchanges greetings.
    #[must_use]
    pub fn greet(path: &Path) -> Self {
        let mut socket = UnixStream::connect(path).expect("the server listens");
        socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        assert_eq!(greet(&mut socket).expect("the server greets"), 3);
        Self { socket }
    }

    /// Connects, and negotiates extended headers and base:allocation, up to the transmission phase,
    /// with the only export.
    #[must_use]
    pub fn extended(path: &Path) -> Self {
        Self::extended_to(path, "")
    }

    /// The same with the export of this name.
    #[must_use]
    pub fn extended_to(path: &Path, export: &str) -> Self {
        let named = name(export);
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

    /// Sends bytes, which need not be a message.
    pub fn send(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).expect("the server reads");
    }

    /// The next bytes.
    pub fn take(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.socket
            .read_exact(&mut bytes)
            .expect("the server answers");
        bytes
    }

    /// Sends an option.
    pub fn option(&mut self, number: u32, data: &[u8]) {
        self.send(&option(number, data));
    }

    /// The next option reply: option, type, data.
    pub fn option_reply(&mut self) -> (u32, u32, Vec<u8>) {
        option_reply(&mut self.socket).expect("an option reply")
    }

    /// Sends a request in extended framing.
    pub fn request(&mut self, flags: u16, command: u16, cookie: u64, offset: u64, length: u64) {
        self.send(&extended_request(flags, command, cookie, offset, length));
    }

    /// The next reply. The data of a read may come in several chunks, in any order.
    pub fn reply(&mut self) -> Reply {
        let (mut reply, mut done) = self.chunk();
        let mut parts = vec![std::mem::take(&mut reply.data)];
        while !done {
            let (chunk, last) = self.chunk();
            assert_eq!((chunk.kind, chunk.cookie), (reply.kind, reply.cookie));
            parts.push(chunk.data);
            done = last;
        }
        // The data of each chunk follows its offset.
        parts.sort_by_key(|part| part[..8.min(part.len())].to_vec());
        let rest = parts.split_off(1);
        reply.data = parts.swap_remove(0);
        rest.iter().for_each(|part| reply.data.extend(&part[8..]));
        reply
    }

    /// The next chunk of a reply, and whether it is the last one.
    fn chunk(&mut self) -> (Reply, bool) {
        let header = self.take(32);
        assert_eq!(header[..5], [0x6e, 0x8a, 0x27, 0x8c, 0], "{header:x?}");
        let long = |at: usize| u64::from_be_bytes(header[at..at + 8].try_into().unwrap());
        let reply = Reply {
            kind: u16::from_be_bytes([header[6], header[7]]),
            cookie: long(8),
            offset: long(16),
            data: self.take(long(24) as usize),
        };
        (reply, header[5] == 1)
    }

    /// Sends a request with its payload, and waits for the reply. `false`: the connection has ended
    /// before that.
    pub fn try_request(&mut self, command: u16, cookie: u64, offset: u64, data: &[u8]) -> bool {
        let flags = if command == WRITE { PAYLOAD_LEN } else { 0 };
        let request = extended_request(flags, command, cookie, offset, data.len() as u64);
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
