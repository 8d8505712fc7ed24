//! How much memory the indexes of a log take.

use std::path::{Path, PathBuf};

use crate::error::{Result, invalid};
use crate::sync::Arc;
use crate::sync::atomic::{AtomicU64, Ordering};

/// Looks and snapshots may take this many bytes of memory, however low the limit of the index is.
const LEAST_BESIDE: u64 = 1 << 20;

/// Bytes of memory taken by the extents of all disks of a log.
#[derive(Clone, Debug, Default)]
pub(crate) struct IndexMemory(Arc<AtomicU64>);

impl IndexMemory {
    pub(crate) fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A memory limit for extents beside an index.
#[derive(Clone, Debug)]
pub(crate) struct ExtentLimit {
    pub memory: IndexMemory,
    /// Bytes.
    pub most: u64,
    log_dir: PathBuf,
}

impl ExtentLimit {
    /// As much again as an index with this limit.
    pub(crate) fn beside(memory: &IndexMemory, index_limit: u64, log_dir: &Path) -> Self {
        Self {
            memory: memory.clone(),
            most: index_limit.max(LEAST_BESIDE),
            log_dir: log_dir.to_path_buf(),
        }
    }

    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput) if the extents take more.
    pub(super) fn check(&self) -> Result<()> {
        if self.memory.bytes() <= self.most {
            return Ok(());
        }
        Err(invalid(format!(
            "{}: its extents and those of open looks take more than the {} bytes of memory that \
             index-memory allows; end looks, or open the disk with a larger index-memory",
            self.log_dir.display(),
            self.most
        )))
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
