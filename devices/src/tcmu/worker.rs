//! One thread per device. It takes every command in the ring, submits them as a batch, and reports all ended commands
//! to the kernel with one write.
//!
//! ```text
//!   UIO device ─┐                ┌─ take all commands ─▶ submit … kick ─┐
//!   backend ────┼─▶ event loop ──┤                                      ├─▶ tail once, ≤ 1 write to the UIO device
//!   stop ───────┘                └─ completions ────────────────────────┘
//! ```
//! Memory is bounded: commands beyond [`MAX_BYTES_IN_FLIGHT`] or [`MAX_COMMANDS_IN_FLIGHT`] stay in the ring.

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
use crate::control::Wake;
use crate::event_loop::{Event, EventLoop, EventSet, Remote};
use crate::latency::{OperationKind, add};
use crate::listen::join;
use crate::metrics::BlockMetrics;
use crate::scsi::{DataBuffer, LogicalUnit, Task, TaskStep};
use crate::throttle::QueueLimits;

/// Bytes in flight, above which commands wait in the ring. One command may overshoot it.
const MAX_BYTES_IN_FLIGHT: usize = 32 << 20;
/// Most commands in flight.
const MAX_COMMANDS_IN_FLIGHT: usize = 1024;

/// How many rounds of taking and answering commands the worker runs before it looks for messages again.
const ROUNDS: usize = 64;

/// The token of the flush after which the disk counts as having no volatile cache.
const SETTLE: u64 = u64::MAX;

/// Why a device cannot be served any longer.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("{0}")]
    Ring(#[from] RingError),
    #[error("the UIO device fails, or was removed: {0}")]
    Device(Errno),
    #[error("the event loop fails: {0}")]
    Events(io::Error),
}

/// A descriptor that the worker watches.
#[derive(Clone, Copy, Debug)]
enum Source {
    Kernel,
    Backend,
    /// That of the disk's limits.
    Timer,
}

/// A message to the worker.
#[derive(Debug)]
enum Mail {
    /// The gate has opened or closed.
    Gate,
    Stop,
}

impl Wake for Remote<Source, Mail> {
    fn wake(&self) {
        self.send(Mail::Gate);
    }
}

/// Serves a device. Dropping it drains the device: commands in flight end and are answered, others stay in the ring.
pub struct Worker {
    /// Kept alive here, since the gate holds only a weak reference to it.
    remote: Arc<Remote<Source, Mail>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Serves `device` to the kernel, which has put `ring` into the memory of the UIO device `uio`.
    ///
    /// A later failure is logged and ends the serving of this device: its commands then wait until they time out.
    ///
    /// # Errors
    /// If the system refuses a descriptor or a thread.
    pub fn start(device: &Device, ring: CommandRing, uio: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&uio, true)?;
        let queue = device.unit.backend().open_queue()?;
        let limits = QueueLimits::new(&device.throttle)?;
        let mut events = EventLoop::new()?;
        events.watch(&uio, Source::Kernel, EventSet::IN)?;
        events.watch(queue.event(), Source::Backend, EventSet::IN)?;
        events.watch(limits.timer(), Source::Timer, EventSet::IN)?;
        let remote = Arc::new(events.remote());
        let watcher: Arc<dyn Wake> = Arc::clone(&remote) as _;
        device.gate.watch(Arc::downgrade(&watcher));
        let server = Server {
            name: device.name.clone(),
            unit: Arc::clone(&device.unit),
            gate: Arc::clone(&device.gate),
            metrics: Arc::clone(&device.metrics),
            ring,
            uio,
            queue,
            limits,
            events,
            happened: Vec::new(),
            stopping: false,
            in_flight: Slab::new(),
            bytes: 0,
            blocked: VecDeque::new(),
            over: false,
            submitted: false,
            ended: Vec::new(),
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
            remote,
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
        self.remote.send(Mail::Stop);
        if let Some(thread) = self.thread.take() {
            join(thread, "TCMU");
        }
    }
}

/// A command in flight.
struct Flying {
    ticket: Ticket,
    task: Task,
    data: CommandData,
    /// The share of [`MAX_BYTES_IN_FLIGHT`] that it uses.
    bytes: usize,
    since: Instant,
    /// An operation of it was submitted while the disk had a volatile write cache.
    volatile: bool,
}

struct Server {
    name: String,
    unit: Arc<LogicalUnit>,
    gate: Arc<crate::control::Gate>,
    metrics: Arc<BlockMetrics>,
    ring: CommandRing,
    uio: OwnedFd,
    queue: Box<dyn BackendQueue>,
    limits: QueueLimits,
    events: EventLoop<Source, Mail>,
    /// The events of this wait. Empty between waits, and kept for its allocation.
    happened: Vec<Event<Source, Mail>>,
    stopping: bool,
    in_flight: Slab<Flying>,
    bytes: usize,
    /// Commands that wait for other commands of the unit, the oldest first.
    blocked: VecDeque<usize>,
    /// A command has ended since the blocked ones were last tried.
    over: bool,
    /// Something was submitted since the last kick.
    submitted: bool,
    /// Completions being handled. Empty between rounds, and kept for its allocation.
    ended: Vec<Completion>,
    /// The value that `on_write_cache` was last called with.
    write_cache: bool,
    on_write_cache: WriteCacheHook,
    /// The worker's own flush is in flight: the cache is off, and earlier writes are not durable yet.
    settling: bool,
    /// A volatile command has ended since that flush was submitted, and the flush may not cover it.
    unsettled: bool,
}

impl Server {
    fn run(mut self) {
        request_short_slices();
        let outcome = self.serve_until_stopped();
        if let Err(failure) = &outcome {
            let name = &self.name;
            tracing::error!(
                "disk '{name}': {failure}: it is no longer served, and its commands will time out"
            );
        }
        // The backend ends the operations that it has. If the UIO device fails, the kernel gets no responses.
        while !self.in_flight.is_empty() {
            if self.wait(None).is_err() {
                break;
            }
            self.complete();
            let _ = self.tell();
        }
        for _ in self.in_flight.drain() {
            self.gate.leave();
        }
    }

    fn serve_until_stopped(&mut self) -> Result<(), Failure> {
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
    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Failure> {
        let mut happened = std::mem::take(&mut self.happened);
        let waited = self.events.wait(timeout, &mut happened);
        waited.map_err(Failure::Events)?;
        for event in happened.drain(..) {
            match event {
                // The 4 bytes read are a count of events, which the worker does not need.
                Event::Ready(Source::Kernel, _) => match rustix::io::read(&self.uio, &mut [0; 4]) {
                    Ok(4) => add(&self.metrics.doorbells, 1),
                    Err(Errno::AGAIN | Errno::INTR) => {}
                    outcome => {
                        // A failed device would stay readable for ever.
                        let _ = self.events.unwatch(&self.uio);
                        return Err(Failure::Device(outcome.err().unwrap_or(Errno::IO)));
                    }
                },
                // Taking the completions clears the event.
                Event::Ready(Source::Backend, _) => {}
                Event::Ready(Source::Timer, _) => {
                    self.limits.release(&mut *self.queue);
                    self.submitted = true;
                }
                // The worker checks the gate before it takes a command.
                Event::Message(Mail::Gate) => {}
                Event::Message(Mail::Stop) => self.stopping = true,
            }
        }
        self.happened = happened;
        Ok(())
    }

    /// Works until there is nothing to do but wait. `true`: the worker must look for messages first, since there may be
    /// more to do.
    fn serve(&mut self) -> Result<bool, Failure> {
        for _ in 0..ROUNDS {
            let taken = match self.stopping {
                true => Ok(0),
                false => self.take(),
            };
            // Commands taken before an error are carried out.
            self.complete();
            let told = self.tell()?;
            if taken? == 0 && told == 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Takes commands until none is left or there is no more room. Returns how many.
    fn take(&mut self) -> Result<usize, RingError> {
        // The clock is read once for all the commands taken now.
        let mut since = None;
        let mut taken = 0;
        while self.in_flight.len() < MAX_COMMANDS_IN_FLIGHT
            && self.bytes < MAX_BYTES_IN_FLIGHT
            && !self.limits.holds()
            && self.gate.enter()
        {
            let entry = self.ring.take();
            if !matches!(entry, Ok(Some(Entry::Command(_)))) {
                self.gate.leave();
            }
            let command = match entry? {
                Some(Entry::Command(command)) => command,
                Some(Entry::TaskManagement { kind, ids }) => {
                    // The commands are still answered; the kernel itself knows that it has aborted them.
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
        let key = self.in_flight.insert(Flying {
            ticket,
            task,
            data,
            bytes,
            since,
            volatile: false,
        });
        self.go_on(key);
    }

    /// Submits the next operations of a command, or answers it.
    fn go_on(&mut self, key: usize) {
        while let Some(Flying {
            task,
            data,
            volatile,
            ..
        }) = self.in_flight.get_mut(key)
        {
            match task.next(&self.unit, data) {
                TaskStep::Submit(operation) => {
                    // Only this thread turns the cache on, so a cache that is off here stays off for this operation.
                    *volatile |= self.unit.backend().write_cache();
                    count(&self.metrics, &operation);
                    match self.limits.in_force() {
                        false => self.queue.submit(key as u64, operation),
                        true => {
                            let queue = &mut *self.queue;
                            self.limits.submit(queue, key as u64, operation);
                        }
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
        let Flying {
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
            // The kernel takes a read length of 0 for all, so stale data of other commands must not stay in the blocks.
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
        self.over = true;
    }

    /// Kicks what was submitted and goes on with commands whose operations have ended, until none has.
    fn complete(&mut self) {
        let mut ended = std::mem::take(&mut self.ended);
        loop {
            // Retries the commands that waited for one that is over now.
            while std::mem::take(&mut self.over) && !self.blocked.is_empty() {
                for key in std::mem::take(&mut self.blocked) {
                    self.go_on(key);
                }
            }
            self.settle();
            if std::mem::take(&mut self.submitted) {
                match self.in_flight.len() {
                    1 => self.queue.kick_alone(),
                    _ => self.queue.kick(),
                }
            }
            self.queue.completions(&mut ended);
            if ended.is_empty() {
                break;
            }
            for Completion { token, result } in ended.drain(..) {
                if token == SETTLE {
                    self.settled(result.is_ok());
                    continue;
                }
                let key = token as usize;
                let Some(Flying { task, data, .. }) = self.in_flight.get_mut(key) else {
                    debug_assert!(false, "completion of unknown token {token}");
                    continue;
                };
                task.ended(&self.unit, data, result);
                self.go_on(key);
            }
        }
        self.ended = ended;
    }

    /// Publishes the responses and wakes the kernel. Returns how many commands were answered.
    fn tell(&mut self) -> Result<usize, Failure> {
        if !self.write_cache && self.unit.backend().write_cache() {
            (self.on_write_cache)(true);
            self.write_cache = true;
        }
        let answered = self.ring.publish();
        if answered > 0 {
            add(&self.metrics.interrupts, 1);
            rustix::io::write(&self.uio, &1_u32.to_ne_bytes()).map_err(Failure::Device)?;
        }
        Ok(answered)
    }
}

impl Server {
    /// Submits a flush once the cache is off: earlier writes may be volatile until it has ended.
    fn settle(&mut self) {
        let off = self.write_cache && !self.unit.backend().write_cache();
        if off && !self.settling && !self.is_volatile() {
            (self.settling, self.unsettled) = (true, false);
            self.queue.submit(SETTLE, Operation::Flush);
            self.submitted = true;
        }
    }

    /// That flush has ended: the disk has no volatile write cache any more, unless the cache is on again.
    fn settled(&mut self, good: bool) {
        // After an error no further flush is tried: it would say no more about earlier writes.
        self.settling = !good;
        let off = !self.unit.backend().write_cache();
        if good && off && !self.unsettled && !self.is_volatile() {
            (self.on_write_cache)(false);
            self.write_cache = false;
        }
    }

    /// Whether commands are in flight that were submitted with a volatile write cache.
    fn is_volatile(&self) -> bool {
        self.in_flight.iter().any(|(_, flying)| flying.volatile)
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
