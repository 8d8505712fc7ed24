//! Reading a log: which records it holds, where it ends, and whether its end is a torn write or damage.
//!
//! Segments are read in the order of their sequence, and batches in order within them. A segment says where it
//! begins, and the next one where it ends. So several segments are read and verified at a time, and taken in order.
//!
//! Every header says how far the log was durable when it was written. That distinguishes a torn write from rot:
//! - A batch has a valid header and a wrong payload. If it was durable, the medium has changed it since: it stays
//!   part of the log, and reads of the damaged blocks fail. Otherwise its write never completed, and the log ends
//!   before it.
//! - The log ends at the first thing that is not the next batch. If the log was durable beyond that, acknowledged
//!   records are missing, which is reported and never repaired silently. Otherwise everything behind the end is
//!   void.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

use zerocopy::little_endian::U64;

use crate::catalog::control::unknown_version;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{
    self, BLOCK, BatchHeader, Control, ControlHeader, Decoded, Descriptor, SegmentHeader, VERSION,
};
use crate::index::{ExtentMap, Place};
use crate::medium::directory::Medium;
use crate::medium::segment::Segment;
use crate::mutant::{Mutant, planted};
use crate::parallel::Progress;
use crate::recovery::window::Window;
use crate::{Buffer, SECTOR_SIZE, parallel};

/// A segment that holds part of the log.
pub(crate) struct LiveSegment {
    pub segment: Arc<Segment>,
    pub sequence: u64,
    pub last_lsn: u64,
}

/// The state of a log, as a scan found it.
#[derive(Default)]
pub(crate) struct Scan {
    pub live: Vec<LiveSegment>,
    pub free: Vec<Arc<Segment>>,
    /// Segments behind the end of the log whose headers must be wiped before the log is written again.
    pub void: Vec<Arc<Segment>>,
    /// Last record of the log.
    pub last_lsn: u64,
    /// The highest numbers seen anywhere, void or not: they are never given out again.
    pub max_lsn: u64,
    pub max_cid: u64,
    pub max_sequence: u64,
    /// The stamp of the last batch: when it was built.
    pub last_unix_us: u64,
    pub batches: u64,
    /// One more than the highest number of a segment file.
    pub files: u32,
    /// Records above the checkpoint LSN, and their payload bytes.
    pub records: u64,
    pub payload_bytes: u64,
    /// Whether a write that never completed was found behind the end.
    pub torn_tail: bool,
    /// Blocks of records above the checkpoint LSN that the medium has changed.
    pub damaged: Vec<DamagedBlock>,
}

/// A block of a record's payload that was durable and has changed since.
#[derive(Clone, Debug)]
pub(crate) struct DamagedBlock {
    pub lsn: u64,
    pub disk_id: u32,
    /// First sector of the block on its disk.
    pub sector: u64,
    pub sectors: u64,
    pub segment: Arc<Segment>,
    /// Byte offset in the segment.
    pub offset: u64,
}

impl DamagedBlock {
    /// Whether a layer of the block's disk refers to its bytes.
    pub(crate) fn is_needed(&self, layer: &ExtentMap) -> bool {
        let mut needed = false;
        let (sector, sectors) = (self.sector, self.sectors);
        layer.visit(sector, sectors, &mut |piece| {
            let skipped = (piece.sector - sector) * SECTOR_SIZE;
            needed |= matches!(
                piece.place,
                Some(Place::Log { segment, offset })
                    if Arc::ptr_eq(&segment, &self.segment) && offset == self.offset + skipped
            );
        });
        needed
    }
}

/// A record in the log.
pub(crate) struct Found<'a> {
    pub lsn: u64,
    pub descriptor: &'a Descriptor,
    /// The batch that contains the record.
    pub batch: &'a BatchHeader,
    pub segment: &'a Arc<Segment>,
    /// The checksums of the payload's blocks.
    pub checksums: &'a [u32],
    /// Byte offset of the payload in the segment.
    pub offset: u64,
    /// Whether the base image has the record (it is at or below the checkpoint LSN), or the record was given up.
    pub in_base: bool,
    /// Whether the payload is damaged.
    pub damaged: bool,
}

/// Called for each record found.
pub(crate) type Visitor<'a> = &'a mut dyn FnMut(Found<'_>);

struct Candidate {
    segment: Arc<Segment>,
    header: SegmentHeader,
}

/// A batch with a valid header.
struct ScannedBatch {
    header: BatchHeader,
    descriptors: Vec<Descriptor>,
    /// Checksums of the blocks of all payloads.
    checksums: Vec<u32>,
    header_len: u64,
    /// Indexes of the blocks whose checksum is wrong.
    wrong: Vec<usize>,
}

impl ScannedBatch {
    fn last_lsn(&self) -> u64 {
        self.header
            .first_lsn
            .get()
            .saturating_add(self.descriptors.len() as u64 - 1)
    }
}

/// Reads the batch header at `offset`. `None` if there is none with a valid CRC and this log's UUID.
fn batch_at(window: &mut Window, log: &[u8; 16], offset: u64) -> Result<Option<ScannedBatch>> {
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
    // Counting never reaches a number near the end of u64, so this header is not ours.
    if header.log != *log || !format::counted(&numbers) || offset + len as u64 > window.size() {
        return Ok(None);
    }
    let Some((descriptors, checksums)) = header.records(window.bytes(offset, len)?) else {
        return Ok(None);
    };
    if header.version.get() != VERSION {
        return Err(unknown_version(window.path(), header.version.get()));
    }
    Ok(Some(ScannedBatch {
        header,
        descriptors,
        checksums,
        header_len: len.next_multiple_of(BLOCK) as u64,
        wrong: Vec::new(),
    }))
}

/// Reads the whole log in `dir` and calls `visit` for each record in segments still in use, in LSN order. Changes
/// nothing. Calls `progress` after each segment.
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
    // The first segment follows any of the recycled ones; each other segment names the one that it follows.
    let begins = candidates.first().is_some_and(|first| {
        first.header.previous_sequence.get() < first_sequence
            && first.header.previous_lsn.get() <= scan.last_lsn
    });
    let mut taker = Taker {
        candidates: &candidates,
        control,
        durable: root.checkpoint_lsn.get().max(root.copying_lsn.get()),
        last_lsns: Vec::new(),
        held: VecDeque::new(),
        visit,
    };
    let (mut read, mut read_end) = (0_usize, BLOCK as u64);
    if let (true, Some(first)) = (begins, candidates.first()) {
        scan.last_lsn = first.header.previous_lsn.get();
        let parts = candidates.iter().enumerate().map(|(i, candidate)| {
            let next = candidates.get(i + 1).map(|next| &next.header);
            let limit = next
                .filter(|next| next.previous_sequence == candidate.header.sequence)
                .map(|next| next.previous_lsn.get());
            (candidate, limit)
        });
        let read_part = |(candidate, limit)| (limit, read_segment(candidate, size, limit));
        parallel::in_order(medium.threads(), parts, read_part, |(limit, contents)| {
            (read, read_end) = (read + 1, contents.end);
            let last_lsn = taker.take_segment(contents, &mut scan)?;
            progress(read as u64 * size, total);
            // Without a limit no segment follows this one.
            Ok::<_, Error>(limit == Some(last_lsn))
        })?;
    }

    // The rest is stale bytes, a torn tail, or evidence that acknowledged records are missing.
    let taken = match taker.held.front() {
        Some(held) => (held.part, held.offset),
        None => (read.saturating_sub(1), read_end),
    };
    let tails = candidates[..read].iter().enumerate().skip(taken.0);
    let tails = tails.map(|(part, candidate)| {
        let salt = Some(candidate.header.salt);
        let offset = if part == taken.0 {
            taken.1
        } else {
            BLOCK as u64
        };
        (&candidate.segment, salt, offset)
    });
    let behind = candidates[read..]
        .iter()
        .map(|candidate| &candidate.segment);
    let behind = behind.chain(&suspects);
    let behind = behind.map(|segment| (segment, None, BLOCK as u64));
    let look = |(segment, salt, offset)| look_behind(segment, root, salt, offset);
    let mut passed = taken.0.min(read) as u64;
    parallel::in_order(medium.threads(), tails.chain(behind), look, |seen| {
        let seen = seen?;
        scan.torn_tail |= seen.torn;
        taker.durable = taker.durable.max(seen.durable_lsn);
        scan.max_lsn = scan.max_lsn.max(seen.max_lsn);
        scan.max_cid = scan.max_cid.max(seen.max_cid);
        scan.max_sequence = scan.max_sequence.max(seen.max_sequence);
        passed += 1;
        // Progress has been reported for the segments of the tails already.
        if passed > read as u64 {
            progress(passed * size, total);
        }
        Ok::<_, Error>(true)
    })?;
    taker.settle(&mut scan);
    // Batches that are still held were never durable: the log ends before them.
    let (mut end, mut end_offset) = (read, read_end);
    for held in taker.held.iter().rev() {
        (end, end_offset) = (held.part + 1, held.offset);
        scan.torn_tail = true;
        scan.max_lsn = scan.max_lsn.max(held.batch.last_lsn());
        scan.max_cid = scan.max_cid.max(held.batch.header.cid.get());
    }
    let evidence = taker.durable;
    let lives = candidates[..end].iter().zip(&taker.last_lsns);
    scan.live = lives
        .map(|(candidate, &last_lsn)| LiveSegment {
            segment: candidate.segment.clone(),
            sequence: candidate.header.sequence.get(),
            last_lsn,
        })
        .collect();
    scan.last_lsn = scan.last_lsn.max(root.checkpoint_lsn.get());
    if evidence > scan.last_lsn {
        let (path, offset) = match end.checked_sub(1) {
            Some(last) => (candidates[last].segment.path.as_path(), end_offset),
            None => {
                let first = candidates.first();
                (first.map_or(dir, |first| first.segment.path.as_path()), 0)
            }
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
        if slot >= root.max_segments.get() {
            return Err(Error::new(
                ErrorKind::Damaged,
                format!(
                    "{}: not a file of this log, whose segment numbers are below {}; move it elsewhere",
                    segment.path.display(),
                    root.max_segments
                ),
            ));
        }
        scan.files = scan.files.max(slot + 1);
        let segment = Arc::new(segment);
        let len = segment
            .file
            .len()
            .map_err(|e| Error::io("read its metadata", &segment.path, e))?;
        if len != size {
            return Err(Error::new(
                ErrorKind::Damaged,
                format!(
                    "{}: truncated: {len} bytes instead of {size}; restore the log from a copy",
                    segment.path.display()
                ),
            ));
        }
        let mut head = Buffer::zeroed(BLOCK);
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
            Decoded::Valid(_) => scan.free.push(segment),
            Decoded::Invalid => suspects.push(segment),
        }
    }
    candidates.sort_by_key(|candidate| candidate.header.sequence.get());
    Ok((candidates, suspects))
}

/// The part of the log in one segment.
struct Contents {
    /// Each batch with the byte offset of its first payload.
    batches: Vec<(ScannedBatch, u64)>,
    /// The offset behind the last batch.
    end: u64,
    /// The error that ended the reading, if any.
    error: Option<Error>,
}

/// Reads the batches of one segment up to its end or to LSN `limit`, without looking at other segments.
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
    // Reads on to the first thing that is not the next batch, even where the next segment says that no batch
    // follows.
    loop {
        let offset = contents.end;
        let Some(mut batch) = batch_at(window, &candidate.header.log, offset)? else {
            break;
        };
        let (header, last_lsn) = (batch.header, batch.last_lsn());
        let first = offset == BLOCK as u64;
        let in_order = match first {
            // LSNs of a dropped torn tail are never given out again, so a gap is normal here.
            true => header.first_lsn.get() > previous_lsn,
            false => header.first_lsn.get() == previous_lsn + 1,
        };
        let payload_at = offset + batch.header_len;
        let fits = header.payload_bytes.get() <= size.saturating_sub(payload_at);
        let ours =
            header.sequence == candidate.header.sequence && header.salt == candidate.header.salt;
        let chained = header.previous_crc == previous_crc;
        if !(in_order && fits && ours && chained) {
            break;
        }
        batch.wrong = wrong_blocks(window, &batch, payload_at)?;
        let beyond = limit.is_some_and(|limit| last_lsn > limit);
        if beyond && !batch.wrong.is_empty() {
            // The batch was dropped as torn when the log was recovered.
            break;
        }
        if beyond {
            // No crash leaves such a batch. If the next segment were missing, the batch would count, and the log
            // would change its contents.
            return Err(Error::new(
                ErrorKind::Damaged,
                format!(
                    "{}: damaged at byte {offset}: its records up to LSN {last_lsn} overlap those of the next \
                     segment; restore the log from a copy",
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

/// Takes the batches that were read as part of the log, in order.
struct Taker<'a> {
    candidates: &'a [Candidate],
    control: &'a Control,
    /// The log was durable up to this LSN, as far as it has been read.
    durable: u64,
    /// For each segment that was read: the last LSN taken from it or from segments before it.
    last_lsns: Vec<u64>,
    /// Batches from the first one with a wrong payload on: it is not known yet whether that one was durable.
    held: VecDeque<Held>,
    visit: Visitor<'a>,
}

/// A batch that has been read but not taken.
struct Held {
    /// The index of its candidate.
    part: usize,
    batch: ScannedBatch,
    /// Byte offset of its header in the segment.
    offset: u64,
}

impl Taker<'_> {
    /// Takes the batches of the next segment. Returns the segment's last LSN, taken or not.
    fn take_segment(&mut self, contents: Contents, scan: &mut Scan) -> Result<u64> {
        let part = self.last_lsns.len();
        self.last_lsns.push(scan.last_lsn);
        for (batch, payload_at) in contents.batches {
            self.durable = self.durable.max(batch.header.durable_lsn.get());
            self.held.push_back(Held {
                part,
                offset: payload_at - batch.header_len,
                batch,
            });
            self.settle(scan);
        }
        let last = self.held.back().map(|held| held.batch.last_lsn());
        contents
            .error
            .map_or(Ok(last.unwrap_or(scan.last_lsn)), Err)
    }

    /// Takes the batches that are known to be part of the log: all up to the next one that may be torn.
    fn settle(&mut self, scan: &mut Scan) {
        let durable = self.durable;
        let known =
            |held: &mut Held| held.batch.wrong.is_empty() || held.batch.last_lsn() <= durable;
        while let Some(held) = self.held.pop_front_if(known) {
            self.take(&held, scan);
        }
    }

    fn take(&mut self, held: &Held, scan: &mut Scan) {
        let Held {
            part,
            batch,
            offset,
        } = held;
        let (header, last_lsn) = (&batch.header, batch.last_lsn());
        let segment = &self.candidates[*part].segment;
        let mut at = offset + batch.header_len;
        let mut first_block = 0;
        for (lsn, descriptor) in (header.first_lsn.get()..).zip(&batch.descriptors) {
            let blocks = first_block..first_block + descriptor.checksums();
            first_block = blocks.end;
            let len = descriptor.payload_len();
            segment.note(|table| table.add(at, len, &batch.checksums[blocks.clone()]));
            let in_base = lsn <= self.control.applied_lsn(descriptor.disk_id.get())
                && !planted(Mutant::RecoveryAcceptsStale);
            let wrong = batch.wrong.iter().filter(|block| blocks.contains(block));
            let damaged = wrong.clone().next().is_some();
            if !in_base {
                scan.records += 1;
                scan.payload_bytes += len;
                scan.damaged.extend(wrong.map(|block| {
                    let skipped = ((block - blocks.start) * BLOCK) as u64;
                    DamagedBlock {
                        lsn,
                        disk_id: descriptor.disk_id.get(),
                        sector: descriptor.sector.get() + skipped / SECTOR_SIZE,
                        sectors: (len - skipped).min(BLOCK as u64) / SECTOR_SIZE,
                        segment: segment.clone(),
                        offset: at + skipped,
                    }
                }));
            }
            (self.visit)(Found {
                lsn,
                descriptor,
                checksums: &batch.checksums[blocks],
                batch: header,
                segment,
                offset: at,
                in_base,
                damaged,
            });
            at += len;
        }
        scan.batches += 1;
        scan.last_lsn = last_lsn;
        self.last_lsns[*part..].fill(last_lsn);
        scan.last_unix_us = scan.last_unix_us.max(header.unix_us.get());
        scan.max_lsn = scan.max_lsn.max(last_lsn);
        scan.max_cid = scan.max_cid.max(header.cid.get());
    }
}

/// Which blocks of the batch's payloads have a wrong checksum. The payloads begin at `payload_at`.
fn wrong_blocks(window: &mut Window, batch: &ScannedBatch, payload_at: u64) -> Result<Vec<usize>> {
    let mut wrong = Vec::new();
    if planted(Mutant::RecoverySkipsChecksum) {
        return Ok(wrong);
    }
    let (mut at, mut number) = (payload_at, 0);
    for descriptor in &batch.descriptors {
        let end = at + descriptor.payload_len();
        while at < end {
            let block_end = end.min(at + BLOCK as u64);
            let mut crc = 0;
            while at < block_end {
                let bytes = window.some(at, block_end)?;
                crc = crc32c::crc32c_append(crc, bytes);
                at += bytes.len() as u64;
            }
            if crc != batch.checksums[number] {
                wrong.push(number);
            }
            number += 1;
        }
    }
    Ok(wrong)
}

/// What a segment holds behind the end of the log.
#[derive(Default)]
struct Behind {
    torn: bool,
    /// How far the log was durable when the headers there were written.
    durable_lsn: u64,
    max_lsn: u64,
    max_cid: u64,
    max_sequence: u64,
}

/// Looks for headers of this log's batches from `offset` on. `salt`: the segment's salt, if known; headers with
/// another salt are ignored.
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
    let wiped = segment.file.write_all_at(&SegmentHeader::blank(), 0);
    let wiped = wiped.and_then(|()| segment.file.sync_data());
    wiped.map_err(|error| Error::io("wipe the void log segment", &segment.path, error))
}
