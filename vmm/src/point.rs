//! Points in the history of a log as the command line takes them.

use jiff::{Span, SpanRelativeTo, Timestamp};
use walvisor_storage::Point;

/// Why a point was not understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PointError {
    /// It has no form that points have.
    #[error(
        "'{0}' is not a point: give cid:N, lsn:N (both as 'walvisor log dump' shows them), time:2026-11-22T12:03:00Z or a \
         time before now, such as -15m"
    )]
    Form(String),
    /// It is later than now.
    #[error("'{0}' is in the future: give a time that has passed")]
    Future(String),
}

/// Parses a point: `cid:N`, `lsn:N`, `time:` and a time of RFC 3339, or `-` and a duration before now.
///
/// # Errors
/// If `text` is none of these, or is in the future.
pub fn parse_point(text: &str) -> Result<Point, PointError> {
    let now = Timestamp::now();
    let form = || PointError::Form(text.to_owned());
    let number = |number: &str| number.parse().map_err(|_| form());
    if let Some(cid) = text.strip_prefix("cid:") {
        return number(cid).map(Point::Cid);
    }
    if let Some(lsn) = text.strip_prefix("lsn:") {
        return number(lsn).map(Point::Lsn);
    }
    let time = match (text.strip_prefix("time:"), text.strip_prefix('-')) {
        (Some(time), _) => time.parse::<Timestamp>().ok(),
        (None, Some(ago)) => before(now, ago),
        (None, None) => None,
    };
    let time = time.ok_or_else(form)?;
    match u64::try_from(time.as_microsecond()) {
        Ok(_) if time > now => Err(PointError::Future(text.to_owned())),
        Ok(unix_us) => Ok(Point::Time(unix_us)),
        Err(_) => Err(form()),
    }
}

/// The time so long before now. A day has 24 hours.
fn before(now: Timestamp, ago: &str) -> Option<Timestamp> {
    let span = ago.parse::<Span>().ok().filter(|span| !span.is_negative());
    let duration = span?
        .to_duration(SpanRelativeTo::days_are_24_hours())
        .ok()?;
    now.checked_sub(duration).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points() {
        assert_eq!(parse_point("cid:7"), Ok(Point::Cid(7)));
        assert_eq!(parse_point("lsn:0"), Ok(Point::Lsn(0)));
        for time in [
            "time:2001-09-09T01:46:40.5Z",
            "time:2001-09-09t03:46:40.5+02:00",
        ] {
            assert_eq!(
                parse_point(time),
                Ok(Point::Time(1_000_000_000_500_000)),
                "{time}"
            );
        }
        for (text, seconds) in [
            ("-90s", 90),
            ("-15m", 900),
            ("-1h30m", 5400),
            ("-2d", 172_800),
        ] {
            let now = Timestamp::now().as_microsecond() as u64;
            let Ok(Point::Time(point)) = parse_point(text) else {
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
    fn what_is_no_point_is_refused() {
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
            assert_eq!(parse_point(text), Err(PointError::Form(text.to_owned())));
        }
        let later = "time:9999-01-01T00:00:00Z";
        assert_eq!(
            parse_point(later),
            Err(PointError::Future(later.to_owned()))
        );
    }
}
