//! Objects that have rotted in the store, or that somebody has made up: what is whole is used, and
//! the rest is named.

use std::time::Duration;

use walvisor_storage::{Commit, Point, Retention, Store};

use super::strange::{flip, told};
use super::{
    AT_ONCE, Bench, claim_elsewhere, copied_four_times, copy_images, expire_before, mark,
    reachable, refused, settle, take_over, uploader, write,
};
use crate::error::ErrorKind;
use crate::expire::{DAY_US, ExpireOptions, expire_at};
use crate::layout::{self, ObjectId};
use crate::remote::Archive;
use crate::restore::verify;
use crate::survey::survey;
use crate::uploader::{Tick, Uploader};

fn part(number: u64) -> String {
    layout::part(ObjectId { epoch: 1, number })
}

/// A log whose records are in a part each; the first is that of the images.
fn in_parts() -> (Bench, Archive, Store, Vec<Commit>) {
    let (bench, archive, store) = Bench::in_use(Retention::All);
    let mut commits = vec![mark(&store.disks()[0])];
    let mut up = uploader(&archive, &bench);
    settle(&mut up);
    for byte in 1..=4 {
        write(&store.disks()[0], 0, byte, 1);
        commits.push(mark(&store.disks()[0]));
        up.tick().unwrap();
    }
    drop(up);
    (bench, archive, store, commits)
}

fn parts(archive: &Archive) -> u64 {
    let parts = archive.block_on(archive.list("parts/00000001")).unwrap();
    parts.len() as u64
}

/// Pushes until everything is there, and judges what comes back then.
fn mends(bench: &Bench, archive: &Archive, newest: u8) -> Tick {
    let tick = settle(&mut uploader(archive, bench));
    assert_eq!(bench.bytes_at(archive, Point::Newest)[0], newest);
    verify(archive, Point::Newest, &mut |_, _| {}).unwrap();
    tick
}

#[test]
fn a_line_ends_before_a_damaged_newest_part_and_a_push_sends_it_again() {
    let (bench, archive, store, commits) = in_parts();
    flip(&archive, &part(parts(&archive)));
    let at = |commit: &Commit| Point::Lsn(commit.lsn);
    assert_eq!(bench.bytes_at(&archive, at(&commits[1]))[0], 1);
    assert_eq!(bench.bytes_at(&archive, Point::Newest)[0], 3);
    let error = told(verify(&archive, Point::Newest, &mut |_, _| {}));
    assert!(error.contains(&part(parts(&archive))), "{error}");
    verify(&archive, at(&commits[3]), &mut |_, _| {}).unwrap();
    let error = told(bench.restore(&archive, at(&commits[4])));
    assert!(error.contains(&format!("to {}", commits[3])), "{error}");
    assert_eq!(survey(&archive).unwrap().spans[0].last, commits[3]);
    expire_before(&archive, commits[0].unix_us, 0, AT_ONCE);
    // One that another machine has written is not taken for one that this log has.
    claim_elsewhere(&archive, 1);
    assert_eq!(refused(&archive, &bench.log()).kind(), ErrorKind::Fenced);
    settle(&mut Uploader::new(&archive, &bench.log(), take_over()).unwrap());
    for (byte, commit) in (1..).zip(&commits[1..]) {
        assert_eq!(bench.bytes_at(&archive, at(commit))[0], byte);
    }
    assert_eq!(mends(&bench, &archive, 4).last, commits[4]);
    store.close().unwrap();
}

#[test]
fn points_before_a_damaged_part_come_back_and_others_are_refused_with_the_newest_that_does() {
    let (bench, archive, store, commits) = in_parts();
    let broken = part(parts(&archive) - 1);
    flip(&archive, &broken);
    for (byte, commit) in (0..=2).zip(&commits) {
        let point = Point::Lsn(commit.lsn);
        assert_eq!(bench.bytes_at(&archive, point)[0], byte);
    }
    let advice = format!("--at lsn:{}", commits[2].lsn);
    for at in [Point::Newest, Point::Lsn(commits[3].lsn)] {
        for error in [
            told(bench.restore(&archive, at)),
            told(verify(&archive, at, &mut |_, _| {})),
        ] {
            assert!(
                error.contains(&broken) && error.contains(&advice),
                "{error}"
            );
            assert!(error.contains("remove that object"), "{error}");
        }
    }
    expire_before(&archive, commits[0].unix_us, 0, AT_ONCE);
    archive.block_on(archive.remove(&broken)).unwrap();
    mends(&bench, &archive, 4);
    for (byte, commit) in (0..).zip(&commits) {
        let point = Point::Lsn(commit.lsn);
        assert_eq!(bench.bytes_at(&archive, point)[0], byte);
    }
    store.close().unwrap();
}

#[test]
fn the_archive_begins_anew_behind_a_damaged_oldest_part() {
    let (bench, archive, store, commits) = in_parts();
    flip(&archive, &part(1));
    expire_before(&archive, commits[0].unix_us, 0, AT_ONCE);
    assert!(!survey(&archive).unwrap().spans.is_empty());
    let error = told(verify(&archive, Point::Newest, &mut |_, _| {}));
    assert!(error.contains(&part(1)), "{error}");
    for number in 2..=parts(&archive) {
        flip(&archive, &part(number));
    }
    let error = told(bench.restore(&archive, Point::Newest));
    assert!(error.contains("makes another beginning"), "{error}");
    assert_eq!(mends(&bench, &archive, 4).last, commits[4]);
    store.close().unwrap();
}

/// The log's segments begin in it.
#[test]
fn the_archive_begins_anew_behind_an_oldest_part_that_was_removed() {
    let (bench, archive, store, _) = in_parts();
    // A newer root, which is in a newer part.
    store.disks()[0].checkpoint().unwrap();
    settle(&mut uploader(&archive, &bench));
    archive.block_on(archive.remove(&part(1))).unwrap();
    mends(&bench, &archive, 4);
    store.close().unwrap();
}

/// A lease may be of any images; other notes tell what to do.
#[test]
fn damaged_notes_stop_nothing_for_ever() {
    let (bench, archive, store, commits) = copied_four_times();
    let put = |name: &str| {
        let rotten = "?".into();
        archive.block_on(archive.put(name, &rotten)).unwrap();
    };
    put(&layout::lease("1"));
    let newest = commits[3].0.unix_us;
    let gone = expire_before(&archive, newest, 0, AT_ONCE);
    assert_eq!((gone.bases, gone.chunks), (0, 0));
    assert_eq!(reachable(&bench, &archive, &commits), [1, 2, 3, 4]);
    // A day later it has ended.
    let gone = expire_before(&archive, newest + 2 * DAY_US, 0, AT_ONCE);
    assert!(gone.bases > 0, "{gone:?}");
    assert!(
        archive
            .block_on(archive.list(layout::LEASES))
            .unwrap()
            .is_empty()
    );
    put(layout::LOG);
    let told = refused(&archive, &bench.log()).to_string();
    assert!(told.contains("remove that object"), "{told}");
    archive.block_on(archive.remove(layout::LOG)).unwrap();
    settle(&mut uploader(&archive, &bench));
    assert_eq!(reachable(&bench, &archive, &commits), [4]);
    store.close().unwrap();
}

/// What can't be read may lead to points that are kept, and be whole again tomorrow.
#[test]
fn nothing_expires_that_a_damaged_object_may_need() {
    let (bench, archive, store, commits) = copied_four_times();
    let [oldest, .., newest] = &commits[..] else {
        unreachable!()
    };
    let expire = |since_us| {
        let options = ExpireOptions {
            keep: Duration::ZERO,
            keep_daily: 0,
            grace: AT_ONCE,
            dry_run: false,
        };
        archive.block_on(expire_at(&archive, &options, since_us))
    };
    let while_damaged = |name: &str, since_us| {
        let whole = archive.block_on(archive.need(name)).unwrap();
        archive.block_on(archive.put(name, &"?".into())).unwrap();
        let expired = expire(since_us);
        archive.block_on(archive.put(name, &whole)).unwrap();
        assert_eq!(reachable(&bench, &archive, &commits), [1, 2, 3, 4]);
        expired
    };
    // The log that it continues would have ended.
    let claim = layout::epoch(2);
    let error = while_damaged(&claim, newest.0.unix_us).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Damaged);
    let told = error.to_string();
    assert!(
        told.contains(&claim) && told.contains("remove that object"),
        "{told}"
    );
    // The images before the oldest point.
    let manifests = archive.block_on(archive.list(layout::BASES)).unwrap();
    let expired = while_damaged(&manifests[0].name, oldest.0.unix_us).unwrap();
    assert_eq!((expired.bases, expired.parts, expired.chunks), (0, 0, 0));
    // Without the claim, that log has ended.
    archive.block_on(archive.remove(&claim)).unwrap();
    assert!(expire(newest.0.unix_us).unwrap().bases > 0);
    assert_eq!(reachable(&bench, &archive, &commits), [4]);
    store.close().unwrap();
}

/// A copy of the images that was made since does not need it.
#[test]
fn newer_images_lead_on_without_a_damaged_part() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    let disk = &store.disks()[0];
    for byte in 1..=3 {
        // More than a segment.
        (0..5).for_each(|_| write(disk, 0, byte, 128));
        mark(disk);
        disk.checkpoint().unwrap();
        copy_images(&bench, &archive);
    }
    flip(&archive, &part(1));
    assert_eq!(bench.bytes_at(&archive, Point::Newest)[0], 3);
    expire_before(&archive, 0, 0, AT_ONCE);
    write(disk, 0, 4, 1);
    mark(disk);
    mends(&bench, &archive, 4);
    store.close().unwrap();
}
