//! `walvisor log`: prints the contents of a log, one line per commit group or record.

use std::cmp::Ordering;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use clap::{Args, Subcommand};
use serde_json::json;
use walvisor_storage::{self as storage, LogGroup, LogRecord, MarkText, Point, RecordKind};

use super::CommandError;
use super::disk::print;
use super::owner::{LogToRead, cannot_look, not_kept};
use crate::size::{human_size, parse_size};

/// Arguments of `walvisor log`.
#[derive(Debug, Args)]
pub struct LogArguments {
    #[command(subcommand)]
    action: LogAction,
}

/// What to do with a log.
#[derive(Debug, Subcommand)]
enum LogAction {
    /// Print a log, one line per commit group, and verify every checksum; change nothing.
    Dump {
        /// The log directory.
        dir: PathBuf,
        /// Print one line per record.
        #[arg(long)]
        records: bool,
        /// Begin with this point: cid:N, lsn:N, a time such as 12:03, 'yesterday 12:03' or
        /// 2026-11-22T12:03:00Z, or a time before now such as -15m.
        #[arg(long, value_name = "AT", allow_hyphen_values = true)]
        since: Option<Point>,
        /// End with this point.
        #[arg(long, value_name = "AT", allow_hyphen_values = true)]
        until: Option<Point>,
        /// Fail if another process has the log open. Without this, that process lets this one read,
        /// if it has a control socket and is this user's or root's.
        #[arg(long)]
        no_owner: bool,
        /// Print JSON: one object per line.
        #[arg(long)]
        json: bool,
    },
    /// Change the size of a log that is not in use.
    Resize {
        /// The log directory.
        dir: PathBuf,
        /// New size in bytes, rounded up to whole segments; K, M, G, T, P and E are powers of 1024,
        /// KB, MB and so on of 1000.
        #[arg(long, value_parser = parse_size)]
        size: u64,
        /// Print JSON.
        #[arg(long)]
        json: bool,
    },
}

/// LineWriter for stdout. A reader that closes the pipe early causes no error.
struct LineWriter {
    out: BufWriter<io::Stdout>,
    failed: Option<io::Error>,
}

impl LineWriter {
    fn print(&mut self, line: std::fmt::Arguments<'_>) {
        if self.failed.is_none() {
            self.failed = self.out.write_fmt(line).err();
        }
    }

    fn end(mut self) -> Result<(), CommandError> {
        match self.failed.or_else(|| self.out.flush().err()) {
            Some(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(CommandError::Failed(
                format!("stdout: {error}: free some space"),
            )),
            _ => Ok(()),
        }
    }
}

/// Carries out `walvisor log`.
///
/// # Errors
/// One line: what, where, what to do. The records before damage are printed.
pub fn run(arguments: &LogArguments) -> Result<(), CommandError> {
    let (dir, records, since, until, no_owner, json) = match &arguments.action {
        LogAction::Dump {
            dir,
            records,
            since,
            until,
            no_owner,
            json,
        } => (dir, records, since, until, no_owner, json),
        LogAction::Resize { dir, size, json } => return resize(dir, *size, *json),
    };
    let log = LogToRead::open(dir, !no_owner)?;
    let found = |point: &Option<Point>| {
        let found = point.map(|point| point.resolve_snapshot(log.log()));
        let found = found.transpose();
        found.map_err(cannot_look)
    };
    let (since, until) = (found(since)?, found(until)?);
    let wanted = |lsn, cid, unix_us| {
        let place = |point: Option<Point>| point.map(|point| point.compare(lsn, cid, unix_us));
        place(since) != Some(Ordering::Less) && place(until) != Some(Ordering::Greater)
    };
    let mut lines = LineWriter {
        out: BufWriter::new(io::stdout()),
        failed: None,
    };
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |time| time.as_micros() as u64);
    // Whether the column headings are still to be printed. They come with the first line.
    let mut first = !json;
    let dumped = if *records {
        storage::dump_records(log.log(), &mut |record| {
            if !wanted(record.lsn, record.cid, record.unix_us) {
                return;
            }
            if std::mem::take(&mut first) {
                lines.print(format_args!(
                    "{:>10} {:>8} {:<12} {:>12} {:>8}  {:<26} disk\n",
                    "LSN", "cid", "kind", "sector", "sectors", "payload"
                ));
            }
            print_record(&mut lines, record, *json);
        })
    } else {
        storage::dump_groups(log.log(), &mut |group| {
            if !wanted(group.last_lsn, group.cid, group.unix_us) {
                return;
            }
            if std::mem::take(&mut first) {
                lines.print(format_args!(
                    "{:>10} {:>21} {:>8} {:>12} {:>9}  disks\n",
                    "cid", "LSNs", "records", "bytes", "age"
                ));
            }
            print_group(&mut lines, group, now, *json);
        })
    };
    if first && dumped.is_ok() {
        let dir = dir.display();
        lines.print(format_args!(
            "{dir}: no records{}\n",
            match (since, until) {
                (None, None) => ": everything is in the base images",
                _ => " there",
            }
        ));
    }
    lines.end()?;
    match dumped {
        Err(_) if !log.is_kept() => Err(not_kept(dir)),
        dumped => dumped.map_err(cannot_look),
    }
}

fn resize(dir: &Path, size: u64, json: bool) -> Result<(), CommandError> {
    let storage::Resize { old_size, size } = storage::resize_log(dir, size)?;
    if json {
        print(format_args!(
            "{}\n",
            json!({ "log": dir, "size_bytes": size, "old_size_bytes": old_size })
        ))
    } else {
        print(format_args!(
            "{}: {} now, {} before\n",
            dir.display(),
            human_size(size),
            human_size(old_size)
        ))
    }
    Ok(())
}

fn print_group(lines: &mut LineWriter, group: &LogGroup, now: u64, json: bool) {
    let LogGroup {
        cid,
        first_lsn,
        last_lsn,
        disks,
        records,
        payload_bytes,
        unix_us,
        marks,
    } = group;
    let age_us = now.saturating_sub(*unix_us);
    if json {
        return lines.print(format_args!(
            "{}\n",
            json!({
                "cid": cid,
                "first_lsn": first_lsn,
                "last_lsn": last_lsn,
                "disks": disks,
                "records": records,
                "payload_bytes": payload_bytes,
                "unix_us": unix_us,
                "age_us": age_us,
                "marks": marks
                    .iter()
                    .map(|mark| json!({ "lsn": mark.lsn, "text": mark.text.as_str() }))
                    .collect::<Vec<_>>(),
            })
        ));
    }
    let disks = disks.iter().map(|disk| disk.display().to_string());
    let marks = marks
        .iter()
        .map(|mark| format!("lsn:{} {}", mark.lsn, shown(&mark.text)));
    let changed: Vec<_> = disks.chain(marks).collect();
    lines.print(format_args!(
        "{cid:>10} {:>21} {records:>8} {payload_bytes:>12} {:>9}  {}\n",
        format!("{first_lsn}-{last_lsn}"),
        age(age_us),
        changed.join(", "),
    ));
}

/// The text of a mark, quoted, with unprintable characters escaped.
fn shown(text: &MarkText) -> String {
    format!("{:?}", text.as_str())
}

fn print_record(lines: &mut LineWriter, record: &LogRecord<'_>, json: bool) {
    let kind = match record.kind {
        RecordKind::Write => "write",
        RecordKind::WriteZeroes => "write_zeroes",
        RecordKind::Discard => "discard",
        RecordKind::Mark => "mark",
        RecordKind::Rewind(_) => "rewind",
    };
    let segment = record.segment.file_name().unwrap_or_default();
    let segment = segment.to_string_lossy();
    if json {
        let mut object = json!({
            "lsn": record.lsn,
            "cid": record.cid,
            "unix_us": record.unix_us,
            "disk_id": record.disk_id,
            "disk": record.disk,
            "kind": kind,
            "sector": record.sector,
            "sectors": record.sectors,
            "payload_bytes": record.payload_bytes,
            "payload_crc32c": (!record.damaged).then_some(record.payload_crc),
            "segment": segment,
            "payload_offset": record.offset,
            "in_base": record.in_base,
            "undone": record.undone,
            "damaged": record.damaged,
        });
        match record.kind {
            RecordKind::Mark => object["text"] = record.text.map(MarkText::as_str).into(),
            RecordKind::Rewind(to) => object["to_lsn"] = to.into(),
            _ => {}
        }
        return lines.print(format_args!("{object}\n"));
    }
    let payload = match record.payload_bytes {
        0 => "-".to_owned(),
        _ => format!("{segment}+{}", record.offset),
    };
    let number = |number: u64| match record.kind {
        RecordKind::Mark | RecordKind::Rewind(_) => "-".to_owned(),
        _ => number.to_string(),
    };
    let disk = record.disk.display();
    let what = match record.kind {
        RecordKind::Mark => record.text.map(shown).unwrap_or_default(),
        RecordKind::Rewind(to) => format!("{disk} as of lsn:{to}"),
        _ => disk.to_string(),
    };
    lines.print(format_args!(
        "{:>10} {:>8} {kind:<12} {:>12} {:>8}  {payload:<26} {what}{}\n",
        record.lsn,
        record.cid,
        number(record.sector),
        number(record.sectors.into()),
        match (record.damaged, record.in_base, record.undone) {
            (true, ..) => " (damaged: not what was written)",
            (false, true, _) => " (in the base image)",
            (false, _, true) => " (undone by a restore in place)",
            (false, ..) => "",
        },
    ));
}

/// A readable age, in the largest unit that fits it.
fn age(us: u64) -> String {
    let seconds = us as f64 / 1e6;
    match seconds {
        ..1.0 => format!("{:.0} ms", seconds * 1e3),
        ..120.0 => format!("{seconds:.1} s"),
        ..7200.0 => format!("{:.0} min", seconds / 60.0),
        ..172_800.0 => format!("{:.0} h", seconds / 3600.0),
        _ => format!("{:.0} days", seconds / 86400.0),
    }
}
