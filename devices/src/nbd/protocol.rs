//! Constants and messages of the NBD protocol, all big-endian on the wire.

/// The port that IANA has assigned to NBD.
pub const DEFAULT_PORT: u16 = 10809;

/// First word of a server's greeting.
pub(super) const GREETING: u64 = 0x4e42_444d_4147_4943;
/// Second word of the greeting, and first of every option.
pub(super) const OPTION: u64 = 0x4948_4156_454f_5054;
/// First word of every option reply.
pub(super) const OPTION_REPLY: u64 = 0x0003_e889_0455_65a9;

/// Handshake flags, the same bits from server and client.
pub(super) mod handshake {
    pub(crate) const FIXED_NEWSTYLE: u16 = 1;
    pub(crate) const NO_ZEROES: u16 = 2;
}

/// Options that a client may send.
pub(super) mod option {
    pub(crate) const EXPORT_NAME: u32 = 1;
    pub(crate) const ABORT: u32 = 2;
    pub(crate) const LIST: u32 = 3;
    pub(crate) const STARTTLS: u32 = 5;
    pub(crate) const INFO: u32 = 6;
    pub(crate) const GO: u32 = 7;
    pub(crate) const STRUCTURED_REPLY: u32 = 8;
    pub(crate) const LIST_META_CONTEXT: u32 = 9;
    pub(crate) const SET_META_CONTEXT: u32 = 10;
    pub(crate) const EXTENDED_HEADERS: u32 = 11;
}

/// Replies to options.
pub(super) mod reply {
    pub(crate) const ACK: u32 = 1;
    pub(crate) const SERVER: u32 = 2;
    pub(crate) const INFO: u32 = 3;
    pub(crate) const META_CONTEXT: u32 = 4;
    pub(crate) const ERR_UNSUPPORTED: u32 = (1 << 31) + 1;
    pub(crate) const ERR_POLICY: u32 = (1 << 31) + 2;
    pub(crate) const ERR_INVALID: u32 = (1 << 31) + 3;
    pub(crate) const ERR_TLS_REQUIRED: u32 = (1 << 31) + 5;
    pub(crate) const ERR_UNKNOWN: u32 = (1 << 31) + 6;
    pub(crate) const ERR_EXTENDED_HEADERS: u32 = (1 << 31) + 10;
}

/// Types of information in an INFO reply.
pub(super) mod info {
    pub(crate) const EXPORT: u16 = 0;
    pub(crate) const NAME: u16 = 1;
    pub(crate) const DESCRIPTION: u16 = 2;
    pub(crate) const BLOCK_SIZE: u16 = 3;
}

/// Transmission flags.
pub(super) mod transmission {
    pub(crate) const HAS_FLAGS: u16 = 1;
    pub(crate) const READ_ONLY: u16 = 1 << 1;
    pub(crate) const SEND_FLUSH: u16 = 1 << 2;
    pub(crate) const SEND_FUA: u16 = 1 << 3;
    pub(crate) const SEND_TRIM: u16 = 1 << 5;
    pub(crate) const SEND_WRITE_ZEROES: u16 = 1 << 6;
    pub(crate) const SEND_DF: u16 = 1 << 7;
    pub(crate) const CAN_MULTI_CONN: u16 = 1 << 8;
    pub(crate) const SEND_FAST_ZERO: u16 = 1 << 11;
}

/// Commands.
pub(super) mod command {
    pub(crate) const READ: u16 = 0;
    pub(crate) const WRITE: u16 = 1;
    pub(crate) const DISCONNECT: u16 = 2;
    pub(crate) const FLUSH: u16 = 3;
    pub(crate) const TRIM: u16 = 4;
    pub(crate) const WRITE_ZEROES: u16 = 6;
    pub(crate) const BLOCK_STATUS: u16 = 7;
}

/// Command flags.
pub(super) mod flag {
    pub(crate) const FUA: u16 = 1;
    pub(crate) const NO_HOLE: u16 = 1 << 1;
    pub(crate) const DF: u16 = 1 << 2;
    pub(crate) const REQUEST_ONE: u16 = 1 << 3;
    pub(crate) const FAST_ZERO: u16 = 1 << 4;
    /// The request's length is that of its payload. Extended headers only.
    pub(crate) const PAYLOAD_LENGTH: u16 = 1 << 5;
}

/// Types of structured and extended replies.
pub(super) mod chunk {
    pub(crate) const DONE: u16 = 1;
    pub(crate) const NONE: u16 = 0;
    pub(crate) const OFFSET_DATA: u16 = 1;
    pub(crate) const BLOCK_STATUS: u16 = 5;
    pub(crate) const BLOCK_STATUS_EXTENDED: u16 = 6;
    pub(crate) const ERROR: u16 = (1 << 15) + 1;
}

/// States of an extent: the first two in the context `base:allocation`, the last in
/// `qemu:dirty-bitmap:NAME`.
pub(super) mod extent {
    pub(crate) const HOLE: u32 = 1;
    pub(crate) const ZERO: u32 = 2;
    pub(crate) const DIRTY: u32 = 1;
}

/// The metadata context that says which parts of a disk hold data.
pub(super) const ALLOCATION: &str = "base:allocation";
/// Prefix of the metadata contexts that say what has changed; the name of a point in the past
/// follows.
pub(super) const DIRTY_BITMAP: &str = "qemu:dirty-bitmap:";
/// Queries that match every metadata context with this prefix.
pub(super) const NAMESPACES: [&str; 3] = ["base:", "qemu:", DIRTY_BITMAP];

/// Error numbers in replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Error {
    Permission = 1,
    Io = 5,
    Invalid = 22,
    NoSpace = 28,
    Shutdown = 108,
}

/// Longest payload of a request or reply in bytes, whatever block size was negotiated. Clients that
/// do not ask for block sizes stay within this limit.
pub(super) const MAX_PAYLOAD: u64 = 32 << 20;

/// The format of requests and replies on a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Framing {
    /// Only simple replies.
    #[default]
    Simple,
    /// Structured replies to READ and BLOCK_STATUS, simple ones to the rest.
    Structured,
    /// Extended headers in both directions.
    Extended,
}

const REQUEST: u32 = 0x2560_9513;
const EXTENDED_REQUEST: u32 = 0x21e4_1c71;
const SIMPLE_REPLY: u32 = 0x6744_6698;
const STRUCTURED_REPLY: u32 = 0x668e_33ef;
const EXTENDED_REPLY: u32 = 0x6e8a_278c;

/// A request's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NbdRequest {
    pub(super) flags: u16,
    pub(super) command: u16,
    pub(super) cookie: u64,
    pub(super) offset: u64,
    pub(super) length: u64,
}

impl NbdRequest {
    /// Bytes of a header.
    pub(super) fn len(framing: Framing) -> usize {
        match framing {
            Framing::Simple | Framing::Structured => 28,
            Framing::Extended => 32,
        }
    }

    /// Decodes a header of [`len`](Self::len) bytes. `None`: the magic number is wrong, so the
    /// stream cannot be parsed.
    pub(super) fn decode(bytes: &[u8], framing: Framing) -> Option<Self> {
        let mut fields = FieldReader(bytes);
        let magic = fields.u32()?;
        let (flags, command) = (fields.u16()?, fields.u16()?);
        let (cookie, offset) = (fields.u64()?, fields.u64()?);
        let (expected, length) = match framing {
            Framing::Extended => (EXTENDED_REQUEST, fields.u64()?),
            _ => (REQUEST, fields.u32()?.into()),
        };
        (magic == expected).then_some(Self {
            flags,
            command,
            cookie,
            offset,
            length,
        })
    }

    /// Whether a payload follows the header.
    pub(super) fn has_payload(&self, framing: Framing) -> bool {
        self.command == command::WRITE
            || (framing == Framing::Extended && self.flags & flag::PAYLOAD_LENGTH != 0)
    }
}

/// Reads big-endian fields from the front of a message; each method returns `None` if the message
/// is too short.
pub(super) struct FieldReader<'a>(pub(super) &'a [u8]);

impl<'a> FieldReader<'a> {
    pub(super) fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string preceded by its length in 32 bits.
    pub(super) fn string(&mut self) -> Option<&'a [u8]> {
        let len = self.u32()?;
        self.bytes(len as usize)
    }
}

/// Appends a simple reply; the data of a successful READ follows it.
pub(super) fn put_simple(out: &mut Vec<u8>, cookie: u64, error: Option<Error>) {
    out.extend(SIMPLE_REPLY.to_be_bytes());
    out.extend(error.map_or(0, |error| error as u32).to_be_bytes());
    out.extend(cookie.to_be_bytes());
}

/// Appends the header of the only chunk of a structured or extended reply; `len` bytes follow it.
pub(super) fn put_chunk(
    out: &mut Vec<u8>,
    framing: Framing,
    kind: u16,
    request: &NbdRequest,
    len: usize,
) {
    put_chunk_with_flags(out, framing, (kind, chunk::DONE), request, len);
}

/// As [`put_chunk`], with the chunk's type and flags: without [`chunk::DONE`] more chunks follow.
pub(super) fn put_chunk_with_flags(
    out: &mut Vec<u8>,
    framing: Framing,
    (kind, flags): (u16, u16),
    request: &NbdRequest,
    len: usize,
) {
    let extended = framing == Framing::Extended;
    let magic = if extended {
        EXTENDED_REPLY
    } else {
        STRUCTURED_REPLY
    };
    out.extend(magic.to_be_bytes());
    out.extend(flags.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend(request.cookie.to_be_bytes());
    if extended {
        out.extend(request.offset.to_be_bytes());
        out.extend((len as u64).to_be_bytes());
    } else {
        // The cast is lossless: at most MAX_PAYLOAD and a few bytes.
        out.extend((len as u32).to_be_bytes());
    }
}

/// Encodes a reply to an option.
pub(super) fn option_reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(20 + data.len());
    out.extend(OPTION_REPLY.to_be_bytes());
    out.extend(option.to_be_bytes());
    out.extend(kind.to_be_bytes());
    out.extend((data.len() as u32).to_be_bytes());
    out.extend(data);
    out
}
