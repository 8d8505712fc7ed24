//! The disk and the log that a command works on.

use std::io::Write;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf, absolute};

use clap::Args;
use walvisor_storage::{
    DiskOptions, DiskReport, ReadableLog, default_log_dir, inspect_with_progress, log_dir_of,
};

use crate::commands::CommandError;
use crate::commands::owner::{LogOwner, read_log};
use crate::control_socket::DiskChoice;

/// Which disk.
#[derive(Debug, Args)]
pub(super) struct DiskPath {
    /// The base image.
    pub(super) path: PathBuf,
    /// The log directory [default: that of the log that the disk is on, else PATH.wal].
    #[arg(long)]
    pub(super) log: Option<PathBuf>,
}

impl DiskPath {
    /// The log's directory: as given, else that of the log that the disk is on.
    pub(super) fn log(&self) -> PathBuf {
        self.log.clone().unwrap_or_else(|| log_dir_of(&self.path))
    }

    /// As [`log`](Self::log), for what needs a name where the log is not at the usual place: a disk
    /// is made there, or what the log holds is given up.
    pub(super) fn named_log(&self) -> PathBuf {
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
    /// command, or lets this one read, if it has a control socket and is this user's or root's.
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

    /// Calls `read` with the image and its log.
    ///
    /// # Errors
    /// As [`read_log`].
    pub(super) fn read<T>(
        &self,
        read: impl Fn(&Path, ReadableLog<'_>) -> walvisor_storage::Result<T>,
    ) -> Result<T, CommandError> {
        let path = &self.disk.path;
        read_log(
            &self.disk.log(),
            !self.no_owner,
            |log| read(path, log),
            |_| false,
        )
    }

    /// Inspects the disk on so many threads.
    ///
    /// # Errors
    /// As [`read_log`].
    pub(super) fn inspect(
        &self,
        threads: Option<NonZeroUsize>,
    ) -> Result<DiskReport, CommandError> {
        let path = &self.disk.path;
        let inspect =
            |log: ReadableLog<'_>| inspect_with_progress(path, log, threads, &mut |_, _| {});
        let is_faulty = |report: &DiskReport| !report.is_clean();
        read_log(&self.disk.log(), !self.no_owner, inspect, is_faulty)
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
