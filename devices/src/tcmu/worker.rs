//! One thread per device. It takes all commands in the ring, submits them as a batch, and reports all completed commands to
//! the kernel with one write.
//!
//! ```text
//!   UIO device ─┐                ┌─ take all commands ─▶ submit … kick ─┐
//!   backend ────┼─▶ event loop ──┤                                      ├─▶ tail once, ≤ 1 write to the UIO device
//!   stop ───────┘                └─ completions ────────────────────────┘
//! ```
//! Memory is bounded: above [`MAX_BYTES_IN_FLIGHT`] or [`MAX_COMMANDS_IN_FLIGHT`] commands stay in the ring.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use slab::Slab;
use walvisor_block::request_short_slices;

use super::device::WriteCacheHook;
use super::{Command, CommandData, CommandRing, Device, Entry, Response, RingError, Ticket};
use crate::backend::{BackendQueue, Completion, Operation};
use crate::control::GateWatcher;
use crate::event_loop::{Event, EventLoop, EventSet, MessageSender};
use crate::latency::{OperationKind, add};
use crate::listen::join;
use crate::metrics::BlockMetrics;
use crate::scsi::{DataBuffer, LogicalUnit, Task, TaskStep};
use crate::throttle::QueueLimits;

/// Cap on the bytes in flight; above it, commands stay in the ring. One command may exceed it.
const MAX_BYTES_IN_FLIGHT: usize = 32 << 20;
/// The most commands in flight.
const MAX_COMMANDS_IN_FLIGHT: usize = 1024;

/// Rounds of taking and answering commands before the worker looks for messages again.
const ROUNDS: usize = 64;

/// The token of the flush after which the disk counts as having no volatile cache.
const SETTLE: u64 = u64::MAX;

/// Why a device can no longer be served.
#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error("{0}")]
    Ring(#[from] RingError),
    #[error("the UIO device fails, or was removed: {0}")]
    Device(Errno),
    #[error("the event loop fails: {0}")]
    Events(io::Error),
}

/// What made the worker's event loop wake up: a descriptor that it watches.
#[derive(Clone, Copy, Debug)]
enum DeviceEvent {
    Kernel,
    Backend,
    /// The timer of the disk's limits.
    Timer,
}

/// A message to the worker.
#[derive(Debug)]
enum DeviceMessage {
    /// The gate has opened or closed.
    Gate,
    Stop,
}

impl GateWatcher for MessageSender<DeviceEvent, DeviceMessage> {
    fn wake(&self) {
        self.send(DeviceMessage::Gate);
    }
}

/// The owner's handle of a device that is served. Dropping it drains the device: commands in flight complete and are
/// answered, others stay in the ring.
pub struct Worker {
    /// The gate has only a weak reference to it, so it is kept alive here.
    sender: Arc<MessageSender<DeviceEvent, DeviceMessage>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Serves `device` to the kernel. `ring` is in the memory of the UIO device `uio`.
    ///
    /// After a later failure, which is logged, the device is no longer served: its commands wait until they time out.
    ///
    /// # Errors
    /// If the system refuses a descriptor or a thread.
    pub fn start(device: &Device, ring: CommandRing, uio: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&uio, true)?;
        let queue = device.unit.backend().open_queue()?;
        let limits = QueueLimits::new(&device.throttle)?;
        let mut events = EventLoop::new()?;
        events.watch(&uio, DeviceEvent::Kernel, EventSet::IN)?;
        events.watch(queue.event(), DeviceEvent::Backend, EventSet::IN)?;
        events.watch(limits.timer(), DeviceEvent::Timer, EventSet::IN)?;
        let sender = Arc::new(events.sender());
        let watcher: Arc<dyn GateWatcher> = Arc::clone(&sender) as _;
        device.gate.watch(Arc::downgrade(&watcher));
        let server = DeviceServer {
            name: device.name.clone(),
            unit: Arc::clone(&device.unit),
            gate: Arc::clone(&device.gate),
            metrics: Arc::clone(&device.metrics),
            ring,
            uio,
            queue,
            limits,
            events,
            events_ready: Vec::new(),
            stopping: false,
            in_flight: Slab::new(),
            bytes: 0,
            blocked: VecDeque::new(),
            retry_blocked: false,
            submitted: false,
            completions: Vec::new(),
            write_cache: device.unit.backend().write_cache(),
            on_write_cache: Arc::clone(&device.write_cache),
            settling: false,
            unsettled: false,
        };
        (server.on_write_cache)(server.write_cache);
        let thread = thread::Builder::new()
            .name("tcmu".into())
            .spawn(move || server.run())?;
        Ok(Self {
            sender,
            thread: Some(thread),
        })
    }

    /// Whether the device is no longer served.
    pub fn finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Drains the device.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.sender.send(DeviceMessage::Stop);
        if let Some(thread) = self.thread.take() {
            join(thread, "TCMU");
        }
    }
}

/// A command in flight.
struct InFlightCommand {
    ticket: Ticket,
    task: Task,
    data: CommandData,
    /// How much of [`MAX_BYTES_IN_FLIGHT`] it uses.
    bytes: usize,
    since: Instant,
    /// Whether an operation of it was submitted while the disk had a volatile write cache.
    volatile: bool,
}

/// The thread that serves a device.
struct DeviceServer {
    name: String,
    unit: Arc<LogicalUnit>,
    gate: Arc<crate::control::Gate>,
    metrics: Arc<BlockMetrics>,
    ring: CommandRing,
    uio: OwnedFd,
    queue: Box<dyn BackendQueue>,
    limits: QueueLimits,
    events: EventLoop<DeviceEvent, DeviceMessage>,
    /// The events of this wait. Empty between waits, and kept for its allocation.
    events_ready: Vec<Event<DeviceEvent, DeviceMessage>>,
    stopping: bool,
    in_flight: Slab<InFlightCommand>,
    bytes: usize,
    /// Commands that wait for other commands of the unit, the oldest first.
    blocked: VecDeque<usize>,
    /// Whether a command has ended since the blocked ones were last tried.
    retry_blocked: bool,
    /// Whether anything was submitted since the last kick.
    submitted: bool,
    /// Completions being handled. Empty between rounds, and kept for its allocation.
    completions: Vec<Completion>,
    /// The value that `on_write_cache` was last called with.
    write_cache: bool,
    on_write_cache: WriteCacheHook,
    /// Whether the worker's own flush is in flight: the cache is off, and earlier writes may not be durable yet.
    settling: bool,
    /// Whether a volatile command has ended since that flush was submitted: the flush may not cover it.
    unsettled: bool,
}

impl DeviceServer {
    fn run(mut self) {
        request_short_slices();
        let outcome = self.serve_until_stopped();
        if let Err(failure) = &outcome {
            let name = &self.name;
            tracing::error!(
                "disk '{name}': {failure}: it is no longer served, and its commands will time out"
            );
        }
        // The backend completes the operations that it has. If the UIO device has failed, the kernel gets no responses.
        while !self.in_flight.is_empty() {
            if self.wait(None).is_err() {
                break;
            }
            self.complete();
            let _ = self.publish_responses();
        }
        for _ in self.in_flight.drain() {
            self.gate.leave();
        }
    }

    fn serve_until_stopped(&mut self) -> Result<(), ServeError> {
        // The ring may hold commands from before this worker started.
        loop {
            let more = self.serve()?;
            if self.stopping {
                return Ok(());
            }
            self.wait(more.then_some(Duration::ZERO))?;
        }
    }

    /// Waits for events.
    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), ServeError> {
        let mut events_ready = std::mem::take(&mut self.events_ready);
        let waited = self.events.wait(timeout, &mut events_ready);
        waited.map_err(ServeError::Events)?;
        for event in events_ready.drain(..) {
            match event {
                // The 4 bytes are a count of events, which the worker does not need.
                Event::Ready(DeviceEvent::Kernel, _) => {
                    match rustix::io::read(&self.uio, &mut [0; 4]) {
                        Ok(4) => add(&self.metrics.doorbells, 1),
                        Err(Errno::AGAIN | Errno::INTR) => {}
                        outcome => {
                            // A failed device would stay readable forever.
                            let _ = self.events.unwatch(&self.uio);
                            return Err(ServeError::Device(outcome.err().unwrap_or(Errno::IO)));
                        }
                    }
                }
                // Taking the completions clears the event.
                Event::Ready(DeviceEvent::Backend, _) => {}
                Event::Ready(DeviceEvent::Timer, _) => {
                    self.limits.release(&mut *self.queue);
                    self.submitted = true;
                }
                // The worker checks the gate before it takes a command.
                Event::Message(DeviceMessage::Gate) => {}
                Event::Message(DeviceMessage::Stop) => self.stopping = true,
            }
        }
        self.events_ready = events_ready;
        Ok(())
    }

    /// Works until there is nothing to do but wait. `true`: there may be more to do, but look for messages first.
    fn serve(&mut self) -> Result<bool, ServeError> {
        for _ in 0..ROUNDS {
            let taken = if self.stopping { Ok(0) } else { self.take() };
            // Commands taken before an error are still carried out.
            self.complete();
            let answered = self.publish_responses()?;
            if taken? == 0 && answered == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Takes commands until none is left or there is no more room. Returns how many.
    fn take(&mut self) -> Result<usize, RingError> {
        // One clock reading for all commands taken now.
        let mut since = None;
        let mut taken = 0;
        while self.in_flight.len() < MAX_COMMANDS_IN_FLIGHT
            && self.bytes < MAX_BYTES_IN_FLIGHT
            && !self.limits.is_holding()
            && self.gate.enter()
        {
            let entry = self.ring.take();
            if !matches!(entry, Ok(Some(Entry::Command(_)))) {
                self.gate.leave();
            }
            let command = match entry? {
                Some(Entry::Command(command)) => command,
                Some(Entry::TaskManagement { kind, ids }) => {
                    // The aborted commands are answered as usual; the kernel knows that it has aborted them.
                    let name = &self.name;
                    tracing::debug!("disk '{name}': task management {kind} for {ids:?}");
                    continue;
                }
                Some(Entry::Unknown(kind)) => {
                    let name = &self.name;
                    tracing::warn!(
                        "disk '{name}': the kernel sent an entry of unknown kind {kind}: refused"
                    );
                    add(&self.metrics.errors, 1);
                    continue;
                }
                None => break,
            };
            taken += 1;
            self.begin(command, *since.get_or_insert_with(Instant::now));
        }
        Ok(taken)
    }

    fn begin(&mut self, command: Command, since: Instant) {
        add(&self.metrics.requests, 1);
        let Command {
            ticket, cdb, data, ..
        } = command;
        tracing::trace!("disk '{}': {cdb:02x?}, {} bytes", self.name, data.len());
        let task = Task::new(&self.unit, &cdb, &data);
        let bytes = task.bytes(&self.unit);
        self.bytes += bytes;
        let key = self.in_flight.insert(InFlightCommand {
            ticket,
            task,
            data,
            bytes,
            since,
            volatile: false,
        });
        self.advance(key);
    }

    /// Submits the next operations of a command, or answers it.
    fn advance(&mut self, key: usize) {
        while let Some(InFlightCommand {
            task,
            data,
            volatile,
            ..
        }) = self.in_flight.get_mut(key)
        {
            match task.next(&self.unit, data) {
                TaskStep::Submit(operation) => {
                    // Only this thread turns the cache on, so if it is off here it stays off for this operation.
                    *volatile |= self.unit.backend().write_cache();
                    count(&self.metrics, &operation);
                    if self.limits.in_force() {
                        let queue = &mut *self.queue;
                        self.limits.submit(queue, key as u64, operation);
                    } else {
                        self.queue.submit(key as u64, operation);
                    }
                    self.submitted = true;
                }
                TaskStep::InFlight => return,
                TaskStep::Blocked => return self.blocked.push_back(key),
                TaskStep::Done => return self.answer(key),
            }
        }
    }

    fn answer(&mut self, key: usize) {
        let InFlightCommand {
            ticket,
            task,
            data,
            bytes,
            since,
            volatile,
        } = self.in_flight.remove(key);
        self.unsettled |= volatile;
        self.bytes -= bytes;
        let kind = task.kind();
        if let Some(kind) = kind {
            self.metrics.latencies.count(0, kind, since.elapsed());
        }
        let outcome = task.outcome();
        let good = outcome.sense.is_none();
        match (good, kind) {
            (false, _) => add(&self.metrics.errors, 1),
            (true, Some(OperationKind::Read)) => {
                add(
                    &self.metrics.bytes_read,
                    outcome.data_in.unwrap_or(0) as u64,
                );
            }
            (true, Some(OperationKind::Write)) => {
                add(&self.metrics.bytes_written, data.len() as u64);
            }
            (true, _) => {}
        }
        let short = outcome.data_in.filter(|&len| len < data.len());
        if short == Some(0) {
            // The kernel takes a read length of 0 as "all of it", so the blocks must not hold stale data of other commands.
            data.clear();
        }
        let read = short.and_then(|len| u32::try_from(len).ok());
        self.ring.complete(
            ticket,
            &Response {
                status: outcome.status as u8,
                sense: outcome.sense.as_ref().map_or(&[], |sense| sense),
                read,
            },
        );
        self.gate.leave();
        self.retry_blocked = true;
    }

    /// Kicks the queue and advances commands whose operations have completed, until there are no more completions.
    fn complete(&mut self) {
        let mut completions = std::mem::take(&mut self.completions);
        loop {
            // Retries the commands that waited for one that has ended.
            while std::mem::take(&mut self.retry_blocked) && !self.blocked.is_empty() {
                for key in std::mem::take(&mut self.blocked) {
                    self.advance(key);
                }
            }
            self.settle();
            if std::mem::take(&mut self.submitted) {
                match self.in_flight.len() {
                    1 => self.queue.kick_alone(),
                    _ => self.queue.kick(),
                }
            }
            self.queue.completions(&mut completions);
            if completions.is_empty() {
                break;
            }
            for Completion { token, result } in completions.drain(..) {
                if token == SETTLE {
                    self.end_settling(result.is_ok());
                    continue;
                }
                let key = token as usize;
                let Some(InFlightCommand { task, data, .. }) = self.in_flight.get_mut(key) else {
                    debug_assert!(false, "completion of unknown token {token}");
                    continue;
                };
                task.complete(&self.unit, data, result);
                self.advance(key);
            }
        }
        self.completions = completions;
    }

    /// Publishes the responses and wakes the kernel. Returns how many commands were answered.
    fn publish_responses(&mut self) -> Result<usize, ServeError> {
        if !self.write_cache && self.unit.backend().write_cache() {
            (self.on_write_cache)(true);
            self.write_cache = true;
        }
        let answered = self.ring.publish();
        if answered > 0 {
            add(&self.metrics.interrupts, 1);
            rustix::io::write(&self.uio, &1_u32.to_ne_bytes()).map_err(ServeError::Device)?;
        }
        Ok(answered)
    }
}

impl DeviceServer {
    /// Submits a flush once the cache is off: until it completes, earlier writes may be volatile.
    fn settle(&mut self) {
        let off = self.write_cache && !self.unit.backend().write_cache();
        if off && !self.settling && !self.is_volatile() {
            (self.settling, self.unsettled) = (true, false);
            self.queue.submit(SETTLE, Operation::Flush);
            self.submitted = true;
        }
    }

    /// That flush has completed: the disk has no volatile write cache any more, unless the cache is on again.
    fn end_settling(&mut self, good: bool) {
        // No further flush is tried after an error: its success would say nothing about earlier writes.
        self.settling = !good;
        let off = !self.unit.backend().write_cache();
        if good && off && !self.unsettled && !self.is_volatile() {
            (self.on_write_cache)(false);
            self.write_cache = false;
        }
    }

    /// Whether a command in flight was submitted while the write cache was volatile.
    fn is_volatile(&self) -> bool {
        self.in_flight.iter().any(|(_, command)| command.volatile)
    }
}

/// Counts an operation by its kind.
fn count(metrics: &BlockMetrics, operation: &Operation) {
    let counter = match operation {
        Operation::Read { .. } => &metrics.reads,
        Operation::Write { .. } => &metrics.writes,
        Operation::Flush => &metrics.flushes,
        Operation::Discard { .. } => &metrics.discards,
        Operation::WriteZeroes { .. } => &metrics.write_zeroes,
    };
    add(counter, 1);
}
