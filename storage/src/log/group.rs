//! Forming batches and commit groups: which thread writes, which one syncs, and how a group ends.
//!
//! ```text
//!  pending ──batch──▶ writing (several at once) ──▶ written ──sync (one at a time)──▶ durable
//! ```
//! The stages overlap: while one group syncs, the next is collected, and pending records are written early when they
//! are many. In the common case nothing is being written when a sync can begin: then one operation writes and syncs
//! all pending records. The log's leader ([`Leader`](crate::log::leader::Leader)) runs the operations that sync, one
//! group after the other; a batch that is only written is written by a port.

use std::time::{Duration, Instant};

use zerocopy::little_endian::{U16, U32, U64};

use crate::format::{self, BatchHeader, Descriptor, SegmentHeader};
use crate::log::gather::Verdict;
use crate::log::state::{
    FailOnPanic, Live, Log, PENDING_LIMIT, Record, State, Tail, Writing, live_ports,
};
use crate::log::waiters::{Mailbox, Waiter, deliver};
use crate::medium::checksum::Table;
use crate::medium::engine::{Chunk, Io, SyncScope};
use crate::medium::segment::Segment;
use crate::mutant::{Mutant, planted};
use crate::sync::atomic::Ordering;
use crate::sync::{self, Arc};
use crate::{Buffer, SharedBuffer};

/// From this many bytes of pending payload on, records are written although no waiter needs them yet.
const WRITE_BEHIND: usize = 1 << 20;
/// Most batches being written at a time.
const MOST_WRITING: usize = 4;
/// Most segments written and not synced.
const MOST_UNSYNCED: usize = 8;
/// Until the next segment file is made, one part in this many of a segment is used: the rest has room for all records
/// that may be pending.
const GROWING_SHARE: u64 = 8;

/// A batch being written, a sync, or both in one operation.
pub(crate) struct Group {
    batch: Option<Batch>,
    sync: Option<Syncing>,
}

/// Lists of earlier groups, for reuse: so a leading thread does not allocate new ones for each of its groups.
#[derive(Default)]
pub(crate) struct Spare {
    records: Vec<Vec<Record>>,
    /// For the next batch; see [`Engine::list`](crate::medium::engine::Engine::list).
    pub(crate) chunks: Vec<Chunk>,
    served: Vec<Waiter>,
}

struct Batch {
    records: Vec<Record>,
    /// Byte offset of the first payload in the segment.
    payload_at: u64,
    segment: Arc<Segment>,
    last_lsn: u64,
    bytes: u64,
}

struct Syncing {
    /// When the sync ends, records up to this LSN are durable.
    lsn: u64,
    /// Number of device syncs.
    count: usize,
    began: Instant,
}

impl Log {
    /// The next operation of the log's leader. `Err`: there is none now; if a time is given, the leader waits that
    /// long.
    pub(crate) fn lead(
        &self,
        state: &mut State,
        spare: &mut Spare,
    ) -> Result<(Io, Group), Option<Duration>> {
        if self.poisoned.load(Ordering::Acquire) {
            return Err(None);
        }
        let mut wait = None;
        if !state.waiters.is_empty() {
            match self.gather(state) {
                Verdict::Start => {
                    if let Some(group) = self.serve(state, spare) {
                        return Ok(group);
                    }
                }
                Verdict::Wait(time) => wait = Some(time),
                Verdict::Hold => {}
            }
        }
        if state.unsynced.len() >= MOST_UNSYNCED {
            return Ok(self.sync_only(state));
        }
        // A port that began to wait while the leader wrote a batch does not look again: the leader writes its
        // records.
        let left = self.is_awaited(state) && !planted(Mutant::WrittenForgotten);
        if (left || self.leader_alone)
            && self.is_behind(state)
            && let Some(batch) = self.batch(state, spare, false)
        {
            return Ok(batch);
        }
        Err(wait)
    }

    /// The next batch for a port to write, while the leader may be busy with a sync; `None` if there is none.
    pub(crate) fn write_behind(&self, state: &mut State, spare: &mut Spare) -> Option<(Io, Group)> {
        let poisoned = self.poisoned.load(Ordering::Acquire);
        match poisoned || self.leader_alone || !self.is_behind(state) {
            true => None,
            false => self.batch(state, spare, false),
        }
    }

    /// Whether pending records are to be written without a sync: there are many bytes of them, or a waiter waits for
    /// `written`.
    fn is_behind(&self, state: &State) -> bool {
        let much = WRITE_BEHIND.min(self.segment_size as usize / 8);
        state.queued_bytes >= much || self.is_awaited(state)
    }

    /// Whether the leader has something to do that it may not have seen.
    pub(crate) fn wants_leader(&self, state: &State) -> bool {
        let complete = state.waiting_clients >= state.open_clients;
        let served = !state.waiters.is_empty()
            && (self.is_urgent(state) || !state.gather.holds(state.waiters.len(), complete));
        served
            || state.unsynced.len() >= MOST_UNSYNCED
            || self.is_awaited(state)
            || (self.leader_alone && self.is_behind(state))
    }

    /// Whether a group starts without waiting for more waiters to join it: group commit is off, a checkpoint waits
    /// for the group, or its records have no room.
    fn is_urgent(&self, state: &State) -> bool {
        self.most_served == 1 || state.keeper.draining.is_some() || state.starved
    }

    /// Whether a group starts now for the present waiters.
    fn gather(&self, state: &mut State) -> Verdict {
        if self.is_urgent(state) {
            state.gather.interrupt();
            return Verdict::Start;
        }
        let complete = state.waiting_clients >= state.open_clients;
        state.gather.ask(state.waiters.len(), complete)
    }

    /// The next operation towards a sync for the waiters. `None` if the leader has none: a port is writing their
    /// records, or the records have no room.
    fn serve(&self, state: &mut State, spare: &mut Spare) -> Option<(Io, Group)> {
        let (batched, written) = (state.batched, self.written.load(Ordering::Acquire));
        if state.writing.is_empty() {
            if state.pending.is_empty() {
                return Some(self.sync_only(state));
            }
            if let Some(group) = self.batch(state, spare, true) {
                return Some(group);
            }
        }
        // A batch is being written, or has no room. Waiters whose records are written already get their sync.
        let (mut ready, mut wanted) = (false, false);
        self.next_served(state).for_each(|waiter| {
            ready |= waiter.lsn <= written;
            wanted |= waiter.lsn > batched;
        });
        match () {
            () if ready => Some(self.sync_only(state)),
            () if wanted => self.batch(state, spare, false),
            () => None,
        }
    }

    /// How many pending records make the next batch, and the bytes of its header and padded payloads.
    fn batch_extent(&self, state: &State) -> (usize, usize, usize) {
        let (mut count, mut checksums, mut payload) = (0, 0, 0);
        // A batch takes all that may be pending, so that one sync serves all waiters, unless segments are small or a
        // record is longer.
        let quarter = self.segment_size as usize / 4;
        // Records that a checkpoint waits for are written in one piece, so that they fit the ring's last segment.
        // Half a segment may be pending, and one request more, of a quarter at most; the last quarter has room for
        // the headers.
        let draining = state.is_draining();
        let most = PENDING_LIMIT.min(if draining { 3 * quarter } else { quarter });
        // Without group commit, a batch takes only the records that the first waiter's FLUSH has to wait for.
        let last = match state.waiters.first() {
            Some(first) if self.most_served == 1 && !draining => first.lsn,
            _ => u64::MAX,
        };
        let records = state.pending.iter();
        let records = records.take_while(|record| record.lsn <= last);
        for record in records.take(format::MAX_DESCRIPTORS) {
            let more = payload + record.payload_len();
            if count > 0 && more > most {
                break;
            }
            payload = more;
            checksums += record.checksums().len();
            count += 1;
        }
        (
            count,
            format::batch_header_len(count, checksums),
            payload.next_multiple_of(format::BLOCK),
        )
    }

    /// Makes sure that the tail has room for `bytes`, taking a free segment into use if need be. Returns whether it
    /// has.
    fn make_room(&self, state: &mut State, bytes: u64) -> bool {
        // While the ring grows and no segment is free, most of the tail is reserved for the keeper, in case no
        // segment file can be made.
        let growing = state.free.is_empty() && state.keeper.files < self.max_segments;
        let usable = match growing && !state.is_draining() {
            true => self.segment_size / GROWING_SHARE,
            false => self.segment_size,
        };
        let tail = state.tail.as_ref();
        if tail.is_some_and(|tail| tail.offset + bytes <= usable) {
            state.starved = false;
            return true;
        }
        // The last segment of the ring is reserved for the keeper: with it a checkpoint can always make the pending
        // records durable, however full the ring, and so free the other segments.
        let to_come = match state.keeper.cramped {
            true => 0,
            false => self.max_segments - state.keeper.files,
        };
        let left = state.free.len() as u32 + to_come;
        let allowed = left > 1 || state.is_draining();
        let Some(segment) = allowed.then(|| state.free.pop_front()).flatten() else {
            // With no segment left even for the keeper, it cannot free any.
            state.keeper.failed |= state.is_draining() && left == 0;
            state.keeper.checkpoint |= !allowed;
            let stuck = state.is_stuck();
            // The log is not starved while a segment file is to come: that makes room without a checkpoint.
            state.starved = to_come == 0;
            if state.is_stuck() && !stuck {
                // Woken ports try their held-back writes again; these fail now.
                live_ports(state).iter().for_each(|port| port.wake());
            }
            self.keeper_wanted.notify_one();
            return false;
        };
        state.starved = false;
        // The unused end of the previous segment counts as used.
        state.end = state.end.next_multiple_of(self.segment_size);
        segment.note(Table::clear);
        let previous = state.live.back();
        let salt = match planted(Mutant::ReuseSalt) {
            true => 7,
            false => self.medium.salt(),
        };
        let header = SegmentHeader {
            magic: format::SEGMENT_MAGIC,
            version: U32::new(format::VERSION),
            crc: U32::new(0),
            log: self.uuid,
            sequence: U64::new(state.next_sequence),
            previous_sequence: U64::new(previous.map_or(0, |live| live.sequence)),
            previous_lsn: U64::new(state.batched),
            salt: U64::new(salt),
        };
        let mut block = Buffer::zeroed(format::BLOCK);
        let previous_crc = header.encode(&mut block);
        state.live.push_back(Live {
            segment: segment.clone(),
            sequence: state.next_sequence,
            last_lsn: state.batched,
        });
        state.next_sequence += 1;
        state.tail = Some(Tail {
            segment,
            salt,
            offset: 0,
            previous_crc,
            header: Some(block),
        });
        // The keeper makes the next segment ready, and checkpoints when half the ring is in use, before any write has
        // to wait.
        state.keeper.checkpoint |= state.live.len() * 2 >= self.max_segments as usize;
        self.keeper_wanted.notify_one();
        true
    }

    /// Makes a batch of pending records. `synced`: the same operation also syncs the batch if a waiter waits for one
    /// of its records; the caller asks for that only while no other batch is being written. `None` if nothing is
    /// pending, too many batches are being written already, or there is no room.
    fn batch(&self, state: &mut State, spare: &mut Spare, synced: bool) -> Option<(Io, Group)> {
        let (count, header_len, payload_len) = self.batch_extent(state);
        if count == 0
            || state.writing.len() >= MOST_WRITING
            || !self.make_room(state, (header_len + payload_len) as u64)
        {
            return None;
        }
        let mut records = spare.records.pop().unwrap_or_default();
        records.extend(state.pending.drain(..count));
        let first_lsn = records[0].lsn;
        let last_lsn = first_lsn + count as u64 - 1;
        let synced = synced && self.next_served(state).any(|waiter| waiter.lsn <= last_lsn);
        let (sequence, cid) = (
            state.live.back().map_or(0, |live| live.sequence),
            state.next_cid,
        );
        state.next_cid += u64::from(synced);
        let tail = state.tail.as_mut().expect("make_room gave one");
        let payload_bytes: usize = records.iter().map(Record::payload_len).sum();
        state.queued_bytes -= records.iter().map(Record::pending_bytes).sum::<usize>();
        let mut header = BatchHeader {
            magic: format::BATCH_MAGIC,
            version: U32::new(format::VERSION),
            crc: U32::new(0),
            log: self.uuid,
            sequence: U64::new(sequence),
            salt: U64::new(tail.salt),
            cid: U64::new(cid),
            first_lsn: U64::new(first_lsn),
            durable_lsn: U64::new(self.durable.load(Ordering::Acquire)),
            unix_us: U64::new(state.stamps.next()),
            previous_crc: U32::new(tail.previous_crc),
            descriptor_count: U16::new(count as u16),
            checksum_count: U16::new(0),
            payload_bytes: U64::new(payload_bytes as u64),
        };
        let mut at = tail.offset + header_len as u64;
        at += tail.header.as_ref().map_or(0, |block| block.len() as u64);
        let payload_at = at;
        tail.segment.note(|table| {
            for record in &records {
                table.add(at, record.payload_len() as u64, record.checksums());
                at += record.payload_len() as u64;
            }
        });
        let mut head = Buffer::zeroed(header_len);
        let mut described = &records[..];
        if planted(Mutant::DropLastDescriptor) && count > 1 {
            described = &records[..count - 1];
            let left: usize = described.iter().map(Record::payload_len).sum();
            header.descriptor_count = U16::new(count as u16 - 1);
            header.payload_bytes = U64::new(left as u64);
        }
        let checksums = || described.iter().flat_map(Record::checksums).copied();
        header.checksum_count = U16::new(checksums().count() as u16);
        let descriptors = described.iter().map(|record| Descriptor {
            disk_id: U32::new(record.disk.id),
            kind: U32::new(record.kind as u32),
            sector: U64::new(record.sector),
            sectors: U32::new(record.sectors),
        });
        tail.previous_crc = header.encode(descriptors, checksums(), &mut head);
        let offset = tail.offset;
        let mut chunks = std::mem::take(&mut spare.chunks);
        chunks.reserve(count + 3);
        if let Some(block) = tail.header.take() {
            chunks.push(chunk(block.share()));
        }
        chunks.push(chunk(head.share()));
        let heads = chunks.len();
        chunks.extend(
            records
                .iter()
                .filter_map(|r| r.payload.as_ref())
                .map(|payload| chunk(payload.bytes.clone())),
        );
        let payloads = heads..chunks.len();
        if payload_len > payload_bytes {
            chunks.push(chunk(Buffer::zeroed(payload_len - payload_bytes).share()));
        }
        let bytes: usize = chunks.iter().map(|chunk| chunk.len).sum();
        tail.offset += bytes as u64;
        let segment = tail.segment.clone();
        state.live.back_mut().expect("the tail is live").last_lsn = last_lsn;
        state.batched = last_lsn;
        state.end += bytes as u64;
        state.writing.push_back(Writing {
            last_lsn,
            segment: segment.clone(),
            synced,
            ended: false,
        });
        let (scope, sync) = match synced {
            true => {
                let (scope, count) = scope(state, &segment);
                (scope, Some(begin_sync(last_lsn, count)))
            }
            false => (SyncScope::None, None),
        };
        let batch = Batch {
            records,
            payload_at,
            segment: segment.clone(),
            last_lsn,
            bytes: bytes as u64,
        };
        let io = Io::Append {
            segment,
            offset,
            chunks,
            payloads,
            sync: scope,
        };
        let batch = Some(batch);
        Some((io, Group { batch, sync }))
    }

    /// A group for records that are written already and need only the sync.
    fn sync_only(&self, state: &mut State) -> (Io, Group) {
        let mut segments = std::mem::take(&mut state.unsynced);
        state.next_cid += 1;
        // A waiter waits for more than is durable, so a segment is written and not synced. Only without group commit
        // may it be synced already.
        if segments.is_empty() {
            let tail = state.tail.as_ref().expect("something was written");
            segments.push(tail.segment.clone());
        }
        let segment = segments[0].clone();
        let lsn = match planted(Mutant::SyncCoversWriting) {
            true => state.batched,
            false => self.written.load(Ordering::Acquire),
        };
        let sync = begin_sync(lsn, segments.len());
        let io = Io::Append {
            segment,
            offset: 0,
            chunks: Vec::new(),
            payloads: 0..0,
            sync: SyncScope::Segments(segments),
        };
        let group = Group {
            batch: None,
            sync: Some(sync),
        };
        (io, group)
    }

    /// The waiters that one group may serve.
    fn next_served<'a>(&self, state: &'a State) -> impl Iterator<Item = &'a Waiter> + use<'a> {
        state.waiters.iter().take(self.most_served)
    }

    /// Ends a group: publishes the watermarks, and gives each waiter that it served a completion. `result` is the
    /// number of writes that it took. `own` is the mailbox of the caller, if it has one: the caller looks into it
    /// next, so it is not woken. `then` is called with the lock held.
    pub(crate) fn end_group<T>(
        &self,
        group: Group,
        result: std::io::Result<u64>,
        own: Option<&Arc<Mailbox>>,
        spare: &mut Spare,
        then: impl FnOnce(&mut State) -> T,
    ) -> T {
        let _failing = FailOnPanic::new(self);
        assert!(!planted(Mutant::PanicEndingGroup), "planted");
        let writes = match result {
            Ok(writes) => writes,
            Err(error) => {
                self.poison(&error);
                return then(&mut self.lock());
            }
        };
        if let Some(batch) = &group.batch {
            let mut at = batch.payload_at;
            for record in &batch.records {
                if record.payload.is_some() {
                    let (sector, sectors) = (record.sector, u64::from(record.sectors));
                    record.disk.index_mut().relocate(
                        sector,
                        sectors,
                        record.lsn,
                        &batch.segment,
                        at,
                    );
                    at += record.payload_len() as u64;
                }
            }
            self.counters.writes.fetch_add(writes, Ordering::Relaxed);
            self.counters
                .log_bytes
                .fetch_add(batch.bytes, Ordering::Relaxed);
        }
        let mut state = self.lock();
        if self.poisoned.load(Ordering::Acquire) {
            // Another group has failed meanwhile: every waiter has got its error, and nothing becomes durable.
            return then(&mut state);
        }
        if let Some(batch) = &group.batch {
            self.end_batch(&mut state, batch);
        }
        if let Some(sync) = &group.sync {
            self.end_sync(&mut state, sync, &mut spare.served);
        }
        let written = self.written.load(Ordering::Acquire);
        let waiters = state.awaiting.take(|waiter| waiter.lsn <= written);
        spare.served.extend(waiters);
        let held_back = self.held_back.swap(false, Ordering::Relaxed);
        let then = then(&mut state);
        drop(state);
        deliver(spare.served.drain(..), Ok(()), own);
        if held_back {
            self.wake_ports();
        }
        if let Some(Batch { mut records, .. }) = group.batch {
            records.clear();
            spare.records.push(records);
        }
        then
    }

    /// Notes that a batch is written. If an earlier batch is still being written, this one counts only once that has
    /// ended.
    fn end_batch(&self, state: &mut State, batch: &Batch) {
        let freed: usize = batch.records.iter().map(Record::pending_bytes).sum();
        state.pending_bytes -= freed;
        let ended = |writing: &&mut Writing| writing.last_lsn == batch.last_lsn;
        let writing = state.writing.iter_mut().find(ended);
        writing.expect("a batch ends once").ended = true;
        while let Some(writing) = state.writing.pop_front_if(|writing| writing.ended) {
            self.written.store(writing.last_lsn, Ordering::Release);
            if !writing.synced {
                add(&mut state.unsynced, &writing.segment);
            }
        }
    }

    /// Notes that a sync has ended, and moves the waiters that it served to `served`.
    fn end_sync(&self, state: &mut State, sync: &Syncing, served: &mut Vec<Waiter>) {
        self.counters
            .syncs
            .fetch_add(sync.count as u64, Ordering::Relaxed);
        self.counters.groups.fetch_add(1, Ordering::Relaxed);
        self.durable.store(sync.lsn, Ordering::Release);
        let most = state.waiters.len().min(self.most_served);
        let ended = |waiter: &mut Waiter| waiter.lsn <= sync.lsn;
        served.extend(state.waiters.extract_if(..most, ended));
        for waiter in &*served {
            state.leave(waiter);
        }
        if !served.is_empty() {
            self.counters.count_group(served.len());
        }
        let waiting = state.waiters.len();
        state
            .gather
            .ended(sync::now() - sync.began, served.len(), waiting);
    }
}

fn begin_sync(lsn: u64, count: usize) -> Syncing {
    Syncing {
        lsn,
        count,
        began: sync::now(),
    }
}

/// What the sync after a batch in `segment` has to cover, and how many device syncs that takes. It covers the batch
/// alone if everything before it is durable and the file system honours durable writes.
fn scope(state: &mut State, segment: &Arc<Segment>) -> (SyncScope, usize) {
    let alone = state.unsynced.is_empty() && !segment.needs_sync;
    if alone {
        return (SyncScope::Write, 1);
    }
    let mut segments = std::mem::take(&mut state.unsynced);
    add(&mut segments, segment);
    let count = segments.len();
    (SyncScope::Segments(segments), count)
}

/// Adds a segment to a list, unless it is in it already.
fn add(segments: &mut Vec<Arc<Segment>>, segment: &Arc<Segment>) {
    if !segments.iter().any(|other| Arc::ptr_eq(other, segment)) {
        segments.push(segment.clone());
    }
}

fn chunk(buffer: SharedBuffer) -> Chunk {
    let len = buffer.len();
    Chunk { buffer, len }
}

impl Log {
    /// Whether a waiter waits for pending records to be written, and no batch is under way whose end would start the
    /// next.
    pub(crate) fn is_awaited(&self, state: &State) -> bool {
        let under_way = |state: &State| state.writing.iter().any(|one| !one.synced && !one.ended);
        state.awaiting.newest > state.batched && !under_way(state)
    }
}
