//! Segment files: fixed-size pieces of the log, zero-filled once and then recycled. And verified
//! reads from them.

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::Buffer;
use crate::error::{Error, ErrorKind, Result};
use crate::format::SegmentHeader;
use crate::medium::file::{DataFile, Segment};
use crate::medium::filesystem::{FileSystem, OpenMode};
use crate::medium::host;
use crate::medium::lock::{self, Access, Holder};
use crate::sync::{self, Arc};

impl Segment {
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
        pace: &mut ZeroingPace<'_>,
    ) -> Result<Self> {
        let path = Self::path(dir, slot);
        let unfinished = path.with_extension("new");
        let mut fill = || {
            let file = files.open(&unfinished, OpenMode::Emptied)?;
            file.allocate(size)?;
            // Write the zeroes past the page cache, in steps: write-back of a whole segment at once
            // would block the log's syncs.
            let direct = files.open(&unfinished, OpenMode::Direct)?;
            write_zeroes(direct.as_ref(), 0, size, pace)?;
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
        Self::open(files, path, Access::Log)?.lock(Access::Log)
    }

    /// Opens an existing segment file.
    fn open(files: &dyn FileSystem, path: PathBuf, access: Access) -> Result<Self> {
        let file = files.open(&path, access.open_mode(OpenMode::Direct));
        let file = file.map_err(|e| Error::io("open the log segment", &path, e))?;
        Ok(Self::new(path, file))
    }

    /// Locks the file. The log's control file is locked already, so only writes that a killed
    /// process had in flight can still hold the segment. They must have ended before the segment is
    /// read.
    fn lock(self, access: Access) -> Result<Self> {
        lock::lock(self.file.as_ref(), &self.path, access, Holder::Writes)?;
        Ok(self)
    }

    /// Opens and locks the segment files in `dir`, in the order of their numbers.
    pub(crate) fn open_all(
        files: &dyn FileSystem,
        dir: &Path,
        access: Access,
    ) -> Result<Vec<(u32, Self)>> {
        let (mut all, mut inodes) = (Vec::new(), HashSet::new());
        for (slot, path) in Self::list(files, dir)? {
            let segment = Self::open(files, path, access)?;
            let path = &segment.path;
            let failed = |error| Error::io("read its metadata", path, error);
            let inode = segment.file.inode().map_err(failed)?;
            let known = inode.number != 0;
            let is_first = inodes.insert((inode.device, inode.number, inode.born));
            if known && !is_first && segment.is_locked_here(access)? {
                // On a file system without a journal, a power cut may leave both names of a file
                // that was being renamed, when the log shrank.
                if access == Access::Log {
                    let removed = files.remove(path);
                    removed.map_err(|error| Error::io("remove the second name", path, error))?;
                }
                continue;
            }
            all.push((slot, segment.lock(access)?));
        }
        Ok(all)
    }

    /// Whether this process has locked the same file under another name, which has the same inode.
    fn is_locked_here(&self, access: Access) -> Result<bool> {
        let failed = |error| Error::io("lock", &self.path, error);
        // Readers don't exclude each other.
        Ok(access != Access::Log || !self.file.try_lock(false).map_err(failed)?)
    }

    /// The segment files in `dir`, with their numbers, in order.
    pub(crate) fn list(files: &dyn FileSystem, dir: &Path) -> Result<Vec<(u32, PathBuf)>> {
        let names = files.names(dir);
        let mut found = Vec::new();
        for name in names.map_err(|error| Error::io("read the log directory", dir, error))? {
            let slot = name
                .to_str()
                .and_then(|name| name.strip_prefix("segment-"))
                .and_then(|n| n.parse().ok());
            // A file named by a person, such as `segment-7`, is not the log's.
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

/// Called after each step of zeroing a new segment; returns the size of the next step. It may
/// sleep.
pub(crate) type ZeroingPace<'a> = dyn FnMut(ZeroingStep) -> StepSize + 'a;

/// A step that has ended.
pub(crate) struct ZeroingStep {
    pub bytes: u64,
    pub took: Duration,
}

/// How much of a new segment is zeroed at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StepSize {
    /// As much as other background work moves at a time.
    Short,
    /// 4 MiB: done sooner where operations are slow, but a sync waits for all of it.
    Long,
}

impl StepSize {
    pub(crate) const fn bytes(self) -> u64 {
        match self {
            Self::Short => host::STEP,
            Self::Long => 4 << 20,
        }
    }
}

/// The pace where nobody waits for the segment, and other logs may be on the medium.
pub(crate) fn take_short_steps(_: ZeroingStep) -> StepSize {
    StepSize::Short
}

/// Zero-fills `len` bytes at `offset` step by step, so that the blocks are allocated and need no
/// later conversion. The first step is short.
fn write_zeroes(
    file: &dyn DataFile,
    offset: u64,
    len: u64,
    pace: &mut ZeroingPace<'_>,
) -> io::Result<()> {
    let zeroes = Buffer::zeroed(StepSize::Long.bytes().min(len) as usize);
    let (mut done, mut size) = (0, StepSize::Short);
    while done < len {
        let bytes = (len - done).min(size.bytes());
        let began = sync::now();
        file.write_all_at(&zeroes[..bytes as usize], offset + done)?;
        done += bytes;
        let took = sync::now() - began;
        size = pace(ZeroingStep { bytes, took });
    }
    Ok(())
}

/// A read of payload bytes from a segment. The blocks that contain them are read whole and
/// verified.
#[derive(Clone, Debug)]
pub(crate) struct LogRead {
    /// Pinned, so that its table keeps the checksums of these blocks.
    segment: Arc<Segment>,
    /// The blocks, as a byte range of the segment.
    blocks: Range<u64>,
    /// The bytes asked for, as a byte range of the blocks.
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

    /// Reads the bytes in the calling thread.
    ///
    /// # Errors
    /// If the read fails; [`ErrorKind::Damaged`] if the medium no longer has what was written.
    pub(crate) fn read(&self) -> Result<Buffer> {
        let mut buffer = Buffer::for_overwrite(self.bytes());
        let read = self.segment.file.read_exact_at(&mut buffer, self.offset());
        read.map_err(|error| Error::io("read the log segment", &self.segment.path, error))?;
        self.checked(buffer)
    }

    /// Verifies the blocks in `read`, and returns the bytes asked for. If the page cache was wrong,
    /// rereads from the medium, in the calling thread.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub(crate) fn verified(&self, read: Buffer) -> Result<Buffer> {
        match self.checked(read) {
            Err(_) if self.segment.cache().is_some() => self.read(),
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
    use std::io::Write;
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::medium::checksum;
    use crate::medium::directory::{Medium, directory};
    use crate::medium::engine::EngineKind;
    use crate::medium::filesystem::files;

    #[test]
    fn a_segment_with_two_names_is_opened_once_and_keeps_the_lower_number() {
        let dir = tempfile::tempdir().unwrap();
        let medium = directory(dir.path(), EngineKind::Auto);
        for slot in [0, 1] {
            medium
                .create_segment(slot, 1 << 20, &mut take_short_steps)
                .unwrap();
        }
        let (name, second) = (Segment::path(dir.path(), 1), Segment::path(dir.path(), 7));
        std::fs::hard_link(&name, &second).unwrap();
        for access in [Access::LogRead, Access::Log] {
            let opened = Segment::open_all(&*files(), dir.path(), access).unwrap();
            let slots: Vec<u32> = opened.iter().map(|(slot, _)| *slot).collect();
            assert_eq!(slots, [0, 1], "{access:?}");
            assert_eq!(second.exists(), access == Access::LogRead);
        }
        assert!(name.exists());
    }

    /// A payload is read from the page cache if a write went through it, and from the medium if the
    /// cache is wrong. Here the cache is another file.
    #[test]
    fn a_read_trusts_the_page_cache_only_with_the_checksums() {
        const LEN: usize = 8192;
        let dir = tempfile::tempdir().unwrap();
        let medium = directory(dir.path(), EngineKind::Auto);
        let segment = medium
            .create_segment(0, 1 << 20, &mut take_short_steps)
            .unwrap();
        let segment = Arc::new(segment);
        let write = |value: u8, len: usize| {
            let bytes = Buffer::from(&vec![value; len][..]);
            segment.file.write_all_at(&bytes, 4096).unwrap();
            bytes
        };
        let payload = write(7, LEN);
        segment.note(|table| table.add(4096, LEN as u64, &checksum::of(&payload)));
        let read = LogRead::new(segment.clone(), 4096, LEN);
        let found = || {
            let mut found = Buffer::zeroed(LEN);
            segment.source().read_exact_at(&mut found, 4096).unwrap();
            found
        };
        assert!(found()[..] == payload[..], "the medium");
        let mut other = tempfile::tempfile().unwrap();
        other.write_all(&vec![1; 1 << 20]).unwrap();
        segment.set_cache(other);
        assert!(found()[..] == [1; LEN], "the page cache");
        assert!(read.verified(found()).unwrap()[..] == payload[..]);
        // Now the medium is wrong too.
        write(7, 512);
        assert!(read.verified(found()).is_ok());
        write(8, 512);
        let damaged = read.verified(found()).unwrap_err();
        assert_eq!(damaged.kind(), ErrorKind::Damaged);
    }

    /// However long the range, others can use the medium between steps.
    #[test]
    fn zeroes_are_written_step_by_step() {
        const SHORT: u64 = StepSize::Short.bytes();
        const LONG: u64 = StepSize::Long.bytes();
        let file = tempfile::tempfile().unwrap();
        FileExt::write_all_at(&file, &[7; 2 * LONG as usize], 0).unwrap();
        let mut steps = Vec::new();
        let len = LONG + 3 * SHORT + 512;
        write_zeroes(&file, 512, len, &mut |step| {
            steps.push(step.bytes);
            match steps.len() {
                2 => StepSize::Long,
                _ => StepSize::Short,
            }
        })
        .unwrap();
        assert_eq!(steps, [SHORT, SHORT, LONG, SHORT, 512]);
        let mut bytes = vec![1; 2 * LONG as usize];
        FileExt::read_exact_at(&file, &mut bytes, 0).unwrap();
        let zeroes = bytes.iter().filter(|&&byte| byte == 0).count() as u64;
        assert_eq!((zeroes, bytes[511], bytes[512]), (len, 7, 0));
    }
}
