//! What a look at a disk in use reads.

use std::any::Any;

use crate::format::Control;
use crate::medium::file::Segment;
use crate::sync::Arc;

/// The part of a log that a look reads: all records up to an LSN, all of them durable.
pub(crate) struct PinnedLog {
    /// The segments with records that are not in the base images, oldest first, each with its last LSN so far. Declared
    /// before the pin, so that they are released before the keeper looks for free segments.
    pub segments: Vec<(Arc<Segment>, u64)>,
    /// The newest record.
    pub newest: u64,
    /// The control file: what the base images have, and which snapshots exist.
    pub control: Control,
    /// A [`Pin`](crate::log::pin::Pin). Its type is erased, because the log's orders contain this struct.
    pub pin: Box<dyn Any + Send + Sync>,
}
