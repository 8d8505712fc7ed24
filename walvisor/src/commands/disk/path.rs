//! The disk and the log that a command works on.

use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use walvisor_storage::{DiskOptions, default_log_dir};

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
