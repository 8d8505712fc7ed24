//! The temporary directories of the disks and the sockets.

use std::path::Path;

use tempfile::TempDir;
use walvisor::commands::CommandError;
use walvisor_storage::{DiskOptions, Store, StoreOptions, default_log_dir, import_disk};

use crate::load::point::{BackendKind, DISK_BYTES};

/// Two directories: one for disks, on the measured medium, and one for sockets, whose paths must be short.
pub struct Directories {
    images: TempDir,
    sockets: TempDir,
}

impl Directories {
    /// Creates both directories, the one for disks in `parent`.
    ///
    /// # Errors
    /// If a directory cannot be made.
    pub fn new(parent: &Path) -> Result<Self, CommandError> {
        let directory = |of: &Path| {
            let made = tempfile::Builder::new()
                .prefix("walvisor-compare-")
                .tempdir_in(of);
            made.map_err(|error| {
                let place = of.display();
                CommandError::Failed(format!(
                    "{place}: can't work there ({error}): name a directory that can be written with --dir"
                ))
            })
        };
        Ok(Self {
            images: directory(&parent.canonicalize().unwrap_or_else(|_| parent.to_owned()))?,
            sockets: directory(&std::env::temp_dir())?,
        })
    }

    /// The directory of the disks.
    pub fn images(&self) -> &Path {
        self.images.path()
    }

    /// The directory of the sockets.
    pub fn sockets(&self) -> &Path {
        self.sockets.path()
    }

    /// Creates a disk called `name`, with a log of its own if that backend is in `backends`, and returns the name of its
    /// image. All its blocks hold data, because holes would be read faster.
    ///
    /// # Errors
    /// If the disk cannot be made.
    pub fn image(&self, name: &str, backends: &[BackendKind]) -> Result<String, CommandError> {
        let image = format!("{name}.img");
        if !backends.contains(&BackendKind::Wal) {
            return Ok(image);
        }
        let raw = self.images().join("raw");
        if !raw.exists() {
            let words = (0..DISK_BYTES / 8).map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
            std::fs::write(&raw, bytes).map_err(|error| {
                CommandError::Failed(format!("{}: cannot write it: {error}", raw.display()))
            })?;
        }
        let path = self.images().join(&image);
        let log = default_log_dir(&path);
        import_disk(&path, &raw, &log, &StoreOptions::default(), &mut |_, _| ())
            .map_err(CommandError::failed)?;
        Ok(image)
    }

    /// Creates a disk with a log of its own, and opens it.
    ///
    /// # Errors
    /// If the disk cannot be made or opened.
    pub fn store(&self, name: &str) -> Result<Store, CommandError> {
        let path = self.images().join(self.image(name, &[BackendKind::Wal])?);
        let options = StoreOptions::default();
        Store::open(
            &default_log_dir(&path),
            &[DiskOptions::new(&path)],
            &options,
        )
        .map_err(CommandError::failed)
    }
}
