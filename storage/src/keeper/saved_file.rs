//! Writing saved files, which hold what snapshots need from the base images. See
//! [`saved`](crate::view::saved).

use std::collections::BTreeMap;
use std::ops::Range;

use zerocopy::FromZeros;
use zerocopy::little_endian::{U16, U32, U64};

use crate::checkpoint::copy::{FrozenLayer, SHORT};
use crate::checkpoint::pace::CopyPace;
use crate::error::{Error, Result, invalid};
use crate::format::{
    self, BATCH_MAGIC, BLOCK, BatchHeader, Descriptor, DescriptorKind, SEGMENT_MAGIC,
    SegmentHeader, Uuid, VERSION,
};
use crate::index::{ExtentMap, IndexBuilder, Location};
use crate::log::disk_state::DiskState;
use crate::log::state::Log;
use crate::medium::checksum;
use crate::medium::file::{ReadFile, Segment};
use crate::medium::filesystem::{FileSystem, OpenMode};
use crate::medium::holes::DataRanges;
use crate::mutant::{Mutant, planted};
use crate::sync::Arc;
use crate::view::saved::{self, SavedRecord, SavedTail};
use crate::{Buffer, SECTOR_SIZE, parallel, sync};

/// Size limit of a saved file.
const PART: u64 = if cfg!(test) { 64 << 10 } else { 1 << 30 };
/// Most bytes of a record, and of a batch's payloads.
const RECORD: u64 = if cfg!(test) { 4 << 10 } else { 256 << 10 };
const BATCH: usize = if cfg!(test) { 16 << 10 } else { 4 << 20 };
/// The map of what is saved may take one part in this many of the memory for extents beside the
/// index.
const KNOWN_SHARE: u64 = if cfg!(test) { 1 << 10 } else { 4 };
/// Threads that read base images.
const READERS: usize = if cfg!(test) { 1 } else { 16 };

/// Writes the saved files that a copy adds to: those of the newest snapshot that the base images
/// have reached.
pub(crate) struct SavedFileWriter {
    log: Arc<Log>,
    files: Arc<dyn FileSystem>,
    /// The snapshot's LSN.
    pub(super) lsn: u64,
    /// Records written so far; those collected below don't count yet.
    pub(super) count: u32,
    /// Where the next batch goes; `None`: no file yet.
    end: Option<SavedTail>,
    parts: u64,
    /// The saved extents of each disk. `None`: that took too much memory, so the files are read
    /// each time.
    known: Option<BTreeMap<u32, ExtentMap>>,
    /// The next batch.
    records: Vec<(Descriptor, Option<Buffer>)>,
    payload: usize,
}

/// Byte ranges of disks to be saved.
pub(super) struct UnsavedRanges<'a>(Vec<(&'a DiskState, Range<u64>)>);

impl UnsavedRanges<'_> {
    /// Upper limit of what saving them costs the medium. `operation`: the cost of an operation, in
    /// bytes.
    pub(super) fn cost(&self, operation: u64) -> u64 {
        self.0.iter().map(|(_, range)| cost(range, operation)).sum()
    }
}

/// The cost of reading a range and appending it to a file.
fn cost(range: &Range<u64>, operation: u64) -> u64 {
    let bytes = range.end - range.start;
    operation * bytes.div_ceil(RECORD) + 2 * bytes
}

/// A disk's byte range to be saved, with the base image's data there; `None`: a hole.
type SavedRange = Result<(u32, Range<u64>, Option<Buffer>)>;

impl SavedFileWriter {
    /// Opens the saved files of the snapshots at `lsn`, which have `count` records. `None` if the
    /// time limit for closing ran out.
    pub(super) fn open(log: &Arc<Log>, uuid: &Uuid, lsn: u64, count: u32) -> Result<Option<Self>> {
        let files = log.medium.files();
        let mut known = Some(BTreeMap::new());
        let visit = &mut |found: SavedRecord<'_>| note(log, &mut known, found.descriptor);
        let (of, how, mut cut) = ((lsn, count), OpenMode::Existing, false);
        let end = saved::read(&*files, &log.dir, uuid, of, how, visit, &mut || {
            cut |= log.lock().keeper.is_over();
            cut
        })?;
        // What was opened by its path must be a file of this log.
        log.medium.check_place()?;
        if cut {
            return Ok(None);
        }
        if let Some(SavedTail {
            segment, offset, ..
        }) = &end
        {
            // Batches that an earlier process wrote but did not commit must not be taken for the
            // next ones.
            let cut = segment.file.set_len(*offset);
            cut.map_err(|error| Error::io("cut off the end of", &segment.path, error))?;
        }
        Ok(Some(Self {
            log: log.clone(),
            files,
            lsn,
            count,
            parts: end.as_ref().map_or(0, |end| end.header.sequence.get()),
            end,
            known,
            records: Vec::new(),
            payload: 0,
        }))
    }

    /// The saved extents under these layers. `None` if the time limit for closing ran out.
    fn find_saved(&self, layers: &[FrozenLayer]) -> Result<Option<BTreeMap<u32, ExtentMap>>> {
        let mut found: BTreeMap<u32, IndexBuilder> = BTreeMap::new();
        let visit = &mut |saved: SavedRecord<'_>| {
            let record = saved.descriptor;
            let id = record.disk_id.get();
            let Some((_, layer)) = layers.iter().find(|(disk, _)| disk.id == id) else {
                return;
            };
            let found = found.entry(id).or_default();
            layer.visit(
                record.sector.get(),
                record.sectors.get().into(),
                &mut |piece| {
                    if piece.place.is_some() {
                        found.add(piece.sector, piece.sectors as u32, SAVED);
                    }
                },
            );
        };
        let (log, files, mut cut) = (&self.log, &*self.files, false);
        let (of, how) = ((self.lsn, self.count), OpenMode::Read);
        let over = &mut || {
            cut |= log.lock().keeper.is_over();
            cut
        };
        saved::read(files, &log.dir, &log.uuid, of, how, visit, over)?;
        if cut {
            return Ok(None);
        }
        let found = found.into_iter();
        let finished = found.map(|(id, found)| Ok((id, found.finish()?)));
        finished.collect::<Result<_>>().map(Some)
    }

    /// The ranges under these layers that are not saved yet, for the needed disks. `None` if the
    /// time limit for closing ran out.
    ///
    /// # Errors
    /// If the saved files have to be read and can't be.
    pub(super) fn find_unsaved<'a>(
        &self,
        layers: &'a [FrozenLayer],
        needed: impl Fn(&DiskState) -> bool,
    ) -> Result<Option<UnsavedRanges<'a>>> {
        let mut ranges: Vec<(&DiskState, Range<u64>)> = Vec::new();
        let read = match self.known {
            Some(_) => None,
            None => match self.find_saved(layers)? {
                None => return Ok(None),
                read => read,
            },
        };
        let known = self.known.as_ref().or(read.as_ref());
        for (disk, layer) in layers.iter().filter(|(disk, _)| needed(disk)) {
            let unsaved = match known.and_then(|known| known.get(&disk.id)) {
                Some(saved) if !planted(Mutant::SavedAgain) => Some(layer.without(saved)),
                _ => None,
            };
            let first = ranges.len();
            for piece in unsaved.as_ref().unwrap_or(layer).iter() {
                let (start, end) = (piece.sector, piece.sector + piece.sectors);
                match ranges[first..].last_mut() {
                    Some((_, last)) if last.end == start * SECTOR_SIZE => {
                        last.end = end * SECTOR_SIZE;
                    }
                    _ => ranges.push((disk, start * SECTOR_SIZE..end * SECTOR_SIZE)),
                }
            }
        }
        if planted(Mutant::SnapshotUnsaved) {
            ranges.clear();
        }
        Ok(Some(UnsavedRanges(ranges)))
    }

    /// Saves these ranges as fast as `pace` allows. `operation`: the cost of an operation, in
    /// bytes. `urgent_work` is called between ranges. Returns `false` if the time limit ran out.
    pub(super) fn save(
        &mut self,
        ranges: UnsavedRanges<'_>,
        pace: &mut CopyPace,
        operation: u64,
        urgent_work: &mut dyn FnMut(),
    ) -> Result<bool> {
        let log = self.log.clone();
        let parts = ranges.0.into_iter().flat_map(|(disk, range)| {
            let data = DataRanges::new(disk.base.host(), &disk.path, range.clone(), RECORD);
            with_holes(range, data).map(move |part| (disk, part))
        });
        let read = |(disk, part): (&DiskState, Result<(Range<u64>, bool)>)| -> SavedRange {
            let (range, has_data) = part?;
            if !has_data {
                return Ok((disk.id, range, None));
            }
            let mut buffer = Buffer::for_overwrite((range.end - range.start) as usize);
            let read = disk.base.read_exact_at(&mut buffer, range.start);
            read.map_err(|error| Error::io("read the base image", &disk.path, error))?;
            Ok((disk.id, range, Some(buffer)))
        };
        let (mut whole, mut done) = (true, 0);
        parallel::in_order(READERS, parts, read, |found| {
            let (disk_id, range, data) = found?;
            done += cost(&range, operation);
            self.push(disk_id, range, data)?;
            loop {
                urgent_work();
                whole = !log.lock().keeper.is_over();
                if !whole || pace.max_runs(&log, done) > 0 {
                    return Ok::<_, Error>(whole);
                }
                sync::sleep(SHORT);
            }
        })?;
        Ok(whole)
    }

    /// Adds a record.
    pub(super) fn push(
        &mut self,
        disk_id: u32,
        range: Range<u64>,
        data: Option<Buffer>,
    ) -> Result<()> {
        let len = data.as_ref().map_or(0, |data| data.len());
        let full = self.payload + len > BATCH || self.records.len() == format::MAX_DESCRIPTORS;
        if full && !self.records.is_empty() {
            self.write()?;
        }
        let kind = data
            .as_ref()
            .map_or(DescriptorKind::Discard, |_| DescriptorKind::Write);
        let descriptor = Descriptor {
            disk_id: U32::new(disk_id),
            kind: U32::new(kind as u32),
            sector: U64::new(range.start / SECTOR_SIZE),
            sectors: U32::new(((range.end - range.start) / SECTOR_SIZE) as u32),
        };
        self.records.push((descriptor, data));
        self.payload += len;
        Ok(())
    }

    /// Writes the collected records as a batch.
    pub(super) fn write(&mut self) -> Result<()> {
        let (records, payload) = (
            std::mem::take(&mut self.records),
            std::mem::take(&mut self.payload),
        );
        if records.is_empty() {
            return Ok(());
        }
        let data = || records.iter().filter_map(|(_, data)| data.as_ref());
        let checksums: Vec<u32> = data().flat_map(|data| checksum::of(data)).collect();
        let head = format::header_len(records.len(), checksums.len()).next_multiple_of(BLOCK);
        let len = head + payload.next_multiple_of(BLOCK);
        let number = self.lsn + u64::from(self.count);
        let end = self.reserve_room(len as u64, number)?;
        let header = BatchHeader {
            magic: BATCH_MAGIC,
            version: U32::new(VERSION),
            crc: U32::new(0),
            log: end.header.log,
            sequence: end.header.sequence,
            salt: end.header.salt,
            cid: U64::new(0),
            first_lsn: U64::new(number + 1),
            durable_lsn: U64::new(0),
            unix_us: U64::new(0),
            previous_crc: U32::new(end.previous_crc),
            descriptor_count: U16::new(records.len() as u16),
            checksum_count: U16::new(checksums.len() as u16),
            payload_bytes: U64::new(payload as u64),
        };
        let mut bytes = Buffer::zeroed(len);
        let descriptors = records.iter().map(|(descriptor, _)| *descriptor);
        let crc = header.encode(descriptors, checksums.iter().copied(), &mut bytes[..head]);
        let mut at = head;
        for data in data() {
            bytes[at..at + data.len()].copy_from_slice(data);
            at += data.len();
        }
        let (segment, offset) = (end.segment.clone(), end.offset);
        let written = segment.file.allocate(offset + len as u64);
        let written = written.and_then(|()| segment.file.write_all_at(&bytes, offset));
        written
            .map_err(|error| Error::io("save what a snapshot needs in", &segment.path, error))?;
        (end.offset, end.previous_crc) = (offset + len as u64, crc);
        for (descriptor, _) in &records {
            note(&self.log, &mut self.known, descriptor);
        }
        let count = self.count.checked_add(records.len() as u32);
        self.count = count.ok_or_else(|| {
            let dir = self.log.dir.display();
            invalid(format!(
                "{dir}: too much has changed since a snapshot; delete it with 'snapshot-delete'"
            ))
        })?;
        Ok(())
    }

    /// Where a batch of `len` bytes goes that follows record `number`. If the current part is full,
    /// syncs it and begins another.
    fn reserve_room(&mut self, len: u64, number: u64) -> Result<&mut SavedTail> {
        let full = |end: &SavedTail| end.offset + len > PART.max(BLOCK as u64 + len);
        if self.end.as_ref().is_some_and(full) {
            self.sync()?;
            self.end = None;
        }
        if self.end.is_none() {
            self.end = Some(self.begin_part(number)?);
        }
        Ok(self.end.as_mut().expect("there is one now"))
    }

    /// Makes the next part.
    fn begin_part(&mut self, number: u64) -> Result<SavedTail> {
        self.log.medium.check_place()?;
        let dir = &self.log.dir;
        let path = saved::path(dir, self.lsn, self.parts);
        let header = SegmentHeader {
            magic: SEGMENT_MAGIC,
            version: U32::new(VERSION),
            log: self.log.uuid,
            sequence: U64::new(self.parts + 1),
            previous_sequence: U64::new(self.parts),
            previous_lsn: U64::new(number),
            salt: U64::new(self.log.medium.salt()),
            ..SegmentHeader::new_zeroed()
        };
        let mut head = Buffer::zeroed(BLOCK);
        let crc = header.encode(&mut head);
        let make = || {
            let file = self.files.open(&path, OpenMode::Emptied)?;
            file.allocate(BLOCK as u64)?;
            file.write_all_at(&head, 0)?;
            // The name must be durable before the control file says that the file is there.
            self.files.sync_dir(dir)?;
            Ok(file)
        };
        let file =
            make().map_err(|error| Error::io("save what a snapshot needs in", &path, error))?;
        // It may have been made in another directory that took the log's place meanwhile.
        self.log.medium.check_place()?;
        self.parts += 1;
        Ok(SavedTail {
            segment: Arc::new(Segment::new(path, file)),
            header,
            offset: BLOCK as u64,
            previous_crc: crc,
        })
    }

    /// Syncs the file being written.
    pub(super) fn sync(&self) -> Result<()> {
        let Some(end) = self
            .end
            .as_ref()
            .filter(|_| !planted(Mutant::SavedUnsynced))
        else {
            return Ok(());
        };
        let synced = end.segment.file.sync_all();
        synced.map_err(|error| Error::io("sync", &end.segment.path, error))
    }
}

/// A placeholder, where only the sectors matter.
const SAVED: Location = Location::Zero {
    unmap: false,
    lsn: 0,
};

/// Adds a saved record to the map, unless the map would take too much memory.
fn note(log: &Log, known: &mut Option<BTreeMap<u32, ExtentMap>>, record: &Descriptor) {
    let (sector, sectors) = (record.sector.get(), u64::from(record.sectors.get()));
    let Some(disks) = known.as_mut().filter(|_| sectors > 0) else {
        return;
    };
    let saved = disks.entry(record.disk_id.get()).or_insert_with(|| {
        let mut saved = ExtentMap::default();
        saved.count_in(&log.counters.beside_index);
        saved
    });
    saved.insert(sector, sectors, 0, SAVED);
    let bytes: u64 = disks.values().map(ExtentMap::bytes).sum();
    if bytes > log.beside_limit().most / KNOWN_SHARE {
        *known = None;
    }
}

/// Splits a byte range into parts with data (`true`) and holes (`false`).
fn with_holes(
    range: Range<u64>,
    data: impl Iterator<Item = Result<Range<u64>>>,
) -> impl Iterator<Item = Result<(Range<u64>, bool)>> {
    let end = range.end;
    let mut at = range.start;
    let mut data = data.peekable();
    std::iter::from_fn(move || {
        let next = match data.peek() {
            Some(Ok(next)) if next.start > at => at..next.start,
            Some(_) => {
                let next = data.next()?;
                at = next.as_ref().map_or(at, |next| next.end);
                return Some(next.map(|next| (next, true)));
            }
            None if at < end => at..end,
            None => return None,
        };
        // A record counts sectors in 32 bits.
        let next = next.start..next.end.min(next.start + (1 << 40));
        at = next.end;
        Some(Ok((next, false)))
    })
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;
    use crate::Operation;
    use crate::store::resize::tests::{end, fill, new_disk};

    /// The time limit for closing also applies to reading what an earlier process saved.
    #[test]
    fn saved_files_are_not_read_after_the_time_limit_for_closing() {
        let (_dir, store) = new_disk();
        let disk = &store.disks()[0];
        let lsn = disk.snapshot("monday".parse().unwrap()).unwrap().lsn;
        let mut port = disk.open_port().unwrap();
        fill(&mut port, 0, 1);
        end(&mut port, Operation::Flush);
        disk.checkpoint().unwrap();
        let log = disk.log.clone();
        let open = || {
            let count = log.lock().keeper.saved.counts()[0].1;
            SavedFileWriter::open(&log, &log.uuid, lsn, count).unwrap()
        };
        let mut writer = open().unwrap();
        // As if the map of what is saved took too much memory.
        writer.known = None;
        let mut layer = ExtentMap::default();
        layer.insert(0, 16, 0, SAVED);
        let layers = [(disk.state.clone(), Arc::new(layer))];
        let find = || writer.find_unsaved(&layers, |_| true).unwrap();
        let unsaved = find().unwrap().0;
        assert_eq!(unsaved.len(), 1, "the first block is saved");
        assert_eq!(unsaved[0].1, 4096..8192);
        log.lock().keeper.copy_steps = Some(0);
        assert!(open().is_none());
        assert!(find().is_none());
        log.lock().keeper.copy_steps = None;
        drop(port);
        store.close().unwrap();
    }
}
