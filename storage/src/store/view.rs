//! A disk that is not in use, as its guest saw it last: the log over the base image. Read only.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::catalog::control::{ControlFile, find_control};
use crate::catalog::options::DiskOptions;
use crate::error::{Error, ErrorKind, Result};
use crate::index::{ExtentMap, Place};
use crate::medium::directory::{Directory, directory_to_read};
use crate::medium::file::DataFile;
use crate::medium::filesystem::{Open, files};
use crate::medium::holes::DataRanges;
use crate::medium::lock::Use;
use crate::medium::segment::{LogRead, Segment};
use crate::recovery::contents::Verify;
use crate::recovery::replay::{read_log, read_log_until};
use crate::store::attach::OpenBase;
use crate::store::point::Point;
use crate::{Buffer, SECTOR_SIZE};

/// Most bytes that are read or copied at a time.
const COPY_BYTES: u64 = 1 << 20;

/// A disk and its log, both locked, with the disk's extents in the log.
pub(crate) struct View {
    pub base: OpenBase,
    /// The log, with the place of the disk's entry in its table.
    pub log: Option<(ControlFile, usize)>,
    /// Size of the disk in bytes. The base image is longer after an interrupted resize.
    pub size: u64,
    /// The extents whose newest bytes are in the log and not in the base image.
    pub extents: ExtentMap,
    /// The base image through the page cache: holes need not be aligned to the medium's sectors.
    reader: Box<dyn DataFile>,
}

/// The place of a range that may hold data other than zeroes.
pub(crate) enum Data {
    /// In the base image, at the same offset.
    Base,
    /// In a segment of the log, from `offset` on.
    Log { segment: Arc<Segment>, offset: u64 },
}

impl View {
    /// Opens the disk, for reading or also for a resize; reads the log on `threads` threads.
    pub(crate) fn open(
        path: &Path,
        log_dir: &Path,
        using: Use,
        threads: Option<NonZeroUsize>,
    ) -> Result<Self> {
        Self::open_at(path, log_dir, using, None, threads)
    }

    /// As [`open`](Self::open); `at`: as the disk was at this point.
    pub(crate) fn open_at(
        path: &Path,
        log_dir: &Path,
        using: Use,
        at: Option<Point>,
        threads: Option<NonZeroUsize>,
    ) -> Result<Self> {
        let log_using = match using {
            Use::Read => Use::LogRead,
            _ => Use::Log,
        };
        let control = find_control(log_dir, log_using)?;
        let base = OpenBase::open(&DiskOptions::new(path), using, control.is_some())?;
        let reader = files().open(path, Open::Read);
        let reader = reader.map_err(|error| Error::io("open the disk", path, error))?;
        let Some(control) = control else {
            base.refuse_foreign(log_dir)?;
            if at.is_some() {
                return Err(Error::new(
                    ErrorKind::NotFound,
                    format!("{}: no log, so no history", log_dir.display()),
                ));
            }
            return Ok(Self {
                size: base.size,
                base,
                log: None,
                extents: ExtentMap::default(),
                reader,
            });
        };
        let medium = Directory {
            using: log_using,
            ..directory_to_read(log_dir, threads)
        };
        let (_, mut waiting) = read_log(
            &medium,
            log_dir,
            &control.control,
            Verify::Tail,
            &mut |_, _| {},
        )?;
        let found = base.find(&control, log_dir, &waiting)?;
        let entry = &control.control.disks[found];
        if let Some(point) = at {
            // It keeps the segments locked.
            drop(waiting);
            let (control, none) = (&control.control, &mut |_, _| {});
            let until = point.resolve(&medium, log_dir, control, entry.id.get())?;
            (_, waiting) = read_log_until(&medium, log_dir, control, until, Verify::Tail, none)?;
        }
        let records = waiting.remove(&entry.id.get());
        Ok(Self {
            size: entry.size.get(),
            base,
            log: Some((control, found)),
            extents: records.map_or_else(ExtentMap::default, |records| records.extents),
            reader,
        })
    }

    /// The parts of the byte range that may hold data, in order. A part in the base image has at most `most` bytes.
    /// The range must be a whole number of sectors.
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

    /// Calls `visit` with the bytes of a part that [`data`](Self::data) returned, piece by piece, until it returns
    /// `false`.
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
