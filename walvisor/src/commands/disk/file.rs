//! `restore --file` of `walvisor disk` and `walvisor ctl`: one file of a guest, as of a point.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;
use walvisor_devices::backend::{Allocation, Backend, BlockingDisk, Mapped, SECTOR_SIZE};
use walvisor_storage::{DiskOptions, Look, Point, Progress, StoreOptions, scratch_file};

use super::path::{DiskPath, print};
use crate::commands::CommandError;
use crate::commands::in_use::ask_owner;
use crate::commands::threads::Threads;
use crate::guest_file::{NewFile, Volume, WantedFile};
use crate::progress::with_bar;
use crate::size::human_size;

/// Bytes that are copied at a time.
const PIECE: u64 = 1 << 20;
/// Extents that are asked for at a time.
const EXTENTS: usize = 1024;

/// Which file of the guest.
#[derive(Args, Clone, Debug)]
pub struct FileArguments {
    /// Restore only this file: its path in the guest's ext4 or xfs, which is mounted from a copy.
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
    pub(in crate::commands) disk: &'a str,
    pub(in crate::commands) at: &'a str,
    pub(in crate::commands) wanted: &'a FileArguments,
    pub(in crate::commands) new: &'a Path,
    pub(in crate::commands) json: bool,
}

impl PastFile<'_> {
    /// Refuses what can't be done, before the disk is copied.
    pub(in crate::commands) fn check(&self) -> Result<(), CommandError> {
        NewFile::refuse_existing(self.new).map_err(CommandError::Failed)
    }

    /// The part of the disk that has the file system, given how to read it.
    fn volume(
        &self,
        read: &dyn Fn(&mut [u8], u64) -> io::Result<()>,
        bytes: u64,
    ) -> Result<Volume, CommandError> {
        let found = Volume::find(read, bytes, self.wanted.partition);
        found.map_err(|error| self.failed(&error))
    }

    fn failed(&self, why: &str) -> CommandError {
        CommandError::Failed(format!("{} as of {}: {why}", self.disk, self.at))
    }

    /// Copies the file out of a volume of `copy`, a copy of the disk that is thrown away, and says
    /// so.
    fn take(&self, copy: &File, volume: &Volume) -> Result<(), CommandError> {
        let path = self.wanted.file.clone().unwrap_or_default();
        let wanted = WantedFile {
            path,
            no_mount: self.wanted.no_mount,
        };
        let found = wanted.copy(copy, volume, self.new);
        let found = found.map_err(|error| self.failed(&error))?;
        if self.json {
            print(format_args!(
                "{}\n",
                json!({
                    "disk": self.disk,
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
                self.disk,
                self.at,
                human_size(found.size),
                found.mode,
                found.uid,
                found.gid
            ));
        }
        Ok(())
    }

    /// Takes the file out of `copy`, which has all of the disk.
    pub(in crate::commands) fn take_from(&self, copy: &File) -> Result<(), CommandError> {
        let bytes = copy.metadata().map_err(CommandError::failed)?.len();
        let volume = self.volume(&|bytes, at| copy.read_exact_at(bytes, at), bytes)?;
        self.take(copy, &volume)
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
        disk: &disk.path.display().to_string(),
        at: &at.to_string(),
        wanted,
        new,
        json,
    };
    past.check()?;
    let options = StoreOptions {
        threads: threads.get(),
        // Nothing else is in this process.
        index_memory: u64::MAX,
        ..StoreOptions::default()
    };
    let look = Look::open(
        &DiskOptions::new(&disk.path),
        &disk.log(),
        at,
        None,
        &options,
    );
    let look = look.map_err(|error| ask_owner(error, "restore --file PATH --at AT -o NEW"))?;
    let look = BlockingDisk::new(look);
    let bytes = look.backend().sectors() * SECTOR_SIZE;
    let volume = past.volume(&|bytes, at| look.read(bytes, at), bytes)?;
    let copy = scratch_file()?;
    let copied = with_bar("copying", |progress| {
        copy_volume(&look, &volume, &copy, progress)
    });
    copied.map_err(|error| past.failed(&error))?;
    // The disk may be opened again.
    drop(look);
    past.take(&copy, &volume)
}

/// Copies the data of a volume to a new file, to the same offsets.
fn copy_volume(
    look: &BlockingDisk<Look>,
    volume: &Volume,
    copy: &File,
    progress: Progress<'_>,
) -> Result<(), String> {
    let write_failed = |error| {
        format!("can't write its copy to TMPDIR, or to /var/tmp if that is not set: {error}")
    };
    let read_failed = |error: io::Error| error.to_string();
    copy.set_len(volume.bytes.end).map_err(write_failed)?;
    let mut piece = vec![0; PIECE as usize];
    let (mut at, end) = (volume.bytes.start, volume.bytes.end);
    while at < end {
        let (sector, sectors) = (at / SECTOR_SIZE, (end - at) / SECTOR_SIZE);
        let extents = look.backend().extents(sector, sectors, EXTENTS);
        for extent in extents.map_err(read_failed)? {
            let extent_end = (at + extent.sectors * SECTOR_SIZE).min(end);
            while extent.allocation == Allocation::Data && at < extent_end {
                let piece = &mut piece[..(extent_end - at).min(PIECE) as usize];
                look.read(piece, at).map_err(read_failed)?;
                copy.write_all_at(piece, at).map_err(write_failed)?;
                at += piece.len() as u64;
                progress(at - volume.bytes.start, end - volume.bytes.start);
            }
            at = extent_end;
        }
    }
    Ok(())
}
