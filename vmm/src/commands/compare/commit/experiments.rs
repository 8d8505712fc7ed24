//! The experiments: what each measures, and what it makes of that.

use std::num::NonZeroU32;
use std::path::Path;
use std::time::Duration;

use super::super::plot::{Axis, Kind, Plot, Series};
use super::super::report::{Cell as Figure, Section, Spread};
use super::super::session::Session;
use super::{Cell, CommandError, Experiment, measure_rounds, plan};
use crate::commands::bench::commit::{CommitReport, Medium, Mode, Plan, Switch};
use walvisor_storage::CommitWait;

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

/// What an experiment does, in full or quickly.
pub fn planned(experiment: Experiment, quick: bool) -> Planned {
    let (what, cells, section): (_, _, fn(&[Cell]) -> Section) = match experiment {
        Experiment::Clients => ("clients", clients(quick), clients_section),
        Experiment::Latency => ("latency", latency(quick), latency_section),
        Experiment::Waiters => ("waiters", waiters(quick), waiters_section),
        Experiment::Wait => ("wait", wait(quick), wait_section),
        Experiment::Disks => ("disks", disks(quick), disks_section),
        Experiment::Mode => ("mode", mode(quick), mode_section),
        Experiment::Medium => ("medium", medium(quick), medium_section),
    };
    // The matrix is long, and its added latency drowns most of the medium's moods.
    let rounds = match (quick, experiment) {
        (true, _) => 1,
        (false, Experiment::Latency) => 2,
        (false, _) => 5,
    };
    Planned {
        what,
        rounds,
        cells: cells.into_iter().map(Cell::new).collect(),
        section,
    }
}

fn rate(report: &CommitReport) -> f64 {
    report.commits_per_s
}

fn syncs(report: &CommitReport) -> f64 {
    report.syncs_per_commit
}

fn writes(report: &CommitReport) -> f64 {
    report.writes_per_commit
}

fn raw_rate(report: &CommitReport) -> f64 {
    report.raw_commits_per_s
}

/// A medium whose syncs take so much longer.
fn slow_sync(milliseconds: u64) -> Medium {
    Medium {
        sync_latency: Duration::from_millis(milliseconds),
        ..Medium::default()
    }
}

/// The middle of the rounds of a figure, where there were any.
fn median(cell: &Cell, figure: fn(&CommitReport) -> f64) -> Option<f64> {
    Spread::of(&cell.of(figure)).map(|spread| spread.median)
}

/// One cell's figure beside another's.
fn ratio(of: &Cell, to: &Cell, figure: fn(&CommitReport) -> f64) -> Figure {
    match (median(of, figure), median(to, figure)) {
        (Some(of), Some(to)) if to > 0.0 => Figure::Number(of / to, 2),
        _ => Figure::None,
    }
}

/// Points of a line: `at` of each cell, and its figure.
fn points<'a>(
    cells: impl Iterator<Item = &'a Cell>,
    at: impl Fn(&Plan) -> f64,
    figure: fn(&CommitReport) -> f64,
) -> Vec<(f64, f64)> {
    cells
        .filter_map(|cell| Some((at(&cell.plan), median(cell, figure)?)))
        .collect()
}

fn by_clients(plan: &Plan) -> f64 {
    plan.clients.into()
}

fn lines(name: &str, title: &str, x: Axis, y: Axis, series: Vec<Series>) -> Plot {
    Plot {
        name: name.to_owned(),
        title: title.to_owned(),
        kind: Kind::Lines { x, y, series },
    }
}

/// `of` each number of clients, 1 at least.
fn curve(name: &str, cells: &[&Cell], of: impl Fn(f64) -> f64) -> Series {
    let clients = cells.iter().map(|cell| by_clients(&cell.plan));
    let points = clients.map(|clients| (clients, of(clients))).collect();
    Series::ideal(name, points)
}

fn every(cells: &[Cell], step: usize, at: usize) -> Vec<&Cell> {
    cells.iter().skip(at).step_by(step).collect()
}

// InnoDB: grouping off, on, and on with the adaptive wait, for each number of clients.

fn clients(quick: bool) -> Vec<Plan> {
    let (clients, commits): (&[u16], _) = match quick {
        true => (&[1, 8, 30], 600),
        false => (&[1, 2, 4, 8, 16, 30], 3000),
    };
    let three = |&clients: &u16| {
        let plan = plan(clients, commits);
        [
            Plan {
                group: Switch::Off,
                ..plan
            },
            plan,
            Plan {
                wait: CommitWait::default(),
                ..plan
            },
        ]
    };
    clients.iter().flat_map(three).collect()
}

fn clients_section(cells: &[Cell]) -> Section {
    let mut section = Section::new(
        "clients",
        "1 to 30 clients, group commit off and on: InnoDB Plugin 1.0.4 (2009)",
        &[
            "Its authors moved the sync out of the critical section that had broken group commit: with 30 clients and 100,000 \
             inserts 200,251 syncs became 26,092 (-87 %), throughput grew 6.1 times; one client gained nothing.",
            "Off: a sync for each FLUSH. On: one for all that wait, and groups begin at once; two of them alternate, so N clients \
             need 2/N syncs a commit at best. With the adaptive wait (the default) one group can serve all: 1/N.",
        ],
        &[
            ("clients", "clients"),
            ("off_syncs_per_commit", "syncs/commit: off"),
            ("on_syncs_per_commit", "on"),
            ("adaptive_syncs_per_commit", "adaptive"),
            ("ideal_syncs_per_commit", "2/N"),
            ("off_commits_per_s", "commits/s: off"),
            ("on_commits_per_s", "on"),
            ("adaptive_commits_per_s", "adaptive"),
            ("gain", "on/off"),
            ("source_gain", "source: gain"),
        ],
    );
    for row in cells.chunks_exact(3) {
        let [off, on, adaptive] = row else { continue };
        let clients = on.plan.clients;
        section.table.rows.push(vec![
            Figure::count(clients.into()),
            Figure::of(&off.of(syncs), 2),
            Figure::of(&on.of(syncs), 3),
            Figure::of(&adaptive.of(syncs), 3),
            Figure::Number((2.0 / f64::from(clients)).min(1.0), 3),
            Figure::of(&off.of(rate), 0),
            Figure::of(&on.of(rate), 0),
            Figure::of(&adaptive.of(rate), 0),
            ratio(on, off, rate),
            match clients {
                1 => Figure::Number(1.0, 1),
                30 => Figure::Number(6.1, 1),
                _ => Figure::None,
            },
        ]);
    }
    let [off, on, adaptive] = [0, 1, 2].map(|at| every(cells, 3, at));
    let of = |cells: &[&Cell], figure| points(cells.iter().copied(), by_clients, figure);
    section.plots = vec![
        lines(
            "commit-clients-syncs",
            "Syncs of the device for each commit",
            Axis::log("clients"),
            Axis::log("syncs per commit"),
            vec![
                Series::measured("a sync each", of(&off, syncs)),
                Series::measured("group commit", of(&on, syncs)),
                Series::measured("group commit, adaptive wait", of(&adaptive, syncs)),
                curve("ideal without a wait: 2/N", &on, |n| (2.0 / n).min(1.0)),
                curve("ideal with a wait: 1/N", &on, |n| 1.0 / n),
            ],
        ),
        lines(
            "commit-clients-rate",
            "Commits a second on this machine's disk",
            Axis::log("clients"),
            Axis::log("commits per second"),
            vec![
                Series::measured("a sync each", of(&off, rate)),
                Series::measured("group commit", of(&on, rate)),
                Series::measured("group commit, adaptive wait", of(&adaptive, rate)),
            ],
        ),
    ];
    section
}

// MySQL 5.6 under DRBD: a pair (off, on) for each latency and number of clients.

fn latency(quick: bool) -> Vec<Plan> {
    let (latencies, clients): (&[u64], &[u16]) = match quick {
        true => (&[1, 4, 20], &[1, 8, 64]),
        false => (&[0, 1, 2, 4, 10, 20], &[1, 2, 4, 8, 16, 32, 64]),
    };
    let mut plans = Vec::new();
    for &latency in latencies {
        // Seconds a cell, not minutes: a slow sync needs fewer commits.
        let (few, share) = match (quick, latency) {
            (true, _) => (15, 3),
            (false, ..4) => (400, 40),
            (false, _) => (100, 20),
        };
        for &clients in clients {
            let on = Plan {
                medium: slow_sync(latency),
                ..plan(clients, few.max(share * u64::from(clients)))
            };
            let off = Plan {
                group: Switch::Off,
                commits: few.max(clients.into()),
                ..on
            };
            plans.extend([off, on]);
        }
    }
    plans
}

fn latency_section(cells: &[Cell]) -> Section {
    let mut section = Section::new(
        "latency",
        "Latency of a sync by clients: MySQL 5.6's group commit under DRBD (2012)",
        &[
            "A replica behind a network makes each sync a round trip longer. Without grouping that was a ceiling of 1/RTT \
             (250 a second at 4 ms) however many clients there were; with it throughput grew with them.",
            "Here that latency S is added to each sync of the log. Off: 1/S at best. On, without a wait: N/2S.",
        ],
        &[
            ("added_latency_ms", "added, ms"),
            ("clients", "clients"),
            ("off_syncs_per_commit", "off: syncs/commit"),
            ("off_commits_per_s", "off: commits/s"),
            ("off_ceiling_per_s", "1/S"),
            ("on_syncs_per_commit", "on: syncs/commit"),
            ("on_commits_per_s", "on: commits/s"),
            ("on_ideal_per_s", "N/2S"),
            ("gain", "on/off"),
        ],
    );
    for pair in cells.chunks_exact(2) {
        let [off, on] = pair else { continue };
        let (clients, latency) = (f64::from(on.plan.clients), on.plan.medium.sync_latency);
        let ceiling = |clients: f64| match latency.is_zero() {
            true => Figure::None,
            false => Figure::Number(clients / latency.as_secs_f64(), 0),
        };
        section.table.rows.push(vec![
            Figure::count(latency.as_millis() as u64),
            Figure::count(on.plan.clients.into()),
            Figure::of(&off.of(syncs), 2),
            Figure::of(&off.of(rate), 0),
            ceiling(1.0),
            Figure::of(&on.of(syncs), 3),
            Figure::of(&on.of(rate), 0),
            ceiling((clients / 2.0).max(1.0)),
            ratio(on, off, rate),
        ]);
    }
    let [off, on] = [0, 1].map(|at| every(cells, 2, at));
    let by_latency = |cells: &[&Cell]| {
        let lines = cells
            .chunk_by(|one, other| one.plan.medium.sync_latency == other.plan.medium.sync_latency);
        lines
            .map(|line| {
                let latency = line[0].plan.medium.sync_latency.as_millis();
                let points = points(line.iter().copied(), by_clients, rate);
                Series::measured(format!("{latency} ms added"), points)
            })
            .collect::<Vec<_>>()
    };
    let plot = |name, title, series| {
        lines(
            name,
            title,
            Axis::log("clients"),
            Axis::log("commits per second"),
            series,
        )
    };
    let mut grouped = by_latency(&on);
    let of_4_ms: Vec<&Cell> = on
        .iter()
        .copied()
        .filter(|cell| cell.plan.medium.sync_latency.as_millis() == 4)
        .collect();
    grouped.push(curve("ideal at 4 ms: N/2S", &of_4_ms, |n| {
        (n / 2.0).max(1.0) * 250.0
    }));
    section.plots = vec![
        plot(
            "commit-latency-on",
            "Group commit: throughput grows with clients",
            grouped,
        ),
        plot(
            "commit-latency-off",
            "A sync for each FLUSH: a ceiling of 1/S",
            by_latency(&off),
        ),
    ];
    section
}

// Aliyun: one write for a group, and a write for each of its waiters.

/// Clients, and commits a second before and after, in the source.
const REPORTED: [(u16, f64, f64); 4] = [
    (32, 25_600.0, 27_000.0),
    (64, 30_000.0, 35_000.0),
    (128, 33_000.0, 39_000.0),
    (256, 29_800.0, 38_000.0),
];

fn waiters(quick: bool) -> Vec<Plan> {
    let (reported, commits) = match quick {
        true => (&REPORTED[1..2], 2000),
        false => (&REPORTED[..], 10_000),
    };
    let pair = |&(clients, ..): &(u16, f64, f64)| {
        let one = plan(clients, commits);
        [
            Plan {
                write_per_waiter: true,
                ..one
            },
            one,
        ]
    };
    reported.iter().flat_map(pair).collect()
}

fn waiters_section(cells: &[Cell]) -> Section {
    let mut section = Section::new(
        "waiters",
        "One write for a group, and a write for each waiter: Aliyun's kernel report (2015)",
        &[
            "There a group's leader writes and syncs the redo log once, up to the highest LSN of all who wait, where each had \
             written for itself: 5 to 28 % more commits with 32 to 256 threads.",
            "In both modes here one sync serves the group. A write for each waiter is a switch for this comparison.",
        ],
        &[
            ("clients", "clients"),
            (
                "write_each_writes_per_commit",
                "a write each: writes/commit",
            ),
            ("write_each_syncs_per_commit", "syncs/commit"),
            ("write_each_commits_per_s", "commits/s"),
            ("one_write_writes_per_commit", "one write: writes/commit"),
            ("one_write_syncs_per_commit", "syncs/commit"),
            ("one_write_commits_per_s", "commits/s"),
            ("gain", "one/each"),
            ("source_gain", "source: gain"),
        ],
    );
    for pair in cells.chunks_exact(2) {
        let [each, one] = pair else { continue };
        let reported = REPORTED.iter().find(|row| row.0 == one.plan.clients);
        section.table.rows.push(vec![
            Figure::count(one.plan.clients.into()),
            Figure::of(&each.of(writes), 3),
            Figure::of(&each.of(syncs), 3),
            Figure::of(&each.of(rate), 0),
            Figure::of(&one.of(writes), 3),
            Figure::of(&one.of(syncs), 3),
            Figure::of(&one.of(rate), 0),
            ratio(one, each, rate),
            reported.map_or(Figure::None, |(_, before, after)| {
                Figure::Number(after / before, 2)
            }),
        ]);
    }
    let of = |at| points(every(cells, 2, at).into_iter(), by_clients, rate);
    section.plots = vec![lines(
        "commit-waiters",
        "One write for a group, and a write for each waiter",
        Axis::log("clients"),
        Axis::linear("commits per second"),
        vec![
            Series::measured("a write for each waiter", of(0)),
            Series::measured("one write for the group", of(1)),
        ],
    )];
    section
}

// MariaDB: how long a group waits at most, and for how many, at 50 clients.

const COUNTS: [u32; 3] = [10, 25, 50];

fn wait(quick: bool) -> Vec<Plan> {
    let (waits, counts, commits): (&[u64], &[u32], _) = match quick {
        true => (&[1000], &COUNTS[1..], 1000),
        false => (&[100, 300, 1000, 3000, 10_000], &COUNTS, 3000),
    };
    let none = Plan {
        medium: slow_sync(1),
        ..plan(50, commits)
    };
    let mut plans = vec![
        none,
        Plan {
            wait: CommitWait::default(),
            ..none
        },
    ];
    for &wait in waits {
        // As many as there are, then as many as there will never be: MariaDB's wait without a count.
        for count in counts.iter().copied().chain([1000]) {
            let wait = CommitWait {
                longest: Some(Duration::from_micros(wait)),
                count: Some(count),
            };
            plans.push(Plan { wait, ..none });
        }
    }
    plans
}

fn wait_section(cells: &[Cell]) -> Section {
    let mut section = Section::new(
        "wait",
        "How long a group waits, and for how many: MariaDB 10.0 (2014)",
        &[
            "50 clients, 1 ms added to each sync. MariaDB's binlog_commit_wait_usec and _count trade latency for larger groups; \
             its authors report that a wait of 1 ms costs about 10 % of the throughput at 50 clients.",
            "A group here ends its wait early when every client that is there has come, which MariaDB's does not: a wait for more \
             clients than there are costs no more than one for all of them.",
        ],
        &[
            ("commit_wait_us", "wait, us"),
            ("commit_wait_count", "count"),
            ("syncs_per_commit", "syncs/commit"),
            ("commits_per_s", "commits/s"),
            ("p50_us", "p50 us"),
            ("p99_us", "p99 us"),
            ("rate_beside_no_wait", "commits/s beside no wait"),
            ("syncs_beside_no_wait", "syncs beside no wait"),
            ("p50_beside_no_wait", "p50 beside no wait"),
        ],
    );
    let Some(none) = cells.first() else {
        return section;
    };
    let p50 = |report: &CommitReport| report.p50_us;
    for cell in cells {
        let CommitWait { longest, count } = cell.plan.wait;
        section.table.rows.push(vec![
            longest.map_or(Figure::text("adaptive"), |longest| {
                Figure::count(longest.as_micros() as u64)
            }),
            count.map_or(Figure::None, |count| Figure::count(count.into())),
            Figure::of(&cell.of(syncs), 3),
            Figure::of(&cell.of(rate), 0),
            Figure::of(&cell.of(p50), 0),
            Figure::of(&cell.of(|report| report.p99_us), 0),
            ratio(cell, none, rate),
            ratio(cell, none, syncs),
            ratio(cell, none, p50),
        ]);
    }
    let longest = |plan: &Plan| {
        plan.wait
            .longest
            .map_or(0.0, |wait| wait.as_secs_f64() * 1e6)
    };
    let series = |figure: fn(&CommitReport) -> f64| {
        let mut series: Vec<Series> = COUNTS
            .into_iter()
            .chain([1000])
            .map(|count| {
                let cells = cells
                    .iter()
                    .filter(|cell| cell.plan.wait.count == Some(count));
                Series::measured(
                    format!("for {count} clients"),
                    points(cells, longest, figure),
                )
            })
            .filter(|series| !series.points.is_empty())
            .collect();
        let ends = series
            .first()
            .map(|line| line.points.clone())
            .unwrap_or_default();
        let ends = [ends.first(), ends.last()].map(|point| point.map_or(1.0, |point| point.0));
        if let Some(none) = median(none, figure) {
            let flat = ends.map(|at| (at, none)).to_vec();
            series.push(Series::ideal("no wait", flat));
        }
        series
    };
    section.plots = vec![
        lines(
            "commit-wait-syncs",
            "What a wait gains: syncs for each commit of 50 clients",
            Axis::log("longest wait of a group, us"),
            Axis::log("syncs per commit"),
            series(syncs),
        ),
        lines(
            "commit-wait-latency",
            "What a wait costs: the time of half the commits",
            Axis::log("longest wait of a group, us"),
            Axis::log("p50 of a commit, us"),
            series(p50),
        ),
    ];
    section
}

// Disks on one log, and on a log each.

fn disks(quick: bool) -> Vec<Plan> {
    let (disks, commits): (&[u16], _) = match quick {
        true => (&[4], 1000),
        false => (&[1, 4, 16], 4000),
    };
    let pair = |&disks: &u16| {
        let one = Plan {
            disks,
            ..plan(32, commits)
        };
        [one, Plan { logs: disks, ..one }]
    };
    disks.iter().flat_map(pair).collect()
}

fn disks_section(cells: &[Cell]) -> Section {
    let mut section = Section::new(
        "disks",
        "1, 4 and 16 disks: one log for all, and a log each",
        &[
            "32 clients spread over the disks. Disks on one log share its syncs: a host that serves many guests has one log.",
            "With a log each the kernel may still merge what several threads sync at once.",
        ],
        &[
            ("disks", "disks"),
            ("clients", "clients"),
            ("one_log_syncs_per_commit", "one log: syncs/commit"),
            ("one_log_commits_per_s", "commits/s"),
            ("one_log_p99_us", "p99 us"),
            ("log_each_syncs_per_commit", "a log each: syncs/commit"),
            ("log_each_commits_per_s", "commits/s"),
            ("log_each_p99_us", "p99 us"),
            ("gain", "one/each"),
        ],
    );
    let p99 = |report: &CommitReport| report.p99_us;
    for pair in cells.chunks_exact(2) {
        let [one, each] = pair else { continue };
        section.table.rows.push(vec![
            Figure::count(one.plan.disks.into()),
            Figure::count(one.plan.clients.into()),
            Figure::of(&one.of(syncs), 3),
            Figure::of(&one.of(rate), 0),
            Figure::of(&one.of(p99), 0),
            Figure::of(&each.of(syncs), 3),
            Figure::of(&each.of(rate), 0),
            Figure::of(&each.of(p99), 0),
            ratio(one, each, rate),
        ]);
    }
    let rows = cells.chunks_exact(2).map(|pair| {
        let label = match pair[0].plan.disks {
            1 => "1 disk".to_owned(),
            disks => format!("{disks} disks"),
        };
        let bars = pair.iter().map(|cell| Spread::of(&cell.of(rate))).collect();
        (label, bars)
    });
    section.plots = vec![Plot {
        name: "commit-disks".to_owned(),
        title: "32 clients on several disks".to_owned(),
        kind: Kind::Bars {
            unit: "commits per second".to_owned(),
            groups: vec!["one log".to_owned(), "a log each".to_owned()],
            rows: rows.collect(),
        },
    }];
    section
}

// Writeback and writethrough.

fn mode(quick: bool) -> Vec<Plan> {
    let (clients, commits): (&[u16], _) = match quick {
        true => (&[1, 16], 600),
        false => (&[1, 4, 16, 64], 3000),
    };
    let pair = |&clients: &u16| {
        let back = plan(clients, commits);
        [
            back,
            Plan {
                mode: Mode::Writethrough,
                ..back
            },
        ]
    };
    clients.iter().flat_map(pair).collect()
}

fn mode_section(cells: &[Cell]) -> Section {
    let mut section = Section::new(
        "mode",
        "Writeback beside writethrough",
        &[
            "Writeback: a commit is a write and a FLUSH, two requests. Writethrough: the write is durable when it completes, and a \
             queue's writes in flight are a group of their own.",
        ],
        &[
            ("clients", "clients"),
            ("writeback_syncs_per_commit", "writeback: syncs/commit"),
            ("writeback_commits_per_s", "commits/s"),
            ("writeback_p50_us", "p50 us"),
            (
                "writethrough_syncs_per_commit",
                "writethrough: syncs/commit",
            ),
            ("writethrough_commits_per_s", "commits/s"),
            ("writethrough_p50_us", "p50 us"),
            ("ratio", "through/back"),
        ],
    );
    let p50 = |report: &CommitReport| report.p50_us;
    for pair in cells.chunks_exact(2) {
        let [back, through] = pair else { continue };
        section.table.rows.push(vec![
            Figure::count(back.plan.clients.into()),
            Figure::of(&back.of(syncs), 3),
            Figure::of(&back.of(rate), 0),
            Figure::of(&back.of(p50), 0),
            Figure::of(&through.of(syncs), 3),
            Figure::of(&through.of(rate), 0),
            Figure::of(&through.of(p50), 0),
            ratio(through, back, rate),
        ]);
    }
    let of = |at| points(every(cells, 2, at).into_iter(), by_clients, rate);
    section.plots = vec![lines(
        "commit-mode",
        "Commits a second, writeback and writethrough",
        Axis::log("clients"),
        Axis::log("commits per second"),
        vec![
            Series::measured("writeback: write, FLUSH", of(0)),
            Series::measured("writethrough: write", of(1)),
        ],
    )];
    section
}

// A volume that is paid by the operation.

const OPERATIONS_PER_SECOND: u32 = 3000;

fn medium(quick: bool) -> Vec<Plan> {
    let (clients, few, share): (&[u16], _, _) = match quick {
        true => (&[16], 300, 20),
        false => (&[1, 4, 16, 64, 256], 600, 20),
    };
    let pair = |&clients: &u16| {
        let commits = (share * u64::from(clients)).max(few);
        let one = Plan {
            medium: Medium {
                operations_per_second: NonZeroU32::new(OPERATIONS_PER_SECOND),
                operation_latency: Duration::from_millis(1),
                ..Medium::default()
            },
            baseline: true,
            ..plan(clients, commits)
        };
        let each = Plan {
            write_per_waiter: true,
            baseline: false,
            ..one
        };
        [each, one]
    };
    clients.iter().flat_map(pair).collect()
}

fn medium_section(cells: &[Cell]) -> Section {
    let mut section = Section::new(
        "medium",
        "A cloud volume: 3,000 operations a second, 1 ms each",
        &[
            "Entry-level volumes of clouds are capped so. Each write and each sync is charged one operation and 1 ms. A raw file, \
             written and synced by each client for itself, is charged two for each commit: 1,500 a second at most.",
            "A write for each waiter: one sync for the group, but as many writes as commits: 3,000 a second at most. One write and \
             one sync for a group: two operations, however many wait.",
        ],
        &[
            ("clients", "clients"),
            ("raw_commits_per_s", "raw file: commits/s"),
            ("write_each_commits_per_s", "a write each: commits/s"),
            ("write_each_operations_per_commit", "operations/commit"),
            ("one_write_commits_per_s", "one write: commits/s"),
            ("one_write_operations_per_commit", "operations/commit"),
            ("one_write_p99_us", "p99 us"),
            ("beside_raw", "one write/raw"),
        ],
    );
    let operations = |report: &CommitReport| report.writes_per_commit + report.syncs_per_commit;
    for pair in cells.chunks_exact(2) {
        let [each, one] = pair else { continue };
        section.table.rows.push(vec![
            Figure::count(one.plan.clients.into()),
            Figure::of(&one.of(raw_rate), 0),
            Figure::of(&each.of(rate), 0),
            Figure::of(&each.of(operations), 2),
            Figure::of(&one.of(rate), 0),
            Figure::of(&one.of(operations), 3),
            Figure::of(&one.of(|report| report.p99_us), 0),
            match (median(one, rate), median(one, raw_rate)) {
                (Some(one), Some(raw)) if raw > 0.0 => Figure::Number(one / raw, 1),
                _ => Figure::None,
            },
        ]);
    }
    let of = |at, figure| points(every(cells, 2, at).into_iter(), by_clients, figure);
    section.plots = vec![lines(
        "commit-medium",
        "On a volume of 3,000 operations a second",
        Axis::log("clients"),
        Axis::log("commits per second"),
        vec![
            Series::measured("raw file: write, sync", of(1, raw_rate)),
            Series::measured("log, a write for each", of(0, rate)),
            Series::measured("log, one write for a group", of(1, rate)),
        ],
    )];
    section
}
