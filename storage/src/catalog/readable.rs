//! A log that can be read: nobody writes it, or its process holds it meanwhile.
//!
//! A log in use reads as it would after a kill of its process at this moment: up to the newest
//! durable record. Meanwhile that process copies nothing to the base images, and recycles no segment
//! with records that they lack.

use std::path::Path;

use crate::medium::lock::Access;

/// A log directory to read from. Any path is one of a log that nobody writes: it is locked while it
/// is read.
#[derive(Clone, Copy, Debug)]
pub struct ReadableLog<'a> {
    dir: &'a Path,
    newest: Option<u64>,
}

impl<'a> ReadableLog<'a> {
    /// A log whose process has a [`ReadHold`](crate::ReadHold) up to this LSN, until the log was
    /// read.
    pub fn held(dir: &'a Path, newest_lsn: u64) -> Self {
        let newest = Some(newest_lsn);
        Self { dir, newest }
    }

    /// The directory.
    pub(crate) fn dir(&self) -> &'a Path {
        self.dir
    }

    /// How its files are opened.
    pub(crate) fn access(&self) -> Access {
        match self.newest {
            None => Access::LogRead,
            Some(newest) => Access::Held { newest },
        }
    }
}

impl<'a, P: AsRef<Path> + ?Sized> From<&'a P> for ReadableLog<'a> {
    fn from(dir: &'a P) -> Self {
        let (dir, newest) = (dir.as_ref(), None);
        Self { dir, newest }
    }
}
