//! Where the holes of a file are.

use std::ops::Range;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use crate::error::{Error, Result};

#[cfg(test)]
thread_local! {
    /// How many times this thread has asked a file system for a hole or for data.
    pub(crate) static QUESTIONS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Asks the file system for the next hole or data.
fn ask(file: impl AsFd, place: SeekFrom) -> rustix::io::Result<u64> {
    #[cfg(test)]
    QUESTIONS.with(|asked| asked.set(asked.get() + 1));
    rustix::fs::seek(file, place)
}

/// The parts of a file's byte range that are not holes, in order. On a file system that reports no
/// holes, the whole range.
pub(crate) struct DataRanges<'a, F> {
    /// `None` for a file that is not the host's: its holes are unknown.
    file: Option<&'a F>,
    path: &'a Path,
    rest: Range<u64>,
    /// There is no hole from the start of `rest` up to here.
    data_end: u64,
    most: u64,
}

impl<'a, F: AsFd> DataRanges<'a, F> {
    /// The parts of `range`, each of at most `most` bytes; `most` is not zero.
    pub(crate) fn new(file: Option<&'a F>, path: &'a Path, range: Range<u64>, most: u64) -> Self {
        Self {
            file,
            path,
            data_end: range.start,
            rest: range,
            most,
        }
    }

    /// Moves on to the next data; returns whether there is any.
    fn seek(&mut self) -> rustix::io::Result<bool> {
        let at = self.rest.start;
        let Some(file) = self.file else {
            self.data_end = self.rest.end;
            return Ok(true);
        };
        match ask(file, SeekFrom::Data(at)) {
            // A hole up to the end of the file.
            Err(Errno::NXIO) => self.rest.start = self.rest.end,
            Ok(start) => {
                self.data_end = match ask(file, SeekFrom::Hole(start)) {
                    Err(Errno::NXIO) => self.rest.end,
                    end => end?.min(self.rest.end),
                };
                self.rest.start = start.min(self.rest.end);
            }
            Err(Errno::INVAL | Errno::OPNOTSUPP) => self.data_end = self.rest.end,
            Err(errno) => return Err(errno),
        }
        Ok(!self.rest.is_empty())
    }
}

impl<F: AsFd> Iterator for DataRanges<'_, F> {
    type Item = Result<Range<u64>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        if self.rest.start >= self.data_end {
            match self.seek() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(errno) => {
                    self.rest.start = self.rest.end;
                    let error = Error::io("find its holes", self.path, errno.into());
                    return Some(Err(error));
                }
            }
        }
        let start = self.rest.start;
        self.rest.start = start.saturating_add(self.most).min(self.data_end);
        Some(Ok(start..self.rest.start))
    }
}
