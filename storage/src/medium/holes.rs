//! Where the holes of a file are.

use std::ops::Range;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

use crate::error::{Error, Result};

/// The parts of a byte range of a file that are no holes, in order. Where the file system knows no holes that is all.
pub(crate) struct DataRanges<'a, F> {
    /// `None` for one that is not the host's, of whose holes nothing is known.
    file: Option<&'a F>,
    path: &'a Path,
    rest: Range<u64>,
    /// Up to here there is no hole.
    data_end: u64,
    most: u64,
}

impl<'a, F: AsFd> DataRanges<'a, F> {
    /// Each of at most `most` bytes, which is not zero.
    pub(crate) fn new(file: Option<&'a F>, path: &'a Path, range: Range<u64>, most: u64) -> Self {
        Self {
            file,
            path,
            data_end: range.start,
            rest: range,
            most,
        }
    }

    /// Goes on to the next data, if there is any.
    fn seek(&mut self) -> rustix::io::Result<bool> {
        let at = self.rest.start;
        let Some(file) = self.file else {
            self.data_end = self.rest.end;
            return Ok(true);
        };
        match rustix::fs::seek(file, SeekFrom::Data(at)) {
            // Nothing but a hole up to the end of the file.
            Err(Errno::NXIO) => self.rest.start = self.rest.end,
            Ok(start) => {
                self.data_end = match rustix::fs::seek(file, SeekFrom::Hole(start)) {
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
                    let error = Error::io("look for holes in", self.path, errno.into());
                    return Some(Err(error));
                }
            }
        }
        let start = self.rest.start;
        self.rest.start = start.saturating_add(self.most).min(self.data_end);
        Some(Ok(start..self.rest.start))
    }
}
