//! A job for a database, and its result.

use std::time::Duration;

/// The database that commits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DatabaseEngine {
    Mariadb,
    SqliteWal,
    SqliteRollback,
}

impl DatabaseEngine {
    /// Its name in the guest's script.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mariadb => "mariadb",
            Self::SqliteWal => "sqlite-wal",
            Self::SqliteRollback => "sqlite-delete",
        }
    }
}

/// The disk, and how the database uses it.
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
    pub const ALL: [Self; 3] = [Self::Raw, Self::Wal, Self::Single];

    /// Its name in the guest's script.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Wal => "wal",
            Self::Single => "single",
        }
    }

    pub fn image(self) -> String {
        format!("{}.img", self.name())
    }

    pub fn title(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Wal => "wal",
            Self::Single => "wal, no doublewrite",
        }
    }
}

/// A job for the guest.
#[derive(Clone, Copy, Debug)]
pub struct DatabaseJob {
    pub engine: DatabaseEngine,
    pub disk: DatabaseDisk,
    pub clients: u32,
    pub commits: u32,
}

impl DatabaseJob {
    pub fn expected(&self) -> Duration {
        Duration::from_secs_f64(1.0 + f64::from(self.commits) / 400.0)
    }
}

/// The result of a job.
#[derive(Clone, Copy, Debug)]
pub struct DatabaseMeasured {
    pub commits_per_s: f64,
    /// The guest's FLUSHes per commit.
    pub flushes: f64,
    /// The host's syncs per commit.
    pub syncs: f64,
    pub writes: f64,
    pub kib: f64,
}
