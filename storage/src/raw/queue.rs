//! One queue of a raw disk: its requests as operations of an engine.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use slab::Slab;

use super::shared::{RawMailbox, RawShared, locked};
use super::sync::Syncer;
use crate::log::reads::check_read;
use crate::medium::file::{Chunk, Engine, Io, IoCompletion, ReadSource};
use crate::{
    BackendQueue, Buffer, Completion, Failure, MAX_REQUEST_BYTES, Operation, SECTOR_SIZE,
    SharedBuffer, check_range,
};

/// Zeroes written at a time, on a file system that can't zero a range itself.
const ZEROES: u64 = 1 << 20;

/// What a request has in the engine.
enum RawStep {
    Read,
    Write,
    /// Make this byte range of the file read as zeroes.
    Zero(Range<u64>),
    /// Zero-fill a range chunk by chunk. `rest` comes after the chunk that is being written.
    Fill {
        rest: Range<u64>,
        zeroes: SharedBuffer,
    },
}

impl RawStep {
    /// Its name in messages.
    fn name(&self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Zero(_) | Self::Fill { .. } => "writing zeroes",
        }
    }
}

/// A request in the engine.
struct RawRequest {
    token: u64,
    step: RawStep,
    /// Whether to sync before the request completes.
    durably: bool,
}

/// What a request needs.
enum RawWork {
    /// An operation of the engine.
    Move(RawStep, Io),
    /// Make durable what was written.
    Sync,
    /// Nothing.
    Nothing,
}

/// One queue of a raw disk.
pub(super) struct RawQueue {
    shared: Arc<RawShared>,
    engine: Box<dyn Engine>,
    syncer: Arc<Syncer>,
    mailbox: Arc<RawMailbox>,
    /// Requests in the engine, by operation id.
    requests: Slab<RawRequest>,
    /// Completions of requests that needed no I/O.
    done: Vec<Completion>,
    /// Scratch list for ended operations.
    ended: Vec<IoCompletion>,
}

impl RawQueue {
    pub(super) fn new(
        shared: Arc<RawShared>,
        engine: Box<dyn Engine>,
        syncer: Arc<Syncer>,
        mailbox: Arc<RawMailbox>,
    ) -> Self {
        Self {
            shared,
            engine,
            syncer,
            mailbox,
            requests: Slab::new(),
            done: Vec::new(),
            ended: Vec::new(),
        }
    }

    /// Checks `operation` and returns the work that it needs.
    fn work(&self, operation: Operation) -> Result<RawWork, Failure> {
        let shared = &self.shared;
        let changes = !matches!(operation, Operation::Read { .. } | Operation::Flush);
        if changes && shared.image.read_only() {
            return Err(Failure::ReadOnly);
        }
        let reads = matches!(operation, Operation::Read { .. });
        if !reads && !shared.no_sync && shared.has_failed() {
            return Err(Failure::Io);
        }
        let (step, io) = match operation {
            Operation::Read { sector, sectors } => {
                check_read(sector, sectors, shared.sectors())?;
                let len = sectors as usize * SECTOR_SIZE as usize;
                let io = Io::Read {
                    source: ReadSource::File(shared.image.shared_file()),
                    offset: sector * SECTOR_SIZE,
                    // The client gets the buffer only if the read fills it.
                    buffer: Buffer::try_for_overwrite(len).map_err(|_| Failure::Io)?,
                };
                (RawStep::Read, io)
            }
            Operation::Write { sector, data } => {
                let len = data.len();
                if len > MAX_REQUEST_BYTES || !len.is_multiple_of(SECTOR_SIZE as usize) {
                    return Err(Failure::TooLarge);
                }
                check_range(sector, len as u64 / SECTOR_SIZE, shared.sectors())?;
                let write = self.write(sector * SECTOR_SIZE, data.share(), len);
                (RawStep::Write, write)
            }
            Operation::Discard { sector, sectors } => self.zero(sector, sectors, true)?,
            Operation::WriteZeroes {
                sector,
                sectors,
                unmap,
            } => self.zero(sector, sectors, unmap)?,
            // Nothing was written, or nobody wants durability.
            Operation::Flush if shared.image.read_only() || shared.no_sync => {
                return Ok(RawWork::Nothing);
            }
            Operation::Flush => return Ok(RawWork::Sync),
        };
        Ok(RawWork::Move(step, io))
    }

    /// A write of the first `len` bytes of `buffer` at this byte of the file.
    fn write(&self, offset: u64, buffer: SharedBuffer, len: usize) -> Io {
        Io::Write {
            base: self.shared.image.shared_file(),
            offset,
            chunks: vec![Chunk { buffer, len }],
        }
    }

    fn zero(&self, sector: u64, sectors: u32, unmap: bool) -> Result<(RawStep, Io), Failure> {
        let sectors = u64::from(sectors);
        check_range(sector, sectors, self.shared.sectors())?;
        let range = sector * SECTOR_SIZE..(sector + sectors) * SECTOR_SIZE;
        let io = Io::Zero {
            file: self.shared.image.shared_file(),
            range: range.clone(),
            unmap,
        };
        Ok((RawStep::Zero(range), io))
    }

    /// The next write of a fill. The range is not empty.
    fn fill(&self, mut rest: Range<u64>, zeroes: SharedBuffer) -> (RawStep, Io) {
        let len = (rest.end - rest.start).min(zeroes.len() as u64);
        let write = self.write(rest.start, zeroes.clone(), len as usize);
        rest.start += len;
        (RawStep::Fill { rest, zeroes }, write)
    }

    fn start(&mut self, token: u64, durably: bool, (step, io): (RawStep, Io)) {
        let request = RawRequest {
            token,
            step,
            durably,
        };
        let id = self.requests.insert(request) as u64;
        self.engine.submit(id, io);
    }

    /// Handles the end of an operation: starts the next one, or appends the request's completion to
    /// `done`.
    fn end(&mut self, ended: IoCompletion, done: &mut Vec<Completion>) {
        let RawRequest {
            token,
            step,
            durably,
        } = self.requests.remove(ended.id as usize);
        let result = match (ended.result, step) {
            (Ok(_), RawStep::Fill { rest, zeroes }) if !rest.is_empty() => {
                let next = self.fill(rest, zeroes);
                self.start(token, durably, next);
                return self.engine.enter();
            }
            (Err(error), RawStep::Zero(range)) if error.kind() == io::ErrorKind::Unsupported => {
                let len = (range.end - range.start).min(ZEROES);
                let next = self.fill(range, Buffer::zeroed(len as usize).share());
                self.start(token, durably, next);
                return self.engine.enter();
            }
            (Ok(_), _) if durably => return self.syncer.submit(token, &self.mailbox),
            (Ok(data), _) => Ok(data),
            (Err(error), step) => {
                let (path, name) = (self.shared.image.path().display(), step.name());
                tracing::warn!("{path}: {name} failed: {error}");
                Err(Failure::Io)
            }
        };
        done.push(Completion { token, result });
    }
}

impl BackendQueue for RawQueue {
    fn submit(&mut self, token: u64, operation: Operation) {
        let durably = self.shared.syncs_each_write();
        let result = match self.work(operation) {
            Ok(RawWork::Move(step, io)) => {
                let durably = durably && !matches!(step, RawStep::Read);
                return self.start(token, durably, (step, io));
            }
            Ok(RawWork::Sync) => return self.syncer.submit(token, &self.mailbox),
            Ok(RawWork::Nothing) => Ok(None),
            Err(failure) => Err(failure),
        };
        self.done.push(Completion { token, result });
    }

    fn kick(&mut self) {
        self.engine.enter();
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.mailbox.event.fd()
    }

    fn completions(&mut self, done: &mut Vec<Completion>) {
        // Clear the event first; a later completion sets it again.
        self.mailbox.event.clear();
        done.append(&mut self.done);
        let mut ended = std::mem::take(&mut self.ended);
        self.engine.poll(&mut ended);
        ended.drain(..).for_each(|end| self.end(end, done));
        self.ended = ended;
        done.append(&mut locked(&self.mailbox.ended));
    }
}
