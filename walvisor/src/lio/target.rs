//! The target's directory in configfs, and the steps that change it.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::opener::Opener;

/// Mount point of configfs on every distribution.
pub(super) const CONFIGFS: &str = "/sys/kernel/config";

/// Why the target could not be changed. Its text is one line.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The kernel refuses a step.
    #[error("cannot {step} {}: {source}", path.display())]
    Step {
        /// The step.
        step: &'static str,
        /// The file or directory that it was for.
        path: PathBuf,
        /// The kernel's reason.
        source: io::Error,
    },
    /// A part of the kernel is missing.
    #[error(
        "{what}: as root run '{command}' (the module is in Debian's linux-image packages, in \
         Ubuntu's linux-modules-extra-$(uname -r), in Fedora's kernel-modules)"
    )]
    Missing {
        /// The missing part.
        what: String,
        /// The command that loads it.
        command: &'static str,
    },
    /// Another disk, process or export is in the way.
    #[error("{0}")]
    Taken(String),
    /// The ring is invalid.
    #[error("{0}")]
    Ring(#[from] walvisor_devices::tcmu::RingError),
}

pub(super) type Result<T> = std::result::Result<T, TargetError>;

/// Adds the step that failed to an error.
pub(super) trait StepContext<T> {
    fn during(self, step: &'static str, path: &Path) -> Result<T>;
}

impl<T> StepContext<T> for io::Result<T> {
    fn during(self, step: &'static str, path: &Path) -> Result<T> {
        self.map_err(|source| TargetError::Step {
            step,
            path: path.to_owned(),
            source,
        })
    }
}

/// The kernel's target.
#[derive(Clone, Debug)]
pub struct LioTarget {
    pub(super) configfs: PathBuf,
    pub(super) uio: PathBuf,
    /// Opens UIO devices; `None`: this process does.
    pub(super) opener: Option<Arc<Opener>>,
}

impl LioTarget {
    /// Finds the target.
    ///
    /// # Errors
    /// If configfs is not mounted, or there is no target in it.
    pub fn open() -> Result<Self> {
        let target = Self {
            configfs: CONFIGFS.into(),
            uio: "/sys/class/uio".into(),
            opener: None,
        };
        target.check()?;
        Ok(target)
    }

    pub(super) fn check(&self) -> Result<()> {
        let missing = |what: &str, command| {
            let what = what.to_owned();
            Err(TargetError::Missing { what, command })
        };
        if self.root().is_dir() {
            return Ok(());
        }
        if !self.configfs.is_dir() {
            return missing(
                "this kernel has no configfs, so it has no SCSI target",
                "modprobe configfs && mount -t configfs configfs /sys/kernel/config && modprobe \
                 target_core_user",
            );
        }
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let mounted = |line: &str| line.split(' ').nth(1).map(Path::new) == Some(&*self.configfs);
        if !mounts.lines().any(mounted) {
            return missing(
                "configfs is not mounted at /sys/kernel/config, so the SCSI target cannot be set \
                 up",
                "mount -t configfs configfs /sys/kernel/config && modprobe target_core_user",
            );
        }
        missing(
            "the kernel's SCSI target is not loaded (no /sys/kernel/config/target)",
            "modprobe target_core_user",
        )
    }

    /// Starts a child process that opens the devices of back stores from now on, so that this
    /// process may give up the right to. Call it while the process has one thread.
    ///
    /// # Errors
    /// If the system refuses a socket or a process.
    pub fn hand_over(&mut self) -> Result<()> {
        let opener =
            Opener::start(&self.uio).during("let a process open the devices of", &self.uio)?;
        self.opener = Some(Arc::new(opener));
        Ok(())
    }

    /// The directories where disks of the fabrics that exist now are made and removed.
    pub fn disk_parents(&self) -> Vec<PathBuf> {
        let all = [
            self.core(),
            self.root().join("loopback"),
            self.root().join("vhost"),
        ];
        all.into_iter().filter(|path| path.is_dir()).collect()
    }

    /// The directory with a link for each UIO device.
    pub fn devices(&self) -> &Path {
        &self.uio
    }

    /// Its directory in configfs.
    pub fn root(&self) -> PathBuf {
        self.configfs.join("target")
    }

    /// The directory of the back stores.
    pub(super) fn core(&self) -> PathBuf {
        self.root().join("core")
    }
}

/// Writes an attribute.
pub(super) fn set(path: &Path, value: &str) -> Result<()> {
    let file = OpenOptions::new().write(true).open(path);
    file.and_then(|mut file| file.write_all(value.as_bytes()))
        .during("set", path)
}

/// Reads an attribute. One that cannot be read counts as empty.
pub(super) fn get(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.trim_end().to_owned()
}

/// The directories in `path`, sorted. None if `path` cannot be read.
pub(super) fn directories(path: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let directory = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
    let mut found: Vec<_> = entries
        .filter(directory)
        .map(|entry| entry.path())
        .collect();
    found.sort();
    found
}

pub(super) fn make_directory(path: &Path) -> Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made.during("make", path),
    }
}

/// Removes a directory of configfs that has only entries made by the kernel.
pub(super) fn remove_directory(path: &Path) -> Result<()> {
    match fs::remove_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.during("remove", path),
    }
}

/// The last part of a path.
pub(super) fn name_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}
