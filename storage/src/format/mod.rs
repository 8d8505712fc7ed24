//! The bytes on the medium. All integers are little-endian; every structure carries its own
//! CRC-32C.
//!
//! ```text
//! DIR/control         slot A (64 KiB) | slot B (64 KiB)       written in turn, newest valid one counts
//! DIR/segment-00000   segment header (4 KiB) | batch | batch | ... | stale or zero bytes | summary, if it is sealed
//!                                              │
//!                     batch header + descriptors + checksums, pad to 4 KiB | payloads, in order | pad to 4 KiB
//! ```
//!
//! A segment file is recycled, not deleted: its header names the *sequence* it serves now and a
//! random *salt*, and every batch header repeats both, so that a batch left over from an earlier
//! life never passes for a new one. LSNs and sequences never restart in the life of a log.

mod control;
mod sealed;
mod segment;
mod spill;

pub(crate) use control::{
    CONTROL_MAGIC, CONTROL_SLOT, Control, ControlHeader, DiskEntry, HistoryHeader, ImageEntry,
    SAMPLES, Sample, SnapshotEntry,
};
pub(crate) use sealed::{BLOCK, DecodeResult, Uuid, VERSION, counted};
#[cfg(any(test, fuzzing))]
pub(crate) use sealed::{CRC_AT, seal, seal_at};
pub(crate) use segment::{
    BATCH_MAGIC, BatchHeader, Descriptor, DescriptorKind, MAX_CHECKSUMS, MAX_DESCRIPTORS, Rewind,
    SEGMENT_MAGIC, SegmentHeader, SummaryFooter, batch_header_len, header_len, summary_len,
};
pub(crate) use spill::{SpillRange, decode_spill_map, encode_spill_map};
