//! Reading a log: which records it holds, where it ends, and whether its end is a torn write or damage.
//!
//! Segments are read in the order of their sequence, batches in order within them. Each segment says where it begins and
//! where it ends: so several are read and verified at a time, and taken in order. The log ends at the first
//! thing that is not the next batch. What is behind the end is void if it can have been a write that never
//! completed: every later header tells how far the log was durable when it was written, and if that reaches
//! past the end, acknowledged records are missing, and that is reported, never repaired in silence.

use std::path::Path;
use std::sync::Arc;

use zerocopy::little_endian::U64;

use crate::Buffer;
use crate::error::{Error, ErrorKind, Result};
use crate::file;
use crate::format::{
    self, BLOCK, BatchHeader, Control, ControlHeader, Decoded, Descriptor, SegmentHeader, VERSION,
};
use crate::mutant::{Mutant, planted};
use crate::parallel;
use crate::segment::{Medium, Segment};
use crate::transfer::Progress;
use crate::window::Window;

/// A segment that holds part of the log.
pub(crate) struct LiveSegment {
    pub segment: Arc<Segment>,
    pub sequence: u64,
    pub last_lsn: u64,
}

/// What a log was found to hold.
#[derive(Default)]
pub(crate) struct Scan {
    pub live: Vec<LiveSegment>,
    pub free: Vec<Arc<Segment>>,
    /// Segments behind the end of the log whose headers must be wiped before the log is written again.
    pub void: Vec<Arc<Segment>>,
    /// Last record of the log.
    pub last_lsn: u64,
    /// The highest numbers seen anywhere, void or not: none of them is given out again.
    pub max_lsn: u64,
    pub max_cid: u64,
    pub max_sequence: u64,
    /// When the last batch was built, by its stamp.
    pub last_unix_us: u64,
    pub batches: u64,
    /// One more than the highest number of a segment file.
    pub files: u32,
    /// Records above the checkpoint LSN, and their payload bytes.
    pub records: u64,
    pub payload_bytes: u64,
    /// A write that never completed was found behind the end.
    pub torn_tail: bool,
}

/// A record found.
pub(crate) struct Found<'a> {
    pub lsn: u64,
    pub descriptor: &'a Descriptor,
    /// The batch that it came in.
    pub batch: &'a BatchHeader,
    pub segment: &'a Arc<Segment>,
    /// Byte offset of its payload in the segment.
    pub offset: u64,
    /// It is at or below the checkpoint LSN: the base image has it.
    pub in_base: bool,
}

/// What is called for each record found.
pub(crate) type Visitor<'a> = &'a mut dyn FnMut(Found<'_>);

struct Candidate {
    segment: Arc<Segment>,
    header: SegmentHeader,
}

/// A batch whose header is right in itself.
struct Batch {
    header: BatchHeader,
    descriptors: Vec<Descriptor>,
    header_len: u64,
}

impl Batch {
    fn last_lsn(&self) -> u64 {
        self.header
            .first_lsn
            .get()
            .saturating_add(self.descriptors.len() as u64 - 1)
    }
}

/// Reads the batch header at `offset`, if one is there: CRC right, this log's.
fn batch_at(window: &mut Window, log: &[u8; 16], offset: u64) -> Result<Option<Batch>> {
    if offset + BLOCK as u64 > window.size() {
        return Ok(None);
    }
    let block = window.bytes(offset, BLOCK)?;
    let Some((header, len)) = BatchHeader::peek(block) else {
        return Ok(None);
    };
    let numbers = [
        header.sequence,
        header.cid,
        header.first_lsn,
        header.durable_lsn,
    ];
    // A number near the end of u64 can't be reached by counting: not a header of ours.
    if header.log != *log || !format::counted(&numbers) || offset + len as u64 > window.size() {
        return Ok(None);
    }
    let Some(descriptors) = header.descriptors(window.bytes(offset, len)?) else {
        return Ok(None);
    };
    if header.version.get() != VERSION {
        return Err(unknown_version(window.path(), header.version.get()));
    }
    Ok(Some(Batch {
        header,
        descriptors,
        header_len: len.next_multiple_of(BLOCK) as u64,
    }))
}

pub(crate) fn unknown_version(path: &Path, version: u32) -> Error {
    Error::new(
        ErrorKind::UnsupportedVersion,
        format!(
            "{}: log format version {version}; this program knows version {VERSION}: use the one that wrote it",
            path.display()
        ),
    )
}

/// Reads the whole log in `dir` and calls `visit` for each record in segments still in use, in LSN order.
/// Changes nothing. `progress` is told after each segment.
///
/// # Errors
/// [`ErrorKind::Damaged`] if acknowledged records are missing or a segment file is truncated.
pub(crate) fn scan(
    medium: &dyn Medium,
    dir: &Path,
    control: &Control,
    visit: Visitor<'_>,
    progress: Progress<'_>,
) -> Result<Scan> {
    let (root, size) = (&control.header, control.header.segment_size.get());
    let first_sequence = root.first_sequence.get();
    let mut scan = Scan {
        last_lsn: root.checkpoint_lsn.get(),
        max_lsn: root.next_lsn.get().saturating_sub(1),
        max_cid: root.next_cid.get().saturating_sub(1),
        max_sequence: first_sequence.saturating_sub(1),
        ..Scan::default()
    };
    let (candidates, suspects) = classify(medium, control, &mut scan)?;

    let total = (candidates.len() + suspects.len()) as u64 * size;
    // The first begins anywhere in what was freed; each of the others says behind which it comes.
    let begins = candidates.first().is_some_and(|first| {
        first.header.previous_sequence.get() < first_sequence
            && first.header.previous_lsn.get() <= scan.last_lsn
    });
    let (mut end, mut end_offset) = (0, None);
    if let (true, Some(first)) = (begins, candidates.first()) {
        scan.last_lsn = first.header.previous_lsn.get();
        let parts = candidates.iter().enumerate().map(|(i, candidate)| {
            let next = candidates.get(i + 1).map(|next| &next.header);
            let limit = next
                .filter(|next| next.previous_sequence == candidate.header.sequence)
                .map(|next| next.previous_lsn.get());
            (candidate, limit)
        });
        let read = |(candidate, limit)| (limit, read_segment(candidate, size, limit));
        let checkpoint_lsn = root.checkpoint_lsn.get();
        parallel::in_order(medium.threads(), parts, read, |(limit, contents)| {
            let candidate = &candidates[end];
            end_offset = Some((end, contents.end));
            end += 1;
            take_segment(candidate, contents, checkpoint_lsn, &mut scan, visit)?;
            progress(end as u64 * size, total);
            // Without a limit there is no next, or none that comes behind this one.
            Ok(limit == Some(scan.last_lsn))
        })?;
    }
    scan.last_lsn = scan.last_lsn.max(root.checkpoint_lsn.get());

    // Behind the end: stale bytes, a torn tail, or evidence that acknowledged records are gone.
    let mut evidence = root.copying_lsn.get();
    let tail = end_offset.map(|(i, offset)| {
        let candidate = &candidates[i];
        (&candidate.segment, Some(candidate.header.salt), offset)
    });
    let behind = candidates[end..].iter().map(|candidate| &candidate.segment);
    let behind = behind.chain(&suspects);
    let behind = behind.map(|segment| (segment, None, BLOCK as u64));
    let look = |(segment, salt, offset)| look_behind(segment, root, salt, offset);
    let mut passed = (end - usize::from(tail.is_some())) as u64;
    parallel::in_order(
        medium.threads(),
        tail.into_iter().chain(behind),
        look,
        |seen| {
            let seen = seen?;
            scan.torn_tail |= seen.torn;
            evidence = evidence.max(seen.durable_lsn);
            scan.max_lsn = scan.max_lsn.max(seen.max_lsn);
            scan.max_cid = scan.max_cid.max(seen.max_cid);
            scan.max_sequence = scan.max_sequence.max(seen.max_sequence);
            passed += 1;
            // The tail has been told of.
            if passed > end as u64 {
                progress(passed * size, total);
            }
            Ok::<_, Error>(true)
        },
    )?;
    if evidence > scan.last_lsn {
        let (path, offset) = match end_offset {
            Some((i, offset)) => (candidates[i].segment.path.clone(), offset),
            None => (
                candidates
                    .first()
                    .map_or(dir.to_path_buf(), |c| c.segment.path.clone()),
                0,
            ),
        };
        return Err(Error::new(
            ErrorKind::Damaged,
            format!(
                "{}: damaged at byte {offset}: records from LSN {} to {evidence} were acknowledged and can't be read; \
                 restore the log from a copy",
                path.display(),
                scan.last_lsn + 1,
            ),
        ));
    }
    scan.void = candidates[end..]
        .iter()
        .map(|candidate| candidate.segment.clone())
        .collect();
    scan.free.extend(suspects);
    Ok(scan)
}

/// Sorts segment files into those that claim to be part of the log, free ones, and those with an unreadable
/// first block that may have been part of it.
fn classify(
    medium: &dyn Medium,
    control: &Control,
    scan: &mut Scan,
) -> Result<(Vec<Candidate>, Vec<Arc<Segment>>)> {
    let (root, size) = (&control.header, control.header.segment_size.get());
    let (mut candidates, mut suspects) = (Vec::new(), Vec::new());
    for (slot, segment) in medium.segments()? {
        scan.files = scan.files.max(slot + 1);
        let segment = Arc::new(segment);
        let len = segment
            .file
            .len()
            .map_err(|e| Error::io("look at", &segment.path, e))?;
        if len != size {
            return Err(Error::new(
                ErrorKind::Damaged,
                format!(
                    "{}: truncated: {len} bytes instead of {size}; restore the log from a copy",
                    segment.path.display()
                ),
            ));
        }
        // The header, and the block behind it: the first batch is written together with the header, and a torn
        // write may have left only one of them.
        let mut head = Buffer::zeroed(2 * BLOCK);
        let read = segment.file.read_exact_at(&mut head, 0);
        read.map_err(|error| Error::io("read the log segment", &segment.path, error))?;
        match SegmentHeader::decode(&head) {
            Decoded::Version(version) => return Err(unknown_version(&segment.path, version)),
            Decoded::Valid(header)
                if header.log == root.log
                    && (header.sequence >= root.first_sequence
                        || planted(Mutant::RecoveryAcceptsStale)) =>
            {
                scan.max_sequence = scan.max_sequence.max(header.sequence.get());
                candidates.push(Candidate { segment, header });
            }
            Decoded::Invalid if head.iter().any(|&byte| byte != 0) => suspects.push(segment),
            _ => scan.free.push(segment),
        }
    }
    candidates.sort_by_key(|candidate| candidate.header.sequence.get());
    Ok((candidates, suspects))
}

/// What one segment holds of the log.
struct Contents {
    /// Each with the byte offset of its first payload.
    batches: Vec<(Batch, u64)>,
    /// The offset behind the last.
    end: u64,
    /// What is wrong behind them.
    error: Option<Error>,
}

/// Reads the batches of one segment up to its end or to LSN `limit`. It depends on no other segment.
fn read_segment(candidate: &Candidate, size: u64, limit: Option<u64>) -> Contents {
    let mut contents = Contents {
        batches: Vec::new(),
        end: BLOCK as u64,
        error: None,
    };
    let mut window = Window::new(&candidate.segment, contents.end, size);
    contents.error = read_batches(candidate, &mut window, limit, &mut contents).err();
    contents
}

fn read_batches(
    candidate: &Candidate,
    window: &mut Window,
    limit: Option<u64>,
    contents: &mut Contents,
) -> Result<()> {
    let size = window.size();
    let mut previous_crc = candidate.header.crc;
    let mut previous_lsn = candidate.header.previous_lsn.get();
    // To the first thing that is not the next batch, also where the next segment says that there is none.
    loop {
        let offset = contents.end;
        let Some(batch) = batch_at(window, &candidate.header.log, offset)? else {
            break;
        };
        let (header, last_lsn) = (&batch.header, batch.last_lsn());
        let first = offset == BLOCK as u64;
        let in_order = match first {
            // LSNs of a dropped torn tail are never given out again: a gap is normal here.
            true => header.first_lsn.get() > previous_lsn,
            false => header.first_lsn.get() == previous_lsn + 1,
        };
        let payload_at = offset + batch.header_len;
        let fits = header.payload_bytes.get() <= size.saturating_sub(payload_at);
        let ours =
            header.sequence == candidate.header.sequence && header.salt == candidate.header.salt;
        let chained = header.previous_crc == previous_crc;
        if !(in_order && fits && ours && chained && payloads_right(window, &batch, payload_at)?) {
            break;
        }
        if limit.is_some_and(|limit| last_lsn > limit) {
            // No crash leaves this. Without the next segment the batch would count: the log would change its mind.
            return Err(Error::new(
                ErrorKind::Damaged,
                format!(
                    "{}: damaged at byte {offset}: its records to LSN {last_lsn} go beyond where the next segment \
                     begins; restore the log from a copy",
                    candidate.segment.path.display()
                ),
            ));
        }
        let payload: u64 = batch.descriptors.iter().map(Descriptor::payload_len).sum();
        let next = (payload_at + payload).next_multiple_of(BLOCK as u64);
        if planted(Mutant::RecoveryStopsEarly)
            && batch_at(window, &candidate.header.log, next)?.is_none()
        {
            break;
        }
        (previous_crc, previous_lsn) = (header.crc, last_lsn);
        contents.batches.push((batch, payload_at));
        contents.end = next;
    }
    Ok(())
}

/// Takes what a segment holds for the next part of the log.
fn take_segment(
    candidate: &Candidate,
    contents: Contents,
    checkpoint_lsn: u64,
    scan: &mut Scan,
    visit: Visitor<'_>,
) -> Result<()> {
    for (batch, payload_at) in &contents.batches {
        let (header, last_lsn) = (&batch.header, batch.last_lsn());
        let mut at = *payload_at;
        for (lsn, descriptor) in (header.first_lsn.get()..).zip(&batch.descriptors) {
            let in_base = lsn <= checkpoint_lsn && !planted(Mutant::RecoveryAcceptsStale);
            if !in_base {
                scan.records += 1;
                scan.payload_bytes += descriptor.payload_len();
            }
            visit(Found {
                lsn,
                descriptor,
                batch: header,
                segment: &candidate.segment,
                offset: at,
                in_base,
            });
            at += descriptor.payload_len();
        }
        scan.batches += 1;
        scan.last_lsn = last_lsn;
        // Logs of earlier versions may hold steps back.
        scan.last_unix_us = scan.last_unix_us.max(header.unix_us.get());
        scan.max_lsn = scan.max_lsn.max(last_lsn);
        scan.max_cid = scan.max_cid.max(header.cid.get());
    }
    if let Some(error) = contents.error {
        return Err(error);
    }
    scan.live.push(LiveSegment {
        segment: candidate.segment.clone(),
        sequence: candidate.header.sequence.get(),
        last_lsn: scan.last_lsn,
    });
    Ok(())
}

fn payloads_right(window: &mut Window, batch: &Batch, payload_at: u64) -> Result<bool> {
    let mut at = payload_at;
    for descriptor in &batch.descriptors {
        let (end, mut crc) = (at + descriptor.payload_len(), 0);
        let skipped = at == end || planted(Mutant::RecoverySkipsChecksum);
        while at < end && !skipped {
            let bytes = window.some(at, end)?;
            crc = crc32c::crc32c_append(crc, bytes);
            at += bytes.len() as u64;
        }
        if !skipped && crc != descriptor.payload_crc.get() {
            return Ok(false);
        }
        at = end;
    }
    Ok(true)
}

/// What lies behind the end of the log in one segment.
#[derive(Default)]
struct Behind {
    torn: bool,
    /// How far the log was durable when it was written.
    durable_lsn: u64,
    max_lsn: u64,
    max_cid: u64,
    max_sequence: u64,
}

/// Looks for headers of this log's batches from `offset` on, with the salt if the segment's is known.
fn look_behind(
    segment: &Arc<Segment>,
    root: &ControlHeader,
    salt: Option<U64>,
    offset: u64,
) -> Result<Behind> {
    let size = root.segment_size.get();
    let mut behind = Behind::default();
    let mut window = Window::new(segment, offset, size);
    for at in (offset..size).step_by(BLOCK) {
        let Some(batch) = batch_at(&mut window, &root.log, at)? else {
            continue;
        };
        let header = &batch.header;
        if header.sequence < root.first_sequence || salt.is_some_and(|salt| salt != header.salt) {
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

/// Wipes the first block of a void segment, so that it can't be taken for part of the log again.
pub(crate) fn wipe(segment: &Segment) -> Result<()> {
    let wiped = file::write_zeroes(segment.file.as_ref(), 0, BLOCK as u64, &mut |_| {})
        .and_then(|()| segment.file.sync_data());
    wiped.map_err(|error| Error::io("wipe the void log segment", &segment.path, error))
}
