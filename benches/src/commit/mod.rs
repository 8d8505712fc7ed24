//! `walvisor-bench commit`: published results on group commit, measured on a disk's log. A commit is a 4 KiB write and its
//! FLUSH. Clients are closed loops, each in a thread of its own.

pub mod experiments;

use std::time::Duration;

use clap::{Args, ValueEnum};
use walvisor::commands::CommandError;

use crate::matrix::Matrix;
use crate::output::{Output, chosen};
use crate::report::Section;
use crate::store::commit::{CommitPlan, measure};

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

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Experiment {
    /// 1 to 30 clients, grouping off and on (InnoDB Plugin 1.0.4, 2009)
    Clients,
    /// Sync latencies by clients, grouping off and on (MySQL 5.6 under DRBD, 2012)
    Latency,
    /// 32 to 256 clients, one write per group and one write per waiter (Aliyun, 2015)
    Waiters,
    /// How long a group waits and for how many (MariaDB 10.0, 2014)
    Wait,
    /// 1, 4 and 16 disks, on one log and on a log each
    Disks,
    /// Writeback compared with writethrough
    Mode,
    /// A medium like entry-level cloud volumes: 3,000 operations per second, 1 ms each
    Medium,
}

impl Experiment {
    /// What is measured, in full or quickly.
    fn matrix(self, quick: bool) -> Matrix<CommitPlan> {
        match self {
            Self::Clients => experiments::clients(quick),
            Self::Latency => experiments::latency(quick),
            Self::Waiters => experiments::waiters(quick),
            Self::Wait => experiments::wait(quick),
            Self::Disks => experiments::disks(quick),
            Self::Mode => experiments::mode(quick),
            Self::Medium => experiments::medium(quick),
        }
    }

    /// The results as a section.
    fn section(self, matrix: &Matrix<CommitPlan>) -> Section {
        let section = match self {
            Self::Clients => experiments::clients_section(matrix),
            Self::Latency => experiments::latency_section(matrix),
            Self::Waiters => experiments::waiters_section(matrix),
            Self::Wait => experiments::wait_section(matrix),
            Self::Disks => experiments::disks_section(matrix),
            Self::Mode => experiments::mode_section(matrix),
            Self::Medium => experiments::medium_section(matrix),
        };
        section.measured(matrix.rounds())
    }

    fn rounds(self, output: &Output) -> usize {
        match self {
            // This experiment is long, and its added latency hides most of the medium's variation.
            Self::Latency => output.rounds(2, 1),
            _ => output.rounds(5, 1),
        }
    }
}

/// Runs `walvisor-bench commit`.
///
/// # Errors
/// If a measurement fails, or a file can't be written.
pub fn run(arguments: &CommitArguments) -> Result<(), CommandError> {
    let output = &arguments.output;
    let slower = Duration::from_micros(arguments.sync_latency_us.into());
    let mut planned = Vec::new();
    let mut expected = Duration::ZERO;
    for experiment in chosen(&arguments.only) {
        let mut matrix = experiment.matrix(output.quick);
        for side in matrix.rows.iter_mut().flat_map(|row| &mut row.sides) {
            side.plan.medium.sync_latency += slower;
        }
        let rounds = experiment.rounds(output);
        expected += matrix.expected(CommitPlan::expected) * rounds as u32;
        planned.push((experiment, matrix, rounds));
    }
    let session = output.start(expected)?;
    let mut sections = Vec::new();
    for (experiment, mut matrix, rounds) in planned {
        matrix.measure(rounds, &session, CommitPlan::expected, |side| {
            measure(&side.plan, &output.dir)
        })?;
        sections.push(experiment.section(&matrix));
    }
    let title = "Group commit: what a FLUSH costs when many wait for one";
    output.write(title, session, sections)
}
