//! The images for the measurements.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;
use walvisor::commands::CommandError;

use crate::output::failed;
use crate::programs;

/// Number of disks of each side over vhost-user, and bytes of each disk.
pub const DISKS: usize = 4;
pub const DISK_BYTES: u64 = 256 << 20;

/// The directory of the images: DISKS raw ones for the peers, and as many disks on one log for `walvisor`.
pub struct ImageDirectory {
    directory: TempDir,
    walvisor: PathBuf,
}

impl ImageDirectory {
    pub fn new(parent: &Path) -> Result<Self, CommandError> {
        let made = tempfile::Builder::new()
            .prefix("walvisor-compare-")
            .tempdir_in(parent);
        let directory = made.map_err(|error| {
            let place = parent.display();
            CommandError::Failed(format!(
                "{place}: can't work there ({error}): name a directory that can be written with --dir"
            ))
        })?;
        let walvisor = programs::walvisor()?;
        let place = Self {
            directory,
            walvisor,
        };
        Ok(place)
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Creates the images of the first `disks` disks, unless they exist. All their blocks hold data, because holes would be
    /// read faster.
    pub fn make_images(&self, disks: usize) -> Result<(), CommandError> {
        let words = (0..DISK_BYTES / 8).map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        for disk in 0..disks {
            let raw = self.path().join(format!("peer-{disk}.img"));
            if raw.exists() {
                continue;
            }
            let written =
                std::fs::write(&raw, &bytes).and_then(|()| std::fs::File::open(&raw)?.sync_all());
            written.map_err(failed("write the image", &raw))?;
            self.import(disk, &format!("ours-{disk}.img"), "log")?;
        }
        Ok(())
    }

    /// Creates a disk with the content of the peers' image number `raw`.
    pub fn import(&self, raw: usize, disk: &str, log: &str) -> Result<(), CommandError> {
        let mut import = Command::new(&self.walvisor);
        import
            .args([
                "disk",
                "import",
                disk,
                &format!("peer-{raw}.img"),
                "--log",
                log,
            ])
            .current_dir(self.path());
        let output = import.output().map_err(CommandError::failed)?;
        if !output.status.success() {
            let error = String::from_utf8_lossy(&output.stderr);
            return Err(CommandError::Failed(error.trim().to_owned()));
        }
        Ok(())
    }
}
