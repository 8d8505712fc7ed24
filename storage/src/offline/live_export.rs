//! Copying a disk in use, as of one moment, to a file.

use std::fs::File;
use std::ops::Range;
use std::path::Path;

use crate::disk::handle::Disk;
use crate::error::{Error, Result};
use crate::history::point::Point;
use crate::log::export::{SYNC_BYTES, TARGET, ended_early, sized};
use crate::medium::copying::{KERNEL_COPY_BYTES, NamedFile, copy};
use crate::offline::view::{DataPlace, Layers};
use crate::{Backend, SECTOR_SIZE, Transfer};

impl Disk {
    /// Copies the disk, as of one LSN, to `target`, an empty file open for writing, while requests go on. Everything
    /// that completed before the call is in the copy. Holes stay holes. `progress` gets the number of bytes passed so
    /// far and the disk's size, and returns `false` to end the export.
    ///
    /// If the log keeps history, this copies a [look](Self::look) at the newest record, and the log needs room for what
    /// is written in the meantime. Otherwise it first copies the log to the base images, as
    /// [`checkpoint`](Self::checkpoint) does; until the export ends, each checkpoint first copies to `target` what it
    /// is about to overwrite, so it takes longer.
    ///
    /// # Errors
    /// As [`checkpoint`](Self::checkpoint), or [`look`](Self::look); if the disk can't be read or `target` can't be
    /// written; if `progress` has ended the export. `target` keeps what was copied so far.
    pub fn export(
        &self,
        target: File,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Transfer> {
        let keeps_history = self.log.lock().keeps_history();
        if keeps_history {
            self.export_at(Point::Newest, target, progress)
        } else {
            self.export_base(target, progress)
        }
    }

    /// As [`export`](Self::export) with a log that keeps history, but as of a point in the past.
    ///
    /// # Errors
    /// As [`export`](Self::export) and [`look`](Self::look).
    pub fn export_at(
        &self,
        at: Point,
        target: File,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Transfer> {
        let look = self.look(at, None)?;
        let size = look.sectors() * SECTOR_SIZE;
        let to = NamedFile {
            file: &sized(target, size)?,
            path: Path::new(TARGET),
        };
        let layers = look.layers();
        let (mut copied, mut synced) = (0, 0);
        for part in layers.data(0..size, KERNEL_COPY_BYTES) {
            let (range, data) = part?;
            let end = range.end;
            copied += copy_part(layers, to, range, &data)?;
            if copied - synced >= SYNC_BYTES {
                synced = copied;
                let written = to.file.drop_cache();
                written.map_err(|error| Error::io("write", to.path, error))?;
            }
            if self.log.lock().keeper.stop {
                return Err(ended_early("the log is being closed"));
            }
            if !progress(end, size) {
                return Err(ended_early("it was given up"));
            }
        }
        progress(size, size);
        Ok(Transfer {
            size,
            copied,
            shared: false,
        })
    }
}

/// Copies a part of a disk to a file of zeroes. Returns how many bytes.
fn copy_part(
    layers: Layers<'_>,
    to: NamedFile<'_>,
    range: Range<u64>,
    data: &DataPlace,
) -> Result<u64> {
    let bytes = range.end - range.start;
    match data {
        DataPlace::Base => copy(layers.base, to, range)?,
        DataPlace::Zero => return Ok(0),
        DataPlace::Log { .. } => layers.read(range, data, &mut |at, bytes: &[u8]| {
            let written = to.file.write_all_at(bytes, at);
            written.map_err(|error| Error::io("write", to.path, error))?;
            Ok(true)
        })?,
    }
    Ok(bytes)
}
