//! Restoring a disk that is not in use, in place.

use std::path::{Path, PathBuf};

use crate::catalog::control::{ControlFile, existing_log};
use crate::catalog::options::DiskOptions;
use crate::disk::handle::Disk;
use crate::error::{Error, Result};
use crate::keeper::Keeper;
use crate::log::holds::HoldOwner;
use crate::medium::directory::{Medium, directory};
use crate::medium::engine::EngineKind;
use crate::medium::lock::Access;
use crate::recovery::contents::VerifyScope;
use crate::recovery::replay::read_for_recovery;
use crate::recovery::scan::{FoundRecord, scan};
use crate::store::attach::{OpenBase, locate};
use crate::store::open::open_for_change;
use crate::sync::atomic::Ordering;
use crate::view::point::Point;
use crate::view::rewind_plan::{LogRecords, RewindReport};

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
/// [`ErrorKind::Io`](crate::ErrorKind::Io) if the log is full of what must stay. Nothing is
/// restored then.
pub fn rewind_disk(path: &Path, log_dir: &Path, at: Point) -> Result<RewindReport> {
    let control = existing_log(log_dir, Access::Log)?;
    let base = OpenBase::open(&DiskOptions::new(path), Access::Write, log_dir, true)?;
    let medium = directory(log_dir, EngineKind::Blocking);
    rewind(Box::new(medium), log_dir, control, base, at)
}

/// As [`rewind_disk`], for all disks of a log that this process brings back, and that nobody may
/// open yet.
pub(crate) fn rewind_unready(paths: &[PathBuf], log_dir: &Path, at: Point) -> Result<()> {
    let control = existing_log(log_dir, Access::Log)?;
    let bases = paths.iter().map(|path| OpenBase::open_unready(path));
    let bases = bases.collect::<Result<Vec<_>>>()?;
    let medium = Box::new(directory(log_dir, EngineKind::Blocking));
    // Each open of a log begins a segment, and there may be many disks.
    let (disks, mut keeper) = open_for_change(medium, log_dir, control, bases)?;
    // The images have all of the others.
    let mut written = disks
        .iter()
        .filter(|disk| disk.state.last_lsn.load(Ordering::Acquire) > 0);
    written.try_for_each(|disk| rewind_open(disk, &mut keeper, at).map(drop))
}

/// As [`rewind_disk`], for a locked log.
pub(crate) fn rewind(
    medium: Box<dyn Medium>,
    log_dir: &Path,
    mut control: ControlFile,
    base: OpenBase,
    at: Point,
) -> Result<RewindReport> {
    // What is refused changes nothing.
    let planned = plan(medium.as_ref(), log_dir, &mut control, &base, at)?;
    if planned.changes_nothing() {
        return Ok(planned);
    }
    let (disks, mut keeper) = open_for_change(medium, log_dir, control, vec![base])?;
    // It takes a segment, and another one is the keeper's. Where nothing can make room, whoever uses
    // the log next needs a third.
    let state = disks[0].log.lock();
    let needed = 2 + u32::from(state.keeper.holds.held().is_some());
    let left = state.ring.left();
    drop(state);
    if left < needed {
        return Err(Error::full(format!(
            "{}: the log has no room for the restore and what follows it; make it larger with \
             'walvisor log resize', then try again",
            log_dir.display()
        )));
    }
    rewind_open(&disks[0], &mut keeper, at)
}

/// Restores a disk of a log that was [opened](open_for_change) for it.
fn rewind_open(disk: &Disk, keeper: &mut Keeper, at: Point) -> Result<RewindReport> {
    let newest = disk.state.last_lsn.load(Ordering::Acquire);
    let held = keeper.hold(&disk.state, HoldOwner::Rewind)?;
    let planned = RewindReport::plan(&disk.log, &disk.state, at, newest, &held)?;
    let (mut done, request) = planned;
    if let Some(request) = request {
        done.lsn = Some(keeper.rewind(&disk.state, request)?);
    }
    Ok(done)
}

/// Plans the restore of a closed log's disk, without a change of the log. What it found is durable.
fn plan(
    medium: &dyn Medium,
    log_dir: &Path,
    control: &mut ControlFile,
    base: &OpenBase,
    at: Point,
) -> Result<RewindReport> {
    let place = locate(base, control, log_dir)?;
    let (found, unapplied) = read_for_recovery(medium, log_dir, control, &mut |_, _| {})?;
    base.find(control, log_dir, &unapplied)?;
    let known = &control.control;
    let newest = found.newest(known).lsn;
    // These hold the segments, which are read again.
    drop((found, unapplied));
    if let Some(why) = base.why_no_past(control, place)? {
        return Err(base.no_past(at, log_dir, why));
    }
    let mut records = LogRecords::new(known.disks[place].id.get());
    let (tail, visit) = (VerifyScope::Tail, &mut |found: FoundRecord<'_>| {
        records.take(&found);
    });
    scan(medium, log_dir, known, tail, visit, &mut |_, _| {})?;
    records.plan(at, known, newest, &base.options.path, log_dir)
}
