//! Points of a log's history, snapshots, and amounts of history, as text and JSON of the command
//! line.

use std::time::{SystemTime, UNIX_EPOCH};

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;
use serde_json::{Value, json};
use walvisor_storage::{
    Commit, Disk, DiskPoints, LogHistory, MarkText, Retention, RewindReport, Snapshot,
};

use crate::size::human_size;

/// A time of the wall clock in microseconds since 1970.
pub(crate) fn unix_us(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    since.as_micros() as u64
}

/// A retention in words, for whoever has just set it.
pub fn retain_text(retain: Retention) -> String {
    match retain {
        Retention::Nothing => "no history".to_owned(),
        Retention::All => "all history, while the log has room".to_owned(),
        Retention::Time(_) => format!("the history of the last {}", retain),
        Retention::Bytes(bytes) => format!("its last {}", human_size(bytes)),
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

/// The points of a disk, as JSON: each has what is typed for it, `at`.
pub fn points_json(points: &DiskPoints) -> Value {
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
        "retain": points.retain.to_string(),
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
            ", {} of them for snapshots ({}, the oldest '{name}', {} old), and {} more beside the \
             log",
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

/// What to do to lose history on purpose.
pub const GIVE_UP: &str = "to do that, add --give-up-history (in JSON: \"give_up_history\": true)";

/// Refuses a checkpoint of a log that keeps history of these disks, which the checkpoint would end.
/// (Snapshots stay.)
///
/// # Errors
/// A message that says what would be lost, and how to do it.
pub fn refuse_checkpoint(history: &LogHistory, disks: Vec<String>) -> Result<(), String> {
    if history.retain == Retention::Nothing {
        return Ok(());
    }
    Err(format!(
        "its log keeps history (retain={}): a checkpoint would discard the history of {} since {}; \
         {GIVE_UP}",
        history.retain,
        disks.join(", "),
        since_text(history.horizon.unix_us),
    ))
}

/// Why a retention is refused that gives up a part of the history that a log keeps of these disks.
pub fn refuse_retention(history: &LogHistory, wanted: Retention, disks: Vec<String>) -> String {
    format!(
        "its log keeps history (retain={}), and retain={wanted} would give up a part of it, of {}: \
         it is kept since {}",
        history.retain,
        disks.join(", "),
        since_text(history.horizon.unix_us),
    )
}

/// Changes how much history a disk's log keeps, and returns the answer as JSON. Less than it keeps
/// now only if `gives_up` says so. `names`: the disks of the log.
///
/// # Errors
/// If the log can't be changed. In the result, why the change is refused.
pub fn set_retention(
    disk: &Disk,
    log: Value,
    wanted: Retention,
    gives_up: bool,
    names: impl FnOnce() -> Vec<String>,
) -> walvisor_storage::Result<Result<Value, String>> {
    let mut answer = json!({ "retain": wanted.to_string(), "keeps": retain_text(wanted) });
    let history = disk.history();
    if history.retain != Retention::Nothing && disk.gives_up_history(wanted) {
        let names = names();
        if !gives_up {
            let why = refuse_retention(&history, wanted, names);
            return Ok(Err(format!("{why}; {GIVE_UP}")));
        }
        answer["history_given_up"] = json!([given_up_json(log, &names, &history)]);
    }
    disk.set_retain(wanted)?;
    Ok(Ok(answer))
}

/// Whose history a log has lost, and since when it was kept.
pub fn given_up_json(log: impl Serialize, disks: &[String], lost: &LogHistory) -> Value {
    json!({ "log": log, "disks": disks, "since_unix_us": lost.horizon.unix_us })
}

/// When a history begins. `unix_us`: of its horizon, or 0.
pub fn since_text(unix_us: u64) -> String {
    match unix_us {
        0 => "the log began".to_owned(),
        _ => time_text(unix_us),
    }
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
