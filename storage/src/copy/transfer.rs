//! Import and export of raw images: a disk from an image, and an image from a disk's contents.
//!
//! Both keep holes, and where possible let the file system share or copy the bytes itself. Both
//! write to `TARGET.walvisor-part`, which is renamed to the target once it is complete and durable,
//! so an interrupted transfer leaves no partial image at the target.

use std::fs::File;
use std::num::{NonZeroU64, NonZeroUsize};
use std::ops::Range;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Advice, fadvise};
use zerocopy::IntoBytes;

use crate::catalog::control::real_path;
use crate::catalog::identity::Identity;
use crate::catalog::options::{DiskOptions, ImageFormat, StoreOptions, default_log_dir};
use crate::error::{Error, ErrorKind, Result, invalid};
use crate::format::BLOCK;
use crate::medium::copying::{COPY_BYTES, KERNEL_COPY_BYTES, NamedSource, copy};
use crate::medium::fetch_map::FetchMap;
use crate::medium::file::DataFile;
use crate::medium::filesystem::{OWNER, OpenMode, PathKind, files};
use crate::medium::holes::DataRanges;
use crate::medium::lock::{self, Access, Holder};
use crate::medium::mark::ImageMark;
use crate::parallel::{self, Progress, thread_count};
use crate::recovery::contents::Candidate;
use crate::store::attach::with_log;
use crate::store::create::NewDisk;
use crate::store::image::disk_len;
use crate::store::other_format::refuse_other_format;
use crate::store::part_file::{PartFile, exists, refuse_existing};
use crate::store::view::{DataPlace, View};
use crate::sync::Mutex;
use crate::view::point::Point;
use crate::{SECTOR_SIZE, Transfer};

/// Most bytes that a thread copies at a time. Progress is reported after each such part.
const PART_BYTES: u64 = KERNEL_COPY_BYTES;
/// After this many copied bytes, a copy notes how far it has come.
const NOTED_BYTES: u64 = if cfg!(test) { 16 << 20 } else { 256 << 20 };
/// Most ranges that a thread copies at a time.
const MOST_RANGES: usize = 256;

/// Creates a disk at `path` with the contents of the raw image or block device `raw`, and registers
/// it in the log in `log_dir`. If there is no log, creates it with `options`; an existing log
/// ignores them.
///
/// # Errors
/// If `path` exists, the image's size is not a positive multiple of 512, it seems to be in another
/// format than raw ([`ImageFormat::Unknown`]), or the image or the log is open elsewhere. Nothing
/// is left behind.
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
        return Err(swapped_paths_error(path, raw, log_dir));
    }
    // Open the log, and so lock it, before the long copy.
    let new = NewDisk::begin(path, log_dir, options)?;
    let (source, size) = open_source(raw, format)?;
    let part = PartFile::create(path, size, mode_of(source.as_ref(), raw)?)?;
    let ranges = DataRanges::new(source.host(), raw, 0..size, PART_BYTES);
    let ranges = ranges.map(|range| range.map(|range| (range, ())));
    let copied = transfer(
        options.threads,
        ranges,
        &|range, ()| {
            let bytes = range.end - range.start;
            let from = NamedSource {
                file: source.as_ref(),
                path: raw,
            };
            copy(from, part.named(), range).map(|()| bytes)
        },
        &mut |at, _| {
            progress(at, size);
            Ok(())
        },
    )?;
    new.finish(part, size, options)?;
    progress(size, size);
    Ok(Transfer {
        size,
        copied,
        shared: false,
    })
}

/// The error if the new disk exists and the source does not: cp(1) takes them in the other order.
fn swapped_paths_error(path: &Path, raw: &Path, log_dir: &Path) -> Error {
    let (disk, source) = (path.display(), raw.display());
    // Only if it is not the default log of the disk.
    let log_dir = if default_log_dir(path) == log_dir {
        &default_log_dir(raw)
    } else {
        log_dir
    };
    let import = with_log(
        format!("walvisor disk import {source} {disk}"),
        raw,
        log_dir,
    );
    Error::new(
        ErrorKind::AlreadyExists,
        format!(
            "{disk}: exists already, and {source} does not: the new disk comes first, then the \
             image to copy; are they swapped? Then say '{import}'"
        ),
    )
}

/// Writes the current contents of the disk at `path`, log over base image, to the raw image `raw`.
/// Does not change the disk. `replace`: `raw` may exist. Copies on `threads` threads; `None`: one
/// per processor.
///
/// # Errors
/// As [`inspect`](crate::inspect); or if `raw` exists, is in use, or can't be written. An existing
/// `raw` is left unchanged.
pub fn export_disk(
    path: &Path,
    log_dir: &Path,
    raw: &Path,
    replace: bool,
    threads: Option<NonZeroUsize>,
    progress: Progress<'_>,
) -> Result<Transfer> {
    let options = RescueOptions {
        replace,
        ..RescueOptions::default()
    };
    let (done, _) = rescue_disk(path, log_dir, raw, options, threads, progress)?;
    Ok(done)
}

/// How [`rescue_disk`] writes a disk to a raw image.
#[derive(Clone, Copy, Debug, Default)]
pub struct RescueOptions {
    /// The raw image may exist.
    pub replace: bool,
    /// The log's records are put over the image whatever the marks of both say. If they do not belong
    /// together, the copy is a mix of two disks.
    pub log_wins: bool,
    /// What can't be read becomes zeroes.
    pub salvage: bool,
}

/// Sectors of a disk that could not be read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadableSectors {
    /// The first of them.
    pub sector: u64,
    /// Their number, at least 1.
    pub sectors: u64,
    /// Why the first could not be read.
    pub why: String,
}

/// As [`export_disk`], for a disk that can't be used as it is. Also returns what could not be read,
/// in order: the copy has zeroes there. Each block is read alone where a longer read fails. A rescue
/// that was killed starts over.
///
/// # Errors
/// As [`export_disk`]. With [`log_wins`](RescueOptions::log_wins): [`ErrorKind::NotFound`] if there
/// is no log; [`ErrorKind::WrongLog`] if it has no disk at `path`, none that the image's mark names,
/// and not just one of the image's size, or if the image has another size.
pub fn rescue_disk(
    path: &Path,
    log_dir: &Path,
    raw: &Path,
    options: RescueOptions,
    threads: Option<NonZeroUsize>,
    progress: Progress<'_>,
) -> Result<(Transfer, Vec<UnreadableSectors>)> {
    let view = if options.log_wins {
        View::open_unmatched(path, log_dir, threads)?
    } else {
        View::open(path, log_dir, Access::Read, threads)?
    };
    if !options.salvage {
        let done = write_raw(&view, path, raw, options.replace, threads, progress)?;
        return Ok((done, Vec::new()));
    }
    let size = view.size;
    refuse_member(&view, raw)?;
    let mode = mode_of(view.base.file.as_ref(), path)?;
    let (part, _replaced) = begin_raw(raw, options.replace, size, mode, String::new())?;
    let unreadable = Mutex::default();
    // One thread: what can't be read is found in order.
    let copied = transfer(
        NonZeroUsize::new(1),
        view.data(0..size, COPY_BYTES),
        &|range, data| salvage(&view, &part, range, &data, &unreadable),
        &mut |at, _| {
            progress(at, size);
            Ok(())
        },
    )?;
    part.publish(options.replace)?;
    progress(size, size);
    let done = Transfer {
        size,
        copied,
        shared: false,
    };
    Ok((
        done,
        unreadable.into_inner().expect("no thread has panicked"),
    ))
}

/// Copies what can be read of a range of the disk, and notes the rest. Returns how many bytes it has
/// copied.
fn salvage(
    view: &View,
    part: &PartFile,
    range: Range<u64>,
    data: &DataPlace,
    unreadable: &Mutex<Vec<UnreadableSectors>>,
) -> Result<u64> {
    // The blocks of a record may begin at any sector of the disk.
    let block = match data {
        DataPlace::Base => BLOCK as u64,
        DataPlace::Log { .. } => SECTOR_SIZE,
        DataPlace::Zero => return Ok(0),
    };
    let (mut copied, mut at, mut step) = (0, range.start, COPY_BYTES);
    while at < range.end {
        let piece = at..range.end.min(at - at % step + step);
        let mut bytes = Vec::new();
        let read = view.read(
            piece.clone(),
            &data.after(piece.start - range.start),
            &mut |_, part| {
                bytes.extend_from_slice(part);
                Ok(true)
            },
        );
        match read {
            Ok(()) => {
                part.write(&bytes, at)?;
                copied += piece.end - at;
            }
            Err(_) if step > block => {
                step = block;
                // A failed read leaves blocks that are good as parts of larger ones in the cache.
                if let Some(file) = view.reader().file.host() {
                    let len = NonZeroU64::new(piece.end - at);
                    let _ = fadvise(file, at, len, Advice::Random);
                    let _ = fadvise(file, at, len, Advice::DontNeed);
                }
                continue;
            }
            Err(error) => {
                let mut unreadable = unreadable.lock().expect("no thread has panicked");
                note(&mut unreadable, &piece, &error);
            }
        }
        at = piece.end;
        if at % COPY_BYTES == 0 {
            step = COPY_BYTES;
        }
    }
    Ok(copied)
}

/// Adds a range that could not be read after those before it.
fn note(unreadable: &mut Vec<UnreadableSectors>, range: &Range<u64>, error: &Error) {
    let (sector, sectors) = (
        range.start / SECTOR_SIZE,
        (range.end - range.start) / SECTOR_SIZE,
    );
    match unreadable.last_mut() {
        Some(last) if last.sector + last.sectors == sector => last.sectors += sectors,
        _ => unreadable.push(UnreadableSectors {
            sector,
            sectors,
            why: error.to_string(),
        }),
    }
}

/// As [`export_disk`] to a new file, but with the contents of the disk at a point in its history.
/// The file has the disk's present size.
///
/// # Errors
/// As [`export_disk`]; or [`ErrorKind::NotFound`] if the log does not reach back to this point; the
/// error names the nearest ones.
pub fn restore_disk(
    path: &Path,
    log_dir: &Path,
    at: Point,
    raw: &Path,
    threads: Option<NonZeroUsize>,
    progress: Progress<'_>,
) -> Result<Transfer> {
    let view = View::open_at(&DiskOptions::new(path), log_dir, at, threads)?;
    write_raw(&view, path, raw, false, threads, progress)
}

/// Refuses to replace the image of another disk of the log, whatever its mark says.
fn refuse_member(view: &View, raw: &Path) -> Result<()> {
    let Some((control, _)) = &view.log else {
        return Ok(());
    };
    let images = control.image_paths();
    // Its own image is open. Whoever makes the file reports a path that does not exist.
    let other = |target: &PathBuf| *target != view.base.path && images.contains(target);
    if !real_path(raw).is_ok_and(|target| other(&target)) {
        return Ok(());
    }
    Err(invalid(format!(
        "{}: the image of a disk of the log in {}; name another file",
        raw.display(),
        control.path.parent().unwrap_or(&control.path).display()
    )))
}

/// Writes the contents of a view to the raw image `raw`.
fn write_raw(
    view: &View,
    path: &Path,
    raw: &Path,
    replace: bool,
    threads: Option<NonZeroUsize>,
    progress: Progress<'_>,
) -> Result<Transfer> {
    refuse_member(view, raw)?;
    let mode = mode_of(view.base.file.as_ref(), path)?;
    // Hold the lock to the end.
    let (part, _replaced) = begin_raw(raw, replace, view.size, mode, origin(view)?)?;
    let done = fill(&part, view, threads, progress)?;
    part.publish(replace)?;
    progress(view.size, view.size);
    Ok(done)
}

/// Identifies the source of a copy: a killed copy is resumed if this is still the same. A disk's
/// state at an LSN never changes, with three exceptions. Somebody changes the base image behind the
/// log's back, which shows in its mtime. The disk's records are discarded, which shows in its void
/// LSN. Or the log is restored from a copy and has got other records since, which shows in the
/// segments' salts.
pub(crate) fn origin(view: &View) -> Result<String> {
    let (mut disk, mut since) = (0, 0);
    if let Some((control, place)) = &view.log {
        let entry = &control.control.disks[*place];
        disk = u128::from_be_bytes(entry.disk);
        since = crc32c::crc32c(&salt_at(view)?.to_le_bytes());
        since = crc32c::crc32c_append(since, entry.void_lsn.as_bytes());
    }
    let (lsn, base) = (view.last_lsn, base_origin(view));
    Ok(format!("{disk:032x} lsn:{lsn} {since:08x} {base}"))
}

/// The salt of the segment up to which the log was read; 0 if there is none.
pub(crate) fn salt_at(view: &View) -> Result<u64> {
    match view.live.iter().find(|live| live.last.lsn >= view.last_lsn) {
        Some(last) => Ok(Candidate::of(&last.segment)?.header.salt.get()),
        None => Ok(0),
    }
}

/// Identifies the base image as it is now.
pub(crate) fn base_origin(view: &View) -> String {
    let metadata = view.base.file.host().and_then(|file| file.metadata().ok());
    let base = metadata
        .filter(|metadata| metadata.is_file())
        .map(|metadata| {
            let (seconds, nanoseconds) = (metadata.mtime(), metadata.mtime_nsec());
            format!(
                "{}:{}:{seconds}.{nanoseconds:09}",
                metadata.dev(),
                metadata.ino()
            )
        });
    // A block device has no useful mtime, so such a copy is never resumed.
    base.unwrap_or_else(|| format!("process:{}", std::process::id()))
}

/// Fills a new file of the view's size with the view's contents. After what an earlier attempt has
/// completed, the file is zeroes.
pub(crate) fn fill(
    part: &PartFile,
    view: &View,
    threads: Option<NonZeroUsize>,
    progress: Progress<'_>,
) -> Result<Transfer> {
    let size = view.size;
    let begun = part.begun();
    let shared = begun == 0 && part.share(view.reader().file, size)?;
    let copy = |range: Range<u64>, data| {
        let bytes = range.end - range.start;
        match data {
            DataPlace::Base => copy(view.reader(), part.named(), range).map(|()| bytes),
            DataPlace::Zero if shared => part.zero(range).map(|()| 0),
            DataPlace::Zero => Ok(0),
            DataPlace::Log { .. } => {
                let write = &mut |at, bytes: &[u8]| part.write(bytes, at).map(|()| true);
                view.read(range, &data, write).map(|()| bytes)
            }
        }
    };
    let copied = if shared {
        transfer(threads, view.over_base(), &copy, &mut |at, _| {
            progress(at, size);
            Ok(())
        })
    } else {
        let mut due = NOTED_BYTES;
        let mut passed = |at, copied| {
            if copied >= due {
                // Ranges are whole sectors.
                due = if part.note(at)? {
                    copied + NOTED_BYTES
                } else {
                    u64::MAX
                };
            }
            progress(at, size);
            Ok(())
        };
        let data = view.data(begun..size, KERNEL_COPY_BYTES);
        transfer(threads, data, &copy, &mut passed)
    };
    part.forget_note();
    Ok(Transfer {
        size,
        copied: copied?,
        shared,
    })
}

/// Creates the file that will become the raw image `raw`, or resumes an earlier attempt at the same
/// copy. Also returns the file that it will replace, if any, locked, so that nobody else can open
/// it any more.
fn begin_raw(
    raw: &Path,
    replace: bool,
    size: u64,
    mode: u32,
    origin: String,
) -> Result<(PartFile, Option<Box<dyn DataFile>>)> {
    let replaced = if replace {
        lock_replaced(raw)?
    } else {
        refuse_existing(raw, "name another file, or replace it with --force")?;
        None
    };
    let part = PartFile::resume(raw, size, mode, origin)?;
    if let Some(replaced) = replaced.as_ref().and_then(|file| file.host()) {
        part.copy_mode_and_owner(replaced)?;
    }
    Ok((part, replaced))
}

/// Creates the raw image `raw`, for its owner only, with what `fill` writes to the empty file it
/// gets. The image gets its name once `fill` has succeeded and everything is durable. `replace`:
/// `raw` may exist; the image then gets its mode and, if allowed, its owner.
///
/// # Errors
/// Those of `fill`; or if `raw` exists, is in use, or can't be written. An existing `raw` is left
/// unchanged.
pub fn receive_image<T, E: From<Error>>(
    raw: &Path,
    replace: bool,
    fill: impl FnOnce(&File) -> std::result::Result<T, E>,
) -> std::result::Result<T, E> {
    let (part, _replaced) = begin_raw(raw, replace, 0, OWNER, String::new())?;
    let filled = fill(part.host_file()?)?;
    part.publish(replace)?;
    Ok(filled)
}

/// Opens and locks the image to import. Also returns its length in bytes.
fn open_source(raw: &Path, format: ImageFormat) -> Result<(Box<dyn DataFile>, u64)> {
    let missing = || "name a raw image that exists: it comes after the new disk".to_owned();
    let open = |error| Error::io("open the image", raw, error).if_missing(missing);
    let kind = files().kind(raw).map_err(open)?;
    if kind == PathKind::Other {
        return Err(invalid(format!(
            "{}: neither a regular file nor a block device; name a raw image",
            raw.display()
        )));
    }
    let source = open_locked(raw, "open the image", Access::Read)?;
    FetchMap::refuse(raw)?;
    let mark = Identity::of(source.as_ref(), raw)?.mark;
    refuse_other_format(raw, mark.as_ref(), format)?;
    if mark.is_some_and(|mark| mark.open) {
        return Err(Error::new(
            ErrorKind::WrongLog,
            format!(
                "{}: a disk that was not closed, so its newest bytes are in its log; export it \
                 ('walvisor disk export') and import the export",
                raw.display()
            ),
        ));
    }
    let size = disk_len(source.as_ref(), raw)?;
    Ok((source, size))
}

/// Opens a file for reading, for `doing` something, and locks it.
fn open_locked(path: &Path, doing: &str, access: Access) -> Result<Box<dyn DataFile>> {
    lock::open_store_file(path, doing, OpenMode::Read, access, |_| Holder::User)
}

/// The mode bits of a file, whose copy must not be accessible to more users.
pub(crate) fn mode_of(file: &dyn DataFile, path: &Path) -> Result<u32> {
    let Some(file) = file.host() else {
        return Ok(OWNER);
    };
    let metadata = file.metadata();
    let metadata = metadata.map_err(|error| Error::io("read its metadata", path, error))?;
    Ok(metadata.mode() & 0o666)
}

/// Locks the file that an export replaces, if it exists; refuses the image of a disk that was not
/// closed.
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
    // It is about to lose its name: anybody who has it open would go on with a file that nobody
    // else sees.
    let file = open_locked(raw, "open", Access::Write)?;
    match Identity::of(file.as_ref(), raw)?.mark {
        Some(ImageMark { open: true, .. }) => Err(Error::new(
            ErrorKind::WrongLog,
            format!(
                "{}: will not replace a disk that was not closed and still has records in its log; \
                 name another file",
                raw.display()
            ),
        )),
        _ => Ok(Some(file)),
    }
}

/// Copies data on several threads with `copy`, which returns the number of bytes. Calls `passed`
/// with the offset up to which everything is copied, and how many bytes that was. Returns the
/// number of bytes copied; of several errors, the one at the lowest offset.
fn transfer<T: Send>(
    threads: Option<NonZeroUsize>,
    mut data: impl Iterator<Item = Result<(Range<u64>, T)>> + Send,
    copy: &(dyn Fn(Range<u64>, T) -> Result<u64> + Sync),
    passed: &mut dyn FnMut(u64, u64) -> Result<()>,
) -> Result<u64> {
    let parts = std::iter::from_fn(|| {
        let (mut part, mut bytes) = (Vec::new(), 0);
        while bytes < PART_BYTES
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
            end = range.end;
            bytes += copy(range, data)?;
        }
        Ok((bytes, end))
    };
    let mut copied = 0;
    parallel::in_order(thread_count(threads), parts, copy_part, |part| {
        let (bytes, end) = part?;
        copied += bytes;
        passed(end, copied)?;
        Ok::<_, Error>(true)
    })?;
    Ok(copied)
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::medium::file::ReadFile;
    use crate::store::resize::tests::fill;
    use crate::{Store, discard_log};

    const SIZE: u64 = 56 << 20;

    /// A disk, its contents, and the paths of a raw image to be made and of its part file.
    struct ResumeCase {
        dir: tempfile::TempDir,
        disk: PathBuf,
        bytes: Vec<u8>,
        new: PathBuf,
        part: PathBuf,
    }

    impl ResumeCase {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            let at = |name: &str| dir.path().join(name);
            let bytes: Vec<u8> = (0..SIZE).map(|at| (at >> 12) as u8 | 1).collect();
            std::fs::write(at("raw"), &bytes).unwrap();
            let (disk, new, part) = (at("disk"), at("new"), at("new.walvisor-part"));
            let options = StoreOptions::default();
            import_disk(&disk, &at("raw"), &at("log"), &options, &mut |_, _| {}).unwrap();
            Self {
                dir,
                disk,
                bytes,
                new,
                part,
            }
        }

        fn export(&self, progress: Progress<'_>) -> Transfer {
            let threads = NonZeroUsize::new(1);
            let log = self.dir.path().join("log");
            export_disk(&self.disk, &log, &self.new, false, threads, progress).unwrap()
        }

        /// Copies up to this offset, and leaves what a process killed at that moment would.
        fn killed_at(&self, offset: u64) {
            // A panic removes the part file; a kill leaves it.
            let kept = self.dir.path().join("kept");
            let killed = catch_unwind(AssertUnwindSafe(|| {
                self.export(&mut |at, _| {
                    if at >= offset {
                        std::fs::hard_link(&self.part, &kept).unwrap();
                        panic!("killed");
                    }
                })
            }));
            assert!(killed.is_err() && !self.part.exists());
            std::fs::rename(kept, &self.part).unwrap();
        }

        /// Copies the rest. Returns how many bytes.
        fn resume(&self) -> u64 {
            let done = self.export(&mut |_, _| {});
            assert!(std::fs::read(&self.new).unwrap() == self.bytes);
            let file = File::open(&self.new).unwrap();
            let mut names = [0u8; 256];
            let len = rustix::fs::flistxattr(&file, &mut names[..]).unwrap();
            assert!(!String::from_utf8_lossy(&names[..len]).contains("walvisor"));
            done.copied
        }
    }

    /// Whether the file system of temporary files can store notes.
    fn has_notes() -> bool {
        let file = tempfile::NamedTempFile::new().unwrap();
        rustix::fs::fsetxattr(
            file.as_file(),
            "user.x",
            b"x",
            rustix::fs::XattrFlags::empty(),
        )
        .is_ok()
    }

    #[test]
    fn a_killed_copy_is_resumed() {
        if !has_notes() {
            println!("skipped: temporary files have no extended attributes");
            return;
        }
        let case = ResumeCase::new();
        case.killed_at(48 << 20);
        // What comes after the noted offset may be incomplete or wrong.
        let part = File::options().write(true).open(&case.part).unwrap();
        part.write_all_at(&[0xee; 4096], 50 << 20).unwrap();
        assert_eq!(case.resume(), SIZE - (48 << 20));
    }

    /// The image was written meanwhile; records that the copy has were discarded, and must not come
    /// back; or the log was restored from a copy, and then other records got the same LSNs.
    #[test]
    fn a_copy_of_something_else_starts_over() {
        for change in ["image", "discard", "restore"] {
            let mut case = ResumeCase::new();
            let log = case.dir.path().join("log");
            let (control, before) = (log.join("control"), case.dir.path().join("before"));
            std::fs::copy(&control, &before).unwrap();
            let image = File::options().write(true).open(&case.disk).unwrap();
            let mark = Identity::of(&image, &case.disk).unwrap().mark;
            let write = |byte| {
                let options = StoreOptions {
                    close_time: Some(std::time::Duration::ZERO),
                    ..StoreOptions::default()
                };
                let disks = [DiskOptions::new(&case.disk)];
                let store = Store::open(&log, &disks, &options).unwrap();
                fill(&mut store.disks()[0].open_port().unwrap(), 8, byte);
                store.close().unwrap();
            };
            if change != "image" {
                write(0x77);
            }
            case.killed_at(32 << 20);
            let mut begun = [0; 512];
            let part = File::open(&case.part).unwrap();
            part.read_exact_at(&mut begun, 4096).unwrap();
            assert_eq!(begun == [0x77; 512], change != "image");
            match change {
                "image" => image.write_all_at(&[0x55; 4096], 4096).unwrap(),
                "discard" => drop(discard_log(&case.disk, &log).unwrap()),
                _ => {
                    std::fs::copy(&before, &control).unwrap();
                    for segment in std::fs::read_dir(&log).unwrap() {
                        let segment = segment.unwrap().path();
                        if segment != control {
                            std::fs::remove_file(segment).unwrap();
                        }
                    }
                    image.write_mark(mark.as_ref()).unwrap();
                    write(0x55);
                }
            }
            if change != "discard" {
                case.bytes[4096..8192].fill(0x55);
            }
            assert_eq!(case.resume(), SIZE, "{change}");
        }
    }
}
