//! The medium: where a log's segments are, and the engines that reach them.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::Result;
use crate::medium::engine::{self, Engine, EngineKind};
use crate::medium::file;
use crate::medium::filesystem::files;
use crate::medium::pace::Pace;
use crate::medium::segment::Segment;
use crate::parallel;
use crate::sync::{Arc, Event};

/// Where a log lives. The store knows no other way to its segments, so that a simulated medium can stand in.
pub(crate) trait Medium: Send + Sync {
    /// Creates segment file number `slot`: a blank header, every other byte written with zero, and synced, so that later
    /// syncs touch no file-system metadata. A crash leaves either nothing or the whole file. `between` is called between
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

impl Medium for Directory {
    fn create_segment(
        &self,
        slot: u32,
        size: u64,
        between: &mut dyn FnMut(Duration),
    ) -> Result<Segment> {
        Segment::create(&*files(), &self.path, slot, size, between)
    }

    fn segments(&self) -> Result<Vec<(u32, Segment)>> {
        Segment::open_all(&*files(), &self.path)
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

pub(crate) fn directory(log_dir: &Path, engine: EngineKind) -> Directory {
    Directory {
        path: log_dir.to_path_buf(),
        engine,
        threads: parallel::thread_count(None),
        sync_latency: Duration::ZERO,
        pace: Arc::default(),
    }
}
