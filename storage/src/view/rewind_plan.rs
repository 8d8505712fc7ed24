//! Planning a restore in place: what a disk would be, and which records would stop or begin to
//! count.

use std::path::Path;

use crate::error::{Error, ErrorKind, Result, invalid};
use crate::format::Control;
use crate::log::commit::Commit;
use crate::log::disk_state::DiskState;
use crate::log::holds::HeldLog;
use crate::log::orders::RewindRequest;
use crate::log::state::Log;
use crate::recovery::live::read_live;
use crate::recovery::replay::read_live_disk;
use crate::recovery::scan::FoundRecord;
use crate::view::point::Point;

/// What [`rewind_disk`](crate::rewind_disk) or [`Disk::rewind`](crate::Disk::rewind) did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RewindReport {
    /// The disk is now what it was after the record with this LSN.
    pub to_lsn: u64,
    /// The LSN of the disk's previous state. A restore in place to it undoes this one.
    pub from_lsn: u64,
    /// The LSN of the restore itself, and so of the disk's present state; `None` if the disk was
    /// already in that state and nothing changed.
    pub lsn: Option<u64>,
    /// Records of the disk that no longer count.
    pub undone: u64,
    /// Records of the disk that count again, because an earlier restore in place was undone.
    pub redone: u64,
}

/// The records of a log, for a restore in place of one of its disks.
pub(crate) struct LogRecords {
    disk_id: u32,
    commits: Vec<Commit>,
    /// The LSNs of the disk's records that are not in its base image.
    of_disk: Vec<u64>,
}

impl LogRecords {
    pub(crate) fn new(disk_id: u32) -> Self {
        Self {
            disk_id,
            commits: Vec::new(),
            of_disk: Vec::new(),
        }
    }

    pub(crate) fn take(&mut self, found: &FoundRecord<'_>) {
        self.commits.push(found.commit());
        if found.descriptor.disk_id.get() == self.disk_id && !found.in_base {
            self.of_disk.push(found.lsn);
        }
    }

    /// Plans a restore to this point; it has no LSN yet. `newest`: the LSN of the disk's present
    /// state.
    ///
    /// # Errors
    /// If the disk can't be restored to this point.
    pub(crate) fn plan(
        &self,
        at: Point,
        control: &Control,
        newest: u64,
        path: &Path,
        log_dir: &Path,
    ) -> Result<RewindReport> {
        let (path, disk_id) = (path.display(), self.disk_id);
        if self.of_disk.is_empty() {
            let horizon = control.applied_lsn(disk_id);
            return Err(Error::new(
                ErrorKind::NotFound,
                format!(
                    "{path}: the disk has no history: its log in {} has no record of it after LSN \
                     {horizon}, the state of the base image; 'retain=24h' in the disk's spec keeps \
                     what is written from now on",
                    log_dir.display()
                ),
            ));
        }
        let to_lsn = at.resolve(log_dir, control, disk_id, |visit| {
            self.commits.iter().for_each(visit);
            Ok(())
        })?;
        if to_lsn < control.horizon_of(disk_id) {
            return Err(invalid(format!(
                "{path}: the base image has moved past LSN {to_lsn}, so the snapshot there can \
                 only be copied: 'walvisor disk restore DISK --at lsn:{to_lsn} -o NEW' makes a \
                 copy"
            )));
        }
        let (before, after) = (
            control.timeline(disk_id, newest),
            control.timeline(disk_id, to_lsn),
        );
        let count = |is: &dyn Fn(u64) -> bool| {
            let records = self.of_disk.iter();
            records.filter(|lsn| is(**lsn)).count() as u64
        };
        Ok(RewindReport {
            to_lsn,
            from_lsn: newest,
            lsn: None,
            undone: count(&|lsn| before.has(lsn) && !after.has(lsn)),
            redone: count(&|lsn| after.has(lsn) && !before.has(lsn)),
        })
    }
}

impl RewindReport {
    /// Plans a restore on a held log, with the request for the keeper; `None`: nothing would
    /// change. `newest`: the disk's newest record before the log was held.
    pub(crate) fn plan(
        log: &Log,
        disk: &DiskState,
        at: Point,
        newest: u64,
        held: &HeldLog,
    ) -> Result<(Self, Option<RewindRequest>)> {
        let control = &held.control;
        let threads = log.medium.threads();
        let mut records = LogRecords::new(disk.id);
        let visit = &mut |found: FoundRecord<'_>| records.take(&found);
        read_live(&held.segments, held.newest, control, threads, visit)?;
        let done = records.plan(at, control, held.newest, &disk.path, &log.dir)?;
        if done.changes_nothing() {
            return Ok((done, None));
        }
        let to = done.to_lsn;
        let of = (control, disk.id, &*log.dir);
        let extents = read_live_disk(&held.segments, to, of, threads, None)?;
        Ok((
            done,
            Some(RewindRequest {
                to,
                newest,
                extents,
            }),
        ))
    }

    /// Whether the disk is already in that state.
    pub(crate) fn changes_nothing(&self) -> bool {
        self.undone + self.redone == 0
    }
}
