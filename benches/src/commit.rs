//! `walvisor-bench commit`: published results on group commit, measured on a disk's log. A commit
//! is a 4 KiB write and its FLUSH. Clients are closed loops, each in a thread of its own.

use clap::Args;
use walvisor::commands::CommandError;

use crate::bench::{Bench, Settings, sections};
use crate::output::Output;
use crate::store::commit::measure;

const MATRICES: &str = include_str!("../matrices/commit.toml");

/// Arguments of `walvisor-bench commit`.
#[derive(Debug, Args)]
pub struct CommitArguments {
    /// Only these experiments, separated by commas
    #[arg(long, value_delimiter = ',', value_name = "NAME,NAME..", value_parser = sections(MATRICES))]
    only: Vec<String>,
    /// Added to the time of each sync, in microseconds
    #[arg(long, hide = true, value_name = "L", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    sync_latency_us: u32,
    #[command(flatten)]
    output: Output,
}

/// Runs `walvisor-bench commit`.
///
/// # Errors
/// If a measurement fails, or a file can't be written.
pub fn run(arguments: &CommitArguments) -> Result<(), CommandError> {
    let output = &arguments.output;
    let mut bench = Bench::new(MATRICES, output, &arguments.only, &Settings::new());
    for side in bench
        .matrices
        .iter_mut()
        .flat_map(|matrix| matrix.sides_mut())
    {
        let latency = side.number("sync_latency_us") + u64::from(arguments.sync_latency_us);
        side.plan
            .insert("sync_latency_us".to_owned(), latency.into());
    }
    let session = bench.start()?;
    let mut matrices = bench.matrices.iter_mut();
    let run = matrices
        .try_for_each(|matrix| matrix.measure(&session, |side| measure(&side.plan(), &output.dir)));
    bench.finish(session, run)
}
