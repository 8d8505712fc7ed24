//! Marks in a log: durable when they are made, found by a dump, gone with the history, and of no
//! consequence for the disks.

use std::path::PathBuf;

use walvisor_storage::{
    Backend, Commit, DiskOptions, EngineKind, ErrorKind, FullLogPolicy, MarkText, Operation, Point,
    RecordKind, Retention, Store, StoreOptions, dump_groups, dump_records,
};

use crate::support::{
    MIB, SIZE, TestDisk, all, commit, port, put, put_in, read, refused, run, small, wait_until,
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

fn made(options: StoreOptions) -> TestDisk {
    TestDisk::made(&["disk.img"], SIZE, options)
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
    let texts = marks(place).into_iter().map(|(_, text, ..)| text.unwrap());
    texts.map(|text| text.to_string()).collect()
}

/// Writes 1, a mark, writes 2 to the same place, a mark, and is killed.
fn two_marks() -> (TestDisk, [Commit; 2]) {
    let live = made(keeping(Retention::All));
    let store = live.open();
    let disk = &store.disks()[0];
    commit(disk, 8, 1, 8);
    let index = disk.history().index_bytes;
    let first = store.mark(&text("the first")).unwrap();
    assert_eq!(disk.history().index_bytes, index);
    commit(disk, 8, 2, 8);
    let second = store.mark(&text("txn 17 \"acked\" — ok")).unwrap();
    (live.crash(), [first, second])
}

#[test]
fn a_mark_is_durable_when_it_is_made_and_its_lsn_is_a_point() {
    let (place, made) = two_marks();
    let found = marks(&place).into_iter().map(|mark| mark.0);
    assert!(found.eq(made));
    assert_eq!(texts(&place), ["the first", "txn 17 \"acked\" — ok"]);
    assert_eq!((made[0].lsn, made[1].lsn), (2, 4));
    assert!(made[0].cid < made[1].cid && made[0].unix_us <= made[1].unix_us);
    let mut lsns = Vec::new();
    dump_groups(&place.log(), &mut |group| {
        assert!(group.disks.len() <= 1);
        lsns.extend(group.marks.iter().map(|mark| mark.lsn));
    })
    .unwrap();
    assert_eq!(lsns, [2, 4]);
    // What a mark costs the disk is nothing.
    assert_eq!(place.report().records, 2);
    let changes = place.changes(&place.disk, Point::Lsn(1), None).unwrap();
    let changed: u64 = changes.ranges.iter().map(|range| range.len).sum();
    assert_eq!((changed, changes.to_lsn), (4096, 4));
    for (lsn, byte) in [(2, 1), (4, 2)] {
        let restored = place.as_of(&place.disk, Point::Lsn(lsn)).unwrap();
        assert!(all(&restored[4096..8192], byte) && all(&restored[8192..], 0));
    }
    // The log keeps what it has.
    let store = place.open();
    let data = read(&mut port(&store, 0), 0, 16);
    assert!(all(&data[..4096], 0) && all(&data[4096..], 2));
    store.mark(&text("after the kill")).unwrap();
    store.close().unwrap();
    let disks = [DiskOptions::new(&place.disk)];
    let store = Store::open_read_only(&place.log(), &disks, &place.options).unwrap();
    refused(store.mark(&text("never")), "open for reading only");
    assert_eq!(texts(&place).len(), 3);
}

#[test]
fn marks_go_with_the_history_around_them() {
    let place = made(StoreOptions {
        max_segments: 4,
        ..keeping(Retention::Bytes(MIB))
    });
    let store = place.open();
    for number in 0..40 {
        store.mark(&text(&format!("mark {number}"))).unwrap();
        commit(&store.disks()[0], number * 64, number as u8 + 1, 256);
    }
    let texts = texts(&place.crash());
    assert!((1..40).contains(&texts.len()), "{}", texts.len());
    let first = 40 - texts.len();
    let numbered = (first..40).map(|number| format!("mark {number}"));
    assert!(numbered.eq(texts));
    // Each is in a segment that is still there, also if that is sealed and has a summary.
    assert!(store.disks()[0].history().horizon.lsn > 0);
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
    put(&segment, offset + 4, b"X");
    let found = marks(&place);
    assert_eq!(found[0].1, None);
    assert_eq!(found[1].1, Some(text("txn 17 \"acked\" — ok")));
    assert!(place.report().damaged.is_empty());
    let store = place.open();
    assert!(all(&read(&mut port(&store, 0), 8, 8), 2));
    store.disks()[0].checkpoint().unwrap();
    store.close().unwrap();
    assert_eq!(std::fs::read(&place.disk).unwrap()[4096], 2);
}

#[test]
fn a_log_that_takes_no_writes_takes_no_marks() {
    let place = made(keeping(Retention::Nothing));
    let store = place.open();
    let disk = store.disks()[0].clone();
    let look = disk.look(Point::Newest, None).unwrap();
    let mut port = port(&store, 0);
    let full = (0..1000).any(|number| {
        run(&mut port, put_in(number % 8 * 64, 7, 512)).is_err()
            || run(&mut port, Operation::Flush).is_err()
    });
    assert!(full);
    wait_until("no_space", || disk.condition().name() == "no_space");
    for part in ["takes no mark", "an open look holds the log"] {
        assert_eq!(refused(disk.mark(&text("full")), part), ErrorKind::Io);
    }
    drop((port, look));
    // There is room again, after a while.
    wait_until("room", || disk.mark(&text("room")).is_ok());
    store.close().unwrap();
    refused(disk.mark(&text("closed")), "being closed");
    // One that lets writes wait takes them as any other.
    let place = made(StoreOptions {
        on_full: FullLogPolicy::Pause,
        ..keeping(Retention::Nothing)
    });
    let store = place.open();
    store.mark(&text("room")).unwrap();
    store.close().unwrap();
}
