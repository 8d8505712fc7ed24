//! Logs and disks that are damaged, cut off, or not what they should be.

use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::support::{SIZE, TestDisk, flush, read, run, small, write};
use walvisor_storage::{
    DiskOptions, EngineKind, ErrorKind, Failure, Operation, Store, create_disk, default_log_dir,
    inspect,
};

fn segment(place: &TestDisk) -> std::fs::File {
    let path = place.log().join("segment-00000");
    std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap()
}

/// Three batches of one 4 KiB write each: header and payload at 4096, 12288, 20480.
fn three_batches() -> TestDisk {
    let place = TestDisk::new();
    let store = place.open();
    let mut port = store.disks()[0].open_port().unwrap();
    for i in 0..3u8 {
        write(&mut port, u64::from(i) * 8, i + 1, 8);
        flush(&mut port);
    }
    place.crash()
}

#[test]
fn a_torn_tail_is_dropped_and_its_lsns_are_not_reused() {
    let place = three_batches();
    segment(&place)
        .write_all_at(&[0xee; 512], 24576 + 1024)
        .unwrap();
    let report = place.report();
    assert_eq!((report.last_lsn, report.torn_tail), (2, true));
    for round in 0..2u8 {
        let store = place.open();
        let mut port = store.disks()[0].open_port().unwrap();
        assert!(read(&mut port, 8, 8).iter().all(|&b| b == 2));
        assert!(
            read(&mut port, 16, 8)
                .iter()
                .all(|&b| b == if round == 0 { 0 } else { 77 })
        );
        write(&mut port, 16, 77, 8);
        flush(&mut port);
        let crashed = place.crash();
        // The new record has an LSN above the dropped one's.
        let report = crashed.report();
        assert!(report.last_lsn >= 4, "{report:?}");
        let store = crashed.open();
        assert!(
            read(&mut store.disks()[0].open_port().unwrap(), 16, 8)
                .iter()
                .all(|&b| b == 77)
        );
    }
}

#[test]
fn damage_below_the_durable_lsn_is_reported_wherever_it_is() {
    // Any bit of the headers of the first two batches, or of the segment's: the third batch says
    // that they were durable.
    for at in [4096, 4096 + 60, 4096 + 100, 4096 + 118, 12288 + 16, 0, 40] {
        let place = three_batches();
        let mut byte = [0];
        segment(&place).read_exact_at(&mut byte, at).unwrap();
        segment(&place).write_all_at(&[byte[0] ^ 4], at).unwrap();
        let error = inspect(&place.disk, &place.log()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Damaged, "byte {at}: {error}");
        let before = std::fs::read(place.log().join("control")).unwrap();
        let opened = Store::open(
            &place.log(),
            &[DiskOptions::new(&place.disk)],
            &small(EngineKind::Auto),
        );
        assert_eq!(
            opened.err().unwrap().kind(),
            ErrorKind::Damaged,
            "byte {at}"
        );
        assert!(before == std::fs::read(place.log().join("control")).unwrap());
    }
}

/// A durable payload that is damaged is no reason to refuse the rest of the log.
#[test]
fn damage_of_a_payload_below_the_durable_lsn_is_named_and_its_reads_fail() {
    for (at, lsn) in [(8192, 1), (8192 + 4095, 1), (16384 + 2000, 2)] {
        let place = three_batches();
        let mut byte = [0];
        segment(&place).read_exact_at(&mut byte, at).unwrap();
        segment(&place).write_all_at(&[byte[0] ^ 4], at).unwrap();
        let report = place.report();
        let named: Vec<_> = report
            .damaged
            .iter()
            .map(|d| (d.lsn, d.sector, d.sectors))
            .collect();
        assert_eq!(named, [(lsn, (lsn - 1) * 8, 8)]);
        assert_eq!((report.last_lsn, report.torn_tail), (3, false));
        let store = place.open();
        let mut port = store.disks()[0].open_port().unwrap();
        for i in 0..3 {
            let sector = i * 8;
            let found = run(&mut port, Operation::Read { sector, sectors: 8 });
            if i + 1 == lsn {
                assert_eq!(found.unwrap_err(), Failure::Io)
            } else {
                assert!(found.unwrap().unwrap().iter().all(|&b| b == i as u8 + 1))
            }
        }
    }
}

fn open_error(log: &Path, disks: &[DiskOptions]) -> (ErrorKind, String) {
    let error = Store::open(log, disks, &small(EngineKind::Auto))
        .err()
        .unwrap();
    let text = error.to_string();
    assert!(!text.contains('\n'), "{text}");
    (error.kind(), text)
}

#[test]
fn bad_input_is_named_and_changes_nothing() {
    let place = TestDisk::new();
    let options = [DiskOptions::new(&place.disk)];
    let store = place.open();
    assert_eq!(open_error(&place.log(), &options).0, ErrorKind::Locked);
    assert_eq!(
        inspect(&place.disk, &place.log()).unwrap_err().kind(),
        ErrorKind::Locked
    );
    store.close().unwrap();
    let twice = [options[0].clone(), options[0].clone()];
    assert_eq!(open_error(&place.log(), &twice).0, ErrorKind::Locked);
    let other = TestDisk::new();
    let renamed = other.disk.with_file_name("other.img");
    std::fs::rename(&other.disk, &renamed).unwrap();
    let (kind, text) = open_error(&place.log(), &[DiskOptions::new(&renamed)]);
    assert!(
        kind == ErrorKind::WrongLog && text.contains("disk.img"),
        "{text}"
    );
    let odd = other.disk.with_file_name("odd.img");
    std::fs::write(&odd, [0; 700]).unwrap();
    assert_eq!(
        open_error(
            &other.disk.with_file_name("odd.wal"),
            &[DiskOptions::new(&odd)]
        )
        .0,
        ErrorKind::InvalidInput
    );
    assert!(!other.disk.with_file_name("odd.wal").exists());
    assert_eq!(
        open_error(&place.log(), &[DiskOptions::new("/nonexistent.img")]).0,
        ErrorKind::NotFound
    );
    let error = create_disk(&place.disk, SIZE, &place.log(), &small(EngineKind::Auto)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    let error = create_disk(
        &odd.with_extension("new"),
        1000,
        &place.log(),
        &small(EngineKind::Auto),
    )
    .unwrap_err();
    assert!(error.kind() == ErrorKind::InvalidInput && !odd.with_extension("new").exists());
    segment(&place).set_len(5000).unwrap();
    assert_eq!(open_error(&place.log(), &options).0, ErrorKind::Damaged);
    std::fs::File::options()
        .write(true)
        .open(place.log().join("control"))
        .unwrap()
        .set_len(100)
        .unwrap();
    assert_eq!(open_error(&place.log(), &options).0, ErrorKind::Damaged);
}

#[test]
fn an_unclosed_disk_is_not_served_without_its_log() {
    let place = TestDisk::new();
    let store = place.open();
    let mut port = store.disks()[0].open_port().unwrap();
    write(&mut port, 0, 1, 8);
    flush(&mut port);
    let elsewhere = place.disk.with_extension("copy");
    // Copied with attributes, as `cp -a` does. (Not by `cp`: between fork and exec, a child would
    // hold the locks of every test in this process.)
    std::fs::copy(&place.disk, &elsewhere).unwrap();
    let mut mark = [0; 64];
    let attribute = "user.walvisor.disk";
    match rustix::fs::getxattr(&place.disk, attribute, &mut mark[..]) {
        Ok(len) => {
            let flags = rustix::fs::XattrFlags::empty();
            rustix::fs::setxattr(&elsewhere, attribute, &mark[..len], flags).unwrap();
        }
        Err(rustix::io::Errno::OPNOTSUPP) => {
            println!("skipped: this file system has no extended attributes");
            return;
        }
        Err(error) => panic!("an open disk is marked: {error}"),
    }
    let (kind, text) = open_error(
        &default_log_dir(&elsewhere),
        &[DiskOptions::new(&elsewhere)],
    );
    assert!(
        kind == ErrorKind::WrongLog && text.contains("log=DIR"),
        "{text}"
    );
    assert!(!default_log_dir(&elsewhere).exists());
}

/// A crash during the creation of a log leaves a control file under its unfinished name: the next
/// attempt creates the log.
#[test]
fn a_log_whose_making_was_cut_is_made_anew() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk.img");
    let log = default_log_dir(&disk);
    std::fs::create_dir(&log).unwrap();
    std::fs::write(log.join("control.new"), [1; 5000]).unwrap();
    create_disk(&disk, SIZE, &log, &small(EngineKind::Auto)).unwrap();
    let store = Store::open(&log, &[DiskOptions::new(&disk)], &small(EngineKind::Auto)).unwrap();
    let mut port = store.disks()[0].open_port().unwrap();
    write(&mut port, 0, 1, 8);
    flush(&mut port);
    assert!(!log.join("control.new").exists());
}
