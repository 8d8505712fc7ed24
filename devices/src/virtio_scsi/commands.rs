//! A request queue: commands for the units of the target.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::request::{Address, GuestData, Layout, PendingCommand, Response, ScsiCommand, parse};
use super::target::{ScsiTarget, TaskFunction, Wakeup};
use super::worker::{Role, ScsiQueue};
use crate::control::GateWatcher;
use crate::latency::add;
use crate::memory::DeviceMemory;
use crate::reactor::Turn;
use crate::scsi::{
    CdbTransfer, EndedCommand, UnitQueue, answer_for_absent_unit, refuse_attribute, transfer_of,
};
use crate::virtio::{NextChain, QueueError, UsedElement};

/// Cap on the bytes in flight; above it, chains stay in the ring. One command may exceed it.
const MAX_BYTES_IN_FLIGHT: usize = 32 << 20;
/// REPORT LUNS.
const REPORT_LUNS: u8 = 0xa0;

/// A function that the queue has seen, and how many chains were taken or waited then: those are
/// the ones that it means.
struct SeenFunction {
    function: Arc<TaskFunction>,
    before: u64,
}

impl SeenFunction {
    fn is_for(&self, command: &PendingCommand) -> bool {
        command.number < self.before && self.function.is_for(command)
    }
}

/// See the module's documentation.
pub(super) struct Commands<M> {
    index: u16,
    layout: Layout,
    target: Arc<ScsiTarget>,
    units: Vec<UnitQueue<PendingCommand, GuestData<M>>>,
    functions: Vec<SeenFunction>,
    /// Number of chains taken.
    taken: u64,
}

impl<M: DeviceMemory> Commands<M> {
    /// Opens a queue of each unit's disk. `index`: of the queue among the target's queues.
    ///
    /// # Errors
    /// If a disk or the system refuses.
    pub(super) fn open(
        target: &Arc<ScsiTarget>,
        index: u16,
        layout: Layout,
        answer_when_written: bool,
        wakeup: &Arc<Wakeup>,
    ) -> io::Result<Self> {
        let counts_as = usize::from(index) - super::FIRST_REQUEST_QUEUE;
        let open = |unit| UnitQueue::open(unit, counts_as, answer_when_written);
        let units = target.units.iter().cloned().map(open);
        let units = units.collect::<Result<_, _>>()?;
        for shared in &target.units {
            let watcher: Arc<dyn GateWatcher> = Arc::<Wakeup>::clone(wakeup);
            shared.gate.watch(Arc::downgrade(&watcher));
            shared.unit.watch_order(Arc::downgrade(&watcher));
        }
        target.links.add_queue(index);
        Ok(Self {
            index,
            layout,
            target: Arc::clone(target),
            units,
            functions: Vec::new(),
            taken: 0,
        })
    }

    /// Carries out a command, or answers it at once.
    fn begin(
        &mut self,
        guest: &M::M,
        command: ScsiCommand<M>,
        since: Instant,
        turn: &mut Turn<'_>,
    ) -> Result<Option<UsedElement>, QueueError> {
        let ScsiCommand {
            mut pending,
            address,
            attribute,
            cdb,
            data_out,
            data_in,
            data,
            valid,
        } = command;
        let (unit, refused) = match address {
            Address::Unit(unit) => (unit, None),
            Address::NoTarget => (0, Some(Response::BadTarget)),
            // Any unit knows the others.
            Address::NoUnit => (0, None),
        };
        // INOUT is not offered.
        let both = data_out > 0 && data_in > 0;
        let ended = self.functions.iter().find(|seen| seen.is_for(&pending));
        let ended = ended.and_then(|seen| {
            seen.function.found.store(true, Ordering::SeqCst);
            seen.function.ends_with
        });
        let CdbTransfer {
            data_in: wants,
            data_out: has,
        } = transfer_of(&self.target.units[unit].unit, &cdb);
        let overrun = wants > data_in as u64 || has > data_out as u64;
        let absent = address == Address::NoUnit && cdb.first() != Some(&REPORT_LUNS);
        // An absent unit answers as much as there is room for, but never into a Data-Out Buffer.
        let overrun = overrun && (!absent || data_out > 0);
        let refused = refused
            .or(ended)
            .or((both || !valid).then_some(Response::Failure))
            .or(overrun.then_some(Response::Overrun));
        let simple = matches!(attribute, 0 | 2);
        if refused.is_none() && !absent && simple {
            // No more than the buffer has.
            pending.data_out = has as usize;
            self.units[unit].begin(pending, &cdb, data, since, turn);
            return Ok(None);
        }
        if let Address::Unit(unit) = address {
            let metrics = &self.target.units[unit].metrics;
            add(&metrics.requests, 1);
            add(&metrics.errors, 1);
        }
        let answer = match refused {
            Some(response) => pending.refuse(guest, response, data_in + data_out),
            None if absent => {
                pending.answer::<M>(guest, &answer_for_absent_unit(&cdb, &data), &data)
            }
            None => pending.answer::<M>(guest, &refuse_attribute(), &data),
        };
        answer.map(Some)
    }

    /// Begins the functions that are new.
    fn see_functions(
        &mut self,
        queue: &ScsiQueue<M>,
        guest: &M::M,
        turn: &mut Turn<'_>,
        broken: bool,
    ) -> Result<(), QueueError> {
        for function in self.target.links.take_functions(self.index) {
            let untaken = if broken {
                0
            } else {
                queue.active.ring.untaken(guest)?
            };
            let seen = SeenFunction {
                function,
                before: self.taken + untaken,
            };
            for unit in &mut self.units {
                let function = &seen.function;
                let is_meant = |command: &mut PendingCommand| {
                    let found = function.is_for(command);
                    function.found.fetch_or(found, Ordering::SeqCst);
                    if found && function.ends_with.is_some() {
                        command.ended_by = command.ended_by.or(function.ends_with);
                    }
                    found && function.ends_with.is_some()
                };
                unit.abort(turn, is_meant);
            }
            self.functions.push(seen);
        }
        Ok(())
    }
}

impl<M> Drop for Commands<M> {
    fn drop(&mut self) {
        for seen in self.functions.drain(..) {
            self.target.links.finish(&seen.function);
        }
        self.target.links.remove_queue(self.index);
    }
}

impl<M: DeviceMemory> Role<M> for Commands<M> {
    fn watch(&self, turn: &mut Turn<'_>) -> io::Result<()> {
        let mut units = self.units.iter();
        units.try_for_each(|unit| unit.port().watch(turn))
    }

    /// The event says not of which unit's port: checking one costs little.
    fn ready(&mut self, event: usize) {
        for unit in &mut self.units {
            unit.port_mut().ready(event);
        }
    }

    fn woken(&mut self) {
        self.units.iter_mut().for_each(UnitQueue::wake_blocked);
    }

    fn takes_chains(&self, queue: &ScsiQueue<M>) -> bool {
        // A unit that is paused, or whose limits hold its commands, does not hold up the others.
        self.in_flight() < usize::from(queue.active.ring.size())
            && self.bytes_in_flight() < MAX_BYTES_IN_FLIGHT
            && !self.is_starved()
    }

    fn take(
        &mut self,
        queue: &mut ScsiQueue<M>,
        guest: &M::M,
        turn: &mut Turn<'_>,
    ) -> Result<bool, QueueError> {
        // One clock reading for all chains taken now.
        let mut since = None;
        loop {
            if turn.is_over() || !self.takes_chains(queue) {
                return Ok(false);
            }
            let NextChain::Chain(chain) = queue.active.ring.available(guest)?.next_if(|_| true)
            else {
                return Ok(true);
            };
            turn.charge_request(0);
            let command = parse(&queue.memory, guest, chain, self.taken, self.layout)?;
            self.taken += 1;
            let since = *since.get_or_insert_with(Instant::now);
            let answered = self.begin(guest, command, since, turn)?;
            queue.batch.extend(answered);
        }
    }

    fn kick(&mut self, alone: bool) {
        let alone = alone && self.in_flight() == 1;
        for unit in &mut self.units {
            unit.port_mut().kick(alone);
        }
    }

    fn answer(
        &mut self,
        queue: &mut ScsiQueue<M>,
        guest: &M::M,
        turn: &mut Turn<'_>,
        broken: bool,
    ) -> Result<(), QueueError> {
        let seen = self.see_functions(queue, guest, turn, broken);
        for unit in &mut self.units {
            unit.complete(turn);
            unit.retry_blocked(turn);
            unit.feed(turn, broken);
            for EndedCommand {
                ticket,
                data,
                outcome,
            } in unit.take_ended()
            {
                if !broken {
                    queue
                        .batch
                        .push(ticket.answer::<M>(guest, &outcome, &data)?);
                }
            }
        }
        seen
    }

    fn published(&mut self, queue: &ScsiQueue<M>) {
        let (broken, taken) = (queue.active.driver.is_broken(), self.taken);
        let units = &self.units;
        let done = self.functions.extract_if(.., |seen| {
            let mut commands = units.iter().flat_map(UnitQueue::tickets);
            let asks = seen.function.ends_with.is_none();
            broken || taken >= seen.before && (asks || !commands.any(|one| seen.is_for(one)))
        });
        done.for_each(|seen| self.target.links.finish(&seen.function));
    }

    fn in_flight(&self) -> usize {
        self.units.iter().map(UnitQueue::len).sum()
    }

    fn bytes_in_flight(&self) -> usize {
        self.units.iter().map(UnitQueue::bytes).sum()
    }

    fn has_work(&self) -> bool {
        let mut units = self.units.iter();
        units.any(|unit| unit.port().has_submitted() || unit.has_completions())
    }

    fn is_starved(&self) -> bool {
        self.units.iter().any(UnitQueue::is_starved)
    }
}
