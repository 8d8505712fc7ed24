//! A disk that is not in use, as its guest last saw it: the log over the base image. Read-only.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::catalog::control::{ControlFile, existing_log, find_control};
use crate::catalog::options::DiskOptions;
use crate::catalog::readable::ReadableLog;
use crate::error::{Error, ErrorKind, Result};
use crate::format::DiskEntry;
use crate::index::{ExtentMap, Location, Piece};
use crate::log::commit::Commit;
use crate::log::image::DiskImage;
use crate::log::ring::LiveSegment;
use crate::log::spill::Spill;
use crate::medium::copying::{COPY_BYTES, NamedSource, parts};
use crate::medium::directory::{Directory, directory_to_read};
use crate::medium::file::Segment;
use crate::medium::filesystem::{OpenMode, files};
use crate::medium::holes::DataRanges;
use crate::medium::lock::Access;
use crate::medium::segment::LogRead;
use crate::recovery::contents::VerifyScope;
use crate::recovery::replay::{UnappliedByDisk, read_log_until, read_records};
use crate::recovery::scan::{self, FoundRecord};
use crate::store::attach::{OpenBase, end_past};
use crate::store::discard::find_lost;
use crate::view::point::Point;
use crate::view::saved::read_saved;
use crate::{Buffer, SECTOR_SIZE};

/// A disk and its log, both locked, with the disk's extents in the log.
pub(crate) struct View {
    pub base: OpenBase,
    /// The log, and the place of the disk's entry in its table.
    pub log: Option<(ControlFile, usize)>,
    /// Size of the disk in bytes. The base image is longer after an interrupted resize.
    pub size: u64,
    /// The extents whose newest bytes are in the log and not in the base image.
    pub extents: ExtentMap,
    /// The log's segments, and the LSN up to which it was read.
    pub live: Vec<LiveSegment>,
    pub last_lsn: u64,
    /// Whether the disk was rewound, so that the log has records that do not count but may again.
    pub rewound: bool,
    /// The base image: through the page cache, because holes need not be aligned to the medium's
    /// sectors, unless another process writes it.
    pub reader: DiskImage,
}

/// Where the bytes of a range of the disk are.
pub(crate) enum DataPlace {
    /// In the base image, at the same offset.
    Base,
    /// In a segment of the log, from `offset` on.
    Log { segment: Arc<Segment>, offset: u64 },
    /// Nowhere: zeroes, whatever the base image has there.
    Zero,
}

impl DataPlace {
    /// The place of the bytes that come so many bytes later.
    pub(crate) fn after(&self, bytes: u64) -> Self {
        match self {
            Self::Base => Self::Base,
            Self::Zero => Self::Zero,
            Self::Log { segment, offset } => Self::Log {
                segment: segment.clone(),
                offset: offset + bytes,
            },
        }
    }
}

/// A disk and its log, both locked.
pub(crate) struct LocatedDisk {
    pub base: OpenBase,
    pub log: Option<LocatedLog>,
}

/// A disk's log, and what it holds.
pub(crate) struct LocatedLog {
    pub control: ControlFile,
    /// The place of the disk's entry in the log's table.
    pub place: usize,
    pub medium: Directory,
    /// The segments that were read.
    pub live: Vec<LiveSegment>,
    /// The record at the log's horizon.
    pub horizon: Commit,
    /// The newest LSN, or the one up to which the log was reread.
    pub last_lsn: u64,
    pub unapplied: UnappliedByDisk,
    /// Why the disk's past can't be seen over the present image.
    no_past: Option<&'static str>,
}

impl LocatedDisk {
    /// Opens the disk, and reads its log if it has one.
    pub(crate) fn open(
        options: &DiskOptions,
        log_dir: &Path,
        access: Access,
        threads: Option<NonZeroUsize>,
    ) -> Result<Self> {
        let control = find_control(log_dir, access.of_log())?;
        let base = OpenBase::open(options, access, log_dir, control.is_some())?;
        let Some(mut control) = control else {
            base.refuse_foreign(log_dir)?;
            return Ok(Self { base, log: None });
        };
        let medium = directory_to_read(log_dir, access.of_log(), threads);
        let known = &mut control.control;
        let (scan, unapplied) = read_log_until(&medium, log_dir, known, u64::MAX)?;
        let place = base.find(&control, log_dir, &unapplied)?;
        let newest = scan.newest(&control.control).lsn;
        let no_past = match access {
            Access::Read => base.without_past(&mut control, place, newest)?,
            // Its process has the right image open.
            Access::Held { .. } => None,
            // The control file will be written.
            _ => {
                end_past(&base, place, &mut control, newest)?;
                None
            }
        };
        let log = Some(LocatedLog {
            no_past,
            place,
            medium,
            horizon: scan.horizon,
            live: scan.live,
            last_lsn: newest.max(control.control.newest_change()),
            control,
            unapplied,
        });
        Ok(Self { base, log })
    }

    /// As [`open`](Self::open) for reading, whatever the marks say of whether image and log belong
    /// together.
    ///
    /// # Errors
    /// If there is no log, it has no disk for this image, or the image has another size.
    pub(crate) fn open_unmatched(
        options: &DiskOptions,
        log_dir: &Path,
        threads: Option<NonZeroUsize>,
    ) -> Result<Self> {
        let mut control = existing_log(log_dir, Access::LogRead)?;
        let base = OpenBase::open_as_is(options, Access::Read, true)?;
        let place = find_lost(&base, &control, log_dir)?;
        base.refuse_other_size(&control.control.disks[place], log_dir)?;
        let medium = directory_to_read(log_dir, Access::LogRead, threads);
        let known = &mut control.control;
        let (scan, unapplied) = read_log_until(&medium, log_dir, known, u64::MAX)?;
        let log = Some(LocatedLog {
            no_past: None,
            place,
            medium,
            last_lsn: scan.newest(&control.control).lsn,
            horizon: scan.horizon,
            live: scan.live,
            control,
            unapplied,
        });
        Ok(Self { base, log })
    }

    /// As [`open`](Self::open), for a command about a disk's history.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] too, if the disk has no log.
    pub(crate) fn with_history(
        options: &DiskOptions,
        log_dir: &Path,
        access: Access,
        threads: Option<NonZeroUsize>,
    ) -> Result<(OpenBase, LocatedLog)> {
        let Self { base, log } = Self::open(options, log_dir, access, threads)?;
        let log = log.ok_or_else(|| {
            Error::new(
                ErrorKind::NotFound,
                format!("{}: no log, so no history", log_dir.display()),
            )
        })?;
        Ok((base, log))
    }
}

impl LocatedLog {
    pub(crate) fn entry(&self) -> &DiskEntry {
        &self.control.control.disks[self.place]
    }

    /// Resolves a point, see [`Point::resolve`]. `base`: the disk's image.
    pub(crate) fn resolve(&self, point: Point, base: &OpenBase) -> Result<u64> {
        if let Some(why) = self.no_past.filter(|_| point != Point::Newest) {
            return Err(base.no_past(point, &self.medium.path, why));
        }
        let (medium, control) = (&self.medium, &self.control.control);
        let (dir, tail) = (&medium.path, VerifyScope::Tail);
        point.resolve(dir, control, self.entry().id.get(), |visit| {
            let visit = &mut |found: FoundRecord<'_>| visit(&found.commit());
            scan::scan(medium, dir, control, tail, visit, &mut |_, _| {}).map(drop)
        })
    }

    /// Rereads the log, as of LSN `until`.
    pub(crate) fn read_until(&mut self, until: u64) -> Result<()> {
        // Don't keep two indexes in memory.
        self.unapplied.clear();
        let (dir, control) = (&self.medium.path, &mut self.control.control);
        self.last_lsn = self.last_lsn.min(until);
        let (scan, unapplied) = read_log_until(&self.medium, dir, control, until)?;
        (self.live, self.unapplied) = (scan.live, unapplied);
        let disk_id = self.entry().id.get();
        if let Some(extents) = self.read_saved(until..u64::MAX)? {
            // The base images have moved past the point, so the log has nothing for it.
            let unapplied = self.unapplied.entry(disk_id).or_default();
            unapplied.extents = extents;
        }
        Ok(())
    }

    /// See [`read_saved`].
    pub(crate) fn read_saved(&self, lsns: Range<u64>) -> Result<Option<ExtentMap>> {
        let (dir, entry) = (&self.medium.path, self.entry());
        let saved = self.control.control.saved_files();
        let disk = (entry.id.get(), entry.size.get());
        read_saved(&*files(), dir, &saved, disk, lsns, None)
    }

    /// See [`read_records`].
    pub(crate) fn read_records(&self, wanted: impl Fn(u64) -> bool) -> Result<ExtentMap> {
        let (dir, control) = (&self.medium.path, &self.control.control);
        let disk_id = self.entry().id.get();
        read_records(&self.medium, dir, control, disk_id, wanted)
    }

    /// The LSN of the disk's newest rewind, if it has one.
    pub(crate) fn rewound(&self) -> Option<u64> {
        self.control.control.rewound(self.entry().id.get())
    }

    /// Takes the disk's extents.
    pub(crate) fn take_extents(&mut self) -> ExtentMap {
        let records = self.unapplied.remove(&self.entry().id.get());
        records.map_or_else(ExtentMap::default, |records| records.extents)
    }
}

/// The bytes of a disk: its extents in the log, over its base image.
#[derive(Clone, Copy)]
pub(crate) struct Layers<'a> {
    pub base: NamedSource<'a>,
    pub extents: &'a ExtentMap,
}

impl<'a> Layers<'a> {
    /// The parts of the byte range that are not holes in the base image, in order. Parts in the
    /// base image have at most `most` bytes. The range must be whole sectors.
    pub(crate) fn data(
        self,
        range: Range<u64>,
        most: u64,
    ) -> impl Iterator<Item = Result<(Range<u64>, DataPlace)>> + Send + use<'a> {
        let Self { base, extents } = self;
        assert!(
            range.start.is_multiple_of(SECTOR_SIZE) && range.end.is_multiple_of(SECTOR_SIZE),
            "a part of a disk is whole sectors"
        );
        let mut pieces = Vec::new();
        let (first, end) = (range.start / SECTOR_SIZE, range.end / SECTOR_SIZE);
        extents.visit(first, end - first, &mut |piece| pieces.push(piece));
        pieces.into_iter().flat_map(move |piece| {
            let (bytes, data) = over_base(piece);
            let (in_base, over) = match data {
                None => {
                    let ranges = DataRanges::new(base.file.host(), base.path, bytes, most);
                    (Some(ranges), None)
                }
                Some(data) => (None, Some(Ok((bytes, data)))),
            };
            let in_base = in_base.into_iter().flatten();
            let in_base = in_base.map(|range| range.map(|range| (range, DataPlace::Base)));
            in_base.chain(over)
        })
    }

    /// Calls `visit` with the bytes of a part from [`data`](Self::data), piece by piece, until it
    /// returns `false`. Not called for zeroes.
    pub(crate) fn read(
        self,
        range: Range<u64>,
        data: &DataPlace,
        visit: &mut dyn FnMut(u64, &[u8]) -> Result<bool>,
    ) -> Result<()> {
        let mut buffer = Buffer::for_overwrite(COPY_BYTES.min(range.end - range.start) as usize);
        for part in parts(range.clone()) {
            let into = &mut buffer[..(part.end - part.start) as usize];
            match data {
                DataPlace::Base => {
                    let read = self.base.file.read_exact_at(into, part.start);
                    read.map_err(|e| Error::io("read the base image", self.base.path, e))?;
                }
                DataPlace::Log { segment, offset } => {
                    let at = offset + part.start - range.start;
                    let read = LogRead::new(segment.clone(), at, into.len());
                    into.copy_from_slice(&read.read()?);
                }
                DataPlace::Zero => break,
            }
            if !visit(part.start, into)? {
                break;
            }
        }
        Ok(())
    }
}

impl View {
    /// Opens the disk, for reading or for a resize. Reads the log on `threads` threads.
    pub(crate) fn open(
        path: &Path,
        log_dir: &Path,
        access: Access,
        threads: Option<NonZeroUsize>,
    ) -> Result<Self> {
        let LocatedDisk { base, log } =
            LocatedDisk::open(&DiskOptions::new(path), log_dir, access, threads)?;
        Self::of(base, log)
    }

    /// Opens the disk for reading, as it was at a point.
    pub(crate) fn open_at<'a>(
        options: &DiskOptions,
        log: impl Into<ReadableLog<'a>>,
        at: Point,
        threads: Option<NonZeroUsize>,
    ) -> Result<Self> {
        let log: ReadableLog<'_> = log.into();
        let access = log.access().of_image();
        let (base, mut log) = LocatedDisk::with_history(options, log.dir(), access, threads)?;
        let until = log.resolve(at, &base)?;
        log.read_until(until)?;
        Self::of(base, Some(log))
    }

    /// As [`open`](Self::open) for reading, see [`LocatedDisk::open_unmatched`].
    pub(crate) fn open_unmatched(
        path: &Path,
        log_dir: &Path,
        threads: Option<NonZeroUsize>,
    ) -> Result<Self> {
        let LocatedDisk { base, log } =
            LocatedDisk::open_unmatched(&DiskOptions::new(path), log_dir, threads)?;
        Self::of(base, log)
    }

    fn of(base: OpenBase, log: Option<LocatedLog>) -> Result<Self> {
        let path = &base.options.path;
        let access = log.as_ref().map(|log| log.medium.access);
        let how = match access.and_then(Access::newest) {
            Some(_) => OpenMode::ReadDirect,
            None => OpenMode::Read,
        };
        let mut reader = files()
            .open(path, how)
            .map_err(|error| Error::io("open the disk", path, error))?;
        if let Some(gate) = base.file.chunk_gate() {
            reader = gate.guard(reader);
        }
        let spill = match &log {
            Some(log) => Spill::of(&log.control, log.entry().id.get(), OpenMode::Read)?,
            None => None,
        };
        let mut view = Self {
            size: base.size,
            base,
            log: None,
            extents: ExtentMap::default(),
            live: Vec::new(),
            last_lsn: 0,
            rewound: false,
            reader: DiskImage::new(reader.into(), spill),
        };
        if let Some(mut log) = log {
            (view.size, view.extents) = (log.entry().size.get(), log.take_extents());
            view.rewound = log.rewound().is_some();
            (view.live, view.last_lsn) = (log.live, log.last_lsn);
            view.log = Some((log.control, log.place));
        }
        Ok(view)
    }

    /// See [`Layers::data`].
    pub(crate) fn data(
        &self,
        range: Range<u64>,
        most: u64,
    ) -> impl Iterator<Item = Result<(Range<u64>, DataPlace)>> + Send {
        self.layers().data(range, most)
    }

    /// The bytes of the disk.
    pub(crate) fn layers(&self) -> Layers<'_> {
        Layers {
            base: self.reader(),
            extents: &self.extents,
        }
    }

    /// The parts of the disk that are not in the base image, in order.
    pub(crate) fn over_base(&self) -> impl Iterator<Item = Result<(Range<u64>, DataPlace)>> + Send {
        self.extents.iter().filter_map(|piece| {
            let (bytes, data) = over_base(piece);
            data.map(|data| Ok((bytes, data)))
        })
    }

    /// The base image, through the page cache.
    pub(crate) fn reader(&self) -> NamedSource<'_> {
        NamedSource {
            file: &self.reader,
            path: &self.base.options.path,
        }
    }

    /// See [`Layers::read`].
    pub(crate) fn read(
        &self,
        range: Range<u64>,
        data: &DataPlace,
        visit: &mut dyn FnMut(u64, &[u8]) -> Result<bool>,
    ) -> Result<()> {
        self.layers().read(range, data, visit)
    }

    /// Whether any byte at or after `from` is not zero.
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

/// The byte range of a piece, and where its bytes are; `None`: in the base image.
fn over_base(piece: Piece) -> (Range<u64>, Option<DataPlace>) {
    let bytes = piece.sector * SECTOR_SIZE..(piece.sector + piece.sectors) * SECTOR_SIZE;
    let data = piece.place.map(|place| match place {
        Location::Zero { .. } => DataPlace::Zero,
        Location::Log { segment, offset } => DataPlace::Log { segment, offset },
        Location::Memory { .. } => unreachable!("what was read from a log is in the log"),
    });
    (bytes, data)
}
