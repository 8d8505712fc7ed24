//! A restore in place of a disk in use.

use crate::index::ExtentMap;

/// What the keeper needs to restore a disk in place.
pub(crate) struct RewindRequest {
    /// The LSN as of which the disk is to be.
    pub to: u64,
    /// The newest record of the disk when this was made.
    pub newest: u64,
    /// What the log has of the disk as of `to`.
    pub extents: ExtentMap,
}
