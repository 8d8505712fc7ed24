//! The program that runs in the machine that loses power, in user-mode Linux.
//! `promises/power_cut.rs` starts it.
//!
//! ```text
//!   record.rs: mkfs, disks made, served, killed, closed, resized      points.rs: the moments at which power is cut
//!      │ client.rs over nbd.rs, faults.rs for what has none              │
//!      ▼                                                                 ▼
//!   device_mapper.rs: dm-log-writes, marks ──▶ log_writes.rs ──▶ judge.rs: mount, recover, compare with history.rs
//! ```
//!
//! ```text
//! power-cut record DIR FILE-SYSTEM ENGINE FAULT LOAD SEED OPERATIONS WALVISOR
//!                                     LOAD: `life`; `pages`; or `raw-pages`, without a log
//! power-cut judge DIR POINTS WALVISOR [first]         POINTS: how many; `each`; or one as it was printed
//! power-cut make DISK
//! ```

mod client;
mod device_mapper;
mod faults;
mod history;
mod judge;
mod log_writes;
mod points;
mod record;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use faults::{Conditions, Fault};
use history::{History, Mark};
use judge::Judge;
use log_writes::Log;
use points::{CutPlaces, Point};
use record::Plan;
use walvisor_testkit::Random;

/// The disk that loses power, in the guest's memory. It has a write cache and supports FUA.
const DATA: &str = "/dev/sda";
/// The log of dm-log-writes, a file outside of the guest.
const LOG: &str = "/dev/ubda";

/// Number of random points, besides the points of `each`.
const SOME: usize = 240;
/// How often new points are chosen until one shows the fault.
const TRIES: usize = 20;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let done = match arguments[..] {
        ["record", ref rest @ ..] => record(rest),
        ["judge", ref rest @ ..] => judge(rest),
        ["make", name] => record::make(name),
        _ => Err(io::Error::other("usage: see the top of main.rs")),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("guest: failed: {error}");
            ExitCode::FAILURE
        }
    }
}

fn number(text: &str) -> io::Result<u64> {
    text.parse()
        .map_err(|_| io::Error::other(format!("{text} is no number")))
}

fn record(arguments: &[&str]) -> io::Result<()> {
    let [
        dir,
        file_system,
        engine,
        fault,
        load,
        seed,
        operations,
        walvisor,
    ] = arguments[..]
    else {
        return Err(io::Error::other("record takes eight arguments"));
    };
    let plan = Plan {
        file_system: file_system.to_owned(),
        conditions: Conditions {
            fault: Fault::named(fault),
            io_uring: engine == "io_uring",
        },
        pages: (load != "life").then_some(load == "pages"),
        seed: number(seed)?,
        operations: number(operations)? as usize,
        walvisor: PathBuf::from(walvisor),
        data: PathBuf::from(DATA),
        log: PathBuf::from(LOG),
    };
    let history = record::record(&plan)?;
    fs::write(Path::new(dir).join("history"), history.to_text())?;
    let states: usize = history
        .chains
        .iter()
        .map(|chain| chain.states.len() - 1)
        .sum();
    println!("guest: operations {states}");
    Ok(())
}

fn judge(arguments: &[&str]) -> io::Result<()> {
    let [dir, wanted, walvisor, ref rest @ ..] = arguments[..] else {
        return Err(io::Error::other("judge takes three or four arguments"));
    };
    let history = History::parse(&fs::read_to_string(Path::new(dir).join("history"))?)?;
    let log = Log::read(File::open(LOG)?)?;
    let marks: Vec<_> = log
        .entries
        .iter()
        .map(|entry| Mark::parse(&entry.mark))
        .collect();
    let begin = marks.iter().position(|mark| *mark == Some(Mark::Begin));
    let begin = begin.ok_or_else(|| io::Error::other("the log has no begin"))?;
    let acknowledged = marks.iter().flatten();
    let acknowledged = acknowledged.filter(|mark| matches!(mark, Mark::Acknowledged { .. }));
    let durable = log.entries[begin..]
        .iter()
        .filter(|entry| entry.is_durable());
    println!("guest: acknowledged {}", acknowledged.count());
    println!("guest: durable {}", durable.count());
    let places = CutPlaces::find(&log.entries, begin);
    let mut random = Random(history.seed);
    let mut choose = || -> io::Result<Vec<Point>> {
        let mut points = match (Point::parse(wanted), wanted) {
            (Some(point), _) => return Ok(vec![point]),
            (None, "each") => [places.each(&mut random), places.some(SOME, &mut random)].concat(),
            (None, count) => places.some(number(count)? as usize, &mut random),
        };
        // These marks are few, and each is a promise of its own kind.
        let made = |number: &usize| matches!(marks[*number], Some(Mark::Made { .. }));
        points.extend((0..marks.len()).filter(made).map(Point::after));
        points.sort_by_key(|point| point.place(&log.entries));
        Ok(points)
    };
    let sectors = fs::read_to_string("/sys/block/sda/size")?;
    let judge = Judge {
        log: &log,
        history: &history,
        walvisor: Path::new(walvisor),
        data: Path::new(DATA),
        bytes: number(sectors.trim())? as usize * log_writes::SECTOR,
    };
    let (mut judged, mut violated) = (0, 0);
    let until_first = !rest.is_empty();
    for _ in 0..if until_first { TRIES } else { 1 } {
        judge.judge(&choose()?, |point, broken| {
            judged += 1;
            violated += usize::from(!broken.is_empty());
            for what in broken {
                println!("guest: broken {point} {what}");
            }
            // Regular lines show the test that the program is still working.
            if judged % 16 == 0 {
                println!("guest: judged {judged} violated {violated}");
            }
            broken.is_empty() || !until_first
        })?;
        if violated > 0 {
            break;
        }
    }
    println!("guest: judged {judged} violated {violated}");
    Ok(())
}
