//! The handshake: client and server agree on the export and on the framing of replies.

use std::io::{self, ErrorKind, IoSlice};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::connection_end::ConnectionEnd;
use super::export::{Export, ExportGuard, Exports};
use super::extent_query::MetaContext;
use super::protocol::{
    ALLOCATION, DIRTY_BITMAP, FieldReader, Framing, GREETING, MAX_PAYLOAD, NAMESPACES, OPTION,
    handshake, info, option, option_reply, reply,
};
use super::tls::TlsConfig;
use super::wire::{Tls, Wire};
use crate::backend::SECTOR_SIZE;
use crate::event_loop::EventSet;
use crate::listen::{Stop, Waiter, WakeReason};

/// How long a client may take to choose its export, TLS included.
const TIMEOUT: Duration = Duration::from_secs(10);
const TOO_LONG: &str = "it took too long to choose an export";
/// Longest data of an option, in bytes. A string has at most 4096 bytes, and an option needs only a
/// few strings.
const MAX_OPTION: usize = 32 << 10;
/// The preferred block size in bytes: a page, the block size of most file systems.
const PREFERRED_BLOCK: u32 = 4096;
/// The smallest maximum block size that a server should advertise, in bytes.
const MIN_MAXIMUM_BLOCK: u32 = 1 << 20;

/// The result of a handshake.
pub(super) struct HandshakeResult {
    pub(super) export: ExportGuard,
    pub(super) framing: Framing,
    /// What the client may ask about with BLOCK_STATUS.
    pub(super) contexts: Arc<[MetaContext]>,
}

/// A non-blocking socket whose reads and writes wait, at most until a deadline.
struct HandshakeChannel<'a> {
    wire: &'a mut Wire,
    waiter: Waiter,
    deadline: Instant,
}

impl HandshakeChannel<'_> {
    fn wait(&mut self, events: EventSet) -> Result<(), ConnectionEnd> {
        let now = Instant::now();
        if now >= self.deadline {
            return Err(ConnectionEnd::Broken(TOO_LONG));
        }
        // Decrypted data can be read without waiting, but a server that stops must be noticed here
        // too.
        let decrypted = events.contains(EventSet::IN) && self.wire.may_have_data();
        let until = if decrypted { now } else { self.deadline };
        match self.waiter.wait(&*self.wire, events, Some(until))? {
            WakeReason::Stopped => Err(ConnectionEnd::Gone),
            WakeReason::TimedOut if !decrypted => Err(ConnectionEnd::Broken(TOO_LONG)),
            _ => Ok(()),
        }
    }

    /// Waits if the error is "would block", ignores EINTR, and returns any other error.
    fn wait_after(&mut self, error: io::Error, events: EventSet) -> Result<(), ConnectionEnd> {
        match error.kind() {
            ErrorKind::WouldBlock => self.wait(events),
            ErrorKind::Interrupted => Ok(()),
            _ => Err(error.into()),
        }
    }

    fn read(&mut self, bytes: &mut [u8]) -> Result<(), ConnectionEnd> {
        let mut done = 0;
        while done < bytes.len() {
            match self.wire.read(&mut bytes[done..]) {
                Ok(0) => return Err(ConnectionEnd::Gone),
                Ok(read) => done += read,
                Err(error) => self.wait_after(error, EventSet::IN)?,
            }
        }
        Ok(())
    }

    fn read_array<const N: usize>(&mut self) -> Result<[u8; N], ConnectionEnd> {
        let mut bytes = [0; N];
        self.read(&mut bytes)?;
        Ok(bytes)
    }

    fn write(&mut self, mut bytes: &[u8]) -> Result<(), ConnectionEnd> {
        while !bytes.is_empty() {
            match self.wire.write(&[IoSlice::new(bytes)]) {
                Ok(written) => bytes = &bytes[written..],
                Err(error) => self.wait_after(error, EventSet::OUT)?,
            }
        }
        self.flush()
    }

    fn flush(&mut self) -> Result<(), ConnectionEnd> {
        loop {
            self.wire.flush()?;
            if !self.wire.has_unsent() {
                return Ok(());
            }
            self.wait(EventSet::OUT)?;
        }
    }

    /// Runs the TLS handshake. Everything after it is encrypted.
    fn start_tls(&mut self, config: &TlsConfig) -> Result<(), ConnectionEnd> {
        self.wire.start_tls(config)?;
        while self.wire.is_shaking_hands() {
            if let Err(error) = self.wire.shake_hands() {
                self.wait_after(error, EventSet::IN)?;
            }
            self.flush()?;
        }
        Ok(())
    }
}

/// Runs the handshake until the client has chosen one of `exports`.
///
/// # Errors
/// If the client leaves, breaks the protocol or takes too long, or `stop` is signalled.
pub(super) fn negotiate(
    wire: &mut Wire,
    stop: &Stop,
    exports: &Exports,
    tls: &Tls,
) -> Result<HandshakeResult, ConnectionEnd> {
    let mut channel = HandshakeChannel {
        waiter: Waiter::new(&*wire, stop)?,
        wire,
        deadline: Instant::now() + TIMEOUT,
    };
    let mut greeting = Vec::from(GREETING.to_be_bytes());
    greeting.extend(OPTION.to_be_bytes());
    greeting.extend((handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES).to_be_bytes());
    channel.write(&greeting)?;
    let flags = u32::from_be_bytes(channel.read_array()?);
    let known = u32::from(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
    if flags & !known != 0 {
        return Err(ConnectionEnd::Broken("it has unknown handshake flags"));
    }
    let mut negotiation = Negotiation::new(exports);
    loop {
        // Enforces the time limit even on a client that sends options without a pause.
        channel.wait(EventSet::IN)?;
        let header: [u8; 16] = channel.read_array()?;
        let mut fields = FieldReader(&header);
        let (magic, option, len) = (fields.u64(), fields.u32(), fields.u32());
        let (Some(OPTION), Some(option), Some(len)) = (magic, option, len) else {
            return Err(ConnectionEnd::Broken(
                "an option has the wrong magic number",
            ));
        };
        if len as usize > MAX_OPTION {
            return Err(ConnectionEnd::Broken("an option is too long"));
        }
        let mut data = vec![0; len as usize];
        channel.read(&mut data)?;
        let chosen = match option {
            option::STARTTLS => {
                let config = match (tls, channel.wire.is_encrypted(), data.is_empty()) {
                    (_, _, false) => Err((reply::ERR_INVALID, "this option has no data")),
                    (_, true, _) => Err((reply::ERR_INVALID, "TLS is on already")),
                    (Tls::Off, ..) => Err((reply::ERR_POLICY, "this server has no TLS")),
                    (Tls::Offered(config) | Tls::Required(config), ..) => Ok(config),
                };
                match config {
                    Ok(config) => {
                        channel.write(&option_reply(option, reply::ACK, &[]))?;
                        channel.start_tls(config)?;
                        // An attacker may have tampered with the unencrypted options, so they are
                        // forgotten.
                        negotiation = Negotiation::new(exports);
                    }
                    Err((kind, reason)) => {
                        channel.write(&option_reply(option, kind, reason.as_bytes()))?;
                    }
                }
                None
            }
            option::EXPORT_NAME if tls.forbids(channel.wire) => {
                // EXPORT_NAME has no error reply: the server can only disconnect.
                return Err(ConnectionEnd::Broken("it asks for an export without TLS"));
            }
            option::EXPORT_NAME => {
                let export = negotiation.find(&data);
                let export =
                    export.ok_or(ConnectionEnd::Broken("it asks for an unknown export"))?;
                let mut out = Vec::from(export.size().to_be_bytes());
                let structured = negotiation.framing != Framing::Simple;
                out.extend(export.flags(structured).to_be_bytes());
                if flags & u32::from(handshake::NO_ZEROES) == 0 {
                    out.extend([0; 124]);
                }
                let chosen = Arc::downgrade(&export);
                drop(export);
                channel.write(&out)?;
                Some(chosen)
            }
            option::ABORT => {
                // The client may leave without waiting for this reply.
                let _ = channel.write(&option_reply(option, reply::ACK, &[]));
                return Err(ConnectionEnd::Gone);
            }
            _ if tls.forbids(channel.wire) => {
                let reason = b"start TLS first";
                channel.write(&option_reply(option, reply::ERR_TLS_REQUIRED, reason))?;
                None
            }
            _ => {
                let (out, chosen) = negotiation.answer(option, &data);
                channel.write(&out)?;
                chosen
            }
        };
        if let Some(export) = chosen {
            return Ok(HandshakeResult {
                framing: negotiation.framing,
                contexts: match negotiation.contexts {
                    Some((of, contexts)) if of.ptr_eq(&export) => contexts.into(),
                    _ => Arc::default(),
                },
                // The export may have been removed while a slow client read the reply.
                export: exports.find(&export).ok_or(ConnectionEnd::Gone)?,
            });
        }
    }
}

/// What the client and the server have agreed on so far.
struct Negotiation<'a> {
    exports: &'a Exports,
    framing: Framing,
    /// The export that SET_META_CONTEXT named, and the contexts it chose. The choice is valid for
    /// that export alone.
    contexts: Option<(Weak<Export>, Vec<MetaContext>)>,
}

/// An error reply to an option: its type and message.
type OptionError = (u32, &'static str);

impl<'a> Negotiation<'a> {
    fn new(exports: &'a Exports) -> Self {
        Self {
            exports,
            framing: Framing::Simple,
            contexts: None,
        }
    }

    /// The export of this name. The empty name finds the only export, if there is just one.
    fn find(&self, name: &[u8]) -> Option<ExportGuard> {
        let mut all = self.exports.all();
        if name.is_empty() && all.len() == 1 {
            return all.pop();
        }
        all.into_iter()
            .find(|export| export.name.as_bytes() == name)
    }

    fn find_or_refuse(&self, name: &[u8]) -> Result<ExportGuard, OptionError> {
        let reason = "no such export: ask for the list";
        self.find(name).ok_or((reply::ERR_UNKNOWN, reason))
    }

    /// The replies to an option, and the export that the option has chosen, if any.
    fn answer(&mut self, option: u32, data: &[u8]) -> (Vec<u8>, Option<Weak<Export>>) {
        let mut out = Vec::new();
        let result = match option {
            option::LIST => self.list(data, &mut out),
            option::INFO | option::GO => self.go(option, data, &mut out),
            option::STRUCTURED_REPLY => match (self.framing, data.is_empty()) {
                (_, false) => Err((reply::ERR_INVALID, "this option has no data")),
                (Framing::Extended, true) => Err((
                    reply::ERR_EXTENDED_HEADERS,
                    "extended headers are already negotiated",
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
            Err((kind, reason)) => (option_reply(option, kind, reason.as_bytes()), None),
        }
    }

    fn list(&self, data: &[u8], out: &mut Vec<u8>) -> Result<Option<Weak<Export>>, OptionError> {
        if !data.is_empty() {
            return Err((reply::ERR_INVALID, "this option has no data"));
        }
        for export in self.exports.all() {
            let mut entry = Vec::from((export.name.len() as u32).to_be_bytes());
            entry.extend(export.name.as_bytes());
            entry.extend(export.description.as_bytes());
            out.extend(option_reply(option::LIST, reply::SERVER, &entry));
        }
        Ok(None)
    }

    /// INFO and GO: both describe an export, and GO also chooses it.
    fn go(
        &mut self,
        option: u32,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Option<Weak<Export>>, OptionError> {
        let malformed = (reply::ERR_INVALID, "the option is malformed");
        let mut fields = FieldReader(data);
        let name = fields.string().ok_or(malformed)?;
        let count = fields.u16().ok_or(malformed)?;
        let wanted: Option<Vec<u16>> = (0..count).map(|_| fields.u16()).collect();
        let wanted = wanted.filter(|_| fields.0.is_empty()).ok_or(malformed)?;
        let export = self.find_or_refuse(name)?;

        let mut send = |kind: u16, parts: &[&[u8]]| {
            let mut data = Vec::from(kind.to_be_bytes());
            parts.iter().for_each(|part| data.extend(*part));
            out.extend(option_reply(option, reply::INFO, &data));
        };
        let flags = export.flags(self.framing != Framing::Simple);
        let size = export.size().to_be_bytes();
        send(info::EXPORT, &[&size, &flags.to_be_bytes()]);
        if wanted.contains(&info::NAME) {
            send(info::NAME, &[export.name.as_bytes()]);
        }
        if wanted.contains(&info::DESCRIPTION) {
            send(info::DESCRIPTION, &[export.description.as_bytes()]);
        }
        // After a crash, a write no longer than the maximum block size is there in full or not at
        // all.
        let largest = export
            .backend
            .max_request_bytes()
            .clamp(MIN_MAXIMUM_BLOCK as usize, MAX_PAYLOAD as usize);
        let blocks = [SECTOR_SIZE as u32, PREFERRED_BLOCK, largest as u32].map(u32::to_be_bytes);
        send(info::BLOCK_SIZE, &[&blocks[0], &blocks[1], &blocks[2]]);
        Ok((option == option::GO).then(|| Arc::downgrade(&export)))
    }

    fn meta_context(
        &mut self,
        option: u32,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Option<Weak<Export>>, OptionError> {
        if self.framing == Framing::Simple {
            return Err((reply::ERR_INVALID, "negotiate structured replies first"));
        }
        let setting = option == option::SET_META_CONTEXT;
        if setting {
            self.contexts = None;
        }
        let malformed = (reply::ERR_INVALID, "the option is malformed");
        let mut fields = FieldReader(data);
        let name = fields.string().ok_or(malformed)?;
        let count = fields.u32().ok_or(malformed)?;
        let queries: Option<Vec<&[u8]>> = (0..count).map(|_| fields.string()).collect();
        let queries = queries.filter(|_| fields.0.is_empty()).ok_or(malformed)?;
        let export = self.find_or_refuse(name)?;
        let wanted = |context: &str| {
            let mut queries = queries.iter();
            let listed = |query: &[u8]| {
                let mut namespaces = NAMESPACES.iter();
                namespaces.any(|space| space.as_bytes() == query && context.starts_with(space))
            };
            (!setting && count == 0)
                || queries.any(|&query| query == context.as_bytes() || (!setting && listed(query)))
        };
        let tracked = export.backend.tracked();
        let points = tracked
            .map_or_else(Vec::new, |disk| disk.past_points())
            .into_iter();
        let changes = points.map(|point| {
            let name = format!("{DIRTY_BITMAP}{}", point.name);
            (name, MetaContext::Changes(point.number))
        });
        let all = std::iter::once((ALLOCATION.to_owned(), MetaContext::Allocation)).chain(changes);
        let mut chosen = Vec::new();
        for (name, context) in all.filter(|(name, _)| wanted(name)) {
            let id = if setting { chosen.len() as u32 } else { 0 };
            let mut entry = Vec::from(id.to_be_bytes());
            entry.extend(name.as_bytes());
            out.extend(option_reply(option, reply::META_CONTEXT, &entry));
            chosen.push(context);
        }
        if setting {
            self.contexts = Some((Arc::downgrade(&export), chosen));
        }
        Ok(None)
    }
}
