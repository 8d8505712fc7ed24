//! What the owner of a queue hands to the thread that serves it, and the state that both share.
//!
//! ```text
//!   owner ──▶ ThreadInbox ── "serve this queue", "stop" ──▶ the thread: a QueueSlot per queue
//!     ▲                                                                             │
//!     └─── QueueControl: the queue is drained and gone ◀──────── QueueSlot dropped ─┘
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

/// A queue that the driver has started.
pub(crate) struct QueueStart {
    /// Its index, from 0.
    pub(crate) index: u16,
    /// Its rings.
    pub(crate) setup: QueueSetup,
    /// The eventfd that the driver signals.
    pub(crate) doorbell: EventFd,
    /// Records the chains in flight, if the front-end outlives this process.
    pub(crate) tracker: Option<Tracker>,
}

/// What a worker needs to know about its queue and its device.
pub(super) struct WorkerConfig {
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
    /// Whether a change must survive the end of this process before it is answered.
    pub(super) answer_when_written: bool,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) throttle: Arc<Throttle>,
    pub(super) metrics: Arc<BlockMetrics>,
    pub(super) status: Arc<DeviceStatus>,
}

/// What made a thread's event loop wake up, with the key of the queue. [`PooledQueue`] describes each descriptor.
#[derive(Clone, Copy)]
pub(super) enum QueueEvent {
    Doorbell(usize),
    Backend(usize),
    Timer(usize),
}

/// A message to a thread of the pool.
pub(super) enum PoolMessage {
    /// A queue to serve.
    Serve(QueueSlot),
    /// A queue has to stop: the `stop` flag of its control is set.
    Stop,
}

/// A queue, as the threads of the pool use it. Each call does as much as it can without waiting.
pub(super) trait PooledQueue: Send {
    fn control(&self) -> Arc<QueueControl>;

    /// The descriptor that the driver signals.
    fn doorbell(&self) -> BorrowedFd<'_>;

    /// The descriptor that the backend signals.
    fn backend(&self) -> BorrowedFd<'_>;

    /// The timer of the disk's limits.
    fn timer(&self) -> BorrowedFd<'_>;

    /// Clears the doorbell, which has rung.
    fn acknowledge_doorbell(&mut self);

    /// The timer has expired: submits the requests that the limits were holding.
    fn release(&mut self);

    /// Takes the chains that the driver has made available.
    fn take_chains(&mut self);

    /// Submits the requests to the backend. `alone`: no other queue of the thread has anything to do or in flight.
    fn submit(&mut self, alone: bool);

    /// Answers the completed requests; `true`: there are more chains to take.
    fn answer(&mut self) -> bool;

    /// Whether requests are in flight.
    fn has_in_flight(&self) -> bool;

    /// Number of chains taken, modulo 2^16.
    fn chains_taken(&self) -> u16;

    /// Marks the queue as broken and notifies its driver.
    fn give_up(&mut self, reason: &str);
}

/// State that a queue and its owner share.
#[derive(Default)]
pub(super) struct QueueControl {
    stop: AtomicBool,
    /// After an error: requests in flight still complete, but none are taken or answered any more.
    broken: AtomicBool,
    /// The number of chains taken, modulo 2^16, once the queue is drained and gone.
    taken: Mutex<Option<u16>>,
    gone: Condvar,
}

impl QueueControl {
    pub(super) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    pub(super) fn set_broken(&self) {
        self.broken.store(true, Ordering::SeqCst);
    }

    pub(super) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::SeqCst)
    }

    fn lock_taken(&self) -> MutexGuard<'_, Option<u16>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the queue is drained and gone.
    pub(super) fn is_gone(&self) -> bool {
        self.lock_taken().is_some()
    }

    /// Waits until the queue is drained and gone. Returns the number of chains taken, modulo 2^16.
    pub(super) fn wait_until_gone(&self) -> u16 {
        let taken = self
            .gone
            .wait_while(self.lock_taken(), |taken| taken.is_none());
        taken
            .unwrap_or_else(PoisonError::into_inner)
            .unwrap_or_default()
    }
}

/// A queue that a thread serves, or that is on its way to a thread.
pub(super) struct QueueSlot {
    /// `None` only while the slot is being dropped.
    pub(super) queue: Option<Box<dyn PooledQueue>>,
    pub(super) control: Arc<QueueControl>,
    /// Whether the queue is in the thread's list of queues with work.
    pub(super) busy: bool,
    /// Whether the queue is being drained. Its doorbell is no longer watched.
    pub(super) draining: bool,
}

impl QueueSlot {
    /// A slot for a queue that no thread serves yet.
    pub(super) fn new(queue: Box<dyn PooledQueue>) -> Self {
        Self {
            control: queue.control(),
            queue: Some(queue),
            busy: false,
            draining: false,
        }
    }
}

impl Drop for QueueSlot {
    /// Reports that the queue is gone, whatever the reason: otherwise its owner would wait forever. The queue is dropped
    /// before the report.
    fn drop(&mut self) {
        let taken = self.queue.take().map(|mut queue| {
            if thread::panicking() {
                queue.give_up("its worker has panicked");
            }
            queue.chains_taken()
        });
        *self.control.lock_taken() = Some(taken.unwrap_or_default());
        self.control.gone.notify_all();
    }
}

/// Hands queues to a thread.
pub(super) struct ThreadInbox {
    sender: MessageSender<QueueEvent, PoolMessage>,
    /// Number of queues of the thread, including those on their way to it, or [`CLOSED`].
    load: AtomicUsize,
}

/// The load of a thread that is ending, and takes no more queues.
const CLOSED: usize = usize::MAX;

impl ThreadInbox {
    /// The inbox of a thread that has no queue yet.
    pub(super) fn new(sender: MessageSender<QueueEvent, PoolMessage>) -> Self {
        Self {
            sender,
            load: AtomicUsize::new(0),
        }
    }

    /// Number of queues of the thread, including those on their way to it.
    pub(super) fn load(&self) -> usize {
        self.load.load(Ordering::SeqCst)
    }

    /// Whether the thread takes no more queues.
    pub(super) fn is_closed(&self) -> bool {
        self.load() == CLOSED
    }

    /// Hands a queue to the thread; returns it if the thread has ended.
    pub(super) fn add_queue(&self, slot: QueueSlot) -> Option<QueueSlot> {
        let more = |load| (load != CLOSED).then(|| load + 1);
        let (set, fetched) = (Ordering::SeqCst, Ordering::SeqCst);
        if self.load.fetch_update(set, fetched, more).is_err() {
            return Some(slot);
        }
        self.sender.send(PoolMessage::Serve(slot));
        None
    }

    /// Makes the thread drain a queue, without waiting for it.
    pub(super) fn stop(&self, queue: &QueueControl) {
        queue.stop.store(true, Ordering::SeqCst);
        self.sender.send(PoolMessage::Stop);
    }

    /// Lets the thread end; `false`: it has a queue, or one is on its way.
    pub(super) fn close(&self) -> bool {
        let (set, read) = (Ordering::SeqCst, Ordering::SeqCst);
        self.load.compare_exchange(0, CLOSED, set, read).is_ok()
    }

    /// Counts a queue less.
    pub(super) fn remove_queue(&self) {
        self.load.fetch_sub(1, Ordering::SeqCst);
    }

    /// Lets the thread end, whatever queues it has.
    pub(super) fn close_for_good(&self) {
        self.load.store(CLOSED, Ordering::SeqCst);
    }
}
