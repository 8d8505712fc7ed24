//! Where the newest bytes of each sector are: the extent index over the base image.
//!
//! ```text
//!   read ─▶ active (written since the last checkpoint began)
//!             └─ gaps ─▶ frozen (what a running checkpoint copies)
//!                          └─ gaps ─▶ base image
//! ```
//! A checkpoint freezes the active layer at one LSN in O(1) and copies from it without a lock while
//! new writes go to a new active layer: the copy is exactly the disk as of that LSN.

pub(crate) mod allocation;
mod bulk;
mod extents;
mod leaf;
mod location;
mod memory;
mod sectors;
#[cfg(test)]
mod tests;

pub(crate) use bulk::IndexBuilder;
pub(crate) use extents::ExtentMap;
pub(crate) use location::{Location, Piece};
pub(crate) use memory::{ExtentLimit, IndexMemory};
pub(crate) use sectors::{SectorMap, SectorSet};

use crate::medium::file::Segment;
use crate::sync::Arc;

/// The two layers over a base image.
#[derive(Debug, Default)]
pub(crate) struct Index {
    pub active: ExtentMap,
    pub frozen: Option<Arc<ExtentMap>>,
}

impl Index {
    /// Counts the memory of this index, and of all that follow it, in `memory`.
    pub(crate) fn count_in(&mut self, memory: &IndexMemory) {
        self.active.count_in(memory);
        if let Some(frozen) = self.frozen.as_mut().and_then(Arc::get_mut) {
            frozen.count_in(memory);
        }
    }

    /// Adds the range to `pieces`, cut into pieces, newest layer first; `None` places are in the
    /// base image.
    pub(crate) fn pieces(&self, sector: u64, sectors: u64, pieces: &mut Vec<Piece>) {
        let add = &mut |piece: Piece| pieces.push(piece);
        let Some(frozen) = &self.frozen else {
            return self.active.visit(sector, sectors, add);
        };
        self.active
            .visit(sector, sectors, &mut |piece| match piece.place {
                None => frozen.visit(piece.sector, piece.sectors, add),
                Some(_) => add(piece),
            });
    }

    /// See [`ExtentMap::relocate`]. The index has a frozen layer for itself until the layer's last
    /// record is durable.
    pub(crate) fn relocate(
        &mut self,
        sector: u64,
        sectors: u64,
        lsn: u64,
        segment: &Arc<Segment>,
        offset: u64,
    ) {
        self.active.relocate(sector, sectors, lsn, segment, offset);
        if let Some(frozen) = self.frozen.as_mut().and_then(Arc::get_mut) {
            frozen.relocate(sector, sectors, lsn, segment, offset);
        }
    }

    /// Freezes the active layer, unless one is frozen already, left by a failed checkpoint. Returns
    /// whether it did.
    pub(crate) fn freeze(&mut self) -> bool {
        let free = self.frozen.is_none();
        if free {
            let empty = self.active.successor();
            self.frozen = Some(Arc::new(std::mem::replace(&mut self.active, empty)));
        }
        free
    }

    /// Undoes [`freeze`](Self::freeze). Nothing may have been inserted since, and nobody else may
    /// be using the frozen layer.
    pub(crate) fn thaw(&mut self) {
        let frozen = self.frozen.as_mut().and_then(Arc::get_mut);
        if let Some(frozen) = frozen.map(std::mem::take) {
            (self.active, self.frozen) = (frozen, None);
        }
    }
}
