//! Group commit: records are appended, written in batches and synced, and one sync serves all who
//! wait.
//!
//! ```text
//!  pending ──batch──▶ writing (several at once) ──▶ written ──sync (one at a time)──▶ durable
//! ```
//! The stages overlap: while one group syncs, the next one is collected, and many pending records
//! are written early. Usually nothing is being written when a sync can begin: then one operation
//! writes and syncs all pending records. The log's leader runs the operations that sync, one group
//! after the other, by stepping one state machine:
//! ```text
//!   begin ──▶ an operation and its group ──run──▶ end ──▶ begin again, or rest
//!         └─▶ none: rest until the leader is called, or until a wait for more waiters to join a group is over
//! ```
//! The log's writer thread does nothing else. A thread that would only wait leads its own group if
//! nobody else leads: the keeper, for records it needs durable, and a port's thread, for a lone
//! FLUSH while syncs are quick. Crash tests drive the same machine one step at a time.
//!
//! A batch that is only written is written by a port within one call, so no batch depends on a
//! thread that may not come back. The leader also starts the page cache's write-back of such
//! batches.

use std::io;
use std::ops::Range;
use std::time::Instant;

use walvisor_block::request_short_slices;
use zerocopy::little_endian::{U16, U32, U64};

use crate::format::{self, BatchHeader, Descriptor, DescriptorKind};
use crate::index::Location;
use crate::log::admission::Admission;
use crate::log::commit::Commit;
use crate::log::disk_state::DiskState;
use crate::log::pipeline::{Modification, Record};
use crate::log::ring::Room;
use crate::log::sharing::{SharingCounters, count_sync};
use crate::log::state::{Log, LogState, PENDING_LIMIT, PanicGuard};
use crate::log::tail::{BatchSize, PendingSummary};
use crate::log::waiters::{Mailbox, Waiter, deliver};
use crate::medium::file::{AppendResult, AppendStats, Chunk, Io, Segment, SyncScope, WriteBack};
use crate::mutant::{Mutant, described, planted};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{self, Arc, Event, MutexGuard};
use crate::{Buffer, Completion, Failure, SharedBuffer, StallCause};

/// Why a record was not appended.
pub(crate) enum AppendError {
    /// The port gets the request back and retries when it is woken.
    HeldBack(StallCause, Modification),
    Refused(StallCause),
}

/// One thread's side of group commit, with its mailbox.
pub(crate) struct Committer {
    pub log: Arc<Log>,
    pub mailbox: Arc<Mailbox>,
    buffers: GroupBuffers,
    leader: Leader,
    /// A record was appended, or a waiter added, since the port last looked at the log.
    unstarted: bool,
    /// The batches that a planted fault keeps.
    #[cfg(test)]
    kept: Vec<(Group, io::Result<AppendStats>)>,
}

impl Committer {
    /// A committer for a port with `clients` clients that may join a group. `sharing`: counts the
    /// syncs of its disk.
    pub(crate) fn new(
        log: Arc<Log>,
        clients: usize,
        sharing: Arc<SharingCounters>,
    ) -> io::Result<Self> {
        let mailbox = Mailbox::new(Event::new()?, sharing);
        Ok(Self::with(log, clients, mailbox))
    }

    /// The keeper's committer. What it waits for need not be in a replica.
    pub(crate) fn of_keeper(log: Arc<Log>) -> io::Result<Self> {
        let mut mailbox = Mailbox::new(Event::new()?, Arc::default());
        mailbox.local = true;
        Ok(Self::with(log, 0, mailbox))
    }

    fn with(log: Arc<Log>, clients: usize, mailbox: Mailbox) -> Self {
        let mailbox = Arc::new(mailbox);
        let mut state = log.lock();
        state.waiters.add_port(&mailbox, clients);
        drop(state);
        let leader = Leader::new(log.clone(), Some(mailbox.clone()));
        Self {
            log,
            leader,
            mailbox,
            buffers: GroupBuffers::default(),
            unstarted: false,
            #[cfg(test)]
            kept: Vec::new(),
        }
    }

    /// Gives a record its LSN, makes it visible to readers and queues it for the log. The next
    /// [`start`](Self::start) checks for a batch to write.
    ///
    /// # Errors
    /// If the log does not [admit](Log::admit) it.
    pub(crate) fn append(
        &mut self,
        disk: &Arc<DiskState>,
        change: Modification,
    ) -> Result<u64, AppendError> {
        self.unstarted = true;
        let log = &self.log;
        let mut state = log.lock();
        // Discards carry no payload, so a guest that only discards could grow the index for as long
        // as the log has room.
        if log.index_is_heavy() && !state.keeper.checkpoint {
            state.keeper.checkpoint = true;
            log.keeper_wanted.notify_one();
        }
        match log.admit(&mut state, disk, &change) {
            Admission::Go => {}
            Admission::Wait(cause) => {
                if cause == StallCause::Replica {
                    // Its acknowledgement wakes the ports.
                    log.tell_of_backlog(state);
                }
                return Err(AppendError::HeldBack(cause, change));
            }
            Admission::Fail(cause) => return Err(AppendError::Refused(cause)),
        }
        let bytes = change.pending_bytes();
        state.room.take(disk.id, bytes as u64);
        let place = match &change.payload {
            Some(payload) => Location::Memory {
                payload: payload.bytes.clone(),
                offset: 0,
            },
            None => Location::Zero {
                unmap: change.kind == DescriptorKind::Discard,
                lsn: state.pipeline.next_lsn(),
            },
        };
        let indexed = change.mark.is_none()
            && (change.kind != DescriptorKind::Discard || !planted(Mutant::IndexSkipsDiscard));
        let (sector, sectors) = (change.sector, u64::from(change.sectors));
        let lsn = state.pipeline.append(disk, change);
        // Under the log's lock, so that the index sees records in LSN order.
        if indexed {
            let active = &mut disk.index_mut().active;
            active.insert(sector, sectors, lsn, place);
        }
        disk.last_lsn.store(lsn, Ordering::Release);
        Ok(lsn)
    }

    /// Completes `token` once `lsn` is durable. `Ok(true)`: it is durable already, and no
    /// completion comes.
    pub(crate) fn wait_for(&mut self, lsn: u64, token: u64) -> Result<bool, Failure> {
        let mut state = self.log.lock();
        if self.log.poisoned.load(Ordering::Acquire) {
            return Err(Failure::Io);
        }
        // Under the lock, a group that ends now either covers this waiter or sees it.
        let covered = state.pipeline.durable() >= lsn;
        // Without group commit each FLUSH gets a sync of its own, even if an earlier FLUSH's sync
        // came after its writes.
        if covered && (self.log.most_served > 1 || state.ring.tail().is_none()) {
            if !state.awaits_replica() {
                return Ok(true);
            }
            drop(state);
            return Ok(self.wait_for_replica(lsn, token));
        }
        let waiter = self.waiter(&state, lsn, token)?;
        state.waiters.join(waiter);
        drop(state);
        self.unstarted = true;
        Ok(false)
    }

    /// Completes `token` once `lsn` is written. `Ok(true)`: it is written already, and no
    /// completion comes.
    pub(crate) fn wait_written(&mut self, lsn: u64, token: u64) -> Result<bool, Failure> {
        let log = &self.log;
        let covered = || {
            if log.poisoned.load(Ordering::Acquire) {
                Err(Failure::Io)
            } else {
                Ok(log.written.load(Ordering::Acquire) >= lsn)
            }
        };
        if covered()? || planted(Mutant::AnsweredUnwritten) {
            return Ok(true);
        }
        let mut state = log.lock();
        // Again under the lock: a batch that ends now either covers this waiter or sees it.
        if covered()? {
            return Ok(true);
        }
        let waiter = self.waiter(&state, lsn, token)?;
        state.waiters.join_written(waiter);
        drop(state);
        self.unstarted = true;
        Ok(false)
    }

    /// A waiter for `lsn`.
    ///
    /// # Errors
    /// If the record has no room, and none can be made.
    fn waiter(&self, state: &LogState, lsn: u64, token: u64) -> Result<Waiter, Failure> {
        if lsn > state.pipeline.batched() && state.is_stuck() {
            return Err(Failure::Io);
        }
        Ok(Waiter {
            lsn,
            token,
            mailbox: self.mailbox.clone(),
        })
    }

    /// Completes `token` once the replica has `lsn`, which is durable here. `true`: it has it
    /// already, and no completion comes.
    fn wait_for_replica(&self, lsn: u64, token: u64) -> bool {
        let mut waiters = vec![Waiter {
            lsn,
            token,
            mailbox: self.mailbox.clone(),
        }];
        self.log.hold_for_replica(&mut waiters, 1);
        !waiters.is_empty()
    }

    /// Writes the batches that need no sync, and calls the leader if it is wanted. `alone`: the
    /// thread has nothing to do until a request of this port ends, so it leads a lone, quick group
    /// itself. Returns whether it did.
    pub(crate) fn start(&mut self, alone: bool) -> bool {
        self.unstarted && self.process_log(alone, false)
    }

    /// Writes the batches that need no sync, and calls the leader for the others. Every batch it
    /// takes has ended when this returns. `polls`: the caller takes the port's completions next.
    fn process_log(&mut self, alone: bool, polls: bool) -> bool {
        self.unstarted = false;
        // If this thread panics, a batch that it took would never end.
        let log = self.log.clone();
        let _failing = PanicGuard::new(&log);
        loop {
            let mut state = log.lock();
            let batch = log.write_behind(&mut state, &mut self.buffers);
            state.check(&log);
            if let Some((io, batch)) = batch {
                drop(state);
                let ran = log.appender.append(io);
                self.buffers.chunks = ran.list;
                #[cfg(test)]
                if planted(Mutant::BatchKept) && !polls {
                    self.kept.push((batch, ran.result));
                    continue;
                }
                let own = Some(&self.mailbox).filter(|_| polls);
                log.end_group(batch, ran.result, own, &mut self.buffers, |state| {
                    state.check(&log);
                });
                continue;
            }
            let stuck = state.take_stuck();
            let called = !state.led && log.wants_leader(&state);
            let mut led = false;
            if called && alone && log.is_lone(&state, &self.mailbox) {
                let next = self.leader.begin_locked(state);
                led = self.leader.run(next);
            } else {
                drop(state);
                if called {
                    log.call_leader();
                }
            }
            log.refuse_waiters(stuck);
            return led;
        }
    }

    /// Clears the port's signal. Call it before looking for completions, so that no later signal is
    /// missed.
    pub(crate) fn clear(&self) {
        self.mailbox.event.clear();
    }

    /// Looks at the log if there may be something to do, and appends completions to `done`.
    pub(crate) fn poll(&mut self, done: &mut Vec<Completion>) {
        #[cfg(test)]
        self.end_kept();
        self.unstarted |= self.mailbox.called.swap(false, Ordering::Acquire);
        if self.unstarted {
            self.process_log(false, true);
        }
        done.append(&mut self.mailbox.completions.lock().expect("mailbox lock"));
    }

    /// Ends the batches that a planted fault has kept.
    #[cfg(test)]
    fn end_kept(&mut self) {
        for (batch, result) in std::mem::take(&mut self.kept) {
            let own = Some(&self.mailbox);
            self.log
                .end_group(batch, result, own, &mut self.buffers, |_| ());
            self.unstarted = true;
        }
    }

    /// Sleeps until there may be something to do.
    pub(crate) fn sleep(&self) {
        self.mailbox.event.sleep_until(None);
    }

    /// Blocks until everything up to `lsn` is durable. The keeper, its only caller, has nothing
    /// else to do, so it leads the group itself if nobody leads.
    pub(crate) fn flush(&mut self, lsn: u64, leader: &mut Leader) -> Result<(), Failure> {
        if self.wait_for(lsn, 0)? {
            return Ok(());
        }
        let mut done = Vec::new();
        loop {
            let led = leader.lead_one();
            self.clear();
            self.poll(&mut done);
            if !done.is_empty() {
                return done.swap_remove(0).result.map(drop);
            }
            if !led {
                self.sleep();
            }
        }
    }
}

impl Drop for Committer {
    fn drop(&mut self) {
        #[cfg(test)]
        self.end_kept();
        let mut state = self.log.lock();
        state.waiters.remove_port(&self.mailbox);
        if let Some(replica) = &mut state.replica {
            replica.remove_port(&self.mailbox);
        }
        drop(state);
        // A group that was waiting for more waiters may be complete without this port.
        self.log.call_leader();
    }
}

/// What a thread needs to lead.
pub(crate) struct Leader {
    log: Arc<Log>,
    buffers: GroupBuffers,
    /// Whether this thread is leading.
    leading: bool,
    /// When the commit delay ends, if one was running when this leader last looked.
    deadline: Option<Instant>,
    /// The leading thread's mailbox, if it has one. The thread checks it next anyway, so it is not
    /// woken.
    own: Option<Arc<Mailbox>>,
}

impl Leader {
    pub(crate) fn new(log: Arc<Log>, own: Option<Arc<Mailbox>>) -> Self {
        Self {
            log,
            buffers: GroupBuffers::default(),
            leading: false,
            deadline: None,
            own,
        }
    }

    /// Takes the lead, if no other thread has it and there is something to do: the operation to
    /// carry out, then to be [`end`](Self::end)ed with its group.
    pub(crate) fn begin(&mut self) -> Option<(Io, Group)> {
        let log = self.log.clone();
        self.begin_locked(log.lock())
    }

    /// As [`begin`](Self::begin), for a caller that has the log's lock.
    pub(crate) fn begin_locked(
        &mut self,
        mut state: MutexGuard<'_, LogState>,
    ) -> Option<(Io, Group)> {
        if state.led && !self.leading {
            return None;
        }
        let next = self.log.next_operation(&mut state, &mut self.buffers);
        state.check(&self.log);
        self.leading = next.is_some();
        state.led = self.leading;
        self.deadline = state.commit_delay.deadline();
        if next.is_none() {
            let stuck = state.take_stuck();
            drop(state);
            self.log.refuse_waiters(stuck);
        }
        next
    }

    /// When the commit delay ends, if one was running when this leader last looked. The writer
    /// calls [`end_delay`](Self::end_delay) then.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// Ends the operation that [`begin`](Self::begin) returned. `goes_on`: the caller will call
    /// `begin` next, so if there may be more to do it keeps the lead and gets `true`. Without
    /// `goes_on`, the writer thread is called for that.
    pub(crate) fn end(&mut self, group: Group, ran: AppendResult, goes_on: bool) -> bool {
        self.buffers.chunks = ran.list;
        let (log, deadline) = (&self.log, &mut self.deadline);
        let wanted = log.end_group(
            group,
            ran.result,
            self.own.as_ref(),
            &mut self.buffers,
            |state| {
                let wanted = log.wants_leader(state);
                state.led = wanted && goes_on;
                *deadline = state.commit_delay.deadline();
                state.check(log);
                wanted
            },
        );
        self.leading = wanted && goes_on;
        if wanted && !goes_on && !planted(Mutant::LeaderLeavesSilently) {
            log.call_leader();
        }
        self.leading
    }

    /// The commit delay has run out.
    pub(crate) fn end_delay(&mut self) {
        self.deadline = None;
        self.log.lock().commit_delay.expire();
    }

    /// Leads one group in the calling thread, if there is no other leader and a group can start;
    /// returns whether it did.
    pub(crate) fn lead_one(&mut self) -> bool {
        let next = self.begin();
        self.run(next)
    }

    /// Carries out a step in the calling thread, if it is an operation.
    pub(crate) fn run(&mut self, next: Option<(Io, Group)>) -> bool {
        let Some((io, group)) = next else {
            return false;
        };
        let ran = self.log.appender.append(io);
        self.end(group, ran, false);
        true
    }
}

/// A log's running writer thread. Dropping it waits until the thread has finished the operation at
/// hand.
pub(crate) struct Writer {
    log: Arc<Log>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    /// Starts the writer of a log that has none.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub(crate) fn start(log: &Arc<Log>) -> io::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (stopping, leading) = (stop.clone(), log.clone());
        let thread = thread::Builder::new()
            .name("log-writer".into())
            .spawn(move || {
                let _failing = PanicGuard::new(&leading);
                request_short_slices();
                run_writer(&leading, &stopping);
            })?;
        Ok(Self {
            log: log.clone(),
            stop,
            thread: Some(thread),
        })
    }
}

/// The writer's loop.
fn run_writer(log: &Arc<Log>, stopping: &AtomicBool) {
    let mut leader = Leader::new(log.clone(), None);
    loop {
        // Cleared before the leader looks, so that no later call is missed.
        log.leader_called.clear();
        while let Some((io, group)) = leader.begin() {
            if !leader.end(group, log.appender.append(io), true) {
                break;
            }
        }
        if stopping.load(Ordering::Acquire) {
            return;
        }
        log.leader_called.sleep_until(leader.deadline());
        if leader
            .deadline()
            .is_some_and(|deadline| deadline <= sync::now())
        {
            leader.end_delay();
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.log.call_leader();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has been printed, and has failed the log.
            let _ = thread.join();
        }
    }
}

/// With this many bytes of payload pending, records are written even though no waiter needs them
/// yet.
const WRITE_BEHIND: usize = 1 << 20;
/// Write-back of a segment starts each time this many of its bytes are in the page cache.
const WRITE_BACK: u64 = 1 << 20;
/// Most batches being written at a time.
const MOST_WRITING: usize = 4;
/// Most segments written and not synced.
const MOST_UNSYNCED: usize = 8;

/// A batch being written, a sync, or both in one operation. Neither: a segment's summary is being
/// written, or write-back is being started.
pub(crate) struct Group {
    batch: Option<GroupBatch>,
    sync: Option<GroupSync>,
}

/// The emptied lists of earlier groups, so that a leading thread does not allocate new ones for
/// each group.
#[derive(Default)]
pub(crate) struct GroupBuffers {
    records: Vec<Vec<Record>>,
    /// For the next batch; see [`AppendResult::list`](crate::medium::file::AppendResult::list).
    pub(crate) chunks: Vec<Chunk>,
    served: Vec<Waiter>,
}

struct GroupBatch {
    records: Vec<Record>,
    segment: Arc<Segment>,
    /// Byte offsets of the batch and of its first payload in the segment.
    at: u64,
    payload_at: u64,
    bytes: u64,
}

struct GroupSync {
    /// Number of device syncs.
    count: u32,
    began: Instant,
}

impl GroupSync {
    fn new(scope: &SyncScope) -> Self {
        Self {
            count: scope.count(),
            began: sync::now(),
        }
    }
}

impl Log {
    /// The next operation of the log's leader, if there is one now.
    pub(crate) fn next_operation(
        &self,
        state: &mut LogState,
        buffers: &mut GroupBuffers,
    ) -> Option<(Io, Group)> {
        if self.poisoned.load(Ordering::Acquire) {
            return None;
        }
        if state.waiters.lsns().len() > 0
            && self.try_start_group(state)
            && let Some(group) = self.serve(state, buffers)
        {
            return Some(group);
        }
        if state.pipeline.unsynced() >= MOST_UNSYNCED {
            return Some(self.build_sync(state));
        }
        let batch = if self.leader_must_write(state) {
            self.build_batch(state, buffers, false)
        } else {
            None
        };
        let write_back = || {
            let step = state.pipeline.take_write_back()?;
            let (batch, sync) = (None, None);
            Some((Io::WriteBack(step), Group { batch, sync }))
        };
        batch
            .or_else(write_back)
            .or_else(|| self.write_summary(state, buffers))
    }

    /// The next write without a sync for a port, while the leader may be busy with a sync: a batch,
    /// or a segment's summary; `None` if there is none.
    pub(crate) fn write_behind(
        &self,
        state: &mut LogState,
        buffers: &mut GroupBuffers,
    ) -> Option<(Io, Group)> {
        if self.poisoned.load(Ordering::Acquire) || self.leader_alone {
            return None;
        }
        let batch = if self.must_write_early(state) {
            self.build_batch(state, buffers, false)
        } else {
            None
        };
        batch.or_else(|| self.write_summary(state, buffers))
    }

    /// Writes the next segment summary. Nothing waits for it and nothing syncs it: without it,
    /// opening the log is only slower.
    fn write_summary(
        &self,
        state: &mut LogState,
        buffers: &mut GroupBuffers,
    ) -> Option<(Io, Group)> {
        let PendingSummary {
            segment,
            offset,
            summary,
        } = state.ring.take_pending_summary()?;
        let mut chunks = std::mem::take(&mut buffers.chunks);
        chunks.push(chunk(summary));
        let io = Io::Append {
            segment,
            offset,
            chunks,
            payloads: 0..0,
            sync: self.unsynced_scope(),
        };
        let (batch, sync) = (None, None);
        Some((io, Group { batch, sync }))
    }

    /// Whether pending records should be written before anyone needs a sync: there are many bytes
    /// of them, or a waiter waits for `written`.
    fn must_write_early(&self, state: &LogState) -> bool {
        let much = WRITE_BEHIND.min(self.segment_size as usize / 8);
        state.pipeline.queued_bytes() >= much || self.is_awaited(state)
    }

    /// Whether a waiter needs pending records written, and no running batch would start the next
    /// one when it ends.
    ///
    /// Records collect while a batch is being written, because fewer, larger batches cost less. But
    /// clients that flush wait for each of their few writes, so then a second batch may begin.
    pub(crate) fn is_awaited(&self, state: &LogState) -> bool {
        let (waiters, pipeline) = (&state.waiters, &state.pipeline);
        let most = if waiters.lsns().len() > 0 { 2 } else { 1 };
        waiters.newest_written() > pipeline.batched() && pipeline.writes_alone() < most
    }

    /// Whether there is work for the leader that it may not have seen.
    pub(crate) fn wants_leader(&self, state: &LogState) -> bool {
        let (waiting, complete) = (state.waiters.lsns().len(), state.waiters.is_complete());
        let served = waiting > 0
            && (self.is_urgent(state) || !state.commit_delay.must_wait(waiting, complete));
        served
            || state.pipeline.unsynced() >= MOST_UNSYNCED
            || state.ring.has_pending_summary()
            || state.pipeline.has_write_back()
            || self.leader_must_write(state)
    }

    /// Whether pending records should be written without a sync and possibly no port will: a port
    /// that began to wait while the leader wrote a batch, or whose batch had to wait for
    /// write-back, does not look again.
    fn leader_must_write(&self, state: &LogState) -> bool {
        let left = self.is_awaited(state) && !planted(Mutant::WrittenForgotten);
        let left = left || self.leader_alone || state.pipeline.is_released();
        left && self.must_write_early(state)
    }

    /// How to write a batch that needs no sync yet: past the page cache if the leader writes every
    /// batch, because it then has the medium to itself.
    fn unsynced_scope(&self) -> SyncScope {
        if self.leader_alone {
            SyncScope::None
        } else {
            SyncScope::Later
        }
    }

    /// Whether the only waiter is one of `port`'s, and its group would start at once and end soon.
    pub(crate) fn is_lone(&self, state: &LogState, port: &Arc<Mailbox>) -> bool {
        state.waiters.is_only(port)
            && state.pipeline.writing() == 0
            && !self.is_urgent(state)
            && state.commit_delay.is_quick()
    }

    /// Whether a group starts without a commit delay: group commit is off, a checkpoint is waiting
    /// for it, or there is no room for more records.
    fn is_urgent(&self, state: &LogState) -> bool {
        self.most_served == 1 || state.keeper.draining.is_some() || state.ring.is_starved()
    }

    /// Whether a group starts now for the present waiters.
    fn try_start_group(&self, state: &mut LogState) -> bool {
        if self.is_urgent(state) {
            state.commit_delay.interrupt();
            return true;
        }
        let (waiting, complete) = (state.waiters.lsns().len(), state.waiters.is_complete());
        state.commit_delay.try_start(waiting, complete)
    }

    /// The next operation towards a sync for the waiters. `None` if the leader has none: a port is
    /// writing their records, or the records have no room.
    fn serve(&self, state: &mut LogState, buffers: &mut GroupBuffers) -> Option<(Io, Group)> {
        let (batched, written) = (state.pipeline.batched(), state.pipeline.written());
        if state.pipeline.writing() == 0 {
            if batched == state.pipeline.appended() {
                return Some(self.build_sync(state));
            }
            if let Some(group) = self.build_batch(state, buffers, true) {
                return Some(group);
            }
        }
        // A batch is being written, or has no room. Waiters whose records are written already get
        // their sync.
        let (mut ready, mut wanted) = (false, false);
        self.next_served(state).for_each(|lsn| {
            ready |= lsn <= written;
            wanted |= lsn > batched;
        });
        if ready {
            Some(self.build_sync(state))
        } else if wanted {
            self.build_batch(state, buffers, false)
        } else {
            None
        }
    }

    /// How many pending records make the next batch, and the bytes of its header, without padding,
    /// and of its padded payloads.
    fn measure_batch(&self, state: &LogState) -> (usize, usize, usize) {
        let (mut count, mut checksums, mut payload) = (0, 0, 0);
        // A batch takes everything that may be pending, so that one sync serves all waiters; less
        // if segments are small, more for one long record.
        let quarter = self.segment_size as usize / 4;
        // Records that a checkpoint waits for are written in one batch, so that they fit the ring's
        // last segment: up to half a segment may be pending, plus one request of at most a quarter,
        // and the last quarter has room for the headers.
        let draining = state.is_draining();
        let most = PENDING_LIMIT.min(if draining { 3 * quarter } else { quarter });
        // Without group commit, a batch takes only the records that the first waiter needs.
        let last = match state.waiters.lsns().next() {
            Some(first) if self.most_served == 1 && !draining => first,
            _ => u64::MAX,
        };
        let records = state.pipeline.pending();
        let records = records.take_while(|record| record.lsn <= last);
        for record in records.take(format::MAX_DESCRIPTORS) {
            let more = payload + record.change.payload_len();
            if count > 0 && more > most {
                break;
            }
            payload = more;
            checksums += record.change.checksums().len();
            count += 1;
        }
        (
            count,
            format::header_len(count, checksums),
            payload.next_multiple_of(format::BLOCK),
        )
    }

    /// Whether the next batch finds room, if need be in a segment that can still be made.
    pub(crate) fn finds_room(&self, state: &LogState) -> bool {
        let (_, header, payload_len) = self.measure_batch(state);
        let whole = (header.next_multiple_of(format::BLOCK) + payload_len) as u64;
        let batch = BatchSize { header, whole };
        state.ring.has_room(batch, state.is_draining())
    }

    /// Makes sure that the tail has room for a batch, if necessary by moving on to a free segment.
    /// Returns whether it has.
    fn make_room(&self, state: &mut LogState, batch: BatchSize) -> bool {
        let (draining, starved) = (state.is_draining(), state.ring.is_starved());
        let found = match state.ring.make_room(batch, draining) {
            Room::Tail => return true,
            Room::Later => return false,
            Room::Next(segment) => {
                let (salt, batched) = (self.medium.salt(), state.pipeline.batched());
                state.ring.begin_tail(segment, self.uuid, salt, batched);
                // The keeper prepares the next segment, and checkpoints before any write has to
                // wait.
                state.keeper.checkpoint |= state.needs_room();
                true
            }
            Room::None { left, reserved } => {
                // Without a segment left even for the keeper, it can't free any.
                state.keeper.failed |= draining && left == 0;
                state.keeper.checkpoint |= reserved;
                if state.is_stuck() && !starved {
                    // Woken ports try their held-back writes again; these fail now.
                    state.waiters.ports().iter().for_each(|port| port.wake());
                }
                false
            }
        };
        self.keeper_wanted.notify_one();
        found
    }

    /// Makes a batch of pending records. `synced`: the same operation also syncs it if a waiter
    /// needs one of its records; only while no other batch is being written. `None` if nothing is
    /// pending, too many batches are being written, or there is no room.
    fn build_batch(
        &self,
        state: &mut LogState,
        buffers: &mut GroupBuffers,
        synced: bool,
    ) -> Option<(Io, Group)> {
        let (count, header, payload_len) = self.measure_batch(state);
        let header_len = header.next_multiple_of(format::BLOCK);
        let whole = (header_len + payload_len) as u64;
        if count == 0
            || state.pipeline.writing() >= MOST_WRITING
            || !(synced || state.pipeline.admit_unsynced(state.room.is_shared()))
            || !self.make_room(state, BatchSize { header, whole })
        {
            return None;
        }
        let last = state.pipeline.pending().nth(count - 1);
        let last_lsn = last.expect("these are pending").lsn;
        let synced = synced && self.next_served(state).any(|lsn| lsn <= last_lsn);
        let unix_us = state.next_timestamp();
        let (pipeline, ring) = (&mut state.pipeline, &mut state.ring);
        let tail = ring.tail().expect("make_room gave one");
        let (segment, offset) = (tail.segment.clone(), tail.offset);
        let cid = pipeline.next_cid();
        let mut records = buffers.records.pop().unwrap_or_default();
        pipeline.begin_batch(count, &segment, synced, &mut records);
        let described = described(&records);
        let checksums = || {
            described
                .iter()
                .flat_map(|record| record.change.checksums())
        };
        let header = BatchHeader {
            magic: format::BATCH_MAGIC,
            version: U32::new(format::VERSION),
            crc: U32::new(0),
            log: self.uuid,
            sequence: U64::new(tail.sequence),
            salt: U64::new(tail.salt),
            cid: U64::new(cid),
            first_lsn: U64::new(records[0].lsn),
            durable_lsn: U64::new(pipeline.durable()),
            unix_us: U64::new(unix_us),
            previous_crc: U32::new(tail.previous_crc),
            descriptor_count: U16::new(described.len() as u16),
            checksum_count: U16::new(checksums().count() as u16),
            payload_bytes: U64::new(payload_bytes(described)),
        };
        let descriptors = described.iter().map(|record| Descriptor {
            disk_id: U32::new(record.disk_id()),
            kind: U32::new(record.change.kind as u32),
            sector: U64::new(record.change.sector),
            sectors: U32::new(record.change.sectors),
        });
        let mut head = Buffer::zeroed(header_len);
        let crc = header.encode(descriptors, checksums().copied(), &mut head);
        let head = head.share();
        let encoded = format::header_len(described.len(), checksums().count());
        let mut chunks = std::mem::take(&mut buffers.chunks);
        chunks.reserve(count + 3);
        chunks.extend(tail.header.clone().map(chunk));
        chunks.push(chunk(head.clone()));
        let heads = chunks.len();
        let payload_at = offset + chunks.iter().map(|chunk| chunk.len as u64).sum::<u64>();
        let payloads = records.iter().filter_map(|r| r.change.payload.as_ref());
        chunks.extend(payloads.map(|payload| chunk(payload.bytes.clone())));
        let payloads = heads..chunks.len();
        segment.note(|table| {
            let mut at = payload_at;
            for Record { change, .. } in &records {
                table.add(at, change.payload_len() as u64, change.checksums());
                at += change.payload_len() as u64;
            }
        });
        let padding = payload_len - payload_bytes(&records) as usize;
        if padding > 0 {
            chunks.push(chunk(Buffer::zeroed(padding).share()));
        }
        let bytes = payload_at - offset + payload_len as u64;
        assert!(
            [offset, payload_at, bytes]
                .iter()
                .all(|at| at.is_multiple_of(format::BLOCK as u64)),
            "a batch, its payload and its end are on blocks"
        );
        assert!(
            offset + bytes <= self.segment_size,
            "a batch fits its segment"
        );
        debug_assert_eq!(head.len(), header_len, "the header has its measured length");
        let last = Commit {
            lsn: last_lsn,
            cid,
            unix_us,
        };
        ring.extend_tail(bytes, (&head[..encoded], crc), last);
        if let Some(replica) = &mut state.replica {
            replica.note_batch(last_lsn, ring.end());
        }
        for record in &records {
            if let Some(marked) = &record.change.mark {
                // Nothing else writes it.
                let _ = marked.set(Commit {
                    lsn: record.lsn,
                    ..last
                });
            }
        }
        if state.horizon.cid == 0 {
            // The oldest record that the log has.
            let lsn = state.horizon.lsn;
            state.horizon = Commit { lsn, ..last };
        }
        let scope = if synced {
            pipeline.sync_batch()
        } else {
            self.unsynced_scope()
        };
        let group = Group {
            batch: Some(GroupBatch {
                records,
                segment: segment.clone(),
                at: offset,
                payload_at,
                bytes,
            }),
            sync: synced.then(|| GroupSync::new(&scope)),
        };
        let io = Io::Append {
            segment,
            offset,
            chunks,
            payloads,
            sync: scope,
        };
        Some((io, group))
    }

    /// A group for records that are already written and only need a sync.
    fn build_sync(&self, state: &mut LogState) -> (Io, Group) {
        let mut segments = state.pipeline.sync_written();
        // A waiter needs more than is durable, so some segment is written and not synced. Only
        // without group commit may it be synced already.
        if segments.is_empty() {
            let tail = state.ring.tail().expect("something was written");
            segments.push(tail.segment.clone());
        }
        let segment = segments[0].clone();
        let scope = SyncScope::Segments(segments);
        let group = Group {
            batch: None,
            sync: Some(GroupSync::new(&scope)),
        };
        let io = Io::Append {
            segment,
            offset: 0,
            chunks: Vec::new(),
            payloads: 0..0,
            sync: scope,
        };
        (io, group)
    }

    /// The LSNs of the waiters that one group may serve.
    fn next_served<'a>(&self, state: &'a LogState) -> impl Iterator<Item = u64> + use<'a> {
        state.waiters.lsns().take(self.most_served)
    }

    /// Ends a group: publishes the watermarks and completes the waiters it served. `own`: the
    /// caller's mailbox, if it checks it next and need not be woken. `then` is called with the lock
    /// held.
    pub(crate) fn end_group<T>(
        &self,
        group: Group,
        result: std::io::Result<AppendStats>,
        own: Option<&Arc<Mailbox>>,
        buffers: &mut GroupBuffers,
        then: impl FnOnce(&mut LogState) -> T,
    ) -> T {
        let _failing = PanicGuard::new(self);
        let AppendStats { writes, cached } = match result {
            Ok(written) => written,
            Err(error) => {
                self.poison(&error);
                return then(&mut self.lock());
            }
        };
        if let Some(batch) = &group.batch {
            let mut at = batch.payload_at;
            for Record { disk, lsn, change } in &batch.records {
                if change.payload.is_some() {
                    if change.mark.is_some() {
                        at += change.payload_len() as u64;
                        continue;
                    }
                    let (sector, sectors) = (change.sector, u64::from(change.sectors));
                    let mut index = disk.index_mut();
                    index.relocate(sector, sectors, *lsn, &batch.segment, at);
                    at += change.payload_len() as u64;
                }
            }
            self.counters.writes.fetch_add(writes, Ordering::Relaxed);
            self.counters
                .log_bytes
                .fetch_add(batch.bytes, Ordering::Relaxed);
        }
        let mut state = self.lock();
        if self.poisoned.load(Ordering::Acquire) {
            // Another group has failed in the meantime: every waiter has its error, and nothing
            // becomes durable.
            return then(&mut state);
        }
        let LogState {
            pipeline,
            waiters,
            commit_delay,
            ..
        } = &mut *state;
        if let Some(batch) = &group.batch {
            let last = batch.records.last().expect("a batch has records");
            pipeline.end_batch(last.lsn);
            self.written.store(pipeline.written(), Ordering::Release);
            let (segment, written) = (batch.segment.clone(), batch.at..batch.at + batch.bytes);
            let step = WRITE_BACK.min(self.segment_size / 8);
            if cached && let Some(range) = written_back(written, step) {
                pipeline.add_write_back(WriteBack { segment, range });
            }
        }
        let mut synced = (0, 0);
        if let Some(sync) = &group.sync {
            pipeline.end_sync();
            let syncs = &self.counters.syncs;
            syncs.fetch_add(u64::from(sync.count), Ordering::Relaxed);
            let number = self.counters.groups.fetch_add(1, Ordering::Relaxed) + 1;
            debug_assert!(buffers.served.is_empty(), "the waiters of one group");
            let served = waiters.serve(pipeline.durable(), self.most_served, &mut buffers.served);
            if served > 0 {
                self.counters.count_group(served);
            }
            synced = (served, number);
            commit_delay.record_group(sync::now() - sync.began, served, waiters.lsns().len());
        }
        waiters.serve_written(pipeline.written(), &mut buffers.served);
        let held_back = self.held_back.swap(false, Ordering::Relaxed);
        let replicated = state.awaits_replica();
        let then = then(&mut state);
        drop(state);
        // Before any client learns that its request has ended: it may then close its disk, which
        // the records hold.
        if let Some(GroupBatch { mut records, .. }) = group.batch {
            records.clear();
            buffers.records.push(records);
        }
        let (served, number) = synced;
        count_sync(&buffers.served[..served], number);
        if replicated {
            self.hold_for_replica(&mut buffers.served, served);
        }
        deliver(buffers.served.drain(..), Ok(()), own);
        if held_back {
            self.wake_ports();
        }
        then
    }
}

/// What to write back once these bytes of a segment are in the page cache: the step that they
/// complete, and the step before it, where parallel writes may have left something. `None` if they
/// complete no step.
fn written_back(written: Range<u64>, step: u64) -> Option<Range<u64>> {
    let (begin, end) = (written.start / step, written.end / step);
    (begin < end).then(|| begin.saturating_sub(1) * step..end * step)
}

/// Bytes of the payloads of these records.
fn payload_bytes(records: &[Record]) -> u64 {
    let payloads = records.iter().map(|record| record.change.payload_len());
    payloads.sum::<usize>() as u64
}

fn chunk(buffer: SharedBuffer) -> Chunk {
    let len = buffer.len();
    Chunk { buffer, len }
}

#[cfg(test)]
mod tests;
