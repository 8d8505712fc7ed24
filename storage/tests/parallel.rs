//! Import, export, check and recovery on several threads: their results do not depend on the number
//! of threads.

mod support;

use std::fs::File;
use std::num::NonZeroUsize;
use std::os::unix::fs::FileExt;
use std::path::Path;

use support::{MIB, MemoryFs, Random, TestDisk, discard, flip, flush, put, run, write};
use walvisor_storage::{
    DiskOptions, DiskReport, EngineKind, ErrorKind, Result, Store, StoreOptions, export_disk,
    import_disk, inspect_with_progress,
};

const THREADS: [usize; 4] = [1, 2, 3, 8];
/// More than one thread gets at a time.
const DISK: u64 = 50 * MIB + 512;

fn options(threads: usize) -> StoreOptions {
    StoreOptions {
        segment_size: MIB,
        max_segments: 32,
        engine: EngineKind::Auto,
        threads: NonZeroUsize::new(threads),
        ..StoreOptions::default()
    }
}

/// Returns the progress calls too: bytes passed and total.
fn with_calls<T>(work: impl FnOnce(&mut dyn FnMut(u64, u64)) -> T) -> (T, Vec<(u64, u64)>) {
    let mut told = Vec::new();
    let done = work(&mut |passed, total| told.push((passed, total)));
    assert!(told.is_sorted(), "{told:?}");
    (done, told)
}

fn check(place: &TestDisk, threads: usize) -> (Result<DiskReport>, Vec<(u64, u64)>) {
    let threads = NonZeroUsize::new(threads);
    with_calls(|progress| inspect_with_progress(&place.disk, &place.log(), threads, progress))
}

/// Creates a raw image with long and short stretches of data, and holes between them.
fn raw_image(path: &Path) {
    let raw = File::create(path).unwrap();
    raw.set_len(DISK).unwrap();
    let mut random = Random(1);
    let long = vec![0x5a; 21 << 20];
    raw.write_all_at(&long, 2 * MIB).unwrap();
    for at in (24 * MIB..DISK - 8192).step_by(64 << 10) {
        let bytes = (random.next() as u32).to_le_bytes().repeat(1024);
        raw.write_all_at(&bytes, at).unwrap();
    }
    raw.write_all_at(&[7; 512], DISK - 512).unwrap();
    raw.sync_all().unwrap();
}

/// A disk with data in its base image, and over it a log of several segments that was not closed.
fn unclosed() -> TestDisk {
    let place = TestDisk::empty();
    let raw = place.disk.with_file_name("raw");
    raw_image(&raw);
    import_disk(&place.disk, &raw, &place.log(), &options(2), &mut |_, _| {}).unwrap();
    let disks = [DiskOptions::new(&place.disk)];
    let store = Store::open(&place.log(), &disks, &options(2)).unwrap();
    let mut port = store.disks()[0].open_port().unwrap();
    let mut random = Random(2);
    for _ in 0..120 {
        let sectors = 1 + random.below(200);
        let sector = random.below(DISK / 512 - sectors);
        match random.below(8) {
            0 => drop(run(&mut port, discard(sector, sectors as u32)).unwrap()),
            1 => flush(&mut port),
            _ => write(&mut port, sector, random.next() as u8, sectors as usize),
        }
    }
    flush(&mut port);
    place.crash()
}

#[test]
fn imports_are_the_same_on_any_number_of_threads() {
    let place = TestDisk::empty();
    let raw = place.disk.with_file_name("raw");
    raw_image(&raw);
    let wanted = std::fs::read(&raw).unwrap();
    let mut first = None;
    for threads in THREADS {
        let disk = place.disk.with_file_name(format!("disk-{threads}"));
        let log = disk.with_extension("wal");
        let done =
            with_calls(|progress| import_disk(&disk, &raw, &log, &options(threads), progress));
        let done = (done.0.unwrap(), done.1);
        assert!(std::fs::read(&disk).unwrap() == wanted, "{threads}");
        assert_eq!(done.1.last(), Some(&(DISK, DISK)));
        assert!(done.1.len() >= 4, "{done:?}");
        assert_eq!(
            first.get_or_insert_with(|| done.clone()),
            &done,
            "{threads}"
        );
    }
}

#[test]
fn exports_checks_and_recoveries_are_the_same_on_any_number_of_threads() {
    let place = unclosed();
    let (mut exports, mut checks, mut recoveries) = (Vec::new(), Vec::new(), Vec::new());
    for threads in THREADS {
        let (report, told) = check(&place, threads);
        checks.push((report.unwrap(), told));

        let raw = place.disk.with_file_name(format!("out-{threads}"));
        let count = NonZeroUsize::new(threads);
        let (done, told) = with_calls(|progress| {
            export_disk(&place.disk, &place.log(), &raw, false, count, progress)
        });
        exports.push((done.unwrap(), told, std::fs::read(&raw).unwrap()));

        let copy = place.crash();
        let disks = [DiskOptions::new(&copy.disk)];
        let (store, told) = with_calls(|progress| {
            Store::open_with_progress(&copy.log(), &disks, &options(threads), progress)
        });
        store.unwrap().close().unwrap();
        recoveries.push((told, std::fs::read(&copy.disk).unwrap()));
    }
    let log = checks[0].0.log.as_ref().unwrap();
    assert!(log.records > 80 && checks[0].1.len() >= 3, "{log:?}");
    assert!(exports[0].2 == recoveries[0].1, "the disk is what it is");
    for i in 1..THREADS.len() {
        assert_eq!(checks[i], checks[0]);
        assert_eq!((exports[i].0, &exports[i].1), (exports[0].0, &exports[0].1));
        assert!(exports[i].2 == exports[0].2 && recoveries[i] == recoveries[0]);
    }
}

/// If several places are damaged, the first in the log's order is reported, whichever a thread
/// finds first.
#[test]
fn damage_is_reported_alike_by_any_number_of_threads() {
    let place = unclosed();
    let segments = check(&place, 1).0.unwrap().log.unwrap().segments;
    assert!(segments >= 4, "{segments}");
    let flip = |slot, at| flip(&place.segment(slot), at);
    // Payloads: every damaged one is reported.
    let payloads = [(0, 8192), (2, 8192)];
    payloads.iter().for_each(|&(slot, at)| flip(slot, at));
    let reports = THREADS.map(|threads| check(&place, threads).0.unwrap().log.unwrap());
    assert!(reports.iter().all(|report| *report == reports[0]));
    assert_eq!(reports[0].damaged.len(), 2, "{reports:?}");
    payloads.iter().for_each(|&(slot, at)| flip(slot, at));
    // Headers, without the summaries' copies of them: the last is damaged first, since each error
    // hides those behind it.
    for slot in 0..segments as u32 {
        put(&place.segment(slot), MIB - 512, &[0; 512]);
    }
    let mut reported = Vec::new();
    for (slot, at) in [(2, 4096 + 40), (1, 4096 + 100), (0, 4096 + 64)] {
        flip(slot, at);
        let errors = THREADS.map(|threads| {
            let (report, told) = check(&place, threads);
            let error = report.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Damaged);
            (error.to_string(), told)
        });
        assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
        assert!(
            errors[0].0.contains(&format!("segment-{slot:05}")),
            "{errors:?}"
        );
        reported.push(errors[0].0.clone());
        let disks = [DiskOptions::new(&place.disk)];
        for threads in THREADS {
            let opened = Store::open(&place.log(), &disks, &options(threads));
            assert_eq!(opened.err().unwrap().to_string(), errors[0].0);
        }
    }
    reported.dedup();
    assert_eq!(reported.len(), 3, "{reported:?}");
}

/// All threads run out of space at once: one error is reported, and no partial file is left.
#[test]
fn a_full_file_system_is_reported_once() {
    let Some(small) = MemoryFs::tmpfs("size=12m") else {
        return;
    };
    let place = unclosed();
    for threads in THREADS {
        let raw = small.path().join("raw");
        let threads = NonZeroUsize::new(threads);
        let (done, told) = with_calls(|progress| {
            export_disk(&place.disk, &place.log(), &raw, false, threads, progress)
        });
        let error = done.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);
        let text = error.to_string();
        let whole = text.contains("raw.walvisor-part") && text.contains("No space left");
        assert!(whole && !text.contains('\n'), "{text}");
        assert!(told.iter().all(|(passed, _)| *passed < DISK), "{told:?}");
        let left = std::fs::read_dir(small.path()).unwrap().count();
        assert_eq!(left, 0, "{threads:?}");
    }
}
