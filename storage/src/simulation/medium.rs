//! A medium with a volatile cache that can lose power at any operation.
//!
//! Synced bytes are durable. Of the sectors written since, a power cut keeps any subset: a write
//! can tear at every sector boundary, and writes can be reordered, as on a disk with a cache.
//!
//! A sync that fails leaves any subset durable. The other sectors are lost, or stay readable
//! although no later sync writes them: the kernel marks pages clean when their write-back fails,
//! and drops them at any time.
//!
//! A process that is killed leaves the cache as it is. The writes that its engines had in flight
//! reach the cache at any later time, unless a new opener waits for them by locking the file.
//!
//! In front of the medium's cache is the kernel's page cache, with its own view of each file. What
//! is written to it is written back at any later time, which may fail. Then readers of the medium
//! see the old bytes, readers of the page cache may see the lost ones for a while, and each open
//! descriptor gets the error once, in its first call that asks. A descriptor opened later gets it
//! if no other one did. The page cache survives a kill, but not a power cut.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::io;
use std::ops::Range;
use std::path::Path;

use walvisor_testkit::Random;

use super::bytes::{Bytes, SECTOR};
use super::names::{DIRECTORY, Names, last};
use crate::medium::filesystem::OpenMode;
use crate::medium::mark::ImageMark;
use crate::mutant::{Mutant, planted};
use crate::sync::{Arc, Event};

/// The log's directory.
pub(super) const LOG: &str = "/log";

/// One file: its durable bytes, and the sectors written since the last sync, in order. Copies share
/// equal parts.
#[derive(Clone, Debug, Hash)]
pub(super) struct FileState {
    pub name: Arc<str>,
    pub durable: Bytes,
    /// What a reader sees: the durable bytes with the cached ones over them.
    pub current: Bytes,
    pub cached: Vec<(usize, [u8; SECTOR])>,
    /// The lengths that the file got since the last sync, in order.
    pub lengths: Vec<usize>,
    /// The file's durable attribute; `marks` has its values since, in order.
    mark: Option<ImageMark>,
    pub marks: Vec<Option<ImageMark>>,
    /// A sync failed: readers may see sectors that are not durable and that the next sync will not
    /// write.
    unwritten: bool,
    /// The cached sectors for which the page cache has not started write-back.
    dirty: BTreeSet<usize>,
    /// Sectors of the page cache whose write-back failed.
    lost: BTreeMap<usize, [u8; SECTOR]>,
    /// How many write-backs have failed, and whether any descriptor got the last error.
    errors: u64,
    told: bool,
}

/// An open descriptor.
#[derive(Clone, Copy, Debug)]
struct OpenDescriptor {
    file: usize,
    /// How many failed write-backs of its file it knows of.
    known: u64,
}

/// The state of all files and names.
#[derive(Clone, Debug, Default, Hash)]
pub(super) struct StoredFiles {
    pub files: Vec<FileState>,
    pub names: Names,
}

impl FileState {
    fn new(name: Arc<str>, bytes: Bytes) -> Self {
        Self {
            name,
            durable: bytes.clone(),
            current: bytes,
            cached: Vec::new(),
            lengths: Vec::new(),
            mark: None,
            marks: Vec::new(),
            unwritten: false,
            dirty: BTreeSet::new(),
            lost: BTreeMap::new(),
            errors: 0,
            told: false,
        }
    }

    /// The attribute as a reader sees it.
    pub(super) fn mark(&self) -> Option<ImageMark> {
        *self.marks.last().unwrap_or(&self.mark)
    }

    /// Makes the oldest `count` of the attribute's new values durable.
    fn sync_marks(&mut self, count: usize) {
        if let Some(mark) = self.marks.drain(..count).next_back() {
            self.mark = mark;
        }
    }

    /// Drops the file's cache, except for the oldest of its new lengths and marks and for the
    /// sectors `kept`.
    pub(super) fn settle<'a>(
        &mut self,
        lengths: usize,
        marks: usize,
        kept: impl Iterator<Item = &'a (usize, [u8; SECTOR])>,
    ) {
        self.sync_lengths(lengths);
        self.lengths.clear();
        self.sync_marks(marks);
        self.marks.clear();
        let len = self.durable.len();
        for (offset, sector) in kept.filter(|(offset, _)| *offset < len) {
            self.durable.put_sector(*offset, sector);
        }
        self.cached.clear();
        self.dirty.clear();
        self.lost.clear();
        self.forget_unwritten();
    }

    fn set_len(&mut self, len: usize) {
        self.current.resize(len);
        self.cached.retain(|(offset, _)| *offset < len);
        self.dirty.retain(|offset| *offset < len);
        self.lost.retain(|offset, _| *offset < len);
        self.lengths.push(len);
    }

    /// Makes the oldest `count` of its new lengths durable.
    fn sync_lengths(&mut self, count: usize) {
        for len in self.lengths.drain(..count) {
            self.durable.resize(len);
        }
    }

    /// From now on readers see the medium, except for sectors that are still to be written.
    fn forget_unwritten(&mut self) {
        self.current = self.durable.clone();
        self.unwritten = false;
        if let Some(len) = self.lengths.last() {
            self.current.resize(*len);
        }
        for (offset, sector) in &self.cached {
            self.current.put_sector(*offset, sector);
        }
    }
}

/// A write that a process had in flight when it was killed.
#[derive(Clone, Debug)]
pub(super) struct LateWrite {
    pub file: usize,
    pub offset: u64,
    pub bytes: Vec<u8>,
}

/// When the engine carries out its operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EngineTiming {
    /// At any time, in any order.
    Random,
    /// Writes reach the cache at once, everything else happens at the next poll.
    AtOnce,
    /// Each poll advances the oldest operation by one step.
    Late,
}

/// The time of a file that was not written to since it was made. 0 means that the time is unknown.
const CREATED: u64 = 1;

/// The whole medium.
#[derive(Clone, Debug)]
pub(super) struct World {
    pub files: Vec<FileState>,
    pub names: Names,
    /// Files that an opener has locked, alone or, once for each of them, with other readers.
    pub locked: Vec<usize>,
    descriptors: Vec<OpenDescriptor>,
    /// When each file was last written to, as it is in memory and on the medium, in changes of all
    /// files.
    modified: Vec<[u64; 2]>,
    changes: u64,
    pub shared: Vec<usize>,
    pub random: Random,
    /// Operations until power is lost.
    pub ticks: Option<u64>,
    pub crashed: bool,
    /// How many syncs succeed before one fails with EIO, once. The cached bytes may or may not be
    /// durable then, and may or may not stay readable.
    pub fail_sync: Option<u64>,
    /// How many reads succeed before one fails with EIO, once.
    pub fail_read: Option<u64>,
    /// How many writes succeed before one fails with EIO, once; a part of its bytes is in the
    /// cache.
    pub fail_write: Option<u64>,
    /// How many write-backs of the page cache succeed before one fails with EIO, once: any part of
    /// it is lost, and is readable through the page cache for a while.
    pub fail_write_back: Option<u64>,
    /// How many write-backs failed.
    pub failed_write_backs: u64,
    /// Whether files can't be opened through the page cache; `buffered`: whether they are opened no
    /// other way.
    pub without_cache: bool,
    pub buffered: bool,
    /// Whether any operation failed; `failed_read`: whether a read did.
    pub failed: bool,
    pub failed_read: bool,
    /// Whether writes may end short.
    pub short_writes: bool,
    /// Whether files have no attributes.
    pub without_attributes: bool,
    /// How many syncs of the control file succeed before power is lost at one.
    pub cut_control: Option<u64>,
    /// Whether `fail_sync` counts only syncs of the control file.
    pub fail_control: bool,
    /// Whether a power cut loses everything that was not synced.
    pub forgetful: bool,
    /// Whether there is no space for writes to base images. Any part of such a write may fit.
    pub base_full: bool,
    /// Whether there is no space for another segment file.
    pub log_full: bool,
    /// The file of an image whose writes and syncs fail. Any part of a write may be in the cache.
    pub failing_image: Option<usize>,
    /// Another directory has taken the place of the log's.
    pub moved: bool,
    /// Whether creating a segment file panics.
    pub create_panics: bool,
    /// Whether writes to base images never end.
    pub base_blocked: bool,
    /// Whether each engine has a thread that writes and syncs appends, as where there is no
    /// io_uring.
    pub blocking: bool,
    pub pace: EngineTiming,
    /// The price of an operation that checkpoints assume; with a high one, they copy in stripes.
    pub operation_bytes: u64,
    /// The state before each sync, if that is asked for. Any state that a power cut may leave at
    /// any time, it may also leave at the next of these moments or at the end.
    pub moments: Option<Vec<StoredFiles>>,
    /// Writes that a killed process left in flight.
    pub late: Vec<LateWrite>,
    /// How many of those reached the cache.
    pub late_writes: u64,
    /// Power cuts that left a control slot with only some of the sectors last written to it.
    pub torn_slots: u64,
    /// Bytes that were read from all files.
    pub bytes_read: u64,
    /// Signalled when power is lost, so that no thread sleeps for ever.
    pub events: Vec<Arc<Event>>,
}

impl World {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            bytes_read: 0,
            files: Vec::new(),
            names: Names::default(),
            locked: Vec::new(),
            descriptors: Vec::new(),
            modified: Vec::new(),
            changes: CREATED,
            shared: Vec::new(),
            random: Random(seed),
            ticks: None,
            crashed: false,
            fail_sync: None,
            fail_read: None,
            fail_write: None,
            fail_write_back: None,
            failed_write_backs: 0,
            without_cache: seed % 8 == 7,
            buffered: seed % 8 == 6,
            failed: false,
            failed_read: false,
            short_writes: false,
            without_attributes: false,
            cut_control: None,
            fail_control: false,
            forgetful: false,
            base_full: false,
            log_full: false,
            failing_image: None,
            moved: false,
            create_panics: false,
            base_blocked: false,
            blocking: false,
            pace: EngineTiming::Random,
            operation_bytes: if seed.is_multiple_of(4) { 1 << 20 } else { 0 },
            moments: None,
            late: Vec::new(),
            late_writes: 0,
            torn_slots: 0,
            events: Vec::new(),
        }
    }

    /// Adds a file whose bytes and name are durable.
    #[cfg(not(feature = "shuttle"))]
    pub(super) fn put_file(&mut self, path: &Path, bytes: Vec<u8>) {
        self.names.set(path, self.files.len());
        self.names.sync(path.parent().expect("a directory"));
        self.files
            .push(FileState::new(last(path), Bytes::from(&bytes[..])));
    }

    /// Opens a file. Returns its number.
    pub(super) fn open(&mut self, path: &Path, how: OpenMode) -> io::Result<usize> {
        if self.crashed {
            return Err(io::Error::other("power lost"));
        }
        let found = self.names.get(path).filter(|file| *file != DIRECTORY);
        let made = matches!(how, OpenMode::Kept { .. } | OpenMode::Emptied);
        let parent = path.parent().unwrap_or(Path::new("/"));
        match found {
            Some(file) if how != OpenMode::Emptied => return Ok(file),
            None if !made || !self.names.has_directory(parent) => {
                return Err(io::ErrorKind::NotFound.into());
            }
            _ => self.tick()?,
        }
        if let Some(file) = found {
            self.files[file].set_len(0);
            return Ok(file);
        }
        self.names.set(path, self.files.len());
        self.files
            .push(FileState::new(last(path), Bytes::default()));
        Ok(self.files.len() - 1)
    }

    /// A new descriptor of a file.
    pub(super) fn describe(&mut self, file: usize) -> usize {
        let FileState { errors, told, .. } = self.files[file];
        let known = errors - u64::from(errors > 0 && !told);
        self.descriptors.push(OpenDescriptor { file, known });
        self.descriptors.len() - 1
    }

    /// The file of a descriptor.
    pub(super) fn file_of(&self, descriptor: usize) -> usize {
        self.descriptors[descriptor].file
    }

    /// Reports failed write-backs of its file to a descriptor, once.
    fn report_error(&mut self, descriptor: usize) -> io::Result<()> {
        let OpenDescriptor { file, known } = &mut self.descriptors[descriptor];
        let file = &mut self.files[*file];
        if *known == file.errors {
            return Ok(());
        }
        (*known, file.told) = (file.errors, true);
        Err(io::Error::other("planted write-back failure"))
    }

    pub(super) fn create_dir(&mut self, path: &Path) -> io::Result<()> {
        self.tick()?;
        match self.names.get(path) {
            Some(_) => Err(io::ErrorKind::AlreadyExists.into()),
            None => {
                self.names.set(path, DIRECTORY);
                Ok(())
            }
        }
    }

    pub(super) fn rename(&mut self, from: &Path, to: &Path, replace: bool) -> io::Result<()> {
        self.tick()?;
        if !replace && self.names.get(to).is_some() {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let file = self.names.get(from).ok_or(io::ErrorKind::NotFound)?;
        self.names.rename(from, to, file);
        self.files[file].name = last(to);
        Ok(())
    }

    pub(super) fn remove(&mut self, path: &Path) -> io::Result<()> {
        self.tick()?;
        self.names.get(path).ok_or(io::ErrorKind::NotFound)?;
        self.names.unset(path);
        Ok(())
    }

    pub(super) fn sync_dir(&mut self, dir: &Path) -> io::Result<()> {
        self.tick()?;
        self.note();
        self.names.sync(dir);
        Ok(())
    }

    pub(super) fn set_mark(&mut self, file: usize, mark: Option<ImageMark>) -> io::Result<()> {
        self.tick()?;
        self.files[file].marks.push(mark);
        Ok(())
    }

    /// Changes the length of a file.
    pub(super) fn set_len(&mut self, file: usize, len: u64) -> io::Result<()> {
        self.tick()?;
        self.modify(file);
        self.files[file].set_len(len as usize);
        Ok(())
    }

    /// Allocates the first `len` bytes of a file, and lengthens it if it is shorter.
    pub(super) fn allocate(&mut self, file: usize, len: u64) -> io::Result<()> {
        if self.log_full && self.is_segment(file) {
            return Err(no_space());
        }
        if self.files[file].current.len() < len as usize {
            self.set_len(file, len)
        } else {
            Ok(())
        }
    }

    /// Whether a file is a segment of the log.
    pub(super) fn is_segment(&self, file: usize) -> bool {
        self.files[file].name.starts_with("segment")
    }

    /// Whether a file is a segment that is whole.
    fn is_live_segment(&self, file: usize) -> bool {
        self.is_segment(file) && !self.files[file].name.ends_with(".new")
    }

    /// The number of a file.
    pub(super) fn find(&self, name: &str) -> usize {
        self.names.find(name).expect("a file of that name")
    }

    pub(super) fn contents(&self, path: &Path) -> Vec<u8> {
        self.bytes(path).to_vec()
    }

    /// As [`contents`](Self::contents), without a copy.
    pub(super) fn bytes(&self, path: &Path) -> &Bytes {
        let file = self.names.get(path).expect("a file at the path");
        &self.files[file].current
    }

    /// The names of the segment files, and their bytes as readers see them.
    pub(super) fn segments(&self) -> Vec<(String, Vec<u8>)> {
        let mut names = self.names.in_directory(Path::new(LOG));
        names.retain(|name| name.to_string_lossy().starts_with("segment-"));
        let segment = |name: OsString| {
            let name = name.to_string_lossy().into_owned();
            let bytes = self.files[self.find(&name)].current.to_vec();
            (name, bytes)
        };
        names.into_iter().map(segment).collect()
    }

    pub(super) fn stored(&self) -> StoredFiles {
        StoredFiles {
            files: self.files.clone(),
            names: self.names.clone(),
        }
    }

    /// Records the state, unless everything is durable: a power cut a moment earlier can then leave
    /// the same.
    fn note(&mut self) {
        let settled = |file: &FileState| {
            file.cached.is_empty() && file.lengths.is_empty() && file.marks.is_empty()
        };
        let durable = self.names.unsynced() == 0 && self.files.iter().all(settled);
        if self.moments.is_some() && !durable {
            let stored = self.stored();
            self.moments.get_or_insert_default().push(stored);
        }
    }

    /// Whether a wait is over.
    pub(super) fn is_over(&mut self) -> bool {
        self.pace != EngineTiming::Random || self.random.one_in(2)
    }

    pub(super) fn fail(&mut self, what: &str) -> io::Result<()> {
        self.failed = true;
        Err(io::Error::other(format!("planted {what} failure")))
    }

    /// Cuts power: every operation fails from now on.
    pub(super) fn cut_power(&mut self) {
        self.crashed = true;
        self.events.iter().for_each(|event| event.signal());
    }

    /// Counts one operation; returns an error once power is lost.
    pub(super) fn tick(&mut self) -> io::Result<()> {
        self.land_some();
        self.write_back_some();
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

    /// Writes to a file, past the page cache unless `to_cache`.
    pub(super) fn write(
        &mut self,
        file: usize,
        bytes: &[u8],
        offset: u64,
        to_cache: bool,
    ) -> io::Result<()> {
        if self.crashed {
            return Err(io::Error::other("power lost"));
        }
        assert!(
            bytes.len().is_multiple_of(SECTOR) && offset.is_multiple_of(SECTOR as u64),
            "sector writes only"
        );
        let to_cache = to_cache || self.buffered;
        let full = self.base_full && self.files[file].name.starts_with("base");
        let broken = self.failing_image == Some(file);
        let fits = if full || broken {
            self.random.below((bytes.len() / SECTOR) as u64 + 1) as usize * SECTOR
        } else {
            bytes.len()
        };
        let bytes = &bytes[..fits];
        let offset = offset as usize;
        let fails = due(&mut self.fail_write);
        // At most half of the bytes reach the cache.
        let mut bytes = if fails {
            &bytes[..bytes.len() / SECTOR / 2 * SECTOR]
        } else {
            bytes
        };
        // A process that is killed while it writes to the page cache has written the first bytes.
        // What it writes past the page cache may still be in flight.
        let killed = self.ticks == Some(0);
        if killed && to_cache {
            let sectors = (bytes.len() / SECTOR) as u64;
            bytes = &bytes[..self.random.below(sectors + 1) as usize * SECTOR];
        } else if killed && self.is_live_segment(file) && self.random.one_in(2) {
            self.late.push(LateWrite {
                file,
                offset: offset as u64,
                bytes: bytes.to_vec(),
            });
            bytes = &[];
        }
        self.put(file, bytes, offset);
        let range = offset..offset + bytes.len();
        let state = &mut self.files[file];
        state.lost.retain(|at, _| !range.contains(at));
        state.dirty.retain(|at| !range.contains(at));
        if to_cache {
            let cached = state.cached.iter().map(|(at, _)| *at);
            state.dirty.extend(cached.filter(|at| range.contains(at)));
        }
        // The write during which power is lost is in the cache too, because any part of it may have
        // reached the medium.
        self.tick()?;
        match (fails || broken, full) {
            (true, _) => self.fail("write"),
            (false, true) => Err(no_space()),
            (false, false) => Ok(()),
        }
    }

    /// Reads from a file, past the page cache unless `from_cache`. `false`: the file is shorter.
    pub(super) fn read(
        &mut self,
        file: usize,
        buffer: &mut [u8],
        offset: usize,
        from_cache: bool,
    ) -> bool {
        let range = offset..offset + buffer.len();
        let from_cache = from_cache || self.buffered;
        if !from_cache {
            self.write_back_range(file, &range);
        }
        let state = &self.files[file];
        let read = state.current.read(buffer, offset);
        if read && from_cache {
            let first = range.start / SECTOR * SECTOR;
            for (&at, sector) in state.lost.range(first..range.end) {
                for (i, byte) in (at..).zip(sector).filter(|(i, _)| range.contains(i)) {
                    buffer[i - range.start] = *byte;
                }
            }
        }
        read
    }

    /// When a file was last written to.
    pub(super) fn modified(&self, file: usize) -> u64 {
        let modified = self.modified.get(file);
        modified.map_or(CREATED, |[now, _]| *now)
    }

    /// A file is written to now.
    fn modify(&mut self, file: usize) -> &mut [u64; 2] {
        if self.modified.len() <= file {
            self.modified.resize(file + 1, [CREATED; 2]);
        }
        self.changes += 1;
        let modified = &mut self.modified[file];
        modified[0] = self.changes;
        modified
    }

    /// Puts bytes into the cache.
    fn put(&mut self, file: usize, bytes: &[u8], offset: usize) {
        if !bytes.is_empty() {
            self.modify(file);
        }
        let state = &mut self.files[file];
        for (i, sector) in bytes.chunks(SECTOR).enumerate() {
            let at = offset + i * SECTOR;
            // The sector is unchanged and not in the cache: there is nothing to tear or to lose.
            if state.current.sector(at) == Some(sector)
                && (!state.unwritten || state.durable.sector(at) == Some(sector))
                && state.cached.iter().all(|(cached, _)| *cached != at)
            {
                continue;
            }
            state.current.put_sector(at, sector);
            let sector = sector.try_into().expect("a sector");
            state.cached.push((at, sector));
        }
    }

    /// Writes dirty sectors of the page cache in this range back to the medium's cache. If that
    /// fails, any of them are lost.
    pub(super) fn write_back_range(&mut self, file: usize, range: &Range<usize>) {
        let dirty: Vec<usize> = self.files[file]
            .dirty
            .range(range.clone())
            .copied()
            .collect();
        if dirty.is_empty() {
            return;
        }
        let fails = due(&mut self.fail_write_back);
        // Some pages stay readable, and some are taken from the cache at once.
        let (lost, readable) = (self.random.below(dirty.len() as u64), self.random.one_in(2));
        let state = &mut self.files[file];
        for &at in &dirty {
            state.dirty.remove(&at);
        }
        if !fails {
            return;
        }
        for &at in &dirty[lost as usize..] {
            let newest = state.cached.iter().rposition(|(cached, _)| *cached == at);
            let (_, bytes) = state.cached.remove(newest.expect("it is dirty"));
            if readable {
                state.lost.insert(at, bytes);
            }
        }
        state.forget_unwritten();
        (state.errors, state.told) = (state.errors + 1, false);
        self.failed_write_backs += 1;
        // What is lost can't be read any more.
        (self.failed, self.failed_read) = (true, true);
    }

    /// Starts write-back of a range. The descriptor gets the error of an earlier failure that it
    /// does not know of.
    pub(super) fn write_back(&mut self, descriptor: usize, range: Range<usize>) -> io::Result<()> {
        self.tick()?;
        self.write_back_range(self.file_of(descriptor), &range);
        self.report_error(descriptor)
    }

    /// Lets the kernel write a part of the page cache back, or take a page from it that could not
    /// be written, by chance.
    fn write_back_some(&mut self) {
        let used = |file: &FileState| !(file.dirty.is_empty() && file.lost.is_empty());
        if self.crashed || !self.files.iter().any(used) || !self.random.one_in(8) {
            return;
        }
        let used: Vec<usize> = (0..self.files.len())
            .filter(|&i| used(&self.files[i]))
            .collect();
        let file = used[self.random.below(used.len() as u64) as usize];
        let len = self.files[file].current.len() as u64;
        let from = self.random.below(len / SECTOR as u64 + 1) as usize * SECTOR;
        if self.random.one_in(2) {
            self.write_back_range(file, &(from..len as usize))
        } else {
            self.files[file].lost.retain(|at, _| *at < from)
        }
    }

    /// Lets one of the writes that a killed process left in flight land, by chance.
    pub(super) fn land_some(&mut self) {
        if !self.crashed && !self.late.is_empty() && self.random.one_in(16) {
            let which = self.random.below(self.late.len() as u64) as usize;
            self.land(which);
        }
    }

    fn land(&mut self, which: usize) {
        let late = self.late.swap_remove(which);
        self.late_writes += 1;
        self.put(late.file, &late.bytes, late.offset as usize);
    }

    /// Lands all writes to a file that a killed process left in flight.
    pub(super) fn await_late(&mut self, file: usize) {
        while let Some(which) = self.late.iter().position(|late| late.file == file) {
            self.land(which);
        }
    }

    /// Makes a file durable, with its attribute.
    pub(super) fn sync_all(&mut self, descriptor: usize) -> io::Result<()> {
        let file = self.file_of(descriptor);
        let (segment, state) = (self.is_segment(file), &self.files[file]);
        let (name, marked) = (&state.name, !state.marks.is_empty());
        let resized_image = !segment && !name.starts_with("control") && !state.lengths.is_empty();
        if segment && name.ends_with(".new") && planted(Mutant::SegmentNamedUnsynced)
            || name.ends_with(".walvisor-part") && planted(Mutant::ImageNamedUnsynced)
            || marked && planted(Mutant::MarkUnsynced)
            || resized_image && !marked && planted(Mutant::LengthUnsynced)
        {
            return Ok(());
        }
        self.sync(descriptor, None)?;
        if let Some([now, durable]) = self.modified.get_mut(file) {
            *durable = *now;
        }
        let state = &mut self.files[file];
        state.sync_marks(state.marks.len());
        Ok(())
    }

    /// Makes the bytes in this range durable, or all of the file's bytes.
    pub(super) fn sync(
        &mut self,
        descriptor: usize,
        range: Option<Range<usize>>,
    ) -> io::Result<()> {
        let file = self.file_of(descriptor);
        if self.files[file].name.as_ref() == "control" && due(&mut self.cut_control) {
            self.cut_power();
        }
        self.tick()?;
        self.note();
        let len = self.files[file].current.len();
        self.write_back_range(file, &range.clone().unwrap_or(0..len));
        self.report_error(descriptor)?;
        if self.failing_image == Some(file) {
            return self.fail("image");
        }
        let counts = !self.fail_control || self.files[file].name.as_ref() == "control";
        if counts && due(&mut self.fail_sync) {
            let readable = self
                .random
                .one_in(2)
                .then(|| self.files[file].current.clone());
            // Length and attribute stay in memory, and a later sync writes them.
            let unsynced = self.settle(file);
            let state = &mut self.files[file];
            (state.lengths, state.marks) = unsynced;
            state.forget_unwritten();
            if let Some(current) = readable {
                (state.current, state.unwritten) = (current, true);
            }
            return self.fail("sync");
        }
        let state = &mut self.files[file];
        // A durable write also makes the length durable that it needs.
        state.sync_lengths(state.lengths.len());
        let range = range.unwrap_or(0..state.current.len());
        let reached = |(offset, _): &mut (usize, _)| range.contains(offset);
        for (offset, sector) in state.cached.extract_if(.., reached) {
            state.durable.put_sector(offset, &sector);
        }
        if state.cached.is_empty() && !state.unwritten {
            state.current = state.durable.clone();
        }
        Ok(())
    }

    /// Drops a file's cached sectors that no later sync will write.
    pub(super) fn drop_clean(&mut self, file: usize) {
        self.files[file].lost.clear();
        if self.files[file].unwritten {
            self.files[file].forget_unwritten();
        }
    }

    /// Keeps any subset of a file's cached sectors; the others are lost, from the cache too.
    /// Returns the lengths and marks that are lost.
    fn settle(&mut self, file: usize) -> (Vec<usize>, Vec<Option<ImageMark>>) {
        // Keeps all, none, about half, or all but a few: mistakes hide at the extremes.
        let mode = if self.forgetful {
            1
        } else {
            self.random.below(4)
        };
        let random = &mut self.random;
        let keep = |_: &&_| match mode {
            0 => true,
            1 => false,
            2 => random.one_in(2),
            _ => !random.one_in(8),
        };
        let cached = std::mem::take(&mut self.files[file].cached);
        let kept: Vec<_> = cached.iter().filter(keep).collect();
        let torn = !kept.is_empty() && kept.len() < cached.len();
        self.torn_slots += u64::from(torn && self.files[file].name.as_ref() == "control");
        let mut some = |most: usize| match most {
            0 => 0,
            _ => self.random.below(most as u64 + 1) as usize,
        };
        let lengths = some(self.files[file].lengths.len());
        let marks = some(self.files[file].marks.len());
        let state = &mut self.files[file];
        let gone = (
            state.lengths[lengths..].to_vec(),
            state.marks[marks..].to_vec(),
        );
        state.settle(lengths, marks, kept.into_iter());
        gone
    }

    /// The medium after a power cut.
    pub(super) fn after_crash(&self) -> Self {
        let mut world = self.clone();
        while !world.late.is_empty() {
            let which = world.random.below(world.late.len() as u64) as usize;
            if world.random.one_in(2) {
                world.land(which)
            } else {
                drop(world.late.swap_remove(which))
            }
        }
        (0..world.files.len()).for_each(|file| drop(world.settle(file)));
        for [now, durable] in &mut world.modified {
            *now = if world.random.one_in(2) {
                *now
            } else {
                *durable
            };
            *durable = *now;
        }
        world.names.lose_power(&mut world.random);
        // A rename that was lost gives a file its old name back.
        for (file, name) in world.names.of_files() {
            world.files[file].name = name;
        }
        world.restart();
        world
    }

    /// Damages a log file: flips a bit, loses or garbles a sector, copies another sector over one,
    /// or moves a whole write to the wrong place.
    pub(super) fn damage(&mut self) {
        let logs: Vec<usize> = (0..self.files.len())
            .filter(|&i| self.names.leads_to(i) && self.files[i].current.len() > 0)
            .filter(|&i| {
                // Images and what spills from them have no checksums.
                let name = &self.files[i].name;
                let spilled = name.starts_with("spill-") && !name.contains('.');
                !name.starts_with("base") && !spilled
            })
            .collect();
        let file = logs[self.random.below(logs.len() as u64) as usize];
        let sectors = (self.files[file].current.len() / SECTOR) as u64;
        // Mostly near the start, where the records are.
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
        let mut bytes = self.files[file].current.to_vec();
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
        self.replace(file, &bytes);
    }

    /// Damages the medium's bytes.
    pub(super) fn replace(&mut self, file: usize, bytes: &[u8]) {
        let state = &mut self.files[file];
        state.current = Bytes::from(bytes);
        state.durable = state.current.clone();
        state.cached.clear();
        state.dirty.clear();
        state.lost.clear();
    }

    /// The image has other bytes and another mark from now on.
    pub(super) fn replace_image(&mut self, file: usize, bytes: &[u8], mark: Option<ImageMark>) {
        self.replace(file, bytes);
        let [now, durable] = self.modify(file);
        *durable = *now;
        let state = &mut self.files[file];
        state.marks.clear();
        state.mark = mark;
    }

    /// Continues after a kill, with all or most of the cache: the kernel may drop clean pages at
    /// any time.
    pub(super) fn restart(&mut self) {
        for file in 0..self.files.len() {
            let state = &self.files[file];
            if (state.unwritten || !state.lost.is_empty()) && self.random.one_in(2) {
                self.drop_clean(file);
            }
            // Some other program's sync got the error. Otherwise opening would fail once, which
            // breaks no promise.
            self.files[file].told = true;
        }
        self.crashed = false;
        self.locked.clear();
        self.shared.clear();
        self.ticks = None;
        self.cut_control = None;
        self.fail_sync = None;
        self.fail_read = None;
        self.fail_write = None;
        self.fail_write_back = None;
        self.failed = false;
        self.failed_read = false;
        self.short_writes = false;
        (self.base_full, self.log_full) = (false, false);
        self.failing_image = None;
        self.events.clear();
    }
}

/// Counts down to a fault; returns whether it is due.
pub(super) fn due(fault: &mut Option<u64>) -> bool {
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

pub(super) fn no_space() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOSPC)
}

#[test]
fn a_rename_that_a_power_cut_undoes_gives_a_segment_its_old_name_back() {
    let [made, whole] = ["/segment-0.new", "/segment-0"].map(Path::new);
    let mut undone = 0;
    for seed in 0..64 {
        let mut world = World::new(seed);
        let file = world.open(made, OpenMode::Emptied).unwrap();
        world.sync_dir(Path::new("/")).unwrap();
        world.rename(made, whole, true).unwrap();
        assert!(world.is_live_segment(file));
        let after = world.after_crash();
        let is_whole = after.names.get(whole).is_some();
        assert_eq!(after.is_live_segment(file), is_whole, "seed {seed}");
        undone += u64::from(!is_whole);
    }
    assert!(undone > 0 && undone < 64, "{undone}");
}
