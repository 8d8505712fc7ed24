//! What a look at a disk in use reads.

use std::any::Any;

use crate::format::Control;
use crate::medium::file::Segment;
use crate::sync::Arc;

/// What a look reads of a log: all records up to an LSN, which are durable.
pub(crate) struct PinnedLog {
    /// The segments that have records which are not in the base images, oldest first, each with its last LSN so far. They
    /// come before the pin, so that they are given back before the keeper looks for free ones.
    pub segments: Vec<(Arc<Segment>, u64)>,
    /// The newest record.
    pub newest: u64,
    /// The control file: what is in the base images, and which snapshots there are.
    pub control: Control,
    /// A [`Pin`](crate::log::pin::Pin), which this module does not name: the log's orders have this in them.
    pub pin: Box<dyn Any + Send + Sync>,
}
