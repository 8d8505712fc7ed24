//! The fetch map: which chunks an image has, while a restore still fetches the others from an
//! archive, or a clone from its source.
//!
//! ```text
//!   who fetches                      IMAGE.fetch, mapped by both          the disk's owner
//!   fetches the chunks, those first   ◀── asked ── a byte a chunk ──────  a request for it waits
//!   that are asked for, and syncs     ─── fetched ──────────────────▶     the request goes on
//! ```
//! A chunk is written and synced to the image before the map says so, and the map is synced before
//! the disk's owner may use the chunk: what is written there from then on is never fetched over.
//! Who fetches removes the map when the image has everything. Until then the image has an extended
//! attribute, so that one that was moved without its map is not taken for a whole one.
//!
//! Whoever makes an image that is not whole yet makes a map first, also if nobody is to use the
//! image before it is whole: a restore, or the first fetch of a replica. Such a map is never ready,
//! and every other process refuses the image, whoever was killed when.

use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::time::Duration;

use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::thread::futex;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use crate::error::{Error, ErrorKind, Result};
use crate::medium::file::DataFile;
use crate::medium::filesystem::{OWNER, parent, sync_dir};
use crate::medium::host;

const MAGIC: [u8; 8] = *b"WALVFTCH";
const VERSION: u32 = 1;
/// Bytes before the chunks' states: the header, and from [`COUNTERS`] on the counters.
const STATES: usize = 4096;
const COUNTERS: usize = 64;
/// The counters: how often chunks were asked for, how often they came, and one that rises while
/// somebody fetches.
const ASKS: usize = 0;
const ARRIVALS: usize = 1;
const PULSE: usize = 2;
/// 0 once the disk can be opened.
const UNREADY: usize = 3;
/// Where the header page says what the chunks are fetched from, in at most so many bytes; zeroes
/// follow.
const ORIGIN: Range<usize> = 1024..STATES;
/// 1 if the image has the attribute too.
const MARKED: usize = 80;
/// The attribute of an image that has a map, where its file system has attributes.
const ATTRIBUTE: &str = "user.walvisor.fetch";

/// Start of a map.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct MapHeader {
    magic: [u8; 8],
    version: U32,
    zero: U32,
    chunk_bytes: U64,
    chunks: U64,
    /// CRC-32C of the fields before.
    crc: U32,
}

impl MapHeader {
    fn new(chunk_bytes: u64, chunks: u64) -> Self {
        let mut header = Self {
            magic: MAGIC,
            version: U32::new(VERSION),
            zero: U32::new(0),
            chunk_bytes: U64::new(chunk_bytes),
            chunks: U64::new(chunks),
            crc: U32::new(0),
        };
        header.crc = U32::new(header.sum());
        header
    }

    fn sum(&self) -> u32 {
        crc32c::crc32c(&self.as_bytes()[..offset_of!(Self, crc)])
    }

    /// Whether this is the header of a map of `len` bytes.
    fn is_of(&self, len: u64) -> bool {
        self.magic == MAGIC
            && self.crc.get() == self.sum()
            && self.version.get() == VERSION
            && self.chunk_bytes.get() > 0
            && self.chunks.get() <= FetchMap::MOST_CHUNKS
            && STATES as u64 + self.chunks.get() == len
    }
}

/// The state of a chunk.
mod state {
    /// Not in the image yet.
    pub(super) const ABSENT: u8 = 0;
    /// As `ABSENT`, and a request waits for it.
    pub(super) const ASKED: u8 = 1;
    /// In the image and synced, but the map is not synced yet. Nobody may use it.
    pub(super) const WRITTEN: u8 = 2;
    /// In the image.
    pub(super) const FETCHED: u8 = 3;
    /// The archive has lost it.
    pub(super) const LOST: u8 = 4;
}

/// The fetch map of an image. See the module's documentation.
#[derive(Debug)]
pub struct FetchMap {
    path: PathBuf,
    file: File,
    memory: NonNull<u8>,
    len: usize,
    chunk_bytes: u64,
    chunks: usize,
    /// Whether chunks can be asked for; otherwise they come in the restore's order.
    writable: bool,
}

// SAFETY: the memory is mapped for as long as the value lives, and is only accessed by atomic
// operations, which any thread may do.
unsafe impl Send for FetchMap {}
// SAFETY: as above.
unsafe impl Sync for FetchMap {}

/// Whether an image has some bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Presence {
    Present,
    /// Some chunk is still to be fetched.
    Absent,
    /// The archive has lost some chunk.
    Lost,
}

impl FetchMap {
    /// Most chunks of an image.
    pub(crate) const MOST_CHUNKS: u64 = 1 << 26;

    /// The path of an image's map: beside the image, links followed.
    pub fn path_of(image: &Path) -> PathBuf {
        let real = image.canonicalize();
        let mut name = real.unwrap_or_else(|_| image.to_owned()).into_os_string();
        name.push(".fetch");
        name.into()
    }

    /// Makes the map of an image of `bytes` bytes, then the image: sparse, for its owner only.
    /// `has`: whether the image has a chunk already. `keeps`: an image that is there keeps its
    /// bytes. Replaces a map that is there. Nobody can open the disk until a
    /// [`Fetcher`](crate::Fetcher) lets others. Returns the image, open to be written.
    ///
    /// # Errors
    /// If they can't be written.
    ///
    /// # Panics
    /// If the size of a chunk is 0.
    pub fn create(
        image: &Path,
        bytes: u64,
        chunk_bytes: u64,
        has: impl Fn(usize) -> bool,
        keeps: bool,
    ) -> Result<File> {
        Self::write(image, bytes, chunk_bytes, has, None)?;
        // An image of which nobody could know that it is not whole must not be there.
        let mut options = File::options();
        options.write(true).create(true).mode(OWNER);
        let mut make = || {
            let file = options.truncate(!keeps).open(image)?;
            Self::mark(&file)?;
            file.set_len(bytes)?;
            file.sync_all()?;
            Ok(file)
        };
        let file = make().map_err(|error| Error::io("make the image", image, error))?;
        sync_dir(parent(&Self::path_of(image)))?;
        Ok(file)
    }

    /// Writes the map of an image, as [`create`](Self::create) does. With an `origin`, which says
    /// what the chunks are fetched from, and whether the image is [marked](Self::mark), anybody may
    /// open the disk at once.
    pub(crate) fn write(
        image: &Path,
        bytes: u64,
        chunk_bytes: u64,
        has: impl Fn(usize) -> bool,
        origin: Option<(&str, bool)>,
    ) -> Result<()> {
        let path = Self::path_of(image);
        let chunks = bytes.div_ceil(chunk_bytes);
        let header = MapHeader::new(chunk_bytes, chunks);
        let mut map = vec![0; STATES];
        map[..size_of::<MapHeader>()].copy_from_slice(header.as_bytes());
        map[COUNTERS + 4 * UNREADY] = u8::from(origin.is_none());
        let (origin, marked) = origin.unwrap_or_default();
        map[ORIGIN][..origin.len()].copy_from_slice(origin.as_bytes());
        map[MARKED] = u8::from(marked);
        map.extend((0..chunks as usize).map(|chunk| {
            if has(chunk) {
                state::FETCHED
            } else {
                state::ABSENT
            }
        }));
        let unfinished = path.with_extension("fetch.new");
        let mut options = File::options();
        options.write(true).create(true).truncate(true).mode(OWNER);
        let write = || {
            let file = options.open(&unfinished)?;
            DataFile::write_all_at(&file, &map, 0)?;
            file.sync_all()?;
            std::fs::rename(&unfinished, &path)
        };
        let written = write().map_err(|error| Error::io("write the fetch map", &path, error));
        written.inspect_err(|_| drop(std::fs::remove_file(&unfinished)))?;
        sync_dir(parent(&path))
    }

    /// Marks an image that has a map, or will have one under its final name. Returns whether its
    /// file system has attributes.
    pub(crate) fn mark(image: &File) -> io::Result<bool> {
        host::write_attribute(image, ATTRIBUTE, Some(b"1"))
    }

    /// Takes the mark away.
    pub(crate) fn unmark(image: &File) -> io::Result<()> {
        host::write_attribute(image, ATTRIBUTE, None).map(drop)
    }

    /// Whether this image can be the map's: it is marked, or could not be.
    pub(crate) fn is_marked(&self, image: &Path) -> Result<bool> {
        let read = || {
            let mut marked = [0];
            self.file.read_exact_at(&mut marked, MARKED as u64)?;
            let attribute = host::read_attribute(&File::open(image)?, ATTRIBUTE)?;
            Ok(marked[0] == 0 || attribute.is_some())
        };
        read().map_err(|error| Error::io("read the mark of the image", image, error))
    }

    /// What the chunks are fetched from, if the map says so.
    pub(crate) fn origin(&self) -> Result<String> {
        let mut text = [0; ORIGIN.end - ORIGIN.start];
        let read = self.file.read_exact_at(&mut text, ORIGIN.start as u64);
        read.map_err(|error| Error::io("read the fetch map", &self.path, error))?;
        let text = String::from_utf8_lossy(&text);
        Ok(text.trim_end_matches('\0').to_owned())
    }

    /// Opens an image's map; `None` if there is none: the image has everything.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`] if it is not a map; if it can't be read.
    pub fn open(image: &Path) -> Result<Option<Self>> {
        let path = Self::path_of(image);
        let opened = File::options().read(true).write(true).open(&path);
        let (opened, writable) = match opened {
            Err(error) if read_only(&error) => (File::open(&path), false),
            opened => (opened, true),
        };
        let file = match opened {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return refuse_lone(image).map(|()| None);
            }
            opened => opened.map_err(|error| Error::io("open the fetch map", &path, error))?,
        };
        let mut header = MapHeader::new_zeroed();
        let read = file.read_exact_at(header.as_mut_bytes(), 0);
        let len = read.and_then(|()| Ok(file.metadata()?.len()));
        let len = len.map_err(|error| Error::io("read the fetch map", &path, error))?;
        if !header.is_of(len) {
            return Err(damaged(&path));
        }
        let len = len as usize;
        let memory = map_file(&file, len, writable);
        let memory = memory.map_err(|error| Error::io("map the fetch map", &path, error))?;
        Ok(Some(Self {
            path,
            file,
            memory,
            len,
            chunk_bytes: header.chunk_bytes.get(),
            chunks: header.chunks.get() as usize,
            writable,
        }))
    }

    /// Refuses an image that lacks chunks, for a reader that can't wait for them.
    ///
    /// # Errors
    /// [`ErrorKind::Locked`].
    pub(crate) fn refuse(image: &Path) -> Result<()> {
        let path = Self::path_of(image);
        match (path.exists(), image.exists()) {
            (false, _) => refuse_lone(image),
            (true, true) => Err(unready(image)),
            (true, false) => Err(Error::new(
                ErrorKind::Locked,
                format!(
                    "{0}: the fetch map of an image that is not there: run the restore or the \
                     clone that was ended too early again, put the image back, or remove {0}",
                    path.display()
                ),
            )),
        }
    }

    /// The number of chunks.
    pub fn chunks(&self) -> usize {
        self.chunks
    }

    /// Bytes of a chunk, but the last.
    pub(crate) fn chunk_bytes(&self) -> u64 {
        self.chunk_bytes
    }

    /// The disk's log is there: others may open the disk, and wait for the chunks that they need.
    pub(crate) fn set_ready(&self) {
        self.assert_writable();
        self.counter(UNREADY).store(0, Ordering::Release);
    }

    /// Refuses a disk that nobody may use yet.
    ///
    /// # Errors
    /// [`ErrorKind::Locked`].
    pub(crate) fn refuse_unready(&self, image: &Path) -> Result<()> {
        match self.counter(UNREADY).load(Ordering::Acquire) {
            0 => Ok(()),
            _ => Err(unready(image)),
        }
    }

    /// Lets requests use what a restore that was killed has written, unless one is running.
    pub(crate) fn settle_abandoned(&self) -> Result<()> {
        if self.writable && self.lock()? {
            self.settle()?;
            let unlocked = self.file.unlock();
            unlocked.map_err(|error| Error::io("unlock the fetch map", &self.path, error))?;
        }
        Ok(())
    }

    /// Takes the lock of whoever fetches; `false`: another process has it. Dropping the map
    /// releases it. Only its owner may change the map; the methods that do panic if the map can't
    /// be written.
    ///
    /// # Errors
    /// If the file system has no locks, or the map can't be written.
    pub(crate) fn lock(&self) -> Result<bool> {
        if !self.writable {
            let error = io::ErrorKind::ReadOnlyFilesystem.into();
            return Err(Error::io("write the fetch map", &self.path, error));
        }
        let locked = DataFile::try_lock(&self.file, false);
        locked.map_err(|error| Error::io("lock the fetch map", &self.path, error))
    }

    /// What an earlier process has left, once this one has the [lock](Self::lock): chunks that it
    /// wrote are fetched, and those that were lost are absent.
    ///
    /// # Errors
    /// As [`settle`](Self::settle).
    pub(crate) fn resume(&self) -> Result<()> {
        self.assert_writable();
        for chunk in self.states() {
            match chunk.load(Ordering::Acquire) {
                state::LOST => chunk.store(state::ABSENT, Ordering::Release),
                // If a sync has failed, the next one has nothing to write unless it changes.
                state::WRITTEN => chunk.store(state::WRITTEN, Ordering::Release),
                _ => {}
            }
        }
        self.settle()
    }

    /// Whether the image lacks this chunk, and nobody knows that it can't be had.
    pub fn lacks(&self, chunk: usize) -> bool {
        matches!(
            self.states()[chunk].load(Ordering::Acquire),
            state::ABSENT | state::ASKED
        )
    }

    /// Whether requests wait for this chunk.
    pub(crate) fn is_asked(&self, chunk: usize) -> bool {
        self.states()[chunk].load(Ordering::Acquire) == state::ASKED
    }

    /// The chunks for which requests wait.
    pub(crate) fn asked(&self) -> Vec<usize> {
        (0..self.chunks)
            .filter(|chunk| self.is_asked(*chunk))
            .collect()
    }

    /// A chunk was written to the image, and the image was synced since. It can be used once this
    /// map was [settled](Self::settle).
    pub(crate) fn note_written(&self, chunk: usize) {
        self.assert_writable();
        let before = self.states()[chunk].swap(state::WRITTEN, Ordering::AcqRel);
        assert_ne!(
            before,
            state::FETCHED,
            "a chunk that requests use is not written again"
        );
    }

    /// The archive has lost a chunk: requests for it fail.
    pub(crate) fn note_lost(&self, chunk: usize) {
        self.assert_writable();
        self.states()[chunk].store(state::LOST, Ordering::Release);
        self.announce();
    }

    /// Syncs the map, and lets requests use the chunks that were
    /// [written](Self::note_written).
    ///
    /// # Errors
    /// If the map can't be synced.
    pub(crate) fn settle(&self) -> Result<()> {
        self.assert_writable();
        let synced = self.file.sync_data();
        synced.map_err(|error| Error::io("sync the fetch map", &self.path, error))?;
        for chunk in self.states() {
            // A page that is not written to need not be written back.
            if chunk.load(Ordering::Acquire) == state::WRITTEN {
                chunk.store(state::FETCHED, Ordering::Release);
            }
        }
        self.announce();
        Ok(())
    }

    /// Tells those who wait that somebody fetches. Call it every second.
    pub(crate) fn beat(&self) {
        self.assert_writable();
        self.counter(PULSE).fetch_add(1, Ordering::AcqRel);
    }

    /// How often chunks were asked for.
    pub(crate) fn asks(&self) -> u32 {
        self.counter(ASKS).load(Ordering::Acquire)
    }

    /// Wakes those who wait until chunks are asked for.
    pub(crate) fn end_wait_for_ask(&self) {
        self.counter(ASKS).fetch_add(1, Ordering::AcqRel);
        wake(self.counter(ASKS));
    }

    /// Waits until chunks are asked for, if they have been `asks` times so far, at most `time`.
    pub fn wait_for_ask(&self, asks: u32, time: Duration) {
        wait(self.counter(ASKS), asks, time);
    }

    /// Removes an image's map, if it has one: the image has everything, or is made anew.
    ///
    /// # Errors
    /// If it can't be removed.
    pub fn remove(image: &Path) -> Result<()> {
        let path = Self::path_of(image);
        if !path.exists() {
            return Ok(());
        }
        let unmark = || {
            let file = File::open(image)?;
            Self::unmark(&file)?;
            file.sync_all()
        };
        let unmarked = match unmark() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            unmarked => unmarked,
        };
        let removed = unmarked.and_then(|()| std::fs::remove_file(&path));
        removed.map_err(|error| Error::io("remove the fetch map", &path, error))?;
        sync_dir(parent(&path))
    }

    /// Whether the image has these bytes. What is behind the last chunk is there: the image has
    /// grown since.
    pub(crate) fn presence(&self, bytes: Range<u64>) -> Presence {
        let mut presence = Presence::Present;
        for chunk in self.states_of(bytes) {
            match chunk.load(Ordering::Acquire) {
                state::FETCHED => {}
                state::LOST => return Presence::Lost,
                _ => presence = Presence::Absent,
            }
        }
        presence
    }

    /// Whether the image has everything.
    pub(crate) fn is_complete(&self) -> bool {
        let mut states = self.states().iter();
        states.all(|chunk| chunk.load(Ordering::Acquire) == state::FETCHED)
    }

    /// Refuses an image that lacks chunks.
    ///
    /// # Errors
    /// [`ErrorKind::Locked`].
    pub(crate) fn refuse_absent(&self, image: &Path) -> Result<()> {
        if self.is_complete() {
            Ok(())
        } else {
            Err(unready(image))
        }
    }

    /// Bytes of the chunks that the image lacks, the last one counted as a whole.
    pub(crate) fn absent_bytes(&self) -> u64 {
        let absent = |chunk: &&AtomicU8| chunk.load(Ordering::Acquire) != state::FETCHED;
        self.states().iter().filter(absent).count() as u64 * self.chunk_bytes
    }

    /// Asks for the chunks of these bytes that the image lacks.
    pub(crate) fn ask(&self, bytes: Range<u64>) {
        if !self.writable {
            return;
        }
        let mut any = false;
        for chunk in self.states_of(bytes) {
            let (absent, asked) = (state::ABSENT, state::ASKED);
            let changed =
                chunk.compare_exchange(absent, asked, Ordering::AcqRel, Ordering::Acquire);
            any |= changed.is_ok();
        }
        if any {
            self.end_wait_for_ask();
        }
    }

    /// How often chunks have come, or turned out to be lost.
    pub(crate) fn arrivals(&self) -> u32 {
        self.counter(ARRIVALS).load(Ordering::Acquire)
    }

    /// Waits for the next arrival after the first `arrivals`, at most `time`.
    pub(crate) fn wait_for_arrival(&self, arrivals: u32, time: Duration) {
        wait(self.counter(ARRIVALS), arrivals, time);
    }

    /// Changes while somebody fetches.
    pub(crate) fn pulse(&self) -> u32 {
        self.counter(PULSE).load(Ordering::Acquire)
    }

    /// Storing to a mapping that may only be read would kill the process.
    fn assert_writable(&self) {
        assert!(
            self.writable,
            "{}: open for reading only",
            self.path.display()
        );
    }

    fn announce(&self) {
        self.counter(ARRIVALS).fetch_add(1, Ordering::AcqRel);
        wake(self.counter(ARRIVALS));
    }

    fn states(&self) -> &[AtomicU8] {
        // SAFETY: the states are mapped behind the header, up to the end of the mapping, which
        // lives as long as `self`. Each is a byte, which has any alignment, and all accesses are
        // atomic. A read-only mapping is only loaded from: those who store have a writable one.
        unsafe {
            let first = self.memory.add(STATES).cast::<AtomicU8>();
            std::slice::from_raw_parts(first.as_ptr(), self.chunks)
        }
    }

    fn states_of(&self, bytes: Range<u64>) -> &[AtomicU8] {
        let chunk = |byte: u64| (byte / self.chunk_bytes).min(self.chunks as u64) as usize;
        let end = chunk(bytes.end.saturating_add(self.chunk_bytes - 1));
        &self.states()[chunk(bytes.start).min(end)..end]
    }

    /// [`ASKS`] and its like.
    fn counter(&self, number: usize) -> &AtomicU32 {
        // SAFETY: the counters are mapped within the header, at a multiple of 4 bytes of a mapping
        // that begins on a page. They live as long as `self`, and all accesses are atomic.
        unsafe {
            let counters = self.memory.add(COUNTERS).cast::<AtomicU32>();
            counters.add(number).as_ref()
        }
    }
}

impl Drop for FetchMap {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and nobody borrows it any more.
        let unmapped = unsafe { munmap(self.memory.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok(), "a mapping can be given back");
    }
}

/// The error for an image that is not whole.
fn unready(image: &Path) -> Error {
    let image = image.display();
    Error::new(
        ErrorKind::Locked,
        format!(
            "{image}: not all of the image has been fetched yet; wait until 'walvisor archive \
             restore' or 'follow', or 'disk clone --serve', has it, or run that again if it was \
             ended too early"
        ),
    )
}

/// Refuses an image that should have a map, and has none.
fn refuse_lone(image: &Path) -> Result<()> {
    // The open of a FIFO would wait.
    let is_file = std::fs::metadata(image).is_ok_and(|metadata| metadata.is_file());
    let read = || File::open(image).and_then(|file| host::read_attribute(&file, ATTRIBUTE));
    match is_file.then(read) {
        Some(Ok(Some(_))) => Err(Error::new(
            ErrorKind::NotFound,
            format!(
                "{}: the image is incomplete, and its fetch map is missing: {}; put that back, or \
                 restore or clone to another place",
                image.display(),
                FetchMap::path_of(image).display()
            ),
        )),
        // If the image can't be read, its opener says so.
        _ => Ok(()),
    }
}

fn damaged(path: &Path) -> Error {
    let path = path.display();
    Error::new(
        ErrorKind::Damaged,
        format!(
            "{path}: this is not a fetch map of version {VERSION}, and without it nobody knows \
             what its image has; restore or clone to another place"
        ),
    )
}

fn map_file(file: impl AsFd, len: usize, writable: bool) -> io::Result<NonNull<u8>> {
    let protection = if writable {
        ProtFlags::READ | ProtFlags::WRITE
    } else {
        ProtFlags::READ
    };
    let (anywhere, shared) = (std::ptr::null_mut(), MapFlags::SHARED);
    // SAFETY: a new mapping at an address of the kernel's choice: no memory that is in use changes.
    let memory = unsafe { mmap(anywhere, len, protection, shared, file, 0) }?;
    NonNull::new(memory.cast()).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
}

/// Whether a file can be read, but not be written.
fn read_only(error: &io::Error) -> bool {
    let kind = error.kind();
    kind == io::ErrorKind::PermissionDenied || kind == io::ErrorKind::ReadOnlyFilesystem
}

/// Waits while the counter has this value, at most `time`. May return early.
fn wait(counter: &AtomicU32, value: u32, time: Duration) {
    let Ok(time) = time.try_into() else { return };
    // Why it returns does not matter: the caller looks again. The flags are those of memory that
    // processes share.
    let _ = futex::wait(counter, futex::Flags::empty(), value, Some(&time));
}

fn wake(counter: &AtomicU32) {
    let _ = futex::wake(counter, futex::Flags::empty(), u32::MAX >> 1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_there_once_the_map_is_settled() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("disk.img");
        File::create(&image).unwrap();
        assert!(FetchMap::open(&image).unwrap().is_none());
        FetchMap::create(&image, 10 << 20, 4 << 20, |chunk| chunk == 1, false).unwrap();
        assert!(FetchMap::refuse(&image).is_err());
        let map = FetchMap::open(&image).unwrap().unwrap();
        let reader = FetchMap::open(&image).unwrap().unwrap();
        assert!(map.lock().unwrap() && !reader.lock().unwrap());
        assert!(reader.refuse_unready(&image).is_err());
        map.set_ready();
        reader.refuse_unready(&image).unwrap();
        assert_eq!(map.chunks(), 3);
        assert_eq!(reader.presence(0..1), Presence::Absent);
        assert_eq!(reader.presence(4 << 20..8 << 20), Presence::Present);
        assert_eq!(reader.presence(5 << 20..(8 << 20) + 1), Presence::Absent);
        // What has come to the image since.
        assert_eq!(reader.presence(12 << 20..20 << 20), Presence::Present);
        let (asks, arrivals) = (map.asks(), reader.arrivals());
        reader.ask(0..9 << 20);
        assert_eq!((map.asked(), map.asks()), (vec![0, 2], asks + 1));
        map.note_written(0);
        assert_eq!(reader.presence(0..1), Presence::Absent);
        assert_eq!(reader.arrivals(), arrivals);
        map.settle().unwrap();
        assert_eq!(reader.presence(0..8 << 20), Presence::Present);
        assert_eq!(reader.arrivals(), arrivals + 1);
        map.note_lost(2);
        assert_eq!(reader.presence(0..10 << 20), Presence::Lost);
        // A process that was killed before it could settle, and the next one.
        map.resume().unwrap();
        assert!(map.lacks(2));
        map.note_written(2);
        drop(map);
        assert!(reader.lock().unwrap());
        reader.resume().unwrap();
        assert!(reader.is_complete());
        FetchMap::remove(&image).unwrap();
        FetchMap::remove(&image).unwrap();
        FetchMap::refuse(&image).unwrap();
    }

    #[test]
    fn an_image_is_not_used_without_its_map() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("disk.img");
        let file = File::create(&image).unwrap();
        if !host::write_attribute(&file, "user.a", Some(b"1")).unwrap() {
            return println!("skipped: no attributes here");
        }
        FetchMap::create(&image, 8 << 20, 4 << 20, |_| false, false).unwrap();
        let moved = dir.path().join("moved.img");
        std::fs::rename(&image, &moved).unwrap();
        for error in [
            FetchMap::open(&moved).unwrap_err(),
            FetchMap::refuse(&moved).unwrap_err(),
        ] {
            let text = error.to_string();
            assert!(text.contains("moved.img.fetch; put that back"), "{text}");
        }
        std::fs::rename(FetchMap::path_of(&image), FetchMap::path_of(&moved)).unwrap();
        assert!(FetchMap::open(&moved).unwrap().is_some());
    }

    #[test]
    fn what_is_no_map_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let image = dir.path().join("disk.img");
        File::create(&image).unwrap();
        FetchMap::create(&image, 8 << 20, 4 << 20, |_| false, false).unwrap();
        let path = FetchMap::path_of(&image);
        let right = std::fs::read(&path).unwrap();
        let mut wrong: Vec<Vec<u8>> = (0..size_of::<MapHeader>())
            .map(|at| {
                let mut map = right.clone();
                map[at] ^= 1;
                map
            })
            .collect();
        wrong.push(right[..right.len() - 1].to_vec());
        wrong.push([&right[..], &[0]].concat());
        for map in wrong {
            std::fs::write(&path, map).unwrap();
            let error = FetchMap::open(&image).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Damaged);
        }
        std::fs::write(&path, &right[..7]).unwrap();
        assert!(FetchMap::open(&image).is_err());
    }
}
