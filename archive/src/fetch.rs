//! Bringing a log back: its images chunk by chunk, before or after its log.
//!
//! ```text
//!   restore: fetch maps ─▶ chunks of the images ─▶ the log, whole ─▶ ready
//!   serve:   fetch maps ─▶ the log, whole ─▶ ready ─▶ chunks: those that requests wait for,
//!                                                     then those behind them
//! ```
//! The disks' owner, another process, asks for chunks by the images' [`FetchMap`]s. Before a
//! restore is ready nobody can open the disks; one that was ended goes on from what the maps say.

use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use tokio::sync::Notify;
use walvisor_storage::{
    ChunkSource, FetchMap, FetchOptions, FetchRemedy, FetchReport, Fetcher, Point, Progress,
};

use crate::error::{Error, ErrorKind, Result};
use crate::expire::Lease;
use crate::lineage::read_base;
use crate::object::BaseHeader;
use crate::remote::{AT_ONCE, Archive};
use crate::restore::{
    Plan, ReadyLog, RestoreNote, RestoreReport, begin, fetch_chunk, image_paths, lock_directory,
    log_dir_of, restored_disks,
};

/// Chunks that are written to an image before it is synced for them, unless a request waits; and if
/// none can wait.
const UNSYNCED: usize = 8;
const MOST_UNSYNCED: usize = 64;
/// How long to wait before a chunk is asked for again that the store did not send: at first, and at
/// most.
const PAUSES: [Duration; 2] = if cfg!(test) {
    [Duration::from_millis(1), Duration::from_millis(20)]
} else {
    [Duration::from_millis(500), Duration::from_secs(10)]
};

/// Restores all disks of the archived log, and the log, to a new directory: as of `at`, and with
/// the history since the base images. Nobody can open the disks before all is there. A restore that
/// was killed is continued by another call with the same arguments: it fetches the log anew, but
/// few chunks of an image twice.
///
/// # Errors
/// [`ErrorKind::NotFound`] if there is no archive, or no way to this point; the error says what can
/// be reached. [`ErrorKind::Damaged`] if an object is missing or wrong: all other chunks are fetched
/// first. [`ErrorKind::InvalidInput`] if something else is in the directory. [`ErrorKind::InUse`] if
/// another process fetches to it.
pub fn restore(
    archive: &Archive,
    dir: &Path,
    at: Point,
    progress: Progress<'_>,
) -> Result<RestoreReport> {
    fetch(archive, dir, at, None::<fn(&RestoreReport)>, progress)
}

/// Restores as [`restore`] does, but the log first. `ready` is called once it is there: from then
/// on the disks can be opened, read and written, while this goes on to fetch the images, and first
/// what requests wait for. A store that does not answer is asked again, for as long as it takes. If
/// this is ended, requests for what was not fetched fail, until another call with the same
/// arguments goes on.
///
/// # Errors
/// As [`restore`]. Requests for chunks that are missing or wrong fail.
pub fn serve(
    archive: &Archive,
    dir: &Path,
    at: Point,
    ready: impl FnOnce(&RestoreReport),
    progress: Progress<'_>,
) -> Result<RestoreReport> {
    fetch(archive, dir, at, Some(ready), progress)
}

/// As [`restore`]; with `ready`, as [`serve`].
fn fetch<R: FnOnce(&RestoreReport)>(
    archive: &Archive,
    dir: &Path,
    at: Point,
    ready: Option<R>,
    progress: Progress<'_>,
) -> Result<RestoreReport> {
    let _alone = lock_directory(dir)?;
    if let Some(unfinished) = UnfinishedRestore::find(archive, dir, &at)? {
        return unfinished.finish(ready, progress);
    }
    let plan = archive.block_on(Plan::find(archive, at))?;
    let start = begin(archive, dir, &plan)?;
    let paths = image_paths(dir, &plan.base.images);
    for (image, path) in plan.base.images.iter().zip(&paths) {
        if start.resumes && FetchMap::path_of(path).exists() {
            continue;
        }
        let zeroes = |chunk: usize| image.chunks.get(chunk).is_none_or(Option::is_none);
        FetchMap::create(path, image.bytes, plan.base.chunk_bytes, zeroes, false)?;
    }
    let mut note = start.note;
    note.write(dir)?;
    let chunks = ArchivedChunks {
        archive,
        lease: plan.lease.as_ref(),
        base: &plan.base,
        persists: ready.is_some(),
    };
    let fetcher = chunks.fetcher(&paths)?;
    let mut build = || {
        let report = plan.build_log(dir, &paths)?;
        note.ready = Some(ReadyLog {
            at: at.to_string(),
            commit: report.commit.into(),
            log_bytes: report.log_bytes,
        });
        note.write(dir)?;
        Ok::<_, Error>(report)
    };
    match ready {
        Some(ready) => {
            let report = build()?;
            fetcher.set_ready();
            let fetched = chunks.fetch(&fetcher, || ready(&report), progress)?;
            end(dir, fetcher, report, fetched)
        }
        None => {
            let fetched = chunks.fetch(&fetcher, || (), progress)?;
            end(dir, fetcher, build()?, fetched)
        }
    }
}

/// Removes the maps and the note. The note has said since the log was made that all is there, so a
/// call after a kill does only this.
fn end(dir: &Path, fetcher: Fetcher, report: RestoreReport, chunks: u64) -> Result<RestoreReport> {
    fetcher.end()?;
    RestoreNote::remove(dir)?;
    Ok(RestoreReport { chunks, ..report })
}

/// A restore whose disks may be in use, and which was ended before it had all chunks.
struct UnfinishedRestore<'a> {
    archive: &'a Archive,
    dir: PathBuf,
    base: BaseHeader,
    lease: Option<Lease<'a>>,
    ready: ReadyLog,
}

impl<'a> UnfinishedRestore<'a> {
    /// That in a directory, from this archive and to this point.
    ///
    /// # Errors
    /// If the archive can't be read.
    fn find(archive: &'a Archive, dir: &Path, at: &Point) -> Result<Option<Self>> {
        let note = RestoreNote::read(dir).filter(|note| note.is_from(archive));
        let Some(RestoreNote {
            base: Some(base),
            ready: Some(ready),
            ..
        }) = note
        else {
            return Ok(None);
        };
        if ready.at != at.to_string() {
            return Ok(None);
        }
        let (base, lease) = archive.block_on(async {
            let (header, _) = read_base(archive, base).await?;
            Ok::<_, Error>((header, Lease::take(archive, base).await?))
        })?;
        Ok(Some(Self {
            archive,
            dir: dir.to_owned(),
            base,
            lease,
            ready,
        }))
    }

    /// Fetches what is left. `ready` is called at once.
    fn finish<R: FnOnce(&RestoreReport)>(
        self,
        ready: Option<R>,
        progress: Progress<'_>,
    ) -> Result<RestoreReport> {
        let paths = image_paths(&self.dir, &self.base.images);
        let report = RestoreReport {
            commit: self.ready.commit.into(),
            log_dir: log_dir_of(&self.dir, &paths),
            disks: restored_disks(&paths, &self.base),
            log_bytes: self.ready.log_bytes,
            chunks: 0,
        };
        let chunks = ArchivedChunks {
            archive: self.archive,
            lease: self.lease.as_ref(),
            base: &self.base,
            persists: ready.is_some(),
        };
        let fetcher = chunks.fetcher(&paths)?;
        fetcher.set_ready();
        let begun = || ready.into_iter().for_each(|ready| ready(&report));
        let fetched = chunks.fetch(&fetcher, begun, progress)?;
        end(&self.dir, fetcher, report, fetched)
    }
}

/// The chunks of archived images.
struct ArchivedChunks<'a> {
    archive: &'a Archive,
    /// Keeps the chunks from expiring.
    lease: Option<&'a Lease<'a>>,
    base: &'a BaseHeader,
    /// A store that does not answer is asked again, for as long as it takes.
    persists: bool,
}

impl ArchivedChunks<'_> {
    /// For the images at these paths.
    fn fetcher(&self, paths: &[PathBuf]) -> Result<Fetcher> {
        if let Some(gone) = paths.iter().find(|path| !path.exists()) {
            let message = format!(
                "{}: the image is gone; put it back, or restore to another directory",
                gone.display()
            );
            return Err(Error::new(ErrorKind::Local, message));
        }
        let bytes = self.base.images.iter().map(|image| image.bytes);
        let images = paths.iter().map(PathBuf::as_path).zip(bytes);
        let options = FetchOptions {
            at_once: AT_ONCE,
            most_unsynced: if self.persists {
                UNSYNCED
            } else {
                MOST_UNSYNCED
            },
            pauses: PAUSES,
        };
        Fetcher::open(images, options).map_err(Error::of_lock)
    }

    /// Fetches all chunks that are absent. Returns how many.
    fn fetch(
        &self,
        fetcher: &Fetcher,
        begun: impl FnOnce(),
        progress: Progress<'_>,
    ) -> Result<u64> {
        let ended = Notify::new();
        let fetched = thread::scope(|scope| {
            let renewing = Lease::during(self.lease, ended.notified());
            scope.spawn(|| self.archive.block_on(renewing));
            let _ending = NotifyOnDrop(&ended);
            fetcher.run(self, begun, progress)
        });
        // Another call fetches what has failed, and needs the same chunks.
        fetched.and_then(whole).inspect_err(|_| {
            let _ = self.lease.map(Lease::keep);
        })
    }
}

/// Notifies also if a thread panics.
struct NotifyOnDrop<'a>(&'a Notify);

impl Drop for NotifyOnDrop<'_> {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

impl ChunkSource for ArchivedChunks<'_> {
    type Error = Error;

    fn chunk(&self, image: usize, chunk: usize) -> Result<Vec<u8>> {
        let image = &self.base.images[image];
        let hash = image.chunks.get(chunk).cloned().flatten();
        let got = fetch_chunk(self.archive, self.base, image, chunk, &hash);
        let (_, bytes) = self.archive.block_on(got)?;
        Ok(bytes.unwrap_or_default())
    }

    fn remedy(&self, error: &Error) -> FetchRemedy {
        match error.kind() {
            ErrorKind::Unavailable if self.persists => FetchRemedy::Wait,
            ErrorKind::Damaged => FetchRemedy::Retry,
            _ => FetchRemedy::Fail,
        }
    }
}

/// How many chunks were fetched, if none is lost.
fn whole(report: FetchReport<Error>) -> Result<u64> {
    let Some(first) = report.lost.first() else {
        return Ok(report.fetched);
    };
    Err(Error::new(
        ErrorKind::Damaged,
        format!(
            "{first}; chunks lost: {}; restore to an earlier point, or from another archive, to \
             another directory",
            report.lost.len()
        ),
    ))
}
