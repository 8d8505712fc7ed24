//! How far back the history of a log's disks reaches.

use crate::catalog::retention::Retention;
use crate::catalog::snapshot::Snapshot;
use crate::log::commit::Commit;
use crate::log::state::Log;

/// How far back the history of a log's disks reaches, and how much of it is retained.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogHistory {
    /// The base images hold all records up to this LSN, so this is the oldest state that can be
    /// restored. The commit group and the time are those of this record, or of the next one if it
    /// has left the log; 0 if there never was one.
    pub horizon: Commit,
    /// Bytes of the segments in use.
    pub kept_bytes: u64,
    /// Bytes of those that must stay: for a look, for a snapshot between the two points of a
    /// restore in place, or for a replica that may lack no more than its limit.
    pub pinned_bytes: u64,
    /// Bytes of all segments the log may have.
    pub room_bytes: u64,
    /// Bytes of memory taken by the extents of all disks, looks and snapshots. For a log that is
    /// not in use: what the disks' extents would take.
    pub index_bytes: u64,
    /// Bytes of the saved files: what snapshots need and the base images no longer have.
    pub saved_bytes: u64,
    /// How much history is retained.
    pub retain: Retention,
    /// The log's snapshots, oldest first.
    pub snapshots: Vec<Snapshot>,
}

impl LogHistory {
    /// The history of an open log.
    pub(crate) fn of(log: &Log) -> Self {
        let state = log.lock();
        let bytes = |segments: usize| segments as u64 * log.segment_size;
        Self {
            horizon: state.horizon,
            kept_bytes: bytes(state.ring.live().count()),
            pinned_bytes: bytes(state.held_segments()),
            room_bytes: bytes(state.ring.most()),
            index_bytes: log.counters.index_bytes(),
            saved_bytes: state.keeper.saved_bytes,
            retain: state.keeper.retain,
            snapshots: state.keeper.listed_snapshots(),
        }
    }
}
