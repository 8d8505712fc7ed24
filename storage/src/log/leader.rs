//! The leader, which makes the log durable: one thread at a time, which steps one state machine.
//!
//! ```text
//!   begin ──▶ Next::Run: an operation and its group ──run──▶ end ──▶ begin again, or rest
//!         ├─▶ Next::Wait: more may join the group; nothing is under way
//!         └─▶ Next::Rest: until the leader is called
//! ```
//! The log's writer thread does nothing else. A thread that would otherwise only wait leads its group itself if there
//! is no other leader: the keeper for the records that it needs durable, and a port's thread for a lone FLUSH while
//! syncs are quick. Crash tests drive the same machine one step at a time.

use std::io;

use walvisor_block::short_slice;

use crate::log::group::{Group, Next, Spare};
use crate::log::state::{FailOnPanic, Log, State};
use crate::log::waiters::Mailbox;
use crate::medium::engine::Appended;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{self, Arc, MutexGuard};

/// A thread's means to lead: the writer's or the keeper's.
pub(crate) struct Leader {
    log: Arc<Log>,
    spare: Spare,
    /// Whether this thread leads now.
    leads: bool,
    /// The mailbox of the leading thread, if it has one: the thread looks into it next, so it is not woken.
    own: Option<Arc<Mailbox>>,
}

impl Leader {
    pub(crate) fn new(log: Arc<Log>, own: Option<Arc<Mailbox>>) -> Self {
        Self {
            log,
            spare: Spare::default(),
            leads: false,
            own,
        }
    }

    /// Takes the lead, if no other thread has it and there is something to do.
    pub(crate) fn begin(&mut self) -> Next {
        let log = self.log.clone();
        self.begin_locked(log.lock())
    }

    /// As [`begin`](Self::begin), for a caller that has the log's lock.
    pub(crate) fn begin_locked(&mut self, mut state: MutexGuard<'_, State>) -> Next {
        if state.led && !self.leads {
            return Next::Rest;
        }
        let next = self.log.lead(&mut state, &mut self.spare);
        state.check(&self.log);
        self.leads = matches!(next, Next::Run(..));
        state.led = self.leads;
        if matches!(next, Next::Rest) {
            let stuck = state.take_stuck();
            drop(state);
            self.log.refuse_waiters(stuck);
        }
        next
    }

    /// Ends the operation that [`begin`](Self::begin) returned. `goes_on`: the caller calls `begin` next; if there
    /// may be more to do, it keeps the lead and gets `true`. Without `goes_on` the writer thread is called for that.
    pub(crate) fn end(&mut self, group: Group, ran: Appended, goes_on: bool) -> bool {
        self.spare.chunks = ran.list;
        let log = &self.log;
        let wanted = log.end_group(
            group,
            ran.result,
            self.own.as_ref(),
            &mut self.spare,
            |state| {
                let wanted = log.wants_leader(state);
                state.led = wanted && goes_on;
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
    pub(crate) fn over(&self) {
        self.log.lock().gather.over();
    }

    /// Leads one group in the calling thread, if there is no other leader and a group can start; returns whether it
    /// did.
    pub(crate) fn lead_one(&mut self) -> bool {
        let next = self.begin();
        self.run(next)
    }

    /// Carries out a step in the calling thread, if it is an operation.
    pub(crate) fn run(&mut self, next: Next) -> bool {
        let Next::Run(io, group) = next else {
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
    // When the wait for more waiters to join a group ends.
    let mut over = None;
    loop {
        // The call is cleared before the leader looks, so that its next look serves every call from here on.
        log.leader_called.clear();
        let mut goes_on = true;
        while goes_on {
            goes_on = match leader.begin() {
                Next::Run(io, group) => {
                    over = None;
                    leader.end(group, log.medium.append(io), true)
                }
                Next::Wait(time) => {
                    over = Some(sync::now() + time);
                    false
                }
                Next::Rest => false,
            };
        }
        if stopping.load(Ordering::Acquire) {
            return;
        }
        log.leader_called.sleep_until(over);
        if over.is_some_and(|over| over <= sync::now()) {
            over = None;
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
