//! Files as the store needs them: locked, O_DIRECT where the file system allows it, holes, attributes.

use std::fs::{File, OpenOptions};
use std::io::{self, Seek};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use rustix::fs::{
    Advice, AtFlags, FallocateFlags, FlockOperation, OFlags, SeekFrom, StatxFlags, XattrFlags,
};
use rustix::io::{Errno, ReadWriteFlags};

use crate::error::{Error, ErrorKind, Result};
use crate::filesystem::{Open, files};
use crate::identity::{Inode, Mark};
use crate::mutant::{Mutant, planted};
use crate::{Buffer, SECTOR_SIZE, sync};

/// What the store asks of a file that holds data: a segment, the control file, a base image.
pub(crate) trait DataFile: Send + Sync + std::fmt::Debug {
    /// Fills `buffer` from `offset`, or fails.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    /// Writes all of `bytes` at `offset`.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Writes some of `slices`, which follow each other at `offset`; returns how many bytes. `durably`: they are
    /// durable then, and nothing else need be, but where the file system has to be told of a sync ([`is_served`]).
    fn write_slices_at(
        &self,
        slices: &[io::IoSlice<'_>],
        offset: u64,
        durably: bool,
    ) -> io::Result<usize>;
    /// Makes everything written durable.
    fn sync_data(&self) -> io::Result<()>;
    /// Makes everything written durable and forgets what is cached: what is read next is what the medium holds. A sync that
    /// failed may have left bytes in the cache that look written, are not, and that no later sync writes.
    fn drop_cache(&self) -> io::Result<()>;
    /// Length in bytes.
    fn len(&self) -> io::Result<u64>;
    /// Gives the file another length. What is new reads as zeroes.
    fn set_len(&self, len: u64) -> io::Result<()>;
    /// Reserves space for the first `len` bytes, so that what does not fit fails before the file system is full.
    fn allocate(&self, len: u64) -> io::Result<()>;
    /// Makes everything written durable, length and attributes too.
    fn sync_all(&self) -> io::Result<()>;
    /// Takes the exclusive lock that every opener takes (`flock`), unless somebody has it.
    fn try_lock(&self) -> io::Result<bool>;
    /// Makes a range read as zeroes, giving its space back if `unmap`.
    fn zero_range(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()>;
    /// Which file it is, by the file system's numbers.
    fn inode(&self) -> io::Result<Inode>;
    /// Reads the mark of a base image, if it has one.
    fn read_mark(&self) -> io::Result<Option<Mark>>;
    /// Sets or removes the mark of a base image. `false`: the file system has no attributes.
    fn write_mark(&self, mark: Option<&Mark>) -> io::Result<bool>;
    /// The descriptor, for engines.
    fn raw_fd(&self) -> RawFd;
    /// The file itself, for what the host alone can do; `None` if it is none of the host's.
    fn host(&self) -> Option<&File>;
}

impl DataFile for File {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        FileExt::read_exact_at(self, buffer, offset)
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        FileExt::write_all_at(self, bytes, offset)
    }

    fn write_slices_at(
        &self,
        slices: &[io::IoSlice<'_>],
        offset: u64,
        durably: bool,
    ) -> io::Result<usize> {
        let flags = match durably {
            true => ReadWriteFlags::DSYNC,
            false => ReadWriteFlags::empty(),
        };
        Ok(rustix::io::pwritev2(self, slices, offset, flags)?)
    }

    fn sync_data(&self) -> io::Result<()> {
        File::sync_data(self)
    }

    fn drop_cache(&self) -> io::Result<()> {
        self.sync_data()?;
        Ok(rustix::fs::fadvise(self, 0, None, Advice::DontNeed)?)
    }

    fn len(&self) -> io::Result<u64> {
        // fstat(2) tells no length of a block device; where it ends is one.
        (&mut &*self).seek(io::SeekFrom::End(0))
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        File::set_len(self, len)
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        match rustix::fs::fallocate(self, FallocateFlags::empty(), 0, len) {
            Err(Errno::OPNOTSUPP) => Ok(()),
            other => Ok(other?),
        }
    }

    fn sync_all(&self) -> io::Result<()> {
        File::sync_all(self)
    }

    fn try_lock(&self) -> io::Result<bool> {
        let lock = |operation| match rustix::fs::flock(self, operation) {
            Err(Errno::WOULDBLOCK) => Ok(false),
            locked => locked.map(|()| true),
        };
        match lock(FlockOperation::NonBlockingLockExclusive) {
            // NFS makes an exclusive lock of a descriptor that writes, and this one reads only: writers are kept out.
            Err(Errno::BADF) => Ok(lock(FlockOperation::NonBlockingLockShared)?),
            locked => Ok(locked?),
        }
    }

    fn zero_range(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        zero_range(self, offset, len, unmap)
    }

    fn inode(&self) -> io::Result<Inode> {
        let metadata = self.metadata()?;
        let born = metadata.created().ok();
        let born = born.and_then(|born| born.duration_since(UNIX_EPOCH).ok());
        Ok(Inode {
            device: metadata.dev(),
            number: metadata.ino(),
            born: born.map_or(0, |born| born.as_nanos() as u64),
        })
    }

    fn read_mark(&self) -> io::Result<Option<Mark>> {
        read_mark(self)
    }

    fn write_mark(&self, mark: Option<&Mark>) -> io::Result<bool> {
        write_mark(self, mark)
    }

    fn raw_fd(&self) -> RawFd {
        self.as_raw_fd()
    }

    fn host(&self) -> Option<&File> {
        Some(self)
    }
}

/// Whether a server does the work of a file system: of FUSE, or over a network. Past the page cache some of these hand
/// `RWF_DSYNC` to the server at most, and few servers look at it; all of them are told of a sync.
pub(crate) fn is_served(file: &File) -> rustix::io::Result<bool> {
    const FUSE: u64 = 0x6573_5546;
    const NFS: u64 = 0x6969;
    const NINE_P: u64 = 0x0102_1997;
    const CIFS: u64 = 0xff53_4d42;
    const SMB2: u64 = 0xfe53_4d42;
    let kind = rustix::fs::fstatfs(file)?.f_type as u64 & 0xffff_ffff;
    Ok([FUSE, NFS, NINE_P, CIFS, SMB2].contains(&kind))
}

/// Opens a file for aligned I/O: with O_DIRECT if I/O of sectors works that way, else buffered.
pub(crate) fn open_direct(path: &Path, write: bool) -> io::Result<File> {
    open_direct_with(path, write, OFlags::empty())
}

/// The same with further flags of open(2).
pub(crate) fn open_direct_with(path: &Path, write: bool, flags: OFlags) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .write(write)
        .custom_flags(flags.bits() as i32);
    let direct = options
        .clone()
        .custom_flags((flags | OFlags::DIRECT).bits() as i32)
        .open(path);
    // Closed before the next attempt: a block device is opened once.
    if let Ok(file) = direct
        && does_sectors(&file)?
    {
        return Ok(file);
    }
    options.open(path)
}

/// Whether a file that is open with O_DIRECT takes I/O of sectors. Some file systems accept the flag and refuse the I/O; some
/// devices have sectors of 4 KiB.
fn does_sectors(file: &File) -> io::Result<bool> {
    // STATX_DIOALIGN, of Linux 6.1.
    let wanted = StatxFlags::from_bits_retain(0x2000);
    if let Ok(told) = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, wanted)
        && told.stx_mask & wanted.bits() != 0
    {
        return Ok((1..=SECTOR_SIZE as u32).contains(&told.stx_dio_offset_align));
    }
    // Where nothing is told a read tells, of data: a hole is read at any offset. A server answers reads of holes too.
    let data = match is_served(file)? {
        true => Ok(0),
        false => rustix::fs::seek(file, SeekFrom::Data(0)),
    };
    let data = match data {
        Ok(data) => data,
        Err(Errno::NXIO) => return Ok(false),
        Err(_) => 0,
    };
    let mut probe = Buffer::zeroed(SECTOR_SIZE as usize);
    let read = file.read_at(&mut probe, data / SECTOR_SIZE * SECTOR_SIZE + SECTOR_SIZE);
    Ok(!matches!(read, Err(error) if error.raw_os_error() == Some(libc::EINVAL)))
}

/// Whom an opener waits for when a file is locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    /// Perhaps another user, who may keep it for long. One that was just killed lets go soon.
    User,
    /// A process that was killed: no other user can be. What it had in flight holds the file until it is done.
    Writes,
}

/// How often a locked file is tried again.
const LOCK_TRY: Duration = Duration::from_millis(10);
/// How long at least a user is waited for, and writes in flight.
const USER_PATIENCE: Duration = Duration::from_secs(3);
const WRITES_PATIENCE: Duration = Duration::from_secs(120);
/// After so long whoever waits is told what for.
const SILENCE: Duration = Duration::from_secs(1);

/// How often a file is opened anew because another took its place while its lock was waited for.
const PLACES: u32 = 100;

/// Opens a file, for `doing` something, and takes its lock as [`lock`] does. Whoever waits may get the lock of a file that was
/// renamed over or removed meanwhile, which keeps nobody from what is at the path now: that is opened then.
///
/// # Errors
/// As [`lock`]; or if the file cannot be opened.
pub(crate) fn open_locked<F>(
    path: &Path,
    doing: &str,
    open: impl Fn() -> io::Result<F>,
    data: impl Fn(&F) -> &dyn DataFile,
    holder: impl Fn(&dyn DataFile) -> Holder,
) -> Result<F> {
    let failed = |error| Error::io(doing, path, error);
    for _ in 0..PLACES {
        let file = open().map_err(failed)?;
        lock(data(&file), path, holder(data(&file)))?;
        let locked = data(&file).inode().map_err(failed)?;
        match files().open(path, Open::Read).and_then(|file| file.inode()) {
            Ok(there) if there == locked => return Ok(file),
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
    }
    Err(Error::new(
        ErrorKind::Locked,
        format!("{}: replaced by others again and again", path.display()),
    ))
}

/// The same for a file of the store's.
pub(crate) fn open_store_file(
    path: &Path,
    doing: &str,
    how: Open,
    holder: impl Fn(&dyn DataFile) -> Holder,
) -> Result<Box<dyn DataFile>> {
    let open = || files().open(path, how);
    open_locked(path, doing, open, |file| file.as_ref(), holder)
}

/// Takes the exclusive lock that every opener of a disk or log takes (`flock`, gone with the last descriptor of the file).
/// A write that a process had in flight in an io_uring keeps the file open, and so locked, after the process was killed.
///
/// # Errors
/// [`ErrorKind::Locked`] if it is still held after about 3 s, or 2 minutes where only writes in flight can hold it;
/// [`ErrorKind::Io`] if the file system has no locks.
pub(crate) fn lock(file: &dyn DataFile, path: &Path, holder: Holder) -> Result<()> {
    let mut waited = Duration::ZERO;
    let patience = match holder {
        Holder::User => USER_PATIENCE,
        Holder::Writes => WRITES_PATIENCE,
    };
    loop {
        match file.try_lock() {
            Ok(true) => return Ok(()),
            Ok(false) if waited < patience => {}
            Ok(false) => break,
            Err(error) => return Err(Error::io("lock", path, error)),
        }
        std::thread::sleep(LOCK_TRY);
        waited += LOCK_TRY;
        if waited == SILENCE && holder == Holder::Writes {
            tracing::warn!(
                "{}: waiting for writes that a process which was killed still has in flight",
                path.display()
            );
        }
    }
    let why = match holder {
        Holder::User => {
            "already open elsewhere; close the other user of this disk or log first".to_owned()
        }
        Holder::Writes => format!(
            "still locked after {} s, by writes in flight of a process that was killed, or by a user of another log; \
             look at the device, or close the other user, then try again",
            WRITES_PATIENCE.as_secs()
        ),
    };
    Err(Error::new(
        ErrorKind::Locked,
        format!("{}: {why}", path.display()),
    ))
}

/// Makes a range read as zeroes: by a hole if `unmap`, else by zeroed extents. A file system that has neither gets zeroes
/// written where it holds anything else, and so no longer file than before.
fn zero_range(file: &File, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
    let flags = match unmap {
        true => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        false => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
    };
    match rustix::fs::fallocate(file, flags, offset, len) {
        Err(Errno::OPNOTSUPP) => overwrite_data(file, offset, len),
        other => Ok(other?),
    }
}

/// Writes zeroes over what is not zero in a range: a hole stays one, and what is zero takes no write.
fn overwrite_data(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let end = offset + len;
    let (zeroes, mut read) = (
        Buffer::zeroed(STEP.min(len) as usize),
        Buffer::zeroed(STEP.min(len) as usize),
    );
    let mut at = offset;
    while at < end {
        at = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) => at.max(data / SECTOR_SIZE * SECTOR_SIZE),
            Err(Errno::NXIO) => break,
            // No holes are told here: all of it is read.
            Err(_) => at,
        };
        let part = STEP.min(end.saturating_sub(at)) as usize;
        let read = &mut read[..part];
        FileExt::read_exact_at(file, read, at)?;
        let sector = SECTOR_SIZE as usize;
        let mut data = read
            .chunks(sector)
            .map(|bytes| bytes.iter().any(|&byte| byte != 0));
        if let Some(first) = data.position(|data| data) {
            let last = first + 1 + data.rposition(|data| data).map_or(0, |last| last + 1);
            let (first, last) = (first * sector, (last * sector).min(part));
            FileExt::write_all_at(file, &zeroes[..last - first], at + first as u64)?;
        }
        at += part as u64;
    }
    Ok(())
}

/// Bytes that background work moves at once: a sync of the log waits for them at most.
pub(crate) const STEP: u64 = 256 << 10;

/// Writes `len` zero bytes at `offset`, so that the blocks are allocated and need no later conversion. `between` is called
/// with the time that each [`STEP`] took.
pub(crate) fn write_zeroes(
    file: &dyn DataFile,
    offset: u64,
    len: u64,
    between: &mut dyn FnMut(Duration),
) -> io::Result<()> {
    let zeroes = Buffer::zeroed(len.min(STEP) as usize);
    let mut done = 0;
    while done < len {
        let part = (len - done).min(zeroes.len() as u64);
        let began = sync::now();
        file.write_all_at(&zeroes[..part as usize], offset + done)?;
        done += part;
        between(sync::now() - began);
    }
    Ok(())
}

/// Makes a directory's entries durable.
pub(crate) fn sync_dir(path: &Path) -> Result<()> {
    let synced = files().sync_dir(path);
    synced.map_err(|error| Error::io("sync the directory", path, error))
}

/// Makes a name durable that is there: who made it may have been killed before it was, and what is acknowledged from now on
/// is lost with it.
pub(crate) fn settle_name(path: &Path) -> Result<()> {
    if planted(Mutant::OpenTrustsNames) {
        return Ok(());
    }
    let dir = parent(path);
    match files().sync_dir(dir) {
        // A process that may not open the directory leaves that to others, or did it before it gave up the right:
        // see `Store::make_log`.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        synced => synced.map_err(|error| Error::io("sync the directory", dir, error)),
    }
}

/// The directory that `path` is in.
pub(crate) fn parent(path: &Path) -> &Path {
    let parent = path.parent();
    let named = parent.filter(|parent| !parent.as_os_str().is_empty());
    named.unwrap_or(Path::new("."))
}

/// Random bytes from the system, for salts and identities.
pub(crate) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(n) => filled += n,
            Err(Errno::INTR) => {}
            Err(errno) => panic!("getrandom failed ({errno}): no salt can be made"),
        }
    }
    bytes
}

/// The attribute of a base image that holds its mark.
const ATTRIBUTE: &str = "user.walvisor.disk";

/// Whether a file system says so that it has no attributes.
fn lacks_attributes(errno: Errno) -> bool {
    matches!(errno, Errno::OPNOTSUPP | Errno::NOSYS | Errno::PERM)
}

fn read_mark(file: &File) -> io::Result<Option<Mark>> {
    let mut text = [0u8; 256];
    let len = match rustix::fs::fgetxattr(file, ATTRIBUTE, &mut text[..]) {
        Err(Errno::NODATA) => return Ok(None),
        Err(errno) if lacks_attributes(errno) => return Ok(None),
        len => len?,
    };
    let mark = std::str::from_utf8(&text[..len])
        .ok()
        .and_then(Mark::decode);
    mark.map(Some).ok_or_else(|| {
        io::Error::other(format!(
            "the attribute {ATTRIBUTE} is not one that this program writes"
        ))
    })
}

fn write_mark(file: &File, mark: Option<&Mark>) -> io::Result<bool> {
    let result = match mark {
        Some(mark) => {
            let text = mark.encode();
            rustix::fs::fsetxattr(file, ATTRIBUTE, text.as_bytes(), XattrFlags::empty())
        }
        None => match rustix::fs::fremovexattr(file, ATTRIBUTE) {
            Err(Errno::NODATA) => Ok(()),
            removed => removed,
        },
    };
    match result {
        Err(errno) if lacks_attributes(errno) => Ok(false),
        other => Ok(other.map(|()| true)?),
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;
    use std::thread;

    /// Whoever waited for a lock has that of the file that is at the path in the end.
    #[test]
    fn a_lock_is_of_the_file_that_is_at_the_path() {
        let dir = tempfile::tempdir().unwrap();
        let (path, newer) = (dir.path().join("file"), dir.path().join("newer"));
        std::fs::write(&path, "old").unwrap();
        std::fs::write(&newer, "new").unwrap();
        let open = || open_store_file(&path, "open", Open::Existing, |_| Holder::Writes);
        let first = open().unwrap();
        thread::scope(|scope| {
            let waiter = scope.spawn(open);
            // It waits, or comes later: either way it may only have the newer.
            thread::sleep(5 * LOCK_TRY);
            std::fs::rename(&newer, &path).unwrap();
            drop(first);
            let mut text = [0; 3];
            let file = waiter.join().unwrap().unwrap();
            file.read_exact_at(&mut text, 0).unwrap();
            assert_eq!(&text, b"new");
        });
    }

    /// Zeroes where data was, and nothing where none was.
    #[test]
    fn without_holes_only_data_is_overwritten() {
        let file = tempfile::tempfile().unwrap();
        let len = 3 * STEP;
        file.set_len(len).unwrap();
        FileExt::write_all_at(&file, &[7; 8192], STEP - 4096).unwrap();
        let blocks = file.metadata().unwrap().blocks();
        overwrite_data(&file, 512, len - 512).unwrap();
        assert_eq!(file.metadata().unwrap().blocks(), blocks);
        let mut bytes = vec![1; len as usize];
        FileExt::read_exact_at(&file, &mut bytes, 0).unwrap();
        assert!(bytes.iter().all(|&byte| byte == 0));
    }

    /// Others have the medium between any two steps, however long the whole.
    #[test]
    fn zeroes_are_written_step_by_step() {
        let file = tempfile::tempfile().unwrap();
        FileExt::write_all_at(&file, &[7; 3 * STEP as usize], 0).unwrap();
        let mut steps = 0;
        write_zeroes(&file, 512, 2 * STEP + 512, &mut |_| steps += 1).unwrap();
        assert_eq!(steps, 3);
        let mut bytes = vec![1; 3 * STEP as usize];
        FileExt::read_exact_at(&file, &mut bytes, 0).unwrap();
        let zeroes = bytes.iter().filter(|&&byte| byte == 0).count() as u64;
        assert_eq!((zeroes, bytes[511], bytes[512]), (2 * STEP + 512, 7, 0));
    }
}
