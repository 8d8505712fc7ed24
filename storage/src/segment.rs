//! Segment files: fixed-size pieces of the log, zero-filled once, recycled for ever.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::file;

/// One segment file. Whoever holds it in an `Arc` pins it: it is recycled only when nobody does.
#[derive(Debug)]
pub(crate) struct Segment {
    pub path: PathBuf,
    pub file: File,
}

impl Segment {
    /// The path of segment file number `slot` of the log in `dir`.
    pub(crate) fn path(dir: &Path, slot: u32) -> PathBuf {
        dir.join(format!("segment-{slot:05}"))
    }

    /// Creates segment file number `slot`, every byte written with zero and synced, so that later syncs
    /// touch no file-system metadata. A crash leaves either nothing or the whole file.
    pub(crate) fn create(dir: &Path, slot: u32, size: u64) -> Result<Self> {
        let path = Self::path(dir, slot);
        let unfinished = path.with_extension("new");
        let fill = || {
            let file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .open(&unfinished)?;
            file::write_zeroes(&file, 0, size)?;
            file.sync_all()?;
            std::fs::rename(&unfinished, &path)
        };
        if let Err(error) = fill() {
            // Best effort: a leftover is overwritten by the next attempt.
            let _ = std::fs::remove_file(&unfinished);
            return Err(Error::io("create a log segment", &path, error));
        }
        file::sync_dir(dir)?;
        Self::open(path)
    }

    /// Opens an existing segment file.
    pub(crate) fn open(path: PathBuf) -> Result<Self> {
        let file = file::open_direct(&path, true)
            .map_err(|e| Error::io("open the log segment", &path, e))?;
        Ok(Self { path, file })
    }

    /// The segment files in `dir`, with their numbers, in order.
    pub(crate) fn list(dir: &Path) -> Result<Vec<(u32, PathBuf)>> {
        let read = |error| Error::io("read the log directory", dir, error);
        let mut found = Vec::new();
        for entry in std::fs::read_dir(dir).map_err(read)? {
            let entry = entry.map_err(read)?;
            let name = entry.file_name();
            let slot = name
                .to_str()
                .and_then(|name| name.strip_prefix("segment-"))
                .and_then(|n| n.parse().ok());
            if let Some(slot) = slot {
                found.push((slot, entry.path()));
            }
        }
        found.sort_unstable();
        Ok(found)
    }
}
