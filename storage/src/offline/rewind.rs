//! Restoring a disk that is not in use, in place.

use std::path::Path;

use crate::catalog::control::{ControlFile, existing_log};
use crate::catalog::options::DiskOptions;
use crate::error::Result;
use crate::history::point::Point;
use crate::history::rewind_plan::{LogRecords, RewindReport};
use crate::log::clock::{ClockReading, LogClock};
use crate::medium::directory::{Medium, directory};
use crate::medium::engine::EngineKind;
use crate::medium::lock::Access;
use crate::offline::attach::{OpenBase, locate};
use crate::recovery::replay::read_durable;
use crate::recovery::scan::FoundRecord;

/// Makes the disk at `path` what it was at a point in its history, with its present size. Nothing
/// is copied, so this takes as long as opening the log, whatever the size of the disk. Other disks
/// of the log do not change.
///
/// Nothing is lost as long as the log keeps its history ([`Retention`](crate::Retention)): earlier
/// points can still be seen, and a restore in place to [`RewindReport::from_lsn`] undoes this one.
/// When a checkpoint reaches the restore, it passes it as a whole; earlier points of all disks of
/// the log are then gone.
///
/// # Errors
/// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) if there is no log, if it does not reach
/// back to this point (the error names the nearest ones), or if it has no record of the disk at
/// all; [`ErrorKind::Locked`](crate::ErrorKind::Locked) if the disk or its log is in use;
/// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput) if there is no room for another
/// restore in place. Nothing is changed then.
pub fn rewind_disk(path: &Path, log_dir: &Path, at: Point) -> Result<RewindReport> {
    let mut control = existing_log(log_dir, Access::Log)?;
    let base = OpenBase::open(&DiskOptions::new(path), Access::Write, log_dir, true)?;
    rewind_now(&mut control, &base, log_dir, at)
}

/// As [`rewind_disk`], for a disk that this process brings back, and that nobody may open yet.
pub(crate) fn rewind_unready(path: &Path, log_dir: &Path, at: Point) -> Result<RewindReport> {
    let mut control = existing_log(log_dir, Access::Log)?;
    let base = OpenBase::open_unready(path)?;
    rewind_now(&mut control, &base, log_dir, at)
}

fn rewind_now(
    control: &mut ControlFile,
    base: &OpenBase,
    log_dir: &Path,
    at: Point,
) -> Result<RewindReport> {
    let medium = directory(log_dir, EngineKind::Blocking);
    rewind(&medium, log_dir, control, base, at, ClockReading::now())
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
    if let Some(why) = base.why_no_past(control, place)? {
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
