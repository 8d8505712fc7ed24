//! A medium with a volatile cache that can lose power at any operation.
//!
//! What was synced is durable. Of what was written since, a power cut keeps any subset of sectors: a write can
//! tear at every sector boundary and writes can be reordered, as on a disk with a cache.

use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::time::Duration;

use crate::Buffer;
use crate::engine::{self, Chunk, Done, Engine, EngineKind, Io, Source, SyncScope};
use crate::error::{Error, Result};
use crate::file::DataFile;
use crate::format::Uuid;
use crate::segment::{Medium, Segment};
use crate::sync::{Arc, Event, Mutex, MutexGuard, thread};

pub(super) const SECTOR: usize = 512;

/// SplitMix64: small, and the same everywhere.
#[derive(Clone, Debug)]
pub(super) struct Random(pub u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e3779b97f4a7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58476d1ce4e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d049bb133111eb);
        z ^ (z >> 31)
    }

    /// A number below `limit`.
    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// True once in `n` times.
    pub(super) fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}

/// One file: what is durable, and the sectors written since the last sync, in order. Copies share what is equal.
#[derive(Clone, Debug)]
pub(super) struct FileState {
    name: String,
    pub durable: Arc<Vec<u8>>,
    /// What a reader sees: the durable bytes with the cached ones over them.
    current: Arc<Vec<u8>>,
    pub cached: Vec<(usize, [u8; SECTOR])>,
}

impl FileState {
    /// Loses its cache, except for these sectors.
    pub(super) fn settle<'a>(&mut self, kept: impl Iterator<Item = &'a (usize, [u8; SECTOR])>) {
        for (offset, sector) in kept {
            Arc::make_mut(&mut self.durable)[*offset..][..SECTOR].copy_from_slice(sector);
        }
        self.cached.clear();
        self.current = self.durable.clone();
    }
}

/// When the engine does what it was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pace {
    /// At any time, in any order.
    Random,
    /// Writes reach the cache at once, the rest happens at the next poll.
    AtOnce,
    /// Each poll brings the oldest operation one step on.
    Late,
}

/// The whole medium.
#[derive(Clone, Debug)]
pub(super) struct World {
    pub files: Vec<FileState>,
    random: Random,
    /// Operations until power is lost.
    pub ticks: Option<u64>,
    pub crashed: bool,
    /// Fail the sync after so many syncs with EIO, once; what was cached may or may not be durable.
    pub fail_sync: Option<u64>,
    /// It did.
    pub failed: bool,
    /// Only syncs of the control file count for that.
    pub fail_control: bool,
    /// A power cut leaves nothing of what was not synced.
    pub forgetful: bool,
    /// Appends are written and synced by a thread for each engine, as where there is no io_uring.
    pub blocking: bool,
    pub pace: Pace,
    /// The files before each sync and each new file, if they are asked for. Whatever a power cut may leave at any
    /// time it may leave at the next of these, or at the end.
    pub moments: Option<Vec<Vec<FileState>>>,
    /// Signalled when power is lost: whoever sleeps then would sleep for ever.
    events: Vec<Arc<Event>>,
}

impl World {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            files: Vec::new(),
            random: Random(seed),
            ticks: None,
            crashed: false,
            fail_sync: None,
            failed: false,
            fail_control: false,
            forgetful: false,
            blocking: false,
            pace: Pace::Random,
            moments: None,
            events: Vec::new(),
        }
    }

    pub(super) fn create(&mut self, name: &str, len: usize) -> usize {
        self.note();
        let zeroes = Arc::new(vec![0; len]);
        self.files.push(FileState {
            name: name.into(),
            durable: zeroes.clone(),
            current: zeroes,
            cached: Vec::new(),
        });
        self.files.len() - 1
    }

    pub(super) fn contents(&self, name: &str) -> &[u8] {
        &self
            .files
            .iter()
            .find(|file| file.name == name)
            .expect("a file of that name")
            .current
    }

    /// Notes the files as they are.
    fn note(&mut self) {
        if let Some(moments) = &mut self.moments {
            moments.push(self.files.clone());
        }
    }

    /// Nothing works any more.
    pub(super) fn cut_power(&mut self) {
        self.crashed = true;
        self.events.iter().for_each(|event| event.signal());
    }

    /// One operation: an error once power is gone.
    fn tick(&mut self) -> io::Result<()> {
        match &mut self.ticks {
            Some(0) => self.cut_power(),
            Some(ticks) => *ticks -= 1,
            None => {}
        }
        if self.crashed {
            Err(io::Error::other("power lost"))
        } else {
            Ok(())
        }
    }

    fn write(&mut self, file: usize, bytes: &[u8], offset: u64) -> io::Result<()> {
        if self.crashed {
            return Err(io::Error::other("power lost"));
        }
        assert!(
            bytes.len().is_multiple_of(SECTOR) && offset.is_multiple_of(SECTOR as u64),
            "sector writes only"
        );
        let state = &mut self.files[file];
        let offset = offset as usize;
        for (i, sector) in bytes.chunks(SECTOR).enumerate() {
            let at = offset + i * SECTOR;
            // The bytes that are there and always were: there is nothing to tear or to lose.
            if state.current[at..at + SECTOR] == *sector
                && state.cached.iter().all(|(offset, _)| *offset != at)
            {
                continue;
            }
            Arc::make_mut(&mut state.current)[at..at + SECTOR].copy_from_slice(sector);
            state
                .cached
                .push((at, sector.try_into().expect("a sector")));
        }
        // The write at which power is lost is in the cache too: any part of it may have reached the medium.
        self.tick()
    }

    /// Makes what stands in this range durable, or all of the file.
    fn sync(&mut self, file: usize, range: Option<Range<usize>>) -> io::Result<()> {
        self.tick()?;
        self.note();
        let counts = !self.fail_control || self.files[file].name == "control";
        if let Some(count) = self.fail_sync.as_mut().filter(|_| counts) {
            if *count == 0 {
                self.fail_sync = None;
                self.failed = true;
                self.settle(file);
                return Err(io::Error::other("planted sync failure"));
            }
            *count -= 1;
        }
        let state = &mut self.files[file];
        let range = range.unwrap_or(0..state.current.len());
        let reached = |(offset, _): &mut (usize, _)| range.contains(offset);
        for (offset, sector) in state.cached.extract_if(.., reached) {
            Arc::make_mut(&mut state.durable)[offset..offset + SECTOR].copy_from_slice(&sector);
        }
        if state.cached.is_empty() {
            state.current = state.durable.clone();
        }
        Ok(())
    }

    /// Keeps any subset of a file's cached sectors; the rest is gone, from the cache too.
    fn settle(&mut self, file: usize) {
        // All, none, about half, or all but a few: the extremes are where mistakes hide.
        let mode = match self.forgetful {
            true => 1,
            false => self.random.below(4),
        };
        let random = &mut self.random;
        let keep = |_: &&_| match mode {
            0 => true,
            1 => false,
            2 => random.one_in(2),
            _ => !random.one_in(8),
        };
        let cached = std::mem::take(&mut self.files[file].cached);
        self.files[file].settle(cached.iter().filter(keep));
    }

    /// The medium after a power cut.
    pub(super) fn after_crash(&self) -> Self {
        let mut world = self.clone();
        (0..world.files.len()).for_each(|file| world.settle(file));
        world.restart();
        world
    }

    /// Changes bytes of a log file: a flipped bit, a lost or garbled sector, a sector written to the wrong place.
    pub(super) fn damage(&mut self) {
        let logs: Vec<usize> = (0..self.files.len())
            .filter(|&i| !self.files[i].name.starts_with("base"))
            .collect();
        let file = logs[self.random.below(logs.len() as u64) as usize];
        let sectors = (self.files[file].current.len() / SECTOR) as u64;
        // Mostly near the start, where there is something.
        let near = if self.random.one_in(4) {
            sectors
        } else {
            sectors.min(64)
        };
        let at = self.random.below(near) as usize * SECTOR;
        let from = self.random.below(sectors) as usize * SECTOR;
        let bit = self.random.below(SECTOR as u64 * 8) as usize;
        let noise: Vec<u8> = (0..SECTOR).map(|_| self.random.next() as u8).collect();
        let kind = self.random.below(4);
        let state = &mut self.files[file];
        let bytes = Arc::make_mut(&mut state.current);
        match kind {
            0 => bytes[at + bit / 8] ^= 1 << (bit % 8),
            1 => bytes[at..at + SECTOR].fill(0),
            2 => bytes[at..at + SECTOR].copy_from_slice(&noise),
            _ => bytes.copy_within(from..from + SECTOR, at),
        }
        state.durable = state.current.clone();
        state.cached.clear();
    }

    /// Works again, with what is in the cache.
    pub(super) fn restart(&mut self) {
        self.crashed = false;
        self.ticks = None;
        self.fail_sync = None;
        self.failed = false;
        self.events.clear();
    }
}

/// The medium as the store sees it; all clones are one.
#[derive(Clone, Debug)]
pub(super) struct Simulated {
    pub world: Arc<Mutex<World>>,
}

impl Simulated {
    pub(super) fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().expect("world lock")
    }

    fn index(&self, name: &str) -> usize {
        let world = self.lock();
        let index = world.files.iter().position(|file| file.name == name);
        index.expect("a file of that name")
    }

    pub(super) fn file(&self, name: &str) -> Box<dyn DataFile> {
        Box::new(SimulatedFile {
            medium: self.clone(),
            index: self.index(name),
        })
    }

    /// As a write with `RWF_DSYNC` ends on a medium with FUA.
    fn sync_range(&self, segment: &Segment, offset: u64, len: usize) -> io::Result<Option<Buffer>> {
        let file = self.index(segment.path.to_str().expect("a simulated name"));
        let range = offset as usize..offset as usize + len;
        self.lock().sync(file, Some(range)).map(|()| None)
    }
}

#[derive(Debug)]
struct SimulatedFile {
    medium: Simulated,
    index: usize,
}

impl DataFile for SimulatedFile {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let world = self.medium.lock();
        if world.crashed {
            return Err(io::Error::other("power lost"));
        }
        let offset = offset as usize;
        let bytes = world.files[self.index]
            .current
            .get(offset..offset + buffer.len());
        buffer.copy_from_slice(bytes.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.medium.lock().write(self.index, bytes, offset)
    }

    fn write_slices_at(&self, slices: &[io::IoSlice<'_>], offset: u64) -> io::Result<usize> {
        let bytes: Vec<u8> = slices
            .iter()
            .flat_map(|slice| slice.iter().copied())
            .collect();
        self.medium.lock().write(self.index, &bytes, offset)?;
        Ok(bytes.len())
    }

    fn sync_data(&self) -> io::Result<()> {
        self.medium.lock().sync(self.index, None)
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.medium.lock().files[self.index].current.len() as u64)
    }

    fn zero_range(&self, offset: u64, len: u64, _unmap: bool) -> io::Result<()> {
        self.write_all_at(&vec![0; len as usize], offset)
    }

    fn write_mark(&self, _uuid: Option<&Uuid>) -> io::Result<()> {
        Ok(())
    }

    fn raw_fd(&self) -> RawFd {
        -1
    }
}

fn segment_name(slot: u32) -> String {
    format!("segment-{slot}")
}

impl Medium for Simulated {
    fn create_segment(&self, slot: u32, size: u64) -> Result<Segment> {
        let path = PathBuf::from(segment_name(slot));
        let created = self.lock().tick();
        created.map_err(|error| Error::io("create a log segment", &path, error))?;
        self.lock().create(&segment_name(slot), size as usize);
        Ok(Segment::new(path, self.file(&segment_name(slot))))
    }

    fn segments(&self) -> Result<Vec<(u32, Segment)>> {
        let count = self
            .lock()
            .files
            .iter()
            .filter(|file| file.name.starts_with("segment-"))
            .count() as u32;
        let open = |slot| {
            let name = segment_name(slot);
            Segment::new(PathBuf::from(&name), self.file(&name))
        };
        Ok((0..count).map(|slot| (slot, open(slot))).collect())
    }

    fn salt(&self) -> u64 {
        self.lock().random.next()
    }

    fn engine(&self, event: &Event) -> io::Result<Box<dyn Engine>> {
        let woken = Arc::new(event.try_clone()?);
        let blocking = {
            let mut world = self.lock();
            world.events.push(woken);
            world.blocking
        };
        if blocking {
            return engine::create(EngineKind::Blocking, Duration::ZERO, event);
        }
        Ok(Box::new(SimulatedEngine {
            medium: self.clone(),
            event: event.try_clone()?,
            queued: Vec::new(),
            failed: Vec::new(),
        }))
    }
}

/// Writes reach the cache when submitted or later, syncs happen later still, operations end in any order.
struct SimulatedEngine {
    medium: Simulated,
    event: Event,
    queued: Vec<Queued>,
    failed: Vec<Done>,
}

struct Queued {
    id: u64,
    io: Io,
    /// An append's bytes are in the cache.
    written: bool,
}

fn concat(chunks: &[Chunk]) -> Vec<u8> {
    chunks
        .iter()
        .flat_map(|chunk| chunk.buffer[..chunk.len].iter().copied())
        .collect()
}

impl Queued {
    /// Puts an append's bytes into the cache.
    fn write(&mut self) -> io::Result<()> {
        if let Io::Append {
            segment,
            offset,
            chunks,
            ..
        } = &self.io
            && !chunks.is_empty()
        {
            segment.file.write_all_at(&concat(chunks), *offset)?;
        }
        self.written = true;
        Ok(())
    }
}

impl SimulatedEngine {
    /// What is left of an operation once its bytes are written.
    fn end(&self, io: Io) -> io::Result<Option<Buffer>> {
        match io {
            Io::Append {
                segment,
                offset,
                chunks,
                sync,
            } => match sync {
                SyncScope::None => Ok(None),
                SyncScope::Write => self
                    .medium
                    .sync_range(&segment, offset, concat(&chunks).len()),
                SyncScope::Segments(segments) => segments
                    .iter()
                    .try_for_each(|segment| segment.file.sync_data())
                    .map(|()| None),
            },
            Io::Read {
                source,
                offset,
                mut buffer,
            } => {
                let read = match &source {
                    Source::Base(file) => file.read_exact_at(&mut buffer, offset),
                    Source::Segment(segment) => segment.file.read_exact_at(&mut buffer, offset),
                };
                read.map(|()| -> Option<Buffer> { Some(buffer) })
            }
            Io::Write {
                base,
                offset,
                chunks,
            } => base.write_all_at(&concat(&chunks), offset).map(|()| None),
            Io::Wait(_) => {
                // Time for others.
                thread::yield_now();
                Ok(None)
            }
        }
    }
}

impl Engine for SimulatedEngine {
    fn submit(&mut self, id: u64, io: Io) {
        self.event.signal();
        let mut queued = Queued {
            id,
            io,
            written: false,
        };
        let at_once = {
            let mut world = self.medium.lock();
            match world.pace {
                Pace::Random => world.random.one_in(2),
                pace => pace == Pace::AtOnce,
            }
        };
        if at_once && let Err(error) = queued.write() {
            self.failed.push(Done {
                id,
                result: Err(error),
            });
            return;
        }
        self.queued.push(queued);
    }

    fn enter(&mut self) {}

    fn poll(&mut self, done: &mut Vec<Done>) {
        done.append(&mut self.failed);
        if self.queued.is_empty() {
            return;
        }
        let end = {
            let world = &mut self.medium.lock();
            match world.pace {
                Pace::Random => {
                    let random = &mut world.random;
                    let count = random.below(self.queued.len() as u64 + 1) as usize;
                    (0..count)
                        .map(|i| random.below((self.queued.len() - i) as u64) as usize)
                        .collect::<Vec<_>>()
                }
                Pace::AtOnce => vec![0; self.queued.len()],
                Pace::Late => vec![0],
            }
        };
        for index in end {
            let mut queued = self.queued.remove(index);
            let id = queued.id;
            if let (false, Io::Append { sync, .. }) = (queued.written, &queued.io) {
                let ended = matches!(sync, SyncScope::None);
                match queued.write() {
                    Ok(()) if !ended => self.queued.insert(index, queued),
                    result => done.push(Done {
                        id,
                        result: result.map(|()| None),
                    }),
                }
                continue;
            }
            let result = self.end(queued.io);
            done.push(Done { id, result });
        }
        if !self.queued.is_empty() {
            self.event.signal();
        }
    }
}
