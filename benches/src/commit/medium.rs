//! A cloud volume with a limit of operations per second.

use std::num::NonZeroU32;
use std::time::Duration;

use super::cell::{
    CommitCell, by_clients, lines, median, plan, points, rate, raw_rate, select_every,
};
use crate::report::plot::{Axis, Series};
use crate::report::{Cell, Preference, Section};
use crate::store::commit::{CommitPlan, CommitReport, MediumModel};

const OPERATIONS_PER_SECOND: u32 = 3000;

/// The cells of the experiment, in full or quickly.
pub fn plans(quick: bool) -> Vec<CommitPlan> {
    let (clients, few, share): (&[u16], _, _) = if quick {
        (&[16], 300, 20)
    } else {
        (&[1, 4, 16, 64, 256], 600, 20)
    };
    let pair = |&clients: &u16| {
        let commits = (share * u64::from(clients)).max(few);
        let one = CommitPlan {
            medium: MediumModel {
                operations_per_second: NonZeroU32::new(OPERATIONS_PER_SECOND),
                operation_latency: Duration::from_millis(1),
                ..MediumModel::default()
            },
            baseline: true,
            ..plan(clients, commits)
        };
        let each = CommitPlan {
            write_per_waiter: true,
            baseline: false,
            ..one
        };
        [each, one]
    };
    clients.iter().flat_map(pair).collect()
}

/// The results as a section.
pub fn section(cells: &[CommitCell]) -> Section {
    let mut section = Section::new(
        "medium",
        "A cloud volume: 3,000 operations a second, 1 ms each",
        &[
            "Entry-level volumes of clouds are capped so. Each write and each sync is charged one operation and 1 ms. A raw file, \
             written and synced by each client for itself, is charged two for each commit: 1,500 a second at most.",
            "A write for each waiter: one sync for the group, but as many writes as commits, one after the other in the order of the \
             log: 1,000 a second at most. One write and one sync for a group: two operations, however many wait.",
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
            Cell::count(one.plan.clients.into()),
            Cell::of(&one.of(raw_rate), 0),
            Cell::of(&each.of(rate), 0),
            Cell::of(&each.of(operations), 2),
            Cell::of(&one.of(rate), 0),
            Cell::of(&one.of(operations), 3),
            Cell::of(&one.of(|report| report.p99_us), 0),
            match (median(one, rate), median(one, raw_rate)) {
                (Some(one), Some(raw)) if raw > 0.0 => Cell::ratio(one / raw, Preference::More),
                _ => Cell::None,
            },
        ]);
    }
    let of = |at, figure| points(select_every(cells, 2, at).into_iter(), by_clients, figure);
    section.plots = vec![
        lines(
            "commit-medium",
            "On a volume of 3,000 operations a second",
            Axis::log("clients"),
            Axis::log("commits per second"),
            vec![
                Series::measured("raw file: write, sync", of(1, raw_rate)),
                Series::measured("log, a write for each", of(0, rate)),
                Series::measured("log, one write for a group", of(1, rate)),
            ],
        )
        .captioned("More commits are better."),
    ];
    section
}
