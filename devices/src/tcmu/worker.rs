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
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use rustix::buffer::spare_capacity;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use slab::Slab;
use walvisor_storage::short_slice;

use super::device::WriteCacheHook;
use super::{Command, CommandData, Device, Entry, Response, Ring, RingError, Ticket};
use crate::backend::{Completion, Operation};
use crate::control::Wake;
use crate::latency::{OperationKind, add};
use crate::metrics::BlockMetrics;
use crate::scsi::{DataBuffer, LogicalUnit, Step, Task};
use crate::throttle::ThrottledQueue;

/// Bytes in flight, above which commands wait in the ring. One command may overshoot it.
const MAX_BYTES_IN_FLIGHT: usize = 32 << 20;
/// Most commands in flight.
const MAX_COMMANDS_IN_FLIGHT: usize = 1024;

const KERNEL: u64 = 0;
const BACKEND: u64 = 1;
const BELL: u64 = 2;

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
    Events(Errno),
}

/// Tells the worker to look: it is to stop, or the gate has moved.
struct Bell {
    event: OwnedFd,
    stop: AtomicBool,
}

impl Wake for Bell {
    fn wake(&self) {
        // A full counter is readable all the same.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }
}

/// A device that is served. Dropping it drains it: commands in flight end and are answered, others stay in the ring.
pub struct Worker {
    bell: Arc<Bell>,
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
        let bell = Arc::new(Bell {
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            stop: AtomicBool::new(false),
        });
        rustix::io::ioctl_fionbio(&uio, true)?;
        let queue = ThrottledQueue::open(&**device.unit.backend(), &device.throttle)?;
        let events = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let watch = |what: &dyn AsFd, data| {
            epoll::add(&events, what, EventData::new_u64(data), EventFlags::IN)
        };
        watch(&uio, KERNEL)?;
        watch(&queue.event(), BACKEND)?;
        watch(&queue.timer(), BACKEND)?;
        watch(&bell.event, BELL)?;
        let watcher: Arc<dyn Wake> = Arc::clone(&bell) as _;
        device.gate.watch(Arc::downgrade(&watcher));
        let server = Server {
            name: device.name.clone(),
            unit: Arc::clone(&device.unit),
            gate: Arc::clone(&device.gate),
            metrics: Arc::clone(&device.metrics),
            bell: Arc::clone(&bell),
            ring,
            uio,
            queue,
            events,
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
            bell,
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
        self.bell.stop.store(true, Ordering::SeqCst);
        self.bell.wake();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("a TCMU worker has panicked");
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
    bell: Arc<Bell>,
    ring: Ring,
    uio: OwnedFd,
    queue: ThrottledQueue,
    events: OwnedFd,
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
            if self.wait().is_err() {
                break;
            }
            self.complete();
            let _ = self.tell();
        }
        for _ in self.in_flight.drain() {
            self.gate.leave();
        }
    }

    fn stopping(&self) -> bool {
        self.bell.stop.load(Ordering::SeqCst)
    }

    fn serve_until_stopped(&mut self) -> Result<(), Failure> {
        // There may be commands of before.
        loop {
            self.serve()?;
            if self.stopping() {
                return Ok(());
            }
            self.wait()?;
        }
    }

    /// Waits for something to do.
    fn wait(&mut self) -> Result<(), Failure> {
        let mut list = Vec::with_capacity(4);
        match epoll::wait(&self.events, spare_capacity(&mut list), None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(Failure::Events(error)),
        }
        for event in list {
            match event.data.u64() {
                KERNEL => {
                    // How many times it has rung; nobody needs to know.
                    match rustix::io::read(&self.uio, &mut [0; 4]) {
                        Ok(4) => add(&self.metrics.doorbells, 1),
                        Err(Errno::AGAIN | Errno::INTR) => {}
                        outcome => {
                            // It would be readable for ever.
                            let _ = epoll::delete(&self.events, &self.uio);
                            return Err(Failure::Device(outcome.err().unwrap_or(Errno::IO)));
                        }
                    }
                }
                BELL => {
                    let _ = rustix::io::read(&self.bell.event, &mut [0; 8]);
                }
                // The completions clear it.
                _ => {}
            }
        }
        Ok(())
    }

    /// Works until there is nothing to do but wait.
    fn serve(&mut self) -> Result<(), Failure> {
        loop {
            let taken = match self.stopping() {
                true => Ok(0),
                false => self.take(),
            };
            // What was taken before an error is carried out.
            self.complete();
            let told = self.tell()?;
            if taken? == 0 && told == 0 {
                return Ok(());
            }
        }
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
