//! The segment at the log's end, which batches are written to, and its summary once no more follow.

use crate::SharedBuffer;
use crate::format::{self, SummaryFooter, Uuid};
use crate::medium::file::Segment;
use crate::mutant::{Mutant, planted};
use crate::sync::Arc;

/// The position in the log at which the next batch is written.
pub(crate) struct Tail {
    pub segment: Arc<Segment>,
    pub sequence: u64,
    pub salt: u64,
    pub offset: u64,
    pub previous_crc: u32,
    /// The segment header while it is not written yet; it is written together with the first batch.
    pub header: Option<SharedBuffer>,
    /// The headers of the batches so far, for the segment's summary. `None`: the segment gets no summary.
    pub headers: Option<Vec<u8>>,
}

/// The summary of a segment that takes no more batches. It waits to be written.
pub(crate) struct PendingSummary {
    pub segment: Arc<Segment>,
    /// Byte offset in the segment.
    pub offset: u64,
    pub summary: SharedBuffer,
}

/// The size of a batch, in bytes.
#[derive(Clone, Copy)]
pub(crate) struct BatchSize {
    /// Its header with descriptors and checksums, without padding.
    pub header: usize,
    /// All that it takes in a segment, padding included.
    pub whole: u64,
}

impl Tail {
    /// Whether a batch and then the summary fit a segment of `segment_size` bytes. `draining`: the batch is the
    /// keeper's, which may take the room of the summary.
    pub(crate) fn has_room(&self, batch: BatchSize, draining: bool, segment_size: u64) -> bool {
        let summary = match draining || planted(Mutant::SummaryUnreserved) {
            true => 0,
            false => self.summary_len(batch.header, segment_size),
        };
        self.offset + batch.whole + summary <= segment_size
    }

    /// Moves behind a batch of `bytes`, segment header included. `header` is its header with descriptors and checksums,
    /// and `crc` the header's checksum.
    pub(crate) fn extend(&mut self, bytes: u64, (header, crc): (&[u8], u32), segment_size: u64) {
        self.header = None;
        self.offset += bytes;
        self.previous_crc = crc;
        let summary = self.summary_len(header.len(), segment_size);
        let fits = self.offset + summary <= segment_size || planted(Mutant::SummaryUnreserved);
        match &mut self.headers {
            Some(headers) if summary > 0 && fits => headers.extend_from_slice(header),
            none => *none = None,
        }
    }

    /// Makes the summary of the segment, unless it gets none. Returns the memory of the headers too, emptied, for the
    /// next tail.
    pub(crate) fn seal(self, log: Uuid, segment_size: u64) -> (Option<PendingSummary>, Vec<u8>) {
        let mut headers = self.headers.unwrap_or_default();
        let footer = SummaryFooter::new(log, self.sequence, self.salt);
        // Without a batch there is nothing to sum up.
        let summary = match headers.is_empty() {
            true => None,
            false => footer.encode(&headers, segment_size),
        };
        headers.clear();
        let pending = summary.map(|summary| PendingSummary {
            segment: self.segment,
            offset: segment_size - summary.len() as u64,
            summary: summary.share(),
        });
        (pending, headers)
    }

    /// Bytes that the summary takes once `more` bytes of batch headers have been added; 0 if the segment gets none.
    fn summary_len(&self, more: usize, segment_size: u64) -> u64 {
        let headers = self.headers.as_ref();
        let len = headers.and_then(|had| format::summary_len(had.len() + more, segment_size));
        len.unwrap_or(0) as u64
    }
}
