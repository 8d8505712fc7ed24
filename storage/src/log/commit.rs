//! Commits, and what is remembered about where they are.

use std::collections::HashMap;
use std::fmt;

use crate::catalog::snapshot::SavedFiles;
use crate::index::ExtentMap;
use crate::sync::{Arc, Mutex};

/// A point in a log's history: a record, its commit group and its time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Commit {
    /// A record's log sequence number.
    pub lsn: u64,
    /// The ID of a commit group.
    pub cid: u64,
    /// When it was, in microseconds since 1970, by the log's clock.
    pub unix_us: u64,
}

impl fmt::Display for Commit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "lsn:{} of cid:{}", self.lsn, self.cid)
    }
}

/// Where the records after an LSN begin: a segment's sequence, and a byte offset in the segment.
pub(crate) type LogPosition = (u64, u64);

/// The last results of reading saved files, oldest first: the files there were, the disk and the
/// snapshot they were read for, and the extents they have of the disk.
pub(crate) type SavedExtentsCache = Mutex<Vec<(SavedFiles, (u32, u64), Arc<ExtentMap>)>>;

/// Positions found so far, by LSN.
pub(crate) type PositionCache = Mutex<HashMap<u64, LogPosition>>;
