//! A job for a database, and its result.

use std::time::Duration;

/// The database that commits, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DatabaseEngine {
    Mariadb,
    /// PostgreSQL, whose log gets a full copy of each page at its first change after a checkpoint.
    Postgresql,
    /// PostgreSQL with `full_page_writes=off`.
    PostgresqlOnce,
    SqliteWal,
    SqliteRollback,
}

impl DatabaseEngine {
    /// Its name in the guest's script.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mariadb => "mariadb",
            Self::Postgresql => "postgresql-on",
            Self::PostgresqlOnce => "postgresql-off",
            Self::SqliteWal => "sqlite-wal",
            Self::SqliteRollback => "sqlite-delete",
        }
    }
}

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
    pub engine: DatabaseEngine,
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
            (DatabaseEngine::PostgresqlOnce, DatabaseDisk::Raw) => {
                "raw, no full-page writes (unsafe)"
            }
            (DatabaseEngine::PostgresqlOnce, _) => "wal, no full-page writes",
            (_, DatabaseDisk::Raw) => "raw",
            (_, DatabaseDisk::Wal) => "wal",
            (_, DatabaseDisk::Single) => "wal, no doublewrite",
        }
    }

    pub fn expected(&self) -> Duration {
        Duration::from_secs_f64(1.0 + f64::from(self.commits) / 400.0)
    }
}

/// The result of a job. The counts are for all guests together.
#[derive(Clone, Copy, Debug)]
pub struct DatabaseMeasurement {
    pub commits_per_s: f64,
    /// The guests' FLUSHes per commit.
    pub flushes: f64,
    /// The host's syncs per commit.
    pub syncs: f64,
    pub writes: f64,
    pub kib: f64,
}
