//! What is measured: the jobs of the databases on their disks.

use std::time::Duration;

use clap::ValueEnum;

use crate::matrix::Matrix;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DatabasePart {
    /// MariaDB, with its doublewrite buffer and without
    Mariadb,
    /// PostgreSQL, with full-page writes and without
    Postgresql,
    /// SQLite, with either journal
    Sqlite,
    /// Several guests with PostgreSQL: raw disks, and disks on one log
    Guests,
}

impl DatabasePart {
    /// The name of its server in the guests' script.
    pub fn server(self) -> &'static str {
        match self {
            Self::Mariadb => "mariadb",
            Self::Postgresql | Self::Guests => "postgresql",
            Self::Sqlite => "sqlite",
        }
    }

    /// Its jobs, in full or quickly. A row has the same number of clients, and SQLite's the same journal.
    pub fn matrix(self, quick: bool, clients: &[u32]) -> Matrix<DatabaseJob> {
        use DatabaseDisk::{Raw, Single, Wal};
        let mut matrix = Matrix::default();
        let mut add = |name: String, clients, commits, sides: &[(&'static str, DatabaseDisk)]| {
            let sides = sides.iter().map(|&(engine, disk)| {
                let job = DatabaseJob {
                    engine,
                    disk,
                    clients,
                    commits,
                };
                (job.side(), job)
            });
            matrix.add(name, sides);
        };
        match self {
            Self::Mariadb => {
                for &clients in clients {
                    let commits = if quick {
                        (clients * 10).max(60)
                    } else {
                        (clients * 40).max(160)
                    };
                    let sides = [Raw, Wal, Single].map(|disk| ("mariadb", disk));
                    add(
                        format!("MariaDB, {clients} clients"),
                        clients,
                        commits,
                        &sides,
                    );
                }
            }
            Self::Postgresql => {
                // The same for all numbers of clients, so that equally many transactions are the first to change their page.
                let all = if quick { 160 } else { 640 };
                for &clients in clients {
                    let name = format!("PostgreSQL, {clients} clients");
                    add(name, clients, all / clients * clients, &POSTGRESQL);
                }
            }
            Self::Sqlite => {
                let commits = if quick { 60 } else { 200 };
                for (journal, engine) in [
                    ("write-ahead log", "sqlite-wal"),
                    ("rollback journal", "sqlite-delete"),
                ] {
                    add(
                        journal.to_owned(),
                        1,
                        commits,
                        &[Raw, Wal].map(|disk| (engine, disk)),
                    );
                }
            }
            Self::Guests => {
                // The crash-safe sides.
                let sides = [POSTGRESQL[0], POSTGRESQL[2], POSTGRESQL[3]];
                let (clients, commits): (&[u32], _) =
                    if quick { (&[4], 80) } else { (&[1, 4], 320) };
                for &clients in clients {
                    add(
                        format!("guests, {clients} clients each"),
                        clients,
                        commits,
                        &sides,
                    );
                }
            }
        }
        matrix
    }
}

/// The sides of PostgreSQL: its disks, and each with full-page writes and without. With them its log gets a full copy of
/// each page at its first change after a checkpoint.
const POSTGRESQL: [(&str, DatabaseDisk); 4] = [
    ("postgresql-on", DatabaseDisk::Raw),
    ("postgresql-off", DatabaseDisk::Raw),
    ("postgresql-on", DatabaseDisk::Wal),
    ("postgresql-off", DatabaseDisk::Wal),
];

/// The disk, and how MariaDB uses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DatabaseDisk {
    /// A raw image; each FLUSH is an fdatasync.
    Raw,
    /// The write-ahead log.
    Wal,
    /// The write-ahead log, with the server's doublewrite buffer off.
    Single,
}

impl DatabaseDisk {
    /// Its name in the guest's script.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Wal => "wal",
            Self::Single => "single",
        }
    }

    /// The image of the guest with this number.
    pub fn image(self, guest: usize) -> String {
        format!("{}-{guest}.img", self.name())
    }

    /// The log of all guests' disks of this kind, if they have one.
    pub fn log(self) -> Option<String> {
        (self != Self::Raw).then(|| format!("{}.log", self.name()))
    }
}

/// A job for each guest.
#[derive(Clone, Copy, Debug)]
pub struct DatabaseJob {
    /// The database and its setting, as the guest's script names them.
    pub engine: &'static str,
    pub disk: DatabaseDisk,
    /// Clients of a guest.
    pub clients: u32,
    /// Commits of a guest, a multiple of its clients.
    pub commits: u32,
}

impl DatabaseJob {
    /// The disk and the setting, as a table names them.
    pub fn side(&self) -> &'static str {
        match (self.engine, self.disk) {
            ("postgresql-off", DatabaseDisk::Raw) => "raw, no full-page writes (unsafe)",
            ("postgresql-off", _) => "wal, no full-page writes",
            (_, DatabaseDisk::Raw) => RAW,
            (_, DatabaseDisk::Wal) => WAL,
            (_, DatabaseDisk::Single) => "wal, no doublewrite",
        }
    }

    /// Estimated time.
    pub fn expected(&self) -> Duration {
        Duration::from_secs_f64(1.0 + f64::from(self.commits) / 400.0)
    }
}

/// Two sides by their names in tables.
pub const RAW: &str = "raw";
pub const WAL: &str = "wal";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_client_makes_the_same_number_of_commits() {
        let clients: Vec<u32> = (1..=64).collect();
        for side in [true, false].map(|quick| DatabasePart::Postgresql.matrix(quick, &clients)) {
            for job in side.sides().map(|side| side.plan) {
                assert!(job.commits.is_multiple_of(job.clients));
                assert!(job.commits >= 41, "{job:?}");
            }
        }
    }
}
