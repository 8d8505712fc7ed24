//! How much of its history a log keeps.

use std::fmt;
use std::time::Duration;

use zerocopy::little_endian::{U32, U64};

use crate::error::{Result, invalid};
use crate::format::{Control, HistoryHeader};

/// Most segments of a log, and the fewest it has beside those of its history.
const MOST_SEGMENTS: u64 = 65536;
const LEAST_OTHERS: u64 = 4;

/// How much history a log keeps. Any state within it can be looked at and restored.
///
/// The base images lag behind by as much. History takes room in the log; when the log is full, the oldest history goes
/// first.
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
                "this log can keep at most {most} bytes of history: {MOST_SEGMENTS} segments of {size} bytes, less \
                 {others} for what is being written"
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
            Self::Bytes(bytes) => {
                let units = ["B", "K", "M", "G", "T", "P", "E"];
                let power = match bytes {
                    0 => 0,
                    _ => (bytes.trailing_zeros() / 10) as usize,
                };
                write!(f, "{}{}", bytes >> (10 * power), units[power])
            }
        }
    }
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
}
