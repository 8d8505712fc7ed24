//! A file system that this machine's kernel mounts, read-only and where no directory shows it.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags, RawDir, ResolveFlags, Stat, fstat, openat2, readlinkat};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen,
};

use super::loop_device::LoopDevice;
use super::output::NewFile;
use super::volume::FileSystem;
use super::{FoundFile, not_a_file, not_there, shown};

/// How often an open is tried.
const TRIES: usize = 1000;
/// Most names of a directory that are looked at.
const MOST_NAMES: usize = 1000;

/// Why a file system is not mounted.
pub(super) enum MountError {
    /// This process may not, or this machine can't.
    Refused(String),
    /// The kernel can't make sense of the file system.
    Broken(String),
}

/// A mounted file system. It is unmounted, and its loop device is free, once this is dropped.
pub(super) struct LoopMount {
    root: OwnedFd,
}

impl LoopMount {
    /// Mounts the file system in a file. The kernel replays its journal, and so writes to the file.
    pub(super) fn new(file: &File, file_system: FileSystem) -> Result<Self, MountError> {
        let device = LoopDevice::new(file);
        let device =
            device.map_err(|error| MountError::Refused(format!("no loop device: {error}")))?;
        let name = file_system.name();
        let context = fsopen(name, FsOpenFlags::FSOPEN_CLOEXEC);
        let context =
            context.map_err(|error| MountError::Refused(format!("no mount of {name}: {error}")))?;
        let mounted = || {
            fsconfig_set_string(&context, "source", &device.path)?;
            fsconfig_set_flag(&context, "ro")?;
            if file_system == FileSystem::Xfs {
                // The same file system may be mounted twice, as of two points for instance.
                fsconfig_set_flag(&context, "nouuid")?;
            }
            fsconfig_create(&context)?;
            let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY
                | MountAttrFlags::MOUNT_ATTR_NOSUID
                | MountAttrFlags::MOUNT_ATTR_NODEV
                | MountAttrFlags::MOUNT_ATTR_NOEXEC;
            fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
        };
        match mounted() {
            Ok(root) => Ok(Self { root }),
            Err(Errno::PERM | Errno::ACCESS) => Err(MountError::Refused(format!(
                "no mount of {name}: not allowed"
            ))),
            Err(error) => Err(MountError::Broken(format!(
                "the kernel can't mount its {name}: {error}{}; 'disk restore' without --file makes \
                 an image, which can be repaired",
                kernel_messages(context)
            ))),
        }
    }

    /// Copies a file.
    pub(super) fn copy(&self, path: &Path, new: &Path) -> Result<FoundFile, String> {
        let found = self.open(path, OFlags::PATH);
        let found = found.map_err(|error| self.not_found(path, error))?;
        let stat = fstat(&found).map_err(|error| format!("{}: {error}", shown(path)))?;
        let what = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => None,
            FileType::Directory => Some("a directory"),
            FileType::Fifo => Some("a FIFO"),
            FileType::Socket => Some("a socket"),
            _ => Some("a device"),
        };
        if let Some(what) = what {
            return Err(not_a_file(path, what));
        }
        let failed = |error: io::Error| format!("{}: {error}", shown(path));
        // The mount is read-only, so this is the same file.
        let file = self.open(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY);
        let file = File::from(file.map_err(|error| failed(error.into()))?);
        let found = found_file(&stat);
        let made = NewFile::create(new, found.mode)?;
        made.fill(&file, found.size, failed)?;
        made.publish()?;
        Ok(found)
    }

    /// Opens a path, whose links stay inside the file system.
    fn open(&self, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let flags = flags | OFlags::CLOEXEC;
        let open = || openat2(&self.root, path, flags, Mode::empty(), resolve);
        // With ".." it fails while anybody on this machine renames something.
        let mut opened = open();
        for _ in 0..TRIES {
            if opened.as_ref().err() != Some(&Errno::AGAIN) {
                break;
            }
            opened = open();
        }
        opened
    }

    /// The error for a path that could not be opened.
    fn not_found(&self, path: &Path, error: Errno) -> String {
        if !matches!(error, Errno::NOENT | Errno::NOTDIR) {
            return format!("{}: {error}", shown(path));
        }
        if let Ok(link) = self.open(path, OFlags::PATH | OFlags::NOFOLLOW)
            && let Ok(target) = readlinkat(&link, "", Vec::new())
        {
            let target = Path::new(OsStr::from_bytes(target.as_bytes()));
            let (path, target) = (shown(path), shown(target));
            return format!("{path} is a symbolic link to {target}, which is not there");
        }
        let whole: PathBuf = [Component::RootDir]
            .into_iter()
            .chain(path.components())
            .collect();
        for nearest in whole.ancestors().skip(1) {
            if let Ok(directory) = self.open(nearest, OFlags::RDONLY | OFlags::DIRECTORY) {
                return not_there(path, nearest, &names(directory));
            }
        }
        format!("{}: {error}", shown(path))
    }
}

fn found_file(stat: &Stat) -> FoundFile {
    FoundFile {
        size: stat.st_size as u64,
        mode: stat.st_mode & 0o777,
        uid: stat.st_uid,
        gid: stat.st_gid,
    }
}

/// The names in a directory, or many of them.
fn names(directory: impl AsFd) -> Vec<String> {
    let mut buffer = Vec::with_capacity(64 << 10);
    let (mut entries, mut names) = (
        RawDir::new(directory, buffer.spare_capacity_mut()),
        Vec::new(),
    );
    while names.len() < MOST_NAMES
        && let Some(Ok(entry)) = entries.next()
    {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name != "." && name != ".." {
            names.push(name);
        }
    }
    names
}

/// What the kernel says of a failed mount.
fn kernel_messages(context: OwnedFd) -> String {
    let (mut context, mut text) = (File::from(context), String::new());
    let mut message = [0; 256];
    // One message each, such as "e xfs: ...".
    while let Ok(len @ 1..) = context.read(&mut message) {
        let line = String::from_utf8_lossy(&message[..len]);
        let line = line.split_once(' ').map_or(&*line, |(_, line)| line);
        text += &format!(" ({})", line.trim_end().escape_debug());
    }
    text
}
