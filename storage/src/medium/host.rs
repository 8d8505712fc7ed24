//! Files of the host: O_DIRECT where the file system allows it, holes, attributes, and random
//! bytes.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use rustix::fs::{AtFlags, FallocateFlags, OFlags, SeekFrom, StatxFlags, XattrFlags};
use rustix::io::Errno;

use crate::medium::mark::ImageMark;
use crate::{Buffer, SECTOR_SIZE};

/// Whether a server implements the file system (FUSE or network). For direct I/O, such file systems
/// at best pass `RWF_DSYNC` on to the server, and few servers honour it; but all of them handle an
/// explicit sync.
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
    // Close the file before the next attempt, because a block device can be opened only once at a
    // time.
    if let Ok(file) = direct
        && does_sectors(&file)?
    {
        return Ok(file);
    }
    options.open(path)
}

/// Whether a file opened with O_DIRECT takes sector-sized I/O. Some file systems accept the flag
/// but refuse the I/O; some devices have sectors of 4 KiB.
fn does_sectors(file: &File) -> io::Result<bool> {
    // STATX_DIOALIGN, of Linux 6.1.
    let wanted = StatxFlags::from_bits_retain(0x2000);
    if let Ok(told) = rustix::fs::statx(file, c"", AtFlags::EMPTY_PATH, wanted)
        && told.stx_mask & wanted.bits() != 0
    {
        return Ok((1..=SECTOR_SIZE as u32).contains(&told.stx_dio_offset_align));
    }
    // Otherwise, try a read. It has to hit data, because holes can be read at any offset; not so on
    // a server's file system.
    let data = if is_served(file)? {
        Ok(0)
    } else {
        rustix::fs::seek(file, SeekFrom::Data(0))
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

/// Opens a file a second time, for buffered I/O, as a separate open file description with its own
/// record of reported write-back errors. Goes through /proc where it is mounted, otherwise through
/// `path`, if the same file is still there.
///
/// # Errors
/// If neither leads to the file.
pub(super) fn reopen(file: &File, path: &Path) -> io::Result<File> {
    let by_descriptor = format!("/proc/self/fd/{}", file.as_raw_fd());
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    let opened = options
        .open(by_descriptor)
        .or_else(|_| options.open(path))?;
    let identity = |file: &File| file.metadata().map(|found| (found.dev(), found.ino()));
    if identity(&opened)? == identity(file)? {
        Ok(opened)
    } else {
        Err(io::Error::other(format!(
            "{}: another file is in its place",
            path.display()
        )))
    }
}

/// Starts write-back of the dirty pages in this range, after any that is already running. Where the
/// call is unavailable, the kernel writes back when it likes.
pub(super) fn write_back(file: &File, range: Range<u64>) -> io::Result<()> {
    let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE;
    let (offset, len) = (range.start as i64, (range.end - range.start) as i64);
    // SAFETY: the call takes a descriptor, which is open, and numbers.
    match unsafe { libc::sync_file_range(file.as_raw_fd(), offset, len, flags) } {
        0 => Ok(()),
        _ => match io::Error::last_os_error() {
            error
                if [libc::ENOSYS, libc::EPERM, libc::EINVAL, libc::ESPIPE]
                    .contains(&error.raw_os_error().unwrap_or(0)) =>
            {
                Ok(())
            }
            error => Err(error),
        },
    }
}

/// Makes a range read as zeroes: by punching a hole if `unmap`, otherwise by zeroing extents. On a
/// file system with neither, overwrites only non-zero data, so that the file takes no more space.
pub(super) fn zero_range(file: &File, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
    match zero(file, offset..offset + len, unmap) {
        Err(error) if error.kind() == io::ErrorKind::Unsupported => {
            overwrite_data(file, offset, len)
        }
        other => other,
    }
}

/// The fallocate mode that makes a range read as zeroes.
pub(super) fn zero_mode(unmap: bool) -> FallocateFlags {
    let how = if unmap {
        FallocateFlags::PUNCH_HOLE
    } else {
        FallocateFlags::ZERO_RANGE
    };
    how | FallocateFlags::KEEP_SIZE
}

/// Makes a range read as zeroes, if the file system can do that itself.
pub(super) fn zero(file: &File, range: Range<u64>, unmap: bool) -> io::Result<()> {
    let len = range.end - range.start;
    let zero = || rustix::fs::fallocate(file, zero_mode(unmap), range.start, len);
    Ok(rustix::io::retry_on_intr(zero)?)
}

/// Zeroes the non-zero bytes in a range. Holes stay holes, and zero bytes cost no write.
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

/// Bytes that background work moves at a time; a sync of the log waits for at most one such step.
pub(crate) const STEP: u64 = 256 << 10;
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

/// Most bytes of an attribute's value.
const LONGEST_ATTRIBUTE: usize = 4096;

/// An extended attribute of a file; `None` if it has none, or its file system has none.
pub(crate) fn read_attribute(file: &File, name: &str) -> io::Result<Option<Vec<u8>>> {
    let mut value = vec![0; LONGEST_ATTRIBUTE];
    let len = match rustix::fs::fgetxattr(file, name, &mut value[..]) {
        Err(Errno::NODATA) => return Ok(None),
        Err(errno) if lacks_attributes(errno) => return Ok(None),
        len => len?,
    };
    value.truncate(len);
    Ok(Some(value))
}

/// Sets or removes an extended attribute of a file. `false`: its file system has none.
pub(crate) fn write_attribute(file: &File, name: &str, value: Option<&[u8]>) -> io::Result<bool> {
    let result = match value {
        Some(value) => rustix::fs::fsetxattr(file, name, value, XattrFlags::empty()),
        None => match rustix::fs::fremovexattr(file, name) {
            Err(Errno::NODATA) => Ok(()),
            removed => removed,
        },
    };
    match result {
        Err(errno) if lacks_attributes(errno) => Ok(false),
        other => Ok(other.map(|()| true)?),
    }
}

pub(super) fn read_mark(file: &File) -> io::Result<Option<ImageMark>> {
    let Some(value) = read_attribute(file, ATTRIBUTE)? else {
        return Ok(None);
    };
    let text = std::str::from_utf8(&value).ok();
    let mark = text.and_then(ImageMark::decode);
    mark.map(Some).ok_or_else(|| {
        io::Error::other(format!(
            "the extended attribute {ATTRIBUTE} was not written by this program"
        ))
    })
}

pub(super) fn write_mark(file: &File, mark: Option<&ImageMark>) -> io::Result<bool> {
    let text = mark.map(ImageMark::encode);
    write_attribute(file, ATTRIBUTE, text.as_deref().map(str::as_bytes))
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
}
