//! The parts of an experiment: cells, their rounds, and the figures computed from them.

use std::path::Path;
use std::time::Duration;

use walvisor::commands::CommandError;
use walvisor_storage::CommitWait;

use crate::report::plot::{Axis, Plot, PlotKind, Series};
use crate::report::{Cell, Preference, Spread};
use crate::session::Session;
use crate::store::commit::{CommitPlan, CommitReport, MediumModel, Mode, Switch, measure};

/// A plan and the results of its rounds.
pub struct CommitCell {
    /// The plan.
    pub plan: CommitPlan,
    /// The result of each round.
    pub rounds: Vec<CommitReport>,
}

impl CommitCell {
    /// A cell without rounds yet.
    pub fn new(plan: CommitPlan) -> Self {
        let rounds = Vec::new();
        Self { plan, rounds }
    }

    /// One figure of each round.
    pub fn of(&self, figure: impl Fn(&CommitReport) -> f64) -> Vec<f64> {
        self.rounds.iter().map(figure).collect()
    }

    /// Estimated time of a round.
    pub fn expected(&self) -> Duration {
        let CommitPlan {
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
        // The time of one group: its own sync, and the operations that it waits for.
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

/// Measures all cells in each round, so that the cells of a round see the machine in the same state.
///
/// # Errors
/// If the medium fails.
pub fn measure_rounds(
    what: &str,
    cells: &mut [CommitCell],
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

/// `clients` on one disk, on the medium as it is, with groups that do not wait.
pub fn plan(clients: u16, commits: u64) -> CommitPlan {
    CommitPlan {
        clients,
        medium: MediumModel::default(),
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

/// No wait: a group starts at once with the waiters present.
pub fn no_wait() -> CommitWait {
    CommitWait {
        longest: Some(Duration::ZERO),
        count: None,
    }
}

/// Commits per second.
pub fn rate(report: &CommitReport) -> f64 {
    report.commits_per_s
}

/// Syncs of the log per commit.
pub fn syncs(report: &CommitReport) -> f64 {
    report.syncs_per_commit
}

/// Writes to the log per commit.
pub fn writes(report: &CommitReport) -> f64 {
    report.writes_per_commit
}

/// Commits per second of the raw file.
pub fn raw_rate(report: &CommitReport) -> f64 {
    report.raw_commits_per_s
}

/// A medium whose syncs take `milliseconds` longer.
pub fn slow_sync(milliseconds: u64) -> MediumModel {
    MediumModel {
        sync_latency: Duration::from_millis(milliseconds),
        ..MediumModel::default()
    }
}

/// The median of a figure over the rounds, if there are any.
pub fn median(cell: &CommitCell, figure: fn(&CommitReport) -> f64) -> Option<f64> {
    Spread::of(&cell.of(figure)).map(|spread| spread.median)
}

/// The ratio of one cell's figure to another's.
pub fn ratio(
    of: &CommitCell,
    to: &CommitCell,
    figure: fn(&CommitReport) -> f64,
    better: Preference,
) -> Cell {
    match (median(of, figure), median(to, figure)) {
        (Some(of), Some(to)) if to > 0.0 => Cell::ratio(of / to, better),
        _ => Cell::None,
    }
}

/// The points of a line: for each cell, `at` of its plan, and its figure.
pub fn points<'a>(
    cells: impl Iterator<Item = &'a CommitCell>,
    at: impl Fn(&CommitPlan) -> f64,
    figure: fn(&CommitReport) -> f64,
) -> Vec<(f64, f64)> {
    cells
        .filter_map(|cell| Some((at(&cell.plan), median(cell, figure)?)))
        .collect()
}

/// The position of a cell on an axis of clients.
pub fn by_clients(plan: &CommitPlan) -> f64 {
    plan.clients.into()
}

/// A plot with lines.
pub fn lines(name: &str, title: &str, x: Axis, y: Axis, series: Vec<Series>) -> Plot {
    Plot {
        name: name.to_owned(),
        title: title.to_owned(),
        caption: String::new(),
        kind: PlotKind::Lines { x, y, series },
    }
}

/// A computed line: `of(clients)` for each number of clients, at least 1.
pub fn curve(name: &str, cells: &[&CommitCell], of: impl Fn(f64) -> f64) -> Series {
    let clients = cells.iter().map(|cell| by_clients(&cell.plan));
    let points = clients.map(|clients| (clients, of(clients))).collect();
    Series::ideal(name, points)
}

/// Every `step`th cell, starting at index `at`.
pub fn select_every(cells: &[CommitCell], step: usize, at: usize) -> Vec<&CommitCell> {
    cells.iter().skip(at).step_by(step).collect()
}
