//! What a client asks with BLOCK_STATUS: which sectors of a disk hold data, or have changed.

use std::io;
use std::sync::Arc;

use super::protocol::extent;
use crate::backend::{Allocation, Backend};
use crate::look_up;

/// A metadata context of BLOCK_STATUS. Its ID is its position in the connection's list of contexts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MetaContext {
    /// Which sectors hold data.
    Allocation,
    /// Which sectors have changed since this point in the past.
    Changes(u64),
}

/// A range of sectors, the contexts asked for, and the most extents to return for each of them.
#[derive(Clone, Debug)]
pub(super) struct ExtentQuery {
    pub(super) sector: u64,
    pub(super) sectors: u64,
    pub(super) most: usize,
    pub(super) contexts: Arc<[MetaContext]>,
}

/// A number of sectors, and their status in a context.
pub(super) type ExtentStatus = (u64, u32);

impl ExtentQuery {
    /// Consecutive extents for each context.
    ///
    /// # Errors
    /// If the medium cannot be queried, or a point in the past is not there any more.
    pub(super) fn run(&self, backend: &dyn Backend) -> io::Result<Vec<Vec<ExtentStatus>>> {
        let &Self {
            sector,
            sectors,
            most,
            ..
        } = self;
        let extents_of = |context: &MetaContext| match *context {
            MetaContext::Allocation => {
                let extents = look_up::extents(backend, sector, sectors, most)?.into_iter();
                let status = extents.map(|extent| match extent.allocation {
                    Allocation::Data => (extent.sectors, 0),
                    Allocation::Zero => (extent.sectors, extent::ZERO),
                    Allocation::Hole => (extent.sectors, extent::HOLE | extent::ZERO),
                });
                Ok(status.collect())
            }
            MetaContext::Changes(since) => {
                let tracked = backend.tracked().ok_or(io::ErrorKind::NotFound)?;
                let changes = tracked.changes(since, sector, sectors, most)?.into_iter();
                let status = changes.map(|change| {
                    let dirty = if change.changed { extent::DIRTY } else { 0 };
                    (change.sectors, dirty)
                });
                Ok(status.collect())
            }
        };
        self.contexts.iter().map(extents_of).collect()
    }
}
