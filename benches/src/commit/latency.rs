//! MySQL 5.6 under DRBD: a pair (off, on) for each latency and number of clients.

use super::cell::{
    CommitCell, by_clients, curve, every, lines, plan, points, rate, ratio, slow_sync, syncs,
};
use crate::report::plot::{Axis, Series};
use crate::report::{Cell, Section};
use crate::store::commit::{CommitPlan, Switch};

/// The cells of the experiment, in full or quickly.
pub fn plans(quick: bool) -> Vec<CommitPlan> {
    let (latencies, clients): (&[u64], &[u16]) = match quick {
        true => (&[1, 4, 20], &[1, 8, 64]),
        false => (&[0, 1, 2, 4, 10, 20], &[1, 2, 4, 8, 16, 32, 64]),
    };
    let mut plans = Vec::new();
    for &latency in latencies {
        // A cell should take seconds, not minutes: a slow sync needs fewer commits.
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
            true => Cell::None,
            false => Cell::Number(clients / latency.as_secs_f64(), 0),
        };
        section.table.rows.push(vec![
            Cell::count(latency.as_millis() as u64),
            Cell::count(on.plan.clients.into()),
            Cell::of(&off.of(syncs), 2),
            Cell::of(&off.of(rate), 0),
            ceiling(1.0),
            Cell::of(&on.of(syncs), 3),
            Cell::of(&on.of(rate), 0),
            ceiling((clients / 2.0).max(1.0)),
            ratio(on, off, rate),
        ]);
    }
    let [off, on] = [0, 1].map(|at| every(cells, 2, at));
    let by_latency = |cells: &[&CommitCell]| {
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
    let of_4_ms: Vec<&CommitCell> = on
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
