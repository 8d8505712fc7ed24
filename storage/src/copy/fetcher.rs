//! Fetching the chunks that images lack, while their disks may be in use.
//!
//! ```text
//!   worker   next chunk: one that a request waits for, or the one behind ─▶ source ─▶ image ─┐
//!   worker   ...                                                                             │
//!   worker   what was written: sync the image ─▶ sync the map ─▶ requests go on  ◀───────────┘
//! ```
//! The source is an archive, or the disk of which the image is a clone.

use std::collections::HashSet;
use std::fmt::Display;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
// Not `crate::sync`: a running store's threads do not use this module.
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Error, ErrorKind, Result};
use crate::format::BLOCK;
use crate::medium::fetch_map::FetchMap;
use crate::parallel::Progress;

/// How often to try to lock a map, and how long to wait in between.
const LOCK_TRIES: u32 = 20;
const LOCK_PAUSE: Duration = Duration::from_millis(50);
/// How often the disks' owner gets a sign of life.
const BEAT: Duration = Duration::from_millis(500);
/// How often a chunk is asked for that is missing or wrong: it may be the answer that is wrong.
const TRIES: u32 = 5;

/// Where the chunks of images come from.
pub trait ChunkSource: Sync {
    /// Why a chunk can't be had.
    type Error: From<Error> + Display + Send;

    /// Gets the bytes of a chunk. The first image has the number 0, and so has its first chunk.
    ///
    /// # Errors
    /// If it can't be had; see [`remedy`](Self::remedy).
    fn chunk(&self, image: usize, chunk: usize) -> std::result::Result<Vec<u8>, Self::Error>;

    /// What to do about an error.
    fn remedy(&self, error: &Self::Error) -> FetchRemedy;
}

/// What to do about a chunk that could not be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FetchRemedy {
    /// Ask again until it comes; requests that need it wait.
    Wait,
    /// Ask again a few times. Then it is lost, and requests that need it fail.
    Retry,
    /// End.
    Fail,
}

/// What was fetched.
#[derive(Debug)]
pub struct FetchReport<E> {
    /// Chunks.
    pub fetched: u64,
    /// Why each of the others is lost.
    pub lost: Vec<E>,
}

/// Fetches the chunks that images lack. No other process can while this one lives.
pub struct Fetcher {
    images: Vec<PartialImage>,
    /// Bytes of all images, also of those that have everything.
    total: u64,
    options: FetchOptions,
}

/// How to fetch.
#[derive(Clone, Copy, Debug)]
pub struct FetchOptions {
    /// Chunks that are asked of the source at once; as many again if requests wait for them.
    pub at_once: usize,
    /// Chunks that are written to an image before it is synced for them, unless a request waits.
    pub most_unsynced: usize,
    /// How long to wait before a chunk is asked for again: at first, and at most.
    pub pauses: [Duration; 2],
}

/// An image that lacks chunks.
struct PartialImage {
    /// Its number for the source.
    number: usize,
    path: PathBuf,
    bytes: u64,
    file: File,
    map: FetchMap,
}

/// A chunk: the place of its image in [`Fetcher::images`], and its own number there.
type ChunkId = (usize, usize);

impl Fetcher {
    /// For those of these images, of so many bytes, that have a [`FetchMap`].
    ///
    /// # Errors
    /// [`ErrorKind::Locked`] if another process fetches them; if an image can't be opened.
    pub fn open<'a>(
        images: impl Iterator<Item = (&'a Path, u64)>,
        options: FetchOptions,
    ) -> Result<Self> {
        let (mut partial, mut total) = (Vec::new(), 0);
        for (number, (path, bytes)) in images.enumerate() {
            total += bytes;
            let Some(map) = FetchMap::open(path)? else {
                continue;
            };
            // Who opens the disk may have it for a moment.
            let mut tries = 0..LOCK_TRIES;
            while !map.lock()? {
                if tries.next().is_none() {
                    let message = format!("{}: another process fetches it", path.display());
                    return Err(Error::new(ErrorKind::Locked, message));
                }
                thread::sleep(LOCK_PAUSE);
            }
            map.resume()?;
            let file = File::options().write(true).open(path);
            partial.push(PartialImage {
                number,
                path: path.to_owned(),
                bytes,
                file: file.map_err(|error| Error::io("open the image", path, error))?,
                map,
            });
        }
        Ok(Self {
            images: partial,
            total,
            options,
        })
    }

    /// Lets others open the disks from now on.
    pub fn set_ready(&self) {
        for image in &self.images {
            image.map.set_ready();
            // Whoever is told must not find that nobody has fetched for long.
            image.map.beat();
        }
    }

    /// Fetches chunks until no image lacks any, but those that are lost. While it calls `begun`, it
    /// fetches only chunks that requests wait for. Calls `progress` with the bytes that are there
    /// and those of all images.
    ///
    /// # Errors
    /// Those of the source that [end](FetchRemedy::Fail) this; if an image or its map can't be
    /// written.
    pub fn run<S: ChunkSource>(
        &self,
        source: &S,
        begun: impl FnOnce(),
        progress: Progress<'_>,
    ) -> std::result::Result<FetchReport<S::Error>, S::Error> {
        let run = FetchRun {
            fetcher: self,
            source,
            state: Mutex::new(FetchState {
                passed: self.total - self.absent_bytes(),
                ..FetchState::default()
            }),
            changed: Condvar::new(),
        };
        thread::scope(|scope| {
            let _ending = EndGuard(&run);
            for image in &self.images {
                scope.spawn(|| run.watch(image));
            }
            for _ in 0..2 * self.options.at_once {
                scope.spawn(|| run.help());
            }
            begun();
            run.lock().begun = true;
            run.changed.notify_all();
            run.report(progress);
        });
        let state = run.state.into_inner();
        let FetchState {
            fetched,
            lost,
            failed,
            ..
        } = state.unwrap_or_else(PoisonError::into_inner);
        match failed {
            Some(error) => Err(error),
            None => Ok(FetchReport { fetched, lost }),
        }
    }

    /// Removes the maps: the images have everything.
    ///
    /// # Errors
    /// If one can't be removed.
    pub fn end(self) -> Result<()> {
        let mut images = self.images.iter();
        images.try_for_each(|image| FetchMap::remove(&image.path))
    }

    fn chunk_len(&self, (image, chunk): ChunkId) -> u64 {
        let image = &self.images[image];
        let size = image.map.chunk_bytes();
        size.min(image.bytes.saturating_sub(chunk as u64 * size))
    }

    fn lacks(&self, chunk: ChunkId) -> bool {
        self.images[chunk.0].map.lacks(chunk.1)
    }

    fn is_asked(&self, chunk: ChunkId) -> bool {
        self.images[chunk.0].map.is_asked(chunk.1)
    }

    /// Changes whenever requests ask for chunks.
    fn asks(&self) -> u64 {
        let images = self.images.iter();
        images.map(|image| u64::from(image.map.asks())).sum()
    }

    /// The chunks that requests wait for, the last ones first.
    fn asked(&self) -> Vec<ChunkId> {
        let images = self.images.iter().enumerate().rev();
        let asked = |(place, image): (usize, &PartialImage)| {
            let chunks = image.map.asked().into_iter().rev();
            chunks.map(move |chunk| (place, chunk))
        };
        images.flat_map(asked).collect()
    }

    /// The next chunk from this one on that is absent and not in `started`.
    fn next_absent(&self, from: ChunkId, started: &HashSet<ChunkId>) -> Option<ChunkId> {
        let of_image = |place: usize, chunks: Range<usize>| chunks.map(move |at| (place, at));
        let whole = |place: usize| of_image(place, 0..self.images[place].map.chunks());
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
        let images = self.images.iter().enumerate();
        let all =
            images.flat_map(|(place, image)| (0..image.map.chunks()).map(move |at| (place, at)));
        let absent = all.filter(|chunk| self.lacks(*chunk));
        absent.map(|chunk| self.chunk_len(chunk)).sum()
    }
}

/// What the threads of a run share.
struct FetchRun<'a, S: ChunkSource> {
    fetcher: &'a Fetcher,
    source: &'a S,
    state: Mutex<FetchState<S::Error>>,
    changed: Condvar,
}

struct FetchState<E> {
    /// Chunks that were asked of the source, and are not usable yet.
    started: HashSet<ChunkId>,
    /// How many of these the source has not sent yet.
    requests: usize,
    /// Those that are in the image, but not synced.
    written: Vec<ChunkId>,
    /// Whether one of the threads syncs some.
    settling: bool,
    /// Chunks that requests waited for, when they had asked so often.
    asked: Vec<ChunkId>,
    asks: Option<u64>,
    /// The chunk that was asked for last.
    cursor: ChunkId,
    /// Whether chunks are fetched for which no request waits.
    begun: bool,
    /// Whether it was told that the source does not answer.
    waits: bool,
    /// Bytes that are there.
    passed: u64,
    fetched: u64,
    lost: Vec<E>,
    failed: Option<E>,
    ended: bool,
}

impl<E> Default for FetchState<E> {
    fn default() -> Self {
        Self {
            started: HashSet::new(),
            requests: 0,
            written: Vec::new(),
            settling: false,
            asked: Vec::new(),
            asks: None,
            cursor: (0, 0),
            begun: false,
            waits: false,
            passed: 0,
            fetched: 0,
            lost: Vec::new(),
            failed: None,
            ended: false,
        }
    }
}

/// What a worker does next.
enum Step {
    Fetch(ChunkId),
    /// These were written.
    Settle(Vec<ChunkId>),
    Wait,
    End,
}

impl<S: ChunkSource> FetchRun<'_, S> {
    fn lock(&self) -> MutexGuard<'_, FetchState<S::Error>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Works until everything is there.
    fn help(&self) {
        let _ending = FetchGuard(self);
        let mut state = self.lock();
        loop {
            match self.next(&mut state) {
                Step::End => break,
                Step::Wait => {
                    let woken = self.changed.wait(state);
                    state = woken.unwrap_or_else(PoisonError::into_inner);
                    continue;
                }
                Step::Fetch(chunk) => {
                    drop(state);
                    let fetched = self.fetch(chunk);
                    state = self.lock();
                    state.requests -= 1;
                    match fetched {
                        Ok(Some(())) => {
                            state.written.push(chunk);
                            (state.fetched, state.waits) = (state.fetched + 1, false);
                        }
                        Ok(None) => drop(state.started.remove(&chunk)),
                        Err(error) => state.fail(error),
                    }
                }
                Step::Settle(chunks) => {
                    drop(state);
                    let settled = self.settle(&chunks);
                    state = self.lock();
                    state.settling = false;
                    for chunk in &chunks {
                        state.started.remove(chunk);
                        state.passed += self.fetcher.chunk_len(*chunk);
                    }
                    if let Err(error) = settled {
                        state.fail(error.into());
                    }
                }
            }
            self.changed.notify_all();
        }
        self.changed.notify_all();
    }

    fn next(&self, state: &mut FetchState<S::Error>) -> Step {
        let fetcher = self.fetcher;
        let FetchOptions {
            at_once,
            most_unsynced: most,
            ..
        } = fetcher.options;
        if state.ended {
            return Step::End;
        }
        // A map has many chunks: it is searched only if requests have asked since.
        let asks = Some(fetcher.asks());
        if state.asks != asks {
            (state.asks, state.asked) = (asks, fetcher.asked());
        }
        // One at a time: what another one has written must not count as synced with it.
        if !state.settling && (state.written.len() >= most || self.is_waited_for(&state.written)) {
            return state.settle();
        }
        // Whoever syncs may be slow.
        if state.written.len() < 2 * most {
            while let Some(chunk) = state.asked.pop() {
                if fetcher.lacks(chunk) && !state.started.contains(&chunk) {
                    return state.start(chunk);
                }
            }
            if state.begun
                && state.requests < at_once
                && let Some(chunk) = fetcher.next_absent(state.cursor, &state.started)
            {
                return state.start(chunk);
            }
        }
        if state.requests > 0 || state.settling {
            Step::Wait
        } else if state.written.is_empty() {
            if !state.begun {
                return Step::Wait;
            }
            state.ended = true;
            Step::End
        } else {
            state.settle()
        }
    }

    fn is_waited_for(&self, chunks: &[ChunkId]) -> bool {
        chunks.iter().any(|chunk| self.fetcher.is_asked(*chunk))
    }

    /// Fetches a chunk to its image; `None`: it is lost, or this has ended.
    fn fetch(&self, id: ChunkId) -> std::result::Result<Option<()>, S::Error> {
        let (image, chunk) = (&self.fetcher.images[id.0], id.1);
        let [first_pause, longest_pause] = self.fetcher.options.pauses;
        let (mut tries, mut pause) = (0, first_pause);
        loop {
            let error = match self.source.chunk(image.number, chunk) {
                Ok(bytes) => {
                    let offset = chunk as u64 * image.map.chunk_bytes();
                    let written = write_data(&image.file, &bytes, offset);
                    written.map_err(|error| Error::io("write", &image.path, error))?;
                    return Ok(Some(()));
                }
                Err(error) => error,
            };
            match self.source.remedy(&error) {
                FetchRemedy::Wait => {
                    if !std::mem::replace(&mut self.lock().waits, true) {
                        tracing::warn!("{error}; trying again, and requests that need it wait");
                    }
                }
                FetchRemedy::Retry if tries + 1 < TRIES => {
                    (tries, pause) = (tries + 1, first_pause);
                }
                FetchRemedy::Retry => {
                    image.map.note_lost(chunk);
                    tracing::warn!("{error}; requests that need it fail");
                    self.lock().lost.push(error);
                    return Ok(None);
                }
                FetchRemedy::Fail => return Err(error),
            }
            if self.has_ended_within(pause) {
                return Ok(None);
            }
            pause = (2 * pause).min(longest_pause);
        }
    }

    /// Waits for some time, or until this has ended.
    fn has_ended_within(&self, time: Duration) -> bool {
        let (until, state) = (Instant::now() + time, self.lock());
        let left = until.saturating_duration_since(Instant::now());
        let waited = self
            .changed
            .wait_timeout_while(state, left, |state| !state.ended);
        waited.unwrap_or_else(PoisonError::into_inner).0.ended
    }

    /// Makes chunks durable that were written, and lets requests use them.
    fn settle(&self, written: &[ChunkId]) -> Result<()> {
        for (place, image) in self.fetcher.images.iter().enumerate() {
            let of_image = || written.iter().filter(|chunk| chunk.0 == place);
            if of_image().next().is_none() {
                continue;
            }
            let synced = image.file.sync_data();
            synced.map_err(|error| Error::io("sync", &image.path, error))?;
            of_image().for_each(|chunk| image.map.note_written(chunk.1));
            image.map.settle()?;
        }
        Ok(())
    }

    /// Tells the owner of an image's disk that somebody fetches, and passes on what it asks for.
    fn watch(&self, image: &PartialImage) {
        let mut seen = image.map.asks();
        while !self.lock().ended {
            image.map.beat();
            image.map.wait_for_ask(seen, BEAT);
            let asks = image.map.asks();
            if asks != seen {
                seen = asks;
                // Whoever is about to wait has the lock.
                drop(self.lock());
                self.changed.notify_all();
            }
        }
    }

    /// Tells how far it is, until it has ended.
    fn report(&self, progress: Progress<'_>) {
        let (mut told, mut state) = (None, self.lock());
        loop {
            let (passed, ended) = (state.passed, state.ended);
            if told.replace(passed) != Some(passed) {
                drop(state);
                progress(passed, self.fetcher.total);
                state = self.lock();
            } else if ended {
                return;
            } else {
                let woken = self.changed.wait(state);
                state = woken.unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn end(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
        for image in &self.fetcher.images {
            image.map.end_wait_for_ask();
        }
    }
}

impl<E> FetchState<E> {
    fn start(&mut self, chunk: ChunkId) -> Step {
        self.started.insert(chunk);
        self.requests += 1;
        self.cursor = chunk;
        Step::Fetch(chunk)
    }

    fn settle(&mut self) -> Step {
        self.settling = true;
        Step::Settle(std::mem::take(&mut self.written))
    }

    fn fail(&mut self, error: E) {
        self.ended = true;
        self.failed.get_or_insert(error);
    }
}

/// Writes bytes where the file has zeroes, but no blocks of zeroes.
fn write_data(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    let blocks = (offset..).step_by(BLOCK).zip(bytes.chunks(BLOCK));
    let mut data = blocks.filter(|(_, block)| block.iter().any(|byte| *byte != 0));
    let Some((mut from, mut end)) = data.next().map(|(at, block)| (at, at + block.len() as u64))
    else {
        return Ok(());
    };
    let write = |from: u64, end: u64| {
        let range = (from - offset) as usize..(end - offset) as usize;
        file.write_all_at(&bytes[range], from)
    };
    for (at, block) in data {
        if at != end {
            write(from, end)?;
            from = at;
        }
        end = at + block.len() as u64;
    }
    write(from, end)
}

/// Ends a run when it is dropped.
struct EndGuard<'a, 'b, S: ChunkSource>(&'a FetchRun<'b, S>);

impl<S: ChunkSource> Drop for EndGuard<'_, '_, S> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// Ends a run if its thread panics.
struct FetchGuard<'a, 'b, S: ChunkSource>(&'a FetchRun<'b, S>);

impl<S: ChunkSource> Drop for FetchGuard<'_, '_, S> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.end();
        }
    }
}
