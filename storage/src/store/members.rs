//! Disks that join or leave a log, in use or not.
//!
//! A disk that leaves a log in use stays in the log's table, so it can be opened with the log
//! again. [`leave_log`] also removes it from the table:
//!
//! ```text
//!   1. the log's records of the disk are copied to its image     (with all others: the checkpoint covers the log)
//!   2. the image loses its mark, or gets that of the new log     the disk can still be opened with its log, by its path
//!   3. the new log's table names the disk                        (only [`move_to_log`]) it can be opened with either log
//!   4. the old log's table names it no more
//! ```
//! Each step is durable before the next begins. After a crash between two steps, the same command
//! continues.

use std::path::{Path, PathBuf};

use crate::SECTOR_SIZE;
use crate::catalog::control::{
    ControlFile, find_control, open_control, open_or_create_log, real_path,
};
use crate::catalog::log_location::LogLocation;
use crate::catalog::options::{DiskOptions, StoreOptions, check_options};
use crate::catalog::retention::Retention;
use crate::catalog::snapshot::Snapshot;
use crate::disk::handle::Disk;
use crate::error::{Error, ErrorKind, Result, invalid};
use crate::log::disk_state::DiskState;
use crate::log::orders::{DiskAdoption, KeeperTask};
use crate::log::state::Log;
use crate::medium::filesystem::{OpenMode, files};
use crate::medium::lock::Access;
use crate::mutant::{Mutant, planted};
use crate::store::attach::{OpenBase, adopt, is_known, refuse_other_copy};
use crate::store::create::{first_segment, refuse_unapplied, register_disk};
use crate::store::open::{Store, copy_closed};
use crate::store::view::View;
use crate::sync::{Arc, mpsc};

impl Store {
    /// Opens another disk while the log is in use. A raw image that belongs to no log joins this
    /// one.
    ///
    /// # Errors
    /// As [`Store::open`] for this disk; the other disks are not affected.
    pub fn add_disk(&mut self, options: &DiskOptions) -> Result<&Disk> {
        let (added, adding) = mpsc::channel();
        self.log.order(add_task(&self.log, options, added)?)?;
        let state = adding.recv().map_err(|_| {
            let dir = self.log.dir.display();
            Error::new(ErrorKind::Io, format!("{dir}: the log is being closed"))
        })?;
        self.disks.push(Disk {
            log: self.log.clone(),
            state,
        });
        Ok(&self.disks[self.disks.len() - 1])
    }

    /// Closes one disk while the others stay in use: copies its records to its base image, which is
    /// then a plain raw image, and unlocked once no [`Disk`] or [`Port`](crate::Port) of it is
    /// left. Writes through those that are left fail. The disk stays in the log's table.
    ///
    /// If the log keeps history, nothing is copied: the log keeps the disk's records, and the image
    /// stays locked until the store is closed. The disk can be [added](Self::add_disk) again. A log
    /// open for reading only copies nothing either.
    ///
    /// # Errors
    /// If the disk is not one of [`disks`](Self::disks), or the copy fails. The disk then stays
    /// open.
    pub fn remove_disk(&mut self, path: &Path) -> Result<()> {
        self.close_disk(path, false)
    }

    /// As [`remove_disk`](Self::remove_disk), but does not write to the base image, which may be
    /// failing, and needs no answer from it. What it lacks goes to a file in the log's directory,
    /// and is copied back once the disk is [added](Self::add_disk), or opened, again. Until then
    /// the image stays marked as open.
    ///
    /// # Errors
    /// If the disk is not one of [`disks`](Self::disks), or the file can't be written. The disk
    /// then stays open.
    pub fn remove_disk_keeping_records(&mut self, path: &Path) -> Result<()> {
        self.close_disk(path, true)
    }

    fn close_disk(&mut self, path: &Path, keeps_records: bool) -> Result<()> {
        let place = self.disks.iter().position(|disk| disk.path() == path);
        let place = place.ok_or_else(|| {
            Error::new(
                ErrorKind::NotFound,
                format!(
                    "{}: not open on the log in {}",
                    path.display(),
                    self.log.dir.display()
                ),
            )
        })?;
        // A log open for reading only has no keeper, and nothing to copy.
        if self.control.is_none() {
            let state = self.disks[place].state.clone();
            self.log.order(KeeperTask::Remove(state, keeps_records))?;
        }
        self.disks.remove(place);
        Ok(())
    }
}

/// The task that adds a disk and sends it to `added`. Reads from its image first: a file system
/// that does not answer holds up the caller, not the log's keeper.
pub(crate) fn add_task(
    log: &Log,
    options: &DiskOptions,
    added: mpsc::Sender<Arc<DiskState>>,
) -> Result<KeeperTask> {
    let path = real_path(&options.path)?;
    let (asked, dir, salt) = (options.clone(), log.dir.clone(), log.medium.salt());
    let sector = &mut [0; SECTOR_SIZE as usize];
    // The keeper reports what is wrong with it.
    let _ = files()
        .open(&path, OpenMode::Read)
        .and_then(|image| image.read_exact_at(sector, 0));
    let adopt: DiskAdoption = Box::new(move |control, open, newest| {
        let base = OpenBase::open(&asked, Access::Write, &dir, false)?;
        adopt(base, control, open, &dir, (salt, newest))
    });
    Ok(KeeperTask::Add(options.clone(), path, adopt, added))
}

/// The directory of the log that a disk leaves, and the detached images of others on it.
type OldLog<'a> = (&'a Path, &'a [PathBuf]);

/// Removes the disk at `path` from the log in `log_dir`: its image is then a plain raw image,
/// without a mark. The contents of the log's other disks do not change. Returns their images.
/// `detached`: those to which the log may have to be copied first.
///
/// # Errors
/// As [`inspect`](crate::inspect); if the copy fails; or [`ErrorKind::Locked`] if a restore has not
/// fetched all of the image. The disk is then still on the log.
pub fn leave_log(path: &Path, log_dir: &Path, detached: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let (base, mut control, place) = open_emptied(path, (log_dir, detached))?;
    if let Some(gate) = base.file.chunk_gate() {
        gate.refuse_absent(path)?;
    }
    LogLocation::remove(base.file.as_ref());
    let unmarked = base.file.write_mark(None);
    let unmarked = unmarked.and_then(|_| base.file.sync_all());
    unmarked.map_err(|error| Error::io("unmark", path, error))?;
    control.change(|control| {
        control.disks.remove(place);
    })?;
    Ok(control.image_paths())
}

/// Moves the disk at `path` from the log in `from` to the one in `to`, which is created with
/// `options` if necessary, and with the retention of the log in `from` if `options` has none. The
/// disk's past is lost. A disk that is only on the log in `to` has been moved already; a raw image
/// on no log joins. `detached`: images of other disks of the log in `from`, to which it may have to
/// be copied first.
///
/// # Errors
/// As [`leave_log`] and [`import_disk`](crate::import_disk). The disk can then be opened with at
/// least one of the logs.
pub fn move_to_log(
    path: &Path,
    from: &Path,
    to: &Path,
    options: &StoreOptions,
    detached: &[PathBuf],
) -> Result<()> {
    check_options(options)?;
    if real_path(from)? == real_path(to)? {
        return Err(invalid(format!(
            "{}: the disk's log already; name another",
            to.display()
        )));
    }
    let (base, old) = if knows(from, path)? {
        let (base, old, place) = open_emptied(path, (from, detached))?;
        (base, Some((old, place)))
    } else if knows(to, path)? {
        // What a killed process wrote may be in the page cache only.
        return open_control(to, Access::Log)?.confirm();
    } else {
        let base = OpenBase::open(&DiskOptions::new(path), Access::Write, from, false)?;
        base.refuse_foreign(from)?;
        (base, None)
    };
    // A new log keeps as much history as the one before.
    let mut options = *options;
    if let Some((old, _)) = &old {
        options.retain = options.retain.or(Some(Retention::of(&old.control.history)));
    }
    let join = &mut |control: &mut ControlFile| {
        refuse_unapplied(path, to, control)?;
        if !is_known(&base, control) {
            refuse_other_copy(&base, control, to)?;
        }
        register_disk(control, path, base.file.as_ref(), path, base.size)?;
        Ok(())
    };
    let (mut new, made) = open_or_create_log(to, &options, join)?;
    if made {
        first_segment(&new, to)?
    } else {
        join(&mut new)?;
        new.write()?;
    }
    if let Some((mut old, place)) = old {
        old.change(|control| {
            control.disks.remove(place);
        })?;
    }
    LogLocation::of(&new).write(base.file.as_ref(), path);
    Ok(())
}

/// Whether there is a log with an entry for the image.
fn knows(log_dir: &Path, path: &Path) -> Result<bool> {
    let Some(control) = find_control(log_dir, Access::LogRead)? else {
        return Ok(false);
    };
    let base = OpenBase::open_as_is(&DiskOptions::new(path), Access::Read, true)?;
    Ok(is_known(&base, &control))
}

/// Opens a disk and its log, once the image has all of the disk's bytes and the log can do without
/// the disk's entry. Returns the image, the log, and the place of the entry.
fn open_emptied(
    path: &Path,
    (log_dir, detached): OldLog<'_>,
) -> Result<(OpenBase, ControlFile, usize)> {
    for copied in [false, true] {
        let View {
            base,
            log,
            extents,
            rewound,
            last_lsn,
            reader,
            ..
        } = View::open(path, log_dir, Access::Write, None)?;
        let Some((mut control, place)) = log else {
            return Err(Error::new(
                ErrorKind::NotFound,
                format!(
                    "{}: there is no log at {}; name the disk's log with --log DIR",
                    path.display(),
                    log_dir.display()
                ),
            ));
        };
        Snapshot::refuse_loss(&control.control, path, "the disk would leave its log")?;
        let entry = &control.control.disks[place];
        let applied = control.control.header.checkpoint_lsn.get();
        // There is no record after the last one, whatever was discarded.
        let void = entry.void_lsn.get().min(last_lsn) > applied;
        if planted(Mutant::LeaveUncopied) {
            return Ok((base, control, place));
        }
        if extents.is_empty() && !rewound && !void && !reader.is_spilled() && entry.resizing == 0 {
            // A killed process may have left this checkpoint LSN in the page cache only. If power
            // failed after the image gets its new mark, the old log would have the records again
            // and refuse the image.
            control.confirm()?;
            return Ok((base, control, place));
        }
        if copied {
            break;
        }
        // The extents keep the segments open, and so locked.
        drop((base, control, extents, reader));
        copy_closed(path, log_dir, detached)?;
    }
    Err(Error::new(
        ErrorKind::Locked,
        format!(
            "{}: another process used the disk in the meantime; close it there, then try again",
            path.display()
        ),
    ))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::log::spill::is_spill;
    use crate::store::resize::tests::{MIB, copy_all, end, fill};
    use crate::{Operation, Point, Port, create_disk, import_disk, inspect};

    fn options() -> StoreOptions {
        StoreOptions {
            segment_size: MIB,
            ..StoreOptions::default()
        }
    }

    /// The byte that fills the first page.
    fn byte(port: &mut Port) -> u8 {
        let sector = 0;
        let page = end(port, Operation::Read { sector, sectors: 8 }).unwrap();
        assert!(page.iter().all(|byte| *byte == page[0]));
        page[0]
    }

    fn open(log: &Path, disks: &[&Path]) -> Result<Store> {
        open_with(log, disks, None)
    }

    fn open_with(log: &Path, disks: &[&Path], close_time: Option<Duration>) -> Result<Store> {
        let disks: Vec<_> = disks.iter().map(|path| DiskOptions::new(*path)).collect();
        let options = StoreOptions {
            close_time,
            ..options()
        };
        Store::open(log, &disks, &options)
    }

    /// The first page of a disk, opened with this log, whose other disks are detached.
    fn first(log: &Path, disk: &Path) -> Result<u8> {
        let on_log = open_control(log, Access::LogRead)?.image_paths();
        let mut disks: Vec<_> = on_log.iter().map(DiskOptions::detached).collect();
        disks.push(DiskOptions::new(disk));
        let store = Store::open(log, &disks, &options())?;
        let byte = byte(&mut store.disks()[0].open_port()?);
        store.close()?;
        Ok(byte)
    }

    /// Two disks on a log that was closed without copying, each with a record of its own byte.
    fn logged_disks(top: &Path) -> [PathBuf; 3] {
        let [a, b, log] = ["a", "b", "log"].map(|name| top.join("live").join(name));
        std::fs::create_dir_all(top.join("live")).unwrap();
        for disk in [&a, &b] {
            create_disk(disk, MIB, &log, &options()).unwrap();
        }
        let store = open_with(&log, &[&a, &b], Some(Duration::ZERO)).unwrap();
        for (disk, byte) in store.disks().iter().zip([7, 8]) {
            let mut port = disk.open_port().unwrap();
            fill(&mut port, 0, byte);
            end(&mut port, Operation::Flush);
        }
        store.close().unwrap();
        [a, b, log]
    }

    #[test]
    fn a_disk_that_left_or_moved_leaves_the_others_unchanged() {
        for moves in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let [a, b, log] = logged_disks(dir.path());
            let (new, others) = (dir.path().join("new"), std::slice::from_ref(&b));
            let again = || move_to_log(&a, &log, &new, &options(), others);
            if moves {
                again().unwrap();
                assert_eq!(first(&new, &a).unwrap(), 7);
                again().unwrap();
            } else {
                assert_eq!(leave_log(&a, &log, others).unwrap(), others);
                assert_eq!(std::fs::read(&a).unwrap()[..4096], [7; 4096]);
                assert!(!inspect(&a, &new).unwrap().marked);
            }
            let error = leave_log(&a, &log, others).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::WrongLog);
            assert_eq!(first(&log, &b).unwrap(), 8);
            let left = open_control(&log, Access::LogRead).unwrap().image_paths();
            assert_eq!(left, others);
        }
    }

    /// A raw image joins a log by being moved to it; an imported one is copied.
    #[test]
    fn raw_images_join_an_existing_log() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        create_disk(&at("a"), MIB, &at("log"), &options()).unwrap();
        std::fs::write(at("raw"), vec![3; MIB as usize]).unwrap();
        let none = &mut |_, _| {};
        import_disk(&at("b"), &at("raw"), &at("log"), &options(), none).unwrap();
        move_to_log(&at("raw"), &at("raw.wal"), &at("log"), &options(), &[]).unwrap();
        let names = ["a", "b", "raw"].map(at);
        let disks: Vec<_> = names.iter().map(PathBuf::as_path).collect();
        let store = open(&at("log"), &disks).unwrap();
        for (disk, expected) in store.disks().iter().zip([0, 3, 3]) {
            assert_eq!(byte(&mut disk.open_port().unwrap()), expected);
        }
        store.close().unwrap();
        let same = move_to_log(&at("a"), &at("log"), &at("./log"), &options(), &[]);
        assert!(same.unwrap_err().to_string().contains("already"));
    }

    /// A stranger's log names a file of the host as the image of one of its disks.
    #[test]
    fn an_image_that_only_the_log_names_is_not_opened() {
        let dir = tempfile::tempdir().unwrap();
        let [a, b, log] = logged_disks(dir.path());
        let precious = dir.path().join("precious");
        std::fs::write(&precious, vec![1; MIB as usize]).unwrap();
        let base = OpenBase::open(&DiskOptions::new(&precious), Access::Read, &log, false).unwrap();
        let mut control = open_control(&log, Access::Log).unwrap();
        let home = control.home.clone();
        let forge = |control: &mut crate::format::Control| {
            let entry = &mut control.disks[1];
            entry.set_path(&base.path, &home).unwrap();
            entry.set_inode(&base.identity.inode);
            entry.marked = 0;
            entry.samples = zerocopy::FromZeros::new_zeroed();
        };
        control.change_both(forge).unwrap();
        drop((base, control));

        let told = open(&log, &[&a]).err().expect("refused").to_string();
        let part = format!("1 record of another disk, last at {}", precious.display());
        assert!(
            told.contains(&part) && told.contains("only the log names it"),
            "{told}"
        );
        assert_eq!(std::fs::read(&precious).unwrap(), vec![1; MIB as usize]);
        // Named, it is the image, as in a log that is no stranger's.
        let disks = [DiskOptions::new(&a), DiskOptions::detached(&precious)];
        Store::open(&log, &disks, &options())
            .unwrap()
            .close()
            .unwrap();
        assert_eq!(std::fs::read(&precious).unwrap()[..4096], [8; 4096]);
        assert_eq!(std::fs::read(&b).unwrap()[..4096], [0; 4096]);
    }

    /// The image does not change, and is unlocked; every later open finds what it lacks.
    #[test]
    fn a_disk_leaves_a_log_in_use_and_its_records_stay() {
        for again in [false, true] {
            let dir = tempfile::tempdir().unwrap();
            let [a, b, log] = logged_disks(dir.path());
            let mut store = open_with(&log, &[&a, &b], Some(Duration::ZERO)).unwrap();
            store.disks()[0].checkpoint().unwrap();
            let before = std::fs::read(&a).unwrap();
            fill(&mut store.disks()[0].open_port().unwrap(), 8, 9);
            store.remove_disk_keeping_records(&a).unwrap();
            assert!(std::fs::read(&a).unwrap() == before);
            let error = OpenBase::open_as_is(&DiskOptions::new(&a), Access::Write, false).err();
            assert!(error.is_none(), "{error:?}");
            if again {
                drop(store);
                // The other disks don't need it.
                open_with(&log, &[&b], None).unwrap().close().unwrap();
                store = open_with(&log, &[&a], None).unwrap();
            } else {
                store.add_disk(&DiskOptions::new(&a)).unwrap();
            }
            store.disks().last().unwrap().checkpoint().unwrap();
            store.close().unwrap();
            let bytes = std::fs::read(&a).unwrap();
            assert_eq!(
                (&bytes[..4096], &bytes[4096..8192]),
                (&[7; 4096][..], &[9; 4096][..])
            );
            assert!(!has_spill(&log));
        }
    }

    /// Whether a log's directory has a spill file.
    fn has_spill(log: &Path) -> bool {
        let mut names = std::fs::read_dir(log)
            .unwrap()
            .map(|entry| entry.unwrap().file_name());
        names.any(|name| is_spill(&name))
    }

    /// Nothing was written, so nothing is copied: the image does not change, and is unlocked.
    #[test]
    fn a_disk_leaves_a_log_that_is_open_for_reading_only() {
        let dir = tempfile::tempdir().unwrap();
        let [a, b, log] = logged_disks(dir.path());
        let before = std::fs::read(&a).unwrap();
        let disks = [&a, &b].map(DiskOptions::new);
        let mut store = Store::open_read_only(&log, &disks, &options()).unwrap();
        store.remove_disk(&a).unwrap();
        assert_eq!(store.disks().len(), 1);
        assert_eq!(std::fs::read(&a).unwrap(), before);
        let error = store.add_disk(&disks[0]).err().unwrap().to_string();
        assert!(error.contains("open for reading only"), "{error}");
        store.close().unwrap();
        assert_eq!(first(&log, &a).unwrap(), 7);
    }

    /// A new disk at the path of one that left the log in use must not orphan the other's void
    /// records.
    #[test]
    fn a_disk_is_made_where_one_has_left_the_log_in_use() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        for name in ["a", "b"] {
            create_disk(&at(name), MIB, &at("log"), &options()).unwrap();
        }
        let (a, b, log) = (at("a"), at("b"), at("log"));
        let mut store = open_with(&log, &[&a, &b], Some(Duration::ZERO)).unwrap();
        for disk in store.disks() {
            fill(&mut disk.open_port().unwrap(), 0, 7);
        }
        store.remove_disk(&a).unwrap();
        assert_eq!(std::fs::read(&a).unwrap()[..4096], [7; 4096]);
        store.close().unwrap();
        std::fs::remove_file(&a).unwrap();
        create_disk(&a, MIB, &log, &options()).unwrap();
        assert_eq!(first(&log, &a).unwrap(), 0);
        assert_eq!(first(&log, &b).unwrap(), 7);
    }

    /// What a disk left behind in the log when it was removed stays void, even if it is added and
    /// removed again without a write, and was restored in place before its last writes.
    #[test]
    fn a_disk_removed_twice_leaves_nothing_in_the_log_that_counts() {
        let dir = tempfile::tempdir().unwrap();
        let top = dir.path().join("top");
        std::fs::create_dir(&top).unwrap();
        let at = |name: &str| top.join(name);
        for name in ["a", "b"] {
            create_disk(&at(name), MIB, &at("log"), &options()).unwrap();
        }
        let (a, b, log) = (at("a"), at("b"), at("log"));
        let mut store = open(&log, &[&a, &b]).unwrap();
        let mut port = store.disks()[1].open_port().unwrap();
        fill(&mut port, 0, 1);
        let then = store.disks()[1].mark(&"then".parse().unwrap()).unwrap();
        fill(&mut port, 0, 2);
        end(&mut port, Operation::Flush);
        drop(port);
        store.disks()[1].rewind(Point::Lsn(then.lsn)).unwrap();
        let mut port = store.disks()[1].open_port().unwrap();
        fill(&mut port, 8, 3);
        end(&mut port, Operation::Flush);
        drop(port);
        store.remove_disk(&b).unwrap();
        store.add_disk(&DiskOptions::new(&b)).unwrap();
        store.remove_disk(&b).unwrap();
        let killed = dir.path().join("killed");
        copy_all(&top, &killed);
        let disks = ["a", "b"].map(|name| DiskOptions::new(killed.join(name)));
        Store::open(&killed.join("log"), &disks, &options())
            .unwrap()
            .close()
            .unwrap();
        let image = std::fs::read(killed.join("b")).unwrap();
        assert_eq!((image[0], image[4096]), (1, 3));
    }
}
