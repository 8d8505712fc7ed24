//! The disk and the log that a command works on.

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use walvisor_storage::default_log_dir;

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

/// Prints the result. A failed write is fine: the command has already done its work.
pub(in crate::commands) fn print(text: std::fmt::Arguments<'_>) {
    let _ = std::io::stdout().write_fmt(text);
}
