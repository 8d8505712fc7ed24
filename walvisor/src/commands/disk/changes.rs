//! `walvisor disk changes`: what changed between two points.

use clap::Args;
use serde_json::json;
use walvisor_storage::{self as storage, Allocation, Point};

use super::path::{SharedDisk, print};
use crate::commands::CommandError;
use crate::commands::threads::Threads;

/// The arguments of `walvisor disk changes`.
#[derive(Debug, Args)]
pub(super) struct ChangesArguments {
    #[command(flatten)]
    shared: SharedDisk,
    /// The point after which changes count: cid:N or lsn:N (`walvisor log dump` shows both),
    /// a time such as 12:03, 'yesterday 12:03' or 2026-11-22T12:03:00Z, or before now such as -15m.
    #[arg(long, value_name = "AT", allow_hyphen_values = true)]
    from: Point,
    /// The last point of the changes [default: the newest record].
    #[arg(long, value_name = "AT", allow_hyphen_values = true)]
    to: Option<Point>,
    #[command(flatten)]
    threads: Threads,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Carries out `walvisor disk changes`.
pub(super) fn run(arguments: &ChangesArguments) -> Result<(), CommandError> {
    let ChangesArguments {
        shared,
        from,
        to,
        threads,
        json,
    } = arguments;
    let disk = &shared.disk;
    let found =
        shared.read(|path, log| storage::disk_changes(path, log, *from, *to, threads.get()));
    let storage::Changes {
        size,
        from_lsn,
        to_lsn,
        ranges,
    } = found?;
    let changed: u64 = ranges.iter().map(|range| range.len).sum();
    let ranges = ranges.iter().map(|range| {
        let now = match range.now {
            Allocation::Data => "data",
            Allocation::Zero => "zero",
            Allocation::Hole => "discarded",
        };
        (range.offset, range.len, now)
    });
    if *json {
        let ranges = ranges.map(|(offset, len, now)| {
            json!({
                "offset_bytes": offset,
                "length_bytes": len,
                "now": now,
            })
        });
        print(format_args!(
            "{}\n",
            json!({
                "disk": disk.path,
                "size_bytes": size,
                "from_lsn": from_lsn,
                "to_lsn": to_lsn,
                "changed_bytes": changed,
                "ranges": ranges.collect::<Vec<_>>(),
            })
        ));
        return Ok(());
    }
    let mut text = format!("{:>16} {:>16}  now\n", "offset", "bytes");
    for (offset, len, now) in ranges {
        text.push_str(&format!("{offset:>16} {len:>16}  {now}\n"));
    }
    print(format_args!(
        "{text}{}: {changed} of {size} bytes changed after LSN {from_lsn}, up to LSN {to_lsn}\n",
        disk.path.display()
    ));
    Ok(())
}
