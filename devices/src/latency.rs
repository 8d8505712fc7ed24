//! Latencies of requests: a histogram for each kind of operation on each queue.
//!
//! Counting a request adds to counters that only the queue's worker changes, and allocates no
//! memory. The clock is read once per batch.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::backend::Operation;

/// Length of [`LatencyCounts::classes`].
pub const LATENCY_CLASSES: usize = 25;

/// Kinds of requests. Each has its own latency histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationKind {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Flushes.
    Flush,
    /// Discards.
    Discard,
    /// Write zeroes, and secure erases.
    WriteZeroes,
}

impl OperationKind {
    /// Every kind.
    pub const ALL: [Self; 5] = [
        Self::Read,
        Self::Write,
        Self::Flush,
        Self::Discard,
        Self::WriteZeroes,
    ];

    /// The kind's name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Discard => "discard",
            Self::WriteZeroes => "write_zeroes",
        }
    }

    /// The kind of `operation`.
    pub(crate) fn of(operation: &Operation) -> Self {
        match operation {
            Operation::Read { .. } => Self::Read,
            Operation::Write { .. } => Self::Write,
            Operation::Flush => Self::Flush,
            Operation::Discard { .. } => Self::Discard,
            Operation::WriteZeroes { .. } => Self::WriteZeroes,
        }
    }
}

/// A histogram that requests are counted in.
#[derive(Debug, Default)]
struct Histogram {
    classes: [AtomicU64; LATENCY_CLASSES],
    sum_ns: AtomicU64,
}

/// A snapshot of a histogram.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LatencyCounts {
    /// Requests by latency in microseconds: element 0 counts those up to 1, element 1 those up to
    /// 2, then 4, 8 and so on by powers of two. The last element counts all above 2^23 (8.4 s).
    pub classes: [u64; LATENCY_CLASSES],
    /// The sum of all latencies in nanoseconds.
    pub sum_ns: u64,
}

impl LatencyCounts {
    /// The upper bound of a class in microseconds; `None` for the last class, which has none.
    pub fn upper_us(class: usize) -> Option<u64> {
        (class + 1 < LATENCY_CLASSES).then(|| 1 << class)
    }

    /// The number of requests.
    pub fn count(&self) -> u64 {
        self.classes.iter().sum()
    }

    /// The latency that all but one in `one_in` requests stay within, as the upper bound of a class
    /// in microseconds. `one_in` is 2 for the median, 100 for the 99th percentile. `None` if there
    /// are no requests, or if it is the class without an upper bound.
    pub fn all_but_one_in_us(&self, one_in: u64) -> Option<u64> {
        let count = self.count();
        let wanted = count - count / one_in.max(1);
        let mut sum = 0;
        let class = self.classes.iter().position(|requests| {
            sum += requests;
            sum >= wanted && sum > 0
        });
        class.and_then(Self::upper_us)
    }

    /// Adds the counts of `other`.
    pub fn add(&mut self, other: &Self) {
        for (ours, theirs) in self.classes.iter_mut().zip(other.classes) {
            *ours += theirs;
        }
        self.sum_ns += other.sum_ns;
    }
}

/// The histograms of a device.
#[derive(Debug, Default)]
pub struct Latencies {
    queues: Box<[[Histogram; OperationKind::ALL.len()]]>,
}

impl Latencies {
    /// Empty histograms of `queues` queues.
    pub(crate) fn new(queues: usize) -> Self {
        Self {
            queues: (0..queues).map(|_| Default::default()).collect(),
        }
    }

    /// Number of queues.
    pub fn queues(&self) -> usize {
        self.queues.len()
    }

    /// Counts a request of `queue` that took `time`.
    pub(crate) fn count(&self, queue: usize, kind: OperationKind, time: Duration) {
        let Some(histograms) = self.queues.get(queue) else {
            return;
        };
        let histogram = &histograms[kind as usize];
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        // Each class includes its upper bound, a power of two.
        let class = ns
            .div_ceil(1000)
            .max(1)
            .next_power_of_two()
            .trailing_zeros() as usize;
        add(&histogram.classes[class.min(LATENCY_CLASSES - 1)], 1);
        add(&histogram.sum_ns, ns);
    }

    /// The counts for `kind` on `queue`; all zero if there is no such queue.
    pub fn get(&self, queue: usize, kind: OperationKind) -> LatencyCounts {
        let Some(histograms) = self.queues.get(queue) else {
            return LatencyCounts::default();
        };
        let histogram = &histograms[kind as usize];
        LatencyCounts {
            classes: std::array::from_fn(|class| histogram.classes[class].load(Ordering::Relaxed)),
            sum_ns: histogram.sum_ns.load(Ordering::Relaxed),
        }
    }
}

/// Adds to a counter. Relaxed: the counter orders nothing else.
pub(crate) fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_counted_by_powers_of_two() {
        let latencies = Latencies::new(2);
        for ns in [
            0,
            1,
            1000,
            1001,
            2000,
            2001,
            8_388_608_000,
            8_388_608_001,
            u64::MAX / 4,
        ] {
            latencies.count(1, OperationKind::Flush, Duration::from_nanos(ns));
        }
        latencies.count(2, OperationKind::Flush, Duration::ZERO);
        let counts = latencies.get(1, OperationKind::Flush);
        assert_eq!(counts.classes[..3], [3, 2, 1]);
        assert_eq!(counts.classes[LATENCY_CLASSES - 2..], [1, 2]);
        assert_eq!(counts.count(), 9);
        for (queue, kind) in [
            (0, OperationKind::Flush),
            (1, OperationKind::Read),
            (2, OperationKind::Flush),
        ] {
            assert_eq!(latencies.get(queue, kind), LatencyCounts::default());
        }
    }

    #[test]
    fn percentiles_are_upper_bounds_of_classes() {
        let mut counts = LatencyCounts::default();
        assert_eq!(counts.all_but_one_in_us(2), None);
        counts.classes[0] = 50;
        counts.classes[4] = 49;
        counts.classes[LATENCY_CLASSES - 1] = 1;
        let at = |one_in| counts.all_but_one_in_us(one_in);
        assert_eq!((at(2), at(100), at(1000)), (Some(1), Some(16), None));
    }
}
