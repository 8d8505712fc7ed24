//! The experiments: the matrix of each, and its table and plots.

use std::num::NonZeroU32;
use std::time::Duration;

use walvisor_storage::CommitWait;

use crate::matrix::{self, Matrix};
use crate::report::plot::{Axis, Plot, Series};
use crate::report::{Cell, Preference, Section};
use crate::store::commit::{CommitPlan, MediumModel, Mode, Switch};

/// A column of these tables.
type Column<'a> = matrix::Column<'a, CommitPlan>;

const RATE: &str = "commits_per_s";
const SYNCS: &str = "syncs_per_commit";
const WRITES: &str = "writes_per_commit";
const OPERATIONS: &str = "operations_per_commit";
const P50: &str = "p50_us";
const P99: &str = "p99_us";

// The sides of experiments with group commit off and on.

/// Each FLUSH has a sync of its own.
pub const OFF: &str = "off";
/// One sync for all that wait.
pub const ON: &str = "on";
const ADAPTIVE: &str = "adaptive";

/// The column of a figure of the side `side`. Its key begins with `prefix`, its title with `name`.
fn of<'a, P: 'a>(
    side: &'static str,
    prefix: &str,
    name: &str,
    figure: &'static str,
) -> matrix::Column<'a, P> {
    let (title, decimals) = match figure {
        SYNCS => ("syncs/commit", 3),
        WRITES => ("writes/commit", 3),
        OPERATIONS => ("operations/commit", 3),
        RATE => ("commits/s", 0),
        P50 => ("p50 us", 0),
        _ => ("p99 us", 0),
    };
    let (key, title) = (format!("{prefix}_{figure}"), format!("{name}{title}"));
    matrix::Column::of(side, &key, &title, figure, decimals)
}

/// `clients` on one disk, on the medium as it is, with groups that do not wait.
pub fn plan(clients: u16, commits: u64) -> CommitPlan {
    CommitPlan {
        clients,
        medium: MediumModel::default(),
        commits: commits.max(u64::from(clients)),
        group: Switch::On,
        write_per_waiter: false,
        wait: CommitWait {
            longest: Some(Duration::ZERO),
            count: None,
        },
        mode: Mode::Writeback,
        disks: 1,
        logs: 1,
        baseline: false,
    }
}

/// A medium whose syncs take `milliseconds` longer.
fn slow_sync(milliseconds: u64) -> MediumModel {
    MediumModel {
        sync_latency: Duration::from_millis(milliseconds),
        ..MediumModel::default()
    }
}

/// The position of a side on an axis of clients.
fn by_clients(plan: &CommitPlan) -> f64 {
    plan.clients.into()
}

fn clients_column<'a>() -> Column<'a> {
    Column::plan("clients", "clients", |plan| {
        Cell::count(plan.clients.into())
    })
}

/// A plot of rates by clients.
pub fn rates(name: &str, title: &str, series: Vec<Series>) -> Plot {
    let (clients, commits) = (Axis::log("clients"), Axis::log("commits per second"));
    Plot::lines(name, title, clients, commits, series).captioned("More commits are better.")
}

/// A computed line: `of(clients)` at the places of `line`.
pub fn curve(name: &str, line: &[(f64, f64)], of: impl Fn(f64) -> f64) -> Series {
    let points = line.iter().map(|&(clients, _)| (clients, of(clients)));
    Series::ideal(name, points.collect())
}

/// InnoDB: grouping off, on, and on with the adaptive wait, for each number of clients.
pub fn clients(quick: bool) -> Matrix<CommitPlan> {
    let (clients, commits): (&[u16], _) = if quick {
        (&[1, 8, 30], 600)
    } else {
        (&[1, 2, 4, 8, 16, 30], 3000)
    };
    let mut matrix = Matrix::default();
    for &clients in clients {
        let on = plan(clients, commits);
        let off = CommitPlan {
            group: Switch::Off,
            ..on
        };
        let adaptive = CommitPlan {
            wait: CommitWait::default(),
            ..on
        };
        let name = format!("{clients} clients");
        matrix.add(name, [(OFF, off), (ON, on), (ADAPTIVE, adaptive)]);
    }
    matrix
}

pub fn clients_section(matrix: &Matrix<CommitPlan>) -> Section {
    let caption = "Group commit is off: each FLUSH has a sync of its own. On: one sync for all that wait. Adaptive, the \
                   default: on, and a group waits for more to come where that pays.";
    let section = matrix.wide(
        "clients",
        "1 to 30 clients, group commit off and on: InnoDB Plugin 1.0.4 (2009)",
        &[
            "Its authors moved the sync out of the critical section that had broken group commit: with 30 clients and 100,000 \
             inserts 200,251 syncs became 26,092 (-87 %), throughput grew 6.1 times; one client gained nothing.",
            "Off: a sync for each FLUSH. On: one for all that wait, and groups begin at once; two of them alternate, so N clients \
             need 2/N syncs a commit at best. With the adaptive wait (the default) one group can serve all: 1/N.",
        ],
        &[
            clients_column(),
            of(OFF, "off", "off: ", SYNCS),
            of(ON, "on", "on: ", SYNCS),
            of(ADAPTIVE, "adaptive", "adaptive: ", SYNCS),
            Column::plan("ideal_syncs_per_commit", "2/N", |plan| {
                Cell::Number((2.0 / by_clients(plan)).min(1.0), 3)
            }),
            of(OFF, "off", "off: ", RATE),
            of(ON, "on", "on: ", RATE),
            of(ADAPTIVE, "adaptive", "adaptive: ", RATE),
            Column::ratio("gain", "on/off", (ON, OFF), RATE),
            Column::plan("source_gain", "source: gain", |plan| match plan.clients {
                1 => Cell::Number(1.0, 1),
                30 => Cell::Number(6.1, 1),
                _ => Cell::None,
            }),
        ],
    );
    let lines = |key| matrix.lines(&[OFF, ON, ADAPTIVE], by_clients, key);
    let mut syncs = lines(SYNCS);
    let places = syncs[1].points.clone();
    syncs.push(curve("ideal without a wait: 2/N", &places, |n| {
        (2.0 / n).min(1.0)
    }));
    syncs.push(curve("ideal with a wait: 1/N", &places, |n| 1.0 / n));
    section.with_plots(vec![
        Plot::lines(
            "commit-clients-syncs",
            "Syncs of the device for each commit",
            Axis::log("clients"),
            Axis::log("syncs per commit"),
            syncs,
        )
        .captioned(&format!("{caption} Fewer syncs are better.")),
        rates(
            "commit-clients-rate",
            "Commits a second on this machine's disk",
            lines(RATE),
        )
        .captioned(&format!("{caption} More commits are better.")),
    ])
}

/// MySQL 5.6 under DRBD: grouping off and on, for each latency and number of clients.
pub fn latency(quick: bool) -> Matrix<CommitPlan> {
    let (latencies, clients): (&[u64], &[u16]) = if quick {
        (&[1, 4, 20], &[1, 8, 64])
    } else {
        (&[0, 1, 2, 4, 10, 20], &[1, 2, 4, 8, 16, 32, 64])
    };
    let mut matrix = Matrix::default();
    for &latency in latencies {
        // With slow syncs fewer commits are enough: a turn should take seconds, not minutes.
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
            let name = format!("{latency} ms, {clients} clients");
            matrix.add(name, [(OFF, off), (ON, on)]);
        }
    }
    matrix
}

/// The columns of grouping off and on by clients. `parts` returns the number of clients and the least time of a sync, if
/// that is known; `served(clients)` is the most clients that a group can serve.
pub fn off_on_columns<'a, P: 'a>(
    parts: impl Fn(&P) -> (u16, Option<Duration>) + Copy + 'a,
    served: impl Fn(f64) -> f64 + Copy + 'a,
    ideal: &'static str,
) -> Vec<matrix::Column<'a, P>> {
    use matrix::Column;
    let ceiling = move |plan: &P, served: f64| match parts(plan).1 {
        None => Cell::None,
        Some(latency) => Cell::Number(served / latency.as_secs_f64(), 0),
    };
    vec![
        Column::plan("clients", "clients", move |plan| {
            Cell::count(parts(plan).0.into())
        }),
        of(OFF, "off", "off: ", SYNCS),
        of(OFF, "off", "off: ", RATE),
        Column::plan("off_ceiling_per_s", "1/S", move |plan| ceiling(plan, 1.0)),
        of(ON, "on", "on: ", SYNCS),
        of(ON, "on", "on: ", RATE),
        Column::plan("on_ideal_per_s", ideal, move |plan| {
            ceiling(plan, served(parts(plan).0.into()))
        }),
        Column::ratio("gain", "on/off", (ON, OFF), RATE),
    ]
}

pub fn latency_section(matrix: &Matrix<CommitPlan>) -> Section {
    let added = |plan: &CommitPlan| plan.medium.sync_latency;
    // Two groups alternate, so each serves half of the clients.
    let served = |clients: f64| (clients / 2.0).max(1.0);
    let latency = move |plan: &CommitPlan| Some(added(plan)).filter(|latency| !latency.is_zero());
    let mut columns = vec![Column::plan("added_latency_ms", "added, ms", |plan| {
        Cell::count(added(plan).as_millis() as u64)
    })];
    let parts = move |plan: &CommitPlan| (plan.clients, latency(plan));
    columns.extend(off_on_columns(parts, served, "N/2S"));
    let section = matrix.wide(
        "latency",
        "Latency of a sync by clients: MySQL 5.6's group commit under DRBD (2012)",
        &[
            "A replica behind a network makes each sync a round trip longer. Without grouping that was a ceiling of 1/RTT \
             (250 a second at 4 ms) however many clients there were; with it throughput grew with them.",
            "Here that latency S is added to each sync of the log. Off: 1/S at best. On, without a wait: N/2S.",
        ],
        &columns,
    );
    let name = |plan: &CommitPlan| format!("{} ms added", added(plan).as_millis());
    let lines = |side| matrix.lines_by(side, name, by_clients, RATE);
    let mut on = lines(ON);
    if let Some(of_4_ms) = on.iter().find(|line| line.name.starts_with("4 ms")) {
        let ideal = curve("ideal at 4 ms: N/2S", &of_4_ms.points, |n| {
            served(n) * 250.0
        });
        on.push(ideal);
    }
    section.with_plots(vec![
        rates(
            "commit-latency-on",
            "Group commit: throughput grows with clients",
            on,
        ),
        rates(
            "commit-latency-off",
            "A sync for each FLUSH: a ceiling of 1/S",
            lines(OFF),
        ),
    ])
}

/// The sides of Aliyun's experiment and of the volume: a write for each waiter, or one for the group.
const EACH: &str = "a write for each waiter";
const ONE: &str = "one write for the group";

/// Results in the source: clients, and commits per second before and after the change.
const REPORTED: [(u16, f64, f64); 4] = [
    (32, 25_600.0, 27_000.0),
    (64, 30_000.0, 35_000.0),
    (128, 33_000.0, 39_000.0),
    (256, 29_800.0, 38_000.0),
];

/// Aliyun: one write for a group, and a write for each of its waiters.
pub fn waiters(quick: bool) -> Matrix<CommitPlan> {
    let (reported, commits) = if quick {
        (&REPORTED[1..2], 2000)
    } else {
        (&REPORTED[..], 10_000)
    };
    let mut matrix = Matrix::default();
    for &(clients, ..) in reported {
        let one = plan(clients, commits);
        let each = CommitPlan {
            write_per_waiter: true,
            ..one
        };
        matrix.add(format!("{clients} clients"), [(EACH, each), (ONE, one)]);
    }
    matrix
}

pub fn waiters_section(matrix: &Matrix<CommitPlan>) -> Section {
    let section = matrix.wide(
        "waiters",
        "One write for a group, and a write for each waiter: Aliyun's kernel report (2015)",
        &[
            "There a group's leader writes and syncs the redo log once, up to the highest LSN of all who wait, where each had \
             written for itself: 5 to 28 % more commits with 32 to 256 threads.",
            "In both modes here one sync serves the group. A write for each waiter is a switch for this comparison.",
        ],
        &[
            clients_column(),
            of(EACH, "write_each", "a write each: ", WRITES),
            of(EACH, "write_each", "", SYNCS),
            of(EACH, "write_each", "", RATE),
            of(ONE, "one_write", "one write: ", WRITES),
            of(ONE, "one_write", "", SYNCS),
            of(ONE, "one_write", "", RATE),
            Column::ratio("gain", "one/each", (ONE, EACH), RATE),
            Column::plan("source_gain", "source: gain", |plan| {
                let reported = REPORTED.iter().find(|row| row.0 == plan.clients);
                reported.map_or(Cell::None, |(_, before, after)| Cell::Number(after / before, 2))
            }),
        ],
    );
    section.with_plots(vec![
        Plot::lines(
            "commit-waiters",
            "One write for a group, and a write for each waiter",
            Axis::log("clients"),
            Axis::linear("commits per second"),
            matrix.lines(&[EACH, ONE], by_clients, RATE),
        )
        .captioned("More commits are better."),
    ])
}

const COUNTS: [u32; 3] = [10, 25, 50];
/// More clients than there are, which is like MariaDB's wait without a count.
const TOO_MANY: u32 = 1000;
const NO_WAIT: &str = "no wait";
const DEFAULT_WAIT: &str = "adaptive (the default)";

/// MariaDB: the longest wait of a group, and the number of waiters that ends it, at 50 clients. All are sides of one row.
pub fn wait(quick: bool) -> Matrix<CommitPlan> {
    let (waits, counts, commits): (&[u64], &[u32], _) = if quick {
        (&[1000], &COUNTS[1..], 1000)
    } else {
        (&[100, 300, 1000, 3000, 10_000], &COUNTS, 3000)
    };
    let none = CommitPlan {
        medium: slow_sync(1),
        ..plan(50, commits)
    };
    let waiting = |wait| CommitPlan { wait, ..none };
    let mut sides = vec![
        (NO_WAIT.to_owned(), none),
        (DEFAULT_WAIT.to_owned(), waiting(CommitWait::default())),
    ];
    for &wait in waits {
        for &count in counts.iter().chain(&[TOO_MANY]) {
            let name = format!("{wait} us for {count}");
            let wait = CommitWait {
                longest: Some(Duration::from_micros(wait)),
                count: Some(count),
            };
            sides.push((name, waiting(wait)));
        }
    }
    let mut matrix = Matrix::default();
    matrix.add("50 clients", sides);
    matrix
}

pub fn wait_section(matrix: &Matrix<CommitPlan>) -> Section {
    let less = |key: &'static str, title, figure: &'static str| {
        Column::new(key, title, move |row, side| {
            row.ratio(side, NO_WAIT, figure, Preference::Less)
        })
    };
    let section = matrix.long(
        "wait",
        "How long a group waits, and for how many: MariaDB 10.0 (2014)",
        &[
            "50 clients, 1 ms added to each sync. MariaDB's binlog_commit_wait_usec and _count trade latency for larger groups; \
             its authors report that a wait of 1 ms costs about 10 % of the throughput at 50 clients.",
            "A group here ends its wait early when every client that is there has come, which MariaDB's does not: a wait for more \
             clients than there are costs no more than one for all of them.",
        ],
        &[
            Column::plan("commit_wait_us", "wait, us", |plan| match plan.wait.longest {
                None => Cell::text("adaptive"),
                Some(longest) => Cell::count(longest.as_micros() as u64),
            }),
            Column::plan("commit_wait_count", "count", |plan| {
                plan.wait.count.map_or(Cell::None, |count| Cell::count(count.into()))
            }),
            Column::figure(SYNCS, "syncs/commit", 3),
            Column::figure(RATE, "commits/s", 0),
            Column::figure(P50, "p50 us", 0),
            Column::figure(P99, "p99 us", 0),
            Column::beside("rate_beside_no_wait", "commits/s beside no wait", NO_WAIT, RATE),
            less("syncs_beside_no_wait", "syncs beside no wait", SYNCS),
            less("p50_beside_no_wait", "p50 beside no wait", P50),
        ],
    );
    let series = |key: &str| {
        let mut lines: Vec<Series> = Vec::new();
        for side in matrix.sides() {
            let (Some(longest), Some(count)) = (side.plan.wait.longest, side.plan.wait.count)
            else {
                continue;
            };
            let name = format!("for {count} clients");
            let point = side
                .median(key)
                .map(|value| (longest.as_secs_f64() * 1e6, value));
            match lines.iter_mut().find(|line| line.name == name) {
                Some(line) => line.points.extend(point),
                None => lines.push(Series::measured(name, point.into_iter().collect())),
            }
        }
        let waits: Vec<f64> = lines
            .iter()
            .flat_map(|line| &line.points)
            .map(|at| at.0)
            .collect();
        let ends = [
            waits.iter().copied().fold(f64::INFINITY, f64::min),
            waits.iter().copied().fold(0.0, f64::max),
        ];
        // The sides without a fixed wait are horizontal lines.
        for name in [NO_WAIT, DEFAULT_WAIT] {
            let side = matrix.rows[0].side(name).and_then(|side| side.median(key));
            lines.extend(side.map(|flat| Series::ideal(name, ends.map(|at| (at, flat)).to_vec())));
        }
        lines
    };
    section.with_plots(vec![
        Plot::lines(
            "commit-wait-syncs",
            "What a wait gains: syncs for each commit of 50 clients",
            Axis::log("longest wait of a group, us"),
            Axis::log("syncs per commit"),
            series(SYNCS),
        )
        .captioned("A group begins after the longest wait, or once so many clients have come. Fewer syncs are better."),
        Plot::lines(
            "commit-wait-latency",
            "What a wait costs: the time of half the commits",
            Axis::log("longest wait of a group, us"),
            Axis::log("p50 of a commit, us"),
            series(P50),
        )
        .captioned("The same waits. A shorter time is better."),
    ])
}

const ONE_LOG: &str = "one log";
const LOG_EACH: &str = "a log each";

/// Disks that share one log, and disks with a log each.
pub fn disks(quick: bool) -> Matrix<CommitPlan> {
    let (disks, commits): (&[u16], _) = if quick {
        (&[4], 1000)
    } else {
        (&[1, 4, 16], 4000)
    };
    let mut matrix = Matrix::default();
    for &disks in disks {
        let one = CommitPlan {
            disks,
            ..plan(32, commits)
        };
        let each = CommitPlan { logs: disks, ..one };
        let name = match disks {
            1 => "1 disk".to_owned(),
            disks => format!("{disks} disks"),
        };
        matrix.add(name, [(ONE_LOG, one), (LOG_EACH, each)]);
    }
    matrix
}

pub fn disks_section(matrix: &Matrix<CommitPlan>) -> Section {
    let section = matrix.wide(
        "disks",
        "1, 4 and 16 disks: one log for all, and a log each",
        &[
            "32 clients spread over the disks. Disks on one log share its syncs: a host that serves many guests has one log.",
            "With a log each the kernel may still merge what several threads sync at once.",
        ],
        &[
            Column::plan("disks", "disks", |plan| Cell::count(plan.disks.into())),
            clients_column(),
            of(ONE_LOG, "one_log", "one log: ", SYNCS),
            of(ONE_LOG, "one_log", "", RATE),
            of(ONE_LOG, "one_log", "", P99),
            of(LOG_EACH, "log_each", "a log each: ", SYNCS),
            of(LOG_EACH, "log_each", "", RATE),
            of(LOG_EACH, "log_each", "", P99),
            Column::ratio("gain", "one/each", (ONE_LOG, LOG_EACH), RATE),
        ],
    );
    let sides = [ONE_LOG, LOG_EACH];
    section.with_plots(vec![Plot::bars(
        "commit-disks",
        "32 clients on several disks",
        "commits per second",
        &sides,
        matrix.bars(&sides, RATE),
    )])
}

const BACK: &str = "writeback: write, FLUSH";
const THROUGH: &str = "writethrough: write";

/// Writeback and writethrough.
pub fn mode(quick: bool) -> Matrix<CommitPlan> {
    let (clients, commits): (&[u16], _) = if quick {
        (&[1, 16], 600)
    } else {
        (&[1, 4, 16, 64], 3000)
    };
    let mut matrix = Matrix::default();
    for &clients in clients {
        let back = plan(clients, commits);
        let through = CommitPlan {
            mode: Mode::Writethrough,
            ..back
        };
        matrix.add(
            format!("{clients} clients"),
            [(BACK, back), (THROUGH, through)],
        );
    }
    matrix
}

pub fn mode_section(matrix: &Matrix<CommitPlan>) -> Section {
    let section = matrix.wide(
        "mode",
        "Writeback compared with writethrough",
        &[
            "Writeback: a commit is a write and a FLUSH, two requests. Writethrough: the write is durable when it completes, and a \
             queue's writes in flight are a group of their own.",
        ],
        &[
            clients_column(),
            of(BACK, "writeback", "writeback: ", SYNCS),
            of(BACK, "writeback", "", RATE),
            of(BACK, "writeback", "", P50),
            of(THROUGH, "writethrough", "writethrough: ", SYNCS),
            of(THROUGH, "writethrough", "", RATE),
            of(THROUGH, "writethrough", "", P50),
            Column::ratio("ratio", "through/back", (THROUGH, BACK), RATE),
        ],
    );
    let title = "Commits a second, writeback and writethrough";
    let lines = matrix.lines(&[BACK, THROUGH], by_clients, RATE);
    section.with_plots(vec![rates("commit-mode", title, lines)])
}

/// A cloud volume with a limit of operations per second.
pub fn medium(quick: bool) -> Matrix<CommitPlan> {
    let (clients, few, share): (&[u16], _, _) = if quick {
        (&[16], 300, 20)
    } else {
        (&[1, 4, 16, 64, 256], 600, 20)
    };
    let mut matrix = Matrix::default();
    for &clients in clients {
        let one = CommitPlan {
            medium: MediumModel {
                operations_per_second: NonZeroU32::new(3000),
                operation_latency: Duration::from_millis(1),
                ..MediumModel::default()
            },
            baseline: true,
            ..plan(clients, few.max(share * u64::from(clients)))
        };
        let each = CommitPlan {
            write_per_waiter: true,
            baseline: false,
            ..one
        };
        matrix.add(format!("{clients} clients"), [(EACH, each), (ONE, one)]);
    }
    matrix
}

pub fn medium_section(matrix: &Matrix<CommitPlan>) -> Section {
    const RAW: &str = "raw_commits_per_s";
    let section = matrix.wide(
        "medium",
        "A cloud volume: 3,000 operations a second, 1 ms each",
        &[
            "Entry-level volumes of clouds are capped so. Each write and each sync is charged one operation and 1 ms. A raw file, \
             written and synced by each client for itself, is charged two for each commit: 1,500 a second at most.",
            "A write for each waiter: one sync for the group, but as many writes as commits, one after the other in the order of the \
             log: 1,000 a second at most. One write and one sync for a group: two operations, however many wait.",
        ],
        &[
            clients_column(),
            Column::of(ONE, "raw_commits_per_s", "raw file: commits/s", RAW, 0),
            of(EACH, "write_each", "a write each: ", RATE),
            of(EACH, "write_each", "", OPERATIONS),
            of(ONE, "one_write", "one write: ", RATE),
            of(ONE, "one_write", "", OPERATIONS),
            of(ONE, "one_write", "", P99),
            Column::new("beside_raw", "one write/raw", |row, _| {
                let median = |key| row.side(ONE).and_then(|one| one.median(key));
                Cell::ratio_of(median(RATE), median(RAW), Preference::More)
            }),
        ],
    );
    let line = |name: &str, side, key| Series::measured(name, matrix.line(side, by_clients, key));
    let lines = vec![
        line("raw file: write, sync", ONE, RAW),
        line("log, a write for each", EACH, RATE),
        line("log, one write for a group", ONE, RATE),
    ];
    let title = "On a volume of 3,000 operations a second";
    section.with_plots(vec![rates("commit-medium", title, lines)])
}
