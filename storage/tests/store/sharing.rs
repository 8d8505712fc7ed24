//! Concurrent creation and opening of a log, its files and images, and what other users may see and
//! plant there.

use std::fs::{Permissions, metadata, set_permissions};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::sync::{Barrier, mpsc};
use std::thread;

use crate::support::{TestDisk, all, commit, port, read, refused, small, wait_until};
use walvisor_storage::{
    DiskOptions, EngineKind, ErrorKind, Image, Store, StoreOptions, create_disk, export_disk,
    import_disk, inspect,
};

const SIZE: u64 = 1 << 20;
/// How often a race is tried.
const ROUNDS: usize = 10;

fn options() -> StoreOptions {
    small(EngineKind::Auto)
}

fn mode(path: &Path) -> u32 {
    metadata(path).unwrap().permissions().mode() & 0o777
}

/// Every disk whose creation was reported as successful is in the log.
#[test]
fn disks_that_are_made_at_once_on_a_new_log_are_all_there() {
    for _ in 0..ROUNDS {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let disks = [0, 1, 2, 3].map(|n| dir.path().join(format!("disk-{n}")));
        let raw = dir.path().join("raw");
        std::fs::write(&raw, vec![7; SIZE as usize]).unwrap();
        let start = Barrier::new(disks.len());
        thread::scope(|scope| {
            for (n, disk) in disks.iter().enumerate() {
                let (start, log, raw) = (&start, &log, &raw);
                scope.spawn(move || {
                    start.wait();
                    let make = || match n % 2 {
                        0 => create_disk(disk, SIZE, log, &options()),
                        _ => import_disk(disk, raw, log, &options(), &mut |_, _| {}).map(drop),
                    };
                    // On a slow disk the others may hold the log for longer than this one waits.
                    while let Err(error) = make() {
                        assert_eq!(error.kind(), ErrorKind::Locked, "{error}");
                    }
                });
            }
        });
        let all = disks.each_ref().map(DiskOptions::new);
        let store = Store::open(&log, &all, &options()).unwrap();
        store.close().unwrap();
        assert_eq!(std::fs::read(&disks[1]).unwrap(), vec![7; SIZE as usize]);
    }
}

/// If two stores are opened with different images on one new log, one gets it, and what it
/// acknowledged stays.
#[test]
fn of_two_that_open_a_new_log_at_once_one_does_and_loses_nothing() {
    // The other one waits for seconds.
    for _ in 0..ROUNDS / 5 {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let disks = ["a", "b"].map(|name| dir.path().join(name));
        for disk in &disks {
            let file = std::fs::File::create(disk).unwrap();
            file.set_len(SIZE).unwrap();
        }
        let start = Barrier::new(2);
        let (done, others) = mpsc::channel();
        let opened = thread::scope(|scope| {
            let threads = disks.each_ref().map(|disk| {
                let (start, log, done) = (&start, &log, done.clone());
                scope.spawn(move || {
                    start.wait();
                    match Store::open(log, &[DiskOptions::new(disk)], &options()) {
                        Ok(store) => {
                            commit(&store.disks()[0], 8, 7, 8);
                            Some((store, disk))
                        }
                        Err(error) => {
                            done.send(error).unwrap();
                            None
                        }
                    }
                })
            });
            threads.map(|thread| thread.join().unwrap())
        });
        let opened: Vec<_> = opened.into_iter().flatten().collect();
        assert_eq!(opened.len(), 1);
        let refused = others.recv().unwrap().kind();
        assert!(
            matches!(refused, ErrorKind::Locked | ErrorKind::WrongLog),
            "{refused:?}"
        );
        for (store, disk) in opened {
            // The refused one has changed nothing.
            assert!(log.join("control").metadata().unwrap().len() > 0);
            store.close().unwrap();
            let store = Store::open(&log, &[DiskOptions::new(disk)], &options()).unwrap();
            assert!(all(&read(&mut port(&store, 0), 8, 8), 7));
        }
    }
}

/// No other user can read in a log or in a copy what the image's mode denies.
#[test]
fn a_log_is_its_owners_alone_and_copies_are_as_their_image() {
    let place = TestDisk::new();
    let dir = place.disk.parent().unwrap();
    assert_eq!(mode(&place.log()), 0o700);
    for entry in std::fs::read_dir(place.log()).unwrap() {
        assert_eq!(mode(&entry.unwrap().path()), 0o600);
    }
    let export = |raw: &Path, replace| {
        let none = &mut |_, _| {};
        export_disk(&place.disk, &place.log(), raw, replace, None, none).unwrap();
        mode(raw)
    };
    let raw = dir.join("raw");
    set_permissions(&place.disk, Permissions::from_mode(0o600)).unwrap();
    assert_eq!(export(&raw, false), 0o600);
    // If the file existed, its mode is kept, as when other programs write to a file.
    set_permissions(&raw, Permissions::from_mode(0o620)).unwrap();
    assert_eq!(export(&raw, true), 0o620);
    set_permissions(&raw, Permissions::from_mode(0o400)).unwrap();
    let imported = dir.join("imported");
    let log = dir.join("imported.wal");
    import_disk(&imported, &raw, &log, &options(), &mut |_, _| {}).unwrap();
    assert_eq!(mode(&imported) & 0o077, 0);
}

/// A link under a name that is about to be created is refused, and its target stays unchanged.
#[test]
fn links_that_others_planted_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    std::fs::write(at("precious"), "precious").unwrap();
    symlink(at("precious"), at("disk.walvisor-part")).unwrap();
    let create = || create_disk(&at("disk"), SIZE, &at("log"), &options());
    let is_told = |done: walvisor_storage::Result<()>| {
        let text = done.unwrap_err().to_string();
        assert!(text.contains("link") && text.contains("remove"), "{text}");
    };
    is_told(create());
    std::fs::remove_file(at("disk.walvisor-part")).unwrap();
    std::fs::create_dir(at("log")).unwrap();
    symlink(at("precious"), at("log/control.new")).unwrap();
    is_told(create());
    assert_eq!(std::fs::read(at("precious")).unwrap(), b"precious");
}

/// Files that look like segments but are none: a file without a segment's name is left alone, and
/// one with the name of a segment that the log can't have is reported.
#[test]
fn files_that_the_log_cannot_have_are_told_or_left_alone() {
    let place = TestDisk::new();
    let segment = place.log().join("segment-00000");
    for name in [
        "segment-0",
        "segment-",
        "segment--1",
        "segment-x",
        "segment-+0001",
    ] {
        std::fs::copy(&segment, place.log().join(name)).unwrap();
    }
    place.open().close().unwrap();
    for name in ["segment-00099", "segment-4294967295"] {
        let path = place.log().join(name);
        std::fs::copy(&segment, &path).unwrap();
        let opened = [
            place.try_open(&options()).map(drop),
            inspect(&place.disk, &place.log()).map(drop),
        ];
        for done in opened {
            assert_eq!(refused(done, name), ErrorKind::Damaged);
        }
        std::fs::remove_file(path).unwrap();
    }
    place.open().close().unwrap();
}

/// The length that counts is that under the lock: the former holder may have made the file longer.
#[test]
fn an_image_that_grew_while_its_lock_was_waited_for_is_as_long_as_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    std::fs::write(&path, [0; 512]).unwrap();
    let first = Image::open(&path, false).unwrap();
    let opened = || {
        let files = std::fs::read_dir("/proc/self/fd").unwrap();
        let files = files.filter_map(|file| std::fs::read_link(file.unwrap().path()).ok());
        files.filter(|file| *file == path).count()
    };
    thread::scope(|scope| {
        let before = opened();
        let waiter = scope.spawn(|| Image::open(&path, false));
        wait_until("the waiter to open the file", || opened() > before);
        first.grow(4096).unwrap();
        drop(first);
        assert_eq!(waiter.join().unwrap().unwrap().bytes(), 4096);
    });
}
