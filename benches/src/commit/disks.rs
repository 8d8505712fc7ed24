//! Disks that share one log, and disks with a log each.

use super::cell::{CommitCell, plan, rate, ratio, syncs};
use crate::report::plot::{Plot, PlotKind};
use crate::report::{Cell, Preference, Section, Spread};
use crate::store::commit::{CommitPlan, CommitReport};

/// The cells of the experiment, in full or quickly.
pub fn plans(quick: bool) -> Vec<CommitPlan> {
    let (disks, commits): (&[u16], _) = if quick {
        (&[4], 1000)
    } else {
        (&[1, 4, 16], 4000)
    };
    let pair = |&disks: &u16| {
        let one = CommitPlan {
            disks,
            ..plan(32, commits)
        };
        [one, CommitPlan { logs: disks, ..one }]
    };
    disks.iter().flat_map(pair).collect()
}

/// The results as a section.
pub fn section(cells: &[CommitCell]) -> Section {
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
            Cell::count(one.plan.disks.into()),
            Cell::count(one.plan.clients.into()),
            Cell::of(&one.of(syncs), 3),
            Cell::of(&one.of(rate), 0),
            Cell::of(&one.of(p99), 0),
            Cell::of(&each.of(syncs), 3),
            Cell::of(&each.of(rate), 0),
            Cell::of(&each.of(p99), 0),
            ratio(one, each, rate, Preference::More),
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
        caption: String::new(),
        kind: PlotKind::Bars {
            unit: "commits per second".to_owned(),
            groups: vec!["one log".to_owned(), "a log each".to_owned()],
            even: None,
            rows: rows.collect(),
        },
    }];
    section
}
