//! Attaching disks to a log: opens the base images, and finds each one's entry in the table of
//! disks or refuses the image.
//!
//! | the image is | the log holds records of the disk | it holds none |
//! |---|---|---|
//! | the disk's own, at the generation that the log expects | attached, at whatever path | attached, at whatever path |
//! | another, at the disk's path | refused | attached, unless it is marked as open |
//! | another, elsewhere | refused | refused |

use std::path::{Path, PathBuf};
use std::time::Duration;

use zerocopy::little_endian::{U16, U64};

use crate::catalog::control::{ControlFile, lost_control, real_path, register};
use crate::catalog::identity::{Identity, written};
use crate::catalog::log_location::{LogLocation, refuse_other_log};
use crate::catalog::options::{DiskOptions, default_log_dir};
use crate::catalog::retention::Retention;
use crate::error::{Error, ErrorKind, Result};
use crate::format::DiskEntry;
use crate::log::disk_state::DiskState;
use crate::log::image::DiskImage;
use crate::log::spill::Spill;
use crate::medium::file::{DataFile, set_size};
use crate::medium::filesystem::{self, OpenMode, PathKind, files};
use crate::medium::lock::Access;
use crate::medium::mark::{ImageMark, hex};
use crate::mutant::{Mutant, planted};
use crate::recovery::replay::UnappliedByDisk;
use crate::store::image::{disk_len, open_base};
use crate::store::other_format::refuse_other_format;
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, Mutex};
use crate::view::point::Point;

/// Why an image is not as the log left it, if its time tells.
const WRITTEN: &str = "another program, or a mount, has written to it since the log did";
/// A file's time may be this much later than the log's last write to it: a file system over the
/// network, or one in memory, may set it when it passes the bytes on.
const LATE: Duration = Duration::from_secs(5);

/// A base image that is open and locked, but not matched to a disk of the log yet.
pub(crate) struct OpenBase {
    pub options: DiskOptions,
    /// The image's path, with links resolved.
    pub path: PathBuf,
    pub file: Box<dyn DataFile>,
    pub size: u64,
    pub identity: Identity,
}

impl OpenBase {
    /// Opens and locks the image, to use it with the log in `log_dir`. `in_log`: this process has
    /// that log open, so nobody else can be using an image that is marked as open.
    pub(crate) fn open(
        options: &DiskOptions,
        access: Access,
        log_dir: &Path,
        in_log: bool,
    ) -> Result<Self> {
        refuse_other_log(&options.path, log_dir)?;
        Self::open_as_is(options, access, in_log)
    }

    /// As [`open`](Self::open), whichever log the image names.
    pub(crate) fn open_as_is(options: &DiskOptions, access: Access, in_log: bool) -> Result<Self> {
        let file = open_base(&options.path, access, in_log, false)?;
        Self::of_file(options, file)
    }

    /// Opens and locks an image that this process makes, and that nobody else may use yet.
    pub(crate) fn open_unready(path: &Path) -> Result<Self> {
        let file = open_base(path, Access::Write, true, true)?;
        Self::of_file(&DiskOptions::new(path), file)
    }

    fn of_file(options: &DiskOptions, file: Box<dyn DataFile>) -> Result<Self> {
        let path = &options.path;
        let identity = Identity::of(file.as_ref(), path)?;
        let size = disk_len(file.as_ref(), path);
        // Files in other formats may have any size.
        let size = size.or_else(|error| {
            refuse_other_format(path, identity.mark.as_ref(), options.format).and(Err(error))
        })?;
        Ok(Self {
            path: real_path(path)?,
            identity,
            options: options.clone(),
            file,
            size,
        })
    }

    /// Opens several images; refuses a file that is named twice.
    pub(crate) fn open_all(
        disks: &[DiskOptions],
        access: Access,
        log_dir: &Path,
        in_log: bool,
    ) -> Result<Vec<Self>> {
        let mut opened = Vec::new();
        for options in disks {
            refuse_twice(&options.path, &opened)?;
            opened.push(Self::open(options, access, log_dir, in_log)?);
        }
        Ok(opened)
    }

    /// Opens the detached images among `disks`, except those that are in use. A file named both in
    /// use and detached counts as in use.
    pub(crate) fn open_detached(
        disks: &[DiskOptions],
        in_use: &[Self],
        log_dir: &Path,
    ) -> Result<Vec<Self>> {
        let mut opened = Vec::new();
        for options in disks.iter().filter(|disk| disk.detached) {
            let named_before = [in_use, &opened]
                .into_iter()
                .any(|others| refuse_twice(&options.path, others).is_err());
            if !named_before {
                opened.push(Self::open(options, Access::Write, log_dir, true)?);
            }
        }
        Ok(opened)
    }

    /// Refuses an image that must not be used as a plain raw image: one in another format, or one
    /// marked as open, whose newest bytes are, or were, in a log; a new log must not hide that.
    pub(crate) fn refuse_foreign(&self, log_dir: &Path) -> Result<()> {
        let mark = self.identity.mark.as_ref();
        refuse_other_format(&self.options.path, mark, self.options.format)?;
        let open = mark.is_none_or(|mark| mark.open);
        if let Some(lost) = self.lost_log(log_dir).filter(|_| open) {
            let path = self.options.path.display();
            return Err(wrong_log_error(format!("{path}: its log at {lost}")));
        }
        match mark {
            Some(ImageMark {
                open: true, disk, ..
            }) => {
                let named = LogLocation::read(self.file.as_ref(), &self.options.path);
                let named = named.map(|log| format!(" (it was at {})", log.dir.display()));
                Err(wrong_log_error(format!(
                    "{}: disk {} was not closed, and its log is not at {}{}; name the log with \
                     log=DIR, or discard what it holds with: {}",
                    self.options.path.display(),
                    hex(disk),
                    log_dir.display(),
                    named.unwrap_or_default(),
                    discard_command(&self.options.path, log_dir),
                )))
            }
            _ => Ok(()),
        }
    }

    /// Describes the log, in `log_dir` or where the image says, if it has lost its control file.
    pub(crate) fn lost_log(&self, log_dir: &Path) -> Option<String> {
        lost_control(log_dir).or_else(|| {
            let named = LogLocation::read(self.file.as_ref(), &self.options.path)?;
            lost_control(&named.dir)
        })
    }

    /// Whether the file's length is what the log says, or longer because a resize was interrupted.
    pub(crate) fn size_fits(&self, entry: &DiskEntry) -> bool {
        let size = entry.size.get();
        self.size == size || (entry.resizing != 0 && self.size > size)
    }

    /// Refuses an image that is not as long as its log expects.
    pub(crate) fn refuse_other_size(&self, entry: &DiskEntry, log_dir: &Path) -> Result<()> {
        if self.size_fits(entry) {
            return Ok(());
        }
        let (path, size, want) = (self.options.path.display(), self.size, entry.size.get());
        let remedy = if size < want {
            format!("lengthen it with 'truncate -s {want} {path}', which keeps all bytes")
        } else {
            "make it a disk of its own with 'walvisor disk import'".to_owned()
        };
        Err(wrong_log_error(format!(
            "{path}: the image has {size} bytes, but its log in {} expects {want}; put the right image \
             back, or {remedy}",
            log_dir.display(),
        )))
    }

    fn is_of(&self, entry: &DiskEntry, home: &Path) -> bool {
        let at_path = entry.path(home) == self.path;
        entry.is_image(&self.identity, at_path)
    }

    /// Why this is not the disk's own image; `None` if it is.
    fn why_foreign(&self, entry: &DiskEntry, home: &Path) -> Option<&'static str> {
        let why = match (&self.identity.mark, self.is_of(entry, home)) {
            (_, true) => return None,
            (Some(mark), false) if mark.disk != entry.disk => "it is the image of another disk",
            (Some(mark), false) if mark.generation < entry.generation.get() => {
                "it is older than the log expects, or a copy that was changed separately"
            }
            (Some(_), false) => {
                "it is newer than the log expects, or a copy that was changed separately"
            }
            (None, false) if entry.marked != 0 => {
                "it has no mark: it is another image, or a copy without the extended attributes"
            }
            (None, false) => {
                "it is another file (on a file system without extended attributes a disk is \
                 identified by its inode)"
            }
        };
        Some(why)
    }

    /// Why a disk's records can't be applied to this image; `None` if they can.
    fn why_not(&self, control: &ControlFile, entry: &DiskEntry) -> Result<Option<String>> {
        if let Some(why) = self.why_foreign(entry, &control.home) {
            return Ok(Some(why.to_owned()));
        }
        if matches!(self.identity.mark, Some(ImageMark { open: false, .. })) {
            return Ok(Some(
                "it was closed with another copy of the log".to_owned(),
            ));
        }
        if let Some(why) = self.why_changed(entry)? {
            return Ok(Some(why.to_owned()));
        }
        let later = self.written_later(control, entry);
        Ok(later.filter(|later| *later > LATE).map(|_| {
            let time = control.control.written(entry.id.get());
            let (seconds, nanoseconds) = (time / 1_000_000_000, time % 1_000_000_000);
            let path = self.options.path.display();
            format!(
                "{WRITTEN} (if only its time has changed, set it back with: touch -d \
                 @{seconds}.{nanoseconds:09} {path})"
            )
        }))
    }

    /// How much later the last write to the image was than the log's own, by the file's time; zero
    /// if it was earlier. `None`: it was that one, or nobody knows.
    fn written_later(&self, control: &ControlFile, entry: &DiskEntry) -> Option<Duration> {
        let (inode, id) = (&self.identity.inode, entry.id.get());
        // A copy's time means nothing.
        let same_file = entry.is_file(inode, entry.path(&control.home) == self.path);
        let fits = !same_file || control.control.written_fits(id, inode.written);
        let later = inode.written.saturating_sub(control.control.written(id));
        (!fits).then_some(Duration::from_nanos(later))
    }

    fn why_changed(&self, entry: &DiskEntry) -> Result<Option<&'static str>> {
        let same = entry.samples_fit(self.file.as_ref(), &self.options.path)?;
        let why = "its bytes have changed since the last checkpoint: another program wrote to it";
        Ok((!same).then_some(why))
    }

    /// Why the disk's past can't be seen over this image; `None` if it can.
    pub(crate) fn why_no_past(
        &self,
        control: &ControlFile,
        place: usize,
    ) -> Result<Option<&'static str>> {
        let entry = &control.control.disks[place];
        // The disk has not had an image yet.
        if (entry.generation.get(), entry.inode.get()) == (0, 0) {
            return Ok(None);
        }
        let why = match self.why_foreign(entry, &control.home) {
            None => self.why_changed(entry)?,
            why => why,
        };
        let written = self.written_later(control, entry).map(|_| WRITTEN);
        Ok(why.or(written))
    }

    /// As [`why_no_past`](Self::why_no_past), for a reader. If there is a reason, ends the disk's
    /// past at LSN `newest`, only in the control file in memory.
    pub(crate) fn without_past(
        &self,
        control: &mut ControlFile,
        place: usize,
        newest: u64,
    ) -> Result<Option<&'static str>> {
        let why = self.why_no_past(control, place)?;
        if why.is_some() {
            let disk_id = control.control.disks[place].id.get();
            let ended = control.control.end_past(disk_id, newest);
            ended.map_err(|error| error.of_file(&control.path))?;
        }
        Ok(why)
    }

    /// The error for a point in the past that can't be seen over this image.
    pub(crate) fn no_past(&self, at: Point, log_dir: &Path, why: &str) -> Error {
        let (log, image) = (log_dir.display(), self.options.path.display());
        let message = format!(
            "{log}: the disk can't be brought back to {at}: {image} is not the image that its past \
             depends on: {why}; put that image back"
        );
        Error::new(ErrorKind::NotFound, message)
    }

    /// Finds the place of the disk's entry in the log's table.
    ///
    /// # Errors
    /// If the table has no entry for the disk, or the entry does not accept the image.
    pub(crate) fn find(
        &self,
        control: &ControlFile,
        log_dir: &Path,
        unapplied: &UnappliedByDisk,
    ) -> Result<usize> {
        find(std::slice::from_ref(self), control, log_dir, unapplied).map(|found| found[0])
    }
}

/// One way to check whether an image belongs to an entry.
type IdentityCheck<'a> = &'a dyn Fn(&OpenBase, &DiskEntry) -> bool;

/// Finds the places of the disks' entries in the log's table. No two disks get the same place.
pub(crate) fn find(
    bases: &[OpenBase],
    control: &ControlFile,
    log_dir: &Path,
    unapplied: &UnappliedByDisk,
) -> Result<Vec<usize>> {
    let found = bases.iter().zip(look_up(bases, control)?);
    found
        .map(|(base, place)| {
            let place = place.ok_or_else(|| unknown(base, control, log_dir))?;
            let entry = &control.control.disks[place];
            accept(base, control, entry, log_dir, unapplied)?;
            Ok(place)
        })
        .collect()
}

/// Finds the place of an image's entry in a log's table, whether or not the entry accepts the
/// image.
///
/// # Errors
/// If the table has none.
pub(crate) fn locate(base: &OpenBase, control: &ControlFile, log_dir: &Path) -> Result<usize> {
    let found = look_up(std::slice::from_ref(base), control)?;
    found[0].ok_or_else(|| unknown(base, control, log_dir))
}

/// Whether a log's table has an entry for the image, accepted or not.
pub(crate) fn is_known(base: &OpenBase, control: &ControlFile) -> bool {
    look_up(std::slice::from_ref(base), control).is_ok_and(|found| found[0].is_some())
}

/// As [`find`], but entries need not accept the images, and may be missing.
fn look_up(bases: &[OpenBase], control: &ControlFile) -> Result<Vec<Option<usize>>> {
    let (entries, home) = (&control.control.disks, control.home.as_path());
    let mut found: Vec<Option<usize>> = vec![None; bases.len()];
    // Identity beats path. Of two images that are both the disk's own, the one at its path wins.
    let own_at_path = |base: &OpenBase, entry: &DiskEntry| {
        base.is_of(entry, home) && entry.path(home) == base.path
    };
    let own = |base: &OpenBase, entry: &DiskEntry| base.is_of(entry, home);
    let at_path = |base: &OpenBase, entry: &DiskEntry| entry.path(home) == base.path;
    let ways: [IdentityCheck<'_>; 3] = [&own_at_path, &own, &at_path];
    for way in ways {
        for (i, base) in bases.iter().enumerate() {
            if found[i].is_some() {
                continue;
            }
            let Some(place) = entries.iter().position(|entry| way(base, entry)) else {
                continue;
            };
            if let Some(other) = found.iter().position(|found| *found == Some(place)) {
                return Err(a_copy(&base.options.path, &bases[other].options.path));
            }
            found[i] = Some(place);
        }
    }
    Ok(found)
}

/// The error for a second image of an open disk.
fn a_copy(path: &Path, open: &Path) -> Error {
    wrong_log_error(format!(
        "{}: a copy of the disk {}, which is open already; make the copy a disk of its own with \
         'walvisor disk import'",
        path.display(),
        open.display(),
    ))
}

/// Refuses an image that this entry does not accept.
fn accept(
    base: &OpenBase,
    control: &ControlFile,
    entry: &DiskEntry,
    log_dir: &Path,
    unapplied: &UnappliedByDisk,
) -> Result<()> {
    let path = &base.options.path;
    let records = unapplied.get(&entry.id.get());
    let held = match records {
        Some(records) => Some(count(records.records)),
        None if control.control.is_spilled(entry.id.get()) => Some("a spill file".to_owned()),
        None => None,
    };
    match held {
        Some(held) => {
            if let Some(why) = base.why_not(control, entry)? {
                return Err(wrong_log_error(format!(
                    "{}: {why}; the log in {} holds {held} of its disk; put the image that they \
                     belong to back; if it is this one, {}; or discard them with: {}",
                    path.display(),
                    log_dir.display(),
                    rescue_commands(path, log_dir),
                    discard_command(path, log_dir),
                )));
            }
        }
        None if base.is_of(entry, &control.home) => {}
        None => match base.identity.mark {
            Some(mark) if mark.open && mark.disk == entry.disk => {
                return Err(wrong_log_error(format!(
                    "{}: this is a copy of an open disk's image, and its newest bytes have left \
                     the log in {}; put the newest image back, or accept this one with: {}",
                    path.display(),
                    log_dir.display(),
                    discard_command(path, log_dir),
                )));
            }
            _ => base.refuse_foreign(log_dir)?,
        },
    }
    base.refuse_other_size(entry, log_dir)
}

/// Refuses an image that is not in the table but carries the mark of a disk that is.
pub(crate) fn refuse_other_copy(
    base: &OpenBase,
    control: &ControlFile,
    log_dir: &Path,
) -> Result<()> {
    let mark = &base.identity.mark;
    let marked = |entry: &&DiskEntry| mark.is_some_and(|mark| mark.disk == entry.disk);
    match control.control.disks.iter().find(marked) {
        None => Ok(()),
        Some(entry) => Err(wrong_log_error(format!(
            "{}: a copy, older or changed separately, of the disk that the log in {} has at {}; \
             move it there to use it instead, or make it a disk of its own with 'walvisor disk \
             import'",
            base.options.path.display(),
            log_dir.display(),
            entry.path(&control.home).display(),
        ))),
    }
}

/// The error for an image that is not in the table.
fn unknown(base: &OpenBase, control: &ControlFile, log_dir: &Path) -> Error {
    if let Err(error) = refuse_other_copy(base, control, log_dir) {
        return error;
    }
    let path = base.options.path.display();
    let others = control.image_paths();
    let others: Vec<_> = others
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    let mut told = format!(
        "{path}: the log in {} belongs to {}, not to this disk; name the right one with log=DIR",
        log_dir.display(),
        if others.is_empty() {
            "no disk yet".to_owned()
        } else {
            others.join(", ")
        },
    );
    if is_only_disk(base, control) {
        let path = &base.options.path;
        told += &format!(
            "; if this is that disk's image without its extended attributes, {}",
            rescue_commands(path, log_dir)
        );
    }
    wrong_log_error(told)
}

/// Whether an image without an identity can only be that of the log's only disk.
pub(crate) fn is_only_disk(base: &OpenBase, control: &ControlFile) -> bool {
    let mark = &base.identity.mark;
    matches!(control.control.disks.as_slice(), [only] if mark.is_none() && base.size_fits(only))
}

/// The commands for an image that has lost its identity.
fn rescue_commands(path: &Path, log_dir: &Path) -> String {
    let image = path.display();
    let adopt = with_log(format!("walvisor disk adopt {image}"), path, log_dir);
    let export = format!("walvisor disk export {image} NEW --log-wins");
    let export = with_log(export, path, log_dir);
    format!("say so with: {adopt}; or write both into a new file with: {export}")
}

/// Refuses a file that is already open here: waiting for its lock would be useless.
fn refuse_twice(path: &Path, opened: &[OpenBase]) -> Result<()> {
    let inode = match files().kind(path) {
        Ok(PathKind::File) => files()
            .open(path, OpenMode::Read)
            .and_then(|file| file.inode()),
        _ => return Ok(()),
    };
    let Ok(inode) = inode else {
        return Ok(());
    };
    let same = |base: &&OpenBase| {
        let other = &base.identity.inode;
        (other.device, other.number) == (inode.device, inode.number)
    };
    match opened.iter().find(same) {
        None => Ok(()),
        Some(other) => Err(Error::new(
            ErrorKind::Locked,
            format!(
                "{}: the same file as {}, which is open already; each disk needs its own image",
                path.display(),
                other.options.path.display()
            ),
        )),
    }
}

/// Finds the disks' entries in the log and updates them in memory. Cuts off what an interrupted
/// resize left beyond the end of a disk. Of the `detached` disks, those that have records in the
/// log come last; the others are closed again. `newest`: the disks' present state.
///
/// # Errors
/// Also if the log holds records of a disk that is neither in `bases` nor in `detached`.
pub(crate) fn attach(
    mut bases: Vec<OpenBase>,
    detached: Vec<OpenBase>,
    control: &mut ControlFile,
    log_dir: &Path,
    unapplied: &UnappliedByDisk,
    newest: u64,
) -> Result<Vec<Arc<DiskState>>> {
    let mut found = find(&bases, control, log_dir, unapplied)?;
    let places = look_up(&detached, control)?;
    for (base, place) in detached.into_iter().zip(places) {
        let Some(place) = place.filter(|place| !found.contains(place)) else {
            continue;
        };
        let entry = &control.control.disks[place];
        if unapplied.contains_key(&entry.id.get()) {
            accept(&base, control, entry, log_dir, unapplied)?;
            bases.push(base);
            found.push(place);
        }
    }
    refuse_unnamed(&found, control, log_dir, unapplied)?;
    enter_all(bases, &found, control, newest)
}

/// Gives these images to the entries at these places, in memory, and creates the disks' states.
/// `newest`: the disks' present state.
pub(crate) fn enter_all(
    bases: Vec<OpenBase>,
    found: &[usize],
    control: &mut ControlFile,
    newest: u64,
) -> Result<Vec<Arc<DiskState>>> {
    for (base, place) in bases.iter().zip(found) {
        end_past(base, *place, control, newest)?;
    }
    take_over(&bases, found, control);
    let states = bases.into_iter().zip(found);
    states
        .map(|(base, place)| enter(base, *place, control))
        .collect()
}

/// Refuses a log with records of a disk whose image was not named: they could never be copied, so
/// the log would fill up. That the log's table names an image is no reason to open it: whoever
/// wrote the table may be a stranger.
fn refuse_unnamed(
    found: &[usize],
    control: &ControlFile,
    log_dir: &Path,
    unapplied: &UnappliedByDisk,
) -> Result<()> {
    let mut entries = control.control.disks.iter().enumerate();
    let unnamed = entries.find_map(|(place, entry)| {
        let records = unapplied.get(&entry.id.get());
        records
            .filter(|_| !found.contains(&place))
            .map(|records| (entry, records))
    });
    let Some((entry, records)) = unnamed else {
        return Ok(());
    };
    let image = entry.path(&control.home);
    let path = image.display();
    Err(wrong_log_error(format!(
        "{}: the log holds {} of another disk, last at {path}, which is not opened because only \
         the log names it; open both disks together, add its image with detached={path} (walvisor \
         disk: --detached {path}), or discard those records with: {}",
        log_dir.display(),
        count(records.records),
        discard_command(&image, log_dir),
    )))
}

/// Ends a disk's past if the image is not the one it depends on, and warns about what is lost.
/// `newest`: the disk's present state.
pub(crate) fn end_past(
    base: &OpenBase,
    place: usize,
    control: &mut ControlFile,
    newest: u64,
) -> Result<()> {
    let Some(why) = base.why_no_past(control, place)? else {
        return Ok(());
    };
    let known = &mut control.control;
    let disk_id = known.disks[place].id.get();
    // The log was empty.
    let is_new = newest == 0 && known.snapshots.is_empty();
    if is_new {
        return Ok(());
    }
    let path = base.options.path.display();
    let retain = Retention::of(&known.history);
    let kept = retain != Retention::Nothing && known.applied_lsn(disk_id) < newest;
    let lost = known.end_past(disk_id, newest);
    let lost = lost.map_err(|error| error.of_file(&control.path))?;
    let names: Vec<_> = lost.iter().map(|name| name.as_str()).collect();
    if !names.is_empty() {
        let names = names.join(", ");
        tracing::warn!(
            "{path}: {why}; the disk now has the contents of this image, and loses these \
             snapshots, which depend on the previous one: {names}"
        );
    } else if kept {
        tracing::warn!("{path}: {why}; its history starts over after LSN {newest}");
    }
    Ok(())
}

/// Gives the images' paths and inodes to their entries; no other entry keeps them.
fn take_over(bases: &[OpenBase], found: &[usize], control: &mut ControlFile) {
    for (place, entry) in control.control.disks.iter_mut().enumerate() {
        if found.contains(&place) {
            continue;
        }
        let path = entry.path(&control.home);
        for base in bases {
            if path == base.path {
                entry.path_len = U16::new(0);
            }
            let inode = &base.identity.inode;
            if (entry.device.get(), entry.inode.get()) == (inode.device, inode.number) {
                entry.set_inode(&crate::medium::mark::Inode::default());
            }
        }
    }
}

/// Updates an image's entry in memory, and creates the disk's state.
fn enter(base: OpenBase, place: usize, control: &mut ControlFile) -> Result<Arc<DiskState>> {
    let disk_id = control.control.disks[place].id.get();
    // Unknown until it is certain what the medium has.
    control.control.set_written(disk_id, 0);
    let entry = &mut control.control.disks[place];
    let own = base.is_of(entry, &control.home);
    entry.settle();
    if let (true, Some(mark)) = (own, &base.identity.mark) {
        entry.generation = U64::new(mark.generation);
    }
    entry.set_path(&base.path, &control.home)?;
    entry.set_inode(&base.identity.inode);
    if entry.resizing != 0 {
        set_size(base.file.as_ref(), &base.options.path, entry.size.get())?;
        entry.resizing = 0;
    }
    filesystem::settle_name(&base.path)?;
    if !planted(Mutant::AttachTrustsCache) {
        // The entry's mark and samples describe the image on the medium. A power cut may take what
        // a killed process left in the page cache, and then the image would be refused.
        let settled = base.file.sync_all().and_then(|()| base.file.drop_cache());
        settled.map_err(|error| Error::io("sync the base image", &base.options.path, error))?;
    }
    entry.renew_samples(base.file.as_ref());
    let spill = Spill::of(control, disk_id, OpenMode::Existing)?;
    let entry = &control.control.disks[place];
    let image = DiskImage::new(base.file.into(), spill);
    let mut state = DiskState::new(entry, &base.options, image);
    let written = written(state.base.file().as_ref());
    control.control.set_written(disk_id, written);
    state.since_lsn = control.control.since(disk_id);
    let rewinds = control.control.rewinds_of(state.id).copied();
    state.rewinds = Mutex::new(rewinds.collect());
    Ok(Arc::new(state))
}

/// Announces that a disk's image is about to be marked as open. `salt`: so that two copies of a
/// disk that are both used from now on never reach the same generation.
pub(crate) fn announce_open(control: &mut ControlFile, state: &DiskState, salt: u64) {
    if let Some(entry) = control.control.disk_mut(state.id) {
        entry.announce(1 + (salt >> 32));
        let next = entry.next_generation.get();
        state.generation.store(next, Ordering::Relaxed);
    }
}

/// Attaches a disk to a log in use that has no records of it, with its own entry or a new one.
/// `open`: the log's open disks. `newest`: the log's newest record.
pub(crate) fn adopt(
    base: OpenBase,
    control: &mut ControlFile,
    open: &[Arc<DiskState>],
    log_dir: &Path,
    (salt, newest): (u64, u64),
) -> Result<Arc<DiskState>> {
    let before = (
        control.control.disks.clone(),
        control.control.images.clone(),
    );
    let entered = enter_alone(base, control, open, log_dir, newest).and_then(|state| {
        if !state.base.is_spilled() {
            announce_open(control, &state, salt);
        }
        control.write()?;
        Ok(state)
    });
    let state = entered.inspect_err(|_| {
        (control.control.disks, control.control.images) = before;
    })?;
    if state.base.is_spilled() {
        // Its mark says that it is open, and may be impossible to write.
        return Ok(state);
    }
    LogLocation::of(control).write(state.base.file().as_ref(), &state.path);
    // As at open, the mark must be durable before the first record is logged.
    let marked = state.mark(true)?;
    let settled = control.change(|control| {
        if let Some(entry) = control.disk_mut(state.id) {
            entry.marked = u8::from(marked);
            entry.settle();
        }
    });
    if let Err(error) = settled {
        // Best effort: the error above is the one to report.
        let _ = state.mark(false);
        return Err(error);
    }
    Ok(state)
}

/// Finds or creates an image's entry in a log in use, and updates it in memory.
fn enter_alone(
    base: OpenBase,
    control: &mut ControlFile,
    open: &[Arc<DiskState>],
    log_dir: &Path,
    newest: u64,
) -> Result<Arc<DiskState>> {
    let bases = [base];
    let place = match look_up(&bases, control)?[0] {
        Some(place) => {
            let entry = &control.control.disks[place];
            if let Some(other) = open.iter().find(|other| other.id == entry.id.get()) {
                return Err(a_copy(&bases[0].options.path, &other.path));
            }
            accept(&bases[0], control, entry, log_dir, &UnappliedByDisk::new())?;
            end_past(&bases[0], place, control, newest)?;
            place
        }
        None => {
            refuse_other_copy(&bases[0], control, log_dir)?;
            bases[0].refuse_foreign(log_dir)?;
            register(control, &bases[0].path, bases[0].size, newest)?
        }
    };
    take_over(&bases, &[place], control);
    let [base] = bases;
    enter(base, place, control)
}

fn wrong_log_error(message: String) -> Error {
    Error::new(ErrorKind::WrongLog, message)
}

/// "1 record", "2 records".
fn count(records: u64) -> String {
    format!("{records} record{}", if records == 1 { "" } else { "s" })
}

/// The command that discards a disk's records.
pub(crate) fn discard_command(path: &Path, log_dir: &Path) -> String {
    let discard = format!("walvisor disk discard {}", path.display());
    with_log(discard, path, log_dir)
}

/// Adds the log to a command for the disk at `path`, if that is not the default.
pub(crate) fn with_log(command: String, path: &Path, log_dir: &Path) -> String {
    if default_log_dir(path) == log_dir {
        command
    } else {
        format!("{command} --log {}", log_dir.display())
    }
}
