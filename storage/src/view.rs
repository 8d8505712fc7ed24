//! A disk that nobody uses, seen as its guest saw it last: the log over the base image. Reads, changes nothing.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use crate::attach::OpenBase;
use crate::catalog::find_control;
use crate::engine::EngineKind;
use crate::error::{Error, Result};
use crate::file::DataFile;
use crate::filesystem::{Open, files};
use crate::index::{ExtentMap, Place};
use crate::keeper::ControlFile;
use crate::parallel::thread_count;
use crate::segment::{Directory, LogRead, Segment};
use crate::store::{DiskOptions, directory, read_log};
use crate::{Buffer, SECTOR_SIZE};

/// Bytes read or copied at a time.
const COPY_BYTES: u64 = 1 << 20;

/// A disk and its log, both locked, with what the log holds of the disk.
pub(crate) struct View {
    pub base: OpenBase,
    /// The log, with the place of the disk's entry in its table.
    pub log: Option<(ControlFile, usize)>,
    /// Bytes of the disk. The base image is longer after a resize that was cut in the middle.
    pub size: u64,
    /// What the log holds that is not in the base image.
    pub extents: ExtentMap,
    /// The base image through the page cache: holes need not begin at sectors of the medium.
    reader: Box<dyn DataFile>,
}

/// Where a part of a disk is that may hold something other than zeroes.
pub(crate) enum Data {
    /// In the base image, at the same offset.
    Base,
    /// In a segment of the log, from this offset on.
    Log { segment: Arc<Segment>, offset: u64 },
}

impl View {
    /// Reads the log on so many threads.
    pub(crate) fn open(path: &Path, log_dir: &Path, threads: Option<NonZeroUsize>) -> Result<Self> {
        let control = find_control(log_dir)?;
        let base = OpenBase::open(&DiskOptions::new(path), control.is_some())?;
        let reader = files().open(path, Open::Read);
        let reader = reader.map_err(|error| Error::io("open the disk", path, error))?;
        let Some(control) = control else {
            base.refuse_open(log_dir)?;
            return Ok(Self {
                size: base.size,
                base,
                log: None,
                extents: ExtentMap::default(),
                reader,
            });
        };
        let medium = Directory {
            threads: thread_count(threads),
            ..directory(log_dir, EngineKind::Blocking)
        };
        let (_, mut waiting) = read_log(&medium, log_dir, &control.control, &mut |_, _| {})?;
        let found = base.find(&control, log_dir, &waiting)?;
        let entry = &control.control.disks[found];
        let records = waiting.remove(&entry.id.get());
        Ok(Self {
            size: entry.size.get(),
            base,
            log: Some((control, found)),
            extents: records.map_or_else(ExtentMap::default, |records| records.index.active),
            reader,
        })
    }

    /// The parts of the byte range that may hold data, in order, each of at most `most` bytes if it is in the base image.
    /// The range is a whole number of sectors.
    pub(crate) fn data(
        &self,
        range: Range<u64>,
        most: u64,
    ) -> impl Iterator<Item = Result<(Range<u64>, Data)>> + Send {
        let mut pieces = Vec::new();
        let (first, end) = (range.start / SECTOR_SIZE, range.end / SECTOR_SIZE);
        self.extents
            .visit(first, end - first, &mut |piece| pieces.push(piece));
        pieces.into_iter().flat_map(move |piece| {
            let bytes = piece.sector * SECTOR_SIZE..(piece.sector + piece.sectors) * SECTOR_SIZE;
            let (in_base, in_log) = match piece.place {
                None => {
                    let path = &self.base.options.path;
                    let ranges = DataRanges::new(self.reader.host(), path, bytes, most);
                    (Some(ranges), None)
                }
                Some(Place::Zero { .. }) => (None, None),
                Some(Place::Log { segment, offset }) => {
                    (None, Some(Ok((bytes, Data::Log { segment, offset }))))
                }
                Some(Place::Memory { .. }) => {
                    unreachable!("what was read from a log is in the log")
                }
            };
            let in_base = in_base.into_iter().flatten();
            let in_base = in_base.map(|range| range.map(|range| (range, Data::Base)));
            in_base.chain(in_log)
        })
    }

    /// The base image, through the page cache.
    pub(crate) fn reader(&self) -> &dyn DataFile {
        self.reader.as_ref()
    }

    /// Calls `visit` with the bytes of a part that [`data`](Self::data) gave, piece by piece, until it gives `false`.
    pub(crate) fn read(
        &self,
        range: Range<u64>,
        data: &Data,
        visit: &mut dyn FnMut(u64, &[u8]) -> Result<bool>,
    ) -> Result<()> {
        let mut buffer = Buffer::for_overwrite(COPY_BYTES.min(range.end - range.start) as usize);
        for part in parts(range.clone()) {
            let into = &mut buffer[..(part.end - part.start) as usize];
            match data {
                Data::Base => self
                    .reader
                    .read_exact_at(into, part.start)
                    .map_err(|e| Error::io("read the base image", &self.base.options.path, e))?,
                Data::Log { segment, offset } => {
                    let at = offset + part.start - range.start;
                    let read = LogRead::new(segment.clone(), at, into.len());
                    into.copy_from_slice(&read.read()?);
                }
            }
            if !visit(part.start, into)? {
                break;
            }
        }
        Ok(())
    }

    /// Whether any byte at or behind `from` is not zero.
    pub(crate) fn holds_data_from(&self, from: u64) -> Result<bool> {
        let mut found = false;
        for part in self.data(from..self.size.max(from), u64::MAX) {
            let (range, data) = part?;
            self.read(range, &data, &mut |_, bytes| {
                found |= bytes.iter().any(|&byte| byte != 0);
                Ok(!found)
            })?;
            if found {
                break;
            }
        }
        Ok(found)
    }
}

/// A range cut into parts of at most [`COPY_BYTES`].
pub(crate) fn parts(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    range
        .clone()
        .step_by(COPY_BYTES as usize)
        .map(move |start| start..(start + COPY_BYTES).min(range.end))
}

/// The parts of a byte range of a file that are no holes, in order. Where the file system knows no holes that is all.
pub(crate) struct DataRanges<'a, F> {
    /// `None` for one that is not the host's, of whose holes nothing is known.
    file: Option<&'a F>,
    path: &'a Path,
    rest: Range<u64>,
    /// Up to here there is no hole.
    data_end: u64,
    most: u64,
}

impl<'a, F: AsFd> DataRanges<'a, F> {
    /// Each of at most `most` bytes, which is not zero.
    pub(crate) fn new(file: Option<&'a F>, path: &'a Path, range: Range<u64>, most: u64) -> Self {
        Self {
            file,
            path,
            data_end: range.start,
            rest: range,
            most,
        }
    }

    /// Goes on to the next data, if there is any.
    fn seek(&mut self) -> rustix::io::Result<bool> {
        let at = self.rest.start;
        let Some(file) = self.file else {
            self.data_end = self.rest.end;
            return Ok(true);
        };
        match rustix::fs::seek(file, SeekFrom::Data(at)) {
            // Nothing but a hole up to the end of the file.
            Err(Errno::NXIO) => self.rest.start = self.rest.end,
            Ok(start) => {
                self.data_end = match rustix::fs::seek(file, SeekFrom::Hole(start)) {
                    Err(Errno::NXIO) => self.rest.end,
                    end => end?.min(self.rest.end),
                };
                self.rest.start = start.min(self.rest.end);
            }
            Err(Errno::INVAL | Errno::OPNOTSUPP) => self.data_end = self.rest.end,
            Err(errno) => return Err(errno),
        }
        Ok(!self.rest.is_empty())
    }
}

impl<F: AsFd> Iterator for DataRanges<'_, F> {
    type Item = Result<Range<u64>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        if self.rest.start >= self.data_end {
            match self.seek() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(errno) => {
                    self.rest.start = self.rest.end;
                    let error = Error::io("look for holes in", self.path, errno.into());
                    return Some(Err(error));
                }
            }
        }
        let start = self.rest.start;
        self.rest.start = start.saturating_add(self.most).min(self.data_end);
        Some(Ok(start..self.rest.start))
    }
}
