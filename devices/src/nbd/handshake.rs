//! The handshake: which export the client wants, and what replies look like.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::time::Timespec;

use super::Export;
use super::protocol::{
    ALLOCATION, ALLOCATION_ID, Fields, Framing, GREETING, MAX_PAYLOAD, OPTION, handshake, info,
    option, option_reply, reply,
};
use crate::backend::SECTOR_SIZE;

/// How long a client may take to choose its export.
const LIMIT: Duration = Duration::from_secs(60);
const TOO_LONG: &str = "it took too long to choose an export";
/// Longest option in bytes: strings have at most 4096 bytes, and no option needs more than a few.
const MAX_OPTION: usize = 32 << 10;
/// Bytes of the best block: a page, as file systems use it.
const PREFERRED_BLOCK: u32 = 4096;
/// The least that a server should take in one request, in bytes.
const LEAST_MAXIMUM_BLOCK: u32 = 1 << 20;

/// Why there is nothing to transmit.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    /// The client went, or the server is to stop: no fault of anybody.
    #[error("the connection has ended")]
    Gone,
    /// The client broke the protocol.
    #[error("{0}")]
    Broken(&'static str),
    /// The socket failed.
    #[error(transparent)]
    Socket(#[from] Errno),
}

/// What was agreed upon.
pub(super) struct Agreed<'a> {
    pub(super) export: &'a Export,
    pub(super) framing: Framing,
    /// BLOCK_STATUS tells `base:allocation`.
    pub(super) allocation: bool,
}

/// A non-blocking socket that is waited for, but not forever.
struct Channel<'a> {
    socket: &'a OwnedFd,
    stop: BorrowedFd<'a>,
    end: Instant,
}

impl Channel<'_> {
    fn wait(&self, events: PollFlags) -> Result<(), Ended> {
        let left = self.end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Ended::Broken(TOO_LONG));
        }
        let timeout = Timespec::try_from(left).ok();
        let mut fds = [
            PollFd::new(self.socket, events),
            PollFd::from_borrowed_fd(self.stop, PollFlags::IN),
        ];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(0) => Err(Ended::Broken(TOO_LONG)),
            Ok(_) if !fds[1].revents().is_empty() => Err(Ended::Gone),
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn read(&self, bytes: &mut [u8]) -> Result<(), Ended> {
        let mut done = 0;
        while done < bytes.len() {
            match rustix::io::read(self.socket, &mut bytes[done..]) {
                Ok(0) => return Err(Ended::Gone),
                Ok(read) => done += read,
                Err(Errno::AGAIN) => self.wait(PollFlags::IN)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn array<const N: usize>(&self) -> Result<[u8; N], Ended> {
        let mut bytes = [0; N];
        self.read(&mut bytes)?;
        Ok(bytes)
    }

    fn write(&self, mut bytes: &[u8]) -> Result<(), Ended> {
        while !bytes.is_empty() {
            match rustix::io::write(self.socket, bytes) {
                Ok(written) => bytes = &bytes[written..],
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Talks until the client has chosen one of `exports`.
///
/// # Errors
/// If it goes, breaks the protocol or takes too long, or `stop` becomes readable.
pub(super) fn negotiate<'a>(
    socket: &OwnedFd,
    stop: BorrowedFd<'_>,
    exports: &'a [Export],
) -> Result<Agreed<'a>, Ended> {
    let channel = Channel {
        socket,
        stop,
        end: Instant::now() + LIMIT,
    };
    let mut greeting = Vec::from(GREETING.to_be_bytes());
    greeting.extend(OPTION.to_be_bytes());
    greeting.extend((handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES).to_be_bytes());
    channel.write(&greeting)?;
    let flags = u32::from_be_bytes(channel.array()?);
    let known = u32::from(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
    if flags & !known != 0 {
        return Err(Ended::Broken("it has unknown handshake flags"));
    }
    let mut talk = Talk {
        exports,
        framing: Framing::Simple,
        allocation: None,
    };
    loop {
        // Also for a client that never stops to send options.
        channel.wait(PollFlags::IN)?;
        let header: [u8; 16] = channel.array()?;
        let mut fields = Fields(&header);
        let (magic, option, len) = (fields.u64(), fields.u32(), fields.u32());
        let (Some(OPTION), Some(option), Some(len)) = (magic, option, len) else {
            return Err(Ended::Broken("an option does not begin as one"));
        };
        if len as usize > MAX_OPTION {
            return Err(Ended::Broken("an option is too long"));
        }
        let mut data = vec![0; len as usize];
        channel.read(&mut data)?;
        let chosen = match option {
            option::EXPORT_NAME => {
                let index = talk.find(&data);
                let index = index.ok_or(Ended::Broken("it asks for an export that is not here"))?;
                let export = &exports[index];
                let mut out = Vec::from(export.size().to_be_bytes());
                let structured = talk.framing != Framing::Simple;
                out.extend(export.flags(structured).to_be_bytes());
                if flags & u32::from(handshake::NO_ZEROES) == 0 {
                    out.extend([0; 124]);
                }
                channel.write(&out)?;
                Some(index)
            }
            option::ABORT => {
                // It need not wait for the answer.
                let _ = channel.write(&option_reply(option, reply::ACK, &[]));
                return Err(Ended::Gone);
            }
            _ => {
                let (out, chosen) = talk.answer(option, &data);
                channel.write(&out)?;
                chosen
            }
        };
        if let Some(index) = chosen {
            return Ok(Agreed {
                export: &exports[index],
                framing: talk.framing,
                allocation: talk.allocation == Some(index),
            });
        }
    }
}

/// What the options so far have agreed upon.
struct Talk<'a> {
    exports: &'a [Export],
    framing: Framing,
    /// The export whose allocation was asked for: it counts for that export alone.
    allocation: Option<usize>,
}

/// The answer to an option that was wrong.
type Refusal = (u32, &'static str);

impl Talk<'_> {
    /// The export of a name. The empty name is that of the only one.
    fn find(&self, name: &[u8]) -> Option<usize> {
        if name.is_empty() && self.exports.len() == 1 {
            return Some(0);
        }
        self.exports
            .iter()
            .position(|export| export.name.as_bytes() == name)
    }

    fn find_or_refuse(&self, name: &[u8]) -> Result<usize, Refusal> {
        let why = "no such export: ask for the list";
        self.find(name).ok_or((reply::ERR_UNKNOWN, why))
    }

    /// The replies to an option, and the export that it has chosen.
    fn answer(&mut self, option: u32, data: &[u8]) -> (Vec<u8>, Option<usize>) {
        let mut out = Vec::new();
        let result = match option {
            option::LIST => self.list(data, &mut out),
            option::INFO | option::GO => self.go(option, data, &mut out),
            option::STRUCTURED_REPLY => match (self.framing, data.is_empty()) {
                (_, false) => Err((reply::ERR_INVALID, "this option has no data")),
                (Framing::Extended, true) => Err((
                    reply::ERR_EXTENDED_HEADERS,
                    "extended headers are agreed upon already",
                )),
                (_, true) => {
                    self.framing = Framing::Structured;
                    Ok(None)
                }
            },
            option::EXTENDED_HEADERS if data.is_empty() => {
                self.framing = Framing::Extended;
                Ok(None)
            }
            option::EXTENDED_HEADERS => Err((reply::ERR_INVALID, "this option has no data")),
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.meta_context(option, data, &mut out)
            }
            _ => Err((reply::ERR_UNSUPPORTED, "this server has no such option")),
        };
        match result {
            Ok(chosen) => {
                out.extend(option_reply(option, reply::ACK, &[]));
                (out, chosen)
            }
            Err((kind, why)) => (option_reply(option, kind, why.as_bytes()), None),
        }
    }

    fn list(&self, data: &[u8], out: &mut Vec<u8>) -> Result<Option<usize>, Refusal> {
        if !data.is_empty() {
            return Err((reply::ERR_INVALID, "this option has no data"));
        }
        for export in self.exports {
            let mut entry = Vec::from((export.name.len() as u32).to_be_bytes());
            entry.extend(export.name.as_bytes());
            entry.extend(export.description.as_bytes());
            out.extend(option_reply(option::LIST, reply::SERVER, &entry));
        }
        Ok(None)
    }

    /// INFO and GO: both tell about an export, and GO chooses it.
    fn go(
        &mut self,
        option: u32,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Option<usize>, Refusal> {
        let malformed = (reply::ERR_INVALID, "the option is malformed");
        let mut fields = Fields(data);
        let name = fields.string().ok_or(malformed)?;
        let count = fields.u16().ok_or(malformed)?;
        let wanted: Option<Vec<u16>> = (0..count).map(|_| fields.u16()).collect();
        let wanted = wanted.filter(|_| fields.0.is_empty()).ok_or(malformed)?;
        let index = self.find_or_refuse(name)?;
        let export = &self.exports[index];

        let mut tell = |kind: u16, parts: &[&[u8]]| {
            let mut data = Vec::from(kind.to_be_bytes());
            parts.iter().for_each(|part| data.extend(*part));
            out.extend(option_reply(option, reply::INFO, &data));
        };
        let flags = export.flags(self.framing != Framing::Simple);
        let size = export.size().to_be_bytes();
        tell(info::EXPORT, &[&size, &flags.to_be_bytes()]);
        if wanted.contains(&info::NAME) {
            tell(info::NAME, &[export.name.as_bytes()]);
        }
        if wanted.contains(&info::DESCRIPTION) {
            tell(info::DESCRIPTION, &[export.description.as_bytes()]);
        }
        // Whoever keeps to the largest block has requests that are all-or-nothing after a crash.
        let largest = export
            .backend
            .max_request_bytes()
            .clamp(LEAST_MAXIMUM_BLOCK as usize, MAX_PAYLOAD as usize);
        let blocks = [SECTOR_SIZE as u32, PREFERRED_BLOCK, largest as u32].map(u32::to_be_bytes);
        tell(info::BLOCK_SIZE, &[&blocks[0], &blocks[1], &blocks[2]]);
        Ok((option == option::GO).then_some(index))
    }

    fn meta_context(
        &mut self,
        option: u32,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Option<usize>, Refusal> {
        if self.framing == Framing::Simple {
            return Err((reply::ERR_INVALID, "agree upon structured replies first"));
        }
        let setting = option == option::SET_META_CONTEXT;
        if setting {
            self.allocation = None;
        }
        let malformed = (reply::ERR_INVALID, "the option is malformed");
        let mut fields = Fields(data);
        let name = fields.string().ok_or(malformed)?;
        let count = fields.u32().ok_or(malformed)?;
        let mut found = !setting && count == 0;
        for _ in 0..count {
            let query = fields.string().ok_or(malformed)?;
            found |= query == ALLOCATION.as_bytes() || (!setting && query == b"base:");
        }
        if !fields.0.is_empty() {
            return Err(malformed);
        }
        let index = self.find_or_refuse(name)?;
        if found {
            let id = if setting { ALLOCATION_ID } else { 0 };
            let mut entry = Vec::from(id.to_be_bytes());
            entry.extend(ALLOCATION.as_bytes());
            out.extend(option_reply(option, reply::META_CONTEXT, &entry));
            if setting {
                self.allocation = Some(index);
            }
        }
        Ok(None)
    }
}
