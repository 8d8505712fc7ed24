//! What a log has of the history of its disks.

use std::collections::HashMap;
use std::fmt;

use crate::catalog::retention::Retention;
use crate::catalog::snapshot::{SavedFiles, Snapshot};
use crate::index::ExtentMap;
use crate::sync::{Arc, Mutex};

/// A place in the history of a log.
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

/// What a log has of the history of its disks, and what it is to keep.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogHistory {
    /// The base images hold all records up to this LSN: the oldest state that comes back. Its commit group and time are those of
    /// this record, or of the oldest record behind it if this one has left the log; 0 if the log has had none.
    pub horizon: Commit,
    /// Bytes of the segments that are in use.
    pub kept_bytes: u64,
    /// Bytes of those that must stay, for a snapshot between the two points of a restore in place or for a look at the past.
    pub pinned_bytes: u64,
    /// Bytes of all segments that the log may have.
    pub room_bytes: u64,
    /// Bytes of memory that the extents of all disks take, those of looks and snapshots too; of a log that is not in use, that the extents
    /// of the disks would take.
    pub index_bytes: u64,
    /// Bytes of the files beside the segments that hold what snapshots need and the base images have no more.
    pub saved_bytes: u64,
    /// How much is to be kept.
    pub retain: Retention,
    /// The log's snapshots, oldest first.
    pub snapshots: Vec<Snapshot>,
}

/// Where the records behind an LSN begin: a segment's sequence, and a byte offset in the segment.
pub(crate) type LogPosition = (u64, u64);

/// What was last read of the saved files, oldest first: the files there were, the disk and the snapshot that it was read for, and where
/// the disk had something.
pub(crate) type SavedExtentsCache = Mutex<Vec<(SavedFiles, (u32, u64), Arc<ExtentMap>)>>;

/// The borders that were looked for, by LSN.
pub(crate) type PositionCache = Mutex<HashMap<u64, LogPosition>>;
