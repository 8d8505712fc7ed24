//! `walvisor compare commit`: what the write-ups behind this project report of group commit, measured on a disk's log. A commit
//! is a 4 KiB write and its FLUSH; clients are closed loops, a thread each.

mod clients;
mod disks;
mod experiments;
mod latency;
mod medium;
mod mode;
mod wait;
mod waiters;

use std::path::Path;
use std::time::Duration;

use clap::{Args, ValueEnum};
use walvisor_storage::CommitWait;

use super::session::Session;
use super::{CommandError, Output};
use crate::commands::bench::commit::{CommitReport, Medium, Mode, Plan, Switch, measure};

/// Arguments of `walvisor compare commit`.
#[derive(Debug, Args)]
pub struct CommitArguments {
    /// Only these experiments, with commas between
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
pub enum Experiment {
    /// 1 to 30 clients, grouping off and on (InnoDB Plugin 1.0.4, 2009)
    Clients,
    /// Sync latencies by clients, grouping off and on (MySQL 5.6 under DRBD, 2012)
    Latency,
    /// 32 to 256 clients, one write for a group and a write for each waiter (Aliyun, 2015)
    Waiters,
    /// How long a group waits and for how many (MariaDB 10.0, 2014)
    Wait,
    /// 1, 4 and 16 disks on one log, and on a log each
    Disks,
    /// Writeback beside writethrough
    Mode,
    /// A medium as entry-level cloud volumes are: 3,000 operations a second, 1 ms each
    Medium,
}

impl Experiment {
    fn is_wanted(self, only: &[Self]) -> bool {
        only.is_empty() || only.contains(&self)
    }
}

/// Carries out `walvisor compare commit`.
///
/// # Errors
/// See [`super::run`].
pub fn run(arguments: &CommitArguments) -> Result<(), CommandError> {
    let slower = Duration::from_micros(arguments.sync_latency_us.into());
    let experiments: Vec<_> = Experiment::value_variants()
        .iter()
        .filter(|experiment| experiment.is_wanted(&arguments.only))
        .map(|experiment| experiments::planned(*experiment, &arguments.output, slower))
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
    arguments.output.give(title, session, sections)
}

/// A plan and what its rounds gave.
struct Cell {
    plan: Plan,
    rounds: Vec<CommitReport>,
}

impl Cell {
    fn new(plan: Plan) -> Self {
        let rounds = Vec::new();
        Self { plan, rounds }
    }

    /// One figure of all rounds.
    fn of(&self, figure: impl Fn(&CommitReport) -> f64) -> Vec<f64> {
        self.rounds.iter().map(figure).collect()
    }

    /// How long a round takes, about.
    fn expected(&self) -> Duration {
        let Plan {
            clients,
            commits,
            medium,
            group,
            write_per_waiter,
            baseline,
            ..
        } = self.plan;
        let served = match group {
            Switch::Off => 1.0,
            Switch::On => (f64::from(clients) / 2.0).max(1.0),
        };
        // Of one group: its own time, and the operations that it waits for.
        let own = medium.sync_latency + 2 * medium.operation_latency + Duration::from_micros(300);
        let writes = if write_per_waiter { served } else { 1.0 };
        let paced = medium
            .operations_per_second
            .map_or(0.0, |most| 1.0 / f64::from(most.get()));
        let groups = commits as f64 / served;
        let log = own.as_secs_f64().max(paced * (writes + 1.0)) * groups;
        let raw = if baseline {
            paced * 2.0 * commits as f64
        } else {
            0.0
        };
        Duration::from_secs_f64(0.4 + log + raw)
    }
}

/// Measures all cells, one round after the other, so that each round sees the same machine.
fn measure_rounds(
    what: &str,
    cells: &mut [Cell],
    rounds: usize,
    session: &Session,
    dir: &Path,
) -> Result<(), CommandError> {
    for round in 0..rounds {
        for cell in &mut *cells {
            let what = format!(
                "{what}: {} clients, round {} of {rounds}",
                cell.plan.clients,
                round + 1
            );
            match session.step(&what, cell.expected(), || measure(&cell.plan, dir))? {
                Some(report) => cell.rounds.push(report),
                None => return Ok(()),
            }
        }
    }
    Ok(())
}

/// `clients` on one disk, on the medium as it is, in groups that do not wait.
fn plan(clients: u16, commits: u64) -> Plan {
    Plan {
        clients,
        medium: Medium::default(),
        commits: commits.max(u64::from(clients)),
        group: Switch::On,
        write_per_waiter: false,
        wait: no_wait(),
        mode: Mode::Writeback,
        disks: 1,
        logs: 1,
        baseline: false,
    }
}

fn no_wait() -> CommitWait {
    CommitWait {
        longest: Some(Duration::ZERO),
        count: None,
    }
}
