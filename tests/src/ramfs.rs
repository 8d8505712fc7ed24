//! A file system without extended attributes, where images have no marks.

use std::path::Path;
use std::process::Command;

/// A file system in memory. Dropping it unmounts it.
pub struct Ramfs(tempfile::TempDir);

impl Ramfs {
    /// Mounts it. Returns `None` if that fails, after printing `skipped: why`.
    ///
    /// # Panics
    /// There is no room for a directory, or no mount(8).
    #[must_use]
    pub fn mount() -> Option<Self> {
        let ramfs = Self(tempfile::tempdir().expect("a directory"));
        let mounted = Command::new("mount")
            .args(["-t", "ramfs", "-o", "mode=0700", "ramfs"])
            .arg(ramfs.path())
            .output();
        let mounted = mounted.expect("mount(8) starts");
        match mounted.status.success() {
            true => Some(ramfs),
            false => {
                let why = String::from_utf8_lossy(&mounted.stderr);
                println!("skipped: no ramfs: {}", why.trim());
                None
            }
        }
    }

    /// The mount point.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Ramfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.path()).status();
    }
}
