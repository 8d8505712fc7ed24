//! Which log an image belongs to: the attribute `user.walvisor.log`, beside the image's mark.
//!
//! The mark decides which log accepts an image. This only lets a command that was given no log, or
//! the wrong one, name the right one before it makes a second log or gives up what the first one
//! holds. So a lost or outdated attribute does no harm, and failing to write one is no error.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::catalog::control::{ControlFile, read_unlocked, real_path};
use crate::catalog::identity::Identity;
use crate::catalog::options::default_log_dir;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{DiskEntry, Uuid};
use crate::medium::file::DataFile;
use crate::medium::filesystem::{OpenMode, files, parent};
use crate::medium::host;
use crate::medium::mark::{hex, parse_uuid};

/// The extended attribute: the log's UUID, a space, and the log's directory, relative to the
/// image's directory if it is below that.
const ATTRIBUTE: &str = "user.walvisor.log";

/// The log that an image names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LogLocation {
    uuid: Uuid,
    /// The log's directory.
    pub dir: PathBuf,
}

impl LogLocation {
    /// The log that `control` belongs to.
    pub(crate) fn of(control: &ControlFile) -> Self {
        Self {
            uuid: control.control.header.log,
            dir: parent(&control.path).to_owned(),
        }
    }

    /// Writes it to an image's attribute, unless it is there.
    pub(crate) fn write(&self, file: &dyn DataFile, image: &Path) {
        let Some(host) = file.attributes() else {
            return;
        };
        let (Ok(image), Ok(dir)) = (real_path(image), real_path(&self.dir)) else {
            return;
        };
        let dir = dir.strip_prefix(parent(&image)).unwrap_or(&dir);
        let mut text = hex(&self.uuid).into_bytes();
        text.push(b' ');
        text.extend(dir.as_os_str().as_bytes());
        if host::read_attribute(host, ATTRIBUTE).is_ok_and(|old| old.as_deref() == Some(&text[..]))
        {
            return;
        }
        if host::write_attribute(host, ATTRIBUTE, Some(&text)).is_err() {
            Self::remove(file);
        }
    }

    /// Removes the attribute.
    pub(crate) fn remove(file: &dyn DataFile) {
        if let Some(host) = file.attributes() {
            let _ = host::write_attribute(host, ATTRIBUTE, None);
        }
    }

    /// The log that an image names, if it does.
    pub(crate) fn read(file: &dyn DataFile, image: &Path) -> Option<Self> {
        let text = host::read_attribute(file.attributes()?, ATTRIBUTE).ok()??;
        let (uuid, dir) = (text.get(..32)?, text.get(33..)?);
        let uuid = parse_uuid(std::str::from_utf8(uuid).ok()?)?;
        let dir = parent(&real_path(image).ok()?).join(OsStr::from_bytes(dir));
        Some(Self { uuid, dir })
    }

    /// Whether the log in this directory is the one that the image names.
    fn is_at(&self, log_dir: &Path) -> bool {
        read_unlocked(log_dir).is_some_and(|control| control.control.header.log == self.uuid)
    }

    /// Whether the log is still where the image says, and has the image as its own.
    fn has(&self, identity: &Identity, image: &Path) -> bool {
        let (Some(control), Ok(path)) = (read_unlocked(&self.dir), real_path(image)) else {
            return false;
        };
        let own = |entry: &DiskEntry| {
            let at_path = entry.path(&control.home) == path;
            // Not a copy elsewhere, nor the image of a disk that has moved to another log.
            entry.is_image(identity, at_path) && (at_path || entry.is_file(&identity.inode, false))
        };
        control.control.header.log == self.uuid && control.control.disks.iter().any(own)
    }
}

/// The directory of the log that the image at `path` is on: the one that the image names, if that
/// log has this image as its own, and not one that it was copied from or has left; else
/// [`default_log_dir`]. Locks nothing.
pub fn log_dir_of(path: &Path) -> PathBuf {
    let default = default_log_dir(path);
    let named = || {
        let file = files().open(path, OpenMode::Read).ok()?;
        let named = LogLocation::read(file.as_ref(), path)?;
        let identity = Identity::of(file.as_ref(), path).ok()?;
        (!named.is_at(&default) && named.has(&identity, path)).then_some(named.dir)
    };
    named().unwrap_or(default)
}

/// Refuses to use the image at `path` with the log in `log_dir` if it names another log, which has
/// it. Locks nothing, so it answers at once about an image in use.
///
/// # Errors
/// [`ErrorKind::WrongLog`], which names the log.
pub(crate) fn refuse_other_log(path: &Path, log_dir: &Path) -> Result<()> {
    // Whoever opens the image reports why it can't be read.
    let Ok(file) = files().open(path, OpenMode::Read) else {
        return Ok(());
    };
    let Some(named) = LogLocation::read(file.as_ref(), path) else {
        return Ok(());
    };
    if named.is_at(log_dir) {
        return Ok(());
    }
    if !Identity::of(file.as_ref(), path).is_ok_and(|identity| named.has(&identity, path)) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::WrongLog,
        format!(
            "{0}: the disk is on the log in {1}, not in {2}; name that log ('log={1}' in a --disk, \
             '--log {1}' for a command), or take the disk out of it with: walvisor disk leave {0} \
             --log {1}",
            path.display(),
            named.dir.display(),
            log_dir.display(),
        ),
    ))
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;
    use crate::{DiskOptions, Store, StoreOptions, create_disk, inspect, leave_log, move_to_log};

    const MIB: u64 = 1 << 20;

    fn options() -> StoreOptions {
        StoreOptions {
            segment_size: MIB,
            ..StoreOptions::default()
        }
    }

    fn open(disk: &Path, log: &Path) -> Result<()> {
        Store::open(log, &[DiskOptions::new(disk)], &options())?.close()
    }

    /// The error of a command on a disk without its log names the log, and makes no second one.
    #[test]
    fn an_image_names_its_log_until_it_leaves() {
        let dir = tempfile::tempdir().unwrap();
        let (images, log) = (dir.path().join("images"), dir.path().join("shared"));
        std::fs::create_dir(&images).unwrap();
        let (disk, wrong) = (images.join("disk"), images.join("disk.wal"));
        create_disk(&disk, MIB, &log, &options()).unwrap();
        for opened in [false, true] {
            let refused = [
                open(&disk, &wrong).unwrap_err(),
                inspect(&disk, &wrong).unwrap_err(),
                leave_log(&disk, &wrong, &[]).unwrap_err(),
                crate::discard_log(&disk, &wrong).unwrap_err(),
            ];
            for error in refused {
                assert_eq!(error.kind(), ErrorKind::WrongLog, "{error}");
                let named = format!("the disk is on the log in {}", log.display());
                assert!(error.to_string().contains(&named), "{error}");
            }
            assert!(!wrong.exists(), "opened: {opened}");
            open(&disk, &log).unwrap();
        }
        leave_log(&disk, &log, &[]).unwrap();
        open(&disk, &wrong).unwrap();
        // The other way around.
        let error = inspect(&disk, &log).unwrap_err().to_string();
        assert!(error.contains("disk.wal"), "{error}");
        move_to_log(&disk, &wrong, &log, &options(), &[]).unwrap();
        assert_eq!(open(&disk, &wrong).unwrap_err().kind(), ErrorKind::WrongLog);
        open(&disk, &log).unwrap();
    }

    /// An attribute that names no log, or one that does not have this file, refuses nothing.
    #[test]
    fn a_stale_log_name_in_an_image_is_ignored() {
        let dir = tempfile::tempdir().unwrap();
        let (disk, log) = (dir.path().join("disk"), dir.path().join("log"));
        create_disk(&disk, MIB, &log, &options()).unwrap();
        // A copy with all attributes, while the disk is still there.
        let copy = dir.path().join("copy");
        let copied = std::process::Command::new("cp")
            .arg("-a")
            .args([&disk, &copy])
            .status();
        assert!(copied.unwrap().success());
        open(&copy, &dir.path().join("copy.wal")).unwrap();
        // The log and the image move together, so the name stays right.
        let moved = dir.path().join("moved");
        std::fs::create_dir(&moved).unwrap();
        let (disk_there, log_there) = (moved.join("disk"), moved.join("log"));
        std::fs::rename(&disk, &disk_there).unwrap();
        std::fs::rename(&log, &log_there).unwrap();
        let error = open(&disk_there, &moved.join("other")).unwrap_err();
        assert!(error.to_string().contains("moved/log"), "{error}");
        open(&disk_there, &log_there).unwrap();
        // A closed image is complete, so it needs no log that is gone.
        std::fs::remove_dir_all(&log_there).unwrap();
        open(&disk_there, &moved.join("other")).unwrap();
    }
}
