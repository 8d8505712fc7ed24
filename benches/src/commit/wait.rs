//! MariaDB: the longest wait of a group, and the number of waiters that ends it, at 50 clients.

use std::time::Duration;

use walvisor_storage::CommitWait;

use super::cell::{CommitCell, lines, median, plan, points, rate, ratio, slow_sync, syncs};
use crate::report::plot::{Axis, Series};
use crate::report::{Cell, Preference, Section};
use crate::store::commit::{CommitPlan, CommitReport};

const COUNTS: [u32; 3] = [10, 25, 50];

/// The cells of the experiment, in full or quickly.
pub fn plans(quick: bool) -> Vec<CommitPlan> {
    let (waits, counts, commits): (&[u64], &[u32], _) = if quick {
        (&[1000], &COUNTS[1..], 1000)
    } else {
        (&[100, 300, 1000, 3000, 10_000], &COUNTS, 3000)
    };
    let none = CommitPlan {
        medium: slow_sync(1),
        ..plan(50, commits)
    };
    let mut plans = vec![
        none,
        CommitPlan {
            wait: CommitWait::default(),
            ..none
        },
    ];
    for &wait in waits {
        // Counts that the clients can reach, then one that they cannot, which is like MariaDB's wait without a count.
        for count in counts.iter().copied().chain([1000]) {
            let wait = CommitWait {
                longest: Some(Duration::from_micros(wait)),
                count: Some(count),
            };
            plans.push(CommitPlan { wait, ..none });
        }
    }
    plans
}

/// The results as a section.
pub fn section(cells: &[CommitCell]) -> Section {
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
            longest.map_or(Cell::text("adaptive"), |longest| {
                Cell::count(longest.as_micros() as u64)
            }),
            count.map_or(Cell::None, |count| Cell::count(count.into())),
            Cell::of(&cell.of(syncs), 3),
            Cell::of(&cell.of(rate), 0),
            Cell::of(&cell.of(p50), 0),
            Cell::of(&cell.of(|report| report.p99_us), 0),
            ratio(cell, none, rate, Preference::More),
            ratio(cell, none, syncs, Preference::Less),
            ratio(cell, none, p50, Preference::Less),
        ]);
    }
    let longest = |plan: &CommitPlan| {
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
        let waits = series.iter().flat_map(|line| &line.points);
        let waits: Vec<f64> = waits.map(|point| point.0).collect();
        let ends = [
            waits.iter().copied().fold(f64::INFINITY, f64::min),
            waits.iter().copied().fold(0.0, f64::max),
        ];
        // The first two cells have no fixed wait, so each is a horizontal line.
        for (cell, name) in cells.iter().zip(["no wait", "adaptive (the default)"]) {
            if let Some(flat) = median(cell, figure) {
                series.push(Series::ideal(name, ends.map(|at| (at, flat)).to_vec()));
            }
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
        )
        .captioned("A group begins after the longest wait, or once so many clients have come. Fewer syncs are better."),
        lines(
            "commit-wait-latency",
            "What a wait costs: the time of half the commits",
            Axis::log("longest wait of a group, us"),
            Axis::log("p50 of a commit, us"),
            series(p50),
        )
        .captioned("The same waits. A shorter time is better."),
    ];
    section
}
