//! The medium: where a log's segments are, and the engines that reach them.

use std::io;
use std::num::NonZeroUsize;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::error::{Error, ErrorKind, Result};
use crate::medium::cost::{self, MediumCost};
use crate::medium::engine::{self, EngineKind};
use crate::medium::file::{Appender, DirectAppender, Engine, Segment};
use crate::medium::filesystem::{FileSystem, files, is_simulated, shared_files};
use crate::medium::host;
use crate::medium::lock::Access;
use crate::medium::segment::ZeroingPace;
use crate::parallel;
use crate::sync::{Arc, Event};

/// Where a log lives. The store reaches segments only through this trait, so that a simulated
/// medium can stand in.
pub(crate) trait Medium: Send + Sync {
    /// Creates segment file number `slot`: a blank header, then zeroes, all written and synced, so
    /// that later syncs touch no file-system metadata. A crash leaves either nothing or the whole
    /// file. `pace` is called after each step.
    fn create_segment(&self, slot: u32, size: u64, pace: &mut ZeroingPace<'_>) -> Result<Segment>;

    /// Fails if the log's directory is no longer where it was opened: a new file would not be
    /// beside the others.
    fn check_place(&self) -> Result<()> {
        Ok(())
    }

    /// Opens the existing segment files, in the order of their numbers.
    fn segments(&self) -> Result<Vec<(u32, Segment)>>;

    /// A new random number.
    fn salt(&self) -> u64;

    /// The newest record to read, if the log's process holds it and appends to it meanwhile: all
    /// records up to there are durable.
    fn newest(&self) -> Option<u64> {
        None
    }

    /// The file system of the log's other files.
    fn files(&self) -> Arc<dyn FileSystem> {
        shared_files()
    }

    /// Whether the medium's engines read in the submitting thread.
    fn blocks(&self) -> bool {
        true
    }

    /// How many threads may read the medium at a time.
    fn threads(&self) -> usize {
        1
    }

    /// Makes an engine that signals `event` when an operation ends.
    fn engine(&self, event: &Event) -> io::Result<Box<dyn Engine>>;

    /// Measures what operations cost, with reads from `segment`, which has `size` bytes.
    fn cost(&self, segment: &Arc<Segment>, size: u64) -> MediumCost {
        let _ = (segment, size);
        MediumCost::USUAL
    }

    /// How the log's leader appends.
    fn appender(&self) -> Box<dyn Appender> {
        Box::new(DirectAppender)
    }
}

/// A log directory on a file system, and the kind of engine that works there.
pub(crate) struct Directory {
    pub path: PathBuf,
    /// Device and inode of the directory when the log was opened.
    pub identity: Option<(u64, u64)>,
    pub engine: EngineKind,
    /// Number of threads that read the log while it is opened.
    pub threads: usize,
    /// [`Access::Log`]; [`Access::LogRead`] or [`Access::Held`] if nothing is written.
    pub access: Access,
}

impl Medium for Directory {
    fn create_segment(&self, slot: u32, size: u64, pace: &mut ZeroingPace<'_>) -> Result<Segment> {
        self.check_place()?;
        let made = Segment::create(&*files(), &self.path, slot, size, pace)?;
        self.check_place()?;
        Ok(made)
    }

    fn check_place(&self) -> Result<()> {
        match self.identity {
            // The directory did not exist yet.
            None => Ok(()),
            opened if opened == identity(&self.path) => Ok(()),
            Some(_) => Err(Error::new(
                ErrorKind::Io,
                format!(
                    "{}: the log's directory was moved or replaced while the log was in use; move \
                     it back, or restart the program that uses the log",
                    self.path.display()
                ),
            )),
        }
    }

    fn segments(&self) -> Result<Vec<(u32, Segment)>> {
        Segment::open_all(&*files(), &self.path, self.access)
    }

    fn salt(&self) -> u64 {
        u64::from_le_bytes(host::random())
    }

    fn newest(&self) -> Option<u64> {
        self.access.newest()
    }

    fn blocks(&self) -> bool {
        self.engine == EngineKind::Blocking
    }

    fn threads(&self) -> usize {
        self.threads
    }

    fn engine(&self, event: &Event) -> io::Result<Box<dyn Engine>> {
        #[cfg(test)]
        if is_simulated() {
            return Ok(Box::<engine::inline::InlineEngine>::default());
        }
        engine::create(self.engine, event)
    }

    fn cost(&self, segment: &Arc<Segment>, size: u64) -> MediumCost {
        if is_simulated() {
            return MediumCost::USUAL;
        }
        let measured = Event::new().and_then(|event| {
            let engine = engine::create(self.engine, &event)?;
            cost::measure(segment, size, engine, &event)
        });
        measured.unwrap_or(MediumCost::USUAL)
    }
}

/// Device and inode of a directory; `None` if there is none.
fn identity(path: &Path) -> Option<(u64, u64)> {
    let found = std::fs::metadata(path).ok()?;
    Some((found.dev(), found.ino()))
}

/// As [`parallel::thread_count`], for a log that may be on a simulated file system.
fn thread_count(threads: Option<NonZeroUsize>) -> usize {
    if is_simulated() {
        1
    } else {
        parallel::thread_count(threads)
    }
}

pub(crate) fn directory(log_dir: &Path, engine: EngineKind) -> Directory {
    Directory {
        path: log_dir.to_path_buf(),
        identity: identity(log_dir),
        engine,
        threads: thread_count(None),
        access: Access::Log,
    }
}

/// A log directory to read, on `threads` threads; `None`: one per processor.
pub(crate) fn directory_to_read(
    log_dir: &Path,
    access: Access,
    threads: Option<NonZeroUsize>,
) -> Directory {
    Directory {
        threads: thread_count(threads),
        access,
        ..directory(log_dir, EngineKind::Blocking)
    }
}

/// A new segment in another directory of the same name would not be part of the log.
#[test]
#[cfg(not(feature = "shuttle"))]
fn no_segment_is_made_in_another_directory_of_the_same_name() {
    use crate::medium::segment::take_short_steps;

    let dir = tempfile::tempdir().unwrap();
    let (log, moved) = (dir.path().join("log"), dir.path().join("moved"));
    std::fs::create_dir(&log).unwrap();
    let medium = directory(&log, EngineKind::Blocking);
    let create = |slot| medium.create_segment(slot, 1 << 20, &mut take_short_steps);
    assert!(create(0).is_ok());
    std::fs::rename(&log, &moved).unwrap();
    std::fs::create_dir(&log).unwrap();
    let refused = create(1).unwrap_err().to_string();
    assert!(refused.contains("moved or replaced"), "{refused}");
    assert!(std::fs::read_dir(&log).unwrap().next().is_none());
    std::fs::remove_dir(&log).unwrap();
    std::fs::rename(&moved, &log).unwrap();
    assert!(create(1).is_ok());
}
