//! How long a commit group waits for more to join it before it starts.
//!
//! While a group syncs, new waiters collect for the next one. So with N clients that come back at once, two groups
//! take turns, each with half of the clients. A short wait after a sync, until the clients that it served are back,
//! makes one group of all: half the syncs. The wait costs the present waiters time, and gains nothing if no client
//! comes back. So it takes at most half of the time of a sync, ends when all expected waiters are there, and is
//! skipped for a while after it was in vain.

use std::time::Duration;

use crate::catalog::options::CommitWait;

/// Longest wait if the options give a count without a time; the same as MariaDB's.
const WAIT_FOR_COUNT: Duration = Duration::from_millis(100);
/// A shorter adaptive wait is not worth a timer.
const SHORTEST: Duration = Duration::from_micros(100);
/// Longest adaptive wait, whatever a sync takes.
const LONGEST: Duration = Duration::from_millis(20);
/// A thread that serves requests makes no sync itself that takes longer.
const QUICK: Duration = Duration::from_micros(400);
/// After waits in vain, fewer groups than two to the power of this start without a wait.
const MOST_MISSES: u32 = 6;

/// Whether a group that could start does so or waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It starts.
    Start,
    /// It waits: the leader sets a timer of this length and calls [`Gather::over`] at its end.
    Wait(Duration),
    /// It is waiting already.
    Hold,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Idle,
    /// A wait is under way.
    Waiting,
    /// The wait has lasted its time.
    Over,
}

/// The wait of one log's groups. Guarded by the log's lock.
#[derive(Debug, Default)]
pub(crate) struct Gather {
    wait: CommitWait,
    phase: Phase,
    /// Smoothed time of a sync.
    sync_time: Duration,
    /// Waiters that the last group served, and those that waited when it ended, added up.
    expected: usize,
    /// Adaptive waits in a row that ended without all expected waiters.
    misses: u32,
    /// Groups that start without a wait before the next wait is tried.
    skip: u32,
}

impl Gather {
    pub(crate) fn new(wait: CommitWait) -> Self {
        Self {
            wait,
            ..Self::default()
        }
    }

    /// Decides whether a group of `waiting` waiters starts; no sync is under way. `complete`: all clients wait
    /// already, so none can join.
    pub(crate) fn ask(&mut self, waiting: usize, complete: bool) -> Verdict {
        let adaptive = self.wait == CommitWait::default();
        let enough = self.enough(waiting, complete);
        match self.phase {
            Phase::Idle if enough => Verdict::Start,
            Phase::Idle if adaptive && self.skip > 0 => {
                self.skip -= 1;
                Verdict::Start
            }
            Phase::Idle => {
                let longest = self.longest();
                if longest.is_zero() {
                    return Verdict::Start;
                }
                self.phase = Phase::Waiting;
                Verdict::Wait(longest)
            }
            Phase::Waiting if enough => {
                self.misses = 0;
                self.phase = Phase::Idle;
                Verdict::Start
            }
            Phase::Waiting => Verdict::Hold,
            Phase::Over => {
                self.misses = if enough {
                    0
                } else {
                    (self.misses + 1).min(MOST_MISSES)
                };
                self.skip = (1 << self.misses) - 1;
                self.phase = Phase::Idle;
                Verdict::Start
            }
        }
    }

    /// Whether a group of one waiter would start at once, and would soon be over if its sync takes as long as the last
    /// ones. Until a sync has been measured, it counts as quick.
    pub(crate) fn is_quick(&self) -> bool {
        self.sync_time < QUICK && self.phase == Phase::Idle && self.enough(1, false)
    }

    /// Whether a group only has to go on waiting; otherwise the leader calls [`ask`](Self::ask).
    pub(crate) fn holds(&self, waiting: usize, complete: bool) -> bool {
        self.phase == Phase::Waiting && !self.enough(waiting, complete)
    }

    /// Whether the expected waiters are there.
    fn enough(&self, waiting: usize, complete: bool) -> bool {
        let target = self
            .wait
            .count
            .map_or(self.expected, |count| count as usize);
        complete || waiting >= target
    }

    fn longest(&self) -> Duration {
        match (self.wait.longest, self.wait.count) {
            (Some(longest), _) => longest,
            (None, Some(_)) => WAIT_FOR_COUNT,
            (None, None) => match (self.sync_time / 2).min(LONGEST) {
                short if short < SHORTEST => Duration::ZERO,
                half => half,
            },
        }
    }

    /// Notes that the wait, if one is under way, has lasted its time.
    pub(crate) fn over(&mut self) {
        if self.phase == Phase::Waiting {
            self.phase = Phase::Over;
        }
    }

    /// Ends any wait, because a group starts without asking.
    pub(crate) fn interrupt(&mut self) {
        self.phase = Phase::Idle;
    }

    /// Notes that a group has ended: its sync took `sync_time`, it served `served` waiters, and `waiting` others wait
    /// already.
    pub(crate) fn ended(&mut self, sync_time: Duration, served: usize, waiting: usize) {
        self.sync_time = match self.sync_time.is_zero() {
            true => sync_time,
            false => (self.sync_time * 7 + sync_time) / 8,
        };
        self.expected = served + waiting;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SYNC: Duration = Duration::from_millis(1);

    fn waited(gather: &mut Gather, waiting: usize) {
        assert_eq!(gather.ask(waiting, false), Verdict::Wait(SYNC / 2));
    }

    #[test]
    fn syncs_count_as_quick_until_they_were_slow() {
        let mut gather = Gather::default();
        assert!(gather.is_quick(), "no sync was measured yet");
        gather.ended(QUICK / 2, 1, 0);
        assert!(gather.is_quick());
        gather.ended(QUICK * 10, 1, 0);
        assert!(!gather.is_quick());
        // A group that has reason to expect more waiters, or was told to wait for them, is no lone one.
        let mut gather = Gather::default();
        gather.ended(QUICK / 2, 2, 0);
        assert!(!gather.is_quick());
        let gather = Gather::new(CommitWait {
            longest: None,
            count: Some(2),
        });
        assert!(!gather.is_quick());
    }

    #[test]
    fn a_lone_client_never_waits() {
        let mut gather = Gather::default();
        for _ in 0..10 {
            assert_eq!(gather.ask(1, false), Verdict::Start);
            gather.ended(SYNC, 1, 0);
        }
    }

    #[test]
    fn two_alternating_groups_become_one() {
        let mut gather = Gather::default();
        // The group served four, and four more had come meanwhile: the next group expects eight.
        gather.ended(SYNC, 4, 4);
        waited(&mut gather, 4);
        assert_eq!(gather.ask(7, false), Verdict::Hold);
        assert_eq!(gather.ask(8, false), Verdict::Start);
        gather.ended(SYNC, 8, 0);
        waited(&mut gather, 1);
        // No other client can join.
        assert_eq!(gather.ask(3, true), Verdict::Start);
    }

    #[test]
    fn waits_for_nothing_become_rare() {
        let mut gather = Gather::default();
        let mut waits = 0;
        for _ in 0..1000 {
            gather.ended(SYNC, 4, 4);
            if let Verdict::Wait(_) = gather.ask(4, false) {
                waits += 1;
                gather.over();
                assert_eq!(gather.ask(5, false), Verdict::Start);
            }
        }
        assert!(waits < 1000 / 40, "{waits}");
        // Now the clients do come back, and enough groups follow for that to be noticed.
        let mut joined = 0;
        for _ in 0..100 {
            gather.ended(SYNC, 4, 4);
            if let Verdict::Wait(_) = gather.ask(4, false) {
                assert_eq!(gather.ask(8, false), Verdict::Start);
                joined += 1;
            }
        }
        assert!(joined > 30, "{joined}");
    }

    #[test]
    fn a_wait_ends_with_its_time_and_what_is_over_late_counts_for_nothing() {
        let mut gather = Gather::default();
        gather.over();
        gather.ended(SYNC, 4, 4);
        waited(&mut gather, 4);
        assert_eq!(gather.ask(5, false), Verdict::Hold);
        gather.over();
        assert_eq!(gather.ask(5, false), Verdict::Start);
    }

    #[test]
    fn fixed_waits_are_as_told() {
        let none = &mut Gather::new(CommitWait::NONE);
        none.ended(SYNC, 4, 4);
        assert_eq!(none.ask(1, false), Verdict::Start);
        let fixed = &mut Gather::new(CommitWait {
            longest: Some(Duration::from_millis(7)),
            count: Some(3),
        });
        assert_eq!(fixed.ask(3, false), Verdict::Start);
        assert_eq!(fixed.ask(1, false), Verdict::Wait(Duration::from_millis(7)));
        assert_eq!(fixed.ask(2, false), Verdict::Hold);
        assert_eq!(fixed.ask(3, false), Verdict::Start);
        let count = &mut Gather::new(CommitWait {
            longest: None,
            count: Some(2),
        });
        assert_eq!(count.ask(1, false), Verdict::Wait(WAIT_FOR_COUNT));
    }
}
