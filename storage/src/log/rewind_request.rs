//! A restore in place of a disk in use.

use crate::index::ExtentMap;

/// What the keeper needs to restore a disk in place.
pub(crate) struct RewindRequest {
    /// The disk is to become what it was as of this LSN.
    pub to: u64,
    /// The disk's newest record when this request was made.
    pub newest: u64,
    /// The extents in the log as of `to`.
    pub extents: ExtentMap,
}
