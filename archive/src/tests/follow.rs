//! Replicas: what they may be used for, and what others do to them meanwhile.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use walvisor_storage::{DiskOptions, LockedLog, Operation, Point, Retention, Store};
use walvisor_testkit::queue;

use super::faulty::FaultyStore;
use super::strange::flip;
use super::{
    Bench, archive_in, bytes_of, copy_images, mark, options, refused, settle, take_over, uploader,
    write,
};
use crate::error::{Error, ErrorKind, Result};
use crate::follow::{Promotion, Replica};
use crate::layout::{self, ObjectId};
use crate::remote::Archive;
use crate::uploader::{UploadOptions, Uploader};

fn replica<'a>(bench: &Bench, archive: &'a Archive) -> Result<Replica<'a>> {
    Replica::open(archive, &bench.dir.path().join("replica"), &mut |_, _| {})
}

fn newest(replica: &Replica<'_>) -> Vec<u8> {
    bytes_of(&replica.disks()[0].path, replica.log_dir())
}

/// Writes a sector and makes it durable.
fn put(store: &Store, byte: u8) {
    write(&store.disks()[0], 0, byte, 1);
    mark(&store.disks()[0]);
}

fn segments(replica: &Replica<'_>) -> usize {
    let entries = std::fs::read_dir(replica.log_dir()).unwrap();
    let name = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name();
    let segment = |name: &std::ffi::OsString| name.to_string_lossy().starts_with("segment-");
    entries.map(name).filter(segment).count()
}

fn kind<T>(result: Result<T>) -> Option<ErrorKind> {
    result.err().as_ref().map(Error::kind)
}

#[test]
fn a_replica_has_what_the_archive_gets_and_drops_the_log_that_newer_images_have() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    let disk = &store.disks()[0];
    let mut most = 0;
    let mut following = None;
    for round in 1..=20 {
        // A segment each time.
        (0..4).for_each(|part| write(disk, part * 128, round, 128));
        let written = mark(disk);
        disk.checkpoint().unwrap();
        if round % 4 == 1 {
            copy_images(&bench, &archive);
        } else {
            settle(&mut uploader(&archive, &bench));
        }
        let following = following.get_or_insert_with(|| replica(&bench, &archive).unwrap());
        let state = loop {
            let state = following.tick().unwrap();
            if state.caught_up {
                break state;
            }
        };
        assert!(state.last.lsn >= written.lsn && state.made_us > 0);
        let bytes = newest(following);
        assert_eq!((bytes[0], bytes[511 * 512]), (round, round));
        most = most.max(segments(following));
    }
    assert!((2..8).contains(&most), "{most} segments");
}

#[test]
fn a_replica_that_was_opened_to_be_written_is_left_alone() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    put(&store, 1);
    settle(&mut uploader(&archive, &bench));
    let mut following = replica(&bench, &archive).unwrap();
    let (disk, log_dir) = (
        following.disks()[0].path.clone(),
        following.log_dir().to_owned(),
    );
    // A look changes nothing.
    assert_eq!(newest(&following)[0], 1);
    following.tick().unwrap();
    let opened = [DiskOptions::new(&disk)];
    let own = Store::open(&log_dir, &opened, &options(Retention::Nothing)).unwrap();
    put(&own, 9);
    put(&store, 2);
    settle(&mut uploader(&archive, &bench));
    assert_eq!(kind(following.tick()), Some(ErrorKind::InUse));
    own.close().unwrap();
    let told = following.tick().unwrap_err();
    assert_eq!(told.kind(), ErrorKind::InvalidInput);
    assert!(
        told.to_string().contains("was opened for writing"),
        "{told}"
    );
    drop(following);
    assert_eq!(
        kind(replica(&bench, &archive)),
        Some(ErrorKind::InvalidInput)
    );
    assert_eq!(bytes_of(&disk, &log_dir)[0], 9);
}

#[test]
fn a_replica_that_is_read_waits() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    put(&store, 1);
    settle(&mut uploader(&archive, &bench));
    let mut replica = replica(&bench, &archive).unwrap();
    let reader = LockedLog::lock(replica.log_dir()).unwrap();
    put(&store, 2);
    settle(&mut uploader(&archive, &bench));
    assert_eq!(kind(replica.tick()), Some(ErrorKind::InUse));
    drop(reader);
    while !replica.tick().unwrap().caught_up {}
    assert_eq!(newest(&replica)[0], 2);
}

#[test]
fn a_directory_has_one_follower_and_nothing_else() {
    let (bench, archive, _store) = Bench::in_use(Retention::Nothing);
    settle(&mut uploader(&archive, &bench));
    let first = replica(&bench, &archive).unwrap();
    let second = replica(&bench, &archive).err().unwrap().to_string();
    assert!(
        second.ends_with("another process follows there; end that one first"),
        "{second}"
    );
    drop(first);
    assert_eq!(kind(replica(&bench, &archive)), None);
    let other = Bench::in_use(Retention::Nothing);
    settle(&mut uploader(&other.1, &other.0));
    let elsewhere = Replica::open(&archive, other.0.dir.path(), &mut |_, _| {});
    assert_eq!(kind(elsewhere), Some(ErrorKind::InvalidInput));
}

/// With keys that may only read, a restore takes no lease, and a replica can't be promoted.
#[test]
fn an_archive_that_can_not_be_written_can_be_restored_and_followed() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    put(&store, 1);
    settle(&mut uploader(&archive, &bench));
    let read_only = archive_in(Arc::new(FaultyStore::read_only(bench.store.clone())));
    assert_eq!(bench.bytes_at(&read_only, Point::Newest)[0], 1);
    let following = replica(&bench, &read_only).unwrap();
    let disk = following.disks()[0].path.clone();
    assert_eq!(newest(&following)[0], 1);
    assert!(following.promote().is_err());
    // It is still a replica.
    let following = replica(&bench, &read_only).unwrap();
    assert_eq!(following.disks()[0].path, disk);
}

#[test]
fn what_the_old_host_has_sent_until_it_knew_is_promoted_too() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    put(&store, 1);
    let mut up = uploader(&archive, &bench);
    settle(&mut up);
    let mut following = replica(&bench, &archive).unwrap();
    for byte in 2..5 {
        put(&store, byte);
        settle(&mut up);
    }
    // Also those of a writer that came between.
    drop(up);
    let mut up = uploader(&archive, &bench);
    put(&store, 5);
    settle(&mut up);
    assert!(!following.claim().unwrap());
    assert_eq!(newest(&following)[0], 5);
    put(&store, 6);
    let fenced = (0..5).find_map(|_| up.tick().err()).unwrap();
    assert_eq!(fenced.kind(), ErrorKind::Fenced);
    let (disk, log_dir) = (
        following.disks()[0].path.clone(),
        following.log_dir().to_owned(),
    );
    assert!(!following.promote().unwrap().left_behind);
    // What was sent before the old host knew may count, and needs not.
    assert!([5, 6].contains(&bytes_of(&disk, &log_dir)[0]));
}

/// A writer adds a part although another has followed it; then the replica is promoted.
#[test]
fn what_a_writer_sends_that_has_lost_the_archive_is_not_promoted() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    put(&store, 1);
    let mut lost = uploader(&archive, &bench);
    settle(&mut lost);
    let mut following = replica(&bench, &archive).unwrap();
    let parts = || archive.block_on(archive.list(layout::PARTS)).unwrap().len();
    put(&store, 2);
    let mut up = uploader(&archive, &bench);
    settle(&mut up);
    let before = parts();
    put(&store, 3);
    assert_eq!(lost.tick().unwrap_err().kind(), ErrorKind::Fenced);
    assert!(parts() > before, "it adds a part before it knows");
    put(&store, 4);
    settle(&mut up);
    assert!(!following.claim().unwrap());
    assert_eq!(newest(&following)[0], 4);
}

/// A host that sends a part, with a record of its own, before each request of the replica, until it
/// knows that it has lost the archive. Then `fenced` is called. Returns the newest record of which it
/// knew that the archive has it.
fn with_busy_host(
    (bench, store): (&Bench, &Store),
    faulty: &FaultyStore,
    fenced: &(dyn Fn() + Sync),
    following: Replica<'_>,
) -> (Result<Promotion>, u64) {
    let archive = bench.archive();
    let (begun, ended) = faulty.take_turns();
    std::thread::scope(|scope| {
        let host = scope.spawn(move || {
            let options = UploadOptions {
                check_each: true,
                ..UploadOptions::default()
            };
            let mut up = Uploader::new(&archive, &bench.log(), options).unwrap();
            let (mut kept, mut lost) = (0, false);
            while begun.recv().is_ok() {
                if !lost {
                    put(store, 1);
                    let ticked = up.tick_and_tell(&mut |lsn| kept = lsn);
                    lost = ticked.is_err_and(|error| error.kind() == ErrorKind::Fenced);
                    if lost {
                        fenced();
                    }
                }
                let _ = ended.send(());
            }
            assert!(lost, "it has lost the archive");
            kept
        });
        let promoted = following.promote();
        faulty.end_turns();
        (promoted, host.join().unwrap())
    })
}

#[test]
fn a_replica_of_a_host_that_never_stops_is_promoted_with_all_that_it_was_told_to_have() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    put(&store, 1);
    settle(&mut uploader(&archive, &bench));
    let faulty = Arc::new(FaultyStore::new(bench.store.clone(), 0, 0));
    let busy = archive_in(faulty.clone());
    let following = replica(&bench, &busy).unwrap();
    let (promoted, kept) = with_busy_host((&bench, &store), &faulty, &|| (), following);
    let promotion = promoted.unwrap();
    assert!(!promotion.left_behind);
    assert!(promotion.commit.lsn >= kept, "{promotion:?} {kept}");
    assert!(kept > 10);
}

/// However old the archive is.
#[test]
fn a_promotion_lists_only_what_may_be_newer_than_the_images() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    put(&store, 1);
    let mut up = uploader(&archive, &bench);
    settle(&mut up);
    for _ in 0..200 {
        put(&store, 2);
        up.tick().unwrap();
    }
    drop(up);
    store.disks()[0].checkpoint().unwrap();
    copy_images(&bench, &archive);
    let parts = archive.block_on(archive.list(layout::PARTS)).unwrap().len() as u64;
    assert!(parts > 200);
    let faulty = Arc::new(FaultyStore::new(bench.store.clone(), 0, 0));
    let counted = archive_in(faulty.clone());
    let following = replica(&bench, &counted).unwrap();
    assert!(faulty.listed.swap(0, Ordering::Relaxed) > parts);
    following.promote().unwrap();
    let listed = faulty.listed.load(Ordering::Relaxed);
    assert!(listed < parts / 2, "{listed} of {parts}");
}

/// Once the host knows that it has lost the archive, the promotion gets so many more answers. Then
/// it is called again.
#[test]
fn a_promotion_that_is_ended_after_its_claim_loses_nothing() {
    for answers in [0, 1, 2, 5, 10, 20, 40] {
        let (bench, archive, store) = Bench::in_use(Retention::Nothing);
        put(&store, 1);
        settle(&mut uploader(&archive, &bench));
        let faulty = Arc::new(FaultyStore::new(bench.store.clone(), 0, 0));
        let busy = archive_in(faulty.clone());
        let following = replica(&bench, &busy).unwrap();
        let fenced = || faulty.fail_after(answers);
        let (promoted, kept) = with_busy_host((&bench, &store), &faulty, &fenced, following);
        let promotion = promoted.unwrap_or_else(|_| {
            let following = replica(&bench, &archive).unwrap();
            following.promote().unwrap()
        });
        assert!(
            !promotion.left_behind && promotion.commit.lsn >= kept,
            "{answers}: {promotion:?} {kept}"
        );
    }
}

/// The old host's push is started anew, and its log could go on where the replica was promoted.
#[test]
fn the_old_host_does_not_take_the_archive_back() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    put(&store, 1);
    settle(&mut uploader(&archive, &bench));
    // On a machine of the same name, or in another directory of the same one.
    replica(&bench, &archive).unwrap().promote().unwrap();
    put(&store, 2);
    let back = refused(&archive, &bench.log());
    assert!(back.to_string().contains("--take-over"), "{back}");
    settle(&mut Uploader::new(&archive, &bench.log(), take_over()).unwrap());
    // Now it has the archive.
    settle(&mut uploader(&archive, &bench));
}

/// A copy of the images that was half taken over, from images that have expired since.
#[test]
fn zeroes_replace_what_the_images_had_before() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    put(&store, 1);
    store.disks()[0].checkpoint().unwrap();
    copy_images(&bench, &archive);
    let following = replica(&bench, &archive).unwrap();
    let path = following.disks()[0].path.clone();
    drop(following);
    let mut port = store.disks()[0].open_port().unwrap();
    queue::run(
        &mut port,
        Operation::Discard {
            sector: 0,
            sectors: super::SECTORS as u32,
        },
    )
    .unwrap();
    drop(port);
    mark(&store.disks()[0]);
    store.disks()[0].checkpoint().unwrap();
    copy_images(&bench, &archive);
    let base = layout::base(ObjectId {
        epoch: 1,
        number: 1,
    });
    archive.block_on(archive.remove(&base)).unwrap();
    // As a kill leaves it that has noted a chunk.
    let note = path.with_file_name("walvisor-replica.json");
    let text = std::fs::read(&note).unwrap();
    let mut noted: serde_json::Value = serde_json::from_slice(&text).unwrap();
    noted["before"] = noted["base"].take();
    noted["base"] = serde_json::json!({ "epoch": 2, "number": 1 });
    noted["complete"] = false.into();
    noted["chunks"] = serde_json::json!([1]);
    std::fs::write(&note, noted.to_string()).unwrap();
    let following = replica(&bench, &archive).unwrap();
    assert_eq!(newest(&following)[0], 0);
    assert_eq!(std::fs::read(path).unwrap()[0], 0);
}

/// The part rots before the replica has it.
#[test]
fn a_replica_follows_whoever_goes_on_before_a_damaged_part() {
    let (bench, archive, store) = Bench::in_use(Retention::All);
    put(&store, 1);
    let mut up = uploader(&archive, &bench);
    settle(&mut up);
    let mut replica = replica(&bench, &archive).unwrap();
    let reached = replica.tick().unwrap().last.lsn;
    put(&store, 2);
    settle(&mut up);
    let parts = archive.block_on(archive.list(layout::PARTS)).unwrap();
    flip(&archive, &parts.last().unwrap().name);
    assert_eq!(kind(replica.tick()), Some(ErrorKind::Damaged));
    put(&store, 3);
    let newest_lsn = settle(&mut uploader(&archive, &bench)).last.lsn;
    assert!(newest_lsn > reached);
    let caught_up = |_| replica.tick().unwrap().caught_up;
    assert!((0..10).any(caught_up));
    assert_eq!(newest(&replica)[0], 3);
    assert_eq!(replica.promote().unwrap().commit.lsn, newest_lsn);
    store.close().unwrap();
}

/// Somebody has put another epoch's claim there.
#[test]
fn a_claim_of_another_epoch_counts_as_damaged() {
    let (bench, archive, store) = Bench::in_use(Retention::All);
    put(&store, 1);
    settle(&mut uploader(&archive, &bench));
    settle(&mut uploader(&archive, &bench));
    let first = archive.block_on(archive.need(&layout::epoch(1))).unwrap();
    let put_as = |epoch| {
        let name = layout::epoch(epoch);
        archive.block_on(archive.put(&name, &first)).unwrap();
    };
    put_as(3);
    // This log goes on, if somebody says so.
    put(&store, 2);
    let mut up = Uploader::new(&archive, &bench.log(), take_over()).unwrap();
    settle(&mut up);
    assert_eq!(up.epoch(), 4);
    put_as(5);
    let mut replica = replica(&bench, &archive).unwrap();
    let newest = replica.tick().unwrap().last;
    replica.claim().unwrap();
    assert_eq!(replica.promote().unwrap().commit, newest);
    store.close().unwrap();
}

/// The part rots after the replica has got it.
#[test]
fn a_replica_keeps_what_the_archive_has_lost() {
    let (bench, archive, store) = Bench::in_use(Retention::All);
    put(&store, 1);
    let mut up = uploader(&archive, &bench);
    settle(&mut up);
    put(&store, 2);
    let last = settle(&mut up).last;
    let mut following = replica(&bench, &archive).unwrap();
    assert_eq!(following.tick().unwrap().last, last);
    let parts = archive.block_on(archive.list(layout::PARTS)).unwrap();
    flip(&archive, &parts.last().unwrap().name);
    for _ in 0..2 {
        assert_eq!(kind(following.tick()), Some(ErrorKind::Damaged));
    }
    assert_eq!(newest(&following)[0], 2);
    let (disks, log) = (following.disks(), following.log_dir().to_owned());
    drop(following);
    let told = replica(&bench, &archive).map(drop).unwrap_err().to_string();
    assert!(told.contains("to keep the replica"), "{told}");
    assert_eq!(bytes_of(&disks[0].path, &log)[0], 2);
    settle(&mut uploader(&archive, &bench));
    let replica = replica(&bench, &archive).unwrap();
    assert_eq!(replica.promote().unwrap().commit, last);
    assert_eq!(bytes_of(&disks[0].path, &log)[0], 2);
    store.close().unwrap();
}
