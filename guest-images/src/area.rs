//! Directories for one build or one run, below the cache. They hold gigabytes (sparse) for a while, and must not pile up
//! when their owner is killed: each has a lock that dies with its owner, and the next one to come removes those whose
//! lock is free.

use std::fs::{self, File};
use std::path::Path;

use tempfile::TempDir;

use crate::cache::Cache;
use crate::error::{FileContext, Result};
use crate::reporter::Reporter;

const PREFIX: &str = "area-";
const LOCK: &str = "lock";

/// A directory that goes when this value is dropped.
#[derive(Debug)]
pub(crate) struct Area {
    directory: TempDir,
    // Held, not read: says that the owner lives.
    _lock: File,
}

impl Area {
    /// Makes an empty directory, and removes those that dead processes left.
    ///
    /// # Errors
    /// The cache cannot be written to.
    pub(crate) fn new(cache: &Cache, reporter: &Reporter) -> Result<Self> {
        // No other process is between making its directory and locking it.
        let _making = cache.lock("areas", reporter)?;
        for entry in fs::read_dir(cache.root())
            .at("read", cache.root())?
            .flatten()
        {
            if entry.file_name().to_string_lossy().starts_with(PREFIX)
                && is_abandoned(&entry.path())
            {
                // Best effort: what cannot be removed now only takes space.
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

    /// The directory. The name `lock` in it is taken.
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
