//! The condition of a disk, for its owner.

use std::time::SystemTime;

use crate::StallCause;

/// Whether a disk can carry out requests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Condition {
    /// It can.
    #[default]
    Ok,
    /// Nothing is broken, but writes wait for this; or fail, while nobody may wait for it.
    Stalled(StallCause),
    /// A file system has no space for the log or the base images. The log retries every second.
    NoSpace(Trouble),
    /// The log can't be copied to the base images, or can't grow, for another reason. It retries
    /// every second.
    CopyFailing(Trouble),
    /// A write or sync failed for good: the disk is read-only until it is opened again.
    ReadOnly(Trouble),
}

/// What is wrong with a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trouble {
    /// When it began, by the wall clock.
    pub since: SystemTime,
    /// The error, in one line.
    pub error: String,
    /// Writes fail.
    pub refuses_writes: bool,
    /// Writes wait until the trouble is over. If writes neither fail nor wait, the log still has
    /// room.
    pub pauses_writes: bool,
}

impl Trouble {
    /// A trouble that begins now.
    pub fn now(error: impl ToString, refuses_writes: bool) -> Self {
        Self {
            since: SystemTime::now(),
            error: error.to_string(),
            refuses_writes,
            pauses_writes: false,
        }
    }
}

impl Condition {
    /// The name of [`NoSpace`](Self::NoSpace).
    pub const NO_SPACE: &str = Self::NAMES[2];

    /// The names of all conditions, for programs.
    pub const NAMES: [&str; 5] = ["ok", "stalled", "no_space", "copy_failing", "read_only"];

    /// Its name, for programs.
    pub fn name(&self) -> &'static str {
        let place = match self {
            Self::Ok => 0,
            Self::Stalled(_) => 1,
            Self::NoSpace(_) => 2,
            Self::CopyFailing(_) => 3,
            Self::ReadOnly(_) => 4,
        };
        Self::NAMES[place]
    }

    /// The same, with these flags if it is a trouble.
    pub fn with_writes(mut self, refuses: bool, pauses: bool) -> Self {
        if let Self::NoSpace(trouble) | Self::CopyFailing(trouble) = &mut self {
            (trouble.refuses_writes, trouble.pauses_writes) = (refuses, pauses);
        }
        self
    }

    /// The trouble, if there is any.
    pub fn trouble(&self) -> Option<&Trouble> {
        match self {
            Self::Ok | Self::Stalled(_) => None,
            Self::NoSpace(trouble) | Self::CopyFailing(trouble) | Self::ReadOnly(trouble) => {
                Some(trouble)
            }
        }
    }
}
