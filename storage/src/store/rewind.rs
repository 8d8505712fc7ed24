//! Restoring a disk in place: at once, whatever its size, by an entry in the control file.

use std::path::Path;

use crate::catalog::control::{ControlFile, existing_log};
use crate::catalog::options::DiskOptions;
use crate::error::{Error, ErrorKind, Result, invalid};
use crate::log::history::Commit;
use crate::medium::directory::{Medium, directory};
use crate::medium::engine::EngineKind;
use crate::medium::lock::Use;
use crate::recovery::replay::read_durable;
use crate::recovery::scan::Found;
use crate::store::attach::{OpenBase, locate};
use crate::store::point::Point;

/// What [`rewind_disk`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rewound {
    /// The disk is what it was after the record with this LSN.
    pub to_lsn: u64,
    /// The disk was as of this LSN before: a restore in place to this point undoes this one.
    pub from_lsn: u64,
    /// The LSN of the restore itself, and so of the disk as it is now; `None` if the disk was as at the point already, and so
    /// nothing was changed.
    pub lsn: Option<u64>,
    /// Records of the disk that count no longer.
    pub undone: u64,
    /// Records of the disk that count again, because an earlier restore in place is undone.
    pub redone: u64,
}

/// Makes the disk at `path` what it was at a point since the last checkpoint, with its present size. It takes as long as
/// opening the log, whatever the size of the disk: no byte is copied. Other disks of the log stay as they are.
///
/// Nothing is lost by it as long as the log keeps its history ([`Retain`](crate::Retain)): points before it can still be looked
/// at, and a restore in place to [`Rewound::from_lsn`] undoes it. When a checkpoint copies what came before the restore, it
/// passes all of that at once: earlier points of all disks of the log are then gone.
///
/// # Errors
/// [`ErrorKind::NotFound`] if there is no log, or it does not reach back to this point, which then names the nearest ones, or it
/// has no record of the disk at all; [`ErrorKind::Locked`] if the disk or its log is in use; [`ErrorKind::InvalidInput`] if there
/// is no room for another restore in place. Nothing has been changed then.
pub fn rewind_disk(path: &Path, log_dir: &Path, at: Point) -> Result<Rewound> {
    let mut control = existing_log(log_dir, Use::Log)?;
    let base = OpenBase::open(&DiskOptions::new(path), Use::Write, true)?;
    let medium = directory(log_dir, EngineKind::Blocking);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let unix_us = now.map_or(0, |now| now.as_micros() as u64);
    rewind(&medium, log_dir, &mut control, &base, at, unix_us)
}

/// As [`rewind_disk`], of a log that is open, at a time in microseconds since 1970.
pub(crate) fn rewind(
    medium: &dyn Medium,
    log_dir: &Path,
    control: &mut ControlFile,
    base: &OpenBase,
    at: Point,
    unix_us: u64,
) -> Result<Rewound> {
    let (place, path) = (locate(base, control, log_dir)?, base.options.path.display());
    let disk_id = control.control.disks[place].id.get();
    let mut commits: Vec<Commit> = Vec::new();
    let mut records: Vec<u64> = Vec::new();
    let visit = &mut |found: &Found<'_>| {
        commits.push(found.commit());
        if found.descriptor.disk_id.get() == disk_id && !found.in_base {
            records.push(found.lsn);
        }
    };
    // What counts from now on must be durable, as when the log is opened to be written.
    let (scan, waiting) = read_durable(medium, log_dir, control, visit, &mut |_, _| {})?;
    base.find(control, log_dir, &waiting)?;
    if records.is_empty() {
        let horizon = control.control.applied_lsn(disk_id);
        return Err(Error::new(
            ErrorKind::NotFound,
            format!(
                "{path}: the disk has no history: its log in {} has no record of it since LSN {horizon}, as of which the base image \
                 is; 'retain=24h' in the disk's spec keeps what is written from now on",
                log_dir.display()
            ),
        ));
    }
    let known = &control.control;
    let to_lsn = at.resolve(log_dir, known, disk_id, |visit| {
        commits.iter().for_each(visit);
        Ok(())
    })?;
    let horizon = known
        .applied_lsn(disk_id)
        .max(known.header.copying_lsn.get());
    if to_lsn < horizon {
        return Err(invalid(format!(
            "{path}: the base image has gone past LSN {to_lsn}, of whose snapshot only copies can be made now: \
             'walvisor disk restore DISK --at lsn:{to_lsn} -o NEW' makes one"
        )));
    }
    let from_lsn = known.with_rewinds(scan.last.lsn);
    let (before, after) = (known.line(disk_id, from_lsn), known.line(disk_id, to_lsn));
    let count = |is: &dyn Fn(u64) -> bool| records.iter().filter(|lsn| is(**lsn)).count() as u64;
    let undone = count(&|lsn| before.has(lsn) && !after.has(lsn));
    let redone = count(&|lsn| after.has(lsn) && !before.has(lsn));
    let mut done = Rewound {
        to_lsn,
        from_lsn,
        lsn: None,
        undone,
        redone,
    };
    if undone + redone == 0 {
        return Ok(done);
    }
    // The times of a log never go back.
    let last_rewind = known.rewinds.last().map_or(0, |last| last.unix_us.get());
    let unix_us = unix_us.max(scan.last.unix_us).max(last_rewind);
    let mut next = known.clone();
    let lsn = next.rewind(disk_id, to_lsn, from_lsn, unix_us);
    done.lsn = Some(lsn.map_err(|error| error.of_file(log_dir))?);
    // Numbers seen on the medium are never given out again.
    let next_lsn = next.header.next_lsn.get().max(scan.max_lsn + 1);
    next.header.next_lsn = next_lsn.into();
    // Both slots: if the newer one rots, the other must not have the records that were undone.
    for _ in 0..2 {
        control.change(|control| {
            control.header.next_lsn = next.header.next_lsn;
            control.rewinds.clone_from(&next.rewinds);
        })?;
    }
    Ok(done)
}
