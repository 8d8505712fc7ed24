//! How far back the history of a log's disks reaches.

use std::collections::HashMap;
use std::fmt;

use crate::catalog::retention::Retention;
use crate::catalog::snapshot::{SavedFiles, Snapshot};
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

/// How far back the history of a log's disks reaches, and how much of it is retained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogHistory {
    /// The base images hold all records up to this LSN, so this is the oldest state that can be restored. The commit
    /// group and the time are those of this record, or of the next one if it has left the log; 0 if there never was
    /// one.
    pub horizon: Commit,
    /// Bytes of the segments in use.
    pub kept_bytes: u64,
    /// Bytes of those that must stay: for a look, or for a snapshot between the two points of a restore in place.
    pub pinned_bytes: u64,
    /// Bytes of all segments the log may have.
    pub room_bytes: u64,
    /// Bytes of memory taken by the extents of all disks, looks and snapshots. For a log that is not in use: what the
    /// disks' extents would take.
    pub index_bytes: u64,
    /// Bytes of the saved files: what snapshots need and the base images no longer have.
    pub saved_bytes: u64,
    /// How much history is retained.
    pub retain: Retention,
    /// The log's snapshots, oldest first.
    pub snapshots: Vec<Snapshot>,
}

/// Where the records after an LSN begin: a segment's sequence, and a byte offset in the segment.
pub(crate) type LogPosition = (u64, u64);

/// The last results of reading saved files, oldest first: the files there were, the disk and the snapshot they were
/// read for, and the extents they have of the disk.
pub(crate) type SavedExtentsCache = Mutex<Vec<(SavedFiles, (u32, u64), Arc<ExtentMap>)>>;

/// Positions found so far, by LSN.
pub(crate) type PositionCache = Mutex<HashMap<u64, LogPosition>>;
