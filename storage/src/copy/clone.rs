//! Clones: a disk from another one, as it is or was at a point of its history.
//!
//! ```text
//!   clone:  source, locked ─▶ view ─ all of it, or shared blocks ─▶ NEW.walvisor-part ─▶ NEW
//!   serve:  source, locked ─▶ view ─▶ NEW, sparse, with a fetch map ─▶ in use
//!                               └───── chunks ───────▲   those that requests wait for, then the others
//! ```
//! Another call resumes a served clone that was killed, if its source has not changed, or proves
//! that it still shows the same state at the point.

use std::fmt;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::Transfer;
use crate::catalog::control::{CONTROL, real_path};
use crate::catalog::options::{DiskOptions, StoreOptions};
use crate::catalog::snapshot::Snapshot;
use crate::copy::fetcher::{ChunkSource, FetchOptions, FetchRemedy, Fetcher};
use crate::copy::transfer::{base_origin, fill, mode_of, origin, salt_at};
use crate::error::{Error, ErrorKind, Result, invalid};
use crate::medium::copying::KERNEL_COPY_BYTES;
use crate::medium::fetch_map::FetchMap;
use crate::medium::filesystem::{OpenMode, files};
use crate::medium::lock::Access;
use crate::parallel::Progress;
use crate::store::create::NewDisk;
use crate::store::part_file::{PartFile, exists};
use crate::store::view::{DataPlace, View};
use crate::view::point::Point;

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

    /// What identifies the source, and the rest that is the same only while its image is.
    fn origin(&self, view: &View) -> Result<CloneOrigin> {
        let size = view.size;
        let Some((control, place)) = &view.log else {
            return Ok(CloneOrigin {
                state: format!("{size}"),
                proof: NO_PROOF.to_owned(),
                base: base_origin(view),
            });
        };
        let (control, lsn) = (&control.control, view.last_lsn);
        let entry = &control.disks[*place];
        let (disk, id) = (u128::from_be_bytes(entry.disk), entry.id.get());
        let (void, cuts) = (entry.void_lsn, control.cuts(id));
        let proof = match self.at {
            Some(Point::Snapshot(name)) => {
                let Snapshot { cid, unix_us, .. } = Snapshot::find(name, control)?;
                format!("cid:{cid}:{unix_us}")
            }
            // The record is in the log, in this use of a segment.
            _ if lsn > control.horizon_of(id) => format!("salt:{:x}", salt_at(view)?),
            _ => NO_PROOF.to_owned(),
        };
        Ok(CloneOrigin {
            state: format!("{disk:032x}:lsn:{lsn}:{void}:{cuts}:{size}"),
            proof,
            base: base_origin(view),
        })
    }

    /// Refuses to go on with a clone that was begun with something else.
    fn refuse_other(&self, view: &View, new: &Path, map: &FetchMap) -> Result<()> {
        if map.is_complete() {
            // Nothing is copied any more.
            return Ok(());
        }
        let (begun, now) = (map.origin()?, self.origin(view)?);
        if !map.is_marked(new)? {
            let message = format!(
                "{}: exists already, and is no unfinished clone",
                new.display()
            );
            return Err(Error::new(ErrorKind::AlreadyExists, message));
        }
        let past = self.at.is_some_and(|at| at != Point::Newest);
        let proven = past && now.proof != NO_PROOF;
        let same = match proven {
            true => begun.starts_with(&format!("{} {} ", now.state, now.proof)),
            false => begun == now.to_string(),
        };
        if same {
            return Ok(());
        }
        let (new, path) = (new.display(), self.path.display());
        let mut words = begun.split([' ', ':']);
        let lsn = words.find(|word| *word == "lsn").and_then(|_| words.next());
        let begun = lsn.map_or_else(String::new, |lsn| format!(", begun at lsn:{lsn},"));
        Err(Error::new(
            ErrorKind::WrongLog,
            format!(
                "{new}: this unfinished clone{begun} is not of {path} as it is now or at that \
                 point: say the same as when it was begun; if {path} was written to or resized \
                 since, what {new} lacks is lost, unless it was begun with a snapshot (--at \
                 snapshot:NAME)"
            ),
        ))
    }
}

/// In a [`CloneOrigin`], if nothing but the image shows that it is the same.
const NO_PROOF: &str = "-";

/// What a clone is of.
struct CloneOrigin {
    /// The disk's state: disk, LSN, what was discarded, how often it was shrunk, and its size.
    state: String,
    /// What no other state with this LSN has.
    proof: String,
    /// The image.
    base: String,
}

impl fmt::Display for CloneOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { state, proof, base } = self;
        write!(f, "{state} {proof} {base}")
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

/// Creates a disk as [`clone_disk`] does, whose bytes are what `fill` writes to the empty file it
/// gets: the process that has the source open can do that.
///
/// # Errors
/// Those of `fill`; or as [`clone_disk`], of the new disk. Nothing is left behind.
pub fn receive_clone<E: From<Error>>(
    source: &CloneSource,
    new: &Path,
    new_log_dir: &Path,
    options: &StoreOptions,
    fill: impl FnOnce(&File) -> std::result::Result<Transfer, E>,
) -> std::result::Result<Transfer, E> {
    source.refuse_own_log(new_log_dir)?;
    let disk = NewDisk::begin(new, new_log_dir, options)?;
    let image = files().open(&source.path, OpenMode::ReadDirect);
    let image = image.map_err(|error| Error::io("open the disk", &source.path, error))?;
    let mode = mode_of(image.as_ref(), &source.path)?;
    let part = PartFile::resume(new, 0, mode, String::new())?;
    let done = fill(part.host_file()?)?;
    disk.finish(part, done.size, options)?;
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
    let map = match exists(new)? {
        true => FetchMap::open(new)?,
        false => None,
    };
    let view = if let Some(map) = map {
        refuse_missing_log(new, new_log_dir)?;
        let view = source.open(options)?;
        source.refuse_other(&view, new, &map)?;
        view
    } else {
        let disk = NewDisk::begin(new, new_log_dir, options)?;
        let view = source.open(options)?;
        if let Some(gate) = view.base.file.chunk_gate() {
            gate.refuse_absent(&source.path)?;
        }
        let mode = mode_of(view.base.file.as_ref(), &source.path)?;
        if !exists(&PartFile::path_for(new))? {
            // A map that is there belongs to an image that was moved away.
            FetchMap::refuse(new)?;
        }
        let part = PartFile::create_partial(new, view.size, mode)?;
        if part.share(view.reader().file, view.size)? {
            let done = fill(&part, &view, options.threads, progress)?;
            disk.finish(part, view.size, options)?;
            ready();
            progress(view.size, view.size);
            return Ok(done);
        }
        let chunk_bytes = chunk_bytes(source, view.size)?;
        let absent = absent_chunks(&view, chunk_bytes)?;
        let origin = source.origin(&view)?.to_string();
        let made = MadeMap(Some(new));
        let marked = part.file().host().map(FetchMap::mark).transpose();
        let marked = marked.map_err(|error| Error::io("mark", part.path(), error))?;
        let has = |chunk: usize| !absent[chunk];
        let origin = (&*origin, marked.unwrap_or(false));
        FetchMap::write(new, view.size, chunk_bytes, has, Some(origin))?;
        disk.finish(part, view.size, options)?;
        made.keep();
        view
    };
    let fetcher = Fetcher::open(std::iter::once((new, view.size)), FETCH)?;
    let chunks = ViewChunks {
        view: &view,
        chunk_bytes: chunk_bytes(source, view.size)?,
    };
    let fetched = fetcher.run(&chunks, ready, progress)?;
    if let Some(first) = fetched.lost.first() {
        return Err(Error::new(
            ErrorKind::Damaged,
            format!(
                "{first}; {}: this clone lacks {} chunks that can't be read from {}; everything \
                 else is there",
                new.display(),
                fetched.lost.len(),
                source.path.display()
            ),
        ));
    }
    fetcher.end()?;
    Ok(Transfer {
        size: view.size,
        copied: (fetched.fetched * chunks.chunk_bytes).min(view.size),
        shared: false,
    })
}

/// The map of a clone that is being made. Removes it if that fails.
struct MadeMap<'a>(Option<&'a Path>);

impl MadeMap<'_> {
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for MadeMap<'_> {
    fn drop(&mut self) {
        // The error that ended it is the one to report.
        let _ = self.0.map(FetchMap::remove);
    }
}

/// Refuses to go on with a clone on another log than its own.
fn refuse_missing_log(new: &Path, new_log_dir: &Path) -> Result<()> {
    if new_log_dir.join(CONTROL).exists() {
        return Ok(());
    }
    let message = format!(
        "{}: exists already, and its log is not in {}; say the same as when this clone was begun",
        new.display(),
        new_log_dir.display()
    );
    Err(Error::new(ErrorKind::WrongLog, message))
}

/// Bytes of a chunk of a disk of so many bytes.
fn chunk_bytes(source: &CloneSource, size: u64) -> Result<u64> {
    let mut sizes = (0..7).map(|doubled| CHUNK_BYTES << doubled);
    let fits = |bytes: &u64| size.div_ceil(*bytes) <= FetchMap::MOST_CHUNKS;
    sizes.find(fits).ok_or_else(|| {
        invalid(format!(
            "{}: the disk is too large to be used before it is whole; clone it without --serve",
            source.path.display()
        ))
    })
}

/// Which chunks have data.
fn absent_chunks(view: &View, chunk_bytes: u64) -> Result<Vec<bool>> {
    let mut absent = vec![false; view.size.div_ceil(chunk_bytes) as usize];
    for part in view.data(0..view.size, KERNEL_COPY_BYTES) {
        let (range, data) = part?;
        if !matches!(data, DataPlace::Zero) && !range.is_empty() {
            let (first, last) = (range.start / chunk_bytes, (range.end - 1) / chunk_bytes);
            absent[first as usize..=last as usize].fill(true);
        }
    }
    Ok(absent)
}

/// The chunks of a disk at a moment.
struct ViewChunks<'a> {
    view: &'a View,
    chunk_bytes: u64,
}

impl ChunkSource for ViewChunks<'_> {
    type Error = Error;

    fn chunk(&self, _: usize, chunk: usize) -> Result<Vec<u8>> {
        let start = chunk as u64 * self.chunk_bytes;
        let end = self.view.size.min(start + self.chunk_bytes);
        assert!(start < end, "the chunk is of the disk");
        let mut bytes = vec![0; (end - start) as usize];
        for part in self.view.data(start..end, self.chunk_bytes) {
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
