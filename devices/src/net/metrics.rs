//! Counters of a network device, readable while it runs.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::metrics::InterruptCounter;

macro_rules! net_metrics {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Live counters of one device since it was created (a reset keeps them).
        ///
        /// Each counter is exact, but they are not all read at the same instant.
        #[derive(Debug, Default)]
        pub struct NetMetrics {
            $($(#[$doc])* pub $name: AtomicU64,)*
        }

        /// The values of [`NetMetrics`] at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct NetCounts {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl NetMetrics {
            /// Reads every counter.
            pub fn counts(&self) -> NetCounts {
                NetCounts { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

net_metrics! {
    /// Frames that the driver got.
    frames_received,
    /// Their bytes, without the header of virtio.
    bytes_received,
    /// Frames of the link that the driver did not get: too long, or for a buffer that is too small
    /// or not there.
    receive_drops,
    /// Frames that the driver sent and that are on their way to the link.
    frames_sent,
    /// Their bytes, without the header of virtio.
    bytes_sent,
    /// Frames of the driver that were not sent: of a wrong length, with a header that asks for an
    /// offload, or because the link is down.
    send_drops,
    /// Doorbells seen by the queue workers.
    doorbells,
    /// Interrupts sent to the driver, for queues and for the configuration.
    interrupts,
}

impl InterruptCounter for NetMetrics {
    fn count_interrupt(&self) {
        self.interrupts.fetch_add(1, Ordering::Relaxed);
    }
}
