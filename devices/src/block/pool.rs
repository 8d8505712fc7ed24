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
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use rustix::thread::{CpuSet, sched_setaffinity};
use slab::Slab;
use walvisor_storage::short_slice;

use crate::event_loop::{Event, EventLoop, EventSet, Remote};

/// How often queues are served before descriptors are looked at again.
const ROUNDS: usize = 64;
/// When the backend has something to say to one queue, so many others with requests in flight are asked too: one sync
/// serves many.
const ASKED: usize = 32;

/// A descriptor that a thread watches, with its queue's key.
#[derive(Clone, Copy)]
enum Source {
    Doorbell(usize),
    Backend(usize),
}

/// What a thread is sent.
enum Mail {
    /// A queue to serve.
    Newcomer(Seat),
    /// A queue is to stop: its control says so.
    Stop,
}

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
        shared.retain(|inbox| !inbox.closed());
        let least = shared
            .iter()
            .min_by_key(|inbox| inbox.load.load(Ordering::SeqCst));
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
        self.inbox.remote.send(Mail::Stop);
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
    remote: Remote<Source, Mail>,
    /// Queues that it has, those on their way to it included, or [`CLOSED`].
    load: AtomicUsize,
}

/// The load of a thread that ends, and takes no queue any more.
const CLOSED: usize = usize::MAX;

impl Inbox {
    fn closed(&self) -> bool {
        self.load.load(Ordering::SeqCst) == CLOSED
    }

    /// Hands over a queue; it comes back if the thread has ended.
    fn put(&self, seat: Seat) -> Option<Seat> {
        let more = |load| (load != CLOSED).then(|| load + 1);
        let (set, fetched) = (Ordering::SeqCst, Ordering::SeqCst);
        if self.load.fetch_update(set, fetched, more).is_err() {
            return Some(seat);
        }
        self.remote.send(Mail::Newcomer(seat));
        None
    }

    /// Ends the thread, unless it has a queue or one is on its way.
    fn close(&self) -> bool {
        let (set, read) = (Ordering::SeqCst, Ordering::SeqCst);
        self.load.compare_exchange(0, CLOSED, set, read).is_ok()
    }
}

/// Starts a thread with its first queue.
fn start(seat: Seat, name: &str, cpu: Option<u16>) -> io::Result<Arc<Inbox>> {
    let events = EventLoop::new()?;
    let inbox = Arc::new(Inbox {
        remote: events.remote(),
        load: AtomicUsize::new(0),
    });
    // Before the thread begins: one without a queue ends.
    drop(inbox.put(seat));
    let own = Arc::clone(&inbox);
    thread::Builder::new().name(name.into()).spawn(move || {
        short_slice();
        if let Some(cpu) = cpu {
            pin(cpu);
        }
        let mut worker = Thread {
            events,
            happened: Vec::new(),
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
    Ok(inbox)
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
    events: EventLoop<Source, Mail>,
    /// What was waited for, the last first. If a queue panics, the others hear the rest of it.
    happened: Vec<Event<Source, Mail>>,
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
        while !(self.seats.is_empty() && self.inbox.close()) {
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
        }
    }

    /// Waits for something to do.
    fn wait(&mut self) -> io::Result<()> {
        if self.happened.is_empty() {
            let timeout = (!self.busy.is_empty()).then_some(Duration::ZERO);
            self.events.wait(timeout, &mut self.happened)?;
            self.happened.reverse();
        }
        let (mut backend, mut stops) = (false, false);
        while let Some(event) = self.happened.pop() {
            match event {
                Event::Ready(Source::Doorbell(key), _) => {
                    if let Some(served) = self.queue(key) {
                        served.rung();
                        self.mark(key);
                    }
                }
                Event::Ready(Source::Backend(key), _) => {
                    backend = true;
                    self.mark(key);
                }
                Event::Message(Mail::Newcomer(seat)) => self.welcome(seat),
                Event::Message(Mail::Stop) => stops = true,
            }
        }
        if backend {
            let waits = |seat: &Seat| seat.served.as_ref().is_some_and(|served| served.waits());
            let others = self.seats.iter().filter(|(_, seat)| waits(seat));
            let others: Vec<usize> = others.map(|(key, _)| key).take(ASKED).collect();
            others.into_iter().for_each(|key| self.mark(key));
        }
        if stops {
            self.see_off();
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

    /// Takes a new queue.
    fn welcome(&mut self, seat: Seat) {
        let key = self.seats.insert(seat);
        let Some(served) = &self.seats[key].served else {
            return;
        };
        // Each ring is told once, and need not be taken back: whoever else has the descriptor can take it first.
        let edges = EventSet::IN | EventSet::EDGE_TRIGGERED;
        let doorbell = Source::Doorbell(key);
        let mut watched = self.events.watch(served.doorbell(), doorbell, edges);
        for event in served.backend() {
            let backend = Source::Backend(key);
            watched = watched.and_then(|()| self.events.watch(event, backend, EventSet::IN));
        }
        if let (Err(error), Some(served)) = (watched, self.queue(key)) {
            served.give_up(&format!("its worker cannot wait for it: {error}"));
        }
        // A doorbell may have rung before anybody was there to hear it.
        self.mark(key);
    }

    /// Looks which queues are to stop.
    fn see_off(&mut self) {
        let stopping = |seat: &Seat| seat.control.stopping() && !seat.leaving;
        let leaving = self.seats.iter().filter(|(_, seat)| stopping(seat));
        for key in leaving.map(|(key, _)| key).collect::<Vec<_>>() {
            let seat = &mut self.seats[key];
            seat.leaving = true;
            // From here on only the backend is listened to.
            if let Some(served) = &seat.served
                && let Err(error) = self.events.unwatch(served.doorbell())
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
            // Before they are closed: somebody else has the doorbell too.
            let [event, timer] = served.backend();
            for fd in [served.doorbell(), event, timer] {
                // Not watched any more is as good.
                let _ = self.events.unwatch(fd);
            }
        }
        self.inbox.load.fetch_sub(1, Ordering::SeqCst);
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
        // It may have been said just now.
        self.see_off();
    }
}

impl Drop for Thread {
    /// Nobody hands over a queue any more.
    fn drop(&mut self) {
        self.inbox.load.store(CLOSED, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests;
