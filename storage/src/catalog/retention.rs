//! How much of its history a log keeps.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use jiff::{SignedDuration, Span, SpanRelativeTo};
use zerocopy::little_endian::{U32, U64};

use crate::error::{Error, Result, invalid};
use crate::format::{Control, HistoryHeader};
use crate::size::{parse_size, show_size};

/// Most segments of a log, and the fewest it has beside those of its history.
const MOST_SEGMENTS: u64 = 65536;
const LEAST_OTHERS: u64 = 4;

/// How much history a log keeps. Any state within it can be looked at and restored.
///
/// The base images lag behind by as much. History takes room in the log; when the log is full, the
/// oldest history goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Retention {
    /// None: the log is copied to the base images when half of it is in use, and when it is closed.
    #[default]
    Nothing,
    /// At least what was written in this time.
    Time(Duration),
    /// At least this many of the newest bytes of log, headers included.
    Bytes(u64),
    /// As much as there is room for.
    All,
}

impl Retention {
    /// What the command line takes, and [`FromStr`], for people.
    pub const FORMS: &str = "off, all, a time such as 24h or 15m, or a size such as 50G";

    /// Whether it keeps what `other` keeps, whatever was written.
    fn covers(self, other: Self) -> bool {
        match (self, other) {
            (Self::All, _) | (_, Self::Nothing) => true,
            (Self::Time(time), Self::Time(other)) => time >= other,
            (Self::Bytes(bytes), Self::Bytes(other)) => bytes >= other,
            _ => false,
        }
    }

    /// As [`set`](Self::set), for a log whose records nobody has read.
    ///
    /// # Errors
    /// If it may keep less than before; or as [`set`](Self::set).
    pub(crate) fn set_unread(self, control: &mut Control) -> Result<()> {
        let old = Self::of(&control.history);
        self.set(control)?;
        if !self.covers(old) {
            return Err(invalid(format!(
                "the log keeps retain={old}, and retain={self} would give history of its disks up; \
                 leave it out, or keep less with 'walvisor disk retain DISK {self}'"
            )));
        }
        Ok(())
    }

    /// Segments needed to keep this many bytes; 0 for other kinds of retention.
    pub(crate) fn segments(self, segment_size: u64) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.div_ceil(segment_size),
            _ => 0,
        }
    }

    /// The fewest segments of a log with this retention. An open raises the log's limit to it.
    pub(crate) fn least_segments(self, segment_size: u64) -> u64 {
        LEAST_OTHERS.saturating_add(self.segments(segment_size))
    }

    /// The retention in a control file.
    pub(crate) fn of(history: &HistoryHeader) -> Self {
        // Unknown kind, from a newer program: lose nothing.
        Self::decode(history.retain_kind.get(), history.retain_value.get()).unwrap_or(Self::All)
    }

    /// Sets the retention. The room for other records stays the same.
    ///
    /// # Errors
    /// If the log can't have that many segments.
    pub(crate) fn set(self, control: &mut Control) -> Result<()> {
        let (header, old) = (&mut control.header, Self::of(&control.history));
        let size = header.segment_size.get();
        let most = u64::from(header.max_segments.get());
        let others = most.saturating_sub(old.segments(size)).max(LEAST_OTHERS);
        let needed = others.saturating_add(self.segments(size));
        if needed > MOST_SEGMENTS {
            let most = (MOST_SEGMENTS - others) * size;
            return Err(invalid(format!(
                "this log can keep at most {most} bytes of history: {MOST_SEGMENTS} segments of \
                 {size} bytes, less {others} for what is being written"
            )));
        }
        header.max_segments = U32::new(needed.max(most) as u32);
        let (kind, value) = self.encode();
        control.history.retain_kind = U32::new(kind);
        control.history.retain_value = U64::new(value);
        Ok(())
    }

    /// Its numbers in a control file.
    fn encode(self) -> (u32, u64) {
        match self {
            Self::Nothing => (0, 0),
            Self::Time(time) => (1, u64::try_from(time.as_micros()).unwrap_or(u64::MAX)),
            Self::Bytes(bytes) => (2, bytes),
            Self::All => (3, 0),
        }
    }

    /// The reverse of [`encode`](Self::encode); `None` for unknown numbers.
    fn decode(kind: u32, value: u64) -> Option<Self> {
        match kind {
            0 => Some(Self::Nothing),
            1 => Some(Self::Time(Duration::from_micros(value))),
            2 => Some(Self::Bytes(value)),
            3 => Some(Self::All),
            _ => None,
        }
    }
}

/// As the key `retain=` takes it: `off`, `all`, a time such as `1h 30m`, or a size such as `50G`.
impl fmt::Display for Retention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Nothing => f.write_str("off"),
            Self::All => f.write_str("all"),
            Self::Time(time) if time.subsec_nanos() > 0 || time.is_zero() => write!(f, "{time:?}"),
            Self::Time(time) => {
                let seconds = time.as_secs();
                let parts = [
                    (seconds / 3600, "h"),
                    (seconds / 60 % 60, "m"),
                    (seconds % 60, "s"),
                ];
                let mut gap = "";
                for (number, unit) in parts.into_iter().filter(|(number, _)| *number > 0) {
                    write!(f, "{gap}{number}{unit}")?;
                    gap = " ";
                }
                Ok(())
            }
            Self::Bytes(bytes) => f.write_str(&show_size(bytes)),
        }
    }
}

/// As the key `retain=` takes it; what [`Display`](fmt::Display) writes is read back.
impl FromStr for Retention {
    type Err = Error;

    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput), with the accepted
    /// [`FORMS`](Self::FORMS).
    fn from_str(text: &str) -> Result<Self> {
        let time = || duration(text).and_then(|time| Duration::try_from(time).ok());
        // 24 may be meant as hours, days or gigabytes.
        let has_unit = !text.ends_with(|last: char| last.is_ascii_digit());
        match (text, time(), parse_size(text)) {
            ("off", ..) => Ok(Self::Nothing),
            ("all", ..) => Ok(Self::All),
            (_, Some(time), _) if !time.is_zero() => Ok(Self::Time(time)),
            (_, None, Ok(bytes)) if bytes > 0 && has_unit => Ok(Self::Bytes(bytes)),
            _ => Err(invalid(format!(
                "'{text}' is not an amount of history: give {}",
                Self::FORMS
            ))),
        }
    }
}

/// Parses a duration that is not negative, such as `1h 30m`. A day has 24 hours.
pub(crate) fn duration(text: &str) -> Option<SignedDuration> {
    let span = text.parse::<Span>().ok().filter(|span| !span.is_negative());
    span?.to_duration(SpanRelativeTo::days_are_24_hours()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retentions_are_shown_as_they_are_typed() {
        for (retain, text) in [
            (Retention::Nothing, "off"),
            (Retention::All, "all"),
            (Retention::Time(Duration::from_secs(86_400)), "24h"),
            (Retention::Time(Duration::from_secs(5_401)), "1h 30m 1s"),
            (Retention::Time(Duration::from_millis(1_500)), "1.5s"),
            (Retention::Bytes(0), "0B"),
            (Retention::Bytes(513), "513B"),
            (Retention::Bytes(3 << 29), "1536M"),
            (Retention::Bytes(1 << 63), "8E"),
        ] {
            assert_eq!(retain.to_string(), text);
        }
    }

    #[test]
    fn amounts_of_history_parse_and_print() {
        for (text, retain) in [
            ("off", Retention::Nothing),
            ("all", Retention::All),
            ("24h", Retention::Time(Duration::from_secs(86_400))),
            ("15m", Retention::Time(Duration::from_secs(900))),
            ("2d", Retention::Time(Duration::from_secs(172_800))),
            ("50G", Retention::Bytes(50 << 30)),
            ("15M", Retention::Bytes(15 << 20)),
        ] {
            assert_eq!(text.parse::<Retention>().unwrap(), retain, "{text}");
            let shown = retain.to_string();
            assert_eq!(shown.parse::<Retention>().unwrap(), retain, "{shown}");
        }
        for text in ["", "0", "24", "0s", "-5m", "1y", "some", "5x"] {
            let error = text.parse::<Retention>().unwrap_err().to_string();
            let expected = format!("'{text}' is not an amount of history: give off, all, a time");
            assert!(error.starts_with(&expected), "{error}");
        }
    }
}
