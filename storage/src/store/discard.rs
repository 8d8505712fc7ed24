//! What is left to do with an image that the log does not take for its disk's: to discard the log's
//! records of the disk, if the image that they belong to is gone, or to adopt the image, if only its
//! identity is lost.
//!
//! Discarded records stay in the log, but the disk's entry says that they are void. So a crash
//! leaves all of them valid or none, and other disks keep theirs. Then the image at the path, if it
//! can be the disk's, is marked as closed.

use std::path::{Path, PathBuf};

use zerocopy::little_endian::U64;

use crate::catalog::control::{
    ControlFile, existing_log, find_control, has_log, open_control, real_path,
};
use crate::catalog::identity::written;
use crate::catalog::log_location::LogLocation;
use crate::catalog::options::DiskOptions;
use crate::catalog::retention::Retention;
use crate::catalog::snapshot::SnapshotName;
use crate::error::{Error, ErrorKind, Result};
use crate::format::DiskEntry;
use crate::log::spill::{Spill, SpillPaths};
use crate::medium::directory::{directory, directory_to_read};
use crate::medium::engine::EngineKind;
use crate::medium::fetch_map::FetchMap;
use crate::medium::filesystem::{OpenMode, files};
use crate::medium::lock::Access;
use crate::medium::mark::{ImageMark, hex};
use crate::mutant::{Mutant, planted};
use crate::recovery::replay::{UnappliedRecords, read_for_recovery, read_log_until};
use crate::store::attach::{OpenBase, end_past, is_only_disk};

/// What a log holds of a disk: what [`discard_log`] has discarded, or [`adopt_image`] has kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeldRecords {
    /// The disk's UUID: 32 hex digits.
    pub disk: String,
    /// Where the disk's image was, according to the log; `None` if there was no log.
    pub image: Option<PathBuf>,
    /// Records of the disk that were not in its image; `None` (unknown) if there was no log.
    pub records: Option<u64>,
    /// Bytes of the payloads of those records, and of the disk's spill file; `None` if there was no
    /// log.
    pub payload_bytes: Option<u64>,
    /// Whether the image at the path can now be opened as the disk.
    pub image_fits: bool,
}

/// Discards the records of the disk at `path` that are in the log in `log_dir` but not in its
/// image. From now on, whatever image is at `path` is the disk. The disk is the one that the log
/// has at `path`, or else the one named by the image's mark. Other disks keep their records.
/// Without a log, only the image is changed: it loses the mark that says it is incomplete.
///
/// # Errors
/// [`ErrorKind::WrongLog`] if the log has no such disk; [`ErrorKind::Damaged`] if it can't be read;
/// [`ErrorKind::Locked`] if the log or the image is in use. Nothing is changed then.
pub fn discard_log(path: &Path, log_dir: &Path) -> Result<HeldRecords> {
    let options = DiskOptions::new(path);
    if !has_log(log_dir) {
        let base = OpenBase::open(&options, Access::Write, log_dir, false)?;
        refuse_headless(&base, log_dir)?;
        return unmark(&base);
    }
    let mut control = open_control(log_dir, Access::Log)?;
    let base = existing(OpenBase::open(&options, Access::Write, log_dir, true))?;
    let place = find(path, base.as_ref(), &control, log_dir)?;
    let medium = directory(log_dir, EngineKind::Blocking);
    // Make the log durable first: the LSN taken below must follow its newest record, which a power
    // cut could drop otherwise.
    let (scan, mut unapplied) = read_for_recovery(&medium, log_dir, &mut control, &mut |_, _| {})?;
    let entry = control.control.disks[place];
    let given_up = unapplied.remove(&entry.id.get()).unwrap_or_default();
    let spilled = spilled_bytes(&control, &entry);
    // LSNs seen on the medium are never reused, so a record that is void now stays void.
    let newest = scan.max_lsn.max(scan.last.lsn);
    let fits = base.filter(|base| base.size_fits(&entry) && !is_another(base, &control, place));
    let lsn = scan.newest(&control.control).lsn;
    if let Some(base) = &fits {
        // The mark may be what a killed process left in the page cache, and a power cut may take
        // that.
        let synced = base.file.sync_all();
        synced.map_err(|error| Error::io("sync the base image", path, error))?;
        // Whatever image it is.
        end_past(base, place, &mut control, lsn)?;
    }
    if control.control.is_spilled(entry.id.get()) {
        // Its past needs what is in the spill file.
        let ended = control.control.end_past(entry.id.get(), lsn);
        ended.map_err(|error| error.of_file(log_dir))?;
    }
    // Without its records, the disk is not what it was at the newest one, so its new state gets an
    // LSN of its own, which is nobody's yet.
    let newest = newest.max(lsn + 1);
    let entry_id = entry.id.get();
    // In both slots: if one rots, the other must not bring the records back.
    control.change_both(|control| {
        let next_lsn = control.header.next_lsn.get().max(newest + 1);
        control.header.next_lsn = U64::new(next_lsn);
        let entry = &mut control.disks[place];
        let kept = 2 * u64::from(planted(Mutant::DiscardKeepsRecord));
        entry.void_lsn = U64::new(newest.saturating_sub(kept));
        if let Some(base) = &fits {
            entry.announce(1);
            // The image still has this mark. If a crash comes before the new one is written, the
            // disk must open with it.
            if let Some(mark) = base.identity.mark.filter(|mark| mark.disk == entry.disk) {
                entry.generation = U64::new(mark.generation);
            }
        }
        let none = control.set_spilled(entry_id, false);
        none.expect("forgetting needs no room");
    })?;
    SpillPaths::new(log_dir, &entry.disk).remove(&*files());
    if let Some(base) = &fits {
        mark_as_own(base, &mut control, place, false)?;
    }
    Ok(report(
        &entry,
        &control,
        (&given_up, spilled),
        fits.is_some(),
    ))
}

/// Takes the image at `path` for its disk's although it has lost its identity: it was copied
/// without its extended attributes, or another program has written to it. The log's records of the
/// disk, which stay, are newer than the image from now on. The disk is the one that the log has at
/// `path`, or else the one named by the image's mark. If another image is the disk's own, the disk
/// is then a mix of both.
///
/// # Errors
/// [`ErrorKind::WrongLog`] if the log has no such disk, or the image has another size or is another
/// disk's; [`ErrorKind::Damaged`] if the log can't be read; [`ErrorKind::Locked`] if the log or the
/// image is in use. Nothing is changed then.
pub fn adopt_image(path: &Path, log_dir: &Path) -> Result<HeldRecords> {
    let mut control = existing_log(log_dir, Access::Log)?;
    let (base, place) = adoptable(path, &control, log_dir, Access::Write)?;
    let entry = control.control.disks[place];
    let medium = directory(log_dir, EngineKind::Blocking);
    let (scan, mut unapplied) = read_for_recovery(&medium, log_dir, &mut control, &mut |_, _| {})?;
    let held = unapplied.remove(&entry.id.get()).unwrap_or_default();
    let spilled = spilled_bytes(&control, &entry);
    let synced = base.file.sync_all();
    synced.map_err(|error| Error::io("sync the base image", path, error))?;
    // Its past needs the image as it was.
    let newest = scan.newest(&control.control).lsn;
    end_past(&base, place, &mut control, newest)?;
    control.change_both(|control| control.disks[place].announce(1))?;
    mark_as_own(&base, &mut control, place, true)?;
    Ok(report(&entry, &control, (&held, spilled), true))
}

/// What [`adopt_image`] would do: what the log holds of the disk, and the snapshots that would be
/// lost; `None` in their place: no history would end. Changes nothing.
///
/// # Errors
/// As [`adopt_image`].
pub fn plan_adoption(
    path: &Path,
    log_dir: &Path,
) -> Result<(HeldRecords, Option<Vec<SnapshotName>>)> {
    let mut control = existing_log(log_dir, Access::LogRead)?;
    let (base, place) = adoptable(path, &control, log_dir, Access::Read)?;
    let entry = control.control.disks[place];
    let medium = directory_to_read(log_dir, Access::LogRead, None);
    let known = &mut control.control;
    let (scan, mut unapplied) = read_log_until(&medium, log_dir, known, u64::MAX)?;
    let held = unapplied.remove(&entry.id.get()).unwrap_or_default();
    let held = report(
        &entry,
        &control,
        (&held, spilled_bytes(&control, &entry)),
        true,
    );
    if base.why_no_past(&control, place)?.is_none() {
        return Ok((held, None));
    }
    let newest = scan.newest(&control.control).lsn;
    let lost = control.control.end_past(entry.id.get(), newest);
    let lost = lost.map_err(|error| error.of_file(log_dir))?;
    let keeps = Retention::of(&control.control.history) != Retention::Nothing;
    Ok((held, Some(lost).filter(|lost| keeps || !lost.is_empty())))
}

/// Opens an image that can be a disk's of the log. Also returns the disk's place in its table.
fn adoptable(
    path: &Path,
    control: &ControlFile,
    log_dir: &Path,
    access: Access,
) -> Result<(OpenBase, usize)> {
    let base = OpenBase::open_as_is(&DiskOptions::new(path), access, true)?;
    let place = find_lost(&base, control, log_dir)?;
    let entry = control.control.disks[place];
    if is_another(&base, control, place) {
        return Err(Error::new(
            ErrorKind::WrongLog,
            format!(
                "{}: the image of another disk than the log in {} has there; put the right image \
                 there, or write both into a new file with 'walvisor disk export --log-wins'",
                path.display(),
                log_dir.display()
            ),
        ));
    }
    base.refuse_other_size(&entry, log_dir)?;
    Ok((base, place))
}

/// Marks the image as that of the disk at this place of the log's table, which was announced.
/// `open`: the log has newer bytes.
fn mark_as_own(base: &OpenBase, control: &mut ControlFile, place: usize, open: bool) -> Result<()> {
    let path = &base.options.path;
    let mut settled = control.control.disks[place];
    let mark = ImageMark {
        disk: settled.disk,
        generation: settled.next_generation.get(),
        open,
    };
    LogLocation::of(control).write(base.file.as_ref(), path);
    let marked = base.file.write_mark(Some(&mark));
    let marked = marked.and_then(|marked| base.file.sync_all().map(|()| marked));
    let marked = marked.map_err(|error| Error::io("mark", path, error))?;
    settled.settle();
    settled.marked = u8::from(marked);
    settled.set_inode(&base.identity.inode);
    settled.renew_samples(base.file.as_ref());
    settled.set_path(&base.path, &control.home)?;
    let written = written(base.file.as_ref());
    control.change(|control| {
        control.disks[place] = settled;
        control.set_written(settled.id.get(), written);
    })
}

/// What [`discard_log`] would do. Changes nothing.
///
/// # Errors
/// As [`discard_log`].
pub fn plan_discard(path: &Path, log_dir: &Path) -> Result<HeldRecords> {
    let options = DiskOptions::new(path);
    let Some(mut control) = find_control(log_dir, Access::LogRead)? else {
        let base = OpenBase::open(&options, Access::Read, log_dir, false)?;
        refuse_headless(&base, log_dir)?;
        return without_log(&base);
    };
    let base = existing(OpenBase::open(&options, Access::Read, log_dir, true))?;
    let place = find(path, base.as_ref(), &control, log_dir)?;
    let medium = directory_to_read(log_dir, Access::LogRead, None);
    let known = &mut control.control;
    let (_, mut unapplied) = read_log_until(&medium, log_dir, known, u64::MAX)?;
    let entry = &control.control.disks[place];
    let given_up = unapplied.remove(&entry.id.get()).unwrap_or_default();
    let spilled = spilled_bytes(&control, entry);
    let fits =
        base.is_some_and(|base| base.size_fits(entry) && !is_another(&base, &control, place));
    Ok(report(entry, &control, (&given_up, spilled), fits))
}

/// Bytes in a disk's spill file, which may be damaged.
fn spilled_bytes(control: &ControlFile, entry: &DiskEntry) -> u64 {
    let spill = Spill::of(control, entry.id.get(), OpenMode::Read);
    spill.ok().flatten().map_or(0, |spill| spill.bytes())
}

fn report(
    entry: &DiskEntry,
    control: &ControlFile,
    (given_up, spilled): (&UnappliedRecords, u64),
    image_fits: bool,
) -> HeldRecords {
    HeldRecords {
        disk: hex(&entry.disk),
        image: Some(entry.path(&control.home)),
        records: Some(given_up.records),
        payload_bytes: Some(given_up.payload_bytes + spilled),
        image_fits,
    }
}

/// The disk's image, if there is one.
fn existing(opened: Result<OpenBase>) -> Result<Option<OpenBase>> {
    match opened {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        opened => opened.map(Some),
    }
}

/// Finds the place of the disk's entry.
fn find(
    path: &Path,
    base: Option<&OpenBase>,
    control: &ControlFile,
    log_dir: &Path,
) -> Result<usize> {
    let real = real_path(path)?;
    let mut entries = control.control.disks.iter();
    let at_path = entries.position(|entry| entry.path(&control.home) == real);
    let mark = base.and_then(|base| base.identity.mark);
    let marked = || {
        let disk = mark?.disk;
        let mut entries = control.control.disks.iter();
        entries.position(|entry| entry.disk == disk)
    };
    at_path.or_else(marked).ok_or_else(|| {
        Error::new(
            ErrorKind::WrongLog,
            format!(
                "{}: the log in {} has no disk at this path; name the path where the disk was \
                 ('walvisor disk info' of another disk of the log lists them), or the right log \
                 with --log DIR",
                path.display(),
                log_dir.display(),
            ),
        )
    })
}

/// As [`find`], for an image that may have lost both its identity and its place: its disk is then
/// the log's only one, if that has the size.
///
/// # Errors
/// As [`find`]; or [`ErrorKind::Locked`] if the image may be a copy of one that a restore has not
/// fetched as a whole.
pub(crate) fn find_lost(base: &OpenBase, control: &ControlFile, log_dir: &Path) -> Result<usize> {
    let mut found = find(&base.options.path, Some(base), control, log_dir);
    if is_only_disk(base, control) {
        found = found.or(Ok(0));
    }
    let place = found?;
    let own = control.control.disks[place].path(&control.home);
    if own != base.path {
        FetchMap::refuse(&own)?;
    }
    Ok(place)
}

/// Whether the image belongs to another disk: one of this log, or one that another log has open.
fn is_another(base: &OpenBase, control: &ControlFile, place: usize) -> bool {
    let disks = &control.control.disks;
    let foreign = |mark: &ImageMark| mark.open && mark.disk != disks[place].disk;
    base.identity.mark.as_ref().is_some_and(foreign)
        || disks.iter().enumerate().any(|(other, entry)| {
            other != place && entry.is_image(&base.identity, entry.path(&control.home) == base.path)
        })
}

/// Refuses to take a log for gone whose segments are there.
fn refuse_headless(base: &OpenBase, log_dir: &Path) -> Result<()> {
    match base.lost_log(log_dir) {
        None => Ok(()),
        Some(lost) => Err(Error::new(
            ErrorKind::Damaged,
            format!(
                "{}: its log at {lost}; to give up what they hold, remove that directory first",
                base.options.path.display()
            ),
        )),
    }
}

/// The report for an image that is marked as open, and whose log is gone.
///
/// # Errors
/// [`ErrorKind::NotFound`] if it is not marked so.
fn without_log(base: &OpenBase) -> Result<HeldRecords> {
    let mark = base.identity.mark.filter(|mark| mark.open);
    let report = mark.map(|mark| HeldRecords {
        disk: hex(&mark.disk),
        image: None,
        records: None,
        payload_bytes: None,
        image_fits: true,
    });
    report.ok_or_else(|| {
        Error::new(
            ErrorKind::NotFound,
            format!(
                "{}: there is nothing to discard: the image is not marked as open, and there is no \
                 log; name its log with --log DIR",
                base.options.path.display()
            ),
        )
    })
}

/// Removes the mark of an image whose log is gone.
fn unmark(base: &OpenBase) -> Result<HeldRecords> {
    let report = without_log(base)?;
    LogLocation::remove(base.file.as_ref());
    let unmarked = base.file.write_mark(None);
    let unmarked = unmarked.and_then(|_| base.file.sync_all());
    unmarked.map_err(|error| Error::io("unmark", &base.options.path, error))?;
    Ok(report)
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::store::resize::tests::{MIB, end};
    use crate::{
        Operation, RescueOptions, Store, StoreOptions, create_disk, export_disk, rescue_disk,
    };

    /// An image is copied by a program that leaves out extended attributes.
    #[test]
    fn an_image_without_its_identity_is_adopted_with_all_records() {
        let dir = tempfile::tempdir().unwrap();
        let (path, log) = (dir.path().join("disk.img"), dir.path().join("log"));
        let options = StoreOptions {
            segment_size: MIB,
            close_time: Some(Duration::ZERO),
            ..StoreOptions::default()
        };
        create_disk(&path, MIB, &log, &options).unwrap();
        let open = || Store::open(&log, &[DiskOptions::new(&path)], &options);
        let write = |store: &Store, byte: u8| {
            let mut port = store.disks()[0].open_port().unwrap();
            let data = crate::Buffer::from(&[byte; 512][..]);
            end(&mut port, Operation::Write { sector: 0, data });
            end(&mut port, Operation::Flush);
        };
        let read = |store: &Store| {
            let mut port = store.disks()[0].open_port().unwrap();
            let read = Operation::Read {
                sector: 0,
                sectors: 1,
            };
            end(&mut port, read).unwrap()[0]
        };
        for byte in 1..4 {
            let store = open().unwrap();
            write(&store, byte);
            store.close().unwrap();
            let bytes = std::fs::read(&path).unwrap();
            std::fs::remove_file(&path).unwrap();
            std::fs::write(&path, &bytes).unwrap();
            let refused = open().map(drop).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::WrongLog);
            let told = refused.to_string();
            for way in ["walvisor disk adopt", "--log-wins", "walvisor disk discard"] {
                assert!(told.contains(way), "{told}");
            }
            // Both are put together in a new file, wherever the image is now.
            let (moved, copy) = (dir.path().join("moved.img"), dir.path().join("copy"));
            for image in [&path, &moved] {
                let rescue = RescueOptions {
                    replace: true,
                    log_wins: true,
                    ..RescueOptions::default()
                };
                std::fs::write(image, &bytes).unwrap();
                let done = rescue_disk(image, &log, &copy, rescue, None, &mut |_, _| {}).unwrap();
                assert_eq!((done.0.size, done.1), (MIB, Vec::new()));
                let refused = DiskOptions::new(image);
                let refused = Store::open(&log, &[refused], &options).map(drop);
                assert!(refused.unwrap_err().to_string().contains("--log-wins"));
                let mut wanted = bytes.clone();
                wanted[..512].fill(byte);
                assert!(std::fs::read(&copy).unwrap() == wanted);
            }
            assert!(open().is_err(), "a rescue changes nothing");
            let adopted = adopt_image(&path, &log).unwrap();
            assert_eq!(adopted.records, plan_discard(&path, &log).unwrap().records);
            assert!(adopted.records > Some(0));
            let store = open().unwrap();
            assert_eq!(read(&store), byte);
            store.close().unwrap();
        }
        // The log has lost its control file.
        let (control, away) = (log.join("control"), log.join("away"));
        std::fs::rename(&control, &away).unwrap();
        for told in [
            discard_log(&path, &log).map(drop).unwrap_err(),
            plan_discard(&path, &log).map(drop).unwrap_err(),
            crate::inspect(&path, &log).map(drop).unwrap_err(),
            open().map(drop).unwrap_err(),
            adopt_image(&path, &log).map(drop).unwrap_err(),
        ] {
            let told = told.to_string();
            assert!(told.contains("segments, and no control file"), "{told}");
        }
        // Nor is an image without any mark taken for one that has everything.
        let copy = dir.path().join("copy");
        for image in [&path, &dir.path().join("moved.img")] {
            let exported = export_disk(image, &log, &copy, true, None, &mut |_, _| {});
            let told = exported.unwrap_err().to_string();
            assert!(told.contains("segments, and no control file"), "{told}");
        }
        std::fs::rename(&away, &control).unwrap();
        // What can't be its image.
        std::fs::write(&path, [0; 4096]).unwrap();
        let refused = adopt_image(&path, &log).unwrap_err();
        assert!(refused.to_string().contains("4096 bytes"), "{refused}");
        let other = dir.path().join("other.img");
        std::fs::write(&other, vec![0; 2 * MIB as usize]).unwrap();
        let refused = adopt_image(&other, &log).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::WrongLog);
        let rescue = RescueOptions {
            log_wins: true,
            ..RescueOptions::default()
        };
        for (image, kind) in [(&path, ErrorKind::WrongLog), (&other, ErrorKind::WrongLog)] {
            let copy = dir.path().join("none");
            let refused = rescue_disk(image, &log, &copy, rescue, None, &mut |_, _| {});
            assert_eq!(refused.unwrap_err().kind(), kind);
            assert!(!copy.exists());
        }
    }

    /// Nobody knows whether all bytes of the image are those that the log left. The plan says what
    /// is lost.
    #[test]
    fn the_plan_of_an_adoption_says_what_is_lost() {
        let dir = tempfile::tempdir().unwrap();
        let (path, log) = (dir.path().join("disk.img"), dir.path().join("log"));
        let options = StoreOptions {
            segment_size: MIB,
            retain: Some(Retention::All),
            ..StoreOptions::default()
        };
        create_disk(&path, MIB, &log, &options).unwrap();
        let name: SnapshotName = "monday".parse().unwrap();
        let store = Store::open(&log, &[DiskOptions::new(&path)], &options).unwrap();
        let disk = &store.disks()[0];
        let write =
            |byte| crate::store::resize::tests::fill(&mut disk.open_port().unwrap(), 0, byte);
        write(1);
        disk.checkpoint().unwrap();
        disk.snapshot(name).unwrap();
        write(2);
        store.close().unwrap();
        let shown = |copy: &str| {
            let copy = dir.path().join(copy);
            let at = crate::Point::Snapshot(name);
            crate::restore_disk(&path, &log, at, &copy, None, &mut |_, _| {})?;
            Ok::<_, Error>(std::fs::read(copy).unwrap()[0])
        };
        assert_eq!(shown("before").unwrap(), 1);
        assert_eq!(plan_adoption(&path, &log).unwrap().1, None);
        let bytes = std::fs::read(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, bytes).unwrap();
        assert_eq!(plan_adoption(&path, &log).unwrap().1, Some(vec![name]));
        adopt_image(&path, &log).unwrap();
        shown("lost").unwrap_err();
    }

    /// The log of an image has lost its control file, and is not where the command looks for it.
    #[test]
    fn a_log_that_the_image_names_is_not_taken_for_gone() {
        let dir = tempfile::tempdir().unwrap();
        let (path, log) = (dir.path().join("disk.img"), dir.path().join("log"));
        let options = StoreOptions {
            segment_size: MIB,
            close_time: Some(Duration::ZERO),
            ..StoreOptions::default()
        };
        create_disk(&path, MIB, &log, &options).unwrap();
        let store = Store::open(&log, &[DiskOptions::new(&path)], &options).unwrap();
        let mut port = store.disks()[0].open_port().unwrap();
        crate::store::resize::tests::fill(&mut port, 0, 1);
        drop(port);
        store.close().unwrap();
        std::fs::remove_file(log.join("control")).unwrap();
        let other = dir.path().join("other");
        for told in [
            discard_log(&path, &other).map(drop),
            plan_discard(&path, &other).map(drop),
            crate::inspect(&path, &other).map(drop),
        ] {
            let told = told.unwrap_err().to_string();
            assert!(told.contains("segments, and no control file"), "{told}");
        }
    }

    /// An image without its mark looks like any file.
    #[test]
    fn no_export_replaces_an_image_of_its_log() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let log = at("log");
        for disk in ["a", "b"] {
            create_disk(&at(disk), MIB, &log, &StoreOptions::default()).unwrap();
        }
        std::fs::remove_file(at("b")).unwrap();
        std::fs::write(at("b"), vec![7; MIB as usize]).unwrap();
        for options in [(false, false), (true, true)] {
            let rescue = RescueOptions {
                replace: true,
                log_wins: options.0,
                salvage: options.1,
            };
            let refused = rescue_disk(&at("a"), &log, &at("b"), rescue, None, &mut |_, _| {});
            let told = refused.unwrap_err().to_string();
            assert!(told.contains("the image of a disk of the log"), "{told}");
            assert_eq!(std::fs::read(at("b")).unwrap(), vec![7; MIB as usize]);
        }
    }
}
