//! Making disks: a new base image, and its place in the table of a log.
//!
//! ```text
//!   1. PATH.walvisor-part    the image: complete, marked, durable
//!   2. the log's control file names the disk, at PATH    (the log is made if there is none)
//!   3. PATH.walvisor-part becomes PATH                   the directory is synced
//! ```
//! If a crash cuts this before step 3, nothing is at PATH. The same command then finishes it: it
//! reuses the file of step 1 and replaces the entry of step 2. A log with a disk whose image is
//! missing still serves its other disks.

use std::path::Path;

use crate::catalog::control::{
    ControlFile, find_control, open_or_create_log, real_path, refuse_occupied, register,
};
use crate::catalog::identity::Identity;
use crate::catalog::log_location::LogLocation;
use crate::catalog::options::{StoreOptions, check_options, check_size};
use crate::error::{Error, ErrorKind, Result};
use crate::medium::directory::{Medium, directory};
use crate::medium::engine::EngineKind;
use crate::medium::file::DataFile;
use crate::medium::filesystem::parent;
use crate::medium::lock::Access;
use crate::medium::mark::ImageMark;
use crate::medium::segment::take_short_steps;
use crate::recovery::replay::{read_for_recovery, read_log_until};
use crate::store::attach::discard_command;
use crate::store::log_size::advise_log_size;
use crate::store::part_file::{PartFile, exists};

/// Creates a sparse base image of `size` bytes and registers it in the log in `log_dir`. If there
/// is no log, creates it with `options`; an existing log ignores them, except for
/// [`retain`](StoreOptions::retain). Reuses what an earlier, interrupted call left.
///
/// # Errors
/// If the size is not a positive multiple of 512, the file exists, or the log is open elsewhere, or
/// keeps more history than `options` say. Leaves nothing at `path`.
pub fn create_disk(path: &Path, size: u64, log_dir: &Path, options: &StoreOptions) -> Result<()> {
    check_size(path, size)?;
    let new = NewDisk::begin(path, log_dir, options)?;
    let part = PartFile::create(path, size, 0o666)?;
    new.finish(part, size, options)
}

/// A disk being created: nothing is at its path, and its log, if it exists, is open.
pub(crate) struct NewDisk<'a> {
    path: &'a Path,
    log_dir: &'a Path,
    log: Option<ControlFile>,
}

impl<'a> NewDisk<'a> {
    /// Checks that a disk can be created there.
    pub(crate) fn begin(path: &'a Path, log_dir: &'a Path, options: &StoreOptions) -> Result<Self> {
        check_options(options)?;
        let log = find_control(log_dir, Access::Log)?;
        let new = Self { path, log_dir, log };
        new.refuse(new.log.as_ref())?;
        Ok(new)
    }

    /// Refuses if a file or another disk's records are in the way.
    fn refuse(&self, log: Option<&ControlFile>) -> Result<()> {
        let Self { path, log_dir, .. } = self;
        if exists(path)? {
            return Err(occupied_error(path, log_dir, log));
        }
        match log {
            Some(log) => refuse_unapplied(path, log_dir, log),
            None => refuse_occupied(log_dir),
        }
    }

    /// Registers the complete image in the log and gives it its final name.
    pub(crate) fn finish(
        mut self,
        part: PartFile,
        size: u64,
        options: &StoreOptions,
    ) -> Result<()> {
        let (path, log_dir) = (self.path, self.log_dir);
        let mut marked = true;
        let mut adopt = |control: &mut ControlFile| {
            LogLocation::of(control).write(part.file(), path);
            marked = register_disk(control, path, part.file(), part.path(), size)?;
            let retain = options
                .retain
                .map(|retain| retain.set_unread(&mut control.control));
            retain.transpose().map_err(|error| error.of_file(log_dir))?;
            Ok(())
        };
        let (mut control, made) = match self.log.take() {
            Some(control) => (control, false),
            None => {
                let (control, made) = open_or_create_log(log_dir, options, &mut adopt)?;
                if !made {
                    // Another process has created the log since this disk was begun.
                    self.refuse(Some(&control))?;
                }
                (control, made)
            }
        };
        let before = if made {
            first_segment(&control, log_dir)?;
            Vec::new()
        } else {
            let before = control.control.disks.clone();
            adopt(&mut control)?;
            control.write()?;
            before
        };
        part.publish(false).inspect_err(|_| {
            // Best effort: the error of `publish` is the one to report.
            let _ = control.change(|control| control.disks = before);
        })?;
        let header = &control.control.header;
        let segment = header.segment_size.get();
        let bytes = u64::from(header.max_segments.get()) * segment;
        if let Some(advised) = advise_log_size(bytes, segment, size) {
            let log = log_dir.display();
            tracing::warn!(
                "{}: its log of {bytes} bytes is small for a disk of {size}; scattered writes are \
                 faster with a larger log: walvisor log resize {log} --size {}M",
                path.display(),
                advised >> 20
            );
        }
        if !marked {
            tracing::warn!(
                "{}: this file system has no extended attributes, so the log identifies the image \
                 by its inode, and does not recognize a copy; copy the disk with 'walvisor disk \
                 export'",
                path.display()
            );
        }
        Ok(())
    }
}

/// Registers the disk at `path` in memory, and marks its complete image, `file` at `image`, as its
/// own and closed. Returns whether the image's file system has extended attributes.
pub(crate) fn register_disk(
    control: &mut ControlFile,
    path: &Path,
    file: &dyn DataFile,
    image: &Path,
    size: u64,
) -> Result<bool> {
    let newest = newest(control)?;
    let place = register(control, path, size, newest)?;
    let entry = &mut control.control.disks[place];
    entry.announce(1);
    entry.settle();
    let mark = ImageMark {
        disk: entry.disk,
        generation: entry.generation.get(),
        open: false,
    };
    let written = file.write_mark(Some(&mark));
    let marked = written.map_err(|error| Error::io("mark", image, error))?;
    entry.marked = u8::from(marked);
    let synced = file.sync_all();
    synced.map_err(|error| Error::io("write", image, error))?;
    entry.set_inode(&Identity::of(file, image)?.inode);
    Ok(marked)
}

/// The LSN of the present state of a log that nobody has open; 0 for one being created. A power cut
/// does not take that state back: a disk whose past begins there would lose the snapshots that are
/// made until the log has it again.
fn newest(control: &mut ControlFile) -> Result<u64> {
    if control.control.header.generation.get() == 0 {
        return Ok(0);
    }
    let log_dir = parent(&control.path).to_owned();
    let medium = directory(&log_dir, EngineKind::Blocking);
    let (scan, _) = read_for_recovery(&medium, &log_dir, control, &mut |_, _| {})?;
    Ok(scan.newest(&control.control).lsn)
}

/// Creates the first segment of a new log.
pub(crate) fn first_segment(control: &ControlFile, log_dir: &Path) -> Result<()> {
    let size = control.control.header.segment_size.get();
    let medium = directory(log_dir, EngineKind::Blocking);
    medium
        .create_segment(0, size, &mut take_short_steps)
        .map(drop)
}

/// The error that says what is at the new disk's path.
fn occupied_error(path: &Path, log_dir: &Path, log: Option<&ControlFile>) -> Error {
    let real = real_path(path).unwrap_or_else(|_| path.to_owned());
    let what = match log {
        Some(log) if log.image_paths().contains(&real) => format!(
            "exists already, as a disk of the log in {}; use it, or choose another name",
            log_dir.display()
        ),
        Some(_) => format!(
            "exists already, and the log in {} does not know it; choose another name, or move it \
             away",
            log_dir.display()
        ),
        None => format!(
            "exists already, without a log at {}; use it (its first use creates the log), choose \
             another name, or move it away",
            log_dir.display()
        ),
    };
    Error::new(
        ErrorKind::AlreadyExists,
        format!("{}: {what}", path.display()),
    )
}

/// Refuses to put a disk in the place of another that has unapplied records in the log.
pub(crate) fn refuse_unapplied(path: &Path, log_dir: &Path, log: &ControlFile) -> Result<()> {
    let real = real_path(path)?;
    let mut disks = log.control.disks.iter();
    let Some(old) = disks.find(|disk| disk.path(&log.home) == real) else {
        return Ok(());
    };
    let medium = directory(log_dir, EngineKind::Blocking);
    let mut control = log.control.clone();
    let (_, unapplied) = read_log_until(&medium, log_dir, &mut control, u64::MAX)?;
    let id = old.id.get();
    if unapplied.contains_key(&id) || log.control.is_spilled(id) {
        Err(Error::new(
            ErrorKind::WrongLog,
            format!(
                "{}: the log in {} holds unapplied records of the disk that was here before; put \
                 that disk back, or discard them with: {}",
                path.display(),
                log_dir.display(),
                discard_command(path, log_dir),
            ),
        ))
    } else {
        Ok(())
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;
    use crate::store::resize::tests::MIB;
    use crate::{DiskOptions, Store};

    fn options() -> StoreOptions {
        StoreOptions {
            segment_size: MIB,
            ..StoreOptions::default()
        }
    }

    fn names(dir: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(dir).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }

    /// Another process may create the directory between the search for a log and the look at the
    /// directory.
    #[test]
    fn a_log_created_in_the_meantime_is_not_in_the_way() {
        let dir = tempfile::tempdir().unwrap();
        let (disk, log) = (dir.path().join("disk"), dir.path().join("log"));
        create_disk(&disk, MIB, &log, &options()).unwrap();
        assert!(names(&log).len() > 1);
        refuse_occupied(&log).unwrap();
        std::fs::remove_file(log.join("control")).unwrap();
        let kind = refuse_occupied(&log).unwrap_err().kind();
        assert_eq!(kind, crate::ErrorKind::Damaged);
    }

    /// A log with a half-created disk serves its other disks.
    #[test]
    fn a_half_created_disk_does_not_block_its_log() {
        let dir = tempfile::tempdir().unwrap();
        let (other, log) = (dir.path().join("other"), dir.path().join("log"));
        create_disk(&other, MIB, &log, &options()).unwrap();
        let disk = dir.path().join("disk");
        create_disk(&disk, MIB, &log, &options()).unwrap();
        std::fs::remove_file(&disk).unwrap();
        let disks = [DiskOptions::new(&other)];
        Store::open(&log, &disks, &options())
            .unwrap()
            .close()
            .unwrap();
    }

    /// If another process creates the log in the middle, that log takes the disk.
    #[test]
    fn a_log_created_in_the_meantime_is_used() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let disks = ["one", "other"].map(|name| dir.path().join(name));
        let new = NewDisk::begin(&disks[0], &log, &options()).unwrap();
        let same = NewDisk::begin(&disks[1], &log, &options()).unwrap();
        create_disk(&disks[1], MIB, &log, &options()).unwrap();
        let part = |path| PartFile::create(path, MIB, 0o666).unwrap();
        new.finish(part(&disks[0]), MIB, &options()).unwrap();
        // This disk was begun before the file existed: the file that is there now stays.
        let late = same.finish(part(&disks[1]), MIB, &options());
        assert_eq!(late.unwrap_err().kind(), ErrorKind::AlreadyExists);
        let all = disks.each_ref().map(DiskOptions::new);
        let store = Store::open(&log, &all, &options()).unwrap();
        store.close().unwrap();
    }

    /// The error says what is in the way and what can be done about it.
    #[test]
    fn the_error_says_what_is_at_the_path() {
        let dir = tempfile::tempdir().unwrap();
        let (disk, log) = (dir.path().join("disk"), dir.path().join("log"));
        // An image without a log, as earlier versions left it when interrupted.
        std::fs::File::create(&disk).unwrap().set_len(MIB).unwrap();
        let told = |log: &Path| {
            let error = create_disk(&disk, MIB, log, &options()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::AlreadyExists);
            error.to_string()
        };
        let text = told(&log);
        assert!(
            text.contains("without a log") && text.contains("use it"),
            "{text}"
        );
        assert!(!log.exists());
        create_disk(&dir.path().join("other"), MIB, &log, &options()).unwrap();
        let text = told(&log);
        assert!(text.contains("does not know it"), "{text}");
        // As the first error says, the image can be used, and then has a log.
        let own = dir.path().join("own");
        let disks = [DiskOptions::new(&disk)];
        Store::open(&own, &disks, &options())
            .unwrap()
            .close()
            .unwrap();
        assert!(told(&own).contains("a disk of the log in"));
    }
}
