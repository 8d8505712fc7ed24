//! A RAM disk behind a gate: requests run, but they end only while the gate is open. So a test
//! decides which requests are in flight, and it can change the capacity.

use std::collections::HashSet;
use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::backend::{
    Backend, BackendQueue, Capabilities, Completion, Extent, MAX_REQUEST_BYTES, Mapped, Operation,
    descriptor,
};
use walvisor_testkit::wait_until;

/// Does something in another thread once this one is asleep, because it waits for the device.
pub fn once_asleep<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    let waiting = std::fs::read_link("/proc/thread-self").expect("this thread");
    let stat = Path::new("/proc").join(waiting).join("stat");
    thread::spawn(move || {
        wait_until("the device to be waited for", || {
            let stat = std::fs::read_to_string(&stat).expect("the state of a thread");
            // The state follows the name, which is in parentheses.
            let state = stat.rsplit_once(") ").map(|(_, state)| state);
            state.is_some_and(|state| state.starts_with('S'))
        });
        act()
    })
}

/// Clones share the gate.
#[derive(Clone)]
pub struct Gate {
    disk: RamDisk,
    shared: Arc<GateState>,
}

struct GateState {
    open: AtomicBool,
    only_flushes: AtomicBool,
    max_request: AtomicUsize,
    events: Mutex<Vec<EventFd>>,
    sectors: AtomicU64,
    submitted: AtomicU64,
    kicks: AtomicU64,
    queues: AtomicU64,
    opened: AtomicU64,
    hold_up: Mutex<Option<Receiver<()>>>,
    look_ups: AtomicU64,
    hold_up_look_up: Mutex<Option<Receiver<()>>>,
    leaked: AtomicU64,
}

impl Gate {
    /// A closed gate in front of `disk`.
    pub fn new(disk: RamDisk) -> Self {
        let shared = GateState {
            open: AtomicBool::new(false),
            only_flushes: AtomicBool::new(false),
            max_request: AtomicUsize::new(MAX_REQUEST_BYTES),
            events: Mutex::default(),
            sectors: AtomicU64::new(disk.sectors()),
            submitted: AtomicU64::new(0),
            kicks: AtomicU64::new(0),
            queues: AtomicU64::new(0),
            opened: AtomicU64::new(0),
            hold_up: Mutex::default(),
            look_ups: AtomicU64::new(0),
            hold_up_look_up: Mutex::default(),
            leaked: AtomicU64::new(0),
        };
        Self {
            disk,
            shared: Arc::new(shared),
        }
    }

    /// Holds only FLUSH requests and lets all others end.
    pub fn hold_flushes(&self) {
        self.shared.only_flushes.store(true, Ordering::SeqCst);
    }

    /// Sets the longest request that the disk claims to take, in bytes.
    pub fn set_max_request(&self, bytes: usize) {
        self.shared.max_request.store(bytes, Ordering::SeqCst);
    }

    pub fn open(&self) {
        self.shared.open.store(true, Ordering::SeqCst);
        for event in self.shared.events.lock().expect("events").iter() {
            event.write(1).expect("event");
        }
    }

    /// Opens it `time` after this thread is [asleep](once_asleep), and returns when that was.
    pub fn open_once_asleep(&self, time: Duration) -> JoinHandle<Instant> {
        let gate = self.clone();
        once_asleep(move || {
            thread::sleep(time);
            let opened = Instant::now();
            gate.open();
            opened
        })
    }

    /// Requests submitted so far.
    pub fn submitted(&self) -> u64 {
        self.shared.submitted.load(Ordering::SeqCst)
    }

    /// Batches kicked so far.
    pub fn kicks(&self) -> u64 {
        self.shared.kicks.load(Ordering::SeqCst)
    }

    /// Queues that are open now.
    pub fn queues(&self) -> u64 {
        self.shared.queues.load(Ordering::SeqCst)
    }

    /// Queues opened so far.
    pub fn opened(&self) -> u64 {
        self.shared.opened.load(Ordering::SeqCst)
    }

    /// Makes the next submission wait, and its worker with it, until the sender sends.
    pub fn hold_up(&self) -> Sender<()> {
        let (release, released) = channel();
        *self.shared.hold_up.lock().expect("a channel") = Some(released);
        release
    }

    /// Makes the next look-up of extents wait, and its thread with it, until the sender sends. If
    /// the sender is dropped, the look-up panics.
    pub fn hold_up_look_up(&self) -> Sender<()> {
        let (release, released) = channel();
        *self.shared.hold_up_look_up.lock().expect("a channel") = Some(released);
        release
    }

    /// Look-ups of extents begun so far.
    pub fn look_ups(&self) -> u64 {
        self.shared.look_ups.load(Ordering::SeqCst)
    }

    /// Requests that had not ended when their queue was closed.
    pub fn leaked(&self) -> u64 {
        self.shared.leaked.load(Ordering::SeqCst)
    }

    pub fn set_sectors(&self, sectors: u64) {
        self.shared.sectors.store(sectors, Ordering::SeqCst);
    }
}

impl Backend for Gate {
    fn sectors(&self) -> u64 {
        self.shared.sectors.load(Ordering::SeqCst)
    }

    fn capabilities(&self) -> Capabilities {
        self.disk.capabilities()
    }

    fn write_cache(&self) -> bool {
        self.disk.write_cache()
    }

    fn set_write_cache(&self, on: bool) {
        self.disk.set_write_cache(on);
    }

    fn max_request_bytes(&self) -> usize {
        self.shared.max_request.load(Ordering::SeqCst)
    }

    fn mapped(&self) -> Option<&dyn Mapped> {
        Some(self)
    }

    fn open_queue(&self) -> io::Result<Box<dyn BackendQueue>> {
        let event = EventFd::new(EFD_NONBLOCK)?;
        self.shared
            .events
            .lock()
            .expect("events")
            .push(event.try_clone()?);
        self.shared.queues.fetch_add(1, Ordering::SeqCst);
        self.shared.opened.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(GateQueue {
            inner: self.disk.open_queue()?,
            shared: Arc::clone(&self.shared),
            event,
            batch: Vec::new(),
            held: Vec::new(),
            flushes: HashSet::new(),
            in_flight: 0,
        }))
    }
}

impl Mapped for Gate {
    /// Everything is data.
    fn extents(&self, _: u64, sectors: u64, _: usize) -> io::Result<Vec<Extent>> {
        self.shared.look_ups.fetch_add(1, Ordering::SeqCst);
        let held = self
            .shared
            .hold_up_look_up
            .lock()
            .expect("a channel")
            .take();
        if let Some(released) = held {
            released.recv().expect("a test wants this panic");
        }
        Ok(vec![Extent::data(sectors)])
    }
}

struct GateQueue {
    inner: Box<dyn BackendQueue>,
    shared: Arc<GateState>,
    event: EventFd,
    /// Requests submitted and not kicked yet, which by the contract have not started.
    batch: Vec<(u64, Operation)>,
    held: Vec<Completion>,
    /// Tokens of FLUSH requests.
    flushes: HashSet<u64>,
    in_flight: usize,
}

impl BackendQueue for GateQueue {
    fn submit(&mut self, token: u64, operation: Operation) {
        self.in_flight += 1;
        if matches!(operation, Operation::Flush) {
            self.flushes.insert(token);
        }
        self.shared.submitted.fetch_add(1, Ordering::SeqCst);
        self.batch.push((token, operation));
        let hold_up = self.shared.hold_up.lock().expect("a channel").take();
        if let Some(released) = hold_up {
            released.recv().expect("the test releases its worker");
        }
    }

    fn kick(&mut self) {
        self.shared.kicks.fetch_add(1, Ordering::SeqCst);
        for (token, operation) in self.batch.drain(..) {
            self.inner.submit(token, operation);
        }
        self.inner.kick();
    }

    fn event(&self) -> BorrowedFd<'_> {
        descriptor(&self.event)
    }

    fn completions(&mut self, done: &mut Vec<Completion>) {
        let _ = self.event.read();
        self.inner.completions(&mut self.held);
        let open = self.shared.open.load(Ordering::SeqCst);
        let only_flushes = self.shared.only_flushes.load(Ordering::SeqCst);
        for completion in std::mem::take(&mut self.held) {
            let flush = self.flushes.contains(&completion.token);
            if open || only_flushes && !flush {
                self.flushes.remove(&completion.token);
                self.in_flight -= 1;
                done.push(completion);
            } else {
                self.held.push(completion);
            }
        }
    }
}

impl Drop for GateQueue {
    fn drop(&mut self) {
        self.shared.queues.fetch_sub(1, Ordering::SeqCst);
        self.shared
            .leaked
            .fetch_add(self.in_flight as u64, Ordering::SeqCst);
    }
}
