//! Import and export of raw images: a disk made from an image, and an image made from a disk's current contents.
//!
//! Both keep holes, and let the file system share or copy the bytes itself where it can. Both write to a file
//! beside the target (`TARGET.walvisor-part`), which gets the target's name when it is complete and durable. So an
//! interrupted transfer leaves no partial image at the target.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::io::Errno;

use crate::Buffer;
use crate::catalog::identity::Identity;
use crate::catalog::options::{ImageFormat, StoreOptions, default_log_dir};
use crate::error::{Error, ErrorKind, Result, invalid};
use crate::medium::file::DataFile;
use crate::medium::filesystem::{OWNER, Open, PathKind, files};
use crate::medium::holes::DataRanges;
use crate::medium::lock::{self, Holder, Use};
use crate::medium::mark::Mark;
use crate::parallel::{self, Progress, thread_count};
use crate::store::attach::with_log;
use crate::store::create::NewDisk;
use crate::store::image::disk_len;
use crate::store::other_format::refuse_other_format;
use crate::store::part::{Part, exists, refuse_existing};
use crate::store::point::Point;
use crate::store::view::{Data, View, parts};

/// Most bytes that the kernel copies in one call, and that one thread copies at a time. Progress is reported
/// after each such part.
const KERNEL_COPY_BYTES: u64 = 16 << 20;
/// Most ranges that one thread copies at a time.
const MOST_RANGES: usize = 256;

/// The result of an import or export.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Bytes of the disk.
    pub size: u64,
    /// Bytes that were copied; the others were in holes.
    pub copied: u64,
}

/// Creates a disk at `path` with the contents of the raw image (or block device) `raw`, and registers it in the log
/// in `log_dir`. If there is no log, it is created with `options`; an existing log ignores them.
///
/// # Errors
/// If `path` exists, the image's size is no positive multiple of 512, it seems to be of another format than raw
/// ([`ImageFormat::Unknown`]), or the image or the log is open elsewhere. Nothing is left behind.
pub fn import_disk(
    path: &Path,
    raw: &Path,
    log_dir: &Path,
    options: &StoreOptions,
    progress: Progress<'_>,
) -> Result<Transfer> {
    import_disk_as(path, raw, ImageFormat::Unknown, log_dir, options, progress)
}

/// As [`import_disk`], from an image whose format may be known.
///
/// # Errors
/// As [`import_disk`].
pub fn import_disk_as(
    path: &Path,
    raw: &Path,
    format: ImageFormat,
    log_dir: &Path,
    options: &StoreOptions,
    progress: Progress<'_>,
) -> Result<Transfer> {
    if exists(path)? && !exists(raw)? {
        return Err(swapped(path, raw, log_dir));
    }
    // The log is opened, and so locked, before the long copy.
    let new = NewDisk::begin(path, log_dir, options)?;
    let (source, size) = open_source(raw, format)?;
    let part = Part::create(path, size, mode_of(source.as_ref(), raw)?)?;
    let ranges = DataRanges::new(source.host(), raw, 0..size, KERNEL_COPY_BYTES);
    let ranges = ranges.map(|range| range.map(|range| (range, ())));
    let copied = transfer(
        options.threads,
        ranges,
        &|range, ()| copy(source.as_ref(), raw, &part, range),
        &mut |at| progress(at, size),
    )?;
    new.finish(part, size, options, &mut |_| {})?;
    progress(size, size);
    Ok(Transfer { size, copied })
}

/// The error for a new disk that exists, and a source that does not: cp(1) takes them in the other order.
fn swapped(path: &Path, raw: &Path, log_dir: &Path) -> Error {
    let (disk, source) = (path.display(), raw.display());
    // A log was named, unless it is the one that the command's disk has by default.
    let log_dir = match default_log_dir(path) == log_dir {
        true => &default_log_dir(raw),
        false => log_dir,
    };
    let import = with_log(
        format!("walvisor disk import {source} {disk}"),
        raw,
        log_dir,
    );
    Error::new(
        ErrorKind::AlreadyExists,
        format!(
            "{disk}: exists already, and {source} does not: the new disk comes first, then the image to copy; are they \
             swapped? Then say '{import}'"
        ),
    )
}

/// Writes the current contents of the disk at `path`, log over base image, to the raw image `raw`. The disk is not
/// changed. `replace`: `raw` may exist. The copy runs on `threads` threads; `None`: one for each processor.
///
/// # Errors
/// As [`inspect`](crate::inspect); or if `raw` exists, is in use, or can't be written. An existing `raw` is left
/// unchanged.
pub fn export_disk(
    path: &Path,
    log_dir: &Path,
    raw: &Path,
    replace: bool,
    threads: Option<NonZeroUsize>,
    progress: Progress<'_>,
) -> Result<Transfer> {
    let view = View::open(path, log_dir, Use::Read, threads)?;
    write_raw(&view, path, raw, replace, threads, progress)
}

/// As [`export_disk`] to a new file, with the contents that the disk had at a point since the last checkpoint. The file
/// has the disk's present size.
///
/// # Errors
/// As [`export_disk`]; or [`ErrorKind::NotFound`] if the log does not reach back to this point, which then names the
/// nearest ones.
pub fn restore_disk(
    path: &Path,
    log_dir: &Path,
    at: Point,
    raw: &Path,
    threads: Option<NonZeroUsize>,
    progress: Progress<'_>,
) -> Result<Transfer> {
    let view = View::open_at(path, log_dir, Use::Read, Some(at), threads)?;
    write_raw(&view, path, raw, false, threads, progress)
}

/// Writes what a view of the disk at `path` shows to the raw image `raw`.
fn write_raw(
    view: &View,
    path: &Path,
    raw: &Path,
    replace: bool,
    threads: Option<NonZeroUsize>,
    progress: Progress<'_>,
) -> Result<Transfer> {
    // The lock is held to the end: no other process may open the file that is about to be replaced.
    let replaced = match replace {
        true => lock_replaced(raw)?,
        false => {
            refuse_existing(raw, "name another file, or replace it with --force")?;
            None
        }
    };
    let part = Part::create(raw, view.size, mode_of(view.base.file.as_ref(), path)?)?;
    if let Some(replaced) = replaced.as_ref().and_then(|file| file.host()) {
        part.resemble(replaced)?;
    }
    let copied = transfer(
        threads,
        view.data(0..view.size, KERNEL_COPY_BYTES),
        &|range, data| match data {
            Data::Base => copy(view.reader(), path, &part, range),
            Data::Log { .. } => view.read(range, &data, &mut |at, bytes| {
                part.write(bytes, at).map(|()| true)
            }),
        },
        &mut |at| progress(at, view.size),
    )?;
    part.publish(replace)?;
    progress(view.size, view.size);
    Ok(Transfer {
        size: view.size,
        copied,
    })
}

/// Opens and locks the image to import; returns it with its length in bytes.
fn open_source(raw: &Path, format: ImageFormat) -> Result<(Box<dyn DataFile>, u64)> {
    let open = |error| Error::io("open the image", raw, error);
    let kind = files().kind(raw).map_err(open)?;
    if kind == PathKind::Other {
        return Err(invalid(format!(
            "{}: neither a regular file nor a block device; name a raw image",
            raw.display()
        )));
    }
    let source = open_locked(raw, "open the image", Use::Read)?;
    let mark = Identity::of(source.as_ref(), raw)?.mark;
    refuse_other_format(raw, mark.as_ref(), format)?;
    if mark.is_some_and(|mark| mark.open) {
        return Err(Error::new(
            ErrorKind::WrongLog,
            format!(
                "{}: a disk that was not closed, so its newest bytes are in its log; export it ('walvisor disk \
                 export') and import the export",
                raw.display()
            ),
        ));
    }
    let size = disk_len(source.as_ref(), raw)?;
    Ok((source, size))
}

/// Opens a file for reading, for `doing` something, and locks it.
fn open_locked(path: &Path, doing: &str, using: Use) -> Result<Box<dyn DataFile>> {
    lock::open_store_file(path, doing, Open::Read, using, |_| Holder::User)
}

/// The mode bits of a file: its copy must not be accessible to more users.
fn mode_of(file: &dyn DataFile, path: &Path) -> Result<u32> {
    let Some(file) = file.host() else {
        return Ok(OWNER);
    };
    let metadata = file.metadata();
    let metadata = metadata.map_err(|error| Error::io("read its metadata", path, error))?;
    Ok(metadata.mode() & 0o666)
}

/// Locks the file that an export replaces, if it exists; refuses the image of a disk that was not closed.
fn lock_replaced(raw: &Path) -> Result<Option<Box<dyn DataFile>>> {
    match files().kind(raw) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("read its metadata", raw, error)),
        Ok(PathKind::File) => {}
        Ok(_) => {
            return Err(invalid(format!(
                "{}: not a regular file; name a regular file to export to",
                raw.display()
            )));
        }
    }
    // It loses its name: who has it open would go on with a file that nobody else sees.
    let file = open_locked(raw, "open", Use::Write)?;
    match Identity::of(file.as_ref(), raw)?.mark {
        Some(Mark { open: true, .. }) => Err(Error::new(
            ErrorKind::WrongLog,
            format!(
                "{}: a disk that was not closed, with records in its log, is not replaced; name another file",
                raw.display()
            ),
        )),
        _ => Ok(Some(file)),
    }
}

/// Copies data with `copy` on several threads, and calls `passed` with the offset up to which all is copied;
/// returns how many bytes were copied. Of several errors the one at the lowest offset is returned.
fn transfer<T: Send>(
    threads: Option<NonZeroUsize>,
    mut data: impl Iterator<Item = Result<(Range<u64>, T)>> + Send,
    copy: &(dyn Fn(Range<u64>, T) -> Result<()> + Sync),
    passed: &mut dyn FnMut(u64),
) -> Result<u64> {
    let parts = std::iter::from_fn(|| {
        let (mut part, mut bytes) = (Vec::new(), 0);
        while bytes < KERNEL_COPY_BYTES
            && part.len() < MOST_RANGES
            && let Some(next) = data.next()
        {
            bytes += next
                .as_ref()
                .map_or(0, |(range, _)| range.end - range.start);
            part.push(next);
        }
        (!part.is_empty()).then_some(part)
    });
    let copy_part = |part: Vec<Result<(Range<u64>, T)>>| {
        let (mut bytes, mut end) = (0, 0);
        for next in part {
            let (range, data) = next?;
            bytes += range.end - range.start;
            end = range.end;
            copy(range, data)?;
        }
        Ok((bytes, end))
    };
    let mut copied = 0;
    parallel::in_order(thread_count(threads), parts, copy_part, |part| {
        let (bytes, end) = part?;
        copied += bytes;
        passed(end);
        Ok::<_, Error>(true)
    })?;
    Ok(copied)
}

/// Copies a range between files at the same offset, in the kernel if it can.
fn copy(from: &dyn DataFile, from_path: &Path, to: &Part, range: Range<u64>) -> Result<()> {
    let (Some(from_host), Some(to_host)) = (from.host(), to.file().host()) else {
        return copy_bytes(from, from_path, to, range);
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
                let doing = format!("copy {} to it", from_path.display());
                return Err(Error::io(&doing, to.path(), errno.into()));
            }
            // The kernel can't copy between these files, or not at all.
            Ok(0) | Err(_) => return copy_bytes(from, from_path, to, at..range.end),
        }
    }
    Ok(())
}

fn copy_bytes(from: &dyn DataFile, from_path: &Path, to: &Part, range: Range<u64>) -> Result<()> {
    let mut buffer = Buffer::zeroed((range.end - range.start).min(1 << 20) as usize);
    for part in parts(range) {
        let into = &mut buffer[..(part.end - part.start) as usize];
        from.read_exact_at(into, part.start)
            .map_err(|error| Error::io("read", from_path, error))?;
        to.write(into, part.start)?;
    }
    Ok(())
}
