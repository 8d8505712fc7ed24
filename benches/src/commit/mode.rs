//! Writeback and writethrough.

use super::cell::{CommitCell, by_clients, lines, plan, points, rate, ratio, select_every, syncs};
use crate::report::plot::{Axis, Series};
use crate::report::{Cell, Preference, Section};
use crate::store::commit::{CommitPlan, CommitReport, Mode};

/// The cells of the experiment, in full or quickly.
pub fn plans(quick: bool) -> Vec<CommitPlan> {
    let (clients, commits): (&[u16], _) = if quick {
        (&[1, 16], 600)
    } else {
        (&[1, 4, 16, 64], 3000)
    };
    let pair = |&clients: &u16| {
        let back = plan(clients, commits);
        [
            back,
            CommitPlan {
                mode: Mode::Writethrough,
                ..back
            },
        ]
    };
    clients.iter().flat_map(pair).collect()
}

/// The results as a section.
pub fn section(cells: &[CommitCell]) -> Section {
    let mut section = Section::new(
        "mode",
        "Writeback compared with writethrough",
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
            Cell::count(back.plan.clients.into()),
            Cell::of(&back.of(syncs), 3),
            Cell::of(&back.of(rate), 0),
            Cell::of(&back.of(p50), 0),
            Cell::of(&through.of(syncs), 3),
            Cell::of(&through.of(rate), 0),
            Cell::of(&through.of(p50), 0),
            ratio(through, back, rate, Preference::More),
        ]);
    }
    let of = |at| points(select_every(cells, 2, at).into_iter(), by_clients, rate);
    section.plots = vec![
        lines(
            "commit-mode",
            "Commits a second, writeback and writethrough",
            Axis::log("clients"),
            Axis::log("commits per second"),
            vec![
                Series::measured("writeback: write, FLUSH", of(0)),
                Series::measured("writethrough: write", of(1)),
            ],
        )
        .captioned("More commits are better."),
    ];
    section
}
