//! The log that disks share: appending records, and forming the commit groups that make them durable.
//!
//! ```text
//!  ports ──append──▶ pending records ──group──▶ batch ──write──▶ segment ──fdatasync──▶ durable
//!                    (LSN given here)          (one leader at a time, no lock held across I/O)
//!        appended ───────────────▶          written ────▶               durable
//! ```
//! Whoever finds work and no leader leads: it takes all pending records as one batch, writes it, and syncs
//! if anyone waits. While its I/O is in flight others append and queue up for the next group.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use zerocopy::little_endian::{U32, U64};

use crate::counters::Counters;
use crate::disk::DiskState;
use crate::engine::{Chunk, Io};
use crate::format::{self, BatchHeader, Descriptor, Kind, SegmentHeader, Uuid};
use crate::index::Place;
use crate::mutant::{Mutant, planted};
use crate::segment::{Medium, Segment};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Condvar, Event, Mutex, MutexGuard, Weak};
use crate::{Buffer, Completion, Failure, SharedBuffer};

/// Bytes of payload that may wait in memory for the log; above it appends wait (backpressure).
pub(crate) const PENDING_LIMIT: usize = 32 << 20;
/// Most records that may wait for a checkpoint. Each takes an extent of the index or two, about 200 bytes: this
/// bounds memory where payloads do not, against a guest that only discards.
const UNAPPLIED_LIMIT: u64 = 1 << 20;
/// Bytes of pending payload that are written without anyone waiting for them.
const WRITE_BEHIND: usize = 1 << 20;
/// Most segments written and not synced.
const MOST_UNSYNCED: usize = 8;
/// Most payload bytes of one batch, unless a single record is longer.
const BATCH_BYTES: usize = 8 << 20;

/// Where completions of other threads' groups reach a port.
pub(crate) struct Mailbox {
    pub completions: Mutex<Vec<Completion>>,
    pub event: Event,
}

impl Mailbox {
    /// Makes the port look at the log again.
    pub(crate) fn wake(&self) {
        self.event.signal();
    }
}

/// Someone who waits for `durable` to reach an LSN.
pub(crate) struct Waiter {
    pub lsn: u64,
    pub token: u64,
    pub mailbox: Arc<Mailbox>,
}

/// A record that has an LSN and waits to be written.
pub(crate) struct Record {
    pub disk: Arc<DiskState>,
    pub lsn: u64,
    pub kind: Kind,
    pub sector: u64,
    pub sectors: u32,
    pub payload: Option<(SharedBuffer, u32)>,
}

impl Record {
    fn payload_len(&self) -> usize {
        self.payload
            .as_ref()
            .map_or(0, |(payload, _)| payload.len())
    }
}

/// A segment in use, with the LSN of its last record so far.
pub(crate) struct Live {
    pub segment: Arc<Segment>,
    pub sequence: u64,
    pub last_lsn: u64,
}

/// Where the next batch goes.
pub(crate) struct Tail {
    pub segment: Arc<Segment>,
    pub salt: u64,
    pub offset: u64,
    pub previous_crc: u32,
    /// Bytes of the segment header while it is not written yet: it goes out with the first batch.
    pub header: Option<Buffer>,
}

/// What the log's lock guards. Held for memory operations only, never across I/O.
pub(crate) struct State {
    pub next_lsn: u64,
    /// LSN of the newest record, pending ones included. Below `next_lsn - 1` after a torn tail was dropped.
    pub appended: u64,
    /// LSN of the newest record that was put into a batch.
    pub batched: u64,
    /// All records up to this LSN are in the base images.
    pub applied: u64,
    pub next_cid: u64,
    pub next_sequence: u64,
    pub pending: std::collections::VecDeque<Record>,
    pub pending_bytes: usize,
    pub waiters: Vec<Waiter>,
    /// A group's I/O is in flight.
    pub busy: bool,
    pub tail: Option<Tail>,
    /// Segments in use, oldest first; the tail's is the last.
    pub live: std::collections::VecDeque<Live>,
    pub free: Vec<Arc<Segment>>,
    /// Segments written since the last sync.
    pub unsynced: Vec<Arc<Segment>>,
    /// The pending records fit no segment: the keeper must free or make one.
    pub starved: bool,
    pub ports: Vec<Weak<Mailbox>>,
    /// For the keeper.
    pub keeper: KeeperState,
}

/// What the keeper thread is asked to do.
#[derive(Default)]
pub(crate) struct KeeperState {
    pub stop: bool,
    pub checkpoint: bool,
    /// A checkpoint waits for pending records: they may use the ring's last segment.
    pub draining: bool,
    /// Number of segment files made so far.
    pub files: u32,
}

/// What is the same for the life of the open log.
pub(crate) struct Log {
    pub dir: PathBuf,
    pub uuid: Uuid,
    pub segment_size: u64,
    pub max_segments: u32,
    pub medium: Box<dyn Medium>,
    /// Most waiters that one group serves: no limit, or 1 without group commit.
    pub most_served: usize,
    pub durable: AtomicU64,
    pub written: AtomicU64,
    pub poisoned: AtomicBool,
    /// Ports hold back requests until pending bytes fall.
    pub held_back: AtomicBool,
    pub counters: Counters,
    pub state: Mutex<State>,
    pub keeper_wanted: Condvar,
}

/// A group whose I/O is in flight: what its leader needs to end it.
pub(crate) struct Group {
    records: Vec<Record>,
    /// Byte offset of the first payload in the segment.
    payload_at: u64,
    segment: Arc<Segment>,
    last_lsn: u64,
    synced: usize,
    bytes: u64,
}

impl Log {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        match self.state.lock() {
            Ok(state) => state,
            // A thread that panics already may clean up; it can't make things worse.
            Err(poisoned) if std::thread::panicking() => poisoned.into_inner(),
            // Somebody panicked while holding the lock: a bug that has been printed. What it guards may be half
            // changed, so going on would risk the promises.
            Err(_) => panic!("the log's state was left half changed"),
        }
    }

    /// Gives a record its LSN, makes it visible to readers and queues it for the log.
    /// `payload` carries its CRC-32C, taken from the copy.
    ///
    /// # Errors
    /// Gives the payload back if the pending limit is reached; try again when woken.
    pub(crate) fn append(
        &self,
        disk: &Arc<DiskState>,
        kind: Kind,
        sector: u64,
        sectors: u32,
        payload: Option<(SharedBuffer, u32)>,
    ) -> Result<u64, Option<(SharedBuffer, u32)>> {
        let mut state = self.lock();
        let unapplied = state.appended - state.applied;
        if unapplied >= UNAPPLIED_LIMIT / 2 && !state.keeper.checkpoint {
            state.keeper.checkpoint = true;
            self.keeper_wanted.notify_one();
        }
        // Half a segment at most, so that whatever is pending fits the keeper's last segment.
        let full = state.pending_bytes >= PENDING_LIMIT.min(self.segment_size as usize / 2);
        if full || unapplied >= UNAPPLIED_LIMIT {
            self.held_back.store(true, Ordering::Relaxed);
            return Err(payload);
        }
        let lsn = state.next_lsn;
        state.next_lsn += 1;
        state.appended = lsn;
        let place = match &payload {
            Some((payload, _)) => Place::Memory {
                payload: payload.clone(),
                offset: 0,
            },
            None => Place::Zero {
                unmap: kind == Kind::Discard,
            },
        };
        // Under the log's lock, so that the index sees records in LSN order.
        if !(kind == Kind::Discard && planted(Mutant::IndexSkipsDiscard)) {
            disk.index_mut()
                .active
                .insert(sector, u64::from(sectors), lsn, place);
        }
        disk.last_lsn.store(lsn, Ordering::Release);
        let record = Record {
            disk: disk.clone(),
            lsn,
            kind,
            sector,
            sectors,
            payload,
        };
        // A record without payload still takes a descriptor: count it, so that memory stays bounded.
        state.pending_bytes += record.payload_len().max(512);
        state.pending.push_back(record);
        Ok(lsn)
    }

    /// Whether there is something to write or sync and nobody does it.
    fn due(&self, state: &State) -> bool {
        let failed = self.poisoned.load(Ordering::Acquire);
        !failed
            && !state.busy
            && (!state.waiters.is_empty()
                || state.pending_bytes >= WRITE_BEHIND.min(self.segment_size as usize / 8))
    }

    /// Takes the lead if there is work and no leader: the operation to run, and what ends it.
    pub(crate) fn lead(&self, state: &mut State) -> Option<(Io, Group)> {
        if !self.due(state) {
            return None;
        }
        let (count, header_len, payload_len) = self.batch_extent(state);
        if count > 0 && !self.make_room(state, (header_len + payload_len) as u64) {
            return None;
        }
        let led = match count {
            0 => self.sync_only(state),
            _ => self.batch(state, count, header_len, payload_len),
        };
        state.busy = true;
        Some(led)
    }

    /// How many pending records make the next batch, and the bytes of its header and padded payloads.
    fn batch_extent(&self, state: &State) -> (usize, usize, usize) {
        let mut count = 0;
        let mut payload = 0;
        // Without group commit only what this FLUSH has to wait for is written with it.
        let last = match state.waiters.first() {
            Some(first) if self.most_served == 1 => first.lsn,
            _ => u64::MAX,
        };
        let records = state.pending.iter().take_while(|record| record.lsn <= last);
        for record in records.take(format::MAX_DESCRIPTORS) {
            let more = payload + record.payload_len();
            if count > 0 && more > BATCH_BYTES.min(self.segment_size as usize / 4) {
                break;
            }
            payload = more;
            count += 1;
        }
        (
            count,
            format::batch_header_len(count),
            payload.next_multiple_of(format::BLOCK),
        )
    }

    /// Sees to it that the tail has room for `bytes`, taking a free segment into use if it must.
    fn make_room(&self, state: &mut State, bytes: u64) -> bool {
        if state
            .tail
            .as_ref()
            .is_some_and(|tail| tail.offset + bytes <= self.segment_size)
        {
            return true;
        }
        // The last segment of the ring is the keeper's: with it a checkpoint can always make what is pending
        // durable, however full the ring, and so free the others.
        let left = state.free.len() as u32 + (self.max_segments - state.keeper.files);
        let allowed = left > 1 || state.keeper.draining;
        let Some(segment) = allowed.then(|| state.free.pop()).flatten() else {
            state.starved = true;
            state.keeper.checkpoint |= !allowed;
            self.keeper_wanted.notify_one();
            return false;
        };
        state.starved = false;
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
        // The next segment is made ready, and half a ring is checkpointed, before anyone has to wait.
        let (live, max) = (state.live.len(), self.max_segments as usize);
        if state.free.is_empty() || live * 2 >= max {
            state.keeper.checkpoint |= live * 2 >= max;
            self.keeper_wanted.notify_one();
        }
        true
    }

    fn batch(
        &self,
        state: &mut State,
        count: usize,
        header_len: usize,
        payload_len: usize,
    ) -> (Io, Group) {
        let records: Vec<Record> = state.pending.drain(..count).collect();
        let first_lsn = records[0].lsn;
        let last_lsn = first_lsn + count as u64 - 1;
        let mut descriptors: Vec<Descriptor> = records
            .iter()
            .map(|record| Descriptor {
                disk_id: U32::new(record.disk.id),
                kind: U32::new(record.kind as u32),
                sector: U64::new(record.sector),
                sectors: U32::new(record.sectors),
                payload_crc: U32::new(record.payload.as_ref().map_or(0, |(_, crc)| *crc)),
            })
            .collect();
        // Segments filled without anyone waiting are synced too before they are many.
        let wanted = state.unsynced.len() >= MOST_UNSYNCED
            || self.next_served(state).any(|waiter| waiter.lsn <= last_lsn);
        let (sequence, cid) = (
            state.live.back().map_or(0, |live| live.sequence),
            state.next_cid,
        );
        state.next_cid += u64::from(wanted);
        let tail = state.tail.as_mut().expect("make_room gave one");
        let payload_bytes: usize = records.iter().map(Record::payload_len).sum();
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
            unix_us: U64::new(
                SystemTime::now()
                    .duration_since(UNIX_EPOCH)
                    .map_or(0, |t| t.as_micros() as u64),
            ),
            previous_crc: U32::new(tail.previous_crc),
            descriptor_count: U32::new(count as u32),
            payload_bytes: U64::new(payload_bytes as u64),
        };
        let mut head = Buffer::zeroed(header_len);
        if planted(Mutant::DropLastDescriptor) && count > 1 {
            let lost = descriptors
                .pop()
                .map_or(0, |descriptor| descriptor.payload_len());
            header.descriptor_count = U32::new(count as u32 - 1);
            header.payload_bytes = U64::new(payload_bytes as u64 - lost);
        }
        tail.previous_crc = header.encode(&descriptors, &mut head);
        let offset = tail.offset;
        let mut chunks = Vec::with_capacity(count + 3);
        let mut header_at = offset;
        if let Some(block) = tail.header.take() {
            header_at += block.len() as u64;
            chunks.push(chunk(block.share()));
        }
        chunks.push(chunk(head.share()));
        chunks.extend(
            records
                .iter()
                .filter_map(|r| r.payload.as_ref())
                .map(|(payload, _)| chunk(payload.clone())),
        );
        if payload_len > payload_bytes {
            chunks.push(chunk(Buffer::zeroed(payload_len - payload_bytes).share()));
        }
        let bytes: usize = chunks.iter().map(|chunk| chunk.len).sum();
        tail.offset += bytes as u64;
        let segment = tail.segment.clone();
        state.live.back_mut().expect("the tail is live").last_lsn = last_lsn;
        state.batched = last_lsn;
        if !state
            .unsynced
            .iter()
            .any(|other| Arc::ptr_eq(other, &segment))
        {
            state.unsynced.push(segment.clone());
        }
        let mut sync = if wanted {
            std::mem::take(&mut state.unsynced)
        } else {
            Vec::new()
        };
        let synced = sync.len();
        if planted(Mutant::AckBeforeSync) {
            sync.clear();
        }
        if planted(Mutant::SyncLastSegmentOnly) {
            sync.drain(..synced.saturating_sub(1));
        }
        let group = Group {
            records,
            payload_at: header_at + header_len as u64,
            segment: segment.clone(),
            last_lsn,
            synced,
            bytes: bytes as u64,
        };
        (
            Io::Append {
                segment,
                offset,
                chunks,
                sync,
            },
            group,
        )
    }

    /// Everything is written already, by write-behind: the waiters need only the sync.
    fn sync_only(&self, state: &mut State) -> (Io, Group) {
        let mut sync = std::mem::take(&mut state.unsynced);
        state.next_cid += 1;
        // Someone waits for more than is durable and nothing is pending: so something is written and not synced.
        // Only without group commit may it be synced already.
        if sync.is_empty() {
            let tail = state.tail.as_ref().expect("something was written");
            sync.push(tail.segment.clone());
        }
        let segment = sync[0].clone();
        let last_lsn = state.batched;
        let group = Group {
            records: Vec::new(),
            payload_at: 0,
            segment: segment.clone(),
            last_lsn,
            synced: sync.len(),
            bytes: 0,
        };
        (
            Io::Append {
                segment,
                offset: 0,
                chunks: Vec::new(),
                sync,
            },
            group,
        )
    }

    /// Those whom one group may serve.
    fn next_served<'a>(&self, state: &'a State) -> impl Iterator<Item = &'a Waiter> + use<'a> {
        state.waiters.iter().take(self.most_served)
    }

    /// Ends a group: publishes the watermarks, and gives everyone it served their completion. Returns the
    /// next group, if there is work for one and the leader may `go_on`.
    pub(crate) fn end_group(
        &self,
        group: Group,
        result: std::io::Result<()>,
        go_on: bool,
    ) -> Option<(Io, Group)> {
        if let Err(error) = result
            && !planted(Mutant::FailedSyncRetried)
        {
            self.poison(&error);
            return None;
        }
        let mut at = group.payload_at;
        for record in &group.records {
            if record.payload.is_some() {
                let (sector, sectors) = (record.sector, u64::from(record.sectors));
                record
                    .disk
                    .index_mut()
                    .relocate(sector, sectors, record.lsn, &group.segment, at);
                at += record.payload_len() as u64;
            }
        }
        self.counters
            .log_bytes
            .fetch_add(group.bytes, Ordering::Relaxed);
        self.written.store(group.last_lsn, Ordering::Release);
        if group.synced > 0 {
            self.counters
                .syncs
                .fetch_add(group.synced as u64, Ordering::Relaxed);
            self.counters.groups.fetch_add(1, Ordering::Relaxed);
            self.durable.store(group.last_lsn, Ordering::Release);
        }
        let freed: usize = group
            .records
            .iter()
            .map(|record| record.payload_len().max(512))
            .sum();
        let mut state = self.lock();
        state.busy = false;
        state.pending_bytes -= freed;
        let durable = self.durable.load(Ordering::Acquire);
        let most = state.waiters.len().min(self.most_served);
        let served: Vec<Waiter> = state
            .waiters
            .extract_if(..most, |waiter| {
                waiter.lsn <= durable && (group.synced > 0 || self.most_served > 1)
            })
            .collect();
        if !served.is_empty() {
            self.counters.count_group(served.len());
        }
        let held_back = self.held_back.swap(false, Ordering::Relaxed);
        let woken = if held_back {
            live_ports(&mut state)
        } else {
            Vec::new()
        };
        let next = if go_on { self.lead(&mut state) } else { None };
        drop(state);
        deliver(served, Ok(None));
        woken.iter().for_each(|port| port.wake());
        next
    }

    /// Promise 5: a failed write or sync of the log is final. Every waiter gets an error, now and later.
    pub(crate) fn poison(&self, error: &std::io::Error) {
        tracing::error!(
            "{}: the log failed ({error}); its disks are read-only until reopened",
            self.dir.display()
        );
        let mut state = self.lock();
        self.poisoned.store(true, Ordering::Release);
        state.busy = false;
        let mut waiters = std::mem::take(&mut state.waiters);
        if planted(Mutant::WaiterLostOnError) {
            // All but the keeper's own, which would wait for ever.
            waiters.retain(|waiter| waiter.token == 0);
        }
        // What was not written stays readable through the index, and will never be durable.
        state.pending.clear();
        let ports = live_ports(&mut state);
        drop(state);
        deliver(waiters, Err(Failure::Io));
        ports.iter().for_each(|port| port.wake());
    }

    /// Makes some port look for work: a leader is going away, or a segment has become free.
    pub(crate) fn wake_ports(&self) {
        let ports = live_ports(&mut self.lock());
        ports.iter().for_each(|port| port.wake());
    }
}

fn chunk(buffer: SharedBuffer) -> Chunk {
    let len = buffer.len();
    Chunk { buffer, len }
}

fn live_ports(state: &mut State) -> Vec<Arc<Mailbox>> {
    state.ports.retain(|port| port.strong_count() > 0);
    state.ports.iter().filter_map(Weak::upgrade).collect()
}

fn deliver(waiters: Vec<Waiter>, result: Result<Option<Buffer>, Failure>) {
    for waiter in waiters {
        let result = match &result {
            Ok(_) => Ok(None),
            Err(failure) => Err(*failure),
        };
        waiter
            .mailbox
            .completions
            .lock()
            .expect("mailbox lock")
            .push(Completion {
                token: waiter.token,
                result,
            });
        waiter.mailbox.wake();
    }
}
