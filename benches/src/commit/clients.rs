//! InnoDB: grouping off, on, and on with the adaptive wait, for each number of clients.

use walvisor_storage::CommitWait;

use super::cell::{
    CommitCell, by_clients, curve, lines, plan, points, rate, ratio, select_every, syncs,
};
use crate::report::plot::{Axis, Series};
use crate::report::{Cell, Preference, Section};
use crate::store::commit::{CommitPlan, Switch};

/// The names of the lines, and what they mean.
const OFF: &str = "off";
const ON: &str = "on";
const ADAPTIVE: &str = "adaptive";
const CAPTION: &str = "Group commit is off: each FLUSH has a sync of its own. On: one sync for all that wait. Adaptive, the \
                       default: on, and a group waits for more to come where that pays.";

/// The cells of the experiment, in full or quickly.
pub fn plans(quick: bool) -> Vec<CommitPlan> {
    let (clients, commits): (&[u16], _) = if quick {
        (&[1, 8, 30], 600)
    } else {
        (&[1, 2, 4, 8, 16, 30], 3000)
    };
    let three = |&clients: &u16| {
        let plan = plan(clients, commits);
        [
            CommitPlan {
                group: Switch::Off,
                ..plan
            },
            plan,
            CommitPlan {
                wait: CommitWait::default(),
                ..plan
            },
        ]
    };
    clients.iter().flat_map(three).collect()
}

/// The results as a section.
pub fn section(cells: &[CommitCell]) -> Section {
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
            ("off_syncs_per_commit", "off: syncs/commit"),
            ("on_syncs_per_commit", "on: syncs/commit"),
            ("adaptive_syncs_per_commit", "adaptive: syncs/commit"),
            ("ideal_syncs_per_commit", "2/N"),
            ("off_commits_per_s", "off: commits/s"),
            ("on_commits_per_s", "on: commits/s"),
            ("adaptive_commits_per_s", "adaptive: commits/s"),
            ("gain", "on/off"),
            ("source_gain", "source: gain"),
        ],
    );
    for row in cells.chunks_exact(3) {
        let [off, on, adaptive] = row else { continue };
        let clients = on.plan.clients;
        section.table.rows.push(vec![
            Cell::count(clients.into()),
            Cell::of(&off.of(syncs), 2),
            Cell::of(&on.of(syncs), 3),
            Cell::of(&adaptive.of(syncs), 3),
            Cell::Number((2.0 / f64::from(clients)).min(1.0), 3),
            Cell::of(&off.of(rate), 0),
            Cell::of(&on.of(rate), 0),
            Cell::of(&adaptive.of(rate), 0),
            ratio(on, off, rate, Preference::More),
            match clients {
                1 => Cell::Number(1.0, 1),
                30 => Cell::Number(6.1, 1),
                _ => Cell::None,
            },
        ]);
    }
    let [off, on, adaptive] = [0, 1, 2].map(|at| select_every(cells, 3, at));
    let of = |cells: &[&CommitCell], figure| points(cells.iter().copied(), by_clients, figure);
    section.plots = vec![
        lines(
            "commit-clients-syncs",
            "Syncs of the device for each commit",
            Axis::log("clients"),
            Axis::log("syncs per commit"),
            vec![
                Series::measured(OFF, of(&off, syncs)),
                Series::measured(ON, of(&on, syncs)),
                Series::measured(ADAPTIVE, of(&adaptive, syncs)),
                curve("ideal without a wait: 2/N", &on, |n| (2.0 / n).min(1.0)),
                curve("ideal with a wait: 1/N", &on, |n| 1.0 / n),
            ],
        )
        .captioned(&format!("{CAPTION} Fewer syncs are better.")),
        lines(
            "commit-clients-rate",
            "Commits a second on this machine's disk",
            Axis::log("clients"),
            Axis::log("commits per second"),
            vec![
                Series::measured(OFF, of(&off, rate)),
                Series::measured(ON, of(&on, rate)),
                Series::measured(ADAPTIVE, of(&adaptive, rate)),
            ],
        )
        .captioned(&format!("{CAPTION} More commits are better.")),
    ];
    section
}
