//! `walvisor-bench sustained`: minutes instead of seconds. Compares the disk with its log with
//! qemu-nbd and a raw image: each second's rate, the longest wait, and the time to close, in the
//! given directory and on a volume that is limited by operations.
//!
//! ```text
//!   mod.rs: media, jobs ─▶ turn.rs ─▶ walvisor serve nbd, with a log │ backend=raw │ qemu-nbd
//!                            │                      ▲ images on medium.rs: --dir │ volume.rs
//!                            └──▶ clients over NBD ─┘
//! ```
//! The sides take turns. Each turn starts its daemons and ends them, so no side leaves work to
//! another.

mod medium;
mod turn;

use std::time::Duration;

use clap::Args;
use serde_json::json;
use walvisor::commands::CommandError;
use walvisor::size::parse_size;
use walvisor_storage::StoreOptions;

use crate::bench::{Bench, Matrix, Row, Side, TakeTurns, Turn, rows, sections, settings, sides};
use crate::output::Output;
use crate::programs::require;
use crate::session::Session;
use crate::volume;
use medium::MountedMedium;

const MATRICES: &str = include_str!("../../matrices/sustained.toml");

/// Arguments of `walvisor-bench sustained`.
#[derive(Debug, Args)]
pub struct SustainedArguments {
    /// Only these jobs, with commas between [default: the first four, quickly the first two]
    #[arg(long, value_delimiter = ',', value_name = "JOB,JOB..", value_parser = rows(MATRICES, "job"))]
    only: Vec<String>,
    /// Only these media, with commas between [default: both, quickly the directory]
    #[arg(long, value_delimiter = ',', value_name = "MEDIUM,MEDIUM..", value_parser = sections(MATRICES))]
    media: Vec<String>,
    /// Only these sides of each job, with commas between [default: all]
    #[arg(long, value_delimiter = ',', value_name = "SIDE,SIDE..", value_parser = sides(MATRICES))]
    sides: Vec<String>,
    /// Seconds of a turn [default: 60, quickly 3]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    seconds: Option<u32>,
    /// Bytes of the disk; of four disks together [default: 2G, quickly 256M]
    #[arg(long, value_name = "SIZE", value_parser = disk_bytes)]
    size: Option<u64>,
    /// Segments of the log, of 64 MiB each: with few of them it is full, and copied to the image,
    /// sooner
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

/// Runs `walvisor-bench sustained`.
///
/// # Errors
/// If a measurement fails, a file can't be written, or a job needs qemu-nbd and it is not
/// installed.
pub fn run(arguments: &SustainedArguments) -> Result<(), CommandError> {
    let output = &arguments.output;
    let mut given = settings(json!({}));
    given.extend(
        arguments
            .seconds
            .map(|seconds| ("seconds".to_owned(), seconds.into())),
    );
    given.extend(
        arguments
            .size
            .map(|bytes| ("bytes".to_owned(), bytes.into())),
    );
    let media = match (&arguments.media[..], output.quick) {
        ([], true) => &["directory".to_owned()],
        (media, _) => media,
    };
    let mut bench = Bench::new(MATRICES, output, media, &given);
    let usual = if output.quick { "quick" } else { "usual" };
    for matrix in &mut bench.matrices {
        matrix.keep_sides(&arguments.sides);
        matrix.rows.retain(|row| {
            let job = &row.sides[0];
            match &arguments.only[..] {
                [] => job.plan.contains_key(usual),
                only => only.iter().any(|name| name == job.text("job")),
            }
        });
    }
    let is_peer = |side: &Side| side.side.starts_with("qemu-nbd");
    if bench.matrices.iter().flat_map(Matrix::sides).any(is_peer) {
        require(&[("qemu-nbd", "qemu-utils")])?;
    }
    let session = bench.start()?;
    let mut run = Ok(());
    for matrix in &mut bench.matrices {
        let missing = (matrix.spec.name == "capped")
            .then(volume::missing)
            .flatten();
        if let Some(missing) = missing {
            matrix.notes.push(missing);
        } else if !session.interrupted() {
            run = run.and(measure(matrix, arguments, &session));
        }
    }
    bench.finish(session, run)
}

fn measure(
    matrix: &mut Matrix,
    arguments: &SustainedArguments,
    session: &Session,
) -> Result<(), CommandError> {
    let Some(bytes) = matrix.sides().next().map(|side| side.number("bytes")) else {
        return Ok(());
    };
    let (dir, capped) = (&arguments.output.dir, matrix.spec.name == "capped");
    let options = StoreOptions {
        max_segments: arguments.segments,
        ..StoreOptions::default()
    };
    let kept = matrix.rows.iter().any(keeps_history);
    let medium = MountedMedium::new(dir, capped, kept, bytes, options)?;
    matrix.measure_rows(session, &mut Turns { medium, session })
}

/// Whether a side of the row keeps history.
fn keeps_history(row: &Row) -> bool {
    row.sides[0].plan.contains_key("kept")
}

/// The turns on a medium.
struct Turns<'a> {
    medium: MountedMedium,
    session: &'a Session,
}

impl TakeTurns for Turns<'_> {
    fn prepare(&mut self, row: &Row) -> Result<(), CommandError> {
        let (medium, disks) = (&mut self.medium, row.sides[0].number("disks") as usize);
        let what = format!("making {disks} images");
        let expected = Duration::from_millis(200 + medium.bytes() / 100_000);
        let kept = keeps_history(row);
        let made = self
            .session
            .step(&what, expected, || medium.make_images(disks, kept))?;
        made.ok_or_else(interrupted)
    }

    fn turn(&mut self, side: &Side) -> Result<Turn, CommandError> {
        turn::measure(&self.medium, side, self.session)
    }
}

/// Ends a turn that Ctrl-C has cut short.
fn interrupted() -> CommandError {
    CommandError::Failed("interrupted".to_owned())
}
