//! The place of the newest bytes of a range of sectors.

use crate::SharedBuffer;
use crate::medium::file::Segment;
use crate::sync::Arc;

/// Where an extent's bytes are.
#[derive(Clone, Debug)]
pub(crate) enum Location {
    /// In memory, not written to the log yet; the extent starts `offset` bytes into the payload.
    Memory {
        payload: SharedBuffer,
        offset: usize,
    },
    /// In the log, at a byte offset of a segment file. Holding the segment keeps it from being
    /// recycled.
    Log { segment: Arc<Segment>, offset: u64 },
    /// All zeroes; `unmap` if the base image's space may be given back. `lsn`: the record that made
    /// them so.
    Zero { unmap: bool, lsn: u64 },
}

impl Location {
    /// The place `sectors` sectors further on.
    pub(crate) fn skip(&self, sectors: u64) -> Self {
        let bytes = sectors * crate::SECTOR_SIZE;
        match self {
            Self::Memory { payload, offset } => Self::Memory {
                payload: payload.clone(),
                offset: offset + bytes as usize,
            },
            Self::Log { segment, offset } => Self::Log {
                segment: segment.clone(),
                offset: offset + bytes,
            },
            Self::Zero { unmap, lsn } => Self::Zero {
                unmap: *unmap,
                lsn: *lsn,
            },
        }
    }
}

/// A part of a looked-up range.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    pub sector: u64,
    pub sectors: u64,
    /// `None`: not in this layer.
    pub place: Option<Location>,
}

impl Piece {
    /// A piece that the layer does not have.
    pub(crate) fn gap(sector: u64, end: u64) -> Self {
        Self {
            sector,
            sectors: end - sector,
            place: None,
        }
    }
}
