//! Listing the points of a disk in use.

use std::collections::VecDeque;

use crate::catalog::snapshot::Snapshot;
use crate::disk::handle::Disk;
use crate::error::Result;
use crate::log::commit::Commit;
use crate::log::holds::HoldOwner;
use crate::recovery::live::read_live;
use crate::recovery::scan::FoundRecord;
use crate::store::dump::{Groups, LogGroup, LogRecord, text_of};

/// The points of a disk in use: see [`Disk::points`].
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

impl Disk {
    /// The points of the disk, while it is in use. Of the commit groups it returns the newest
    /// `most`, and as many of the older ones with marks.
    ///
    /// While this reads the log, requests that need more room in it wait.
    ///
    /// # Errors
    /// As [`look`](Self::look).
    pub fn points(&self, most: usize) -> Result<DiskPoints> {
        let (log, disk_id) = (&self.log, self.state.id);
        // Not as for a look: a log that is full meanwhile makes writes wait, and fails none.
        let held = self.hold(HoldOwner::Export)?;
        let control = &held.control;
        let first = control.horizon_of(disk_id).max(control.since(disk_id));
        let mut oldest = Commit {
            lsn: first,
            ..Commit::default()
        };
        let horizon = log.lock().horizon;
        if horizon.lsn == first {
            oldest = horizon;
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
        let threads = log.medium.threads();
        read_live(
            &held.segments,
            held.newest,
            control,
            threads,
            &mut |found: FoundRecord<'_>| {
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
                let record = LogRecord::new(&found, &self.state.path, text.as_ref());
                groups.take(&record).map(&mut add);
            },
        )?;
        failed.map_or(Ok(()), Err)?;
        groups.end().map(&mut add);
        let mut snapshots = self.snapshots();
        snapshots.retain(|snapshot| snapshot.has(disk_id));
        Ok(DiskPoints {
            oldest,
            groups: count,
            newest: marked.groups.into_iter().chain(recent.groups).collect(),
            snapshots,
        })
    }
}
