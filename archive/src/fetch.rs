//! Bringing a log back: its images chunk by chunk, before or after its log.
//!
//! ```text
//!   restore: fetch maps ─▶ chunks of the images ─▶ the log, whole ─▶ ready
//!   serve:   fetch maps ─▶ the log, whole ─▶ ready ─▶ chunks: those that requests wait for,
//!                                                     then those behind them
//! ```
//! The disks' owner, another process, asks for chunks by the images' [`FetchMap`]s. Before a
//! restore is ready nobody can open the disks; one that was ended goes on from what the maps say.

use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::{Either, select};
use futures_util::stream::FuturesUnordered;
use tokio::sync::Notify;
use walvisor_storage::{FetchMap, Point};

use crate::error::{Error, ErrorKind, Result};
use crate::expire::Lease;
use crate::lineage::read_base;
use crate::object::{BaseHeader, BaseImage};
use crate::remote::{AT_ONCE, Archive};
use crate::restore::{
    Note, Plan, Progress, ReadyLog, RestoreReport, begin, fetch_chunk, image_paths, lock_directory,
    log_dir_of, restored_disks,
};

/// Chunks that are written to an image before it is synced for them, unless a request waits; and if
/// none can wait.
const UNSYNCED: usize = 8;
const MOST_UNSYNCED: usize = 64;
/// How often to try to lock a map, and how long to wait in between.
const LOCK_TRIES: u32 = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(50);
/// How often the disks' owner gets a sign of life.
const BEAT: Duration = Duration::from_millis(500);
/// How long to wait before a chunk is asked for again that the store did not send: at first, and at
/// most.
const FIRST_PAUSE: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 500 });
const LONGEST_PAUSE: Duration = Duration::from_millis(if cfg!(test) { 20 } else { 10_000 });
/// How often a chunk is asked for that is missing or wrong: it may be the answer that is wrong.
const TRIES: u32 = 5;

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
    ready: impl FnOnce(&RestoreReport) + Send,
    progress: Progress<'_>,
) -> Result<RestoreReport> {
    fetch(archive, dir, at, Some(ready), progress)
}

/// As [`restore`]; with `ready`, as [`serve`].
fn fetch<R: FnOnce(&RestoreReport) + Send>(
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
    let fetcher = Fetcher {
        persists: ready.is_some(),
        ..Fetcher::new(archive, plan.lease.as_ref(), &plan.base, &paths)?
    };
    let build = || {
        let report = plan.build_log(dir, &paths)?;
        note.ready = Some(ReadyLog {
            at: at.to_string(),
            commit: report.commit.into(),
            log_bytes: report.log_bytes,
        });
        note.write(dir)?;
        Ok(report)
    };
    match ready {
        Some(ready) => fetcher.log_first(dir, build, ready, progress),
        None => fetcher.images_first(dir, build, progress),
    }
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
        let note = Note::read(dir).filter(|note| note.is_from(archive));
        let Some(Note {
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
    fn finish<R: FnOnce(&RestoreReport) + Send>(
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
        let fetcher = Fetcher {
            persists: ready.is_some(),
            ..Fetcher::new(self.archive, self.lease.as_ref(), &self.base, &paths)?
        };
        let ready = |report: &RestoreReport| ready.into_iter().for_each(|ready| ready(report));
        fetcher.log_first(&self.dir, || Ok(report), ready, progress)
    }
}

/// Fetches the chunks that the images lack.
struct Fetcher<'a> {
    archive: &'a Archive,
    /// Keeps the chunks from expiring.
    lease: Option<&'a Lease<'a>>,
    base: &'a BaseHeader,
    images: Vec<PartialImage<'a>>,
    /// A store that does not answer is asked again, for as long as it takes.
    persists: bool,
    /// Chunks are fetched for which no request waits.
    unasked: AtomicBool,
    stops: AtomicBool,
    /// One of these has changed, or a request waits for a chunk.
    changed: Notify,
}

/// An image that lacks chunks.
struct PartialImage<'a> {
    image: &'a BaseImage,
    path: &'a Path,
    file: File,
    map: FetchMap,
}

/// A chunk: the number of its image, and its own there.
type ChunkId = (usize, usize);

impl<'a> Fetcher<'a> {
    /// For the images that have a fetch map.
    ///
    /// # Errors
    /// [`ErrorKind::InUse`] if another process fetches; if an image can't be opened.
    fn new(
        archive: &'a Archive,
        lease: Option<&'a Lease<'a>>,
        base: &'a BaseHeader,
        paths: &'a [PathBuf],
    ) -> Result<Self> {
        let mut images = Vec::new();
        for (image, path) in base.images.iter().zip(paths) {
            if !path.exists() {
                let message = format!(
                    "{}: the image is gone; put it back, or restore to another directory",
                    path.display()
                );
                return Err(Error::new(ErrorKind::Local, message));
            }
            let Some(map) = FetchMap::open(path)? else {
                continue;
            };
            // Who opens the disk may have it for a moment.
            let mut tries = 0..LOCK_TRIES;
            while !map.lock()? {
                if tries.next().is_none() {
                    let message = format!("{}: another restore is fetching it", path.display());
                    return Err(Error::new(ErrorKind::InUse, message));
                }
                thread::sleep(LOCK_PAUSE);
            }
            map.resume()?;
            let file = File::options().write(true).open(path);
            images.push(PartialImage {
                image,
                path,
                file: file.map_err(|error| Error::local("open the image", path, error))?,
                map,
            });
        }
        Ok(Self {
            archive,
            lease,
            base,
            images,
            persists: false,
            unasked: AtomicBool::new(false),
            stops: AtomicBool::new(false),
            changed: Notify::new(),
        })
    }

    /// Fetches the chunks, then lets `build` make the log. Ends the restore in `dir`.
    fn images_first(
        &self,
        dir: &Path,
        build: impl FnOnce() -> Result<RestoreReport>,
        progress: Progress<'_>,
    ) -> Result<RestoreReport> {
        self.unasked.store(true, Ordering::Release);
        let fetched = Lease::during(self.lease, self.fetch(progress));
        let fetched = self.archive.block_on(fetched);
        let chunks = self.keep_lease_of_failed(fetched)?;
        self.end(dir, build()?, chunks)
    }

    /// Fetches the chunks: while `build` makes the log, those that requests wait for, and then all.
    /// `ready` is called in between. Ends the restore in `dir`.
    fn log_first(
        &self,
        dir: &Path,
        build: impl FnOnce() -> Result<RestoreReport> + Send,
        ready: impl FnOnce(&RestoreReport) + Send,
        progress: Progress<'_>,
    ) -> Result<RestoreReport> {
        let (built, fetched) = thread::scope(|scope| {
            for image in &self.images {
                scope.spawn(|| self.watch(image));
            }
            let builder = scope.spawn(|| {
                let built = build();
                let next = match &built {
                    Ok(report) => {
                        for image in &self.images {
                            image.map.set_ready();
                            // Whoever is told must not find that nobody has fetched for long.
                            image.map.beat();
                        }
                        ready(report);
                        &self.unasked
                    }
                    Err(_) => &self.stops,
                };
                next.store(true, Ordering::Release);
                self.changed.notify_one();
                built
            });
            let fetch = Lease::during(self.lease, self.fetch(progress));
            let fetched = self.archive.block_on(fetch);
            self.stops.store(true, Ordering::Release);
            (builder.join(), fetched)
        });
        let report = built.unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        let chunks = self.keep_lease_of_failed(fetched)?;
        self.end(dir, report, chunks)
    }

    /// Another call goes on with what has failed, and needs the same chunks.
    fn keep_lease_of_failed<T>(&self, fetched: Result<T>) -> Result<T> {
        fetched.inspect_err(|_| {
            let _ = self.lease.map(Lease::keep);
        })
    }

    /// Removes the maps and the note. The note has said since the log was made that all is there,
    /// so a call after a kill does only this.
    fn end(&self, dir: &Path, report: RestoreReport, chunks: u64) -> Result<RestoreReport> {
        for image in &self.images {
            FetchMap::remove(image.path)?;
        }
        Note::remove(dir)?;
        Ok(RestoreReport { chunks, ..report })
    }

    /// Tells the owner of an image's disk that somebody fetches, and passes on what it asks for.
    fn watch(&self, image: &PartialImage<'_>) {
        let mut seen = image.map.asks();
        while !self.stops.load(Ordering::Acquire) {
            image.map.beat();
            image.map.wait_for_ask(seen, BEAT);
            let asks = image.map.asks();
            if asks != seen {
                seen = asks;
                self.changed.notify_one();
            }
        }
    }

    /// Fetches chunks until no image lacks any. Returns how many.
    async fn fetch(&self, progress: Progress<'_>) -> Result<u64> {
        let total = self.base.images.iter().map(|image| image.bytes).sum();
        let mut passed = total - self.absent_bytes();
        progress(passed, total);
        let mut requests = FuturesUnordered::new();
        // Chunks that were asked of the store and are not usable yet; of these, those that are in
        // the image but not synced.
        let (mut started, mut written) = (HashSet::new(), Vec::new());
        let (mut asks, mut asked) = (None, Vec::new());
        let (mut cursor, mut pause) = ((0, 0), FIRST_PAUSE);
        let (mut fetched, mut lost) = (0, Vec::new());
        let mut damaged: HashMap<ChunkId, u32> = HashMap::new();
        while !self.stops.load(Ordering::Acquire) {
            // A map has many chunks: it is searched only if requests have asked since.
            let asks_now = Some(self.asks());
            if asks != asks_now {
                (asks, asked) = (asks_now, self.asked());
            }
            let waited_for = written.iter().any(|chunk| self.is_asked(*chunk));
            let most = if self.persists {
                UNSYNCED
            } else {
                MOST_UNSYNCED
            };
            if waited_for || written.len() >= most || requests.is_empty() {
                passed += self.settle(&written)?;
                progress(passed, total);
                for chunk in written.drain(..) {
                    started.remove(&chunk);
                }
            }
            while requests.len() < 2 * AT_ONCE
                && let Some(chunk) = asked.pop()
            {
                if self.lacks(chunk) && started.insert(chunk) {
                    requests.push(self.request(chunk, Duration::ZERO));
                    cursor = chunk;
                }
            }
            let unasked = self.unasked.load(Ordering::Acquire);
            while unasked && requests.len() < AT_ONCE {
                let Some(chunk) = self.next_absent(cursor, &started) else {
                    break;
                };
                requests.push(self.request(chunk, Duration::ZERO));
                started.insert(chunk);
                cursor = chunk;
            }
            if requests.is_empty() {
                if unasked {
                    break;
                }
                self.changed.notified().await;
                continue;
            }
            let changed = pin!(self.changed.notified());
            let Either::Left((Some((chunk, result)), _)) = select(requests.next(), changed).await
            else {
                continue;
            };
            match result {
                Ok(bytes) => {
                    self.write(chunk, &bytes)?;
                    written.push(chunk);
                    fetched += 1;
                    pause = FIRST_PAUSE;
                }
                Err(error) if error.kind() == ErrorKind::Unavailable && self.persists => {
                    if pause == FIRST_PAUSE {
                        tracing::warn!("{error}; trying again, and requests that need it wait");
                    }
                    requests.push(self.request(chunk, pause));
                    pause = (2 * pause).min(LONGEST_PAUSE);
                }
                Err(error) if error.kind() == ErrorKind::Damaged => {
                    let tries = damaged.entry(chunk).or_default();
                    *tries += 1;
                    if *tries < TRIES {
                        requests.push(self.request(chunk, FIRST_PAUSE));
                        continue;
                    }
                    self.images[chunk.0].map.note_lost(chunk.1);
                    started.remove(&chunk);
                    tracing::warn!("{error}; requests that need it fail");
                    lost.push(error);
                }
                Err(error) => return Err(error),
            }
        }
        match lost.first() {
            None => Ok(fetched),
            Some(first) => Err(Error::new(
                ErrorKind::Damaged,
                format!(
                    "{first}; chunks lost: {}; restore to an earlier point, or from another \
                     archive, to another directory",
                    lost.len()
                ),
            )),
        }
    }

    /// Gets a chunk, after some time.
    async fn request(&self, chunk: ChunkId, pause: Duration) -> (ChunkId, Result<Vec<u8>>) {
        if !pause.is_zero() {
            tokio::time::sleep(pause).await;
        }
        let (image, number) = (self.images[chunk.0].image, chunk.1);
        let hash = image.chunks.get(number).cloned().flatten();
        let got = fetch_chunk(self.archive, self.base, image, number, &hash).await;
        (chunk, got.map(|(_, bytes)| bytes.unwrap_or_default()))
    }

    fn write(&self, chunk: ChunkId, bytes: &[u8]) -> Result<()> {
        let image = &self.images[chunk.0];
        let offset = chunk.1 as u64 * self.base.chunk_bytes;
        let written = image.file.write_all_at(bytes, offset);
        written.map_err(|error| Error::local("write", image.path, error))
    }

    /// Makes chunks durable that were written, and lets requests use them. Returns their bytes.
    fn settle(&self, written: &[ChunkId]) -> Result<u64> {
        let mut bytes = 0;
        for (number, image) in self.images.iter().enumerate() {
            let of_image = || written.iter().filter(|chunk| chunk.0 == number);
            if of_image().next().is_none() {
                continue;
            }
            let synced = image.file.sync_data();
            synced.map_err(|error| Error::local("sync", image.path, error))?;
            for chunk in of_image() {
                image.map.note_written(chunk.1);
                bytes += self.base.chunk_len(image.image, chunk.1);
            }
            image.map.settle()?;
        }
        Ok(bytes)
    }

    /// Changes whenever requests ask for chunks.
    fn asks(&self) -> u64 {
        let images = self.images.iter();
        images.map(|image| u64::from(image.map.asks())).sum()
    }

    fn is_asked(&self, chunk: ChunkId) -> bool {
        self.images[chunk.0].map.is_asked(chunk.1)
    }

    /// The chunks that requests wait for, the last ones first.
    fn asked(&self) -> Vec<ChunkId> {
        let images = self.images.iter().enumerate();
        let asked = |(number, image): (usize, &PartialImage<'_>)| {
            let chunks = image.map.asked();
            chunks.into_iter().map(move |chunk| (number, chunk))
        };
        let mut chunks: Vec<_> = images.flat_map(asked).collect();
        chunks.reverse();
        chunks
    }

    fn lacks(&self, chunk: ChunkId) -> bool {
        self.images[chunk.0].map.lacks(chunk.1)
    }

    /// The next chunk from this one on that is absent and not in `started`.
    fn next_absent(&self, from: ChunkId, started: &HashSet<ChunkId>) -> Option<ChunkId> {
        let of_image = |number: usize, chunks: Range<usize>| chunks.map(move |at| (number, at));
        let whole = |number: usize| of_image(number, 0..self.images[number].map.chunks());
        let last = self.images.get(from.0)?.map.chunks();
        let behind =
            of_image(from.0, from.1..last).chain((from.0 + 1..self.images.len()).flat_map(whole));
        let before = (0..from.0)
            .flat_map(whole)
            .chain(of_image(from.0, 0..from.1));
        let mut chunks = behind.chain(before);
        chunks.find(|chunk| self.lacks(*chunk) && !started.contains(chunk))
    }

    fn absent_bytes(&self) -> u64 {
        let images = self.images.iter();
        let absent = images.flat_map(|image| {
            let lacking = (0..image.map.chunks()).filter(|chunk| image.map.lacks(*chunk));
            lacking.map(|chunk| self.base.chunk_len(image.image, chunk))
        });
        absent.sum()
    }
}
