//! The medium: segment files, fixed-size pieces of the log that are zero-filled once and recycled for ever, and
//! the engines that reach them.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::engine::{self, Engine, EngineKind};
use crate::error::{Error, Result};
use crate::file::{self, DataFile};
use crate::pace::Pace;
use crate::sync::atomic::AtomicU64;
use crate::sync::{Arc, Event};

/// Where a log lives. The store knows no other way to its segments, so that a simulated medium can stand in.
pub(crate) trait Medium: Send + Sync {
    /// Creates segment file number `slot`, every byte written with zero and synced, so that later syncs
    /// touch no file-system metadata. A crash leaves either nothing or the whole file. `between` is called between
    /// any two steps with the time that the first took.
    fn create_segment(
        &self,
        slot: u32,
        size: u64,
        between: &mut dyn FnMut(Duration),
    ) -> Result<Segment>;

    /// Opens the segment files there are, in the order of their numbers.
    fn segments(&self) -> Result<Vec<(u32, Segment)>>;

    /// A number that no earlier segment had: random.
    fn salt(&self) -> u64;

    /// A segment as the page cache has it, if it can; whoever overwrites the segment is seen through it.
    fn cached(&self, segment: &Segment) -> Option<File> {
        let _ = segment;
        None
    }

    /// Whether its engines read in the thread that submits.
    fn blocks(&self) -> bool {
        true
    }

    /// How many threads may read it at a time.
    fn threads(&self) -> usize {
        1
    }

    /// Makes an engine that signals `event` when an operation ends.
    fn engine(&self, event: &Event) -> io::Result<Box<dyn Engine>>;

    /// Makes the engine of the log's writer; likewise.
    fn writer_engine(&self, event: &Event) -> io::Result<Box<dyn Engine>>;
}

/// A log directory of a file system, and the kind of engine that was found to work.
pub(crate) struct Directory {
    pub path: PathBuf,
    pub engine: EngineKind,
    /// Threads that read it while it is opened.
    pub threads: usize,
    /// See [`StoreOptions::sync_latency`](crate::StoreOptions::sync_latency).
    pub sync_latency: Duration,
    /// See [`StoreOptions::operations_per_second`](crate::StoreOptions::operations_per_second).
    pub pace: Arc<Pace>,
}

/// One segment file. Whoever holds it in an `Arc` pins it: it is recycled only when nobody does.
#[derive(Debug)]
pub(crate) struct Segment {
    pub path: PathBuf,
    pub file: Box<dyn DataFile>,
    /// Bytes of log in front of it, counted from where the log was opened: 0 for a segment from before.
    pub position: AtomicU64,
}

impl Segment {
    pub(crate) fn new(path: PathBuf, file: Box<dyn DataFile>) -> Self {
        Self {
            path,
            file,
            position: AtomicU64::new(0),
        }
    }

    /// The path of segment file number `slot` of the log in `dir`.
    fn path(dir: &Path, slot: u32) -> PathBuf {
        dir.join(format!("segment-{slot:05}"))
    }

    /// See [`Medium::create_segment`].
    fn create(dir: &Path, slot: u32, size: u64, between: &mut dyn FnMut(Duration)) -> Result<Self> {
        let path = Self::path(dir, slot);
        let unfinished = path.with_extension("new");
        let mut fill = || {
            let file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .open(&unfinished)?;
            file::allocate(&file, size)?;
            // Past the cache and bit by bit: written back at once, a segment would keep the medium from the log's syncs.
            file::write_zeroes(&file::open_direct(&unfinished, true)?, 0, size, between)?;
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
    fn open(path: PathBuf) -> Result<Self> {
        let file = file::open_direct(&path, true)
            .map_err(|e| Error::io("open the log segment", &path, e))?;
        Ok(Self::new(path, Box::new(file)))
    }

    /// The segment files in `dir`, with their numbers, in order.
    fn list(dir: &Path) -> Result<Vec<(u32, PathBuf)>> {
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

impl Medium for Directory {
    fn create_segment(
        &self,
        slot: u32,
        size: u64,
        between: &mut dyn FnMut(Duration),
    ) -> Result<Segment> {
        Segment::create(&self.path, slot, size, between)
    }

    fn segments(&self) -> Result<Vec<(u32, Segment)>> {
        let found = Segment::list(&self.path)?.into_iter();
        found
            .map(|(slot, path)| Ok((slot, Segment::open(path)?)))
            .collect()
    }

    fn salt(&self) -> u64 {
        u64::from_le_bytes(file::random())
    }

    fn cached(&self, segment: &Segment) -> Option<File> {
        File::open(&segment.path).ok()
    }

    fn blocks(&self) -> bool {
        self.engine == EngineKind::Blocking
    }

    fn threads(&self) -> usize {
        self.threads
    }

    fn engine(&self, event: &Event) -> io::Result<Box<dyn Engine>> {
        engine::create(self.engine, event)
    }

    fn writer_engine(&self, _event: &Event) -> io::Result<Box<dyn Engine>> {
        Ok(engine::create_writer(self.sync_latency, self.pace.clone()))
    }
}
