//! Threads that serve queues; each thread serves any number of queues.
//!
//! ```text
//!   queue ─┐                  ┌─ take from each that rang ─▶ hand in for each ─▶ answer each ─┐
//!   queue ─┼─▶ one event loop ┤                                                              ├─▶ sleep
//!   inbox ─┘                  └──────────────────── there is more ◀──────────────────────────┘
//! ```
//!
//! With one thread per queue, a commit group wakes as many threads as it has served queues, and each thread wakes its
//! driver. One thread serves a dozen queues better in one turn: it hands in the requests of all of them before it
//! answers any, and requests that one sync has made durable are answered together.

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
use walvisor_block::short_slice;

use crate::event_loop::{Event, EventLoop, EventSet, Remote};

/// Turns before the thread looks at its descriptors again.
const ROUNDS: usize = 64;
/// When the backend signals one queue, the thread also checks up to this many other queues with requests in flight: one
/// sync serves many.
const ASKED: usize = 32;

/// A descriptor that a thread watches, with its queue's key.
#[derive(Clone, Copy)]
enum Source {
    Doorbell(usize),
    Backend(usize),
    Timer(usize),
}

/// A message to a thread.
enum Mail {
    /// A queue to serve.
    Newcomer(Seat),
    /// A queue is to stop: the `stop` flag of its control is set.
    Stop,
}

/// Runs jobs in a thread of its own. Queue workers then inherit what threads inherit, such as a system call filter,
/// from that thread and not from a vCPU.
pub trait Starter: Send + Sync {
    /// Runs `job` once, soon, without waiting for anything that the caller holds. A starter that cannot run `job`
    /// drops it.
    fn run(&self, job: Box<dyn FnOnce() + Send>);
}

/// Threads that serve the queues of any number of devices. The pool starts them as queues start, up to one for two
/// processors, and each ends with its last queue. A queue whose worker is pinned, polls, or blocks on reads of its disk
/// has a thread of its own.
pub struct WorkerPool {
    starter: Option<Arc<dyn Starter>>,
    /// The most shared threads.
    most: usize,
    shared: Mutex<Vec<Arc<Inbox>>>,
}

/// The most threads that serve side by side: one for two processors. The other half is left to the clients.
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
    /// A pool whose threads are started, and whose queues are opened, by `starter`. In a pool made by
    /// [`default`](Self::default) the thread that sets DRIVER_OK or enables the queue does both.
    pub fn with_starter(starter: Arc<dyn Starter>) -> Self {
        Self {
            starter: Some(starter),
            ..Self::default()
        }
    }

    /// Serves the queue that `open` opens until it is told to stop. `alone`: in a thread of its own.
    pub(super) fn serve(
        self: &Arc<Self>,
        alone: Option<Alone>,
        open: impl FnOnce() -> io::Result<Box<dyn Served>> + Send + 'static,
    ) -> io::Result<Handle> {
        let pool = Arc::clone(self);
        self.opened_by_starter(move || open().and_then(|served| pool.place(alone, served)))
    }

    /// Runs `work`, which opens queues, in the starter's thread if there is a starter, and waits for it.
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
        // A panic leaves no partial change in the list.
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
                // The thread has ended just now.
                Some(seat) => seat,
            };
        }
        let inbox = start(seat, "virtio-blk", None)?;
        shared.push(Arc::clone(&inbox));
        Ok(Handle { control, inbox })
    }
}

/// The properties of a thread that serves only one queue.
pub(super) struct Alone {
    pub(super) name: String,
    /// The processor to run on.
    pub(super) cpu: Option<u16>,
}

/// A queue as a thread of the pool serves it. Each call does as much as it can without waiting.
pub(super) trait Served: Send {
    fn control(&self) -> Arc<QueueControl>;

    /// The descriptor that the driver signals.
    fn doorbell(&self) -> BorrowedFd<'_>;

    /// The descriptor that the backend signals.
    fn backend(&self) -> BorrowedFd<'_>;

    /// The timer of the disk's limits.
    fn timer(&self) -> BorrowedFd<'_>;

    /// Takes note that the doorbell has rung.
    fn rung(&mut self);

    /// Submits the requests that the limits held until now, because the timer has expired.
    fn release(&mut self);

    /// Takes the chains that the driver has made available.
    fn take(&mut self);

    /// Submits the requests taken to the backend. `alone`: no other queue of the thread has something to do, or
    /// requests in flight.
    fn start(&mut self, alone: bool);

    /// Answers the requests that have ended; `true`: there is more to take.
    fn answer(&mut self) -> bool;

    /// Whether requests are in flight.
    fn waits(&self) -> bool;

    /// Number of chains taken, modulo 2^16.
    fn taken(&self) -> u16;

    /// Marks the queue as broken and notifies its driver.
    fn give_up(&mut self, reason: &str);
}

/// State shared by a queue and its owner.
#[derive(Default)]
pub(super) struct QueueControl {
    stop: AtomicBool,
    /// The queue has met an error: requests in flight end, but no more are taken or answered.
    broken: AtomicBool,
    /// The number of chains taken, modulo 2^16, once the queue is drained and gone.
    ended: Mutex<Option<u16>>,
    over: Condvar,
}

impl QueueControl {
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
    control: Arc<QueueControl>,
    inbox: Arc<Inbox>,
}

impl Handle {
    pub(super) fn control(&self) -> &QueueControl {
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

/// A queue that a thread serves, or that is on its way to one.
struct Seat {
    /// `None` only while the seat is dropped.
    served: Option<Box<dyn Served>>,
    control: Arc<QueueControl>,
    /// Whether the queue is in the thread's list of queues with work.
    busy: bool,
    /// Whether the queue is stopping. Its doorbell is not watched any more.
    leaving: bool,
}

impl Drop for Seat {
    /// Reports the end for every reason, so that the owner does not wait forever. The queue is dropped before the
    /// report.
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

/// The way for queues to a thread.
struct Inbox {
    remote: Remote<Source, Mail>,
    /// Number of queues of the thread, including those on their way to it, or [`CLOSED`].
    load: AtomicUsize,
}

/// The load of a thread that is ending and takes no more queues.
const CLOSED: usize = usize::MAX;

impl Inbox {
    fn closed(&self) -> bool {
        self.load.load(Ordering::SeqCst) == CLOSED
    }

    /// Hands over a queue; returns it if the thread has ended.
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
    // Before the thread begins, because a thread without a queue ends.
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

/// Keeps the calling thread on one processor. If the system refuses, the worker goes on unpinned.
fn pin(cpu: u16) {
    let mut set = CpuSet::new();
    set.set(cpu.into());
    if let Err(error) = sched_setaffinity(None, &set) {
        tracing::warn!(%error, "a virtio-blk worker cannot run on CPU {cpu} alone");
    }
}

struct Thread {
    events: EventLoop<Source, Mail>,
    /// Events to be handled, the last first. After a panic in one queue the thread handles the rest for the others.
    happened: Vec<Event<Source, Mail>>,
    inbox: Arc<Inbox>,
    seats: Slab<Seat>,
    /// Keys of the queues that have something to do.
    busy: Vec<usize>,
    /// Keys of the queues that this turn serves; empty between turns, kept for its memory.
    served: Vec<usize>,
    /// Key of the queue being served: a panic is attributed to it.
    current: usize,
}

impl Thread {
    /// Serves queues until none is left.
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
                Event::Ready(Source::Timer(key), _) => {
                    if let Some(served) = self.queue(key) {
                        served.release();
                        self.mark(key);
                    }
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

    /// Notes that the queue has something to do.
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
        // Edge-triggered: each ring is reported once, even if another owner of the descriptor reads its counter first.
        let edges = EventSet::IN | EventSet::EDGE_TRIGGERED;
        let sources = [
            (served.doorbell(), Source::Doorbell(key), edges),
            (served.backend(), Source::Backend(key), EventSet::IN),
            (served.timer(), Source::Timer(key), EventSet::IN),
        ];
        let watch = |(fd, source, what)| self.events.watch(fd, source, what);
        let watched = sources.into_iter().try_for_each(watch);
        if let (Err(error), Some(served)) = (watched, self.queue(key)) {
            served.give_up(&format!("its worker cannot wait for it: {error}"));
        }
        // The doorbell may have rung before the thread watched it.
        self.mark(key);
    }

    /// Finds the queues that are to stop.
    fn see_off(&mut self) {
        let stopping = |seat: &Seat| seat.control.stopping() && !seat.leaving;
        let leaving = self.seats.iter().filter(|(_, seat)| stopping(seat));
        for key in leaving.map(|(key, _)| key).collect::<Vec<_>>() {
            let seat = &mut self.seats[key];
            seat.leaving = true;
            // From here on the thread watches only the queue's backend.
            if let Some(served) = &seat.served
                && let Err(error) = self.events.unwatch(served.doorbell())
            {
                tracing::debug!("a queue's doorbell was not watched: {error}");
            }
            self.mark(key);
        }
    }

    /// Serves the queues that have something to do: takes from all of them before it answers any.
    fn turn(&mut self) {
        std::mem::swap(&mut self.busy, &mut self.served);
        for at in 0..self.served.len() {
            if let Some(served) = self.queue(self.served[at]) {
                served.take();
            }
        }
        let waits = |(_, seat): &(usize, &Seat)| seat.served.as_ref().is_some_and(|s| s.waits());
        let alone = self.served.len() == 1 && self.seats.iter().filter(waits).count() <= 1;
        for at in 0..self.served.len() {
            if let Some(served) = self.queue(self.served[at]) {
                served.start(alone);
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

    /// Removes a queue that is drained or lost.
    fn leave(&mut self, key: usize) {
        let Some(seat) = self.seats.try_remove(key) else {
            return;
        };
        if let Some(served) = &seat.served {
            // Unwatch the descriptors before they are closed: the transport holds the doorbell open too.
            for fd in [served.doorbell(), served.backend(), served.timer()] {
                // A descriptor that is not watched any more needs nothing.
                let _ = self.events.unwatch(fd);
            }
        }
        self.inbox.load.fetch_sub(1, Ordering::SeqCst);
        drop(seat);
    }

    /// Removes the queue that has panicked; the others go on.
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
        // The thread may have taken a stop message before the panic without acting on it.
        self.see_off();
    }
}

impl Drop for Thread {
    /// Closes the inbox, so that no more queues are handed over.
    fn drop(&mut self) {
        self.inbox.load.store(CLOSED, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests;
