//! Segment files, fixed-size pieces of the log that are zero-filled once and recycled for ever, and verified reads of
//! them.

use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use rustix::fs::{Advice, fadvise};

use crate::Buffer;
use crate::error::{Error, ErrorKind, Result};
use crate::format::SegmentHeader;
use crate::medium::checksum::Table;
use crate::medium::file::{self, DataFile};
use crate::medium::filesystem::{FileSystem, Open};
use crate::medium::lock::{self, Holder, Use};
use crate::sync::{Arc, RwLock};

/// One segment file. Each `Arc` of it pins it: the segment is recycled only when no user holds one.
#[derive(Debug)]
pub(crate) struct Segment {
    pub path: PathBuf,
    pub file: Arc<dyn DataFile>,
    /// The file through the page cache, once [`cache`](Self::cache) was called; `None` within if it could not be opened.
    cache: OnceLock<Option<File>>,
    /// Whether its file system needs an explicit sync: a write with `RWF_DSYNC` is not enough there.
    pub needs_sync: bool,
    /// The checksums of the payloads that the segment holds.
    checksums: RwLock<Table>,
}

impl Segment {
    pub(crate) fn new(path: PathBuf, file: Box<dyn DataFile>) -> Self {
        // An explicit sync is right on every file system.
        let needs_sync = |file| file::is_served(file).unwrap_or(true);
        Self {
            needs_sync: file.host().is_some_and(needs_sync),
            path,
            file: file.into(),
            cache: OnceLock::new(),
            checksums: RwLock::default(),
        }
    }

    /// The file through the kernel's page cache. The first call opens it; `None` if that fails. Its callers write and read many
    /// bytes through the cache, which leaves them in memory. So from then on all reads go through it, see [`source`](Self::source).
    pub(crate) fn cache(&self) -> Option<&File> {
        let open = || {
            self.file.host()?;
            let file = File::options().read(true).write(true).open(&self.path);
            let file = file.ok()?;
            // A read that does not find its page in the cache reads that page alone. If this call fails, it also reads
            // pages that follow.
            let _ = fadvise(&file, 0, None, Advice::Random);
            Some(file)
        };
        self.cache.get_or_init(open).as_ref()
    }

    /// The file to read payloads from: through the page cache if bytes went through it, else past it. The page cache may lack
    /// what was written past it since, so readers [verify](LogRead::verified) payloads.
    pub(crate) fn source(&self) -> &dyn DataFile {
        match self.opened_cache() {
            Some(file) => file,
            None => self.file.as_ref(),
        }
    }

    /// What [`cache`](Self::cache) has returned, if it was called.
    fn opened_cache(&self) -> Option<&File> {
        self.cache.get()?.as_ref()
    }

    /// Lets `change` change the table of checksums, under the table's lock.
    pub(crate) fn note(&self, change: impl FnOnce(&mut Table)) {
        change(&mut self.checksums.write().expect("checksums lock"));
    }

    /// Frees the pages of the kernel's cache that hold bytes of the segment, which nobody needs any more.
    pub(crate) fn free_pages(&self) {
        if let Some(file) = self.file.host() {
            // A page that stays is used again, or freed when the kernel needs memory.
            let _ = fadvise(file, 0, None, Advice::DontNeed);
        }
    }

    /// The path of segment file number `slot` of the log in `dir`.
    pub(crate) fn path(dir: &Path, slot: u32) -> PathBuf {
        dir.join(format!("segment-{slot:05}"))
    }

    /// See [`Medium::create_segment`].
    pub(crate) fn create(
        files: &dyn FileSystem,
        dir: &Path,
        slot: u32,
        size: u64,
        between: &mut dyn FnMut(Duration),
    ) -> Result<Self> {
        let path = Self::path(dir, slot);
        let unfinished = path.with_extension("new");
        let mut fill = || {
            let file = files.open(&unfinished, Open::Emptied)?;
            file.allocate(size)?;
            // The zeroes bypass the page cache and go out in steps: a segment written back at once would keep the
            // medium from the log's syncs.
            let direct = files.open(&unfinished, Open::Direct)?;
            file::write_zeroes(direct.as_ref(), 0, size, between)?;
            direct.write_all_at(&SegmentHeader::blank(), 0)?;
            file.sync_all()?;
            files.rename(&unfinished, &path)
        };
        if let Err(error) = fill() {
            // Best effort: a leftover is overwritten by the next attempt.
            let _ = files.remove(&unfinished);
            return Err(Error::io("create a log segment", &path, error));
        }
        let synced = files.sync_dir(dir);
        synced.map_err(|error| Error::io("sync the directory", dir, error))?;
        Self::open(files, path, Use::Log)
    }

    /// Opens and locks an existing segment file. The log's control file is locked already, so only writes that a
    /// killed process had in flight can still hold the segment. They must have ended before the segment is read.
    fn open(files: &dyn FileSystem, path: PathBuf, using: Use) -> Result<Self> {
        let file = files.open(&path, using.how(Open::Direct));
        let file = file.map_err(|e| Error::io("open the log segment", &path, e))?;
        lock::lock(file.as_ref(), &path, using, Holder::Writes)?;
        Ok(Self::new(path, file))
    }

    /// Opens the segment files in `dir`, in the order of their numbers.
    pub(crate) fn open_all(
        files: &dyn FileSystem,
        dir: &Path,
        using: Use,
    ) -> Result<Vec<(u32, Self)>> {
        let found = Self::list(files, dir)?.into_iter();
        found
            .map(|(slot, path)| Ok((slot, Self::open(files, path, using)?)))
            .collect()
    }

    /// The segment files in `dir`, with their numbers, in order.
    fn list(files: &dyn FileSystem, dir: &Path) -> Result<Vec<(u32, PathBuf)>> {
        let names = files.names(dir);
        let mut found = Vec::new();
        for name in names.map_err(|error| Error::io("read the log directory", dir, error))? {
            let slot = name
                .to_str()
                .and_then(|name| name.strip_prefix("segment-"))
                .and_then(|n| n.parse().ok());
            // A file that a person named, such as `segment-7`, is not one of the log's.
            if let Some(slot) = slot
                && Self::path(dir, slot) == dir.join(&name)
            {
                found.push((slot, dir.join(name)));
            }
        }
        found.sort_unstable();
        Ok(found)
    }
}

/// A read of payload bytes of a segment. The blocks that hold these bytes are read whole, and verified.
#[derive(Clone, Debug)]
pub(crate) struct LogRead {
    /// Pinned, so that the checksums of these blocks stay in its table.
    segment: Arc<Segment>,
    /// The blocks, as a byte range of the segment.
    blocks: Range<u64>,
    /// The wanted bytes, as a byte range of the blocks.
    wanted: Range<usize>,
}

impl LogRead {
    /// A read of `len` bytes at byte `offset` of the segment.
    pub(crate) fn new(segment: Arc<Segment>, offset: u64, len: usize) -> Self {
        let blocks = segment
            .checksums
            .read()
            .expect("checksums lock")
            .cover(offset, len as u64);
        let lead = (offset - blocks.start) as usize;
        Self {
            segment,
            blocks,
            wanted: lead..lead + len,
        }
    }

    /// The segment to read.
    pub(crate) fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    /// Where to begin to read.
    pub(crate) fn offset(&self) -> u64 {
        self.blocks.start
    }

    /// How many bytes to read.
    pub(crate) fn bytes(&self) -> usize {
        (self.blocks.end - self.blocks.start) as usize
    }

    /// Reads the wanted bytes from the medium, in the calling thread.
    ///
    /// # Errors
    /// If the read fails; [`ErrorKind::Damaged`] if the medium does not have what was written.
    pub(crate) fn read(&self) -> Result<Buffer> {
        let mut buffer = Buffer::for_overwrite(self.bytes());
        let read = self.segment.file.read_exact_at(&mut buffer, self.offset());
        read.map_err(|error| Error::io("read the log segment", &self.segment.path, error))?;
        self.checked(buffer)
    }

    /// Verifies the blocks, which are in `read`, and returns the wanted bytes. If the page cache had others than the medium, it
    /// reads those of the medium, in the calling thread.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub(crate) fn verified(&self, read: Buffer) -> Result<Buffer> {
        match self.checked(read) {
            Err(_) if self.segment.opened_cache().is_some() => self.read(),
            checked => checked,
        }
    }

    fn checked(&self, read: Buffer) -> Result<Buffer> {
        let checksums = self.segment.checksums.read().expect("checksums lock");
        let verified = checksums.verify(self.blocks.start, &read);
        drop(checksums);
        match verified {
            Ok(()) if self.wanted == (0..read.len()) => Ok(read),
            Ok(()) => Ok(Buffer::from(&read[self.wanted.clone()])),
            Err(at) => Err(Error::new(
                ErrorKind::Damaged,
                format!(
                    "{}: damaged at byte {at}: the medium does not have what was written there",
                    self.segment.path.display()
                ),
            )),
        }
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;
    use crate::medium::checksum;
    use crate::medium::directory::{Medium, directory};
    use crate::medium::engine::EngineKind;

    /// A payload is read from the page cache if a write went through it, and from the medium if the cache has other bytes.
    /// Here the cache is that of another file.
    #[test]
    fn a_read_trusts_the_page_cache_only_with_the_checksums() {
        const LEN: usize = 8192;
        let dir = tempfile::tempdir().unwrap();
        let medium = directory(dir.path(), EngineKind::Auto);
        let segment = medium.create_segment(0, 1 << 20, &mut |_| {}).unwrap();
        let segment = Arc::new(segment);
        let payload = Buffer::from(&[7; LEN][..]);
        segment.file.write_all_at(&payload, 4096).unwrap();
        segment.note(|table| table.add(4096, LEN as u64, &checksum::of(&payload)));
        let read = LogRead::new(segment.clone(), 4096, LEN);
        let found = || {
            let mut found = Buffer::zeroed(LEN);
            segment.source().read_exact_at(&mut found, 4096).unwrap();
            found
        };
        assert!(found()[..] == payload[..], "the medium");
        std::fs::remove_file(&segment.path).unwrap();
        std::fs::write(&segment.path, vec![1; 1 << 20]).unwrap();
        assert!(segment.cache().is_some());
        assert!(found()[..] == [1; LEN], "the page cache");
        assert!(read.verified(found()).unwrap()[..] == payload[..]);
        // The medium does not have what was written either.
        segment.file.write_all_at(&[7; 512], 4096).unwrap();
        assert!(read.verified(found()).is_ok());
        segment.file.write_all_at(&[8; 512], 4096).unwrap();
        let damaged = read.verified(found()).unwrap_err();
        assert_eq!(damaged.kind(), ErrorKind::Damaged);
    }
}
