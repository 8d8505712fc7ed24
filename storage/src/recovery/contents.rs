//! The part of a log in one segment: its batches, from the segment's summary or read in place.
//!
//! The summary of a sealed segment is used only if it has the segment's log, sequence and salt, if
//! its batches chain from the segment's header, and if they end where the next segment begins.
//! Otherwise the segment is read from front to back. A summary does not prove that its batches ever
//! reached the medium, so the caller uses it only if all of them were durable.

use std::path::Path;
use std::sync::Arc;

use zerocopy::little_endian::{U32, U64};

use crate::Buffer;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{BLOCK, ControlHeader, DecodeResult, SegmentHeader, SummaryFooter};
use crate::medium::file::{DataFile, Segment};
use crate::mutant::{Mutant, planted};
use crate::recovery::batch::Batch;
use crate::recovery::window::Window;

/// How much of the log a scan verifies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum VerifyScope {
    /// Only batches that may be torn. The payloads of the others are verified when they are read.
    Tail,
    /// Every batch.
    All,
}

/// A segment that claims to be part of the log.
pub(crate) struct Candidate {
    pub segment: Arc<Segment>,
    pub header: SegmentHeader,
}

impl Candidate {
    /// From a segment that is known to be part of the log.
    pub(crate) fn of(segment: &Arc<Segment>) -> Result<Self> {
        match read_header(segment.file.as_ref(), &segment.path)? {
            DecodeResult::Valid(header) => Ok(Self {
                segment: segment.clone(),
                header,
            }),
            _ => Err(Error::new(
                ErrorKind::Damaged,
                format!(
                    "{}: damaged at byte 0: its header is not valid",
                    segment.path.display()
                ),
            )),
        }
    }
}

/// Reads a segment's header.
///
/// # Errors
/// If it can't be read.
pub(crate) fn read_header(file: &dyn DataFile, path: &Path) -> Result<DecodeResult<SegmentHeader>> {
    let mut head = Buffer::zeroed(BLOCK);
    let read = file.read_exact_at(&mut head, 0);
    read.map_err(|error| Error::io("read the log segment", path, error))?;
    Ok(SegmentHeader::decode(&head))
}

/// The part of the log in one segment.
pub(crate) struct SegmentContents {
    pub batches: Vec<Batch>,
    /// The batches are those of the segment's summary.
    pub summarised: bool,
    /// The offset after the last batch.
    pub end: u64,
    /// The error that ended the reading, if any.
    pub error: Option<Error>,
}

/// Where in a segment the next batch is expected, and what it must have to be that batch.
#[derive(Clone, Debug)]
pub(crate) struct BatchChain {
    pub sequence: U64,
    pub salt: U64,
    pub offset: u64,
    pub previous_crc: U32,
    pub previous_lsn: u64,
    /// Batches end at this offset at the latest.
    pub room: u64,
}

impl BatchChain {
    /// At the beginning of the segment with this header.
    pub(crate) fn new(header: &SegmentHeader, room: u64) -> Self {
        Self {
            sequence: header.sequence,
            salt: header.salt,
            offset: BLOCK as u64,
            previous_crc: header.crc,
            previous_lsn: header.previous_lsn.get(),
            room,
        }
    }

    /// Whether this is the next batch.
    pub(crate) fn follows(&self, batch: &Batch) -> bool {
        let header = &batch.header;
        let in_order = if self.offset == BLOCK as u64 {
            // LSNs of a dropped torn tail are never reused, so a gap is normal here.
            header.first_lsn.get() > self.previous_lsn
        } else {
            header.first_lsn.get() == self.previous_lsn + 1
        };
        let room = self.room.checked_sub(batch.payload_at);
        let fits = room.is_some_and(|room| header.payload_bytes.get() <= room);
        let ours = header.sequence == self.sequence && header.salt == self.salt;
        in_order && fits && ours && header.previous_crc == self.previous_crc
    }

    /// Advances past this batch.
    pub(crate) fn advance(&mut self, batch: &Batch) {
        self.offset = batch.end();
        self.previous_crc = batch.header.crc;
        self.previous_lsn = batch.last_lsn();
    }
}

impl SegmentContents {
    /// Reads the part of the log in a segment of `size` bytes, up to its end or to LSN `limit`,
    /// without looking at other segments. The next segment begins after `limit`; `None`: there is
    /// none. `summaries`: the segment's summary may be used.
    pub(crate) fn read(
        candidate: &Candidate,
        size: u64,
        limit: Option<u64>,
        verify: VerifyScope,
        summaries: bool,
    ) -> Self {
        let mut contents = Self {
            batches: Vec::new(),
            summarised: false,
            end: BLOCK as u64,
            error: None,
        };
        let limit_of_summary = limit.filter(|_| summaries);
        let summary = limit_of_summary.and_then(|limit| summary(candidate, size, limit));
        // A new window starts reading at once.
        let window = || Window::new(&candidate.segment, BLOCK as u64, size);
        let read = match summary {
            Some(batches) => {
                contents.end = batches.last().map_or(contents.end, Batch::end);
                (contents.batches, contents.summarised) = (batches, true);
                match verify {
                    VerifyScope::Tail => Ok(()),
                    VerifyScope::All => contents.verify(&mut window()),
                }
            }
            None => contents.read_batches(candidate, &mut window(), limit),
        };
        contents.error = read.err();
        contents
    }

    /// Only the batches up to LSN `newest`, if it is given: what follows may be on its way to the
    /// medium.
    pub(crate) fn up_to(mut self, newest: Option<u64>) -> Self {
        let Some(newest) = newest else {
            return self;
        };
        let wanted = |batch: &Batch| batch.last_lsn() <= newest;
        let in_range = self.batches.last().is_none_or(wanted);
        self.batches.retain(wanted);
        self.end = self.batches.last().map_or(BLOCK as u64, Batch::end);
        // The error belongs to the batch after the last one that was read.
        let reached = self.batches.last().map(Batch::last_lsn) == Some(newest);
        self.error = self.error.filter(|_| in_range && !reached);
        self
    }

    fn verify(&mut self, window: &mut Window) -> Result<()> {
        let mut batches = self.batches.iter_mut();
        batches.try_for_each(|batch| batch.verify(window))
    }

    fn read_batches(
        &mut self,
        candidate: &Candidate,
        window: &mut Window,
        limit: Option<u64>,
    ) -> Result<()> {
        let log = &candidate.header.log;
        let mut chain = BatchChain::new(&candidate.header, window.size());
        // Read on to the first thing that is not the next batch, even where the next segment says
        // that no batch follows.
        while let Some(mut batch) = Batch::at(window, log, chain.offset)? {
            if !chain.follows(&batch) {
                break;
            }
            batch.verify_payloads(window, true)?;
            let whole = batch.is_whole();
            let (offset, last_lsn) = (batch.offset, batch.last_lsn());
            let beyond = limit.is_some_and(|limit| last_lsn > limit);
            if beyond && !whole {
                // This batch was dropped as torn by an earlier recovery.
                break;
            }
            if beyond {
                // No crash leaves such a batch. If the next segment went missing, the batch would
                // count, and the log would have other contents.
                return Err(Error::new(
                    ErrorKind::Damaged,
                    format!(
                        "{}: damaged at byte {offset}: its records up to LSN {last_lsn} overlap \
                         those of the next segment; restore the log from a copy",
                        candidate.segment.path.display()
                    ),
                ));
            }
            chain.advance(&batch);
            if planted(Mutant::RecoveryStopsEarly)
                && Batch::at(window, log, chain.offset)?.is_none()
            {
                break;
            }
            self.batches.push(batch);
            self.end = chain.offset;
        }
        Ok(())
    }
}

/// The batches in a segment's summary, if that is valid and ends with LSN `limit`, after which the
/// next segment begins.
fn summary(candidate: &Candidate, size: u64, limit: u64) -> Option<Vec<Batch>> {
    let file = &candidate.segment.file;
    // An unreadable summary counts as none.
    let read = |len: usize| {
        let mut bytes = Buffer::for_overwrite(len);
        file.read_exact_at(&mut bytes, size - len as u64).ok()?;
        Some(bytes)
    };
    let block = read(BLOCK)?;
    let (footer, len) = SummaryFooter::peek(&block, size)?;
    let header = &candidate.header;
    let stale = planted(Mutant::SummaryTrustedStale);
    let ours = footer.log == header.log
        && footer.sequence == header.sequence
        && footer.salt == header.salt;
    if !ours && !stale {
        return None;
    }
    let bytes = if len > BLOCK { read(len)? } else { block };
    let mut rest = footer.headers(&bytes)?;
    let mut chain = BatchChain::new(&candidate.header, size - len as u64);
    let mut batches = Vec::new();
    while !rest.is_empty() {
        let (batch, len) = Batch::parse(rest, &header.log, chain.offset)?;
        let follows = batch.header.is_known() && chain.follows(&batch);
        if !follows && !stale {
            return None;
        }
        chain.advance(&batch);
        batches.push(batch);
        rest = &rest[len..];
    }
    // If the last batches were dropped as torn, the summary may still have them.
    if chain.previous_lsn != limit && !stale {
        return None;
    }
    if planted(Mutant::SummaryStopsEarly) {
        batches.pop();
    }
    Some(batches)
}

/// What a segment holds after the end of the log.
#[derive(Default)]
pub(crate) struct StaleTail {
    pub torn: bool,
    /// The highest durable LSN in the headers there.
    pub durable_lsn: u64,
    pub max_lsn: u64,
    pub max_cid: u64,
    pub max_sequence: u64,
}

impl StaleTail {
    /// Looks for headers of this log's batches from `offset` on. `salt`: the segment's salt, if
    /// known; headers with another salt are ignored.
    pub(crate) fn look(
        segment: &Arc<Segment>,
        root: &ControlHeader,
        salt: Option<U64>,
        offset: u64,
    ) -> Result<Self> {
        let size = root.segment_size.get();
        let mut behind = Self::default();
        let mut window = Window::new(segment, offset, size);
        for at in (offset..size).step_by(BLOCK) {
            let Some(batch) = Batch::at(&mut window, &root.log, at)? else {
                continue;
            };
            let header = &batch.header;
            if header.sequence < root.first_sequence || salt.is_some_and(|salt| salt != header.salt)
            {
                continue;
            }
            behind.torn = true;
            behind.durable_lsn = behind.durable_lsn.max(header.durable_lsn.get());
            behind.max_lsn = behind.max_lsn.max(batch.last_lsn());
            behind.max_cid = behind.max_cid.max(header.cid.get());
            behind.max_sequence = behind.max_sequence.max(header.sequence.get());
        }
        Ok(behind)
    }
}
