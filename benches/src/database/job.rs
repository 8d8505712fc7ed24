//! What is asked of a database, and what came out.

use std::time::Duration;

/// Who commits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Engine {
    Mariadb,
    SqliteWal,
    SqliteRollback,
}

impl Engine {
    /// As the guest's script knows it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mariadb => "mariadb",
            Self::SqliteWal => "sqlite-wal",
            Self::SqliteRollback => "sqlite-delete",
        }
    }
}

/// Where to, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disk {
    /// A raw image; each FLUSH is an fdatasync.
    Raw,
    /// The write-ahead log.
    Wal,
    /// The same, and the server has no doublewrite buffer.
    Single,
}

impl Disk {
    pub const ALL: [Self; 3] = [Self::Raw, Self::Wal, Self::Single];

    /// As the guest's script knows it.
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

/// What the guest is to do.
#[derive(Clone, Copy, Debug)]
pub struct Job {
    pub engine: Engine,
    pub disk: Disk,
    pub clients: u32,
    pub commits: u32,
}

impl Job {
    pub fn expected(&self) -> Duration {
        Duration::from_secs_f64(1.0 + f64::from(self.commits) / 400.0)
    }
}

/// What a job came to.
#[derive(Clone, Copy, Debug)]
pub struct Measured {
    pub commits_per_s: f64,
    /// FLUSHes of the guest, a commit.
    pub flushes: f64,
    /// Syncs of the host, a commit.
    pub syncs: f64,
    pub writes: f64,
    pub kib: f64,
}
