//! One turn: a side starts its daemons, the clients do their job, and the daemons end.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use serde_json::json;
use walvisor::commands::CommandError;

use super::interrupted;
use super::medium::{MountedMedium, Traffic};
use crate::bench::{Side, Turn};
use crate::daemon::Daemon;
use crate::load::loops::Tally;
use crate::load::nbd::{NbdClient, drive_all};
use crate::serve::serve;
use crate::session::Session;

/// Runs one turn. The images must exist.
///
/// # Errors
/// If a daemon does not start, a request fails, or a daemon ends with an error.
pub fn measure(
    medium: &MountedMedium,
    side: &Side,
    session: &Session,
) -> Result<Turn, CommandError> {
    let before = medium.traffic()?;
    let sockets = medium.sockets();
    let each = (0..side.number("disks")).map(|disk| sockets.join(format!("disk-{disk}")));
    let each: Vec<PathBuf> = each.collect();
    let daemons = serve(side, "nbd", &medium.images(), sockets, &each)?;
    let tally = drive(medium, side, &each, session);
    if session.interrupted() || tally.is_err() {
        daemons.into_iter().for_each(Daemon::kill);
        return Err(tally.err().unwrap_or_else(interrupted));
    }
    let (close, moved) = end(daemons, session)?;
    let traffic = match (medium.traffic()?, before) {
        (Some(after), Some(before)) => after.since(before),
        _ => moved,
    };
    Ok(figures(&tally?, close, traffic))
}

/// Runs the clients, each in a thread of its own.
fn drive(
    medium: &MountedMedium,
    side: &Side,
    sockets: &[PathBuf],
    session: &Session,
) -> Result<Tally, CommandError> {
    let job = side.text("title");
    let failed = |error: std::io::Error| CommandError::Failed(format!("{job}: {error}"));
    let mut clients = Vec::new();
    for socket in sockets {
        for _ in 0..side.number("connections") {
            clients.push(NbdClient::connect(socket, "disk").map_err(failed)?.0);
        }
    }
    let loops = (
        side.plan(),
        side.number("depth") as usize,
        medium.disk_bytes(),
    );
    let turn = Duration::from_secs(side.number("seconds"));
    drive_all(clients, loops, turn, session).map_err(failed)
}

/// Ends the daemons with SIGTERM. Returns the time until all have ended, and the bytes that they
/// moved in all. If the session is interrupted, kills them.
fn end(mut daemons: Vec<Daemon>, session: &Session) -> Result<(Duration, Traffic), CommandError> {
    let began = Instant::now();
    let mut processes: Vec<_> = daemons.iter_mut().map(Daemon::process).collect();
    for process in &processes {
        kill_process(Pid::from_child(process), Signal::TERM).map_err(CommandError::failed)?;
    }
    let mut traffic = Traffic::default();
    for process in &mut processes {
        let id = Pid::from_child(process);
        // Leaves the process a zombie, because its counts are still to be read.
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
        while waitid(WaitId::Pid(id), options)
            .map_err(CommandError::failed)?
            .is_none()
        {
            if session.interrupted() {
                let _ = process.kill();
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let (read, written) = bytes_moved(process.id())?;
        traffic.read_bytes += read;
        traffic.written_bytes += written;
    }
    let took = began.elapsed();
    for process in processes {
        let status = process.wait().map_err(CommandError::failed)?;
        if !status.success() {
            return Err(CommandError::Failed(format!(
                "a daemon ended with {status}"
            )));
        }
    }
    Ok((took, traffic))
}

/// Bytes that a process has read from and written to devices (proc(5), `io`).
fn bytes_moved(process: u32) -> Result<(u64, u64), CommandError> {
    let path = format!("/proc/{process}/io");
    let text = std::fs::read_to_string(&path);
    let text = text.map_err(|error| CommandError::Failed(format!("{path}: {error}")))?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|value| value.trim().parse().ok())
            .ok_or_else(|| CommandError::Failed(format!("{path}: no {name}")))
    };
    Ok((field("read_bytes:")?, field("write_bytes:")?))
}

/// The figures of a turn: what the clients saw, the time from SIGTERM until the last daemon has
/// ended, and what reached the device from the start of the daemons to their end.
fn figures(tally: &Tally, close: Duration, traffic: Traffic) -> Turn {
    let seconds = tally.seconds.iter();
    let each_second: Vec<f64> = seconds.map(|second| second.requests as f64).collect();
    let mut sorted = each_second.clone();
    sorted.sort_by(f64::total_cmp);
    let middle = |sorted: &[f64]| sorted.get(sorted.len() / 2).copied().unwrap_or(0.0);
    let median = middle(&sorted);
    let slowest = sorted.first().copied().unwrap_or(0.0);
    let within = |per_mille| tally.histogram.quantile(per_mille) as f64 / 1e3;
    let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
    let longest = tally.seconds.iter();
    let longest: Vec<f64> = longest.map(|second| milliseconds(second.longest)).collect();
    let requests = tally.histogram.total() as f64;
    let each_byte = |count: u64| count as f64 / tally.written_bytes.max(1) as f64;
    Turn(json!({
        "median_per_s": median,
        // The median of the slowest tenth of the seconds.
        "worst_tenth_per_s": middle(&sorted[..sorted.len().div_ceil(10)]),
        "slowest_second_share": slowest / median.max(1.0),
        "p50_us": within(500),
        "p99_us": within(990),
        "p999_us": within(999),
        "longest_ms": milliseconds(tally.longest),
        "close_s": close.as_secs_f64(),
        // The time to close counts too, in which the side finishes its work.
        "with_close_per_s": requests / (tally.time + close).as_secs_f64().max(1e-9),
        "device_bytes_per_byte": each_byte(traffic.written_bytes),
        "device_read_bytes_per_byte": each_byte(traffic.read_bytes),
        // A database page is several times 4 KiB.
        "device_operations_per_4_kib": traffic.operations.map(|count| each_byte(count) * 4096.0),
        "each_second_per_s": each_second,
        "each_second_longest_ms": longest,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::loops::SecondStats;

    #[test]
    fn the_worst_seconds_are_reported_next_to_the_median() {
        let mut seconds = vec![100; 18];
        seconds.extend([10, 20]);
        let seconds = seconds.into_iter().map(|requests| SecondStats {
            requests,
            ..SecondStats::default()
        });
        let mut tally = Tally {
            seconds: seconds.collect(),
            time: Duration::from_secs(20),
            written_bytes: 4000,
            ..Tally::default()
        };
        (0..1830).for_each(|_| tally.histogram.record(1000));
        let traffic = Traffic {
            written_bytes: 6000,
            ..Traffic::default()
        };
        let turn = figures(&tally, Duration::from_secs(10), traffic);
        for (key, value) in [
            ("median_per_s", 100.0),
            ("worst_tenth_per_s", 20.0),
            ("slowest_second_share", 0.1),
            ("with_close_per_s", 61.0),
            ("device_bytes_per_byte", 1.5),
        ] {
            assert_eq!(turn.get(key), Some(value), "{key}");
        }
        assert_eq!(turn.list("each_second_per_s").len(), 20);
    }
}
