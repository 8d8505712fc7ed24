//! Threads of reactors: which one gets a source, and how its owner stops it.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use rustix::thread::{CpuSet, sched_setaffinity};
use walvisor_block::request_short_slices;

use super::{Message, Reactor, Source, SourceEvent, SourceSlot};
use crate::control::GateWatcher;
use crate::event_loop::{EventLoop, MessageSender};

/// Threads that serve sources. The pool starts them as sources come, up to one per two processors,
/// and each ends with its last source. The other processors are left to the clients.
pub(crate) struct ReactorPool {
    /// Name of the shared threads.
    name: &'static str,
    /// The most shared threads.
    max_shared: usize,
    shared: Mutex<Vec<Arc<Inbox>>>,
}

impl ReactorPool {
    pub(crate) fn new(name: &'static str) -> Self {
        let processors = thread::available_parallelism().map_or(1, |cpus| cpus.get());
        Self::with_threads(name, processors.div_ceil(2))
    }

    pub(crate) fn with_threads(name: &'static str, max_shared: usize) -> Self {
        Self {
            name,
            max_shared,
            shared: Mutex::default(),
        }
    }

    /// Reserves a place in the thread with the fewest, or in a new thread of its own if `dedicated`
    /// is given.
    ///
    /// # Errors
    /// If the system refuses a thread.
    pub(crate) fn reserve(&self, dedicated: Option<DedicatedThread>) -> io::Result<Reservation> {
        if let Some(DedicatedThread { name, cpu }) = dedicated {
            return start(&name, cpu);
        }
        // A panic leaves no partial change in the list.
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.retain(|inbox| !inbox.is_closed());
        let least = shared.iter().min_by_key(|inbox| inbox.load());
        let full = |inbox: &&Arc<Inbox>| shared.len() >= self.max_shared || inbox.load() == 0;
        // A thread that has just ended takes none.
        if let Some(reservation) = least.filter(full).and_then(Inbox::reserve) {
            return Ok(reservation);
        }
        let reservation = start(self.name, None)?;
        shared.push(Arc::clone(&reservation.0));
        Ok(reservation)
    }
}

/// Starts a thread, with its first place reserved.
fn start(name: &str, cpu: Option<u16>) -> io::Result<Reservation> {
    let events = EventLoop::new()?;
    let inbox = Arc::new(Inbox {
        sender: events.sender(),
        // Made before the thread starts, because a thread without a reservation ends.
        load: AtomicUsize::new(1),
    });
    let reservation = Reservation(Arc::clone(&inbox));
    thread::Builder::new().name(name.into()).spawn(move || {
        request_short_slices();
        if let Some(cpu) = cpu {
            pin(cpu);
        }
        Reactor::new(events, inbox).serve();
    })?;
    Ok(reservation)
}

/// Pins the calling thread to a processor. If the system refuses, the thread runs unpinned.
fn pin(cpu: u16) {
    let mut set = CpuSet::new();
    set.set(cpu.into());
    if let Err(error) = sched_setaffinity(None, &set) {
        tracing::warn!(%error, "a worker cannot run on CPU {cpu} alone");
    }
}

/// A thread that serves one source only.
pub(crate) struct DedicatedThread {
    pub(crate) name: String,
    /// The processor to run on.
    pub(crate) cpu: Option<u16>,
}

/// The way into a thread.
pub(super) struct Inbox {
    sender: MessageSender<SourceEvent, Message>,
    /// Number of reservations, or [`CLOSED`].
    load: AtomicUsize,
}

/// The load of a thread that is ending, and takes no more sources.
const CLOSED: usize = usize::MAX;

impl Inbox {
    fn load(&self) -> usize {
        self.load.load(Ordering::SeqCst)
    }

    fn is_closed(&self) -> bool {
        self.load() == CLOSED
    }

    /// Reserves a place; `None`: the thread is ending.
    pub(super) fn reserve(self: &Arc<Self>) -> Option<Reservation> {
        let more = |load| (load != CLOSED).then(|| load + 1);
        let (set, fetched) = (Ordering::SeqCst, Ordering::SeqCst);
        let reserved = self.load.fetch_update(set, fetched, more);
        reserved.is_ok().then(|| Reservation(Arc::clone(self)))
    }

    fn wake(&self) {
        self.sender.send(Message::Wake);
    }

    /// Lets the thread end; `false`: there are reservations.
    pub(super) fn close(&self) -> bool {
        let (set, read) = (Ordering::SeqCst, Ordering::SeqCst);
        self.load.compare_exchange(0, CLOSED, set, read).is_ok()
    }

    /// Lets the thread end, whatever reservations there are.
    pub(super) fn close_for_good(&self) {
        self.load.store(CLOSED, Ordering::SeqCst);
    }
}

/// A place in a thread, which goes on while it has any.
pub(crate) struct Reservation(Arc<Inbox>);

impl Reservation {
    /// Lets the thread serve `source`.
    pub(crate) fn serve(self, source: Box<dyn Source>) -> SourceHandle {
        let control = Arc::<SourceControl>::default();
        let handle = SourceHandle {
            control: Arc::clone(&control),
            thread: self.thread(),
        };
        let inbox = Arc::clone(&self.0);
        // If the thread has ended, dropping the message reports that the source is gone.
        inbox.sender.send(Message::Serve(SourceSlot {
            source: Some(source),
            control,
            disk: 0,
            busy: false,
            deadline: None,
            _reservation: self,
        }));
        handle
    }

    /// The thread.
    pub(crate) fn thread(&self) -> ReactorThread {
        ReactorThread(Arc::clone(&self.0))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let less = |load| (load != CLOSED).then(|| load - 1);
        let (set, fetched) = (Ordering::SeqCst, Ordering::SeqCst);
        if self.0.load.fetch_update(set, fetched, less) == Ok(1) {
            // The thread may sleep with no source.
            self.0.wake();
        }
    }
}

/// A thread of a pool, which may have ended.
#[derive(Clone)]
pub(crate) struct ReactorThread(Arc<Inbox>);

impl ReactorThread {
    /// Gives each source a turn, soon: something that they look at in their turns has changed.
    pub(crate) fn wake(&self) {
        self.0.wake();
    }

    /// Whether the reservation is in this thread.
    pub(crate) fn has(&self, reservation: &Reservation) -> bool {
        Arc::ptr_eq(&self.0, &reservation.0)
    }
}

impl GateWatcher for ReactorThread {
    /// Sources check the gate in their turns.
    fn wake(&self) {
        Self::wake(self);
    }
}

/// State that a source's owner and its thread share.
#[derive(Default)]
pub(crate) struct SourceControl {
    stop: AtomicBool,
    gone: Mutex<bool>,
    went: Condvar,
}

impl SourceControl {
    pub(super) fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.gone.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn report_gone(&self) {
        *self.lock() = true;
        self.went.notify_all();
    }
}

/// The owner's handle of a source. Dropping it does not stop the source.
pub(crate) struct SourceHandle {
    control: Arc<SourceControl>,
    thread: ReactorThread,
}

impl SourceHandle {
    /// Makes the source end once its requests in flight are answered, without waiting for it.
    pub(crate) fn request_stop(&self) {
        self.control.stop.store(true, Ordering::SeqCst);
        self.thread.wake();
    }

    /// Whether the source has ended.
    pub(crate) fn is_gone(&self) -> bool {
        *self.control.lock()
    }

    /// Waits until the source has ended.
    pub(crate) fn wait_until_gone(&self) {
        let gone = self.control.lock();
        drop(self.control.went.wait_while(gone, |gone| !*gone));
    }

    /// The thread that serves the source.
    pub(crate) fn thread(&self) -> &ReactorThread {
        &self.thread
    }
}

/// The inbox of a thread that does not run, and its events.
#[cfg(test)]
pub(super) fn inbox_for_test() -> (Arc<Inbox>, EventLoop<SourceEvent, Message>) {
    let events = EventLoop::new().unwrap();
    let sender = events.sender();
    let load = AtomicUsize::new(0);
    (Arc::new(Inbox { sender, load }), events)
}
