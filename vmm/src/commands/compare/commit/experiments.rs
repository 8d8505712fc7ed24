//! The experiments: what each measures, and what it makes of that.

use std::path::Path;
use std::time::Duration;

use super::super::plot::{Axis, Kind, Plot, Series};
use super::super::report::{Cell as Figure, Section, Spread};
use super::super::session::Session;
use super::{
    Cell, CommandError, Experiment, Output, clients, disks, latency, measure_rounds, medium, mode,
    wait, waiters,
};
use crate::commands::bench::commit::{CommitReport, Medium, Plan};

/// An experiment under way.
pub struct Planned {
    what: &'static str,
    rounds: usize,
    cells: Vec<Cell>,
    section: fn(&[Cell]) -> Section,
}

impl Planned {
    /// How long it takes, about.
    pub fn expected(&self) -> Duration {
        let once: Duration = self.cells.iter().map(Cell::expected).sum();
        once * self.rounds as u32
    }

    /// Measures, until done or interrupted.
    ///
    /// # Errors
    /// If the medium fails.
    pub fn measure(&mut self, session: &Session, dir: &Path) -> Result<(), CommandError> {
        measure_rounds(self.what, &mut self.cells, self.rounds, session, dir)
    }

    /// What came out.
    pub fn section(&self) -> Section {
        let mut section = (self.section)(&self.cells);
        // What was not measured has no row.
        let is_measured = |figure: &Figure| matches!(figure, Figure::Spread(..));
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

/// What an experiment does, in full or quickly, each sync taking `slower` longer than it says.
pub fn planned(experiment: Experiment, output: &Output, slower: Duration) -> Planned {
    let quick = output.quick;
    let (what, cells, section): (_, _, fn(&[Cell]) -> Section) = match experiment {
        Experiment::Clients => ("clients", clients::plans(quick), clients::section),
        Experiment::Latency => ("latency", latency::plans(quick), latency::section),
        Experiment::Waiters => ("waiters", waiters::plans(quick), waiters::section),
        Experiment::Wait => ("wait", wait::plans(quick), wait::section),
        Experiment::Disks => ("disks", disks::plans(quick), disks::section),
        Experiment::Mode => ("mode", mode::plans(quick), mode::section),
        Experiment::Medium => ("medium", medium::plans(quick), medium::section),
    };
    let rounds = match experiment {
        // It is long, and its added latency drowns most of the medium's moods.
        Experiment::Latency => output.rounds(2, 1),
        _ => output.rounds(5, 1),
    };
    let cell = |mut plan: Plan| {
        plan.medium.sync_latency += slower;
        Cell::new(plan)
    };
    Planned {
        what,
        rounds,
        cells: cells.into_iter().map(cell).collect(),
        section,
    }
}

/// Commits a second.
pub fn rate(report: &CommitReport) -> f64 {
    report.commits_per_s
}

/// Syncs of the log for each commit.
pub fn syncs(report: &CommitReport) -> f64 {
    report.syncs_per_commit
}

/// Writes to the log for each commit.
pub fn writes(report: &CommitReport) -> f64 {
    report.writes_per_commit
}

/// Commits a second of the raw file.
pub fn raw_rate(report: &CommitReport) -> f64 {
    report.raw_commits_per_s
}

/// A medium whose syncs take so much longer.
pub fn slow_sync(milliseconds: u64) -> Medium {
    Medium {
        sync_latency: Duration::from_millis(milliseconds),
        ..Medium::default()
    }
}

/// The middle of the rounds of a figure, where there were any.
pub fn median(cell: &Cell, figure: fn(&CommitReport) -> f64) -> Option<f64> {
    Spread::of(&cell.of(figure)).map(|spread| spread.median)
}

/// One cell's figure beside another's.
pub fn ratio(of: &Cell, to: &Cell, figure: fn(&CommitReport) -> f64) -> Figure {
    match (median(of, figure), median(to, figure)) {
        (Some(of), Some(to)) if to > 0.0 => Figure::Number(of / to, 2),
        _ => Figure::None,
    }
}

/// Points of a line: `at` of each cell, and its figure.
pub fn points<'a>(
    cells: impl Iterator<Item = &'a Cell>,
    at: impl Fn(&Plan) -> f64,
    figure: fn(&CommitReport) -> f64,
) -> Vec<(f64, f64)> {
    cells
        .filter_map(|cell| Some((at(&cell.plan), median(cell, figure)?)))
        .collect()
}

/// The place of a cell on an axis of clients.
pub fn by_clients(plan: &Plan) -> f64 {
    plan.clients.into()
}

/// A plot with lines.
pub fn lines(name: &str, title: &str, x: Axis, y: Axis, series: Vec<Series>) -> Plot {
    Plot {
        name: name.to_owned(),
        title: title.to_owned(),
        kind: Kind::Lines { x, y, series },
    }
}

/// `of` each number of clients, 1 at least.
pub fn curve(name: &str, cells: &[&Cell], of: impl Fn(f64) -> f64) -> Series {
    let clients = cells.iter().map(|cell| by_clients(&cell.plan));
    let points = clients.map(|clients| (clients, of(clients))).collect();
    Series::ideal(name, points)
}

/// Every `step`th cell, from the one at `at` on.
pub fn every(cells: &[Cell], step: usize, at: usize) -> Vec<&Cell> {
    cells.iter().skip(at).step_by(step).collect()
}
