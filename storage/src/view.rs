//! A disk that nobody uses, seen as its guest saw it last: the log over the base image. Reads, changes nothing.

use std::fs::File;
use std::ops::Range;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use crate::catalog::{OpenBase, has_control, open_control};
use crate::engine::EngineKind;
use crate::error::{Error, Result};
use crate::index::{ExtentMap, Place};
use crate::keeper::ControlFile;
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
    reader: File,
}

/// Part of a disk that may hold something other than zeroes.
pub(crate) enum Data<'a> {
    /// In the base image, at the same offset.
    Base(&'a File),
    /// These bytes.
    Bytes(&'a [u8]),
}

impl View {
    pub(crate) fn open(path: &Path, log_dir: &Path) -> Result<Self> {
        let base = OpenBase::open(&DiskOptions::new(path))?;
        let reader = File::open(path).map_err(|error| Error::io("open the disk", path, error))?;
        if !has_control(log_dir) {
            base.refuse_mark(log_dir)?;
            return Ok(Self {
                size: base.size,
                base,
                log: None,
                extents: ExtentMap::default(),
                reader,
            });
        }
        let control = open_control(log_dir)?;
        let found = base.find(&control, log_dir)?;
        let medium = directory(log_dir, EngineKind::Blocking);
        let (_, mut indexes) = read_log(&medium, log_dir, &control.control, &mut |_, _| {})?;
        let entry = &control.control.disks[found];
        let index = indexes.remove(&entry.id.get());
        Ok(Self {
            size: entry.size.get(),
            base,
            log: Some((control, found)),
            extents: index.map_or_else(ExtentMap::default, |(index, _)| index.active),
            reader,
        })
    }

    /// Calls `visit` with each part of the byte range that may hold data, in order. The range is a whole number of
    /// sectors.
    pub(crate) fn data(
        &self,
        range: Range<u64>,
        visit: &mut dyn FnMut(Range<u64>, Data<'_>) -> Result<()>,
    ) -> Result<()> {
        let path = &self.base.options.path;
        let mut pieces = Vec::new();
        let (first, end) = (range.start / SECTOR_SIZE, range.end / SECTOR_SIZE);
        self.extents
            .visit(first, end - first, &mut |piece| pieces.push(piece));
        let mut buffer = Buffer::for_overwrite(COPY_BYTES as usize);
        for piece in pieces {
            let bytes = piece.sector * SECTOR_SIZE..(piece.sector + piece.sectors) * SECTOR_SIZE;
            match piece.place {
                None => data_ranges(&self.reader, path, bytes, &mut |part| {
                    visit(part, Data::Base(&self.reader))
                })?,
                Some(Place::Zero { .. }) => {}
                Some(Place::Memory { payload, offset }) => {
                    let len = (bytes.end - bytes.start) as usize;
                    visit(bytes, Data::Bytes(&payload[offset..offset + len]))?;
                }
                Some(Place::Log { segment, offset }) => {
                    for part in parts(bytes.clone()) {
                        let into = &mut buffer[..(part.end - part.start) as usize];
                        segment
                            .file
                            .read_exact_at(into, offset + part.start - bytes.start)
                            .map_err(|e| Error::io("read the log segment", &segment.path, e))?;
                        visit(part, Data::Bytes(into))?;
                    }
                }
            }
        }
        Ok(())
    }

    /// Whether any byte at or behind `from` is not zero.
    pub(crate) fn holds_data_from(&self, from: u64) -> Result<bool> {
        let mut found = false;
        let mut buffer = Buffer::for_overwrite(COPY_BYTES as usize);
        self.data(from..self.size.max(from), &mut |range, data| {
            let file = match data {
                Data::Bytes(bytes) => {
                    found |= bytes.iter().any(|&byte| byte != 0);
                    return Ok(());
                }
                Data::Base(file) => file,
            };
            for part in parts(range) {
                if found {
                    break;
                }
                let into = &mut buffer[..(part.end - part.start) as usize];
                FileExt::read_exact_at(file, into, part.start)
                    .map_err(|e| Error::io("read the base image", &self.base.options.path, e))?;
                found = into.iter().any(|&byte| byte != 0);
            }
            Ok(())
        })?;
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

/// Calls `visit` with each part of the range that is no hole. Where the file system knows no holes that is all.
pub(crate) fn data_ranges(
    file: impl AsFd,
    path: &Path,
    range: Range<u64>,
    visit: &mut dyn FnMut(Range<u64>) -> Result<()>,
) -> Result<()> {
    let seek = |to| match rustix::fs::seek(&file, to) {
        Ok(at) => Ok(Some(at)),
        Err(Errno::NXIO) => Ok(None),
        Err(errno) => Err(errno),
    };
    let mut at = range.start;
    while at < range.end {
        let (start, end) = match seek(SeekFrom::Data(at)) {
            // Nothing but a hole up to the end of the file.
            Ok(None) => return Ok(()),
            Ok(Some(start)) => match seek(SeekFrom::Hole(start)) {
                Ok(end) => (start, end.unwrap_or(range.end)),
                Err(errno) => return Err(Error::io("look for holes in", path, errno.into())),
            },
            Err(Errno::INVAL | Errno::OPNOTSUPP) => (at, range.end),
            Err(errno) => return Err(Error::io("look for holes in", path, errno.into())),
        };
        if start >= range.end {
            return Ok(());
        }
        at = end.min(range.end);
        visit(start..at)?;
    }
    Ok(())
}
