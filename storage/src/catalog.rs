//! Which base image belongs to which log: the table of disks in the control file, and how it is matched.

use std::fs::{File, OpenOptions};
use std::path::{Path, PathBuf};

use zerocopy::FromZeros;
use zerocopy::little_endian::{U16, U32, U64};

use crate::SECTOR_SIZE;
use crate::disk::{CacheMode, DiskState};
use crate::error::{Error, ErrorKind, Result};
use crate::file::{self, DataFile};
use crate::format::{
    BLOCK, CONTROL_MAGIC, CONTROL_SLOT, Control, ControlHeader, Decoded, DiskEntry, MAX_DISKS,
    Uuid, VERSION,
};
use crate::image::{Devices, open_file};
use crate::keeper::ControlFile;
use crate::recovery;
use crate::store::{DiskOptions, StoreOptions};
use crate::sync::atomic::{AtomicBool, AtomicU64};
use crate::sync::{Arc, RwLock};

pub(crate) fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidInput, message)
}

pub(crate) fn check_options(options: &StoreOptions) -> Result<()> {
    let size = options.segment_size;
    if !(64 << 10..=1 << 30).contains(&size) || !size.is_multiple_of(BLOCK as u64) {
        return Err(invalid(format!(
            "a segment of {size} bytes can't be: give 64 KiB to 1 GiB, a multiple of 4096"
        )));
    }
    if !(4..=65536).contains(&options.max_segments) {
        return Err(invalid(format!(
            "{} segments can't be: give 4 to 65536",
            options.max_segments
        )));
    }
    Ok(())
}

/// A base image that is open and locked, not yet known to the log.
pub(crate) struct OpenBase {
    pub options: DiskOptions,
    pub file: File,
    pub size: u64,
    pub mark: Option<Uuid>,
}

impl OpenBase {
    pub(crate) fn open(options: &DiskOptions) -> Result<Self> {
        let (file, size) = open_file(&options.path, true, Devices::Refused)?;
        let mark = file::read_mark(&file);
        Ok(Self {
            options: options.clone(),
            file,
            size,
            mark,
        })
    }

    /// A marked image has, or had, its newest bytes in a log: a new one must not hide that.
    pub(crate) fn refuse_mark(&self, log_dir: &Path) -> Result<()> {
        match self.mark {
            None => Ok(()),
            Some(uuid) => Err(Error::new(
                ErrorKind::WrongLog,
                format!(
                    "{}: disk {} was not closed and its log is not at {}; name it with log=DIR, or give up what \
                     it holds with: setfattr -x user.walvisor.disk {0}",
                    self.options.path.display(),
                    file::hex(&uuid),
                    log_dir.display(),
                ),
            )),
        }
    }

    /// Whether the file is as long as the log says, or longer because a resize was cut in the middle.
    pub(crate) fn size_fits(&self, entry: &DiskEntry) -> bool {
        let size = entry.size.get();
        self.size == size || (entry.resizing.get() != 0 && self.size > size)
    }

    /// Finds the place of the disk's entry in the log's table.
    ///
    /// # Errors
    /// If there is none, or the image's size is not what it says.
    pub(crate) fn find(&self, control: &ControlFile, log_dir: &Path) -> Result<usize> {
        let path = canonical(&self.options.path)?;
        let entries = &control.control.disks;
        let found = match self.mark {
            Some(uuid) => entries.iter().position(|entry| entry.disk == uuid),
            // Unmarked: closed cleanly, or copied without its attributes. Its place or its name tells.
            None => entries
                .iter()
                .position(|entry| entry_path(entry) == path)
                .or_else(|| {
                    let same = |entry: &DiskEntry| {
                        entry_path(entry).file_name() == path.file_name() && self.size_fits(entry)
                    };
                    entries.iter().position(same)
                }),
        };
        let Some(found) = found else {
            let others: Vec<_> = entries
                .iter()
                .map(|entry| entry_path(entry).display().to_string())
                .collect();
            return Err(Error::new(
                ErrorKind::WrongLog,
                format!(
                    "{}: the log in {} belongs to {}, not to this disk; name the right one with log=DIR",
                    self.options.path.display(),
                    log_dir.display(),
                    if others.is_empty() {
                        "no disk yet".into()
                    } else {
                        others.join(", ")
                    },
                ),
            ));
        };
        let entry = &entries[found];
        if !self.size_fits(entry) {
            return Err(Error::new(
                ErrorKind::WrongLog,
                format!(
                    "{}: {} bytes, but its log in {} knows a disk of {}; restore the image's size (truncate -s {3})",
                    self.options.path.display(),
                    self.size,
                    log_dir.display(),
                    entry.size.get(),
                ),
            ));
        }
        Ok(found)
    }

    /// Finds the disk's entry in the log, and brings it up to date there (in memory). What a resize that was cut
    /// in the middle left behind the end of the disk is cut off.
    pub(crate) fn attach(self, control: &mut ControlFile, log_dir: &Path) -> Result<DiskState> {
        let path = canonical(&self.options.path)?;
        let found = self.find(control, log_dir)?;
        let entry = &mut control.control.disks[found];
        if entry_path(entry) != path {
            set_entry_path(entry, &path)?;
            control.moved = true;
        }
        if entry.resizing.get() != 0 {
            set_size(&self.file, &self.options.path, entry.size.get())?;
            entry.resizing = U16::new(0);
            control.moved = true;
        }
        Ok(DiskState {
            id: entry.id.get(),
            uuid: entry.disk,
            path: self.options.path,
            sectors: AtomicU64::new(entry.size.get() / SECTOR_SIZE),
            base: Arc::new(self.file),
            read_only: self.options.read_only,
            no_flush: self.options.cache == CacheMode::Unsafe,
            write_cache: AtomicBool::new(self.options.cache != CacheMode::Writethrough),
            last_lsn: AtomicU64::new(0),
            index: RwLock::default(),
        })
    }
}

/// Gives a base image its length, durably.
pub(crate) fn set_size(file: &dyn DataFile, path: &Path, size: u64) -> Result<()> {
    file.set_len(size)
        .map_err(|error| match error.kind() {
            std::io::ErrorKind::FileTooLarge => invalid(format!(
                "{}: the file system holds no file of {size} bytes (ext4's longest has 16 TiB): use one that does, such \
                 as XFS, or a smaller disk",
                path.display()
            )),
            _ => Error::io("size the disk", path, error),
        })
}

pub(crate) fn canonical(path: &Path) -> Result<PathBuf> {
    path.canonicalize()
        .map_err(|error| Error::io("find", path, error))
}

pub(crate) fn entry_path(entry: &DiskEntry) -> PathBuf {
    use std::os::unix::ffi::OsStrExt;
    let len = usize::from(entry.path_len.get()).min(entry.path.len());
    PathBuf::from(std::ffi::OsStr::from_bytes(&entry.path[..len]))
}

fn set_entry_path(entry: &mut DiskEntry, path: &Path) -> Result<()> {
    use std::os::unix::ffi::OsStrExt;
    let bytes = path.as_os_str().as_bytes();
    let Some(into) = entry.path.get_mut(..bytes.len()) else {
        return Err(invalid(format!(
            "{}: a path of more than 480 bytes; use a shorter one",
            path.display()
        )));
    };
    into.copy_from_slice(bytes);
    entry.path_len = U16::new(bytes.len() as u16);
    Ok(())
}

pub(crate) fn has_control(log_dir: &Path) -> bool {
    log_dir.join("control").exists()
}

/// Refuses a directory that is there, holds something, and is no log.
pub(crate) fn refuse_occupied(log_dir: &Path) -> Result<()> {
    let entries = match std::fs::read_dir(log_dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(|error| Error::io("read the log directory", log_dir, error))?,
    };
    // A control file that never got its name is what a crash in `create_log` left.
    let unfinished = |name: &std::ffi::OsStr| name == UNFINISHED_CONTROL;
    match entries
        .flatten()
        .find(|entry| !unfinished(&entry.file_name()))
    {
        None => Ok(()),
        Some(_) => Err(Error::new(
            ErrorKind::Damaged,
            format!(
                "{}: not empty, and no log (it has no control file); restore it, or name another directory",
                log_dir.display()
            ),
        )),
    }
}

/// The control file's name while it is being made.
const UNFINISHED_CONTROL: &str = "control.new";

/// Makes the directory and a control file with these disks. The file gets its name when it is whole: a crash before
/// leaves nothing that is taken for a log.
pub(crate) fn create_log(
    log_dir: &Path,
    options: &StoreOptions,
    disks: &[(&Path, u64)],
) -> Result<ControlFile> {
    match std::fs::create_dir(log_dir) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            refuse_occupied(log_dir)?
        }
        Err(error) => return Err(Error::io("create the log directory", log_dir, error)),
    }
    let (path, unfinished) = (log_dir.join("control"), log_dir.join(UNFINISHED_CONTROL));
    let create = |error| Error::io("create the log's control file", &path, error);
    let mut open = OpenOptions::new();
    open.read(true).write(true).create(true).truncate(true);
    let file = open.open(&unfinished).map_err(create)?;
    file::lock(&file, log_dir)?;
    file.set_len(2 * CONTROL_SLOT as u64).map_err(create)?;
    let mut header = ControlHeader::new_zeroed();
    header.magic = CONTROL_MAGIC;
    header.version = U32::new(VERSION);
    header.log = file::random();
    header.segment_size = U64::new(options.segment_size);
    header.max_segments = U32::new(options.max_segments);
    header.first_sequence = U64::new(1);
    header.next_lsn = U64::new(1);
    header.next_cid = U64::new(1);
    let control = Control {
        header,
        disks: Vec::new(),
    };
    let mut control = ControlFile {
        path,
        file: Box::new(file),
        control,
        moved: false,
    };
    disks
        .iter()
        .try_for_each(|(disk, size)| register(&mut control, disk, *size))?;
    control.write()?;
    std::fs::rename(&unfinished, &control.path)
        .map_err(|error| Error::io("name the log's control file", &control.path, error))?;
    file::sync_dir(log_dir)?;
    let parent = log_dir
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    file::sync_dir(parent.unwrap_or(Path::new(".")))?;
    Ok(control)
}

/// Where the base images of all disks on a log were when they were last open, without opening the log: to know what
/// opening it may open. None if the log cannot be read, which its opener will tell.
pub fn log_images(log_dir: &Path) -> Vec<PathBuf> {
    let path = log_dir.join("control");
    let Ok(file) = File::open(&path) else {
        return Vec::new();
    };
    let control = read_control(Box::new(file), path);
    control.map_or_else(
        |_| Vec::new(),
        |control| control.control.disks.iter().map(entry_path).collect(),
    )
}

/// Opens, locks and reads the control file.
pub(crate) fn open_control(log_dir: &Path) -> Result<ControlFile> {
    let path = log_dir.join("control");
    let open = OpenOptions::new().read(true).write(true).open(&path);
    let file = open.map_err(|error| Error::io("open the log", &path, error))?;
    file::lock(&file, log_dir)?;
    read_control(Box::new(file), path)
}

/// Reads an open control file: the newest valid slot counts.
pub(crate) fn read_control(file: Box<dyn DataFile>, path: PathBuf) -> Result<ControlFile> {
    let mut newest: Option<Control> = None;
    for slot in 0..2 {
        let mut bytes = vec![0; CONTROL_SLOT];
        match file.read_exact_at(&mut bytes, slot * CONTROL_SLOT as u64) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => continue,
            // It may be the newer one: the other must not be taken for it.
            Err(error) => return Err(Error::io("read the log's control file", &path, error)),
        }
        match Control::decode(&bytes) {
            Decoded::Version(version) => return Err(recovery::unknown_version(&path, version)),
            Decoded::Invalid => {}
            Decoded::Valid(control) => {
                let newer = |old: &Control| control.header.generation > old.header.generation;
                if newest.as_ref().is_none_or(newer) {
                    newest = Some(control);
                }
            }
        }
    }
    let sane = |control: &Control| {
        let header = &control.header;
        let options = StoreOptions {
            segment_size: header.segment_size.get(),
            max_segments: header.max_segments.get(),
            ..StoreOptions::default()
        };
        check_options(&options).is_ok()
    };
    match newest.filter(sane) {
        Some(control) => Ok(ControlFile {
            path,
            file,
            control,
            moved: false,
        }),
        None => Err(Error::new(
            ErrorKind::Damaged,
            format!(
                "{}: truncated or damaged: no valid copy in it; restore the log from a copy",
                path.display()
            ),
        )),
    }
}

/// Adds a disk to the log's table (in memory). It takes the place of a disk that was at the same path before.
pub(crate) fn register(control: &mut ControlFile, path: &Path, size: u64) -> Result<()> {
    let path = canonical(path)?;
    let disks = &mut control.control.disks;
    let mut entry = DiskEntry::new_zeroed();
    entry.disk = file::random();
    entry.id = U32::new(disks.iter().map(|disk| disk.id.get()).max().unwrap_or(0) + 1);
    entry.size = U64::new(size);
    set_entry_path(&mut entry, &path)?;
    if let Some(old) = disks.iter_mut().find(|disk| entry_path(disk) == path) {
        *old = entry;
    } else if disks.len() < MAX_DISKS {
        disks.push(entry);
    } else {
        return Err(invalid(format!(
            "{}: the log holds {MAX_DISKS} disks, its most; use another log",
            control.path.display()
        )));
    }
    Ok(())
}
