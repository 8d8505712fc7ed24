//! The control file of a log with its table of disks: creating, opening, reading and changing it.

use std::path::{Path, PathBuf};

use zerocopy::FromZeros;
use zerocopy::little_endian::{U16, U32, U64};

use crate::catalog::control;
use crate::catalog::options::{StoreOptions, check_options};
use crate::catalog::snapshot::Snapshot;
use crate::error::{Error, ErrorKind, Result, invalid};
use crate::format::{
    CONTROL_MAGIC, CONTROL_SLOT, Control, ControlHeader, DecodeResult, DiskEntry, VERSION,
};
use crate::medium::file::DataFile;
use crate::medium::file::Segment;
use crate::medium::filesystem::{OWNER, OpenMode, files};
use crate::medium::host;
use crate::medium::lock::{Access, Holder};
use crate::medium::{filesystem, lock, owner};
use crate::mutant::{Mutant, planted};

/// The path with links resolved. The directory must exist, the file need not.
pub(crate) fn real_path(path: &Path) -> Result<PathBuf> {
    let found = match files().real_path(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let directory = files().real_path(filesystem::parent(path));
            directory.map(|directory| directory.join(path.file_name().unwrap_or_default()))
        }
        found => found,
    };
    found.map_err(|error| Error::io("find", path, error))
}

/// The directory that contains the log directory.
fn log_parent(log_dir: &Path) -> Result<PathBuf> {
    let real = real_path(log_dir)?;
    Ok(filesystem::parent(&real).to_owned())
}

/// The open, locked control file and its contents.
pub(crate) struct ControlFile {
    /// The directory that contains the log directory, see
    /// [`DiskEntry::path`](crate::format::DiskEntry::path).
    pub home: PathBuf,
    pub path: PathBuf,
    pub file: Box<dyn DataFile>,
    pub control: Control,
    /// The contents as read, until they are confirmed: they may be in the page cache only.
    pub unconfirmed: Option<Control>,
}

impl ControlFile {
    /// When the log was made, in microseconds since 1970 by the wall clock; 0 if the file system
    /// does not say.
    pub(crate) fn created_us(&self) -> u64 {
        self.file.inode().map_or(0, |inode| inode.born / 1000)
    }

    /// The ids of the disks, and the paths of their base images, empty where unknown.
    pub(crate) fn members(&self) -> Vec<(u32, PathBuf)> {
        let disks = self.control.disks.iter();
        disks
            .map(|disk| (disk.id.get(), disk.path(&self.home)))
            .collect()
    }

    /// The paths of the disks' base images, where known.
    pub(crate) fn image_paths(&self) -> Vec<PathBuf> {
        let disks = self.control.disks.iter();
        let known = disks.filter(|disk| disk.path_len.get() > 0);
        known.map(|disk| disk.path(&self.home)).collect()
    }

    /// Writes the other slot and syncs it.
    pub(crate) fn write(&mut self) -> Result<()> {
        self.update(|_| {})
    }

    /// Changes anything, in both slots: if one rots, the other has the change too.
    pub(crate) fn change_both(&mut self, change: impl FnOnce(&mut Control)) -> Result<()> {
        self.change(change)?;
        self.write()
    }

    /// Rewrites the contents that were read, to the slot they came from, and syncs it. They must be
    /// on the medium before segments that they free are reused, and before the other slot, possibly
    /// the only valid one on the medium, is overwritten. A sync alone is not enough: after a failed
    /// sync, the cache may hold pages that no later sync writes.
    pub(crate) fn confirm(&mut self) -> Result<()> {
        if let Some(read) = &self.unconfirmed
            && !planted(Mutant::RecoveryTrustsControl)
        {
            self.put(read)?;
        }
        self.unconfirmed = None;
        Ok(())
    }

    fn put(&self, control: &Control) -> Result<()> {
        let slot = if planted(Mutant::ControlInPlace) {
            0
        } else {
            control.header.generation.get() % 2
        };
        let offset = slot * CONTROL_SLOT as u64;
        let written = self.file.write_all_at(&control.encode(), offset);
        written
            .and_then(|()| self.file.sync_data())
            .map_err(|e| Error::io("write the log's control file", &self.path, e))
    }

    /// Changes the header and writes it. If the write fails, the header in memory stays unchanged
    /// too, so that a later check of what still has to be written sees what the medium has.
    pub(crate) fn update(&mut self, change: impl FnOnce(&mut ControlHeader)) -> Result<()> {
        self.change(|control| change(&mut control.header))
    }

    /// Changes anything and writes it, as [`update`](Self::update) does.
    pub(crate) fn change(&mut self, change: impl FnOnce(&mut Control)) -> Result<()> {
        self.confirm()?;
        // Repeat a failed attempt on the same slot; the other one is the good one.
        let generation = self.control.header.generation.get() + 1;
        let mut next = self.control.clone();
        change(&mut next);
        next.header.generation = U64::new(generation);
        let lsn = |control: &Control| control.header.checkpoint_lsn.get();
        assert!(
            lsn(&next) >= lsn(&self.control),
            "a checkpoint is never taken back"
        );
        assert!(next.is_ahead(), "the log has what the images have");
        assert!(
            next.rewinds.is_sorted_by(|one, next| one.at < next.at)
                && next.rewinds.iter().all(|rewind| rewind.to < rewind.at),
            "rewinds are in log order, and lead back"
        );
        if !next.counted() {
            return Err(Error::new(
                ErrorKind::Damaged,
                format!(
                    "{}: a counter of the log is at its maximum; restore the log from a copy",
                    self.path.display()
                ),
            ));
        }
        self.put(&next)?;
        self.control = next;
        Ok(())
    }
}

/// Whether there is a log in this directory.
pub fn has_log(log_dir: &Path) -> bool {
    // If this user may not examine the file, the next call that opens it reports that.
    match files().kind(&log_dir.join(CONTROL)) {
        Err(error) => error.kind() == std::io::ErrorKind::PermissionDenied,
        Ok(_) => true,
    }
}

/// The process that has the log in this directory open to write it, if there is one and it can be
/// known: it may be in another container.
pub fn log_writer(log_dir: &Path) -> Option<u32> {
    let control = files().open(&log_dir.join(CONTROL), OpenMode::Read).ok()?;
    control.host().and_then(owner::writer_of)
}

/// Opens, locks and reads the control file, if there is one.
pub(crate) fn find_control(log_dir: &Path, access: Access) -> Result<Option<ControlFile>> {
    if has_log(log_dir) {
        open_control(log_dir, access).map(Some)
    } else {
        Ok(None)
    }
}

/// As [`find_control`], for a log that must exist.
pub(crate) fn existing_log(log_dir: &Path, access: Access) -> Result<ControlFile> {
    find_control(log_dir, access)?.ok_or_else(|| {
        let text = lost_control(log_dir).unwrap_or_else(|| {
            format!(
                "{}: this is not a log (it has no control file); name a log directory, such as \
                 disk.img.wal",
                log_dir.display()
            )
        });
        Error::new(ErrorKind::NotFound, text)
    })
}

/// Describes a directory that has segments and no control file: a log that has lost it. `None`: it
/// is no such directory.
pub(crate) fn lost_control(log_dir: &Path) -> Option<String> {
    let segments = Segment::list(&*files(), log_dir).ok()?.len();
    (segments > 0 && !has_log(log_dir)).then(|| {
        format!(
            "{} has {segments} segments, and no control file, which says what they are: put that \
             file back",
            log_dir.display()
        )
    })
}

/// Refuses a directory that exists, is not empty, and is no log.
pub(crate) fn refuse_occupied(log_dir: &Path) -> Result<()> {
    let names = match files().names(log_dir) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        names => names.map_err(|error| Error::io("read the log directory", log_dir, error))?,
    };
    // Another process may have made a log here since the caller looked for one.
    let is_log = names.iter().any(|name| name == CONTROL);
    // A crash in `create_log` leaves a control file with the unfinished name.
    if !is_log && names.iter().any(|name| name != UNFINISHED_CONTROL) {
        Err(Error::new(
            ErrorKind::Damaged,
            format!(
                "{}: the directory is neither empty nor a log (it has no control file); restore \
                 the log, or name another directory",
                log_dir.display()
            ),
        ))
    } else {
        Ok(())
    }
}

/// The control file's name, and its name while it is being created.
pub(crate) const CONTROL: &str = "control";
const UNFINISHED_CONTROL: &str = "control.new";

/// Creates the directory and a control file with the disks that `fill` adds. The file gets its name
/// once it is complete, so a crash before that leaves nothing that looks like a log. `None`:
/// another process has created the log in the meantime.
pub(crate) fn create_log(
    log_dir: &Path,
    options: &StoreOptions,
    fill: &mut dyn FnMut(&mut ControlFile) -> Result<()>,
) -> Result<Option<ControlFile>> {
    match files().create_dir(log_dir) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(Error::io("create the log directory", log_dir, error));
        }
        _ => {}
    }
    let (path, unfinished) = (log_dir.join(CONTROL), log_dir.join(UNFINISHED_CONTROL));
    const DOING: &str = "create the log's control file";
    let create = |error| Error::io(DOING, &path, error);
    // If several processes create the log at once, the one that locks this file does it; the others
    // then look again.
    let how = OpenMode::Kept { mode: OWNER };
    let file = lock::open_store_file(&unfinished, DOING, how, Access::Log, |_| Holder::User)?;
    if has_log(log_dir) {
        files().remove(&unfinished).map_err(create)?;
        return Ok(None);
    }
    refuse_occupied(log_dir).inspect_err(|_| {
        // Best effort: the error of `refuse_occupied` is the one to report.
        let _ = files().remove(&unfinished);
    })?;
    file.set_len(0)
        .and_then(|()| file.set_len(2 * CONTROL_SLOT as u64))
        .map_err(create)?;
    let mut header = ControlHeader::new_zeroed();
    header.magic = CONTROL_MAGIC;
    header.version = U32::new(VERSION);
    header.log = host::random();
    header.segment_size = U64::new(options.segment_size);
    header.max_segments = U32::new(options.max_segments);
    header.first_sequence = U64::new(1);
    header.next_lsn = U64::new(1);
    header.next_cid = U64::new(1);
    let control = Control::new(header);
    let mut control = ControlFile {
        home: log_parent(log_dir)?,
        path,
        file,
        control,
        unconfirmed: None,
    };
    if let Some(retain) = options.retain {
        retain.set(&mut control.control)?;
    }
    fill(&mut control)?;
    // Write both slots, so that their space is allocated now and not when the file system is full.
    if !planted(Mutant::ControlNamedUnwritten) {
        control.change_both(|_| {})?;
    }
    files()
        .rename_new(&unfinished, &control.path)
        .map_err(|error| Error::io("name the log's control file", &control.path, error))?;
    if planted(Mutant::ControlNamedUnwritten) {
        control.write()?;
    }
    filesystem::sync_dir(log_dir)?;
    filesystem::sync_dir(filesystem::parent(log_dir))?;
    Ok(Some(control))
}

/// Opens and locks the log in `log_dir`. If there is none, it is created with the disks that `fill`
/// adds, and the flag is `true`.
pub(crate) fn open_or_create_log(
    log_dir: &Path,
    options: &StoreOptions,
    fill: &mut dyn FnMut(&mut ControlFile) -> Result<()>,
) -> Result<(ControlFile, bool)> {
    loop {
        if has_log(log_dir) {
            return Ok((open_control(log_dir, Access::Log)?, false));
        }
        if let Some(control) = create_log(log_dir, options, fill)? {
            return Ok((control, true));
        }
    }
}

/// The control file of a log that another process may be writing, without a lock. `None` if it
/// can't be read.
pub(crate) fn read_unlocked(log_dir: &Path) -> Option<ControlFile> {
    read_unlocked_control(log_dir).ok()
}

/// As [`read_unlocked`], with the reason why it can't be read.
pub(crate) fn read_unlocked_control(log_dir: &Path) -> Result<ControlFile> {
    let path = log_dir.join(CONTROL);
    let file = files().open(&path, OpenMode::Read);
    let file = file.map_err(|error| Error::io("open the log", &path, error))?;
    read_control(file, path, log_parent(log_dir)?)
}

/// How often to read the control file of a log in use: its process may write one slot while the
/// other one is read, and then that one.
const READS: u32 = 5;

/// Opens, locks and reads the control file, to use the log ([`Access::Log`]) or only to look at it
/// ([`Access::LogRead`], or [`Access::Held`] without a lock).
pub(crate) fn open_control(log_dir: &Path, access: Access) -> Result<ControlFile> {
    if access.newest().is_some() {
        let mut read = read_unlocked_control(log_dir);
        for _ in 1..READS {
            match &read {
                Err(error) if error.kind() == ErrorKind::Damaged => {}
                _ => break,
            }
            read = read_unlocked_control(log_dir);
        }
        return read;
    }
    let path = log_dir.join(CONTROL);
    let holder = |_: &dyn DataFile| Holder::User;
    let how = access.open_mode(OpenMode::Existing);
    let file = lock::open_store_file(&path, "open the log", how, access, holder)?;
    if access == Access::Log {
        // The name too may be in memory only.
        filesystem::settle_name(&path)?;
        filesystem::settle_name(&real_path(log_dir)?)?;
    }
    read_control(file, path, log_parent(log_dir)?)
}

/// Reads an open control file: the newest valid slot counts.
pub(crate) fn read_control(
    file: Box<dyn DataFile>,
    path: PathBuf,
    home: PathBuf,
) -> Result<ControlFile> {
    let mut newest: Option<Control> = None;
    for slot in 0..2 {
        let mut bytes = vec![0; CONTROL_SLOT];
        match file.read_exact_at(&mut bytes, slot * CONTROL_SLOT as u64) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => continue,
            // This slot may be the newer one, so the other must not be used in its place.
            Err(error) => return Err(Error::io("read the log's control file", &path, error)),
        }
        match Control::decode(&bytes) {
            DecodeResult::Version(version) => return Err(control::unknown_version(&path, version)),
            DecodeResult::Invalid => {}
            DecodeResult::Valid(control) => {
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
        check_options(&options).is_ok() && control.is_ahead()
    };
    match newest.filter(sane) {
        Some(mut control) => {
            let unconfirmed = Some(control.clone());
            // A killed process left them.
            Snapshot::remove_exports(&mut control)?;
            Ok(ControlFile {
                home,
                path,
                file,
                unconfirmed,
                control,
            })
        }
        None => Err(Error::new(
            ErrorKind::Damaged,
            format!(
                "{}: truncated or damaged: neither of its two slots is valid; restore the log from \
                 a copy",
                path.display()
            ),
        )),
    }
}

/// Adds a disk to the log's table in memory, and returns its place there. It takes over its path
/// from any other entry. The disk has no past before the LSN `newest`, that of the disks' present
/// state.
pub(crate) fn register(
    control: &mut ControlFile,
    path: &Path,
    size: u64,
    newest: u64,
) -> Result<usize> {
    let path = real_path(path)?;
    // The number of a disk that has left the log may be given out again.
    control.control.forget_images();
    let disks = &mut control.control.disks;
    let mut entry = DiskEntry::new_zeroed();
    entry.disk = host::random();
    entry.id = U32::new(disks.iter().map(|disk| disk.id.get()).max().unwrap_or(0) + 1);
    entry.size = U64::new(size);
    entry.set_path(&path, &control.home)?;
    let same = |disk: &DiskEntry| disk.path(&control.home) == path;
    let mut place = disks.iter().position(same).unwrap_or(disks.len());
    let applied = control.control.header.checkpoint_lsn.get();
    let spilled = disks.get(place).map(|old| old.id.get());
    let spilled = spilled.is_some_and(|id| control.control.is_spilled(id));
    let disks = &mut control.control.disks;
    if let Some(old) = disks.get_mut(place)
        && (old.void_lsn.get() > applied || spilled)
    {
        // The log still holds void records of that disk, or a spill file; without the entry, they
        // would be of no disk.
        old.path_len = U16::new(0);
        place = disks.len();
    }
    match disks.get_mut(place) {
        Some(old) => *old = entry,
        None => disks.push(entry),
    }
    if !control.control.fits() {
        control.control.disks.pop();
        return Err(invalid(format!(
            "{}: the log has no room for another disk: {} disks and {} snapshots; use another log",
            control.path.display(),
            control.control.disks.len(),
            control.control.snapshots.len(),
        )));
    }
    let disk_id = control.control.disks[place].id.get();
    let begun = control.control.begin_past(disk_id, newest);
    begun.map_err(|error| error.of_file(&control.path))?;
    Ok(place)
}

pub(crate) fn unknown_version(path: &Path, version: u32) -> Error {
    let remedy = match version {
        ..VERSION => {
            "run 'walvisor disk checkpoint' for each of its disks with the program that wrote it, \
             then remove the log's directory: opening a disk makes a new log"
        }
        _ => "use the program that wrote it",
    };
    Error::new(
        ErrorKind::UnsupportedVersion,
        format!(
            "{}: log format version {version}; this program knows version {VERSION}: {remedy}",
            path.display()
        ),
    )
}
