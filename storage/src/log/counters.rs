//! The counters of a log.

use crate::index::IndexMemory;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::{GROUP_SIZE_CLASSES, LogCounters, StallCause, StallCounts};

/// The live counters behind [`LogCounters`].
#[derive(Default)]
pub(crate) struct Counters {
    pub flushes: AtomicU64,
    pub flushes_grouped: AtomicU64,
    pub groups: AtomicU64,
    pub writes: AtomicU64,
    pub syncs: AtomicU64,
    pub log_bytes: AtomicU64,
    pub checkpoints: AtomicU64,
    pub base_bytes: AtomicU64,
    pub base_writes: AtomicU64,
    pub group_sizes: [AtomicU64; GROUP_SIZE_CLASSES],
    pub stalled: CauseCounters,
    pub refused: CauseCounters,
    /// The memory of all disks' indexes.
    pub index: IndexMemory,
    /// The memory of other extents: those of looks, and of what was saved for snapshots.
    pub beside_index: IndexMemory,
}

/// Counts causes.
#[derive(Default)]
pub(crate) struct CauseCounters([AtomicU64; StallCause::ALL.len()]);

impl CauseCounters {
    pub(crate) fn count(&self, cause: StallCause) {
        self.0[cause as usize].fetch_add(1, Ordering::Relaxed);
    }

    fn snapshot(&self) -> StallCounts {
        StallCounts::of(|cause| self.0[cause as usize].load(Ordering::Relaxed))
    }
}

impl Counters {
    /// Counts a group that served `waiters`, at least one.
    pub(crate) fn count_group(&self, waiters: usize) {
        let class = waiters.next_power_of_two().trailing_zeros() as usize;
        self.group_sizes[class.min(GROUP_SIZE_CLASSES - 1)].fetch_add(1, Ordering::Relaxed);
    }

    /// Bytes of memory taken by all extents.
    pub(crate) fn index_bytes(&self) -> u64 {
        self.index.bytes() + self.beside_index.bytes()
    }

    /// The counters now.
    pub(crate) fn snapshot(&self) -> LogCounters {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        LogCounters {
            flushes: get(&self.flushes),
            flushes_grouped: get(&self.flushes_grouped),
            groups: get(&self.groups),
            writes: get(&self.writes),
            syncs: get(&self.syncs),
            log_bytes: get(&self.log_bytes),
            checkpoints: get(&self.checkpoints),
            base_bytes: get(&self.base_bytes),
            base_writes: get(&self.base_writes),
            index_bytes: self.index_bytes(),
            stalled: self.stalled.snapshot(),
            refused: self.refused.snapshot(),
            group_sizes: std::array::from_fn(|class| get(&self.group_sizes[class])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_classed_by_powers_of_two() {
        let counters = Counters::default();
        for waiters in [1, 2, 3, 4, 5, 8, 9, 256, 257, 100_000] {
            counters.count_group(waiters);
        }
        assert_eq!(
            counters.snapshot().group_sizes,
            [1, 1, 2, 2, 1, 0, 0, 0, 1, 2]
        );
    }
}
