//! MySQL 5.6 under DRBD: a pair (off, on) for each latency and number of clients.

use std::time::Duration;

use super::cell::{
    CommitCell, by_clients, curve, lines, plan, points, rate, ratio, select_every, slow_sync, syncs,
};
use crate::report::plot::{Axis, Plot, Series};
use crate::report::{Cell, Preference, Section};
use crate::store::commit::{CommitPlan, Switch};

/// The cells of the experiment, in full or quickly.
pub fn plans(quick: bool) -> Vec<CommitPlan> {
    let (latencies, clients): (&[u64], &[u16]) = if quick {
        (&[1, 4, 20], &[1, 8, 64])
    } else {
        (&[0, 1, 2, 4, 10, 20], &[1, 2, 4, 8, 16, 32, 64])
    };
    let mut plans = Vec::new();
    for &latency in latencies {
        // With slow syncs fewer commits are enough: a cell should take seconds, not minutes.
        let (few, share) = match (quick, latency) {
            (true, _) => (15, 3),
            (false, ..4) => (400, 40),
            (false, _) => (100, 20),
        };
        for &clients in clients {
            let on = CommitPlan {
                medium: slow_sync(latency),
                ..plan(clients, few.max(share * u64::from(clients)))
            };
            let off = CommitPlan {
                group: Switch::Off,
                commits: few.max(clients.into()),
                ..on
            };
            plans.extend([off, on]);
        }
    }
    plans
}

/// The results as a section.
pub fn section(cells: &[CommitCell]) -> Section {
    let mut section = Section::new(
        "latency",
        "Latency of a sync by clients: MySQL 5.6's group commit under DRBD (2012)",
        &[
            "A replica behind a network makes each sync a round trip longer. Without grouping that was a ceiling of 1/RTT \
             (250 a second at 4 ms) however many clients there were; with it throughput grew with them.",
            "Here that latency S is added to each sync of the log. Off: 1/S at best. On, without a wait: N/2S.",
        ],
        &[
            &[("added_latency_ms", "added, ms")],
            &COLUMNS[..],
            &[("on_ideal_per_s", "N/2S"), ("gain", "on/off")],
        ]
        .concat(),
    );
    let lines: Vec<PlotLine> = cells
        .chunk_by(|one, other| one.plan.medium.sync_latency == other.plan.medium.sync_latency)
        .map(|cells| {
            let latency = cells[0].plan.medium.sync_latency;
            PlotLine {
                name: format!("{} ms added", latency.as_millis()),
                begin: vec![Cell::count(latency.as_millis() as u64)],
                latency: Some(latency).filter(|latency| !latency.is_zero()),
                cells,
            }
        })
        .collect();
    // Two groups alternate, so each serves half of the clients.
    let served = |clients: f64| (clients / 2.0).max(1.0);
    section.table.rows = lines.iter().flat_map(|line| line.rows(served)).collect();
    let mut grouped = series(&lines, 1);
    if let Some(of_4_ms) = lines.iter().find(|line| line.name.starts_with("4 ms")) {
        let cells: Vec<&CommitCell> = select_every(of_4_ms.cells, 2, 1);
        grouped.push(curve("ideal at 4 ms: N/2S", &cells, |n| served(n) * 250.0));
    }
    section.plots = vec![
        rates(
            "commit-latency-on",
            "Group commit: throughput grows with clients",
            grouped,
        ),
        rates(
            "commit-latency-off",
            "A sync for each FLUSH: a ceiling of 1/S",
            series(&lines, 0),
        ),
    ];
    section
}

/// The columns of [`PlotLine::rows`], after those of [`PlotLine::begin`].
pub const COLUMNS: [(&str, &str); 6] = [
    ("clients", "clients"),
    ("off_syncs_per_commit", "off: syncs/commit"),
    ("off_commits_per_s", "off: commits/s"),
    ("off_ceiling_per_s", "1/S"),
    ("on_syncs_per_commit", "on: syncs/commit"),
    ("on_commits_per_s", "on: commits/s"),
];

/// A line of the plots: the cells of one sync latency.
pub struct PlotLine<'a> {
    /// Its name.
    pub name: String,
    /// The first cells of its rows.
    pub begin: Vec<Cell>,
    /// The least time of a sync, if it is known.
    pub latency: Option<Duration>,
    /// Pairs for each number of clients: group commit off, on.
    pub cells: &'a [CommitCell],
}

impl PlotLine<'_> {
    /// A row for each number of clients. `served(clients)` is the most clients that a group can serve.
    pub fn rows(&self, served: impl Fn(f64) -> f64) -> impl Iterator<Item = Vec<Cell>> {
        let row = move |pair: &[CommitCell]| {
            let [off, on] = pair else { return Vec::new() };
            let clients = on.plan.clients;
            let ceiling = |served: f64| match self.latency {
                None => Cell::None,
                Some(latency) => Cell::Number(served / latency.as_secs_f64(), 0),
            };
            let mut row = self.begin.clone();
            row.extend([
                Cell::count(clients.into()),
                Cell::of(&off.of(syncs), 2),
                Cell::of(&off.of(rate), 0),
                ceiling(1.0),
                Cell::of(&on.of(syncs), 3),
                Cell::of(&on.of(rate), 0),
                ceiling(served(clients.into())),
                ratio(on, off, rate, Preference::More),
            ]);
            row
        };
        self.cells.chunks_exact(2).map(row)
    }
}

/// The rates of each line by clients: with group commit off if `at` is 0, on if it is 1.
pub fn series(lines: &[PlotLine], at: usize) -> Vec<Series> {
    let of = |line: &PlotLine| {
        let cells = select_every(line.cells, 2, at);
        Series::measured(&line.name, points(cells.into_iter(), by_clients, rate))
    };
    lines.iter().map(of).collect()
}

/// A plot of rates by clients.
pub fn rates(name: &str, title: &str, series: Vec<Series>) -> Plot {
    let (clients, commits) = (Axis::log("clients"), Axis::log("commits per second"));
    lines(name, title, clients, commits, series).captioned("More commits are better.")
}
