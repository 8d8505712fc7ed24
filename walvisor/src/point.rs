//! Points of a log's history, snapshots, and amounts of history, as text and JSON of the command
//! line.

use std::time::Duration;

use jiff::{SignedDuration, Span, SpanRelativeTo, Timestamp};
use serde_json::{Value, json};
use walvisor_storage::{
    Commit, DiskPoints, LogHistory, MarkText, Point, Retention, RewindReport, Snapshot,
};

use crate::size::{human_size, parse_size};

/// Describes the accepted points to the user.
pub const POINT: &str = "cid:N, lsn:N (both as 'walvisor log dump' shows them), snapshot:NAME, \
    time:2026-11-22T12:03:00Z, a time before now, such as -15m, or newest";

/// Why a text is not a point.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PointError {
    /// It has none of the forms of a point.
    #[error("'{0}' is not a point: give {POINT}")]
    Form(String),
    /// It is later than now.
    #[error("'{0}' is in the future: give a time in the past")]
    Future(String),
}

/// Describes the accepted amounts of history to the user.
pub const RETAIN: &str = "off, all, a time such as 24h or 15m, or a size such as 50G";

/// Parses how much history a log keeps: `off`, `all`, a duration, or a size.
///
/// # Errors
/// A message with the accepted forms.
pub fn parse_retain(text: &str) -> Result<Retention, String> {
    let time = || duration(text).and_then(|time| Duration::try_from(time).ok());
    // 24 may be meant as hours, days or gigabytes.
    let has_unit = !text.ends_with(|last: char| last.is_ascii_digit());
    match (text, time(), parse_size(text)) {
        ("off", ..) => Ok(Retention::Nothing),
        ("all", ..) => Ok(Retention::All),
        (_, Some(time), _) if !time.is_zero() => Ok(Retention::Time(time)),
        (_, None, Ok(bytes)) if bytes > 0 && has_unit => Ok(Retention::Bytes(bytes)),
        _ => Err(format!(
            "'{text}' is not an amount of history: give {RETAIN}"
        )),
    }
}

/// A retention in words, for whoever has just set it.
pub fn retain_text(retain: Retention) -> String {
    match retain {
        Retention::Nothing => "no history".to_owned(),
        Retention::All => "all history, while the log has room".to_owned(),
        Retention::Time(_) => format!("the history of the last {}", retain),
        Retention::Bytes(bytes) => format!("the last {} of the log", human_size(bytes)),
    }
}

/// Parses a point: `cid:N`, `lsn:N`, `snapshot:NAME`, `time:` and a time of RFC 3339, `-` and a
/// duration before now, or `newest`.
///
/// # Errors
/// If `text` is none of these, or is in the future.
pub fn parse_point(text: &str) -> Result<Point, PointError> {
    let now = Timestamp::now();
    let form = || PointError::Form(text.to_owned());
    if text == "newest" {
        return Ok(Point::Newest);
    }
    let number = |number: &str| number.parse().map_err(|_| form());
    if let Some(cid) = text.strip_prefix("cid:") {
        return number(cid).map(Point::Cid);
    }
    if let Some(lsn) = text.strip_prefix("lsn:") {
        return number(lsn).map(Point::Lsn);
    }
    if let Some(name) = text.strip_prefix("snapshot:") {
        return name.parse().map(Point::Snapshot).map_err(|_| form());
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

/// A snapshot as JSON.
pub fn snapshot_json(snapshot: &Snapshot) -> Value {
    json!({
        "name": snapshot.name.as_str(),
        "lsn": snapshot.lsn,
        "cid": snapshot.cid,
        "unix_us": snapshot.unix_us,
        "disk_id": snapshot.disk_id,
        "saved_bytes": snapshot.saved_bytes,
    })
}

/// The points of a disk in use, as JSON: each has what is typed for it, `at`.
pub fn points_json(points: &DiskPoints, retain: Retention) -> Value {
    let mut all = Vec::new();
    for group in &points.newest {
        let (cid, unix_us) = (group.cid, group.unix_us);
        if group.records > group.marks.len() as u64 {
            let point = json!({
                "at": format!("cid:{cid}"),
                "kind": "commit",
                "lsn": group.last_lsn,
                "cid": cid,
                "unix_us": unix_us,
                "records": group.records - group.marks.len() as u64,
                "payload_bytes": group.payload_bytes,
            });
            all.push((group.last_lsn, point));
        }
        all.extend(group.marks.iter().map(|mark| {
            let point = json!({
                "at": format!("lsn:{}", mark.lsn),
                "kind": "mark",
                "lsn": mark.lsn,
                "cid": cid,
                "unix_us": unix_us,
                "text": mark.text.as_str(),
            });
            (mark.lsn, point)
        }));
    }
    all.extend(points.snapshots.iter().map(|snapshot| {
        let mut point = snapshot_json(snapshot);
        point["at"] = format!("snapshot:{}", snapshot.name).into();
        point["kind"] = "snapshot".into();
        (snapshot.lsn, point)
    }));
    // A snapshot comes after the commit that it names.
    all.sort_by_key(|(lsn, _)| *lsn);
    let Commit { lsn, cid, unix_us } = points.oldest;
    json!({
        "retain": retain.to_string(),
        "oldest": { "lsn": lsn, "cid": cid, "unix_us": unix_us },
        "commits": points.groups,
        "points": all.into_iter().map(|(_, point)| point).collect::<Vec<_>>(),
    })
}

/// A mark that was written with this commit, as JSON.
pub fn mark_json(text: &MarkText, made: &Commit) -> Value {
    json!({
        "text": text.as_str(),
        "lsn": made.lsn,
        "cid": made.cid,
        "unix_us": made.unix_us,
    })
}

/// A restore in place, as JSON.
pub fn rewound_json(done: &RewindReport) -> Value {
    json!({
        "to_lsn": done.to_lsn,
        "from_lsn": done.from_lsn,
        "lsn": done.lsn,
        "undone_records": done.undone,
        "redone_records": done.redone,
    })
}

/// The history that a log keeps, as JSON.
pub fn history_json(history: &LogHistory) -> Value {
    let LogHistory {
        horizon, snapshots, ..
    } = history;
    json!({
        "horizon": { "lsn": horizon.lsn, "cid": horizon.cid, "unix_us": horizon.unix_us },
        "retain": history.retain.to_string(),
        "kept_bytes": history.kept_bytes,
        "pinned_bytes": history.pinned_bytes,
        "room_bytes": history.room_bytes,
        "saved_bytes": history.saved_bytes,
        "index_bytes": history.index_bytes,
        "snapshots": snapshots.len(),
        "oldest_snapshot": snapshots.first().map(snapshot_json),
    })
}

/// The history that a log keeps, as a line of text. `history` is from [`history_json`].
pub fn history_text(history: &Value) -> String {
    let number = |of: &Value, key: &str| of[key].as_u64().unwrap_or(0);
    let size = |key: &str| human_size(number(history, key));
    let horizon = &history["horizon"];
    let since = match number(horizon, "unix_us") {
        0 => String::new(),
        unix_us => format!(" (cid:{}, {})", horizon["cid"], time_text(unix_us)),
    };
    let oldest = &history["oldest_snapshot"];
    let pinned = match oldest["name"].as_str() {
        None => String::new(),
        Some(name) => format!(
            ", {} of them for snapshots ({}, the oldest '{name}', {} old), and {} more beside the log",
            size("pinned_bytes"),
            history["snapshots"],
            age(number(oldest, "unix_us")),
            size("saved_bytes")
        ),
    };
    format!(
        "retain={}, from lsn:{}{since} on: {} of {}{pinned}; index {}",
        history["retain"].as_str().unwrap_or_default(),
        horizon["lsn"],
        size("kept_bytes"),
        size("room_bytes"),
        size("index_bytes")
    )
}

/// Refuses a checkpoint of a log that keeps history of these disks, which the checkpoint would end.
/// (Snapshots stay.)
///
/// # Errors
/// A message that says what would be lost, and how to do it.
pub fn refuse_checkpoint(history: &LogHistory, disks: Vec<String>) -> Result<(), String> {
    if history.retain == Retention::Nothing {
        return Ok(());
    }
    let since = match history.horizon.unix_us {
        0 => "the log began".to_owned(),
        unix_us => time_text(unix_us),
    };
    Err(format!(
        "its log keeps history (retain={}), and a checkpoint would end it for {}: what is there \
         since {since} would be lost; to do that, add --give-up-history (in JSON: \
         \"give_up_history\": true)",
        history.retain,
        disks.join(", "),
    ))
}

/// The age of a time, which is in microseconds since 1970, in whole seconds.
pub fn age(unix_us: u64) -> String {
    let now = Timestamp::now().as_microsecond();
    let passed = now.saturating_sub_unsigned(unix_us).max(0) / 1_000_000;
    format!("{:#}", SignedDuration::from_secs(passed))
}

/// A time in microseconds since 1970, as RFC 3339 text in UTC.
pub fn time_text(unix_us: u64) -> String {
    let time = i64::try_from(unix_us).map(Timestamp::from_microsecond);
    time.ok().and_then(Result::ok).map_or_else(
        || format!("{unix_us} us after 1970"),
        |time| time.to_string(),
    )
}

/// The time that lies a duration before now. A day has 24 hours.
fn before(now: Timestamp, ago: &str) -> Option<Timestamp> {
    now.checked_sub(duration(ago)?).ok()
}

/// A duration that is not negative. A day has 24 hours.
fn duration(text: &str) -> Option<SignedDuration> {
    let span = text.parse::<Span>().ok().filter(|span| !span.is_negative());
    span?.to_duration(SpanRelativeTo::days_are_24_hours()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points() {
        assert_eq!(parse_point("cid:7"), Ok(Point::Cid(7)));
        assert_eq!(parse_point("lsn:0"), Ok(Point::Lsn(0)));
        assert_eq!(parse_point("newest"), Ok(Point::Newest));
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
            assert_eq!(parse_retain(text), Ok(retain), "{text}");
            assert_eq!(parse_retain(&retain.to_string()), Ok(retain), "{text}");
        }
        for text in ["", "0", "0s", "-5m", "1y", "some", "5x"] {
            let error = parse_retain(text).unwrap_err();
            assert!(error.contains("is not an amount of history"), "{error}");
        }
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
            assert_eq!(parse_point(text), Err(PointError::Form(text.to_owned())));
        }
        let later = "time:9999-01-01T00:00:00Z";
        assert_eq!(
            parse_point(later),
            Err(PointError::Future(later.to_owned()))
        );
    }
}
