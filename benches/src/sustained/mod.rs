//! `walvisor-bench sustained`: minutes instead of seconds. Compares the disk with its log with qemu-nbd and a raw image:
//! each second's rate, the longest wait, and the time to close, in the given directory and on a volume that is limited by
//! operations.
//!
//! ```text
//!   mod.rs: media, jobs, rounds ─▶ turn.rs ─▶ walvisor serve nbd │ qemu-nbd │ walvisor serve nbd, backend=raw
//!                                    │                      ▲ images on   │ medium.rs: --dir │ capped.rs
//!                                    └──▶ clients over NBD ─┘
//! ```
//! The sides take turns. Each turn starts its daemons and ends them, so no side leaves work to another.

mod capped;
mod job;
mod medium;
mod turn;

use std::time::Duration;

use clap::{Args, ValueEnum};
use walvisor::commands::CommandError;
use walvisor::size::parse_size;
use walvisor_storage::StoreOptions;

use crate::matrix::{self, Matrix, Row};
use crate::output::{Output, chosen};
use crate::programs::find;
use crate::report::plot::{Axis, Plot, Series};
use crate::report::{Cell, Preference, Section};
use crate::session::Session;
use job::{Job, Server};
use medium::{Medium, MountedMedium};
use turn::measure;

/// Arguments of `walvisor-bench sustained`.
#[derive(Debug, Args)]
pub struct SustainedArguments {
    /// Only these jobs, with commas between [default: all but mix, quickly the first two]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "JOB,JOB..")]
    only: Vec<Job>,
    /// Also the mix of a database
    #[arg(long)]
    mix: bool,
    /// Also the price of an honest FLUSH: 1, 8 and 32 connections beside cache=unsafe
    #[arg(long)]
    price: bool,
    /// Only these media, with commas between [default: both, quickly the directory]
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        value_name = "MEDIUM,MEDIUM.."
    )]
    media: Vec<Medium>,
    /// Only these sides of each job, with commas between [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "SIDE,SIDE..")]
    sides: Vec<Server>,
    /// Seconds of a turn [default: 60, quickly 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    seconds: Option<u32>,
    /// Bytes of the disk; of four disks together [default: 2G, quickly 256M]
    #[arg(long, value_name = "SIZE", value_parser = disk_bytes)]
    size: Option<u64>,
    /// Segments of the log, of 64 MiB each: with few of them it is full, and copied to the image, sooner
    #[arg(long, value_name = "N", default_value_t = StoreOptions::default().max_segments, value_parser = clap::value_parser!(u32).range(4..=65_536))]
    segments: u32,
    #[command(flatten)]
    output: Output,
}

/// Parses the size, of which four disks get a quarter each, in whole pages.
fn disk_bytes(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text).map_err(|error| error.to_string())?;
    if bytes < 4 << 20 || !bytes.is_multiple_of(1 << 20) {
        return Err("not a multiple of 1M, at least 4M".to_owned());
    }
    Ok(bytes)
}

impl SustainedArguments {
    fn jobs(&self) -> Vec<Job> {
        let mut jobs = chosen(&self.only);
        if self.only.is_empty() {
            let most = if self.output.quick { 2 } else { 4 };
            let first = jobs[..most].to_vec();
            jobs.retain(|job| {
                first.contains(job)
                    || (self.mix && *job == Job::Mix)
                    || (self.price && job.shows_price())
            });
        }
        jobs
    }

    fn media(&self) -> Vec<Medium> {
        match (&self.media[..], self.output.quick) {
            ([], true) => vec![Medium::Directory],
            ([], false) => Medium::value_variants().to_vec(),
            (chosen, _) => chosen.to_vec(),
        }
    }
}

/// Runs `walvisor-bench sustained`.
///
/// # Errors
/// If a measurement fails, a file can't be written, or a job needs qemu-nbd and it is not installed.
pub fn run(arguments: &SustainedArguments) -> Result<(), CommandError> {
    let output = &arguments.output;
    let (quick, jobs, media) = (output.quick, arguments.jobs(), arguments.media());
    let run = Run {
        time: Duration::from_secs(
            arguments
                .seconds
                .unwrap_or(if quick { 3 } else { 60 })
                .into(),
        ),
        rounds: output.rounds(if output.quick { 1 } else { 1 }),
        bytes: arguments
            .size
            .unwrap_or(if quick { 256 << 20 } else { 2 << 30 }),
        options: StoreOptions {
            max_segments: arguments.segments,
            ..StoreOptions::default()
        },
        jobs,
        sides: arguments.sides.clone(),
    };
    let planned = run.matrix();
    if planned.sides().any(|side| side.plan.0.is_peer()) && find("qemu-nbd").is_none() {
        return Err(CommandError::Failed(
            "qemu-nbd is missing: install the package qemu-utils".to_owned(),
        ));
    }
    let turns = planned.expected(|_| run.time + OVERHEAD) * run.rounds as u32;
    let session = output.start((run.images() + turns) * media.len() as u32)?;
    let (mut sections, mut failed): (Vec<Section>, _) = (Vec::new(), None);
    for medium in media {
        let mut matrix = run.matrix();
        let missing = match medium {
            Medium::Directory => None,
            Medium::Capped => capped::missing(),
        };
        if missing.is_none() && !session.interrupted() {
            let measured = run.measure(output, medium, &session, &mut matrix);
            // What was measured before a failure is still reported.
            failed = failed.or(measured.err());
        }
        matrix
            .rows
            .retain(|row| row.sides.iter().any(|side| !side.turns.is_empty()));
        sections.push(section(medium, &matrix, run.time, missing));
    }
    let title = "The disk for minutes: rates of seconds, longest waits, time to close";
    let interrupted = session.interrupted();
    let measured = |section: &Section| !section.table.rows.is_empty();
    if failed.is_none() || interrupted || sections.iter().any(measured) {
        output.write(title, session, sections)?;
    }
    // Ctrl-C also ends the daemons on the terminal.
    failed.filter(|_| !interrupted).map_or(Ok(()), Err)
}

/// The time of a turn besides its job: starting and closing.
const OVERHEAD: Duration = Duration::from_secs(2);

/// What is measured on each medium.
struct Run {
    time: Duration,
    rounds: usize,
    bytes: u64,
    options: StoreOptions,
    jobs: Vec<Job>,
    /// Only these; all if it is empty.
    sides: Vec<Server>,
}

/// What a side does in a turn.
type Work = (Server, Job);

impl Run {
    /// The jobs and sides, without turns yet.
    fn matrix(&self) -> Matrix<Work> {
        let mut matrix = Matrix::default();
        for &job in &self.jobs {
            let wanted = chosen(&self.sides);
            let sides = job.sides().filter(|server| wanted.contains(server));
            let mut sides = sides.peekable();
            if sides.peek().is_some() {
                let sides = sides.map(|server| (server.title(), (server, job)));
                matrix.add(job.plan().title, sides);
            }
        }
        matrix
    }

    /// Estimated time to make images.
    fn images(&self) -> Duration {
        Duration::from_millis(200 + self.bytes / 100_000)
    }

    fn measure(
        &self,
        output: &Output,
        medium: Medium,
        session: &Session,
        matrix: &mut Matrix<Work>,
    ) -> Result<(), CommandError> {
        let mut place = MountedMedium::new(&output.dir, medium, self.bytes, self.options)?;
        for row in &mut matrix.rows {
            let disks = row.sides[0].plan.1.plan().disks;
            let what = format!("making {disks} images");
            session.step(&what, self.images(), || place.make_images(disks))?;
            for round in 0..self.rounds {
                let expected = |_: &Work| self.time + OVERHEAD;
                let goes_on = row.measure((round, self.rounds), session, expected, |side| {
                    measure(&place, side.plan, self.time, session)
                })?;
                if !goes_on {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

/// The section of a medium: a row for each job and side, a plot of the seconds for each job. `missing`: why it was not
/// measured.
fn section(
    medium: Medium,
    matrix: &Matrix<Work>,
    time: Duration,
    missing: Option<String>,
) -> Section {
    type Column = matrix::Column<'static, Work>;
    const MEDIAN: &str = "median_per_s";
    const WITH_CLOSE: &str = "with_close_per_s";
    let (key, title) = match medium {
        Medium::Directory => ("sustained-directory", "For minutes, in the directory"),
        Medium::Capped => (
            "sustained-capped",
            "For minutes, on a volume that counts operations",
        ),
    };
    let turns = format!(
        "Turns of {} s. Median second: of the requests that ended in each second. Worst tenth: the median of the slowest tenth of the \
         seconds. A request that is flushed counts once, when its FLUSH has ended. With close: requests over the time of the turn \
         and from SIGTERM to the daemon's end, when it has nothing left to do.",
        time.as_secs()
    );
    let counted = match medium {
        Medium::Directory => {
            "Bytes that reached the device, from a daemon's start to its end, for each byte that the clients wrote: of the daemon's \
             process (/proc/PID/io). The directory shares its device with others, so operations are not counted."
        }
        Medium::Capped => {
            "1 ms for an operation and three at a time, which is 1,700 to 3,700 a second: nbdkit's delay filter under nbdfuse, a loop device and \
             ext4. Bytes and operations that reached the loop device (/sys/block/loopN/stat), from a daemon's start to its end, for \
             what the clients wrote."
        }
    };
    let mut notes = vec![
        turns.as_str(),
        "All sides but cache=unsafe answer a write once a kill of the daemon cannot lose it (for walvisor answer=written), and a FLUSH \
         makes every write before it durable (fdatasync). The peer and the raw image keep the host's page cache out (O_DIRECT, io_uring), \
         except with cache=writeback. A log is written through it, about 2 MiB ahead of the medium, and its image past it.",
        counted,
    ];
    notes.extend(missing.as_deref());
    // The list of the first round.
    let seconds = |key: &'static str, title| {
        Column::new(key, title, move |_, side| {
            let first = side.turns.first();
            first.map_or(Cell::None, |turn| Cell::Series(turn.list(key)))
        })
    };
    let (peer, raw) = (Server::QemuNbd.title(), Server::Raw.title());
    let columns = [
        Column::new("job", "job", |row, _| Cell::text(&row.name)),
        Column::new("side", "side", |_, side| Cell::text(&side.name)),
        Column::plan("answer", "answer=", |_| Cell::text("written")),
        Column::plan("cache", "cache", |(server, _)| Cell::text(server.cache())),
        Column::figure(MEDIAN, "median second", 0),
        Column::figure("worst_tenth_per_s", "worst tenth", 0),
        Column::figure("slowest_second_share", "slowest / median", 2),
        Column::figure("p50_us", "p50 us", 0),
        Column::figure("p99_us", "p99 us", 0),
        Column::figure("p999_us", "p99.9 us", 0),
        Column::figure("longest_ms", "longest ms", 1),
        Column::figure("close_s", "close s", 2),
        Column::figure(WITH_CLOSE, "rate with close", 0),
        Column::figure("device_bytes_per_byte", "written bytes/byte", 2),
        Column::figure("device_read_bytes_per_byte", "read bytes/byte", 2),
        Column::figure("device_operations_per_4_kib", "operations/4 KiB", 2),
        Column::beside("median_beside_peer", "median / peer", peer, MEDIAN),
        Column::beside("median_beside_raw", "median / raw", raw, MEDIAN),
        Column::beside(
            "with_close_beside_peer",
            "with close / peer",
            peer,
            WITH_CLOSE,
        ),
        Column::beside("with_close_beside_raw", "with close / raw", raw, WITH_CLOSE),
        Column::beside(
            "median_beside_unsafe",
            "median / unsafe",
            Server::Unsafe.title(),
            MEDIAN,
        ),
        Column::new(
            "median_beside_no_history",
            "median / retain=off",
            move |row, side| match side.plan.0 {
                Server::Keeping => row.ratio(side, Server::Wal.title(), MEDIAN, Preference::More),
                _ => Cell::None,
            },
        ),
        seconds("each_second_per_s", "each second"),
        seconds("each_second_longest_ms", "longest of each second"),
    ];
    let section = matrix.long(key, title, &notes, &columns);
    section.with_plots(
        matrix
            .rows
            .iter()
            .map(|row| plot(key, title, row))
            .collect(),
    )
}

/// The most points of a line.
const POINTS: usize = 300;

/// The seconds of the first round. If there are many, each point stands for several of them and shows the slowest.
fn plot(key: &str, title: &str, row: &Row<Work>) -> Plot {
    let series = row.sides.iter().map(|side| {
        let first = side.turns.first();
        let seconds = first.map_or(Vec::new(), |turn| turn.list("each_second_per_s"));
        let each = seconds.len().div_ceil(POINTS).max(1);
        let points = seconds.chunks(each).enumerate().map(|(at, part)| {
            let slowest = part.iter().copied().fold(f64::INFINITY, f64::min);
            ((at * each) as f64, slowest)
        });
        Series::measured(&side.name, points.collect())
    });
    Plot::lines(
        &format!("{key}-{}", row.sides[0].plan.1.name()),
        &format!("{title}: {}", row.name),
        Axis::linear("second"),
        Axis::linear("requests a second"),
        series.collect(),
    )
}
