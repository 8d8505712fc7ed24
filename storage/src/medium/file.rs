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

use crate::error::{Error, Result, invalid};
use crate::medium::mark::{Inode, Mark};
use crate::{Buffer, SECTOR_SIZE, sync};

/// The store's operations on a file that holds data: a segment, the control file, a base image.
pub(crate) trait DataFile: Send + Sync + std::fmt::Debug {
    /// Fills `buffer` from `offset`, or fails.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    /// Writes all of `bytes` at `offset`.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Writes all or a part of `slices`, which follow each other at `offset`; returns how many bytes. `durably`:
    /// these bytes are then durable, and earlier ones need not be. That does not hold on a file system that needs an
    /// explicit sync ([`is_served`]).
    fn write_slices_at(
        &self,
        slices: &[io::IoSlice<'_>],
        offset: u64,
        durably: bool,
    ) -> io::Result<usize>;
    /// Makes everything written durable.
    fn sync_data(&self) -> io::Result<()>;
    /// Makes everything written durable and drops the page cache, so that the next read comes from the medium. A sync
    /// that failed may have left bytes in the cache that look written but are not, and that no later sync writes.
    fn drop_cache(&self) -> io::Result<()>;
    /// Length in bytes.
    fn len(&self) -> io::Result<u64>;
    /// Gives the file another length. New bytes read as zeroes.
    fn set_len(&self, len: u64) -> io::Result<()>;
    /// Reserves space for the first `len` bytes, so that a file that does not fit fails now, and not when a write
    /// finds the file system full.
    fn allocate(&self, len: u64) -> io::Result<()>;
    /// Makes everything written durable, length and attributes too.
    fn sync_all(&self) -> io::Result<()>;
    /// Takes the lock that every opener takes (`flock`), with other openers if `shared`, else alone. `false`: another
    /// opener is in the way.
    fn try_lock(&self, shared: bool) -> io::Result<bool>;
    /// Makes a range read as zeroes, giving its space back if `unmap`.
    fn zero_range(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()>;
    /// The file's identity, by the file system's numbers.
    fn inode(&self) -> io::Result<Inode>;
    /// Reads the mark of a base image, if it has one.
    fn read_mark(&self) -> io::Result<Option<Mark>>;
    /// Sets or removes the mark of a base image. `false`: the file system has no extended attributes.
    fn write_mark(&self, mark: Option<&Mark>) -> io::Result<bool>;
    /// The descriptor, for engines.
    fn raw_fd(&self) -> RawFd;
    /// The file itself, for operations that only the host has; `None` if the file is not on the host.
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
        // fstat(2) reports no length for a block device; a seek to its end does.
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

    fn try_lock(&self, shared: bool) -> io::Result<bool> {
        let lock = |operation| match rustix::fs::flock(self, operation) {
            Err(Errno::WOULDBLOCK) => Ok(false),
            locked => locked.map(|()| true),
        };
        let shared_lock = || lock(FlockOperation::NonBlockingLockShared);
        let locked = match shared {
            true => shared_lock(),
            false => match lock(FlockOperation::NonBlockingLockExclusive) {
                // NFS gives an exclusive lock only to a descriptor that is open for writing, and this one is read-only:
                // a shared lock keeps writers out.
                Err(Errno::BADF) => shared_lock(),
                locked => locked,
            },
        };
        Ok(locked?)
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

/// Whether a server does the work of a file system: one of FUSE, or one in a network. For direct I/O some of these
/// file systems at most pass `RWF_DSYNC` on to the server, and few servers honour it; all servers get an explicit
/// sync.
pub(crate) fn is_served(file: &File) -> rustix::io::Result<bool> {
    const FUSE: u64 = 0x6573_5546;
    const NFS: u64 = 0x6969;
    const NINE_P: u64 = 0x0102_1997;
    const CIFS: u64 = 0xff53_4d42;
    const SMB2: u64 = 0xfe53_4d42;
    let kind = rustix::fs::fstatfs(file)?.f_type as u64 & 0xffff_ffff;
    Ok([FUSE, NFS, NINE_P, CIFS, SMB2].contains(&kind))
}

/// Opens a file for aligned I/O: with O_DIRECT if sector-sized I/O works that way, else buffered.
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
    // The file is closed before the next attempt, because a block device is opened only once at a time.
    if let Ok(file) = direct
        && does_sectors(&file)?
    {
        return Ok(file);
    }
    options.open(path)
}

/// Whether a file that is open with O_DIRECT takes sector-sized I/O. Some file systems accept the flag and refuse the
/// I/O; some devices have sectors of 4 KiB.
fn does_sectors(file: &File) -> io::Result<bool> {
    // STATX_DIOALIGN, of Linux 6.1.
    let wanted = StatxFlags::from_bits_retain(0x2000);
    if let Ok(told) = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, wanted)
        && told.stx_mask & wanted.bits() != 0
    {
        return Ok((1..=SECTOR_SIZE as u32).contains(&told.stx_dio_offset_align));
    }
    // Without that report, a trial read decides. It has to read data, because a hole can be read at any offset; a
    // server's file system answers reads of holes too.
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

/// Makes a range read as zeroes: by a hole if `unmap`, else by zeroed extents. On a file system that has neither,
/// zeroes are written over non-zero data only, so that the file does not grow.
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

/// Writes zeroes over the non-zero bytes in a range: a hole stays a hole, and zero bytes cost no write.
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
            // The file system reports no holes: the whole range is read.
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

/// Bytes that background work moves at once: a sync of the log waits for one such step at most.
const STEP: u64 = 256 << 10;
/// The same while a segment is made. Where each operation takes long, smaller ones would make writers wait for the segment.
pub(crate) const LONG_STEP: u64 = 4 << 20;

/// Writes `len` zero bytes at `offset`, so that the blocks are allocated and need no later conversion. `between` is called
/// with the time that each [`LONG_STEP`] took.
pub(crate) fn write_zeroes(
    file: &dyn DataFile,
    offset: u64,
    len: u64,
    between: &mut dyn FnMut(Duration),
) -> io::Result<()> {
    let zeroes = Buffer::zeroed(len.min(LONG_STEP) as usize);
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

/// Sets the length of a base image, durably.
pub(crate) fn set_size(file: &dyn DataFile, path: &Path, size: u64) -> Result<()> {
    let sized = file.set_len(size).and_then(|()| file.sync_all());
    sized.map_err(|error| size_error(path, size, error))
}

/// The error of a failed attempt to give a base image this length.
pub(crate) fn size_error(path: &Path, size: u64, error: std::io::Error) -> Error {
    match error.kind() {
        std::io::ErrorKind::FileTooLarge => invalid(format!(
            "{}: {size} bytes exceed the longest file that the file system (ext4: 16 TiB) or 'ulimit -f' allows; \
             use another file system, such as XFS, make the disk smaller, or raise the limit",
            path.display()
        )),
        _ => Error::io("size the disk", path, error),
    }
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

/// The extended attribute of a base image that holds its mark.
const ATTRIBUTE: &str = "user.walvisor.disk";

/// Whether the error means that the file system has no extended attributes.
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
            "the extended attribute {ATTRIBUTE} was not written by this program"
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

    /// Data is overwritten with zeroes, and holes stay holes.
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

    /// Other users get the medium between any two steps, however long the range.
    #[test]
    fn zeroes_are_written_step_by_step() {
        let file = tempfile::tempfile().unwrap();
        FileExt::write_all_at(&file, &[7; 3 * LONG_STEP as usize], 0).unwrap();
        let mut steps = 0;
        write_zeroes(&file, 512, 2 * LONG_STEP + 512, &mut |_| steps += 1).unwrap();
        assert_eq!(steps, 3);
        let mut bytes = vec![1; 3 * LONG_STEP as usize];
        FileExt::read_exact_at(&file, &mut bytes, 0).unwrap();
        let zeroes = bytes.iter().filter(|&&byte| byte == 0).count() as u64;
        assert_eq!(
            (zeroes, bytes[511], bytes[512]),
            (2 * LONG_STEP + 512, 7, 0)
        );
    }
}
