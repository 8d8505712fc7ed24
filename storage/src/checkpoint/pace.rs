//! The pace of a checkpoint, and how far it lets the log grow meanwhile.
//!
//! A checkpoint without `hurry` takes its time, because it shares the medium with syncs that
//! clients wait for. Its progress is compared with how much of the log's room was used since it
//! began. While the log grows and the copy is ahead, no run is in flight; while the log does not
//! grow, a few; if the log would otherwise fill up before the copy ends, many. If even that is too
//! slow, writers wait, but never for the whole copy: the log may grow in step with the copy's
//! progress, so writers are as fast as the copy.
//!
//! A guest's read, or the sync for a FLUSH, queues behind everything the copy has in flight. So the
//! copy keeps less in flight while guests flush, and little while they read, even if it is late:
//! writers wait a little longer, readers a lot less. It also never has more in flight than the
//! medium does in a few milliseconds, so on a slow medium only a few runs.

use std::time::{Duration, Instant};

use crate::log::room::RESERVED_ROOM;
use crate::log::state::{Log, LogState};
use crate::sync;
use crate::sync::atomic::Ordering;

/// Most runs in flight: in general, while guests flush, while they read, and while the copy is in
/// no hurry.
pub(crate) const IN_FLIGHT_RUNS: usize = 256;
const RUNS_BESIDE_FLUSHES: usize = 64;
const RUNS_BESIDE_READS: usize = 8;
const UNHURRIED_RUNS: usize = 2;
/// Cap on queued copy I/O, as time on the medium; lower while guests flush, because they wait
/// behind it.
const QUEUE: Duration = Duration::from_millis(12);
const QUEUE_BESIDE_FLUSHES: Duration = Duration::from_millis(6);
/// If the log has not grown for this long, background work disturbs no writer.
const QUIET: Duration = Duration::from_millis(50);
/// If there was no read or FLUSH for this long, the copy disturbs none.
const STILL: Duration = Duration::from_millis(5);
/// A copy behind schedule by this share of its work runs at full speed; with less lag,
/// proportionally slower.
const WORST_LAG: f64 = 0.125;
/// The share of the room that may be used up by the time everything is copied.
const USABLE_SHARE: f64 = 0.7;
/// The share of the room that writers get when a copy starts. They get the rest in step with its
/// progress, except for the last share, which covers the copy's last runs and syncs.
const FREE_SHARE: f64 = 0.125;
const LAST_SHARE: f64 = 0.125;
/// Room is released in steps of this size, because each step wakes the waiting writers.
const ROOM_STEP: u64 = 256 << 10;

/// Tells whether a counter is still going up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ActivityMeter {
    /// The count at the last check.
    count: u64,
    /// When the count was last seen to rise.
    grown: Option<Instant>,
    quiet: Duration,
}

impl ActivityMeter {
    /// For a log that ends at `end`: while it grows, background work would delay its writers.
    pub(crate) fn of_log(end: u64) -> Self {
        Self::new(end, QUIET)
    }

    fn new(count: u64, quiet: Duration) -> Self {
        Self {
            count,
            grown: None,
            quiet,
        }
    }

    /// Whether the count has risen lately; it is `count` now.
    pub(crate) fn is_active(&mut self, count: u64) -> bool {
        let now = sync::now();
        if count > self.count {
            self.grown = Some(now);
        }
        self.count = count;
        self.grown
            .is_some_and(|grown| now.duration_since(grown) < self.quiet)
    }
}

/// The pace of a copy, which should end before the log is full.
pub(crate) struct CopyPace {
    log_activity: ActivityMeter,
    /// Reads and FLUSHes on all disks of the log.
    reads: ActivityMeter,
    flushes: ActivityMeter,
    hurry: bool,
    /// Bytes of log when the copy began, and how many more it had room for.
    bytes: (u64, u64),
    /// The same for the index: bytes of memory when the copy began, and how many more it may take.
    index: (u64, u64),
    /// The cost of all reads and writes of the copy, and of saving before it.
    work: u64,
    /// What saving for snapshots has cost so far.
    saved: u64,
    /// How far the log may grow for now.
    allowed: u64,
    /// The medium's throughput: cost per second.
    rate: u64,
    /// The cap on the cost in flight.
    queue: u64,
}

impl CopyPace {
    /// A copy that begins now. `hurry`: a caller is waiting for it. Until its work is known,
    /// writers get only the first share of the room.
    pub(crate) fn new(log: &Log, state: &mut LogState, hurry: bool) -> Self {
        let (end, index) = (state.ring.end(), log.counters.index.bytes());
        // One segment is the keeper's.
        let room = state.ring.unused_bytes();
        let room = room.saturating_sub(log.segment_size);
        let mut pace = Self {
            log_activity: ActivityMeter::of_log(end),
            reads: ActivityMeter::new(log.reads.load(Ordering::Relaxed), STILL),
            flushes: ActivityMeter::new(log.counters.flushes.load(Ordering::Relaxed), STILL),
            hurry,
            bytes: (end, room),
            index: (index, log.index_limit.saturating_sub(index)),
            work: u64::MAX,
            saved: 0,
            allowed: end,
            rate: u64::MAX,
            queue: u64::MAX,
        };
        state.room.begin_copy();
        state.ring.begin_copy(room / RESERVED_ROOM);
        state.ring.allow(pace.allowed(0));
        pace
    }

    /// Sets the medium's throughput, as cost per second.
    pub(crate) fn set_rate(&mut self, rate: u64) {
        self.rate = rate;
    }

    /// The cap on the cost in flight, as of the last call of [`max_runs`](Self::max_runs).
    pub(crate) fn queue(&self) -> u64 {
        self.queue
    }

    /// Sets the work that is left: the cost of the copy, and of saving before it, if that comes
    /// next.
    pub(crate) fn plan(&mut self, work: u64) {
        self.work = self.saved + work.max(1);
    }

    /// The planned saving is done; this is what it cost.
    pub(crate) fn end_saving(&mut self, saving: u64) {
        self.saved += saving;
    }

    /// How far the log may grow once `done` of the work is done; `None`: as long as there is room.
    fn allowed(&mut self, done: u64) -> Option<u64> {
        if done >= self.work {
            return None;
        }
        let (end, room) = self.bytes;
        let steps = 1.0 - FREE_SHARE - LAST_SHARE;
        let share = FREE_SHARE + steps * (done as f64 / self.work as f64);
        let allowed = end + (room as f64 * share) as u64;
        if allowed >= self.allowed + ROOM_STEP.min(room / 16) {
            self.allowed = allowed;
        }
        Some(self.allowed)
    }

    /// How many runs may be in flight once `done` of the saving or of the copy is done. Also
    /// releases room in the log.
    pub(crate) fn max_runs(&mut self, log: &Log, done: u64) -> usize {
        let done = self.saved + done;
        let mut state = log.lock();
        let awaited = state.ring.allow(self.allowed(done));
        if awaited {
            drop(state);
            log.wake_ports();
            state = log.lock();
        }
        let state = &*state;
        let held_back = awaited || log.held_back.load(Ordering::Relaxed);
        let hurry = self.hurry || state.is_pressing() || held_back;
        let used = |now: u64, (began, room): (u64, u64)| {
            now.saturating_sub(began) as f64 / (room.max(1) as f64 * USABLE_SHARE)
        };
        let end = state.ring.end();
        let used = used(end, self.bytes).max(used(log.counters.index.bytes(), self.index));
        let behind = if hurry {
            1.0
        } else {
            used - done as f64 / self.work as f64
        };
        let disturbing = behind <= 0.0 && self.log_activity.is_active(end);
        if disturbing {
            return 0;
        }
        let (reads, flushes) = (&log.reads, &log.counters.flushes);
        let read = self.reads.is_active(reads.load(Ordering::Relaxed));
        let flushed = self.flushes.is_active(flushes.load(Ordering::Relaxed));
        let most = match (read, flushed) {
            (true, _) => RUNS_BESIDE_READS,
            (false, true) => RUNS_BESIDE_FLUSHES,
            (false, false) => IN_FLIGHT_RUNS,
        };
        let queue = if flushed { QUEUE_BESIDE_FLUSHES } else { QUEUE };
        self.queue = (self.rate as f64 * queue.as_secs_f64()) as u64;
        let more = (most - UNHURRIED_RUNS) as f64;
        UNHURRIED_RUNS + ((behind / WORST_LAG).clamp(0.0, 1.0) * more) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DiskOptions, Operation, Store, StoreOptions, create_disk};

    /// The limit on the log's growth rises with the progress of the copy, and goes away with its
    /// end.
    #[test]
    fn writers_get_room_in_step_with_the_copy() {
        let dir = tempfile::tempdir().unwrap();
        let (disk, log) = (dir.path().join("disk.img"), dir.path().join("log"));
        let options = StoreOptions {
            segment_size: 1 << 20,
            max_segments: 18,
            ..StoreOptions::default()
        };
        create_disk(&disk, 1 << 20, &log, &options).unwrap();
        let store = Store::open(&log, &[DiskOptions::new(&disk)], &options).unwrap();
        let log = store.disks()[0].log.clone();
        let mut pace = CopyPace::new(&log, &mut log.lock(), true);
        let (end, room) = pace.bytes;
        assert!(
            room >= 16 << 20,
            "one segment may be in use, and one is the keeper's"
        );
        let share = |share: f64| Some(end + (room as f64 * share) as u64);
        // However long preparations take.
        assert_eq!(pace.allowed(0), share(FREE_SHARE));
        pace.plan(1000);
        assert_eq!(pace.allowed(0), share(FREE_SHARE));
        // It rises in steps.
        assert_eq!(pace.allowed(1), share(FREE_SHARE));
        assert_eq!(pace.allowed(500), share(0.5));
        assert_eq!(pace.max_runs(&log, 1000), IN_FLIGHT_RUNS);
        assert_eq!(pace.allowed(1000), None);

        // Saving for snapshots comes first, and counts.
        let mut pace = CopyPace::new(&log, &mut log.lock(), true);
        pace.plan(600 + 400);
        pace.max_runs(&log, 500);
        assert_eq!(pace.allowed, share(0.5).unwrap());
        pace.end_saving(600);
        pace.plan(600);
        pace.max_runs(&log, 300);
        let three_quarters = FREE_SHARE + (1.0 - FREE_SHARE - LAST_SHARE) * 0.75;
        assert_eq!(pace.allowed, share(three_quarters).unwrap());
        assert_eq!(pace.allowed(1200), None);
    }

    #[test]
    fn less_is_in_flight_while_guests_flush_and_little_while_they_read() {
        let mut reads = ActivityMeter::new(7, Duration::MAX);
        assert!(!reads.is_active(7));
        assert!(reads.is_active(8));
        assert!(reads.is_active(8), "a moment ago");
        reads.quiet = Duration::ZERO;
        assert!(!reads.is_active(8), "long ago");

        let dir = tempfile::tempdir().unwrap();
        let (disk, log) = (dir.path().join("disk.img"), dir.path().join("log"));
        let options = StoreOptions::default();
        create_disk(&disk, 1 << 20, &log, &options).unwrap();
        let store = Store::open(&log, &[DiskOptions::new(&disk)], &options).unwrap();
        let log = store.disks()[0].log.clone();
        let mut pace = CopyPace::new(&log, &mut log.lock(), true);
        pace.plan(1000);
        (pace.reads.quiet, pace.flushes.quiet) = (Duration::MAX, Duration::MAX);
        assert_eq!(pace.max_runs(&log, 0), IN_FLIGHT_RUNS);
        let mut port = store.disks()[0].open_port().unwrap();
        port.end_for_test(Operation::Flush).unwrap();
        assert_eq!(pace.max_runs(&log, 0), RUNS_BESIDE_FLUSHES);
        port.end_for_test(Operation::Read {
            sector: 0,
            sectors: 8,
        })
        .unwrap();
        assert_eq!(pace.max_runs(&log, 0), RUNS_BESIDE_READS);
        pace.reads.quiet = Duration::ZERO;
        assert_eq!(pace.max_runs(&log, 0), RUNS_BESIDE_FLUSHES);
        pace.flushes.quiet = Duration::ZERO;
        assert_eq!(pace.max_runs(&log, 0), IN_FLIGHT_RUNS);

        // What a medium does in some milliseconds.
        pace.set_rate(1_000_000);
        for (quiet, queue) in [(Duration::ZERO, 12_000), (Duration::MAX, 6_000)] {
            pace.flushes.quiet = quiet;
            pace.max_runs(&log, 0);
            assert_eq!(pace.queue(), queue);
        }
    }
}
