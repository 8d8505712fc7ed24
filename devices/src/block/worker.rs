//! Serves a virtqueue: a source of the reactor.
//!
//! ```text
//!   all available chains, a batch ─▶ kick ─▶ completions ─▶ used index once, ≤ 1 interrupt
//! ```
//! Memory is bounded. Chains stay in the ring while the process has no memory for them, and while
//! [32 MiB](super::in_flight::MAX_BYTES_IN_FLIGHT), or as many requests as the queue has
//! descriptors, are in flight. Completions make room for more.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vm_memory::GuestMemory;

use super::in_flight::{InFlightRequest, RequestTable, Sectors};
use super::request::{
    BlockAction, BlockRules, BlockStatus, Direction, ID_LEN, PendingChain, parse,
};
use crate::backend::{Backend, Completion, MemoryBudget, MemoryClient, Operation};
use crate::event_loop::EventSet;
use crate::latency::{OperationKind, add};
use crate::memory::DeviceMemory;
use crate::metrics::BlockMetrics;
use crate::reactor::{DiskPort, FIRST_OWN_EVENT, NextStep, Source, Turn};
use crate::throttle::{Throttle, bytes_of};
use crate::virtio::{ActiveQueue, Features, NextChain, QueueError, UsedBatch, UsedElement};

/// What a chain has besides its payload: the header and the status.
const FRAME_BYTES: u64 = 17;

/// The driver has rung the queue's doorbell.
const DOORBELL: usize = FIRST_OWN_EVENT;

/// What a worker needs to know about its queue and its device.
pub(super) struct WorkerConfig {
    pub(super) max_size: u16,
    pub(super) in_order: bool,
    /// How long to poll the ring before sleeping.
    pub(super) poll: Duration,
    pub(super) features: Features,
    pub(super) id: [u8; ID_LEN],
    pub(super) flush_after_write: bool,
    /// Whether a change must survive the end of this process before it is answered.
    pub(super) answer_when_written: bool,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) throttle: Arc<Throttle>,
    pub(super) metrics: Arc<BlockMetrics>,
}

/// Serves one queue: the driver's rings on one side, a queue of the backend on the other.
pub(super) struct QueueWorker<M> {
    config: WorkerConfig,
    queue: ActiveQueue,
    memory: M,
    port: DiskPort,
    in_flight: RequestTable,
    /// The process's memory, of which each chain takes some.
    budget: MemoryClient,
    /// Since when the next chain waits for memory.
    hungry_since: Option<Instant>,
    /// Completions not handled yet.
    completions: Vec<Completion>,
    /// Chains to publish next.
    batch: UsedBatch,
}

impl<M: DeviceMemory> QueueWorker<M> {
    /// Opens a queue of the backend for the driver's queue.
    ///
    /// # Errors
    /// If the disk or the system refuses.
    pub(super) fn open(config: WorkerConfig, queue: ActiveQueue, memory: M) -> io::Result<Self> {
        Ok(Self {
            in_flight: RequestTable::new(queue.ring.size()),
            queue,
            memory,
            port: DiskPort::open(&*config.backend, &config.throttle)?,
            budget: MemoryBudget::of_process().client(),
            hungry_since: None,
            completions: Vec::new(),
            batch: UsedBatch::new(config.in_order),
            config,
        })
    }

    /// Runs `step`; an error in it breaks the queue. `true`: there are more chains to take.
    fn run_step(
        &mut self,
        step: impl FnOnce(&mut Self, &M::M) -> Result<bool, QueueError>,
    ) -> bool {
        let memory = self.memory.memory();
        match step(self, &*memory) {
            Ok(more) => more,
            Err(error) => {
                self.fail(&error);
                false
            }
        }
    }

    fn fail(&mut self, error: &dyn std::fmt::Display) {
        self.queue.fail(error);
        self.batch.clear();
    }

    fn take_batch<G: GuestMemory>(
        &mut self,
        memory: &G,
        turn: &mut Turn<'_>,
    ) -> Result<bool, QueueError> {
        self.queue.begin_taking(memory)?;
        let emptied = self.take_available(memory, turn)?;
        self.queue.end_taking(emptied)?;
        Ok(false)
    }

    fn answer_batch<G: GuestMemory>(
        &mut self,
        memory: &G,
        turn: &mut Turn<'_>,
    ) -> Result<bool, QueueError> {
        self.complete(memory, turn)?;
        let stopping = turn.is_stopping();
        let ready = self.batch.ready_elements();
        self.queue.publish(memory, ready, stopping)?;
        self.batch.clear();
        if stopping || !self.completions.is_empty() {
            return Ok(false);
        }
        if !self.queue.is_emptied() {
            // There was no room, or the turn was over. A completion wakes the
            // worker (a timer, if it waits for memory), so doorbells stay off.
            return Ok(self.hungry_since.is_none()
                && self.in_flight.has_room()
                && !self.batch.is_full(self.queue.ring.size())
                && !self.port.is_holding());
        }
        // Not while requests are in flight, because it would not notice their completions.
        let found = self.in_flight.is_empty() && {
            let WorkerConfig { poll, metrics, .. } = &self.config;
            self.queue.poll(memory, turn, *poll, &metrics.poll_ns)?
        };
        self.queue.wait(memory, found)
    }

    /// Takes chains until none is left (`true`), there is no more room, or the turn is over.
    fn take_available<G: GuestMemory>(
        &mut self,
        memory: &G,
        turn: &mut Turn<'_>,
    ) -> Result<bool, QueueError> {
        let config = &self.config;
        let capabilities = config.backend.capabilities();
        let mut rules = BlockRules {
            features: config.features,
            read_only: capabilities.read_only,
            flush: capabilities.flush,
            flush_after_write: config.flush_after_write,
            max_request: 0,
            capacity: config.backend.sectors(),
            id: &config.id,
            max_descriptors: usize::from(config.max_size),
            metrics: &config.metrics,
        };
        let max_request = config.backend.max_request_bytes();
        let size = self.queue.ring.size();
        // One clock reading for all chains taken now.
        let mut since = None;
        let mut available = self.queue.ring.available(memory)?;
        loop {
            // The disk's limits hold at most one request of each queue; further ones stay in the
            // ring.
            if !self.in_flight.has_room()
                || self.batch.is_full(size)
                || self.port.is_holding()
                || turn.is_over()
            {
                return Ok(false);
            }
            let mut charge = None;
            let next = available.next_if(|bytes| {
                // A longer payload is refused, and takes no memory. So is one that becomes longer
                // after this look.
                let payload = bytes.saturating_sub(FRAME_BYTES).min(max_request as u64);
                rules.max_request = payload as usize;
                charge = self.budget.charge(payload);
                charge.is_some()
            });
            let (chain, charge) = match (next, charge) {
                (NextChain::Chain(chain), Some(charge)) => (chain, charge),
                (NextChain::None, _) => return Ok(true),
                _ => {
                    let since = *self.hungry_since.get_or_insert_with(Instant::now);
                    self.budget.wait_since(since);
                    return Ok(false);
                }
            };
            self.hungry_since = None;
            self.batch.record_taken(chain.head());
            add(&config.metrics.requests, 1);
            let (pending, action) =
                parse(memory, chain, &rules).inspect_err(|_| add(&config.metrics.errors, 1))?;
            let (status, data) = match action {
                BlockAction::Submit(mut operation) => {
                    let (mut moving, mut rest) = (pending.bytes, Sectors::default());
                    let whole = bytes_of(&operation);
                    if let Operation::Read { sector, sectors } = operation {
                        rest = Sectors {
                            first: sector,
                            sectors,
                        };
                        let part = rest.take(turn.part());
                        (moving, operation) = (part.bytes(), part.read());
                    }
                    turn.charge_request(moving as usize);
                    turn.take_room(moving as usize);
                    let changes = !matches!(operation, Operation::Read { .. } | Operation::Flush);
                    let request = InFlightRequest {
                        // A FLUSH that follows guarantees more.
                        await_written: config.answer_when_written
                            && changes
                            && !pending.flush_after,
                        pending,
                        kind: OperationKind::of(&operation),
                        since: *since.get_or_insert_with(Instant::now),
                        charge,
                        moving,
                        rest,
                    };
                    let token = self.in_flight.insert(request);
                    self.port.submit_first(token, operation, whole);
                    continue;
                }
                BlockAction::Answer(status) => (status, None),
                BlockAction::AnswerId => (BlockStatus::Ok, Some(rules.id.as_slice())),
            };
            turn.charge_request(0);
            self.batch.push(answer_chain(
                &config.metrics,
                memory,
                pending,
                status,
                data,
            )?);
        }
    }

    /// Answers the completed requests until the turn is over. Goes on after an error.
    fn complete<G: GuestMemory>(
        &mut self,
        memory: &G,
        turn: &mut Turn<'_>,
    ) -> Result<(), QueueError> {
        let mut outcome = Ok(());
        let mut completions = std::mem::take(&mut self.completions);
        loop {
            self.port.completions(&mut completions);
            let mut now = None;
            let mut handled = 0;
            for Completion { token, result } in &mut completions {
                if turn.is_over() && handled > 0 {
                    break;
                }
                handled += 1;
                let token = *token;
                let broken = self.queue.driver.is_broken();
                if !broken && result.is_ok() && self.in_flight.take_flush_after(token) {
                    // The second half of a writethrough write, or of a SECURE_ERASE.
                    self.port.submit_unlimited(token, Operation::Flush);
                    continue;
                }
                if !broken
                    && result.is_ok()
                    && self.in_flight.take_await_written(token)
                    && !self.port.notify_written(token)
                {
                    continue;
                }
                if !broken
                    && let Ok(Some(data)) = result
                    && let Some(next) = self.in_flight.next_part(memory, token, data, turn.part())
                {
                    turn.charge(data.len() + bytes_of(&next) as usize);
                    self.port.submit_unlimited(token, next);
                    continue;
                }
                let Some(request) = self.in_flight.remove(token) else {
                    debug_assert!(false, "completion of unknown token {token}");
                    continue;
                };
                let InFlightRequest {
                    pending,
                    kind,
                    since,
                    charge,
                    moving,
                    rest,
                    ..
                } = request;
                let time = now.get_or_insert_with(Instant::now).duration_since(since);
                let queue = usize::from(self.queue.driver.index());
                self.config.metrics.latencies.count(queue, kind, time);
                if broken {
                    pending.abandon();
                    continue;
                }
                let read = pending.direction == Direction::ToDriver;
                let result = std::mem::replace(result, Ok(None));
                let (status, data) = match result {
                    Ok(Some(data))
                        if read && data.len() == moving as usize && rest.sectors == 0 =>
                    {
                        turn.charge(data.len());
                        (BlockStatus::Ok, Some(data))
                    }
                    Ok(_) if !read => (BlockStatus::Ok, None),
                    // A read without its data is an error too.
                    _ => (BlockStatus::IoError, None),
                };
                match answer_chain(
                    &self.config.metrics,
                    memory,
                    pending,
                    status,
                    data.as_deref(),
                ) {
                    Ok(used) => self.batch.push(used),
                    Err(error) => outcome = Err(error),
                }
                drop(data);
                drop(charge);
            }
            completions.drain(..handled);
            if !self.port.has_submitted() {
                self.completions = completions;
                return outcome;
            }
            self.port.kick(false);
        }
    }
}

/// Answers a request, and counts its result.
fn answer_chain<G: GuestMemory>(
    metrics: &BlockMetrics,
    memory: &G,
    mut pending: PendingChain,
    mut status: BlockStatus,
    data: Option<&[u8]>,
) -> Result<UsedElement, QueueError> {
    let (direction, bytes) = (pending.direction, pending.bytes.into());
    if data.is_some_and(|data| pending.write(memory, data).is_err()) {
        status = BlockStatus::IoError;
    }
    let used = pending.answer(memory, status)?;
    match (status, direction) {
        (BlockStatus::Ok, Direction::None) => {}
        (BlockStatus::Ok, Direction::ToDriver) => add(&metrics.bytes_read, bytes),
        (BlockStatus::Ok, Direction::FromDriver) => add(&metrics.bytes_written, bytes),
        (BlockStatus::IoError | BlockStatus::Unsupported, _) => add(&metrics.errors, 1),
    }
    Ok(used)
}

impl<M: DeviceMemory> Source for QueueWorker<M> {
    fn throttle(&self) -> &Arc<Throttle> {
        self.port.throttle()
    }

    fn begin(&mut self, turn: &mut Turn<'_>) -> io::Result<()> {
        self.queue.driver.watch(turn, DOORBELL)?;
        self.port.watch(turn)
    }

    fn ready(&mut self, event: usize, _: EventSet, stopping: bool) {
        if event != DOORBELL {
            self.port.ready(event);
        } else if !stopping {
            add(
                &self.config.metrics.doorbells,
                self.queue.driver.take_rings(),
            );
        }
    }

    fn take(&mut self, turn: &mut Turn<'_>) {
        if !self.queue.driver.is_broken() && !turn.is_stopping() {
            self.run_step(|queue, memory| queue.take_batch(memory, turn));
        }
    }

    /// Even after an error: requests submitted before it still have to complete.
    fn kick(&mut self, alone: bool) {
        self.port.kick(alone && self.in_flight.len() == 1);
    }

    fn answer(&mut self, turn: &mut Turn<'_>) -> NextStep {
        let more = if self.queue.driver.is_broken() {
            self.run_step(|queue, memory| queue.complete(memory, turn).map(|()| false))
        } else {
            self.run_step(|queue, memory| queue.answer_batch(memory, turn))
        };
        if turn.is_stopping() && self.in_flight.is_empty() {
            NextStep::End
        } else if !self.completions.is_empty() {
            NextStep::Work
        } else if more {
            NextStep::Take
        } else if self.hungry_since.is_some() && !turn.is_stopping() {
            NextStep::WaitUntil(Instant::now() + MemoryClient::RETRY)
        } else {
            NextStep::Wait
        }
    }

    fn has_in_flight(&self) -> bool {
        !self.in_flight.is_empty()
    }

    fn bytes_in_flight(&self) -> usize {
        self.in_flight.moving()
    }

    fn give_up(&mut self, reason: &str) {
        self.fail(&reason);
    }
}
