//! What a log counts.

use crate::sync::atomic::{AtomicU64, Ordering};

/// Length of [`LogCounters::group_sizes`].
pub const GROUP_SIZE_CLASSES: usize = 10;

/// What the log has done since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LogCounters {
    /// FLUSH requests received, and writes in writethrough mode.
    pub flushes: u64,
    /// Those that waited for a commit group; the others found nothing new and cost no sync.
    pub flushes_grouped: u64,
    /// Commit groups made durable.
    pub groups: u64,
    /// Device syncs (fdatasync) of log segments.
    pub syncs: u64,
    /// Bytes written to segments, headers and padding included.
    pub log_bytes: u64,
    /// Checkpoints finished.
    pub checkpoints: u64,
    /// Bytes that checkpoints wrote to base images; ranges made zero are not among them.
    pub base_bytes: u64,
    /// Operations that did so, zeroing included: fewer than records, since adjacent ones are copied together.
    pub base_writes: u64,
    /// Commit groups by how many waiters they served: element 0 counts those that served 1, element 1 those that
    /// served 2, then 3 to 4, 5 to 8 and so on by powers of two; the last element counts all above 256. Groups that
    /// nobody waited for are not here.
    pub group_sizes: [u64; GROUP_SIZE_CLASSES],
}

/// The same, being counted.
#[derive(Default)]
pub(crate) struct Counters {
    pub flushes: AtomicU64,
    pub flushes_grouped: AtomicU64,
    pub groups: AtomicU64,
    pub syncs: AtomicU64,
    pub log_bytes: AtomicU64,
    pub checkpoints: AtomicU64,
    pub base_bytes: AtomicU64,
    pub base_writes: AtomicU64,
    pub group_sizes: [AtomicU64; GROUP_SIZE_CLASSES],
}

impl Counters {
    /// Counts a group that served `waiters`, at least one.
    pub(crate) fn count_group(&self, waiters: usize) {
        let class = waiters.next_power_of_two().trailing_zeros() as usize;
        self.group_sizes[class.min(GROUP_SIZE_CLASSES - 1)].fetch_add(1, Ordering::Relaxed);
    }

    /// The counters now.
    pub(crate) fn snapshot(&self) -> LogCounters {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        LogCounters {
            flushes: get(&self.flushes),
            flushes_grouped: get(&self.flushes_grouped),
            groups: get(&self.groups),
            syncs: get(&self.syncs),
            log_bytes: get(&self.log_bytes),
            checkpoints: get(&self.checkpoints),
            base_bytes: get(&self.base_bytes),
            base_writes: get(&self.base_writes),
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
