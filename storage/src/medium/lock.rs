//! Opening and locking a file for one writer, or only readers, and making sure that it is still the
//! one at its path.

use std::io;
use std::path::Path;
use std::time::Duration;

use crate::error::{Error, ErrorKind, Result};
use crate::medium::file::DataFile;
use crate::medium::filesystem::{OpenMode, files};
use crate::medium::owner;
use crate::medium::qemu::{self, Conflict};

/// What a file is opened for, which decides who else may have it open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    /// A file of a log, to write: nobody else may have it open. (Other programs do not use it.)
    Log,
    /// A file of a log, only to read: others may read it too.
    LogRead,
    /// An image, to write: nobody else may have it open, QEMU's programs included.
    Write,
    /// An image, only to read: others may read it too.
    Read,
    /// A file of a log, or an image, only to read and without a lock: the process that has it open
    /// holds everything up to this LSN.
    Held {
        /// The LSN.
        newest: u64,
    },
}

impl Access {
    /// How to open a file for this.
    pub(crate) fn open_mode(self, to_write: OpenMode) -> OpenMode {
        match self {
            Self::Log | Self::Write => to_write,
            Self::LogRead | Self::Read => OpenMode::Read,
            // Its pages must not be cached while that process writes.
            Self::Held { .. } => OpenMode::ReadDirect,
        }
    }

    /// For the log of an image that is opened for this.
    pub(crate) fn of_log(self) -> Self {
        match self {
            Self::Log | Self::Write => Self::Log,
            Self::LogRead | Self::Read => Self::LogRead,
            held @ Self::Held { .. } => held,
        }
    }

    /// For an image of a log that is opened for this.
    pub(crate) fn of_image(self) -> Self {
        match self {
            Self::Log | Self::Write => Self::Write,
            Self::LogRead | Self::Read => Self::Read,
            held @ Self::Held { .. } => held,
        }
    }

    /// The newest record to read, if records may be appended meanwhile.
    pub(crate) fn newest(self) -> Option<u64> {
        match self {
            Self::Held { newest } => Some(newest),
            _ => None,
        }
    }
}

/// Who may be holding a lock that an opener waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    /// Possibly another user, which may keep the lock for a long time. A user that was just killed
    /// releases it soon.
    User,
    /// Only writes that a killed process left in flight; there can be no other user. They hold the
    /// lock until they end.
    Writes,
}

/// Time between two tries.
const LOCK_TRY: Duration = Duration::from_millis(10);

/// How long to wait for another user, and below, for writes in flight.
const USER_PATIENCE: Duration = Duration::from_secs(3);

const WRITES_PATIENCE: Duration = Duration::from_secs(120);

/// After this time, log what the opener is waiting for.
const SILENCE: Duration = Duration::from_secs(1);

/// How often to reopen a file that was replaced while the opener waited for its lock.
const PLACES: u32 = 100;

/// Opens a file, for `doing` something, and locks it as [`lock`] does. Waiters lock the file that
/// is finally at the path: if the file is replaced or removed while this waits, the new one is
/// opened instead.
///
/// # Errors
/// As [`lock`]; or if the file cannot be opened.
pub(crate) fn open_locked<F>(
    path: &Path,
    doing: &str,
    open: impl Fn() -> io::Result<F>,
    data: impl Fn(&F) -> &dyn DataFile,
    access: Access,
    holder: impl Fn(&dyn DataFile) -> Holder,
) -> Result<F> {
    let failed = |error| Error::io(doing, path, error);
    for _ in 0..PLACES {
        let file = open().map_err(failed)?;
        lock(data(&file), path, access, holder(data(&file)))?;
        let locked = data(&file).inode().map_err(failed)?;
        match files()
            .open(path, OpenMode::Read)
            .and_then(|file| file.inode())
        {
            Ok(there) if there == locked => return Ok(file),
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
    }
    Err(Error::new(
        ErrorKind::Locked,
        format!(
            "{}: other processes replaced the file {PLACES} times while it was being opened; stop \
             them, then try again",
            path.display()
        ),
    ))
}

/// As [`open_locked`], for a file of the store.
pub(crate) fn open_store_file(
    path: &Path,
    doing: &str,
    how: OpenMode,
    access: Access,
    holder: impl Fn(&dyn DataFile) -> Holder,
) -> Result<Box<dyn DataFile>> {
    let open = || files().open(path, how);
    open_locked(path, doing, open, |file| file.as_ref(), access, holder)
}

/// Takes the lock that every opener of a disk or log takes (`flock`, released with the last
/// descriptor of the open file), and on an image QEMU's locks too. A killed process's io_uring
/// write in flight keeps the file open, and so locked.
///
/// # Errors
/// [`ErrorKind::Locked`] if the lock is still held after about 3 s, or after 2 minutes where only
/// writes in flight can hold it; [`ErrorKind::Io`] if the file system has no locks.
pub(crate) fn lock(
    file: &dyn DataFile,
    path: &Path,
    access: Access,
    mut holder: Holder,
) -> Result<()> {
    let failed = |error| Error::io("lock", path, error);
    let mut waited = Duration::ZERO;
    loop {
        let Some(other) = try_lock(file, access).map_err(failed)? else {
            return Ok(());
        };
        let writes = matches!(other, LockOwner::Opener) && holder == Holder::Writes;
        let patience = if writes {
            WRITES_PATIENCE
        } else {
            USER_PATIENCE
        };
        if waited >= patience {
            return Err(other.refusal(file, path, holder));
        }
        std::thread::sleep(LOCK_TRY);
        waited += LOCK_TRY;
        if waited != SILENCE || !writes {
            continue;
        }
        if file.host().is_some_and(owner::is_alive) {
            // Somebody has the file open as a disk of another log.
            holder = Holder::User;
        } else {
            tracing::warn!(
                "{}: waiting for the writes that a killed process still has in flight",
                path.display()
            );
        }
    }
}

/// Who holds a lock that is in the way.
enum LockOwner {
    /// An opener that takes this program's lock.
    Opener,
    /// A program that takes QEMU's locks.
    Qemu(Conflict),
}

/// Tries to take the locks once; returns who is in the way.
fn try_lock(file: &dyn DataFile, access: Access) -> io::Result<Option<LockOwner>> {
    if access.newest().is_some() {
        return Ok(None);
    }
    if !file.try_lock(matches!(access, Access::Read | Access::LogRead))? {
        return Ok(Some(LockOwner::Opener));
    }
    match file.host() {
        Some(host) if matches!(access, Access::Write | Access::Read) => {
            let conflict = qemu::try_lock(host, access == Access::Write)?;
            Ok(conflict.map(LockOwner::Qemu))
        }
        _ => Ok(None),
    }
}

impl LockOwner {
    /// The error for an opener that has waited long enough.
    fn refusal(&self, file: &dyn DataFile, path: &Path, holder: Holder) -> Error {
        let name = path.display();
        let owner = match self {
            Self::Opener => file.host().and_then(owner::of),
            Self::Qemu(_) => None,
        };
        let why = match (self, holder, &owner) {
            (Self::Qemu(conflict), ..) => format!(
                "QEMU, qemu-nbd or another program with QEMU's locks has it open for {}; end that \
                 program first ('fuser -v {name}' names it), then try again",
                match conflict {
                    Conflict::Writes => "writing",
                    Conflict::Reads => "reading",
                }
            ),
            (Self::Opener, _, Some((pid, name))) => {
                format!("already open elsewhere, in process {pid} ({name}); end that process first")
            }
            (Self::Opener, Holder::User, None) => format!(
                "already open elsewhere; end the process that has it open first ('fuser -v {name}' \
                 names it)"
            ),
            (Self::Opener, Holder::Writes, None) => format!(
                "still locked after {} s: a killed process still has writes in flight, or a user \
                 of another log has it open; check the device, or close the other user, then try \
                 again",
                WRITES_PATIENCE.as_secs()
            ),
        };
        Error::new(ErrorKind::Locked, format!("{name}: {why}")).of_owner(owner.map(|(pid, _)| pid))
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;
    use std::thread;

    /// A waiter locks the file that is finally at the path.
    #[test]
    fn a_waiter_locks_the_file_now_at_the_path() {
        let dir = tempfile::tempdir().unwrap();
        let (path, newer) = (dir.path().join("file"), dir.path().join("newer"));
        std::fs::write(&path, "old").unwrap();
        std::fs::write(&newer, "new").unwrap();
        let open = || {
            open_store_file(&path, "open", OpenMode::Existing, Access::Log, |_| {
                Holder::Writes
            })
        };
        let first = open().unwrap();
        thread::scope(|scope| {
            let waiter = scope.spawn(open);
            // Whether it is waiting by now or comes later, it must get the newer file.
            thread::sleep(5 * LOCK_TRY);
            std::fs::rename(&newer, &path).unwrap();
            drop(first);
            let mut text = [0; 3];
            let file = waiter.join().unwrap().unwrap();
            file.read_exact_at(&mut text, 0).unwrap();
            assert_eq!(&text, b"new");
        });
    }
}
