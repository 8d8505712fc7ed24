//! The one loop of all threads that serve requests: virtio queues, NBD clients and TCMU rings are
//! its sources. What is said of disks here holds for network devices too, but for the medium.
//!
//! ```text
//!   descriptor ─┐          ┌─ a round: take from each source in turn ─▶ kick each ─▶ answer each ─┐
//!   message ────┼─▶ look ──┤                                                                      ├─▶ sleep, or look again
//!   time ───────┘          └───────── a source has more, and LOOK_EVERY has not passed ◀──────────┘
//! ```
//! With a thread per source, a commit group would wake a thread for every source that it completes
//! requests of. One thread serves a dozen sources better: it submits the requests of all of them
//! before it answers any, and answers together what one sync has made durable.
//!
//! Sources of one disk share its turn, and disks take turns by deficit round robin (Shreedhar and
//! Varghese 1996): a turn adds [`QUANTUM`] bytes to the disk's budget, or less for a disk with a
//! smaller weight than another one that has work. What the disk moves is taken off, and so is its
//! time, at [`US_COST`]. A disk without budget waits for its next turn. So between two turns of a
//! disk every other disk moves at most a quantum and one request, and a round of all disks ends
//! soon after a quantum.
//!
//! What a disk has in flight fills the queue of the medium, and other disks wait behind it. So
//! while another disk of the process has work, a disk takes no more than [`WINDOW`] bytes into
//! flight, a long read in [parts](Turn::part), and its turns are [smaller](QUANTUM_BESIDE).

mod activity;
mod pool;
mod port;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use slab::Slab;

pub(crate) use pool::{
    DedicatedThread, ReactorPool, ReactorThread, Reservation, SourceControl, SourceHandle,
};
pub(crate) use port::DiskPort;

use crate::event_loop::{Event, EventLoop, EventSet};
use crate::throttle::Throttle;

/// How long the thread works before it looks at its descriptors again.
const LOOK_EVERY: Duration = Duration::from_micros(200);
/// Bytes that a disk may move in a turn.
pub(crate) const QUANTUM: i64 = 1 << 20;
/// The same beside other disks that have work.
const QUANTUM_BESIDE: i64 = QUANTUM / 4;
/// Bytes that a disk may have in flight in a thread beside other disks that have work. One request
/// may exceed it. Local media move as much in a tenth of a millisecond; a sync that waits behind 1
/// MiB takes many times as long.
pub(crate) const WINDOW: i64 = 128 << 10;
/// How long a disk counts as having work after a turn.
const LATELY: Duration = Duration::from_millis(100);
/// What a request costs in bytes, beside those that it moves.
const REQUEST_COST: i64 = 4096;
/// What a request that moves bytes counts for at least, of those in flight.
pub(crate) const LEAST_IN_FLIGHT: usize = 4096;
/// What a microsecond costs in bytes: about as many as are copied in it.
const US_COST: i64 = 1 << 10;
/// The most that one call of a source costs because of its time: the thread may not have run all
/// that time.
const MAX_TIME_COST: i64 = QUANTUM;
/// When a disk signals one source, the thread also checks up to this many other sources with
/// requests in flight, because one sync completes requests of many sources.
const MAX_ALSO_CHECKED: usize = 32;

/// The event of a source's [`DiskPort`]: requests have completed.
pub(crate) const COMPLETIONS: usize = 0;
/// The event of a source's [`DiskPort`]: requests that the disk's limits held may start.
pub(crate) const RELEASE: usize = 1;
/// The first event number that a source may use for itself.
pub(crate) const FIRST_OWN_EVENT: usize = 2;

/// Something that has requests for a disk. Each call does as much as it can, or as its turn allows,
/// without waiting.
pub(crate) trait Source: Send {
    /// The disk's limits and weight. Sources with the same take turns as one.
    fn throttle(&self) -> &Arc<Throttle>;

    /// Whether it moves bytes of a disk, which shares a medium with other disks.
    fn is_disk(&self) -> bool {
        true
    }

    /// Watches the source's descriptors. Called once, before all others.
    ///
    /// # Errors
    /// If one cannot be watched. The source is then [given up](Self::give_up).
    fn begin(&mut self, turn: &mut Turn<'_>) -> io::Result<()>;

    /// A watched descriptor is ready; the source gets a turn soon.
    fn ready(&mut self, event: usize, what: EventSet, stopping: bool);

    /// Takes requests and submits them to the disk. A stopping source takes none.
    fn take(&mut self, turn: &mut Turn<'_>);

    /// Starts what was submitted. `alone`: no other source of the thread has anything to do or in
    /// flight.
    fn kick(&mut self, alone: bool);

    /// Answers requests that have completed.
    fn answer(&mut self, turn: &mut Turn<'_>) -> NextStep;

    /// Whether requests are in flight.
    fn has_in_flight(&self) -> bool;

    /// Bytes that these requests move, [`LEAST_IN_FLIGHT`] at least for each that moves any.
    fn bytes_in_flight(&self) -> usize;

    /// A call of the source has panicked, because of `reason`. Returns whether that costs only a
    /// part of the source, which has been given up, and the rest goes on.
    fn survive(&mut self, _reason: &str) -> bool {
        false
    }

    /// Serves no more, because of `reason`: a panic, or an error of the system.
    fn give_up(&mut self, reason: &str);
}

/// What a source does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NextStep {
    /// It has more to do now.
    Work,
    /// It has more requests to take, and nothing else to do.
    Take,
    /// It waits for its descriptors.
    Wait,
    /// It waits for its descriptors, at most until then.
    WaitUntil(Instant),
    /// Nothing any more: it is dropped.
    End,
}

/// A source in its turn.
pub(crate) struct Turn<'a> {
    /// Bytes that the source may still move.
    left: i64,
    /// Bytes that the disk may still take into flight.
    room: i64,
    /// Whether another disk has work.
    beside: bool,
    key: usize,
    control: &'a SourceControl,
    events: &'a mut EventLoop<SourceEvent, Message>,
}

impl Turn<'_> {
    /// Counts a request, and the `bytes` that are moved for it now.
    pub(crate) fn charge_request(&mut self, bytes: usize) {
        self.left -= REQUEST_COST;
        self.charge(bytes);
    }

    /// Counts moved bytes.
    pub(crate) fn charge(&mut self, bytes: usize) {
        self.left -= bytes as i64;
    }

    /// Counts the `bytes` that a request moves in flight.
    pub(crate) fn take_room(&mut self, bytes: usize) {
        if bytes > 0 {
            self.room -= bytes.max(LEAST_IN_FLIGHT) as i64;
        }
    }

    /// Whether the turn is over: what is left to do waits for the next one. It may be over from the
    /// start.
    pub(crate) fn is_over(&self) -> bool {
        self.left <= 0 || self.room <= 0
    }

    /// Bytes that the source may still move; 0: the turn [is over](Self::is_over).
    pub(crate) fn left(&self) -> usize {
        self.left.max(0) as usize
    }

    /// The most bytes of a read that may be in flight at once: a longer one is carried out in
    /// parts, one after the other.
    pub(crate) fn part(&self) -> usize {
        if self.beside {
            WINDOW as usize
        } else {
            usize::MAX
        }
    }

    /// Whether the source's owner has asked it to stop. Requests taken already are completed.
    pub(crate) fn is_stopping(&self) -> bool {
        self.control.is_stopping()
    }

    /// Watches a descriptor: the source's [`ready`](Source::ready) gets `event`. The reactor stops
    /// watching what is left when the source ends.
    pub(crate) fn watch(&mut self, fd: impl AsFd, event: usize, what: EventSet) -> io::Result<()> {
        let source = self.key;
        self.events.watch(fd, SourceEvent { source, event }, what)
    }

    /// See [`EventLoop::rewatch`].
    pub(crate) fn rewatch(&mut self, fd: impl AsFd, what: EventSet) -> io::Result<()> {
        self.events.rewatch(fd, what)
    }

    /// See [`EventLoop::unwatch`]; a descriptor that is not watched is fine.
    pub(crate) fn unwatch(&mut self, fd: impl AsFd) {
        let _ = self.events.unwatch(fd);
    }
}

/// A descriptor of a source.
#[derive(Clone, Copy, Debug)]
struct SourceEvent {
    source: usize,
    event: usize,
}

/// A message to the thread.
enum Message {
    Serve(SourceSlot),
    /// Something that sources look at in their turns has changed: each gets one.
    Wake,
}

/// A source that a thread serves, or that is on its way to a thread.
struct SourceSlot {
    /// `None` only while the slot is being dropped.
    source: Option<Box<dyn Source>>,
    control: Arc<SourceControl>,
    /// Key of its disk.
    disk: usize,
    /// Whether it is in its disk's list of sources with work.
    busy: bool,
    /// When it has work, if nothing happens before.
    deadline: Option<Instant>,
    _reservation: Reservation,
}

impl SourceSlot {
    fn has_in_flight(&self) -> bool {
        let source = self.source.as_ref();
        source.is_some_and(|source| source.has_in_flight())
    }
}

impl Drop for SourceSlot {
    /// Reports that the source is gone, whatever the reason: otherwise its owner would wait
    /// forever. The source is dropped before the report.
    fn drop(&mut self) {
        if let Some(mut source) = self.source.take()
            && std::thread::panicking()
        {
            source.give_up("its worker has panicked");
        }
        self.control.report_gone();
    }
}

/// The sources of one disk.
struct DiskTurns {
    throttle: Arc<Throttle>,
    is_disk: bool,
    sources: usize,
    /// What the disk may move now, in bytes; negative: what it has moved too much.
    budget: i64,
    /// Keys of its sources with work.
    busy: VecDeque<usize>,
    /// Whether the disk waits for its turn.
    waiting: bool,
    /// Keys of its sources with requests to take, for which it has too much in flight.
    blocked: Vec<usize>,
    /// Whether another disk has had work lately.
    beside: bool,
}

/// A thread that serves sources.
struct Reactor {
    events: EventLoop<SourceEvent, Message>,
    /// Events still to handle, in reverse order. After a panic in one source the thread handles the
    /// rest of them.
    pending_events: Vec<Event<SourceEvent, Message>>,
    inbox: Arc<pool::Inbox>,
    slots: Slab<SourceSlot>,
    disks: Slab<DiskTurns>,
    /// Keys of the disks with work, in the order of their turns.
    waiting: VecDeque<usize>,
    /// Keys of the sources that this round serves, and whether there was no room for their
    /// requests. Empty between rounds, and kept for its allocation.
    in_round: Vec<(usize, bool)>,
    /// Key of the source being served, which a panic is blamed on.
    current: usize,
    /// When the last call of a source ended.
    clock: Instant,
    /// [`US_COST`] and [`LATELY`], unless a test says otherwise.
    us_cost: i64,
    lately: Duration,
}

impl Reactor {
    /// A thread that receives its sources through `inbox`, which sends to `events`.
    fn new(events: EventLoop<SourceEvent, Message>, inbox: Arc<pool::Inbox>) -> Self {
        Self {
            events,
            pending_events: Vec::new(),
            inbox,
            slots: Slab::new(),
            disks: Slab::new(),
            waiting: VecDeque::new(),
            in_round: Vec::new(),
            current: 0,
            clock: Instant::now(),
            us_cost: US_COST,
            lately: LATELY,
        }
    }

    /// Serves sources until none is left. A panic costs only the source in which it happens, or a
    /// part of it.
    fn serve(&mut self) {
        while let Err(reason) = catch_unwind(AssertUnwindSafe(|| self.run())) {
            self.remove_panicked(&*reason);
        }
    }

    fn run(&mut self) {
        while !(self.slots.is_empty() && self.inbox.close()) {
            if let Err(error) = self.look() {
                let reason = format!("its worker cannot wait: {error}");
                for (_, slot) in &mut self.slots {
                    slot.source.iter_mut().for_each(|s| s.give_up(&reason));
                }
                self.slots.clear();
                return;
            }
            self.clock = Instant::now();
            let look_at = self.clock + LOOK_EVERY;
            while !self.waiting.is_empty() && self.clock < look_at {
                self.serve_round();
            }
        }
    }

    /// Waits until there is work, and lists the sources that have it.
    fn look(&mut self) -> io::Result<()> {
        if self.pending_events.is_empty() {
            let timeout = self.timeout();
            self.events.wait(timeout, &mut self.pending_events)?;
            self.pending_events.reverse();
        }
        let (mut completions, mut wakes) = (false, false);
        while let Some(event) = self.pending_events.pop() {
            match event {
                Event::Ready(SourceEvent { source, event }, what) => {
                    completions |= event == COMPLETIONS;
                    self.current = source;
                    if let Some(slot) = self.slots.get_mut(source)
                        && let Some(source) = &mut slot.source
                    {
                        source.ready(event, what, slot.control.is_stopping());
                    }
                    self.mark_busy(source);
                }
                Event::Message(Message::Serve(slot)) => self.add(slot),
                Event::Message(Message::Wake) => wakes = true,
            }
        }
        if completions || wakes || self.has_deadlines() {
            self.check_all(completions, wakes);
        }
        Ok(())
    }

    fn has_deadlines(&self) -> bool {
        self.slots.iter().any(|(_, slot)| slot.deadline.is_some())
    }

    /// Lists the sources whose deadline has passed, all of them if the thread was woken, and if the
    /// disk has signalled any, some that may have completions.
    fn check_all(&mut self, completions: bool, woken: bool) {
        let now = Instant::now();
        let mut to_check = if completions { MAX_ALSO_CHECKED } else { 0 };
        let mut busy = Vec::new();
        for (key, slot) in &mut self.slots {
            let late = slot.deadline.take_if(|at| *at <= now).is_some();
            let check = to_check > 0 && slot.has_in_flight();
            to_check -= usize::from(check);
            if late || check || woken {
                busy.push(key);
            }
        }
        busy.into_iter().for_each(|key| self.mark_busy(key));
    }

    /// How long the thread may sleep.
    fn timeout(&self) -> Option<Duration> {
        if !self.waiting.is_empty() {
            return Some(Duration::ZERO);
        }
        let deadlines = self.slots.iter().filter_map(|(_, slot)| slot.deadline);
        let deadline = deadlines.min()?;
        Some(deadline.saturating_duration_since(Instant::now()))
    }

    /// Takes a source to serve.
    fn add(&mut self, mut slot: SourceSlot) {
        let Some(source) = &slot.source else {
            return;
        };
        let throttle = source.throttle();
        let same = |(_, disk): &(usize, &DiskTurns)| Arc::ptr_eq(&disk.throttle, throttle);
        let found = self.disks.iter().find(same).map(|(key, _)| key);
        slot.disk = found.unwrap_or_else(|| {
            self.disks.insert(DiskTurns {
                throttle: Arc::clone(throttle),
                is_disk: source.is_disk(),
                sources: 0,
                budget: 0,
                busy: VecDeque::new(),
                waiting: false,
                blocked: Vec::new(),
                beside: false,
            })
        });
        self.disks[slot.disk].sources += 1;
        let key = self.slots.insert(slot);
        if let Some((Err(error), _)) = self.call(key, (0, 0), |source, turn| source.begin(turn))
            && let Some(source) = &mut self.slots[key].source
        {
            source.give_up(&format!("its worker cannot wait for it: {error}"));
        }
        // Something may have happened before the descriptors were watched.
        self.mark_busy(key);
    }

    /// Calls a source, with `left` bytes to move, of which `room` may go into flight. Returns what
    /// the call returned and cost.
    fn call<T>(
        &mut self,
        key: usize,
        (left, room): (i64, i64),
        act: impl FnOnce(&mut dyn Source, &mut Turn<'_>) -> T,
    ) -> Option<(T, i64)> {
        self.current = key;
        let slot = self.slots.get_mut(key)?;
        let mut turn = Turn {
            left,
            room,
            beside: self.disks[slot.disk].beside,
            key,
            control: &slot.control,
            events: &mut self.events,
        };
        let result = act(slot.source.as_deref_mut()?, &mut turn);
        let moved = left - turn.left;
        let before = std::mem::replace(&mut self.clock, Instant::now());
        let spent = self.clock.duration_since(before).as_micros() as i64;
        Some((result, moved.max((spent * self.us_cost).min(MAX_TIME_COST))))
    }

    /// Lists a source as one with work.
    fn mark_busy(&mut self, key: usize) {
        if let Some(slot) = self.slots.get_mut(key)
            && !std::mem::replace(&mut slot.busy, true)
        {
            let disk = &mut self.disks[slot.disk];
            disk.busy.push_back(key);
            if !std::mem::replace(&mut disk.waiting, true) {
                self.waiting.push_back(slot.disk);
            }
        }
    }

    /// Gives disks their turns: takes requests from the sources of all of them before it answers
    /// any.
    fn serve_round(&mut self) {
        let weight = |disk: &DiskTurns| i64::from(disk.throttle.weight());
        let disks = self.waiting.iter().map(|&key| &self.disks[key]);
        let heaviest = disks.map(weight).max().unwrap_or(1);
        let mut taken = 0;
        for _ in 0..self.waiting.len() {
            let Some(key) = self.waiting.pop_front() else {
                break;
            };
            let disk = &mut self.disks[key];
            let address = Arc::as_ptr(&disk.throttle).addr();
            disk.beside = disk.is_disk && activity::note(address, self.clock, self.lately);
            let quantum = if disk.beside { QUANTUM_BESIDE } else { QUANTUM };
            disk.budget += quantum * weight(disk) / heaviest;
            while self.disks[key].budget > 0
                && let Some(source) = self.disks[key].busy.pop_front()
            {
                self.slots[source].busy = false;
                let turn = (self.disks[key].budget, self.room(key));
                self.in_round.push((source, turn.1 <= 0));
                let cost = self.call(source, turn, |source, turn| source.take(turn));
                taken += self.charge(key, cost.map(|((), cost)| cost));
            }
            let disk = &mut self.disks[key];
            disk.waiting = !disk.busy.is_empty();
            if disk.waiting {
                self.waiting.push_back(key);
            } else {
                // A disk saves nothing up.
                disk.budget = disk.budget.min(0);
            }
            if taken >= QUANTUM {
                break;
            }
        }
        self.end_round();
    }

    /// Bytes that a disk may take into flight.
    fn room(&self, disk: usize) -> i64 {
        if !self.disks[disk].beside {
            return i64::MAX;
        }
        let slots = self.slots.iter().filter(|(_, slot)| slot.disk == disk);
        let sources = slots.filter_map(|(_, slot)| slot.source.as_ref());
        let in_flight = sources
            .map(|source| source.bytes_in_flight())
            .sum::<usize>();
        WINDOW - in_flight as i64
    }

    /// Lists the blocked sources of a disk as ones with work, if it has room for their requests.
    fn unblock(&mut self, disk: usize) {
        if !self.disks[disk].blocked.is_empty() && self.room(disk) > 0 {
            let blocked = std::mem::take(&mut self.disks[disk].blocked);
            blocked.into_iter().for_each(|key| self.mark_busy(key));
        }
    }

    /// Takes the cost of a call off a disk's budget.
    fn charge(&mut self, disk: usize, cost: Option<i64>) -> i64 {
        let cost = cost.unwrap_or(0);
        self.disks[disk].budget -= cost;
        cost
    }

    /// Kicks and answers the sources that were taken from.
    fn end_round(&mut self) {
        let round = std::mem::take(&mut self.in_round);
        let in_flight = self.slots.iter().filter(|(_, slot)| slot.has_in_flight());
        let alone = round.len() == 1 && in_flight.take(2).count() <= 1;
        for &(key, _) in &round {
            let disk = self.slots[key].disk;
            let cost = self.call(key, (0, 0), |source, _| source.kick(alone));
            self.charge(disk, cost.map(|((), cost)| cost));
        }
        let mut again = Vec::new();
        for &(key, starved) in &round {
            let disk = self.slots[key].disk;
            let left = self.disks[disk].budget + QUANTUM;
            if left <= 0 {
                // The disk has moved its share: this source answers first in the disk's next turn.
                self.mark_busy(key);
                self.disks[disk].busy.rotate_right(1);
                continue;
            }
            let Some((next, cost)) =
                self.call(key, (left, i64::MAX), |source, turn| source.answer(turn))
            else {
                continue;
            };
            self.charge(disk, Some(cost));
            match next {
                NextStep::Take if self.room(disk) <= 0 => {
                    let blocked = &mut self.disks[disk].blocked;
                    if !blocked.contains(&key) {
                        blocked.push(key);
                    }
                }
                NextStep::Work | NextStep::Take => again.push((!starved, key)),
                NextStep::Wait => self.slots[key].deadline = None,
                NextStep::WaitUntil(at) => self.slots[key].deadline = Some(at),
                NextStep::End => self.remove(key),
            }
            if self.disks.contains(disk) {
                self.unblock(disk);
            }
        }
        // First those that had no room, so that the other sources of their disk don't always take
        // it.
        again.sort_by_key(|&(served, _)| served);
        again.into_iter().for_each(|(_, key)| self.mark_busy(key));
        self.in_round = round;
        self.in_round.clear();
    }

    /// Removes a source that is done or lost.
    fn remove(&mut self, key: usize) {
        let Some(slot) = self.slots.try_remove(key) else {
            return;
        };
        // Before the descriptors are closed: others may have them open too.
        self.events.unwatch_all(|event| event.source == key);
        let disk = &mut self.disks[slot.disk];
        disk.busy.retain(|&busy| busy != key);
        disk.blocked.retain(|&blocked| blocked != key);
        disk.sources -= 1;
        if disk.sources == 0 {
            self.waiting.retain(|&waiting| waiting != slot.disk);
            self.disks.remove(slot.disk);
        }
        drop(slot);
    }

    /// Removes the source that has panicked, unless it survives; the others keep running.
    fn remove_panicked(&mut self, reason: &(dyn Any + Send)) {
        let text = reason.downcast_ref::<&str>().copied();
        let text = text.or_else(|| reason.downcast_ref::<String>().map(String::as_str));
        let reason = format!(
            "its worker has panicked: {}",
            text.unwrap_or("no reason was given")
        );
        let key = self.current;
        let slot = self.slots.get_mut(key);
        let source = slot.and_then(|slot| slot.source.as_mut());
        let survives = source.is_some_and(|source| {
            let survives = source.survive(&reason);
            if !survives {
                source.give_up(&reason);
            }
            survives
        });
        if !survives {
            self.remove(key);
        }
        // The panic may have ended a round. Each source gets a turn, and looks at what it has.
        self.in_round.clear();
        self.waiting.clear();
        for (_, disk) in &mut self.disks {
            disk.busy.clear();
            disk.blocked.clear();
            disk.waiting = false;
        }
        let keys: Vec<usize> = self.slots.iter().map(|(key, _)| key).collect();
        for key in keys {
            self.slots[key].busy = false;
            self.mark_busy(key);
        }
    }
}

impl Drop for Reactor {
    /// Closes the inbox, so that no more sources are handed over.
    fn drop(&mut self) {
        self.inbox.close_for_good();
    }
}
