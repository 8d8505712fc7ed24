//! The times of a log: the timestamps of its batches, and how long ago something was.
//!
//! Nothing in a log is found or ordered by its timestamps, and every wait is by the monotonic clock: a wall clock that is wrong
//! changes neither what is durable nor when. But a person looks for moments of the history, and history expires. So one wrong
//! reading of the wall clock must not spoil either:
//!
//! - While a log is open, the wall clock is believed as long as it goes with the machine's steady clock. After a jump, timestamps
//!   follow the steady clock, until the wall clock has stayed where it jumped to for [`BELIEVED`].
//! - Timestamps rise with the LSNs, and repeat if the clock was set back a little. If the clock proves to have been far ahead, they go
//!   back to the right time. A record was not written later than the next one: so the time of a record is the lowest timestamp from
//!   its own on.
//! - What expires is measured by the steady clock. Only of the time between two runs does nothing but timestamps tell: it counts if it
//!   is a [`DAY`] at most.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

const SECOND: u64 = 1_000_000;
/// A difference between the clocks that is no jump.
const TOLERATED: u64 = 60 * SECOND;
/// A jump is believed after this time.
const BELIEVED: u64 = 600 * SECOND;
const DAY: u64 = 86_400 * SECOND;
/// A wall clock that reads less, the begin of 2026, was never set.
const UNSET: u64 = 1_767_225_600 * SECOND;

/// A reading of both clocks, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ClockReading {
    /// The wall clock: since 1970.
    pub wall: u64,
    /// The steady clock: since the machine was started, also while it slept.
    pub steady: u64,
}

impl ClockReading {
    /// The clocks are read here only.
    pub(crate) fn now() -> Self {
        #[cfg(test)]
        if let Some(now) = CLOCKS.get() {
            return now;
        }
        let wall = SystemTime::now().duration_since(UNIX_EPOCH);
        let mut steady = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: the call writes to `steady` alone. It can't fail: Linux has this clock since 2.6.39.
        unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &mut steady) };
        Self {
            wall: wall.map_or(0, |wall| wall.as_micros() as u64),
            steady: steady.tv_sec as u64 * SECOND + steady.tv_nsec as u64 / 1000,
        }
    }

    /// What the wall clock would read at a later time of the steady clock.
    fn wall_at(self, steady: u64) -> u64 {
        self.wall + steady.saturating_sub(self.steady)
    }

    /// Whether the wall clock goes with the steady clock from here to another reading.
    fn goes_to(self, other: Self) -> bool {
        other.wall.abs_diff(self.wall_at(other.steady)) <= TOLERATED
    }
}

/// How much of the time between two timestamps certainly passed.
pub(crate) fn passed_between(from: u64, to: u64) -> u64 {
    let passed = to.saturating_sub(from);
    if passed <= DAY { passed } else { 0 }
}

/// A time of a log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Timestamp {
    /// Microseconds since 1970.
    pub unix_us: u64,
    /// Microseconds that have certainly passed since the oldest record of the log.
    pub passed: u64,
}

/// The source of a log's times.
#[derive(Debug)]
pub(crate) struct LogClock {
    /// The log, for those who read of it.
    log: String,
    /// The last timestamp, and when the log was opened: how much had passed since its oldest record.
    last: u64,
    opened: Timestamp,
    opened_at: u64,
    /// The last reading that was believed. `certain`: it is not only the timestamp that the log ended with.
    agreed: ClockReading,
    certain: bool,
    /// The wall clock has jumped to this reading, and has not been believed yet.
    doubted: Option<ClockReading>,
    /// The time stands still.
    #[cfg(test)]
    stopped: bool,
}

impl LogClock {
    /// The times of a log that is opened now. `last`: its newest timestamp, 0: it has none; `passed`: how much time has certainly
    /// passed from its oldest record to the newest; `born`: when it was made, by the wall clock, in microseconds since 1970.
    pub(crate) fn open(log: &Path, (last, passed): (u64, u64), born: u64) -> Self {
        Self::open_at(log, (last, passed), born, ClockReading::now())
    }

    pub(crate) fn open_at(
        log: &Path,
        (last, passed): (u64, u64),
        born: u64,
        now: ClockReading,
    ) -> Self {
        let behind = last.saturating_sub(now.wall);
        let was_ahead = behind > DAY && now.wall >= born.max(UNSET);
        let believed = behind <= TOLERATED || was_ahead;
        let clock = Self {
            log: log.display().to_string(),
            last,
            opened: Timestamp {
                unix_us: last,
                passed: match last {
                    0 => 0,
                    _ => passed + passed_between(last, now.wall),
                },
            },
            opened_at: now.steady,
            agreed: ClockReading {
                wall: if believed { now.wall } else { last },
                ..now
            },
            certain: believed,
            doubted: (!believed).then_some(now),
            #[cfg(test)]
            stopped: false,
        };
        if was_ahead {
            tracing::warn!(
                "log {}: its newest record has a time that is {} ahead: the clock was wrong then; from now on times are those of \
                 the clock, and records with later times count as written now",
                clock.log,
                length(behind),
            );
        } else if !believed {
            tracing::warn!(
                "log {}: the clock is {} behind the time of the newest record, which new records get until the clock has passed it, \
                 or for {}",
                clock.log,
                length(behind),
                length(BELIEVED),
            );
        }
        clock
    }

    /// A source whose time stands still.
    #[cfg(test)]
    pub(crate) fn stopped(at: u64) -> Self {
        let now = ClockReading {
            wall: at,
            ..ClockReading::now()
        };
        Self {
            stopped: true,
            ..Self::open_at(Path::new("log"), (at, 0), 0, now)
        }
    }

    /// The next timestamp.
    pub(crate) fn next(&mut self) -> Timestamp {
        self.next_at(ClockReading::now())
    }

    /// The time now by these timestamps.
    pub(crate) fn now(&mut self) -> Timestamp {
        let last = self.last;
        let now = self.next();
        self.last = last;
        now
    }

    pub(crate) fn next_at(&mut self, now: ClockReading) -> Timestamp {
        let time = self.time_at(now);
        // Times of a moment ago are repeated; those of a clock that was wrong are not.
        if time > self.last || self.last - time > TOLERATED {
            self.last = time;
        }
        let passed = now.steady.saturating_sub(self.opened_at);
        Timestamp {
            unix_us: self.last,
            passed: self.opened.passed + passed,
        }
    }

    /// The wall clock's time as far as it is believed.
    fn time_at(&mut self, now: ClockReading) -> u64 {
        #[cfg(test)]
        if self.stopped {
            return self.last;
        }
        let caught_up = !self.certain && now.wall >= self.last;
        let stays = |doubted: ClockReading| {
            doubted.goes_to(now) && now.steady.saturating_sub(doubted.steady) >= BELIEVED
        };
        if self.certain && self.agreed.goes_to(now) || caught_up || self.doubted.is_some_and(stays)
        {
            (self.agreed, self.certain, self.doubted) = (now, true, None);
            return now.wall;
        }
        let expected = match self.certain {
            true => self.agreed.wall_at(now.steady),
            false => self.last,
        };
        if !self.doubted.is_some_and(|doubted| doubted.goes_to(now)) {
            self.doubted = Some(now);
            let (jump, way) = match now.wall > expected {
                true => (now.wall - expected, "forward"),
                false => (expected - now.wall, "back"),
            };
            tracing::warn!(
                "log {}: the clock has jumped {way} by {}: times of new records do not follow it unless it stays there for {}",
                self.log,
                length(jump),
                length(BELIEVED),
            );
        }
        expected
    }
}

/// A length of time for people.
fn length(us: u64) -> String {
    match us / SECOND {
        seconds @ ..120 => format!("{seconds} s"),
        seconds @ ..7200 => format!("{} min", seconds / 60),
        seconds @ ..172_800 => format!("{} h", seconds / 3600),
        seconds => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
thread_local! {
    /// What this thread takes for a reading of the clocks; `None`: the host's.
    pub(crate) static CLOCKS: std::cell::Cell<Option<ClockReading>> = const { std::cell::Cell::new(None) };
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: u64 = 60 * SECOND;
    const HOUR: u64 = 60 * MINUTE;
    const YEAR: u64 = 365 * DAY;
    /// The right time when a test begins.
    const NOW: u64 = UNSET + 300 * DAY;
    /// The log was made then.
    const BORN: u64 = NOW - 10 * DAY;

    /// A machine whose wall clock may be wrong.
    struct Machine {
        steady: u64,
        /// How far the wall clock is ahead, or behind.
        ahead: i64,
    }

    impl Machine {
        fn new() -> Self {
            let (steady, ahead) = (7 * HOUR, 0);
            Self { steady, ahead }
        }

        fn right(&self) -> u64 {
            NOW + self.steady - 7 * HOUR
        }

        fn read(&self) -> ClockReading {
            ClockReading {
                wall: self.right().saturating_add_signed(self.ahead),
                steady: self.steady,
            }
        }

        fn open(&self, last: u64, passed: u64) -> LogClock {
            LogClock::open_at(Path::new("log"), (last, passed), BORN, self.read())
        }

        /// The time of a batch, so much later.
        fn after(&mut self, us: u64, clock: &mut LogClock) -> u64 {
            self.steady += us;
            clock.next_at(self.read()).unix_us
        }
    }

    #[test]
    fn stamps_follow_the_clock() {
        let mut machine = Machine::new();
        let mut clock = machine.open(0, 0);
        for us in [0, 5, SECOND, 3 * DAY, 0] {
            assert_eq!(machine.after(us, &mut clock), machine.right());
        }
        // A second comes twice, and the clock is set right by some seconds.
        let newest = machine.right();
        machine.ahead = -(SECOND as i64);
        assert_eq!(machine.after(9, &mut clock), newest);
        machine.ahead = 5 * SECOND as i64;
        assert_eq!(machine.after(9, &mut clock), machine.right() + 5 * SECOND);
    }

    /// One wrong reading, or some, change nothing.
    #[test]
    fn a_clock_that_jumps_and_returns_is_not_followed() {
        for jump in [YEAR as i64, -(YEAR as i64), 2 * HOUR as i64, -(HOUR as i64)] {
            let mut machine = Machine::new();
            let mut clock = machine.open(machine.right() - HOUR, 0);
            machine.after(SECOND, &mut clock);
            machine.ahead = jump;
            for _ in 0..9 {
                assert_eq!(machine.after(MINUTE, &mut clock), machine.right(), "{jump}");
            }
            machine.ahead = 0;
            assert_eq!(machine.after(MINUTE, &mut clock), machine.right());
            assert_eq!(clock.doubted, None);
        }
    }

    /// A clock that is set right is followed, after a while.
    #[test]
    fn a_clock_that_stays_where_it_jumped_to_is_believed() {
        for jump in [YEAR as i64, -(HOUR as i64), -(YEAR as i64)] {
            let mut machine = Machine::new();
            let mut clock = machine.open(0, 0);
            machine.ahead = jump;
            machine.after(SECOND, &mut clock);
            machine.steady += BELIEVED;
            let time = machine.after(0, &mut clock);
            assert_eq!(time, machine.read().wall, "{jump}");
            machine.ahead = 0;
            machine.after(SECOND, &mut clock);
            assert_eq!(machine.after(BELIEVED, &mut clock), machine.right());
        }
    }

    /// A whole run with a clock that is far ahead, and then the right time.
    #[test]
    fn what_a_clock_that_was_ahead_left_is_passed_at_once() {
        let mut machine = Machine::new();
        machine.ahead = YEAR as i64;
        let mut wrong = machine.open(machine.right() - HOUR, 0);
        let last = machine.after(HOUR, &mut wrong);
        assert_eq!(last, machine.right() + YEAR);
        machine.ahead = 0;
        let mut clock = machine.open(last, 0);
        assert_eq!(machine.after(MINUTE, &mut clock), machine.right());
        assert_eq!(machine.after(MINUTE, &mut clock), machine.right());
    }

    /// A machine without a battery begins long ago, and gets its time from the network a little later: what it writes before does not
    /// count as written long ago.
    #[test]
    fn a_clock_that_was_never_set_is_not_believed() {
        let mut machine = Machine::new();
        let last = machine.right() - HOUR;
        for wall in [0, 100 * DAY, UNSET - 1, BORN - 1, last - 2 * HOUR] {
            let right = machine.right();
            machine.ahead = wall as i64 - right as i64;
            let mut clock = machine.open(last, 0);
            assert_eq!(machine.after(MINUTE, &mut clock), last);
            machine.ahead = 0;
            assert_eq!(machine.after(MINUTE, &mut clock), machine.right());
            // Without a network it stays there.
            machine.ahead = wall as i64 - right as i64;
            let mut clock = machine.open(last, 0);
            assert_eq!(machine.after(BELIEVED, &mut clock), machine.read().wall);
        }
    }

    /// What has passed is known whatever the wall clock says.
    #[test]
    fn time_passes_by_the_steady_clock() {
        let mut machine = Machine::new();
        // Closed for an hour; two days; for a year by a clock that is wrong; and until a time before the newest record.
        for (last, closed) in [
            (machine.right() - HOUR, HOUR),
            (machine.right() - 2 * DAY, 0),
            (machine.right() - YEAR, 0),
            (machine.right() + YEAR, 0),
            (0, 0),
        ] {
            let mut clock = machine.open(last, if last > 0 { 5 } else { 0 });
            let before = if last > 0 { 5 } else { 0 } + closed;
            assert_eq!(clock.next_at(machine.read()).passed, before);
            machine.ahead = YEAR as i64;
            machine.steady += 3 * DAY;
            assert_eq!(clock.next_at(machine.read()).passed, before + 3 * DAY);
            machine.ahead = 0;
        }
    }

    #[test]
    fn a_time_that_stands_stands() {
        let mut clock = LogClock::stopped(77 * DAY);
        assert_eq!(clock.next().unix_us, 77 * DAY);
        assert_eq!(clock.now().unix_us, 77 * DAY);
        assert!(ClockReading::now().wall > 20_000 * DAY);
    }
}
