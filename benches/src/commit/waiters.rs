//! Aliyun: one write for a group, and a write for each of its waiters.

use super::cell::{
    CommitCell, by_clients, lines, plan, points, rate, ratio, select_every, syncs, writes,
};
use crate::report::plot::{Axis, Series};
use crate::report::{Cell, Preference, Section};
use crate::store::commit::CommitPlan;

/// Results in the source: clients, and commits per second before and after the change.
const REPORTED: [(u16, f64, f64); 4] = [
    (32, 25_600.0, 27_000.0),
    (64, 30_000.0, 35_000.0),
    (128, 33_000.0, 39_000.0),
    (256, 29_800.0, 38_000.0),
];

/// The cells of the experiment, in full or quickly.
pub fn plans(quick: bool) -> Vec<CommitPlan> {
    let (reported, commits) = if quick {
        (&REPORTED[1..2], 2000)
    } else {
        (&REPORTED[..], 10_000)
    };
    let pair = |&(clients, ..): &(u16, f64, f64)| {
        let one = plan(clients, commits);
        [
            CommitPlan {
                write_per_waiter: true,
                ..one
            },
            one,
        ]
    };
    reported.iter().flat_map(pair).collect()
}

/// The results as a section.
pub fn section(cells: &[CommitCell]) -> Section {
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
            Cell::count(one.plan.clients.into()),
            Cell::of(&each.of(writes), 3),
            Cell::of(&each.of(syncs), 3),
            Cell::of(&each.of(rate), 0),
            Cell::of(&one.of(writes), 3),
            Cell::of(&one.of(syncs), 3),
            Cell::of(&one.of(rate), 0),
            ratio(one, each, rate, Preference::More),
            reported.map_or(Cell::None, |(_, before, after)| {
                Cell::Number(after / before, 2)
            }),
        ]);
    }
    let of = |at| points(select_every(cells, 2, at).into_iter(), by_clients, rate);
    section.plots = vec![
        lines(
            "commit-waiters",
            "One write for a group, and a write for each waiter",
            Axis::log("clients"),
            Axis::linear("commits per second"),
            vec![
                Series::measured("a write for each waiter", of(0)),
                Series::measured("one write for the group", of(1)),
            ],
        )
        .captioned("More commits are better."),
    ];
    section
}
