//! `walvisor top`: what the disks of a running process do, and what their FLUSHes cost, each
//! second.

use std::io::{self, IsTerminal, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::termios::tcgetwinsize;
use serde_json::{Value, json};
use walvisor_devices::block::{LATENCY_CLASSES, LatencyCounts};
use walvisor_vmm::devices::terminal::RawTerminal;
use walvisor_vmm::vm::TerminationSignals;

use super::CommandError;
use super::ctl::answer::{latency, shared_with, text};
use crate::control_socket::{ControlCommand, StatsFormat, ask};
use crate::size::human_size;
use crate::table::{Table, stdout_width};

/// The rows of a terminal that does not tell.
const USUAL_ROWS: usize = 24;

/// The arguments of `walvisor top`.
#[derive(Args, Debug)]
pub struct TopArguments {
    /// The process's --control socket
    pub socket: PathBuf,
    /// Seconds between two looks
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = parse_interval)]
    pub interval: Duration,
    /// Measure one interval, print it, and end
    #[arg(long)]
    pub once: bool,
    /// Print JSON, an object for each interval
    #[arg(long)]
    pub json: bool,
}

/// Parses the argument of `--interval`.
fn parse_interval(text: &str) -> Result<Duration, String> {
    let seconds = text
        .parse()
        .ok()
        .filter(|seconds| (0.1..=3600.0).contains(seconds));
    let interval = seconds.map(Duration::from_secs_f64);
    interval.ok_or_else(|| "give seconds from 0.1 to 3600".to_owned())
}

/// Shows the process until somebody presses q or Ctrl-C.
///
/// # Errors
/// If no process answers, or it ends.
pub fn run(arguments: &TopArguments) -> Result<(), CommandError> {
    let stats = || {
        let stats = ControlCommand::Stats {
            format: StatsFormat::Json,
        };
        ask(&arguments.socket, &stats).map_err(CommandError::Failed)
    };
    let redraws = !arguments.once && !arguments.json && io::stdout().is_terminal();
    let mut before = stats()?;
    let mut screen = Screen::open(redraws).map_err(CommandError::failed)?;
    let mut next = Instant::now();
    loop {
        next += arguments.interval;
        if screen.is_ended(next).map_err(CommandError::failed)? {
            return Ok(());
        }
        let now = stats()?;
        let measured = rates(&before, &now);
        let shown = if arguments.json {
            format!("{measured}\n")
        } else {
            page(&measured, screen.width())
        };
        match screen.show(&shown) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
            shown => shown.map_err(CommandError::failed)?,
        }
        if arguments.once {
            return Ok(());
        }
        before = now;
    }
}

/// Where the pages go. Dropping it gives a terminal back as it was.
struct Screen {
    signals: TerminationSignals,
    /// The pages replace each other.
    redraws: bool,
    /// How many pages were shown.
    pages: u64,
    /// Keys come at once, and none is echoed.
    keys: Option<RawTerminal>,
}

impl Screen {
    fn open(redraws: bool) -> io::Result<Self> {
        let signals = TerminationSignals::block()?;
        let keys = if redraws { RawTerminal::enter()? } else { None };
        let mut screen = Self {
            signals,
            redraws,
            pages: 0,
            keys,
        };
        if redraws {
            // The other screen of the terminal, without a cursor.
            screen.write("\x1b[?1049h\x1b[?25l")?;
            screen.show("measuring ...\n")?;
        }
        Ok(screen)
    }

    fn write(&mut self, text: &str) -> io::Result<()> {
        let mut stdout = io::stdout();
        stdout.write_all(text.as_bytes())?;
        stdout.flush()
    }

    fn width(&self) -> usize {
        stdout_width()
    }

    /// Shows a page.
    fn show(&mut self, page: &str) -> io::Result<()> {
        self.pages += 1;
        if !self.redraws {
            let gap = if self.pages > 1 && !page.starts_with('{') {
                "\n"
            } else {
                ""
            };
            return self.write(&format!("{gap}{page}"));
        }
        let rows = match tcgetwinsize(io::stdout()) {
            Ok(size) if size.ws_row > 0 => usize::from(size.ws_row),
            _ => USUAL_ROWS,
        };
        let width = self.width();
        let lines = page.lines().take(rows - 1);
        let line =
            |line: &str| format!("{}\x1b[K\r\n", line.chars().take(width).collect::<String>());
        let lines: String = lines.map(line).collect();
        self.write(&format!("\x1b[H{lines}\x1b[J"))
    }

    /// Waits until `next`; `true`: somebody wants the end before.
    fn is_ended(&mut self, next: Instant) -> io::Result<bool> {
        loop {
            let left = next.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).map_err(io::Error::other)?;
            let stdin = io::stdin();
            let mut watched = vec![PollFd::new(&self.signals, PollFlags::IN)];
            if self.keys.is_some() {
                watched.push(PollFd::from_borrowed_fd(stdin.as_fd(), PollFlags::IN));
            }
            match poll(&mut watched, Some(&left)) {
                Ok(0) => return Ok(false),
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
            let ready: Vec<_> = watched.iter().map(|fd| !fd.revents().is_empty()).collect();
            if ready[0] {
                return Ok(true);
            }
            if ready.get(1) == Some(&true) {
                let mut keys = [0; 64];
                let count = rustix::io::read(&stdin, &mut keys)?;
                // The end of the input, q, or Ctrl-C, which sends no signal now.
                if count == 0 || keys[..count].iter().any(|key| b"qQ\x03".contains(key)) {
                    return Ok(true);
                }
            }
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        if self.redraws {
            // There is nobody left to report a failure to.
            let _ = self.write("\x1b[?25h\x1b[?1049l");
        }
    }
}

/// What happened between two looks at the statistics, per second.
fn rates(before: &Value, now: &Value) -> Value {
    let us = |stats: &Value| stats["uptime_us"].as_u64().unwrap_or(0);
    let seconds = us(now).saturating_sub(us(before)).max(1) as f64 / 1e6;
    let named = |stats: &Value, list: &str, key: &str, name: &Value| {
        let all = stats[list].as_array().into_iter().flatten();
        let mut same = all.filter(|one| one[key] == *name);
        same.next().cloned().unwrap_or_default()
    };
    let disks = now["disks"].as_array().into_iter().flatten().map(|disk| {
        let old = named(before, "disks", "name", &disk["name"]);
        disk_rates(&old, disk, seconds)
    });
    let logs = now["logs"].as_array().into_iter().flatten().map(|log| {
        let old = named(before, "logs", "path", &log["path"]);
        let (flushes, syncs) = (more(&old, log, "flushes"), more(&old, log, "syncs"));
        json!({
            "path": log["path"],
            "flushes_per_second": flushes / seconds,
            "syncs_per_second": syncs / seconds,
            "syncs_per_flush": part(syncs, flushes),
            "log_bytes_per_second": more(&old, log, "log_bytes") / seconds,
        })
    });
    json!({
        "kind": now["kind"],
        "pid": now["pid"],
        "state": now["state"],
        "uptime_us": now["uptime_us"],
        "memory": now["memory"],
        "seconds": seconds,
        "logs": logs.collect::<Vec<_>>(),
        "disks": disks.collect::<Vec<_>>(),
    })
}

/// How much a counter has grown. A disk that was opened again counts from 0.
fn more(old: &Value, new: &Value, key: &str) -> f64 {
    let number = |of: &Value| of[key].as_f64().unwrap_or(0.0);
    (number(new) - number(old)).max(0.0)
}

/// `some` for each of `all`; null if there is none.
fn part(some: f64, all: f64) -> Option<f64> {
    (all > 0.0).then(|| some / all)
}

/// What a disk did.
fn disk_rates(old: &Value, new: &Value, seconds: f64) -> Value {
    let rate = |key: &str| more(old, new, key) / seconds;
    let classes = |disk: &Value, class: usize| {
        let count = disk["latency"]["flush"]["classes"][class].as_u64();
        count.unwrap_or(0)
    };
    let flushes = LatencyCounts {
        classes: std::array::from_fn::<_, LATENCY_CLASSES, _>(|class| {
            classes(new, class).saturating_sub(classes(old, class))
        }),
        sum_ns: 0,
    };
    let (shared, before) = (&new["sync_sharing"], &old["sync_sharing"]);
    let partners = shared["with"].as_array().into_iter().flatten();
    let partners = partners.filter_map(|partner| {
        let before = before["with"].as_array().into_iter().flatten();
        let mut before = before.filter(|other| other["disk"] == partner["disk"]);
        let old = before.next().cloned().unwrap_or_default();
        let groups = more(&old, partner, "groups") as u64;
        (groups > 0).then(|| json!({ "disk": partner["disk"], "groups": groups }))
    });
    let count = flushes.count();
    let bound = |one_in| (count > 0).then(|| json!(flushes.all_but_one_in_us(one_in)));
    json!({
        "name": new["name"],
        "condition": new["condition"]["name"],
        "paused": new["paused"],
        "reads_per_second": rate("reads"),
        "writes_per_second": rate("writes"),
        "read_bytes_per_second": rate("read_bytes"),
        "written_bytes_per_second": rate("written_bytes"),
        "flushes": count,
        "flushes_per_second": rate("flushes"),
        "flush_p50_us": bound(2),
        "flush_p99_us": bound(100),
        "syncs_per_flush": part(more(before, shared, "syncs"), more(before, shared, "flushes")),
        "groups": more(before, shared, "groups") as u64,
        "shared_with": partners.collect::<Vec<_>>(),
    })
}

/// A number of things in a second.
fn rate(value: &Value) -> String {
    match value.as_f64().unwrap_or(0.0) {
        number @ ..10.0 => format!("{}", (number * 10.0).round() / 10.0),
        number => format!("{number:.0}"),
    }
}

/// The last characters of a name, which tell more than its first ones.
fn end_of(name: &str, most: usize) -> String {
    let length = name.chars().count();
    if length <= most {
        return name.to_owned();
    }
    let kept: String = name.chars().skip(length + 1 - most).collect();
    format!("…{kept}")
}

/// The rates for people, in lines of at most `width` characters.
fn page(rates: &Value, width: usize) -> String {
    let all = |key: &str| rates[key].as_array().cloned().unwrap_or_default();
    let bytes = |value: &Value| human_size(value.as_f64().unwrap_or(0.0) as u64);
    let per = |value: &Value| {
        value
            .as_f64()
            .map_or("-".to_owned(), |part| format!("{part:.2}"))
    };
    let mut page = format!(
        "{} {}: {}, up {} s\n",
        text(&rates["kind"]),
        rates["pid"],
        text(&rates["state"]),
        rates["uptime_us"].as_u64().unwrap_or(0) / 1_000_000
    );
    for log in all("logs") {
        page += &format!(
            "log {}: {} FLUSHes/s, {} syncs/s, {} for each, {}/s\n",
            end_of(&text(&log["path"]), width.saturating_sub(64).max(16)),
            rate(&log["flushes_per_second"]),
            rate(&log["syncs_per_second"]),
            per(&log["syncs_per_flush"]),
            bytes(&log["log_bytes_per_second"])
        );
    }
    let mut table = Table::new(&[
        "DISK",
        "READ/s",
        "WRITTEN/s",
        "FLUSH/s",
        "P50",
        "P99",
        "SYNCS",
        "SHARED WITH",
    ]);
    for disk in all("disks") {
        let bound = |key: &str| match disk["flushes"].as_u64() {
            None | Some(0) => "-".to_owned(),
            _ => latency(&disk[key]),
        };
        let condition = match (disk["paused"] == true, text(&disk["condition"])) {
            (true, _) => " (paused)".to_owned(),
            (_, ok) if ok == "ok" => String::new(),
            (_, trouble) => format!(" ({})", trouble.replace('_', " ")),
        };
        let groups = disk["groups"].as_u64().unwrap_or(0);
        table.row(vec![
            format!("{}{condition}", end_of(&text(&disk["name"]), width / 8)),
            bytes(&disk["read_bytes_per_second"]),
            bytes(&disk["written_bytes_per_second"]),
            rate(&disk["flushes_per_second"]),
            bound("flush_p50_us"),
            bound("flush_p99_us"),
            per(&disk["syncs_per_flush"]),
            shared_with(&disk["shared_with"], groups),
        ]);
    }
    table.cut_last(width);
    page + &table.lines(width)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(uptime_us: u64, flushes: u64, syncs: f64, with: Value) -> Value {
        let mut classes = [0; LATENCY_CLASSES];
        classes[7] = flushes;
        json!({
            "kind": "nbd", "pid": 7, "state": "running", "uptime_us": uptime_us,
            "logs": [{ "path": "log", "flushes": flushes, "syncs": flushes / 2, "log_bytes": flushes * 4096 }],
            "disks": [{
                "name": "/var/lib/walvisor/a-long-name-of-a-disk.img", "condition": { "name": "ok" }, "paused": false,
                "reads": 0, "writes": flushes, "read_bytes": 0, "written_bytes": flushes << 20, "flushes": flushes,
                "latency": { "flush": { "classes": classes } },
                "sync_sharing": { "flushes": flushes, "syncs": syncs, "groups": flushes, "with": with },
            }],
        })
    }

    #[test]
    fn an_interval_has_its_own_rates_and_latencies() {
        let before = stats(1_000_000, 100, 100.0, json!([]));
        let with = json!([{ "disk": "b", "groups": 25 }, { "disk": "c", "groups": 75 }]);
        let now = stats(3_000_000, 200, 125.0, with);
        let rates = rates(&before, &now);
        let disk = &rates["disks"][0];
        assert_eq!(rates["seconds"], 2.0);
        assert_eq!(rates["logs"][0]["syncs_per_flush"], 0.5);
        for (key, value) in [
            ("flushes_per_second", json!(50.0)),
            ("flush_p50_us", json!(128)),
            ("flush_p99_us", json!(128)),
            ("syncs_per_flush", json!(0.25)),
            ("written_bytes_per_second", json!((50 << 20) as f64)),
        ] {
            assert_eq!(disk[key], value, "{key}");
        }
        for (width, cell) in [(80, "c 75 %, "), (120, "c 75 %, b 25 %")] {
            let page = page(&rates, width);
            assert!(
                page.lines().all(|line| line.chars().count() <= width),
                "{page}"
            );
            assert!(page.contains("50 MiB") && page.contains(cell), "{page}");
            assert_eq!(page.lines().count(), 4, "{page}");
        }
        // Nothing has happened since, so nothing is known.
        let idle = disk_rates(&now["disks"][0], &now["disks"][0], 1.0);
        assert_eq!(
            (&idle["flush_p50_us"], &idle["syncs_per_flush"]),
            (&Value::Null, &Value::Null)
        );
    }

    #[test]
    fn an_interval_is_a_number_of_seconds() {
        assert_eq!(parse_interval("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["0", "nan", "inf", "-1", "4000", "1s", ""] {
            assert!(parse_interval(wrong).is_err(), "{wrong}");
        }
    }
}
