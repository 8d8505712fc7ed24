//! A thread that serves any number of queues.
//!
//! ```text
//!   queue ─┐                  ┌─ take from each that rang ─▶ submit for each ─▶ answer each ─┐
//!   queue ─┼─▶ one event loop ┤                                                             ├─▶ sleep
//!   inbox ─┘                  └──────────────────── there is more ◀─────────────────────────┘
//!
//!   one queue:  all available chains, a batch ─▶ kick ─▶ completions ─▶ used index once, ≤ 1 interrupt
//! ```
//!
//! With a thread per queue, a commit group would wake a thread for every queue that it completes requests of, and each
//! thread would wake its driver. One thread serves a dozen queues better in one turn: it submits the requests of all of
//! them before it answers any, and answers together what one sync has made durable.
//!
//! Memory is bounded: chains stay in the ring while [32 MiB](super::in_flight::MAX_BYTES_IN_FLIGHT), or as many requests
//! as the queue has descriptors, are in flight. Completions make room for more.

use std::any::Any;
use std::io::{self, IoSliceMut};
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::{Errno, ReadWriteFlags};
use slab::Slab;
use vm_memory::GuestMemory;

use super::in_flight::{InFlightRequest, RequestTable};
use super::queue_slot::{
    PoolMessage, PooledQueue, QueueControl, QueueEvent, QueueSlot, ThreadInbox, WorkerConfig,
};
use super::request::{BlockAction, BlockRules, BlockStatus, Direction, PendingChain, parse};
use super::tracker::UsedElement;
use super::virtqueue::{QueueError, UsedBatch, Virtqueue};
use crate::backend::{BackendQueue, Completion, Operation, descriptor};
use crate::event_loop::{Event, EventLoop, EventSet};
use crate::latency::{OperationKind, add};
use crate::memory::DeviceMemory;
use crate::metrics::BlockMetrics;
use crate::status::DeviceStatus;
use crate::throttle::QueueLimits;

/// Turns before the thread looks at its descriptors again.
const MAX_TURNS: usize = 64;
/// When the backend signals one queue, the thread also checks up to this many other queues with requests in flight,
/// because one sync completes requests of many queues.
const MAX_ALSO_CHECKED: usize = 32;

/// A thread of the pool.
pub(super) struct PoolThread {
    events: EventLoop<QueueEvent, PoolMessage>,
    /// Events still to handle, in reverse order. After a panic in one queue the thread handles the rest of them.
    pending_events: Vec<Event<QueueEvent, PoolMessage>>,
    inbox: Arc<ThreadInbox>,
    slots: Slab<QueueSlot>,
    /// Keys of the queues that have work.
    busy: Vec<usize>,
    /// Keys of the queues that this turn serves. Empty between turns, and kept for its allocation.
    in_turn: Vec<usize>,
    /// Key of the queue being served, which a panic is blamed on.
    current: usize,
}

impl PoolThread {
    /// A thread that receives its queues through `inbox`, which sends to `events`.
    pub(super) fn new(events: EventLoop<QueueEvent, PoolMessage>, inbox: Arc<ThreadInbox>) -> Self {
        Self {
            events,
            pending_events: Vec::new(),
            inbox,
            slots: Slab::new(),
            busy: Vec::new(),
            in_turn: Vec::new(),
            current: 0,
        }
    }

    /// Serves queues until none is left. A panic costs only the queue in which it happens.
    pub(super) fn serve(&mut self) {
        while let Err(reason) = catch_unwind(AssertUnwindSafe(|| self.run())) {
            self.remove_panicked(&*reason);
        }
    }

    fn run(&mut self) {
        while !(self.slots.is_empty() && self.inbox.close()) {
            if let Err(error) = self.wait() {
                let reason = format!("its worker cannot wait: {error}");
                for (_, slot) in &mut self.slots {
                    slot.queue.iter_mut().for_each(|s| s.give_up(&reason));
                }
                self.slots.clear();
                return;
            }
            for _ in 0..MAX_TURNS {
                if self.busy.is_empty() {
                    break;
                }
                self.serve_turn();
            }
        }
    }

    /// Waits for work.
    fn wait(&mut self) -> io::Result<()> {
        if self.pending_events.is_empty() {
            let timeout = (!self.busy.is_empty()).then_some(Duration::ZERO);
            self.events.wait(timeout, &mut self.pending_events)?;
            self.pending_events.reverse();
        }
        let (mut backend, mut stops) = (false, false);
        while let Some(event) = self.pending_events.pop() {
            match event {
                Event::Ready(QueueEvent::Doorbell(key), _) => {
                    if let Some(queue) = self.queue(key) {
                        queue.acknowledge_doorbell();
                        self.mark_busy(key);
                    }
                }
                Event::Ready(QueueEvent::Backend(key), _) => {
                    backend = true;
                    self.mark_busy(key);
                }
                Event::Ready(QueueEvent::Timer(key), _) => {
                    if let Some(queue) = self.queue(key) {
                        queue.release();
                        self.mark_busy(key);
                    }
                }
                Event::Message(PoolMessage::Serve(slot)) => self.add(slot),
                Event::Message(PoolMessage::Stop) => stops = true,
            }
        }
        if backend {
            let has_in_flight = |slot: &QueueSlot| {
                slot.queue
                    .as_ref()
                    .is_some_and(|queue| queue.has_in_flight())
            };
            let others = self.slots.iter().filter(|(_, slot)| has_in_flight(slot));
            let others: Vec<usize> = others.map(|(key, _)| key).take(MAX_ALSO_CHECKED).collect();
            others.into_iter().for_each(|key| self.mark_busy(key));
        }
        if stops {
            self.stop_queues();
        }
        Ok(())
    }

    fn queue(&mut self, key: usize) -> Option<&mut Box<dyn PooledQueue>> {
        self.current = key;
        self.slots.get_mut(key)?.queue.as_mut()
    }

    /// Lists a queue as one with work.
    fn mark_busy(&mut self, key: usize) {
        if let Some(slot) = self.slots.get_mut(key)
            && !std::mem::replace(&mut slot.busy, true)
        {
            self.busy.push(key);
        }
    }

    /// Takes a queue to serve.
    fn add(&mut self, slot: QueueSlot) {
        let key = self.slots.insert(slot);
        let Some(queue) = &self.slots[key].queue else {
            return;
        };
        // Edge-triggered: every ring of the doorbell is reported once, even if another owner of the descriptor clears its
        // counter first.
        let edges = EventSet::IN | EventSet::EDGE_TRIGGERED;
        let descriptors = [
            (queue.doorbell(), QueueEvent::Doorbell(key), edges),
            (queue.backend(), QueueEvent::Backend(key), EventSet::IN),
            (queue.timer(), QueueEvent::Timer(key), EventSet::IN),
        ];
        let watch = |(fd, event, what)| self.events.watch(fd, event, what);
        let watched = descriptors.into_iter().try_for_each(watch);
        if let (Err(error), Some(queue)) = (watched, self.queue(key)) {
            queue.give_up(&format!("its worker cannot wait for it: {error}"));
        }
        // The doorbell may have rung before it was watched.
        self.mark_busy(key);
    }

    /// Starts draining the queues that have to stop.
    fn stop_queues(&mut self) {
        let is_stopping = |slot: &QueueSlot| slot.control.is_stopping() && !slot.draining;
        let to_drain = self.slots.iter().filter(|(_, slot)| is_stopping(slot));
        for key in to_drain.map(|(key, _)| key).collect::<Vec<_>>() {
            let slot = &mut self.slots[key];
            slot.draining = true;
            // No new chains are taken, so the doorbell means nothing any more.
            if let Some(queue) = &slot.queue
                && let Err(error) = self.events.unwatch(queue.doorbell())
            {
                tracing::debug!("a queue's doorbell was not watched: {error}");
            }
            self.mark_busy(key);
        }
    }

    /// Serves the queues with work: takes chains from all of them before it answers any.
    fn serve_turn(&mut self) {
        std::mem::swap(&mut self.busy, &mut self.in_turn);
        for at in 0..self.in_turn.len() {
            if let Some(queue) = self.queue(self.in_turn[at]) {
                queue.take_chains();
            }
        }
        let has_in_flight = |(_, slot): &(usize, &QueueSlot)| {
            slot.queue.as_ref().is_some_and(|s| s.has_in_flight())
        };
        let alone = self.in_turn.len() == 1 && self.slots.iter().filter(has_in_flight).count() <= 1;
        for at in 0..self.in_turn.len() {
            if let Some(queue) = self.queue(self.in_turn[at]) {
                queue.submit(alone);
            }
        }
        for at in 0..self.in_turn.len() {
            let key = self.in_turn[at];
            let Some(queue) = self.queue(key) else {
                continue;
            };
            let (more, has_in_flight) = (queue.answer(), queue.has_in_flight());
            let slot = &mut self.slots[key];
            slot.busy = false;
            if slot.draining && !has_in_flight {
                self.remove(key);
            } else if more {
                self.mark_busy(key);
            }
        }
        self.in_turn.clear();
    }

    /// Removes a queue that is drained or lost.
    fn remove(&mut self, key: usize) {
        let Some(slot) = self.slots.try_remove(key) else {
            return;
        };
        if let Some(queue) = &slot.queue {
            // Unwatch the descriptors before they are closed: the transport holds the doorbell open too.
            for fd in [queue.doorbell(), queue.backend(), queue.timer()] {
                // Fails for a descriptor that is no longer watched, which is fine.
                let _ = self.events.unwatch(fd);
            }
        }
        self.inbox.remove_queue();
        drop(slot);
    }

    /// Removes the queue that has panicked; the others keep running.
    fn remove_panicked(&mut self, reason: &(dyn Any + Send)) {
        let text = reason.downcast_ref::<&str>().copied();
        let text = text.or_else(|| reason.downcast_ref::<String>().map(String::as_str));
        let key = self.current;
        if let Some(queue) = self.queue(key) {
            queue.give_up(&format!(
                "its worker has panicked: {}",
                text.unwrap_or("no reason was given")
            ));
        }
        self.remove(key);
        self.busy.clear();
        self.in_turn.clear();
        let keys: Vec<usize> = self.slots.iter().map(|(key, _)| key).collect();
        for key in keys {
            self.slots[key].busy = false;
            self.mark_busy(key);
        }
        // The thread may have taken a stop message before the panic without acting on it.
        self.stop_queues();
    }
}

impl Drop for PoolThread {
    /// Closes the inbox, so that no more queues are handed over.
    fn drop(&mut self) {
        self.inbox.close_for_good();
    }
}

/// Serves one queue: the driver's rings on one side, a queue of the backend on the other.
pub(super) struct QueueWorker<M> {
    config: WorkerConfig,
    queue: Virtqueue,
    memory: M,
    disk: Box<dyn BackendQueue>,
    limits: QueueLimits,
    control: Arc<QueueControl>,
    in_flight: RequestTable,
    /// Whether anything was submitted since the last kick.
    submitted: bool,
    /// Whether the ring was empty after the last chains were taken.
    ring_emptied: bool,
    /// The number of chains taken so far, if the ring then reported another available chain.
    seen_available: Option<u16>,
    /// Completions being handled. Empty between batches, and kept for its allocation.
    completions: Vec<Completion>,
    /// Chains to publish next.
    batch: UsedBatch,
}

impl<M: DeviceMemory> QueueWorker<M> {
    /// Opens a queue of the backend for the driver's queue.
    ///
    /// # Errors
    /// If the disk or the system refuses.
    pub(super) fn open(config: WorkerConfig, queue: Virtqueue, memory: M) -> io::Result<Self> {
        Ok(Self {
            in_flight: RequestTable::new(queue.size()),
            queue,
            memory,
            disk: config.backend.open_queue()?,
            limits: QueueLimits::new(&config.throttle)?,
            control: Arc::default(),
            submitted: false,
            ring_emptied: true,
            seen_available: None,
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
        give_up(&self.config.status, self.config.queue.index, error);
        self.control.set_broken();
        self.batch.clear();
    }

    fn take_batch<G: GuestMemory>(&mut self, memory: &G) -> Result<bool, QueueError> {
        self.queue.disable_doorbell(memory)?;
        self.ring_emptied = self.take_available(memory)?;
        // Without this check the worker would retry an unreadable ring forever.
        match self.seen_available.take() {
            Some(before) if self.ring_emptied && self.queue.chains_taken() == before => {
                Err(QueueError::Unreadable)
            }
            _ => Ok(false),
        }
    }

    fn answer_batch<G: GuestMemory>(&mut self, memory: &G) -> Result<bool, QueueError> {
        self.complete(memory)?;
        let running = !self.control.is_stopping();
        if self.queue.publish(memory, self.batch.ready_elements())? && running {
            self.config
                .status
                .interrupt()
                .queue(self.config.queue.index);
        }
        self.batch.clear();
        if !running {
            return Ok(false);
        }
        if !self.ring_emptied {
            // There was no room. A completion will wake the worker; it needs no doorbells until then.
            return Ok(self.in_flight.has_room()
                && !self.batch.is_full(self.queue.size())
                && !self.limits.is_holding());
        }
        let available = self.poll(memory)? || self.queue.enable_doorbell(memory)?;
        self.seen_available = available.then(|| self.queue.chains_taken());
        Ok(available)
    }

    /// Polls the ring for the configured time, with doorbells off; `true`: a chain is available. Does not poll while
    /// requests are in flight, because it would not notice their completions.
    fn poll<G: GuestMemory>(&mut self, memory: &G) -> Result<bool, QueueError> {
        if self.config.poll.is_zero() || !self.in_flight.is_empty() {
            return Ok(false);
        }
        let start = Instant::now();
        let found = loop {
            if self.queue.has_available(memory)? {
                break true;
            }
            if self.control.is_stopping() || start.elapsed() >= self.config.poll {
                break false;
            }
            std::hint::spin_loop();
        };
        let spent = start.elapsed().as_nanos() as u64;
        add(&self.config.metrics.poll_ns, spent);
        Ok(found)
    }

    /// Takes chains until none is left (`true`), or there is no more room.
    fn take_available<G: GuestMemory>(&mut self, memory: &G) -> Result<bool, QueueError> {
        let config = &self.config;
        let capabilities = config.backend.capabilities();
        let rules = BlockRules {
            features: config.features,
            read_only: capabilities.read_only,
            flush: capabilities.flush,
            flush_after_write: config.flush_after_write,
            max_request: config.backend.max_request_bytes(),
            capacity: config.backend.sectors(),
            id: &config.id,
            max_descriptors: usize::from(config.max_size),
            metrics: &config.metrics,
        };
        let size = self.queue.size();
        // One clock reading for all chains taken now.
        let mut since = None;
        let mut available = self.queue.available(memory)?;
        loop {
            // The disk's limits hold at most one request of each queue; further ones stay in the ring.
            if !self.in_flight.has_room() || self.batch.is_full(size) || self.limits.is_holding() {
                return Ok(false);
            }
            let Some(chain) = available.next() else {
                return Ok(true);
            };
            self.batch.record_taken(chain.head());
            add(&config.metrics.requests, 1);
            let (pending, action) =
                parse(memory, chain, &rules).inspect_err(|_| add(&config.metrics.errors, 1))?;
            let (status, data) = match action {
                BlockAction::Submit(operation) => {
                    let changes = !matches!(operation, Operation::Read { .. } | Operation::Flush);
                    let request = InFlightRequest {
                        // A FLUSH that follows guarantees more.
                        await_written: config.answer_when_written
                            && changes
                            && !pending.flush_after,
                        pending,
                        kind: OperationKind::of(&operation),
                        since: *since.get_or_insert_with(Instant::now),
                    };
                    let token = self.in_flight.insert(request);
                    if self.limits.in_force() {
                        self.limits.submit(&mut *self.disk, token, operation);
                    } else {
                        self.disk.submit(token, operation);
                    }
                    self.submitted = true;
                    continue;
                }
                BlockAction::Answer(status) => (status, None),
                BlockAction::AnswerId => (BlockStatus::Ok, Some(rules.id.as_slice())),
            };
            self.batch.push(answer_chain(
                &config.metrics,
                memory,
                pending,
                status,
                data,
            )?);
        }
    }

    /// Answers the completed requests. Takes every completion, even after an error.
    fn complete<G: GuestMemory>(&mut self, memory: &G) -> Result<(), QueueError> {
        let mut outcome = Ok(());
        loop {
            self.disk.completions(&mut self.completions);
            let mut more = false;
            let mut now = None;
            for completion in self.completions.drain(..) {
                let Completion { token, result } = completion;
                if !self.control.is_broken()
                    && result.is_ok()
                    && self.in_flight.take_flush_after(token)
                {
                    // The second half of a writethrough write, or of a SECURE_ERASE.
                    self.disk.submit(token, Operation::Flush);
                    more = true;
                    continue;
                }
                if !self.control.is_broken()
                    && result.is_ok()
                    && self.in_flight.take_await_written(token)
                    && !self.disk.notify_written(token)
                {
                    more = true;
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
                    ..
                } = request;
                let time = now.get_or_insert_with(Instant::now).duration_since(since);
                let queue = usize::from(self.config.queue.index);
                self.config.metrics.latencies.count(queue, kind, time);
                if self.control.is_broken() {
                    pending.abandon();
                    continue;
                }
                let read = pending.direction == Direction::ToDriver;
                let (status, data) = match result {
                    Ok(Some(data)) if read && data.len() == pending.bytes as usize => {
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
            }
            if !more {
                return outcome;
            }
            self.disk.kick();
        }
    }
}

/// Answers a request, and counts its result.
fn answer_chain<G: GuestMemory>(
    metrics: &BlockMetrics,
    memory: &G,
    pending: PendingChain,
    status: BlockStatus,
    data: Option<&[u8]>,
) -> Result<UsedElement, QueueError> {
    let (direction, bytes) = (pending.direction, pending.bytes.into());
    let (used, status) = pending.answer(memory, status, data)?;
    match (status, direction) {
        (BlockStatus::Ok, Direction::None) => {}
        (BlockStatus::Ok, Direction::ToDriver) => add(&metrics.bytes_read, bytes),
        (BlockStatus::Ok, Direction::FromDriver) => add(&metrics.bytes_written, bytes),
        (BlockStatus::IoError | BlockStatus::Unsupported, _) => add(&metrics.errors, 1),
    }
    Ok(used)
}

impl<M: DeviceMemory> PooledQueue for QueueWorker<M> {
    fn control(&self) -> Arc<QueueControl> {
        Arc::clone(&self.control)
    }

    fn doorbell(&self) -> BorrowedFd<'_> {
        descriptor(&self.config.queue.doorbell)
    }

    fn backend(&self) -> BorrowedFd<'_> {
        self.disk.event()
    }

    fn timer(&self) -> BorrowedFd<'_> {
        self.limits.timer()
    }

    fn acknowledge_doorbell(&mut self) {
        add(
            &self.config.metrics.doorbells,
            read_counter(self.doorbell()),
        );
    }

    fn release(&mut self) {
        self.limits.release(&mut *self.disk);
        self.submitted = true;
    }

    fn take_chains(&mut self) {
        if !self.control.is_broken() && !self.control.is_stopping() {
            self.run_step(Self::take_batch);
        }
    }

    fn submit(&mut self, alone: bool) {
        // Even after an error: requests submitted before it still have to complete.
        if std::mem::take(&mut self.submitted) {
            if alone && self.in_flight.len() == 1 {
                self.disk.kick_alone();
            } else {
                self.disk.kick();
            }
        }
    }

    fn answer(&mut self) -> bool {
        if self.control.is_broken() {
            self.run_step(|queue, memory| queue.complete(memory).map(|()| false))
        } else {
            self.run_step(Self::answer_batch)
        }
    }

    fn has_in_flight(&self) -> bool {
        !self.in_flight.is_empty()
    }

    fn chains_taken(&self) -> u16 {
        self.queue.chains_taken()
    }

    fn give_up(&mut self, reason: &str) {
        self.fail(&reason);
    }
}

/// Gives up a broken queue: DEVICE_NEEDS_RESET and a configuration change interrupt (virtio 1.2, 2.1.2).
pub(super) fn give_up(status: &DeviceStatus, queue: u16, error: &dyn std::fmt::Display) {
    status.warn(format_args!(
        "virtio-blk queue {queue}: {error}; the driver has to reset the device"
    ));
    status.set_needs_reset();
}

/// Reads and clears the counter of an eventfd. Never waits, although another owner of the descriptor may have read the
/// counter first, or have made the descriptor blocking.
fn read_counter(doorbell: BorrowedFd<'_>) -> u64 {
    let mut count = [0; 8];
    let mut buffer = [IoSliceMut::new(&mut count)];
    // Offset -1 means the current position.
    let current = u64::MAX;
    match rustix::io::preadv2(doorbell, &mut buffer, current, ReadWriteFlags::NOWAIT) {
        Ok(_) => u64::from_ne_bytes(count),
        Err(Errno::AGAIN) => 0,
        // NOWAIT fails on an eventfd before Linux 5.8: count one ring.
        Err(_) => 1,
    }
}
