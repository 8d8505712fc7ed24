//! Points in the history of a log.
//!
//! ```text
//!   base image ─ horizon ──▶ commit ──▶ commit ──▶ commit ─ newest
//!                └──── each of these states of the disk can be brought back ────┘
//! ```
//! A checkpoint moves the horizon: the base image then holds all records up to there.

use std::cmp::Ordering;
use std::fmt;
use std::path::Path;
use std::str::FromStr;

use jiff::Timestamp;
use jiff::civil::{Date, Time};
use jiff::tz::TimeZone;

use crate::catalog::control::open_control;
use crate::catalog::readable::ReadableLog;
use crate::catalog::retention::{Retention, duration};
use crate::catalog::snapshot::{Snapshot, SnapshotName};
use crate::error::{Error, ErrorKind, Result, invalid};
use crate::format::Control;
use crate::log::commit::Commit;
use crate::medium::filesystem::parent;

/// A point in the history of a log: after one of its records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// After the record with this log sequence number.
    Lsn(u64),
    /// After the last record of the commit group with this ID.
    Cid(u64),
    /// After the last record that was in the log at this time, in microseconds since 1970 by the
    /// wall clock. The log's times are those of its batches, and never go back.
    Time(u64),
    /// The state named by a snapshot.
    Snapshot(SnapshotName),
    /// After the newest record.
    Newest,
}

impl Point {
    /// What the command line takes, and [`FromStr`], for people.
    pub const FORMS: &str = "cid:N, lsn:N (both as 'walvisor log dump' shows them), snapshot:NAME, \
        a time such as 12:03, 'yesterday 12:03', '2026-11-22 12:03' or 2026-11-22T12:03:00Z, a time \
        before now such as -15m, or newest";

    /// Compares a record with the point: [`Less`](Ordering::Less) if it comes before.
    ///
    /// # Panics
    /// If the point is a snapshot; [resolve](Self::resolve_snapshot) it first.
    pub fn compare(&self, lsn: u64, cid: u64, unix_us: u64) -> Ordering {
        match *self {
            Self::Snapshot(name) => panic!("the place of snapshot '{name}' is not known"),
            Self::Lsn(point) => lsn.cmp(&point),
            Self::Cid(point) => cid.cmp(&point),
            Self::Time(point) => unix_us.cmp(&point),
            Self::Newest => Ordering::Less,
        }
    }

    /// Resolves a snapshot to its LSN by looking it up in the log; other points stay as they are.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if the log, or the snapshot, does not exist; or the log can't be
    /// read.
    pub fn resolve_snapshot<'a>(self, log: impl Into<ReadableLog<'a>>) -> Result<Self> {
        match self {
            Self::Snapshot(_) => {
                let log: ReadableLog<'_> = log.into();
                let control = open_control(log.dir(), log.access())?;
                self.resolve_snapshot_in(&control.control, log.dir())
            }
            point => Ok(point),
        }
    }

    /// As [`resolve_snapshot`](Self::resolve_snapshot), given the log's control file.
    pub(crate) fn resolve_snapshot_in(self, control: &Control, log_dir: &Path) -> Result<Self> {
        match self {
            Self::Snapshot(name) => match Snapshot::find(name, control) {
                Ok(snapshot) => Ok(Self::Lsn(snapshot.lsn)),
                Err(error) => Err(error.of_file(log_dir)),
            },
            point => Ok(point),
        }
    }

    /// Resolves the point, for a disk of the log, to the LSN of the last record up to it. `read`
    /// calls its argument with each record of the log, in LSN order.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if the disk can't be restored to the point; the error names the
    /// nearest ones. Errors of `read`.
    pub(crate) fn resolve(
        self,
        log_dir: &Path,
        control: &Control,
        disk_id: u32,
        read: impl FnOnce(&mut dyn FnMut(&Commit)) -> Result<()>,
    ) -> Result<u64> {
        // Check first whether these are in the past of another image, which would explain why they
        // can't be found.
        if let Self::Lsn(_) | Self::Snapshot(_) = self
            && let Self::Lsn(lsn) = self.resolve_snapshot_in(control, log_dir)?
        {
            self.refuse_lost(lsn, log_dir, control, disk_id)?;
        }
        let lsn = self.lsn(log_dir, control, disk_id, read)?;
        if self != Self::Newest {
            self.refuse_lost(lsn, log_dir, control, disk_id)?;
        }
        Ok(lsn)
    }

    /// Refuses an LSN before the past of the disk begins.
    fn refuse_lost(self, lsn: u64, log_dir: &Path, control: &Control, disk_id: u32) -> Result<()> {
        let since = control.since(disk_id);
        if lsn >= since {
            return Ok(());
        }
        let entry = control.disk(disk_id);
        let image = entry.map(|entry| entry.path(parent(log_dir)));
        let image = image.unwrap_or_default();
        let why = format!(
            "{} had another image before LSN {since}, or was not on the log, so this is lost",
            image.display()
        );
        Err(self.refused(log_dir, &why))
    }

    fn lsn(
        self,
        log_dir: &Path,
        control: &Control,
        disk_id: u32,
        read: impl FnOnce(&mut dyn FnMut(&Commit)) -> Result<()>,
    ) -> Result<u64> {
        if let Self::Snapshot(name) = self {
            let found = Snapshot::find(name, control).map_err(|error| error.of_file(log_dir))?;
            if !found.has(disk_id) {
                return Err(self.refused(log_dir, "it is a snapshot of another disk only"));
            }
            let point = self.resolve_snapshot_in(control, log_dir)?;
            return point.lsn(log_dir, control, disk_id, read);
        }
        // Saved files have what the base images no longer have.
        if let Self::Lsn(lsn) = self
            && control.has_saved(lsn, disk_id)
        {
            return Ok(lsn);
        }
        let horizon = control.horizon_of(disk_id);
        // Just the base image; the record itself may have left the log.
        if self == Self::Lsn(horizon) {
            return Ok(horizon);
        }
        let (mut before, mut after): (Option<Commit>, Option<Commit>) = (None, None);
        let mut visit =
            |&commit: &Commit| match self.compare(commit.lsn, commit.cid, commit.unix_us) {
                Ordering::Greater if commit.lsn <= horizon => {}
                Ordering::Greater => drop(after.get_or_insert(commit)),
                Ordering::Less | Ordering::Equal => before = Some(commit),
            };
        read(&mut visit)?;
        // What was changed of the log's disks since the newest record has an LSN too.
        if let Self::Lsn(lsn) = self
            && after.is_none()
            && (horizon..=control.newest_change()).contains(&lsn)
        {
            return Ok(lsn);
        }
        let is_there = |commit: &Commit| match self {
            Self::Time(_) | Self::Newest => true,
            _ => self.compare(commit.lsn, commit.cid, commit.unix_us) == Ordering::Equal,
        };
        let before = before.filter(|before| before.lsn >= horizon);
        match (before.filter(is_there), before, after) {
            (Some(commit), ..) if self == Self::Newest => {
                Ok(commit.lsn.max(control.since(disk_id)))
            }
            (Some(commit), ..) => Ok(commit.lsn),
            (None, Some(before), Some(after)) => {
                Err(self.refused(log_dir, &format!("the nearest are {before} and {after}")))
            }
            (None, Some(newest), None) => {
                Err(self.refused(log_dir, &format!("the newest is {newest}")))
            }
            (None, None, Some(after)) => Err(self.refused(
                log_dir,
                &format!(
                    "the oldest are LSN {horizon}, which the base image holds, and {after}, at \
                     time:{}; the log has retain={}",
                    utc(after.unix_us),
                    Retention::of(&control.history)
                ),
            )),
            (None, None, None) if self == Self::Newest => Ok(horizon),
            (None, None, None) => Err(self.refused(
                log_dir,
                &format!(
                    "the only point is LSN {horizon}, the base image itself (retain={})",
                    Retention::of(&control.history)
                ),
            )),
        }
    }

    fn refused(self, log_dir: &Path, nearest: &str) -> Error {
        let dir = log_dir.display();
        let message = format!("{dir}: the disk can't be brought back to {self}: {nearest}");
        Error::new(ErrorKind::NotFound, message)
    }
}

/// In the syntax of `--at`.
impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lsn(lsn) => write!(f, "lsn:{lsn}"),
            Self::Cid(cid) => write!(f, "cid:{cid}"),
            Self::Time(unix_us) => write!(f, "time:{}", utc(*unix_us)),
            Self::Snapshot(name) => write!(f, "snapshot:{name}"),
            Self::Newest => write!(f, "newest"),
        }
    }
}

/// `cid:N`, `lsn:N`, `snapshot:NAME`, `newest`, or a time, which may have `time:` before it: of RFC
/// 3339; on the clock of this machine, such as `12:03` (the last one), `yesterday 12:03` or
/// `2026-11-22 12:03`; or before now, such as `-15m` or `15 minutes ago`.
impl FromStr for Point {
    type Err = Error;

    /// # Errors
    /// [`ErrorKind::InvalidInput`] if `text` is none of these, or is in the future, or the machine's
    /// time zone is needed and can't be read.
    fn from_str(text: &str) -> Result<Self> {
        let form = || invalid(format!("'{text}' is not a point: give {}", Self::FORMS));
        if text == "newest" {
            return Ok(Self::Newest);
        }
        let number = |number: &str| number.parse().map_err(|_| form());
        if let Some(cid) = text.strip_prefix("cid:") {
            return number(cid).map(Self::Cid);
        }
        if let Some(lsn) = text.strip_prefix("lsn:") {
            return number(lsn).map(Self::Lsn);
        }
        if let Some(name) = text.strip_prefix("snapshot:") {
            return name.parse().map(Self::Snapshot).map_err(|_| form());
        }
        let now = Timestamp::now();
        let time = text.strip_prefix("time:").unwrap_or(text);
        let time = match absolute(time, now) {
            Some(time) => time,
            None => {
                let local = local_time(time).ok_or_else(form)?;
                let zone = TimeZone::try_system().map_err(|error| {
                    invalid(format!(
                        "'{text}': the machine's time zone can't be read ({error}); give the time \
                         with its zone, such as 2026-11-22T12:03:00Z"
                    ))
                })?;
                local.last_before(now, zone).ok_or_else(form)?
            }
        };
        match u64::try_from(time.as_microsecond()) {
            Ok(_) if time > now => Err(invalid(format!(
                "'{text}' is in the future: give a time in the past"
            ))),
            Ok(unix_us) => Ok(Self::Time(unix_us)),
            Err(_) => Err(form()),
        }
    }
}

/// A time that is the same everywhere: of RFC 3339, or before `now`.
fn absolute(text: &str, now: Timestamp) -> Option<Timestamp> {
    let ago = text.strip_prefix('-').or_else(|| text.strip_suffix(" ago"));
    match ago.and_then(duration) {
        Some(ago) => now.checked_sub(ago).ok(),
        None => text.parse().ok(),
    }
}

/// A time on the clock of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LocalTime {
    day: Day,
    time: Time,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Day {
    /// The last on which the time has passed.
    Last,
    Today,
    Yesterday,
    Date(Date),
}

/// `12:03`, with or without a day before it; `2026-11-22` and `yesterday` are when they began.
fn local_time(text: &str) -> Option<LocalTime> {
    let (day, time) = match text.split_once([' ', 'T']) {
        Some((day, time)) => (Some(day), time),
        None if text.contains(':') => (None, text),
        None => (Some(text), "00:00"),
    };
    let day = match day {
        None => Day::Last,
        Some("today") => Day::Today,
        Some("yesterday") => Day::Yesterday,
        Some(date) => Day::Date(date.parse().ok()?),
    };
    let time = time.parse().ok()?;
    Some(LocalTime { day, time })
}

impl LocalTime {
    fn last_before(self, now: Timestamp, zone: TimeZone) -> Option<Timestamp> {
        let today = now.to_zoned(zone.clone()).date();
        let at = |date: Date| {
            let zoned = date.to_datetime(self.time).to_zoned(zone.clone());
            zoned.ok().map(|zoned| zoned.timestamp())
        };
        let yesterday = || at(today.yesterday().ok()?);
        match self.day {
            Day::Last => at(today).filter(|time| *time <= now).or_else(yesterday),
            Day::Today => at(today),
            Day::Yesterday => yesterday(),
            Day::Date(date) => at(date),
        }
    }
}

/// A time in microseconds since 1970 as RFC 3339 writes it, in UTC.
fn utc(unix_us: u64) -> String {
    let time = i64::try_from(unix_us).map_or(Timestamp::MAX, |us| {
        Timestamp::from_microsecond(us).unwrap_or(Timestamp::MAX)
    });
    format!("{time:.6}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Point {
        text.parse().unwrap()
    }

    #[test]
    fn times_are_shown_in_utc() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000007Z"),
            (951_782_399, "2000-02-28T23:59:59.000007Z"),
            (951_782_400, "2000-02-29T00:00:00.000007Z"),
            (951_868_800, "2000-03-01T00:00:00.000007Z"),
            (1_798_761_599, "2026-12-31T23:59:59.000007Z"),
            (4_107_542_400, "2100-03-01T00:00:00.000007Z"),
        ] {
            assert_eq!(utc(seconds * 1_000_000 + 7), text);
        }
    }

    #[test]
    fn points_are_parsed() {
        assert_eq!(parse("cid:7"), Point::Cid(7));
        assert_eq!(parse("lsn:0"), Point::Lsn(0));
        assert_eq!(parse("newest"), Point::Newest);
        assert_eq!(parse("snapshot:monday").to_string(), "snapshot:monday");
        for time in [
            "time:2001-09-09T01:46:40.5Z",
            "time:2001-09-09t03:46:40.5+02:00",
        ] {
            assert_eq!(parse(time), Point::Time(1_000_000_000_500_000), "{time}");
            assert_eq!(parse(&parse(time).to_string()), parse(time));
        }
        for (text, seconds) in [
            ("-90s", 90),
            ("-15m", 900),
            ("-1h30m", 5400),
            ("-2d", 172_800),
        ] {
            let now = Timestamp::now().as_microsecond() as u64;
            let Point::Time(point) = parse(text) else {
                panic!("{text}");
            };
            // The clock may have been read a little later.
            let ago = now.abs_diff(point);
            assert!(
                ago.abs_diff(seconds * 1_000_000) < 60_000_000,
                "{text}: {ago}"
            );
        }
    }

    #[test]
    fn times_on_a_clock_are_those_of_its_zone() {
        let zone = TimeZone::fixed(jiff::tz::offset(2));
        let now: Timestamp = "2026-11-30T00:30:00+02:00".parse().unwrap();
        for (text, time) in [
            ("12:03", Some("2026-11-29T12:03:00+02:00")),
            ("00:30", Some("2026-11-30T00:30:00+02:00")),
            ("00:29:59.5", Some("2026-11-30T00:29:59.5+02:00")),
            ("today 12:03", Some("2026-11-30T12:03:00+02:00")),
            ("yesterday 12:03", Some("2026-11-29T12:03:00+02:00")),
            ("yesterday", Some("2026-11-29T00:00:00+02:00")),
            ("2026-11-22", Some("2026-11-22T00:00:00+02:00")),
            ("2026-11-22 12:03", Some("2026-11-22T12:03:00+02:00")),
            ("2026-11-22T12:03:07", Some("2026-11-22T12:03:07+02:00")),
            ("tomorrow", None),
            ("24:61", None),
            ("2026-13-01 12:03", None),
            ("", None),
            ("7", None),
        ] {
            let found = local_time(text).and_then(|time| time.last_before(now, zone.clone()));
            let time = time.map(|time| time.parse().unwrap());
            assert_eq!(found, time, "{text}");
        }
        let ago = |text| absolute(text, now).map(|time: Timestamp| now.duration_since(time));
        let minutes = |count| Some(jiff::SignedDuration::from_mins(count));
        assert_eq!(ago("10 minutes ago"), minutes(10));
        assert_eq!(ago("2h 5m ago"), minutes(125));
        assert_eq!(ago("-2h"), minutes(120));
        assert_eq!(ago("12:03"), None);
        // The points that the program takes.
        assert!(matches!(parse("yesterday 12:03"), Point::Time(_)));
        assert!(matches!(parse("time:2026-11-22 12:03"), Point::Time(_)));
    }

    #[test]
    fn texts_that_are_not_points_are_refused() {
        for text in [
            "",
            "7",
            "cid:",
            "cid:-1",
            "lsn:x",
            "time:",
            "time:noon",
            "time:1960-01-01T00:00:00Z",
            "-",
            "--5m",
            "-15",
            "-1y",
            "-99999d",
        ] {
            let error = text.parse::<Point>().unwrap_err().to_string();
            let expected = format!("'{text}' is not a point: give cid:N, lsn:N");
            assert!(error.starts_with(&expected), "{error}");
        }
        let later = "time:9999-01-01T00:00:00Z".parse::<Point>();
        let error = later.unwrap_err().to_string();
        assert!(error.contains("is in the future"), "{error}");
    }
}
