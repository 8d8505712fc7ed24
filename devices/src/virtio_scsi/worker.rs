//! Serves a queue of the target, whatever its role: a source of the reactor.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use super::target::{ScsiTarget, Wakeup};
use crate::backend::{MemoryClient, descriptor};
use crate::event_loop::EventSet;
use crate::latency::add;
use crate::memory::DeviceMemory;
use crate::metrics::BlockMetrics;
use crate::reactor::{FIRST_OWN_EVENT, NextStep, Source, Turn};
use crate::throttle::Throttle;
use crate::virtio::{ActiveQueue, QueueError, UsedElement};

/// The driver has rung the queue's doorbell.
const DOORBELL: usize = FIRST_OWN_EVENT;
/// Another worker of the target, or its owner, has something for this one.
const WOKEN: usize = FIRST_OWN_EVENT + 1;

/// A queue that is being served.
pub(super) struct ScsiQueue<M> {
    pub(super) active: ActiveQueue,
    pub(super) memory: M,
    pub(super) target: Arc<ScsiTarget>,
    /// Chains to publish next.
    pub(super) batch: Vec<UsedElement>,
    pub(super) max_descriptors: usize,
}

/// What a queue is for.
pub(super) trait Role<M: DeviceMemory>: Send {
    /// Watches descriptors, for the events of a disk's port.
    ///
    /// # Errors
    /// If the system refuses.
    fn watch(&self, _turn: &mut Turn<'_>) -> io::Result<()> {
        Ok(())
    }

    /// Such an event has happened.
    fn ready(&mut self, _event: usize) {}

    /// Something that other workers may change has changed.
    fn woken(&mut self) {}

    /// Whether chains may be taken now.
    fn takes_chains(&self, queue: &ScsiQueue<M>) -> bool;

    /// Takes chains until none is left (`true`), there is no more room, or the turn is over.
    ///
    /// # Errors
    /// If the rings or a chain can't be read.
    fn take(
        &mut self,
        queue: &mut ScsiQueue<M>,
        guest: &M::M,
        turn: &mut Turn<'_>,
    ) -> Result<bool, QueueError>;

    /// Starts what was submitted.
    fn kick(&mut self, _alone: bool) {}

    /// Answers what has ended. `broken`: nothing can be answered any more.
    ///
    /// # Errors
    /// If the rings or a chain can't be written.
    fn answer(
        &mut self,
        queue: &mut ScsiQueue<M>,
        guest: &M::M,
        turn: &mut Turn<'_>,
        broken: bool,
    ) -> Result<(), QueueError>;

    /// The answers are published, or never will be.
    fn published(&mut self, _queue: &ScsiQueue<M>) {}

    /// Chains that are taken and not answered.
    fn in_flight(&self) -> usize {
        0
    }

    fn bytes_in_flight(&self) -> usize {
        0
    }

    /// Whether there is more to do at once.
    fn has_work(&self) -> bool {
        false
    }

    /// Whether a command waits for memory.
    fn is_starved(&self) -> bool {
        false
    }
}

/// Serves one queue.
pub(super) struct ScsiWorker<M: DeviceMemory, R: Role<M>> {
    pub(super) queue: ScsiQueue<M>,
    pub(super) role: R,
    pub(super) wakeup: Arc<Wakeup>,
    pub(super) throttle: Arc<Throttle>,
    pub(super) metrics: Arc<BlockMetrics>,
    /// How long to poll the ring before sleeping.
    pub(super) poll: Duration,
}

impl<M: DeviceMemory, R: Role<M>> ScsiWorker<M, R> {
    fn fail(&mut self, error: &dyn std::fmt::Display) {
        self.queue.active.fail(error);
        self.queue.batch.clear();
    }

    fn take_chains(&mut self, guest: &M::M, turn: &mut Turn<'_>) -> Result<(), QueueError> {
        self.queue.active.begin_taking(guest)?;
        let emptied = self.role.take(&mut self.queue, guest, turn)?;
        self.queue.active.end_taking(emptied)
    }

    /// Publishes the answers; `true`: there is more to take.
    fn publish(&mut self, guest: &M::M, turn: &Turn<'_>) -> Result<bool, QueueError> {
        let ScsiQueue { active, batch, .. } = &mut self.queue;
        active.publish(guest, batch, turn.is_stopping())?;
        batch.clear();
        if turn.is_stopping() || !self.role.takes_chains(&self.queue) {
            return Ok(false);
        }
        let active = &mut self.queue.active;
        if !active.is_emptied() {
            return Ok(true);
        }
        let spent: &AtomicU64 = &self.metrics.poll_ns;
        let idle = self.role.in_flight() == 0;
        let found = idle && active.poll(guest, turn, self.poll, spent)?;
        active.wait(guest, found)
    }
}

impl<M: DeviceMemory, R: Role<M>> Source for ScsiWorker<M, R> {
    fn throttle(&self) -> &Arc<Throttle> {
        &self.throttle
    }

    fn begin(&mut self, turn: &mut Turn<'_>) -> io::Result<()> {
        self.queue.active.driver.watch(turn, DOORBELL)?;
        turn.watch(descriptor(&self.wakeup.0), WOKEN, EventSet::IN)?;
        self.role.watch(turn)
    }

    fn ready(&mut self, event: usize, _: EventSet, stopping: bool) {
        match event {
            DOORBELL if !stopping => {
                add(
                    &self.metrics.doorbells,
                    self.queue.active.driver.take_rings(),
                );
            }
            DOORBELL => {}
            WOKEN => {
                // Fails only if it was read already.
                let _ = self.wakeup.0.read();
                self.role.woken();
            }
            _ => self.role.ready(event),
        }
    }

    fn take(&mut self, turn: &mut Turn<'_>) {
        let broken = self.queue.active.driver.is_broken();
        if broken || turn.is_stopping() || !self.role.takes_chains(&self.queue) {
            return;
        }
        let memory = self.queue.memory.clone();
        if let Err(error) = self.take_chains(&memory.memory(), turn) {
            self.fail(&error);
        }
    }

    fn kick(&mut self, alone: bool) {
        self.role.kick(alone);
    }

    fn answer(&mut self, turn: &mut Turn<'_>) -> NextStep {
        let memory = self.queue.memory.clone();
        let guest = memory.memory();
        let broken = self.queue.active.driver.is_broken();
        let answered = self.role.answer(&mut self.queue, &guest, turn, broken);
        let more = match answered {
            Ok(()) if broken => Ok(false),
            Ok(()) => self.publish(&guest, turn),
            Err(error) => Err(error),
        };
        let more = more.unwrap_or_else(|error| {
            self.fail(&error);
            false
        });
        self.role.published(&self.queue);
        if turn.is_stopping() && self.role.in_flight() == 0 {
            NextStep::End
        } else if self.role.has_work() {
            NextStep::Work
        } else if more {
            NextStep::Take
        } else if self.role.is_starved() {
            NextStep::WaitUntil(Instant::now() + MemoryClient::RETRY)
        } else {
            NextStep::Wait
        }
    }

    fn has_in_flight(&self) -> bool {
        self.role.in_flight() > 0
    }

    fn bytes_in_flight(&self) -> usize {
        self.role.bytes_in_flight()
    }

    fn give_up(&mut self, reason: &str) {
        self.fail(&reason);
    }
}
