//! Records on their way from their LSN to the medium.
//!
//! ```text
//!  append ──▶ pending ──batch──▶ writing (several at once) ──▶ unsynced ──sync (one at a time)──▶ durable
//!        appended           batched                       written                            durable
//! ```
//! The words in the bottom line are watermarks: the LSN of the newest record that has come this
//! far.

use std::collections::VecDeque;
use std::sync::OnceLock;

use crate::catalog::mark_text::MarkText;
use crate::format::{Descriptor, DescriptorKind};
use crate::log::commit::Commit;
use crate::log::disk_state::DiskState;
use crate::log::room::shared_memory;
use crate::medium::checksum::{self, Payload};
use crate::medium::file::{Segment, SyncScope, WriteBack};
use crate::sync::Arc;
use crate::tracepoints;

/// A request that becomes a record of the log.
pub(crate) struct Modification {
    pub kind: DescriptorKind,
    pub sector: u64,
    pub sectors: u32,
    pub payload: Option<Payload>,
    /// Set for a mark, whose text is the payload and which changes no disk. Its position in the log
    /// is reported here.
    pub mark: Option<MarkCommit>,
}

/// A mark's position in the log, once it is in a batch.
pub(crate) type MarkCommit = Arc<OnceLock<Commit>>;

impl Modification {
    /// A mark with this text.
    pub(crate) fn mark(text: &MarkText, marked: MarkCommit) -> Self {
        let bytes = text.to_sector();
        let checksums = checksum::of(&bytes);
        let payload = Payload {
            bytes: bytes.share(),
            checksums,
        };
        Self {
            kind: DescriptorKind::Mark,
            sector: 0,
            sectors: 1,
            payload: Some(payload),
            mark: Some(marked),
        }
    }

    /// A restore in place to LSN `to`.
    pub(crate) fn rewind(to: u64) -> Self {
        Self {
            kind: DescriptorKind::Rewind,
            sector: to,
            sectors: 0,
            payload: None,
            mark: None,
        }
    }

    /// What takes the place of a record that must not count.
    pub(crate) fn void() -> Self {
        let text = "a restore in place was given up".parse().expect("a text");
        Self::mark(&text, MarkCommit::default())
    }

    pub(crate) fn payload_len(&self) -> usize {
        self.payload
            .as_ref()
            .map_or(0, |payload| payload.bytes.len())
    }

    /// What the record counts towards the pending bytes. A record without a payload counts too,
    /// because it takes a descriptor; so memory stays bounded.
    pub(crate) fn pending_bytes(&self) -> usize {
        self.payload_len().max(512)
    }

    /// The checksums of the payload.
    pub(crate) fn checksums(&self) -> &[u32] {
        self.payload
            .as_ref()
            .map_or(&[], |payload| &payload.checksums)
    }
}

/// A record that has an LSN and is waiting to be written.
pub(crate) struct Record {
    /// The disk of the port that the record came from.
    pub disk: Arc<DiskState>,
    pub lsn: u64,
    pub change: Modification,
}

impl Record {
    /// The disk number for the record's descriptor.
    pub(crate) fn disk_id(&self) -> u32 {
        match self.change.mark {
            Some(_) => Descriptor::NO_DISK,
            None => self.disk.id,
        }
    }

    /// See [`Modification::pending_bytes`].
    fn pending_bytes(&self) -> usize {
        self.change.pending_bytes()
    }
}

/// Most bytes of write-back that may be due; further batches wait until the leader has started
/// some. A FLUSH waits for all of them, whichever disk has written them.
const MOST_WRITE_BACK: usize = 4 << 20;

/// A batch being written to its segment.
struct InFlightBatch {
    last_lsn: u64,
    segment: Arc<Segment>,
    /// The [pending bytes](Record::pending_bytes) of its records.
    bytes: usize,
    /// One operation writes and syncs the batch.
    synced: bool,
    ended: bool,
}

/// The records on their way to the medium, and the watermarks.
pub(crate) struct Pipeline {
    next_lsn: u64,
    /// Lower than `next_lsn - 1` after a torn tail was dropped.
    appended: u64,
    batched: u64,
    written: u64,
    durable: u64,
    /// All records up to this LSN are in the base images.
    applied: u64,
    next_cid: u64,
    pending: VecDeque<Record>,
    /// Bytes of `pending`, and of the records in batches that are being written.
    queued_bytes: usize,
    writing_bytes: usize,
    /// Batches being written, and written ones that still have an unfinished batch before them, in
    /// log order.
    writing: VecDeque<InFlightBatch>,
    /// Segments with written batches that no sync covers, finished or running.
    unsynced: Vec<Arc<Segment>>,
    /// The running sync makes records up to this LSN durable.
    syncing: Option<u64>,
    /// Write-back steps that are due for written batches, oldest first.
    write_backs: VecDeque<WriteBack>,
    /// A batch is waiting until no more bytes than this are due for write-back.
    held_up: Option<usize>,
}

impl Pipeline {
    /// The pipeline of a durable log whose newest record is `last_lsn`.
    pub(crate) fn new(next_lsn: u64, last_lsn: u64, applied: u64, next_cid: u64) -> Self {
        Self {
            next_lsn,
            appended: last_lsn,
            batched: last_lsn,
            written: last_lsn,
            durable: last_lsn,
            applied,
            next_cid,
            pending: VecDeque::new(),
            queued_bytes: 0,
            writing_bytes: 0,
            writing: VecDeque::new(),
            unsynced: Vec::new(),
            syncing: None,
            write_backs: VecDeque::new(),
            held_up: None,
        }
    }

    /// The LSN of the next record.
    pub(crate) fn next_lsn(&self) -> u64 {
        self.next_lsn
    }

    /// The LSN of the newest record, pending ones included.
    pub(crate) fn appended(&self) -> u64 {
        self.appended
    }

    /// The LSN of the newest record in a batch.
    pub(crate) fn batched(&self) -> u64 {
        self.batched
    }

    /// All records up to this LSN are written.
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    /// All records up to this LSN are durable.
    pub(crate) fn durable(&self) -> u64 {
        self.durable
    }

    /// All records up to this LSN are in the base images.
    pub(crate) fn applied(&self) -> u64 {
        self.applied
    }

    /// Notes that all records up to `lsn` are in the base images.
    pub(crate) fn set_applied(&mut self, lsn: u64) {
        self.applied = lsn;
    }

    /// How many records are not in the base images yet.
    pub(crate) fn unapplied(&self) -> u64 {
        self.appended - self.applied
    }

    /// The number of the next commit group.
    pub(crate) fn next_cid(&self) -> u64 {
        self.next_cid
    }

    /// The pending records, oldest first.
    pub(crate) fn pending(&self) -> impl Iterator<Item = &Record> {
        self.pending.iter()
    }

    /// Bytes of the pending records.
    pub(crate) fn queued_bytes(&self) -> usize {
        self.queued_bytes
    }

    /// Bytes of the pending records and of those being written.
    pub(crate) fn bytes(&self) -> usize {
        self.queued_bytes + self.writing_bytes
    }

    /// The number of batches being written, plus written ones that still have an unfinished batch
    /// before them.
    pub(crate) fn writing(&self) -> usize {
        self.writing.len()
    }

    /// The number of batches being written without a sync.
    pub(crate) fn writes_alone(&self) -> usize {
        let writing = self.writing.iter();
        writing.filter(|one| !one.synced && !one.ended).count()
    }

    /// Whether a batch without a sync may be written now. If not, it counts as waiting for
    /// write-back. `shared`: several disks write.
    pub(crate) fn admit_unsynced(&mut self, shared: bool) -> bool {
        let most = if shared {
            shared_memory(MOST_WRITE_BACK)
        } else {
            MOST_WRITE_BACK
        };
        self.held_up = (self.write_back_due() >= most).then_some(most);
        self.held_up.is_none()
    }

    /// Whether a batch that was waiting for write-back may be written now.
    pub(crate) fn is_released(&self) -> bool {
        let due = self.write_back_due();
        self.held_up.is_some_and(|most| due < most)
    }

    /// Bytes of write-back that is due.
    fn write_back_due(&self) -> usize {
        let steps = self.write_backs.iter();
        let bytes = steps.map(|step| step.range.end - step.range.start);
        bytes.sum::<u64>() as usize
    }

    /// Whether any write-back is due.
    pub(crate) fn has_write_back(&self) -> bool {
        !self.write_backs.is_empty()
    }

    /// Takes the oldest step of write-back.
    pub(crate) fn take_write_back(&mut self) -> Option<WriteBack> {
        self.write_backs.pop_front()
    }

    /// Adds a step of write-back.
    pub(crate) fn add_write_back(&mut self, step: WriteBack) {
        self.write_backs.push_back(step);
    }

    /// The number of segments with written batches that no sync covers.
    pub(crate) fn unsynced(&self) -> usize {
        self.unsynced.len()
    }

    /// Gives a record the next LSN, and returns it.
    pub(crate) fn append(&mut self, disk: &Arc<DiskState>, change: Modification) -> u64 {
        debug_assert!(
            (change.sectors == 0) == (change.kind == DescriptorKind::Rewind),
            "a record of nothing"
        );
        debug_assert!(
            change.payload.is_none()
                || change.payload_len() as u64 == 512 * u64::from(change.sectors),
            "a payload has the bytes of its sectors"
        );
        let lsn = self.next_lsn;
        debug_assert!(self.appended < lsn, "LSNs rise");
        self.next_lsn += 1;
        self.appended = lsn;
        tracepoints::append(lsn, disk.id, change.sector, change.sectors);
        let disk = disk.clone();
        let record = Record { disk, lsn, change };
        self.queued_bytes += record.pending_bytes();
        self.pending.push_back(record);
        lsn
    }

    /// Makes a record that is still pending one that does not count. Returns `false` if it is in a
    /// batch, or gone.
    pub(crate) fn void(&mut self, lsn: u64) -> bool {
        let mut pending = self.pending.iter_mut();
        let Some(record) = pending.find(|record| record.lsn == lsn) else {
            return false;
        };
        let bytes = record.pending_bytes();
        record.change = Modification::void();
        self.queued_bytes = self.queued_bytes + record.pending_bytes() - bytes;
        true
    }

    /// Moves the oldest `count` pending records, at least one, to `records`: the next batch to be
    /// written to `segment`. If `synced`, [`sync_batch`](Self::sync_batch) follows.
    pub(crate) fn begin_batch(
        &mut self,
        count: usize,
        segment: &Arc<Segment>,
        synced: bool,
        records: &mut Vec<Record>,
    ) {
        assert!(records.is_empty(), "a batch of two lists");
        records.extend(self.pending.drain(..count));
        debug_assert!(
            self.batched < records[0].lsn
                && records.is_sorted_by(|one, next| one.lsn + 1 == next.lsn),
            "a batch has consecutive records"
        );
        let bytes = records.iter().map(Record::pending_bytes).sum();
        self.queued_bytes -= bytes;
        self.writing_bytes += bytes;
        self.batched = records[count - 1].lsn;
        self.writing.push_back(InFlightBatch {
            last_lsn: self.batched,
            segment: segment.clone(),
            bytes,
            synced,
            ended: false,
        });
    }

    /// The batch with this last record is written. It counts only once all earlier batches are
    /// written too.
    pub(crate) fn end_batch(&mut self, last_lsn: u64) {
        let mut writing = self.writing.iter_mut();
        let batch = writing.find(|batch| batch.last_lsn == last_lsn && !batch.ended);
        let batch = batch.expect("a batch ends once");
        batch.ended = true;
        self.writing_bytes -= batch.bytes;
        while let Some(batch) = self.writing.pop_front_if(|batch| batch.ended) {
            debug_assert!(self.written < batch.last_lsn, "batches count in log order");
            self.written = batch.last_lsn;
            if !batch.synced {
                add(&mut self.unsynced, &batch.segment);
            }
        }
    }

    fn begin_sync(&mut self, lsn: u64) {
        assert!(self.syncing.is_none(), "one sync at a time");
        tracepoints::sync(self.next_cid, lsn);
        self.syncing = Some(lsn);
        self.next_cid += 1;
    }

    /// A sync of these segments covers all write-back due for them.
    fn end_write_back(&mut self, segments: &[Arc<Segment>]) {
        let other = |step: &WriteBack| !segments.iter().any(|one| Arc::ptr_eq(one, &step.segment));
        self.write_backs.retain(other);
    }

    /// Begins a sync of the newest batch and everything before it. Returns what it must cover: the
    /// batch alone, if everything before it is durable and the file system honours durable writes.
    pub(crate) fn sync_batch(&mut self) -> SyncScope {
        self.begin_sync(self.batched);
        assert_eq!(self.writing.len(), 1, "no batch before it is being written");
        let segment = &self.writing[0].segment;
        if self.unsynced.is_empty() && !segment.needs_sync {
            return SyncScope::Write;
        }
        let mut segments = std::mem::take(&mut self.unsynced);
        add(&mut segments, segment);
        self.end_write_back(&segments);
        SyncScope::Segments(segments)
    }

    /// Begins a sync of everything written, and returns the segments that it must cover.
    pub(crate) fn sync_written(&mut self) -> Vec<Arc<Segment>> {
        self.begin_sync(self.written);
        let segments = std::mem::take(&mut self.unsynced);
        self.end_write_back(&segments);
        segments
    }

    /// Notes that the sync under way has ended.
    pub(crate) fn end_sync(&mut self) {
        let lsn = self.syncing.take().expect("a sync is under way");
        assert!(
            self.durable <= lsn && lsn <= self.written,
            "a sync covers what is written"
        );
        self.durable = lsn;
        tracepoints::synced(self.next_cid - 1, self.durable);
    }

    /// Drops everything on its way, because the log has failed and nothing becomes durable any
    /// more.
    pub(crate) fn fail(&mut self) {
        self.pending.clear();
        self.writing.clear();
        self.write_backs.clear();
    }

    /// The segments with batches that are not durable.
    pub(crate) fn segments(&self) -> impl Iterator<Item = &Arc<Segment>> {
        let writing = self.writing.iter().map(|batch| &batch.segment);
        writing.chain(&self.unsynced)
    }

    /// Panics if an invariant does not hold. Not to be called once the log has failed.
    pub(crate) fn check(&self) {
        let Self {
            appended,
            batched,
            written,
            durable,
            applied,
            syncing,
            ..
        } = *self;
        assert!(
            applied <= durable
                && durable <= written
                && written <= batched
                && batched <= appended
                && appended < self.next_lsn,
            "applied {applied}, durable {durable}, written {written}, batched {batched}, appended \
             {appended}"
        );
        // The pending records are exactly those in no batch, in LSN order. (LSNs of a dropped torn
        // tail, up to the `next_lsn` at opening, belong to no record.)
        let newest = self.pending.iter().rev().map(|record| record.lsn);
        assert!(
            newest.eq((batched + 1..=appended).rev().take(self.pending.len()))
                && (self.pending.is_empty() == (batched == appended)),
            "pending records are out of order"
        );
        let queued: usize = self.pending.iter().map(Record::pending_bytes).sum();
        assert_eq!(self.queued_bytes, queued, "bytes of pending records");
        // Batches end in any order, but count in log order.
        let mut newest = written;
        for batch in &self.writing {
            assert!(newest < batch.last_lsn, "batches are out of order");
            newest = batch.last_lsn;
        }
        assert_eq!(newest, batched, "the newest batch");
        let front = self.writing.front();
        assert!(
            front.is_none_or(|batch| !batch.ended),
            "the oldest batch is written, and does not count"
        );
        let unwritten = self.writing.iter().filter(|batch| !batch.ended);
        let bytes: usize = unwritten.map(|batch| batch.bytes).sum();
        assert_eq!(self.writing_bytes, bytes, "bytes being written");
        // A sync covers what was written when it began, plus its own operation's batch.
        let own = front.filter(|batch| batch.synced);
        let ahead = own.map_or(written, |batch| batch.last_lsn);
        assert!(
            syncing.is_none_or(|lsn| durable <= lsn && lsn <= ahead),
            "a sync of more than was written when it began"
        );
        let others = self.writing.iter().skip(1);
        assert!(
            own.is_none_or(|own| syncing == Some(own.last_lsn))
                && others.into_iter().all(|batch| !batch.synced),
            "a sync of another batch"
        );
        assert_eq!(
            self.unsynced.is_empty(),
            written <= syncing.unwrap_or(durable),
            "segments are unsynced if and only if records are written and not durable"
        );
        let distinct = |(at, segment)| !self.unsynced[..at].iter().any(|s| Arc::ptr_eq(s, segment));
        assert!(self.unsynced.iter().enumerate().all(distinct), "twice");
    }
}

/// Adds a segment to a list, unless it is there already.
fn add(segments: &mut Vec<Arc<Segment>>, segment: &Arc<Segment>) {
    if !segments.iter().any(|other| Arc::ptr_eq(other, segment)) {
        segments.push(segment.clone());
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
pub(crate) mod tests {
    use crate::log::image::DiskImage;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use zerocopy::FromZeros;

    use super::*;
    use crate::DiskOptions;
    use crate::format::DiskEntry;

    pub(crate) fn segment() -> Arc<Segment> {
        let file = Box::new(tempfile::tempfile().unwrap());
        Arc::new(Segment::new("segment".into(), file))
    }

    /// Asserts that `act` panics with a message that contains `part`.
    pub(crate) fn panics(part: &str, act: impl FnOnce()) {
        let Err(panic) = catch_unwind(AssertUnwindSafe(act)) else {
            panic!("no panic with: {part}");
        };
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        assert!(text.unwrap_or("").contains(part), "{text:?}, not {part}");
    }

    /// A pipeline with record 1 durable, 2 written, 3 being written, 4 written out of order, 5 and
    /// 6 pending.
    fn pipeline() -> Pipeline {
        let disk = DiskState::new(
            &DiskEntry::new_zeroed(),
            &DiskOptions::new("disk"),
            DiskImage::new(Arc::new(tempfile::tempfile().unwrap()), None),
        );
        let (disk, segment) = (Arc::new(disk), segment());
        let mut pipeline = Pipeline::new(1, 0, 0, 1);
        for lsn in 1..=6 {
            let change = Modification {
                kind: DescriptorKind::Discard,
                sector: 0,
                sectors: 1,
                payload: None,
                mark: None,
            };
            assert_eq!(pipeline.append(&disk, change), lsn);
            pipeline.check();
        }
        let begin = |pipeline: &mut Pipeline| {
            pipeline.begin_batch(1, &segment, false, &mut Vec::new());
            pipeline.check();
        };
        begin(&mut pipeline);
        pipeline.end_batch(1);
        assert_eq!(pipeline.sync_written().len(), 1);
        pipeline.check();
        pipeline.end_sync();
        begin(&mut pipeline);
        pipeline.end_batch(2);
        begin(&mut pipeline);
        begin(&mut pipeline);
        pipeline.end_batch(4);
        pipeline.check();
        assert_eq!((pipeline.written(), pipeline.durable()), (2, 1));
        pipeline
    }

    #[test]
    fn a_batch_and_a_sync_end_once_and_in_order() {
        panics("a batch ends once", || pipeline().end_batch(4));
        panics("a sync is under way", || pipeline().end_sync());
        panics("one sync at a time", || {
            let mut pipeline = pipeline();
            pipeline.sync_written();
            pipeline.sync_written();
        });
        panics("no batch before it is being written", || {
            pipeline().sync_batch();
        });
        let mut pipeline = pipeline();
        pipeline.sync_written();
        pipeline.end_batch(3);
        pipeline.check();
        assert_eq!((pipeline.written(), pipeline.unsynced()), (4, 1));
        pipeline.end_sync();
        pipeline.check();
        assert_eq!(pipeline.durable(), 2);
    }

    #[test]
    fn every_broken_invariant_is_noticed() {
        type Fault = fn(&mut Pipeline);
        let broken: [(&str, Fault); 15] = [
            ("durable 3, written 2", |pipeline| pipeline.durable = 3),
            ("written 5, batched 4", |pipeline| pipeline.written = 5),
            ("batched 7, appended 6", |pipeline| pipeline.batched = 7),
            ("applied 2, durable 1", |pipeline| pipeline.applied = 2),
            ("appended 6", |pipeline| pipeline.next_lsn = 6),
            ("records are out of order", |pipeline| {
                pipeline.pending.swap(0, 1)
            }),
            ("records are out of order", |pipeline| {
                pipeline.pending.clear()
            }),
            ("bytes of pending records", |pipeline| {
                pipeline.queued_bytes += 1
            }),
            ("batches are out of order", |pipeline| {
                pipeline.writing.swap(0, 1)
            }),
            ("the newest batch", |pipeline| pipeline.writing.clear()),
            ("the oldest batch is written", |pipeline| {
                pipeline.writing[0].ended = true
            }),
            ("bytes being written", |pipeline| pipeline.writing_bytes = 0),
            ("more than was written", |pipeline| {
                pipeline.syncing = Some(3)
            }),
            ("a sync of another batch", |pipeline| {
                pipeline.writing[1].synced = true
            }),
            ("segments are unsynced", |pipeline| {
                pipeline.unsynced.clear()
            }),
        ];
        for (message, change) in broken {
            let mut pipeline = pipeline();
            pipeline.check();
            change(&mut pipeline);
            panics(message, || pipeline.check());
        }
        let mut pipeline = pipeline();
        pipeline.unsynced.push(pipeline.unsynced[0].clone());
        panics("twice", || pipeline.check());
    }
}
