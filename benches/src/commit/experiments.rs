//! The experiments: the cells of each, and the section that shows its results.

use std::path::Path;
use std::time::Duration;

use clap::ValueEnum;
use walvisor::commands::CommandError;

use super::cell::{CommitCell, measure_rounds};
use super::{clients, disks, latency, medium, mode, wait, waiters};
use crate::output::Output;
use crate::report::{Cell, Section};
use crate::session::Session;
use crate::store::commit::CommitPlan;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Experiment {
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
    /// Whether the experiment is in `only`, or `only` is empty.
    pub fn is_wanted(self, only: &[Self]) -> bool {
        only.is_empty() || only.contains(&self)
    }
}

/// An experiment that is being measured.
pub struct ExperimentRun {
    what: &'static str,
    rounds: usize,
    cells: Vec<CommitCell>,
    section: fn(&[CommitCell]) -> Section,
}

impl ExperimentRun {
    /// Estimated time of the experiment.
    pub fn expected(&self) -> Duration {
        let once: Duration = self.cells.iter().map(CommitCell::expected).sum();
        once * self.rounds as u32
    }

    /// Measures all rounds, unless the user interrupts them.
    ///
    /// # Errors
    /// If the medium fails.
    pub fn measure(&mut self, session: &Session, dir: &Path) -> Result<(), CommandError> {
        measure_rounds(self.what, &mut self.cells, self.rounds, session, dir)
    }

    /// The results as a section.
    pub fn section(&self) -> Section {
        let mut section = (self.section)(&self.cells);
        // Leaves out rows without measured figures.
        let is_measured = |figure: &Cell| matches!(figure, Cell::Spread(..));
        section.table.rows.retain(|row| row.iter().any(is_measured));
        let rounds = self.cells.iter().map(|cell| cell.rounds.len()).max();
        let rounds = rounds.unwrap_or(0);
        if rounds > 1 {
            section.notes.push(format!(
                "Median of {rounds} rounds (lowest to highest), all rows in turns."
            ));
        }
        section
    }
}

/// The plan of an experiment, in full or quickly. Each sync takes `slower` longer than the experiment specifies.
pub fn plan_experiment(experiment: Experiment, output: &Output, slower: Duration) -> ExperimentRun {
    let quick = output.quick;
    let (what, cells, section): (_, _, fn(&[CommitCell]) -> Section) = match experiment {
        Experiment::Clients => ("clients", clients::plans(quick), clients::section),
        Experiment::Latency => ("latency", latency::plans(quick), latency::section),
        Experiment::Waiters => ("waiters", waiters::plans(quick), waiters::section),
        Experiment::Wait => ("wait", wait::plans(quick), wait::section),
        Experiment::Disks => ("disks", disks::plans(quick), disks::section),
        Experiment::Mode => ("mode", mode::plans(quick), mode::section),
        Experiment::Medium => ("medium", medium::plans(quick), medium::section),
    };
    let rounds = match experiment {
        // This experiment is long, and its added latency hides most of the medium's variation.
        Experiment::Latency => output.rounds(2, 1),
        _ => output.rounds(5, 1),
    };
    let cell = |mut plan: CommitPlan| {
        plan.medium.sync_latency += slower;
        CommitCell::new(plan)
    };
    ExperimentRun {
        what,
        rounds,
        cells: cells.into_iter().map(cell).collect(),
        section,
    }
}
