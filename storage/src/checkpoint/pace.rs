//! The pace of a checkpoint, and how much of the log's room it hands on to writers.
//!
//! A checkpoint without `hurry` takes its time, because it shares the medium with syncs that clients wait for. Its
//! progress is compared with the share of the log's room that was used since it began. No run is in flight while
//! the log grows and the copy is ahead; few are while the log does not grow; many are if the log would otherwise be
//! full before the copy ends. If even that is too slow, writers wait, but never until the copy ends: it hands on
//! the room of the log in step with its progress, so that the log grows as fast as the copy can follow.

use std::time::{Duration, Instant};

use crate::log::state::{Log, State};
use crate::sync;
use crate::sync::atomic::Ordering;

/// Most runs in flight, and how many while the copy disturbs no writer.
pub(super) const IN_FLIGHT_RUNS: usize = 64;
const UNHURRIED_RUNS: usize = 2;
/// After this long without growth of the log, background work disturbs no writer.
const QUIET: Duration = Duration::from_millis(50);
/// A copy that is this share of its work behind schedule has most runs in flight; with less, proportionally fewer.
const WORST_LAG: f64 = 0.125;
/// The share of the room that may be used before everything is copied.
const USABLE_SHARE: f64 = 0.7;
/// The share of the room that writers have from the begin of a copy. They get the rest in step with its progress.
const FREE_SHARE: f64 = 0.125;
/// The room is handed on in steps of so many bytes, because each step wakes the writers that wait.
const ROOM_STEP: u64 = 256 << 10;

/// Detects whether a log is being written to: background work would then delay the writers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Growth {
    /// The log's end at the last check.
    end: u64,
    /// When the log was last seen to have grown.
    grown: Option<Instant>,
}

impl Growth {
    /// Growth of a log that ends at `end`.
    pub(crate) fn new(end: u64) -> Self {
        Self { end, grown: None }
    }

    /// Whether the log has grown lately, given that it now ends at `end`.
    pub(crate) fn is_under_way(&mut self, end: u64) -> bool {
        let now = sync::now();
        if end > self.end {
            self.grown = Some(now);
        }
        self.end = end;
        self.grown
            .is_some_and(|grown| now.duration_since(grown) < QUIET)
    }
}

/// The pace of a copy: it is to end before the log is full.
pub(crate) struct CopyPace {
    growth: Growth,
    hurry: bool,
    /// Bytes of log when the copy began, and how many more there was room for.
    bytes: (u64, u64),
    /// Bytes of memory that the index took when it began, and how many more it may take.
    index: (u64, u64),
    /// What all reads and writes of the copy cost.
    work: u64,
    /// Up to where the log may grow for now.
    allowed: u64,
}

impl CopyPace {
    /// The pace of a copy that begins now. `hurry`: a caller waits for it. Until more is known of its work, writers have
    /// the first share of the room.
    pub(super) fn new(log: &Log, state: &mut State, hurry: bool) -> Self {
        let (end, index) = (state.ring.end(), log.counters.index.bytes());
        // One segment is the keeper's.
        let room = state.ring.unused_bytes();
        let room = room.saturating_sub(log.segment_size);
        let mut pace = Self {
            growth: Growth::new(end),
            hurry,
            bytes: (end, room),
            index: (index, log.index_limit.saturating_sub(index)),
            work: u64::MAX,
            allowed: end,
        };
        state.ring.allow(pace.allowed(0));
        pace
    }

    /// Sets the work of the whole copy: what its reads and writes cost.
    pub(super) fn plan(&mut self, work: u64) {
        self.work = work.max(1);
    }

    /// Up to where the log may grow when `done` of the work is done; `None`: as long as there is room.
    fn allowed(&mut self, done: u64) -> Option<u64> {
        if done >= self.work {
            return None;
        }
        let (end, room) = self.bytes;
        let share = FREE_SHARE + (1.0 - FREE_SHARE) * (done as f64 / self.work as f64);
        let allowed = end + (room as f64 * share) as u64;
        if allowed >= self.allowed + ROOM_STEP.min(room / 16) {
            self.allowed = allowed;
        }
        Some(self.allowed)
    }

    /// How many runs may be in flight when `done` of the work is done. Hands on the log's room.
    pub(super) fn runs(&mut self, log: &Log, done: u64) -> usize {
        let mut state = log.lock();
        if state.ring.allow(self.allowed(done)) {
            drop(state);
            log.wake_ports();
            state = log.lock();
        }
        let state = &*state;
        let hurry = self.hurry || state.is_pressing() || log.held_back.load(Ordering::Relaxed);
        let used = |now: u64, (began, room): (u64, u64)| {
            now.saturating_sub(began) as f64 / (room.max(1) as f64 * USABLE_SHARE)
        };
        let end = state.ring.end();
        let used = used(end, self.bytes).max(used(log.counters.index.bytes(), self.index));
        let behind = match hurry {
            true => 1.0,
            false => used - done as f64 / self.work as f64,
        };
        let disturbing = behind <= 0.0 && self.growth.is_under_way(end);
        if disturbing {
            return 0;
        }
        let more = (IN_FLIGHT_RUNS - UNHURRIED_RUNS) as f64;
        UNHURRIED_RUNS + ((behind / WORST_LAG).clamp(0.0, 1.0) * more) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DiskOptions, Store, StoreOptions, create_disk};

    /// How far the log may grow rises with the progress of the copy, and ends with it.
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
        // However long the preparations take.
        assert_eq!(pace.allowed(0), share(FREE_SHARE));
        pace.plan(1000);
        assert_eq!(pace.allowed(0), share(FREE_SHARE));
        // It rises in steps.
        assert_eq!(pace.allowed(1), share(FREE_SHARE));
        assert_eq!(pace.allowed(500), share((1.0 + FREE_SHARE) / 2.0));
        assert_eq!(pace.runs(&log, 1000), IN_FLIGHT_RUNS);
        assert_eq!(pace.allowed(1000), None);
    }
}
