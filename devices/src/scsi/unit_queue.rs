//! The commands of a logical unit that one worker carries out, whatever transport has brought them.
//!
//! ```text
//!   begin ─▶ waiting ─▶ advance ─▶ DiskPort ─▶ complete ─▶ advance … ─▶ take_ended
//!              │ the gate is closed, the disk's limits hold, or no memory is free
//!              ├─ blocked: another command of the unit has to end first
//!              └─ a look-up of extents: another thread asks the disk, and puts the result in the inbox
//! ```

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use slab::Slab;
use smallvec::SmallVec;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{DataBuffer, LogicalUnit, Task, TaskOutcome, TaskStep};
use crate::backend::{
    Completion, Extent, MemoryBudget, MemoryCharge, MemoryClient, Operation, descriptor,
};
use crate::control::{DeviceControl, Gate};
use crate::event_loop::EventSet;
use crate::latency::{OperationKind, add};
use crate::look_up::{self, LookUpThread};
use crate::metrics::BlockMetrics;
use crate::reactor::{COMPLETIONS, DiskPort, Turn};
use crate::throttle::{Throttle, bytes_of};

/// The token of the worker's own flush.
const OWN_FLUSH: u64 = u64::MAX;
/// Marks the token of a completion that says that a command's writes survive the process.
const WRITTEN: u64 = 1 << 62;

/// Length in bytes of the CDBs that need no allocation.
const USUAL_CDB: usize = 32;

/// A logical unit as workers share it.
#[derive(Clone)]
pub(crate) struct SharedUnit {
    pub(crate) unit: Arc<LogicalUnit>,
    pub(crate) gate: Arc<Gate>,
    pub(crate) metrics: Arc<BlockMetrics>,
    pub(crate) throttle: Arc<Throttle>,
    look_ups: Arc<LookUpThread>,
}

impl SharedUnit {
    /// A unit that is not paused.
    pub(crate) fn new(unit: LogicalUnit, queues: usize) -> Self {
        Self {
            unit: Arc::new(unit),
            gate: Arc::default(),
            metrics: Arc::new(BlockMetrics::of_queues(queues)),
            throttle: Arc::default(),
            look_ups: Arc::default(),
        }
    }
}

impl DeviceControl for SharedUnit {
    /// The next command gets UNIT ATTENTION (CAPACITY DATA HAS CHANGED). Initiators read the new
    /// capacity when they rescan.
    fn capacity_changed(&self) {
        self.unit.capacity_changed();
    }

    /// Only an initiator may turn writeback on (MODE SELECT, caching page): an initiator that has
    /// seen writethrough never flushes.
    fn set_write_cache(&self, on: bool) -> bool {
        let backend = self.unit.backend();
        if !on && backend.capabilities().write_cache_toggle {
            backend.set_write_cache(false);
        }
        backend.write_cache()
    }

    fn pause(&self) -> io::Result<()> {
        self.gate.pause()
    }

    fn resume(&self) {
        self.gate.open();
    }
}

/// A command in flight. `ticket`: what the transport knows it by.
struct UnitCommand<T, D> {
    ticket: T,
    cdb: SmallVec<[u8; USUAL_CDB]>,
    data: D,
    /// `None` until it may begin.
    task: Option<Task>,
    /// How much it uses of the bytes in flight.
    bytes: usize,
    charge: Option<MemoryCharge>,
    since: Instant,
    /// Whether an operation of it was submitted while the disk had a volatile write cache.
    volatile: bool,
    /// Whether it must not be answered before its changes survive the process.
    await_written: bool,
}

/// What the look-up of a command, by its key, has found.
type FoundExtents = (usize, io::Result<Vec<Extent>>);

/// What look-ups of a queue have found.
struct LookUpInbox {
    found: Mutex<Vec<FoundExtents>>,
    /// Readable while something is there.
    event: EventFd,
}

impl LookUpInbox {
    fn put(&self, found: FoundExtents) {
        let mut all = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(found);
        // Fails only if the counter is full, and then the queue is woken anyway.
        let _ = self.event.write(1);
    }

    fn take(&self) -> Vec<FoundExtents> {
        let mut all = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        // Fails only if nothing is there.
        let _ = self.event.read();
        std::mem::take(&mut all)
    }
}

/// A command that has ended.
pub(crate) struct EndedCommand<T, D> {
    pub(crate) ticket: T,
    pub(crate) data: D,
    pub(crate) outcome: TaskOutcome,
}

/// See the module's documentation.
pub(crate) struct UnitQueue<T, D> {
    shared: SharedUnit,
    /// The queue whose latencies they count as.
    index: usize,
    /// Whether a change must survive the end of this process before it is answered.
    answer_when_written: bool,
    port: DiskPort,
    commands: Slab<UnitCommand<T, D>>,
    bytes: usize,
    memory: MemoryClient,
    /// Commands that have not begun, the oldest first.
    waiting: VecDeque<usize>,
    /// Whether the first of them waits for memory.
    starved: bool,
    /// Commands that wait for other commands of the unit, the oldest first.
    blocked: VecDeque<usize>,
    /// Whether a command has ended since the blocked ones were last tried.
    retry_blocked: bool,
    /// Completions not handled yet.
    completions: Vec<Completion>,
    /// `None` until the first look-up.
    inbox: Option<Arc<LookUpInbox>>,
    /// Results of look-ups not handled yet.
    found: VecDeque<FoundExtents>,
    ended: Vec<EndedCommand<T, D>>,
    /// How the worker's own flush has ended.
    flushed: Option<bool>,
    /// Whether a volatile command has ended since that flush was submitted.
    unsettled: bool,
}

impl<T, D: DataBuffer> UnitQueue<T, D> {
    /// Opens a queue of the unit's disk.
    ///
    /// # Errors
    /// If the disk or the system refuses.
    pub(crate) fn open(
        shared: SharedUnit,
        index: usize,
        answer_when_written: bool,
    ) -> io::Result<Self> {
        Ok(Self {
            port: DiskPort::open(&**shared.unit.backend(), &shared.throttle)?,
            shared,
            index,
            answer_when_written,
            commands: Slab::new(),
            bytes: 0,
            memory: MemoryBudget::of_process().client(),
            waiting: VecDeque::new(),
            starved: false,
            blocked: VecDeque::new(),
            retry_blocked: false,
            completions: Vec::new(),
            inbox: None,
            found: VecDeque::new(),
            ended: Vec::new(),
            flushed: None,
            unsettled: false,
        })
    }

    pub(crate) fn port(&self) -> &DiskPort {
        &self.port
    }

    pub(crate) fn port_mut(&mut self) -> &mut DiskPort {
        &mut self.port
    }

    pub(crate) fn len(&self) -> usize {
        self.commands.len()
    }

    /// Bytes that the commands in flight use.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether a command waits for memory.
    pub(crate) fn is_starved(&self) -> bool {
        self.starved
    }

    /// Whether there are completions, or results of look-ups, that no turn was left for.
    pub(crate) fn has_completions(&self) -> bool {
        !self.completions.is_empty() || !self.found.is_empty()
    }

    /// How many commands wait to begin, for whatever reason.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// The tickets of all commands in flight.
    pub(crate) fn tickets(&self) -> impl Iterator<Item = &T> {
        self.commands.iter().map(|(_, command)| &command.ticket)
    }

    /// Takes a command. It begins at once if it may.
    pub(crate) fn begin(
        &mut self,
        ticket: T,
        cdb: &[u8],
        data: D,
        since: Instant,
        turn: &mut Turn<'_>,
    ) {
        add(&self.shared.metrics.requests, 1);
        let key = self.commands.insert(UnitCommand {
            ticket,
            cdb: SmallVec::from_slice(cdb),
            data,
            task: None,
            bytes: 0,
            charge: None,
            since,
            volatile: false,
            await_written: false,
        });
        self.waiting.push_back(key);
        self.feed(turn, false);
    }

    /// Begins the commands that may. Those of a worker that `ends` wait for nothing any more; they
    /// end with BUSY if the owner has paused the disk.
    pub(crate) fn feed(&mut self, turn: &mut Turn<'_>, ends: bool) {
        let ends = ends || turn.is_stopping();
        self.starved = false;
        while let Some(&key) = self.waiting.front()
            && (ends || !self.port.is_holding())
        {
            let SharedUnit { unit, gate, .. } = &self.shared;
            let command = &mut self.commands[key];
            if !gate.enter() {
                if !ends {
                    return;
                }
                self.waiting.pop_front();
                self.end(key, TaskOutcome::BUSY);
                continue;
            }
            // It enters the order of commands only when it begins: nobody may wait for one that
            // waits for something else.
            let (cdb, data) = (&command.cdb, &command.data);
            let plan = || Task::plan(unit, cdb, data);
            let bytes = command.task.get_or_insert_with(plan).bytes(unit);
            command.charge = self.memory.charge(bytes as u64);
            if command.charge.is_none() && !ends {
                gate.leave();
                self.memory.wait_since(command.since);
                self.starved = true;
                return;
            }
            command.bytes = bytes;
            self.bytes += bytes;
            self.waiting.pop_front();
            self.advance(key, turn);
        }
    }

    /// Submits the next operations of a command, or ends it.
    fn advance(&mut self, key: usize, turn: &mut Turn<'_>) {
        let unit = &self.shared.unit;
        while let Some(command) = self.commands.get_mut(key)
            && let Some(task) = &mut command.task
        {
            match task.next_part(unit, &command.data, turn.part()) {
                TaskStep::Submit(operation) => {
                    // Nobody turns the cache on behind the back of a command that has seen it off.
                    command.volatile |= unit.backend().write_cache();
                    command.await_written |= self.answer_when_written
                        && !matches!(operation, Operation::Read { .. } | Operation::Flush);
                    let bytes = bytes_of(&operation);
                    turn.charge(bytes as usize);
                    turn.take_room(bytes as usize);
                    let counted = match &operation {
                        Operation::Read { .. } => task.counted_read(unit),
                        _ => Some(bytes),
                    };
                    let token = key as u64;
                    if let Some(counted) = counted {
                        self.shared.metrics.count(&operation);
                        self.port.submit_first(token, operation, counted);
                    } else {
                        self.port.submit_unlimited(token, operation);
                    }
                }
                TaskStep::LookUp {
                    sector,
                    sectors,
                    most,
                } => return self.look_up(key, (sector, sectors, most), turn),
                TaskStep::InFlight => return,
                TaskStep::Blocked => return self.blocked.push_back(key),
                TaskStep::Done => {
                    let wait = std::mem::take(&mut command.await_written);
                    if wait && !self.port.notify_written(key as u64 | WRITTEN) {
                        return;
                    }
                    return self.answer(key);
                }
            }
        }
    }

    /// Has another thread look extents up: first sector, number of sectors, and most extents.
    fn look_up(
        &mut self,
        key: usize,
        (sector, sectors, most): (u64, u64, usize),
        turn: &mut Turn<'_>,
    ) {
        let inbox = match self.open_inbox(turn) {
            Ok(inbox) => inbox,
            Err(error) => return self.found.push_back((key, Err(error))),
        };
        let SharedUnit { unit, look_ups, .. } = &self.shared;
        look_ups.ask(
            unit.backend(),
            move |backend| look_up::extents(backend, sector, sectors, most),
            move |found| inbox.put((key, found)),
        );
    }

    fn open_inbox(&mut self, turn: &mut Turn<'_>) -> io::Result<Arc<LookUpInbox>> {
        if let Some(inbox) = &self.inbox {
            return Ok(Arc::clone(inbox));
        }
        let inbox = Arc::new(LookUpInbox {
            found: Mutex::default(),
            event: EventFd::new(EFD_NONBLOCK)?,
        });
        turn.watch(descriptor(&inbox.event), COMPLETIONS, EventSet::IN)?;
        Ok(Arc::clone(self.inbox.insert(inbox)))
    }

    fn answer(&mut self, key: usize) {
        let task = self.commands[key].task.take();
        let Some(task) = task else { return };
        let command = &self.commands[key];
        self.unsettled |= command.volatile;
        self.bytes -= command.bytes;
        let metrics = &self.shared.metrics;
        let kind = task.kind();
        if let Some(kind) = kind {
            let time = command.since.elapsed();
            metrics.latencies.count(self.index, kind, time);
        }
        let outcome = task.outcome();
        match kind {
            _ if outcome.sense.is_some() => {}
            Some(OperationKind::Read) => {
                add(&metrics.bytes_read, outcome.data_in.unwrap_or(0) as u64);
            }
            Some(OperationKind::Write) => add(&metrics.bytes_written, command.data.len() as u64),
            _ => {}
        }
        self.end(key, outcome);
        self.shared.gate.leave();
        self.retry_blocked = true;
    }

    fn end(&mut self, key: usize, outcome: TaskOutcome) {
        if outcome.sense.is_some() {
            add(&self.shared.metrics.errors, 1);
        }
        let UnitCommand { ticket, data, .. } = self.commands.remove(key);
        self.ended.push(EndedCommand {
            ticket,
            data,
            outcome,
        });
    }

    /// The commands that have ended since the last call.
    pub(crate) fn take_ended(&mut self) -> Vec<EndedCommand<T, D>> {
        std::mem::take(&mut self.ended)
    }

    /// A command of another worker has ended: blocked ones may go on.
    pub(crate) fn wake_blocked(&mut self) {
        self.retry_blocked = true;
    }

    /// Retries the commands that waited for one that has ended.
    pub(crate) fn retry_blocked(&mut self, turn: &mut Turn<'_>) {
        while std::mem::take(&mut self.retry_blocked) && !self.blocked.is_empty() {
            for key in std::mem::take(&mut self.blocked) {
                self.advance(key, turn);
            }
        }
    }

    /// Ends the commands for whose tickets `is_meant` is true, with TASK ABORTED. Operations in
    /// flight complete first.
    pub(crate) fn abort(&mut self, turn: &mut Turn<'_>, mut is_meant: impl FnMut(&mut T) -> bool) {
        let commands = self.commands.iter_mut();
        let meant = commands.filter_map(|(key, command)| {
            let meant = is_meant(&mut command.ticket);
            meant.then(|| {
                command.task.iter_mut().for_each(Task::abort);
                key
            })
        });
        for key in meant.collect::<Vec<_>>() {
            if self.waiting.contains(&key) {
                self.waiting.retain(|waiting| *waiting != key);
                self.end(key, TaskOutcome::ABORTED);
            } else if self.blocked.contains(&key) {
                self.blocked.retain(|blocked| *blocked != key);
                self.advance(key, turn);
            }
        }
    }

    /// Advances commands whose operations or look-ups have completed, until the turn is over.
    pub(crate) fn complete(&mut self, turn: &mut Turn<'_>) {
        self.complete_look_ups(turn);
        let mut completions = std::mem::take(&mut self.completions);
        self.port.completions(&mut completions);
        let mut handled = 0;
        for Completion { token, result } in &mut completions {
            if turn.is_over() {
                break;
            }
            handled += 1;
            let result = std::mem::replace(result, Ok(None));
            if *token == OWN_FLUSH {
                self.flushed = Some(result.is_ok());
                continue;
            }
            let key = (*token & !WRITTEN) as usize;
            let command = self.commands.get_mut(key);
            let Some((data, task)) =
                command.and_then(|command| Some((&command.data, command.task.as_mut()?)))
            else {
                debug_assert!(false, "completion of unknown token {token}");
                continue;
            };
            if let Ok(Some(read)) = &result {
                turn.charge(read.len());
            }
            if *token & WRITTEN == 0 || result.is_err() {
                task.complete(&self.shared.unit, data, result);
            }
            self.advance(key, turn);
        }
        completions.drain(..handled);
        self.completions = completions;
    }

    fn complete_look_ups(&mut self, turn: &mut Turn<'_>) {
        if let Some(inbox) = &self.inbox {
            self.found.extend(inbox.take());
        }
        while !turn.is_over()
            && let Some((key, found)) = self.found.pop_front()
        {
            if let Some(command) = self.commands.get_mut(key)
                && let Some(task) = &mut command.task
            {
                turn.charge_request(command.bytes);
                task.complete_look_up(&self.shared.unit, &command.data, found);
            }
            self.advance(key, turn);
        }
    }

    /// Submits a flush of the worker's own.
    pub(crate) fn submit_flush(&mut self) {
        self.unsettled = false;
        self.port.submit_unlimited(OWN_FLUSH, Operation::Flush);
    }

    /// Whether that flush has succeeded, once it has ended.
    pub(crate) fn take_flushed(&mut self) -> Option<bool> {
        self.flushed.take()
    }

    /// Whether a volatile command has ended since that flush was submitted: it may not cover it.
    pub(crate) fn is_unsettled(&self) -> bool {
        self.unsettled
    }

    /// Whether a command in flight was submitted while the write cache was volatile.
    pub(crate) fn is_volatile(&self) -> bool {
        self.commands.iter().any(|(_, command)| command.volatile)
    }
}

impl<T, D> Drop for UnitQueue<T, D> {
    /// Commands still in flight were abandoned after an error. They leave the gate without a
    /// response.
    fn drop(&mut self) {
        for key in &self.waiting {
            self.commands.remove(*key);
        }
        for _ in self.commands.drain() {
            self.shared.gate.leave();
        }
    }
}
