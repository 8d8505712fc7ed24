//! Copying a range of one file to the same place in another.

use std::ops::Range;
use std::path::Path;

use rustix::io::Errno;

use crate::Buffer;
use crate::error::{Error, Result};
use crate::medium::file::{DataFile, ReadFile};

/// Most bytes that the kernel copies in one call.
pub(crate) const KERNEL_COPY_BYTES: u64 = 16 << 20;
/// Most bytes that are read or copied at a time.
pub(crate) const COPY_BYTES: u64 = 1 << 20;

/// A file to copy from, and its name in errors.
#[derive(Clone, Copy)]
pub(crate) struct NamedSource<'a> {
    pub file: &'a dyn ReadFile,
    pub path: &'a Path,
}

/// A file, and its name in errors.
#[derive(Clone, Copy)]
pub(crate) struct NamedFile<'a> {
    pub file: &'a dyn DataFile,
    pub path: &'a Path,
}

/// A range cut into parts of at most [`COPY_BYTES`].
pub(crate) fn parts(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    range
        .clone()
        .step_by(COPY_BYTES as usize)
        .map(move |start| start..(start + COPY_BYTES).min(range.end))
}

/// Copies a range of bytes, in the kernel if it can.
pub(crate) fn copy(from: NamedSource<'_>, to: NamedFile<'_>, range: Range<u64>) -> Result<()> {
    let (Some(from_host), Some(to_host)) = (from.file.host(), to.file.host()) else {
        return copy_bytes(from, to, range);
    };
    let mut at = range.start;
    while at < range.end {
        let (mut read_at, mut write_at) = (at, at);
        let len = (range.end - at).min(KERNEL_COPY_BYTES) as usize;
        let copied = rustix::fs::copy_file_range(
            from_host,
            Some(&mut read_at),
            to_host,
            Some(&mut write_at),
            len,
        );
        match copied {
            Ok(1..) => at = read_at,
            Err(Errno::INTR) => {}
            Err(errno @ (Errno::IO | Errno::NOSPC | Errno::DQUOT | Errno::FBIG)) => {
                let doing = format!("copy {} to it", from.path.display());
                return Err(Error::io(&doing, to.path, errno.into()));
            }
            // The kernel can't copy between these files, or not at all.
            Ok(0) | Err(_) => return copy_bytes(from, to, at..range.end),
        }
    }
    Ok(())
}

fn copy_bytes(from: NamedSource<'_>, to: NamedFile<'_>, range: Range<u64>) -> Result<()> {
    let mut buffer = Buffer::zeroed((range.end - range.start).min(COPY_BYTES) as usize);
    for part in parts(range) {
        let into = &mut buffer[..(part.end - part.start) as usize];
        let read = from.file.read_exact_at(into, part.start);
        read.map_err(|error| Error::io("read", from.path, error))?;
        let written = to.file.write_all_at(into, part.start);
        written.map_err(|error| Error::io("write", to.path, error))?;
    }
    Ok(())
}
