//! Snapshots: what they show stays, belongs to one image, and is never put together with another.

use std::fs::{File, create_dir, remove_dir_all, remove_file, rename};
use std::os::unix::fs::FileExt;
use std::path::Path;

use walvisor_storage::{
    Allocation, Backend, BackendQueue, Disk, DiskOptions, ErrorKind, Point, Result, Retention,
    SnapshotFault, Store, StoreOptions, Tracked, clone_disk, create_disk, inspect, leave_log,
    resize_disk,
};

use crate::bench::{BYTES, Bench};
use crate::support::{
    MIB, MemoryFs, TestDisk, all, commit, copy_image, each_file_system, flip, flush, port, put,
    read, refused, snapshot, wait, write, zeroes,
};

const BLOCKS: u64 = MIB / 4096;
/// A disk of 1 MiB.
const WHOLE: usize = MIB as usize;

fn options() -> StoreOptions {
    StoreOptions {
        segment_size: 256 << 10,
        max_segments: 8,
        retain: Some(Retention::Nothing),
        ..StoreOptions::default()
    }
}

fn empty() -> TestDisk {
    TestDisk::within(None, &["disk.img"], options())
}

/// Fills blocks of the disk with a byte, each with a record of its own.
fn paint(disk: &Disk, blocks: std::ops::Range<u64>, byte: u8) {
    let mut port = disk.open_port().unwrap();
    blocks.for_each(|block| write(&mut port, block * 8, byte, 8));
    flush(&mut port);
}

fn take(disk: &Disk, name: &str) {
    disk.snapshot(name.parse().unwrap()).unwrap();
}

/// Makes a closed disk that is full of ones, with the snapshot 'monday' of that, and of which only
/// the first half has been overwritten since, with twos. So the second half of the snapshot is in
/// the image alone. `saved`: the image has the twos, and saved files the ones. Else the log still
/// has the twos. 'backup' is a copy of the image as it was before there was anything.
fn with_snapshot(place: &TestDisk, saved: bool) {
    place.make(MIB);
    place.open().close().unwrap();
    copy_image(&place.disk, &place.at("backup"));
    let store = place.open();
    let disk = &store.disks()[0];
    paint(disk, 0..BLOCKS, 1);
    disk.checkpoint().unwrap();
    take(disk, "monday");
    if saved {
        paint(disk, 0..BLOCKS / 2, 2);
        disk.checkpoint().unwrap();
    }
    store.close().unwrap();
}

fn monday(place: &TestDisk) -> Result<Vec<u8>> {
    place.as_of(&place.disk, snapshot("monday"))
}

/// Each way to see the snapshot of a disk that is not in use is refused.
#[track_caller]
fn is_hidden(place: &TestDisk, part: &str) {
    let [clone, log] = ["clone", "clone.wal"].map(|name| place.at(name));
    let (disk, at, none) = (&place.disk, snapshot("monday"), &mut |_, _| {});
    let source = place.source(disk, Some(at));
    let ways = [
        monday(place).map(drop),
        clone_disk(&source, &clone, &log, &options(), none).map(drop),
        place.look(disk, at, None).map(drop),
        place.changes(disk, at, None).map(drop),
    ];
    for seen in ways {
        hides(place, seen, part);
    }
}

#[track_caller]
fn hides(place: &TestDisk, seen: Result<()>, part: &str) {
    let text = seen
        .as_ref()
        .err()
        .map(ToString::to_string)
        .unwrap_or_default();
    assert!(text.contains(place.disk.to_str().unwrap()), "{text}");
    assert!(text.contains("snapshot:monday"), "{text}");
    assert_eq!(refused(seen, part), ErrorKind::NotFound);
}

/// What `disk check` says of the snapshots.
fn faults(place: &TestDisk) -> Vec<SnapshotFault> {
    place.report().snapshot_faults
}

#[track_caller]
fn has_fault(place: &TestDisk, parts: [&str; 2]) {
    let found = faults(place);
    assert_eq!(found.len(), 1, "{found:?}");
    let names = found[0].snapshots.iter().map(|name| name.as_str());
    assert!(names.eq(["monday"]), "{found:?}");
    let told = parts.iter().all(|part| found[0].what.contains(part));
    assert!(told, "{found:?}");
}

/// Puts something else in the place of the image.
type Replace = fn(&TestDisk);

/// Whether the file itself is written, so that there is no way back.
const REPLACED: [(&str, bool, Replace); 5] = [
    ("an older copy", false, |place| {
        remove_file(&place.disk).unwrap();
        copy_image(&place.at("backup"), &place.disk);
    }),
    ("an older copy, into the file", true, |place| {
        std::fs::copy(place.at("backup"), &place.disk).unwrap();
    }),
    ("a file without a mark", false, |place| {
        remove_file(&place.disk).unwrap();
        std::fs::write(&place.disk, vec![9; WHOLE]).unwrap();
    }),
    ("the image of another disk", false, |place| {
        let [other, log] = ["other", "other.wal"].map(|name| place.at(name));
        create_disk(&other, MIB, &log, &options()).unwrap();
        let store = Store::open(&log, &[DiskOptions::new(&other)], &options());
        store.unwrap().close().unwrap();
        rename(other, &place.disk).unwrap();
        remove_dir_all(log).unwrap();
    }),
    // In the middle, of which the log has no sample.
    ("a write by another program", true, |place| {
        put(&place.disk, MIB * 3 / 4 + 5, &[7]);
    }),
];

/// The snapshot is refused as long as the other image is there, is there again with its own image,
/// and is lost, and said to be, once the disk was opened with the other one.
#[test]
fn a_snapshot_is_never_shown_over_another_image() {
    for (saved, (what, into, replace)) in [true, false]
        .into_iter()
        .flat_map(|saved| REPLACED.map(|row| (saved, row)))
    {
        each_file_system(&["disk.img"], options(), |place| {
            println!("{what}, saved: {saved}, in {}", place.top.display());
            with_snapshot(place, saved);
            assert!(all(&monday(place).unwrap(), 1));
            let (image, kept) = (&place.disk, place.at("kept"));
            if !into {
                // On a file system without attributes a copy is another image.
                rename(image, &kept).unwrap();
                copy_image(&kept, image);
                replace(place);
                is_hidden(place, "put that image back");
                has_fault(place, ["put that image back", image.to_str().unwrap()]);
                rename(&kept, image).unwrap();
                assert!(all(&monday(place).unwrap(), 1));
                assert_eq!(faults(place), []);
                rename(image, &kept).unwrap();
                copy_image(&kept, image);
            }
            replace(place);
            is_hidden(place, "put that image back");
            has_fault(place, ["put that image back", image.to_str().unwrap()]);
            let now = std::fs::read(image).unwrap();

            let store = place.open();
            let disk = &store.disks()[0];
            hides(
                place,
                disk.look(snapshot("monday"), None).map(drop),
                "is lost",
            );
            assert_eq!(disk.past_points(), []);
            let whole = disk.look(Point::Newest, None).unwrap();
            let seen = read(&mut *whole.open_queue().unwrap(), 0, MIB as u32 / 512);
            assert!(seen[..] == now[..], "what the disk has now");
            drop(whole);
            // From now on the image is known as any other.
            take(disk, "tuesday");
            assert_eq!(disk.past_points().len(), 1);
            paint(disk, 0..BLOCKS, 5);
            disk.checkpoint().unwrap();
            store.close().unwrap();
            is_hidden(place, "is lost");
            has_fault(place, ["had another image", image.to_str().unwrap()]);
            assert!(place.as_of(image, snapshot("tuesday")).unwrap() == now);
            for file in ["kept", "backup", "disk.img"] {
                let _ = remove_file(place.at(file));
            }
            remove_dir_all(place.log()).unwrap();
        });
    }
}

/// The newest bytes are in the log, and its samples fit, so the disk is opened. What it was before
/// is not known.
#[test]
fn a_write_behind_the_back_of_a_log_that_keeps_history_ends_the_history() {
    let mut place = empty();
    place.options.retain = Some(Retention::All);
    place.make(MIB);
    let store = place.open();
    let disk = &store.disks()[0];
    paint(disk, 0..BLOCKS, 1);
    disk.checkpoint().unwrap();
    commit(disk, 0, 2, 8);
    take(disk, "monday");
    commit(disk, 0, 3, 8);
    store.close().unwrap();
    assert_eq!(monday(&place).unwrap()[0], 2);
    put(&place.disk, MIB * 3 / 4 + 5, &[7]);
    is_hidden(&place, "put that image back");
    let store = place.open();
    assert_eq!(read(&mut port(&store, 0), 0, 8)[0], 3);
    store.close().unwrap();
    is_hidden(&place, "is lost");
}

/// What a look or a restore trusts is verified: payloads, headers, and that the files are there.
#[test]
fn a_check_tells_of_damage_in_saved_files() {
    type Damage = fn(&Path);
    let damages: [(&str, Damage); 4] = [
        ("damaged at byte", |file| {
            let bytes = std::fs::read(file).unwrap();
            let ones = bytes.windows(4096).position(|bytes| bytes == [1; 4096]);
            flip(file, ones.unwrap() as u64 + 77);
        }),
        ("damaged at byte 0", |file| flip(file, 40)),
        ("damaged at byte 4096", |file| flip(file, 4096 + 100)),
        ("missing", |file| remove_file(file).unwrap()),
    ];
    for (what, damage) in damages {
        let place = empty();
        with_snapshot(&place, true);
        assert_eq!(faults(&place), []);
        let name = format!("saved-{BLOCKS:020}-00000");
        damage(&place.log().join(&name));
        has_fault(&place, [what, &name]);
        assert!(monday(&place).is_err(), "{what}");
    }
}

/// A look only reads: what can't be saved for want of space, and so not be copied to the image,
/// stays in the log, where looks read it.
#[test]
fn a_look_is_opened_on_a_full_file_system() {
    let Some(small) = MemoryFs::tmpfs("size=24m") else {
        return;
    };
    let place = TestDisk::within(Some(small), &["disk.img"], options());
    with_snapshot(&place, true);
    let store = place.open();
    let disk = &store.disks()[0];
    paint(disk, BLOCKS / 2..BLOCKS / 2 + 16, 3);
    let filler = File::create(place.at("filler")).unwrap();
    let full = (0..).find(|at| filler.write_all_at(&[5; 4096], at * 4096).is_err());
    assert!(full.is_some());
    refused(disk.checkpoint(), "save what a snapshot needs");
    let mut now = vec![1; WHOLE];
    now[..WHOLE / 2].fill(2);
    now[WHOLE / 2..][..16 * 4096].fill(3);
    let seen = |at| {
        let look = disk.look(at, None).unwrap();
        read(&mut *look.open_queue().unwrap(), 0, MIB as u32 / 512)
    };
    for _ in 0..2 {
        assert!(all(&seen(snapshot("monday")), 1));
        assert!(seen(Point::Newest)[..] == now);
    }
    // Nothing is copied beside a look, also not what an earlier attempt has left.
    let look = disk.look(snapshot("monday"), None).unwrap();
    drop(filler);
    remove_file(place.at("filler")).unwrap();
    refused(disk.checkpoint(), "unlook");
    drop(look);
    disk.checkpoint().unwrap();
    assert!(all(&seen(snapshot("monday")), 1));
    store.close().unwrap();
    assert!(std::fs::read(&place.disk).unwrap() == now);
    assert!(all(&monday(&place).unwrap(), 1));
}

/// Looks, and what is saved for snapshots, take no more memory than `index-memory` allows, and
/// `index_bytes` tells of it.
#[test]
fn the_extents_of_looks_and_snapshots_are_counted_and_bounded() {
    const EXTENTS: u64 = 20_000;
    let mut place = empty();
    place.options.max_segments = 64;
    place.options.index_memory = MIB;
    place.make(2 * EXTENTS * 512);
    let store = place.open();
    let disk = &store.disks()[0];
    take(disk, "monday");
    let mut port = port(&store, 0);
    for saved in [false, true] {
        // Each other sector, so that no two are one extent.
        for first in (0..EXTENTS).step_by(100) {
            for number in first..first + 100 {
                port.submit(number, zeroes(2 * number, 1, false));
            }
            wait(&mut port, 100);
        }
        flush(&mut port);
        if saved {
            disk.checkpoint().unwrap();
        }
        let point = if saved {
            snapshot("monday")
        } else {
            Point::Newest
        };
        let before = disk.history().index_bytes;
        let mut looks = Vec::new();
        let look = || disk.look(point, None);
        let full = (0..20).find_map(|_| look().map(|look| looks.push(look)).err());
        refused(full.map_or(Ok(()), Err), "index-memory");
        assert!(!looks.is_empty(), "one look has room");
        let bytes = disk.history().index_bytes - before;
        let least = looks.len() as u64 * EXTENTS * 16;
        assert!((least..=MIB).contains(&bytes), "{bytes}");
        assert_eq!(store.log_counters().index_bytes, before + bytes);
        drop(looks);
        assert_eq!(disk.history().index_bytes, before);
        look().unwrap();
    }
    drop(port);
    store.close().unwrap();
}

/// A look at saved data keeps the checksums of it, and only of its own disk's. They count.
#[test]
fn the_checksums_of_saved_files_are_counted() {
    const BYTES: u64 = 8 * MIB;
    let place = TestDisk::made(&["one", "two"], BYTES, options());
    let store = place.open();
    let overwrite = |disk: &Disk, byte: u8, bytes: u64| {
        let mut port = disk.open_port().unwrap();
        for at in (0..bytes).step_by(64 << 10) {
            write(&mut port, at / 512, byte, 128);
        }
        flush(&mut port);
        disk.checkpoint().unwrap();
    };
    let [one, two] = [0, 1].map(|disk| &store.disks()[disk]);
    overwrite(one, 1, BYTES);
    overwrite(two, 1, BYTES);
    take(one, "monday");
    overwrite(one, 2, BYTES);
    overwrite(two, 2, MIB);
    let before = one.history().index_bytes;
    for (disk, bytes) in [(one, BYTES), (two, MIB)] {
        let look = disk.look(snapshot("monday"), None).unwrap();
        let counted = one.history().index_bytes - before;
        let checksums = bytes / 4096 * 4;
        assert!((checksums..2 * checksums).contains(&counted), "{counted}");
        drop(look);
        assert_eq!(one.history().index_bytes, before);
    }
    store.close().unwrap();
}

/// Snapshots stay however often the log goes round, until they are deleted, cost no more than what
/// has changed since, and are seen by looks, restores and changes.
#[test]
fn a_log_goes_round_under_its_snapshots() {
    let mut bench = Bench::with(StoreOptions {
        segment_size: 64 << 10,
        max_segments: 8,
        retain: Some(Retention::Nothing),
        ..StoreOptions::default()
    });
    bench.open();
    let mut lsns = Vec::new();
    for (name, more) in ["a", "b", "c", "d"].into_iter().zip([30, 200, 25, 300]) {
        bench.change(more);
        take(bench.disk(0), name);
        let again = bench.disk(0).snapshot(name.parse().unwrap());
        assert_eq!(refused(again, ""), ErrorKind::AlreadyExists);
        lsns.push((name, bench.newest));
        if name == "c" {
            bench.close();
            bench.open();
        }
    }
    bench.change(400);
    // The older ones need what was saved for the one that is deleted.
    let (name, _) = lsns.remove(1);
    bench
        .disk(0)
        .delete_snapshot(name.parse().unwrap())
        .unwrap();
    let again = bench.disk(0).delete_snapshot(name.parse().unwrap());
    assert_eq!(refused(again, ""), ErrorKind::NotFound);
    bench.change(40);
    for &(name, lsn) in &lsns {
        for disk in 0..2 {
            let look = bench.look(disk, snapshot(name)).unwrap();
            bench.check_look(&look, disk, lsn, "in use");
        }
    }
    let told = bench.disk(0).history();
    assert!(told.horizon.lsn > lsns[2].1, "{told:?}");
    // No more than the disks, a file's header, and one header for each batch.
    for kept in &told.snapshots {
        assert!(
            (1..3 * BYTES as u64).contains(&kept.saved_bytes),
            "{told:?}"
        );
    }
    bench.close();
    let gone = bench.as_of(0, snapshot(name));
    refused(gone, "no snapshot 'b': the log has a, c, d");
    for (at, &(name, lsn)) in lsns.iter().enumerate() {
        let bytes = [0, 1].map(|disk| bench.as_of(disk, snapshot(name)).unwrap());
        assert!(bytes == bench.states[&lsn], "{name}");
        // What has changed between two snapshots, or since.
        let until = lsns[at + 1..]
            .iter()
            .map(|(name, lsn)| (Some(snapshot(name)), *lsn));
        for (until, end) in until.chain([(None, bench.newest)]) {
            let changes = bench
                .place
                .changes(&bench.place.disk, snapshot(name), until);
            let mut told = vec![false; BYTES / 512];
            for range in changes.unwrap().ranges {
                let bytes = range.offset as usize..(range.offset + range.len) as usize;
                let now = &bench.states[&end][0][bytes.clone()];
                assert!(range.now == Allocation::Data || all(now, 0), "{range:?}");
                told[bytes.start / 512..bytes.end / 512].fill(true);
            }
            let mut wanted = vec![false; BYTES / 512];
            for (_, (disk, sectors, _)) in bench.touched.range(lsn + 1..end + 1) {
                let sectors = &mut wanted[sectors.start as usize..sectors.end as usize];
                sectors
                    .iter_mut()
                    .for_each(|changed| *changed |= *disk == 0);
            }
            assert!(told == wanted, "from {lsn} to {end}");
        }
    }
    assert!(!bench.place.files("saved-").is_empty());
    bench.open();
    for (name, _) in lsns {
        bench
            .disk(0)
            .delete_snapshot(name.parse().unwrap())
            .unwrap();
    }
    bench.disk(0).checkpoint().unwrap();
    bench.close();
    assert!(bench.place.files("saved-").is_empty());
}

/// A snapshot of one disk costs nothing for what others write, and is none of the others.
#[test]
fn a_snapshot_of_one_disk_keeps_nothing_of_another() {
    let place = TestDisk::made(&["quiet", "busy"], MIB, options());
    let store = place.open();
    let [quiet, busy] = [0, 1].map(|at| &store.disks()[at]);
    paint(quiet, 0..50, 1);
    let alone = "alone".parse().unwrap();
    assert_eq!(quiet.snapshot_alone(alone).unwrap().disk_id, Some(1));
    (1..6).for_each(|byte| paint(busy, 0..BLOCKS, byte));
    let saved = || quiet.history().snapshots[0].saved_bytes;
    quiet.checkpoint().unwrap();
    let idle = saved();
    assert!(idle <= 3 * 4096, "{idle}");
    refused(busy.look(snapshot("alone"), None), "another disk only");
    paint(quiet, 5..15, 2);
    quiet.checkpoint().unwrap();
    let changed = saved();
    assert!(
        (idle + 10 * 4096..idle + 24 * 4096).contains(&changed),
        "{changed}"
    );
    store.close().unwrap();
    let bytes = place.as_of(&place.disk, snapshot("alone")).unwrap();
    assert!(all(&bytes[..50 * 4096], 1) && all(&bytes[50 * 4096..], 0));
    // What would lose it is refused.
    let (disk, log, other) = (&place.disk, place.log(), &place.disks()[1..]);
    let shrunk = resize_disk(disk, MIB / 2, &log, true, other);
    refused(shrunk, "need it: alone");
    refused(leave_log(disk, &log, other), "need it: alone");
}

/// A disk has no past from before it came to the log, whether that is in use or not; and none from
/// before another image came.
#[test]
fn a_disk_that_joins_a_log_has_no_past_from_before() {
    let place = empty();
    with_snapshot(&place, true);
    let [made, raw, backup] = ["made", "raw", "backup-of-raw"].map(|name| place.at(name));
    create_disk(&made, MIB, &place.log(), &options()).unwrap();
    std::fs::write(&raw, vec![7; WHOLE]).unwrap();
    std::fs::copy(&raw, &backup).unwrap();
    let disks = [&place.disk, &made].map(DiskOptions::new);
    let mut store = Store::open(&place.log(), &disks, &options()).unwrap();
    paint(&store.disks()[1], 0..BLOCKS, 4);
    // Nothing is written between these and what comes before and after.
    store.add_disk(&DiskOptions::new(&raw)).unwrap();
    take(&store.disks()[0], "tuesday");
    paint(&store.disks()[2], 0..BLOCKS, 8);
    take(&store.disks()[0], "wednesday");
    // The images go past the snapshots, so that the disk leaves with all its bytes.
    paint(&store.disks()[1], 0..BLOCKS, 5);
    store.disks()[0].checkpoint().unwrap();
    store.remove_disk(&raw).unwrap();
    assert_eq!(std::fs::read(&raw).unwrap()[0], 8);
    remove_file(&raw).unwrap();
    std::fs::copy(&backup, &raw).unwrap();
    store.add_disk(&DiskOptions::new(&raw)).unwrap();
    take(&store.disks()[0], "thursday");
    paint(&store.disks()[2], 0..BLOCKS, 9);
    store.close().unwrap();
    for (disk, name, wanted) in [
        (&made, "monday", None),
        (&made, "tuesday", Some(4)),
        (&raw, "monday", None),
        (&raw, "tuesday", None),
        (&raw, "wednesday", None),
        (&made, "thursday", Some(5)),
        (&raw, "thursday", Some(7)),
        (&place.disk, "monday", Some(1)),
        (&place.disk, "wednesday", Some(2)),
        (&place.disk, "thursday", Some(2)),
    ] {
        let seen = place.as_of(disk, snapshot(name)).map(|bytes| bytes[0]);
        match wanted {
            Some(byte) => assert_eq!(seen.unwrap(), byte, "{disk:?} {name}"),
            None => assert_eq!(refused(seen, ""), ErrorKind::NotFound, "{disk:?} {name}"),
        }
    }
}

/// An open of a log trusts the spill map of each of its disks, so a check of any of them reads it.
#[test]
fn a_check_tells_of_damage_in_any_spill_map() {
    let place = TestDisk::made(&["disk", "other"], MIB, options());
    let mut store = place.open();
    // Too little for a checkpoint, which would copy it to the image.
    commit(&store.disks()[1], 0, 1, 8);
    let [disk, other] = [0, 1].map(|at| place.disks()[at].clone());
    store.remove_disk_keeping_records(&other).unwrap();
    store.close().unwrap();
    let check = || [&disk, &other].map(|disk| inspect(disk, &place.log()));
    let [here, there] = check().map(|report| report.unwrap().spilled);
    assert!(here == 0 && there > 0, "{here}, {there}");
    let mut files = place.files("").into_iter();
    let map = files
        .find(|path| path.extension().is_some_and(|end| end == "map"))
        .unwrap();
    let whole = std::fs::read(&map).unwrap();
    let is_damaged = || check().map(|report| refused(report, "")) == [ErrorKind::Damaged; 2];
    for at in [0, whole.len() / 2] {
        flip(&map, at as u64);
        assert!(is_damaged(), "byte {at}");
        std::fs::write(&map, &whole).unwrap();
    }
    remove_file(&map).unwrap();
    assert!(is_damaged());
    std::fs::write(&map, whole).unwrap();
    assert!(check().iter().all(Result::is_ok));
}

/// Saved bytes that went to another directory would be in no snapshot, and the image no longer has
/// them.
#[test]
fn nothing_is_saved_to_another_directory_of_the_same_name() {
    let place = empty();
    with_snapshot(&place, true);
    let store = place.open();
    paint(&store.disks()[0], BLOCKS / 2..BLOCKS, 3);
    let (log, aside) = (place.log(), place.at("aside"));
    rename(&log, &aside).unwrap();
    create_dir(&log).unwrap();
    for file in std::fs::read_dir(&aside).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), log.join(file.file_name())).unwrap();
    }
    refused(
        store.disks()[0].checkpoint(),
        "directory was moved or replaced",
    );
    remove_dir_all(&log).unwrap();
    rename(&aside, &log).unwrap();
    store.disks()[0].checkpoint().unwrap();
    store.close().unwrap();
    assert!(all(&monday(&place).unwrap(), 1));
}

/// A new length is a write of the log's own: the snapshot is as it was, whether the disk is in use
/// or not.
#[test]
fn a_snapshot_stays_when_its_disk_grows() {
    let place = empty();
    with_snapshot(&place, true);
    let store = place.open();
    store.disks()[0].grow(2 * MIB).unwrap();
    store.close().unwrap();
    let shown = |size: u64| {
        let bytes = monday(&place).unwrap();
        assert_eq!(bytes.len() as u64, size);
        assert!(all(&bytes[..WHOLE], 1) && all(&bytes[WHOLE..], 0));
        assert_eq!(faults(&place), []);
    };
    shown(2 * MIB);
    resize_disk(&place.disk, 3 * MIB, &place.log(), false, &[]).unwrap();
    shown(3 * MIB);
    place.open().close().unwrap();
    shown(3 * MIB);
}
