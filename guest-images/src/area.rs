//! Temporary directories below the cache, each for one build or one run. They hold gigabytes (sparse) for a while,
//! and must not pile up when their owner is killed. Each has a lock file that the kernel unlocks when the owner ends,
//! and the next process to make a directory removes those whose lock is free.

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
pub(crate) struct Area {
    directory: TempDir,
    // Never read: the lock on this file shows other processes that the owner is alive.
    _lock: File,
}

impl Area {
    /// Makes an empty directory, and removes the directories of dead processes.
    ///
    /// # Errors
    /// The cache cannot be written to.
    pub(crate) fn new(cache: &Cache, reporter: &Reporter) -> Result<Self> {
        // This lock keeps other processes from being between making their directory and locking it.
        let _making = cache.lock("areas", reporter)?;
        for entry in fs::read_dir(cache.root())
            .at("read", cache.root())?
            .flatten()
        {
            if entry.file_name().to_string_lossy().starts_with(PREFIX)
                && is_abandoned(&entry.path())
            {
                // Best effort: a directory that cannot be removed now only takes space.
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
    fn what_the_dead_left_is_removed_and_what_the_living_use_is_not() {
        let root = tempfile::tempdir().unwrap();
        let cache = Cache::open(Some(root.path().to_owned())).unwrap();
        let reporter = Reporter::quiet(None);
        let dead = root.path().join("area-dead");
        fs::create_dir(&dead).unwrap();
        fs::write(dead.join(LOCK), "").unwrap();
        let first = Area::new(&cache, &reporter).unwrap();
        assert!(!dead.exists());
        let second = Area::new(&cache, &reporter).unwrap();
        assert!(first.path().exists() && second.path().exists());
        let path = first.path().to_owned();
        drop(first);
        assert!(!path.exists());
    }
}
