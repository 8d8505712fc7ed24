//! A log's clock: the timestamps of its batches, and how long ago something happened.
//!
//! Nothing in a log is found or ordered by timestamps, and every wait uses the monotonic clock. So
//! a wrong wall clock affects neither what is durable nor when. But people look for points in time,
//! and history expires; one wrong reading of the wall clock must not spoil either:
//!
//! - While a log is open, the wall clock is believed as long as it agrees with the machine's steady
//!   clock. After a jump, timestamps follow the steady clock until the wall clock has stayed where
//!   it jumped to for [`BELIEVED`].
//! - Timestamps rise with the LSNs, and repeat if the clock was set back a little. If the clock
//!   turns out to have been far ahead, they go back to the right time. (A time before the log was
//!   made is that of a clock that was never set, unless the kernel says that a time service keeps
//!   it.) No record was written later than the next one, so a record's time is the lowest timestamp
//!   from its own on.
//! - Expiry is measured by the steady clock. For the time between two runs there are only
//!   timestamps; it counts if it is a [`DAY`] at most.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

const SECOND: u64 = 1_000_000;
/// Clocks that differ by no more than this agree.
const TOLERATED: u64 = 60 * SECOND;
/// How long the wall clock must stay where it jumped to before it is believed.
const BELIEVED: u64 = 600 * SECOND;
const DAY: u64 = 86_400 * SECOND;
/// The start of 2026: a wall clock that reads less was never set.
const UNSET: u64 = 1_767_225_600 * SECOND;

/// A reading of both clocks, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ClockReading {
    /// Wall clock, since 1970.
    pub wall: u64,
    /// Steady clock, since boot, sleep included.
    pub steady: u64,
}

impl ClockReading {
    /// The only place where the clocks are read.
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
        // SAFETY: the call writes to `steady` alone. It can't fail: Linux has this clock since
        // 2.6.39.
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

    /// Whether the wall clock agrees with the steady clock from here to another reading.
    fn goes_to(self, other: Self) -> bool {
        other.wall.abs_diff(self.wall_at(other.steady)) <= TOLERATED
    }
}

/// Whether a time service, such as NTP, keeps the wall clock right.
fn is_synchronized() -> bool {
    #[cfg(test)]
    return SYNCHRONIZED.get();
    #[cfg(not(test))]
    {
        // SAFETY: a `timex` consists of numbers, which may all be zero.
        let mut state: libc::timex = unsafe { std::mem::zeroed() };
        // SAFETY: the call writes to `state` alone. Without modes it changes nothing.
        let read = unsafe {
            libc::syscall(
                libc::SYS_clock_adjtime,
                libc::CLOCK_REALTIME,
                &raw mut state,
            )
        };
        read >= 0 && state.status & libc::STA_UNSYNC == 0
    }
}

/// How much time certainly passed between two timestamps.
pub(crate) fn passed_between(from: u64, to: u64) -> u64 {
    let passed = to.saturating_sub(from);
    if passed <= DAY { passed } else { 0 }
}

/// A point in time by a log's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Timestamp {
    /// Microseconds since 1970.
    pub unix_us: u64,
    /// Microseconds that have certainly passed since the log's oldest record.
    pub passed: u64,
}

/// A log's clock.
#[derive(Debug)]
pub(crate) struct LogClock {
    /// The log, for messages.
    log: String,
    /// The last timestamp; and, when the log was opened, how much time had passed since its oldest
    /// record.
    last: u64,
    opened: Timestamp,
    opened_at: u64,
    /// The last reading that was believed. `certain`: it is more than just the last timestamp in
    /// the log.
    agreed: ClockReading,
    certain: bool,
    /// The wall clock jumped to this reading, and is not believed yet.
    doubted: Option<ClockReading>,
    /// The clock is stopped.
    #[cfg(test)]
    stopped: bool,
}

impl LogClock {
    /// The clock of a log that is being opened. `last`: its newest timestamp, 0 if there is none.
    /// `passed`: how much time certainly passed from its oldest record to the newest. `born`: when
    /// the log was made, by the wall clock, in microseconds since 1970.
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
        // If the log was made with the wrong clock, the right time is before its birth.
        let is_set = now.wall >= UNSET && (now.wall >= born || is_synchronized());
        let was_ahead = behind > DAY && is_set;
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
                "log {}: the time of its newest record is {} ahead, so the clock was wrong then; \
                 new records get the clock's time, and records with later times count as written \
                 now",
                clock.log,
                length(behind),
            );
        } else if !believed {
            tracing::warn!(
                "log {}: the clock is {} behind the time of the newest record; new records get \
                 that time until the clock has passed it, or for {}",
                clock.log,
                length(behind),
                length(BELIEVED),
            );
        }
        clock
    }

    /// A stopped clock.
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

    /// The time now, without using up a timestamp.
    pub(crate) fn now(&mut self) -> Timestamp {
        let last = self.last;
        let now = self.next();
        self.last = last;
        now
    }

    pub(crate) fn next_at(&mut self, now: ClockReading) -> Timestamp {
        let time = self.time_at(now);
        // If the clock went back a little, repeat the last timestamp; if it had been wrong, don't.
        if time > self.last || self.last - time > TOLERATED {
            self.last = time;
        }
        let passed = now.steady.saturating_sub(self.opened_at);
        Timestamp {
            unix_us: self.last,
            passed: self.opened.passed + passed,
        }
    }

    /// The time: the wall clock's, as far as it is believed.
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
        let expected = if self.certain {
            self.agreed.wall_at(now.steady)
        } else {
            self.last
        };
        if !self.doubted.is_some_and(|doubted| doubted.goes_to(now)) {
            self.doubted = Some(now);
            let (jump, way) = if now.wall > expected {
                (now.wall - expected, "forward")
            } else {
                (expected - now.wall, "back")
            };
            tracing::warn!(
                "log {}: the clock has jumped {way} by {}; the times of new records follow only if \
                 it stays there for {}",
                self.log,
                length(jump),
                length(BELIEVED),
            );
        }
        expected
    }
}

/// A duration, for people.
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
    /// The clocks that this thread reads; `None`: the host's.
    pub(crate) static CLOCKS: std::cell::Cell<Option<ClockReading>> = const { std::cell::Cell::new(None) };
    /// Whether a time service keeps them right.
    static SYNCHRONIZED: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

#[cfg(test)]
mod tests {
    use walvisor_testkit::LogLines;

    use super::*;

    const MINUTE: u64 = 60 * SECOND;
    const HOUR: u64 = 60 * MINUTE;
    const YEAR: u64 = 365 * DAY;
    /// The true time when a test begins.
    const NOW: u64 = UNSET + 300 * DAY;
    /// When the log was made.
    const BORN: u64 = NOW - 10 * DAY;

    /// A machine whose wall clock may be wrong.
    struct Machine {
        steady: u64,
        /// How far the wall clock is ahead, or behind if negative.
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

        /// The timestamp of a batch `us` later.
        fn after(&mut self, us: u64, clock: &mut LogClock) -> u64 {
            self.steady += us;
            clock.next_at(self.read()).unix_us
        }
    }

    #[test]
    fn timestamps_follow_the_clock() {
        let mut machine = Machine::new();
        let mut clock = machine.open(0, 0);
        for us in [0, 5, SECOND, 3 * DAY, 0] {
            assert_eq!(machine.after(us, &mut clock), machine.right());
        }
        // A leap second repeats, and the clock is corrected by a few seconds.
        let newest = machine.right();
        machine.ahead = -(SECOND as i64);
        assert_eq!(machine.after(9, &mut clock), newest);
        machine.ahead = 5 * SECOND as i64;
        assert_eq!(machine.after(9, &mut clock), machine.right() + 5 * SECOND);
    }

    /// One or a few wrong readings change nothing.
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

    /// A clock that is corrected is followed after a while.
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

    /// A whole run with a clock that is far ahead; then the clock is right.
    #[test]
    fn a_log_recovers_at_once_from_a_clock_that_was_ahead() {
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

    /// The log was made in the run with the wrong clock, so the right time is before its birth.
    /// That of a machine without a clock battery is too, but no time service keeps it.
    #[test]
    fn a_log_made_with_a_clock_that_was_ahead_recovers_with_a_time_service() {
        for synchronized in [false, true] {
            SYNCHRONIZED.set(synchronized);
            let mut machine = Machine::new();
            let (born, last) = (machine.right() + YEAR, machine.right() + YEAR + HOUR);
            let open = |machine: &Machine| {
                LogClock::open_at(Path::new("log"), (last, 0), born, machine.read())
            };
            let mut clock = open(&machine);
            let right = if synchronized { machine.right() } else { last };
            assert_eq!(machine.after(0, &mut clock), right);
            // A clock that was never set is not right whatever the kernel says.
            machine.ahead = -(NOW as i64);
            let mut clock = open(&machine);
            assert_eq!(machine.after(MINUTE, &mut clock), last);
        }
        SYNCHRONIZED.set(false);
    }

    /// One line, however often the clock is read.
    #[test]
    fn a_clock_that_is_doubted_is_told_of_once() {
        for (last, jump, told) in [
            (NOW - HOUR, YEAR, "has jumped forward by 365 days"),
            (NOW + HOUR, 0, "is 60 min behind"),
            (NOW + YEAR, 0, "is 365 days ahead"),
        ] {
            let mut machine = Machine::new();
            let lines = LogLines::default();
            tracing::subscriber::with_default(lines.clone(), || {
                let mut clock = machine.open(last, 0);
                machine.ahead = jump as i64;
                for _ in 0..99 {
                    machine.after(SECOND, &mut clock);
                }
            });
            let lines = lines.all();
            assert!(lines.len() == 1 && lines[0].contains(told), "{lines:?}");
        }
    }

    /// A machine without a clock battery boots with an ancient time, and gets the time from the
    /// network a little later. What it writes before that does not count as old.
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
            // Without a network the clock stays wrong.
            machine.ahead = wall as i64 - right as i64;
            let mut clock = machine.open(last, 0);
            assert_eq!(machine.after(BELIEVED, &mut clock), machine.read().wall);
        }
    }

    /// Elapsed time is right whatever the wall clock says.
    #[test]
    fn time_passes_by_the_steady_clock() {
        let mut machine = Machine::new();
        // Closed for an hour; for two days; for a year, by a wrong clock; and until before the
        // newest record.
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
    fn a_stopped_clock_does_not_move() {
        let mut clock = LogClock::stopped(77 * DAY);
        assert_eq!(clock.next().unix_us, 77 * DAY);
        assert_eq!(clock.now().unix_us, 77 * DAY);
        assert!(ClockReading::now().wall > 20_000 * DAY);
    }
}
