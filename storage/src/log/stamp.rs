//! The times that batches are stamped with: the wall clock's, but never earlier than the batch before.
//!
//! Nothing in a log is found or ordered by its times, and every wait is by the monotonic clock: a wall clock that is set
//! back or forward, or repeats a second, changes neither what is durable nor when. But whoever looks for a moment in the
//! history must be able to trust that time goes on as LSNs do.

use std::time::{SystemTime, UNIX_EPOCH};

/// Gives stamps, in microseconds since 1970.
#[derive(Debug, Default)]
pub(crate) struct Stamps {
    last: u64,
}

impl Stamps {
    /// Those that come after `last`.
    pub(crate) fn after(last: u64) -> Self {
        Self { last }
    }

    /// The next: now, or as the one before if the clock has been set back since.
    pub(crate) fn next(&mut self) -> u64 {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        self.next_at(now.map_or(0, |now| now.as_micros() as u64))
    }

    fn next_at(&mut self, now: u64) -> u64 {
        self.last = self.last.max(now);
        self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_follow_the_clock_and_never_go_back() {
        const DAY: u64 = 86_400_000_000;
        let mut stamps = Stamps::after(5 * DAY);
        // Set back between two runs, set right, forward by a day, back by two; a second that comes twice.
        let clock = [4 * DAY, 6 * DAY, 7 * DAY, 5 * DAY, 7 * DAY + 9, 7 * DAY + 8];
        let given = clock.map(|now| stamps.next_at(now));
        let wanted = [5 * DAY, 6 * DAY, 7 * DAY, 7 * DAY, 7 * DAY + 9, 7 * DAY + 9];
        assert_eq!(given, wanted);
        let now = stamps.next();
        assert!(now > 20_000 * DAY && stamps.next() >= now);
    }
}
