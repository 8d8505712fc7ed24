//! Listing the points of a disk, whether or not it is in use.

use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::path::Path;

use crate::catalog::options::{DiskOptions, StoreOptions};
use crate::catalog::retention::Retention;
use crate::catalog::snapshot::Snapshot;
use crate::disk::handle::Disk;
use crate::error::Result;
use crate::format::Control;
use crate::log::commit::Commit;
use crate::log::holds::HoldOwner;
use crate::medium::file::Segment;
use crate::recovery::live::read_live;
use crate::recovery::scan::FoundRecord;
use crate::store::dump::{Groups, LogGroup, LogRecord, text_of};
use crate::store::open::Store;
use crate::sync::Arc;

/// The points of a disk: see [`Disk::points`] and [`disk_points`].
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

/// The points of a disk that nobody writes, as [`Disk::points`] does. Nothing is changed.
///
/// # Errors
/// As [`Store::open_read_only`], and if the log can't be read.
pub fn disk_points(
    path: &Path,
    log_dir: &Path,
    most: usize,
    threads: Option<NonZeroUsize>,
) -> Result<DiskPoints> {
    let options = StoreOptions {
        threads,
        ..StoreOptions::default()
    };
    let store = Store::open_read_only(log_dir, &[DiskOptions::new(path)], &options)?;
    let control = store.control.as_ref().expect("open for reading only");
    let disk = &store.disks[0];
    let state = disk.log.lock();
    let (applied, newest) = (state.pipeline.applied(), state.pipeline.appended());
    let segments = state.ring.oldest(usize::MAX).into_iter();
    let segments = segments.map(|(segment, last)| (segment, last.lsn));
    let segments: Vec<_> = segments.filter(|(_, last)| *last > applied).collect();
    drop(state);
    disk.points_in((&segments, newest), &control.control, most)
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
        // Not as for a look: a log that is full meanwhile makes writes wait, and fails none.
        let held = self.hold(HoldOwner::Export)?;
        self.points_in((&held.segments, held.newest), &held.control, most)
    }

    /// The same, from these segments, each with its last LSN, up to LSN `until`.
    fn points_in(
        &self,
        (segments, until): (&[(Arc<Segment>, u64)], u64),
        control: &Control,
        most: usize,
    ) -> Result<DiskPoints> {
        let (log, disk_id) = (&self.log, self.state.id);
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
            segments,
            until,
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
            retain: self.retain(),
        })
    }
}
