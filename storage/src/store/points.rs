//! Listing the points of a disk.

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::path::Path;

use crate::catalog::options::DiskOptions;
use crate::catalog::readable::ReadableLog;
use crate::catalog::retention::Retention;
use crate::catalog::snapshot::Snapshot;
use crate::error::Result;
use crate::log::commit::Commit;
use crate::recovery::contents::VerifyScope;
use crate::recovery::scan::{FoundRecord, scan};
use crate::store::dump::{Groups, LogGroup, LogRecord, text_of};
use crate::store::view::LocatedDisk;

/// The points of a disk, see [`disk_points`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskPoints {
    /// The oldest state that can be reached without a snapshot. The commit group and the time are
    /// those of this record, or of the next one if it has left the log; 0 if there is none.
    pub oldest: Commit,
    /// How many commit groups after that change the disk, or have a mark.
    pub groups: u64,
    /// The newest of them, and the newest with a mark, oldest first. They count the records of this
    /// disk and the marks.
    pub newest: Vec<LogGroup>,
    /// The disk's snapshots, oldest first.
    pub snapshots: Vec<Snapshot>,
    /// How much history the log keeps.
    pub retain: Retention,
}

/// The last few groups.
struct NewestGroups {
    most: usize,
    groups: VecDeque<LogGroup>,
}

impl NewestGroups {
    /// Adds the newest group. Returns the one that has to go for it.
    fn push(&mut self, group: LogGroup) -> Option<LogGroup> {
        self.groups.push_back(group);
        let full = self.groups.len() > self.most;
        full.then(|| self.groups.pop_front()).flatten()
    }
}

/// The points of the disk at `path`. Of the commit groups it returns the newest `most`, and as many
/// of the older ones with marks. The log is read on `threads` threads; `None`: one per processor.
/// Nothing is changed.
///
/// # Errors
/// As [`inspect`](crate::inspect); [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) too, if the
/// disk has no log.
pub fn disk_points<'a>(
    path: &Path,
    log: impl Into<ReadableLog<'a>>,
    most: usize,
    threads: Option<NonZeroUsize>,
) -> Result<DiskPoints> {
    let log: ReadableLog<'_> = log.into();
    let (dir, access) = (log.dir(), log.access().of_image());
    let (_base, log) = LocatedDisk::with_history(&DiskOptions::new(path), dir, access, threads)?;
    let (control, disk_id) = (&log.control.control, log.entry().id.get());
    let first = control.horizon_of(disk_id).max(control.since(disk_id));
    let mut oldest = Commit {
        lsn: first,
        ..Commit::default()
    };
    if log.horizon.lsn == first {
        oldest = log.horizon;
    }
    let newest = |groups: VecDeque<LogGroup>| NewestGroups { most, groups };
    let (mut recent, mut marked) = (newest(VecDeque::new()), newest(VecDeque::new()));
    let mut count = 0;
    let mut add = |group: LogGroup| {
        count += 1;
        let older = recent.push(group);
        older
            .filter(|group| !group.marks.is_empty())
            .and_then(|group| marked.push(group));
    };
    let (mut groups, mut failed) = (Groups::default(), None);
    let visit = &mut |found: FoundRecord<'_>| {
        if found.lsn <= first || oldest.cid == 0 {
            oldest = Commit {
                lsn: first,
                ..found.commit()
            };
        }
        let ours = found.descriptor.disk_id.get() == disk_id;
        if found.lsn <= first || !ours && !found.is_mark() {
            return;
        }
        let text = if found.is_mark() {
            text_of(&found).unwrap_or_else(|error| {
                failed.get_or_insert(error);
                None
            })
        } else {
            None
        };
        let record = LogRecord::new(&found, path, text.as_ref());
        groups.take(&record).map(&mut add);
    };
    let verify = VerifyScope::Tail;
    scan(&log.medium, dir, control, verify, visit, &mut |_, _| {})?;
    failed.map_or(Ok(()), Err)?;
    groups.end().map(&mut add);
    let mut snapshots = Snapshot::all(control);
    snapshots.retain(|snapshot| !snapshot.name.is_of_export() && snapshot.has(disk_id));
    Ok(DiskPoints {
        oldest,
        groups: count,
        newest: marked.groups.into_iter().chain(recent.groups).collect(),
        snapshots,
        retain: Retention::of(&control.history),
    })
}
