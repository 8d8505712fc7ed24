//! Files as the store needs them: locked, O_DIRECT where the file system allows it, holes, attributes.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{FallocateFlags, FlockOperation, OFlags};
use rustix::io::ReadWriteFlags;

use crate::error::{Error, ErrorKind, Result};
use crate::format::Uuid;
use crate::{Buffer, SECTOR_SIZE, sync};

/// What the store asks of a file that holds data: a segment, the control file, a base image.
pub(crate) trait DataFile: Send + Sync + std::fmt::Debug {
    /// Fills `buffer` from `offset`, or fails.
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    /// Writes all of `bytes` at `offset`.
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Writes some of `slices`, which follow each other at `offset`; returns how many bytes. `durably`: they are
    /// durable then, and nothing else need be.
    fn write_slices_at(
        &self,
        slices: &[io::IoSlice<'_>],
        offset: u64,
        durably: bool,
    ) -> io::Result<usize>;
    /// Makes everything written durable.
    fn sync_data(&self) -> io::Result<()>;
    /// Length in bytes.
    fn len(&self) -> io::Result<u64>;
    /// Gives the file another length, durably. What is new reads as zeroes.
    fn set_len(&self, len: u64) -> io::Result<()>;
    /// Makes a range read as zeroes, giving its space back if `unmap`.
    fn zero_range(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()>;
    /// Sets or removes the mark of a disk whose newest bytes may be in a log.
    fn write_mark(&self, uuid: Option<&Uuid>) -> io::Result<()>;
    /// The descriptor, for engines.
    fn raw_fd(&self) -> RawFd;
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

    fn len(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        File::set_len(self, len)?;
        self.sync_all()
    }

    fn zero_range(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        zero_range(self, offset, len, unmap)
    }

    fn write_mark(&self, uuid: Option<&Uuid>) -> io::Result<()> {
        write_mark(self, uuid)
    }

    fn raw_fd(&self) -> RawFd {
        self.as_raw_fd()
    }
}

/// Opens a file for aligned I/O: with O_DIRECT if reads at sector granularity work that way, else buffered.
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
    if let Ok(file) = direct {
        // Some file systems accept the flag and refuse the I/O; some devices have 4 KiB sectors.
        let mut probe = Buffer::zeroed(SECTOR_SIZE as usize);
        match file.read_at(&mut probe, SECTOR_SIZE) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            _ => return Ok(file),
        }
    }
    options.open(path)
}

/// How long at least an opener waits for a lock, in hundredths of a second.
const LOCK_PATIENCE: u32 = 300;

/// Takes the exclusive lock that every opener of a disk or log takes (`flock`, gone with the process). Waits for up to about 3 s:
/// a process that was killed holds its files until what it had in flight is done, and a slow medium may take that long.
///
/// # Errors
/// [`ErrorKind::Locked`] if it is still held then; [`ErrorKind::Io`] if the file system has no locks.
pub(crate) fn lock(file: &File, path: &Path) -> Result<()> {
    let mut tries = LOCK_PATIENCE;
    let locked = loop {
        match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
            // What a process that was killed had in flight in an io_uring holds its files a little longer than it.
            Err(rustix::io::Errno::WOULDBLOCK) if tries > 0 => tries -= 1,
            locked => break locked,
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    };
    match locked {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(Error::new(
            ErrorKind::Locked,
            format!(
                "{}: already open elsewhere; close the other user of this disk or log first",
                path.display()
            ),
        )),
        Err(errno) => Err(Error::io("lock", path, errno.into())),
    }
}

/// Makes a range read as zeroes: by a hole if `unmap`, else by zeroed extents, else by writing.
fn zero_range(file: &File, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
    let flags = match unmap {
        true => FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE,
        false => FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE,
    };
    match rustix::fs::fallocate(file, flags, offset, len) {
        Err(rustix::io::Errno::OPNOTSUPP) => write_zeroes(file, offset, len, &mut |_| {}),
        other => Ok(other?),
    }
}

/// Reserves space for the first `len` bytes, so that what does not fit fails before the file system is full.
pub(crate) fn allocate(file: &File, len: u64) -> io::Result<()> {
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, len) {
        Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
        other => Ok(other?),
    }
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
    let synced = File::open(path).and_then(|dir| dir.sync_all());
    synced.map_err(|error| Error::io("sync the directory", path, error))
}

/// Random bytes from the system, for salts and identities.
pub(crate) fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        match rustix::rand::getrandom(&mut bytes[filled..], rustix::rand::GetRandomFlags::empty()) {
            Ok(n) => filled += n,
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => panic!("getrandom failed ({errno}): no salt can be made"),
        }
    }
    bytes
}

/// The attribute on a base image that says "my newest bytes may be in a log": the disk's UUID in hex.
/// Set before the first record is logged, removed once all records are in the base image.
const ATTRIBUTE: &str = "user.walvisor.disk";

/// Reads the attribute; `None` if there is none or the file system has none.
pub(crate) fn read_mark(file: &File) -> Option<Uuid> {
    let mut text = [0u8; 64];
    let len = rustix::fs::fgetxattr(file, ATTRIBUTE, &mut text[..]).ok()?;
    let hex = std::str::from_utf8(text.get(..len)?).ok()?;
    Some(u128::from_str_radix(hex, 16).ok()?.to_be_bytes())
}

/// Sets or removes the attribute. File systems without attributes are served without.
fn write_mark(file: &File, uuid: Option<&Uuid>) -> io::Result<()> {
    use rustix::io::Errno;
    let result = match uuid {
        Some(uuid) => {
            let hex = hex(uuid);
            rustix::fs::fsetxattr(
                file,
                ATTRIBUTE,
                hex.as_bytes(),
                rustix::fs::XattrFlags::empty(),
            )
        }
        None => rustix::fs::fremovexattr(file, ATTRIBUTE),
    };
    match result {
        Err(Errno::OPNOTSUPP | Errno::NODATA | Errno::PERM) => Ok(()),
        other => Ok(other?),
    }
}

/// A UUID as 32 hex digits.
pub(crate) fn hex(uuid: &Uuid) -> String {
    format!("{:032x}", u128::from_be_bytes(*uuid))
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;

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
