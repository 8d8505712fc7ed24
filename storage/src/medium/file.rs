//! Files that hold data, segments of the log among them, and the operations on them.
//!
//! ```text
//!   the log's leader ──▶ Appender ──▶ pwritev2(RWF_DSYNC), fdatasync or sync_file_range, in its thread   DirectAppender
//!   a port           ──▶ Appender ──▶ pwritev2 to the page cache, in its thread
//!   a port, a copy   ──▶ Engine ──▶ io_uring, or a thread                                              medium/engine/
//! ```
//!
//! Linux reports a failed write-back once to each open file description, to whichever call asks
//! first. So a segment is opened twice. [`Segment::file`] is the descriptor for syncs, and nothing
//! else consumes its errors. Everything that goes through the page cache, including starting
//! write-back, uses a [`CachedFile`], which can't sync.

use std::fs::File;
use std::io::{self, Seek};
use std::num::NonZero;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{Advice, FallocateFlags, FlockOperation, fadvise};
use rustix::io::{Errno, ReadWriteFlags};
use smallvec::SmallVec;

use crate::error::{Error, Result, invalid};
use crate::medium::checksum::ChecksumTable;
use crate::medium::host;
use crate::medium::mark::{ImageMark, Inode};
use crate::medium::partial_file::ChunkGate;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, RwLock};
use crate::{Buffer, SharedBuffer};

/// A file to read from.
pub(crate) trait ReadFile: Send + Sync + std::fmt::Debug {
    /// Fills `buffer` from `offset`, or fails.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    /// The descriptor, for engines.
    fn raw_fd(&self) -> RawFd;
    /// The file itself, for operations that only the host has; `None` if the file is not on the
    /// host.
    fn host(&self) -> Option<&File>;
}

/// The store's operations on a file that holds data: a segment, the control file, a base image.
pub(crate) trait DataFile: ReadFile {
    /// What keeps operations until an image has their chunks; `None`: the file has everything.
    fn chunk_gate(&self) -> Option<&Arc<ChunkGate>> {
        None
    }
    /// The file itself, for its extended attributes; `None` if it is not on the host.
    fn attributes(&self) -> Option<&File> {
        self.host()
    }
    /// Writes all of `bytes` at `offset`.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Writes `slices`, or a part of them, contiguously at `offset`; returns how many bytes.
    /// `durably`: those bytes are then durable, earlier ones not necessarily. Not on a file system
    /// that needs an explicit sync ([`host::is_served`]).
    fn write_slices_at(
        &self,
        slices: &[io::IoSlice<'_>],
        offset: u64,
        durably: bool,
    ) -> io::Result<usize>;
    /// Makes everything written durable.
    fn sync_data(&self) -> io::Result<()>;
    /// Makes everything written durable and drops the page cache, so that the next read comes from
    /// the medium. After a failed sync, the cache may hold bytes that look clean but are not on the
    /// medium, and that no later sync writes.
    fn drop_cache(&self) -> io::Result<()>;
    /// Length in bytes.
    fn len(&self) -> io::Result<u64>;
    /// Sets the file's length. New bytes read as zeroes.
    fn set_len(&self, len: u64) -> io::Result<()>;
    /// Reserves space for the first `len` bytes, so that a lack of space shows now, not in a later
    /// write.
    fn allocate(&self, len: u64) -> io::Result<()>;
    /// Makes everything written durable, length and attributes too.
    fn sync_all(&self) -> io::Result<()>;
    /// Tries to take the lock that every opener takes (`flock`), shared or exclusive. `false`:
    /// another opener has it.
    fn try_lock(&self, shared: bool) -> io::Result<bool>;
    /// Makes a range read as zeroes, and frees its space if `unmap`.
    fn zero_range(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()>;
    /// The file's identity on its file system.
    fn inode(&self) -> io::Result<Inode>;
    /// Reads the mark of a base image, if it has one.
    fn read_mark(&self) -> io::Result<Option<ImageMark>>;
    /// Sets or removes the mark of a base image. `false`: the file system has no extended
    /// attributes.
    fn write_mark(&self, mark: Option<&ImageMark>) -> io::Result<bool>;
    /// Opens the same file a second time, through the kernel's page cache. `path` is where it was
    /// opened; if another file is there by now, it is not opened instead.
    fn open_cached(&self, path: &Path) -> io::Result<Box<dyn CachedFile>>;
}

/// A file opened through the kernel's page cache, with a descriptor that is never synced: see the
/// module's documentation.
pub(crate) trait CachedFile: ReadFile {
    /// Writes all or a part of `slices`, which follow each other at `offset`, to the page cache;
    /// returns how many bytes.
    fn write_slices_at(&self, slices: &[io::IoSlice<'_>], offset: u64) -> io::Result<usize>;
    /// Starts write-back of the dirty pages in this range, after waiting for any that is already
    /// running.
    fn write_back(&self, range: Range<u64>) -> io::Result<()>;
    /// Asks the kernel to read this range into the page cache.
    fn read_ahead(&self, offset: u64, len: u64);
}

impl ReadFile for File {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, buffer, offset)
    }

    fn raw_fd(&self) -> RawFd {
        self.as_raw_fd()
    }

    fn host(&self) -> Option<&File> {
        Some(self)
    }
}

/// A file of the host through the page cache.
#[derive(Debug)]
struct HostCache(File);

impl ReadFile for HostCache {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(&self.0, buffer, offset)
    }

    fn raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    fn host(&self) -> Option<&File> {
        Some(&self.0)
    }
}

impl CachedFile for HostCache {
    fn write_slices_at(&self, slices: &[io::IoSlice<'_>], offset: u64) -> io::Result<usize> {
        Ok(rustix::io::pwritev(&self.0, slices, offset)?)
    }

    fn write_back(&self, range: Range<u64>) -> io::Result<()> {
        host::write_back(&self.0, range)
    }

    fn read_ahead(&self, offset: u64, len: u64) {
        // Only a hint: a missing page is read when it is needed.
        let _ = fadvise(&self.0, offset, NonZero::new(len), Advice::WillNeed);
    }
}

impl DataFile for File {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        FileExt::write_all_at(self, bytes, offset)
    }

    fn write_slices_at(
        &self,
        slices: &[io::IoSlice<'_>],
        offset: u64,
        durably: bool,
    ) -> io::Result<usize> {
        let flags = if durably {
            ReadWriteFlags::DSYNC
        } else {
            ReadWriteFlags::empty()
        };
        Ok(rustix::io::pwritev2(self, slices, offset, flags)?)
    }

    fn sync_data(&self) -> io::Result<()> {
        File::sync_data(self)
    }

    fn drop_cache(&self) -> io::Result<()> {
        self.sync_data()?;
        Ok(fadvise(self, 0, None, Advice::DontNeed)?)
    }

    fn len(&self) -> io::Result<u64> {
        // For a block device, fstat(2) reports no length, but a seek to the end does.
        (&mut &*self).seek(io::SeekFrom::End(0))
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        File::set_len(self, len)
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        match rustix::fs::fallocate(self, FallocateFlags::empty(), 0, len) {
            Err(Errno::OPNOTSUPP) => Ok(()),
            other => Ok(other?),
        }
    }

    fn sync_all(&self) -> io::Result<()> {
        File::sync_all(self)
    }

    fn try_lock(&self, shared: bool) -> io::Result<bool> {
        let lock = |operation| match rustix::fs::flock(self, operation) {
            Err(Errno::WOULDBLOCK) => Ok(false),
            locked => locked.map(|()| true),
        };
        let shared_lock = || lock(FlockOperation::NonBlockingLockShared);
        let locked = if shared {
            shared_lock()
        } else {
            match lock(FlockOperation::NonBlockingLockExclusive) {
                // NFS gives exclusive locks only to descriptors open for writing. This one is
                // read-only; a shared lock is enough to keep writers out.
                Err(Errno::BADF) => shared_lock(),
                locked => locked,
            }
        };
        Ok(locked?)
    }

    fn zero_range(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        host::zero_range(self, offset, len, unmap)
    }

    fn inode(&self) -> io::Result<Inode> {
        let metadata = self.metadata()?;
        let nanoseconds = |time: io::Result<SystemTime>| {
            let time = time
                .ok()
                .and_then(|time| time.duration_since(UNIX_EPOCH).ok());
            time.map_or(0, |time| time.as_nanos() as u64)
        };
        Ok(Inode {
            device: metadata.dev(),
            number: metadata.ino(),
            born: nanoseconds(metadata.created()),
            written: nanoseconds(metadata.modified()),
        })
    }

    fn read_mark(&self) -> io::Result<Option<ImageMark>> {
        host::read_mark(self)
    }

    fn write_mark(&self, mark: Option<&ImageMark>) -> io::Result<bool> {
        host::write_mark(self, mark)
    }

    fn open_cached(&self, path: &Path) -> io::Result<Box<dyn CachedFile>> {
        let file = host::reopen(self, path)?;
        // No readahead: a cache miss should read only its own page. If this call fails, it reads
        // more.
        let _ = fadvise(&file, 0, None, Advice::Random);
        Ok(Box::new(HostCache(file)))
    }
}

/// Sets the length of a base image, durably.
pub(crate) fn set_size(file: &dyn DataFile, path: &Path, size: u64) -> Result<()> {
    let sized = file.set_len(size).and_then(|()| file.sync_all());
    sized.map_err(|error| size_error(path, size, error))
}

/// The error for a base image that can't get this length.
pub(crate) fn size_error(path: &Path, size: u64, error: std::io::Error) -> Error {
    match error.kind() {
        std::io::ErrorKind::FileTooLarge => invalid(format!(
            "{}: {size} bytes exceed the longest file that the file system (ext4: 16 TiB) or \
             'ulimit -f' allows; use another file system, such as XFS, make the disk smaller, or \
             raise the limit",
            path.display()
        )),
        _ => Error::io("size the disk", path, error),
    }
}

/// One segment file. Each `Arc` of it pins it: the segment is recycled only when no user holds one.
#[derive(Debug)]
pub(crate) struct Segment {
    pub path: PathBuf,
    /// The file, bypassing the page cache. Every sync of the segment uses this descriptor.
    pub file: Arc<dyn DataFile>,
    /// The file through the page cache, once [opened](Self::prepare_cache); and whether that is in
    /// use.
    cache: OnceLock<Box<dyn CachedFile>>,
    uses_cache: AtomicBool,
    /// Whether the file system needs an explicit sync, because `RWF_DSYNC` is not enough.
    pub needs_sync: bool,
    /// The checksums of the payloads that the segment holds.
    pub(super) checksums: RwLock<ChecksumTable>,
}

impl Segment {
    pub(crate) fn new(path: PathBuf, file: Box<dyn DataFile>) -> Self {
        // An explicit sync is always right.
        let needs_sync = |file| host::is_served(file).unwrap_or(true);
        Self {
            needs_sync: file.host().is_some_and(needs_sync),
            path,
            file: file.into(),
            cache: OnceLock::new(),
            uses_cache: AtomicBool::new(false),
            checksums: RwLock::default(),
        }
    }

    /// Opens the file through the kernel's page cache, unless that is done. A thread that serves a
    /// guest may not be allowed to open files, so the keeper does this for the segments that come
    /// next. A failure is retried when the cache is needed.
    pub(crate) fn prepare_cache(&self) {
        if !self.has_cache()
            && let Ok(opened) = self.file.open_cached(&self.path)
        {
            // If two threads race, one closes its file again.
            let _ = self.cache.set(opened);
        }
    }

    /// The file through the kernel's page cache, `None` if it can't be opened. The caller writes or
    /// reads many bytes, which then stay cached; so from now on all reads go through the cache, see
    /// [`source`](Self::source).
    pub(crate) fn use_cache(&self) -> Option<&dyn CachedFile> {
        self.prepare_cache();
        let cache = self.cache.get()?;
        self.uses_cache.store(true, Ordering::Release);
        Some(cache.as_ref())
    }

    /// The file through the page cache, if that is [in use](Self::use_cache).
    pub(crate) fn cache(&self) -> Option<&dyn CachedFile> {
        let used = self.uses_cache.load(Ordering::Acquire);
        self.cache.get().filter(|_| used).map(Box::as_ref)
    }

    /// Whether the file is open through the page cache, in use or not.
    pub(crate) fn has_cache(&self) -> bool {
        self.cache.get().is_some()
    }

    /// Uses another file as the page cache, as if the cache had other bytes than the medium.
    #[cfg(test)]
    pub(crate) fn set_cache(&self, other: File) {
        let other: Box<dyn CachedFile> = Box::new(HostCache(other));
        assert!(self.cache.set(other).is_ok(), "the cache is open");
        self.use_cache();
    }

    /// The file to read payloads from: through the page cache if that is in use, otherwise
    /// directly. The cache may miss what was later written directly, so readers
    /// [verify](crate::medium::segment::LogRead::verified) payloads.
    pub(crate) fn source(&self) -> &dyn ReadFile {
        match self.cache() {
            Some(file) => file,
            None => self.file.as_ref(),
        }
    }

    /// Changes the table of checksums, under its lock.
    pub(crate) fn note<T>(&self, change: impl FnOnce(&mut ChecksumTable) -> T) -> T {
        change(&mut self.checksums.write().expect("checksums lock"))
    }

    /// Frees the segment's pages in the kernel's cache, which nobody needs any more.
    pub(crate) fn free_pages(&self) {
        if let Some(file) = self.file.host() {
            // Only a hint: pages that stay are reused, or freed under memory pressure.
            let _ = fadvise(file, 0, None, Advice::DontNeed);
        }
    }
}

/// A slice of a shared buffer, to be written.
#[derive(Clone, Debug)]
pub(crate) struct Chunk {
    pub buffer: SharedBuffer,
    pub len: usize,
}

/// What to read from: a file, or a segment, which the read pins.
#[derive(Clone, Debug)]
pub(crate) enum ReadSource {
    File(Arc<dyn DataFile>),
    Segment(Arc<Segment>),
}

impl ReadSource {
    pub(crate) fn file(&self) -> &dyn ReadFile {
        match self {
            Self::File(file) => file.as_ref(),
            Self::Segment(segment) => segment.source(),
        }
    }
}

/// One operation.
#[derive(Debug)]
pub(crate) enum Io {
    /// Write `chunks` at `offset` of the segment (nothing if there are no chunks), then sync.
    Append {
        segment: Arc<Segment>,
        offset: u64,
        chunks: Vec<Chunk>,
        /// Which of the chunks are payloads of records, one each.
        payloads: Range<usize>,
        sync: SyncScope,
    },
    /// Fill `buffer` from `offset`.
    Read {
        source: ReadSource,
        offset: u64,
        buffer: Buffer,
    },
    /// Write `chunks`, at most [`MAX_CHUNKS`], at `offset` of a base image.
    Write {
        base: Arc<dyn DataFile>,
        offset: u64,
        chunks: Vec<Chunk>,
    },
    /// Make a range of a raw image read as zeroes, and free its space if `unmap`. Fails with
    /// [`Unsupported`](io::ErrorKind::Unsupported) if the file system can't do that itself.
    Zero {
        file: Arc<File>,
        range: Range<u64>,
        unmap: bool,
    },
    /// Start write-back of a part of a segment, as [`CachedFile::write_back`].
    WriteBack(WriteBack),
}

/// A part of a segment that may be in the page cache only.
#[derive(Clone, Debug)]
pub(crate) struct WriteBack {
    pub segment: Arc<Segment>,
    pub range: Range<u64>,
}

/// Most chunks of one [`Io::Write`]: Linux takes 1024 in one call.
pub(crate) const MAX_CHUNKS: usize = 256;

impl Io {
    /// The file, the offset and the chunks that the operation writes.
    pub(crate) fn written(&self) -> Option<(&dyn DataFile, u64, &[Chunk])> {
        match self {
            Self::Append {
                segment,
                offset,
                chunks,
                ..
            } => Some((segment.file.as_ref(), *offset, chunks)),
            Self::Write {
                base,
                offset,
                chunks,
            } => Some((base.as_ref(), *offset, chunks)),
            Self::Read { .. } | Self::Zero { .. } | Self::WriteBack(_) => None,
        }
    }

    /// Takes the chunk list of an append, emptied, for the next append.
    pub(super) fn take_list(&mut self) -> Vec<Chunk> {
        match self {
            Self::Append { chunks, .. } => {
                chunks.clear();
                std::mem::take(chunks)
            }
            _ => Vec::new(),
        }
    }
}

/// Which writes an append's sync covers.
#[derive(Debug)]
pub(crate) enum SyncScope {
    /// Nothing yet.
    None,
    /// Nothing yet, and the write may stay in the page cache, for a later fdatasync of the segment.
    Later,
    /// Its own write, not necessarily earlier ones: `RWF_DSYNC`, a single command on a medium with
    /// FUA.
    Write,
    /// Everything written to these segments, by an fdatasync of each.
    Segments(Vec<Arc<Segment>>),
}

impl SyncScope {
    fn segments(&self) -> &[Arc<Segment>] {
        match self {
            Self::None | Self::Later | Self::Write => &[],
            Self::Segments(segments) => segments,
        }
    }

    /// Number of device syncs.
    pub(crate) fn count(&self) -> u32 {
        match self {
            Self::None | Self::Later => 0,
            Self::Write => 1,
            Self::Segments(segments) => segments.len() as u32,
        }
    }
}

/// The end of an operation.
#[derive(Debug)]
pub(crate) struct IoCompletion {
    pub id: u64,
    /// The filled buffer of a read; `None` for all others.
    pub result: io::Result<Option<Buffer>>,
}

/// The end of an append in the calling thread.
#[derive(Debug)]
pub(crate) struct AppendResult {
    pub result: io::Result<AppendStats>,
    /// The append's chunk list, emptied, for the next append.
    pub list: Vec<Chunk>,
}

/// What an append has written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AppendStats {
    /// How many writes it took.
    pub writes: u64,
    /// Whether the bytes are in the page cache, for later write-back.
    pub cached: bool,
}

impl AppendStats {
    /// One write past the page cache.
    pub(crate) const DIRECT: Self = Self {
        writes: 1,
        cached: false,
    };
}

/// How threads append to the log.
pub(crate) trait Appender: Send + Sync {
    /// Carries out an append, or a write-back, in the calling thread.
    fn append(&self, io: Io) -> AppendResult;
}

/// Appends by system calls in the calling thread: the fastest way to a durable group, because it is
/// one call and its end wakes no other thread. For an asynchronous write with `RWF_DSYNC`, a kernel
/// worker does the sync. That worker is bound to one processor, and if a guest is computing there,
/// each sync takes a scheduler tick.
///
/// A batch that needs no sync yet goes to the page cache. A kill of the process can't lose it
/// there, so its writers need not wait for the medium, and the thread that takes it ends it in the
/// same call: no batch depends on a thread that may not come back. A checkpoint copies it from
/// memory, and a later fdatasync of the segment includes it. To keep that sync short, the log's
/// leader starts write-back step by step.
pub(crate) struct DirectAppender;

impl Appender for DirectAppender {
    fn append(&self, mut io: Io) -> AppendResult {
        let written = append_cached(&io);
        let (result, list) = match written {
            Some(written) => (written, io.take_list()),
            None => {
                let (result, list) = run(io);
                (result.map(|_| AppendStats::DIRECT), list)
            }
        };
        AppendResult { result, list }
    }
}

/// Appends through the page cache if no sync is needed yet; `None` for any other operation, or if
/// the segment can't be written that way.
pub(crate) fn append_cached(io: &Io) -> Option<io::Result<AppendStats>> {
    let Io::Append {
        segment,
        offset,
        chunks,
        sync: SyncScope::Later,
        ..
    } = io
    else {
        return None;
    };
    // On a network file system, the server would get each write at once.
    let cache = if segment.needs_sync {
        None
    } else {
        segment.use_cache()
    }?;
    let written = write_all(chunks, 0, |slices, done| {
        cache.write_slices_at(slices, offset + done)
    });
    Some(written.map(|()| AppendStats {
        writes: 1,
        cached: true,
    }))
}

/// Performs I/O asynchronously. Owned and called by one thread.
pub(crate) trait Engine: Send {
    /// Takes an operation; it may start now or at the next [`enter`](Self::enter).
    fn submit(&mut self, id: u64, io: Io);
    /// Fails operations that wait for chunks of an image. Whether there were any.
    fn abandon(&mut self) -> bool {
        false
    }
    /// Starts everything submitted.
    fn enter(&mut self);
    /// Appends the ended operations to `done`. The event given at creation is signalled whenever
    /// one ends.
    fn poll(&mut self, done: &mut Vec<IoCompletion>);
}

/// Carries out an operation in the calling thread. Returns its result, and an append's chunk list,
/// emptied.
pub(crate) fn run(mut io: Io) -> (io::Result<Option<Buffer>>, Vec<Chunk>) {
    let written = match (&io, io.written()) {
        (_, None) => Ok(()),
        (io, Some((file, offset, chunks))) => {
            let durably = matches!(
                io,
                Io::Append {
                    sync: SyncScope::Write,
                    ..
                }
            );
            write_chunks(file, offset, chunks, 0, durably)
        }
    };
    let list = io.take_list();
    let ended = written.and_then(|()| match io {
        Io::WriteBack(WriteBack { segment, range }) => match segment.cache() {
            Some(cache) => cache.write_back(range).map(|()| None),
            None => Ok(None),
        },
        Io::Append { sync, .. } => {
            let mut segments = sync.segments().iter();
            segments.try_for_each(|segment| segment.file.sync_data())?;
            Ok(None)
        }
        Io::Read {
            source,
            offset,
            buffer,
        } => read_exact(&source, offset, buffer).map(Some),
        Io::Write { .. } => Ok(None),
        Io::Zero { file, range, unmap } => host::zero(&file, range, unmap).map(|()| None),
    });
    (ended, list)
}

/// Reads exactly `buffer.len()` bytes.
fn read_exact(source: &ReadSource, offset: u64, mut buffer: Buffer) -> io::Result<Buffer> {
    source.file().read_exact_at(&mut buffer, offset)?;
    Ok(buffer)
}

/// Writes all of `chunks` from byte `skip` of them on, see [`DataFile::write_slices_at`].
pub(crate) fn write_chunks(
    file: &dyn DataFile,
    offset: u64,
    chunks: &[Chunk],
    skip: usize,
    durably: bool,
) -> io::Result<()> {
    write_all(chunks, skip, |slices, done| {
        file.write_slices_at(slices, offset + done, durably)
    })
}

/// Writes all of `chunks` from byte `skip` of them on. `write` writes all or a part of its slices,
/// which begin at that byte of the chunks, and returns how many bytes.
fn write_all(
    chunks: &[Chunk],
    skip: usize,
    write: impl Fn(&[io::IoSlice<'_>], u64) -> io::Result<usize>,
) -> io::Result<()> {
    let total: usize = chunks.iter().map(|chunk| chunk.len).sum();
    let mut done = skip;
    while done < total {
        let mut passed = 0;
        // Groups rarely have more chunks, so usually nothing is allocated.
        let mut slices: SmallVec<[io::IoSlice<'_>; 128]> = SmallVec::new();
        for chunk in chunks {
            let from = done.saturating_sub(passed).min(chunk.len);
            if from < chunk.len {
                slices.push(io::IoSlice::new(&chunk.buffer[from..chunk.len]));
            }
            passed += chunk.len;
        }
        match write(&slices, done as u64) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => done += written,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;
    use crate::medium::directory::{Medium, directory};
    use crate::medium::engine::EngineKind;
    use crate::medium::segment::take_short_steps;

    /// An append of `len` bytes of this value to the start of the segment.
    fn append(segment: &Arc<Segment>, value: u8, len: usize, sync: SyncScope) -> Io {
        Io::Append {
            segment: segment.clone(),
            offset: 0,
            chunks: vec![Chunk {
                buffer: Buffer::from(&vec![value; len][..]).share(),
                len,
            }],
            payloads: 0..1,
            sync,
        }
    }

    fn read(file: &dyn ReadFile, len: usize) -> Buffer {
        let mut buffer = Buffer::zeroed(len);
        file.read_exact_at(&mut buffer, 0).unwrap();
        buffer
    }

    /// A batch that needs no sync goes to the page cache, and reads do from then on. Everything
    /// else bypasses it.
    #[test]
    fn only_a_batch_without_a_sync_goes_to_the_page_cache() {
        let dir = tempfile::tempdir().unwrap();
        let medium = directory(dir.path(), EngineKind::Auto);
        let segment = Arc::new(
            medium
                .create_segment(0, 1 << 20, &mut take_short_steps)
                .unwrap(),
        );
        let all = vec![segment.clone()];
        let scopes = [
            SyncScope::None,
            SyncScope::Write,
            SyncScope::Segments(all),
            SyncScope::Later,
        ];
        for (value, sync) in (1..).zip(scopes) {
            let cached = matches!(sync, SyncScope::Later);
            let written = DirectAppender
                .append(append(&segment, value, 8192, sync))
                .result
                .unwrap();
            assert_eq!((written.writes, written.cached), (1, cached));
            assert_eq!(segment.cache().is_some(), cached);
            for file in [segment.source(), segment.file.as_ref()] {
                assert!(read(file, 8192)[..] == [value; 8192]);
            }
        }
        let range = 0..8192;
        let step = WriteBack { segment, range };
        DirectAppender.append(Io::WriteBack(step)).result.unwrap();
    }

    /// After the log's directory was moved away and copied back, writes go to the files that are
    /// locked, not to those that now have their names.
    #[test]
    fn the_page_cache_is_that_of_the_file_that_was_opened() {
        let dir = tempfile::tempdir().unwrap();
        let medium = directory(dir.path(), EngineKind::Auto);
        let segment = Arc::new(
            medium
                .create_segment(0, 1 << 20, &mut take_short_steps)
                .unwrap(),
        );
        let moved = dir.path().join("moved");
        std::fs::rename(&segment.path, &moved).unwrap();
        std::fs::copy(&moved, &segment.path).unwrap();
        DirectAppender
            .append(append(&segment, 7, 4096, SyncScope::Later))
            .result
            .unwrap();
        assert!(std::fs::read(&moved).unwrap()[..4096] == [7; 4096]);
        assert!(std::fs::read(&segment.path).unwrap()[..4096] != [7; 4096]);
    }
}
