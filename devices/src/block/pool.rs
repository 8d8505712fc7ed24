//! Threads that serve queues, each of them any number.
//!
//! ```text
//!   queue ─┐                  ┌─ take from each that rang ─▶ hand in for each ─▶ answer each ─┐
//!   queue ─┼─▶ one event loop ┤                                                              ├─▶ sleep
//!   inbox ─┘                  └──────────────────── there is more ◀──────────────────────────┘
//! ```
//!
//! With a thread a queue a commit group wakes as many threads as it has served queues, and each of them its driver. A
//! processor serves a dozen queues better in one turn: what all of them have goes to the disk before any is answered, and
//! those whom one sync has served are answered together.

use std::any::Any;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::thread::{CpuSet, sched_setaffinity};
use rustix::time::Timespec;
use slab::Slab;
use walvisor_storage::short_slice;

/// Events taken at once.
const EVENTS: usize = 64;
/// How often queues are served before descriptors are looked at again.
const ROUNDS: usize = 64;
/// When the backend has something to say to one queue, so many others with requests in flight are asked too: one sync
/// serves many.
const ASKED: usize = 32;

/// What an event is about: a source in the upper half, a queue's key in the lower.
const INBOX: u64 = 0;
const DOORBELL: u64 = 1 << 32;
const BACKEND: u64 = 2 << 32;
const KEY: u64 = (1 << 32) - 1;

/// Carries out jobs in a thread of its own: what threads inherit from the one that starts them, such as a system call
/// filter, queue workers then have from it and not from a vCPU.
pub trait Starter: Send + Sync {
    /// Runs `job` once, soon. It does not wait for anything that the caller holds. A starter that cannot run it drops it.
    fn run(&self, job: Box<dyn FnOnce() + Send>);
}

/// Threads that serve the queues of any number of devices. They are started as queues are, up to one for two processors,
/// and each ends with its last queue. A queue whose worker is pinned, polls, or waits for its disk has one of its own.
pub struct WorkerPool {
    starter: Option<Arc<dyn Starter>>,
    /// Most shared threads.
    most: usize,
    shared: Mutex<Vec<Arc<Inbox>>>,
}

/// Most threads that serve side by side: one for two processors. The other half is for those who ask.
pub(crate) fn most_threads() -> usize {
    thread::available_parallelism().map_or(1, |cpus| cpus.get().div_ceil(2))
}

impl Default for WorkerPool {
    fn default() -> Self {
        Self {
            starter: None,
            most: most_threads(),
            shared: Mutex::default(),
        }
    }
}

impl WorkerPool {
    /// Threads, and what queues need to be opened, are to come from `starter`. Without one, as
    /// [`default`](Self::default) makes it, they are started by the thread that sets DRIVER_OK or enables the queue.
    pub fn with_starter(starter: Arc<dyn Starter>) -> Self {
        Self {
            starter: Some(starter),
            ..Self::default()
        }
    }

    /// Serves what `open` opens until it is told to stop. `alone`: in a thread of its own.
    pub(super) fn serve(
        self: &Arc<Self>,
        alone: Option<Alone>,
        open: impl FnOnce() -> io::Result<Box<dyn Served>> + Send + 'static,
    ) -> io::Result<Handle> {
        let pool = Arc::clone(self);
        self.opened_by_starter(move || open().and_then(|served| pool.place(alone, served)))
    }

    /// Does `work`, which opens queues, where that is to be done, and waits for it.
    pub(super) fn opened_by_starter<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let Some(starter) = &self.starter else {
            return work();
        };
        let (done, waiting) = mpsc::channel();
        starter.run(Box::new(move || drop(done.send(work()))));
        let gone = || io::Error::other("the thread that starts queue workers is gone");
        waiting.recv().unwrap_or_else(|_| Err(gone()))
    }

    /// Gives a queue to a thread.
    fn place(&self, alone: Option<Alone>, served: Box<dyn Served>) -> io::Result<Handle> {
        let control = served.control();
        let mut seat = Seat {
            served: Some(served),
            control: Arc::clone(&control),
            busy: false,
            leaving: false,
        };
        if let Some(alone) = alone {
            let inbox = start(seat, &alone.name, alone.cpu)?;
            return Ok(Handle { control, inbox });
        }
        // A list is right between any two steps.
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.retain(|inbox| !inbox.lock().closed);
        let least = shared
            .iter()
            .min_by_key(|inbox| inbox.load.load(Ordering::Relaxed));
        if let Some(inbox) = least.filter(|_| shared.len() >= self.most) {
            seat = match inbox.put(seat) {
                None => {
                    let inbox = Arc::clone(inbox);
                    return Ok(Handle { control, inbox });
                }
                // It has ended this moment.
                Some(seat) => seat,
            };
        }
        let inbox = start(seat, "virtio-blk", None)?;
        shared.push(Arc::clone(&inbox));
        Ok(Handle { control, inbox })
    }
}

/// A thread that serves one queue and no other.
pub(super) struct Alone {
    pub(super) name: String,
    /// The processor to run on.
    pub(super) cpu: Option<u16>,
}

/// What a thread of the pool needs of a queue. Each call does as much as can be done without waiting.
pub(super) trait Served: Send {
    fn control(&self) -> Arc<Control>;

    /// What the driver rings.
    fn doorbell(&self) -> BorrowedFd<'_>;

    /// What the backend rings.
    fn backend(&self) -> [BorrowedFd<'_>; 2];

    /// The doorbell has rung.
    fn rung(&mut self);

    /// Takes what the driver has made available.
    fn take(&mut self);

    /// Hands in what was taken.
    fn start(&mut self);

    /// Answers what has ended; `true`: there is more to take.
    fn answer(&mut self) -> bool;

    /// Whether requests are in flight.
    fn waits(&self) -> bool;

    /// Number of chains taken, modulo 2^16.
    fn taken(&self) -> u16;

    /// The queue cannot go on, and its driver is to be told.
    fn give_up(&mut self, reason: &str);
}

/// What a queue and its owner tell each other.
#[derive(Default)]
pub(super) struct Control {
    stop: AtomicBool,
    /// The queue has met an error: requests in flight end, nothing is taken or answered any more.
    broken: AtomicBool,
    /// Once it is drained and gone: the number of chains taken, modulo 2^16.
    ended: Mutex<Option<u16>>,
    over: Condvar,
}

impl Control {
    pub(super) fn stopping(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    pub(super) fn set_broken(&self) {
        self.broken.store(true, Ordering::SeqCst);
    }

    pub(super) fn broken(&self) -> bool {
        self.broken.load(Ordering::SeqCst)
    }

    fn ended(&self) -> MutexGuard<'_, Option<u16>> {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The owner's side of a queue that is served.
pub(super) struct Handle {
    control: Arc<Control>,
    inbox: Arc<Inbox>,
}

impl Handle {
    pub(super) fn control(&self) -> &Control {
        &self.control
    }

    /// Tells the queue to drain, without waiting for it.
    pub(super) fn request_stop(&self) {
        self.control.stop.store(true, Ordering::SeqCst);
        self.inbox.ring();
    }

    /// Whether the queue is drained and gone.
    pub(super) fn finished(&self) -> bool {
        self.control.ended().is_some()
    }

    /// Drains the queue. Returns the number of chains taken, modulo 2^16.
    pub(super) fn stop(&self) -> u16 {
        self.request_stop();
        let ended = self.control.ended();
        let ended = self.control.over.wait_while(ended, |ended| ended.is_none());
        ended
            .unwrap_or_else(PoisonError::into_inner)
            .unwrap_or_default()
    }
}

/// A queue at its thread, or on its way there.
struct Seat {
    /// There until the seat goes.
    served: Option<Box<dyn Served>>,
    control: Arc<Control>,
    /// It is in the list of those that have something to do.
    busy: bool,
    /// It is to stop, and its doorbell is not heard any more.
    leaving: bool,
}

impl Drop for Seat {
    /// Whatever the reason: the owner does not wait for ever, and nothing of the queue is left when he goes on.
    fn drop(&mut self) {
        let taken = self.served.take().map(|mut served| {
            if thread::panicking() {
                served.give_up("its worker has panicked");
            }
            served.taken()
        });
        *self.control.ended() = Some(taken.unwrap_or_default());
        self.control.over.notify_all();
    }
}

/// Where a thread gets its queues from.
struct Inbox {
    state: Mutex<InboxState>,
    event: OwnedFd,
    /// Queues that it has.
    load: AtomicUsize,
}

#[derive(Default)]
struct InboxState {
    newcomers: Vec<Seat>,
    /// The thread has ended.
    closed: bool,
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, InboxState> {
        // A list and a flag are right between any two steps.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands over a queue; it comes back if the thread has ended.
    fn put(&self, seat: Seat) -> Option<Seat> {
        let mut state = self.lock();
        if state.closed {
            return Some(seat);
        }
        self.load.fetch_add(1, Ordering::Relaxed);
        state.newcomers.push(seat);
        drop(state);
        self.ring();
        None
    }

    fn ring(&self) {
        // A full counter is readable all the same.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }
}

/// Starts a thread with its first queue.
fn start(seat: Seat, name: &str, cpu: Option<u16>) -> io::Result<Arc<Inbox>> {
    let inbox = Arc::new(Inbox {
        state: Mutex::default(),
        event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        load: AtomicUsize::new(0),
    });
    let events = epoll::create(CreateFlags::CLOEXEC)?;
    watch(&events, &inbox.event, INBOX)?;
    let own = Arc::clone(&inbox);
    thread::Builder::new().name(name.into()).spawn(move || {
        short_slice();
        if let Some(cpu) = cpu {
            pin(cpu);
        }
        let mut worker = Thread {
            events,
            inbox: own,
            seats: Slab::new(),
            busy: Vec::new(),
            served: Vec::new(),
            current: 0,
        };
        while let Err(reason) = catch_unwind(AssertUnwindSafe(|| worker.run())) {
            worker.fell(&*reason);
        }
    })?;
    // A new thread waits for its first.
    drop(inbox.put(seat));
    Ok(inbox)
}

fn watch(events: &OwnedFd, what: impl AsFd, data: u64) -> io::Result<()> {
    Ok(epoll::add(
        events,
        what,
        EventData::new_u64(data),
        EventFlags::IN,
    )?)
}

/// Keeps the calling thread on one processor. Where the system takes it away again, slower is better than not at all.
fn pin(cpu: u16) {
    let mut set = CpuSet::new();
    set.set(cpu.into());
    if let Err(error) = sched_setaffinity(None, &set) {
        tracing::warn!(%error, "a virtio-blk worker cannot run on CPU {cpu} alone");
    }
}

struct Thread {
    events: OwnedFd,
    inbox: Arc<Inbox>,
    seats: Slab<Seat>,
    /// Those that have something to do.
    busy: Vec<usize>,
    /// Those that are served this turn; empty between turns, kept for its memory.
    served: Vec<usize>,
    /// Whose turn it is: the one to blame for a panic.
    current: usize,
}

impl Thread {
    /// Serves queues until there is none.
    fn run(&mut self) {
        loop {
            if let Err(error) = self.wait() {
                let reason = format!("its worker cannot wait: {error}");
                for (_, seat) in &mut self.seats {
                    seat.served.iter_mut().for_each(|s| s.give_up(&reason));
                }
                self.seats.clear();
                return;
            }
            for _ in 0..ROUNDS {
                if self.busy.is_empty() {
                    break;
                }
                self.turn();
            }
            if self.seats.is_empty() {
                let mut state = self.inbox.lock();
                state.closed = state.newcomers.is_empty();
                if state.closed {
                    return;
                }
            }
        }
    }

    /// Waits for something to do.
    fn wait(&mut self) -> io::Result<()> {
        let mut list = [const {
            epoll::Event {
                flags: EventFlags::empty(),
                data: EventData::new_u64(0),
            }
        }; EVENTS];
        let timeout = (!self.busy.is_empty()).then(Timespec::default);
        let count = match epoll::wait(&self.events, &mut list[..], timeout.as_ref()) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            Err(error) => return Err(error.into()),
        };
        let (mut newcomers, mut backend) = (false, false);
        for event in &list[..count] {
            let data = event.data.u64();
            let key = (data & KEY) as usize;
            match data & !KEY {
                INBOX => newcomers = true,
                DOORBELL => {
                    if let Some(served) = self.queue(key) {
                        served.rung();
                        self.mark(key);
                    }
                }
                _ => {
                    backend = true;
                    self.mark(key);
                }
            }
        }
        if backend {
            let waits = |seat: &Seat| seat.served.as_ref().is_some_and(|served| served.waits());
            let others = self.seats.iter().filter(|(_, seat)| waits(seat));
            let others: Vec<usize> = others.map(|(key, _)| key).take(ASKED).collect();
            others.into_iter().for_each(|key| self.mark(key));
        }
        // Last: no event in the list is about them, whatever key they get.
        if newcomers {
            self.welcome();
        }
        Ok(())
    }

    fn queue(&mut self, key: usize) -> Option<&mut Box<dyn Served>> {
        self.current = key;
        self.seats.get_mut(key)?.served.as_mut()
    }

    /// The queue has something to do.
    fn mark(&mut self, key: usize) {
        if let Some(seat) = self.seats.get_mut(key)
            && !std::mem::replace(&mut seat.busy, true)
        {
            self.busy.push(key);
        }
    }

    /// Takes new queues, and looks which are to stop.
    fn welcome(&mut self) {
        // Cleared first: who comes from here on rings again.
        let _ = rustix::io::read(&self.inbox.event, &mut [0; 8]);
        let newcomers = std::mem::take(&mut self.inbox.lock().newcomers);
        for seat in newcomers {
            let key = self.seats.insert(seat);
            let Some(served) = &self.seats[key].served else {
                continue;
            };
            // Each ring is told once, and need not be taken back: whoever else has the descriptor can take it first.
            let data = EventData::new_u64(DOORBELL | key as u64);
            let edges = EventFlags::IN | EventFlags::ET;
            let mut watched =
                epoll::add(&self.events, served.doorbell(), data, edges).map_err(Into::into);
            for event in served.backend() {
                watched = watched.and(watch(&self.events, event, BACKEND | key as u64));
            }
            if let (Err(error), Some(served)) = (watched, self.queue(key)) {
                served.give_up(&format!("its worker cannot wait for it: {error}"));
            }
            // A doorbell may have rung before anybody was there to hear it.
            self.mark(key);
        }
        let stopping = |seat: &Seat| seat.control.stopping() && !seat.leaving;
        let leaving = self.seats.iter().filter(|(_, seat)| stopping(seat));
        for key in leaving.map(|(key, _)| key).collect::<Vec<_>>() {
            let seat = &mut self.seats[key];
            seat.leaving = true;
            // From here on only the backend is listened to.
            if let Some(served) = &seat.served
                && let Err(error) = epoll::delete(&self.events, served.doorbell())
            {
                tracing::debug!("a queue's doorbell was not watched: {error}");
            }
            self.mark(key);
        }
    }

    /// Serves those that have something to do: all of them take before any is answered.
    fn turn(&mut self) {
        std::mem::swap(&mut self.busy, &mut self.served);
        for at in 0..self.served.len() {
            if let Some(served) = self.queue(self.served[at]) {
                served.take();
            }
        }
        for at in 0..self.served.len() {
            if let Some(served) = self.queue(self.served[at]) {
                served.start();
            }
        }
        for at in 0..self.served.len() {
            let key = self.served[at];
            let Some(served) = self.queue(key) else {
                continue;
            };
            let (more, waits) = (served.answer(), served.waits());
            let seat = &mut self.seats[key];
            seat.busy = false;
            if seat.leaving && !waits {
                self.leave(key);
            } else if more {
                self.mark(key);
            }
        }
        self.served.clear();
    }

    /// The queue is drained, or lost.
    fn leave(&mut self, key: usize) {
        let Some(seat) = self.seats.try_remove(key) else {
            return;
        };
        if let Some(served) = &seat.served {
            // A doorbell lives on. A waiter on its way elsewhere may keep the others open for a moment.
            let [event, timer] = served.backend();
            for fd in [served.doorbell(), event, timer] {
                // Not watched any more is as good.
                let _ = epoll::delete(&self.events, fd);
            }
        }
        self.inbox.load.fetch_sub(1, Ordering::Relaxed);
        drop(seat);
    }

    /// The queue whose turn it was has panicked: it is lost, and the others go on.
    fn fell(&mut self, reason: &(dyn Any + Send)) {
        let text = reason.downcast_ref::<&str>().copied();
        let text = text.or_else(|| reason.downcast_ref::<String>().map(String::as_str));
        let key = self.current;
        if let Some(served) = self.queue(key) {
            served.give_up(&format!(
                "its worker has panicked: {}",
                text.unwrap_or("no reason was given")
            ));
        }
        self.leave(key);
        self.busy.clear();
        self.served.clear();
        let keys: Vec<usize> = self.seats.iter().map(|(key, _)| key).collect();
        for key in keys {
            self.seats[key].busy = false;
            self.mark(key);
        }
    }
}

impl Drop for Thread {
    /// Nobody hands over a queue any more.
    fn drop(&mut self) {
        let mut state = self.inbox.lock();
        state.closed = true;
        state.newcomers.clear();
    }
}

#[cfg(test)]
mod tests;
