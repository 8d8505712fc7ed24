//! One request: its checks, its steps at the backend, its reply.

use std::collections::VecDeque;
use std::sync::Arc;

use super::incoming::{NbdMessage, Payload};
use super::mapper::{Context, Question, Status};
use super::outgoing::Outgoing;
use super::protocol::{
    Error, Framing, MAX_PAYLOAD, NbdRequest, chunk, command, flag, put_chunk, put_part, put_simple,
};
use crate::backend::{Backend, Buffer, Capabilities, Failure, Operation, SECTOR_SIZE};

/// Most sectors zeroed or discarded in one step: a multiple of every block size, 1 TiB.
const ZERO_STEP: u64 = 1 << 31;
/// Most extents in one reply, for all contexts together.
const MAX_EXTENTS: usize = 4096;

/// What the checks of a request depend on.
pub(super) struct NbdRules<'a> {
    pub(super) backend: &'a dyn Backend,
    pub(super) capabilities: Capabilities,
    pub(super) framing: Framing,
    /// What the client may ask about with BLOCK_STATUS.
    pub(super) contexts: &'a Arc<[Context]>,
}

/// How to go on with a request.
pub(super) enum NbdAction {
    /// Run it: it has steps for the backend, or a question to it.
    Run(PendingRequest),
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
    /// The last step is a FLUSH, not submitted yet.
    flush_after: bool,
    /// The request changes the disk, and [`take_unasked`](Self::take_unasked) was not called yet.
    unasked: bool,
    /// The request was cut short by a stop of the server.
    cut: bool,
}

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
        kind: Zero,
    },
    Flush,
    Map {
        question: Question,
        extents: Vec<Vec<Status>>,
    },
}

#[derive(Clone, Copy)]
enum Zero {
    Trim,
    Zeroes { unmap: bool },
}

/// Checks a request.
pub(super) fn judge(message: NbdMessage, rules: &NbdRules<'_>) -> NbdAction {
    let request = message.request;
    match check(message, rules) {
        Ok(action) => action,
        Err(error) => NbdAction::Refuse(request, error),
    }
}

fn check(message: NbdMessage, rules: &NbdRules<'_>) -> Result<NbdAction, Error> {
    let NbdMessage { request, payload } = message;
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
            let (done, left) = (Vec::new(), range(&request, rules, Error::Invalid)?);
            Work::Read { left, done }
        }
        command::WRITE => {
            writable(can)?;
            let Payload::Data(rest) = payload else {
                return Err(Error::Invalid);
            };
            range(&request, rules, Error::NoSpace)?;
            Work::Write { rest }
        }
        command::FLUSH if can.flush => Work::Flush,
        command::TRIM if can.discard || can.read_only => {
            writable(can)?;
            let left = range(&request, rules, Error::Invalid)?;
            let kind = Zero::Trim;
            Work::Zero { left, kind }
        }
        command::WRITE_ZEROES if can.write_zeroes || can.read_only => {
            writable(can)?;
            let left = range(&request, rules, Error::NoSpace)?;
            let unmap = request.flags & flag::NO_HOLE == 0;
            let kind = Zero::Zeroes { unmap };
            Work::Zero { left, kind }
        }
        command::BLOCK_STATUS if !rules.contexts.is_empty() => {
            let sectors = range(&request, rules, Error::Invalid)?;
            let most = match request.flags & flag::REQUEST_ONE {
                0 => (MAX_EXTENTS / rules.contexts.len()).max(1),
                _ => 1,
            };
            let question = Question {
                sector: request.offset / SECTOR_SIZE,
                sectors,
                most,
                contexts: Arc::clone(rules.contexts),
            };
            let extents = Vec::new();
            Work::Map { question, extents }
        }
        _ => return Err(Error::Invalid),
    };
    let changes = matches!(work, Work::Write { .. } | Work::Zero { .. });
    let durable = changes && request.flags & flag::FUA != 0;
    Ok(NbdAction::Run(PendingRequest {
        request,
        sector: request.offset / SECTOR_SIZE,
        flush_after: durable || matches!(work, Work::Flush),
        unasked: changes && !durable,
        cut: false,
        work,
    }))
}

fn writable(can: Capabilities) -> Result<(), Error> {
    match can.read_only {
        true => Err(Error::Permission),
        false => Ok(()),
    }
}

/// The sectors of a request, at least one. `beyond` is the error for a range that exceeds the disk.
fn range(request: &NbdRequest, rules: &NbdRules<'_>, beyond: Error) -> Result<u64, Error> {
    let end = request.offset.checked_add(request.length).ok_or(beyond)?;
    if end > rules.backend.sectors().saturating_mul(SECTOR_SIZE) {
        return Err(beyond);
    }
    let whole = |bytes: u64| bytes.is_multiple_of(SECTOR_SIZE);
    match request.length > 0 && whole(request.offset) && whole(request.length) {
        true => Ok(request.length / SECTOR_SIZE),
        false => Err(Error::Invalid),
    }
}

impl PendingRequest {
    /// The most bytes of memory that the request holds.
    pub(super) fn bytes(&self) -> usize {
        match self.work {
            Work::Read { .. } | Work::Write { .. } => self.request.length as usize,
            Work::Zero { .. } | Work::Flush => 0,
            Work::Map { ref question, .. } => {
                question.contexts.len() * question.most * size_of::<Status>()
            }
        }
    }

    /// The next step; `None`: there are no more.
    pub(super) fn step(&mut self, part: usize) -> Option<Operation> {
        let sector = self.sector;
        let (operation, sectors) = match &mut self.work {
            Work::Read { left, .. } if *left > 0 => {
                let sectors = (*left).min(part as u64 / SECTOR_SIZE);
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
                    Zero::Trim => Operation::Discard { sector, sectors },
                    Zero::Zeroes { unmap } => Operation::WriteZeroes {
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

    /// Cuts short a request that has more zeroing steps to come: there may be millions of them.
    pub(super) fn cut(&mut self) {
        if let Work::Zero { left, .. } = &mut self.work
            && *left > 0
        {
            *left = 0;
            self.flush_after = false;
            self.cut = true;
        }
    }

    /// The question about extents; `None` if the request has steps instead.
    pub(super) fn question(&self) -> Option<Question> {
        match &self.work {
            Work::Map { question, .. } => Some(question.clone()),
            _ => None,
        }
    }

    /// Takes the answer to the question.
    pub(super) fn mapped(&mut self, found: Vec<Vec<Status>>) {
        if let Work::Map { extents, .. } = &mut self.work {
            *extents = found;
        }
    }

    /// Whether the caller must still ask if the request's changes are written. Returns `true` only once.
    pub(super) fn take_unasked(&mut self) -> bool {
        std::mem::take(&mut self.unasked)
    }

    /// Takes the data that a step has read.
    pub(super) fn stepped(&mut self, data: Option<Buffer>) {
        if let (Work::Read { done, .. }, Some(data)) = (&mut self.work, data) {
            done.push(data);
        }
    }

    /// Answers the request, once all steps are done or one has failed. Returns whether it succeeded.
    pub(super) fn answer(
        self,
        result: Result<(), Failure>,
        framing: Framing,
        out: &mut Outgoing,
    ) -> bool {
        let request = &self.request;
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
            (Some(error), _) => return refuse(request, error, framing, out),
            // A read that returned less data than requested has failed too.
            (None, Work::Read { .. }) if len as u64 != request.length => {
                return refuse(request, Error::Io, framing, out);
            }
            (None, Work::Read { done, .. }) => {
                match framing {
                    Framing::Simple => out.header(|out| put_simple(out, request.cookie, None)),
                    _ => out.header(|out| {
                        put_chunk(out, framing, chunk::OFFSET_DATA, request, 8 + len);
                        out.extend(request.offset.to_be_bytes());
                    }),
                }
                done.into_iter().for_each(|part| out.data(part));
            }
            (None, Work::Map { extents, .. }) => answer_extents(request, &extents, framing, out),
            (None, _) => out.header(|out| match framing {
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

/// Answers a request with an error. Returns `false`, as [`PendingRequest::answer`] does for a failure.
pub(super) fn refuse(
    request: &NbdRequest,
    error: Error,
    framing: Framing,
    out: &mut Outgoing,
) -> bool {
    let chunked = match framing {
        Framing::Simple => false,
        Framing::Structured => matches!(request.command, command::READ | command::BLOCK_STATUS),
        Framing::Extended => true,
    };
    out.header(|out| {
        if !chunked {
            return put_simple(out, request.cookie, Some(error));
        }
        put_chunk(out, framing, chunk::ERROR, request, 6);
        out.extend((error as u32).to_be_bytes());
        // The error message is empty.
        out.extend(0_u16.to_be_bytes());
    });
    false
}

/// Answers a BLOCK_STATUS with a chunk for each context.
fn answer_extents(
    request: &NbdRequest,
    contexts: &[Vec<Status>],
    framing: Framing,
    out: &mut Outgoing,
) {
    out.header(|out| {
        for (id, extents) in contexts.iter().enumerate() {
            let flags = match id + 1 == contexts.len() {
                true => chunk::DONE,
                false => 0,
            };
            let id = (id as u32).to_be_bytes();
            if framing == Framing::Extended {
                let (kind, len) = (chunk::BLOCK_STATUS_EXTENDED, 8 + 16 * extents.len());
                put_part(out, framing, (kind, flags), request, len);
                out.extend(id);
                out.extend((extents.len() as u32).to_be_bytes());
                for (sectors, state) in extents {
                    out.extend((sectors * SECTOR_SIZE).to_be_bytes());
                    out.extend(u64::from(*state).to_be_bytes());
                }
                continue;
            }
            let (kind, len) = (chunk::BLOCK_STATUS, 4 + 8 * extents.len());
            put_part(out, framing, (kind, flags), request, len);
            out.extend(id);
            for (sectors, state) in extents {
                // It fits: an extent is no longer than the requested range, whose length has 32 bits.
                out.extend(((sectors * SECTOR_SIZE) as u32).to_be_bytes());
                out.extend(state.to_be_bytes());
            }
        }
    });
}
