//! Why a write waits, or fails, before it is in the log.

use std::fmt;

/// Why a write waits before it is in the log, or fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StallCause {
    /// The log is full, and a copy to the base images has not made room yet.
    LogFull,
    /// The index of the log takes as much memory as it may, and a copy to the base images has not
    /// made it smaller yet.
    IndexFull,
    /// As many bytes as may be are in memory and not in the log yet.
    PendingFull,
    /// The disk has used more than its share of the log's room, and other disks want some.
    Share,
    /// The base image can't be written, and its spill file may take no more.
    SpillFull,
    /// The replica, or the archive, lacks as much of the log as it may.
    Replica,
    /// The disk is being restored in place.
    Restore,
    /// The log is being closed, or the disk leaves it.
    Closing,
}

impl StallCause {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::LogFull,
        Self::IndexFull,
        Self::PendingFull,
        Self::Share,
        Self::SpillFull,
        Self::Replica,
        Self::Restore,
        Self::Closing,
    ];

    /// Its name, for programs.
    pub fn name(self) -> &'static str {
        match self {
            Self::LogFull => "log_full",
            Self::IndexFull => "index_full",
            Self::PendingFull => "pending_full",
            Self::Share => "share",
            Self::SpillFull => "spill_full",
            Self::Replica => "replica",
            Self::Restore => "restore",
            Self::Closing => "closing",
        }
    }
}

/// A clause.
impl fmt::Display for StallCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LogFull => "the log is full until a copy to the images has made room",
            Self::IndexFull => {
                "the log's index has reached index-memory= until a copy to the images has made it \
                 smaller"
            }
            Self::PendingFull => "the log's medium is slower than the writes",
            Self::Share => "the disk has used its share of the log's room",
            Self::SpillFull => "the image can't be written, and its spill file is full",
            Self::Replica => "the archive lacks as much of the log as it may",
            Self::Restore => "the disk is being restored in place",
            Self::Closing => "the disk is leaving the log",
        })
    }
}

/// How many writes have met each cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StallCounts([u64; StallCause::ALL.len()]);

impl StallCounts {
    /// Counts of each cause, from this function.
    pub fn of(count: impl Fn(StallCause) -> u64) -> Self {
        Self(StallCause::ALL.map(count))
    }

    /// The count of this cause.
    pub fn get(&self, cause: StallCause) -> u64 {
        self.0[cause as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_cause_has_a_count_and_a_name() {
        let counts = StallCounts::of(|cause| cause as u64 + 1);
        for (at, cause) in StallCause::ALL.into_iter().enumerate() {
            assert_eq!(counts.get(cause), at as u64 + 1);
            let same = |other: &StallCause| other.name() == cause.name();
            assert_eq!(
                StallCause::ALL.iter().filter(|&other| same(other)).count(),
                1
            );
        }
    }
}
