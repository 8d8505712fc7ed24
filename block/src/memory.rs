//! How much memory a process may use, and who holds it.
//!
//! ```text
//!   reserve: logs, connections ──▶ reserved ─┐
//!                                            ├─▶ at most the limit
//!   charge: requests, unread replies ─▶ lent ┘     a client waits for its share, and one that holds others up is told to leave
//! ```
//! A client may hold as much as is free, and no more (Choudhury and Hahne 1998, "Dynamic queue
//! length thresholds"). One client alone gets half of the memory; of a hundred greedy ones each
//! gets a hundredth, and as much is free for one that asks for little. The last eighth is kept for
//! those: for clients that hold next to nothing, and for new ones. What a request may need is
//! charged before it is taken, so a request that was taken never waits for memory.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::buffer::{self, Buffer};

/// What a request takes besides its payload, in bytes.
const REQUEST_BYTES: u64 = 512;
/// What a client may hold of the memory that is kept for those who ask for little, in bytes.
const LITTLE: u64 = 64 << 10;
/// How long a client waits for memory before another one is told to leave.
const PATIENCE: Duration = Duration::from_secs(2);
/// How long that one must have been slow.
const SLOW: Duration = Duration::from_millis(500);
/// The time between two clients that are told to leave.
const EVICTION_PAUSE: Duration = Duration::from_millis(100);

/// The memory that a process may use. Copies share it.
#[derive(Clone)]
pub struct MemoryBudget(Arc<Budget>);

struct Budget {
    limit: AtomicU64,
    /// Bytes of [`MemoryBudget::reserve`].
    reserved: AtomicU64,
    /// Bytes that clients hold.
    lent: AtomicU64,
    clients: Mutex<Clients>,
}

#[derive(Default)]
struct Clients {
    all: Vec<Weak<ClientShare>>,
    evicted: Option<Instant>,
}

impl MemoryBudget {
    /// A budget of `limit` bytes.
    pub fn new(limit: u64) -> Self {
        Self(Arc::new(Budget {
            limit: limit.into(),
            reserved: AtomicU64::new(0),
            lent: AtomicU64::new(0),
            clients: Mutex::default(),
        }))
    }

    /// The budget of this process, with no limit until [`set_limit`](Self::set_limit).
    pub fn of_process() -> &'static Self {
        static PROCESS: OnceLock<MemoryBudget> = OnceLock::new();
        PROCESS.get_or_init(|| Self::new(u64::MAX))
    }

    /// Sets the limit in bytes. [`Buffer`](crate::Buffer)s that are kept for reuse take a sixteenth
    /// of it at most, which is reserved; longer ones go back to the system at once. Call it once,
    /// before anything is charged.
    pub fn set_limit(&self, bytes: u64) {
        // Otherwise the allocator keeps large blocks that are free. SAFETY: this sets a number of
        // the allocator.
        unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, 256 << 10) };
        self.0.limit.store(bytes, Ordering::Relaxed);
        let pool = buffer::limit_pool(bytes / 16);
        self.0.reserved.fetch_add(pool, Ordering::Relaxed);
    }

    /// The limit in bytes; `None`: there is none.
    pub fn limit(&self) -> Option<u64> {
        let limit = self.0.limit.load(Ordering::Relaxed);
        (limit != u64::MAX).then_some(limit)
    }

    /// Bytes that are reserved or that clients hold.
    pub fn used(&self) -> u64 {
        let reserved = self.0.reserved.load(Ordering::Relaxed);
        reserved.saturating_add(self.0.lent.load(Ordering::Relaxed))
    }

    /// Bytes that are free.
    pub fn free(&self) -> u64 {
        self.0
            .limit
            .load(Ordering::Relaxed)
            .saturating_sub(self.used())
    }

    /// Takes memory for something that lives long. A sixteenth of the limit is left for requests.
    /// `None`: there is not so much.
    pub fn reserve(&self, bytes: u64) -> Option<MemoryReservation> {
        let budget = &self.0;
        let limit = budget.limit.load(Ordering::Relaxed);
        let lent = budget.lent.load(Ordering::Relaxed);
        let reserved = |reserved: u64| {
            let more = reserved.saturating_add(bytes);
            let left = lent.max(limit / 16);
            (limit == u64::MAX || more.saturating_add(left) <= limit).then_some(more)
        };
        let taken = budget
            .reserved
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, reserved);
        taken.ok().map(|_| MemoryReservation {
            budget: self.clone(),
            bytes,
        })
    }

    /// A client, which holds nothing yet.
    pub fn client(&self) -> MemoryClient {
        let client = Arc::new(ClientShare {
            budget: self.clone(),
            held: AtomicU64::new(0),
            leaving: AtomicBool::new(false),
            eviction: Mutex::default(),
        });
        let mut clients = self.0.lock();
        clients.all.retain(|client| client.strong_count() > 0);
        clients.all.push(Arc::downgrade(&client));
        MemoryClient(client)
    }
}

impl Budget {
    fn lock(&self) -> MutexGuard<'_, Clients> {
        // The list is whole at every step.
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Memory of something that lives long, which dropping this gives back.
pub struct MemoryReservation {
    budget: MemoryBudget,
    bytes: u64,
}

impl Drop for MemoryReservation {
    fn drop(&mut self) {
        let reserved = &self.budget.0.reserved;
        reserved.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

/// Who takes memory for requests: an NBD connection, a queue.
pub struct MemoryClient(Arc<ClientShare>);

struct ClientShare {
    budget: MemoryBudget,
    held: AtomicU64,
    /// Whether it has to leave.
    leaving: AtomicBool,
    eviction: Mutex<Eviction>,
}

/// Whether a client may be told to leave, and how.
#[derive(Default)]
struct Eviction {
    /// Since when what the client holds waits for the client itself: it reads no reply, or does not
    /// send what it announced.
    slow_since: Option<Instant>,
    /// Tells it to leave.
    leave: Option<Box<dyn Fn() + Send>>,
}

impl ClientShare {
    fn lock(&self) -> MutexGuard<'_, Eviction> {
        self.eviction.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MemoryClient {
    /// How long a client that was refused should wait before it asks again.
    pub const RETRY: Duration = Duration::from_millis(5);

    /// Takes memory for a request with a payload of `payload` bytes. `None`: the client has to
    /// wait.
    pub fn charge(&self, payload: u64) -> Option<MemoryCharge> {
        let budget = &self.0.budget.0;
        let limit = budget.limit.load(Ordering::Relaxed);
        let buffers = if payload > 0 {
            Buffer::memory_of(payload)
        } else {
            0
        };
        let bytes = buffers.saturating_add(REQUEST_BYTES);
        let held = self.held();
        let reserved = budget.reserved.load(Ordering::Relaxed);
        let in_buffers = reserved.saturating_add(buffer::allocated());
        let lend = |lent: u64| {
            let all = reserved.saturating_add(lent).saturating_add(bytes);
            let little = held.saturating_add(bytes) <= LITTLE && all <= limit;
            let fair = little || all.saturating_add(held).saturating_add(bytes) <= limit / 8 * 7;
            let there = in_buffers.saturating_add(bytes) <= limit;
            // Nobody who asks for much waits for ever: when nobody holds any, it gets what it asks
            // for.
            (lent == 0 || (fair && there)).then(|| lent.saturating_add(bytes))
        };
        budget
            .lent
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, lend)
            .ok()?;
        self.0.held.fetch_add(bytes, Ordering::Relaxed);
        Some(MemoryCharge {
            client: Arc::clone(&self.0),
            bytes,
        })
    }

    /// Bytes that the client holds.
    pub fn held(&self) -> u64 {
        self.0.held.load(Ordering::Relaxed)
    }

    /// Calls `leave`, in any thread, when the client has to leave for the sake of others.
    pub fn on_eviction(&self, leave: impl Fn() + Send + 'static) {
        self.0.lock().leave = Some(Box::new(leave));
    }

    /// Whether it has to leave.
    pub fn is_evicted(&self) -> bool {
        self.0.leaving.load(Ordering::Relaxed)
    }

    /// Says since when what the client holds waits for the client itself; `None`: it does not.
    pub fn set_slow_since(&self, since: Option<Instant>) {
        self.0.lock().slow_since = since;
    }

    /// Says that the client has waited since `since` for a [`charge`](Self::charge). If that is
    /// long ago, the one that holds most, more than this one, is told to leave, if it is slow.
    pub fn wait_since(&self, since: Instant) {
        let now = Instant::now();
        if now.duration_since(since) < PATIENCE {
            return;
        }
        let mut clients = self.0.budget.0.lock();
        let evicted = clients.evicted;
        if evicted.is_some_and(|at| now.duration_since(at) < EVICTION_PAUSE) {
            return;
        }
        let all: Vec<_> = clients.all.iter().filter_map(Weak::upgrade).collect();
        let slow = all.iter().filter(|client| {
            let eviction = client.lock();
            let since = eviction.slow_since.filter(|_| eviction.leave.is_some());
            let leaving = client.leaving.load(Ordering::Relaxed);
            !leaving && since.is_some_and(|since| now.duration_since(since) >= SLOW)
        });
        let held = |client: &Arc<ClientShare>| client.held.load(Ordering::Relaxed);
        let greediest = slow.max_by_key(|client| held(client));
        let greediest = greediest.filter(|client| held(client) > self.held());
        if let Some(client) = greediest {
            clients.evicted = Some(now);
            client.leaving.store(true, Ordering::Relaxed);
            client.lock().leave.iter().for_each(|leave| leave());
        }
    }
}

/// Memory of a request, which dropping this gives back.
pub struct MemoryCharge {
    client: Arc<ClientShare>,
    bytes: u64,
}

impl MemoryCharge {
    /// Splits off the memory of `payload` bytes; at most what there is.
    pub fn split(&mut self, payload: u64) -> Self {
        let bytes = Buffer::memory_of(payload).min(self.bytes);
        self.bytes -= bytes;
        Self {
            client: Arc::clone(&self.client),
            bytes,
        }
    }
}

impl Drop for MemoryCharge {
    fn drop(&mut self) {
        self.client.held.fetch_sub(self.bytes, Ordering::Relaxed);
        let lent = &self.client.budget.0.lent;
        lent.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn greedy_clients_leave_room_for_one_that_asks_for_little() {
        let budget = MemoryBudget::new(256 * MIB);
        let reserved = budget.reserve(56 * MIB).unwrap();
        let greedy: Vec<_> = (0..100).map(|_| budget.client()).collect();
        let mut held = Vec::new();
        loop {
            let more: Vec<_> = greedy.iter().filter_map(|one| one.charge(MIB)).collect();
            if more.is_empty() {
                break;
            }
            held.extend(more);
        }
        assert!(held.len() >= 100, "{}", held.len());
        assert!(budget.used() <= 256 * MIB);
        let modest = budget.client();
        let little = modest.charge(4096).unwrap();
        assert_eq!(modest.held(), 8192 + REQUEST_BYTES);
        assert!(budget.reserve(200 * MIB).is_none());
        drop((little, held, reserved));
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_client_alone_gets_half_and_a_request_of_any_size_once_nobody_holds_any() {
        let budget = MemoryBudget::new(64 * MIB);
        let client = budget.client();
        let held: Vec<_> = std::iter::from_fn(|| client.charge(MIB)).collect();
        assert_eq!(held.len(), 27);
        let large = budget.client();
        assert!(large.charge(100 * MIB).is_none());
        drop(held);
        assert!(large.charge(100 * MIB).is_some());
    }

    #[test]
    fn a_charge_is_given_back_piece_by_piece() {
        let budget = MemoryBudget::new(64 * MIB);
        let client = budget.client();
        let mut charge = client.charge(4 * MIB).unwrap();
        let piece = charge.split(MIB);
        drop(charge);
        assert_eq!(client.held(), MIB + 4096);
        drop(piece);
        assert_eq!((client.held(), budget.used()), (0, 0));
    }

    #[test]
    fn only_a_slow_client_that_holds_more_than_the_one_that_waits_has_to_leave() {
        let budget = MemoryBudget::new(64 * MIB);
        let [quick, slow, waits] = [(); 3].map(|()| budget.client());
        let told = Arc::new(AtomicBool::new(false));
        let leave = Arc::clone(&told);
        slow.on_eviction(move || leave.store(true, Ordering::Relaxed));
        quick.on_eviction(|| panic!("it is not slow"));
        let _quick = quick.charge(9 * MIB).unwrap();
        let mut held = slow.charge(8 * MIB).unwrap();
        let long_ago = Instant::now().checked_sub(PATIENCE).unwrap();
        slow.set_slow_since(Some(long_ago));
        waits.wait_since(Instant::now());
        assert!(!slow.is_evicted(), "it has not waited for long");
        let more = waits.charge(9 * MIB).unwrap();
        waits.wait_since(long_ago);
        assert!(!slow.is_evicted(), "the one that waits holds more");
        drop(more);
        waits.wait_since(long_ago);
        assert!(slow.is_evicted() && told.load(Ordering::Relaxed));
        drop(held.split(MIB));
    }
}
