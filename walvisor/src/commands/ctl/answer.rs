//! The answers of a process, as text for people.

use std::cmp::Reverse;
use std::time::SystemTime;

use serde_json::Value;
use walvisor_storage::StallCause;

use crate::control_socket::ControlCommand;
use crate::point::unix_us;
use crate::point::{age, history_text, since_text, time_text};
use crate::size::human_size;
use crate::table::{Table, fit_terminal};

/// A value without quotes.
pub(in crate::commands) fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// The values of these keys.
fn list(of: &Value, keys: &[&str]) -> String {
    let parts: Vec<_> = keys
        .iter()
        .map(|key| format!("{key} {}", of[key]))
        .collect();
    parts.join(", ")
}

/// The condition of a disk: one word, what its writes wait for, or its trouble.
fn condition_text(condition: &Value) -> String {
    let name = text(&condition["name"]).replace('_', " ");
    let cause = |cause: &StallCause| cause.name() == text(&condition["cause"]);
    if let Some(cause) = StallCause::ALL.into_iter().find(cause) {
        return format!("writes wait: {cause}");
    }
    let Some(since) = condition["since_unix_us"].as_u64() else {
        return name;
    };
    let seconds = unix_us(SystemTime::now()).saturating_sub(since) / 1_000_000;
    let error = text(&condition["error"]);
    match (&condition["pauses_writes"], &condition["refuses_writes"]) {
        (Value::Bool(true), _) => format!("paused: {name} for {seconds} s: {error}"),
        (_, Value::Bool(true)) => format!("{name} for {seconds} s, writes fail: {error}"),
        _ => format!("{name} for {seconds} s, writes go on: {error}"),
    }
}

/// A latency: the upper bound of a class of the histogram, in microseconds.
pub(in crate::commands) fn latency(bound: &Value) -> String {
    match bound.as_u64() {
        None => "over 8 s".to_owned(),
        Some(us @ ..1000) => format!("{us} us"),
        Some(us @ ..1_000_000) => format!("{} ms", us / 1000),
        Some(us) => format!("{} s", us / 1_000_000),
    }
}

/// What the FLUSHes of a disk cost, if it has had any.
fn flush_line(disk: &Value) -> Option<String> {
    let flush = disk["latency"].get("flush")?;
    let mut line = format!(
        "FLUSH: p50 within {}, p99 within {}",
        latency(&flush["p50_us"]),
        latency(&flush["p99_us"])
    );
    let shared = &disk["sync_sharing"];
    let flushes = shared["flushes"].as_u64().unwrap_or(0);
    if flushes > 0 {
        let syncs = shared["syncs"].as_f64().unwrap_or(0.0);
        line += &format!("; {:.2} syncs for each", syncs / flushes as f64);
        let with = shared_with(&shared["with"], shared["groups"].as_u64().unwrap_or(0));
        if !with.is_empty() {
            line += &format!("; shared with {with}");
        }
    }
    Some(line)
}

/// The disks with which a disk has shared its `groups` commit groups, those with most first, and
/// how many of its groups.
pub(in crate::commands) fn shared_with(partners: &Value, groups: u64) -> String {
    let mut all: Vec<_> = partners.as_array().into_iter().flatten().collect();
    all.sort_by_key(|partner| Reverse(partner["groups"].as_u64()));
    let parts = all.into_iter().map(|partner| {
        let common = partner["groups"].as_u64().unwrap_or(0);
        let part = (common * 100).checked_div(groups).unwrap_or(0);
        format!("{} {part} %", text(&partner["disk"]))
    });
    parts.collect::<Vec<_>>().join(", ")
}

/// A disk as lines of text.
fn disk_lines(disk: &Value, indent: &str) -> String {
    let requests = [
        "requests",
        "reads",
        "writes",
        "flushes",
        "discards",
        "write_zeroes",
        "errors",
    ];
    let traffic = format!(
        "read {}, written {}, {}",
        size(&disk["read_bytes"]),
        size(&disk["written_bytes"]),
        list(disk, &["doorbells", "interrupts"])
    );
    format!(
        "{indent}disk {}: {}, {}, {}{}, {}{}\n{indent}  {}\n{indent}  {}\n{}",
        text(&disk["name"]),
        size(&disk["size_bytes"]),
        text(&disk["transport"]),
        text(&disk["cache"]),
        match disk["read_only"].as_bool() {
            Some(true) => ", read-only",
            _ => "",
        },
        condition_text(&disk["condition"]),
        match disk["paused"].as_bool() {
            Some(true) => ", paused",
            _ => "",
        },
        list(disk, &requests),
        traffic,
        flush_line(disk).map_or_else(String::new, |line| format!("{indent}  {line}\n")),
    )
}

/// The answer to a request. What changes something is answered with one line.
pub(in crate::commands) fn shown(request: &ControlCommand, answer: &Value) -> String {
    let disk = text(&answer["disk"]);
    let line = match request {
        ControlCommand::Stats { .. } => return fit_terminal(&stats(answer)),
        ControlCommand::Snapshots { .. } => return snapshots(answer),
        ControlCommand::Looks {} => return looks(answer),
        ControlCommand::Exports {} => return exports(answer),
        // They print what they have done.
        ControlCommand::Export { .. }
        | ControlCommand::Look(_)
        | ControlCommand::Config { .. }
        | ControlCommand::Hold { .. } => {
            return String::new();
        }
        ControlCommand::Pause { .. } | ControlCommand::Resume { .. } => {
            let state = text(&answer["state"]);
            match &answer["disk"] {
                Value::Null => state,
                _ => format!("{disk}: {state}"),
            }
        }
        ControlCommand::Resize { .. } => format!(
            "{disk}: {}, before {}",
            size(&answer["size_bytes"]),
            size(&answer["old_size_bytes"])
        ),
        ControlCommand::SetCache { .. } => {
            let [cache, requested] = ["cache", "requested"].map(|key| text(&answer[key]));
            if cache == requested {
                format!("{disk}: {cache}")
            } else {
                format!("{disk}: stays {cache}, not {requested}")
            }
        }
        ControlCommand::SetLimit(_) => format!("{disk}: {}", limits(answer)),
        ControlCommand::Checkpoint { .. } => match all(answer, "disks") {
            [] => "no disks".to_owned(),
            disks => {
                format!(
                    "{}: checkpointed{}",
                    names(disks),
                    given_up(answer, "the history")
                )
            }
        },
        ControlCommand::Snapshot { .. } => {
            let of = match &answer["disk_id"] {
                Value::Null => String::new(),
                id => format!(", of disk {id} alone"),
            };
            let name = text(&answer["name"]);
            format!("snapshot '{name}' at {}{of}", commit(answer))
        }
        ControlCommand::SnapshotDelete { .. } => {
            format!("snapshot '{}' deleted", text(&answer["deleted"]))
        }
        ControlCommand::Restore { .. } => format!("{disk}: {}", rewound(answer)),
        ControlCommand::Mark { .. } => format!("marked {}", commit(answer)),
        ControlCommand::SetRetain { .. } => format!(
            "retain={}: the log keeps {}{}",
            text(&answer["retain"]),
            text(&answer["keeps"]),
            given_up(answer, "the rest of the history")
        ),
        ControlCommand::AddDisk { .. } => {
            let log = match &answer["log"] {
                Value::Null => String::new(),
                log => format!(", log {}", text(log)),
            };
            let (size, place) = (size(&answer["size_bytes"]), text(&answer["place"]));
            format!("serving {disk}: {size} at {place}{log}")
        }
        ControlCommand::RemoveDisk { .. } => return removed_line(answer),
        ControlCommand::Unlook { .. } => format!(
            "{}: ended, the look at {disk} as of {}",
            text(&answer["socket"]),
            text(&answer["at"])
        ),
        ControlCommand::ExportCancel { .. } => {
            let ended = all(answer, "cancelled").iter().map(|export| {
                format!(
                    "{}: export as of {} cancelled at {} of {}",
                    text(&export["disk"]),
                    text(&export["at"]),
                    size(&export["passed_bytes"]),
                    size(&export["total_bytes"])
                )
            });
            ended.collect::<Vec<_>>().join("; ")
        }
        ControlCommand::Shutdown { .. } => "shutting down".to_owned(),
    };
    printable(&line)
}

/// A line without what a terminal would obey.
pub(super) fn printable(line: &str) -> String {
    format!("{}\n", line.replace(char::is_control, "?"))
}

/// What became of a disk that was removed.
pub(in crate::commands) fn removed_line(answer: &Value) -> String {
    let disk = text(&answer["disk"]);
    printable(&match &answer["note"] {
        Value::Null => format!("{disk}: removed; its image is {}", text(&answer["image"])),
        note => format!("{disk}: removed; {}", text(note)),
    })
}

/// What was given up, after what was done.
fn given_up(answer: &Value, what: &str) -> String {
    let logs = all(answer, "history_given_up").iter().map(|log| {
        let since = since_text(log["since_unix_us"].as_u64().unwrap_or(0));
        let disks = names(all(log, "disks"));
        format!("; gave up {what} of {disks} since {since}")
    });
    logs.collect()
}

/// Names in a row.
fn names(of: &[Value]) -> String {
    let names: Vec<_> = of.iter().map(text).collect();
    names.join(", ")
}

/// The limits of a disk.
fn limits(limits: &Value) -> String {
    let number = |key: &str| limits[key].as_u64().unwrap_or(0);
    let part = |rate: &str, burst: &str, shown: fn(u64) -> String, unit: &str| {
        let burst = match number(burst) {
            0 => String::new(),
            burst => format!(" (burst {})", shown(burst)),
        };
        (number(rate) > 0).then(|| format!("{}{unit}{burst}, ", shown(number(rate))))
    };
    let operations = part("ops_per_second", "ops_burst", |n| n.to_string(), " ops/s");
    let bytes = part("bytes_per_second", "bytes_burst", human_size, "/s");
    let rates: String = operations.into_iter().chain(bytes).collect();
    let rates = if rates.is_empty() {
        "no limit, "
    } else {
        &rates
    };
    format!("{rates}weight {}", limits["weight"])
}

/// The point that something was written with.
fn commit(answer: &Value) -> String {
    format!("lsn:{} of cid:{}", answer["lsn"], answer["cid"])
}

/// What a restore in place has done.
fn rewound(answer: &Value) -> String {
    let to = &answer["to_lsn"];
    if answer["lsn"].is_null() {
        return format!("already as of lsn:{to}: nothing to do");
    }
    let back = match answer["redone_records"].as_u64() {
        None | Some(0) => String::new(),
        Some(redone) => format!(" and {redone} back"),
    };
    format!(
        "restored in place as of lsn:{to}, {} undone{back}; to undo this, restore --at lsn:{}",
        count(&answer["undone_records"], "record"),
        answer["from_lsn"]
    )
}

/// How far the archive of a log is.
fn archive_text(archive: &Value) -> String {
    let seconds = archive["lag_us"].as_f64().unwrap_or(0.0) / 1e6;
    let lag = if archive["caught_up"] == true {
        format!("has everything up to {seconds:.1} s ago")
    } else {
        format!("has not caught up in {seconds:.1} s")
    };
    let lacks = archive["lag_bytes"].as_u64().unwrap_or(0);
    let lacks = match (lacks, archive["writes_wait"] == true) {
        (0, _) => String::new(),
        (lacks, false) => format!(" and lacks {}", human_size(lacks)),
        (lacks, true) => format!(" and lacks {}, so writes wait", human_size(lacks)),
    };
    let images = if archive["restorable"] == true {
        ""
    } else {
        "; its images are not complete"
    };
    let ended = if archive["running"] == true {
        ""
    } else {
        "; its push has ended"
    };
    let error = archive["error"].as_str();
    let error = error.map_or_else(String::new, |error| format!(": {error}"));
    format!(
        "{} {lag}{lacks}{images}{ended}{error}",
        text(&archive["url"])
    )
}

/// Counters and the current state.
fn stats(stats: &Value) -> String {
    let seconds = stats["uptime_us"].as_u64().unwrap_or(0) / 1_000_000;
    let mut lines = format!(
        "{} {}: {}, up {seconds} s\n",
        text(&stats["kind"]),
        stats["pid"],
        text(&stats["state"])
    );
    let memory = |key: &str| stats["memory"][key].as_u64().map(|bytes| bytes >> 20);
    if let Some(resident) = memory("resident_bytes") {
        let set_aside = match (memory("used_bytes"), memory("limit_bytes")) {
            (Some(used), Some(limit)) => format!("; {used} of {limit} MiB are set aside"),
            _ => String::new(),
        };
        lines += &format!("  memory: {resident} MiB{set_aside}\n");
    }
    if let Some(exits) = stats["exits"].as_object() {
        let sum = |counts: &Value| -> u64 {
            let counts = counts.as_array().into_iter().flatten();
            counts.filter_map(Value::as_u64).sum()
        };
        let parts: Vec<_> = exits
            .iter()
            .map(|(reason, counts)| format!("{reason} {}", sum(counts)))
            .collect();
        lines += &format!(
            "  exits of {} vCPUs: {}\n",
            stats["vcpus"],
            parts.join(", ")
        );
    }
    let all = |key: &str| stats[key].as_array().cloned().unwrap_or_default();
    let (disks, logs) = (all("disks"), all("logs"));
    for log in &logs {
        lines += &format!(
            "log {}: {}, written {}, checkpoints {} of {}\n",
            text(&log["path"]),
            list(log, &["flushes", "groups", "syncs"]),
            size(&log["log_bytes"]),
            log["checkpoints"],
            size(&log["base_bytes"]),
        );
        for (counts, what) in [("stalled", "waited"), ("refused", "failed")] {
            let causes = StallCause::ALL.map(StallCause::name).into_iter();
            let met: Vec<_> = causes.filter(|&cause| log[counts][cause] != 0).collect();
            if !met.is_empty() {
                let causes = list(&log[counts], &met).replace('_', " ");
                lines += &format!("  writes that {what}, by cause: {causes}\n");
            }
        }
        if log["archive"].is_object() {
            lines += &format!("  archive: {}\n", archive_text(&log["archive"]));
        }
        if log["history"].is_object() {
            lines += &format!("  history: {}\n", history_text(&log["history"]));
        }
        for disk in disks
            .iter()
            .filter(|disk| disk["log"]["path"] == log["path"])
        {
            lines += &disk_lines(disk, "  ");
        }
    }
    for disk in disks.iter().filter(|disk| !disk["log"].is_object()) {
        lines += &disk_lines(disk, "");
    }
    lines
}

/// The elements of an array.
fn all<'a>(of: &'a Value, key: &str) -> &'a [Value] {
    of[key].as_array().map_or(&[], Vec::as_slice)
}

/// A number of things, such as `1 record` or `2 records`.
fn count(value: &Value, thing: &str) -> String {
    match value.as_u64() {
        Some(1) => format!("1 {thing}"),
        _ => format!("{value} {thing}s"),
    }
}

/// A number of bytes.
fn size(value: &Value) -> String {
    human_size(value.as_u64().unwrap_or(0))
}

/// The time of a point, in units of so many microseconds, and its age.
fn when(point: &Value, unit: u64) -> [String; 2] {
    match point["unix_us"].as_u64() {
        None | Some(0) => ["-".to_owned(), "-".to_owned()],
        Some(unix_us) => [time_text(unix_us / unit * unit), age(unix_us)],
    }
}

/// A second, and a millisecond.
const SECOND: u64 = 1_000_000;
const MILLISECOND: u64 = 1000;

/// The points of a disk.
pub(in crate::commands) fn points(answer: &Value) -> String {
    let (points, oldest) = (all(answer, "points"), &answer["oldest"]);
    let mut shown: Vec<_> = points
        .iter()
        .filter(|point| point["kind"] != "snapshot")
        .filter_map(|point| point["cid"].as_u64())
        .collect();
    shown.dedup();
    let mut table = Table::new(&["AT", "TIME", "AGE", "WHAT"]);
    // Points of one second are told apart.
    let second = |point: &Value| point["unix_us"].as_u64().unwrap_or(0) / SECOND;
    let unit = match points.is_sorted_by(|one, next| second(one) < second(next)) {
        true => SECOND,
        false => MILLISECOND,
    };
    let mut row = |point: &Value, at: String, what: String| {
        let [time, age] = when(point, unit);
        table.row(vec![at, time, age, what]);
    };
    row(
        oldest,
        format!("lsn:{}", oldest["lsn"]),
        "the oldest point without a snapshot".to_owned(),
    );
    for point in points {
        let what = match point["kind"].as_str() {
            Some("snapshot") => format!("snapshot, {} saved", size(&point["saved_bytes"])),
            Some("mark") => format!("mark {}", point["text"]),
            _ => format!(
                "commit, {} written by {}",
                size(&point["payload_bytes"]),
                count(&point["records"], "record")
            ),
        };
        row(point, text(&point["at"]), what);
    }
    let more = match answer["commits"].as_u64().unwrap_or(0) - shown.len() as u64 {
        0 => String::new(),
        more => format!("{more} older commits are not shown: --newest N shows more\n"),
    };
    format!(
        "{} on the log {}, retain={}\n{}{more}",
        text(&answer["disk"]),
        text(&answer["log"]),
        text(&answer["retain"]),
        table.for_stdout(),
    )
}

/// The snapshots of a log.
fn snapshots(answer: &Value) -> String {
    let mut table = Table::new(&["SNAPSHOT", "TIME", "AGE", "LSN", "CID", "SAVED", "OF"]);
    for snapshot in all(answer, "snapshots") {
        let [time, age] = when(snapshot, SECOND);
        table.row(vec![
            text(&snapshot["name"]),
            time,
            age,
            snapshot["lsn"].to_string(),
            snapshot["cid"].to_string(),
            size(&snapshot["saved_bytes"]),
            match &snapshot["disk_id"] {
                Value::Null => "all disks".to_owned(),
                id => format!("disk {id}"),
            },
        ]);
    }
    format!("retain={}\n{}", text(&answer["retain"]), table.for_stdout())
}

/// The open looks.
fn looks(answer: &Value) -> String {
    let mut table = Table::new(&["SOCKET", "DISK", "AT", "SIZE", "TAKES", "ENDS"]);
    for look in all(answer, "looks") {
        let yes = |key: &str| look[key] == true;
        table.row(vec![
            text(&look["socket"]),
            text(&look["disk"]),
            text(&look["at"]),
            size(&look["size_bytes"]),
            if yes("scratch") { "writes" } else { "reads" }.to_owned(),
            if yes("keep") {
                "by unlook"
            } else {
                "with its last client"
            }
            .to_owned(),
        ]);
    }
    table.for_stdout()
}

/// The exports under way.
fn exports(answer: &Value) -> String {
    let mut table = Table::new(&["DISK", "AT", "DONE", "OF", "PART"]);
    for export in all(answer, "exports") {
        let bytes = |key: &str| export[key].as_u64().unwrap_or(0);
        let (passed, total) = (bytes("passed_bytes"), bytes("total_bytes"));
        table.row(vec![
            text(&export["disk"]),
            text(&export["at"]),
            human_size(passed),
            human_size(total),
            format!("{} %", passed * 100 / total.max(1)),
        ]);
    }
    table.for_stdout()
}
