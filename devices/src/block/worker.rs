//! One queue, one thread: it takes every available chain, submits them as a batch, and publishes whatever
//! has ended as a batch.
//!
//! ```text
//!   doorbell ─┐                ┌─ take all chains ─▶ submit … kick ─┐
//!   backend ──┼─▶ event loop ──┤                                    ├─▶ used index once, ≤ 1 interrupt
//!   stop ─────┘                └─ completions ──────────────────────┘
//! ```
//!
//! Memory is bounded: chains stay in the ring while [`MAX_BYTES_IN_FLIGHT`] are in flight, or as many
//! requests as the queue has descriptors. Completions make room, and the worker goes on.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
use rustix::thread::{CpuSet, sched_setaffinity};
use vm_memory::GuestMemory;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use walvisor_storage::short_slice;

use super::features::Features;
use super::latency::OperationKind;
use super::metrics::{BlockMetrics, add};
use super::order::Batch;
use super::request::{Action, ID_LEN, Pending, Rules, Status, Transfer, parse};
use super::tracker::Tracker;
use super::virtqueue::{QueueError, QueueSetup, Used, Virtqueue};
use crate::backend::{Backend, Completion, Operation};
use crate::status::DeviceStatus;
use crate::throttle::{Throttle, ThrottledQueue};
use crate::transport::DeviceMemory;

/// Payload bytes that one queue may have in flight before it leaves further chains in the ring. One
/// request may overshoot it.
const MAX_BYTES_IN_FLIGHT: usize = 32 << 20;

const DOORBELL: u32 = 0;
const BACKEND: u32 = 1;
const STOP: u32 = 2;

/// The queue that a worker is to serve.
pub(crate) struct QueueStart {
    /// Its number, from 0.
    pub(crate) index: u16,
    /// Its rings.
    pub(crate) setup: QueueSetup,
    /// What its driver rings.
    pub(crate) doorbell: EventFd,
    /// Where its chains in flight are recorded, for a front-end that outlives this process.
    pub(crate) tracker: Option<Tracker>,
}

/// Everything a worker needs to know when it starts.
pub(super) struct Plan {
    pub(super) queue: QueueStart,
    pub(super) max_size: u16,
    pub(super) event_idx: bool,
    pub(super) in_order: bool,
    /// How long to look at the ring before sleeping.
    pub(super) poll: Duration,
    /// The processor to run on.
    pub(super) cpu: Option<u16>,
    pub(super) features: Features,
    pub(super) id: [u8; ID_LEN],
    pub(super) flush_after_write: bool,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) throttle: Arc<Throttle>,
    pub(super) metrics: Arc<BlockMetrics>,
    pub(super) status: Arc<DeviceStatus>,
}

/// Tells a worker to stop.
struct StopSignal {
    requested: AtomicBool,
    event: EventFd,
    /// What the worker tells in return: its queue has met an error.
    broken: AtomicBool,
}

/// The running worker of one queue. Dropping it drains the queue: requests in flight end and are answered
/// without an interrupt, chains still in the ring stay there.
pub(crate) struct Worker {
    stop: Arc<StopSignal>,
    /// Gives the number of chains taken, modulo 2^16.
    thread: Option<JoinHandle<Option<u16>>>,
}

impl Worker {
    /// Starts the thread. A broken ring is the driver's fault and no error here: it sets DEVICE_NEEDS_RESET.
    pub(super) fn start<M: DeviceMemory>(mut plan: Plan, memory: M) -> io::Result<Self> {
        let stop = Arc::new(StopSignal {
            requested: AtomicBool::new(false),
            broken: AtomicBool::new(false),
            event: EventFd::new(EFD_NONBLOCK)?,
        });
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
                return Ok(Self { stop, thread: None });
            }
        };
        let worker = QueueWorker {
            in_flight: InFlight::new(queue.size()),
            queue,
            memory,
            disk: ThrottledQueue::open(&*plan.backend, &plan.throttle)?,
            stop: Arc::clone(&stop),
            started: Ok(()),
            submitted: false,
            ended: Vec::new(),
            batch: Batch::new(plan.in_order),
            broken: false,
            plan,
        };
        let name = format!("virtio-blk-q{}", worker.plan.queue.index);
        let mut manager = EventManager::new().map_err(io::Error::other)?;
        let id = manager.add_subscriber(worker);
        std::mem::replace(
            &mut manager
                .subscriber_mut(id)
                .map_err(io::Error::other)?
                .started,
            Ok(()),
        )
        .map_err(io::Error::other)?;
        let thread = thread::Builder::new().name(name).spawn(move || {
            let worker = manager.subscriber_mut(id).ok()?;
            let _announce = ResetOnPanic(Arc::clone(&worker.plan.status));
            short_slice();
            if let Some(cpu) = worker.plan.cpu {
                pin(cpu, worker.plan.queue.index);
            }
            // A doorbell may have rung before this thread was there to see it.
            worker.serve();
            while manager
                .subscriber_mut(id)
                .is_ok_and(|worker| !worker.finished())
            {
                if let Err(error) = manager.run() {
                    if let Ok(worker) = manager.subscriber_mut(id) {
                        give_up(&worker.plan.status, worker.plan.queue.index, &error);
                    }
                    break;
                }
            }
            let worker = manager.subscriber_mut(id).ok()?;
            Some(worker.queue.taken())
        })?;
        Ok(Self {
            stop,
            thread: Some(thread),
        })
    }

    /// Tells the worker to stop without waiting for it, so that several can drain at once.
    pub(crate) fn request_stop(&self) {
        self.stop.requested.store(true, Ordering::SeqCst);
        // A full counter is readable all the same.
        let _ = self.stop.event.write(1);
    }

    /// Whether the queue has met an error, after which only a reset lets it go on.
    pub(crate) fn broken(&self) -> bool {
        self.stop.broken.load(Ordering::SeqCst)
    }

    /// Whether the queue is drained: then dropping the worker waits for nothing.
    pub(crate) fn finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Drains the queue. Returns the index of the first chain that was not taken; `None` if the worker never ran.
    pub(crate) fn stop(mut self) -> Option<u16> {
        self.end()
    }

    fn end(&mut self) -> Option<u16> {
        self.request_stop();
        self.thread.take()?.join().unwrap_or_else(|_| {
            tracing::error!("a virtio-blk queue worker has panicked");
            None
        })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.end();
    }
}

/// A worker that panics must not leave its driver waiting in silence.
struct ResetOnPanic(Arc<DeviceStatus>);

impl Drop for ResetOnPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.needs_reset();
        }
    }
}

/// Keeps the calling thread on one processor. Where the system takes it away again, slower is better than not at all.
fn pin(cpu: u16, queue: u16) {
    let mut set = CpuSet::new();
    set.set(cpu.into());
    if let Err(error) = sched_setaffinity(None, &set) {
        tracing::warn!(%error, "virtio-blk queue {queue}: its worker cannot run on CPU {cpu} alone");
    }
}

/// The queue cannot go on: DEVICE_NEEDS_RESET and a configuration change interrupt (virtio 1.2, 2.1.2).
fn give_up(status: &DeviceStatus, queue: u16, error: &dyn std::fmt::Display) {
    status.complain(format_args!(
        "virtio-blk queue {queue}: {error}; the driver has to reset the device"
    ));
    status.needs_reset();
}

/// A request that was handed to the backend.
struct Flying {
    pending: Pending,
    kind: OperationKind,
    /// When the batch was taken that it came with.
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
        self.free.len() == self.slots.len()
    }

    /// Where the next request goes, if there is room for one.
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

    /// Whether the request has yet to be flushed before it is answered; answers `true` once.
    fn take_flush_after(&mut self, token: u64) -> bool {
        usize::try_from(token)
            .ok()
            .and_then(|slot| self.slots.get_mut(slot)?.as_mut())
            .is_some_and(|flying| std::mem::take(&mut flying.pending.flush_after))
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
    plan: Plan,
    queue: Virtqueue,
    memory: M,
    disk: ThrottledQueue,
    stop: Arc<StopSignal>,
    in_flight: InFlight,
    /// Whether the event loop took the descriptors.
    started: Result<(), event_manager::Error>,
    /// Whether something was submitted since the last kick.
    submitted: bool,
    /// Completions being worked on; empty between batches, kept for its memory.
    ended: Vec<Completion>,
    /// Chains to be published next.
    batch: Batch,
    /// The queue has met an error: requests in flight end, nothing is taken or answered any more.
    broken: bool,
}

impl<M: DeviceMemory> QueueWorker<M> {
    fn stopping(&self) -> bool {
        self.stop.requested.load(Ordering::SeqCst)
    }

    /// Nothing is left to wait for.
    fn finished(&self) -> bool {
        self.stopping() && self.in_flight.is_empty()
    }

    /// Works until there is nothing to do but wait.
    fn serve(&mut self) {
        let memory = self.memory.memory();
        let outcome = if self.broken {
            self.complete(&*memory)
        } else {
            self.serve_batches(&*memory)
        };
        if let Err(error) = outcome {
            give_up(&self.plan.status, self.plan.queue.index, &error);
            self.broken = true;
            self.stop.broken.store(true, Ordering::SeqCst);
            self.batch.clear();
            // What was submitted before the error still has to be started, to end.
            self.disk.kick();
            self.submitted = false;
            // Cannot fail: nothing is answered any more.
            let _ = self.complete(&*memory);
        }
    }

    fn serve_batches<G: GuestMemory>(&mut self, memory: &G) -> Result<(), QueueError> {
        let mut promised = false;
        loop {
            let taking = !self.stopping();
            let mut took_all = true;
            if taking {
                self.queue.disable_doorbell(memory)?;
                let before = self.queue.taken();
                took_all = self.take_available(memory)?;
                // Without this a ring that cannot be read would be asked forever.
                if promised && took_all && self.queue.taken() == before {
                    return Err(QueueError::Unreadable);
                }
            }
            if self.submitted {
                self.disk.kick();
                self.submitted = false;
            }
            self.complete(memory)?;
            if self.queue.publish(memory, self.batch.ready())? && taking {
                self.plan.status.interrupt().queue(self.plan.queue.index);
            }
            self.batch.clear();
            if !taking {
                return Ok(());
            }
            if !took_all {
                // Full. Completions wake the worker; until then doorbells have nothing to say.
                promised = false;
                if self.in_flight.vacancy().is_none()
                    || self.batch.is_full(self.queue.size())
                    || self.disk.holds()
                {
                    return Ok(());
                }
            } else {
                promised = self.poll(memory)? || self.queue.enable_doorbell(memory)?;
                if !promised {
                    return Ok(());
                }
            }
        }
    }

    /// Looks at the ring for as long as it is to be polled, doorbells still being off; `true`: there is a chain. Not
    /// while anything is in flight, whose end would go unseen.
    fn poll<G: GuestMemory>(&mut self, memory: &G) -> Result<bool, QueueError> {
        if self.plan.poll.is_zero() || !self.in_flight.is_empty() {
            return Ok(false);
        }
        let start = Instant::now();
        let found = loop {
            if self.queue.has_available(memory)? {
                break true;
            }
            if self.stopping() || start.elapsed() >= self.plan.poll {
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
        let rules = Rules {
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
        // One look at the clock for all that are taken now.
        let mut since = None;
        let mut available = self.queue.available(memory)?;
        loop {
            let Some(slot) = self.in_flight.vacancy() else {
                return Ok(false);
            };
            // What is above a limit waits in the ring, but for one.
            if self.batch.is_full(size) || self.disk.holds() {
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
                Action::Submit(operation) => {
                    let flying = Flying {
                        pending,
                        kind: OperationKind::of(&operation),
                        since: *since.get_or_insert_with(Instant::now),
                    };
                    let token = self.in_flight.insert(slot, flying);
                    self.disk.submit(token, operation);
                    self.submitted = true;
                    continue;
                }
                Action::Answer(status) => (status, None),
                Action::AnswerId => (Status::Ok, Some(rules.id.as_slice())),
            };
            self.batch
                .push(settle(&plan.metrics, memory, pending, status, data)?);
        }
    }

    /// Answers whatever has ended. Every completion is taken, even after an error.
    fn complete<G: GuestMemory>(&mut self, memory: &G) -> Result<(), QueueError> {
        let mut outcome = Ok(());
        loop {
            self.disk.completions(&mut self.ended);
            let mut flushing = false;
            let mut now = None;
            for completion in self.ended.drain(..) {
                let Completion { token, result } = completion;
                if !self.broken && result.is_ok() && self.in_flight.take_flush_after(token) {
                    // Second half of a writethrough write, or of a SECURE_ERASE.
                    self.disk.submit(token, Operation::Flush);
                    flushing = true;
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
                } = flying;
                let time = now.get_or_insert_with(Instant::now).duration_since(since);
                let queue = usize::from(self.plan.queue.index);
                self.plan.metrics.latencies.count(queue, kind, time);
                if self.broken {
                    pending.abandon();
                    continue;
                }
                let read = pending.transfer == Transfer::ToDriver;
                let (status, data) = match result {
                    Ok(Some(data)) if read && data.len() == pending.bytes as usize => {
                        (Status::Ok, Some(data))
                    }
                    Ok(_) if !read => (Status::Ok, None),
                    // A read without its data is as failed as one that says so.
                    _ => (Status::IoError, None),
                };
                match settle(&self.plan.metrics, memory, pending, status, data.as_deref()) {
                    Ok(used) => self.batch.push(used),
                    Err(error) => outcome = Err(error),
                }
            }
            if !flushing {
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
    pending: Pending,
    status: Status,
    data: Option<&[u8]>,
) -> Result<Used, QueueError> {
    let (transfer, bytes) = (pending.transfer, pending.bytes.into());
    let (used, status) = pending.answer(memory, status, data)?;
    match (status, transfer) {
        (Status::Ok, Transfer::None) => {}
        (Status::Ok, Transfer::ToDriver) => add(&metrics.bytes_read, bytes),
        (Status::Ok, Transfer::FromDriver) => add(&metrics.bytes_written, bytes),
        (Status::IoError | Status::Unsupported, _) => add(&metrics.errors, 1),
    }
    Ok(used)
}

impl<M: DeviceMemory> MutEventSubscriber for QueueWorker<M> {
    fn init(&mut self, ops: &mut EventOps) {
        let sources = [
            (self.plan.queue.doorbell.as_raw_fd(), DOORBELL),
            (self.disk.event().as_raw_fd(), BACKEND),
            (self.disk.timer().as_raw_fd(), BACKEND),
            (self.stop.event.as_raw_fd(), STOP),
        ];
        self.started = sources
            .into_iter()
            .try_for_each(|(fd, source)| ops.add(Events::with_data_raw(fd, source, EventSet::IN)));
    }

    fn process(&mut self, events: Events, ops: &mut EventOps) {
        match events.data() {
            DOORBELL => {
                if let Ok(rings) = self.plan.queue.doorbell.read() {
                    add(&self.plan.metrics.doorbells, rings);
                }
            }
            STOP => {
                // From here on only the backend is listened to.
                for fd in [
                    self.plan.queue.doorbell.as_raw_fd(),
                    self.stop.event.as_raw_fd(),
                ] {
                    if let Err(error) = ops.remove(Events::empty_raw(fd)) {
                        tracing::error!(%error, "cannot leave the event loop of a queue");
                    }
                }
            }
            _ => {}
        }
        self.serve();
    }
}
