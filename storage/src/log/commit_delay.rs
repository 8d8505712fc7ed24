//! How long a commit group waits for more requests to join before it starts.
//!
//! While a group syncs, new waiters collect for the next one. So N clients that come straight back
//! end up in two alternating groups of N/2. A short delay after a sync, until the clients it served
//! are back, makes one group of them all and halves the syncs. The delay costs the present waiters
//! time, and gains nothing if no client comes back. So it lasts at most half as long as a sync,
//! ends as soon as all expected waiters are there, and is skipped for a while after it gained
//! nothing.

use std::time::{Duration, Instant};

use crate::catalog::options::CommitWait;
use crate::sync;

/// Longest delay if the options give a count without a time; MariaDB's default.
const WAIT_FOR_COUNT: Duration = Duration::from_millis(100);
/// An adaptive delay shorter than this is not worth a timer.
const SHORTEST: Duration = Duration::from_micros(100);
/// Longest adaptive delay, however long a sync takes.
const LONGEST: Duration = Duration::from_millis(20);
/// A thread that serves requests does a sync itself only if it takes less than this.
const QUICK: Duration = Duration::from_micros(400);
/// After delays that gained nothing, fewer than 2^this groups skip the delay.
const MOST_MISSES: u32 = 6;

#[derive(Debug, Default, PartialEq, Eq)]
enum DelayPhase {
    #[default]
    Idle,
    /// A delay is running until this time.
    Waiting(Instant),
    /// The delay has run out.
    Over,
}

/// The commit delay of one log. Guarded by the log's lock.
#[derive(Debug, Default)]
pub(crate) struct CommitDelay {
    wait: CommitWait,
    phase: DelayPhase,
    /// Smoothed duration of a sync.
    sync_time: Duration,
    /// Waiters served by the last group, plus those already waiting when it ended.
    expected: usize,
    /// Consecutive adaptive delays that ended without all expected waiters.
    misses: u32,
    /// Groups that still start without a delay before one is tried again.
    skip: u32,
}

impl CommitDelay {
    pub(crate) fn new(wait: CommitWait) -> Self {
        Self {
            wait,
            ..Self::default()
        }
    }

    /// Whether a group of `waiting` waiters starts now; no sync is running. `complete`: all clients
    /// are waiting already, so nobody else can join. If it does not start, the leader calls
    /// [`expire`](Self::expire) at the [`deadline`](Self::deadline).
    pub(crate) fn try_start(&mut self, waiting: usize, complete: bool) -> bool {
        let adaptive = self.wait == CommitWait::default();
        let has_enough = self.has_enough(waiting, complete);
        match self.phase {
            DelayPhase::Idle if has_enough => true,
            DelayPhase::Idle if adaptive && self.skip > 0 => {
                self.skip -= 1;
                true
            }
            DelayPhase::Idle => {
                let limit = self.limit();
                if !limit.is_zero() {
                    self.phase = DelayPhase::Waiting(sync::now() + limit);
                }
                limit.is_zero()
            }
            DelayPhase::Waiting(_) if has_enough => {
                self.misses = 0;
                self.phase = DelayPhase::Idle;
                true
            }
            DelayPhase::Waiting(_) => false,
            DelayPhase::Over => {
                self.misses = if has_enough {
                    0
                } else {
                    (self.misses + 1).min(MOST_MISSES)
                };
                self.skip = (1 << self.misses) - 1;
                self.phase = DelayPhase::Idle;
                true
            }
        }
    }

    /// When the running delay ends, if there is one.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        match self.phase {
            DelayPhase::Waiting(deadline) => Some(deadline),
            DelayPhase::Idle | DelayPhase::Over => None,
        }
    }

    /// Whether a group of one waiter would start at once and, judging by recent syncs, end soon.
    /// Counts as quick until a sync has been measured.
    pub(crate) fn is_quick(&self) -> bool {
        self.sync_time < QUICK && self.phase == DelayPhase::Idle && self.has_enough(1, false)
    }

    /// How long a sync takes, smoothed.
    pub(crate) fn sync_time(&self) -> Duration {
        self.sync_time
    }

    /// Whether a group has to keep waiting; otherwise the leader calls
    /// [`try_start`](Self::try_start).
    pub(crate) fn must_wait(&self, waiting: usize, complete: bool) -> bool {
        self.deadline().is_some() && !self.has_enough(waiting, complete)
    }

    /// Whether all expected waiters are there.
    fn has_enough(&self, waiting: usize, complete: bool) -> bool {
        let target = self
            .wait
            .count
            .map_or(self.expected, |count| count as usize);
        complete || waiting >= target
    }

    fn limit(&self) -> Duration {
        match (self.wait.longest, self.wait.count) {
            (Some(longest), _) => longest,
            (None, Some(_)) => WAIT_FOR_COUNT,
            (None, None) => match (self.sync_time / 2).min(LONGEST) {
                short if short < SHORTEST => Duration::ZERO,
                half => half,
            },
        }
    }

    /// The delay, if one is running, has run out.
    pub(crate) fn expire(&mut self) {
        if self.deadline().is_some() {
            self.phase = DelayPhase::Over;
        }
    }

    /// Cancels any delay, because a group starts regardless.
    pub(crate) fn interrupt(&mut self) {
        self.phase = DelayPhase::Idle;
    }

    /// Records a finished group: its sync took `sync_time`, it served `served` waiters, and
    /// `waiting` others are waiting already.
    pub(crate) fn record_group(&mut self, sync_time: Duration, served: usize, waiting: usize) {
        self.sync_time = if self.sync_time.is_zero() {
            sync_time
        } else {
            (self.sync_time * 7 + sync_time) / 8
        };
        self.expected = served + waiting;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SYNC: Duration = Duration::from_millis(1);

    /// Asserts that a group of `waiting` waiters waits for `time`.
    #[track_caller]
    fn waits(delay: &mut CommitDelay, waiting: usize, time: Duration) {
        let before = sync::now();
        assert!(!delay.try_start(waiting, false));
        let deadline = delay.deadline().expect("a wait");
        assert!(before + time <= deadline && deadline <= sync::now() + time);
    }

    #[test]
    fn syncs_count_as_quick_until_they_were_slow() {
        let mut delay = CommitDelay::default();
        assert!(delay.is_quick(), "no sync was measured yet");
        delay.record_group(QUICK / 2, 1, 0);
        assert!(delay.is_quick());
        delay.record_group(QUICK * 10, 1, 0);
        assert!(!delay.is_quick());
        // A group that expects more waiters, or is configured to wait for them, is not a lone one.
        let mut delay = CommitDelay::default();
        delay.record_group(QUICK / 2, 2, 0);
        assert!(!delay.is_quick());
        let delay = CommitDelay::new(CommitWait {
            longest: None,
            count: Some(2),
        });
        assert!(!delay.is_quick());
    }

    #[test]
    fn a_lone_client_never_waits() {
        let mut delay = CommitDelay::default();
        for _ in 0..10 {
            assert!(delay.try_start(1, false));
            delay.record_group(SYNC, 1, 0);
        }
    }

    #[test]
    fn two_alternating_groups_become_one() {
        let mut delay = CommitDelay::default();
        // The group served four while four more arrived: the next group expects eight.
        delay.record_group(SYNC, 4, 4);
        waits(&mut delay, 4, SYNC / 2);
        assert!(!delay.try_start(7, false));
        assert!(delay.try_start(8, false));
        delay.record_group(SYNC, 8, 0);
        waits(&mut delay, 1, SYNC / 2);
        // No other client can join.
        assert!(delay.try_start(3, true));
    }

    #[test]
    fn delays_that_gain_nothing_become_rare() {
        let mut delay = CommitDelay::default();
        let mut waits = 0;
        for _ in 0..1000 {
            delay.record_group(SYNC, 4, 4);
            if !delay.try_start(4, false) {
                waits += 1;
                delay.expire();
                assert!(delay.try_start(5, false));
            }
        }
        assert!(waits < 1000 / 40, "{waits}");
        // Now the clients do come back, and there are enough groups to notice it.
        let mut joined = 0;
        for _ in 0..100 {
            delay.record_group(SYNC, 4, 4);
            if !delay.try_start(4, false) {
                assert!(delay.try_start(8, false));
                joined += 1;
            }
        }
        assert!(joined > 30, "{joined}");
    }

    #[test]
    fn a_delay_ends_at_its_deadline_and_a_late_expiry_is_ignored() {
        let mut delay = CommitDelay::default();
        delay.expire();
        delay.record_group(SYNC, 4, 4);
        waits(&mut delay, 4, SYNC / 2);
        assert!(!delay.try_start(5, false));
        delay.expire();
        assert!(delay.try_start(5, false));
    }

    #[test]
    fn fixed_delays_are_as_configured() {
        let none = &mut CommitDelay::new(CommitWait::NONE);
        none.record_group(SYNC, 4, 4);
        assert!(none.try_start(1, false));
        let fixed = &mut CommitDelay::new(CommitWait {
            longest: Some(Duration::from_millis(7)),
            count: Some(3),
        });
        assert!(fixed.try_start(3, false));
        waits(fixed, 1, Duration::from_millis(7));
        assert!(!fixed.try_start(2, false));
        assert!(fixed.try_start(3, false));
        let count = &mut CommitDelay::new(CommitWait {
            longest: None,
            count: Some(2),
        });
        waits(count, 1, WAIT_FOR_COUNT);
    }
}
