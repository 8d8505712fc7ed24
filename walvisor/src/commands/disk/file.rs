//! `restore --file` of `walvisor disk` and `walvisor ctl`: one file of a guest, as of a point.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use clap::Args;
use serde_json::json;
use walvisor_devices::backend::{Backend, BlockingDisk, SECTOR_SIZE};
use walvisor_storage::{DiskOptions, Look, Point, StoreOptions};

use super::path::{DiskPath, print};
use crate::commands::CommandError;
use crate::commands::in_use::ask_owner;
use crate::commands::threads::Threads;
use crate::guest_file::{NewFile, OpenedDisk, ServedVolume, WantedFile};
use crate::size::human_size;

/// Which file of the guest.
#[derive(Args, Clone, Debug)]
pub struct FileArguments {
    /// Restore only this file: its path in the guest's ext4 or xfs. Nothing else is copied.
    #[arg(long, value_name = "PATH", requires = "output")]
    pub file: Option<PathBuf>,
    /// The number of the partition with that file system [default: the only one with ext4 or xfs].
    #[arg(long, value_name = "N", requires = "file")]
    partition: Option<u32>,
    /// Don't let this machine's kernel mount the file system: read ext4 with debugfs. So it is done
    /// where a mount is not allowed.
    #[arg(long, requires = "file")]
    no_mount: bool,
}

/// A disk as of a point, and where the file goes.
pub(in crate::commands) struct PastFile<'a> {
    pub(in crate::commands) at: &'a str,
    pub(in crate::commands) wanted: &'a FileArguments,
    pub(in crate::commands) new: &'a Path,
    pub(in crate::commands) json: bool,
}

impl PastFile<'_> {
    /// Copies the file out of the disk that `open` opens in a child, and says so. The process has
    /// one thread.
    pub(in crate::commands) fn take(
        &self,
        open: impl FnOnce() -> Result<OpenedDisk, CommandError>,
    ) -> Result<(), CommandError> {
        NewFile::refuse_existing(self.new).map_err(CommandError::Failed)?;
        let path = self.wanted.file.clone().unwrap_or_default();
        let wanted = WantedFile {
            path,
            no_mount: self.wanted.no_mount,
        };
        let served = ServedVolume::start(self.wanted.partition, || {
            open().map_err(|error| error.to_string())
        });
        let served = served.map_err(CommandError::Failed)?;
        let (disk, volume) = (&served.name, &served.volume);
        let failed = |why: String| CommandError::Failed(format!("{disk} as of {}: {why}", self.at));
        let found = wanted.copy(&served, self.new).map_err(failed)?;
        if self.json {
            print(format_args!(
                "{}\n",
                json!({
                    "disk": disk,
                    "at": self.at,
                    "file": wanted.path.to_string_lossy(),
                    "output": self.new.to_string_lossy(),
                    "file_system": volume.file_system.name(),
                    "partition": volume.partition,
                    "size_bytes": found.size,
                    "mode": format!("{:04o}", found.mode),
                    "uid": found.uid,
                    "gid": found.gid,
                })
            ));
        } else {
            print(format_args!(
                "{}: {:?} of {} as of {}: {}; in the guest its mode is {:04o} and its owner {}:{}\n",
                self.new.display(),
                wanted.path,
                disk,
                self.at,
                human_size(found.size),
                found.mode,
                found.uid,
                found.gid
            ));
        }
        Ok(())
    }
}

/// Carries out `walvisor disk restore --file`.
pub(super) fn restore_file(
    disk: &DiskPath,
    at: Point,
    wanted: &FileArguments,
    new: &Path,
    threads: Threads,
    json: bool,
) -> Result<(), CommandError> {
    let past = PastFile {
        at: &at.to_string(),
        wanted,
        new,
        json,
    };
    past.take(|| {
        let options = StoreOptions {
            threads: threads.get(),
            // Nothing else is in this process.
            index_memory: u64::MAX,
            ..StoreOptions::default()
        };
        let (options_of_disk, log) = (DiskOptions::new(&disk.path), disk.log());
        let look = Look::open(&options_of_disk, &log, at, None, &options);
        let look = look.map_err(|error| ask_owner(error, "restore --file PATH --at AT -o NEW"))?;
        let look = BlockingDisk::new(look);
        Ok(OpenedDisk {
            bytes: look.backend().sectors() * SECTOR_SIZE,
            name: disk.path.display().to_string(),
            read: Arc::new(move |bytes, at| look.read(bytes, at)),
        })
    })
}
