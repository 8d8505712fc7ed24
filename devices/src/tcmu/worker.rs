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

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use super::device::WriteCacheHook;
use super::{Command, CommandData, CommandRing, Device, Entry, Response, RingError, Ticket};
use crate::backend::MemoryClient;
use crate::control::GateWatcher;
use crate::event_loop::EventSet;
use crate::latency::add;
use crate::reactor::{
    DedicatedThread, FIRST_OWN_EVENT, NextStep, ReactorPool, Source, SourceHandle, Turn,
};
use crate::scsi::{DataBuffer, EndedCommand, SharedUnit, UnitQueue};
use crate::throttle::Throttle;
use rustix::io::Errno;

/// Cap on the bytes in flight; above it, commands stay in the ring. One command may exceed it.
const MAX_BYTES_IN_FLIGHT: usize = 32 << 20;
/// The most commands in flight.
const MAX_COMMANDS_IN_FLIGHT: usize = 1024;

/// The kernel has put commands into the ring.
const COMMANDS: usize = FIRST_OWN_EVENT;

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
        let shared = device.shared.clone();
        let server = DeviceServer {
            name: device.name.clone(),
            write_cache: shared.unit.backend().write_cache(),
            commands: UnitQueue::open(shared.clone(), 0, false)?,
            shared,
            ring,
            uio,
            failed: false,
            more: false,
            on_write_cache: Arc::clone(&device.write_cache),
            settling: false,
        };
        let own = DedicatedThread {
            name: "tcmu".into(),
            cpu: None,
        };
        let reservation = ReactorPool::new("tcmu").reserve(Some(own))?;
        let watcher: Arc<dyn GateWatcher> = Arc::new(reservation.thread());
        device.shared.gate.watch(Arc::downgrade(&watcher));
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

/// Serves a device.
struct DeviceServer {
    name: String,
    shared: SharedUnit,
    commands: UnitQueue<Ticket, CommandData>,
    ring: CommandRing,
    uio: OwnedFd,
    /// Whether the device is no longer served: commands in flight complete, and no more are taken.
    failed: bool,
    /// Whether the turn was over before all commands were taken.
    more: bool,
    /// The value that `on_write_cache` was last called with.
    write_cache: bool,
    on_write_cache: WriteCacheHook,
    /// Whether the worker's own flush is in flight: the cache is off, and earlier writes may not be
    /// durable yet.
    settling: bool,
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
        while self.commands.waiting() == 0
            && self.commands.len() < MAX_COMMANDS_IN_FLIGHT
            && self.commands.bytes() < MAX_BYTES_IN_FLIGHT
            && !self.commands.port().is_holding()
        {
            if turn.is_over() {
                self.more = true;
                break;
            }
            if self.shared.gate.is_closed() {
                break;
            }
            let entry = self.ring.take()?;
            turn.charge_request(0);
            let command = match entry {
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
                    add(&self.shared.metrics.errors, 1);
                    continue;
                }
                None => break,
            };
            let Command {
                ticket, cdb, data, ..
            } = command;
            tracing::trace!("disk '{}': {cdb:02x?}, {} bytes", self.name, data.len());
            let since = *since.get_or_insert_with(Instant::now);
            self.commands.begin(ticket, &cdb, data, since, turn);
        }
        Ok(())
    }

    /// Puts the responses of commands that have ended into the ring.
    fn respond(&mut self) {
        for EndedCommand {
            ticket,
            data,
            outcome,
        } in self.commands.take_ended()
        {
            let short = outcome.data_in.filter(|&len| len < data.len());
            if short == Some(0) {
                // The kernel takes a read length of 0 as "all of it", so the blocks must not hold
                // stale data of other commands.
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
        }
    }

    /// Publishes the responses and wakes the kernel.
    fn publish_responses(&mut self) -> Result<(), ServeError> {
        if !self.write_cache && self.shared.unit.backend().write_cache() {
            (self.on_write_cache)(true);
            self.write_cache = true;
        }
        let answered = self.ring.publish();
        if answered > 0 {
            add(&self.shared.metrics.interrupts, 1);
            rustix::io::write(&self.uio, &1_u32.to_ne_bytes()).map_err(ServeError::Device)?;
        }
        Ok(())
    }
}

impl Source for DeviceServer {
    fn throttle(&self) -> &Arc<Throttle> {
        self.commands.port().throttle()
    }

    fn begin(&mut self, turn: &mut Turn<'_>) -> io::Result<()> {
        turn.watch(&self.uio, COMMANDS, EventSet::IN)?;
        self.commands.port().watch(turn)
    }

    fn ready(&mut self, event: usize, _: EventSet, _: bool) {
        if event != COMMANDS {
            return self.commands.port_mut().ready(event);
        }
        // The 4 bytes are a count of events, which the worker does not need.
        match rustix::io::read(&self.uio, &mut [0; 4]) {
            Ok(4) => add(&self.shared.metrics.doorbells, 1),
            Err(Errno::AGAIN | Errno::INTR) => {}
            outcome => self.fail(&ServeError::Device(outcome.err().unwrap_or(Errno::IO))),
        }
    }

    fn take(&mut self, turn: &mut Turn<'_>) {
        self.commands.feed(turn, self.failed);
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
        let alone = alone && self.commands.len() == 1;
        self.commands.port_mut().kick(alone);
    }

    fn answer(&mut self, turn: &mut Turn<'_>) -> NextStep {
        self.commands.complete(turn);
        self.commands.retry_blocked(turn);
        if let Some(good) = self.commands.take_flushed() {
            self.end_settling(good);
        }
        self.settle();
        self.respond();
        // If the UIO device has failed, the kernel gets no responses.
        let answered = self.publish_responses();
        if let Err(error) = &answered {
            self.fail(error);
        }
        if (self.failed || turn.is_stopping()) && self.commands.len() == 0 {
            NextStep::End
        } else if self.commands.port().has_submitted() || self.commands.has_completions() {
            NextStep::Work
        } else if self.more {
            NextStep::Take
        } else if self.commands.is_starved() {
            NextStep::WaitUntil(Instant::now() + MemoryClient::RETRY)
        } else {
            NextStep::Wait
        }
    }

    fn has_in_flight(&self) -> bool {
        self.commands.len() > 0
    }

    fn bytes_in_flight(&self) -> usize {
        self.commands.bytes()
    }

    fn give_up(&mut self, reason: &str) {
        self.fail(&ServeError::GivenUp(reason.to_owned()));
    }
}

impl DeviceServer {
    /// Submits a flush once the cache is off: until it completes, earlier writes may be volatile.
    fn settle(&mut self) {
        let off = self.write_cache && !self.shared.unit.backend().write_cache();
        if off && !self.settling && !self.commands.is_volatile() {
            self.settling = true;
            self.commands.submit_flush();
        }
    }

    /// That flush has completed: the disk has no volatile write cache any more, unless the cache is
    /// on again.
    fn end_settling(&mut self, good: bool) {
        // No further flush is tried after an error: its success would say nothing about earlier
        // writes.
        self.settling = !good;
        let off = !self.shared.unit.backend().write_cache();
        if good && off && !self.commands.is_unsettled() && !self.commands.is_volatile() {
            (self.on_write_cache)(false);
            self.write_cache = false;
        }
    }
}
