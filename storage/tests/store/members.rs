//! Disks that come and go while other disks of their log are written.
//!
//! `WALVISOR_MEMBER_CYCLES=N` makes it N additions and removals, and prints how long the flushes of
//! the other disks took with and without them.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::support::{copy_image, copy_log, flush, mark, read, write};
use walvisor_storage::{
    Disk, DiskOptions, ErrorKind, Image, Port, Store, StoreOptions, create_disk,
};

const SIZE: u64 = 4 << 20;
/// Disks that stay, and disks that come and go.
const STAYING: usize = 6;
const CHANGING: usize = 4;
/// Blocks of 8 sectors that are written on each disk.
const BLOCKS: u64 = 64;

fn options() -> StoreOptions {
    StoreOptions {
        segment_size: 1 << 20,
        max_segments: 12,
        ..StoreOptions::default()
    }
}

/// What a disk must hold: the byte of each block whose FLUSH was acknowledged.
struct Oracle {
    port: Port,
    bytes: [u8; BLOCKS as usize],
    writes: u64,
}

impl Oracle {
    fn new(disk: &Disk, bytes: [u8; BLOCKS as usize]) -> Self {
        Self {
            port: disk.open_port().unwrap(),
            bytes,
            writes: 0,
        }
    }

    /// Writes some blocks, and flushes them; returns how long the flush took.
    fn step(&mut self) -> Duration {
        for _ in 0..4 {
            self.writes += 1;
            let block = self.writes.wrapping_mul(0x9e37_79b9) % BLOCKS;
            let byte = (self.writes % 251) as u8;
            write(&mut self.port, block * 8, byte, 8);
            self.bytes[block as usize] = byte;
        }
        let began = Instant::now();
        flush(&mut self.port);
        began.elapsed()
    }

    fn check(&mut self) {
        for (block, byte) in self.bytes.iter().enumerate() {
            let found = read(&mut self.port, block as u64 * 8, 8);
            assert!(found.iter().all(|found| found == byte), "block {block}");
        }
    }
}

/// Compares a closed image with what its disk must hold.
fn check_image(path: &Path, bytes: &[u8]) {
    let image = std::fs::read(path).unwrap();
    for (block, byte) in bytes.iter().enumerate() {
        let found = &image[block * 4096..][..4096];
        assert!(found.iter().all(|found| found == byte), "{path:?} {block}");
    }
}

/// The time below which 99 of 100 are.
fn p99(times: &mut [Duration]) -> Duration {
    times.sort();
    times[times.len() * 99 / 100]
}

#[test]
fn disks_come_and_go_while_others_are_written() {
    let cycles = std::env::var("WALVISOR_MEMBER_CYCLES");
    let cycles: usize = cycles.map_or(40, |cycles| cycles.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let at = |name: String| dir.path().join(name);
    let log = at("log".to_owned());
    let staying: Vec<PathBuf> = (0..STAYING).map(|n| at(format!("stays-{n}"))).collect();
    let changing: Vec<PathBuf> = (0..CHANGING).map(|n| at(format!("changes-{n}"))).collect();
    for path in &staying {
        create_disk(path, SIZE, &log, &options()).unwrap();
    }
    // These are raw images, and join the log when they are first added.
    for path in &changing {
        std::fs::File::create(path).unwrap().set_len(SIZE).unwrap();
    }
    let disks: Vec<_> = staying.iter().map(DiskOptions::new).collect();
    let mut store = Store::open(&log, &disks, &options()).unwrap();

    let (stop, changes) = (AtomicBool::new(false), AtomicBool::new(false));
    let steps = AtomicUsize::new(0);
    let mut held = vec![[0; BLOCKS as usize]; CHANGING];
    let open = store.disks().to_vec();
    let written = thread::scope(|scope| {
        let writers: Vec<_> = open
            .iter()
            .map(|disk| {
                let (stop, changes, steps) = (&stop, &changes, &steps);
                scope.spawn(move || {
                    let mut oracle = Oracle::new(disk, [0; BLOCKS as usize]);
                    let mut times = [Vec::new(), Vec::new()];
                    while !stop.load(Ordering::SeqCst) {
                        let with = usize::from(changes.load(Ordering::SeqCst));
                        times[with].push(oracle.step());
                        steps.fetch_add(1, Ordering::SeqCst);
                    }
                    oracle.check();
                    (oracle.bytes, times)
                })
            })
            .collect();
        // Turns with and without changes alternate.
        for cycle in 0..cycles {
            let which = cycle % CHANGING;
            let path = &changing[which];
            changes.store(true, Ordering::SeqCst);
            let disk = store.add_disk(&DiskOptions::new(path)).unwrap().clone();
            let mut oracle = Oracle::new(&disk, held[which]);
            oracle.check();
            oracle.writes = cycle as u64 * 100;
            for _ in 0..5 {
                oracle.step();
            }
            held[which] = oracle.bytes;
            drop((oracle, disk));
            store.remove_disk(path).unwrap();
            changes.store(false, Ordering::SeqCst);
            check_image(path, &held[which]);
            // The image can be opened elsewhere at once, as a raw one.
            drop(Image::open(path, false).unwrap());
            let until = steps.load(Ordering::SeqCst) + 20;
            while steps.load(Ordering::SeqCst) < until {
                thread::yield_now();
            }
        }
        stop.store(true, Ordering::SeqCst);
        let ended = writers.into_iter().map(|writer| writer.join().unwrap());
        ended.collect::<Vec<_>>()
    });
    let mut all = [Vec::new(), Vec::new()];
    for (_, times) in &written {
        (0..2).for_each(|with| all[with].extend(&times[with]));
    }
    let [without, with] = all.each_mut().map(|times| p99(times));
    println!(
        "{cycles} additions and removals: the p99 of the other disks' flushes is {with:?}, without \
         {without:?}"
    );

    // A crash now: no FLUSH that was acknowledged is lost. One disk is in the log, and leaves it
    // later.
    let last = store.add_disk(&DiskOptions::new(&changing[0])).unwrap();
    let mut oracle = Oracle::new(last, held[0]);
    oracle.step();
    held[0] = oracle.bytes;
    drop(oracle);
    open[0].checkpoint().unwrap();
    let left = at("left".to_owned());
    std::fs::create_dir_all(left.join("log")).unwrap();
    copy_log(&log, &left.join("log"));
    let there = |path: &PathBuf| left.join(path.file_name().unwrap());
    for path in staying.iter().chain(&changing) {
        copy_image(path, &there(path));
    }
    drop(open);
    store.close().unwrap();
    let paths: Vec<_> = staying.iter().chain(&changing).collect();
    let disks: Vec<_> = paths
        .iter()
        .map(|path| DiskOptions::new(there(path)))
        .collect();
    let recovered = Store::open(&left.join("log"), &disks, &options()).unwrap();
    let expected = written.iter().map(|(bytes, _)| bytes).chain(&held);
    for (disk, bytes) in recovered.disks().iter().zip(expected) {
        Oracle::new(disk, *bytes).check();
    }
    recovered.close().unwrap();
}

#[test]
fn what_cannot_be_added_or_removed_is_refused_and_disturbs_nobody() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    for name in ["a", "b"] {
        create_disk(&at(name), SIZE, &at("log"), &options()).unwrap();
    }
    create_disk(&at("other"), SIZE, &at("other.wal"), &options()).unwrap();
    let mut store = Store::open(&at("log"), &[DiskOptions::new(at("a"))], &options()).unwrap();
    let mut port = store.disks()[0].open_port().unwrap();
    write(&mut port, 0, 7, 8);
    let mut refused = |name: &str| {
        let added = store.add_disk(&DiskOptions::new(at(name))).map(drop);
        let error = added.unwrap_err();
        (error.kind(), error.to_string())
    };
    copy_image(&at("a"), &at("copy"));
    let (kind, text) = refused("copy");
    assert_eq!(kind, ErrorKind::WrongLog, "{text}");
    assert!(text.contains("a copy of the disk"), "{text}");
    assert_eq!(refused("missing").0, ErrorKind::NotFound);
    // The disk of a log that was not closed.
    let other = Store::open(
        &at("other.wal"),
        &[DiskOptions::new(at("other"))],
        &options(),
    );
    let other = other.unwrap();
    copy_image(&at("other"), &at("killed"));
    let (kind, text) = refused("killed");
    assert_eq!(kind, ErrorKind::WrongLog, "{text}");
    assert!(text.contains("was not closed"), "{text}");
    other.close().unwrap();

    // A disk that leaves with a port open fails its writes, and its image is complete.
    store.add_disk(&DiskOptions::new(at("b"))).unwrap();
    let mut late = store.disks()[1].open_port().unwrap();
    write(&mut late, 0, 8, 8);
    store.remove_disk(&at("b")).unwrap();
    assert_eq!(store.disks().len(), 1);
    assert_eq!(std::fs::read(at("b")).unwrap()[..4096], [8; 4096]);
    if let Some(mark) = mark(&at("b")) {
        assert!(mark.ends_with("closed"), "{mark}");
    }
    let error = store.remove_disk(&at("b")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    drop(late);
    store.add_disk(&DiskOptions::new(at("b"))).unwrap();
    flush(&mut port);
    assert_eq!(&read(&mut port, 0, 8)[..], [7; 4096]);
    drop(port);
    store.close().unwrap();
}
