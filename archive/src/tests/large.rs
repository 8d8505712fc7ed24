//! Archives of large disks, and of many copies of them.

#[path = "../../../storage/tests/support/heap.rs"]
mod heap;

use std::sync::Arc;
use std::time::Duration;

use walvisor_storage::{Point, Retention, create_disk};

use super::faulty::FaultyStore;
use super::{Bench, archive_in, copies, copy_images, mark, options, uploader, write};
use crate::base::lost_chunks;
use crate::error::ErrorKind;
use crate::expire::{ExpireOptions, expire_at};
use crate::layout::{self, ObjectId};
use crate::lineage::read_base;
use crate::object;
use crate::remote::Archive;
use crate::restore::Plan;
use crate::survey::survey;
use crate::uploader::now_us;

/// Chunks that each manifest names.
const CHUNKS: usize = 20_000;

/// The images can't be named in one manifest. The log is archived all the same.
#[test]
fn images_that_no_manifest_can_name_are_refused_before_they_are_sent() {
    let bench = Bench::new(&[], Retention::Nothing);
    let (archive, options) = (bench.archive(), options(Retention::Nothing));
    create_disk(&bench.disk("a"), 8 << 30, &bench.log(), &options).unwrap();
    let mut up = uploader(&archive, &bench);
    let refused = loop {
        up.tick().unwrap();
        assert_eq!(copies(&archive), 0);
        if let Some(error) = up.take_copy_error() {
            break error;
        }
    };
    assert_eq!(refused.kind(), ErrorKind::InvalidInput);
    let told = refused.to_string();
    assert!(told.contains("more than an archive can name"), "{told}");
    // However often it is tried.
    for _ in 0..100 {
        assert!(up.tick().unwrap().caught_up);
        assert!(up.take_copy_error().is_some());
    }
    assert_eq!(copies(&archive), 0);
}

fn keep_all() -> ExpireOptions {
    ExpireOptions {
        keep: Duration::MAX,
        keep_daily: 0,
        grace: Duration::ZERO,
        dry_run: true,
    }
}

/// An archive with so many copies of the images of a disk with many chunks.
fn with_copies(bench: &Bench, count: u64) -> Archive {
    let archive = bench.archive();
    copy_images(bench, &archive);
    let newest = |number| ObjectId { epoch: 1, number };
    let (mut header, root) = archive.block_on(read_base(&archive, newest(1))).unwrap();
    let image = &mut header.images[0];
    // The image is as large as the disk.
    header.chunk_bytes = image.bytes / CHUNKS as u64;
    let chunks = image.bytes.div_ceil(header.chunk_bytes);
    let name = |number: u64| Some(object::hash(&number.to_le_bytes()));
    image.chunks = (0..chunks).map(name).collect();
    for number in 1..=count {
        header.at = newest(number);
        let object = object::seal(&header, &root).unwrap().into();
        let name = layout::base(header.at);
        archive.block_on(archive.put(&name, &object)).unwrap();
    }
    archive
}

/// Chunks that are none of the newest copy's take no room in a push, and in an expiry what it has to
/// know of each.
#[test]
fn memory_does_not_hold_the_names_of_all_chunks() {
    const LISTED: u64 = 15_000;
    let most = |chunks| {
        let bench = Bench::new(&["a"], Retention::Nothing);
        copy_images(&bench, &bench.archive());
        let mut store = FaultyStore::new(bench.store.clone(), 0, 0);
        store.chunks = chunks;
        let archive = archive_in(Arc::new(store));
        let expire = || {
            let options = ExpireOptions {
                grace: Duration::MAX,
                ..keep_all()
            };
            let report = archive.block_on(expire_at(&archive, &options, now_us()));
            assert_eq!(report.unwrap().chunks, 0);
        };
        let push = || {
            let hash = object::hash(b"nobody has sent this");
            let none = archive.block_on(lost_chunks(&archive, [(&*hash, 0)].into_iter()));
            assert_eq!(none.unwrap().len(), 1);
        };
        [heap::most_during(expire), heap::most_during(push)]
    };
    let (few, many) = (most(1), most(LISTED));
    let each = [0, 1].map(|work| (many[work] - few[work]) as u64 / LISTED);
    assert!(each[0] < 64 && each[1] == 0, "{each:?} bytes");
}

/// What lists, restores, expires and pushes has one manifest in memory at a time.
#[test]
fn memory_does_not_grow_with_the_number_of_copies() {
    let most = |count| {
        let bench = Bench::new(&["a"], Retention::Nothing);
        let store = bench.open(&["a"]);
        write(&store.disks()[0], 0, 1, 1);
        mark(&store.disks()[0]);
        store.disks()[0].checkpoint().unwrap();
        let archive = with_copies(&bench, count);
        let expire = || {
            let report = archive.block_on(expire_at(&archive, &keep_all(), now_us()));
            assert_eq!(report.unwrap().bases, 0);
        };
        let survey = || assert_eq!(survey(&archive).unwrap().spans[0].bases.len() as u64, count);
        // All are too new.
        let find = || {
            assert!(
                archive
                    .block_on(Plan::find(&archive, Point::Lsn(0)))
                    .is_err()
            )
        };
        let push = || drop(uploader(&archive, &bench));
        let works: [(&str, &dyn Fn()); 4] = [
            ("expire", &expire),
            ("survey", &survey),
            ("find", &find),
            ("push", &push),
        ];
        works.map(|(name, work)| (name, heap::most_during(work)))
    };
    for ((work, few), (_, many)) in most(2).into_iter().zip(most(20)) {
        // A manifest has about 2 MB: each name, and where it is.
        let manifest = CHUNKS as isize * 64;
        println!("{work}: {few} bytes for 2 copies, {many} for 20");
        assert!(few > manifest, "{work}: a manifest is read");
        assert!(many < few + manifest, "{work}: {few} {many}");
    }
}
