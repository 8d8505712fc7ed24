//! The media: the given directory and a capped volume, the disks' images on them, and the traffic
//! that reaches them.

use std::fs;
use std::path::{Path, PathBuf};

use walvisor::commands::CommandError;
use walvisor_storage::StoreOptions;

use crate::bench_dirs::{BenchDirs, LOGGED, failed, make_disks};
use crate::volume::{self, Volume};

/// Bytes and operations that reached a device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Traffic {
    pub read_bytes: u64,
    pub written_bytes: u64,
    /// Reads and writes; `None` where only bytes are counted.
    pub operations: Option<u64>,
}

impl Traffic {
    /// The traffic since `before`.
    pub fn since(self, before: Self) -> Self {
        let operations = self.operations.zip(before.operations);
        Self {
            read_bytes: self.read_bytes - before.read_bytes,
            written_bytes: self.written_bytes - before.written_bytes,
            operations: operations.map(|(now, before)| now - before),
        }
    }
}

/// A medium in use. Dropping it removes everything.
pub struct MountedMedium {
    // The order of the fields matters: the volume is unmounted before its directory is removed.
    volume: Option<Volume>,
    place: BenchDirs,
    /// The options of the logs.
    options: StoreOptions,
    /// Bytes of all disks of a side, and for how many disks there are images.
    bytes: u64,
    disks: usize,
}

impl MountedMedium {
    /// Creates a directory in `parent`, with a volume in it if it is to be `capped`, for sides of
    /// `bytes` bytes each and a log with these options, and a second log for the side that keeps
    /// history if one is `kept`.
    ///
    /// # Errors
    /// If it cannot be made.
    pub fn new(
        parent: &Path,
        capped: bool,
        kept: bool,
        bytes: u64,
        options: StoreOptions,
    ) -> Result<Self, CommandError> {
        let place = BenchDirs::new(parent)?;
        let log = u64::from(options.max_segments) * options.segment_size;
        // The peers' images, those of walvisor, its logs, and what the file system takes.
        let logs = 1 + u64::from(kept);
        let needed = (bytes + logs * (bytes + log)) / 10 * 11 + (128 << 20);
        let volume = capped.then(|| {
            volume::own_mounts()?;
            Volume::capped(place.images(), needed)
        });
        let volume = volume.transpose()?;
        Ok(Self {
            volume,
            place,
            options,
            bytes,
            disks: 0,
        })
    }

    /// The directory of the sockets.
    pub fn sockets(&self) -> &Path {
        self.place.sockets()
    }

    /// The directory of the images.
    pub fn images(&self) -> PathBuf {
        match &self.volume {
            Some(volume) => volume.disks(),
            None => self.place.images().to_owned(),
        }
    }

    /// Bytes of all disks of a side.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of each disk.
    pub fn disk_bytes(&self) -> u64 {
        self.bytes / self.disks.max(1) as u64
    }

    /// Creates images for `disks` disks, unless they exist. Those for another number of disks go.
    /// If history is `kept`, the side that keeps it has images and a log of its own: a log that
    /// has history is not opened by a side that keeps none.
    ///
    /// # Errors
    /// If they cannot be made.
    pub fn make_images(&mut self, disks: usize, kept: bool) -> Result<(), CommandError> {
        let images = self.images();
        if self.disks != disks {
            for entry in fs::read_dir(&images).map_err(failed("read", &images))? {
                let path = entry.map_err(failed("read", &images))?.path();
                if path.extension().is_some_and(|extension| extension == "img") {
                    fs::remove_file(&path).map_err(failed("remove", &path))?;
                } else if path.ends_with("log") || path.ends_with("kept-log") {
                    fs::remove_dir_all(&path).map_err(failed("remove", &path))?;
                }
            }
            self.disks = disks;
        }
        let make = |side| make_disks(&images, disks, self.disk_bytes(), side, &self.options);
        make(LOGGED)?;
        if kept {
            make(("kept", "kept-log"))?;
        }
        Ok(())
    }

    /// The traffic of the medium's block device so far. `None` if it shares its device with others.
    ///
    /// # Errors
    /// If the system does not report it.
    pub fn traffic(&self) -> Result<Option<Traffic>, CommandError> {
        let Some(volume) = &self.volume else {
            return Ok(None);
        };
        let path = volume.counts();
        let text = fs::read_to_string(&path).map_err(failed("read", &path))?;
        let counts: Vec<u64> = text
            .split_whitespace()
            .map_while(|n| n.parse().ok())
            .collect();
        // Reads, reads merged, sectors, time; the same of writes.
        match counts[..] {
            [reads, _, sectors_read, _, writes, _, sectors_written, ..] => Ok(Some(Traffic {
                read_bytes: sectors_read * 512,
                written_bytes: sectors_written * 512,
                operations: Some(reads + writes),
            })),
            _ => Err(CommandError::Failed(format!(
                "{}: no counts of a block device",
                path.display()
            ))),
        }
    }
}
