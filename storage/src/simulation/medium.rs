//! A medium with a volatile cache that can lose power at any operation.
//!
//! What was synced is durable. Of what was written since, a power cut keeps any subset of sectors: a write can
//! tear at every sector boundary and writes can be reordered, as on a disk with a cache.

use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::time::Duration;

use super::engine::SimulatedEngine;
use crate::Buffer;
use crate::engine::{self, Engine, EngineKind};
use crate::error::{Error, Result};
use crate::file::DataFile;
use crate::format::Uuid;
use crate::segment::{Medium, Segment};
use crate::sync::{Arc, Event, Mutex, MutexGuard};

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
    pub random: Random,
    /// Operations until power is lost.
    pub ticks: Option<u64>,
    pub crashed: bool,
    /// Fail the sync after so many syncs with EIO, once; what was cached may or may not be durable.
    pub fail_sync: Option<u64>,
    /// Fail the read after so many reads with EIO, once.
    pub fail_read: Option<u64>,
    /// Fail the write after so many writes with EIO, once; a part of it is in the cache.
    pub fail_write: Option<u64>,
    /// Something failed, and whether that was a read.
    pub failed: bool,
    pub failed_read: bool,
    /// Writes may end short.
    pub short_writes: bool,
    /// Only syncs of the control file count for that.
    pub fail_control: bool,
    /// A power cut leaves nothing of what was not synced.
    pub forgetful: bool,
    /// There is no space for what is written to base images. Any part of it may fit.
    pub base_full: bool,
    /// There is no space for another segment file.
    pub log_full: bool,
    /// Writes to base images do not end.
    pub base_blocked: bool,
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
            fail_read: None,
            fail_write: None,
            failed: false,
            failed_read: false,
            short_writes: false,
            fail_control: false,
            forgetful: false,
            base_full: false,
            log_full: false,
            base_blocked: false,
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

    fn fail(&mut self, what: &str) -> io::Result<()> {
        self.failed = true;
        Err(io::Error::other(format!("planted {what} failure")))
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
        let full = self.base_full && self.files[file].name.starts_with("base");
        let fits = match full {
            true => self.random.below((bytes.len() / SECTOR) as u64 + 1) as usize * SECTOR,
            false => bytes.len(),
        };
        let bytes = &bytes[..fits];
        let offset = offset as usize;
        let fails = due(&mut self.fail_write);
        // At most half of it gets there.
        let bytes = match fails {
            true => &bytes[..bytes.len() / SECTOR / 2 * SECTOR],
            false => bytes,
        };
        let state = &mut self.files[file];
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
        self.tick()?;
        match (fails, full) {
            (true, _) => self.fail("write"),
            (false, true) => Err(no_space()),
            (false, false) => Ok(()),
        }
    }

    /// Makes what stands in this range durable, or all of the file.
    fn sync(&mut self, file: usize, range: Option<Range<usize>>) -> io::Result<()> {
        self.tick()?;
        self.note();
        let counts = !self.fail_control || self.files[file].name == "control";
        if counts && due(&mut self.fail_sync) {
            self.settle(file);
            return self.fail("sync");
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

    /// Changes bytes of a log file: a flipped bit, a lost or garbled sector, another sector written over one, a whole
    /// write that went to the wrong place.
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
        let kind = self.random.below(5);
        let len = (1 + self.random.below(24)) as usize * SECTOR;
        let state = &mut self.files[file];
        let bytes = Arc::make_mut(&mut state.current);
        match kind {
            0 => bytes[at + bit / 8] ^= 1 << (bit % 8),
            1 => bytes[at..at + SECTOR].fill(0),
            2 => bytes[at..at + SECTOR].copy_from_slice(&noise),
            3 => bytes.copy_within(from..from + SECTOR, at),
            _ => {
                let len = len.min(bytes.len() - at.max(from));
                bytes.copy_within(at..at + len, from);
                bytes[at..at + len].fill(0);
            }
        }
        state.durable = state.current.clone();
        state.cached.clear();
    }

    /// Works again, with what is in the cache.
    pub(super) fn restart(&mut self) {
        self.crashed = false;
        self.ticks = None;
        self.fail_sync = None;
        self.fail_read = None;
        self.fail_write = None;
        self.failed = false;
        self.failed_read = false;
        self.short_writes = false;
        (self.base_full, self.log_full) = (false, false);
        self.events.clear();
    }
}

/// Counts down to a fault.
fn due(fault: &mut Option<u64>) -> bool {
    match fault {
        Some(0) => {
            *fault = None;
            true
        }
        Some(count) => {
            *count -= 1;
            false
        }
        None => false,
    }
}

fn no_space() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOSPC)
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

    /// Whether engines are the real ones, on files of this medium. `event` is signalled when power is lost.
    fn blocking(&self, event: &Event) -> io::Result<bool> {
        let woken = Arc::new(event.try_clone()?);
        let mut world = self.lock();
        world.events.push(woken);
        Ok(world.blocking)
    }

    fn simulated(&self, event: &Event) -> io::Result<Box<dyn Engine>> {
        let engine = SimulatedEngine::new(self.clone(), event.try_clone()?);
        Ok(Box::new(engine))
    }

    /// As a write with `RWF_DSYNC` ends on a medium with FUA.
    pub(super) fn sync_range(
        &self,
        segment: &Segment,
        offset: u64,
        len: usize,
    ) -> io::Result<Option<Buffer>> {
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
        let mut world = self.medium.lock();
        if world.crashed {
            return Err(io::Error::other("power lost"));
        }
        if due(&mut world.fail_read) {
            world.failed_read = true;
            world.fail("read")?;
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

    fn write_slices_at(
        &self,
        slices: &[io::IoSlice<'_>],
        offset: u64,
        durably: bool,
    ) -> io::Result<usize> {
        let bytes: Vec<u8> = slices
            .iter()
            .flat_map(|slice| slice.iter().copied())
            .collect();
        let mut world = self.medium.lock();
        let sectors = bytes.len() / SECTOR;
        let part = match world.short_writes && sectors > 1 && world.random.one_in(3) {
            true => 1 + world.random.below(sectors as u64 - 1) as usize,
            false => sectors,
        };
        world.write(self.index, &bytes[..part * SECTOR], offset)?;
        if durably {
            let range = offset as usize..offset as usize + part * SECTOR;
            world.sync(self.index, Some(range))?;
        }
        Ok(part * SECTOR)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.medium.lock().sync(self.index, None)
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.medium.lock().files[self.index].current.len() as u64)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        let mut world = self.medium.lock();
        if world.crashed {
            return Err(io::Error::other("power lost"));
        }
        let file = &mut world.files[self.index];
        for bytes in [&mut file.durable, &mut file.current] {
            Arc::make_mut(bytes).resize(len as usize, 0);
        }
        Ok(())
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
    fn create_segment(
        &self,
        slot: u32,
        size: u64,
        _between: &mut dyn FnMut(Duration),
    ) -> Result<Segment> {
        let path = PathBuf::from(segment_name(slot));
        let created = {
            let mut world = self.lock();
            world.tick().and_then(|()| match world.log_full {
                true => Err(no_space()),
                false => Ok(()),
            })
        };
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
        match self.blocking(event)? {
            true => engine::create(EngineKind::Blocking, event),
            false => self.simulated(event),
        }
    }

    fn writer_engine(&self, event: &Event) -> io::Result<Box<dyn Engine>> {
        match self.blocking(event)? {
            true => Ok(engine::create_writer(Duration::ZERO, Arc::default())),
            false => self.simulated(event),
        }
    }
}
