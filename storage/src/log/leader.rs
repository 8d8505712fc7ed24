//! The leader, which makes the log durable: one thread at a time, which steps one state machine.
//!
//! ```text
//!   begin ──▶ an operation and its group ──run──▶ end ──▶ begin again, or rest
//!         └─▶ none: rest until the leader is called, or until a wait for more waiters to join a group is over
//! ```
//! The log's writer thread does nothing else. A thread that would otherwise only wait leads its group itself if there
//! is no other leader: the keeper for the records that it needs durable, and a port's thread for a lone FLUSH while
//! syncs are quick. Crash tests drive the same machine one step at a time.

use std::io;
use std::time::Instant;

use walvisor_block::short_slice;

use crate::log::group::{Group, Spare};
use crate::log::state::{FailOnPanic, Log, State};
use crate::log::waiters::Mailbox;
use crate::medium::engine::{Appended, Io};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{self, Arc, MutexGuard};

/// A thread's means to lead: the writer's or the keeper's.
pub(crate) struct Leader {
    log: Arc<Log>,
    spare: Spare,
    /// Whether this thread leads now.
    leads: bool,
    /// The end of the wait for more waiters to join a group, if one was under way at this leader's last look.
    until: Option<Instant>,
    /// The mailbox of the leading thread, if it has one: the thread looks into it next, so it is not woken.
    own: Option<Arc<Mailbox>>,
}

impl Leader {
    pub(crate) fn new(log: Arc<Log>, own: Option<Arc<Mailbox>>) -> Self {
        Self {
            log,
            spare: Spare::default(),
            leads: false,
            until: None,
            own,
        }
    }

    /// Takes the lead, if no other thread has it and there is something to do: the operation to carry out, then to be
    /// [`end`](Self::end)ed with its group.
    pub(crate) fn begin(&mut self) -> Option<(Io, Group)> {
        let log = self.log.clone();
        self.begin_locked(log.lock())
    }

    /// As [`begin`](Self::begin), for a caller that has the log's lock.
    pub(crate) fn begin_locked(&mut self, mut state: MutexGuard<'_, State>) -> Option<(Io, Group)> {
        if state.led && !self.leads {
            return None;
        }
        let next = self.log.lead(&mut state, &mut self.spare);
        state.check(&self.log);
        self.leads = next.is_some();
        state.led = self.leads;
        self.until = state.gather.until();
        if next.is_none() {
            let stuck = state.take_stuck();
            drop(state);
            self.log.refuse_waiters(stuck);
        }
        next
    }

    /// The end of the wait for more waiters to join a group, if one was under way at this leader's last look. The
    /// writer calls [`over`](Self::over) then.
    pub(crate) fn until(&self) -> Option<Instant> {
        self.until
    }

    /// Ends the operation that [`begin`](Self::begin) returned. `goes_on`: the caller calls `begin` next; if there
    /// may be more to do, it keeps the lead and gets `true`. Without `goes_on` the writer thread is called for that.
    pub(crate) fn end(&mut self, group: Group, ran: Appended, goes_on: bool) -> bool {
        self.spare.chunks = ran.list;
        let (log, until) = (&self.log, &mut self.until);
        let wanted = log.end_group(
            group,
            ran.result,
            self.own.as_ref(),
            &mut self.spare,
            |state| {
                let wanted = log.wants_leader(state);
                state.led = wanted && goes_on;
                *until = state.gather.until();
                state.check(log);
                wanted
            },
        );
        self.leads = wanted && goes_on;
        if wanted && !goes_on {
            log.call_leader();
        }
        self.leads
    }

    /// Notes that the time for more waiters to join a group has passed.
    pub(crate) fn over(&mut self) {
        self.until = None;
        self.log.lock().gather.over();
    }

    /// Leads one group in the calling thread, if there is no other leader and a group can start; returns whether it
    /// did.
    pub(crate) fn lead_one(&mut self) -> bool {
        let next = self.begin();
        self.run(next)
    }

    /// Carries out a step in the calling thread, if it is an operation.
    pub(crate) fn run(&mut self, next: Option<(Io, Group)>) -> bool {
        let Some((io, group)) = next else {
            return false;
        };
        let ran = self.log.medium.append(io);
        self.end(group, ran, false);
        true
    }
}

/// The running writer thread of a log. Dropping it lets the thread finish its work at hand, and waits for its end.
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
                let _failing = FailOnPanic::new(&leading);
                short_slice();
                lead(&leading, &stopping);
            })?;
        Ok(Self {
            log: log.clone(),
            stop,
            thread: Some(thread),
        })
    }
}

/// The writer's loop.
fn lead(log: &Arc<Log>, stopping: &AtomicBool) {
    let mut leader = Leader::new(log.clone(), None);
    loop {
        // The call is cleared before the leader looks, so that its next look serves every call from here on.
        log.leader_called.clear();
        while let Some((io, group)) = leader.begin() {
            if !leader.end(group, log.medium.append(io), true) {
                break;
            }
        }
        if stopping.load(Ordering::Acquire) {
            return;
        }
        log.leader_called.sleep_until(leader.until());
        if leader.until().is_some_and(|until| until <= sync::now()) {
            leader.over();
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
