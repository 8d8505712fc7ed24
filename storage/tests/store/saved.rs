//! Saved files belong to one image: what a snapshot shows is never put together with another.


use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::support::{MemoryFs, copy_image, flush, write};
use walvisor_storage::{
    Backend, BackendQueue, Disk, DiskOptions, Error, ErrorKind, Look, Operation, Point, Retention,
    SnapshotFault, Store, StoreOptions, Tracked, clone_disk, create_disk, discard_log,
    disk_changes, inspect, resize_disk, restore_disk,
};

const SIZE: u64 = 1 << 20;
const BLOCKS: u64 = SIZE / 4096;

fn options() -> StoreOptions {
    StoreOptions {
        segment_size: 256 << 10,
        max_segments: 8,
        retain: Some(Retention::Nothing),
        ..StoreOptions::default()
    }
}

fn open(disk: &Path, log: &Path) -> Result<Store, Error> {
    Store::open(log, &[DiskOptions::new(disk)], &options())
}

/// A disk in a directory, which is on a file system with attributes or on one without.
struct TestDir {
    top: PathBuf,
    // Dropped before `_dir`: the file system is unmounted before its directory is removed.
    _small: Option<MemoryFs>,
    _dir: tempfile::TempDir,
}

impl TestDir {
    fn disk(&self) -> PathBuf {
        self.top.join("disk.img")
    }

    fn log(&self) -> PathBuf {
        self.top.join("log")
    }

    fn open(&self) -> Store {
        open(&self.disk(), &self.log()).unwrap()
    }
}

/// Runs the test on a file system with attributes and on one without.
fn each_file_system(test: impl Fn(&TestDir)) {
    let dir = tempfile::tempdir().unwrap();
    test(&TestDir {
        top: dir.path().to_owned(),
        _small: None,
        _dir: dir,
    });
    if let Some(small) = MemoryFs::ramfs() {
        test(&TestDir {
            top: small.path().to_owned(),
            _small: Some(small),
            _dir: tempfile::tempdir().unwrap(),
        });
    }
}

/// Fills every block of the disk with a byte.
fn paint(disk: &Disk, byte: u8) {
    let mut port = disk.open_port().unwrap();
    for block in 0..BLOCKS {
        write(&mut port, block * 8, byte, 8);
    }
    flush(&mut port);
}

/// A closed disk that is full of ones, with the snapshot 'monday' of that, and of which only the
/// first half has been overwritten since, with twos. So the second half of the snapshot is in the
/// image alone. `saved`: the image has the twos, and saved files the ones. Else the log still has
/// the twos. Returns a copy of the image as it was before there was anything.
fn with_snapshot(site: &TestDir, saved: bool) -> PathBuf {
    let (disk, log) = (site.disk(), site.log());
    create_disk(&disk, SIZE, &log, &options()).unwrap();
    site.open().close().unwrap();
    let backup = site.top.join("backup");
    copy_image(&disk, &backup);
    let store = site.open();
    paint(&store.disks()[0], 1);
    store.disks()[0].checkpoint().unwrap();
    store.disks()[0]
        .snapshot("monday".parse().unwrap())
        .unwrap();
    if saved {
        let mut port = store.disks()[0].open_port().unwrap();
        for block in 0..BLOCKS / 2 {
            write(&mut port, block * 8, 2, 8);
        }
        drop(port);
        store.disks()[0].checkpoint().unwrap();
    }
    store.close().unwrap();
    backup
}

fn monday() -> Point {
    Point::Snapshot("monday".parse().unwrap())
}

fn restored(site: &TestDir) -> Result<Vec<u8>, Error> {
    let new = site.top.join("new");
    crate::support::restored(&site.disk(), &site.log(), monday(), &new)
}

/// Each way to see the snapshot of the disk while it is not in use.
fn closed_ways(site: &TestDir) -> Vec<(&'static str, Result<(), Error>)> {
    let (disk, log) = (site.disk(), site.log());
    let [clone, clone_log] = ["clone", "clone.wal"].map(|name| site.top.join(name));
    let cloned = clone_disk(
        &disk,
        &log,
        Some(monday()),
        &clone,
        &clone_log,
        &options(),
        &mut |_, _| {},
    );
    if cloned.is_ok() {
        std::fs::remove_file(clone).unwrap();
        std::fs::remove_dir_all(clone_log).unwrap();
    }
    let look = Look::open(&DiskOptions::new(&disk), &log, monday(), None, &options());
    vec![
        ("restore", restored(site).map(drop)),
        ("clone", cloned.map(drop)),
        ("look", look.map(drop)),
        (
            "changes",
            disk_changes(&disk, &log, monday(), None, None).map(drop),
        ),
    ]
}

#[track_caller]
fn expect_refused(site: &TestDir, ways: Vec<(&'static str, Result<(), Error>)>, part: &str) {
    let disk = site.disk();
    for (way, seen) in ways {
        let error = seen.expect_err(way);
        let text = error.to_string();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{way}: {text}");
        let named = text.contains(disk.to_str().unwrap()) && text.contains("snapshot:monday");
        assert!(named && text.contains(part), "{way}: {text}");
    }
}

/// What `disk check` says of the snapshots.
fn faults(site: &TestDir) -> Vec<SnapshotFault> {
    let report = inspect(&site.disk(), &site.log()).unwrap();
    report.log.unwrap().snapshot_faults
}

#[track_caller]
fn expect_fault(site: &TestDir, part: &str) {
    let found = faults(site);
    assert_eq!(found.len(), 1, "{found:?}");
    let monday = found[0]
        .snapshots
        .iter()
        .any(|name| name.as_str() == "monday");
    let named = found[0].what.contains(site.disk().to_str().unwrap());
    assert!(monday && named && found[0].what.contains(part), "{found:?}");
}

/// Puts something else in the place of the image.
type Replace = fn(&TestDir, &Path);

const REPLACED: [(&str, Replace); 5] = [
    ("an older copy", |site, backup| {
        std::fs::remove_file(site.disk()).unwrap();
        copy_image(backup, &site.disk());
    }),
    ("an older copy, into the file", |site, backup| {
        std::fs::copy(backup, site.disk()).unwrap();
    }),
    ("a file without a mark", |site, _| {
        std::fs::remove_file(site.disk()).unwrap();
        std::fs::write(site.disk(), vec![9; SIZE as usize]).unwrap();
    }),
    ("the image of another disk", |site, _| {
        let [other, log] = ["other", "other.wal"].map(|name| site.top.join(name));
        create_disk(&other, SIZE, &log, &options()).unwrap();
        open(&other, &log).unwrap().close().unwrap();
        std::fs::rename(other, site.disk()).unwrap();
        std::fs::remove_dir_all(log).unwrap();
    }),
    // In the middle, of which the log has no sample.
    ("a write by another program", |site, _| {
        let image = std::fs::File::options().write(true).open(site.disk());
        image.unwrap().write_all_at(&[7], SIZE * 3 / 4 + 5).unwrap();
    }),
];

/// The snapshot is refused as long as the other image is there, is there again with its own image,
/// and is lost, and said to be, once the disk was opened with the other one.
#[test]
fn a_snapshot_is_never_shown_over_another_image() {
    for saved in [true, false] {
        for (what, replace) in REPLACED {
            each_file_system(|site| {
                println!("{what}, saved: {saved}, in {}", site.top.display());
                let backup = with_snapshot(site, saved);
                assert!(restored(site).unwrap() == vec![1; SIZE as usize]);
                let kept = site.top.join("kept");
                std::fs::rename(site.disk(), &kept).unwrap();
                let own = |site: &TestDir| {
                    // On a file system without attributes a copy is another image.
                    let _ = std::fs::remove_file(site.disk());
                    std::fs::rename(&kept, site.disk()).unwrap();
                };
                if what.contains("the file") || what.contains("a write") {
                    // Into the own file: there is no way back.
                    own(site);
                    replace(site, &backup);
                } else {
                    copy_image(&kept, &site.disk());
                    replace(site, &backup);
                    expect_refused(site, closed_ways(site), "put that image back");
                    expect_fault(site, "put that image back");
                    own(site);
                    assert!(restored(site).unwrap() == vec![1; SIZE as usize]);
                    assert_eq!(faults(site), []);
                    std::fs::rename(site.disk(), &kept).unwrap();
                    copy_image(&kept, &site.disk());
                    replace(site, &backup);
                }
                expect_refused(site, closed_ways(site), "put that image back");
                expect_fault(site, "put that image back");
                let now = std::fs::read(site.disk()).unwrap();

                let store = site.open();
                let disk = &store.disks()[0];
                let look = disk.look(monday(), None).map(drop);
                expect_refused(site, vec![("live look", look)], "is lost");
                assert_eq!(disk.past_points(), []);
                let whole = disk.look(Point::Newest, None).unwrap();
                let mut queue = whole.open_queue().unwrap();
                let seen = crate::support::read(&mut *queue, 0, SIZE as u32 / 512);
                assert!(seen[..] == now[..], "what the disk has now");
                drop((queue, whole));
                // From now on the image is known as any other.
                let tuesday = "tuesday".parse().unwrap();
                disk.snapshot(tuesday).unwrap();
                let points = disk.past_points();
                assert_eq!(points.len(), 1, "{points:?}");
                paint(disk, 5);
                disk.checkpoint().unwrap();
                store.close().unwrap();
                expect_refused(site, closed_ways(site), "is lost");
                expect_fault(site, "had another image");
                let new = site.top.join("new");
                restore_disk(
                    &site.disk(),
                    &site.log(),
                    Point::Snapshot(tuesday),
                    &new,
                    None,
                    &mut |_, _| {},
                )
                .unwrap();
                assert!(std::fs::read(&new).unwrap() == now);
                for file in ["new", "kept", "backup", "disk.img"] {
                    let _ = std::fs::remove_file(site.top.join(file));
                }
                std::fs::remove_dir_all(site.log()).unwrap();
            });
        }
    }
}

/// What a look or a restore trusts is verified: payloads, headers, and that the files are there.
#[test]
fn a_check_tells_of_damage_in_saved_files() {
    let flip = |file: &Path, at: u64| {
        let file = std::fs::File::options().read(true).write(true).open(file);
        let (file, mut byte) = (file.unwrap(), [0]);
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[!byte[0]], at).unwrap();
    };
    type Damage<'a> = (&'a str, &'a dyn Fn(&Path));
    let damages: [Damage<'_>; 4] = [
        ("damaged at byte", &|file| {
            let bytes = std::fs::read(file).unwrap();
            let ones = bytes.windows(4096).position(|bytes| bytes == [1; 4096]);
            flip(file, ones.unwrap() as u64 + 77);
        }),
        ("damaged at byte 0", &|file| flip(file, 40)),
        ("damaged at byte 4096", &|file| flip(file, 4096 + 100)),
        ("missing", &|file| std::fs::remove_file(file).unwrap()),
    ];
    for (what, damage) in damages {
        let dir = tempfile::tempdir().unwrap();
        let site = TestDir {
            top: dir.path().to_owned(),
            _small: None,
            _dir: dir,
        };
        with_snapshot(&site, true);
        assert_eq!(faults(&site), []);
        let name = format!("saved-{BLOCKS:020}-00000");
        let file = site.log().join(&name);
        damage(&file);
        let found = faults(&site);
        assert_eq!(found.len(), 1, "{found:?}");
        let text = &found[0].what;
        assert!(text.contains(&name) && text.contains(what), "{text}");
        let names: Vec<_> = found[0]
            .snapshots
            .iter()
            .map(|name| name.as_str())
            .collect();
        assert_eq!(names, ["monday"]);
        assert!(restored(&site).is_err(), "{what}");
    }
}

/// A look only reads: what can't be saved for want of space, and so not be copied to the image,
/// stays in the log, where looks read it.
#[test]
fn a_look_is_opened_on_a_full_file_system() {
    let Some(small) = MemoryFs::tmpfs("size=24m") else {
        return;
    };
    let site = TestDir {
        top: small.path().to_owned(),
        _small: Some(small),
        _dir: tempfile::tempdir().unwrap(),
    };
    with_snapshot(&site, true);
    let store = site.open();
    let disk = &store.disks()[0];
    let mut port = disk.open_port().unwrap();
    for block in BLOCKS / 2..BLOCKS / 2 + 16 {
        write(&mut port, block * 8, 3, 8);
    }
    flush(&mut port);
    let filler = site.top.join("filler");
    let file = std::fs::File::create(&filler).unwrap();
    let full = (0..).find(|at| file.write_all_at(&[5; 4096], at * 4096).is_err());
    assert!(full.is_some());
    let error = disk.checkpoint().unwrap_err().to_string();
    assert!(error.contains("save what a snapshot needs"), "{error}");
    let mut now = vec![1; SIZE as usize];
    now[..SIZE as usize / 2].fill(2);
    now[SIZE as usize / 2..][..16 * 4096].fill(3);
    let seen = |at| {
        let look = disk.look(at, None).unwrap();
        let mut queue = look.open_queue().unwrap();
        crate::support::read(&mut *queue, 0, SIZE as u32 / 512)
    };
    for _ in 0..2 {
        assert!(seen(monday())[..] == vec![1; SIZE as usize]);
        assert!(seen(Point::Newest)[..] == now);
    }
    // Nothing is copied beside a look, also not what an earlier attempt has left.
    let look = disk.look(monday(), None).unwrap();
    drop(file);
    std::fs::remove_file(&filler).unwrap();
    let error = disk.checkpoint().unwrap_err().to_string();
    assert!(error.contains("unlook"), "{error}");
    drop(look);
    disk.checkpoint().unwrap();
    assert!(seen(monday())[..] == vec![1; SIZE as usize]);
    drop(port);
    store.close().unwrap();
    assert!(std::fs::read(site.disk()).unwrap() == now);
    assert!(restored(&site).unwrap() == vec![1; SIZE as usize]);
}

/// Looks, and what is saved for snapshots, take no more memory than `index-memory` allows, and
/// `index_bytes` tells of it.
#[test]
fn the_extents_of_looks_and_snapshots_are_counted_and_bounded() {
    const EXTENTS: u64 = 20_000;
    const LIMIT: u64 = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let (path, log) = (dir.path().join("disk.img"), dir.path().join("log"));
    let options = StoreOptions {
        max_segments: 64,
        index_memory: LIMIT,
        ..options()
    };
    create_disk(&path, 2 * EXTENTS * 512, &log, &options).unwrap();
    let store = Store::open(&log, &[DiskOptions::new(&path)], &options).unwrap();
    let disk = &store.disks()[0];
    let name = "monday".parse().unwrap();
    disk.snapshot(name).unwrap();
    let mut port = disk.open_port().unwrap();
    // Each other sector, so that no two are one extent.
    let mut scatter = || {
        for first in (0..EXTENTS).step_by(100) {
            for sector in first..first + 100 {
                let operation = Operation::WriteZeroes {
                    sector: 2 * sector,
                    sectors: 1,
                    unmap: false,
                };
                port.submit(sector, operation);
            }
            crate::support::wait(&mut port, 100);
        }
        crate::support::flush(&mut port);
    };
    for saved in [false, true] {
        scatter();
        if saved {
            disk.checkpoint().unwrap();
        }
        let point = if saved { monday() } else { Point::Newest };
        let before = disk.history().index_bytes;
        let mut looks = Vec::new();
        let refused =
            (0..20).find_map(|_| disk.look(point, None).map(|look| looks.push(look)).err());
        let error = refused.expect("twenty looks take more").to_string();
        assert!(error.contains("index-memory"), "{error}");
        assert!(!looks.is_empty(), "one look has room");
        let bytes = disk.history().index_bytes - before;
        let least = looks.len() as u64 * EXTENTS * 16;
        assert!((least..=LIMIT).contains(&bytes), "{bytes}");
        assert_eq!(store.log_counters().index_bytes, before + bytes);
        drop(looks);
        assert_eq!(disk.history().index_bytes, before);
        disk.look(point, None).unwrap();
    }
    drop(port);
    store.close().unwrap();
}

/// A look at saved data keeps the checksums of it, and only of its own disk's. They count.
#[test]
fn the_checksums_of_saved_files_are_counted() {
    const BYTES: u64 = 8 << 20;
    let dir = tempfile::tempdir().unwrap();
    let paths = ["one.img", "two.img"].map(|name| dir.path().join(name));
    let log = dir.path().join("log");
    for path in &paths {
        create_disk(path, BYTES, &log, &options()).unwrap();
    }
    let disks = paths.each_ref().map(DiskOptions::new);
    let store = Store::open(&log, &disks, &options()).unwrap();
    let (one, two) = (&store.disks()[0], &store.disks()[1]);
    let overwrite = |disk: &Disk, byte: u8, bytes: u64| {
        let mut port = disk.open_port().unwrap();
        for at in (0..bytes).step_by(64 << 10) {
            write(&mut port, at / 512, byte, 128);
        }
        flush(&mut port);
        disk.checkpoint().unwrap();
    };
    for disk in [one, two] {
        overwrite(disk, 1, BYTES);
    }
    one.snapshot("monday".parse().unwrap()).unwrap();
    overwrite(one, 2, BYTES);
    overwrite(two, 2, 1 << 20);
    let before = one.history().index_bytes;
    for (disk, bytes) in [(one, BYTES), (two, 1 << 20)] {
        let look = disk.look(monday(), None).unwrap();
        let counted = one.history().index_bytes - before;
        let checksums = bytes / 4096 * 4;
        assert!((checksums..2 * checksums).contains(&counted), "{counted}");
        drop(look);
        assert_eq!(one.history().index_bytes, before);
    }
    store.close().unwrap();
}

/// What the disk at this path was as of a snapshot.
fn as_of(site: &TestDir, disk: &Path, name: &str) -> Result<Vec<u8>, Error> {
    let (new, point) = (site.top.join("new"), Point::Snapshot(name.parse().unwrap()));
    restore_disk(disk, &site.log(), point, &new, None, &mut |_, _| {})?;
    let bytes = std::fs::read(&new).unwrap();
    std::fs::remove_file(&new).unwrap();
    Ok(bytes)
}

fn on_this_file_system() -> TestDir {
    let dir = tempfile::tempdir().unwrap();
    TestDir {
        top: dir.path().to_owned(),
        _small: None,
        _dir: dir,
    }
}

/// A snapshot that needs records which were given up is refused; one that has all it needs is not,
/// nor is a later one.
#[test]
fn a_snapshot_that_needs_discarded_records_is_refused() {
    let site = on_this_file_system();
    with_snapshot(&site, true);
    let options = StoreOptions {
        close_time: Some(std::time::Duration::ZERO),
        ..options()
    };
    let disks = [DiskOptions::new(site.disk())];
    let store = Store::open(&site.log(), &disks, &options).unwrap();
    let mut port = store.disks()[0].open_port().unwrap();
    write(&mut port, 0, 3, 8);
    store.disks()[0]
        .snapshot("tuesday".parse().unwrap())
        .unwrap();
    drop(port);
    store.close().unwrap();
    assert_eq!(as_of(&site, &site.disk(), "tuesday").unwrap()[0], 3);
    discard_log(&site.disk(), &site.log()).unwrap();
    for again in [false, true] {
        let error = as_of(&site, &site.disk(), "tuesday").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
        assert!(as_of(&site, &site.disk(), "monday").unwrap() == vec![1; SIZE as usize]);
        let store = site.open();
        if again {
            assert_eq!(as_of_now(&store), 2, "what the image has");
        } else {
            let name = "wednesday".parse().unwrap();
            store.disks()[0].snapshot(name).unwrap();
        }
        store.close().unwrap();
        assert_eq!(as_of(&site, &site.disk(), "wednesday").unwrap()[0], 2);
    }
}

/// Giving up one disk's records takes an LSN of its own. The copy to the images, which passes it,
/// loses no snapshot of the others.
#[test]
fn giving_up_the_records_of_one_disk_keeps_the_snapshots_of_the_others() {
    let site = on_this_file_system();
    let disks = [site.disk(), site.top.join("other")];
    for disk in &disks {
        create_disk(disk, SIZE, &site.log(), &options()).unwrap();
    }
    let write_all = |store: &Store, byte| {
        for disk in store.disks() {
            let mut port = disk.open_port().unwrap();
            write(&mut port, 0, byte, 8);
            flush(&mut port);
        }
    };
    let opened = disks.each_ref().map(DiskOptions::new);
    // Nothing is copied to the images when they are closed.
    let cut = StoreOptions {
        close_time: Some(std::time::Duration::ZERO),
        ..options()
    };
    let store = Store::open(&site.log(), &opened, &cut).unwrap();
    write_all(&store, 1);
    store.disks()[0]
        .snapshot("monday".parse().unwrap())
        .unwrap();
    store.close().unwrap();
    discard_log(&disks[0], &site.log()).unwrap();
    let store = Store::open(&site.log(), &opened, &cut).unwrap();
    store.disks()[0]
        .snapshot("tuesday".parse().unwrap())
        .unwrap();
    write_all(&store, 2);
    store.disks()[0].checkpoint().unwrap();
    let states = |name| disks.each_ref().map(|disk| as_of(&site, disk, name));
    let written = |byte: u8| {
        let mut bytes = vec![0; SIZE as usize];
        bytes[..4096].fill(byte);
        bytes
    };
    let expect = |ways: &str| {
        let [given_up, kept] = states("monday");
        let error = given_up.expect_err(ways);
        assert_eq!(error.kind(), ErrorKind::NotFound, "{ways}: {error}");
        assert!(kept.expect(ways) == written(1), "{ways}");
        let [given_up, kept] = states("tuesday");
        assert!(given_up.expect(ways) == written(0), "{ways}");
        assert!(kept.expect(ways) == written(1), "{ways}");
    };
    store.close().unwrap();
    expect("after a checkpoint");
    let store = Store::open(&site.log(), &opened, &options()).unwrap();
    write_all(&store, 3);
    store.close().unwrap();
    expect("after another close");
}

/// The first byte of the disk.
fn as_of_now(store: &Store) -> u8 {
    let mut port = store.disks()[0].open_port().unwrap();
    crate::support::read(&mut port, 0, 8)[0]
}

/// A disk has no past from before it came to the log, whether that is in use or not; and none from
/// before another image came.
#[test]
fn a_disk_that_joins_a_log_has_no_past_from_before() {
    let site = on_this_file_system();
    with_snapshot(&site, true);
    let [made, raw, backup] = ["made", "raw", "backup-of-raw"].map(|name| site.top.join(name));
    create_disk(&made, SIZE, &site.log(), &options()).unwrap();
    std::fs::write(&raw, vec![7; SIZE as usize]).unwrap();
    std::fs::copy(&raw, &backup).unwrap();
    let disks = [site.disk(), made.clone()].map(DiskOptions::new);
    let mut store = Store::open(&site.log(), &disks, &options()).unwrap();
    let snapshot = |store: &Store, name: &str| {
        store.disks()[0].snapshot(name.parse().unwrap()).unwrap();
    };
    paint(&store.disks()[1], 4);
    // Nothing is written between these and what comes before and after.
    store.add_disk(&DiskOptions::new(&raw)).unwrap();
    snapshot(&store, "tuesday");
    paint(&store.disks()[2], 8);
    snapshot(&store, "wednesday");
    // The images go past the snapshots, so that the disk leaves with all its bytes.
    paint(&store.disks()[1], 5);
    store.disks()[0].checkpoint().unwrap();
    store.remove_disk(&raw).unwrap();
    assert_eq!(std::fs::read(&raw).unwrap()[0], 8);
    std::fs::remove_file(&raw).unwrap();
    std::fs::copy(&backup, &raw).unwrap();
    store.add_disk(&DiskOptions::new(&raw)).unwrap();
    snapshot(&store, "thursday");
    paint(&store.disks()[2], 9);
    store.close().unwrap();
    let first = |disk: &Path, name| as_of(&site, disk, name).map(|bytes| bytes[0]);
    for (disk, name, wanted) in [
        (&made, "monday", None),
        (&made, "tuesday", Some(4)),
        (&raw, "monday", None),
        (&raw, "tuesday", None),
        (&raw, "wednesday", None),
        (&made, "thursday", Some(5)),
        (&raw, "thursday", Some(7)),
        (&site.disk(), "monday", Some(1)),
        (&site.disk(), "wednesday", Some(2)),
        (&site.disk(), "thursday", Some(2)),
    ] {
        match (first(disk, name), wanted) {
            (Ok(byte), Some(wanted)) => assert_eq!(byte, wanted, "{disk:?} {name}"),
            (Err(error), None) => assert_eq!(error.kind(), ErrorKind::NotFound, "{error}"),
            (seen, wanted) => panic!("{disk:?} as of {name}: {seen:?}, not {wanted:?}"),
        }
    }
}

/// An open of a log trusts the spill map of each of its disks, so a check of any of them reads it.
#[test]
fn a_check_tells_of_damage_in_any_spill_map() {
    let site = on_this_file_system();
    let other = site.top.join("other.img");
    for disk in [site.disk(), other.clone()] {
        create_disk(&disk, SIZE, &site.log(), &options()).unwrap();
    }
    let disks = [site.disk(), other.clone()].map(DiskOptions::new);
    let mut store = Store::open(&site.log(), &disks, &options()).unwrap();
    // Too little for a checkpoint, which would copy it to the image.
    let mut port = store.disks()[1].open_port().unwrap();
    write(&mut port, 0, 1, 8);
    flush(&mut port);
    drop(port);
    store.remove_disk_keeping_records(&other).unwrap();
    store.close().unwrap();
    let check = || [site.disk(), other.clone()].map(|disk| inspect(&disk, &site.log()));
    let [here, there] = check().map(|report| report.unwrap().spilled);
    assert!(here == 0 && there > 0, "{here}, {there}");
    let names = std::fs::read_dir(site.log()).unwrap();
    let mut paths = names.map(|entry| entry.unwrap().path());
    let map = paths
        .find(|path| path.extension().is_some_and(|end| end == "map"))
        .unwrap();
    let whole = std::fs::read(&map).unwrap();
    let damaged = || check().map(|report| report.unwrap_err().kind());
    for at in [0, whole.len() / 2] {
        let mut rotten = whole.clone();
        rotten[at] ^= 1;
        std::fs::write(&map, rotten).unwrap();
        assert_eq!(damaged(), [ErrorKind::Damaged; 2], "byte {at}");
    }
    std::fs::remove_file(&map).unwrap();
    assert_eq!(damaged(), [ErrorKind::Damaged; 2]);
    std::fs::write(&map, whole).unwrap();
    assert!(check().iter().all(Result::is_ok));
}

/// Saved bytes that went to another directory would be in no snapshot, and the image no longer has
/// them.
#[test]
fn nothing_is_saved_to_another_directory_of_the_same_name() {
    let site = on_this_file_system();
    with_snapshot(&site, true);
    let store = site.open();
    let disk = &store.disks()[0];
    let mut port = disk.open_port().unwrap();
    for block in BLOCKS / 2..BLOCKS {
        write(&mut port, block * 8, 3, 8);
    }
    flush(&mut port);
    let aside = site.top.join("aside");
    std::fs::rename(site.log(), &aside).unwrap();
    std::fs::create_dir(site.log()).unwrap();
    for file in std::fs::read_dir(&aside).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), site.log().join(file.file_name())).unwrap();
    }
    let error = disk.checkpoint().unwrap_err().to_string();
    assert!(error.contains("directory was moved or replaced"), "{error}");
    std::fs::remove_dir_all(site.log()).unwrap();
    std::fs::rename(&aside, site.log()).unwrap();
    disk.checkpoint().unwrap();
    drop(port);
    store.close().unwrap();
    assert_eq!(restored(&site).unwrap(), vec![1; SIZE as usize]);
}

/// A new length is a write of the log's own: the snapshot is as it was.
#[test]
fn a_snapshot_stays_when_its_disk_grows() {
    let site = on_this_file_system();
    with_snapshot(&site, true);
    let store = site.open();
    store.disks()[0].grow(2 * SIZE).unwrap();
    store.close().unwrap();
    let shown = |size: u64| {
        let mut wanted = vec![0; size as usize];
        wanted[..SIZE as usize].fill(1);
        assert!(restored(&site).unwrap() == wanted);
        assert_eq!(faults(&site), []);
    };
    shown(2 * SIZE);
    resize_disk(&site.disk(), 3 * SIZE, &site.log(), false, &[]).unwrap();
    shown(3 * SIZE);
    site.open().close().unwrap();
    shown(3 * SIZE);
}

/// The newest bytes are in the log, and its samples fit, so the disk is opened. What it was before
/// is not known any more.
#[test]
fn a_write_behind_the_back_of_a_log_that_keeps_history_ends_the_history() {
    let site = on_this_file_system();
    let options = StoreOptions {
        retain: Some(Retention::All),
        ..options()
    };
    create_disk(&site.disk(), SIZE, &site.log(), &options).unwrap();
    let open = || {
        let disks = [DiskOptions::new(site.disk())];
        Store::open(&site.log(), &disks, &options).unwrap()
    };
    let store = open();
    paint(&store.disks()[0], 1);
    store.disks()[0].checkpoint().unwrap();
    let mut port = store.disks()[0].open_port().unwrap();
    write(&mut port, 0, 2, 8);
    store.disks()[0]
        .snapshot("monday".parse().unwrap())
        .unwrap();
    write(&mut port, 0, 3, 8);
    drop(port);
    store.close().unwrap();
    assert_eq!(restored(&site).unwrap()[0], 2);
    let image = std::fs::File::options().write(true).open(site.disk());
    image.unwrap().write_all_at(&[7], SIZE * 3 / 4 + 5).unwrap();
    expect_refused(&site, closed_ways(&site), "put that image back");
    let store = open();
    assert_eq!(as_of_now(&store), 3);
    store.close().unwrap();
    expect_refused(&site, closed_ways(&site), "is lost");
}
