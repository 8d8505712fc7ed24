//! Saved files: what the disks held at a snapshot, where the base images have changed since.
//!
//! ```text
//!   as of the snapshot  =  saved files of the snapshot ─ gaps ─▶ those of later snapshots ─ gaps ─▶ base image
//! ```
//! A copy that moves the base images past a snapshot first saves what it is about to overwrite,
//! once for each sector. So the log keeps nothing for the snapshot, and the snapshot takes no more
//! room than what has changed since.
//!
//! A saved file looks like a segment: a header, and batches of records. A snapshot's records are
//! numbered from the LSN after its own, and the control file says how many there are; all of those
//! are durable. Those without sectors list the disks of the snapshot.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::catalog::snapshot::{SavedFiles, Snapshot};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{BLOCK, BatchHeader, Control, DecodeResult, Descriptor, SegmentHeader, Uuid};
use crate::index::{ExtentLimit, ExtentMap, IndexBuilder};
use crate::medium::file::Segment;
use crate::medium::filesystem::{FileSystem, OpenMode};
use crate::medium::segment::LogRead;
use crate::recovery::batch::Batch;
use crate::recovery::replay::place;
use crate::sync::Arc;
use crate::{Buffer, SECTOR_SIZE};

/// Where the next batch of a snapshot's saved files goes.
pub(crate) struct SavedTail {
    pub segment: Arc<Segment>,
    pub header: SegmentHeader,
    /// Byte offset in the file.
    pub offset: u64,
    /// CRC of the previous batch, or of the header.
    pub previous_crc: u32,
}

/// The path of a saved file of the log in `dir`, for the snapshots at an LSN. Parts have up to a
/// gigabyte each; the first is part 0.
pub(crate) fn path(dir: &Path, lsn: u64, part: u64) -> PathBuf {
    dir.join(format!("saved-{lsn:020}-{part:05}"))
}

/// The LSN of the snapshots that a saved file of this name belongs to; `None` if it is not a saved
/// file's name.
pub(crate) fn lsn_of(dir: &Path, name: &OsStr) -> Option<u64> {
    let (lsn, part) = name.to_str()?.strip_prefix("saved-")?.split_once('-')?;
    let (lsn, part) = (lsn.parse().ok()?, part.parse().ok()?);
    (path(dir, lsn, part) == dir.join(name)).then_some(lsn)
}

/// Bytes of the saved files in a log directory, by the LSN of their snapshots.
pub(crate) fn sizes(files: &dyn FileSystem, dir: &Path) -> BTreeMap<u64, u64> {
    let mut sizes = BTreeMap::new();
    for name in files.names(dir).unwrap_or_default() {
        let Some(lsn) = lsn_of(dir, &name) else {
            continue;
        };
        let file = files.open(&dir.join(&name), OpenMode::Read);
        // A file that has just been removed has none.
        let bytes = file.and_then(|file| file.len()).unwrap_or(0);
        *sizes.entry(lsn).or_default() += bytes;
    }
    sizes
}

/// The snapshots of a log, oldest first, with the sizes of their files; and the size of all saved
/// files.
pub(crate) fn snapshots(
    files: &dyn FileSystem,
    dir: &Path,
    control: &Control,
) -> (Vec<Snapshot>, u64) {
    let sizes = sizes(files, dir);
    let mut all = Snapshot::all(control);
    for snapshot in &mut all {
        snapshot.saved_bytes = sizes.get(&snapshot.lsn).copied().unwrap_or(0);
    }
    (all, sizes.values().sum())
}

/// The error for a file without what the control file says it has.
fn damaged(path: &Path, what: &str) -> Error {
    let message = format!(
        "{}: {what}, so the disks can't be seen as of its snapshot; restore the file from a copy, \
         or delete the snapshot",
        path.display()
    );
    Error::new(ErrorKind::Damaged, message)
}

/// A record in a saved file.
pub(crate) struct SavedRecord<'a> {
    pub segment: &'a Arc<Segment>,
    pub descriptor: &'a Descriptor,
    /// Where its payload is, as a byte offset of the file.
    offset: u64,
    checksums: &'a [u32],
}

impl SavedRecord<'_> {
    /// Keeps the checksums of its payload, which reads of it need. Returns the bytes of memory that
    /// they take.
    fn keep_checksums(&self) -> u64 {
        self.segment.note(|table| {
            let before = table.bytes();
            table.add(self.offset, self.descriptor.payload_len(), self.checksums);
            table.bytes() - before
        })
    }
}

/// Calls `visit` with each of the first `count` records in the saved files of the snapshots at
/// `lsn`. `how`: how to open the files. Returns where the next record goes; `None` if there are no
/// records, or if `over` returned `true` before all were visited.
///
/// # Errors
/// [`ErrorKind::Damaged`] if a record is not there.
pub(crate) fn read(
    files: &dyn FileSystem,
    dir: &Path,
    log: &Uuid,
    (lsn, count): (u64, u32),
    how: OpenMode,
    visit: &mut dyn FnMut(SavedRecord<'_>),
    over: &mut dyn FnMut() -> bool,
) -> Result<Option<SavedTail>> {
    let (mut number, last) = (lsn, lsn + u64::from(count));
    let (mut part, mut end) = (0, None);
    while number < last {
        let path = path(dir, lsn, part);
        let before = number;
        let mut next = open_part(files, path, log, (part, number), how)?;
        let len = next.segment.file.len();
        let len = len.map_err(|error| io_error(&next.segment, error))?;
        while number < last
            && let Some((batch, crc)) = next_batch(&next, log, number, len)?
        {
            if over() {
                return Ok(None);
            }
            for (_, descriptor, offset, blocks) in batch.records() {
                visit(SavedRecord {
                    segment: &next.segment,
                    descriptor,
                    offset,
                    checksums: &batch.checksums[blocks],
                });
            }
            number = batch.last_lsn();
            (next.offset, next.previous_crc) = (batch.end(), crc);
        }
        if number == before || number > last {
            let at = next.offset;
            let path = &next.segment.path;
            return Err(damaged(path, &format!("damaged at byte {at}")));
        }
        (end, part) = (Some(next), part + 1);
    }
    Ok(end)
}

/// Reads all saved files, every byte that a look may read. Returns what is wrong, each with the LSN
/// of the snapshots it affects.
pub(crate) fn check(files: &dyn FileSystem, dir: &Path, saved: &SavedFiles) -> Vec<(u64, String)> {
    let mut wrong = Vec::new();
    for &(lsn, count) in saved.counts() {
        let visit = &mut |found: SavedRecord<'_>| {
            found.keep_checksums();
            let (segment, record) = (found.segment.clone(), found.descriptor);
            let read = LogRead::new(segment, found.offset, record.payload_len() as usize);
            if let Err(error) = read.read() {
                let (first, disk) = (record.sector.get(), record.disk_id);
                let last = first + u64::from(record.sectors.get()) - 1;
                wrong.push((
                    lsn,
                    format!("{error}: sectors {first} to {last} of disk {disk}"),
                ));
            }
        };
        let (of, mode) = ((lsn, count), OpenMode::Read);
        if let Err(error) = read(files, dir, saved.log(), of, mode, visit, &mut || false) {
            wrong.push((lsn, error.to_string()));
        }
    }
    wrong
}

/// Opens a part whose first record follows the one with this number.
fn open_part(
    files: &dyn FileSystem,
    path: PathBuf,
    log: &Uuid,
    (part, number): (u64, u64),
    how: OpenMode,
) -> Result<SavedTail> {
    let file = files.open(&path, how).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => damaged(&path, "missing"),
        _ => Error::io("open", &path, error),
    })?;
    let mut head = Buffer::zeroed(BLOCK);
    match file.read_exact_at(&mut head, 0) {
        Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => {
            return Err(Error::io("read", &path, error));
        }
        // Too short for a valid header.
        _ => {}
    }
    match SegmentHeader::decode(&head) {
        DecodeResult::Valid(header)
            if header.log == *log
                && header.sequence == part + 1
                && header.previous_lsn == number =>
        {
            Ok(SavedTail {
                previous_crc: header.crc.get(),
                segment: Arc::new(Segment::new(path, file)),
                header,
                offset: BLOCK as u64,
            })
        }
        _ => Err(damaged(&path, "damaged at byte 0")),
    }
}

/// The batch here, with the CRC of its header, if it follows the record with this number.
fn next_batch(end: &SavedTail, log: &Uuid, number: u64, len: u64) -> Result<Option<(Batch, u32)>> {
    let read = |bytes: usize| {
        let mut buffer = Buffer::zeroed(bytes.next_multiple_of(BLOCK));
        if end.offset + buffer.len() as u64 > len {
            return Ok(None);
        }
        let read = end.segment.file.read_exact_at(&mut buffer, end.offset);
        read.map_err(|error| io_error(&end.segment, error))?;
        Ok::<_, Error>(Some(buffer))
    };
    let Some(block) = read(BLOCK)? else {
        return Ok(None);
    };
    let Some((_, bytes)) = BatchHeader::peek(&block) else {
        return Ok(None);
    };
    let Some(bytes) = read(bytes)? else {
        return Ok(None);
    };
    let found = Batch::parse(&bytes, log, end.offset).filter(|(batch, _)| {
        let header = &batch.header;
        header.is_known()
            && header.sequence == end.header.sequence
            && header.salt == end.header.salt
            && header.previous_crc == end.previous_crc
            && header.first_lsn == number + 1
            && batch.end() <= len
    });
    Ok(found.map(|(batch, _)| {
        let crc = batch.header.crc.get();
        (batch, crc)
    }))
}

fn io_error(segment: &Segment, error: io::Error) -> Error {
    Error::io("read", &segment.path, error)
}

/// What a disk (number and bytes) held at the first of these LSNs, where its base image may have
/// changed since; gaps have not changed. Leaves out what was saved for snapshots after the range.
/// `None` if there are no saved files of the disk for the first LSN.
///
/// # Errors
/// [`ErrorKind::NotFound`] if the snapshot does not have the disk; or if the files can't be read;
/// or if the extents and their checksums go over the limit.
pub(crate) fn read_saved(
    files: &dyn FileSystem,
    dir: &Path,
    saved: &SavedFiles,
    (disk_id, size): (u32, u64),
    lsns: Range<u64>,
    limit: Option<ExtentLimit>,
) -> Result<Option<ExtentMap>> {
    if !saved.has(lsns.start, disk_id) {
        return Ok(None);
    }
    let (mut extents, mut known) = (IndexBuilder::within(limit), false);
    let full = Cell::new(false);
    let has = |sector: u64, sectors: u32| {
        let end = sector.checked_add(u64::from(sectors));
        end.is_some_and(|end| end <= size / SECTOR_SIZE)
    };
    // Duplicates: the older snapshot wins.
    let counts = saved.counts().iter().rev();
    for &(lsn, count) in counts.filter(|(lsn, _)| lsns.contains(lsn)) {
        let visit = &mut |found: SavedRecord<'_>| {
            let descriptor = found.descriptor;
            let (sector, sectors) = (descriptor.sector.get(), descriptor.sectors.get());
            if descriptor.disk_id != disk_id {
                return;
            }
            if sectors == 0 {
                known |= lsn == lsns.start;
            } else if has(sector, sectors) {
                let place = place(descriptor, lsn, found.segment, found.offset);
                extents.add(sector, sectors, place);
                extents.add_checksums(found.keep_checksums());
                full.set(extents.is_full());
            }
        };
        let (of, mode) = ((lsn, count), OpenMode::Read);
        read(files, dir, saved.log(), of, mode, visit, &mut || full.get())?;
    }
    if known || full.get() {
        extents.finish().map(Some)
    } else {
        Err(Error::new(
            ErrorKind::NotFound,
            format!(
                "{}: the snapshots as of LSN {} do not have this disk: it was not on the log then, \
                 or its records were discarded",
                dir.display(),
                lsns.start
            ),
        ))
    }
}
