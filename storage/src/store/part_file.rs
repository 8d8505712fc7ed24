//! A file that is written under a temporary name, and renamed once it is complete and durable.

use std::fs::{File, Permissions};
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::XattrFlags;
use rustix::io::Errno;

use crate::error::{Error, ErrorKind, Result, invalid};
use crate::medium::copying::NamedFile;
use crate::medium::fetch_map::FetchMap;
use crate::medium::file::{DataFile, ReadFile, size_error};
use crate::medium::filesystem::{OpenMode, files, is_simulated};
use crate::medium::lock::{Access, Holder};
use crate::medium::{filesystem, lock};

/// Whether anything is at the path, including a dangling link.
pub(crate) fn exists(path: &Path) -> Result<bool> {
    let exists = files().exists(path);
    exists.map_err(|error| Error::io("read its metadata", path, error))
}

/// Refuses a path that exists.
pub(crate) fn refuse_existing(path: &Path, remedy: &str) -> Result<()> {
    if exists(path)? {
        Err(part_exists_error(path, remedy))
    } else {
        Ok(())
    }
}

fn part_exists_error(path: &Path, remedy: &str) -> Error {
    Error::new(
        ErrorKind::AlreadyExists,
        format!("{}: exists already; {remedy}", path.display()),
    )
}

/// Refuses an image that lacks chunks: these would be fetched over it.
fn refuse_partial(target: &Path) -> Result<()> {
    if is_simulated() {
        return Ok(());
    }
    FetchMap::refuse(target)
}

/// The extended attribute of a part file that says what it is a copy of, and up to which byte
/// offset it is durable.
const NOTE: &str = "user.walvisor.part";

/// A file being made under a temporary name. Removed if it is dropped before it is published.
pub(crate) struct PartFile {
    file: Box<dyn DataFile>,
    path: PathBuf,
    target: PathBuf,
    /// Describes the source, for resuming.
    origin: String,
    begun: u64,
    published: bool,
}

impl PartFile {
    /// Creates the file, or reuses what an earlier attempt left, with `size` zero bytes and
    /// permissions `mode`.
    pub(crate) fn create(target: &Path, size: u64, mode: u32) -> Result<Self> {
        refuse_partial(target)?;
        Self::create_partial(target, size, mode)
    }

    /// As [`create`](Self::create), for an image that has a fetch map or will have one.
    pub(crate) fn create_partial(target: &Path, size: u64, mode: u32) -> Result<Self> {
        let part = Self::open(target, mode)?;
        part.clear(size)?;
        Ok(part)
    }

    /// As [`create`](Self::create), but if an earlier attempt at the same copy [noted](Self::note)
    /// how far it had come, continues from there, see [`begun`](Self::begun). `origin` describes
    /// the source.
    pub(crate) fn resume(target: &Path, size: u64, mode: u32, origin: String) -> Result<Self> {
        refuse_partial(target)?;
        let mut part = Self::open(target, mode)?;
        part.origin = origin;
        let same_size = part.file.len().is_ok_and(|len| len == size);
        let noted = part.noted_offset();
        let Some(begun) = noted.filter(|begun| same_size && *begun <= size) else {
            part.clear(size)?;
            return Ok(part);
        };
        // Anything after it may be incomplete.
        let cut = part.file.set_len(begun);
        let cut = cut.and_then(|()| part.file.set_len(size));
        cut.map_err(|error| size_error(&part.target, size, error))?;
        part.begun = begun;
        Ok(part)
    }

    /// Up to which byte offset an earlier attempt completed the file.
    pub(crate) fn begun(&self) -> u64 {
        self.begun
    }

    /// The temporary name of a file that will have this one, with links followed.
    pub(crate) fn path_for(target: &Path) -> PathBuf {
        let target = files().real_path(target).unwrap_or(target.to_path_buf());
        let mut path = target.into_os_string();
        path.push(".walvisor-part");
        PathBuf::from(path)
    }

    /// Opens the file, or makes it.
    fn open(target: &Path, mode: u32) -> Result<Self> {
        // If the target is a link, replace the file that it points to.
        let target = files().real_path(target).unwrap_or(target.to_path_buf());
        let path = Self::path_for(&target);
        // Reuse a file left by an interrupted run. A running process would have it locked.
        let how = OpenMode::Kept { mode };
        let file = lock::open_store_file(&path, "write", how, Access::Write, |_| Holder::User);
        let file = file.map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                let parent = filesystem::parent(&target).display();
                let missing = Error::io("write", &target, Errno::NOENT.into());
                missing.if_missing(|| format!("make its directory: mkdir -p {parent}"))
            }
            _ => error,
        })?;
        Ok(Self {
            file,
            path,
            target,
            origin: String::new(),
            begun: 0,
            published: false,
        })
    }

    /// The offset noted for a copy of the same source.
    fn noted_offset(&self) -> Option<u64> {
        let mut text = [0; 256];
        let len = rustix::fs::fgetxattr(self.file.host()?, NOTE, &mut text[..]).ok()?;
        let (noted, offset) = std::str::from_utf8(&text[..len]).ok()?.rsplit_once(' ')?;
        (noted == self.origin)
            .then(|| offset.parse().ok())
            .flatten()
    }

    /// Notes that the file is complete up to an offset, durably. Returns `false` if its file system
    /// can't store that; then a killed copy starts over.
    ///
    /// # Errors
    /// If bytes of the file are not durable. The kernel reports that only once, so a later sync of
    /// the file can't be trusted.
    pub(crate) fn note(&self, offset: u64) -> Result<bool> {
        let Some(file) = self.file.host() else {
            return Ok(false);
        };
        let synced = self.file.sync_data();
        synced.map_err(|error| Error::io("write", &self.target, error))?;
        let note = format!("{} {offset}", self.origin);
        Ok(rustix::fs::fsetxattr(file, NOTE, note.as_bytes(), XattrFlags::empty()).is_ok())
    }

    /// Takes the note away.
    pub(crate) fn forget_note(&self) {
        if let Some(file) = self.file.host() {
            // There may be none.
            let _ = rustix::fs::fremovexattr(file, NOTE);
        }
    }

    /// Makes the file `size` zero bytes.
    fn clear(&self, size: u64) -> Result<()> {
        self.forget_note();
        if let Some(file) = self.file.host() {
            let unmarked = FetchMap::unmark(file);
            unmarked.map_err(|error| Error::io("unmark", &self.path, error))?;
        }
        let cleared = self.file.set_len(0);
        let cleared = cleared.and_then(|()| self.file.set_len(size));
        cleared.map_err(|error| size_error(&self.target, size, error))
    }

    /// Makes the file, of `size` bytes, share the blocks of `from`, which is at least as long (a
    /// reflink). Returns `false` if the file system can't; the file is then still zeroes.
    pub(crate) fn share(&self, from: &dyn ReadFile, size: u64) -> Result<bool> {
        let (Some(from), Some(to)) = (from.host(), self.file.host()) else {
            return Ok(false);
        };
        if rustix::fs::ioctl_ficlone(to, from).is_err() {
            // It may have failed half-way.
            return self.clear(size).map(|()| false);
        }
        let cut = self.file.set_len(size);
        cut.map_err(|error| size_error(&self.target, size, error))?;
        Ok(true)
    }

    /// Gives the file the mode of the one it will replace, and its owner if this process is allowed
    /// to.
    pub(crate) fn copy_mode_and_owner(&self, replaced: &File) -> Result<()> {
        let Some(file) = self.file.host() else {
            return Ok(());
        };
        let resemble = || {
            let old = replaced.metadata()?;
            let new = file.metadata()?;
            let mut mode = old.mode() & 0o777;
            if (old.uid(), old.gid()) != (new.uid(), new.gid())
                && fchown(file, Some(old.uid()), Some(old.gid())).is_err()
            {
                // The group differs, and its members must not gain access.
                mode &= 0o700;
            }
            file.set_permissions(Permissions::from_mode(mode))
        };
        resemble().map_err(|error| Error::io("set its mode", &self.path, error))
    }

    pub(crate) fn write(&self, bytes: &[u8], offset: u64) -> Result<()> {
        self.file
            .write_all_at(bytes, offset)
            .map_err(|error| Error::io("write", &self.path, error))
    }

    /// Makes a range read as zeroes.
    pub(crate) fn zero(&self, range: Range<u64>) -> Result<()> {
        let (offset, len) = (range.start, range.end - range.start);
        let zeroed = self.file.zero_range(offset, len, true);
        zeroed.map_err(|error| Error::io("write", &self.path, error))
    }

    /// The file under its temporary name.
    pub(crate) fn file(&self) -> &dyn DataFile {
        self.file.as_ref()
    }

    /// The same, for another process to fill.
    ///
    /// # Errors
    /// If it is on a simulated file system.
    pub(crate) fn host_file(&self) -> Result<&File> {
        self.file.host().ok_or_else(|| {
            let path = self.path.display();
            invalid(format!("{path}: not a file on this machine"))
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The file, to be copied to.
    pub(crate) fn named(&self) -> NamedFile<'_> {
        NamedFile {
            file: self.file(),
            path: &self.path,
        }
    }

    /// Makes what was written durable.
    pub(crate) fn sync(&self) -> Result<()> {
        let synced = self.file.sync_all();
        synced.map_err(|error| Error::io("write", &self.target, error))
    }

    /// Makes the file durable and gives it its final name.
    pub(crate) fn publish(mut self, replace: bool) -> Result<()> {
        self.sync()?;
        let renamed = if replace {
            files().rename(&self.path, &self.target)
        } else {
            files().rename_new(&self.path, &self.target)
        };
        renamed.map_err(|error| match error.kind() {
            std::io::ErrorKind::AlreadyExists => {
                part_exists_error(&self.target, "name another file")
            }
            _ => Error::io("write", &self.target, error),
        })?;
        self.published = true;
        // The new file is still locked, so nobody has it open yet and it can be removed.
        filesystem::sync_dir(filesystem::parent(&self.target)).inspect_err(|_| {
            if !replace {
                let _ = files().remove(&self.target);
            }
        })
    }
}

impl Drop for PartFile {
    fn drop(&mut self) {
        if !self.published {
            // Best effort: the next attempt reuses what is left.
            let _ = files().remove(&self.path);
        }
    }
}
