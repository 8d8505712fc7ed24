//! Temporary directories below the cache, one per build or run. They hold gigabytes (sparse) for a
//! while, and must not pile up when their owner is killed. Each has a lock file, which the kernel
//! unlocks when the owner ends; the next process that creates a directory removes those whose lock
//! is free.

use std::fs::{self, File};
use std::path::Path;

use tempfile::TempDir;

use crate::cache::Cache;
use crate::error::{FileContext, Result};
use crate::reporter::Reporter;

const PREFIX: &str = "area-";
const LOCK: &str = "lock";

/// A directory that is removed when this value is dropped.
#[derive(Debug)]
pub(crate) struct ScratchDir {
    directory: TempDir,
    // Never read: the lock on this file tells other processes that the owner is alive.
    _lock: File,
}

impl ScratchDir {
    /// Creates an empty directory, and removes the directories of dead processes.
    ///
    /// # Errors
    /// The cache cannot be written to.
    pub(crate) fn new(cache: &Cache, reporter: &Reporter) -> Result<Self> {
        // With this lock no other process is between creating its directory and locking it.
        let _creating = cache.lock("areas", reporter)?;
        for entry in fs::read_dir(cache.root())
            .at("read", cache.root())?
            .flatten()
        {
            if entry.file_name().to_string_lossy().starts_with(PREFIX)
                && is_abandoned(&entry.path())
            {
                // Best effort: a directory that cannot be removed only takes space.
                let _ = fs::remove_dir_all(entry.path());
            }
        }
        let directory = tempfile::Builder::new()
            .prefix(PREFIX)
            .tempdir_in(cache.root())
            .at("create a directory in", cache.root())?;
        let path = directory.path().join(LOCK);
        let lock = File::create(&path).at("create", &path)?;
        lock.lock().at("lock", &path)?;
        Ok(Self {
            directory,
            _lock: lock,
        })
    }

    /// The directory. The file name `lock` in it is reserved.
    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }
}

fn is_abandoned(directory: &Path) -> bool {
    File::open(directory.join(LOCK)).is_ok_and(|lock| lock.try_lock().is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_dead_processes_are_removed_and_others_are_not() {
        let root = tempfile::tempdir().unwrap();
        let cache = Cache::open(Some(root.path().to_owned())).unwrap();
        let reporter = Reporter::quiet(None);
        let dead = root.path().join("area-dead");
        fs::create_dir(&dead).unwrap();
        fs::write(dead.join(LOCK), "").unwrap();
        let first = ScratchDir::new(&cache, &reporter).unwrap();
        assert!(!dead.exists());
        let second = ScratchDir::new(&cache, &reporter).unwrap();
        assert!(first.path().exists() && second.path().exists());
        let path = first.path().to_owned();
        drop(first);
        assert!(!path.exists());
    }
}
