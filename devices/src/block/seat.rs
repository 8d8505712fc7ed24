//! What the owner of a queue gives to the thread that serves it, and what they share.
//!
//! ```text
//!   owner ──▶ Inbox ── a queue to serve, or one to stop ──▶ the thread: a Seat for each queue
//!     ▲                                                                  │
//!     └─── QueueControl: the queue is drained and gone ◀── Seat dropped ─┘
//! ```

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use vmm_sys_util::eventfd::EventFd;

use super::features::Features;
use super::request::ID_LEN;
use super::tracker::Tracker;
use super::virtqueue::QueueSetup;
use crate::backend::Backend;
use crate::event_loop::MessageSender;
use crate::metrics::BlockMetrics;
use crate::status::DeviceStatus;
use crate::throttle::Throttle;

/// The queue that a worker serves.
pub(crate) struct QueueStart {
    /// Its number, from 0.
    pub(crate) index: u16,
    /// Its rings.
    pub(crate) setup: QueueSetup,
    /// The eventfd that the driver signals.
    pub(crate) doorbell: EventFd,
    /// Records the chains in flight, for a front-end that outlives this process.
    pub(crate) tracker: Option<Tracker>,
}

/// Everything a worker needs to know when it starts.
pub(super) struct WorkerPlan {
    pub(super) queue: QueueStart,
    pub(super) max_size: u16,
    pub(super) event_idx: bool,
    pub(super) in_order: bool,
    /// How long to poll the ring before sleeping.
    pub(super) poll: Duration,
    /// The processor to run on.
    pub(super) cpu: Option<u16>,
    pub(super) features: Features,
    pub(super) id: [u8; ID_LEN],
    pub(super) flush_after_write: bool,
    /// Whether a change must outlive this process before it is answered.
    pub(super) written_first: bool,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) throttle: Arc<Throttle>,
    pub(super) metrics: Arc<BlockMetrics>,
    pub(super) status: Arc<DeviceStatus>,
}

/// A descriptor that a thread watches, with its queue's key. [`Served`] says what each is.
#[derive(Clone, Copy)]
pub(super) enum Source {
    Doorbell(usize),
    Backend(usize),
    Timer(usize),
}

/// A message to a thread.
pub(super) enum Mail {
    /// A queue to serve.
    Serve(Seat),
    /// A queue is to stop: the `stop` flag of its control is set.
    Stop,
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

    /// Whether the queue is drained and gone.
    pub(super) fn is_over(&self) -> bool {
        self.ended().is_some()
    }

    /// Waits until the queue is drained and gone. Returns the number of chains taken, modulo 2^16.
    pub(super) fn wait_until_over(&self) -> u16 {
        let ended = self.over.wait_while(self.ended(), |ended| ended.is_none());
        ended
            .unwrap_or_else(PoisonError::into_inner)
            .unwrap_or_default()
    }
}

/// A queue that a thread serves, or that is on its way to one.
pub(super) struct Seat {
    /// `None` only while the seat is dropped.
    pub(super) served: Option<Box<dyn Served>>,
    pub(super) control: Arc<QueueControl>,
    /// Whether the queue is in the thread's list of queues with work.
    pub(super) busy: bool,
    /// Whether the queue is stopping. Its doorbell is not watched any more.
    pub(super) leaving: bool,
}

impl Seat {
    /// The seat of a queue that has not begun.
    pub(super) fn new(served: Box<dyn Served>) -> Self {
        Self {
            control: served.control(),
            served: Some(served),
            busy: false,
            leaving: false,
        }
    }
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
pub(super) struct Inbox {
    remote: MessageSender<Source, Mail>,
    /// Number of queues of the thread, including those on their way to it, or [`CLOSED`].
    load: AtomicUsize,
}

/// The load of a thread that is ending and takes no more queues.
const CLOSED: usize = usize::MAX;

impl Inbox {
    /// The inbox of a thread that has no queue yet.
    pub(super) fn new(remote: MessageSender<Source, Mail>) -> Self {
        Self {
            remote,
            load: AtomicUsize::new(0),
        }
    }

    /// Number of queues of the thread, including those on their way to it.
    pub(super) fn load(&self) -> usize {
        self.load.load(Ordering::SeqCst)
    }

    /// Whether the thread takes no more queues.
    pub(super) fn closed(&self) -> bool {
        self.load() == CLOSED
    }

    /// Hands over a queue; returns it if the thread has ended.
    pub(super) fn put(&self, seat: Seat) -> Option<Seat> {
        let more = |load| (load != CLOSED).then(|| load + 1);
        let (set, fetched) = (Ordering::SeqCst, Ordering::SeqCst);
        if self.load.fetch_update(set, fetched, more).is_err() {
            return Some(seat);
        }
        self.remote.send(Mail::Serve(seat));
        None
    }

    /// Tells a queue of the thread to drain, without waiting for it.
    pub(super) fn stop(&self, queue: &QueueControl) {
        queue.stop.store(true, Ordering::SeqCst);
        self.remote.send(Mail::Stop);
    }

    /// Ends the thread, unless it has a queue or one is on its way.
    pub(super) fn close(&self) -> bool {
        let (set, read) = (Ordering::SeqCst, Ordering::SeqCst);
        self.load.compare_exchange(0, CLOSED, set, read).is_ok()
    }

    /// Notes that a queue has left the thread.
    pub(super) fn queue_removed(&self) {
        self.load.fetch_sub(1, Ordering::SeqCst);
    }

    /// Notes that the thread ends, whatever it has.
    pub(super) fn thread_ended(&self) {
        self.load.store(CLOSED, Ordering::SeqCst);
    }
}
