//! `walvisor-bench sustained`: minutes instead of seconds. Compares the disk with its log with qemu-nbd and a raw image:
//! each second's rate, the longest wait, and the time to close, in the given directory and on a volume that is limited by
//! operations.
//!
//! ```text
//!   mod.rs: media, jobs, rounds ─▶ turn.rs ─▶ side.rs: walvisor serve nbd │ qemu-nbd │ walvisor serve nbd, backend=raw
//!                                    │                      ▲ images on   │ medium.rs: --dir │ capped.rs
//!                                    └──▶ clients over NBD ─┘
//! ```
//! The sides take turns. Each turn starts its daemons and ends them, so no side leaves work to another.

mod capped;
mod job;
mod medium;
mod section;
mod side;
mod turn;

use std::time::Duration;

use clap::{Args, ValueEnum};
use walvisor::commands::CommandError;
use walvisor::size::parse_size;
use walvisor_storage::StoreOptions;

use crate::output::Output;
use crate::programs::find;
use crate::report::Section;
use crate::session::Session;
use job::Job;
use medium::{Medium, Place};
use side::Side;
use turn::{Row, measure};

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
    sides: Vec<Side>,
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
        let all = Job::value_variants().iter().copied();
        let most = if self.output.quick { 2 } else { 4 };
        if self.only.is_empty() {
            all.enumerate()
                .filter(|&(at, job)| {
                    at < most || (self.mix && job == Job::Mix) || (self.price && job.shows_price())
                })
                .map(|(_, job)| job)
                .collect()
        } else {
            all.filter(|job| self.only.contains(job)).collect()
        }
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
        rounds: output.rounds(1, 1),
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
    let mut sides = run.jobs.iter().flat_map(|&job| run.sides(job));
    if sides.any(Side::is_peer) && find("qemu-nbd").is_none() {
        return Err(CommandError::Failed(
            "qemu-nbd is missing: install the package qemu-utils".to_owned(),
        ));
    }
    let session = output.start(run.expected() * media.len() as u32)?;
    let (mut sections, mut failed): (Vec<Section>, _) = (Vec::new(), None);
    for medium in media {
        let mut rows = Vec::new();
        let missing = match medium {
            Medium::Directory => None,
            Medium::Capped => capped::missing(),
        };
        if missing.is_none() {
            let measured = run.measure(output, medium, &session, &mut rows);
            // What was measured before a failure is still reported.
            failed = failed.or(measured.err());
        }
        sections.push(section::section(medium, &rows, run.time, missing));
    }
    let title = "The disk for minutes: rates of seconds, longest waits, time to close";
    let interrupted = session.interrupted();
    output.write(title, session, sections)?;
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
    sides: Vec<Side>,
}

impl Run {
    /// The sides that are measured with this job.
    fn sides(&self, job: Job) -> Vec<Side> {
        let mut sides = job.sides();
        sides.retain(|side| self.sides.is_empty() || self.sides.contains(side));
        sides
    }

    /// Estimated time to make images.
    fn images(&self) -> Duration {
        Duration::from_millis(200 + self.bytes / 100_000)
    }

    /// Estimated time on a medium.
    fn expected(&self) -> Duration {
        let sides: usize = self.jobs.iter().map(|&job| self.sides(job).len()).sum();
        let turns = self.rounds * sides;
        self.images() + (self.time + OVERHEAD) * turns as u32
    }

    fn measure(
        &self,
        output: &Output,
        medium: Medium,
        session: &Session,
        rows: &mut Vec<Row>,
    ) -> Result<(), CommandError> {
        if session.interrupted() {
            return Ok(());
        }
        // Socket paths must be short.
        let sockets = tempfile::tempdir().map_err(CommandError::failed)?;
        let mut place = Place::new(&output.dir, medium, self.bytes, self.options)?;
        for &job in &self.jobs {
            let sides = self.sides(job);
            if sides.is_empty() {
                continue;
            }
            let what = format!("making {} images", job.disks());
            session.step(&what, self.images(), || place.make_images(job.disks()))?;
            rows.push(Row {
                job,
                sides,
                turns: Default::default(),
            });
            let Some(row) = rows.last_mut() else { continue };
            for round in 0..self.rounds {
                let mut sides = row.sides.clone();
                // The order rotates, so that no side is always first.
                let first = round % sides.len();
                sides.rotate_left(first);
                for side in sides {
                    let (round, rounds) = (round + 1, self.rounds);
                    let what = format!(
                        "{}: {}, round {round} of {rounds}",
                        side.title(),
                        job.title()
                    );
                    let turn = session.step(&what, self.time + OVERHEAD, || {
                        measure(&place, sockets.path(), (side, job), self.time, session)
                    })?;
                    row.turns[side.position()].extend(turn);
                }
            }
        }
        Ok(())
    }
}
