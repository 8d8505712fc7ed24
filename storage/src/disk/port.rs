//! One thread's way to a disk: checks requests, answers reads from log and base, joins group commit.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;

use slab::Slab;
use smallvec::SmallVec;

use crate::format::Kind;
use crate::index::{Piece, Place};
use crate::log::committer::Committer;
use crate::log::disk_state::DiskState;
use crate::log::pipeline::Modification;
use crate::log::state::{Log, Refused};
use crate::medium::checksum::{self, Payload};
use crate::medium::engine::{Done, Io, Source};
use crate::medium::segment::LogRead;
use crate::sync::Arc;
use crate::sync::atomic::Ordering;
use crate::{BackendQueue, Buffer, Completion, Failure, MAX_REQUEST_BYTES, Operation, SECTOR_SIZE};

/// A read whose parts are in flight.
struct Read {
    token: u64,
    /// `None` if one part is the whole read: the part's buffer becomes the result.
    buffer: Option<Buffer>,
    open: u32,
    /// The parts that come from the log, by their first sector in the read.
    logged: SmallVec<[(u64, LogRead); 1]>,
    failed: bool,
}

/// One thread's way to a disk. Dropping it waits for the operations in flight; completions not taken are lost.
///
/// A port may write a batch of records that other ports of the log wait for. So its owner has to call
/// [`completions`](Self::completions) whenever [`event`](Self::event) is readable, also while the owner waits for
/// nothing itself, or drop the port.
pub struct Port {
    pub(crate) disk: Arc<DiskState>,
    pub(crate) committer: Committer,
    pub(crate) done: Vec<Completion>,
    /// The newest record of this port.
    pub(crate) newest_lsn: u64,
    /// Writes held back by a full log, in order.
    parked: VecDeque<(u64, Modification)>,
    /// The reads in flight. The engine id of a part is the key of its read here, then, in 32 bits, the part's first
    /// sector in the read.
    reads: Slab<Read>,
    /// Memory for the next read's pieces, and for ended operations.
    pieces: Vec<Piece>,
    ended: Vec<Done>,
}

/// The state of a request after the port has taken it.
enum Submitted {
    /// The request has ended, with the data of a READ.
    Ended(Option<Buffer>),
    /// The completion comes later.
    InFlight,
    /// The full log took no record of this modification.
    HeldBack(Modification),
}

impl Port {
    /// A port to the disk with this state, on this log.
    pub(crate) fn new(log: &Arc<Log>, disk: &Arc<DiskState>) -> io::Result<Self> {
        Ok(Self {
            disk: disk.clone(),
            committer: Committer::new(log.clone(), 1)?,
            done: Vec::new(),
            newest_lsn: 0,
            parked: VecDeque::new(),
            reads: Slab::new(),
            pieces: Vec::new(),
            ended: Vec::new(),
        })
    }
}

impl BackendQueue for Port {
    fn set_clients(&mut self, clients: usize) {
        let mailbox = &self.committer.mailbox;
        let mut state = self.committer.log.lock();
        state.waiters.set_clients(mailbox, clients);
    }

    fn submit(&mut self, token: u64, operation: Operation) {
        let submitted = match operation {
            Operation::Read { sector, sectors } => self.read(token, sector, sectors),
            Operation::Write { sector, data } => self.write(token, sector, data),
            Operation::Discard { sector, sectors } => {
                self.zero(token, Kind::Discard, sector, sectors)
            }
            Operation::WriteZeroes {
                sector,
                sectors,
                unmap,
            } => {
                let kind = if unmap {
                    Kind::Discard
                } else {
                    Kind::WriteZeroes
                };
                self.zero(token, kind, sector, sectors)
            }
            Operation::Flush => self.flush(token),
        };
        self.settle(token, submitted);
    }

    fn when_written(&mut self, token: u64) -> bool {
        if self.disk.no_flush {
            return true;
        }
        match self.committer.wait_written(self.newest_lsn, token) {
            Ok(written) => written,
            Err(failure) => {
                let result = Err(failure);
                self.done.push(Completion { token, result });
                false
            }
        }
    }

    fn kick(&mut self) {
        self.committer.start(false);
    }

    fn kick_alone(&mut self) {
        self.committer.start(true);
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.committer.mailbox.event.fd()
    }

    fn completions(&mut self, done: &mut Vec<Completion>) {
        let mut ended = std::mem::take(&mut self.ended);
        self.committer.poll(&mut ended, &mut self.done);
        ended.drain(..).for_each(|end| self.end_part(end));
        self.ended = ended;
        if !self.parked.is_empty() {
            self.unpark();
            self.committer.start(false);
        }
        done.append(&mut self.done);
    }
}

impl Port {
    /// Queues the completion of a request that has ended already, and parks one that the full log holds back.
    fn settle(&mut self, token: u64, submitted: Result<Submitted, Failure>) {
        let result = match submitted {
            Ok(Submitted::InFlight) => return,
            Ok(Submitted::HeldBack(modification)) => {
                self.parked.push_back((token, modification));
                return;
            }
            Ok(Submitted::Ended(data)) => Ok(data),
            Err(failure) => Err(failure),
        };
        self.done.push(Completion { token, result });
    }

    /// Sleeps until [`event`](Self::event) is readable.
    #[cfg(test)]
    pub(crate) fn sleep_for_test(&self) {
        self.committer.sleep();
    }

    /// Carries out one request, with no other in flight.
    #[cfg(test)]
    pub(crate) fn end_for_test(&mut self, operation: Operation) -> Result<Option<Buffer>, Failure> {
        self.submit(1, operation);
        self.kick();
        let mut done = Vec::new();
        loop {
            self.completions(&mut done);
            match done.pop() {
                Some(Completion { result, .. }) => return result,
                None => self.sleep_for_test(),
            }
        }
    }

    fn check_range(&self, sector: u64, sectors: u64) -> Result<(), Failure> {
        let end = sector.checked_add(sectors).ok_or(Failure::OutOfRange)?;
        if sectors == 0 || end > self.disk.sectors() {
            Err(Failure::OutOfRange)
        } else {
            Ok(())
        }
    }

    fn check_writable(&self) -> Result<(), Failure> {
        match () {
            () if self.disk.read_only => Err(Failure::ReadOnly),
            () if self.committer.log.poisoned.load(Ordering::Acquire) => Err(Failure::Io),
            () => Ok(()),
        }
    }

    fn write(&mut self, token: u64, sector: u64, data: Buffer) -> Result<Submitted, Failure> {
        self.check_writable()?;
        let most = self.committer.log.max_request_bytes();
        if !data.len().is_multiple_of(SECTOR_SIZE as usize) || data.len() > most {
            return Err(Failure::TooLarge);
        }
        let sectors = (data.len() as u64 / SECTOR_SIZE) as u32;
        self.check_range(sector, u64::from(sectors))?;
        // The checksums are of the copy, never of memory that the guest can change.
        let checksums = checksum::of(&data);
        let data = crate::mutant::changed_after_checksum(data);
        let payload = Some(Payload {
            bytes: data.share(),
            checksums,
        });
        self.modify(
            token,
            Modification {
                kind: Kind::Write,
                sector,
                sectors,
                payload,
            },
        )
    }

    fn zero(
        &mut self,
        token: u64,
        kind: Kind,
        sector: u64,
        sectors: u32,
    ) -> Result<Submitted, Failure> {
        self.check_writable()?;
        self.check_range(sector, u64::from(sectors))?;
        self.modify(
            token,
            Modification {
                kind,
                sector,
                sectors,
                payload: None,
            },
        )
    }

    /// Logs a modification. It is held back while earlier ones are parked.
    fn modify(&mut self, token: u64, modification: Modification) -> Result<Submitted, Failure> {
        if !self.parked.is_empty() {
            return Ok(Submitted::HeldBack(modification));
        }
        self.append(token, modification)
    }

    fn append(&mut self, token: u64, modification: Modification) -> Result<Submitted, Failure> {
        self.committer.appended();
        let lsn = match self.committer.log.append(&self.disk, modification) {
            Ok(lsn) => lsn,
            Err(Refused::Stuck) => return Err(Failure::Io),
            Err(Refused::HeldBack(modification)) => return Ok(Submitted::HeldBack(modification)),
        };
        self.newest_lsn = lsn;
        if self.disk.write_cache.load(Ordering::Acquire) || self.disk.no_flush {
            return Ok(Submitted::Ended(None));
        }
        self.wait(token, lsn)
    }

    /// Logs the parked modifications, in order, until the log holds one back again.
    fn unpark(&mut self) {
        while let Some((token, modification)) = self.parked.pop_front() {
            let writable = self.check_writable();
            match writable.and_then(|()| self.append(token, modification)) {
                Ok(Submitted::HeldBack(modification)) => {
                    self.parked.push_front((token, modification));
                    return;
                }
                submitted => self.settle(token, submitted),
            }
        }
    }

    fn flush(&mut self, token: u64) -> Result<Submitted, Failure> {
        if self.disk.no_flush {
            return Ok(Submitted::Ended(None));
        }
        self.wait(token, self.disk.last_lsn.load(Ordering::Acquire))
    }

    fn wait(&mut self, token: u64, lsn: u64) -> Result<Submitted, Failure> {
        let waits = !self.committer.wait_for(lsn, token)?;
        let counters = &self.committer.log.counters;
        counters.flushes.fetch_add(1, Ordering::Relaxed);
        if !waits {
            return Ok(Submitted::Ended(None));
        }
        counters.flushes_grouped.fetch_add(1, Ordering::Relaxed);
        Ok(Submitted::InFlight)
    }

    fn read(&mut self, token: u64, sector: u64, sectors: u32) -> Result<Submitted, Failure> {
        self.check_range(sector, u64::from(sectors))?;
        let len = sectors as usize * SECTOR_SIZE as usize;
        if len > MAX_REQUEST_BYTES {
            return Err(Failure::TooLarge);
        }
        let mut pieces = std::mem::take(&mut self.pieces);
        self.disk
            .index()
            .pieces(sector, u64::from(sectors), &mut pieces);
        let whole = pieces.len() == 1;
        let key = self.reads.vacant_key();
        let mut buffer = None;
        let mut open = 0;
        let mut logged = SmallVec::new();
        for piece in pieces.drain(..) {
            let skipped = piece.sector - sector;
            let at = (skipped * SECTOR_SIZE) as usize;
            let part = (piece.sectors * SECTOR_SIZE) as usize;
            let (source, offset, bytes) = match piece.place {
                Some(Place::Memory { payload, offset }) => {
                    let bytes = &payload[offset..offset + part];
                    match whole {
                        true => buffer = Some(Buffer::from(bytes)),
                        false => buffer.get_or_insert_with(|| Buffer::zeroed(len))[at..at + part]
                            .copy_from_slice(bytes),
                    }
                    continue;
                }
                Some(Place::Zero { .. }) => continue,
                Some(Place::Log { segment, offset }) => {
                    let read = LogRead::new(segment.clone(), offset, part);
                    let (offset, bytes) = (read.offset(), read.bytes());
                    logged.push((skipped, read));
                    (Source::Segment(segment), offset, bytes)
                }
                None => (
                    Source::Base(self.disk.base.clone()),
                    piece.sector * SECTOR_SIZE,
                    part,
                ),
            };
            open += 1;
            let io = Io::Read {
                source,
                offset,
                buffer: Buffer::for_overwrite(bytes),
            };
            self.committer.submit_read((key as u64) << 32 | skipped, io);
        }
        self.pieces = pieces;
        if open == 0 {
            let read = buffer.unwrap_or_else(|| Buffer::zeroed(len));
            return Ok(Submitted::Ended(Some(read)));
        }
        if !whole {
            // Parts without a read are zeroes.
            buffer.get_or_insert_with(|| Buffer::zeroed(len));
        }
        self.reads.insert(Read {
            token,
            buffer,
            open,
            logged,
            failed: false,
        });
        Ok(Submitted::InFlight)
    }

    fn end_part(&mut self, end: Done) {
        let (key, skipped) = ((end.id >> 32) as usize, end.id & u64::from(u32::MAX));
        let at = (skipped * SECTOR_SIZE) as usize;
        let Some(read) = self.reads.get_mut(key) else {
            return;
        };
        read.open -= 1;
        let logged = read.logged.iter().position(|(first, _)| *first == skipped);
        let logged = logged.map(|found| read.logged.swap_remove(found).1);
        let result = end.result.map_err(|error| error.to_string());
        // Bytes of the log are verified before the client gets them: bytes that the medium changed, or never wrote,
        // are an error.
        let result = result.and_then(|part| match (part, logged) {
            (Some(part), Some(logged)) => {
                let verified = logged.verified(part).map_err(|error| error.to_string());
                verified.map(Some)
            }
            (part, _) => Ok(part),
        });
        match (result, &mut read.buffer) {
            (Ok(Some(part)), Some(whole)) => whole[at..at + part.len()].copy_from_slice(&part),
            (Ok(part), whole) => *whole = part,
            (Err(error), _) => {
                let disk = self.disk.path.display();
                tracing::error!("{disk}: a read failed: {error}");
                read.failed = true;
            }
        }
        if read.open == 0
            && let Some(read) = self.reads.try_remove(key)
        {
            let result = match read.failed {
                true => Err(Failure::Io),
                false => Ok(read.buffer),
            };
            self.done.push(Completion {
                token: read.token,
                result,
            });
        }
    }
}
