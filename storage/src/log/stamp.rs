//! The timestamps of batches: the wall clock's time, but never earlier than that of the batch before.
//!
//! Nothing in a log is found or ordered by its timestamps, and every wait is by the monotonic clock: a wall clock
//! that is set back or forward, or repeats a second, changes neither what is durable nor when. But a person who looks
//! for a moment in the history must be able to trust that timestamps rise with the LSNs.

use std::time::{SystemTime, UNIX_EPOCH};

/// A source of timestamps, in microseconds since 1970.
#[derive(Debug, Default)]
pub(crate) struct Stamps {
    last: u64,
}

impl Stamps {
    /// A source whose timestamps are never before `last`.
    pub(crate) fn after(last: u64) -> Self {
        Self { last }
    }

    /// The next timestamp: now, or the previous one if the clock has been set back since.
    pub(crate) fn next(&mut self) -> u64 {
        self.next_at(now())
    }

    /// The time now by these timestamps: never before the last one.
    pub(crate) fn now(&self) -> u64 {
        self.last.max(now())
    }

    fn next_at(&mut self, now: u64) -> u64 {
        self.last = self.last.max(now);
        self.last
    }
}

fn now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_micros() as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_follow_the_clock_and_never_go_back() {
        const DAY: u64 = 86_400_000_000;
        let mut stamps = Stamps::after(5 * DAY);
        // The clock is set back between two runs, set right, set forward by a day, back by two; then a second comes
        // twice.
        let clock = [4 * DAY, 6 * DAY, 7 * DAY, 5 * DAY, 7 * DAY + 9, 7 * DAY + 8];
        let given = clock.map(|now| stamps.next_at(now));
        let wanted = [5 * DAY, 6 * DAY, 7 * DAY, 7 * DAY, 7 * DAY + 9, 7 * DAY + 9];
        assert_eq!(given, wanted);
        let now = stamps.next();
        assert!(now > 20_000 * DAY && stamps.next() >= now);
    }
}
