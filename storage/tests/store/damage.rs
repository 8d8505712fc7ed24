//! Logs whose bytes the medium changes, which are cut off, or are not what they should be: reads of
//! such bytes fail, and they never reach a base image.

use std::path::Path;

use walvisor_storage::{
    DamagedHeader, DamagedSectors, Disk, DiskOptions, EngineKind, ErrorKind, Failure, Operation,
    Store, StoreOptions, create_disk, dump_records, inspect,
};

use crate::support::{
    ENGINES, MIB, SIZE, TestDisk, all, commit, flip, flush, port, put, read, refused, run, small,
    wait_until, write,
};

/// Two disks on one log.
fn pair(engine: EngineKind) -> TestDisk {
    TestDisk::made(&["a", "b"], MIB, small(engine))
}

/// The byte that fills the sectors, or the failure of the read.
fn holds(disk: &Disk, sector: u64, sectors: u32) -> Result<u8, Failure> {
    let mut port = disk.open_port().unwrap();
    let data = run(&mut port, Operation::Read { sector, sectors })?.unwrap();
    assert!(all(&data, data[0]));
    Ok(data[0])
}

fn image(place: &TestDisk, disk: usize) -> Vec<u8> {
    std::fs::read(&place.disks()[disk]).unwrap()
}

#[test]
fn a_changed_byte_is_an_error_until_it_is_overwritten_and_other_disks_go_on() {
    for engine in ENGINES {
        let pair = pair(engine);
        let store = pair.open();
        let [a, b] = [0, 1].map(|disk| &store.disks()[disk]);
        // Two blocks of a, with its header at 4096 and its payload at 8192; then one of b.
        commit(a, 8, 1, 16);
        commit(b, 8, 2, 8);
        // Damage to bytes that were overwritten matters to no reader.
        commit(a, 40, 7, 8);
        commit(a, 40, 8, 8);
        flip(&pair.segment(0), 24576 + 4096);
        assert_eq!(holds(a, 40, 8), Ok(8));
        flip(&pair.segment(0), 8192 + 4096 + 100);
        assert_eq!(holds(a, 8, 8), Ok(1));
        // Reading half of a block verifies the whole block.
        for (sector, sectors) in [(16, 8), (20, 1), (8, 16)] {
            assert_eq!(holds(a, sector, sectors), Err(Failure::Io));
        }
        assert_eq!(holds(b, 8, 8), Ok(2));
        let kind = refused(a.checkpoint(), "segment-00000");
        assert_eq!(kind, ErrorKind::Damaged);
        refused(a.checkpoint(), "disk check");
        // The other disk is copied, the damaged bytes are not, and both disks still take requests.
        assert_eq!(
            (image(&pair, 1)[8 * 512], image(&pair, 0)[16 * 512]),
            (2, 0)
        );
        commit(a, 100, 3, 8);
        commit(b, 100, 4, 8);
        assert_eq!(refused(store.close(), ""), ErrorKind::Damaged);
        let named = DamagedSectors {
            disk: pair.disk.canonicalize().unwrap(),
            sector: 16,
            sectors: 8,
            lsn: 1,
            segment: pair.segment(0),
            offset: 12288,
        };
        assert_eq!(pair.report().damaged, [named]);
        assert_eq!(refused(pair.exported(&pair.disk), ""), ErrorKind::Damaged);
        assert!(!pair.at("exported").exists());

        let store = pair.open();
        let [a, b] = [0, 1].map(|disk| &store.disks()[disk]);
        assert_eq!(holds(a, 16, 8), Err(Failure::Io));
        let kept = [
            holds(a, 8, 8),
            holds(b, 8, 8),
            holds(a, 100, 8),
            holds(b, 100, 8),
        ];
        assert_eq!(kept, [Ok(1), Ok(2), Ok(3), Ok(4)]);
        // Only half of the damaged block is overwritten: the other half is still needed.
        commit(a, 16, 5, 4);
        assert_eq!(
            (holds(a, 16, 4), holds(a, 20, 4)),
            (Ok(5), Err(Failure::Io))
        );
        assert_eq!(refused(a.checkpoint(), ""), ErrorKind::Damaged);
        commit(a, 20, 6, 4);
        assert_eq!((holds(a, 16, 4), holds(a, 20, 4)), (Ok(5), Ok(6)));
        a.checkpoint().unwrap();
        store.close().unwrap();
        assert_eq!(pair.report().damaged, []);
        let image = image(&pair, 0);
        let bytes = [8, 16, 20, 40, 100].map(|sector| image[sector * 512]);
        assert_eq!(bytes, [1, 5, 6, 8, 3]);
    }
}

/// Many small parts are read through the page cache, and verified as well.
#[test]
fn a_checkpoint_of_many_parts_verifies_each() {
    let pair = pair(EngineKind::Auto);
    let store = pair.open();
    let a = &store.disks()[0];
    let mut port = a.open_port().unwrap();
    // One batch: a header of a block or two, then the payloads in order.
    for i in 0..100 {
        write(&mut port, u64::from(i) * 16, i + 1, 1);
    }
    flush(&mut port);
    let log = std::fs::read(pair.segment(0)).unwrap();
    let at = log.chunks(512).position(|sector| sector == [50; 512]);
    flip(&pair.segment(0), at.unwrap() as u64 * 512 + 7);
    let failing = || -> Vec<_> { (0..100).filter(|i| holds(a, i * 16, 1).is_err()).collect() };
    assert_eq!(failing(), [49]);
    assert_eq!(refused(a.checkpoint(), ""), ErrorKind::Damaged);
    assert_eq!(failing(), [49]);
    assert_eq!(holds(a, 16, 1), Ok(2));
    drop(port);
    assert!(store.close().is_err());
    // Parts next to the damaged one in the same run may stay in the log with it.
    let image = image(&pair, 0);
    let missing = (0..100).filter(|i| image[i * 16 * 512] != *i as u8 + 1);
    assert!(missing.eq([49]));
}

/// Logs and batches of another version are refused, whatever they hold, and the error says what to
/// do.
#[test]
fn another_version_is_refused() {
    let place = TestDisk::new();
    let control = place.log().join("control");
    let good = std::fs::read(&control).unwrap();
    let mut bytes = good.clone();
    for slot in bytes.chunks_mut(64 << 10) {
        slot[8] = 1;
        seal(slot);
    }
    std::fs::write(&control, bytes).unwrap();
    for part in ["version 1", "disk checkpoint"] {
        let kind = refused(place.try_open(&place.options), part);
        assert_eq!(kind, ErrorKind::UnsupportedVersion);
    }
    assert!(place.disk.exists());
    std::fs::write(&control, good).unwrap();

    let store = place.open();
    commit(&store.disks()[0], 0, 1, 8);
    let place = place.crash();
    let mut bytes = std::fs::read(place.segment(0)).unwrap();
    let batch = &mut bytes[4096..];
    assert!(batch.starts_with(b"WALVBATC"));
    let count = |field: usize| usize::from(u16::from_le_bytes([batch[field], batch[field + 1]]));
    let len = 96 + 20 * count(84) + 4 * count(86);
    batch[8] = 9;
    // The kind of the first record is unknown too.
    batch[96 + 4] = 77;
    seal(&mut batch[..len]);
    std::fs::write(place.segment(0), bytes).unwrap();
    let kind = refused(place.try_open(&place.options), "log format version 9");
    assert_eq!(kind, ErrorKind::UnsupportedVersion);
}

/// The images never have what the log has not had, whatever a slot's checksum says.
#[test]
fn a_control_file_of_images_ahead_of_their_log_is_damaged() {
    let place = TestDisk::new();
    let control = place.log().join("control");
    let mut bytes = std::fs::read(&control).unwrap();
    for slot in bytes.chunks_mut(64 << 10) {
        // `checkpoint_lsn`
        slot[64..72].copy_from_slice(&7_u64.to_le_bytes());
        seal(slot);
    }
    std::fs::write(&control, bytes).unwrap();
    let kind = refused(place.try_open(&place.options), "truncated or damaged");
    assert_eq!(kind, ErrorKind::Damaged);
}

/// Sets the checksum of a structure.
fn seal(bytes: &mut [u8]) {
    bytes[12..16].fill(0);
    let crc = crc32c::crc32c(bytes);
    bytes[12..16].copy_from_slice(&crc.to_le_bytes());
}

#[test]
fn bad_input_is_named_and_changes_nothing() {
    let (place, other) = (TestDisk::new(), TestDisk::new());
    let open = |disks: &[&Path]| {
        let disks: Vec<_> = disks.iter().map(DiskOptions::new).collect();
        Store::open(&place.log(), &disks, &place.options)
    };
    let is = |done: walvisor_storage::Result<()>, kind, part: &str| {
        assert_eq!(refused(done, part), kind);
    };
    let disk = place.disk.as_path();
    let store = place.open();
    is(open(&[disk]).map(drop), ErrorKind::Locked, "");
    is(inspect(disk, &place.log()).map(drop), ErrorKind::Locked, "");
    store.close().unwrap();
    is(open(&[disk, disk]).map(drop), ErrorKind::Locked, "");
    let renamed = other.at("other.img");
    std::fs::rename(&other.disk, &renamed).unwrap();
    is(open(&[&renamed]).map(drop), ErrorKind::WrongLog, "disk.img");
    let nowhere = Path::new("/nonexistent.img");
    is(open(&[nowhere]).map(drop), ErrorKind::NotFound, "");
    let create =
        |name: &str, size| create_disk(&place.at(name), size, &place.log(), &place.options);
    is(create("disk.img", SIZE), ErrorKind::AlreadyExists, "");
    is(create("new", 1000), ErrorKind::InvalidInput, "");
    let (odd, log) = (place.at("odd.img"), place.at("odd.wal"));
    std::fs::write(&odd, [0; 700]).unwrap();
    let opened = Store::open(&log, &[DiskOptions::new(&odd)], &place.options);
    is(opened.map(drop), ErrorKind::InvalidInput, "");
    assert!(!log.exists() && !place.at("new").exists());
    for (file, len) in [(place.segment(0), 5000), (place.log().join("control"), 100)] {
        let file = std::fs::File::options().write(true).open(file).unwrap();
        file.set_len(len).unwrap();
        is(open(&[disk]).map(drop), ErrorKind::Damaged, "");
    }
}

/// Sectors of a write: 128 KiB. With the header of its batch seven fill a segment.
const WRITE: usize = 256;
const WRITES: u64 = 20;
/// Where a segment's summary ends with its footer.
const FOOTER: u64 = MIB - 56;

/// A log of three segments, as a killed process leaves it: the first two are sealed. Each write
/// fills its own place with its LSN. Also the records' segment files, and their payloads' places.
fn three_segments() -> (TestDisk, Vec<(std::path::PathBuf, u64)>) {
    let options = StoreOptions {
        max_segments: 64,
        ..small(EngineKind::Auto)
    };
    let place = TestDisk::made(&["disk.img"], SIZE, options);
    let store = place.open();
    for i in 0..WRITES {
        commit(&store.disks()[0], i * WRITE as u64, i as u8 + 1, WRITE);
    }
    // No request waits for a summary to be written.
    for slot in 0..2 {
        wait_until("a summary", || {
            std::fs::read(place.segment(slot)).unwrap()[FOOTER as usize..].starts_with(b"WALVSUMM")
        });
    }
    let place = place.crash();
    let mut records = Vec::new();
    dump_records(&place.log(), &mut |record| {
        assert!(!record.damaged);
        records.push((record.segment.to_path_buf(), record.offset));
    })
    .unwrap();
    assert_eq!(records.len() as u64, WRITES);
    (place, records)
}

/// Asserts that all writes are there.
#[track_caller]
fn is_whole(place: &TestDisk) {
    let report = place.report();
    assert_eq!((report.last_lsn, report.damaged), (WRITES, vec![]));
    let store = place.open();
    for lsn in 1..=WRITES {
        let found = read(&mut port(&store, 0), (lsn - 1) * WRITE as u64, WRITE as u32);
        assert!(all(&found, lsn as u8), "LSN {lsn}");
    }
}

#[test]
fn a_segment_without_a_valid_summary_is_read_from_front_to_back() {
    let (place, records) = three_segments();
    let whole = std::fs::read(&records[0].0).unwrap();
    // A bit of each field of the footer, and of a copied header.
    for field in [0, 8, 12, 16, 32, 40, 48, -20] {
        let again = place.crash();
        flip(&again.segment(0), (FOOTER as i64 + field) as u64);
        is_whole(&again);
    }
    // None, and the summary of another segment.
    put(&records[0].0, FOOTER, &[0; 56]);
    put(&records[8].0, FOOTER, &whole[FOOTER as usize..]);
    is_whole(&place);
}

/// The copy in the summary replaces a header that the medium has changed. A check names its place,
/// and that of a payload, which is verified where its bytes are used.
#[test]
fn a_damaged_header_in_a_sealed_segment_loses_no_record() {
    let (place, records) = three_segments();
    let killed = place.crash();
    let (segment, payload) = records[3].clone();
    let offset = payload - 4096;
    flip(&segment, offset + 60);
    let named = DamagedHeader { segment, offset };
    assert_eq!(place.report().damaged_headers, [named]);
    is_whole(&place);
    // Without the summary the record is lost, which is reported.
    let lost = killed.crash();
    flip(&lost.segment(0), offset + 60);
    flip(&lost.segment(0), MIB - 1);
    assert_eq!(
        refused(inspect(&lost.disk, &lost.log()), ""),
        ErrorKind::Damaged
    );

    flip(&killed.segment(0), payload + 4096);
    let report = killed.report();
    let named = report
        .damaged
        .iter()
        .map(|found| (found.lsn, found.sector, found.sectors));
    let sector = 3 * WRITE as u64 + 8;
    assert!(named.eq([(4, sector, 8)]) && report.damaged_headers.is_empty());
    let store = killed.open();
    let disk = &store.disks()[0];
    let found = [sector - 8, sector, sector + 8].map(|sector| holds(disk, sector, 8));
    assert_eq!(found, [Ok(4), Err(Failure::Io), Ok(4)]);
    assert_eq!(refused(disk.checkpoint(), ""), ErrorKind::Damaged);
    let (image, last) = (image(&killed, 0), (WRITES as usize - 1) * WRITE);
    assert_eq!(
        (image[sector as usize * 512], image[last * 512]),
        (0, WRITES as u8)
    );
}

/// Opening a log tells of its progress with every segment, and of none after a close.
#[test]
fn recovery_tells_of_every_segment_and_of_none_after_a_close() {
    let (place, _) = three_segments();
    let open = || {
        let mut told = Vec::new();
        let disks = [DiskOptions::new(&place.disk)];
        let progress = &mut |passed, total| told.push((passed, total));
        let store = Store::open_with_progress(&place.log(), &disks, &place.options, progress);
        store.unwrap().close().unwrap();
        told
    };
    assert_eq!(open(), [1, 2, 3].map(|passed| (passed * MIB, 3 * MIB)));
    assert_eq!(open(), []);
}
