//! Serves a device: a source of the reactor, in a thread of its own. It takes all commands in the
//! ring, submits them as a batch, and reports all completed commands to the kernel with one write.
//!
//! ```text
//!   all commands, a batch ─▶ kick ─▶ completions ─▶ tail once, ≤ 1 write to the UIO device
//! ```
//! Memory is bounded: above [`MAX_BYTES_IN_FLIGHT`] or [`MAX_COMMANDS_IN_FLIGHT`], or while a
//! command waits for memory of the process, commands stay in the ring.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use rustix::io::Errno;
use slab::Slab;

use super::device::WriteCacheHook;
use super::{Command, CommandData, CommandRing, Device, Entry, Response, RingError, Ticket};
use crate::backend::{Completion, MemoryBudget, MemoryCharge, MemoryClient, Operation};
use crate::control::GateWatcher;
use crate::event_loop::EventSet;
use crate::latency::{OperationKind, add};
use crate::metrics::BlockMetrics;
use crate::reactor::{
    DedicatedThread, DiskPort, FIRST_OWN_EVENT, Next, ReactorPool, Source, SourceHandle, Turn,
};
use crate::scsi::{DataBuffer, LogicalUnit, Task, TaskStep};
use crate::throttle::{Throttle, bytes_of};

/// Cap on the bytes in flight; above it, commands stay in the ring. One command may exceed it.
const MAX_BYTES_IN_FLIGHT: usize = 32 << 20;
/// The most commands in flight.
const MAX_COMMANDS_IN_FLIGHT: usize = 1024;

/// The kernel has put commands into the ring.
const COMMANDS: usize = FIRST_OWN_EVENT;

/// The token of the flush after which the disk counts as having no volatile cache.
const SETTLE: u64 = u64::MAX;

/// Why a device can no longer be served.
#[derive(Debug, thiserror::Error)]
enum ServeError {
    #[error("{0}")]
    Ring(#[from] RingError),
    #[error("the UIO device fails, or was removed: {0}")]
    Device(Errno),
    #[error("{0}")]
    GivenUp(String),
}

/// The owner's handle of a device that is served. Dropping it drains the device: commands in flight
/// complete and are answered, others stay in the ring.
pub struct Worker {
    source: SourceHandle,
    /// The gate has only a weak reference to it, so it is kept alive here.
    _watcher: Arc<dyn GateWatcher>,
}

impl Worker {
    /// Serves `device` to the kernel. `ring` is in the memory of the UIO device `uio`.
    ///
    /// After a later failure, which is logged, the device is no longer served: its commands wait
    /// until they time out.
    ///
    /// # Errors
    /// If the system refuses a descriptor or a thread.
    pub fn start(device: &Device, ring: CommandRing, uio: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&uio, true)?;
        let server = DeviceServer {
            name: device.name.clone(),
            unit: Arc::clone(&device.unit),
            gate: Arc::clone(&device.gate),
            metrics: Arc::clone(&device.metrics),
            ring,
            uio,
            port: DiskPort::open(&**device.unit.backend(), &device.throttle)?,
            failed: false,
            in_flight: Slab::new(),
            bytes: 0,
            memory: MemoryBudget::of_process().client(),
            hungry: None,
            blocked: VecDeque::new(),
            retry_blocked: false,
            more: false,
            completions: Vec::new(),
            write_cache: device.unit.backend().write_cache(),
            on_write_cache: Arc::clone(&device.write_cache),
            settling: false,
            unsettled: false,
        };
        let own = DedicatedThread {
            name: "tcmu".into(),
            cpu: None,
        };
        let reservation = ReactorPool::new("tcmu").reserve(Some(own))?;
        let watcher: Arc<dyn GateWatcher> = Arc::new(reservation.thread());
        device.gate.watch(Arc::downgrade(&watcher));
        (server.on_write_cache)(server.write_cache);
        Ok(Self {
            source: reservation.serve(Box::new(server)),
            _watcher: watcher,
        })
    }

    /// Whether the device is no longer served.
    pub fn finished(&self) -> bool {
        self.source.is_gone()
    }

    /// Drains the device.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.source.request_stop();
        self.source.wait_until_gone();
    }
}

/// A command in flight.
struct InFlightCommand {
    ticket: Ticket,
    task: Task,
    data: CommandData,
    /// How much of [`MAX_BYTES_IN_FLIGHT`] it uses.
    bytes: usize,
    /// The memory that it may take; `None`: it waits for that.
    charge: Option<MemoryCharge>,
    since: Instant,
    /// Whether an operation of it was submitted while the disk had a volatile write cache.
    volatile: bool,
}

/// Serves a device.
struct DeviceServer {
    name: String,
    unit: Arc<LogicalUnit>,
    gate: Arc<crate::control::Gate>,
    metrics: Arc<BlockMetrics>,
    ring: CommandRing,
    uio: OwnedFd,
    port: DiskPort,
    /// Whether the device is no longer served: commands in flight complete, and no more are taken.
    failed: bool,
    in_flight: Slab<InFlightCommand>,
    bytes: usize,
    memory: MemoryClient,
    /// The newest command, if it waits for memory.
    hungry: Option<usize>,
    /// Commands that wait for other commands of the unit, the oldest first.
    blocked: VecDeque<usize>,
    /// Whether a command has ended since the blocked ones were last tried.
    retry_blocked: bool,
    /// Whether the turn was over before all commands were taken.
    more: bool,
    /// Completions not handled yet.
    completions: Vec<Completion>,
    /// The value that `on_write_cache` was last called with.
    write_cache: bool,
    on_write_cache: WriteCacheHook,
    /// Whether the worker's own flush is in flight: the cache is off, and earlier writes may not be
    /// durable yet.
    settling: bool,
    /// Whether a volatile command has ended since that flush was submitted: the flush may not cover
    /// it.
    unsettled: bool,
}

impl DeviceServer {
    fn fail(&mut self, failure: &ServeError) {
        if !std::mem::replace(&mut self.failed, true) {
            let name = &self.name;
            tracing::error!(
                "disk '{name}': {failure}: it is no longer served, and its commands will time out"
            );
        }
    }

    /// Takes commands until none is left, there is no more room, or the turn is over.
    fn take_commands(&mut self, turn: &mut Turn<'_>) -> Result<(), RingError> {
        // One clock reading for all commands taken now.
        let mut since = None;
        self.more = false;
        while self.hungry.is_none()
            && self.in_flight.len() < MAX_COMMANDS_IN_FLIGHT
            && self.bytes < MAX_BYTES_IN_FLIGHT
            && !self.port.is_holding()
        {
            if turn.is_over() {
                self.more = true;
                break;
            }
            if !self.gate.enter() {
                break;
            }
            let entry = self.ring.take();
            if !matches!(entry, Ok(Some(Entry::Command(_)))) {
                self.gate.leave();
            }
            turn.charge_request(0);
            let command = match entry? {
                Some(Entry::Command(command)) => command,
                Some(Entry::TaskManagement { kind, ids }) => {
                    // The aborted commands are answered as usual; the kernel knows that it has
                    // aborted them.
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
            self.begin_command(command, *since.get_or_insert_with(Instant::now), turn);
        }
        Ok(())
    }

    fn begin_command(&mut self, command: Command, since: Instant, turn: &mut Turn<'_>) {
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
            charge: None,
            since,
            volatile: false,
        });
        self.hungry = Some(key);
        self.feed(turn);
    }

    /// Begins the command that waits for memory, if there is some. A device that ends no longer
    /// waits.
    fn feed(&mut self, turn: &mut Turn<'_>) {
        let Some(key) = self.hungry else {
            return;
        };
        let command = &mut self.in_flight[key];
        command.charge = self.memory.charge(command.bytes as u64);
        if command.charge.is_some() || self.failed || turn.is_stopping() {
            self.hungry = None;
            self.advance(key, turn);
        } else {
            self.memory.wait_since(command.since);
        }
    }

    /// Submits the next operations of a command, or answers it.
    fn advance(&mut self, key: usize, turn: &mut Turn<'_>) {
        while let Some(InFlightCommand {
            task,
            data,
            volatile,
            ..
        }) = self.in_flight.get_mut(key)
        {
            match task.next(&self.unit, data) {
                TaskStep::Submit(operation) => {
                    // Only this thread turns the cache on, so if it is off here it stays off for
                    // this operation.
                    *volatile |= self.unit.backend().write_cache();
                    self.metrics.count(&operation);
                    let bytes = bytes_of(&operation) as usize;
                    turn.charge(bytes);
                    turn.take_room(bytes);
                    self.port.submit(key as u64, operation);
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
            charge: _charge,
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
            // The kernel takes a read length of 0 as "all of it", so the blocks must not hold stale
            // data of other commands.
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

    /// Retries the commands that waited for one that has ended.
    fn retry_blocked(&mut self, turn: &mut Turn<'_>) {
        while std::mem::take(&mut self.retry_blocked) && !self.blocked.is_empty() {
            for key in std::mem::take(&mut self.blocked) {
                self.advance(key, turn);
            }
        }
    }

    /// Advances commands whose operations have completed, until the turn is over.
    fn complete(&mut self, turn: &mut Turn<'_>) {
        let mut completions = std::mem::take(&mut self.completions);
        self.port.completions(&mut completions);
        let mut handled = 0;
        for Completion { token, result } in &mut completions {
            if turn.is_over() {
                break;
            }
            handled += 1;
            let result = std::mem::replace(result, Ok(None));
            if *token == SETTLE {
                self.end_settling(result.is_ok());
                continue;
            }
            let key = *token as usize;
            let Some(InFlightCommand { task, data, .. }) = self.in_flight.get_mut(key) else {
                debug_assert!(false, "completion of unknown token {token}");
                continue;
            };
            if let Ok(Some(data)) = &result {
                turn.charge(data.len());
            }
            task.complete(&self.unit, data, result);
            self.advance(key, turn);
        }
        completions.drain(..handled);
        self.completions = completions;
    }

    /// Publishes the responses and wakes the kernel.
    fn publish_responses(&mut self) -> Result<(), ServeError> {
        if !self.write_cache && self.unit.backend().write_cache() {
            (self.on_write_cache)(true);
            self.write_cache = true;
        }
        let answered = self.ring.publish();
        if answered > 0 {
            add(&self.metrics.interrupts, 1);
            rustix::io::write(&self.uio, &1_u32.to_ne_bytes()).map_err(ServeError::Device)?;
        }
        Ok(())
    }
}

impl Source for DeviceServer {
    fn throttle(&self) -> &Arc<Throttle> {
        self.port.throttle()
    }

    fn begin(&mut self, turn: &mut Turn<'_>) -> io::Result<()> {
        turn.watch(&self.uio, COMMANDS, EventSet::IN)?;
        self.port.watch(turn)
    }

    fn ready(&mut self, event: usize, _: EventSet, _: bool) {
        if event != COMMANDS {
            return self.port.ready(event);
        }
        // The 4 bytes are a count of events, which the worker does not need.
        match rustix::io::read(&self.uio, &mut [0; 4]) {
            Ok(4) => add(&self.metrics.doorbells, 1),
            Err(Errno::AGAIN | Errno::INTR) => {}
            outcome => self.fail(&ServeError::Device(outcome.err().unwrap_or(Errno::IO))),
        }
    }

    fn take(&mut self, turn: &mut Turn<'_>) {
        self.feed(turn);
        if self.failed {
            self.more = false;
            // A failed device would stay readable forever.
            return turn.unwatch(&self.uio);
        }
        if !turn.is_stopping()
            && let Err(error) = self.take_commands(turn)
        {
            // Commands taken before the error are still carried out.
            self.fail(&error.into());
        }
        self.settle();
    }

    fn kick(&mut self, alone: bool) {
        self.port.kick(alone && self.in_flight.len() == 1);
    }

    fn answer(&mut self, turn: &mut Turn<'_>) -> Next {
        self.complete(turn);
        self.retry_blocked(turn);
        self.settle();
        // If the UIO device has failed, the kernel gets no responses.
        let answered = self.publish_responses();
        if let Err(error) = &answered {
            self.fail(error);
        }
        if (self.failed || turn.is_stopping()) && self.in_flight.is_empty() {
            Next::End
        } else if self.port.has_submitted() || !self.completions.is_empty() {
            Next::Work
        } else if self.more {
            Next::Take
        } else if self.hungry.is_some() {
            Next::WaitUntil(Instant::now() + MemoryClient::RETRY)
        } else {
            Next::Wait
        }
    }

    fn has_in_flight(&self) -> bool {
        !self.in_flight.is_empty()
    }

    fn bytes_in_flight(&self) -> usize {
        self.bytes
    }

    fn give_up(&mut self, reason: &str) {
        self.fail(&ServeError::GivenUp(reason.to_owned()));
    }
}

impl Drop for DeviceServer {
    /// Commands still in flight were abandoned after an error. They leave the gate without a
    /// response.
    fn drop(&mut self) {
        for _ in self.in_flight.drain() {
            self.gate.leave();
        }
    }
}

impl DeviceServer {
    /// Submits a flush once the cache is off: until it completes, earlier writes may be volatile.
    fn settle(&mut self) {
        let off = self.write_cache && !self.unit.backend().write_cache();
        if off && !self.settling && !self.is_volatile() {
            (self.settling, self.unsettled) = (true, false);
            self.port.submit_unlimited(SETTLE, Operation::Flush);
        }
    }

    /// That flush has completed: the disk has no volatile write cache any more, unless the cache is
    /// on again.
    fn end_settling(&mut self, good: bool) {
        // No further flush is tried after an error: its success would say nothing about earlier
        // writes.
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
