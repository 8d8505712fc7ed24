//! Reading segments of a log in use.

use crate::error::{Error, ErrorKind, Result};
use crate::format::Control;
use crate::medium::file::Segment;
use crate::mutant::{Mutant, planted};
use crate::parallel;
use crate::recovery::contents::{Candidate, SegmentContents, VerifyScope};
use crate::recovery::scan::{FoundRecord, Visitor};
use crate::sync::Arc;

/// Calls `visit` with each record of these segments up to LSN `until`, in LSN order. All of them
/// are durable. Each segment comes with its last LSN so far; those that end before `until` get no
/// more records. The caller holds the segments, so that they are not recycled. Reads on up to
/// `threads` threads.
///
/// # Errors
/// [`ErrorKind::Damaged`] if a record can't be read.
pub(crate) fn read_live(
    segments: &[(Arc<Segment>, u64)],
    until: u64,
    control: &Control,
    threads: usize,
    visit: Visitor<'_>,
) -> Result<()> {
    let size = control.header.segment_size.get();
    let read = |part: &(Arc<Segment>, u64)| {
        let (segment, last_lsn) = part;
        let candidate = Candidate::of(segment)?;
        // Anything after `until` may be on its way to the medium.
        let limit = (*last_lsn < until).then_some(*last_lsn);
        let contents = SegmentContents::read(&candidate, size, limit, VerifyScope::Tail, true);
        contents.error.map_or(Ok(()), Err)?;
        // All batches of a segment may have been dropped as torn.
        let before = candidate.header.previous_lsn.get();
        let read_until = contents
            .batches
            .last()
            .map_or(before, |last| last.last_lsn());
        let last_lsn = until.min(*last_lsn);
        if read_until < last_lsn {
            let path = segment.path.display();
            let message =
                format!("{path}: damaged: its records up to LSN {last_lsn} can't be read");
            return Err(Error::new(ErrorKind::Damaged, message));
        }
        Ok((segment.clone(), contents.batches))
    };
    let timelines = control.timelines(u64::MAX);
    let until = until.saturating_add(u64::from(planted(Mutant::PointReadsNewer)));
    parallel::in_order(threads, segments.iter(), read, |part| {
        let (segment, batches) = part?;
        for batch in &batches {
            let wrong = batch
                .verified
                .as_ref()
                .map_or(&[][..], |found| &found.wrong);
            for (lsn, descriptor, offset, blocks) in batch.records() {
                if lsn > until {
                    return Ok(false);
                }
                let disk_id = descriptor.disk_id.get();
                visit(FoundRecord {
                    lsn,
                    descriptor,
                    checksums: &batch.checksums[blocks.clone()],
                    batch: &batch.header,
                    segment: &segment,
                    offset,
                    in_base: lsn <= control.applied_lsn(disk_id),
                    counts: descriptor.changes_sectors() && timelines.of(disk_id).has(lsn),
                    damaged: wrong.iter().any(|block| blocks.contains(block)),
                });
            }
        }
        Ok::<_, Error>(true)
    })
}
