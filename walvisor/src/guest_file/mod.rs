//! A file of a guest, out of its disk as of a point.
//!
//! ```text
//!   the disk as of the point, which is read
//!      │ volume.rs: the partition with ext4 or xfs
//!      │ served.rs: that as a file of this machine (FUSE), not copied; else a copy
//!      ├─▶ mount.rs: a loop device, and a mount that no directory shows   (root)
//!      └─▶ debugfs.rs: debugfs(8) of e2fsprogs, ext4 only                 (anybody)
//!              │ a path, which is resolved inside that file system
//!              ▼
//!   output.rs: a new file, which has its name once it is whole
//! ```
//! The file system's journal is replayed into a scratch file, so the disk itself is only read. All
//! that this makes is held by descriptors alone: the scratch file, both mounts, the loop device and
//! the new file are gone with the process, however it ends. (A new file on a file system that has
//! no files without a name is gone if the process ends by itself.)

mod debugfs;
mod loop_device;
mod mount;
mod output;
mod served;
mod volume;

use std::path::{Path, PathBuf};

use debugfs::Debugfs;
use mount::{LoopMount, MountError};
pub use output::NewFile;
pub use served::{OpenedDisk, ServedVolume};
use volume::FileSystem;
pub use volume::ReadDisk;

/// What is wanted.
#[derive(Clone, Debug)]
pub struct WantedFile {
    /// Its path in the guest's file system, from that file system's root.
    pub path: PathBuf,
    /// The file system is never mounted, but read with debugfs.
    pub no_mount: bool,
}

/// What was found, as the guest's file system has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FoundFile {
    /// Bytes.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// The number of its owner.
    pub uid: u32,
    /// The number of its group.
    pub gid: u32,
}

impl WantedFile {
    /// Copies the file from a volume of the guest's disk to `new`.
    ///
    /// # Errors
    /// One line: why the file system can't be read, or which part of the path is not there; or that
    /// it is no regular file.
    pub fn copy(&self, served: &ServedVolume, new: &Path) -> Result<FoundFile, String> {
        let (file, file_system) = (served.file(), served.volume.file_system);
        let xfs = file_system == FileSystem::Xfs;
        if self.no_mount && xfs {
            return Err("--no-mount: only ext4 can be read without a mount".to_owned());
        }
        if !self.no_mount {
            match LoopMount::new(file, file_system) {
                Ok(mounted) => return mounted.copy(&self.path, new),
                Err(MountError::Broken(why)) => return Err(why),
                Err(MountError::Refused(why)) if xfs => {
                    return Err(format!(
                        "{why}; xfs must be mounted, which needs root, loop devices and a kernel \
                         with xfs"
                    ));
                }
                Err(MountError::Refused(_)) => {}
            }
        }
        Debugfs::new(file)?.copy(&self.path, new)
    }
}

/// A path of the guest for people: quoted, and without characters that a terminal would obey.
fn shown(path: &Path) -> String {
    format!("{:?}", path.to_string_lossy())
}

/// The error for a path that is not there.
fn not_there(path: &Path, nearest: &Path, names: &[String]) -> String {
    const MOST: usize = 8;
    let mut has: Vec<_> = names.iter().map(|name| format!("{name:?}")).collect();
    has.sort();
    let more = if has.len() > MOST { " and more" } else { "" };
    has.truncate(MOST);
    let has = match has.join(", ") {
        none if none.is_empty() => none,
        names => format!(", with {names}{more}"),
    };
    let (path, nearest) = (shown(path), shown(nearest));
    format!("no {path} there; what is there is {nearest}{has}")
}

/// The error for what is no regular file.
fn not_a_file(path: &Path, what: &str) -> String {
    format!("{} is {what}: name a regular file", shown(path))
}
