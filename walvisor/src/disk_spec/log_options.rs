//! The options of a log, as its disks set them.

use std::time::Duration;

use walvisor_storage::{FullLogPolicy, Retention};

use crate::size::show_size;

/// Options of a log, which any of its disks may set. `None`: not set.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LogOptions {
    /// The longest time that a commit group waits for more FLUSHes to join it.
    pub commit_wait: Option<Duration>,
    /// The number of FLUSHes at which a commit group stops waiting.
    pub commit_count: Option<u32>,
    /// How long closing may copy the log to the images.
    pub close_time: Option<Duration>,
    /// Memory limit of the log's index in bytes.
    pub index_memory: Option<u64>,
    /// Most bytes in the spill file of a disk.
    pub spill_limit: Option<u64>,
    /// How much history the log keeps.
    pub retain: Option<Retention>,
    /// What writes and FLUSHes do while the log is full and cannot be emptied.
    pub on_full: Option<FullLogPolicy>,
    /// The address of the archive to which the log's push sends it.
    pub archive: Option<String>,
    /// How often the push sends what is new.
    pub archive_interval: Option<Duration>,
    /// Whether a FLUSH waits for the archive.
    pub archive_sync: Option<bool>,
    /// Writes wait while the archive lacks so many bytes of log.
    pub archive_limit: Option<u64>,
}

/// Two values of one key of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disagreement {
    /// The key.
    pub key: &'static str,
    /// The value of the one, and that of the other.
    pub values: [String; 2],
}

impl LogOptions {
    /// The keys that are set, with their values as a SPEC spells them.
    pub fn said(&self) -> impl Iterator<Item = (&'static str, String)> {
        let on_full = |policy| match policy {
            FullLogPolicy::Fail => "fail".to_owned(),
            FullLogPolicy::Pause => "pause".to_owned(),
        };
        let on = |on| if on { "on" } else { "off" }.to_owned();
        let all = [
            (
                "commit-wait-usec",
                self.commit_wait.map(|wait| wait.as_micros().to_string()),
            ),
            (
                "commit-wait-count",
                self.commit_count.map(|count| count.to_string()),
            ),
            (
                "close-seconds",
                self.close_time.map(|time| time.as_secs().to_string()),
            ),
            ("index-memory", self.index_memory.map(show_size)),
            ("spill-limit", self.spill_limit.map(show_size)),
            ("retain", self.retain.map(|retain| retain.to_string())),
            ("on-full", self.on_full.map(on_full)),
            ("archive", self.archive.clone()),
            (
                "archive-interval",
                self.archive_interval.map(|time| format!("{time:?}")),
            ),
            ("archive-sync", self.archive_sync.map(on)),
            ("archive-limit", self.archive_limit.map(show_size)),
        ];
        all.into_iter()
            .filter_map(|(key, value)| Some((key, value?)))
    }

    /// Checks that these options set every key that `other` sets, to the same value.
    ///
    /// # Errors
    /// The first key that these set to another value, or not at all.
    pub fn covers(&self, other: &Self) -> Result<(), Disagreement> {
        let mut said = other.said();
        let differs = said.find_map(|(key, theirs)| {
            let ours = self.said().find(|(name, _)| *name == key);
            let ours = ours.map_or_else(|| "none".to_owned(), |(_, value)| value);
            (ours != theirs).then_some(Disagreement {
                key,
                values: [ours, theirs],
            })
        });
        differs.map_or(Ok(()), Err)
    }

    /// Takes over the options that another disk of the log sets.
    ///
    /// # Errors
    /// The first key about which both disagree.
    pub fn join(&mut self, other: &Self) -> Result<(), Disagreement> {
        let joined = Self {
            commit_wait: self.commit_wait.or(other.commit_wait),
            commit_count: self.commit_count.or(other.commit_count),
            close_time: self.close_time.or(other.close_time),
            index_memory: self.index_memory.or(other.index_memory),
            spill_limit: self.spill_limit.or(other.spill_limit),
            retain: self.retain.or(other.retain),
            on_full: self.on_full.or(other.on_full),
            archive: self.archive.clone().or_else(|| other.archive.clone()),
            archive_interval: self.archive_interval.or(other.archive_interval),
            archive_sync: self.archive_sync.or(other.archive_sync),
            archive_limit: self.archive_limit.or(other.archive_limit),
        };
        joined.covers(other)?;
        *self = joined;
        Ok(())
    }
}
