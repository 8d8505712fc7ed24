//! One device, one thread: it takes every command that there is, submits them as a batch, and tells the kernel of whatever
//! has ended with one write.
//!
//! ```text
//!   UIO device ─┐                ┌─ take all commands ─▶ submit … kick ─┐
//!   backend ────┼─▶ event loop ──┤                                      ├─▶ tail once, ≤ 1 write to the UIO device
//!   stop ───────┘                └─ completions ────────────────────────┘
//! ```
//! Memory is bounded: commands stay in the ring while [`MAX_BYTES_IN_FLIGHT`] or [`MAX_COMMANDS_IN_FLIGHT`] are in flight.

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
use walvisor_storage::short_slice;

use super::device::WriteCacheHook;
use super::{Command, CommandData, Device, Entry, Response, Ring, RingError, Ticket};
use crate::backend::{Completion, Operation};
use crate::control::Wake;
use crate::event_loop::{Event, EventLoop, EventSet, Remote};
use crate::latency::{OperationKind, add};
use crate::listen::join;
use crate::metrics::BlockMetrics;
use crate::scsi::{DataBuffer, LogicalUnit, Step, Task};
use crate::throttle::ThrottledQueue;

/// Bytes in flight, above which commands wait in the ring. One command may overshoot it.
const MAX_BYTES_IN_FLIGHT: usize = 32 << 20;
/// Most commands in flight.
const MAX_COMMANDS_IN_FLIGHT: usize = 1024;

/// How often commands are taken and answered before messages are looked for again.
const ROUNDS: usize = 64;

/// The token of the flush after which the disk counts as one without a volatile cache.
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
}

/// What the worker is sent.
#[derive(Debug)]
enum Mail {
    /// The gate has opened, or closed.
    Gate,
    Stop,
}

impl Wake for Remote<Source, Mail> {
    fn wake(&self) {
        self.send(Mail::Gate);
    }
}

/// A device that is served. Dropping it drains it: commands in flight end and are answered, others stay in the ring.
pub struct Worker {
    /// Kept as long as the device is served: the gate knows it by a weak reference.
    remote: Arc<Remote<Source, Mail>>,
    thread: Option<JoinHandle<()>>,
}

impl Worker {
    /// Serves `device` to the kernel, which has put `ring` into the memory of the UIO device `uio`.
    ///
    /// What goes wrong later is logged, and ends the serving of this device: commands wait until their time is over.
    ///
    /// # Errors
    /// If the system refuses a descriptor or a thread.
    pub fn start(device: &Device, ring: Ring, uio: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&uio, true)?;
        let queue = ThrottledQueue::open(&**device.unit.backend(), &device.throttle)?;
        let mut events = EventLoop::new()?;
        events.watch(&uio, Source::Kernel, EventSet::IN)?;
        events.watch(queue.event(), Source::Backend, EventSet::IN)?;
        events.watch(queue.timer(), Source::Backend, EventSet::IN)?;
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

    /// Whether the device is served no longer.
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
    /// Of [`MAX_BYTES_IN_FLIGHT`].
    bytes: usize,
    since: Instant,
    /// Something of it was submitted while the disk had a volatile write cache.
    volatile: bool,
}

struct Server {
    name: String,
    unit: Arc<LogicalUnit>,
    gate: Arc<crate::control::Gate>,
    metrics: Arc<BlockMetrics>,
    ring: Ring,
    uio: OwnedFd,
    queue: ThrottledQueue,
    events: EventLoop<Source, Mail>,
    /// What was waited for; empty between waits, kept for its memory.
    happened: Vec<Event<Source, Mail>>,
    stopping: bool,
    in_flight: Slab<Flying>,
    bytes: usize,
    /// Commands that wait for others of the unit, the oldest first.
    blocked: VecDeque<usize>,
    /// A command has ended since the blocked ones were last asked.
    over: bool,
    /// Something was submitted since the last kick.
    submitted: bool,
    /// Completions being worked on; kept for its memory.
    ended: Vec<Completion>,
    /// What was told last.
    write_cache: bool,
    on_write_cache: WriteCacheHook,
    /// A flush of our own is in flight: the cache is off, and what was written before is not durable yet.
    settling: bool,
    /// Something has ended since that flush was submitted that it need not cover.
    unsettled: bool,
}

impl Server {
    fn run(mut self) {
        short_slice();
        let outcome = self.serve_until_stopped();
        if let Err(failure) = &outcome {
            let name = &self.name;
            tracing::error!(
                "disk '{name}': {failure}: it is served no longer, and its commands end when their time is over"
            );
        }
        // What the backend has, it ends; whoever cannot be told of it is not.
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
        // There may be commands of before.
        loop {
            let more = self.serve()?;
            if self.stopping {
                return Ok(());
            }
            self.wait(more.then_some(Duration::ZERO))?;
        }
    }

    /// Waits for something to do.
    fn wait(&mut self, timeout: Option<Duration>) -> Result<(), Failure> {
        let mut happened = std::mem::take(&mut self.happened);
        let waited = self.events.wait(timeout, &mut happened);
        waited.map_err(Failure::Events)?;
        for event in happened.drain(..) {
            match event {
                // How many times it has rung; nobody needs to know.
                Event::Ready(Source::Kernel, _) => match rustix::io::read(&self.uio, &mut [0; 4]) {
                    Ok(4) => add(&self.metrics.doorbells, 1),
                    Err(Errno::AGAIN | Errno::INTR) => {}
                    outcome => {
                        // It would be readable for ever.
                        let _ = self.events.unwatch(&self.uio);
                        return Err(Failure::Device(outcome.err().unwrap_or(Errno::IO)));
                    }
                },
                // The completions clear it.
                Event::Ready(Source::Backend, _) => {}
                // It is looked at before a command is taken.
                Event::Message(Mail::Gate) => {}
                Event::Message(Mail::Stop) => self.stopping = true,
            }
        }
        self.happened = happened;
        Ok(())
    }

    /// Works until there is nothing to do but wait; `true`: messages are to be looked for, and there may be more.
    fn serve(&mut self) -> Result<bool, Failure> {
        for _ in 0..ROUNDS {
            let taken = match self.stopping {
                true => Ok(0),
                false => self.take(),
            };
            // What was taken before an error is carried out.
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
        // One look at the clock for all that are taken now.
        let mut since = None;
        let mut taken = 0;
        while self.in_flight.len() < MAX_COMMANDS_IN_FLIGHT
            && self.bytes < MAX_BYTES_IN_FLIGHT
            && !self.queue.holds()
            && self.gate.enter()
        {
            let entry = self.ring.take();
            if !matches!(entry, Ok(Some(Entry::Command(_)))) {
                self.gate.leave();
            }
            let command = match entry? {
                Some(Entry::Command(command)) => command,
                Some(Entry::TaskManagement { kind, ids }) => {
                    // All of them are answered, and the kernel knows that they were aborted.
                    let name = &self.name;
                    tracing::debug!("disk '{name}': task management {kind} for {ids:?}");
                    continue;
                }
                Some(Entry::Unknown(kind)) => {
                    let name = &self.name;
                    tracing::warn!(
                        "disk '{name}': the kernel asks for something of kind {kind}, which is not known: refused"
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

    /// Submits what a command has to do next, or answers it.
    fn go_on(&mut self, key: usize) {
        while let Some(Flying {
            task,
            data,
            volatile,
            ..
        }) = self.in_flight.get_mut(key)
        {
            match task.next(&self.unit, data) {
                Step::Submit(operation) => {
                    // The cache is turned on by this thread alone, so it is not on if it is off here.
                    *volatile |= self.unit.backend().write_cache();
                    count(&self.metrics, &operation);
                    self.queue.submit(key as u64, operation);
                    self.submitted = true;
                }
                Step::InFlight => return,
                Step::Blocked => return self.blocked.push_back(key),
                Step::Done => return self.answer(key),
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
            // Which cannot be said: what other commands have left there must not go to the initiator.
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

    /// Starts what was submitted and goes on with what has ended, until the backend has nothing to say.
    fn complete(&mut self) {
        let mut ended = std::mem::take(&mut self.ended);
        loop {
            // Those that waited for a command that is over now.
            while std::mem::take(&mut self.over) && !self.blocked.is_empty() {
                for key in std::mem::take(&mut self.blocked) {
                    self.go_on(key);
                }
            }
            self.settle();
            if std::mem::take(&mut self.submitted) {
                self.queue.kick();
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

    /// Lets the kernel know of what was answered. Returns how many commands that were.
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
    /// Flushes once the cache is off: what was written before may be volatile until then.
    fn settle(&mut self) {
        let off = self.write_cache && !self.unit.backend().write_cache();
        if off && !self.settling && !self.is_volatile() {
            (self.settling, self.unsettled) = (true, false);
            self.queue.submit(SETTLE, Operation::Flush);
            self.submitted = true;
        }
    }

    /// That flush has ended: there is no volatile write cache any more, unless it was on again meanwhile.
    fn settled(&mut self, good: bool) {
        // After an error there is none that would tell more.
        self.settling = !good;
        let off = !self.unit.backend().write_cache();
        if good && off && !self.unsettled && !self.is_volatile() {
            (self.on_write_cache)(false);
            self.write_cache = false;
        }
    }

    /// Whether commands are in flight that go by a volatile write cache.
    fn is_volatile(&self) -> bool {
        self.in_flight.iter().any(|(_, flying)| flying.volatile)
    }
}

/// Counts an operation as what it is.
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
