//! The ring of a log's segment files.
//!
//! ```text
//!           ┌── make_room ──▶ live, the newest is the tail ── retire ──┐
//!         free                                                     retiring
//!           └──────────── reclaim, once no reader holds it ────────────┘
//! ```

use std::collections::VecDeque;

use zerocopy::little_endian::{U32, U64};

use crate::Buffer;
use crate::catalog::retention::Retention;
use crate::format::{self, SegmentHeader, Uuid};
use crate::log::clock::Timestamp;
use crate::log::commit::Commit;
use crate::log::room::RESERVED_ROOM;
use crate::log::tail::{BatchSize, PendingSummary, Tail};
use crate::medium::checksum::ChecksumTable;
use crate::medium::file::Segment;
use crate::sync::Arc;

/// Segments kept ready: one for the next writes, one for records that a checkpoint finds pending.
const READY: usize = 2;
/// Until the next segment file is made, only one part in this many of a segment is used; the rest
/// is room for everything that may be pending.
const GROWING_SHARE: u64 = 8;
/// Segments beside those that have to stay for the log's replica.
const OTHERS_THAN_BACKLOG: u32 = 4;
/// Most summaries waiting to be written; one more drops the oldest.
const MOST_PENDING_SUMMARIES: usize = 2;
/// Most segments that a log with history frees at a time.
const MOST_FREED: usize = 16;

/// A segment in use.
#[derive(Clone)]
pub(crate) struct LiveSegment {
    pub segment: Arc<Segment>,
    pub sequence: u64,
    /// Its last record so far, or the last one before it. The time is that of the record's batch.
    pub last: Commit,
    /// Time from the log's oldest record to that one: see [`Timestamp::passed`].
    pub passed: u64,
}

/// Where there is room for a batch.
pub(crate) enum Room {
    /// In the tail.
    Tail,
    /// In this free segment, which becomes the [next tail](SegmentRing::begin_tail).
    Next(Arc<Segment>),
    /// There is room, but a running checkpoint, or the preallocation of a segment file, releases it
    /// bit by bit.
    Later,
    /// Nowhere yet. `left`: segments that are free or can still be made. `reserved`: those are the
    /// keeper's.
    None { left: u32, reserved: bool },
}

/// The segments of a log.
pub(crate) struct SegmentRing {
    segment_size: u64,
    /// Most segment files.
    most: u32,
    /// Most segments that a log with history frees at a time.
    pub most_freed: usize,
    /// Segment files made so far.
    files: u32,
    /// The last attempt to make a segment file failed. Until one succeeds, the existing files are
    /// the whole ring.
    cannot_grow: bool,
    next_sequence: u64,
    tail: Option<Tail>,
    /// The next batch goes to another segment, if one is free.
    leaves_tail: bool,
    /// Segments in use, oldest first. The tail's is the last.
    live: VecDeque<LiveSegment>,
    /// Summaries that are not written yet, oldest first.
    pending_summaries: VecDeque<PendingSummary>,
    /// Segments that are no longer needed but may still be held by readers.
    retiring: Vec<Arc<Segment>>,
    /// Free segments, used in the order in which they were freed.
    free: VecDeque<Arc<Segment>>,
    /// No segment has room for the pending records and the ring can't grow: a checkpoint has to
    /// free a segment.
    starved: bool,
    /// The last batch that was not the keeper's found no room; a checkpoint has to make some.
    full: bool,
    /// Bytes of log from its opening to the position of the next batch. Unused ends of segments
    /// count too.
    end: u64,
    /// [`Timestamp::passed`] of the next batch.
    passed: u64,
    /// How far the running checkpoint lets the log grow.
    copied: GrowthQuota,
    /// How far the preallocation of a segment file lets the log grow.
    made: GrowthQuota,
    /// Room that disks beyond their part leave to the others; 0 while no copy is under way.
    reserve: u64,
}

/// How far batches may grow the log while background work makes room for them.
#[derive(Default)]
struct GrowthQuota {
    /// The log may grow to this end for now; `None`: as long as there is room.
    end: Option<u64>,
    /// A batch waits for more.
    awaited: bool,
}

impl GrowthQuota {
    /// Lets the log grow to `end`. Returns whether a batch was waiting for that.
    fn set(&mut self, end: Option<u64>) -> bool {
        self.end = end;
        std::mem::take(&mut self.awaited)
    }

    /// Whether the log may grow to `end`.
    fn has(&self, end: u64) -> bool {
        self.end.is_none_or(|most| end <= most)
    }

    /// Whether a batch may grow the log to `end`. If not, it waits from now on.
    fn admits(&mut self, end: u64) -> bool {
        let admits = self.has(end);
        self.awaited |= !admits;
        admits
    }
}

impl SegmentRing {
    /// A ring of `files` segment files, at most `most`. The newest of the `live` segments takes no
    /// more batches.
    pub(crate) fn new(
        segment_size: u64,
        (files, most): (u32, u32),
        next_sequence: u64,
        live: VecDeque<LiveSegment>,
        free: VecDeque<Arc<Segment>>,
    ) -> Self {
        assert!(files <= most, "{files} segment files, at most {most}");
        assert!(
            live.len() + free.len() <= files as usize,
            "a segment has a file"
        );
        assert!(
            live.iter().is_sorted_by(|one, next| {
                one.sequence < next.sequence && one.last.lsn <= next.last.lsn
            }),
            "segments in use are in log order"
        );
        assert!(
            live.back().is_none_or(|live| live.sequence < next_sequence),
            "each use of a segment has a new sequence"
        );
        Self {
            segment_size,
            most,
            most_freed: MOST_FREED,
            files,
            cannot_grow: false,
            next_sequence,
            tail: None,
            leaves_tail: false,
            live,
            pending_summaries: VecDeque::new(),
            retiring: Vec::new(),
            free,
            starved: false,
            full: false,
            end: 0,
            passed: 0,
            copied: GrowthQuota::default(),
            made: GrowthQuota::default(),
            reserve: 0,
        }
    }

    /// Where the next batch goes; `None` until a batch was written since the log was opened.
    pub(crate) fn tail(&self) -> Option<&Tail> {
        self.tail.as_ref()
    }

    /// Bytes of log from its opening to the position of the next batch. Unused ends of segments
    /// count too.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    /// How many segments the log can still begin.
    pub(crate) fn left(&self) -> u32 {
        self.free.len() as u32 + self.to_come()
    }

    /// Whether no segment has room for the pending records and the ring can't grow.
    pub(crate) fn is_starved(&self) -> bool {
        self.starved
    }

    /// Whether the last batch that was not the keeper's found no room, and none has been made
    /// since.
    pub(crate) fn is_full(&self) -> bool {
        self.full
    }

    /// Whether a batch waits for room that only a checkpoint can make.
    pub(crate) fn holds_back(&self) -> bool {
        self.full || self.copied.awaited
    }

    /// Lets the next batch look for room again.
    pub(crate) fn end_starving(&mut self) {
        self.starved = false;
    }

    /// How many segments the ring may have.
    pub(crate) fn most(&self) -> usize {
        self.most as usize
    }

    /// Whether half of the ring, or more, is in use.
    pub(crate) fn is_half_used(&self) -> bool {
        self.live.len() * 2 >= self.most as usize
    }

    /// Bytes of segments that are unused or not made yet.
    pub(crate) fn unused_bytes(&self) -> u64 {
        u64::from(self.most).saturating_sub(self.live.len() as u64) * self.segment_size
    }

    /// Bytes of the segments in use.
    pub(crate) fn live_bytes(&self) -> u64 {
        self.live.len() as u64 * self.segment_size
    }

    /// How many bytes of log may have to stay, so that there is room for the next batches and the
    /// keeper.
    pub(crate) fn room_for_backlog(&self) -> u64 {
        let files = if self.cannot_grow {
            self.files
        } else {
            self.most
        };
        u64::from(files.saturating_sub(OTHERS_THAN_BACKLOG).max(1)) * self.segment_size
    }

    /// Raises the limit of segment files; never lowers it.
    pub(crate) fn enlarge(&mut self, most: u32) {
        self.most = self.most.max(most);
        self.starved &= self.to_come() == 0;
    }

    /// Takes a free segment away.
    ///
    /// # Panics
    /// If none is free.
    #[cfg(all(test, not(feature = "shuttle")))]
    pub(crate) fn take_free(&mut self) -> Arc<Segment> {
        self.free.pop_front().expect("a free segment")
    }

    /// Whether no segment is free.
    pub(crate) fn has_none_free(&self) -> bool {
        self.free.is_empty()
    }

    /// Whether no segment is free, and no more can be made.
    pub(crate) fn is_used_up(&self) -> bool {
        self.free.is_empty() && self.to_come() == 0
    }

    /// The number of the segment file to make now, if one is needed; see
    /// [`is_short`](Self::is_short).
    pub(crate) fn next_file(&self) -> Option<u32> {
        (self.free.len() < READY && self.files < self.most).then_some(self.files)
    }

    /// Whether a segment file should be made now; not after an attempt has failed.
    pub(crate) fn is_short(&self) -> bool {
        self.next_file().is_some() && !self.cannot_grow
    }

    /// Whether the last segment file could not be made.
    pub(crate) fn cannot_grow(&self) -> bool {
        self.cannot_grow
    }

    /// The segments that will be used next.
    pub(crate) fn ready(&self) -> impl Iterator<Item = &Arc<Segment>> {
        self.free.iter().take(READY)
    }

    /// How many more segment files can be made.
    fn to_come(&self) -> u32 {
        if self.cannot_grow {
            0
        } else {
            self.most - self.files
        }
    }

    /// Adds a new segment file.
    pub(crate) fn add(&mut self, made: Segment) {
        self.cannot_grow = false;
        self.free.push_back(Arc::new(made));
        self.files += 1;
        assert!(self.files <= self.most, "more segment files than allowed");
        (self.starved, self.full) = (false, false);
    }

    /// Lets the next batch begin another segment as soon as one is free beside the keeper's: a
    /// reader that can't read the tail then finds a beginning.
    pub(crate) fn leave_tail(&mut self) {
        self.leaves_tail = true;
    }

    /// Notes that no segment file could be made. Returns whether that is new.
    pub(crate) fn note_cannot_grow(&mut self) -> bool {
        !std::mem::replace(&mut self.cannot_grow, true)
    }

    /// While a copy is under way, disks beyond their part leave so many bytes to the others.
    pub(crate) fn begin_copy(&mut self, reserve: u64) {
        self.reserve = reserve;
    }

    /// The copy has ended. Returns whether somebody was waiting for that.
    pub(crate) fn end_copy(&mut self) -> bool {
        self.reserve = 0;
        self.copied.set(None)
    }

    /// Whether `bytes` more leave what disks beyond their part leave to the others: while a copy is
    /// under way, and while the ring grows.
    pub(crate) fn leaves_reserve(&self, bytes: u64) -> bool {
        let reserve = self.segment_size / RESERVED_ROOM;
        let has_file = !self.free.is_empty() && self.made.has(self.end + bytes + reserve);
        if self.to_come() > 0 && !has_file {
            return false;
        }
        let more = bytes + self.reserve;
        let tail = self.tail.as_ref();
        let tail = tail.map_or(0, |tail| self.segment_size - tail.offset);
        // One segment is the keeper's.
        let others = (self.free.len() as u64 + u64::from(self.to_come())).saturating_sub(1);
        let has_room = more <= others * self.segment_size + tail;
        self.reserve == 0 || has_room && self.copied.has(self.end + more)
    }

    /// Somebody waits until there is more room.
    pub(crate) fn await_room(&mut self) {
        self.copied.awaited |= self.reserve > 0;
        self.made.awaited = true;
    }

    /// The checkpoint lets the log grow to `end`; `None`: as long as there is room. Returns whether
    /// a batch was waiting for that.
    pub(crate) fn allow(&mut self, end: Option<u64>) -> bool {
        self.copied.set(end)
    }

    /// Bytes that batches may use before they need a segment file that is not made yet; 0 if no
    /// segment is free.
    pub(crate) fn ready_bytes(&self) -> u64 {
        let tail = self
            .tail
            .as_ref()
            .map_or(0, |tail| self.segment_size - tail.offset);
        match self.free.len() as u64 {
            0 => 0,
            free => free * self.segment_size + tail,
        }
    }

    /// While a segment file is being made, lets the log grow to `end`; `None`: it is done. Returns
    /// whether a batch was waiting for that.
    pub(crate) fn make_progress(&mut self, end: Option<u64>) -> bool {
        self.made.set(end)
    }

    /// Whether batches fill the log faster than the segment file is made.
    pub(crate) fn outruns_files(&self) -> bool {
        self.made.awaited
    }

    /// Finds room for a batch and for its segment's summary. `draining`: the batch is the keeper's,
    /// which may use the summary's room.
    pub(crate) fn make_room(&mut self, batch: BatchSize, draining: bool) -> Room {
        let bytes = batch.whole;
        let end = self.end + bytes;
        // Ask both (no short circuit): each has to know that a batch is waiting.
        if !draining && !(self.copied.admits(end) & self.made.admits(end)) {
            return Room::Later;
        }
        // While the ring still grows and no segment is free, most of the tail is reserved for the
        // keeper, in case no segment file can be made.
        let growing = self.free.is_empty() && self.files < self.most;
        let usable = if growing && !draining {
            self.segment_size / GROWING_SHARE
        } else {
            self.segment_size
        };
        let leaves = self.leaves_tail && !draining && self.free.len() > 1;
        let has_room = |tail: &Tail| {
            tail.offset + bytes <= usable && tail.has_room(batch, draining, self.segment_size)
        };
        if !leaves && self.tail.as_ref().is_some_and(has_room) {
            self.starved = false;
            self.full &= draining;
            return Room::Tail;
        }
        // The ring's last segment is reserved for the keeper. With it, a checkpoint can always make
        // the pending records durable, however full the ring is, and so free the other segments.
        let left = self.left();
        let may = left > 1 || draining;
        let next = may.then(|| self.free.pop_front()).flatten();
        // Not starved while a segment file can still be made: that makes room without a checkpoint.
        self.starved = next.is_none() && self.to_come() == 0;
        if !draining {
            self.full = self.starved;
        }
        match next {
            Some(segment) => Room::Next(segment),
            None => Room::None {
                left,
                reserved: !may,
            },
        }
    }

    /// Whether there is room for a batch: in the tail, in a free segment, or in one that can be made.
    /// `draining`: as for [`make_room`](Self::make_room).
    pub(crate) fn has_room(&self, batch: BatchSize, draining: bool) -> bool {
        let fits = |tail: &Tail| {
            let end = tail.offset + batch.whole;
            end <= self.segment_size && tail.has_room(batch, draining, self.segment_size)
        };
        self.left() > u32::from(!draining) || self.tail.as_ref().is_some_and(fits)
    }

    /// Continues the log in a segment that [`make_room`](Self::make_room) returned. `batched`: the
    /// LSN of the newest record so far.
    pub(crate) fn begin_tail(&mut self, segment: Arc<Segment>, log: Uuid, salt: u64, batched: u64) {
        // The unused end of the previous segment counts as used.
        self.end = self.end.next_multiple_of(self.segment_size);
        let headers = self.seal_tail(log);
        self.leaves_tail = false;
        segment.note(ChecksumTable::clear);
        let sequence = self.next_sequence;
        assert!(
            self.live
                .back()
                .is_none_or(|live| live.sequence < sequence && live.last.lsn <= batched),
            "the log goes on after its newest segment"
        );
        let header = SegmentHeader {
            magic: format::SEGMENT_MAGIC,
            version: U32::new(format::VERSION),
            crc: U32::new(0),
            log,
            sequence: U64::new(sequence),
            previous_sequence: U64::new(self.live.back().map_or(0, |live| live.sequence)),
            previous_lsn: U64::new(batched),
            salt: U64::new(salt),
        };
        let mut block = Buffer::zeroed(format::BLOCK);
        let previous_crc = header.encode(&mut block);
        self.live.push_back(LiveSegment {
            segment: segment.clone(),
            sequence,
            last: Commit {
                lsn: batched,
                ..self.live.back().map_or(Commit::default(), |live| live.last)
            },
            passed: self.live.back().map_or(self.passed, |live| live.passed),
        });
        self.next_sequence += 1;
        self.tail = Some(Tail {
            segment,
            sequence,
            salt,
            offset: 0,
            previous_crc,
            header: Some(block.share()),
            headers: Some(headers),
        });
    }

    /// Seals the tail: it takes no more batches, and its summary is queued. Returns an empty list
    /// for the headers of the next tail.
    fn seal_tail(&mut self, log: Uuid) -> Vec<u8> {
        let Some(tail) = self.tail.take() else {
            return Vec::new();
        };
        let (summary, headers) = tail.seal(log, self.segment_size);
        if summary.is_some() && self.pending_summaries.len() == MOST_PENDING_SUMMARIES {
            self.pending_summaries.pop_front();
        }
        self.pending_summaries.extend(summary);
        headers
    }

    /// Whether a summary waits to be written.
    pub(crate) fn has_pending_summary(&self) -> bool {
        !self.pending_summaries.is_empty()
    }

    /// Takes the oldest summary that waits to be written.
    pub(crate) fn take_pending_summary(&mut self) -> Option<PendingSummary> {
        self.pending_summaries.pop_front()
    }

    /// Drops the summaries waiting to be written, because the log has failed.
    pub(crate) fn drop_pending_summaries(&mut self) {
        self.pending_summaries.clear();
    }

    /// Advances the tail past a batch of `bytes`, segment header included. `header`: the batch's
    /// header with descriptors and checksums, and its CRC. `last`: its last record, and when it was
    /// built.
    pub(crate) fn extend_tail(&mut self, bytes: u64, header: (&[u8], u32), last: Commit) {
        let tail = self.tail.as_mut().expect("the batch is in it");
        tail.extend(bytes, header, self.segment_size);
        self.end += bytes;
        let live = self.live.back_mut().expect("the tail is live");
        debug_assert!(live.last.lsn < last.lsn, "batches are in log order");
        (live.last, live.passed) = (last, self.passed);
    }

    /// Records the time of the next batch. No earlier record may have a later time, so those are
    /// corrected.
    pub(crate) fn note_time(&mut self, stamp: Timestamp) {
        self.passed = stamp.passed;
        let later = |live: &&mut LiveSegment| live.last.unix_us > stamp.unix_us;
        let later = self.live.iter_mut().rev().take_while(later);
        later.for_each(|live| live.last.unix_us = stamp.unix_us);
    }

    /// Ends the tail, because the log is closing: another batch would begin a new segment.
    pub(crate) fn end_tail(&mut self) {
        self.tail = None;
    }

    /// How many of the oldest segments can be freed once all records up to `lsn` are in the base
    /// images, and the sequence of the first that can't. The tail never can.
    pub(crate) fn find_freeable(&self, lsn: u64) -> (usize, u64) {
        let most = self.live.len() - usize::from(self.tail.is_some());
        let keep = self.live.iter().position(|live| live.last.lsn > lsn);
        let count = keep.unwrap_or(most);
        let first = self.live.get(count);
        (
            count,
            first.map_or(self.next_sequence, |live| live.sequence),
        )
    }

    /// How many segments a log with history frees at a time. Fewer, larger checkpoints rewrite a
    /// hot block less often.
    pub(crate) fn step(&self, retain: Retention) -> usize {
        let rest = u64::from(self.most).saturating_sub(retain.segments(self.segment_size));
        (rest as usize / 2).clamp(1, self.most_freed)
    }

    /// Whether a log with history is about to need the room of its oldest segments.
    pub(crate) fn is_running_out(&self, retain: Retention) -> bool {
        self.live.len() + self.step(retain) >= self.most as usize
    }

    /// How many of the oldest segments this retention does not cover. `now`: see
    /// [`Timestamp::passed`].
    pub(crate) fn beyond(&self, retain: Retention, now: u64) -> usize {
        let newer = |at: usize| (self.live.len() - at - 1) as u64 * self.segment_size;
        let beyond = |&(at, live): &(usize, &LiveSegment)| match retain {
            Retention::Nothing => true,
            Retention::Time(time) => u128::from(now.saturating_sub(live.passed)) > time.as_micros(),
            Retention::Bytes(bytes) => newer(at) >= bytes,
            Retention::All => false,
        };
        self.live.iter().enumerate().take_while(beyond).count()
    }

    /// How many of the oldest segments to free now under this retention, and how many of those have
    /// not expired yet. `now`: see [`Timestamp::passed`]. `pressed`: room is needed, whatever the
    /// retention. `held`: everything after this LSN stays.
    pub(crate) fn expired(
        &self,
        retain: Retention,
        now: u64,
        pressed: bool,
        held: u64,
    ) -> (usize, usize) {
        let sealed = self.live.len() - usize::from(self.tail.is_some());
        let expired = self.beyond(retain, now);
        let step = self.step(retain);
        let wanted = if pressed {
            expired.max(step)
        } else if expired >= step {
            expired
        } else {
            0
        };
        let free = self.live.iter().take_while(|live| live.last.lsn <= held);
        let count = wanted.min(sealed).min(free.count());
        (count, count.saturating_sub(expired))
    }

    /// The oldest `count` segments, each with its last record.
    pub(crate) fn oldest(&self, count: usize) -> Vec<(Arc<Segment>, Commit)> {
        let oldest = self.live.iter().take(count);
        oldest
            .map(|live| (live.segment.clone(), live.last))
            .collect()
    }

    /// The last LSN of each segment that takes no more batches, oldest first.
    pub(crate) fn sealed_ends(&self) -> impl Iterator<Item = u64> {
        let sealed = self.live.len() - usize::from(self.tail.is_some());
        self.live.iter().take(sealed).map(|live| live.last.lsn)
    }

    /// How many segments have records after this LSN.
    pub(crate) fn newer(&self, lsn: u64) -> usize {
        let older = self.live.iter().take_while(|live| live.last.lsn <= lsn);
        self.live.len() - older.count()
    }

    /// Takes the oldest `count` segments out of use. They are free once they are
    /// [reclaimed](Self::reclaim).
    pub(crate) fn retire(&mut self, count: usize) {
        let retired = self.live.drain(..count).map(|live| live.segment);
        let first = self.retiring.len();
        self.retiring.extend(retired);
        // A segment that is not needed any more needs no summary.
        let retired = &self.retiring[first..];
        let is_live =
            |one: &PendingSummary| !retired.iter().any(|other| Arc::ptr_eq(other, &one.segment));
        self.pending_summaries.retain(is_live);
    }

    /// Frees the retired segments that no reader holds any more. Returns whether there were any.
    pub(crate) fn reclaim(&mut self) -> bool {
        let free = self.free.len();
        let unused = |segment: &mut Arc<Segment>| Arc::strong_count(segment) == 1;
        self.free.extend(self.retiring.extract_if(.., unused));
        let more = self.free.len() > free;
        self.starved &= !more;
        self.full &= !more;
        more
    }

    /// Whether readers hold retired segments.
    pub(crate) fn has_readers(&self) -> bool {
        !self.retiring.is_empty()
    }

    /// Whether only segments held by readers could become free.
    pub(crate) fn waits_for_readers(&self) -> bool {
        self.has_readers() && self.is_used_up()
    }

    /// The number of segment files, and of free segments.
    #[cfg(all(test, not(feature = "shuttle")))]
    pub(crate) fn counts(&self) -> (u32, usize) {
        (self.files, self.free.len())
    }

    /// The segments in use, oldest first, with their bookkeeping.
    pub(crate) fn all_live(&self) -> Vec<LiveSegment> {
        self.live.iter().cloned().collect()
    }

    /// The segments that are in use, oldest first.
    pub(crate) fn live(&self) -> impl Iterator<Item = &Arc<Segment>> {
        self.live.iter().map(|live| &live.segment)
    }

    /// Panics if an invariant does not hold. `batched`: the LSN of the newest record in a batch.
    pub(crate) fn check(&self, batched: u64) {
        let mut newest = (0, 0);
        for live in &self.live {
            assert!(
                newest.0 < live.sequence && newest.1 <= live.last.lsn,
                "live segments are out of order"
            );
            newest = (live.sequence, live.last.lsn);
        }
        assert!(
            newest.0 < self.next_sequence && newest.1 <= batched,
            "a segment from the future"
        );
        if let Some(tail) = &self.tail {
            let last = self.live.back().expect("the tail is live");
            assert!(
                Arc::ptr_eq(&last.segment, &tail.segment)
                    && (last.sequence, last.last.lsn) == (tail.sequence, batched),
                "the tail is not the last live segment"
            );
            assert!(
                tail.offset <= self.segment_size
                    && (tail.offset == 0) == tail.header.is_some()
                    && (self.end - tail.offset).is_multiple_of(self.segment_size),
                "the tail's offset is {} of {}, the log's end {}",
                tail.offset,
                self.segment_size,
                self.end
            );
        }
        let all = || self.live().chain(&self.retiring).chain(&self.free);
        for (at, segment) in all().enumerate() {
            let mut others = all().take(at);
            assert!(
                others.all(|other| !Arc::ptr_eq(other, segment)),
                "a segment is in two places"
            );
        }
        assert!(
            all().count() <= self.files as usize && self.files <= self.most,
            "more segments than files"
        );
        assert!(
            !self.starved || self.to_come() == 0,
            "starved, although a segment file can still be made"
        );
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests;
