//! How much memory the indexes of a log take.

use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, Ordering};

/// Looks and snapshots may take this many bytes of memory, however low the limit of the index is.
pub(crate) const LEAST_BESIDE: u64 = 1 << 20;

/// Bytes of memory taken by the extents of all disks of a log.
#[derive(Clone, Debug, Default)]
pub(crate) struct IndexMemory(Arc<AtomicU64>);

impl IndexMemory {
    pub(crate) fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// One map's share, subtracted when the map is dropped.
#[derive(Debug, Default)]
pub(super) struct MemoryShare {
    pub memory: IndexMemory,
    bytes: u64,
}

impl MemoryShare {
    pub(super) fn new(memory: &IndexMemory) -> Self {
        Self {
            memory: memory.clone(),
            bytes: 0,
        }
    }

    /// Sets the map's share.
    pub(super) fn set(&mut self, bytes: u64) {
        let all = &self.memory.0;
        match bytes.checked_sub(self.bytes) {
            Some(0) => {}
            Some(more) => drop(all.fetch_add(more, Ordering::Relaxed)),
            None => drop(all.fetch_sub(self.bytes - bytes, Ordering::Relaxed)),
        }
        self.bytes = bytes;
    }
}

impl Drop for MemoryShare {
    fn drop(&mut self) {
        self.set(0);
    }
}
