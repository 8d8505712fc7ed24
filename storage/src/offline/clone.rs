//! Clones: a disk from another one, as it is or was at a point of its history.
//!
//! ```text
//!   source, locked ─▶ view ─▶ NEW.walvisor-part ─▶ NEW                    the file system shares blocks,
//!                                                                         or all is copied first
//!                     view ─▶ NEW, sparse, with a fetch map ─▶ used       served: chunks that requests
//!                          └───── chunks ─────────▲                       wait for, then the others
//! ```
//! A clone that is served and was killed goes on if its source is as it was, or can still be seen at
//! the point that was named.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::catalog::control::real_path;
use crate::catalog::options::{DiskOptions, StoreOptions};
use crate::catalog::snapshot::Snapshot;
use crate::error::{Error, ErrorKind, Result, invalid};
use crate::history::point::Point;
use crate::medium::copying::KERNEL_COPY_BYTES;
use crate::medium::fetch_map::FetchMap;
use crate::medium::lock::Access;
use crate::offline::create::NewDisk;
use crate::offline::fetcher::{ChunkSource, FetchOptions, FetchRemedy, Fetcher};
use crate::offline::part_file::{PartFile, exists};
use crate::offline::transfer::{fill, mode_of, origin, origin_of};
use crate::offline::view::{DataPlace, View};
use crate::parallel::Progress;
use crate::{SECTOR_SIZE, Transfer};

/// Bytes of a chunk that a served clone lacks or has.
const CHUNK_BYTES: u64 = 1 << 20;
/// The source is a file: few requests at once keep it busy, and it answers or not.
const FETCH: FetchOptions = FetchOptions {
    at_once: 2,
    most_unsynced: 16,
    pauses: [Duration::from_millis(100), Duration::from_secs(1)],
};

/// The disk to clone: its image, its log, and the point, or as it is now.
#[derive(Clone, Debug)]
pub struct CloneSource {
    /// The image.
    pub path: PathBuf,
    /// The log's directory.
    pub log_dir: PathBuf,
    /// `None`: as it is now.
    pub at: Option<Point>,
}

impl CloneSource {
    fn open(&self, options: &StoreOptions) -> Result<View> {
        let Self { path, log_dir, at } = self;
        match *at {
            Some(at) => View::open_at(&DiskOptions::new(path), log_dir, at, options.threads),
            None => View::open(path, log_dir, Access::Read, options.threads),
        }
    }

    fn refuse_own_log(&self, new_log_dir: &Path) -> Result<()> {
        if real_path(&self.log_dir)? != real_path(new_log_dir)? {
            return Ok(());
        }
        Err(invalid(format!(
            "{}: a clone cannot use its source's log; name another one",
            new_log_dir.display()
        )))
    }

    /// See [`origin`]. A snapshot is known by its commit, whatever the log still has of it.
    fn origin(&self, view: &View) -> Result<String> {
        let snapshot = match (self.at, &view.log) {
            (Some(Point::Snapshot(name)), Some((control, _))) => {
                Some(Snapshot::find(name, &control.control)?)
            }
            _ => None,
        };
        match snapshot {
            Some(Snapshot { cid, unix_us, .. }) => {
                let commit = [cid.to_le_bytes(), unix_us.to_le_bytes()].concat();
                Ok(origin_of(view, &commit))
            }
            None => origin(view),
        }
    }
}

/// Creates a disk at `new` with the contents of another one, and registers it in the log in
/// `new_log_dir`. If there is no such log, creates it with `options`; an existing log ignores them.
/// Where the file system can, both disks share the blocks of the base image. Does not change the
/// source.
///
/// # Errors
/// As [`restore_disk`](crate::restore_disk); or if `new` exists or its log is open elsewhere.
/// Nothing is left behind.
pub fn clone_disk(
    source: &CloneSource,
    new: &Path,
    new_log_dir: &Path,
    options: &StoreOptions,
    progress: Progress<'_>,
) -> Result<Transfer> {
    source.refuse_own_log(new_log_dir)?;
    let disk = NewDisk::begin(new, new_log_dir, options)?;
    let view = source.open(options)?;
    let mode = mode_of(view.base.file.as_ref(), &source.path)?;
    let part = PartFile::resume(new, view.size, mode, origin(&view)?)?;
    let done = fill(&part, &view, options.threads, progress)?;
    disk.finish(part, view.size, options)?;
    progress(view.size, view.size);
    Ok(done)
}

/// Creates a disk as [`clone_disk`] does, but `ready` is called at once: from then on the new disk
/// can be opened, read and written, while this goes on to copy, and first what requests wait for.
/// Meanwhile nobody can write to the source. If this is ended, requests for what was not copied
/// fail, until another call with the same arguments goes on.
///
/// # Errors
/// As [`clone_disk`]. [`ErrorKind::Locked`] if another process fills the clone.
/// [`ErrorKind::WrongLog`] if an earlier call was ended, and the source is no longer what it was:
/// name a snapshot as the point, and it is, whatever is written to the source meanwhile.
/// [`ErrorKind::Damaged`] if parts of the source can't be read: all others are copied first, and
/// requests for these fail.
pub fn serve_clone(
    source: &CloneSource,
    new: &Path,
    new_log_dir: &Path,
    options: &StoreOptions,
    ready: impl FnOnce(),
    progress: Progress<'_>,
) -> Result<Transfer> {
    source.refuse_own_log(new_log_dir)?;
    let begun = exists(new)? && FetchMap::path_of(new).exists();
    let view = if begun {
        let view = source.open(options)?;
        refuse_other_source(source, &view, new)?;
        view
    } else {
        let disk = NewDisk::begin(new, new_log_dir, options)?;
        let view = source.open(options)?;
        let mode = mode_of(view.base.file.as_ref(), &source.path)?;
        let part = PartFile::create_partial(new, view.size, mode)?;
        if part.share(view.reader().file, view.size)? {
            FetchMap::remove(new)?;
            let done = fill(&part, &view, options.threads, progress)?;
            disk.finish(part, view.size, options)?;
            ready();
            progress(view.size, view.size);
            return Ok(done);
        }
        let absent = absent_chunks(&view)?;
        let origin = source.origin(&view)?;
        let has = |chunk: usize| !absent[chunk];
        FetchMap::write(new, view.size, CHUNK_BYTES, has, Some(&origin))?;
        if let Some(file) = part.file().host() {
            let marked = FetchMap::mark(file);
            marked.map_err(|error| Error::io("mark", part.path(), error))?;
        }
        disk.finish(part, view.size, options)?;
        view
    };
    let fetcher = Fetcher::open(std::iter::once((new, view.size)), FETCH)?;
    let chunks = ViewChunks { view: &view };
    let fetched = fetcher.run(&chunks, ready, progress)?;
    if let Some(first) = fetched.lost.first() {
        return Err(Error::new(
            ErrorKind::Damaged,
            format!(
                "{first}; {}: this clone lacks {} MiB that can't be read from {}; everything else \
                 is there",
                new.display(),
                fetched.lost.len(),
                source.path.display()
            ),
        ));
    }
    fetcher.end()?;
    Ok(Transfer {
        size: view.size,
        copied: (fetched.fetched * CHUNK_BYTES).min(view.size),
        shared: false,
    })
}

/// Which chunks have data.
fn absent_chunks(view: &View) -> Result<Vec<bool>> {
    let mut absent = vec![false; view.size.div_ceil(CHUNK_BYTES) as usize];
    for part in view.data(0..view.size, KERNEL_COPY_BYTES) {
        let (range, data) = part?;
        if !matches!(data, DataPlace::Zero) && !range.is_empty() {
            let (first, last) = (range.start / CHUNK_BYTES, (range.end - 1) / CHUNK_BYTES);
            absent[first as usize..=last as usize].fill(true);
        }
    }
    Ok(absent)
}

/// Refuses to go on with a clone that was begun with something else.
fn refuse_other_source(source: &CloneSource, view: &View, new: &Path) -> Result<()> {
    let (begun, now) = match FetchMap::open(new)? {
        Some(map) => (map.origin()?, source.origin(view)?),
        // It has just ended.
        None => return Ok(()),
    };
    // Without the image, which may have got newer bytes: then the log leads to the same point.
    let record = |origin: &str| origin.splitn(4, ' ').take(3).collect::<Vec<_>>().join(" ");
    let same = begun == now || source.at.is_some() && record(&begun) == record(&now);
    if same {
        return Ok(());
    }
    let (new, path) = (new.display(), source.path.display());
    Err(Error::new(
        ErrorKind::WrongLog,
        format!(
            "{new}: exists already, and is no unfinished clone of {path} as it is now or at the \
             point; if {path} has changed since, what {new} lacks is lost, unless '--at' still \
             leads to where the clone was begun; a clone from a snapshot (--at snapshot:NAME) can \
             go on whatever is written to its source"
        ),
    ))
}

/// The chunks of a disk at a moment.
struct ViewChunks<'a> {
    view: &'a View,
}

impl ChunkSource for ViewChunks<'_> {
    type Error = Error;

    fn chunk(&self, _: usize, chunk: usize) -> Result<Vec<u8>> {
        let start = chunk as u64 * CHUNK_BYTES;
        let end = self.view.size.min(start + CHUNK_BYTES);
        debug_assert!((end - start).is_multiple_of(SECTOR_SIZE));
        let mut bytes = vec![0; (end - start) as usize];
        for part in self.view.data(start..end, CHUNK_BYTES) {
            let (range, data) = part?;
            self.view.read(range, &data, &mut |at, piece| {
                let into = (at - start) as usize;
                bytes[into..into + piece.len()].copy_from_slice(piece);
                Ok(true)
            })?;
        }
        Ok(bytes)
    }

    fn remedy(&self, _: &Error) -> FetchRemedy {
        FetchRemedy::Retry
    }
}
