//! QEMU's locks on an image, which qemu-nbd, qemu-img and others of its programs take too
//! (`block/file-posix.c`).
//!
//! Each lock is a shared lock on a single byte, held by an open file. By itself it blocks nobody: a
//! program takes the locks that say what it does, then looks for conflicting locks of others.
//!
//! | byte | the holder |
//! |---|---|
//! | 100 + permission | uses this permission |
//! | 200 + permission | does not share this permission with others |

use std::fs::File;
use std::io;

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};

/// To read contents that belong together.
const CONSISTENT_READ: u8 = 1 << 0;
const WRITE: u8 = 1 << 1;
/// To write the bytes that are there already.
const WRITE_UNCHANGED: u8 = 1 << 2;
const RESIZE: u8 = 1 << 3;
/// QEMU's permissions, by number.
const PERMISSIONS: u8 = 4;
/// The byte of the first permission in use, and the byte of the first that is not shared.
const USED: u8 = 100;
const NOT_SHARED: u8 = 200;

/// What the conflicting program does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Conflict {
    /// It writes.
    Writes,
    /// It reads, and nobody may write at the same time.
    Reads,
}

/// Takes the locks of a program that only reads the image, or of one that writes it and shares it
/// with nobody, because then parts of its contents may be in memory or in a log. Without a
/// conflict, the locks are held until the file is closed; otherwise none is held.
///
/// On a kernel or file system without such locks there is no conflict; QEMU takes none there
/// either.
///
/// # Errors
/// If the system can't tell.
pub(crate) fn try_lock(file: &File, write: bool) -> io::Result<Option<Conflict>> {
    let (used, not_shared) = if write {
        (
            CONSISTENT_READ | WRITE | RESIZE,
            CONSISTENT_READ | WRITE | WRITE_UNCHANGED | RESIZE,
        )
    } else {
        (CONSISTENT_READ, WRITE | RESIZE)
    };
    let taken = take(file, USED, used).and_then(|()| take(file, NOT_SHARED, not_shared));
    let conflict = match taken {
        Ok(()) => is_any_held(file, USED, not_shared)? || is_any_held(file, NOT_SHARED, used)?,
        // Some program other than QEMU has an exclusive lock.
        Err(Errno::EAGAIN | Errno::EACCES) => true,
        Err(Errno::EINVAL | Errno::ENOLCK | Errno::EOPNOTSUPP | Errno::ENOSYS) => false,
        Err(error) => return Err(error.into()),
    };
    if !conflict {
        return Ok(None);
    }
    // All bytes, from the first permission in use on.
    fcntl(file, FcntlArg::F_OFD_SETLK(&lock(libc::F_UNLCK, USED, 0)))?;
    Ok(Some(if is_any_held(file, USED, WRITE | RESIZE)? {
        Conflict::Writes
    } else {
        Conflict::Reads
    }))
}

/// The numbers of the permissions in a set.
fn numbers(permissions: u8) -> impl Iterator<Item = u8> {
    (0..PERMISSIONS).filter(move |number| permissions & 1 << number != 0)
}

/// Takes the locks of `permissions`, of which the first has the byte `base`.
fn take(file: &File, base: u8, permissions: u8) -> nix::Result<()> {
    numbers(permissions).try_for_each(|number| {
        let lock = lock(libc::F_RDLCK, base + number, 1);
        fcntl(file, FcntlArg::F_OFD_SETLK(&lock)).map(drop)
    })
}

/// Whether another open file has a lock of one of `permissions`.
fn is_any_held(file: &File, base: u8, permissions: u8) -> nix::Result<bool> {
    for number in numbers(permissions) {
        let mut lock = lock(libc::F_WRLCK, base + number, 1);
        fcntl(file, FcntlArg::F_OFD_GETLK(&mut lock))?;
        if i32::from(lock.l_type) != libc::F_UNLCK {
            return Ok(true);
        }
    }
    Ok(false)
}

/// A lock of `len` bytes from byte `first` on; 0: of everything from there.
fn lock(kind: i32, first: u8, len: i64) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: first.into(),
        l_len: len,
        l_pid: 0,
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;

    #[test]
    fn one_writes_or_all_read() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let open = || File::open(image.path()).unwrap();
        let (first, second, third) = (open(), open(), open());
        assert_eq!(try_lock(&first, false).unwrap(), None);
        assert_eq!(try_lock(&second, false).unwrap(), None);
        // The same file again, as a waiter does.
        assert_eq!(try_lock(&second, false).unwrap(), None);
        assert_eq!(try_lock(&third, true).unwrap(), Some(Conflict::Reads));
        drop(first);
        assert_eq!(try_lock(&third, true).unwrap(), Some(Conflict::Reads));
        drop(second);
        assert_eq!(try_lock(&third, true).unwrap(), None);
        for write in [false, true] {
            let late = open();
            assert_eq!(try_lock(&late, write).unwrap(), Some(Conflict::Writes));
        }
    }

    /// The locks of a guest's disk in QEMU 7.2: it writes, and shares reading.
    #[test]
    fn a_refused_program_leaves_no_locks() {
        let image = tempfile::NamedTempFile::new().unwrap();
        let (qemu, here) = (image.reopen().unwrap(), image.reopen().unwrap());
        take(&qemu, USED, CONSISTENT_READ | WRITE).unwrap();
        take(&qemu, NOT_SHARED, WRITE).unwrap();
        for write in [false, true] {
            assert_eq!(try_lock(&here, write).unwrap(), Some(Conflict::Writes));
            let (all, none) = (CONSISTENT_READ | WRITE | WRITE_UNCHANGED | RESIZE, 0);
            for (base, own) in [(USED, none), (NOT_SHARED, WRITE)] {
                assert!(!is_any_held(&qemu, base, all & !own).unwrap());
            }
        }
    }
}
