//! Points in the history of a log.
//!
//! ```text
//!   base image ─ horizon ──▶ commit ──▶ commit ──▶ commit ─ newest
//!                └──── each of these states of the disk can be brought back ────┘
//! ```
//! A checkpoint moves the horizon: the base image then holds all records up to the new one.

use std::cmp::Ordering;
use std::fmt;
use std::path::Path;

use crate::error::{Error, ErrorKind, Result};
use crate::format::Control;
use crate::medium::directory::Medium;
use crate::recovery::contents::Verify;
use crate::recovery::scan::{self, Found};

/// A point in the history of a log: after one of its records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// After the record with this log sequence number.
    Lsn(u64),
    /// After the last record of the commit group with this ID.
    Cid(u64),
    /// After the last record that was in the log at this time, in microseconds since 1970 by the wall clock. The times of
    /// the log are those of its batches, and never go back.
    Time(u64),
}

impl Point {
    /// Where a record is, which has these numbers: [`Less`](Ordering::Less) before the point.
    pub fn compare(&self, lsn: u64, cid: u64, unix_us: u64) -> Ordering {
        match *self {
            Self::Lsn(point) => lsn.cmp(&point),
            Self::Cid(point) => cid.cmp(&point),
            Self::Time(point) => unix_us.cmp(&point),
        }
    }

    /// The LSN of the last record up to this point, for a disk of the log.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if the disk can't be brought back there; the error names the nearest points.
    pub(crate) fn resolve(
        self,
        medium: &dyn Medium,
        log_dir: &Path,
        control: &Control,
        disk_id: u32,
    ) -> Result<u64> {
        // A checkpoint that was interrupted may have copied some records.
        let copying = control.header.copying_lsn.get();
        let horizon = control.applied_lsn(disk_id).max(copying);
        if self == Self::Lsn(horizon) {
            // The base image alone; the record itself may have left the log.
            return Ok(horizon);
        }
        let (mut before, mut after): (Option<Commit>, Option<Commit>) = (None, None);
        let mut visit = |found: Found<'_>| {
            let commit = Commit {
                lsn: found.lsn,
                cid: found.batch.cid.get(),
                unix_us: found.batch.unix_us.get(),
            };
            match self.compare(commit.lsn, commit.cid, commit.unix_us) {
                Ordering::Greater if commit.lsn <= horizon => {}
                Ordering::Greater => drop(after.get_or_insert(commit)),
                Ordering::Less | Ordering::Equal => before = Some(commit),
            }
        };
        let tail = Verify::Tail;
        scan::scan(medium, log_dir, control, tail, &mut visit, &mut |_, _| {})?;
        let is_there = |commit: &Commit| match self {
            Self::Time(_) => true,
            _ => self.compare(commit.lsn, commit.cid, commit.unix_us) == Ordering::Equal,
        };
        let before = before.filter(|before| before.lsn >= horizon);
        match (before.filter(is_there), before, after) {
            (Some(commit), ..) => Ok(commit.lsn),
            (None, Some(before), Some(after)) => {
                Err(self.refused(log_dir, &format!("the nearest are {before} and {after}")))
            }
            (None, Some(newest), None) => {
                Err(self.refused(log_dir, &format!("the newest is {newest}")))
            }
            (None, None, Some(after)) => Err(self.refused(
                log_dir,
                &format!("the oldest are LSN {horizon}, which the base image holds, and {after}"),
            )),
            (None, None, None) => Err(self.refused(
                log_dir,
                &format!("there is only LSN {horizon}, which the base image holds"),
            )),
        }
    }

    fn refused(self, log_dir: &Path, nearest: &str) -> Error {
        let dir = log_dir.display();
        let message = format!("{dir}: the disk can't be brought back to {self}: {nearest}");
        Error::new(ErrorKind::NotFound, message)
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lsn(lsn) => write!(f, "lsn:{lsn}"),
            Self::Cid(cid) => write!(f, "cid:{cid}"),
            Self::Time(_) => write!(f, "this time"),
        }
    }
}

/// A record's numbers.
#[derive(Clone, Copy)]
struct Commit {
    lsn: u64,
    cid: u64,
    unix_us: u64,
}

impl fmt::Display for Commit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lsn:{} of cid:{}", self.lsn, self.cid)
    }
}
