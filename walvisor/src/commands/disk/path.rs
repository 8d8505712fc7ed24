//! The disk and the log that a command works on.

use std::io::Write;
use std::path::{Path, PathBuf, absolute};

use clap::Args;
use walvisor_storage::{DiskOptions, default_log_dir};

use crate::commands::owner::LogOwner;
use crate::control_socket::DiskChoice;

/// Which disk.
#[derive(Debug, Args)]
pub(super) struct DiskPath {
    /// The base image.
    pub(super) path: PathBuf,
    /// The log directory [default: PATH.wal].
    #[arg(long)]
    pub(super) log: Option<PathBuf>,
}

impl DiskPath {
    pub(super) fn log(&self) -> PathBuf {
        self.log
            .clone()
            .unwrap_or_else(|| default_log_dir(&self.path))
    }
}

/// A disk that another process may have open, which then carries out the command.
#[derive(Debug, Args)]
pub(super) struct SharedDisk {
    #[command(flatten)]
    pub(super) disk: DiskPath,
    /// Fail if another process has the disk open. Without this, that process carries out the
    /// command, if it has a control socket and is this user's or root's.
    #[arg(long)]
    no_owner: bool,
}

impl SharedDisk {
    /// The process that has the disk open, if it can be asked, and the disk for it.
    pub(super) fn owner(&self) -> Option<(LogOwner, Option<DiskChoice>)> {
        let log = self.disk.log();
        let owner = LogOwner::find(&log).filter(|_| !self.no_owner)?;
        let choice = DiskChoice::Image {
            image: absolute(&self.disk.path).ok()?,
            log: absolute(log).ok()?,
        };
        Some((owner, Some(choice)))
    }
}

/// Other disks of the log, whose images a command may open.
#[derive(Debug, Default, Args)]
pub(super) struct DetachedImages {
    /// The image of another disk on the log, to which the log may copy its records of that disk;
    /// may be given several times.
    #[arg(long = "detached", value_name = "IMAGE")]
    pub(super) images: Vec<PathBuf>,
}

impl DetachedImages {
    /// The disk at `path`, and the others.
    pub(super) fn with(&self, path: &Path) -> Vec<DiskOptions> {
        let mut disks = vec![DiskOptions::new(path)];
        disks.extend(self.images.iter().map(DiskOptions::detached));
        disks
    }
}

/// Prints the result. A failed write is fine: the command has already done its work.
pub(in crate::commands) fn print(text: std::fmt::Arguments<'_>) {
    let _ = std::io::stdout().write_fmt(text);
}
