//! The file system as the store uses it: names, and the files they lead to. A simulated one can
//! stand in for the host's.

use std::ffi::OsString;
use std::fmt::Debug;
use std::fs::{DirBuilder, File, OpenOptions, Permissions};
use std::io;
use std::ops::Deref;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, OFlags, RenameFlags, renameat_with};
use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::medium::file::DataFile;
use crate::medium::host::open_direct;
use crate::mutant::{Mutant, planted};
use crate::sync::Arc;

/// How a file is opened: for reading and writing, unless the variant says otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpenMode {
    /// An existing file, bypassing the page cache if the file system can do sector-sized I/O that
    /// way.
    Direct,
    /// An existing file.
    Existing,
    /// An existing file, for reading only.
    Read,
    /// As [`Read`](Self::Read), but bypassing the page cache as [`Direct`](Self::Direct) does. A
    /// file that another process writes to like that must be read like that: a page that somebody
    /// reads can't be dropped when the write ends, which the kernel reports as a failed write.
    ReadDirect,
    /// An existing file, or a new one with permissions `mode` (minus the umask). Symbolic links are
    /// not followed.
    Kept { mode: u32 },
    /// An existing file, emptied, or a new one for its owner only. Symbolic links are not followed.
    Emptied,
}

/// What a path leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PathKind {
    File,
    BlockDevice,
    Other,
}

/// The store's operations on a file system. Names are durable once their directory is synced.
pub(crate) trait FileSystem: Send + Sync + Debug {
    /// Opens a file.
    fn open(&self, path: &Path, how: OpenMode) -> io::Result<Box<dyn DataFile>>;
    /// Makes a directory, for its owner only.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Renames a file in the same directory, replacing whatever had that name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Renames a file; fails if the name is taken.
    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file's name.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// The names in a directory, in any order.
    fn names(&self, dir: &Path) -> io::Result<Vec<OsString>>;
    /// Makes the names in a directory durable.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;
    /// What the path leads to, links followed.
    fn kind(&self, path: &Path) -> io::Result<PathKind>;
    /// Whether anything is at the path, a dangling symbolic link included.
    fn exists(&self, path: &Path) -> io::Result<bool>;
    /// The path without links.
    fn real_path(&self, path: &Path) -> io::Result<PathBuf>;
}

/// The mode of a file that only its owner may read and write.
pub(crate) const OWNER: u32 = 0o600;

/// Opens a file, creating it if necessary. An existing file, left by an earlier attempt, loses
/// permissions that are not in `mode`.
fn make(path: &Path, options: &mut OpenOptions, mode: u32) -> io::Result<File> {
    let no_link = OFlags::NOFOLLOW.bits() as i32;
    let made = options.create(true).mode(mode).custom_flags(no_link);
    let file = made
        .open(path)
        .map_err(|error| match error.raw_os_error() {
            Some(libc::ELOOP) => {
                io::Error::other("a symbolic link is in the way of the new file; remove it")
            }
            _ => error,
        })?;
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(io::Error::other(
            "something other than a regular file is in the way of the new file; remove it",
        ));
    }
    let has = found.permissions().mode() & 0o7777;
    if has & !mode != 0 {
        file.set_permissions(Permissions::from_mode(has & mode))?;
    }
    Ok(file)
}

/// The file system of the host.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HostFiles;

impl FileSystem for HostFiles {
    fn open(&self, path: &Path, how: OpenMode) -> io::Result<Box<dyn DataFile>> {
        let mut options = OpenOptions::new();
        options.read(true).write(how != OpenMode::Read);
        // The open of a FIFO waits for another process, and a device's may do anything.
        let made = matches!(how, OpenMode::Kept { .. } | OpenMode::Emptied);
        if !made && self.kind(path)? == PathKind::Other {
            let why = "neither a regular file nor a block device";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        let file = match how {
            OpenMode::Direct => open_direct(path, true)?,
            OpenMode::ReadDirect => open_direct(path, false)?,
            OpenMode::Existing | OpenMode::Read => options.open(path)?,
            OpenMode::Kept { mode } => make(path, options.truncate(false), mode)?,
            OpenMode::Emptied => make(path, options.truncate(true), OWNER)?,
        };
        Ok(Box::new(file))
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        DirBuilder::new().mode(OWNER | 0o100).create(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()> {
        match renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE) {
            // This file system has no `RENAME_NOREPLACE`.
            Err(Errno::INVAL | Errno::NOSYS) => {
                if self.exists(to)? {
                    Err(io::ErrorKind::AlreadyExists.into())
                } else {
                    self.rename(from, to)
                }
            }
            renamed => Ok(renamed?),
        }
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_file(path)
    }

    fn names(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        std::fs::read_dir(dir)?
            .map(|entry| Ok(entry?.file_name()))
            .collect()
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        File::open(dir)?.sync_all()
    }

    fn kind(&self, path: &Path) -> io::Result<PathKind> {
        let kind = std::fs::metadata(path)?.file_type();
        Ok(if kind.is_file() {
            PathKind::File
        } else if kind.is_block_device() {
            PathKind::BlockDevice
        } else {
            PathKind::Other
        })
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        match path.symlink_metadata() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
            found => found.map(|_| true),
        }
    }

    fn real_path(&self, path: &Path) -> io::Result<PathBuf> {
        path.canonicalize()
    }
}

/// The file system that disks and logs are on.
#[cfg(not(test))]
#[inline]
pub(crate) fn files() -> impl Deref<Target = dyn FileSystem> {
    let host: &'static dyn FileSystem = &HostFiles;
    host
}

/// The file system that disks and logs are on: the host's, unless this thread has a simulated one.
#[cfg(test)]
pub(crate) fn files() -> impl Deref<Target = dyn FileSystem> {
    let simulated = SIMULATED.with_borrow(Clone::clone);
    simulated.unwrap_or_else(|| crate::sync::Arc::new(HostFiles))
}

/// As [`files`], but shared.
pub(crate) fn shared_files() -> Arc<dyn FileSystem> {
    #[cfg(test)]
    if let Some(simulated) = SIMULATED.with_borrow(Clone::clone) {
        return simulated;
    }
    Arc::new(HostFiles)
}

/// Whether disks and logs are on a simulated file system. Everything that touches it then runs in
/// the calling thread, so that one seed gives one run.
pub(crate) fn is_simulated() -> bool {
    #[cfg(test)]
    return SIMULATED.with_borrow(Option::is_some);
    #[cfg(not(test))]
    false
}

#[cfg(test)]
thread_local! {
    /// The simulated file system of this thread.
    pub(crate) static SIMULATED: std::cell::RefCell<Option<crate::sync::Arc<dyn FileSystem>>> =
        const { std::cell::RefCell::new(None) };
}

/// Removes a file that nobody reads any more. If that fails, the next open of the log tries again.
pub(crate) fn remove_leftover(files: &dyn FileSystem, path: &Path) {
    match files.remove(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!("{}: can't be removed: {error}", path.display());
        }
        _ => {}
    }
}

/// Makes a directory's entries durable.
pub(crate) fn sync_dir(path: &Path) -> Result<()> {
    let synced = files().sync_dir(path);
    synced.map_err(|error| Error::io("sync the directory", path, error))
}

/// Makes an existing name durable. The process that made it may have been killed first, and if the
/// name were lost, so would everything acknowledged from now on.
pub(crate) fn settle_name(path: &Path) -> Result<()> {
    if planted(Mutant::OpenTrustsNames) {
        return Ok(());
    }
    let dir = parent(path);
    match files().sync_dir(dir) {
        // A process that may not open the directory leaves this to others, or did it before it
        // dropped privileges, see `Store::make_log`.
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
