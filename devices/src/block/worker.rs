//! One queue: takes every available chain, submits them as a batch, and publishes those that have ended as a batch.
//!
//! ```text
//!   a thread of the pool ─▶ take all chains, submit ─▶ kick ─▶ completions ─▶ used index once, ≤ 1 interrupt
//! ```
//!
//! Memory is bounded: chains stay in the ring while [`MAX_BYTES_IN_FLIGHT`] are in flight, or as many requests as the
//! queue has descriptors. Completions make room, and the worker takes more.

use std::io::{self, IoSliceMut};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::{Errno, ReadWriteFlags};
use vm_memory::GuestMemory;
use vmm_sys_util::eventfd::EventFd;

use super::features::Features;
use super::pool::{Alone, Handle, QueueControl, Served, WorkerPool};
use super::request::{
    BlockAction, BlockRules, BlockStatus, Direction, ID_LEN, PendingChain, parse,
};
use super::tracker::Tracker;
use super::tracker::Used;
use super::virtqueue::{QueueError, QueueSetup, UsedBatch, Virtqueue};
use crate::backend::{Backend, BackendQueue, Completion, Operation, descriptor};
use crate::latency::{OperationKind, add};
use crate::memory::DeviceMemory;
use crate::metrics::BlockMetrics;
use crate::status::DeviceStatus;
use crate::throttle::{QueueLimits, Throttle};

/// Payload bytes that one queue may have in flight before it leaves further chains in the ring. One
/// request may overshoot it.
const MAX_BYTES_IN_FLIGHT: usize = 32 << 20;

/// The queue that a worker serves.
pub(crate) struct QueueStart {
    /// Its number, from 0.
    pub(crate) index: u16,
    /// Its rings.
    pub(crate) setup: QueueSetup,
    /// The eventfd that the driver signals.
    pub(crate) doorbell: EventFd,
    /// Records the chains in flight, for a front-end that outlives this process.
    pub(crate) tracker: Option<Tracker>,
}

/// Everything a worker needs to know when it starts.
pub(super) struct WorkerPlan {
    pub(super) queue: QueueStart,
    pub(super) max_size: u16,
    pub(super) event_idx: bool,
    pub(super) in_order: bool,
    /// How long to poll the ring before sleeping.
    pub(super) poll: Duration,
    /// The processor to run on.
    pub(super) cpu: Option<u16>,
    pub(super) features: Features,
    pub(super) id: [u8; ID_LEN],
    pub(super) flush_after_write: bool,
    /// Whether a change must outlive this process before it is answered.
    pub(super) written_first: bool,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) throttle: Arc<Throttle>,
    pub(super) metrics: Arc<BlockMetrics>,
    pub(super) status: Arc<DeviceStatus>,
}

/// The running worker of one queue. Dropping it drains the queue: requests in flight end and are answered
/// without an interrupt, chains still in the ring stay there.
pub(crate) struct Worker {
    /// `None`: the driver's rings are broken, and it never ran.
    handle: Option<Handle>,
}

impl Worker {
    /// Starts serving the queue. A broken ring is the driver's fault and no error here: it sets DEVICE_NEEDS_RESET.
    pub(super) fn start<M: DeviceMemory>(
        mut plan: WorkerPlan,
        memory: M,
        pool: &Arc<WorkerPool>,
    ) -> io::Result<Self> {
        let queue = Virtqueue::new(
            &plan.queue.setup,
            plan.max_size,
            plan.event_idx,
            &*memory.memory(),
            plan.queue.tracker.take(),
        );
        let queue = match queue {
            Ok(queue) => queue,
            Err(error) => {
                give_up(&plan.status, plan.queue.index, &error);
                return Ok(Self { handle: None });
            }
        };
        // A worker that polls, or whose disk blocks, would delay other queues of its thread.
        let own = plan.cpu.is_some() || !plan.poll.is_zero() || plan.backend.blocks();
        let alone = own.then(|| Alone {
            name: format!("virtio-blk-q{}", plan.queue.index),
            cpu: plan.cpu,
        });
        let handle = pool.serve(alone, move || {
            Ok(Box::new(QueueWorker {
                in_flight: InFlight::new(queue.size()),
                queue,
                memory,
                disk: plan.backend.open_queue()?,
                limits: QueueLimits::new(&plan.throttle)?,
                control: Arc::default(),
                submitted: false,
                took_all: true,
                promised: None,
                ended: Vec::new(),
                batch: UsedBatch::new(plan.in_order),
                plan,
            }))
        })?;
        Ok(Self {
            handle: Some(handle),
        })
    }

    /// Asks the worker to stop without waiting for it, so that several can drain at once.
    pub(crate) fn request_stop(&self) {
        self.handle.iter().for_each(Handle::request_stop);
    }

    /// Whether the queue is drained: then dropping the worker does not wait.
    pub(crate) fn finished(&self) -> bool {
        self.handle.as_ref().is_none_or(Handle::finished)
    }

    /// Drains the queue. Chains that the worker has taken are completed, unless the queue breaks.
    pub(crate) fn stop(mut self) -> Drained {
        let handle = self.handle.take();
        let next = handle.as_ref().map(Handle::stop);
        // Only now: the worker may have met an error while it drained.
        let broken = handle.is_none_or(|handle| handle.control().broken());
        Drained { next, broken }
    }
}

/// A queue that was served and is drained.
pub(crate) struct Drained {
    /// The index of the first chain that was not taken; `None` if the worker never ran.
    pub(crate) next: Option<u16>,
    /// The queue has met an error: only a reset lets it go on.
    pub(crate) broken: bool,
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Some(handle) = self.handle.take() {
            handle.stop();
        }
    }
}

/// Gives up a queue that cannot go on: DEVICE_NEEDS_RESET and a configuration change interrupt (virtio 1.2, 2.1.2).
fn give_up(status: &DeviceStatus, queue: u16, error: &dyn std::fmt::Display) {
    status.complain(format_args!(
        "virtio-blk queue {queue}: {error}; the driver has to reset the device"
    ));
    status.needs_reset();
}

/// Reads and clears the counter of an eventfd. It never waits: another owner of the descriptor may have read the
/// counter already, and may have made the descriptor a blocking one.
fn rings(doorbell: BorrowedFd<'_>) -> u64 {
    let mut count = [0; 8];
    let mut buffer = [IoSliceMut::new(&mut count)];
    // Offset -1: the current position, for files without an offset.
    let nowhere = u64::MAX;
    match rustix::io::preadv2(doorbell, &mut buffer, nowhere, ReadWriteFlags::NOWAIT) {
        Ok(_) => u64::from_ne_bytes(count),
        Err(Errno::AGAIN) => 0,
        // Before Linux 5.8 NOWAIT fails here: count one ring.
        Err(_) => 1,
    }
}

/// A request that was handed to the backend.
struct Flying {
    pending: PendingChain,
    kind: OperationKind,
    unasked: bool,
    /// When the batch that the request belongs to was taken.
    since: Instant,
}

/// Requests handed to the backend, by token.
struct InFlight {
    slots: Vec<Option<Flying>>,
    free: Vec<u16>,
    bytes: usize,
}

impl InFlight {
    fn new(size: u16) -> Self {
        Self {
            slots: (0..size).map(|_| None).collect(),
            free: (0..size).rev().collect(),
            bytes: 0,
        }
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// The slot for the next request, if there is room.
    fn vacancy(&self) -> Option<u16> {
        if self.bytes < MAX_BYTES_IN_FLIGHT {
            self.free.last().copied()
        } else {
            None
        }
    }

    /// Puts a request into the slot that [`vacancy`](Self::vacancy) named, and returns its token.
    fn insert(&mut self, slot: u16, flying: Flying) -> u64 {
        self.free.pop();
        self.bytes += flying.pending.bytes as usize;
        self.slots[usize::from(slot)] = Some(flying);
        slot.into()
    }

    fn get_mut(&mut self, token: u64) -> Option<&mut Flying> {
        self.slots.get_mut(usize::try_from(token).ok()?)?.as_mut()
    }

    /// Whether the request still needs a flush before it is answered; returns `true` once.
    fn take_flush_after(&mut self, token: u64) -> bool {
        let flying = self.get_mut(token);
        flying.is_some_and(|flying| std::mem::take(&mut flying.pending.flush_after))
    }

    /// Whether the request has changed the disk and `when_written` was not yet called for it; returns `true` once.
    fn take_unasked(&mut self, token: u64) -> bool {
        let flying = self.get_mut(token);
        flying.is_some_and(|flying| std::mem::take(&mut flying.unasked))
    }

    fn remove(&mut self, token: u64) -> Option<Flying> {
        let slot = u16::try_from(token).ok()?;
        let flying = self.slots.get_mut(usize::from(slot))?.take()?;
        self.free.push(slot);
        self.bytes -= flying.pending.bytes as usize;
        Some(flying)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        for flying in self.slots.drain(..).flatten() {
            flying.pending.abandon();
        }
    }
}

struct QueueWorker<M> {
    plan: WorkerPlan,
    queue: Virtqueue,
    memory: M,
    disk: Box<dyn BackendQueue>,
    limits: QueueLimits,
    control: Arc<QueueControl>,
    in_flight: InFlight,
    /// Whether something was submitted since the last kick.
    submitted: bool,
    /// Whether the last look at the ring left nothing in it.
    took_all: bool,
    /// Number of chains taken when the ring last reported another available one.
    promised: Option<u16>,
    /// Completions being worked on; empty between batches, kept for its memory.
    ended: Vec<Completion>,
    /// Chains to be published next.
    batch: UsedBatch,
}

impl<M: DeviceMemory> QueueWorker<M> {
    /// Does a step of the queue's work, until it meets an error. `true`: there is more to take.
    fn step(&mut self, step: impl FnOnce(&mut Self, &M::M) -> Result<bool, QueueError>) -> bool {
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
        give_up(&self.plan.status, self.plan.queue.index, error);
        self.control.set_broken();
        self.batch.clear();
    }

    fn take_batch<G: GuestMemory>(&mut self, memory: &G) -> Result<bool, QueueError> {
        self.queue.disable_doorbell(memory)?;
        self.took_all = self.take_available(memory)?;
        // Without this the worker would retry an unreadable ring forever.
        match self.promised.take() {
            Some(before) if self.took_all && self.queue.taken() == before => {
                Err(QueueError::Unreadable)
            }
            _ => Ok(false),
        }
    }

    fn answer_batch<G: GuestMemory>(&mut self, memory: &G) -> Result<bool, QueueError> {
        self.complete(memory)?;
        let taking = !self.control.stopping();
        if self.queue.publish(memory, self.batch.ready())? && taking {
            self.plan.status.interrupt().queue(self.plan.queue.index);
        }
        self.batch.clear();
        if !taking {
            return Ok(false);
        }
        if !self.took_all {
            // No room. Completions wake the worker; until then it needs no doorbells.
            return Ok(self.in_flight.vacancy().is_some()
                && !self.batch.is_full(self.queue.size())
                && !self.limits.holds());
        }
        let promised = self.poll(memory)? || self.queue.enable_doorbell(memory)?;
        self.promised = promised.then(|| self.queue.taken());
        Ok(promised)
    }

    /// Polls the ring for the configured time, with doorbells off; `true`: there is a chain. It does not poll while
    /// requests are in flight, because it would not see them complete.
    fn poll<G: GuestMemory>(&mut self, memory: &G) -> Result<bool, QueueError> {
        if self.plan.poll.is_zero() || !self.in_flight.is_empty() {
            return Ok(false);
        }
        let start = Instant::now();
        let found = loop {
            if self.queue.has_available(memory)? {
                break true;
            }
            if self.control.stopping() || start.elapsed() >= self.plan.poll {
                break false;
            }
            std::hint::spin_loop();
        };
        let spent = start.elapsed().as_nanos() as u64;
        add(&self.plan.metrics.poll_ns, spent);
        Ok(found)
    }

    /// Takes chains until none is left (`true`) or there is no more room.
    fn take_available<G: GuestMemory>(&mut self, memory: &G) -> Result<bool, QueueError> {
        let plan = &self.plan;
        let capabilities = plan.backend.capabilities();
        let rules = BlockRules {
            features: plan.features,
            read_only: capabilities.read_only,
            flush: capabilities.flush,
            flush_after_write: plan.flush_after_write,
            max_request: plan.backend.max_request_bytes(),
            capacity: plan.backend.sectors(),
            id: &plan.id,
            max_descriptors: usize::from(plan.max_size),
            metrics: &plan.metrics,
        };
        let size = self.queue.size();
        // One reading of the clock for all chains taken now.
        let mut since = None;
        let mut available = self.queue.available(memory)?;
        loop {
            let Some(slot) = self.in_flight.vacancy() else {
                return Ok(false);
            };
            // A throttled disk holds one request of a queue; all others stay in the ring.
            if self.batch.is_full(size) || self.limits.holds() {
                return Ok(false);
            }
            let Some(chain) = available.next() else {
                return Ok(true);
            };
            self.batch.taken(chain.head());
            add(&plan.metrics.requests, 1);
            let (pending, action) =
                parse(memory, chain, &rules).inspect_err(|_| add(&plan.metrics.errors, 1))?;
            let (status, data) = match action {
                BlockAction::Submit(operation) => {
                    let changes = !matches!(operation, Operation::Read { .. } | Operation::Flush);
                    let flying = Flying {
                        // A FLUSH follows, which does more.
                        unasked: plan.written_first && changes && !pending.flush_after,
                        pending,
                        kind: OperationKind::of(&operation),
                        since: *since.get_or_insert_with(Instant::now),
                    };
                    let token = self.in_flight.insert(slot, flying);
                    match self.limits.in_force() {
                        false => self.disk.submit(token, operation),
                        true => self.limits.submit(&mut *self.disk, token, operation),
                    }
                    self.submitted = true;
                    continue;
                }
                BlockAction::Answer(status) => (status, None),
                BlockAction::AnswerId => (BlockStatus::Ok, Some(rules.id.as_slice())),
            };
            self.batch
                .push(settle(&plan.metrics, memory, pending, status, data)?);
        }
    }

    /// Answers the requests that have ended. It takes every completion, even after an error.
    fn complete<G: GuestMemory>(&mut self, memory: &G) -> Result<(), QueueError> {
        let mut outcome = Ok(());
        loop {
            self.disk.completions(&mut self.ended);
            let mut more = false;
            let mut now = None;
            for completion in self.ended.drain(..) {
                let Completion { token, result } = completion;
                if !self.control.broken()
                    && result.is_ok()
                    && self.in_flight.take_flush_after(token)
                {
                    // Second half of a writethrough write, or of a SECURE_ERASE.
                    self.disk.submit(token, Operation::Flush);
                    more = true;
                    continue;
                }
                if !self.control.broken()
                    && result.is_ok()
                    && self.in_flight.take_unasked(token)
                    && !self.disk.when_written(token)
                {
                    more = true;
                    continue;
                }
                let Some(flying) = self.in_flight.remove(token) else {
                    debug_assert!(false, "completion of unknown token {token}");
                    continue;
                };
                let Flying {
                    pending,
                    kind,
                    since,
                    ..
                } = flying;
                let time = now.get_or_insert_with(Instant::now).duration_since(since);
                let queue = usize::from(self.plan.queue.index);
                self.plan.metrics.latencies.count(queue, kind, time);
                if self.control.broken() {
                    pending.abandon();
                    continue;
                }
                let read = pending.transfer == Direction::ToDriver;
                let (status, data) = match result {
                    Ok(Some(data)) if read && data.len() == pending.bytes as usize => {
                        (BlockStatus::Ok, Some(data))
                    }
                    Ok(_) if !read => (BlockStatus::Ok, None),
                    // A read without its data has failed too.
                    _ => (BlockStatus::IoError, None),
                };
                match settle(&self.plan.metrics, memory, pending, status, data.as_deref()) {
                    Ok(used) => self.batch.push(used),
                    Err(error) => outcome = Err(error),
                }
            }
            if !more {
                return outcome;
            }
            self.disk.kick();
        }
    }
}

/// Answers a request and counts how it ended.
fn settle<G: GuestMemory>(
    metrics: &BlockMetrics,
    memory: &G,
    pending: PendingChain,
    status: BlockStatus,
    data: Option<&[u8]>,
) -> Result<Used, QueueError> {
    let (transfer, bytes) = (pending.transfer, pending.bytes.into());
    let (used, status) = pending.answer(memory, status, data)?;
    match (status, transfer) {
        (BlockStatus::Ok, Direction::None) => {}
        (BlockStatus::Ok, Direction::ToDriver) => add(&metrics.bytes_read, bytes),
        (BlockStatus::Ok, Direction::FromDriver) => add(&metrics.bytes_written, bytes),
        (BlockStatus::IoError | BlockStatus::Unsupported, _) => add(&metrics.errors, 1),
    }
    Ok(used)
}

impl<M: DeviceMemory> Served for QueueWorker<M> {
    fn control(&self) -> Arc<QueueControl> {
        Arc::clone(&self.control)
    }

    fn doorbell(&self) -> BorrowedFd<'_> {
        descriptor(&self.plan.queue.doorbell)
    }

    fn backend(&self) -> BorrowedFd<'_> {
        self.disk.event()
    }

    fn timer(&self) -> BorrowedFd<'_> {
        self.limits.timer()
    }

    fn rung(&mut self) {
        add(&self.plan.metrics.doorbells, rings(self.doorbell()));
    }

    fn release(&mut self) {
        self.limits.release(&mut *self.disk);
        self.submitted = true;
    }

    fn take(&mut self) {
        if !self.control.broken() && !self.control.stopping() {
            self.step(Self::take_batch);
        }
    }

    fn start(&mut self, alone: bool) {
        // After an error too: what was submitted before it still has to end.
        if std::mem::take(&mut self.submitted) {
            match alone && self.in_flight.len() == 1 {
                true => self.disk.kick_alone(),
                false => self.disk.kick(),
            }
        }
    }

    fn answer(&mut self) -> bool {
        match self.control.broken() {
            true => self.step(|queue, memory| queue.complete(memory).map(|()| false)),
            false => self.step(Self::answer_batch),
        }
    }

    fn waits(&self) -> bool {
        !self.in_flight.is_empty()
    }

    fn taken(&self) -> u16 {
        self.queue.taken()
    }

    fn give_up(&mut self, reason: &str) {
        self.fail(&reason);
    }
}
