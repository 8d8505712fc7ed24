//! A look at a disk that is not in use.

use std::fs::File;
use std::path::Path;

use crate::SECTOR_SIZE;
use crate::catalog::options::{DiskOptions, StoreOptions};
use crate::catalog::snapshot::SavedFiles;
use crate::error::Error;
use crate::index::{ExtentLimit, IndexMemory};
use crate::log::commit::{PositionCache, SavedExtentsCache};
use crate::log::image::DiskImage;
use crate::medium::copying::NamedSource;
use crate::medium::engine;
use crate::store::view::{Layers, View};
use crate::sync::Arc;
use crate::view::look::{LogHold, Look, PastDisk, points, sized};
use crate::view::point::Point;

impl Look {
    /// Opens the disk as it was at a point in its history, with its present size. Uses only the
    /// engine, the number of threads and the memory limit of the index from `options`: the look's
    /// extents may take as much. `scratch`: an empty file for writes to the look, for instance from
    /// [`scratch_file`](crate::scratch_file); `None`: the look is read-only.
    ///
    /// # Errors
    /// As [`restore_disk`](crate::restore_disk); or if io_uring is asked for and the kernel has
    /// none, or the scratch file can't be as long as the disk; or
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput) if the extents take more memory
    /// than they may.
    pub fn open(
        disk: &DiskOptions,
        log_dir: &Path,
        at: Point,
        scratch: Option<File>,
        options: &StoreOptions,
    ) -> crate::Result<Self> {
        let engine = engine::probe(options.engine);
        let engine = engine.map_err(|e| Error::io("use io_uring for the log", log_dir, e))?;
        let mut view = View::open_at(disk, log_dir, at, options.threads)?;
        let limit = ExtentLimit::beside(&IndexMemory::default(), options.index_memory, log_dir);
        view.extents.count_within(&limit)?;
        let log = view.log.as_ref();
        let disk_id = log.map_or(0, |(log, place)| log.control.disks[*place].id.get());
        let points = log.map_or_else(Vec::new, |(log, _)| {
            points(&log.control, disk_id, view.last_lsn)
        });
        let files = log.map_or_else(SavedFiles::default, |(log, _)| log.control.saved_files());
        let past = PastDisk {
            live: view.live,
            segment_size: log.map_or(0, |(log, _)| log.control.header.segment_size.get()),
            positions: PositionCache::default(),
            disk_id,
            until: view.last_lsn,
            log_dir: log_dir.to_path_buf(),
            files,
            saved_since: SavedExtentsCache::default(),
            points,
            scratch: sized(scratch, view.size, &disk.path, &limit)?,
            path: disk.path.clone(),
            sectors: view.size / SECTOR_SIZE,
            base: Arc::new(DiskImage::new(view.base.file.into(), view.reader.spill())),
            extents: view.extents,
            hold: LogHold::Closed {
                engine,
                limit,
                _log: view.log.map(|(control, _)| Box::new(control)),
            },
        };
        Ok(Self {
            past: Arc::new(past),
        })
    }

    /// The disk as of the point, without what was written to the scratch file.
    pub(crate) fn layers(&self) -> Layers<'_> {
        Layers {
            base: NamedSource {
                file: self.past.base.as_ref(),
                path: &self.past.path,
            },
            extents: &self.past.extents,
        }
    }
}
