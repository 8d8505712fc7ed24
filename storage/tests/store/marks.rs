//! Marks in a log: durable when they are made, found by a dump, gone with the history, and of no
//! consequence for the disks.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use crate::support::{SIZE, TestDisk, flush, read, run, small, wait_until, write};
use walvisor_storage::{
    Backend, Commit, DiskOptions, EngineKind, ErrorKind, FullLogPolicy, LogMark, MarkText,
    Operation, Point, RecordKind, Retention, Store, StoreOptions, create_disk, disk_changes,
    dump_groups, dump_records, inspect, restore_disk,
};

fn text(text: &str) -> MarkText {
    text.parse().unwrap()
}

fn keeping(retain: Retention) -> StoreOptions {
    StoreOptions {
        retain: Some(retain),
        max_segments: 16,
        ..small(EngineKind::Auto)
    }
}

fn open(place: &TestDisk, options: &StoreOptions) -> Store {
    if !place.disk.exists() {
        create_disk(&place.disk, SIZE, &place.log(), options).unwrap();
    }
    Store::open(&place.log(), &[DiskOptions::new(&place.disk)], options).unwrap()
}

/// A mark as a dump shows it: its place and its text, and where the text is stored.
type DumpedMark = (Commit, Option<MarkText>, PathBuf, u64);

fn marks(place: &TestDisk) -> Vec<DumpedMark> {
    let mut marks = Vec::new();
    dump_records(&place.log(), &mut |record| {
        if record.kind != RecordKind::Mark {
            return assert_eq!(record.text, None);
        }
        assert_eq!((record.disk_id, record.payload_bytes), (0, 512));
        assert_eq!(record.text.is_none(), record.damaged);
        let commit = Commit {
            lsn: record.lsn,
            cid: record.cid,
            unix_us: record.unix_us,
        };
        let segment = record.segment.to_path_buf();
        marks.push((commit, record.text.cloned(), segment, record.offset));
    })
    .unwrap();
    marks
}

fn texts(place: &TestDisk) -> Vec<String> {
    let texts = marks(place).into_iter();
    let texts = texts.map(|(_, text, ..)| text.unwrap().to_string());
    texts.collect()
}

/// Writes 1, a mark, writes 2 to the same place, a mark, and is killed.
fn two_marks() -> (TestDisk, [Commit; 2]) {
    let live = TestDisk::empty();
    let store = open(&live, &keeping(Retention::All));
    let mut port = store.disks()[0].open_port().unwrap();
    write(&mut port, 8, 1, 8);
    let index = store.disks()[0].history().index_bytes;
    let first = store.mark(&text("the first")).unwrap();
    assert_eq!(store.disks()[0].history().index_bytes, index);
    write(&mut port, 8, 2, 8);
    let second = store.mark(&text("txn 17 \"acked\" — ok")).unwrap();
    (live.crash(), [first, second])
}

#[test]
fn a_mark_is_durable_when_it_is_made_and_its_lsn_is_a_point() {
    let (place, made) = two_marks();
    let found = marks(&place);
    assert_eq!(found.iter().map(|mark| mark.0).collect::<Vec<_>>(), made);
    assert_eq!(texts(&place), ["the first", "txn 17 \"acked\" — ok"]);
    assert_eq!((made[0].lsn, made[1].lsn), (2, 4));
    assert!(made[0].cid < made[1].cid && made[0].unix_us <= made[1].unix_us);
    let mut groups = Vec::new();
    dump_groups(&place.log(), &mut |group| groups.push(group.clone())).unwrap();
    let shown: Vec<LogMark> = groups
        .iter()
        .flat_map(|group| group.marks.clone())
        .collect();
    let lsns: Vec<u64> = shown.iter().map(|mark| mark.lsn).collect();
    assert_eq!(lsns, [2, 4]);
    assert!(groups.iter().all(|group| group.disks.len() <= 1));
    // What a mark costs the disk is nothing.
    assert_eq!(place.report().records, 2);
    let changes = disk_changes(&place.disk, &place.log(), Point::Lsn(1), None, None).unwrap();
    let changed: u64 = changes.ranges.iter().map(|range| range.len).sum();
    assert_eq!((changed, changes.to_lsn), (4096, 4));
    for (lsn, byte) in [(2, 1), (4, 2)] {
        let raw = place.disk.with_extension("raw");
        let _ = std::fs::remove_file(&raw);
        let (at, progress) = (Point::Lsn(lsn), &mut |_, _| {});
        restore_disk(&place.disk, &place.log(), at, &raw, None, progress).unwrap();
        let restored = std::fs::read(&raw).unwrap();
        assert!(restored[4096..8192].iter().all(|&found| found == byte));
        assert!(restored[8192..].iter().all(|&found| found == 0));
    }
    // The log goes on, and keeps what it has.
    let store = open(&place, &keeping(Retention::All));
    let mut port = store.disks()[0].open_port().unwrap();
    assert!(read(&mut port, 8, 8).iter().all(|&found| found == 2));
    assert!(read(&mut port, 0, 8).iter().all(|&found| found == 0));
    store.mark(&text("after the kill")).unwrap();
    drop(port);
    store.close().unwrap();
    assert_eq!(texts(&place).len(), 3);
    let error = Store::open_read_only(
        &place.log(),
        &[DiskOptions::new(&place.disk)],
        &keeping(Retention::All),
    );
    let error = error.unwrap().mark(&text("never")).unwrap_err();
    assert!(
        error.to_string().contains("open for reading only"),
        "{error}"
    );
    assert_eq!(texts(&place).len(), 3);
}

#[test]
fn marks_go_with_the_history_around_them() {
    let place = TestDisk::empty();
    let options = StoreOptions {
        max_segments: 4,
        ..keeping(Retention::Bytes(1 << 20))
    };
    let store = open(&place, &options);
    let mut port = store.disks()[0].open_port().unwrap();
    for number in 0..40u64 {
        store.mark(&text(&format!("mark {number}"))).unwrap();
        write(&mut port, number * 64, number as u8 + 1, 256);
        // A mark waits for what a port has begun to write, and nobody serves the port meanwhile.
        flush(&mut port);
    }
    let texts = texts(&place.crash());
    assert!((1..40).contains(&texts.len()), "{}", texts.len());
    assert_eq!(texts.last().unwrap(), "mark 39");
    let first = 40 - texts.len();
    let numbered = (first..40).map(|number| format!("mark {number}"));
    assert!(numbered.eq(texts));
    // Each is in a segment that is still there, also if that is sealed and has a summary.
    assert!(store.disks()[0].history().horizon.lsn > 0);
    drop(port);
    store.disks()[0].checkpoint().unwrap();
    store.close().unwrap();
    // Everything is in the image: a plain raw one.
    assert!(marks(&place).is_empty());
    assert_eq!(place.report().records, 0);
}

#[test]
fn damage_of_a_text_costs_that_text_alone() {
    let (place, _) = two_marks();
    let (_, _, segment, offset) = marks(&place).swap_remove(0);
    let file = std::fs::File::options().write(true).open(segment);
    file.unwrap().write_all_at(b"X", offset + 4).unwrap();
    let found = marks(&place);
    assert_eq!(found[0].1, None);
    assert_eq!(found[1].1, Some(text("txn 17 \"acked\" — ok")));
    let report = inspect(&place.disk, &place.log()).unwrap().log.unwrap();
    assert!(report.damaged.is_empty(), "{:?}", report.damaged);
    let store = open(&place, &keeping(Retention::All));
    let mut port = store.disks()[0].open_port().unwrap();
    assert!(read(&mut port, 8, 8).iter().all(|&found| found == 2));
    drop(port);
    store.disks()[0].checkpoint().unwrap();
    store.close().unwrap();
    assert_eq!(std::fs::read(&place.disk).unwrap()[4096], 2);
}

#[test]
fn a_log_that_takes_no_writes_takes_no_marks() {
    for on_full in [FullLogPolicy::Fail, FullLogPolicy::Pause] {
        let place = TestDisk::empty();
        let options = StoreOptions {
            on_full,
            ..keeping(Retention::Nothing)
        };
        let store = open(&place, &options);
        let disk = &store.disks()[0];
        let look = disk.look(Point::Newest, None).unwrap();
        if on_full == FullLogPolicy::Fail {
            let mut port = disk.open_port().unwrap();
            let full = (0..1000u64).any(|number| {
                let (sector, data) = (number % 8 * 64, crate::support::fill(7, 512));
                run(&mut port, Operation::Write { sector, data }).is_err()
                    || run(&mut port, Operation::Flush).is_err()
            });
            assert!(full);
            wait_until("no_space", || disk.condition().name() == "no_space");
            let error = disk.mark(&text("full")).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Io);
            let told = error.to_string();
            assert!(
                told.contains("takes no mark") && told.contains("a look at a disk"),
                "{told}"
            );
            drop(port);
        }
        drop(look);
        // There is room again, after a while if it was full.
        wait_until("room", || disk.mark(&text("room")).is_ok());
        let live = disk.clone();
        store.close().unwrap();
        let error = live.mark(&text("closed")).unwrap_err().to_string();
        assert!(error.contains("being closed"), "{error}");
    }
}

/// A batch of a version that is not known is refused, whatever it holds.
#[test]
fn a_batch_of_a_later_version_is_refused() {
    let (place, _) = two_marks();
    let segment = place.log().join("segment-00000");
    let mut bytes = std::fs::read(&segment).unwrap();
    // The mark's batch is the second, or the first if the write is in it; its version is at
    // offset 8.
    let at = (4096..bytes.len()).step_by(4096);
    let mut batches = at.filter(|&at| bytes[at..].starts_with(b"WALVBATC") && bytes[at + 8] == 3);
    let at = batches.next().unwrap();
    let count = |field: usize| usize::from(u16::from_le_bytes([bytes[field], bytes[field + 1]]));
    let len = 96 + 20 * count(at + 84) + 4 * count(at + 86);
    bytes[at + 8] = 9;
    // The kind of the first record is unknown too.
    bytes[at + 96 + 4] = 77;
    bytes[at + 12..at + 16].fill(0);
    let crc = crc32c::crc32c(&bytes[at..at + len]);
    bytes[at + 12..at + 16].copy_from_slice(&crc.to_le_bytes());
    std::fs::write(&segment, bytes).unwrap();
    let opened = Store::open(
        &place.log(),
        &[DiskOptions::new(&place.disk)],
        &keeping(Retention::All),
    );
    let error = opened.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::UnsupportedVersion);
    assert!(
        error.to_string().contains("log format version 9"),
        "{error}"
    );
}
