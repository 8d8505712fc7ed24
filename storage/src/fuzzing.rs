//! Recovery of a log with arbitrary bytes: the entry point of the fuzz target in `fuzz/`.
//!
//! An *input* encodes a log: a byte with the numbers of segments and of saved files and whether to
//! correct checksums, then pieces of the files
//! (`file: u8, place in units of 64 bytes: u16, length: u16, bytes`; file 0 is the control file,
//! segments follow, and then saved files), all little-endian; every other byte is zero. With
//! corrected checksums a changed field gets past the checks, as deep as the code goes.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::mem::offset_of;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

use zerocopy::FromBytes;

use crate::catalog::control::read_control;
use crate::catalog::options::DiskOptions;
use crate::error::Result;
use crate::format::{
    self, BLOCK, BatchHeader, CONTROL_MAGIC, CONTROL_SLOT, CRC_AT, Descriptor, DescriptorKind,
    SEGMENT_MAGIC, SegmentHeader, SummaryFooter,
};
use crate::index::{Location, Piece};
use crate::log::disk_state::DiskState;
use crate::log::image::DiskImage;
use crate::medium::checksum;
use crate::medium::directory::Medium;
use crate::medium::file::{CachedFile, DataFile, Engine, ReadFile, Segment};
use crate::medium::filesystem::{FileSystem, OpenMode, PathKind};
use crate::medium::mark::{ImageMark, Inode};
use crate::medium::segment::ZeroingPace;
use crate::recovery::contents::VerifyScope;
use crate::recovery::replay::{read_for_recovery, read_log, recover};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Arc, Event, Mutex};
use crate::view::saved::read_saved;
use crate::{Failure, SECTOR_SIZE};

/// Size of each segment file, and of each saved file, in bytes.
const SEGMENT: usize = 64 << 10;
/// Maximum number of segment files.
const SEGMENTS: usize = 4;
/// Maximum number of saved files, all of one snapshot.
const SAVED: usize = 2;
/// Most I/O calls that one input may cause: far more than recovery needs for so few files.
const MOST_CALLS: u64 = 100_000;
/// Places are given in units of this many bytes.
const UNIT: usize = 64;

/// The files, in memory.
#[derive(Clone, Debug)]
struct Files {
    bytes: Arc<Mutex<Vec<Vec<u8>>>>,
    segments: usize,
    calls: Arc<AtomicU64>,
}

#[derive(Debug)]
struct MemoryFile {
    files: Files,
    index: usize,
}

impl Files {
    /// Builds the files that an input encodes.
    fn new(input: &[u8]) -> Self {
        let (flags, mut rest) = input.split_first().unwrap_or((&0, &[]));
        let segments = usize::from(flags >> 1 & 7) % (SEGMENTS + 1);
        let saved = usize::from(flags >> 4) % (SAVED + 1);
        let count = 1 + segments + saved;
        let mut files = vec![vec![0; 2 * CONTROL_SLOT]];
        files.resize(count, vec![0; SEGMENT]);
        while let Some((head, more)) = rest.split_first_chunk::<5>() {
            let number = |at: usize| usize::from(u16::from_le_bytes([head[at], head[at + 1]]));
            let (bytes, behind) = more.split_at(number(3).min(more.len()));
            let file = &mut files[usize::from(head[0]) % count];
            let at = number(1) * UNIT % file.len();
            let len = bytes.len().min(file.len() - at);
            file[at..at + len].copy_from_slice(&bytes[..len]);
            rest = behind;
        }
        if flags & 1 == 1 {
            files[0].chunks_mut(CONTROL_SLOT).for_each(seal_control);
            files[1..].iter_mut().for_each(|file| seal_segment(file));
        }
        Self {
            bytes: Arc::new(Mutex::new(files)),
            segments,
            calls: Arc::default(),
        }
    }

    fn file(&self, index: usize) -> MemoryFile {
        MemoryFile {
            files: self.clone(),
            index,
        }
    }
}

fn seal_control(slot: &mut [u8]) {
    if slot.starts_with(&CONTROL_MAGIC) {
        format::seal(slot);
    }
}

/// Corrects all checksums of a segment, as far as its batches chain.
fn seal_segment(file: &mut [u8]) {
    if !file.starts_with(&SEGMENT_MAGIC) {
        return;
    }
    let mut previous = format::seal(&mut file[..size_of::<SegmentHeader>()]);
    let mut at = BLOCK;
    while let Some((header, len)) = file.get(at..).and_then(BatchHeader::peek)
        && at + len <= file.len()
    {
        let payloads = at + len.next_multiple_of(BLOCK);
        let mut payload = payloads as u64;
        let descriptors = usize::from(header.descriptor_count.get());
        let first_checksum = size_of::<BatchHeader>() + descriptors * size_of::<Descriptor>();
        let mut checksums = (at + first_checksum..at + len).step_by(size_of::<u32>());
        for descriptor in
            (size_of::<BatchHeader>()..first_checksum).step_by(size_of::<Descriptor>())
        {
            let descriptor = Descriptor::read_from_prefix(&file[at + descriptor..]);
            let (descriptor, _) = descriptor.expect("the batch has it");
            let end = payload + descriptor.payload_len();
            let blocks = file.get(payload as usize..end as usize);
            for (crc, field) in blocks
                .map(checksum::of)
                .iter()
                .flatten()
                .zip(&mut checksums)
            {
                file[field..field + 4].copy_from_slice(&crc.to_le_bytes());
            }
            payload = end;
        }
        let field = at + offset_of!(BatchHeader, previous_crc);
        file[field..field + 4].copy_from_slice(&previous.to_le_bytes());
        previous = format::seal(&mut file[at..at + len]);
        let behind = (payloads as u64).saturating_add(header.payload_bytes.get());
        at = usize::try_from(behind).map_or(file.len(), |at| at.min(file.len()));
        at = at.next_multiple_of(BLOCK);
    }
    seal_summary(file);
}

/// Corrects all checksums of a segment's summary, as far as its batch headers chain.
fn seal_summary(file: &mut [u8]) {
    let Some((footer, _)) = SummaryFooter::peek(file, file.len() as u64) else {
        return;
    };
    let end = file.len() - size_of::<SummaryFooter>();
    let first = end - footer.headers_len.get() as usize;
    let mut previous: [u8; 4] = file[CRC_AT..CRC_AT + 4].try_into().expect("four bytes");
    let mut at = first;
    while let Some((_, len)) = BatchHeader::peek(&file[at..end])
        && at + len <= end
    {
        let field = at + offset_of!(BatchHeader, previous_crc);
        file[field..field + 4].copy_from_slice(&previous);
        previous = format::seal(&mut file[at..at + len]).to_le_bytes();
        at += len;
    }
    format::seal_at(&mut file[first..], end - first + CRC_AT);
}

impl MemoryFile {
    /// Calls `each` with the bytes of a range; fails if the file has no such range.
    fn with<T>(&self, offset: u64, len: usize, each: impl FnOnce(&mut [u8]) -> T) -> io::Result<T> {
        let calls = self.files.calls.fetch_add(1, Ordering::Relaxed);
        assert!(calls < MOST_CALLS, "recovery reads for ever");
        let mut files = self.files.bytes.lock().expect("one thread");
        let range = usize::try_from(offset)
            .ok()
            .and_then(|at| Some(at..at.checked_add(len)?))
            .and_then(|range| files[self.index].get_mut(range));
        range.map(each).ok_or(io::ErrorKind::UnexpectedEof.into())
    }
}

impl ReadFile for MemoryFile {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.with(offset, buffer.len(), |bytes| buffer.copy_from_slice(bytes))
    }

    fn raw_fd(&self) -> RawFd {
        -1
    }

    fn host(&self) -> Option<&std::fs::File> {
        None
    }
}

impl DataFile for MemoryFile {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.with(offset, bytes.len(), |into| into.copy_from_slice(bytes))
    }

    fn write_slices_at(
        &self,
        slices: &[io::IoSlice<'_>],
        offset: u64,
        _durably: bool,
    ) -> io::Result<usize> {
        let first = slices.first().map_or(&[][..], |slice| slice);
        self.write_all_at(first, offset).map(|()| first.len())
    }

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn drop_cache(&self) -> io::Result<()> {
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.files.bytes.lock().expect("one thread")[self.index].len() as u64)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.files.bytes.lock().expect("one thread")[self.index].resize(len as usize, 0);
        Ok(())
    }

    fn allocate(&self, _len: u64) -> io::Result<()> {
        unreachable!("recovery makes no files")
    }

    fn sync_all(&self) -> io::Result<()> {
        Ok(())
    }

    fn try_lock(&self, _shared: bool) -> io::Result<bool> {
        Ok(true)
    }

    fn zero_range(&self, offset: u64, len: u64, _unmap: bool) -> io::Result<()> {
        self.with(offset, len as usize, |bytes| bytes.fill(0))
    }

    fn inode(&self) -> io::Result<Inode> {
        Ok(Inode::default())
    }

    fn read_mark(&self) -> io::Result<Option<ImageMark>> {
        Ok(None)
    }

    fn write_mark(&self, _mark: Option<&ImageMark>) -> io::Result<bool> {
        Ok(false)
    }

    fn open_cached(&self, _path: &Path) -> io::Result<Box<dyn CachedFile>> {
        unreachable!("recovery reads past the page cache")
    }
}

impl Medium for Files {
    fn create_segment(
        &self,
        _slot: u32,
        _size: u64,
        _pace: &mut ZeroingPace<'_>,
    ) -> Result<Segment> {
        unreachable!("recovery makes no segments")
    }

    fn segments(&self) -> Result<Vec<(u32, Segment)>> {
        let segment = |slot: usize| {
            let path = format!("segment-{slot:05}").into();
            (
                slot as u32,
                Segment::new(path, Box::new(self.file(slot + 1))),
            )
        };
        Ok((0..self.segments).map(segment).collect())
    }

    fn salt(&self) -> u64 {
        unreachable!("recovery makes no segments")
    }

    fn engine(&self, _event: &Event) -> io::Result<Box<dyn Engine>> {
        unreachable!("nothing is written behind recovery's back")
    }
}

/// The saved files: whatever the LSN of the snapshot, the same parts.
impl FileSystem for Files {
    fn open(&self, path: &Path, _how: OpenMode) -> io::Result<Box<dyn DataFile>> {
        let name = path.to_string_lossy();
        let part = name.rsplit('-').next().and_then(|part| part.parse().ok());
        let index = 1 + self.segments + part.unwrap_or(SAVED);
        if index < self.bytes.lock().expect("one thread").len() {
            Ok(Box::new(self.file(index)))
        } else {
            Err(io::ErrorKind::NotFound.into())
        }
    }

    fn create_dir(&self, _path: &Path) -> io::Result<()> {
        unreachable!("reading makes nothing")
    }

    fn rename(&self, _from: &Path, _to: &Path) -> io::Result<()> {
        unreachable!("reading renames nothing")
    }

    fn rename_new(&self, _from: &Path, _to: &Path) -> io::Result<()> {
        unreachable!("reading renames nothing")
    }

    fn remove(&self, _path: &Path) -> io::Result<()> {
        unreachable!("reading removes nothing")
    }

    fn names(&self, _dir: &Path) -> io::Result<Vec<OsString>> {
        unreachable!("the control file tells which files there are")
    }

    fn sync_dir(&self, _dir: &Path) -> io::Result<()> {
        unreachable!("reading makes nothing")
    }

    fn kind(&self, _path: &Path) -> io::Result<PathKind> {
        unreachable!("the control file tells which files there are")
    }

    fn exists(&self, _path: &Path) -> io::Result<bool> {
        unreachable!("the control file tells which files there are")
    }

    fn real_path(&self, path: &Path) -> io::Result<PathBuf> {
        Ok(path.into())
    }
}

/// The contents of the disks: disk id, first sector, sectors, and the place of each extent's bytes.
type Extents = Vec<(u32, u64, u64, String)>;

/// Reads the whole log and recovers it, twice: it ends with an error, or with the same store each
/// time.
///
/// # Panics
/// If recovery panics, reads forever, or returns a store that can't be read or differs from one
/// recovery to the next.
pub fn recover_input(input: &[u8]) {
    let files = Files::new(input);
    let Ok(first) = recover_once(&files) else {
        return;
    };
    let again = match recover_once(&files) {
        // Each recovery raises the counters, and an input may start at the limit.
        Err(error) if error.to_string().contains("at its maximum") => return,
        again => again.expect("what was recovered can be recovered again"),
    };
    assert_eq!(first, again, "a second recovery gives something else");
}

fn recover_once(files: &Files) -> Result<(u64, u64, Extents)> {
    let path = Path::new("log");
    let mut control = read_control(Box::new(files.file(0)), path.into(), PathBuf::new())?;
    // First read the log as read-only commands do, with and without all payloads.
    let look = |verify| {
        let mut known = control.control.clone();
        let (scope, progress) = ((u64::MAX, verify), &mut |_, _| {});
        let (scan, _) = read_log(files, path, &mut known, scope, progress)?;
        Result::Ok((scan.last.lsn, scan.records, scan.batches, scan.max_lsn))
    };
    let (checked, looked) = (look(VerifyScope::All), look(VerifyScope::Tail));
    let read = read_for_recovery(files, path, &mut control, &mut |_, _| {})?;
    let disks = control.control.disks.iter();
    let states: Vec<Arc<DiskState>> = disks
        .map(|disk| {
            let base = DiskImage::new(Arc::new(files.file(0)), None);
            Arc::new(DiskState::new(disk, &DiskOptions::new(path), base))
        })
        .collect();
    let (scan, _) = recover(&mut control, &states, read, false)?;
    let found = (scan.last.lsn, scan.records, scan.batches, scan.max_lsn);
    assert_eq!(looked?, found, "looking and recovering differ");
    assert_eq!(checked?, found, "checking and recovering differ");
    let saved = control.control.saved_files();
    let mut extents = Extents::new();
    let mut ends: HashMap<u32, u64> = HashMap::new();
    for state in &states {
        let disk = (state.id, state.sectors() * SECTOR_SIZE);
        let oldest = saved.counts().iter().map(|(lsn, _)| *lsn).take(1);
        let maps = oldest
            .filter_map(|lsn| read_saved(files, path, &saved, disk, lsn..u64::MAX, None).ok());
        let past: Vec<_> = maps.flatten().collect();
        let index = state.index();
        let frozen = index.frozen.iter().flat_map(|frozen| frozen.iter());
        for piece in past.iter().flat_map(|past| past.iter()) {
            extents.push(extent(state, &piece));
        }
        for piece in frozen {
            let end = piece.sector + piece.sectors;
            let before = ends.insert(state.id, end).unwrap_or(0);
            assert!(before <= piece.sector, "extents overlap");
            extents.push(extent(state, &piece));
        }
    }
    Ok((
        scan.last.lsn,
        control.control.header.next_lsn.get(),
        extents,
    ))
}

/// An extent of a disk; asserts that its bytes can be read.
fn extent(disk: &DiskState, piece: &Piece) -> (u32, u64, u64, String) {
    let end = piece.sector + piece.sectors;
    assert!(end <= disk.sectors(), "an extent beyond the disk");
    let place = match &piece.place {
        Some(Location::Log { segment, offset }) => {
            let mut bytes = vec![0; (piece.sectors * SECTOR_SIZE) as usize];
            let read = segment.file.read_exact_at(&mut bytes, *offset);
            read.map_err(|_| Failure::Io)
                .expect("the log's bytes of an extent");
            format!("{} {offset}", segment.path.display())
        }
        Some(Location::Zero { unmap, .. }) => format!("zero {unmap}"),
        Some(Location::Memory { .. }) | None => unreachable!("nothing was written"),
    };
    (disk.id, piece.sector, piece.sectors, place)
}

#[cfg(test)]
mod tests;
