//! The segment at the log's end, where batches are written, and its summary once it is sealed.

use crate::SharedBuffer;
use crate::format::{self, SummaryFooter, Uuid};
use crate::medium::file::Segment;
use crate::mutant::{Mutant, planted};
use crate::sync::Arc;

/// Where the next batch goes.
pub(crate) struct Tail {
    pub segment: Arc<Segment>,
    pub sequence: u64,
    pub salt: u64,
    pub offset: u64,
    pub previous_crc: u32,
    /// The segment header until it is written, together with the first batch.
    pub header: Option<SharedBuffer>,
    /// The batch headers so far, for the summary. `None`: the segment gets no summary.
    pub headers: Option<Vec<u8>>,
}

/// The summary of a sealed segment, waiting to be written.
pub(crate) struct PendingSummary {
    pub segment: Arc<Segment>,
    /// Byte offset in the segment.
    pub offset: u64,
    pub summary: SharedBuffer,
}

/// The size of a batch, in bytes.
#[derive(Clone, Copy)]
pub(crate) struct BatchSize {
    /// The header with descriptors and checksums, without padding.
    pub header: usize,
    /// Everything it takes in a segment, padding included.
    pub whole: u64,
}

impl Tail {
    /// Whether a batch, and then the summary, fit a segment of `segment_size` bytes. `draining`:
    /// the batch is the keeper's, which may use the summary's room.
    pub(crate) fn has_room(&self, batch: BatchSize, draining: bool, segment_size: u64) -> bool {
        let summary = if draining || planted(Mutant::SummaryUnreserved) {
            0
        } else {
            self.summary_len(batch.header, segment_size)
        };
        self.offset + batch.whole + summary <= segment_size
    }

    /// Advances past a batch of `bytes`, segment header included. `header` is its header with
    /// descriptors and checksums, and `crc` that header's checksum.
    pub(crate) fn extend(&mut self, bytes: u64, (header, crc): (&[u8], u32), segment_size: u64) {
        debug_assert!(
            bytes.is_multiple_of(format::BLOCK as u64),
            "batches end on a block"
        );
        self.header = None;
        self.offset += bytes;
        assert!(self.offset <= segment_size, "a batch beyond its segment");
        self.previous_crc = crc;
        let summary = self.summary_len(header.len(), segment_size);
        let fits = self.offset + summary <= segment_size || planted(Mutant::SummaryUnreserved);
        match &mut self.headers {
            Some(headers) if summary > 0 && fits => headers.extend_from_slice(header),
            none => *none = None,
        }
    }

    /// Makes the segment's summary, unless it gets none. Also returns the emptied header list, for
    /// the next tail.
    pub(crate) fn seal(self, log: Uuid, segment_size: u64) -> (Option<PendingSummary>, Vec<u8>) {
        let mut headers = self.headers.unwrap_or_default();
        let footer = SummaryFooter::new(log, self.sequence, self.salt);
        // Without a batch there is nothing to summarise.
        let summary = if headers.is_empty() {
            None
        } else {
            footer.encode(&headers, segment_size)
        };
        headers.clear();
        let pending = summary.map(|summary| PendingSummary {
            segment: self.segment,
            offset: segment_size - summary.len() as u64,
            summary: summary.share(),
        });
        (pending, headers)
    }

    /// Bytes of the summary once `more` bytes of batch headers are added; 0 if the segment gets
    /// none.
    fn summary_len(&self, more: usize, segment_size: u64) -> u64 {
        let headers = self.headers.as_ref();
        let len = headers.and_then(|had| format::summary_len(had.len() + more, segment_size));
        len.unwrap_or(0) as u64
    }
}
