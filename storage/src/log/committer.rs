//! A thread's part in group commit: appending records, waiting for an LSN, writing batches, and
//! leading.
//!
//! The leader makes the log durable. One thread leads at a time, by stepping one state machine.
//! ```text
//!   begin ──▶ an operation and its group ──run──▶ end ──▶ begin again, or rest
//!         └─▶ none: rest until the leader is called, or until a wait for more waiters to join a group is over
//! ```
//! The log's writer thread does nothing else. A thread that would only wait leads its own group if
//! nobody else leads: the keeper, for records it needs durable, and a port's thread, for a lone
//! FLUSH while syncs are quick. Crash tests drive the same machine one step at a time.

use std::io;
use std::time::Instant;

use walvisor_block::request_short_slices;

use crate::format::DescriptorKind;
use crate::index::Location;
use crate::log::admission::Admission;
use crate::log::disk_state::DiskState;
use crate::log::group::{Group, GroupBuffers};
use crate::log::pipeline::Modification;
use crate::log::sharing::SharingCounters;
use crate::log::state::{Log, LogState, PanicGuard};
use crate::log::waiters::{Mailbox, Waiter};
#[cfg(test)]
use crate::medium::file::AppendStats;
use crate::medium::file::{AppendResult, Io};
use crate::mutant::{Mutant, planted};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{self, Arc, Event, MutexGuard};
use crate::{Completion, Failure, StallCause};

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
        if lsn > state.pipeline.batched() && state.is_stuck() {
            return Err(Failure::Io);
        }
        state.waiters.join(Waiter {
            lsn,
            token,
            mailbox: self.mailbox.clone(),
        });
        drop(state);
        self.unstarted = true;
        Ok(false)
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

impl Committer {
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
        if lsn > state.pipeline.batched() && state.is_stuck() {
            return Err(Failure::Io);
        }
        state.waiters.join_written(Waiter {
            lsn,
            token,
            mailbox: self.mailbox.clone(),
        });
        drop(state);
        self.unstarted = true;
        Ok(false)
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

#[cfg(test)]
mod tests;
