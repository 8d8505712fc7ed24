//! `walvisor-bench commit`: published results on group commit, measured on a disk's log. A commit is a 4 KiB write and its
//! FLUSH. Clients are closed loops, each in a thread of its own.

pub mod cell;
mod clients;
mod disks;
mod experiments;
pub mod latency;
mod medium;
mod mode;
mod wait;
mod waiters;

use std::time::Duration;

use clap::{Args, ValueEnum};
use walvisor::commands::CommandError;

use crate::output::Output;
use experiments::Experiment;

/// Arguments of `walvisor-bench commit`.
#[derive(Debug, Args)]
pub struct CommitArguments {
    /// Only these experiments, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME,NAME..")]
    only: Vec<Experiment>,
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
    let slower = Duration::from_micros(arguments.sync_latency_us.into());
    let experiments: Vec<_> = Experiment::value_variants()
        .iter()
        .filter(|experiment| experiment.is_wanted(&arguments.only))
        .map(|experiment| experiments::plan_experiment(*experiment, &arguments.output, slower))
        .collect();
    let expected = experiments
        .iter()
        .map(|experiment| experiment.expected())
        .sum();
    let session = arguments.output.start(expected)?;
    let mut sections = Vec::new();
    for mut experiment in experiments {
        experiment.measure(&session, &arguments.output.dir)?;
        sections.push(experiment.section());
    }
    let title = "Group commit: what a FLUSH costs when many wait for one";
    arguments.output.write(title, session, sections)
}
