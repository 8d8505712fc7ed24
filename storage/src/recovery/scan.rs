//! Reading a log: which records it holds, where it ends, and whether its end is a torn write or
//! damage.
//!
//! Segments are processed in the order of their sequence, and batches in order within them. A
//! segment says where it begins, and the next one says where it ends, so several segments can be
//! read and verified in parallel. A sealed segment's summary repeats its headers, so only the
//! summary is read.
//!
//! Every batch header says how far the log was durable when it was written, and so does the control
//! file. That tells a torn write from rot:
//! - A batch has a valid header and a wrong payload. If it was durable, it was damaged later: it
//!   stays part of the log, and reads of the damaged blocks fail. Otherwise its write never
//!   completed, and the log ends before it.
//! - The log ends at the first thing that is not the next batch. If the log was durable beyond
//!   that, acknowledged records are missing, which is reported and never repaired silently.
//!   Otherwise everything after the end is void.

use std::collections::VecDeque;
use std::path::Path;
use std::sync::Arc;

use zerocopy::little_endian::U64;

use crate::catalog::control::{ControlFile, unknown_version};
use crate::catalog::rewind::Timelines;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{
    BLOCK, BatchHeader, Control, DecodeResult, Descriptor, DescriptorKind, Rewind, SegmentHeader,
};
use crate::index::{ExtentMap, Location};
use crate::log::clock::passed_between;
use crate::log::commit::Commit;
use crate::log::ring::LiveSegment;
use crate::medium::directory::Medium;
use crate::medium::file::Segment;
use crate::mutant::{Mutant, planted};
use crate::parallel::Progress;
use crate::recovery::batch::Batch;
use crate::recovery::contents::{Candidate, SegmentContents, StaleTail, VerifyScope, read_header};
use crate::{SECTOR_SIZE, parallel};

/// The state of a log, as a scan found it.
#[derive(Default)]
pub(crate) struct Scan {
    /// Segments that hold parts of the log.
    pub live: Vec<LiveSegment>,
    /// Segments that hold none, see [`release`](Self::release).
    free: Vec<Arc<Segment>>,
    /// Segments after the end of the log, whose headers must be wiped before the log is written
    /// again.
    void: Vec<Arc<Segment>>,
    /// Segments with a damaged header, which may have been part of the log.
    suspects: Vec<Arc<Segment>>,
    /// The highest numbers seen anywhere, void or not; never reused.
    pub max_lsn: u64,
    pub max_cid: u64,
    pub max_sequence: u64,
    /// The last record of the log, and when its batch was built.
    pub last: Commit,
    /// The last record that was read. The checkpoint may be past it, if its segment was recycled.
    pub read_to: u64,
    /// The rewinds that the base images have not passed, in the order of their LSNs.
    pub rewinds: Vec<Rewind>,
    /// Microseconds that have certainly passed from the oldest batch to the newest.
    pub passed: u64,
    /// The record at the [horizon](Control::horizon); if it has left the log, its LSN with the
    /// group and the time of the oldest record.
    pub horizon: Commit,
    pub batches: u64,
    /// One more than the highest number of a segment file.
    pub files: u32,
    /// Records that count now, and their payload bytes.
    pub records: u64,
    pub payload_bytes: u64,
    /// Whether a write that never completed was found after the end.
    pub torn_tail: bool,
    /// Damaged blocks of records that count now, as far as they were verified.
    pub damaged: Vec<DamagedBlock>,
    /// Segment and byte offset of damaged batch headers that are intact in the segment's summary.
    pub damaged_headers: Vec<(Arc<Segment>, u64)>,
}

impl Scan {
    /// How many segments there are.
    pub(crate) fn segments(&self) -> usize {
        self.live.len() + self.free.len() + self.void.len() + self.suspects.len()
    }

    /// Hands out the segments that hold no part of a log that was [read
    /// durably](crate::recovery::replay::read_durable). This is the only way to get them, and the
    /// caller may overwrite or remove them: by then, both slots of the control file have what these
    /// segments prove, namely how far the log was durable (so that damage is never taken for a torn
    /// write) and the highest numbers seen anywhere. Void segments are wiped.
    pub(crate) fn release(&mut self, control: &mut ControlFile) -> Result<Vec<Arc<Segment>>> {
        let seen = if planted(Mutant::LsnRestart) {
            self.last.lsn
        } else {
            self.max_lsn.max(self.last.lsn)
        };
        debug_assert!(
            control.control.header.durable_lsn >= self.read_to,
            "what was read is on the medium"
        );
        let next_cid = self.max_cid + 1;
        let next_lsn = if planted(Mutant::LsnRestart) {
            seen + 1
        } else {
            // The first record after a change that took an LSN must not have a lower one, or the
            // next open would take its bytes for what that change has given up.
            let changed = control.control.newest_change();
            let next_lsn = control.control.header.next_lsn.get();
            next_lsn.max(seen + 1).max(changed)
        };
        let note = |control: &mut Control| {
            control.header.next_lsn = U64::new(next_lsn);
            control.header.next_cid = U64::new(next_cid);
        };
        if planted(Mutant::ProofInOneSlot) {
            control.change(note)?
        } else {
            control.change_both(note)?
        }
        self.void.iter().try_for_each(|segment| wipe(segment))?;
        for suspect in &self.suspects {
            tracing::warn!(
                "{}: its header is damaged; the log is complete without it, and reuses the file",
                suspect.path.display()
            );
        }
        let mut released = std::mem::take(&mut self.free);
        // Last, so that they are overwritten last.
        released.append(&mut self.void);
        released.append(&mut self.suspects);
        Ok(released)
    }

    /// Refuses to remove files of a log in which damage was found: those files may be all that is
    /// left of the data.
    pub(crate) fn refuse_damaged(&self, log_dir: &Path) -> Result<()> {
        let dir = log_dir.display();
        let told = match (self.damaged.first(), self.suspects.first()) {
            (Some(block), _) => format!(
                "{}: record {} is damaged at byte {}, so no file of the log in {dir} is removed; \
                 'walvisor disk check' lists the disk and the sectors: overwrite them, restore the \
                 disk from a copy, or discard its records with 'walvisor disk discard'",
                block.segment.path.display(),
                block.lsn,
                block.offset,
            ),
            (None, Some(suspect)) => format!(
                "{0}: its header is damaged, so it may have been part of the log in {dir}; if \
                 'walvisor disk check' finds nothing missing, move {0} elsewhere, then try again",
                suspect.path.display(),
            ),
            (None, None) => return Ok(()),
        };
        Err(Error::new(ErrorKind::Damaged, told))
    }

    /// The newest state of the log's disks.
    pub(crate) fn newest(&self, control: &Control) -> Commit {
        Commit {
            lsn: self.last.lsn.max(control.newest_change()),
            ..self.last
        }
    }

    /// Notes the numbers of a batch, whether or not it is part of the log.
    fn note_numbers(&mut self, batch: &Batch) {
        self.max_lsn = self.max_lsn.max(batch.last_lsn());
        self.max_cid = self.max_cid.max(batch.header.cid.get());
    }
}

/// A block of a payload that was durable and was damaged later.
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
    /// Whether a layer of its disk refers to the block.
    pub(crate) fn is_needed(&self, layer: &ExtentMap) -> bool {
        let mut needed = false;
        let (sector, sectors) = (self.sector, self.sectors);
        layer.visit(sector, sectors, &mut |piece| {
            let skipped = (piece.sector - sector) * SECTOR_SIZE;
            needed |= matches!(
                piece.place,
                Some(Location::Log { segment, offset })
                    if Arc::ptr_eq(&segment, &self.segment) && offset == self.offset + skipped
            );
        });
        needed
    }
}

/// A record in the log.
pub(crate) struct FoundRecord<'a> {
    pub lsn: u64,
    pub descriptor: &'a Descriptor,
    /// The batch that contains the record.
    pub batch: &'a BatchHeader,
    pub segment: &'a Arc<Segment>,
    /// The checksums of the payload's blocks.
    pub checksums: &'a [u32],
    /// Byte offset of the payload in the segment.
    pub offset: u64,
    /// Whether the base image has the record (at or below the checkpoint LSN), or the record was
    /// discarded.
    pub in_base: bool,
    /// Whether the record counts: it changes sectors of its disk, is not in the base image, and no
    /// rewind has undone it.
    pub counts: bool,
    /// Whether the payload is damaged, as far as it was verified.
    pub damaged: bool,
}

impl FoundRecord<'_> {
    /// The record's position in the log's history.
    pub(crate) fn commit(&self) -> Commit {
        Commit {
            lsn: self.lsn,
            cid: self.batch.cid.get(),
            unix_us: self.batch.unix_us.get(),
        }
    }

    /// Whether this is a mark, which changes no disk.
    pub(crate) fn is_mark(&self) -> bool {
        self.descriptor.kind() == Some(DescriptorKind::Mark)
    }
}

/// Called for each record found.
pub(crate) type Visitor<'a> = &'a mut dyn FnMut(FoundRecord<'_>);

/// Reads the whole log in `dir` and calls `visit` for each record in segments in use, in LSN order.
/// Changes nothing. Calls `progress` after each segment. `verify` affects only what is found out
/// about damage. If the [medium says](Medium::newest) how far to read, what follows is left alone.
///
/// Which records count depends on rewinds that follow them. `control` has those that are known
/// already; if the scan finds [others](Scan::rewinds), the caller reads the log again with them.
///
/// # Errors
/// [`ErrorKind::Damaged`] if acknowledged records are missing or a segment file is truncated.
pub(crate) fn scan(
    medium: &dyn Medium,
    dir: &Path,
    control: &Control,
    verify: VerifyScope,
    visit: Visitor<'_>,
    progress: Progress<'_>,
) -> Result<Scan> {
    let (root, size) = (&control.header, control.header.segment_size.get());
    let first_sequence = root.first_sequence.get();
    let at = |lsn| Commit {
        lsn,
        ..Commit::default()
    };
    let checkpoint_lsn = root.checkpoint_lsn.get();
    let mut scan = Scan {
        last: at(checkpoint_lsn),
        horizon: at(control.horizon()),
        max_lsn: root.next_lsn.get().saturating_sub(1),
        max_cid: root.next_cid.get().saturating_sub(1),
        max_sequence: first_sequence.saturating_sub(1),
        ..Scan::default()
    };
    let (mut candidates, mut suspects) = classify(medium, control, &mut scan)?;
    let newest = medium.newest();
    if let Some(newest) = newest {
        // The log's process makes these now, or appends to them.
        candidates.retain(|candidate| candidate.header.previous_lsn.get() < newest);
        suspects.clear();
    }

    let total = (candidates.len() + suspects.len()) as u64 * size;
    // The first segment follows a recycled one; every other segment names its predecessor, or none
    // if the images had everything when it was begun. (A log restored from an archive may begin
    // before that.)
    let begins = candidates.first().is_some_and(|first| {
        first.header.previous_sequence.get() < first_sequence
            && first.header.previous_lsn.get() <= scan.last.lsn
    });
    let mut taker = LogAssembler {
        candidates: &candidates,
        control,
        timelines: control.timelines(u64::MAX),
        // Whatever the images may hold was durable.
        durable: newest.unwrap_or(control.horizon().min(root.durable_lsn.get())),
        last: Vec::new(),
        held: VecDeque::new(),
        visit,
    };
    let (mut read, mut read_end) = (0_usize, BLOCK as u64);
    // Segments for which progress has been reported.
    let mut told = 0;
    if let (true, Some(first)) = (begins, candidates.first()) {
        scan.last.lsn = first.header.previous_lsn.get();
        let part = |i: usize| {
            let next = candidates.get(i + 1).map(|next| &next.header);
            let limit = next
                .filter(|next| {
                    let previous = next.previous_sequence;
                    previous == candidates[i].header.sequence || previous.get() == 0
                })
                .map(|next| next.previous_lsn.get());
            (&candidates[i], limit)
        };
        for summaries in [true, false] {
            let parts = (read..candidates.len()).map(part);
            let read_part = |(candidate, limit)| {
                let contents = SegmentContents::read(candidate, size, limit, verify, summaries);
                (limit, contents.up_to(newest))
            };
            parallel::in_order(medium.threads(), parts, read_part, |(limit, contents)| {
                (read, read_end) = (read + 1, contents.end);
                let last_lsn = taker.take_segment(contents, &mut scan)?;
                if read > told {
                    told = read;
                    progress(read as u64 * size, total);
                }
                // Without a limit, this is the last segment.
                Ok::<_, Error>(limit == Some(last_lsn))
            })?;
            // From the first summary with batches that may be torn, read the segments again.
            match taker.distrust(&mut scan) {
                Some(part) => read = part,
                None => break,
            }
        }
    }

    // What is left is stale bytes, a torn tail, or evidence that acknowledged records are missing.
    let taken = match taker.held.front() {
        Some(held) => (held.part, held.batch.offset),
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
    let unread = tails.chain(behind).filter(|_| newest.is_none());
    let look = |(segment, salt, offset)| StaleTail::look(segment, root, salt, offset);
    let mut passed = taken.0.min(read) as u64;
    parallel::in_order(medium.threads(), unread, look, |seen| {
        let seen = seen?;
        scan.torn_tail |= seen.torn;
        taker.durable = taker.durable.max(seen.durable_lsn);
        scan.max_lsn = scan.max_lsn.max(seen.max_lsn);
        scan.max_cid = scan.max_cid.max(seen.max_cid);
        scan.max_sequence = scan.max_sequence.max(seen.max_sequence);
        passed += 1;
        if passed > told as u64 {
            progress(passed * size, total);
        }
        Ok::<_, Error>(true)
    })?;
    // This comes last: which summaries are trusted must not depend on what an earlier recovery
    // found.
    if !planted(Mutant::DurableLsnIgnored) && newest.is_none() {
        taker.durable = taker.durable.max(root.durable_lsn.get());
    }
    taker.settle(&mut scan);
    // Batches still held were never durable; the log ends before them.
    let (mut end, mut end_offset) = (read, read_end);
    for held in taker.held.iter().rev() {
        (end, end_offset) = (held.part + 1, held.batch.offset);
        scan.torn_tail = true;
        scan.note_numbers(&held.batch);
    }
    let evidence = taker.durable;
    let lives = candidates[..end].iter().zip(&taker.last);
    scan.live = lives
        .map(|(candidate, &(last, passed))| LiveSegment {
            segment: candidate.segment.clone(),
            sequence: candidate.header.sequence.get(),
            last,
            passed,
        })
        .collect();
    let passed = scan.last.lsn < checkpoint_lsn;
    scan.read_to = scan.last.lsn;
    scan.last.lsn = scan.last.lsn.max(checkpoint_lsn);
    if evidence > scan.last.lsn {
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
                "{}: damaged at byte {offset}: records from LSN {} to {evidence} were acknowledged \
                 and can't be read; restore the log from a copy",
                path.display(),
                scan.last.lsn + 1,
            ),
        ));
    }
    let possible = |rewind: &&Rewind| (checkpoint_lsn..rewind.at).contains(&rewind.to);
    if let Some(wrong) = scan.rewinds.iter().find(|rewind| !possible(rewind)) {
        return Err(Error::new(
            ErrorKind::Damaged,
            format!(
                "{}: record {} restores disk {} to LSN {}, which the log does not have; restore \
                 the log from a copy",
                dir.display(),
                wrong.at,
                wrong.disk_id,
                wrong.to
            ),
        ));
    }
    if passed {
        // Everything in the segments is in the base images, and the next segment follows the
        // checkpoint.
        scan.live.clear();
        end = 0;
    }
    scan.void = candidates[end..]
        .iter()
        .map(|candidate| candidate.segment.clone())
        .collect();
    scan.suspects = suspects;
    Ok(scan)
}

/// Reads the log to learn its rewinds.
///
/// # Errors
/// As [`scan`].
pub(crate) fn learn_rewinds(medium: &dyn Medium, dir: &Path, control: &mut Control) -> Result<()> {
    let verify = VerifyScope::Tail;
    let scan = scan(medium, dir, control, verify, &mut |_| {}, &mut |_, _| {})?;
    control.rewinds = scan.rewinds;
    Ok(())
}

/// Sorts segment files into those that claim to be part of the log, free ones, and those with an
/// unreadable first block that may have been part of it.
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
                    "{}: not a file of this log, whose segment numbers are below {}; move it \
                     elsewhere",
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
        match read_header(segment.file.as_ref(), &segment.path)? {
            DecodeResult::Version(version) => return Err(unknown_version(&segment.path, version)),
            DecodeResult::Valid(header)
                if header.log == root.log
                    && (header.sequence >= root.first_sequence
                        || planted(Mutant::RecoveryAcceptsStale)) =>
            {
                scan.max_sequence = scan.max_sequence.max(header.sequence.get());
                candidates.push(Candidate { segment, header });
            }
            DecodeResult::Valid(_) => scan.free.push(segment),
            DecodeResult::Invalid => suspects.push(segment),
        }
    }
    candidates.sort_by_key(|candidate| candidate.header.sequence.get());
    Ok((candidates, suspects))
}

/// Assembles the log from the batches that were read, in order.
struct LogAssembler<'a> {
    candidates: &'a [Candidate],
    control: &'a Control,
    /// The records that count now.
    timelines: Timelines,
    /// The log is known to have been durable up to this LSN.
    durable: u64,
    /// For each segment read: the last record taken from it or an earlier one, and the time that
    /// had passed by then.
    last: Vec<(Commit, u64)>,
    /// Batches from the first one with a wrong payload, as long as it is unknown whether that one
    /// was durable.
    held: VecDeque<HeldBatch>,
    visit: Visitor<'a>,
}

/// A batch that was read but not taken yet.
struct HeldBatch {
    /// The index of its candidate.
    part: usize,
    batch: Batch,
    /// The batch is in the segment's summary, so it need not be whole in place.
    summarised: bool,
    /// The batch is part of the log if the log was durable up to here.
    certain_from: u64,
}

impl LogAssembler<'_> {
    /// Processes the batches of the next segment. Returns the segment's last LSN, taken or not.
    fn take_segment(&mut self, contents: SegmentContents, scan: &mut Scan) -> Result<u64> {
        let part = self.last.len();
        self.last.push((scan.last, scan.passed));
        let summarised = contents.summarised;
        let segment_end = contents.batches.last().map_or(0, Batch::last_lsn);
        for batch in contents.batches {
            self.durable = self.durable.max(batch.header.durable_lsn.get());
            // Trust a summary as a whole or not at all. Otherwise the next open, which may find
            // that the log ends in this segment and then does not use the summary, could come to
            // another result.
            let certain_from = if summarised {
                segment_end
            } else {
                batch.last_lsn()
            };
            self.held.push_back(HeldBatch {
                part,
                batch,
                summarised,
                certain_from,
            });
            self.settle(scan);
        }
        let last = self.held.back().map(|held| held.batch.last_lsn());
        contents
            .error
            .map_or(Ok(last.unwrap_or(scan.last.lsn)), Err)
    }

    /// Takes the batches known to be part of the log, up to the next one that may be torn.
    fn settle(&mut self, scan: &mut Scan) {
        let durable = self.durable;
        let known = |held: &mut HeldBatch| {
            let whole = if held.summarised {
                planted(Mutant::SummaryTrustedUnsynced)
            } else {
                held.batch.is_whole()
            };
            whole || held.certain_from <= durable
        };
        while let Some(held) = self.held.pop_front_if(known) {
            self.take(&held, scan);
        }
    }

    /// Drops all batches from the first segment whose summary has batches that may be torn. Returns
    /// that segment's index.
    fn distrust(&mut self, scan: &mut Scan) -> Option<usize> {
        let durable = self.durable;
        let mut held = self.held.iter();
        let first = held.find(|held| held.summarised && held.certain_from > durable)?;
        let part = first.part;
        let dropped = self.held.iter().filter(|held| held.part >= part);
        dropped.for_each(|held| scan.note_numbers(&held.batch));
        self.held.retain(|held| held.part < part);
        self.last.truncate(part);
        Some(part)
    }

    fn take(&mut self, held: &HeldBatch, scan: &mut Scan) {
        let HeldBatch { part, batch, .. } = held;
        let (header, last_lsn) = (&batch.header, batch.last_lsn());
        let segment = &self.candidates[*part].segment;
        let wrong = batch.verified.as_ref().map_or(&[][..], |v| &v.wrong);
        if batch.verified.as_ref().is_some_and(|found| !found.in_place) {
            scan.damaged_headers.push((segment.clone(), batch.offset));
        }
        segment.note(|table| {
            for (_, descriptor, at, blocks) in batch.records() {
                table.add(at, descriptor.payload_len(), &batch.checksums[blocks]);
            }
        });
        for (lsn, descriptor, at, blocks) in batch.records() {
            let len = descriptor.payload_len();
            let (disk_id, stale) = (
                descriptor.disk_id.get(),
                planted(Mutant::RecoveryAcceptsStale),
            );
            let in_base = lsn <= self.control.applied_lsn(disk_id) && !stale;
            let counts =
                descriptor.changes_sectors() && (self.timelines.of(disk_id).has(lsn) || stale);
            if descriptor.kind() == Some(DescriptorKind::Rewind)
                && lsn > self.control.header.checkpoint_lsn.get()
            {
                let to = descriptor.sector.get();
                scan.rewinds.push(Rewind {
                    disk_id,
                    to,
                    at: lsn,
                });
            }
            let wrong = wrong.iter().filter(|block| blocks.contains(block));
            let damaged = wrong.clone().next().is_some();
            if counts {
                scan.records += 1;
                scan.payload_bytes += len;
                scan.damaged.extend(wrong.map(|block| {
                    let skipped = ((block - blocks.start) * BLOCK) as u64;
                    DamagedBlock {
                        lsn,
                        disk_id,
                        sector: descriptor.sector.get() + skipped / SECTOR_SIZE,
                        sectors: (len - skipped).min(BLOCK as u64) / SECTOR_SIZE,
                        segment: segment.clone(),
                        offset: at + skipped,
                    }
                }));
            }
            (self.visit)(FoundRecord {
                lsn,
                descriptor,
                checksums: &batch.checksums[blocks],
                batch: header,
                segment,
                offset: at,
                in_base,
                counts,
                damaged,
            });
        }
        let unix_us = header.unix_us.get();
        if scan.batches > 0 {
            scan.passed += passed_between(scan.last.unix_us, unix_us);
        }
        if unix_us < scan.last.unix_us {
            // Earlier records were not written later.
            let before = self.last.iter_mut().map(|(last, _)| last);
            let times = before.chain([&mut scan.horizon]);
            times.for_each(|last| last.unix_us = last.unix_us.min(unix_us));
        }
        scan.batches += 1;
        scan.last = Commit {
            lsn: last_lsn,
            cid: header.cid.get(),
            unix_us,
        };
        if header.first_lsn <= scan.horizon.lsn || scan.horizon.cid == 0 {
            scan.horizon = Commit {
                lsn: scan.horizon.lsn,
                ..scan.last
            };
        }
        self.last[*part..].fill((scan.last, scan.passed));
        scan.note_numbers(batch);
    }
}

/// Wipes the first block of a void segment, so that it is never taken for part of the log.
fn wipe(segment: &Segment) -> Result<()> {
    let wiped = segment.file.write_all_at(&SegmentHeader::blank(), 0);
    let wiped = wiped.and_then(|()| segment.file.sync_data());
    wiped.map_err(|error| Error::io("wipe the void log segment", &segment.path, error))
}
