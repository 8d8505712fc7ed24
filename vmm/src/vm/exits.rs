//! Counts exits to user space by reason: what a request costs besides its own work.

use std::sync::atomic::{AtomicU64, Ordering};

/// Why KVM_RUN returned to user space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitReason {
    /// A port was read.
    PortRead,
    /// A port was written.
    PortWrite,
    /// A memory-mapped register was read.
    MmioRead,
    /// A memory-mapped register was written.
    MmioWrite,
    /// The vCPU halted.
    Halt,
    /// A signal came.
    Interrupted,
    /// Any other reason.
    Other,
}

impl ExitReason {
    /// Every reason.
    pub const ALL: [Self; 7] = [
        Self::PortRead,
        Self::PortWrite,
        Self::MmioRead,
        Self::MmioWrite,
        Self::Halt,
        Self::Interrupted,
        Self::Other,
    ];

    /// The reason's name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::PortRead => "port_read",
            Self::PortWrite => "port_write",
            Self::MmioRead => "mmio_read",
            Self::MmioWrite => "mmio_write",
            Self::Halt => "halt",
            Self::Interrupted => "interrupted",
            Self::Other => "other",
        }
    }
}

/// Exits of one vCPU.
#[derive(Debug, Default)]
pub struct ExitCounters {
    counts: [AtomicU64; ExitReason::ALL.len()],
}

impl ExitCounters {
    /// Counts one exit.
    pub fn count(&self, reason: ExitReason) {
        self.counts[reason as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Exits for `reason` so far.
    pub fn get(&self, reason: ExitReason) -> u64 {
        self.counts[reason as usize].load(Ordering::Relaxed)
    }

    /// Exits because the guest accessed a register or port.
    pub fn accesses(&self) -> u64 {
        use ExitReason::{MmioRead, MmioWrite, PortRead, PortWrite};
        [PortRead, PortWrite, MmioRead, MmioWrite]
            .into_iter()
            .map(|reason| self.get(reason))
            .sum()
    }

    /// All exits so far.
    pub fn total(&self) -> u64 {
        ExitReason::ALL
            .into_iter()
            .map(|reason| self.get(reason))
            .sum()
    }
}
