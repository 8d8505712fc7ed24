//! Sealed segments: what opening a log reads of them, and what happens if they or their summaries
//! are damaged.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::support::{SIZE, TestDisk, flush, read, run, small, wait_until, write};
use walvisor_storage::{
    DamagedHeader, DiskOptions, EngineKind, ErrorKind, Failure, Operation, Store, StoreOptions,
    create_disk, dump_records, inspect,
};

const SEGMENT: u64 = 1 << 20;
/// Sectors of a write: 128 KiB. With the header of its batch seven fill a segment.
const WRITE: usize = 256;
const WRITES: u64 = 20;
const FOOTER: usize = 56;

/// A record: its LSN, its segment file, and its payload's place there.
type Record = (u64, PathBuf, u64);

fn records(place: &TestDisk) -> Vec<Record> {
    let mut found = Vec::new();
    dump_records(&place.log(), &mut |record| {
        assert!(!record.damaged);
        found.push((record.lsn, record.segment.to_path_buf(), record.offset));
    })
    .unwrap();
    found
}

fn file(path: &Path) -> File {
    let mut options = File::options();
    options.read(true).write(true).open(path).unwrap()
}

fn flip(path: &Path, at: u64) {
    let mut byte = [0];
    file(path).read_exact_at(&mut byte, at).unwrap();
    file(path).write_all_at(&[byte[0] ^ 4], at).unwrap();
}

fn footer(segment: &Path) -> [u8; FOOTER] {
    let mut footer = [0; FOOTER];
    let at = SEGMENT - FOOTER as u64;
    file(segment).read_exact_at(&mut footer, at).unwrap();
    footer
}

fn options() -> StoreOptions {
    StoreOptions {
        segment_size: SEGMENT,
        max_segments: 64,
        ..small(EngineKind::Auto)
    }
}

fn open(place: &TestDisk) -> Store {
    Store::open(&place.log(), &[DiskOptions::new(&place.disk)], &options()).unwrap()
}

/// A log of three segments, as a killed process leaves it: the first two are sealed. Each write
/// fills its own place with its LSN.
fn three_segments() -> TestDisk {
    let place = TestDisk::empty();
    create_disk(&place.disk, SIZE, &place.log(), &options()).unwrap();
    let store = open(&place);
    let mut port = store.disks()[0].open_port().unwrap();
    for i in 0..WRITES {
        write(&mut port, i * WRITE as u64, i as u8 + 1, WRITE);
        flush(&mut port);
    }
    // No request waits for a summary to be written.
    for slot in 0..2 {
        let segment = place.log().join(format!("segment-{slot:05}"));
        wait_until("a summary", || footer(&segment).starts_with(b"WALVSUMM"));
    }
    let crashed = place.crash();
    let found = records(&crashed);
    assert_eq!(found.len() as u64, WRITES);
    let segments: Vec<_> = found.iter().map(|record| record.1.clone()).collect();
    assert!(segments[0] != segments[8] && segments[8] != segments[WRITES as usize - 1]);
    crashed
}

/// Asserts that all writes up to the one with this LSN are there, and no later one.
#[track_caller]
fn holds(place: &TestDisk, last: u64) {
    let report = inspect(&place.disk, &place.log()).unwrap().log.unwrap();
    assert_eq!(report.last_lsn, last);
    assert!(report.damaged.is_empty());
    let store = open(place);
    let mut port = store.disks()[0].open_port().unwrap();
    for lsn in 1..=WRITES {
        let found = read(&mut port, (lsn - 1) * WRITE as u64, WRITE as u32);
        let wanted = if lsn <= last { lsn as u8 } else { 0 };
        assert!(found.iter().all(|&byte| byte == wanted), "LSN {lsn}");
    }
}

#[test]
fn a_segment_without_a_valid_summary_is_read_from_front_to_back() {
    // A bit of each field of the footer, of a copied header, and the whole footer.
    let fields = [0, 8, 12, 16, 32, 40, 48];
    let places = fields.map(|field| SEGMENT - FOOTER as u64 + field);
    for at in places.into_iter().chain([SEGMENT - FOOTER as u64 - 20]) {
        let place = three_segments();
        let sealed = records(&place)[0].1.clone();
        flip(&sealed, at);
        holds(&place, WRITES);
    }
    let place = three_segments();
    let all = records(&place);
    // The summary of another segment, and none.
    let other = footer(&all[8].1);
    file(&all[0].1)
        .write_all_at(&other, SEGMENT - FOOTER as u64)
        .unwrap();
    file(&all[8].1)
        .write_all_at(&[0; FOOTER], SEGMENT - FOOTER as u64)
        .unwrap();
    holds(&place, WRITES);
}

/// A payload in a sealed segment is verified where its bytes are used.
#[test]
fn a_damaged_payload_in_a_sealed_segment_is_found_by_its_reader_and_by_a_check() {
    let place = three_segments();
    let (lsn, segment, offset) = records(&place)[2].clone();
    flip(&segment, offset + 4096);
    let report = inspect(&place.disk, &place.log()).unwrap().log.unwrap();
    let sector = (lsn - 1) * WRITE as u64 + 8;
    let named: Vec<_> = report
        .damaged
        .iter()
        .map(|d| (d.lsn, d.sector, d.sectors))
        .collect();
    assert_eq!(named, [(lsn, sector, 8)]);
    assert_eq!(report.damaged_headers, []);
    let store = open(&place);
    let disk = &store.disks()[0];
    let mut port = disk.open_port().unwrap();
    let mut block = |sector| run(&mut port, Operation::Read { sector, sectors: 8 });
    assert_eq!(block(sector).unwrap_err(), Failure::Io);
    for sector in [sector - 8, sector + 8] {
        let found = block(sector).unwrap().unwrap();
        assert!(found.iter().all(|&byte| byte == lsn as u8));
    }
    assert_eq!(disk.checkpoint().unwrap_err().kind(), ErrorKind::Damaged);
    let base = std::fs::read(&place.disk).unwrap();
    assert_eq!(base[sector as usize * 512], 0);
    let last = (WRITES - 1) * WRITE as u64;
    assert_eq!(base[last as usize * 512], WRITES as u8);
}

/// The copy in the summary replaces a header that the medium has changed. A check names its place.
#[test]
fn a_damaged_header_in_a_sealed_segment_loses_no_record() {
    let place = three_segments();
    let (_, segment, payload) = records(&place)[3].clone();
    let offset = payload - 4096;
    flip(&segment, offset + 60);
    let report = inspect(&place.disk, &place.log()).unwrap().log.unwrap();
    let segment_path = segment.clone();
    let named = DamagedHeader { segment, offset };
    assert_eq!(report.damaged_headers, [named]);
    holds(&place, WRITES);
    // Without the summary the record is lost, which is reported.
    let place = three_segments();
    let segment = place.log().join(segment_path.file_name().unwrap());
    flip(&segment, offset + 60);
    flip(&segment, SEGMENT - 1);
    let error = inspect(&place.disk, &place.log()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Damaged);
}

/// A crash may keep a summary, and the header of the next segment, and lose batches that the
/// summary names. The log then ends before the first of these, also for all later openings.
#[test]
fn a_summary_hides_no_torn_batch() {
    for torn in ["payload", "header"] {
        let place = three_segments();
        let all = records(&place);
        // Nothing of the third segment is left but its header, so nothing shows how far the log was
        // durable.
        let tail = all.last().unwrap().1.clone();
        let sealed = all.iter().rev().find(|record| record.1 != tail).unwrap();
        file(&tail)
            .write_all_at(&vec![0; SEGMENT as usize - 4096], 4096)
            .unwrap();
        let (lsn, segment, payload) = sealed.clone();
        // Both bytes of the record are above what the headers before it show to be durable.
        flip(&segment, payload - if torn == "header" { 4000 } else { 0 });
        holds(&place, lsn - 1);
        for round in 0..3 {
            let store = open(&place);
            let mut port = store.disks()[0].open_port().unwrap();
            // The LSN of the torn record is not given out again.
            write(&mut port, SIZE / 512 - 8, round, 8);
            flush(&mut port);
            let crashed = place.crash();
            let found = records(&crashed);
            assert!(found.iter().all(|record| record.0 != lsn), "{torn}");
            let store = open(&crashed);
            let mut port = store.disks()[0].open_port().unwrap();
            let sector = (lsn - 1) * WRITE as u64;
            assert!(
                read(&mut port, sector, 8).iter().all(|&byte| byte == 0),
                "{torn}"
            );
            let last = read(&mut port, SIZE / 512 - 8, 8);
            assert!(last.iter().all(|&byte| byte == round));
        }
    }
}
