//! Copying the base image of a disk in use, exactly as a checkpoint left it.
//!
//! ```text
//!   base image   ███████▒▒░░░░░░██░░░░░░░      █ copied   ░ not copied yet
//!                 reader ─▶      ▲
//!                                a later checkpoint: what it is about to overwrite is copied first
//! ```
//! Right after a checkpoint, the base image holds the disk as of one record. One thread, the
//! reader, copies it from front to back. Only the log's keeper writes to the image, and before it
//! changes a part that the reader has not reached, it copies that part itself. So each part is
//! copied once, as it was at the start, while requests go on and checkpoints free the log's
//! segments as usual.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use crate::error::{Error, ErrorKind, Result, invalid};
use crate::log::image::Image;
use crate::medium::copying::{COPY_BYTES, NamedFile, NamedSource, copy};
use crate::medium::file::{DataFile, size_error};
use crate::medium::holes::DataRanges;
use crate::sync::{Arc, Condvar, Mutex, MutexGuard};

/// Most bytes copied at a time. A checkpoint may have to wait for one such copy.
const BLOCK: u64 = if cfg!(test) { 8 << 10 } else { COPY_BYTES };
/// The exported file in errors: only its descriptor is known.
pub(crate) const TARGET: &str = "the exported file";
/// After this many bytes, the reader syncs the copy and drops its cached pages: a large copy must
/// not fill memory with dirty pages.
pub(crate) const SYNC_BYTES: u64 = 64 << 20;

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Export {
    base: Arc<Image>,
    path: PathBuf,
    target: File,
    progress: Mutex<ExportProgress>,
    /// Signalled when the reader has copied a part or has ended.
    copied: Condvar,
}

/// What has been copied. All ranges are in bytes of the disk.
#[derive(Debug, Default)]
struct ExportProgress {
    /// The disk's size as of the exported record.
    size: u64,
    /// Everything before this is copied.
    next: u64,
    /// The reader is copying from `next` to here.
    busy: u64,
    /// What the keeper has copied, or found to be a hole.
    saved: RangeSet,
    /// Bytes copied, holes excluded.
    bytes: u64,
    /// The error met by the keeper.
    failed: Option<Error>,
    /// The reader is gone; nothing more is copied.
    ended: bool,
}

impl Export {
    /// An export, not begun yet, of the base image `base` at `path` to `target`, an empty file.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the file is not regular or not empty.
    pub(crate) fn new(base: &Arc<Image>, path: &Path, target: File) -> Result<Self> {
        refuse_unfit(&target)?;
        Ok(Self {
            base: base.clone(),
            path: path.to_owned(),
            target,
            progress: Mutex::default(),
            copied: Condvar::new(),
        })
    }

    /// Begins the export of the first `size` bytes that the base image holds now. Called by the
    /// keeper, with no checkpoint under way.
    ///
    /// # Errors
    /// If the file can't have this size.
    pub(crate) fn begin(&self, size: u64) -> Result<()> {
        set_size(&self.target, size)?;
        self.lock().size = size;
        Ok(())
    }

    /// Ends the export, whether it is complete or not. Called by the reader.
    pub(crate) fn end(&self) {
        self.lock().ended = true;
        self.copied.notify_all();
    }

    /// Copies the next part. Returns how far the copy has come, the disk's size, and how many bytes
    /// were copied. Called by the reader until the first two are equal.
    ///
    /// # Errors
    /// If the image can't be read or the file can't be written, here or by the keeper.
    pub(crate) fn step(&self) -> Result<(u64, u64, u64)> {
        let (next, size) = {
            let progress = self.lock();
            (progress.next, progress.size)
        };
        let part = self.next_data(next..size)?;
        let mut progress = self.lock();
        if let Some(error) = progress.failed.take() {
            return Err(error);
        }
        (progress.next, progress.busy) = (part.start, part.end);
        let gaps = progress.saved.gaps(&part);
        drop(progress);
        // An error ends the export, and with it the keeper's wait.
        let bytes = self.copy(gaps)?;
        let mut progress = self.lock();
        progress.next = part.end;
        let before = progress.bytes;
        progress.bytes += bytes;
        let done = (part.end, size, progress.bytes);
        drop(progress);
        self.copied.notify_all();
        if before / SYNC_BYTES < done.2 / SYNC_BYTES {
            let synced = self.target.drop_cache();
            synced.map_err(|error| Error::io("write", Path::new(TARGET), error))?;
        }
        Ok(done)
    }

    /// Copies a part of the range, from its start, unless that is copied already. Returns where the
    /// part ends. Called by the keeper, which may then change it.
    pub(crate) fn save(&self, range: Range<u64>) -> u64 {
        let reads = |progress: &mut ExportProgress| {
            let (first, end) = (range.start.max(progress.next), range.end.min(progress.busy));
            !progress.ended && first < end
        };
        let waited = self.copied.wait_while(self.lock(), reads);
        let mut progress = waited.expect("export lock");
        if progress.ended || progress.failed.is_some() {
            return range.end;
        }
        // Copy whole blocks: neighbours of what changes are likely to change too.
        let first = (range.start / BLOCK * BLOCK).max(progress.busy);
        let last = range.end.next_multiple_of(BLOCK).min(progress.size);
        if first >= last {
            return range.end;
        }
        let saved = self.next_data(first..last).and_then(|part| {
            let part = first..part.end;
            let bytes = self.copy(progress.saved.gaps(&part))?;
            progress.bytes += bytes;
            Ok(part)
        });
        match saved {
            Ok(part) => {
                let end = part.end.min(range.end);
                progress.saved.insert(part);
                end
            }
            // The disk goes on. The reader reports the error.
            Err(error) => {
                progress.failed = Some(error);
                range.end
            }
        }
    }

    /// The next part of the range that has data, at most one block; the end of the range if there
    /// is none.
    fn next_data(&self, range: Range<u64>) -> Result<Range<u64>> {
        let base = self.base();
        let mut data = DataRanges::new(base.file.host(), base.path, range.clone(), BLOCK);
        let start = match data.next() {
            Some(data) => (data?.start / BLOCK * BLOCK).max(range.start),
            None => range.end,
        };
        let end = (start / BLOCK + 1).saturating_mul(BLOCK);
        Ok(start..end.min(range.end))
    }

    /// Copies the data in these ranges, leaving out holes. Returns how many bytes.
    fn copy(&self, ranges: Vec<Range<u64>>) -> Result<u64> {
        let (base, mut bytes) = (self.base(), 0);
        let to = NamedFile {
            file: &self.target,
            path: Path::new(TARGET),
        };
        for range in ranges {
            for data in DataRanges::new(base.file.host(), base.path, range, BLOCK) {
                let data = data?;
                bytes += data.end - data.start;
                copy(base, to, data)?;
            }
        }
        Ok(bytes)
    }

    fn base(&self) -> NamedSource<'_> {
        NamedSource {
            file: self.base.as_ref(),
            path: &self.path,
        }
    }

    fn lock(&self) -> MutexGuard<'_, ExportProgress> {
        self.progress.lock().expect("export lock")
    }
}

/// Refuses a file that is not regular or not empty.
fn refuse_unfit(target: &File) -> Result<()> {
    let metadata = target.metadata();
    let metadata =
        metadata.map_err(|error| Error::io("read its metadata", Path::new(TARGET), error))?;
    if !metadata.is_file() || metadata.len() > 0 {
        return Err(invalid(format!("{TARGET}: not an empty regular file")));
    }
    Ok(())
}

fn set_size(target: &File, size: u64) -> Result<()> {
    let sized = DataFile::set_len(target, size);
    sized.map_err(|error| size_error(Path::new(TARGET), size, error))
}

/// An empty regular file, made `size` zero bytes long.
///
/// # Errors
/// [`ErrorKind::InvalidInput`] if the file is not regular or not empty; or it can't have this size.
pub(crate) fn sized(target: File, size: u64) -> Result<File> {
    refuse_unfit(&target)?;
    set_size(&target, size)?;
    Ok(target)
}

/// The error of an export that is ended before it is complete.
pub(crate) fn ended_early(why: &str) -> Error {
    Error::new(ErrorKind::Io, format!("{TARGET}: not complete: {why}"))
}

/// Disjoint ranges that do not touch each other: end by start.
#[derive(Debug, Default)]
struct RangeSet(BTreeMap<u64, u64>);

impl RangeSet {
    fn insert(&mut self, mut range: Range<u64>) {
        while let Some((&start, &end)) = self.0.range(..=range.end).next_back()
            && end >= range.start
        {
            range = start.min(range.start)..end.max(range.end);
            self.0.remove(&start);
        }
        self.0.insert(range.start, range.end);
    }

    /// The parts of a range that none of these cover.
    fn gaps(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let before = self.0.range(..=range.start).next_back();
        let mut at = before.map_or(range.start, |(_, &end)| end.max(range.start));
        let mut gaps = Vec::new();
        for (&start, &end) in self.0.range(range.start..range.end) {
            if start > at {
                gaps.push(at..start);
            }
            at = at.max(end);
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        gaps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_joined_and_their_gaps_found() {
        let mut ranges = RangeSet::default();
        assert!(ranges.gaps(&(3..9)).into_iter().eq(std::iter::once(3..9)));
        for range in [10..20, 40..50, 30..40, 25..28] {
            ranges.insert(range);
        }
        assert_eq!(ranges.0.len(), 3);
        assert_eq!(ranges.gaps(&(0..60)), [0..10, 20..25, 28..30, 50..60]);
        assert!(
            ranges
                .gaps(&(15..27))
                .into_iter()
                .eq(std::iter::once(20..25))
        );
        assert!(ranges.gaps(&(12..18)).is_empty());
        ranges.insert(5..45);
        assert_eq!(ranges.0, BTreeMap::from([(5, 50)]));
        let whole = 0..u64::MAX;
        assert_eq!(ranges.gaps(&whole), [0..5, 50..u64::MAX]);
    }
}
