//! The kernel's SCSI target (LIO) as configfs shows it: back stores of target_core_user, and the fabrics that export them.
//!
//! ```text
//!   /sys/kernel/config/target/
//!     core/user_N/NAME/                                    Backstore: control, enable, attrib/, action/   backstore.rs
//!     loopback|vhost/naa.…/tpgt_1/lun/lun_0/NAME ─▶ there  Export: who sees it                            export.rs
//!   /sys/class/uio/uioM/name = tcm-user/N/NAME/walvisor/…  Uio: the way to its ring                       uio.rs
//!   netlink, family TCM-USER, group config                 Events: what an administrator changes          events.rs
//! ```
//! What is made here is made in an order in which each step can be taken back, and is: nothing half-built stays. Of the
//! back stores only those are touched whose configuration says that they are walvisor's.

mod backstore;
mod events;
mod export;
mod refusal;
mod standing;
mod uio;

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

pub use backstore::{Backstore, Wanted};
pub use events::{Change, Events};
pub use export::Export;
pub use standing::Standing;
pub use uio::Uio;

/// Where configfs is mounted, on every distribution.
const CONFIGFS: &str = "/sys/kernel/config";

/// What cannot be done with the target. Its text is one line.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The kernel refuses a step.
    #[error("cannot {doing} {}: {source}", path.display())]
    Step {
        /// What was tried.
        doing: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A part of the kernel is missing.
    #[error(
        "{what}: as root run '{command}' (the module is in Debian's linux-image packages, in Ubuntu's \
         linux-modules-extra-$(uname -r), in Fedora's kernel-modules)"
    )]
    Missing {
        /// What is missing.
        what: String,
        /// What helps.
        command: &'static str,
    },
    /// Something is in the way.
    #[error("{0}")]
    Taken(String),
    /// The ring makes no sense.
    #[error("{0}")]
    Ring(#[from] walvisor_devices::tcmu::RingError),
}

type Result<T> = std::result::Result<T, TargetError>;

/// Names a step that failed.
trait Doing<T> {
    fn doing(self, doing: &'static str, path: &Path) -> Result<T>;
}

impl<T> Doing<T> for io::Result<T> {
    fn doing(self, doing: &'static str, path: &Path) -> Result<T> {
        self.map_err(|source| TargetError::Step {
            doing,
            path: path.to_owned(),
            source,
        })
    }
}

/// The kernel's target.
#[derive(Clone, Debug)]
pub struct Target {
    configfs: PathBuf,
    uio: PathBuf,
}

impl Target {
    /// Finds it.
    ///
    /// # Errors
    /// If configfs is not mounted, or there is no target in it.
    pub fn open() -> Result<Self> {
        let target = Self {
            configfs: CONFIGFS.into(),
            uio: "/sys/class/uio".into(),
        };
        target.check()?;
        Ok(target)
    }

    fn check(&self) -> Result<()> {
        let missing = |what: &str, command| {
            let what = what.to_owned();
            Err(TargetError::Missing { what, command })
        };
        if self.root().is_dir() {
            return Ok(());
        }
        if !self.configfs.is_dir() {
            return missing(
                "this kernel shows no configfs, so there is no SCSI target to be set up",
                "modprobe configfs && mount -t configfs configfs /sys/kernel/config && modprobe target_core_user",
            );
        }
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let mounted = |line: &str| line.split(' ').nth(1).map(Path::new) == Some(&*self.configfs);
        if !mounts.lines().any(mounted) {
            return missing(
                "configfs is not mounted at /sys/kernel/config, so there is no SCSI target to be set up",
                "mount -t configfs configfs /sys/kernel/config && modprobe target_core_user",
            );
        }
        missing(
            "the kernel's SCSI target is not loaded (no /sys/kernel/config/target)",
            "modprobe target_core_user",
        )
    }

    /// Its directory in configfs.
    pub fn root(&self) -> PathBuf {
        self.configfs.join("target")
    }

    /// Where back stores are.
    fn core(&self) -> PathBuf {
        self.root().join("core")
    }
}

/// Writes an attribute.
fn set(path: &Path, value: &str) -> Result<()> {
    let file = OpenOptions::new().write(true).open(path);
    file.and_then(|mut file| file.write_all(value.as_bytes()))
        .doing("set", path)
}

/// Reads an attribute; what cannot be read is empty.
fn get(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.trim_end().to_owned()
}

/// The directories in `path`, sorted; none, if it cannot be read.
fn directories(path: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let directory = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
    let mut found: Vec<_> = entries
        .filter(directory)
        .map(|entry| entry.path())
        .collect();
    found.sort();
    found
}

fn make_directory(path: &Path) -> Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        made => made.doing("make", path),
    }
}

/// Removes a directory of configfs, which holds only what the kernel has put there.
fn remove_directory(path: &Path) -> Result<()> {
    match fs::remove_dir(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.doing("remove", path),
    }
}

/// The last part of a path.
fn name_of(path: &Path) -> String {
    let name = path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests;
