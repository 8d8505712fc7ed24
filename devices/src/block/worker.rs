//! A thread that serves queues: any number of them, side by side.
//!
//! ```text
//!   queue ─┐                  ┌─ take from each that rang ─▶ submit for each ─▶ answer each ─┐
//!   queue ─┼─▶ one event loop ┤                                                             ├─▶ sleep
//!   inbox ─┘                  └──────────────────── there is more ◀─────────────────────────┘
//!
//!   one queue:  all available chains, a batch ─▶ kick ─▶ completions ─▶ used index once, ≤ 1 interrupt
//! ```
//!
//! With one thread per queue, a commit group wakes as many threads as it has served queues, and each thread wakes its
//! driver. One thread serves a dozen queues better in one turn: it submits the requests of all of them before it
//! answers any, and requests that one sync has made durable are answered together.
//!
//! Memory is bounded: chains stay in the ring while [32 MiB](super::in_flight::MAX_BYTES_IN_FLIGHT) are in flight, or as
//! many requests as the queue has descriptors. Completions make room, and the thread takes more.

use std::any::Any;
use std::io::{self, IoSliceMut};
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::{Errno, ReadWriteFlags};
use slab::Slab;
use vm_memory::GuestMemory;

use super::in_flight::{Flying, InFlight};
use super::request::{BlockAction, BlockRules, BlockStatus, Direction, PendingChain, parse};
use super::seat::{Inbox, Mail, QueueControl, Seat, Served, Source, WorkerPlan};
use super::tracker::Used;
use super::virtqueue::{QueueError, UsedBatch, Virtqueue};
use crate::backend::{BackendQueue, Completion, Operation, descriptor};
use crate::event_loop::{Event, EventLoop, EventSet};
use crate::latency::{OperationKind, add};
use crate::memory::DeviceMemory;
use crate::metrics::BlockMetrics;
use crate::status::DeviceStatus;
use crate::throttle::QueueLimits;

/// Turns before the thread looks at its descriptors again.
const ROUNDS: usize = 64;
/// When the backend signals one queue, the thread also checks up to this many other queues with requests in flight: one
/// sync serves many.
const ASKED: usize = 32;

/// A thread of the pool.
pub(super) struct Thread {
    events: EventLoop<Source, Mail>,
    /// Events to be handled, the last first. After a panic in one queue the thread handles the rest for the others.
    happened: Vec<Event<Source, Mail>>,
    inbox: Arc<Inbox>,
    seats: Slab<Seat>,
    /// Keys of the queues that have something to do.
    busy: Vec<usize>,
    /// Keys of the queues that this turn serves; empty between turns, kept for its memory.
    served: Vec<usize>,
    /// Key of the queue being served: a panic is attributed to it.
    current: usize,
}

impl Thread {
    /// A thread that gets its queues through `inbox`, the inbox of `events`.
    pub(super) fn new(events: EventLoop<Source, Mail>, inbox: Arc<Inbox>) -> Self {
        Self {
            events,
            happened: Vec::new(),
            inbox,
            seats: Slab::new(),
            busy: Vec::new(),
            served: Vec::new(),
            current: 0,
        }
    }

    /// Serves queues until none is left. A queue that panics is lost alone.
    pub(super) fn serve(&mut self) {
        while let Err(reason) = catch_unwind(AssertUnwindSafe(|| self.run())) {
            self.remove_panicked(&*reason);
        }
    }

    fn run(&mut self) {
        while !(self.seats.is_empty() && self.inbox.close()) {
            if let Err(error) = self.wait() {
                let reason = format!("its worker cannot wait: {error}");
                for (_, seat) in &mut self.seats {
                    seat.served.iter_mut().for_each(|s| s.give_up(&reason));
                }
                self.seats.clear();
                return;
            }
            for _ in 0..ROUNDS {
                if self.busy.is_empty() {
                    break;
                }
                self.turn();
            }
        }
    }

    /// Waits for something to do.
    fn wait(&mut self) -> io::Result<()> {
        if self.happened.is_empty() {
            let timeout = (!self.busy.is_empty()).then_some(Duration::ZERO);
            self.events.wait(timeout, &mut self.happened)?;
            self.happened.reverse();
        }
        let (mut backend, mut stops) = (false, false);
        while let Some(event) = self.happened.pop() {
            match event {
                Event::Ready(Source::Doorbell(key), _) => {
                    if let Some(served) = self.queue(key) {
                        served.rung();
                        self.mark(key);
                    }
                }
                Event::Ready(Source::Backend(key), _) => {
                    backend = true;
                    self.mark(key);
                }
                Event::Ready(Source::Timer(key), _) => {
                    if let Some(served) = self.queue(key) {
                        served.release();
                        self.mark(key);
                    }
                }
                Event::Message(Mail::Serve(seat)) => self.add(seat),
                Event::Message(Mail::Stop) => stops = true,
            }
        }
        if backend {
            let waits = |seat: &Seat| seat.served.as_ref().is_some_and(|served| served.waits());
            let others = self.seats.iter().filter(|(_, seat)| waits(seat));
            let others: Vec<usize> = others.map(|(key, _)| key).take(ASKED).collect();
            others.into_iter().for_each(|key| self.mark(key));
        }
        if stops {
            self.stop_queues();
        }
        Ok(())
    }

    fn queue(&mut self, key: usize) -> Option<&mut Box<dyn Served>> {
        self.current = key;
        self.seats.get_mut(key)?.served.as_mut()
    }

    /// Notes that the queue has something to do.
    fn mark(&mut self, key: usize) {
        if let Some(seat) = self.seats.get_mut(key)
            && !std::mem::replace(&mut seat.busy, true)
        {
            self.busy.push(key);
        }
    }

    /// Takes a queue to serve.
    fn add(&mut self, seat: Seat) {
        let key = self.seats.insert(seat);
        let Some(served) = &self.seats[key].served else {
            return;
        };
        // Edge-triggered: each ring is reported once, even if another owner of the descriptor reads its counter first.
        let edges = EventSet::IN | EventSet::EDGE_TRIGGERED;
        let sources = [
            (served.doorbell(), Source::Doorbell(key), edges),
            (served.backend(), Source::Backend(key), EventSet::IN),
            (served.timer(), Source::Timer(key), EventSet::IN),
        ];
        let watch = |(fd, source, what)| self.events.watch(fd, source, what);
        let watched = sources.into_iter().try_for_each(watch);
        if let (Err(error), Some(served)) = (watched, self.queue(key)) {
            served.give_up(&format!("its worker cannot wait for it: {error}"));
        }
        // The doorbell may have rung before the thread watched it.
        self.mark(key);
    }

    /// Begins to drain the queues that are to stop.
    fn stop_queues(&mut self) {
        let stopping = |seat: &Seat| seat.control.stopping() && !seat.leaving;
        let leaving = self.seats.iter().filter(|(_, seat)| stopping(seat));
        for key in leaving.map(|(key, _)| key).collect::<Vec<_>>() {
            let seat = &mut self.seats[key];
            seat.leaving = true;
            // From here on the thread watches only the queue's backend.
            if let Some(served) = &seat.served
                && let Err(error) = self.events.unwatch(served.doorbell())
            {
                tracing::debug!("a queue's doorbell was not watched: {error}");
            }
            self.mark(key);
        }
    }

    /// Serves the queues that have something to do: takes from all of them before it answers any.
    fn turn(&mut self) {
        std::mem::swap(&mut self.busy, &mut self.served);
        for at in 0..self.served.len() {
            if let Some(served) = self.queue(self.served[at]) {
                served.take();
            }
        }
        let waits = |(_, seat): &(usize, &Seat)| seat.served.as_ref().is_some_and(|s| s.waits());
        let alone = self.served.len() == 1 && self.seats.iter().filter(waits).count() <= 1;
        for at in 0..self.served.len() {
            if let Some(served) = self.queue(self.served[at]) {
                served.start(alone);
            }
        }
        for at in 0..self.served.len() {
            let key = self.served[at];
            let Some(served) = self.queue(key) else {
                continue;
            };
            let (more, waits) = (served.answer(), served.waits());
            let seat = &mut self.seats[key];
            seat.busy = false;
            if seat.leaving && !waits {
                self.remove(key);
            } else if more {
                self.mark(key);
            }
        }
        self.served.clear();
    }

    /// Removes a queue that is drained or lost.
    fn remove(&mut self, key: usize) {
        let Some(seat) = self.seats.try_remove(key) else {
            return;
        };
        if let Some(served) = &seat.served {
            // Unwatch the descriptors before they are closed: the transport holds the doorbell open too.
            for fd in [served.doorbell(), served.backend(), served.timer()] {
                // A descriptor that is not watched any more needs nothing.
                let _ = self.events.unwatch(fd);
            }
        }
        self.inbox.queue_removed();
        drop(seat);
    }

    /// Removes the queue that has panicked; the others go on.
    fn remove_panicked(&mut self, reason: &(dyn Any + Send)) {
        let text = reason.downcast_ref::<&str>().copied();
        let text = text.or_else(|| reason.downcast_ref::<String>().map(String::as_str));
        let key = self.current;
        if let Some(served) = self.queue(key) {
            served.give_up(&format!(
                "its worker has panicked: {}",
                text.unwrap_or("no reason was given")
            ));
        }
        self.remove(key);
        self.busy.clear();
        self.served.clear();
        let keys: Vec<usize> = self.seats.iter().map(|(key, _)| key).collect();
        for key in keys {
            self.seats[key].busy = false;
            self.mark(key);
        }
        // The thread may have taken a stop message before the panic without acting on it.
        self.stop_queues();
    }
}

impl Drop for Thread {
    /// Closes the inbox, so that no more queues are handed over.
    fn drop(&mut self) {
        self.inbox.thread_ended();
    }
}

/// One queue.
pub(super) struct QueueWorker<M> {
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
    /// Opens the queue of the disk that belongs to the driver's queue.
    ///
    /// # Errors
    /// If the disk or the system refuses.
    pub(super) fn open(plan: WorkerPlan, queue: Virtqueue, memory: M) -> io::Result<Self> {
        Ok(Self {
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
        })
    }

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
            return Ok(self.in_flight.has_room()
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
            // The limits of a disk hold one request of a queue; all others stay in the ring.
            if !self.in_flight.has_room() || self.batch.is_full(size) || self.limits.holds() {
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
                    let token = self.in_flight.insert(flying);
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
                    && !self.disk.notify_written(token)
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
/// Gives up a queue that cannot go on: DEVICE_NEEDS_RESET and a configuration change interrupt (virtio 1.2, 2.1.2).
pub(super) fn give_up(status: &DeviceStatus, queue: u16, error: &dyn std::fmt::Display) {
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
