//! One request: how it is checked, its backend operations ("steps"), and its reply.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::extent_query::{ExtentQuery, ExtentStatus, MetaContext};
use super::protocol::{
    Error, Framing, MAX_PAYLOAD, NbdRequest, chunk, command, flag, put_chunk, put_chunk_with_flags,
    put_simple,
};
use super::reply_queue::ReplyQueue;
use super::request_reader::{NbdMessage, Payload};
use crate::backend::{
    Backend, Buffer, Capabilities, Failure, MemoryCharge, Operation, SECTOR_SIZE,
};

/// Most sectors zeroed or discarded in one step: a multiple of every block size, 1 TiB.
const ZERO_STEP: u64 = 1 << 31;
/// Most bytes of one step of a read: other requests come between the steps.
const READ_STEP: usize = 1 << 20;
/// Most extents in one reply, for all contexts together.
const MAX_EXTENTS: usize = 4096;

/// What a request is checked against.
pub(super) struct NbdRules<'a> {
    pub(super) backend: &'a dyn Backend,
    pub(super) capabilities: Capabilities,
    pub(super) framing: Framing,
    /// What the client may ask about with BLOCK_STATUS.
    pub(super) contexts: &'a Arc<[MetaContext]>,
}

/// What to do with a request.
pub(super) enum NbdAction {
    /// Run it: it has steps, or an extent query.
    Run(PendingRequest),
    /// Run its parts.
    Split(LongRead),
    /// Answer it with this error.
    Refuse(NbdRequest, Error),
    /// The client sends no more requests.
    Disconnect,
}

/// A request in flight.
pub(super) struct PendingRequest {
    pub(super) request: NbdRequest,
    work: Work,
    sector: u64,
    /// Whether the last step is a FLUSH that is not submitted yet.
    flush_after: bool,
    /// Whether the request changes the disk, and [`take_await_written`](Self::take_await_written)
    /// was not called yet.
    await_written: bool,
    /// Whether the request was cut short because the server stops.
    cut: bool,
    /// What the request is a part of, if it is one.
    part: Option<ReadPart>,
    /// The memory that it may take.
    charge: MemoryCharge,
}

/// A part of a read.
struct ReadPart {
    offset: u64,
    length: u64,
    /// Parts that are not answered yet: the last one says that there are no more.
    left: Arc<AtomicU64>,
}

/// A read whose data may be sent in several chunks: only its parts need memory, one by one.
pub(super) struct LongRead {
    request: NbdRequest,
    /// Bytes that belong to parts taken so far.
    taken: u64,
    left: Arc<AtomicU64>,
}

impl LongRead {
    /// The bytes of the next part; 0: there is none.
    pub(super) fn next_bytes(&self) -> u64 {
        (self.request.length - self.taken).min(READ_STEP as u64)
    }

    /// The next part. There is one.
    pub(super) fn next_part(&mut self, charge: MemoryCharge) -> PendingRequest {
        let (offset, length) = (self.request.offset + self.taken, self.next_bytes());
        self.taken += length;
        let left = Arc::clone(&self.left);
        PendingRequest {
            request: self.request,
            work: Work::Read {
                left: length / SECTOR_SIZE,
                done: Vec::new(),
            },
            sector: offset / SECTOR_SIZE,
            flush_after: false,
            await_written: false,
            cut: false,
            part: Some(ReadPart {
                offset,
                length,
                left,
            }),
            charge,
        }
    }

    /// Refuses the parts that were not taken.
    pub(super) fn cut_short(self, framing: Framing, out: &mut ReplyQueue) {
        let parts = (self.request.length - self.taken).div_ceil(READ_STEP as u64);
        let left = self.left.fetch_sub(parts, Ordering::Relaxed) - parts;
        refuse_part(&self.request, Error::Shutdown, left == 0, framing, out);
    }
}

/// What is left to do for a request.
enum Work {
    Read {
        left: u64,
        done: Vec<Buffer>,
    },
    Write {
        rest: VecDeque<Buffer>,
    },
    Zero {
        left: u64,
        kind: ZeroKind,
    },
    Flush,
    Map {
        query: ExtentQuery,
        extents: Vec<Vec<ExtentStatus>>,
    },
}

/// The operation of a [`Work::Zero`].
#[derive(Clone, Copy)]
enum ZeroKind {
    Trim,
    Zeroes { unmap: bool },
}

/// Checks a request.
pub(super) fn check_request(message: NbdMessage, rules: &NbdRules<'_>) -> NbdAction {
    let request = message.request;
    match check(message, rules) {
        Ok(action) => action,
        Err(error) => NbdAction::Refuse(request, error),
    }
}

fn check(message: NbdMessage, rules: &NbdRules<'_>) -> Result<NbdAction, Error> {
    let NbdMessage {
        request,
        payload,
        charge,
    } = message;
    let can = rules.capabilities;
    if request.command == command::DISCONNECT {
        return Ok(NbdAction::Disconnect);
    }
    let allowed = flag::FUA
        | match request.command {
            command::READ if rules.framing != Framing::Simple => flag::DF,
            command::WRITE if rules.framing == Framing::Extended => flag::PAYLOAD_LENGTH,
            command::WRITE_ZEROES => flag::NO_HOLE | flag::FAST_ZERO,
            command::BLOCK_STATUS => flag::REQUEST_ONE,
            _ => 0,
        };
    if request.flags & !allowed != 0 {
        return Err(Error::Invalid);
    }
    let work = match request.command {
        command::READ => {
            if request.length > MAX_PAYLOAD {
                return Err(Error::Invalid);
            }
            let (done, left) = (Vec::new(), check_range(&request, rules, Error::Invalid)?);
            if may_split(&request, rules.framing) {
                let parts = request.length.div_ceil(READ_STEP as u64);
                return Ok(NbdAction::Split(LongRead {
                    request,
                    taken: 0,
                    left: Arc::new(parts.into()),
                }));
            }
            Work::Read { left, done }
        }
        command::WRITE => {
            check_writable(can)?;
            let Payload::Data(rest) = payload else {
                return Err(Error::Invalid);
            };
            check_range(&request, rules, Error::NoSpace)?;
            Work::Write { rest }
        }
        command::FLUSH if can.flush => Work::Flush,
        command::TRIM if can.discard || can.read_only => {
            check_writable(can)?;
            let left = check_range(&request, rules, Error::Invalid)?;
            let kind = ZeroKind::Trim;
            Work::Zero { left, kind }
        }
        command::WRITE_ZEROES if can.write_zeroes || can.read_only => {
            check_writable(can)?;
            let left = check_range(&request, rules, Error::NoSpace)?;
            let unmap = request.flags & flag::NO_HOLE == 0;
            let kind = ZeroKind::Zeroes { unmap };
            Work::Zero { left, kind }
        }
        command::BLOCK_STATUS if !rules.contexts.is_empty() => {
            let sectors = check_range(&request, rules, Error::Invalid)?;
            let most = match request.flags & flag::REQUEST_ONE {
                0 => (MAX_EXTENTS / rules.contexts.len()).max(1),
                _ => 1,
            };
            let query = ExtentQuery {
                sector: request.offset / SECTOR_SIZE,
                sectors,
                most,
                contexts: Arc::clone(rules.contexts),
            };
            let extents = Vec::new();
            Work::Map { query, extents }
        }
        _ => return Err(Error::Invalid),
    };
    let changes = matches!(work, Work::Write { .. } | Work::Zero { .. });
    let durable = changes && request.flags & flag::FUA != 0;
    Ok(NbdAction::Run(PendingRequest {
        request,
        sector: request.offset / SECTOR_SIZE,
        flush_after: durable || matches!(work, Work::Flush),
        await_written: changes && !durable,
        cut: false,
        part: None,
        charge,
        work,
    }))
}

/// Whether a read is long, and its data may be sent in several chunks.
fn may_split(request: &NbdRequest, framing: Framing) -> bool {
    framing != Framing::Simple
        && request.flags & flag::DF == 0
        && (READ_STEP as u64 + 1..=MAX_PAYLOAD).contains(&request.length)
}

/// Bytes of memory that a request may need beside what every request takes. A write's payload
/// arrives in buffers of `max_step` bytes.
pub(super) fn memory_of(
    request: &NbdRequest,
    framing: Framing,
    contexts: usize,
    max_step: usize,
) -> u64 {
    if request.has_payload(framing) && request.length <= MAX_PAYLOAD {
        let whole = request.length / max_step as u64;
        let rest = request.length % max_step as u64;
        let rest = if rest > 0 { Buffer::memory_of(rest) } else { 0 };
        return whole * Buffer::memory_of(max_step as u64) + rest;
    }
    match request.command {
        command::READ if request.length <= MAX_PAYLOAD && !may_split(request, framing) => {
            request.length
        }
        // Each extent as it is found, and as it is sent.
        command::BLOCK_STATUS => {
            (contexts.max(MAX_EXTENTS) * (size_of::<ExtentStatus>() + 16)) as u64
        }
        _ => 0,
    }
}

fn check_writable(can: Capabilities) -> Result<(), Error> {
    if can.read_only {
        return Err(Error::Permission);
    }
    Ok(())
}

/// Checks a request's range, and returns its length in sectors, at least one. `beyond` is the error
/// for a range that exceeds the disk.
fn check_range(request: &NbdRequest, rules: &NbdRules<'_>, beyond: Error) -> Result<u64, Error> {
    let end = request.offset.checked_add(request.length).ok_or(beyond)?;
    if end > rules.backend.sectors().saturating_mul(SECTOR_SIZE) {
        return Err(beyond);
    }
    let whole = |bytes: u64| bytes.is_multiple_of(SECTOR_SIZE);
    if request.length == 0 || !whole(request.offset) || !whole(request.length) {
        return Err(Error::Invalid);
    }
    Ok(request.length / SECTOR_SIZE)
}

impl PendingRequest {
    /// Bytes of the request, or of its part.
    fn length(&self) -> u64 {
        let part = self.part.as_ref();
        part.map_or(self.request.length, |part| part.length)
    }

    /// The most bytes of memory that the request holds.
    pub(super) fn bytes(&self) -> usize {
        match self.work {
            Work::Read { .. } | Work::Write { .. } => self.length() as usize,
            Work::Zero { .. } | Work::Flush => 0,
            Work::Map { ref query, .. } => {
                query.contexts.len() * query.most * size_of::<ExtentStatus>()
            }
        }
    }

    /// Whether there is a next step.
    pub(super) fn has_steps(&self) -> bool {
        self.flush_after
            || match &self.work {
                Work::Read { left, .. } | Work::Zero { left, .. } => *left > 0,
                Work::Write { rest } => !rest.is_empty(),
                Work::Flush | Work::Map { .. } => false,
            }
    }

    /// The next step, of at most `max_bytes` of data; `None`: there are no more.
    pub(super) fn next_step(&mut self, max_bytes: usize) -> Option<Operation> {
        let sector = self.sector;
        let (operation, sectors) = match &mut self.work {
            Work::Read { left, .. } if *left > 0 => {
                let sectors = (*left).min(max_bytes.min(READ_STEP) as u64 / SECTOR_SIZE);
                *left -= sectors;
                let read = Operation::Read {
                    sector,
                    sectors: sectors as u32,
                };
                (read, sectors)
            }
            Work::Write { rest } if !rest.is_empty() => {
                let data = rest.pop_front()?;
                let sectors = data.len() as u64 / SECTOR_SIZE;
                (Operation::Write { sector, data }, sectors)
            }
            Work::Zero { left, kind } if *left > 0 => {
                let step = (*left).min(ZERO_STEP);
                *left -= step;
                let sectors = step as u32;
                let operation = match *kind {
                    ZeroKind::Trim => Operation::Discard { sector, sectors },
                    ZeroKind::Zeroes { unmap } => Operation::WriteZeroes {
                        sector,
                        sectors,
                        unmap,
                    },
                };
                (operation, step)
            }
            _ if std::mem::take(&mut self.flush_after) => (Operation::Flush, 0),
            _ => return None,
        };
        self.sector += sectors;
        Some(operation)
    }

    /// Drops the remaining zeroing steps of a request, of which there may be millions.
    pub(super) fn cut_short(&mut self) {
        if let Work::Zero { left, .. } = &mut self.work
            && *left > 0
        {
            *left = 0;
            self.flush_after = false;
            self.cut = true;
        }
    }

    /// The extent query; `None` if the request has steps instead.
    pub(super) fn query(&self) -> Option<ExtentQuery> {
        match &self.work {
            Work::Map { query, .. } => Some(query.clone()),
            _ => None,
        }
    }

    /// Stores the result of the query.
    pub(super) fn set_extents(&mut self, found: Vec<Vec<ExtentStatus>>) {
        if let Work::Map { extents, .. } = &mut self.work {
            *extents = found;
        }
    }

    /// Whether the caller still has to make sure that the request's changes are written. Returns
    /// `true` only once.
    pub(super) fn take_await_written(&mut self) -> bool {
        std::mem::take(&mut self.await_written)
    }

    /// Stores the data that a step has read.
    pub(super) fn store_data(&mut self, data: Option<Buffer>) {
        if let (Work::Read { done, .. }, Some(data)) = (&mut self.work, data) {
            done.push(data);
        }
    }

    /// Answers the request after its last step, or after a step that failed. Returns whether the
    /// request succeeded.
    pub(super) fn answer(
        mut self,
        result: Result<(), Failure>,
        framing: Framing,
        out: &mut ReplyQueue,
    ) -> bool {
        let length = self.length();
        let request = &self.request;
        let (offset, is_last) = match &self.part {
            None => (request.offset, true),
            Some(part) => {
                let left = part.left.fetch_sub(1, Ordering::Relaxed) - 1;
                (part.offset, left == 0)
            }
        };
        let error = match result {
            Ok(()) => self.cut.then_some(Error::Shutdown),
            Err(Failure::OutOfRange | Failure::TooLarge) => Some(Error::Invalid),
            Err(Failure::ReadOnly) => Some(Error::Permission),
            Err(Failure::Io) => Some(Error::Io),
        };
        let len: usize = match &self.work {
            Work::Read { done, .. } => done.iter().map(|part| part.len()).sum(),
            _ => 0,
        };
        match (error, self.work) {
            (Some(error), _) => return refuse_part(request, error, is_last, framing, out),
            // A read that returned less data than requested is an error too.
            (None, Work::Read { .. }) if len as u64 != length => {
                return refuse_part(request, Error::Io, is_last, framing, out);
            }
            (None, Work::Read { done, .. }) => {
                let flags = if is_last { chunk::DONE } else { 0 };
                match framing {
                    Framing::Simple => out.push_header(|out| put_simple(out, request.cookie, None)),
                    _ => out.push_header(|out| {
                        let kind = (chunk::OFFSET_DATA, flags);
                        put_chunk_with_flags(out, framing, kind, request, 8 + len);
                        out.extend(offset.to_be_bytes());
                    }),
                }
                for data in done {
                    let charge = self.charge.split(data.len() as u64);
                    out.push_data(data, charge);
                }
            }
            (None, Work::Map { extents, .. }) => out.push_charged(self.charge, |out| {
                answer_extents(request, &extents, framing, out);
            }),
            (None, _) => out.push_header(|out| match framing {
                Framing::Extended => put_chunk(out, framing, chunk::NONE, request, 0),
                _ => put_simple(out, request.cookie, None),
            }),
        }
        true
    }

    /// The command of the request, for metrics.
    pub(super) fn command(&self) -> u16 {
        self.request.command
    }
}

/// Answers a request with an error. Returns `false`, as [`PendingRequest::answer`] does for a
/// failure.
pub(super) fn refuse(
    request: &NbdRequest,
    error: Error,
    framing: Framing,
    out: &mut ReplyQueue,
) -> bool {
    refuse_part(request, error, true, framing, out)
}

/// As [`refuse`]. `is_last`: no more chunks follow.
fn refuse_part(
    request: &NbdRequest,
    error: Error,
    is_last: bool,
    framing: Framing,
    out: &mut ReplyQueue,
) -> bool {
    let chunked = match framing {
        Framing::Simple => false,
        Framing::Structured => matches!(request.command, command::READ | command::BLOCK_STATUS),
        Framing::Extended => true,
    };
    out.push_header(|out| {
        if !chunked {
            return put_simple(out, request.cookie, Some(error));
        }
        let flags = if is_last { chunk::DONE } else { 0 };
        put_chunk_with_flags(out, framing, (chunk::ERROR, flags), request, 6);
        out.extend((error as u32).to_be_bytes());
        // The error message is empty.
        out.extend(0_u16.to_be_bytes());
    });
    false
}

/// Answers a BLOCK_STATUS with a chunk for each context.
fn answer_extents(
    request: &NbdRequest,
    contexts: &[Vec<ExtentStatus>],
    framing: Framing,
    out: &mut Vec<u8>,
) {
    for (id, extents) in contexts.iter().enumerate() {
        let is_last = id + 1 == contexts.len();
        let flags = if is_last { chunk::DONE } else { 0 };
        let id = (id as u32).to_be_bytes();
        if framing == Framing::Extended {
            let (kind, len) = (chunk::BLOCK_STATUS_EXTENDED, 8 + 16 * extents.len());
            put_chunk_with_flags(out, framing, (kind, flags), request, len);
            out.extend(id);
            out.extend((extents.len() as u32).to_be_bytes());
            for (sectors, state) in extents {
                out.extend((sectors * SECTOR_SIZE).to_be_bytes());
                out.extend(u64::from(*state).to_be_bytes());
            }
            continue;
        }
        let (kind, len) = (chunk::BLOCK_STATUS, 4 + 8 * extents.len());
        put_chunk_with_flags(out, framing, (kind, flags), request, len);
        out.extend(id);
        for (sectors, state) in extents {
            // The cast is lossless: no extent is longer than the requested range, whose length has
            // 32 bits.
            out.extend(((sectors * SECTOR_SIZE) as u32).to_be_bytes());
            out.extend(state.to_be_bytes());
        }
    }
}
