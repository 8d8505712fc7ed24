use std::path::PathBuf;

use zerocopy::little_endian::{U16, U32, U64};

use super::*;
use crate::catalog::control::open_control;
use crate::heap;
use crate::medium::lock::Access;
use crate::{
    BackendQueue, Buffer, DiskOptions, Operation, Point, Port, Retention, Store, StoreOptions,
    create_disk, default_log_dir, rewind_disk,
};

/// The longest allocation of a recovery, as in `fuzz/src/recover.rs`: it reads segments through a
/// window of 1 MiB, and those of inputs are 64 KiB.
const LONGEST: usize = 4 << 20;

fn corpus() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/recover")
}

/// Encodes a log directory as an input with correct checksums: its bytes that are not zero, in
/// pieces.
fn input_of(dir: &Path) -> Vec<u8> {
    let segments: Vec<PathBuf> = (0..SEGMENTS)
        .map(|slot| dir.join(format!("segment-{slot:05}")))
        .filter(|path| path.exists())
        .collect();
    let names = std::fs::read_dir(dir).unwrap();
    let mut saved: Vec<_> = names
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.to_string_lossy().contains("/saved-"))
        .collect();
    saved.sort();
    assert!(saved.len() <= SAVED);
    let mut input = vec![1 | (segments.len() as u8) << 1 | (saved.len() as u8) << 4];
    let control = dir.join("control");
    let files = std::iter::once(&control).chain(&segments).chain(&saved);
    for (file, path) in (0u8..).zip(files) {
        let bytes = std::fs::read(path).unwrap();
        let mut at = 0;
        while let Some(start) = bytes[at..].iter().position(|&byte| byte != 0) {
            let start = (at + start) / UNIT * UNIT;
            let zeroes = bytes[start..]
                .windows(2 * UNIT)
                .position(|w| w.iter().all(|&b| b == 0));
            let end = zeroes.map_or(bytes.len(), |len| start + len);
            input.push(file);
            input.extend(((start / UNIT) as u16).to_le_bytes());
            input.extend(((end - start) as u16).to_le_bytes());
            input.extend(&bytes[start..end]);
            at = (start + (end - start).next_multiple_of(UNIT)).min(bytes.len());
        }
    }
    input
}

fn request(port: &mut Port, operation: Operation) {
    port.submit(0, operation);
    let mut done = Vec::new();
    while done.is_empty() {
        port.kick();
        port.completions(&mut done);
        if done.is_empty() {
            port.sleep_for_test();
        }
    }
    done[0].result.as_ref().unwrap();
}

/// A log of three segments with two records each. The first two segments are sealed.
fn sealed_log() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let (disk, log) = (dir.path().join("disk"), dir.path().join("log"));
    let options = StoreOptions {
        segment_size: SEGMENT as u64,
        max_segments: SEGMENTS as u32,
        ..StoreOptions::default()
    };
    create_disk(&disk, 1 << 20, &log, &options).unwrap();
    let root = open_control(&log, Access::Log).unwrap().control;
    let (uuid, disk_id) = (root.header.log, root.disks[0].id);
    for slot in 0..3 {
        let mut file = vec![0; SEGMENT];
        let (sequence, salt) = (slot + 1, slot + 77);
        let segment = SegmentHeader {
            magic: SEGMENT_MAGIC,
            version: U32::new(format::VERSION),
            crc: U32::new(0),
            log: uuid,
            sequence: U64::new(sequence),
            previous_sequence: U64::new(slot),
            previous_lsn: U64::new(2 * slot),
            salt: U64::new(salt),
        };
        let mut crc = segment.encode(&mut file);
        let (mut at, mut headers) = (BLOCK, Vec::new());
        for lsn in 2 * slot + 1..2 * slot + 3 {
            let payload = &mut file[at + BLOCK..at + 2 * BLOCK];
            payload[0] = lsn as u8;
            let checksums = checksum::of(payload);
            let header = BatchHeader {
                magic: format::BATCH_MAGIC,
                version: U32::new(format::VERSION),
                crc: U32::new(0),
                log: uuid,
                sequence: U64::new(sequence),
                salt: U64::new(salt),
                cid: U64::new(lsn),
                first_lsn: U64::new(lsn),
                durable_lsn: U64::new(lsn - 1),
                unix_us: U64::new(lsn),
                previous_crc: U32::new(crc),
                descriptor_count: U16::new(1),
                checksum_count: U16::new(1),
                payload_bytes: U64::new(BLOCK as u64),
            };
            let descriptor = Descriptor {
                disk_id,
                kind: U32::new(DescriptorKind::Write as u32),
                sector: U64::new(lsn * 8),
                sectors: U32::new(8),
            };
            let len = format::header_len(1, 1);
            let head = &mut file[at..at + len];
            crc = header.encode([descriptor].into_iter(), checksums.into_iter(), head);
            headers.extend_from_slice(head);
            at += 2 * BLOCK;
        }
        if slot < 2 {
            let footer = SummaryFooter::new(uuid, sequence, salt);
            let summary = footer.encode(&headers, SEGMENT as u64).unwrap();
            file[SEGMENT - summary.len()..].copy_from_slice(&summary);
        }
        std::fs::write(log.join(format!("segment-{slot:05}")), file).unwrap();
    }
    input_of(&log)
}

/// A new disk with a log of its own, open.
fn new_store(disk: &Path, log: &Path, retain: Retention) -> Store {
    let options = StoreOptions {
        segment_size: SEGMENT as u64,
        max_segments: SEGMENTS as u32,
        retain: Some(retain),
        ..StoreOptions::default()
    };
    create_disk(disk, 1 << 20, log, &options).unwrap();
    Store::open(log, &[DiskOptions::new(disk)], &options).unwrap()
}

/// A log that keeps its history, whose disk was restored in place twice.
fn rewound_log() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let (disk, log) = (dir.path().join("disk"), dir.path().join("log"));
    let store = new_store(&disk, &log, Retention::All);
    let mut port = store.disks()[0].open_port().unwrap();
    for sector in 0..5 {
        let data = Buffer::zeroed(SECTOR_SIZE as usize);
        request(&mut port, Operation::Write { sector, data });
    }
    request(&mut port, Operation::Flush);
    drop(port);
    store.close().unwrap();
    for to in [2, 4] {
        rewind_disk(&disk, &log, Point::Lsn(to)).unwrap();
    }
    input_of(&log)
}

/// A log with a snapshot that its base images have moved past.
fn saved_log() -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let store = new_store(&dir.path().join("disk"), &log, Retention::Nothing);
    let mut port = store.disks()[0].open_port().unwrap();
    for round in 1..3 {
        for sector in [0, 1, 40] {
            let mut data = Buffer::zeroed(SECTOR_SIZE as usize);
            data[0] = round;
            request(&mut port, Operation::Write { sector, data });
        }
        request(&mut port, Operation::Flush);
        if round == 1 {
            store.disks()[0].snapshot("one".parse().unwrap()).unwrap();
        }
    }
    store.disks()[0].checkpoint().unwrap();
    let input = input_of(&log);
    drop(port);
    store.close().unwrap();
    input
}

/// Logs after some work: short ones, one over several segments, one of two disks, one closed, one
/// of sealed segments, one with restores in place, one with a saved file.
fn real_logs() -> Vec<(String, Vec<u8>)> {
    let options = StoreOptions {
        segment_size: SEGMENT as u64,
        max_segments: SEGMENTS as u32,
        ..StoreOptions::default()
    };
    let log = |name: &str, disks: usize, writes: u64, sectors: u64, closed: bool| {
        let dir = tempfile::tempdir().unwrap();
        let paths: Vec<_> = (0..disks)
            .map(|disk| dir.path().join(format!("disk-{disk}")))
            .collect();
        let log = default_log_dir(&paths[0]);
        for path in &paths {
            create_disk(path, 1 << 20, &log, &options).unwrap();
        }
        let disks: Vec<_> = paths.iter().map(DiskOptions::new).collect();
        let store = Store::open(&log, &disks, &options).unwrap();
        for i in 0..writes {
            let disk = &store.disks()[i as usize % store.disks().len()];
            let mut port = disk.open_port().unwrap();
            // Mostly zeroes, so that inputs stay small.
            let mut data = Buffer::zeroed((sectors * SECTOR_SIZE) as usize);
            data[..8].copy_from_slice(&(i + 1).to_le_bytes());
            let sector = i * 3;
            request(&mut port, Operation::Write { sector, data });
            if i % 3 == 2 {
                let sectors = 2;
                request(&mut port, Operation::Discard { sector, sectors });
            }
            request(&mut port, Operation::Flush);
        }
        if name == "marks" {
            store.mark(&"a mark".parse().unwrap()).unwrap();
        }
        let input = if closed {
            store.close().unwrap();
            input_of(&log)
        } else {
            input_of(&log)
        };
        (name.to_string(), input)
    };
    vec![
        log("empty", 1, 0, 1, false),
        log("one-write", 1, 1, 1, false),
        log("some-writes", 1, 4, 2, false),
        log("two-disks", 2, 5, 3, false),
        log("marks", 1, 2, 1, false),
        log("segments", 1, 6, 32, false),
        log("closed", 2, 5, 2, true),
        ("sealed".to_string(), sealed_log()),
        ("rewound".to_string(), rewound_log()),
        ("saved".to_string(), saved_log()),
    ]
}

/// Real logs recover as inputs too, with the records that were written. `WALVISOR_WRITE_CORPUS=1`
/// keeps them as the seed corpus.
#[test]
fn real_logs_recover_as_inputs() {
    let logs = real_logs();
    for (name, input) in &logs {
        recover_input(input);
        let found = recover_once(&Files::new(input)).unwrap();
        let records = matches!(name.as_str(), "one-write" | "some-writes" | "two-disks");
        assert!(!records || !found.2.is_empty(), "{name}: {found:?}");
        let sealed = name == "sealed";
        assert!(!sealed || (found.0, found.2.len()) == (6, 6), "{found:?}");
        // The newest restore is to the fourth record, and the next one comes after it.
        let sectors: u64 = found.2.iter().map(|extent| extent.2).sum();
        assert!(
            name != "rewound" || (found.1, sectors) == (8, 4),
            "{found:?}"
        );
        // The snapshot's sectors, and none in the log: two that are adjacent, and another one.
        let past = found.2.iter().all(|extent| extent.3.contains("saved-"));
        assert!(
            name != "saved" || past && (found.2.len(), sectors) == (2, 3),
            "{found:?}"
        );
    }
    if std::env::var_os("WALVISOR_WRITE_CORPUS").is_some() {
        std::fs::create_dir_all(corpus()).unwrap();
        for (name, input) in logs {
            std::fs::write(corpus().join(name), input).unwrap();
        }
    }
}

/// Any number in any structure may have any value, with or without correct checksums.
#[test]
fn any_number_may_be_anything() {
    for (name, input) in real_logs() {
        println!("{name}");
        for value in [u64::MAX, 1 << 60, (1 << 60) - 1, 1 << 32, 0] {
            for at in 1..input.len() - 8 {
                let mut changed = input.clone();
                changed[at..at + 8].copy_from_slice(&value.to_le_bytes());
                recover_input(&changed);
            }
        }
    }
}

/// Regressions: recovers all inputs of the corpus, including those that once failed, and believes
/// no length.
#[test]
fn the_corpus_recovers() {
    let inputs = std::fs::read_dir(corpus()).unwrap();
    let mut inputs: Vec<_> = inputs.map(|entry| entry.unwrap().path()).collect();
    assert!(inputs.len() >= 6, "{inputs:?}");
    inputs.sort();
    for input in inputs {
        println!("{}", input.display());
        let bytes = std::fs::read(&input).unwrap();
        heap::take_longest();
        recover_input(&bytes);
        let longest = heap::take_longest();
        assert!(
            longest <= LONGEST,
            "{}: {longest} bytes at once",
            input.display()
        );
    }
}
