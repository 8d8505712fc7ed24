//! The file that is made.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, OFlags, SeekFrom, linkat, seek};
use rustix::io::Errno;
use tempfile::NamedTempFile;

/// Bytes that are copied at a time.
const PIECE: usize = 1 << 20;

/// A new file, which has its name once it is whole and durable.
pub struct NewFile {
    path: PathBuf,
    file: TemporaryFile,
    /// The permission bits that it gets.
    mode: u32,
}

enum TemporaryFile {
    /// It has no name, and goes with the process.
    Unnamed(File),
    /// For a file system that has no such files.
    Named(NamedTempFile),
}

impl NewFile {
    /// Makes the file that will be at `path`, with these permission bits as far as the umask allows
    /// them.
    ///
    /// # Errors
    /// One line: there is something at `path`, or its directory can't have a new file.
    pub fn create(path: &Path, mode: u32) -> Result<Self, String> {
        Self::refuse_existing(path)?;
        let directory = Self::directory(path);
        let mut options = File::options();
        options.read(true).write(true).mode(mode);
        let unnamed = options
            .custom_flags(OFlags::TMPFILE.bits() as i32)
            .open(directory);
        let file = match unnamed {
            Ok(file) => Ok(TemporaryFile::Unnamed(file)),
            Err(error) if error.kind() == ErrorKind::NotFound => Err(error),
            Err(_) => tempfile::Builder::new()
                .prefix(".walvisor-")
                .permissions(PermissionsExt::from_mode(mode))
                .tempfile_in(directory)
                .map(TemporaryFile::Named),
        };
        let failed = |error| {
            let (path, directory) = (path.display(), directory.display());
            format!("{path}: can't make a file in {directory}: {error}")
        };
        let file = file.map_err(failed)?;
        let mut new = Self {
            path: path.to_owned(),
            file,
            mode: 0,
        };
        // While it is filled, its owner may write it, by name too.
        let allowed = new.file().metadata().map_err(failed)?;
        new.mode = allowed.permissions().mode();
        new.set_mode(0o600).map_err(failed)?;
        Ok(new)
    }

    /// Refuses a path at which there is something.
    ///
    /// # Errors
    /// One line.
    pub fn refuse_existing(path: &Path) -> Result<(), String> {
        match path.symlink_metadata() {
            Ok(found) if found.is_dir() => {
                Err(format!("{}: a directory: name a new file", path.display()))
            }
            Ok(_) => Err(exists(path)),
            Err(_) => Ok(()),
        }
    }

    fn directory(path: &Path) -> &Path {
        let parent = path
            .parent()
            .filter(|parent| !parent.as_os_str().is_empty());
        parent.unwrap_or(Path::new("."))
    }

    /// The file, for whoever fills it.
    pub(super) fn file(&self) -> &File {
        match &self.file {
            TemporaryFile::Unnamed(file) => file,
            TemporaryFile::Named(file) => file.as_file(),
        }
    }

    fn set_mode(&self, mode: u32) -> io::Result<()> {
        self.file().set_permissions(PermissionsExt::from_mode(mode))
    }

    /// Copies a file of `size` bytes, without its holes. `read_failed` names it in an error.
    pub(super) fn fill(
        &self,
        from: &File,
        size: u64,
        read_failed: impl Fn(io::Error) -> String,
    ) -> Result<(), String> {
        let to = self.file();
        to.set_len(size).map_err(|error| self.failed(error))?;
        let mut piece = vec![0; PIECE];
        let mut at = 0;
        while at < size {
            let data = match seek(from, SeekFrom::Data(at)) {
                Ok(data) => data,
                // Only a hole follows.
                Err(Errno::NXIO) => break,
                Err(error) => return Err(read_failed(error.into())),
            };
            let hole = seek(from, SeekFrom::Hole(data));
            let end = hole.map_err(|error| read_failed(error.into()))?.min(size);
            at = data;
            while at < end {
                let piece = &mut piece[..(end - at).min(PIECE as u64) as usize];
                from.read_exact_at(piece, at).map_err(&read_failed)?;
                let written = to.write_all_at(piece, at);
                written.map_err(|error| self.failed(error))?;
                at += piece.len() as u64;
            }
        }
        Ok(())
    }

    /// Makes the file durable and gives it its name.
    pub(super) fn publish(self) -> Result<(), String> {
        let ready = self
            .set_mode(self.mode)
            .and_then(|()| self.file().sync_all());
        ready.map_err(|error| self.failed(error))?;
        let path = self.path;
        let linked = match self.file {
            TemporaryFile::Unnamed(file) => {
                let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
                let follow = AtFlags::SYMLINK_FOLLOW;
                linkat(CWD, unnamed, CWD, &path, follow).map_err(io::Error::from)
            }
            TemporaryFile::Named(file) => {
                let kept = file.persist_noclobber(&path);
                kept.map(drop).map_err(|error| error.error)
            }
        };
        match linked {
            Ok(()) => {
                let directory = File::open(Self::directory(&path));
                let synced = directory.and_then(|directory| directory.sync_all());
                synced.map_err(|error| format!("{}: {error}", path.display()))
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Err(exists(&path)),
            Err(error) => Err(format!("{}: {error}", path.display())),
        }
    }

    fn failed(&self, error: io::Error) -> String {
        format!("{}: can't write: {error}", self.path.display())
    }
}

fn exists(path: &Path) -> String {
    format!("{}: exists already: name a new file", path.display())
}
