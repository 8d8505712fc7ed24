//! One request: checked, carried out in steps that the backend takes, answered.

use std::collections::VecDeque;

use super::incoming::{Message, Payload};
use super::mapper::Question;
use super::outgoing::Outgoing;
use super::protocol::{
    ALLOCATION_ID, Error, Framing, MAX_PAYLOAD, Request, chunk, command, extent, flag, put_chunk,
    put_simple,
};
use crate::backend::{
    Allocation, Backend, Buffer, Capabilities, Extent, Failure, Operation, SECTOR_SIZE,
};

/// Most sectors that become zeroes in one step: a multiple of every block size, 1 TiB.
const ZERO_STEP: u64 = 1 << 31;
/// Most extents in one reply.
const MAX_EXTENTS: usize = 4096;

/// What a request is judged by.
pub(super) struct Rules<'a> {
    pub(super) backend: &'a dyn Backend,
    pub(super) capabilities: Capabilities,
    pub(super) framing: Framing,
    pub(super) allocation: bool,
}

/// What is to be done.
pub(super) enum Action {
    /// Steps for the backend, or a question to it.
    Run(Pending),
    /// It failed already.
    Refuse(Request, Error),
    /// Nothing more will come.
    Disconnect,
}

/// A request on its way.
pub(super) struct Pending {
    pub(super) request: Request,
    work: Work,
    sector: u64,
    /// A FLUSH is the last step, still to be taken.
    flush_after: bool,
    /// It changes the disk, and nobody has asked yet whether that is written.
    unasked: bool,
    /// It ends before it is done.
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
        extents: Vec<Extent>,
    },
}

#[derive(Clone, Copy)]
enum Zero {
    Trim,
    Zeroes { unmap: bool },
}

/// Checks a request.
pub(super) fn judge(message: Message, rules: &Rules<'_>) -> Action {
    let request = message.request;
    match check(message, rules) {
        Ok(action) => action,
        Err(error) => Action::Refuse(request, error),
    }
}

fn check(message: Message, rules: &Rules<'_>) -> Result<Action, Error> {
    let Message { request, payload } = message;
    let can = rules.capabilities;
    if request.command == command::DISCONNECT {
        return Ok(Action::Disconnect);
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
        command::BLOCK_STATUS if rules.allocation => {
            let sectors = range(&request, rules, Error::Invalid)?;
            let most = match request.flags & flag::REQUEST_ONE {
                0 => MAX_EXTENTS,
                _ => 1,
            };
            let question = Question {
                sector: request.offset / SECTOR_SIZE,
                sectors,
                most,
            };
            let extents = Vec::new();
            Work::Map { question, extents }
        }
        _ => return Err(Error::Invalid),
    };
    let changes = matches!(work, Work::Write { .. } | Work::Zero { .. });
    let durable = changes && request.flags & flag::FUA != 0;
    Ok(Action::Run(Pending {
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

/// The sectors of a request, at least one. `beyond`: what a range that leaves the disk fails with.
fn range(request: &Request, rules: &Rules<'_>, beyond: Error) -> Result<u64, Error> {
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

impl Pending {
    /// Bytes that it keeps in memory at most.
    pub(super) fn bytes(&self) -> usize {
        match self.work {
            Work::Read { .. } | Work::Write { .. } => self.request.length as usize,
            Work::Zero { .. } | Work::Flush => 0,
            Work::Map { question, .. } => question.most * size_of::<Extent>(),
        }
    }

    /// The next step; `None`: all are done.
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

    /// Lets a request that zeroes more than a step end now: there may be millions of steps to come.
    pub(super) fn cut(&mut self) {
        if let Work::Zero { left, .. } = &mut self.work
            && *left > 0
        {
            *left = 0;
            self.flush_after = false;
            self.cut = true;
        }
    }

    /// What the disk is to be asked instead of steps.
    pub(super) fn question(&self) -> Option<Question> {
        match &self.work {
            Work::Map { question, .. } => Some(*question),
            _ => None,
        }
    }

    /// Takes the answer.
    pub(super) fn mapped(&mut self, found: Vec<Extent>) {
        if let Work::Map { extents, .. } = &mut self.work {
            *extents = found;
        }
    }

    /// Whether it has yet to be asked if it is written, before it is answered; answers `true` once.
    pub(super) fn take_unasked(&mut self) -> bool {
        std::mem::take(&mut self.unasked)
    }

    /// Takes what a step has brought.
    pub(super) fn stepped(&mut self, data: Option<Buffer>) {
        if let (Work::Read { done, .. }, Some(data)) = (&mut self.work, data) {
            done.push(data);
        }
    }

    /// Answers it, once all steps are done or one has failed. Returns whether it succeeded.
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
            // A read without its data is as failed as one that says so.
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

    /// Which operation it is, for those who count.
    pub(super) fn command(&self) -> u16 {
        self.request.command
    }
}

/// Answers that it failed; `false`, since it did not succeed.
pub(super) fn refuse(
    request: &Request,
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
        // No text.
        out.extend(0_u16.to_be_bytes());
    });
    false
}

/// Answers which parts of a range hold data.
fn answer_extents(request: &Request, extents: &[Extent], framing: Framing, out: &mut Outgoing) {
    let state = |extent: &Extent| match extent.allocation {
        Allocation::Data => 0,
        Allocation::Zero => extent::ZERO,
        Allocation::Hole => extent::HOLE | extent::ZERO,
    };
    out.header(|out| match framing {
        Framing::Extended => {
            let len = 8 + 16 * extents.len();
            put_chunk(out, framing, chunk::BLOCK_STATUS_EXTENDED, request, len);
            out.extend(ALLOCATION_ID.to_be_bytes());
            out.extend((extents.len() as u32).to_be_bytes());
            for extent in extents {
                out.extend((extent.sectors * SECTOR_SIZE).to_be_bytes());
                out.extend(u64::from(state(extent)).to_be_bytes());
            }
        }
        _ => {
            let len = 4 + 8 * extents.len();
            put_chunk(out, framing, chunk::BLOCK_STATUS, request, len);
            out.extend(ALLOCATION_ID.to_be_bytes());
            for extent in extents {
                // No more than was asked for, which had 32 bits.
                out.extend(((extent.sectors * SECTOR_SIZE) as u32).to_be_bytes());
                out.extend(state(extent).to_be_bytes());
            }
        }
    });
}
