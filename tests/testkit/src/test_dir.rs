//! The directory of a test.

use std::ops::Deref;
use std::path::Path;

use tempfile::TempDir;

/// A path. Dropping it removes what is there.
#[derive(Debug)]
pub struct TestDir(TempDir);

/// Makes a directory that is empty, and the test's own.
#[must_use]
pub fn test_dir() -> TestDir {
    TestDir(tempfile::tempdir().expect("a directory"))
}

impl Deref for TestDir {
    type Target = Path;

    fn deref(&self) -> &Path {
        self.0.path()
    }
}

impl AsRef<Path> for TestDir {
    fn as_ref(&self) -> &Path {
        self
    }
}
