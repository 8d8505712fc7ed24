//! Raw images in and out: a disk made from an image, an image made from a disk as it is now.
//!
//! Both keep holes, let the file system share or copy the bytes itself where it can, and work on a file beside the
//! target (`TARGET.walvisor-part`), which gets its name when it is complete and durable: whoever is interrupted leaves no
//! half image under a name that anyone uses.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use crate::catalog::{check_options, has_control, invalid, open_control, refuse_occupied};
use crate::error::{Error, ErrorKind, Result};
use crate::file;
use crate::parallel::{self, thread_count};
use crate::store::{StoreOptions, adopt};
use crate::view::{Data, DataRanges, View, parts};
use crate::{Buffer, SECTOR_SIZE};

/// Longest stretch handed to the kernel at once, in bytes, and what one thread does at a time: how often progress is told.
const KERNEL_COPY_BYTES: u64 = 16 << 20;
/// Most ranges that one thread does at a time.
const MOST_RANGES: usize = 256;

/// What an import or export did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Bytes of the disk.
    pub size: u64,
    /// Bytes that were copied; the rest were holes.
    pub copied: u64,
}

/// Is told, as long work goes on, how many bytes are behind it, and how many there are: of the disk in a transfer (holes
/// included), of the log's segments in a recovery.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

/// Makes a disk at `path` with the contents of the raw image (or block device) `raw`, and registers it in the log in
/// `log_dir`, which is made if it is not there. `options` count for a new log only.
///
/// # Errors
/// If `path` exists, the image's size is no positive multiple of 512, or image or log are open elsewhere. Nothing is
/// left behind.
pub fn import_disk(
    path: &Path,
    raw: &Path,
    log_dir: &Path,
    options: &StoreOptions,
    progress: Progress<'_>,
) -> Result<Transfer> {
    check_options(options)?;
    refuse_existing(path, "remove it, or name another")?;
    let (source, size) = open_source(raw)?;
    // Opened, and so locked, before the long part.
    let log = match has_control(log_dir) {
        true => Some(open_control(log_dir)?),
        false => {
            refuse_occupied(log_dir)?;
            None
        }
    };
    let part = Part::create(path, size)?;
    let ranges = DataRanges::new(&source, raw, 0..size, KERNEL_COPY_BYTES);
    let ranges = ranges.map(|range| range.map(|range| (range, ())));
    let copied = transfer(
        options.threads,
        ranges,
        &|range, ()| copy(&source, raw, &part, range),
        &mut |at| progress(at, size),
    )?;
    part.publish(false)?;
    adopt(path, size, log_dir, options, log).inspect_err(|_| {
        // Best effort: the error that is being reported matters more.
        let _ = std::fs::remove_file(path);
    })?;
    progress(size, size);
    Ok(Transfer { size, copied })
}

/// Writes the disk at `path` as it is now, log over base image, to the raw image `raw`. The disk is not changed.
/// `replace`: `raw` may exist. It is done on so many `threads`; `None`: as many as there are processors.
///
/// # Errors
/// As [`inspect`](crate::inspect); or if `raw` exists, is in use, or can't be written. What was at `raw` is left.
pub fn export_disk(
    path: &Path,
    log_dir: &Path,
    raw: &Path,
    replace: bool,
    threads: Option<NonZeroUsize>,
    progress: Progress<'_>,
) -> Result<Transfer> {
    let view = View::open(path, log_dir, threads)?;
    // Held to the end: nobody else shall open what is about to be replaced.
    let _replaced = match replace {
        true => lock_replaced(raw)?,
        false => {
            refuse_existing(raw, "name another file, or replace it with --force")?;
            None
        }
    };
    let part = Part::create(raw, view.size)?;
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

fn refuse_existing(path: &Path, remedy: &str) -> Result<()> {
    match path.symlink_metadata() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(Error::io("look at", path, error)),
        Ok(_) => Err(Error::new(
            ErrorKind::AlreadyExists,
            format!("{}: exists already; {remedy}", path.display()),
        )),
    }
}

/// Opens and locks what is to be imported; returns its bytes too.
fn open_source(raw: &Path) -> Result<(File, u64)> {
    let open = |error| Error::io("open the image", raw, error);
    let kind = std::fs::metadata(raw).map_err(open)?.file_type();
    if !kind.is_file() && !kind.is_block_device() {
        return Err(invalid(format!(
            "{}: not a regular file nor a block device; give a raw image",
            raw.display()
        )));
    }
    let mut source = File::open(raw).map_err(open)?;
    file::lock(&source, raw)?;
    if file::read_mark(&source).is_some() {
        return Err(Error::new(
            ErrorKind::WrongLog,
            format!(
                "{}: a disk that was not closed: its newest bytes are in its log; export it ('walvisor disk export') \
                 and import that",
                raw.display()
            ),
        ));
    }
    let size = source.seek(SeekFrom::End(0)).map_err(open)?;
    if size == 0 || !size.is_multiple_of(SECTOR_SIZE) {
        return Err(invalid(format!(
            "{}: {size} bytes; a disk's size is a positive multiple of 512 ('truncate -s %512' rounds it up)",
            raw.display()
        )));
    }
    Ok((source, size))
}

/// Locks the file that an export replaces, if there is one; refuses one that others need.
fn lock_replaced(raw: &Path) -> Result<Option<File>> {
    match std::fs::metadata(raw) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io("look at", raw, error)),
        Ok(metadata) if !metadata.is_file() => {
            return Err(invalid(format!(
                "{}: not a regular file; export to a file",
                raw.display()
            )));
        }
        Ok(_) => {}
    }
    let file = File::open(raw).map_err(|error| Error::io("open", raw, error))?;
    file::lock(&file, raw)?;
    match file::read_mark(&file) {
        None => Ok(Some(file)),
        Some(_) => Err(Error::new(
            ErrorKind::WrongLog,
            format!(
                "{}: a disk that was not closed, with records in its log: it is not replaced; name another file",
                raw.display()
            ),
        )),
    }
}

/// Copies data with `copy`, on several threads, and tells `passed` up to where all is copied; returns how many bytes
/// that were. Of several errors the one at the lowest offset counts.
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
fn copy(from: &File, from_path: &Path, to: &Part, range: Range<u64>) -> Result<()> {
    let mut at = range.start;
    while at < range.end {
        let (mut read_at, mut write_at) = (at, at);
        let len = (range.end - at).min(KERNEL_COPY_BYTES) as usize;
        let copied = rustix::fs::copy_file_range(
            from,
            Some(&mut read_at),
            &to.file,
            Some(&mut write_at),
            len,
        );
        match copied {
            Ok(1..) => at = read_at,
            Err(Errno::INTR) => {}
            Err(errno @ (Errno::IO | Errno::NOSPC | Errno::DQUOT | Errno::FBIG)) => {
                let doing = format!("copy {} to", from_path.display());
                return Err(Error::io(&doing, &to.path, errno.into()));
            }
            // Not between these files, or not at all.
            Ok(0) | Err(_) => {
                let mut buffer = Buffer::zeroed((range.end - at).min(1 << 20) as usize);
                for part in parts(at..range.end) {
                    let into = &mut buffer[..(part.end - part.start) as usize];
                    FileExt::read_exact_at(from, into, part.start)
                        .map_err(|error| Error::io("read", from_path, error))?;
                    to.write(into, part.start)?;
                }
                return Ok(());
            }
        }
    }
    Ok(())
}

/// A file that is being made beside its final name. Removed if it is dropped before it is published.
struct Part {
    file: File,
    path: PathBuf,
    target: PathBuf,
    published: bool,
}

impl Part {
    fn create(target: &Path, size: u64) -> Result<Self> {
        // A link's name stays a link: what it points to is replaced.
        let target = target.canonicalize().unwrap_or(target.to_path_buf());
        let mut path = target.clone().into_os_string();
        path.push(".walvisor-part");
        let path = PathBuf::from(path);
        let doing = |error| Error::io("write", &path, error);
        // Whatever an interrupted run left is used up; whatever a running one writes is locked.
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(doing)?;
        file::lock(&file, &path)?;
        file.set_len(0)
            .and_then(|()| file.set_len(size))
            .map_err(doing)?;
        Ok(Self {
            file,
            path,
            target,
            published: false,
        })
    }

    fn write(&self, bytes: &[u8], offset: u64) -> Result<()> {
        FileExt::write_all_at(&self.file, bytes, offset)
            .map_err(|error| Error::io("write", &self.path, error))
    }

    /// Makes the file durable and gives it its name.
    fn publish(mut self, replace: bool) -> Result<()> {
        use rustix::fs::{CWD, RenameFlags, renameat_with};
        let doing = |error| Error::io("write", &self.target, error);
        self.file.sync_all().map_err(doing)?;
        let plain = || std::fs::rename(&self.path, &self.target);
        let renamed = match replace {
            true => plain(),
            false => {
                match renameat_with(CWD, &self.path, CWD, &self.target, RenameFlags::NOREPLACE) {
                    Ok(()) => Ok(()),
                    // Not on this file system.
                    Err(Errno::INVAL | Errno::NOSYS) => {
                        refuse_existing(&self.target, "name another file")?;
                        plain()
                    }
                    Err(errno) => Err(errno.into()),
                }
            }
        };
        renamed.map_err(doing)?;
        self.published = true;
        let parent = self.target.parent();
        file::sync_dir(
            parent
                .filter(|p| !p.as_os_str().is_empty())
                .unwrap_or(Path::new(".")),
        )
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        if !self.published {
            // Best effort: what is left is used up by the next attempt.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}
