//! The cells of the tables: jobs, and the results of their rounds.

use super::job::{DatabaseDisk, DatabaseEngine, DatabaseJob, DatabaseMeasurement};
use crate::report::{Cell as Figure, Spread};

/// A job and the results of its rounds.
pub struct DatabaseCell {
    pub job: DatabaseJob,
    pub rounds: Vec<DatabaseMeasurement>,
}

impl DatabaseCell {
    pub fn of(&self, figure: fn(&DatabaseMeasurement) -> f64) -> Vec<f64> {
        self.rounds.iter().map(figure).collect()
    }

    pub fn median(&self, figure: fn(&DatabaseMeasurement) -> f64) -> Option<f64> {
        Spread::of(&self.of(figure)).map(|spread| spread.median)
    }

    /// The figures that all tables contain.
    pub fn figures(&self) -> [Figure; 5] {
        [
            Figure::of(&self.of(|it| it.commits_per_s), 0),
            Figure::of(&self.of(|it| it.flushes), 2),
            Figure::of(&self.of(|it| it.syncs), 2),
            Figure::of(&self.of(|it| it.writes), 2),
            Figure::of(&self.of(|it| it.kib), 1),
        ]
    }
}

/// The titles of [`DatabaseCell::figures`].
pub const FIGURES: [(&str, &str); 5] = [
    ("commits_per_s", "commits/s"),
    ("flushes_per_commit", "guest FLUSHes/commit"),
    ("syncs_per_commit", "host syncs/commit"),
    ("writes_per_commit", "writes/commit"),
    ("written_kib_per_commit", "KiB/commit"),
];

/// The sides of MariaDB: its disks.
const MARIADB: [(DatabaseEngine, DatabaseDisk); 3] = [
    (DatabaseEngine::Mariadb, DatabaseDisk::Raw),
    (DatabaseEngine::Mariadb, DatabaseDisk::Wal),
    (DatabaseEngine::Mariadb, DatabaseDisk::Single),
];
/// The sides of PostgreSQL: its disks, and each with and without full-page writes.
const POSTGRESQL: [(DatabaseEngine, DatabaseDisk); 4] = [
    (DatabaseEngine::Postgresql, DatabaseDisk::Raw),
    (DatabaseEngine::PostgresqlOnce, DatabaseDisk::Raw),
    (DatabaseEngine::Postgresql, DatabaseDisk::Wal),
    (DatabaseEngine::PostgresqlOnce, DatabaseDisk::Wal),
];
const SQLITE: [(DatabaseEngine, DatabaseDisk); 4] = [
    (DatabaseEngine::SqliteWal, DatabaseDisk::Raw),
    (DatabaseEngine::SqliteWal, DatabaseDisk::Wal),
    (DatabaseEngine::SqliteRollback, DatabaseDisk::Raw),
    (DatabaseEngine::SqliteRollback, DatabaseDisk::Wal),
];
/// The sides with several guests: the crash-safe ones of PostgreSQL.
const GUESTS: [(DatabaseEngine, DatabaseDisk); 3] = [POSTGRESQL[0], POSTGRESQL[2], POSTGRESQL[3]];

/// MariaDB's cells, in the order of a round.
pub fn mariadb(quick: bool, clients: &[u32]) -> Vec<DatabaseCell> {
    let commits = |clients: u32| {
        if quick {
            (clients * 10).max(60)
        } else {
            (clients * 40).max(160)
        }
    };
    plan_cells(&MARIADB, clients, commits)
}

/// PostgreSQL's cells.
pub fn postgresql(quick: bool, clients: &[u32]) -> Vec<DatabaseCell> {
    // The same for all numbers of clients, so that equally many transactions are the first to change their page.
    let all = if quick { 160 } else { 640 };
    let commits = |clients: u32| all / clients * clients;
    plan_cells(&POSTGRESQL, clients, commits)
}

/// SQLite's cells.
pub fn sqlite(quick: bool) -> Vec<DatabaseCell> {
    plan_cells(&SQLITE, &[1], |_| if quick { 60 } else { 200 })
}

/// The cells of several guests.
pub fn guests(quick: bool) -> Vec<DatabaseCell> {
    if quick {
        plan_cells(&GUESTS, &[4], |_| 80)
    } else {
        plan_cells(&GUESTS, &[1, 4], |_| 320)
    }
}

fn plan_cells(
    sides: &[(DatabaseEngine, DatabaseDisk)],
    clients: &[u32],
    commits: impl Fn(u32) -> u32,
) -> Vec<DatabaseCell> {
    let mut cells = Vec::new();
    for &clients in clients {
        cells.extend(sides.iter().map(|&(engine, disk)| DatabaseCell {
            job: DatabaseJob {
                engine,
                disk,
                clients,
                commits: commits(clients),
            },
            rounds: Vec::new(),
        }));
    }
    cells
}
