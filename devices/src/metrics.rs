//! Counters of a device, readable while it runs.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::backend::Operation;
use crate::latency::{Latencies, add};

macro_rules! block_metrics {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Live counters of one device, over all of its queues and since it was created (a reset
        /// keeps them).
        ///
        /// Each counter is exact, but they are not all read at the same instant.
        #[derive(Debug, Default)]
        pub struct BlockMetrics {
            $($(#[$doc])* pub $name: AtomicU64,)*
            /// How long requests took.
            pub latencies: Latencies,
        }

        /// The values of [`BlockMetrics`] at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct BlockCounts {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl BlockMetrics {
            /// Reads every counter.
            pub fn counts(&self) -> BlockCounts {
                BlockCounts { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

block_metrics! {
    /// Requests taken from the rings, malformed ones included.
    requests,
    /// IN requests.
    reads,
    /// OUT requests.
    writes,
    /// FLUSH requests.
    flushes,
    /// DISCARD requests.
    discards,
    /// WRITE_ZEROES requests.
    write_zeroes,
    /// SECURE_ERASE requests.
    secure_erases,
    /// GET_ID requests.
    get_ids,
    /// Bytes returned by successful IN requests.
    bytes_read,
    /// Bytes written by successful OUT requests.
    bytes_written,
    /// Requests answered with anything but VIRTIO_BLK_S_OK, and chains that could not be answered.
    errors,
    /// Doorbells seen by the queue workers: writes to the queues' event descriptors.
    doorbells,
    /// Nanoseconds of processor time spent polling rings, whether or not a request was found.
    poll_ns,
    /// Interrupts sent to the driver, for queues and for the configuration.
    interrupts,
}

impl BlockMetrics {
    /// Counts an operation by its kind.
    pub(crate) fn count(&self, operation: &Operation) {
        let counter = match operation {
            Operation::Read { .. } => &self.reads,
            Operation::Write { .. } => &self.writes,
            Operation::Flush => &self.flushes,
            Operation::Discard { .. } => &self.discards,
            Operation::WriteZeroes { .. } => &self.write_zeroes,
        };
        add(counter, 1);
    }

    /// The metrics of a device with this number of queues.
    pub(crate) fn of_queues(queues: usize) -> Self {
        Self {
            latencies: Latencies::new(queues),
            ..Self::default()
        }
    }
}

/// Counts the interrupts of a device.
pub trait InterruptCounter: Send + Sync {
    /// Counts an interrupt that was sent.
    fn count_interrupt(&self);
}

impl InterruptCounter for BlockMetrics {
    fn count_interrupt(&self) {
        self.interrupts.fetch_add(1, Ordering::Relaxed);
    }
}
