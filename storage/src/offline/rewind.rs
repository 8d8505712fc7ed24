//! Restoring a disk in place: at once, whatever its size, by an entry in the control file.

use std::path::Path;

use crate::catalog::control::{ControlFile, existing_log};
use crate::catalog::options::DiskOptions;
use crate::disk::handle::Disk;
use crate::error::{Error, ErrorKind, Result, invalid};
use crate::format::Control;
use crate::log::clock::{ClockReading, LogClock};
use crate::log::history::Commit;
use crate::log::orders::KeeperTask;
use crate::log::pinned_log::PinnedLog;
use crate::log::rewind_request::RewindRequest;
use crate::medium::directory::{Medium, directory};
use crate::medium::engine::EngineKind;
use crate::medium::lock::Access;
use crate::offline::attach::{OpenBase, locate};
use crate::offline::point::Point;
use crate::recovery::live::read_live;
use crate::recovery::replay::{read_durable, read_live_disk};
use crate::recovery::scan::FoundRecord;
use crate::sync::atomic::Ordering;
use crate::sync::mpsc;

/// What [`rewind_disk`] or [`Disk::rewind`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RewindReport {
    /// The disk is now what it was after the record with this LSN.
    pub to_lsn: u64,
    /// The LSN of the disk's previous state. A restore in place to it undoes this one.
    pub from_lsn: u64,
    /// The LSN of the restore itself, and so of the disk's present state; `None` if the disk was already in that state
    /// and nothing changed.
    pub lsn: Option<u64>,
    /// Records of the disk that no longer count.
    pub undone: u64,
    /// Records of the disk that count again, because an earlier restore in place was undone.
    pub redone: u64,
}

/// Makes the disk at `path` what it was at a point in its history, with its present size. Nothing is copied, so this
/// takes as long as opening the log, whatever the size of the disk. Other disks of the log do not change.
///
/// Nothing is lost as long as the log keeps its history ([`Retention`](crate::Retention)): earlier points can still be
/// seen, and a restore in place to [`RewindReport::from_lsn`] undoes this one. When a checkpoint reaches the restore,
/// it passes it as a whole; earlier points of all disks of the log are then gone.
///
/// # Errors
/// [`ErrorKind::NotFound`] if there is no log, if it does not reach back to this point (the error names the nearest
/// ones), or if it has no record of the disk at all; [`ErrorKind::Locked`] if the disk or its log is in use;
/// [`ErrorKind::InvalidInput`] if there is no room for another restore in place. Nothing is changed then.
pub fn rewind_disk(path: &Path, log_dir: &Path, at: Point) -> Result<RewindReport> {
    let mut control = existing_log(log_dir, Access::Log)?;
    let base = OpenBase::open(&DiskOptions::new(path), Access::Write, log_dir, true)?;
    let medium = directory(log_dir, EngineKind::Blocking);
    rewind(
        &medium,
        log_dir,
        &mut control,
        &base,
        at,
        ClockReading::now(),
    )
}

/// The records of a log, for a restore in place of one of its disks.
struct LogRecords {
    disk_id: u32,
    commits: Vec<Commit>,
    /// The LSNs of the disk's records that are not in its base image.
    of_disk: Vec<u64>,
}

impl LogRecords {
    fn new(disk_id: u32) -> Self {
        Self {
            disk_id,
            commits: Vec::new(),
            of_disk: Vec::new(),
        }
    }

    fn take(&mut self, found: &FoundRecord<'_>) {
        self.commits.push(found.commit());
        if found.descriptor.disk_id.get() == self.disk_id && !found.in_base {
            self.of_disk.push(found.lsn);
        }
    }

    /// Plans a restore to this point; it has no LSN yet. `newest`: the LSN of the disk's present state.
    ///
    /// # Errors
    /// If the disk can't be restored to this point.
    fn plan(
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
                    "{path}: the disk has no history: its log in {} has no record of it after LSN {horizon}, the state \
                     of the base image; 'retain=24h' in the disk's spec keeps what is written from now on",
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
                "{path}: the base image has moved past LSN {to_lsn}, so the snapshot there can only be copied: \
                 'walvisor disk restore DISK --at lsn:{to_lsn} -o NEW' makes a copy"
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
    /// Whether the disk is already in that state.
    fn changes_nothing(&self) -> bool {
        self.undone + self.redone == 0
    }
}

/// As [`rewind_disk`], for an open log, with the clocks at `now`.
pub(crate) fn rewind(
    medium: &dyn Medium,
    log_dir: &Path,
    control: &mut ControlFile,
    base: &OpenBase,
    at: Point,
    now: ClockReading,
) -> Result<RewindReport> {
    let place = locate(base, control, log_dir)?;
    let disk_id = control.control.disks[place].id.get();
    let mut records = LogRecords::new(disk_id);
    let visit = &mut |found: &FoundRecord<'_>| records.take(found);
    // Whatever counts from now on must be durable, as when the log is opened for writing.
    let (scan, unapplied) = read_durable(medium, log_dir, control, visit, &mut |_, _| {})?;
    base.find(control, log_dir, &unapplied)?;
    if let Some(why) = base.why_no_past(&control.control, place, &control.home)? {
        return Err(base.no_past(at, log_dir, why));
    }
    let known = &control.control;
    let newest = known.with_rewinds(scan.last.lsn);
    let mut done = records.plan(at, known, newest, &base.options.path, log_dir)?;
    if done.changes_nothing() {
        return Ok(done);
    }
    let newest_time = (
        control.newest_time(scan.last.lsn, scan.last.unix_us),
        scan.passed,
    );
    let mut clock = LogClock::open_at(log_dir, newest_time, control.created_us(), now);
    let unix_us = clock.next_at(now).unix_us;
    let mut next = known.clone();
    let lsn = next.rewind(disk_id, done.to_lsn, newest, unix_us);
    done.lsn = Some(lsn.map_err(|error| error.of_file(log_dir))?);
    // Numbers seen on the medium are never reused.
    let next_lsn = next.header.next_lsn.get().max(scan.max_lsn + 1);
    next.header.next_lsn = next_lsn.into();
    // In both slots: if the newer one rots, the other must not bring back what was undone.
    control.change_both(|control| {
        control.header.next_lsn = next.header.next_lsn;
        control.rewinds.clone_from(&next.rewinds);
    })?;
    Ok(done)
}

impl Disk {
    /// As [`rewind_disk`], for an open disk. Its writes wait in the meantime; other disks of the log go on. A mark in
    /// the log records it.
    ///
    /// The contents change at once, as by a WRITE of the whole disk. The caller must make sure that no user of the disk
    /// relies on the old contents, in caches for instance.
    ///
    /// # Errors
    /// As [`rewind_disk`], for the point; [`ErrorKind::Locked`] if the disk was written to meanwhile;
    /// [`ErrorKind::InvalidInput`] if it is open for reading only; or the disk has left the log, or the log had failed,
    /// is being closed, or has records that can't be read or copied. The disk is then unchanged, but the log may have
    /// the mark.
    pub fn rewind(&self, at: Point) -> Result<RewindReport> {
        let path = self.state.path.display();
        if self.state.read_only {
            return Err(invalid(format!(
                "{path}: the disk is open for reading only"
            )));
        }
        let newest = self.state.last_lsn.load(Ordering::Acquire);
        let held = self.hold(true)?;
        let (mut done, rewinding) = self.plan_rewind(at, newest, &held)?;
        let Some(rewinding) = rewinding else {
            return Ok(done);
        };
        let (rewound, lsn) = mpsc::channel();
        let task = KeeperTask::Rewind(self.state.clone(), rewinding, rewound);
        self.log.order(task)?;
        // The keeper sends it before it answers.
        let lsn = lsn.recv().map_err(|_| self.log.closed())?;
        done.lsn = Some(lsn);
        // Records of other disks may have come in between.
        done.from_lsn = lsn - 1;
        Ok(done)
    }

    /// Plans a restore on a pinned log, with the request for the keeper; `None`: nothing would change. `newest`: the
    /// disk's newest record before the log was pinned.
    pub(crate) fn plan_rewind(
        &self,
        at: Point,
        newest: u64,
        held: &PinnedLog,
    ) -> Result<(RewindReport, Option<RewindRequest>)> {
        let (log, disk, control) = (&self.log, &self.state, &held.control);
        let threads = log.medium.threads();
        let mut records = LogRecords::new(disk.id);
        let visit = &mut |found: FoundRecord<'_>| records.take(&found);
        read_live(&held.segments, held.newest, control, threads, visit)?;
        let done = records.plan(at, control, held.newest, &disk.path, &log.dir)?;
        if done.changes_nothing() {
            return Ok((done, None));
        }
        let to = done.to_lsn;
        let extents = read_live_disk(&held.segments, to, control, disk.id, &log.dir, threads)?;
        Ok((
            done,
            Some(RewindRequest {
                to,
                newest,
                extents,
            }),
        ))
    }
}
