//! Waiting until records are *written*: then they outlive this process, but not a power cut.
//!
//! A client that connects again after this process was killed does not repeat a write that was answered. So its writes
//! are answered when their batch is in its segment: on the device, perhaps in the device's volatile cache, or in the
//! kernel's page cache where the file system refuses O_DIRECT. The next start finds them there and makes them durable
//! before it serves anybody.
//!
//! One batch at a time is written for those who wait, by the port that finds none under way; those who come meanwhile
//! share the next one. Whoever ends a batch looks for the next, the log's writer too.

use crate::committer::Committer;
use crate::log::{Log, State, Waiter};
use crate::mutant::{Mutant, planted};
use crate::sync::atomic::Ordering;
use crate::{Completion, Failure, Port};

/// Those who wait for `written` to reach an LSN.
#[derive(Default)]
pub(crate) struct WrittenWaiters {
    waiters: Vec<Waiter>,
    /// The highest LSN that any of them has waited for.
    newest: u64,
}

impl WrittenWaiters {
    fn join(&mut self, waiter: Waiter) {
        self.newest = self.newest.max(waiter.lsn);
        self.waiters.push(waiter);
    }

    /// Takes those away that `chosen` chooses.
    pub(crate) fn take(
        &mut self,
        chosen: impl FnMut(&mut Waiter) -> bool,
    ) -> impl Iterator<Item = Waiter> {
        self.waiters.extract_if(.., chosen)
    }
}

impl Log {
    /// Somebody waits for pending records to be written, and no batch is under way that they could be behind.
    pub(crate) fn is_awaited(&self, state: &State) -> bool {
        let under_way = |state: &State| state.writing.iter().any(|one| !one.synced && !one.ended);
        state.awaiting.newest > state.batched && !under_way(state)
    }
}

impl Committer {
    /// Completes `token` once `lsn` is written. `Ok(true)`: it is already, nothing waits.
    fn wait_written(&self, lsn: u64, token: u64) -> Result<bool, Failure> {
        let covered = || match self.log.poisoned.load(Ordering::Acquire) {
            true => Err(Failure::Io),
            false => Ok(self.log.written.load(Ordering::Acquire) >= lsn),
        };
        if covered()? || planted(Mutant::AnsweredUnwritten) {
            return Ok(true);
        }
        let mut state = self.log.lock();
        // Again, under the lock: a batch that ends now either covers this waiter or sees it.
        if covered()? {
            return Ok(true);
        }
        if lsn > state.batched && state.is_stuck() {
            return Err(Failure::Io);
        }
        state.awaiting.join(Waiter {
            lsn,
            token,
            mailbox: self.mailbox.clone(),
        });
        Ok(false)
    }
}

impl Port {
    /// Asks for word once the modifications that this port has completed so far outlive this process, though not yet a
    /// power cut: a completion that carries `token` comes then, or with it why not. `true`: they do already, and none
    /// comes. Nothing starts before [`kick`](Self::kick). On a disk without FLUSH there is nothing to wait for.
    pub fn when_written(&mut self, token: u64) -> bool {
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
}
