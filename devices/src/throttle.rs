//! Limits of a disk: operations and bytes per second, each with a burst. They can be changed while
//! the disk is in use.
//!
//! ```text
//!   frontend ──submit──▶ QueueLimits ── Throttle says "now" ──▶ BackendQueue
//!                             │ "at t"
//!                             └─ held, in order ── timerfd at t ──▶ the frontend's event loop ──▶ release
//! ```
//! A bucket is a single number, the time at which it will be full again (the generic cell rate
//! algorithm, which admits the same requests as a token bucket). It needs no lock, no thread, and
//! no work between requests. Without limits a frontend only checks a flag, and submits the request
//! to the disk itself.
//!
//! ```
//! use std::sync::Arc;
//! use walvisor_devices::backend::ram::RamDisk;
//! use walvisor_devices::block::{BlockConfig, BlockError, VirtioBlock};
//! use walvisor_devices::throttle::Limits;
//!
//! let device = VirtioBlock::new(Arc::new(RamDisk::new(2048)), BlockConfig::default())?;
//! // Stays valid after a transport has taken the device.
//! let throttle = device.throttle();
//! throttle.set(Limits {
//!     ops_per_second: 1000,
//!     ..Limits::default()
//! });
//! assert_eq!(throttle.limits().ops_per_second, 1000);
//! # Ok::<(), BlockError>(())
//! ```

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, clock_gettime,
    timerfd_create, timerfd_settime,
};

use crate::backend::{BackendQueue, Operation, SECTOR_SIZE};

const SECOND: u64 = 1_000_000_000;

/// Limits of a disk, and its weight beside others. 0 is no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Operations per second; each request is one.
    pub ops_per_second: u64,
    /// Operations that may start at once after a pause; 0: as many as in a second.
    pub ops_burst: u64,
    /// Bytes read and written per second.
    pub bytes_per_second: u64,
    /// Bytes that may start at once after a pause; 0: as many as in a second. A longer request
    /// waits until the bucket is full, and the requests after it pay for the excess.
    pub bytes_burst: u64,
    /// The disk's part of a thread that it shares with other disks, relative to theirs: 1 to 1000.
    /// 0: 100.
    pub weight: u16,
}

/// The weight of a disk without one of its own.
pub const DEFAULT_WEIGHT: u16 = 100;
/// The greatest weight.
pub const MAX_WEIGHT: u16 = 1000;

/// The token bucket of one limit. Times are in nanoseconds.
#[derive(Default)]
struct Bucket {
    /// Units per second; 0: no limit.
    rate: AtomicU64,
    /// How long an empty bucket takes to fill.
    fill_time: AtomicU64,
    /// When the bucket will be full.
    full_at: AtomicU64,
}

impl Bucket {
    fn set(&self, rate: u64, burst: u64) {
        let burst = if burst == 0 { rate } else { burst };
        self.fill_time
            .store(time_of(burst, rate), Ordering::Relaxed);
        self.full_at.store(0, Ordering::Relaxed);
        self.rate.store(rate, Ordering::Relaxed);
    }

    /// Takes `amount` at the time `now`. Returns its cost, for [`give_back`](Self::give_back).
    ///
    /// # Errors
    /// The time at which the bucket will hold enough.
    fn take(&self, amount: u64, now: u64) -> Result<u64, u64> {
        let rate = self.rate.load(Ordering::Relaxed);
        if rate == 0 || amount == 0 {
            return Ok(0);
        }
        let cost = time_of(amount, rate);
        let room = self.fill_time.load(Ordering::Relaxed).saturating_sub(cost);
        let mut full_at = self.full_at.load(Ordering::Relaxed);
        loop {
            let enough_at = full_at.saturating_sub(room);
            if enough_at > now {
                return Err(enough_at);
            }
            let after = full_at.max(now).saturating_add(cost);
            match self.full_at.compare_exchange_weak(
                full_at,
                after,
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => return Ok(cost),
                Err(other) => full_at = other,
            }
        }
    }

    fn give_back(&self, cost: u64) {
        // If the limit was changed since, the bucket is full and stays full.
        let give = |full_at: u64| Some(full_at.saturating_sub(cost));
        let _ = self
            .full_at
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, give);
    }
}

/// The time that `amount` takes at `rate` per second, in nanoseconds.
fn time_of(amount: u64, rate: u64) -> u64 {
    let time = u128::from(amount) * u128::from(SECOND) / u128::from(rate.max(1));
    u64::try_from(time).unwrap_or(u64::MAX)
}

/// The limits of a disk, shared by its queues.
#[derive(Default)]
pub struct Throttle {
    /// Whether there is any limit.
    active: AtomicBool,
    weight: AtomicU16,
    ops: Bucket,
    bytes: Bucket,
    /// Counts changes of the limits.
    changes: AtomicU64,
    state: Mutex<ThrottleState>,
}

#[derive(Default)]
struct ThrottleState {
    limits: Limits,
    queues: Vec<Weak<SharedQueue>>,
}

impl Throttle {
    fn lock(&self) -> MutexGuard<'_, ThrottleState> {
        // A panic leaves no partial change in the state.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The limits in force.
    pub fn limits(&self) -> Limits {
        self.lock().limits
    }

    /// Puts `limits` in force, with full buckets. Held requests are checked against the new limits.
    pub fn set(&self, limits: Limits) {
        let mut state = self.lock();
        state.limits = limits;
        self.weight.store(limits.weight, Ordering::Relaxed);
        self.ops.set(limits.ops_per_second, limits.ops_burst);
        self.bytes.set(limits.bytes_per_second, limits.bytes_burst);
        let any = limits.ops_per_second > 0 || limits.bytes_per_second > 0;
        self.active.store(any, Ordering::Relaxed);
        self.changes.fetch_add(1, Ordering::SeqCst);
        state.queues.retain(|queue| queue.strong_count() > 0);
        for queue in state.queues.iter().filter_map(Weak::upgrade) {
            queue.timer.arm(0);
        }
    }

    /// Whether requests are in flight, or held by the limits.
    pub fn is_busy(&self) -> bool {
        let state = self.lock();
        let mut queues = state.queues.iter().filter_map(Weak::upgrade);
        queues.any(|queue| queue.in_flight.load(Ordering::Relaxed) > 0)
    }

    /// The disk's weight, 1 to [`MAX_WEIGHT`].
    pub fn weight(&self) -> u16 {
        match self.weight.load(Ordering::Relaxed) {
            0 => DEFAULT_WEIGHT,
            weight => weight.min(MAX_WEIGHT),
        }
    }

    /// Charges for a request of `bytes` if it may start now. If not, the error is when to ask
    /// again, in nanoseconds of CLOCK_MONOTONIC.
    fn admit(&self, bytes: u64) -> Result<(), u64> {
        self.admit_at(bytes, now())
    }

    fn admit_at(&self, bytes: u64, now: u64) -> Result<(), u64> {
        let cost = self.ops.take(1, now)?;
        self.bytes
            .take(bytes, now)
            .map(drop)
            .inspect_err(|_| self.ops.give_back(cost))
    }
}

/// The bytes that an operation moves. Discards and zeroes move none.
pub(crate) fn bytes_of(operation: &Operation) -> u64 {
    match operation {
        Operation::Read { sectors, .. } => u64::from(*sectors) * SECTOR_SIZE,
        Operation::Write { data, .. } => data.len() as u64,
        _ => 0,
    }
}

fn now() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    now.tv_sec as u64 * SECOND + now.tv_nsec as u64
}

/// The timer that wakes a queue's thread when held requests may start.
struct Timer {
    fd: OwnedFd,
    armed: AtomicBool,
}

impl Timer {
    fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        Ok(Self {
            fd: timerfd_create(TimerfdClockId::Monotonic, flags)?,
            armed: AtomicBool::new(false),
        })
    }

    /// Makes the descriptor readable at `when`, or at once if that is past.
    fn arm(&self, when: u64) {
        self.armed.store(true, Ordering::SeqCst);
        // Zero would disarm the timer.
        let when = when.clamp(1, i64::MAX as u64);
        let time = Itimerspec {
            it_interval: Timespec::default(),
            it_value: Timespec {
                tv_sec: (when / SECOND) as i64,
                tv_nsec: (when % SECOND) as i64,
            },
        };
        if let Err(error) = timerfd_settime(&self.fd, TimerfdTimerFlags::ABSTIME, &time) {
            tracing::error!(
                "cannot set the rate limiter's timer: delayed requests stay queued: {error}"
            );
        }
    }

    fn clear(&self) {
        if self.armed.swap(false, Ordering::SeqCst) {
            // The read fails if the timer has not expired: then there is nothing to clear.
            let _ = rustix::io::read(&self.fd, &mut [0; 8]);
        }
    }
}

/// What a queue shares with its disk.
struct SharedQueue {
    timer: Timer,
    /// Requests that were submitted and have not completed. Only the queue's thread changes it.
    in_flight: AtomicUsize,
}

/// Applies the limits of a disk to one queue: holds the requests that may not start yet.
///
/// Without limits a frontend submits requests to the [`BackendQueue`] directly: see
/// [`in_force`](Self::in_force).
pub(crate) struct QueueLimits {
    throttle: Arc<Throttle>,
    shared: Arc<SharedQueue>,
    /// Requests that may not start yet, in order, each with the bytes that it counts for.
    held: VecDeque<(u64, Operation, u64)>,
}

impl QueueLimits {
    /// The limits of a new queue.
    ///
    /// # Errors
    /// If the system refuses a timer.
    pub(crate) fn new(throttle: &Arc<Throttle>) -> io::Result<Self> {
        let shared = Arc::new(SharedQueue {
            timer: Timer::new()?,
            in_flight: AtomicUsize::new(0),
        });
        throttle.lock().queues.push(Arc::downgrade(&shared));
        Ok(Self {
            throttle: Arc::clone(throttle),
            shared,
            held: VecDeque::new(),
        })
    }

    /// A request was submitted.
    pub(crate) fn submitted(&self) {
        let in_flight = self.shared.in_flight.load(Ordering::Relaxed);
        self.shared
            .in_flight
            .store(in_flight + 1, Ordering::Relaxed);
    }

    /// So many requests have completed.
    pub(crate) fn completed(&self, count: usize) {
        let in_flight = self.shared.in_flight.load(Ordering::Relaxed);
        self.shared
            .in_flight
            .store(in_flight - count, Ordering::Relaxed);
    }

    /// Readable when held requests may start; then call [`release`](Self::release).
    pub(crate) fn timer(&self) -> BorrowedFd<'_> {
        self.shared.timer.fd.as_fd()
    }

    /// Whether requests are held. Then further ones will be held too.
    pub(crate) fn is_holding(&self) -> bool {
        !self.held.is_empty()
    }

    /// Whether the next request has to go through [`submit`](Self::submit).
    pub(crate) fn in_force(&self) -> bool {
        self.throttle.active.load(Ordering::Relaxed) || self.is_holding()
    }

    /// Submits a request that counts for so many bytes to `queue`, now or in a later
    /// [`release`](Self::release).
    pub(crate) fn submit(
        &mut self,
        queue: &mut dyn BackendQueue,
        token: u64,
        operation: Operation,
        bytes: u64,
    ) {
        self.held.push_back((token, operation, bytes));
        if self.held.len() == 1 {
            self.release(queue);
        }
    }

    /// Submits the held requests that may start now, and sets the timer for the others.
    pub(crate) fn release(&mut self, queue: &mut dyn BackendQueue) {
        self.shared.timer.clear();
        while let Some((_, _, bytes)) = self.held.front() {
            let changes = self.throttle.changes.load(Ordering::SeqCst);
            match self.throttle.admit(*bytes) {
                Ok(()) => {
                    let (token, operation, _) = self.held.pop_front().expect("the front exists");
                    queue.submit(token, operation);
                }
                Err(when) => {
                    self.shared.timer.arm(when);
                    // If the limits have changed since, that armed the timer too, and this `arm`
                    // has overwritten it: check again.
                    if self.throttle.changes.load(Ordering::SeqCst) == changes {
                        break;
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{PollFd, PollFlags, poll};

    use super::*;
    use crate::backend::Backend;
    use crate::backend::ram::RamDisk;

    fn throttle(limits: Limits) -> Throttle {
        let throttle = Throttle::default();
        throttle.set(limits);
        throttle
    }

    /// How many requests of `bytes` start in `seconds`, if the caller retries at each moment that
    /// the throttle returns.
    fn count_admitted(throttle: &Throttle, bytes: u64, seconds: u64) -> u64 {
        let (start, mut count) = (1_000 * SECOND, 0);
        let mut at = start;
        while at < start + seconds * SECOND {
            match throttle.admit_at(bytes, at) {
                Ok(()) => count += 1,
                Err(when) => {
                    assert!(when > at);
                    at = when;
                }
            }
        }
        count
    }

    #[test]
    fn a_burst_and_then_the_rate() {
        let ops = |ops_per_second, ops_burst| Limits {
            ops_per_second,
            ops_burst,
            ..Limits::default()
        };
        for (limits, seconds, expected) in [
            (ops(100, 0), 10, 100 + 1000),
            (ops(100, 5), 10, 5 + 1000),
            (ops(1, 1), 10, 1 + 9),
            (ops(3, 1), 7, 1 + 20),
        ] {
            let count = count_admitted(&throttle(limits), 4096, seconds);
            assert!(count.abs_diff(expected) <= 1, "{limits:?}: {count}");
        }
        let bytes = Limits {
            bytes_per_second: 1 << 20,
            bytes_burst: 1 << 18,
            ..Limits::default()
        };
        assert!(count_admitted(&throttle(bytes), 4096, 10).abs_diff(64 + 2560) <= 1);
        // Requests longer than the burst: one at a time, each charged in full.
        assert!(count_admitted(&throttle(bytes), 1 << 20, 10).abs_diff(10) <= 1);
        // Operations that move no bytes are not charged.
        let throttle = throttle(bytes);
        assert!((0..10_000).all(|_| throttle.admit_at(0, SECOND).is_ok()));
    }

    #[test]
    fn the_tighter_of_two_limits_decides_and_a_refusal_costs_nothing() {
        let both = Limits {
            ops_per_second: 100,
            ops_burst: 1,
            bytes_per_second: 4096 * 10,
            bytes_burst: 4096,
            ..Limits::default()
        };
        assert!(count_admitted(&throttle(both), 4096, 20).abs_diff(201) <= 2);
        assert!(count_admitted(&throttle(both), 0, 20).abs_diff(2001) <= 2);
    }

    #[test]
    fn the_largest_numbers_are_valid_limits() {
        let ends = Limits {
            ops_per_second: u64::MAX,
            ops_burst: u64::MAX,
            bytes_per_second: 1,
            bytes_burst: u64::MAX,
            ..Limits::default()
        };
        let throttle = throttle(ends);
        assert!(throttle.admit_at(u64::MAX, 1).is_ok());
        assert!(throttle.admit_at(u64::MAX, u64::MAX - 1).is_err());
    }

    fn is_due(limits: &QueueLimits) -> bool {
        let mut fds = [PollFd::from_borrowed_fd(limits.timer(), PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).unwrap() > 0
    }

    fn wait(limits: &QueueLimits) {
        let mut fds = [PollFd::from_borrowed_fd(limits.timer(), PollFlags::IN)];
        poll(&mut fds, None).unwrap();
    }

    #[test]
    fn held_requests_start_in_order_in_time_or_when_the_limit_is_lifted() {
        let disk = RamDisk::new(64);
        let throttle = Arc::new(throttle(Limits {
            ops_per_second: 200,
            ops_burst: 1,
            ..Limits::default()
        }));
        let mut queue = disk.open_queue().unwrap();
        let mut limits = QueueLimits::new(&throttle).unwrap();
        let submit = |limits: &mut QueueLimits, queue: &mut dyn BackendQueue, tokens| {
            for token in tokens {
                assert!(limits.in_force());
                let operation = Operation::Read {
                    sector: 0,
                    sectors: 1,
                };
                limits.submit(queue, token, operation, 512);
            }
        };
        let mut done = Vec::new();
        submit(&mut limits, &mut *queue, 0..5);
        assert!(limits.is_holding());
        while limits.is_holding() {
            wait(&limits);
            limits.release(&mut *queue);
        }
        assert!(!is_due(&limits), "no wake-up is left");

        // So slow that only lifting the limit can release the requests.
        throttle.set(Limits {
            ops_per_second: 1,
            bytes_per_second: 1,
            bytes_burst: 1,
            ..Limits::default()
        });
        submit(&mut limits, &mut *queue, 5..8);
        limits.release(&mut *queue);
        assert!(limits.is_holding());
        throttle.set(Limits::default());
        assert!(is_due(&limits));
        assert!(
            limits.in_force(),
            "a request now would overtake the held ones"
        );
        limits.release(&mut *queue);
        assert!(!limits.in_force() && !is_due(&limits));
        queue.kick();
        queue.completions(&mut done);
        let tokens: Vec<_> = done.iter().map(|completion| completion.token).collect();
        assert_eq!(tokens, [0, 1, 2, 3, 4, 5, 6, 7]);
    }
}
