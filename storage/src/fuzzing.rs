//! Recovery of a log with arbitrary bytes: the entry point of the fuzz target in `fuzz/`.
//!
//! An *input* encodes a log: a byte with the numbers of segments and of saved files and whether checksums are to be corrected,
//! then pieces of the files (`file: u8, place in units of 64 bytes: u16, length: u16, bytes`; file 0 is the control
//! file, segments follow, and then saved files), all little-endian; every other byte is zero. With corrected checksums a changed field gets past the
//! checks, as deep as the code goes.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io;
use std::mem::offset_of;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::catalog::control::read_control;
use crate::catalog::options::DiskOptions;
use crate::error::Result;
use crate::format::{
    self, BLOCK, BatchHeader, CONTROL_MAGIC, CONTROL_SLOT, CRC_AT, Descriptor, Kind, SEGMENT_MAGIC,
    SegmentHeader, SummaryFooter,
};
use crate::index::{Piece, Place};
use crate::log::disk_state::DiskState;
use crate::medium::checksum;
use crate::medium::directory::Medium;
use crate::medium::engine::Engine;
use crate::medium::file::DataFile;
use crate::medium::filesystem::{FileSystem, Open, PathKind};
use crate::medium::mark::{Inode, Mark};
use crate::medium::segment::Segment;
use crate::recovery::contents::Verify;
use crate::recovery::replay::{read_for_recovery, read_log, recover};
use crate::recovery::saved::read_saved;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Arc, Event, Mutex};
use crate::{Failure, SECTOR_SIZE};

/// Size of each segment file, and of each saved file, in bytes.
const SEGMENT: usize = 64 << 10;
/// Maximum number of segment files.
const SEGMENTS: usize = 4;
/// Maximum number of saved files, which are parts of those of one snapshot.
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

/// Corrects all checksums of a segment, as far as its batches follow each other.
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
            let field = |offset: usize| {
                let field = &file[at + descriptor + offset..][..4];
                u32::from_le_bytes(field.try_into().expect("four bytes"))
            };
            if field(offset_of!(Descriptor, kind)) != Kind::Write as u32 {
                continue;
            }
            let end = payload + u64::from(field(offset_of!(Descriptor, sectors))) * SECTOR_SIZE;
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

/// Corrects all checksums of a segment's summary, as far as its batch headers follow each other.
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

impl DataFile for MemoryFile {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.with(offset, buffer.len(), |bytes| buffer.copy_from_slice(bytes))
    }

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

    fn read_mark(&self) -> io::Result<Option<Mark>> {
        Ok(None)
    }

    fn write_mark(&self, _mark: Option<&Mark>) -> io::Result<bool> {
        Ok(false)
    }

    fn raw_fd(&self) -> RawFd {
        -1
    }

    fn host(&self) -> Option<&std::fs::File> {
        None
    }
}

impl Medium for Files {
    fn create_segment(
        &self,
        _slot: u32,
        _size: u64,
        _between: &mut dyn FnMut(Duration),
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
    fn open(&self, path: &Path, _how: Open) -> io::Result<Box<dyn DataFile>> {
        let name = path.to_string_lossy();
        let part = name.rsplit('-').next().and_then(|part| part.parse().ok());
        let index = 1 + self.segments + part.unwrap_or(SAVED);
        match index < self.bytes.lock().expect("one thread").len() {
            true => Ok(Box::new(self.file(index))),
            false => Err(io::ErrorKind::NotFound.into()),
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

/// Reads the whole log and recovers it, twice: it ends with an error, or with the same store each time.
///
/// # Panics
/// If recovery panics, reads forever, or returns a store that can't be read or differs from one recovery to the
/// next.
pub fn recover_input(input: &[u8]) {
    let files = Files::new(input);
    let Ok(first) = recover_once(&files) else {
        return;
    };
    let again = match recover_once(&files) {
        // Each recovery raises the numbers; an input may start where counting alone never gets.
        Err(error) if error.to_string().contains("at its maximum") => return,
        again => again.expect("what was recovered can be recovered again"),
    };
    assert_eq!(first, again, "a second recovery gives something else");
}

fn recover_once(files: &Files) -> Result<(u64, u64, Extents)> {
    let path = Path::new("log");
    let mut control = read_control(Box::new(files.file(0)), path.into(), PathBuf::new())?;
    // Reads the log first, as the commands that only inspect it do: with all payloads, and without.
    let look = |verify| {
        let (scan, _) = read_log(files, path, &control.control, verify, &mut |_, _| {})?;
        Result::Ok((scan.last.lsn, scan.records, scan.batches, scan.max_lsn))
    };
    let (checked, looked) = (look(Verify::All), look(Verify::Tail));
    let read = read_for_recovery(files, path, &mut control, &mut |_, _| {})?;
    let disks = control.control.disks.iter();
    let states: Vec<Arc<DiskState>> = disks
        .map(|disk| {
            let base = Arc::new(files.file(0));
            Arc::new(DiskState::new(disk, &DiskOptions::new(path), base))
        })
        .collect();
    let recovered = recover(&mut control, &states, read, false);
    let scan = recovered?;
    let found = (scan.last.lsn, scan.records, scan.batches, scan.max_lsn);
    assert_eq!(looked?, found, "looking and recovering differ");
    assert_eq!(checked?, found, "checking and recovering differ");
    let saved = control.control.saved_files();
    let mut extents = Extents::new();
    let mut ends: HashMap<u32, u64> = HashMap::new();
    for state in &states {
        let disk = (state.id, state.sectors() * SECTOR_SIZE);
        let oldest = saved.counts().iter().map(|(lsn, _)| *lsn).take(1);
        let maps =
            oldest.filter_map(|lsn| read_saved(files, path, &saved, disk, lsn..u64::MAX).ok());
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

/// An extent of a disk, whose bytes can be read.
fn extent(disk: &DiskState, piece: &Piece) -> (u32, u64, u64, String) {
    let end = piece.sector + piece.sectors;
    assert!(end <= disk.sectors(), "an extent beyond the disk");
    let place = match &piece.place {
        Some(Place::Log { segment, offset }) => {
            let mut bytes = vec![0; (piece.sectors * SECTOR_SIZE) as usize];
            let read = segment.file.read_exact_at(&mut bytes, *offset);
            read.map_err(|_| Failure::Io)
                .expect("the log's bytes of an extent");
            format!("{} {offset}", segment.path.display())
        }
        Some(Place::Zero { unmap, .. }) => format!("zero {unmap}"),
        Some(Place::Memory { .. }) | None => unreachable!("nothing was written"),
    };
    (disk.id, piece.sector, piece.sectors, place)
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use zerocopy::little_endian::{U16, U32, U64};

    use super::*;
    use crate::catalog::control::open_control;
    use crate::medium::lock::Use;
    use crate::{
        BackendQueue, Buffer, DiskOptions, Operation, Point, Port, Retain, Store, StoreOptions,
        create_disk, default_log_dir, rewind_disk,
    };

    fn corpus() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/recover")
    }

    /// Encodes a log directory as an input with correct checksums: its bytes that are not zero, in pieces.
    fn input_of(dir: &Path) -> Vec<u8> {
        let segments: Vec<PathBuf> = (0..SEGMENTS)
            .map(|slot| dir.join(format!("segment-{slot:05}")))
            .filter(|path| path.exists())
            .collect();
        let names = std::fs::read_dir(dir).unwrap();
        let mut saved: Vec<_> = names
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.to_string_lossy().contains("/saved-"))
            .collect();
        saved.sort();
        assert!(saved.len() <= SAVED);
        let mut input = vec![1 | (segments.len() as u8) << 1 | (saved.len() as u8) << 4];
        let control = dir.join("control");
        let files = std::iter::once(&control).chain(&segments).chain(&saved);
        for (file, path) in (0u8..).zip(files) {
            let bytes = std::fs::read(path).unwrap();
            let mut at = 0;
            while let Some(start) = bytes[at..].iter().position(|&byte| byte != 0) {
                let start = (at + start) / UNIT * UNIT;
                let zeroes = bytes[start..]
                    .windows(2 * UNIT)
                    .position(|w| w.iter().all(|&b| b == 0));
                let end = zeroes.map_or(bytes.len(), |len| start + len);
                input.push(file);
                input.extend(((start / UNIT) as u16).to_le_bytes());
                input.extend(((end - start) as u16).to_le_bytes());
                input.extend(&bytes[start..end]);
                at = (start + (end - start).next_multiple_of(UNIT)).min(bytes.len());
            }
        }
        input
    }

    fn request(port: &mut Port, operation: Operation) {
        port.submit(0, operation);
        let mut done = Vec::new();
        while done.is_empty() {
            port.kick();
            port.completions(&mut done);
            if done.is_empty() {
                port.sleep_for_test();
            }
        }
        done[0].result.as_ref().unwrap();
    }

    /// A log of three segments with two records each. The first two segments are sealed.
    fn sealed_log() -> Vec<u8> {
        let dir = tempfile::tempdir().unwrap();
        let (disk, log) = (dir.path().join("disk"), dir.path().join("log"));
        let options = StoreOptions {
            segment_size: SEGMENT as u64,
            max_segments: SEGMENTS as u32,
            ..StoreOptions::default()
        };
        create_disk(&disk, 1 << 20, &log, &options).unwrap();
        let root = open_control(&log, Use::Log).unwrap().control;
        let (uuid, disk_id) = (root.header.log, root.disks[0].id);
        for slot in 0..3 {
            let mut file = vec![0; SEGMENT];
            let (sequence, salt) = (slot + 1, slot + 77);
            let segment = SegmentHeader {
                magic: SEGMENT_MAGIC,
                version: U32::new(format::VERSION),
                crc: U32::new(0),
                log: uuid,
                sequence: U64::new(sequence),
                previous_sequence: U64::new(slot),
                previous_lsn: U64::new(2 * slot),
                salt: U64::new(salt),
            };
            let mut crc = segment.encode(&mut file);
            let (mut at, mut headers) = (BLOCK, Vec::new());
            for lsn in 2 * slot + 1..2 * slot + 3 {
                let payload = &mut file[at + BLOCK..at + 2 * BLOCK];
                payload[0] = lsn as u8;
                let checksums = checksum::of(payload);
                let header = BatchHeader {
                    magic: format::BATCH_MAGIC,
                    version: U32::new(format::VERSION),
                    crc: U32::new(0),
                    log: uuid,
                    sequence: U64::new(sequence),
                    salt: U64::new(salt),
                    cid: U64::new(lsn),
                    first_lsn: U64::new(lsn),
                    durable_lsn: U64::new(lsn - 1),
                    unix_us: U64::new(lsn),
                    previous_crc: U32::new(crc),
                    descriptor_count: U16::new(1),
                    checksum_count: U16::new(1),
                    payload_bytes: U64::new(BLOCK as u64),
                };
                let descriptor = Descriptor {
                    disk_id,
                    kind: U32::new(Kind::Write as u32),
                    sector: U64::new(lsn * 8),
                    sectors: U32::new(8),
                };
                let len = format::header_len(1, 1);
                let head = &mut file[at..at + len];
                crc = header.encode([descriptor].into_iter(), checksums.into_iter(), head);
                headers.extend_from_slice(head);
                at += 2 * BLOCK;
            }
            if slot < 2 {
                let footer = SummaryFooter::new(uuid, sequence, salt);
                let summary = footer.encode(&headers, SEGMENT as u64).unwrap();
                file[SEGMENT - summary.len()..].copy_from_slice(&summary);
            }
            std::fs::write(log.join(format!("segment-{slot:05}")), file).unwrap();
        }
        input_of(&log)
    }

    /// A log that keeps its history, whose disk was restored in place twice.
    fn rewound_log() -> Vec<u8> {
        let dir = tempfile::tempdir().unwrap();
        let (disk, log) = (dir.path().join("disk"), dir.path().join("log"));
        let options = StoreOptions {
            segment_size: SEGMENT as u64,
            max_segments: SEGMENTS as u32,
            retain: Some(Retain::All),
            ..StoreOptions::default()
        };
        create_disk(&disk, 1 << 20, &log, &options).unwrap();
        let store = Store::open(&log, &[DiskOptions::new(&disk)], &options).unwrap();
        let mut port = store.disks()[0].open_port().unwrap();
        for sector in 0..5 {
            let data = Buffer::zeroed(SECTOR_SIZE as usize);
            request(&mut port, Operation::Write { sector, data });
        }
        request(&mut port, Operation::Flush);
        drop(port);
        store.close().unwrap();
        for to in [2, 4] {
            rewind_disk(&disk, &log, Point::Lsn(to)).unwrap();
        }
        input_of(&log)
    }

    /// A log with a snapshot that its base images have gone past.
    fn saved_log() -> Vec<u8> {
        let dir = tempfile::tempdir().unwrap();
        let (disk, log) = (dir.path().join("disk"), dir.path().join("log"));
        let options = StoreOptions {
            segment_size: SEGMENT as u64,
            max_segments: SEGMENTS as u32,
            ..StoreOptions::default()
        };
        create_disk(&disk, 1 << 20, &log, &options).unwrap();
        let store = Store::open(&log, &[DiskOptions::new(&disk)], &options).unwrap();
        let mut port = store.disks()[0].open_port().unwrap();
        for round in 1..3 {
            for sector in [0, 1, 40] {
                let mut data = Buffer::zeroed(SECTOR_SIZE as usize);
                data[0] = round;
                request(&mut port, Operation::Write { sector, data });
            }
            request(&mut port, Operation::Flush);
            if round == 1 {
                store.disks()[0].snapshot("one".parse().unwrap()).unwrap();
            }
        }
        store.disks()[0].checkpoint().unwrap();
        let input = input_of(&log);
        drop(port);
        store.close().unwrap();
        input
    }

    /// Logs after some work: short ones, one over several segments, one of two disks, one closed, one of sealed
    /// segments, one with restores in place, one with a saved file.
    fn real_logs() -> Vec<(String, Vec<u8>)> {
        let options = StoreOptions {
            segment_size: SEGMENT as u64,
            max_segments: SEGMENTS as u32,
            ..StoreOptions::default()
        };
        let log = |name: &str, disks: usize, writes: u64, sectors: u64, closed: bool| {
            let dir = tempfile::tempdir().unwrap();
            let paths: Vec<_> = (0..disks)
                .map(|disk| dir.path().join(format!("disk-{disk}")))
                .collect();
            let log = default_log_dir(&paths[0]);
            for path in &paths {
                create_disk(path, 1 << 20, &log, &options).unwrap();
            }
            let disks: Vec<_> = paths.iter().map(DiskOptions::new).collect();
            let store = Store::open(&log, &disks, &options).unwrap();
            for i in 0..writes {
                let disk = &store.disks()[i as usize % store.disks().len()];
                let mut port = disk.open_port().unwrap();
                // Mostly zeroes, so that inputs stay small.
                let mut data = Buffer::zeroed((sectors * SECTOR_SIZE) as usize);
                data[..8].copy_from_slice(&(i + 1).to_le_bytes());
                let sector = i * 3;
                request(&mut port, Operation::Write { sector, data });
                if i % 3 == 2 {
                    let sectors = 2;
                    request(&mut port, Operation::Discard { sector, sectors });
                }
                request(&mut port, Operation::Flush);
            }
            if name == "marks" {
                store.mark(&"a mark".parse().unwrap()).unwrap();
            }
            let input = match closed {
                true => {
                    store.close().unwrap();
                    input_of(&log)
                }
                false => input_of(&log),
            };
            (name.to_string(), input)
        };
        vec![
            log("empty", 1, 0, 1, false),
            log("one-write", 1, 1, 1, false),
            log("some-writes", 1, 4, 2, false),
            log("two-disks", 2, 5, 3, false),
            log("marks", 1, 2, 1, false),
            log("segments", 1, 6, 32, false),
            log("closed", 2, 5, 2, true),
            ("sealed".to_string(), sealed_log()),
            ("rewound".to_string(), rewound_log()),
            ("saved".to_string(), saved_log()),
        ]
    }

    /// Real logs recover as inputs too, with the records that were written. `WALVISOR_WRITE_CORPUS=1` keeps them as
    /// the seed corpus.
    #[test]
    fn real_logs_recover_as_inputs() {
        let logs = real_logs();
        for (name, input) in &logs {
            recover_input(input);
            let found = recover_once(&Files::new(input)).unwrap();
            let records = matches!(name.as_str(), "one-write" | "some-writes" | "two-disks");
            assert!(!records || !found.2.is_empty(), "{name}: {found:?}");
            let sealed = name == "sealed";
            assert!(!sealed || (found.0, found.2.len()) == (6, 6), "{found:?}");
            // The newest restore is to the fourth record, and the next one comes behind it.
            let sectors: u64 = found.2.iter().map(|extent| extent.2).sum();
            assert!(
                name != "rewound" || (found.1, sectors) == (8, 4),
                "{found:?}"
            );
            // The snapshot's sectors, and none in the log: two that are adjacent, and another one.
            let past = found.2.iter().all(|extent| extent.3.contains("saved-"));
            assert!(
                name != "saved" || past && (found.2.len(), sectors) == (2, 3),
                "{found:?}"
            );
        }
        if std::env::var_os("WALVISOR_WRITE_CORPUS").is_some() {
            std::fs::create_dir_all(corpus()).unwrap();
            for (name, input) in logs {
                std::fs::write(corpus().join(name), input).unwrap();
            }
        }
    }

    /// Any number of any structure may have any value, with or without correct checksums.
    #[test]
    fn any_number_may_be_anything() {
        for (name, input) in real_logs() {
            println!("{name}");
            for value in [u64::MAX, 1 << 60, (1 << 60) - 1, 1 << 32, 0] {
                for at in 1..input.len() - 8 {
                    let mut changed = input.clone();
                    changed[at..at + 8].copy_from_slice(&value.to_le_bytes());
                    recover_input(&changed);
                }
            }
        }
    }

    /// Regressions: recovers all inputs of the corpus, including those that once failed.
    #[test]
    fn the_corpus_recovers() {
        let inputs: Vec<_> = std::fs::read_dir(corpus())
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        assert!(inputs.len() >= 6, "{inputs:?}");
        for input in inputs {
            println!("{}", input.display());
            recover_input(&std::fs::read(input).unwrap());
        }
    }
}
