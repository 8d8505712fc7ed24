//! Logs that are damaged before the archive has them.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use walvisor_storage::{Point, ReplicaOptions, Retention, Store, segment_path};

use super::{Bench, mark, settle, uploader, write};
use crate::error::{Error, ErrorKind};
use crate::uploader::Uploader;

/// Flips a bit of what is in the log at the first sector of these bytes; returns the segment.
fn damage(bench: &Bench, byte: u8) -> PathBuf {
    let segments = (0..).map(|slot| segment_path(&bench.log(), slot));
    let found = segments.take_while(|path| path.exists()).find_map(|path| {
        let bytes = std::fs::read(&path).unwrap();
        let mut sectors = bytes.chunks(512);
        let at = sectors.position(|sector| sector == [byte; 512])?;
        Some((path, at as u64 * 512))
    });
    let (path, at) = found.expect("the record is in the log");
    flip(&path, at, byte);
    path
}

/// Flips a bit of the byte at this place.
fn flip(path: &PathBuf, at: u64, byte: u8) {
    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(&[byte ^ 1], at).unwrap();
}

/// Ticks until one fails.
fn fails(up: &mut Uploader<'_>) -> Error {
    (0..50).find_map(|_| up.tick().err()).expect("an error")
}

/// Writes more than a segment, here and there.
fn fill(store: &Store) {
    (0..4).for_each(|part| write(&store.disks()[0], part * 128, 0x11, 128));
    mark(&store.disks()[0]);
}

#[test]
fn damage_in_the_log_is_told() {
    let (bench, archive, store) = Bench::in_use(Retention::All);
    let disk = &store.disks()[0];
    let mut up = uploader(&archive, &bench);
    for round in 1..6 {
        write(disk, round, 0xa0 | round as u8, 1);
        mark(disk);
    }
    store.close().unwrap();
    damage(&bench, 0xa3);
    let error = fails(&mut up);
    assert_eq!(error.kind(), ErrorKind::Local);
    assert!(error.to_string().contains("can't be read"), "{error}");
}

/// The damage is told as long as the log needs the record. Then the images have passed it.
#[test]
fn the_archive_begins_anew_once_the_images_have_passed_the_damage() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    let disk = &store.disks()[0];
    write(disk, 0, 1, 1);
    let before = mark(disk);
    let mut up = uploader(&archive, &bench);
    settle(&mut up);
    write(disk, 3, 0xa3, 1);
    let damaged = mark(disk);
    fill(&store);
    damage(&bench, 0xa3);
    let error = fails(&mut up).to_string();
    let what = format!("the records from LSN {} to ", before.lsn + 1);
    assert!(error.contains(&what), "{error}");
    assert!(error.contains("the archive begins anew"), "{error}");
    fails(&mut up);
    assert_eq!(up.epoch(), 1);
    // What is overwritten needs not be read.
    write(disk, 3, 9, 1);
    mark(disk);
    disk.checkpoint().unwrap();
    settle(&mut up);
    assert_eq!(up.epoch(), 2);
    write(disk, 4, 10, 1);
    mark(disk);
    settle(&mut up);
    let bytes = bench.bytes_at(&archive, Point::Newest);
    assert_eq!([0, 3, 4].map(|sector| bytes[sector * 512]), [0x11, 9, 10]);
    assert_eq!(bench.bytes_at(&archive, Point::Lsn(before.lsn))[0], 1);
    assert!(bench.restore(&archive, Point::Lsn(damaged.lsn)).is_err());
    store.close().unwrap();
}

/// Nothing that follows tells of the record, and the log's root does not either yet.
#[test]
fn damage_of_the_newest_record_is_told_to_whoever_waits_for_it() {
    let (bench, archive, store) = Bench::in_use(Retention::Nothing);
    let disk = &store.disks()[0];
    let replica = disk.replicate(ReplicaOptions::default(), |_| ()).unwrap();
    let mut up = uploader(&archive, &bench);
    settle(&mut up);
    write(disk, 3, 0xa3, 1);
    let newest = mark(disk);
    damage(&bench, 0xa3);
    for _ in 0..50 {
        up.tick().unwrap();
    }
    up.expect(newest.lsn);
    let error = fails(&mut up).to_string();
    assert!(
        error.contains(&format!("to {} can't", newest.lsn)),
        "{error}"
    );
    // The log goes on in another segment.
    replica.lose();
    write(disk, 3, 9, 1);
    mark(disk);
    disk.checkpoint().unwrap();
    settle(&mut up);
    write(disk, 4, 10, 1);
    up.expect(mark(disk).lsn);
    for _ in 0..50 {
        settle(&mut up);
    }
    let bytes = bench.bytes_at(&archive, Point::Newest);
    assert_eq!((bytes[3 * 512], bytes[4 * 512]), (9, 10));
    drop(replica);
    store.close().unwrap();
}

/// The segment is not one of the log any more, as far as one can see.
#[test]
fn an_archive_does_not_begin_anew_again_and_again_because_of_a_damaged_segment() {
    let (bench, archive, store) = Bench::in_use(Retention::All);
    let disk = &store.disks()[0];
    write(disk, 0, 1, 1);
    mark(disk);
    fill(&store);
    fill(&store);
    store.close().unwrap();
    let path = segment_path(&bench.log(), 0);
    flip(&path, 20, std::fs::read(&path).unwrap()[20]);
    let mut up = uploader(&archive, &bench);
    let error = fails(&mut up);
    assert_eq!(error.kind(), ErrorKind::Local);
    fails(&mut up);
    assert_eq!(up.epoch(), 1);
}
