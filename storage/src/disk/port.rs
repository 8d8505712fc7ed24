//! One thread's access to a disk: checks requests, answers reads from log and base image, joins
//! group commit.

use std::collections::VecDeque;
use std::io;
use std::os::fd::BorrowedFd;

use crate::catalog::mark_text::MarkText;
use crate::format::DescriptorKind;
use crate::index::Piece;
use crate::log::disk_state::DiskState;
use crate::log::group_commit::{AppendError, Committer};
use crate::log::pipeline::{MarkCommit, Modification};
use crate::log::reads::{ReadPart, ReadQueue, SharedReads, check_read};
use crate::log::state::Log;
use crate::log::waiters::PortReads;
use crate::medium::checksum::{self, Payload};
use crate::mutant::{Mutant, planted};
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, Mutex};
use crate::tracepoints;
use crate::{
    BackendQueue, Buffer, Completion, Failure, Operation, SECTOR_SIZE, StallCause, check_range,
};

/// One thread's access to a disk. Dropping it waits for reads in flight; completions not taken are
/// lost.
///
/// A port that is not polled holds up no other port: any work on the log that it takes is finished
/// before the call returns.
pub struct Port {
    pub(crate) disk: Arc<DiskState>,
    pub(crate) committer: Committer,
    pub(crate) done: Vec<Completion>,
    /// The newest record of this port.
    pub(crate) newest_lsn: u64,
    /// Modifications that the log held back, in order.
    parked: VecDeque<(u64, Modification)>,
    /// What the first of them waits for.
    stall: StallCause,
    reads: Arc<SharedReads>,
    /// Memory for the next read's pieces.
    pieces: Vec<Piece>,
}

/// The state of a request after the port has taken it.
enum RequestState {
    /// The request has ended, with the data of a READ.
    Ended(Option<Buffer>),
    /// The completion comes later.
    InFlight,
    /// The log was full and did not take this modification.
    HeldBack(Modification),
}

impl Port {
    /// Opens a port to a disk on a log.
    pub(crate) fn new(log: &Arc<Log>, disk: &Arc<DiskState>) -> io::Result<Self> {
        let committer = Committer::new(log.clone(), 1, disk.sharing.clone())?;
        let mailbox = committer.mailbox.clone();
        let engine = log.medium.engine(&mailbox.event)?;
        let reads = Arc::new(SharedReads {
            queue: Mutex::new(Some(ReadQueue::new(engine, &disk.path))),
            mailbox: mailbox.clone(),
        });
        let shared: Arc<dyn PortReads> = reads.clone();
        // Can't fail: the mailbox is new.
        let _ = mailbox.reads.set(Arc::downgrade(&shared));
        Ok(Self {
            disk: disk.clone(),
            committer,
            done: Vec::new(),
            newest_lsn: 0,
            parked: VecDeque::new(),
            stall: StallCause::PendingFull,
            reads,
            pieces: Vec::new(),
        })
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        // Drop the queue here, where waiting for reads in flight is fine, and not in another thread
        // that is ending reads.
        if let Ok(mut queue) = self.reads.queue.lock() {
            drop(queue.take());
        }
    }
}

impl BackendQueue for Port {
    fn set_clients(&mut self, clients: usize) {
        let mailbox = &self.committer.mailbox;
        let mut state = self.committer.log.lock();
        state.waiters.set_clients(mailbox, clients);
    }

    fn submit(&mut self, token: u64, operation: Operation) {
        tracepoints::submit(token, &operation);
        let submitted = match operation {
            Operation::Read { sector, sectors } => self.read(token, sector, sectors),
            Operation::Write { sector, data } => self.write(token, sector, data),
            Operation::Discard { sector, sectors } => {
                self.zero(token, DescriptorKind::Discard, sector, sectors)
            }
            Operation::WriteZeroes {
                sector,
                sectors,
                unmap,
            } => {
                let kind = if unmap {
                    DescriptorKind::Discard
                } else {
                    DescriptorKind::WriteZeroes
                };
                self.zero(token, kind, sector, sectors)
            }
            Operation::Flush => self.flush(token),
        };
        self.settle(token, submitted);
    }

    fn notify_written(&mut self, token: u64) -> bool {
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
        self.start(false);
    }

    fn kick_alone(&mut self) {
        self.start(true);
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.committer.mailbox.event.fd()
    }

    fn completions(&mut self, done: &mut Vec<Completion>) {
        if !planted(Mutant::SignalClearedLate) {
            self.committer.clear();
        }
        let mut ended = std::mem::take(&mut self.done);
        self.reads.with(|reads| reads.poll(&mut ended));
        self.committer.poll(&mut ended);
        self.done = ended;
        if !self.parked.is_empty() {
            self.unpark();
            self.committer.start(false);
        }
        self.done.iter().for_each(tracepoints::complete);
        done.append(&mut self.done);
        if planted(Mutant::SignalClearedLate) {
            self.committer.clear();
        }
    }
}

impl Port {
    /// Starts what was submitted. `alone`: the thread has nothing else to do, so it may run a lone,
    /// quick sync itself. Returns whether it did.
    pub(crate) fn start(&mut self, alone: bool) -> bool {
        self.reads.with(ReadQueue::start);
        self.committer.start(alone)
    }

    /// Queues the completion of a request that has already ended, and parks one that the log held
    /// back.
    fn settle(&mut self, token: u64, submitted: Result<RequestState, Failure>) {
        let result = match submitted {
            Ok(RequestState::InFlight) => return,
            Ok(RequestState::HeldBack(modification)) => {
                self.parked.push_back((token, modification));
                return;
            }
            Ok(RequestState::Ended(data)) => Ok(data),
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
        check_range(sector, sectors, self.disk.sectors())
    }

    fn check_writable(&self) -> Result<(), Failure> {
        if self.disk.read_only {
            Err(Failure::ReadOnly)
        } else {
            self.check_healthy()
        }
    }

    fn check_healthy(&self) -> Result<(), Failure> {
        if self.committer.log.poisoned.load(Ordering::Acquire) {
            Err(Failure::Io)
        } else {
            Ok(())
        }
    }

    fn write(&mut self, token: u64, sector: u64, data: Buffer) -> Result<RequestState, Failure> {
        self.check_writable()?;
        let most = self.committer.log.max_request_bytes();
        if !data.len().is_multiple_of(SECTOR_SIZE as usize) || data.len() > most {
            return Err(Failure::TooLarge);
        }
        let sectors = (data.len() as u64 / SECTOR_SIZE) as u32;
        self.check_range(sector, u64::from(sectors))?;
        // Checksum the copy, never memory that the guest can change.
        let checksums = checksum::of(&data);
        let data = crate::mutant::changed_after_checksum(data);
        let payload = Some(Payload {
            bytes: data.share(),
            checksums,
        });
        self.modify(
            token,
            Modification {
                kind: DescriptorKind::Write,
                sector,
                sectors,
                payload,
                mark: None,
            },
        )
    }

    /// Logs a mark with this text. It completes once it is durable; `marked` then has its position.
    pub(crate) fn mark(&mut self, token: u64, text: &MarkText, marked: MarkCommit) {
        let mark = Modification::mark(text, marked);
        let submitted = self.check_healthy();
        let submitted = submitted.and_then(|()| self.modify(token, mark));
        self.settle(token, submitted);
    }

    fn zero(
        &mut self,
        token: u64,
        kind: DescriptorKind,
        sector: u64,
        sectors: u32,
    ) -> Result<RequestState, Failure> {
        self.check_writable()?;
        self.check_range(sector, u64::from(sectors))?;
        self.modify(
            token,
            Modification {
                kind,
                sector,
                sectors,
                payload: None,
                mark: None,
            },
        )
    }

    /// Logs a modification. It is held back while earlier ones are parked.
    fn modify(&mut self, token: u64, modification: Modification) -> Result<RequestState, Failure> {
        let submitted = if self.parked.is_empty() {
            self.append(token, modification)
        } else {
            Ok(RequestState::HeldBack(modification))
        };
        if let Ok(RequestState::HeldBack(_)) = submitted {
            self.committer.log.counters.stalled.count(self.stall);
        }
        submitted
    }

    fn append(&mut self, token: u64, modification: Modification) -> Result<RequestState, Failure> {
        let mark = modification.mark.is_some();
        let lsn = match self.committer.append(&self.disk, modification) {
            Ok(lsn) => lsn,
            Err(AppendError::Refused(cause)) => {
                self.committer.log.counters.refused.count(cause);
                return Err(Failure::Io);
            }
            Err(AppendError::HeldBack(cause, modification)) => {
                self.stall = cause;
                return Ok(RequestState::HeldBack(modification));
            }
        };
        assert!(self.newest_lsn < lsn, "LSNs rise");
        self.newest_lsn = lsn;
        if mark && !planted(Mutant::MarkAnsweredEarly) {
            return self.wait(token, lsn);
        }
        if mark || self.disk.write_cache.load(Ordering::Acquire) || self.disk.no_flush {
            return Ok(RequestState::Ended(None));
        }
        self.wait(token, lsn)
    }

    /// Logs the parked modifications, in order, until the log holds one back again.
    fn unpark(&mut self) {
        while let Some((token, modification)) = self.parked.pop_front() {
            let writable = match modification.mark {
                Some(_) => self.check_healthy(),
                None => self.check_writable(),
            };
            match writable.and_then(|()| self.append(token, modification)) {
                Ok(RequestState::HeldBack(modification)) => {
                    self.parked.push_front((token, modification));
                    return;
                }
                submitted => self.settle(token, submitted),
            }
        }
    }

    fn flush(&mut self, token: u64) -> Result<RequestState, Failure> {
        if self.disk.no_flush {
            return Ok(RequestState::Ended(None));
        }
        self.wait(token, self.disk.last_lsn.load(Ordering::Acquire))
    }

    fn wait(&mut self, token: u64, lsn: u64) -> Result<RequestState, Failure> {
        let waits = !self.committer.wait_for(lsn, token)?;
        let counters = &self.committer.log.counters;
        counters.flushes.fetch_add(1, Ordering::Relaxed);
        if !waits {
            return Ok(RequestState::Ended(None));
        }
        counters.flushes_grouped.fetch_add(1, Ordering::Relaxed);
        Ok(RequestState::InFlight)
    }

    fn read(&mut self, token: u64, sector: u64, sectors: u32) -> Result<RequestState, Failure> {
        check_read(sector, sectors, self.disk.sectors())?;
        let disk = &self.disk;
        self.committer.log.reads.fetch_add(1, Ordering::Relaxed);
        let count = u64::from(sectors);
        disk.index().pieces(sector, count, &mut self.pieces);
        let parts = self
            .pieces
            .drain(..)
            .flat_map(|piece| ReadPart::of(piece, &disk.base));
        let begun = self
            .reads
            .with(|reads| reads.begin(token, sector, sectors, parts));
        Ok(match begun? {
            Some(data) => RequestState::Ended(Some(data)),
            None => RequestState::InFlight,
        })
    }
}
