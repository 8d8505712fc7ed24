//! The store from outside: its promises over files that a crash, simulated by copying them, leaves behind.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags};
use walvisor_storage::{
    Buffer, CacheMode, Completion, DiskOptions, EngineKind, ErrorKind, Failure, LogReport,
    Operation, Port, Store, StoreOptions, create_disk, default_log_dir, inspect,
};

const SIZE: u64 = 8 << 20;

fn small(engine: EngineKind) -> StoreOptions {
    StoreOptions {
        segment_size: 1 << 20,
        max_segments: 4,
        engine,
    }
}

struct Place {
    _dir: tempfile::TempDir,
    disk: PathBuf,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("disk.img");
        create_disk(
            &disk,
            SIZE,
            &default_log_dir(&disk),
            &small(EngineKind::Auto),
        )
        .unwrap();
        Self { _dir: dir, disk }
    }

    /// The files as a process killed now would leave them. A checkpoint may run meanwhile, so the control file
    /// comes first and the base image last: what an older control file needs is still in the log.
    fn crash(&self) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("disk.img");
        let (from, to) = (self.log(), default_log_dir(&disk));
        std::fs::create_dir(&to).unwrap();
        std::fs::copy(from.join("control"), to.join("control")).unwrap();
        for entry in std::fs::read_dir(&from).unwrap() {
            let name = entry.unwrap().file_name();
            if name.to_str().unwrap().starts_with("segment")
                && !name.to_str().unwrap().ends_with(".new")
            {
                std::fs::copy(from.join(&name), to.join(&name)).unwrap();
            }
        }
        std::fs::copy(&self.disk, &disk).unwrap();
        Self { _dir: dir, disk }
    }

    fn log(&self) -> PathBuf {
        default_log_dir(&self.disk)
    }

    fn report(&self) -> LogReport {
        inspect(&self.disk, &self.log()).unwrap().log.unwrap()
    }

    fn open_with(&self, engine: EngineKind, cache: CacheMode) -> Store {
        let options = DiskOptions {
            cache,
            ..DiskOptions::new(&self.disk)
        };
        Store::open(&self.log(), &[options], &small(engine)).unwrap()
    }

    fn open(&self) -> Store {
        self.open_with(EngineKind::Auto, CacheMode::Writeback)
    }
}

fn wait(port: &mut Port, count: usize) -> Vec<Completion> {
    port.kick();
    wait_all(&mut [port], count)
}

/// Serves the ports, as their threads would, until `count` requests have ended.
fn wait_all(ports: &mut [&mut Port], count: usize) -> Vec<Completion> {
    let mut done = Vec::new();
    loop {
        ports
            .iter_mut()
            .for_each(|port| port.completions(&mut done));
        if done.len() >= count {
            return done;
        }
        let events: Vec<_> = ports.iter().map(|port| port.event()).collect();
        let mut fds: Vec<_> = events
            .iter()
            .map(|event| PollFd::new(event, PollFlags::IN))
            .collect();
        let limit = rustix::time::Timespec {
            tv_sec: 20,
            tv_nsec: 0,
        };
        let ready = rustix::event::poll(&mut fds, Some(&limit)).unwrap();
        assert!(
            ready > 0,
            "no completion in 20 s; {} of {count} came",
            done.len()
        );
    }
}

fn run(port: &mut Port, operation: Operation) -> Result<Option<Buffer>, Failure> {
    port.submit(1, operation);
    wait(port, 1).pop().unwrap().result
}

fn fill(byte: u8, sectors: usize) -> Buffer {
    Buffer::from(&vec![byte; sectors * 512][..])
}

fn write(port: &mut Port, sector: u64, byte: u8, sectors: usize) {
    run(
        port,
        Operation::Write {
            sector,
            data: fill(byte, sectors),
        },
    )
    .unwrap();
}

fn read(port: &mut Port, sector: u64, sectors: u32) -> Buffer {
    run(port, Operation::Read { sector, sectors })
        .unwrap()
        .unwrap()
}

fn flush(port: &mut Port) {
    run(port, Operation::Flush).unwrap();
}

fn engines() -> Vec<EngineKind> {
    vec![EngineKind::Auto, EngineKind::Blocking]
}

#[test]
fn reads_merge_memory_log_base_and_zeroes() {
    for engine in engines() {
        let place = Place::new();
        let store = place.open_with(engine, CacheMode::Writeback);
        let mut port = store.disks()[0].open_port().unwrap();
        write(&mut port, 0, 1, 64);
        flush(&mut port);
        write(&mut port, 8, 2, 8);
        run(
            &mut port,
            Operation::Discard {
                sector: 24,
                sectors: 8,
            },
        )
        .unwrap();
        run(
            &mut port,
            Operation::WriteZeroes {
                sector: 33,
                sectors: 1,
                unmap: false,
            },
        )
        .unwrap();
        let check = |port: &mut Port| {
            let data = read(port, 4, 64);
            for s in 0..64u64 {
                let want = match s + 4 {
                    8..16 => 2,
                    24..=31 | 33 => 0,
                    64.. => 0,
                    _ => 1,
                };
                assert!(
                    data[s as usize * 512..][..512].iter().all(|&b| b == want),
                    "sector {} {engine:?}",
                    s + 4
                );
            }
        };
        check(&mut port);
        flush(&mut port);
        check(&mut port);
        drop(port);
        store.close().unwrap();
        // Closed cleanly: the base image is a plain raw image.
        let base = std::fs::read(&place.disk).unwrap();
        assert!(
            base[..8 * 512].iter().all(|&b| b == 1)
                && base[8 * 512..16 * 512].iter().all(|&b| b == 2)
        );
        assert!(base[24 * 512..32 * 512].iter().all(|&b| b == 0));
        let store = place.open_with(engine, CacheMode::Writeback);
        check(&mut store.disks()[0].open_port().unwrap());
    }
}

#[test]
fn flushed_writes_survive_a_crash_and_a_crash_after_that() {
    for engine in engines() {
        let place = Place::new();
        let store = place.open_with(engine, CacheMode::Writeback);
        let mut port = store.disks()[0].open_port().unwrap();
        for i in 0..40u64 {
            write(&mut port, i * 8, i as u8 + 1, 8);
            if i % 3 == 0 {
                flush(&mut port);
            }
        }
        flush(&mut port);
        let crashed = place.crash();
        let report = crashed.report();
        assert_eq!((report.records, report.last_lsn), (40, 40));
        let again = {
            let store = crashed.open();
            let mut port = store.disks()[0].open_port().unwrap();
            for i in 0..40u64 {
                assert!(
                    read(&mut port, i * 8, 8).iter().all(|&b| b == i as u8 + 1),
                    "write {i}"
                );
            }
            write(&mut port, 0, 99, 8);
            flush(&mut port);
            crashed.crash()
        };
        let store = again.open();
        let mut port = store.disks()[0].open_port().unwrap();
        assert!(read(&mut port, 0, 8).iter().all(|&b| b == 99));
        assert!(read(&mut port, 39 * 8, 8).iter().all(|&b| b == 40));
    }
}

#[test]
fn a_flush_with_nothing_new_costs_no_sync_and_concurrent_flushes_share_one() {
    let place = Place::new();
    let store = place.open();
    let disk = &store.disks()[0];
    let mut ports: Vec<Port> = (0..4).map(|_| disk.open_port().unwrap()).collect();
    flush(&mut ports[0]);
    assert_eq!(store.log_counters().syncs, 0);
    for (i, port) in ports.iter_mut().enumerate() {
        port.submit(
            1,
            Operation::Write {
                sector: i as u64 * 8,
                data: fill(7, 8),
            },
        );
        port.submit(2, Operation::Flush);
    }
    // Nobody kicked yet: all four wait. The first to be served leads one group for all.
    let ended = wait_all(&mut ports.iter_mut().collect::<Vec<_>>(), 8).len();
    let counters = store.log_counters();
    assert_eq!(
        (
            ended,
            counters.flushes,
            counters.flushes_grouped,
            counters.syncs
        ),
        (8, 5, 4, 1)
    );
    flush(&mut ports[3]);
    assert_eq!(store.log_counters().syncs, 1);
}

#[test]
fn writethrough_writes_are_durable_when_they_complete() {
    let place = Place::new();
    let store = place.open_with(EngineKind::Auto, CacheMode::Writethrough);
    let disk = store.disks()[0].clone();
    let mut port = disk.open_port().unwrap();
    write(&mut port, 16, 5, 8);
    assert_eq!(store.log_counters().syncs, 1);
    let crashed = place.crash();
    assert!(
        read(&mut crashed.open().disks()[0].open_port().unwrap(), 16, 8)
            .iter()
            .all(|&b| b == 5)
    );
    disk.set_write_cache(true);
    write(&mut port, 16, 6, 8);
    assert_eq!(store.log_counters().syncs, 1);
    disk.set_write_cache(false);
    write(&mut port, 24, 6, 8);
    assert_eq!(store.log_counters().syncs, 2);
}

#[test]
fn the_ring_wraps_many_times_and_nothing_is_lost() {
    for engine in engines() {
        let place = Place::new();
        let store = place.open_with(engine, CacheMode::Writeback);
        let mut port = store.disks()[0].open_port().unwrap();
        let mut random = 12345u64;
        let mut model = vec![0u8; (SIZE / 512) as usize];
        // 40 MiB through a ring of 4 MiB.
        for i in 0..1200u64 {
            random = random
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            let sectors = (random >> 60) * 8 + 8;
            let sector = (random >> 20) % (SIZE / 512 - sectors);
            let byte = (i % 250) as u8 + 1;
            write(&mut port, sector, byte, sectors as usize);
            model[sector as usize..(sector + sectors) as usize].fill(byte);
            if i % 7 == 0 {
                flush(&mut port);
            }
        }
        flush(&mut port);
        assert!(
            store.log_counters().checkpoints > 3,
            "{:?}",
            store.log_counters()
        );
        let crashed = place.crash();
        for store in [store, crashed.open()] {
            let mut port = store.disks()[0].open_port().unwrap();
            for (chunk, want) in model.chunks(64).enumerate() {
                let data = read(&mut port, chunk as u64 * 64, want.len() as u32);
                for (s, want) in want.iter().enumerate() {
                    assert!(
                        data[s * 512..][..512].iter().all(|b| b == want),
                        "sector {}",
                        chunk * 64 + s
                    );
                }
            }
        }
    }
}

#[test]
fn one_log_serves_several_disks_with_one_sync() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let paths = ["a.img", "b.img"].map(|name| dir.path().join(name));
    for path in &paths {
        create_disk(path, SIZE, &log, &small(EngineKind::Auto)).unwrap();
    }
    let options = paths.each_ref().map(DiskOptions::new);
    let store = Store::open(&log, &options, &small(EngineKind::Auto)).unwrap();
    let mut ports: Vec<Port> = store
        .disks()
        .iter()
        .map(|disk| disk.open_port().unwrap())
        .collect();
    for (i, port) in ports.iter_mut().enumerate() {
        port.submit(
            1,
            Operation::Write {
                sector: 0,
                data: fill(i as u8 + 1, 8),
            },
        );
        port.submit(2, Operation::Flush);
    }
    wait_all(&mut ports.iter_mut().collect::<Vec<_>>(), 4);
    assert_eq!(store.log_counters().syncs, 1);
    // The other disk's durable records do not make this one wait.
    write(&mut ports[0], 8, 9, 8);
    flush(&mut ports[1]);
    assert_eq!(store.log_counters().syncs, 1);
    drop(ports);
    store.close().unwrap();
    for (i, path) in paths.iter().enumerate() {
        assert_eq!(std::fs::read(path).unwrap()[0], i as u8 + 1);
    }
}

fn segment(place: &Place) -> std::fs::File {
    let path = place.log().join("segment-00000");
    std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open(path)
        .unwrap()
}

/// Three batches of one 4 KiB write each: header and payload at 4096, 12288, 20480.
fn three_batches() -> Place {
    let place = Place::new();
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
        // The new record carries an LSN above the dropped one's.
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
    // Any bit of the first two batches, or the segment's header: the third tells that they were durable.
    for at in [
        4096,
        4096 + 60,
        4096 + 100,
        8192,
        8192 + 4095,
        12288 + 16,
        16384 + 2000,
        0,
        40,
    ] {
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
    let place = Place::new();
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
    let other = Place::new();
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
fn requests_outside_the_disk_fail_and_read_only_disks_refuse_writes() {
    let place = Place::new();
    {
        let store = place.open();
        let mut port = store.disks()[0].open_port().unwrap();
        let end = SIZE / 512;
        for (sector, sectors) in [
            (end, 1),
            (end - 1, 2),
            (u64::MAX, 1),
            (u64::MAX - 1, u32::MAX),
            (1 << 55, 1),
            (0, 0),
        ] {
            assert_eq!(
                run(&mut port, Operation::Read { sector, sectors }).unwrap_err(),
                Failure::OutOfRange
            );
            assert_eq!(
                run(&mut port, Operation::Discard { sector, sectors }).unwrap_err(),
                Failure::OutOfRange
            );
        }
        let data = Buffer::from(&[0; 700][..]);
        assert_eq!(
            run(&mut port, Operation::Write { sector: 0, data }).unwrap_err(),
            Failure::TooLarge
        );
        let data = fill(1, 8);
        assert_eq!(
            run(
                &mut port,
                Operation::Write {
                    sector: end - 7,
                    data
                }
            )
            .unwrap_err(),
            Failure::OutOfRange
        );
    }
    let options = DiskOptions {
        read_only: true,
        ..DiskOptions::new(&place.disk)
    };
    let store = Store::open(&place.log(), &[options], &small(EngineKind::Auto)).unwrap();
    let mut port = store.disks()[0].open_port().unwrap();
    assert_eq!(
        run(
            &mut port,
            Operation::Write {
                sector: 0,
                data: fill(1, 8)
            }
        )
        .unwrap_err(),
        Failure::ReadOnly
    );
    flush(&mut port);
    assert!(read(&mut port, 0, 8).iter().all(|&b| b == 0));
}

#[test]
fn an_unclosed_disk_is_not_served_without_its_log() {
    let place = Place::new();
    let store = place.open();
    let mut port = store.disks()[0].open_port().unwrap();
    write(&mut port, 0, 1, 8);
    flush(&mut port);
    let elsewhere = place.disk.with_extension("copy");
    // As `cp -a` does it, attributes included.
    let copied = std::process::Command::new("cp")
        .arg("-a")
        .arg(&place.disk)
        .arg(&elsewhere)
        .status()
        .unwrap();
    assert!(copied.success());
    if std::process::Command::new("getfattr")
        .arg("-d")
        .arg(&elsewhere)
        .output()
        .is_err()
    {
        println!("note: no getfattr here; the attribute is checked through the store alone");
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
