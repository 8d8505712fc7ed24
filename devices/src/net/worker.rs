//! Serves a queue of the network device: a source of the reactor.

use std::fmt;
use std::io;
use std::sync::Arc;

use vm_memory::GuestMemory;

use super::SharedState;
use crate::event_loop::EventSet;
use crate::latency::add;
use crate::memory::DeviceMemory;
use crate::reactor::{FIRST_OWN_EVENT, NextStep, Source, Turn};
use crate::status::DeviceStatus;
use crate::throttle::Throttle;
use crate::virtio::{ActiveQueue, QueueError, UsedElement};

/// The driver has rung the queue's doorbell.
const DOORBELL: usize = FIRST_OWN_EVENT;
/// The link can be read, or has room.
const LINK_READY: usize = FIRST_OWN_EVENT + 1;

/// A queue that is being served, and what the device's queues share.
pub(super) struct NetQueue {
    pub(super) active: ActiveQueue,
    pub(super) shared: Arc<SharedState>,
    pub(super) status: Arc<DeviceStatus>,
    /// The most descriptors of a chain.
    pub(super) max_descriptors: usize,
    /// Chains to publish next.
    pub(super) batch: Vec<UsedElement>,
}

impl NetQueue {
    fn fail(&mut self, error: &dyn fmt::Display) {
        self.active.fail(error);
        self.batch.clear();
    }
}

/// The traffic of one queue: how its frames get to the link, or from it.
pub(super) trait Traffic: Send {
    /// Watches the link, for the event `event`.
    ///
    /// # Errors
    /// If the system refuses.
    fn watch(&self, turn: &mut Turn<'_>, event: usize) -> io::Result<()>;

    /// The link has told that it is ready.
    fn wake(&mut self);

    /// Whether a turn may take chains. Otherwise the queue is left as it is.
    fn takes_chains(&self) -> bool;

    /// Whether frames can move at once.
    fn can_move(&self, shared: &SharedState) -> bool;

    /// Moves frames until nothing can move or the turn is over. Returns whether the ring had no
    /// more chains.
    ///
    /// # Errors
    /// If the rings or a chain can't be read.
    fn move_frames<G: GuestMemory>(
        &mut self,
        queue: &mut NetQueue,
        memory: &G,
        turn: &mut Turn<'_>,
    ) -> Result<bool, QueueError>;
}

/// Serves one queue.
pub(super) struct NetWorker<M, T> {
    queue: NetQueue,
    memory: M,
    traffic: T,
}

impl<M: DeviceMemory, T: Traffic> NetWorker<M, T> {
    pub(super) fn new(queue: NetQueue, memory: M, traffic: T) -> Self {
        Self {
            queue,
            memory,
            traffic,
        }
    }

    fn take_frames<G: GuestMemory>(
        &mut self,
        memory: &G,
        turn: &mut Turn<'_>,
    ) -> Result<(), QueueError> {
        self.queue.active.begin_taking(memory)?;
        let emptied = self.traffic.move_frames(&mut self.queue, memory, turn)?;
        self.queue.active.end_taking(emptied)
    }

    /// Gives the driver its buffers back; `true`: there is more to take.
    fn publish<G: GuestMemory>(&mut self, memory: &G, turn: &Turn<'_>) -> Result<bool, QueueError> {
        let NetQueue {
            active,
            batch,
            shared,
            ..
        } = &mut self.queue;
        active.publish(memory, batch, turn.is_stopping())?;
        batch.clear();
        let more = !active.is_emptied() || active.wait(memory, false)?;
        Ok(more && self.traffic.can_move(shared))
    }
}

impl<M: DeviceMemory, T: Traffic> Source for NetWorker<M, T> {
    fn throttle(&self) -> &Arc<Throttle> {
        &self.queue.shared.throttle
    }

    fn is_disk(&self) -> bool {
        false
    }

    fn begin(&mut self, turn: &mut Turn<'_>) -> io::Result<()> {
        self.queue.active.driver.watch(turn, DOORBELL)?;
        self.traffic.watch(turn, LINK_READY)
    }

    fn ready(&mut self, event: usize, _: EventSet, _: bool) {
        if event == DOORBELL {
            let rung = self.queue.active.driver.take_rings();
            add(&self.queue.shared.metrics.doorbells, rung);
        } else {
            self.traffic.wake();
        }
    }

    fn take(&mut self, turn: &mut Turn<'_>) {
        let broken = self.queue.active.driver.is_broken();
        if broken || turn.is_stopping() || !self.traffic.takes_chains() {
            return;
        }
        let memory = self.memory.clone();
        if let Err(error) = self.take_frames(&*memory.memory(), turn) {
            self.queue.fail(&error);
        }
    }

    fn kick(&mut self, _: bool) {}

    fn answer(&mut self, turn: &mut Turn<'_>) -> NextStep {
        let memory = self.memory.clone();
        let more = if self.queue.active.driver.is_broken() {
            false
        } else {
            self.publish(&*memory.memory(), turn)
                .unwrap_or_else(|error| {
                    self.queue.fail(&error);
                    false
                })
        };
        if turn.is_stopping() {
            NextStep::End
        } else if more {
            NextStep::Take
        } else {
            NextStep::Wait
        }
    }

    fn has_in_flight(&self) -> bool {
        false
    }

    fn bytes_in_flight(&self) -> usize {
        0
    }

    fn give_up(&mut self, reason: &str) {
        self.queue.fail(&reason);
    }
}
