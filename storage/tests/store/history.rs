//! Every state that two disks of one log had since the last checkpoint can be brought back and
//! looked at.


use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use crate::support::{
    MemoryFs, Random, check_look, copy_image, copy_log, fill, flush, modify, read, run, small,
};
use walvisor_storage::{
    Allocation, Backend, ChangedRange, DiskOptions, EngineKind, ErrorKind, Failure, Look,
    Operation, Point, Result, Store, StoreOptions, clone_disk, create_disk, disk_changes,
    dump_records, restore_disk, scratch_file,
};

const NAMES: [&str; 2] = ["a", "b"];
const SECTORS: u64 = 256;
/// Requests before the checkpoint, and after it.
const REQUESTS: [usize; 2] = [60, 90];

/// A log of two disks that was not closed, and what they were after each of its records.
struct KilledLog {
    dir: tempfile::TempDir,
    /// Both disks after each record, by LSN.
    states: Vec<[Vec<u8>; 2]>,
    /// Which sectors of which disk each record touched, and what it made of them, by LSN.
    touched: Vec<(usize, Range<u64>, Allocation)>,
}

/// The sectors that a modification touches, and what it makes of them.
fn touches(operation: &Operation) -> (Range<u64>, Allocation) {
    match *operation {
        Operation::Discard { sector, sectors }
        | Operation::WriteZeroes {
            sector,
            sectors,
            unmap: true,
        } => (sector..sector + u64::from(sectors), Allocation::Hole),
        Operation::WriteZeroes {
            sector, sectors, ..
        } => (sector..sector + u64::from(sectors), Allocation::Zero),
        Operation::Write { sector, ref data } => {
            let sectors = data.len() as u64 / 512;
            (sector..sector + sectors, Allocation::Data)
        }
        Operation::Read { .. } | Operation::Flush => unreachable!("no modification"),
    }
}

impl KilledLog {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let live = dir.path().join("live");
        std::fs::create_dir(&live).unwrap();
        let (log, disks) = (live.join("log"), NAMES.map(|name| live.join(name)));
        // No checkpoint but the one at the close.
        let options = StoreOptions {
            max_segments: 64,
            ..small(EngineKind::Auto)
        };
        for disk in &disks {
            create_disk(disk, SECTORS * 512, &log, &options).unwrap();
        }
        let mut random = Random(7);
        let mut states = vec![[(); 2].map(|()| vec![0; (SECTORS * 512) as usize])];
        // There is no record 0.
        let mut touched = vec![(0, 0..0, Allocation::Data)];
        for (life, requests) in REQUESTS.into_iter().enumerate() {
            let opened = disks.each_ref().map(DiskOptions::new);
            let store = Store::open(&log, &opened, &options).unwrap();
            let mut ports: Vec<_> = store
                .disks()
                .iter()
                .map(|disk| disk.open_port().unwrap())
                .collect();
            for _ in 0..requests {
                let disk = random.below(2) as usize;
                let mut state = states.last().unwrap().clone();
                let operation = modify(&mut random, &mut state[disk]);
                let (sectors, now) = touches(&operation);
                touched.push((disk, sectors, now));
                run(&mut ports[disk], operation).unwrap();
                states.push(state);
                if random.below(4) == 0 {
                    flush(&mut ports[disk]);
                }
            }
            ports.iter_mut().for_each(flush);
            if life == 0 {
                drop(ports);
                store.close().unwrap();
                continue;
            }
            std::fs::create_dir(dir.path().join("log")).unwrap();
            copy_log(&log, &dir.path().join("log"));
            for (disk, name) in disks.iter().zip(NAMES) {
                copy_image(disk, &dir.path().join(name));
            }
        }
        Self {
            dir,
            states,
            touched,
        }
    }

    fn log(&self) -> PathBuf {
        self.dir.path().join("log")
    }

    fn disk(&self, number: usize) -> PathBuf {
        self.dir.path().join(NAMES[number])
    }

    /// The states that can be brought back of a disk, by LSN.
    fn since_checkpoint(&self, disk: usize) -> impl Iterator<Item = (u64, &Vec<u8>)> {
        let states = self.states.iter().enumerate().skip(REQUESTS[0]);
        states.map(move |(lsn, state)| (lsn as u64, &state[disk]))
    }

    fn look(&self, disk: usize, lsn: u64, engine: EngineKind) -> Result<Look> {
        let options = small(engine);
        let disk = DiskOptions::new(self.disk(disk));
        Look::open(&disk, &self.log(), Point::Lsn(lsn), None, &options)
    }

    /// A look that can be written.
    fn scratch(&self, disk: usize, lsn: u64, engine: EngineKind) -> Look {
        let options = small(engine);
        let disk = DiskOptions::new(self.disk(disk));
        let scratch = Some(scratch_file().unwrap());
        Look::open(&disk, &self.log(), Point::Lsn(lsn), scratch, &options).unwrap()
    }

    /// The bytes of all files.
    fn files(&self) -> Vec<Vec<u8>> {
        let log = std::fs::read_dir(self.log()).unwrap();
        let mut paths: Vec<_> = log.map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        paths.extend([0, 1].map(|disk| self.disk(disk)));
        let read = |path: &PathBuf| std::fs::read(path).unwrap();
        paths.iter().map(read).collect()
    }
}

#[test]
fn every_state_since_the_checkpoint_comes_back() {
    let killed = KilledLog::new();
    let new = killed.dir.path().join("new");
    let restored = |disk: usize, lsn: u64| {
        let point = Point::Lsn(lsn);
        let (disk, log) = (killed.disk(disk), killed.log());
        restore_disk(&disk, &log, point, &new, None, &mut |_, _| {})?;
        let bytes = std::fs::read(&new).unwrap();
        std::fs::remove_file(&new).unwrap();
        Result::Ok(bytes)
    };
    for disk in 0..NAMES.len() {
        for (lsn, state) in killed.since_checkpoint(disk) {
            assert!(
                restored(disk, lsn).unwrap() == *state,
                "disk {disk} at LSN {lsn}"
            );
        }
        for lsn in [0, REQUESTS[0] - 1, killed.states.len()] {
            let lsn = lsn as u64;
            let looked = killed.look(disk, lsn, EngineKind::Auto).err().unwrap();
            for error in [restored(disk, lsn).unwrap_err(), looked] {
                assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
            }
        }
    }
}

#[test]
fn looks_at_all_points_are_open_at_once() {
    let killed = KilledLog::new();
    let mut random = Random(11);
    for engine in [EngineKind::Auto, EngineKind::Blocking] {
        let mut looks = Vec::new();
        for disk in 0..NAMES.len() {
            for (lsn, state) in killed.since_checkpoint(disk) {
                looks.push((killed.look(disk, lsn, engine).unwrap(), state));
            }
        }
        for (number, (look, state)) in looks.iter().enumerate() {
            check_look(&mut random, look, state, &format!("look {number}"));
        }
        // Nobody writes to the disks and the log meanwhile.
        let disks = [DiskOptions::new(killed.disk(0))];
        let error = Store::open(&killed.log(), &disks, &small(engine))
            .err()
            .unwrap();
        assert_eq!(error.kind(), ErrorKind::Locked, "{error}");
    }
}

#[test]
fn a_look_cannot_be_written() {
    let killed = KilledLog::new();
    let look = killed
        .look(0, REQUESTS[0] as u64, EngineKind::Auto)
        .unwrap();
    assert!(look.capabilities().read_only);
    let mut queue = look.open_queue().unwrap();
    let (sector, sectors) = (0, 1);
    for operation in [
        Operation::Write {
            sector,
            data: fill(1, 1),
        },
        Operation::Discard { sector, sectors },
        Operation::WriteZeroes {
            sector,
            sectors,
            unmap: false,
        },
    ] {
        assert_eq!(run(&mut *queue, operation).unwrap_err(), Failure::ReadOnly);
    }
    assert!(run(&mut *queue, Operation::Flush).unwrap().is_none());
    for (sector, sectors) in [(0, 0), (SECTORS, 1), (u64::MAX, 2)] {
        let failure = run(&mut *queue, Operation::Read { sector, sectors }).unwrap_err();
        assert_eq!(failure, Failure::OutOfRange);
    }
}

/// A byte of the log that the medium has changed is never data.
#[test]
fn damage_below_a_point_is_an_error_of_the_reads_that_need_it() {
    let killed = KilledLog::new();
    let mut records = Vec::new();
    dump_records(&killed.log(), &mut |record| {
        if record.payload_bytes > 0 && !record.in_base {
            records.push((record.lsn, record.disk_id, record.sector, record.offset));
        }
    })
    .unwrap();
    // The first disk has the first number.
    let first = records.iter().map(|record| record.1).min().unwrap();
    let mut records = records.iter().filter(|record| record.1 == first);
    let &(lsn, _, sector, offset) = records.next().unwrap();
    let segments = std::fs::read_dir(killed.log()).unwrap();
    let mut segments = segments.map(|entry| entry.unwrap().path());
    let holds = |path: &PathBuf| {
        let bytes = std::fs::read(path).unwrap();
        let state = &killed.states[lsn as usize][0][sector as usize * 512..][..512];
        path.to_str().unwrap().contains("segment-")
            && bytes.get(offset as usize..offset as usize + 512) == Some(state)
    };
    let segment = segments.find(holds).unwrap();
    let file = std::fs::File::options().write(true).open(segment).unwrap();
    let byte = killed.states[lsn as usize][0][sector as usize * 512];
    file.write_all_at(&[!byte], offset + 100).unwrap();
    for engine in [EngineKind::Auto, EngineKind::Blocking] {
        let mut queue = killed.look(0, lsn, engine).unwrap().open_queue().unwrap();
        let sectors = 1;
        let failed = run(&mut *queue, Operation::Read { sector, sectors });
        assert_eq!(failed.unwrap_err(), Failure::Io);
        // The base image has what was there before, and the other disk is not affected.
        let before = killed.look(0, lsn - 1, engine).unwrap();
        let state = &killed.states[lsn as usize - 1];
        check_look(&mut Random(3), &before, &state[0], "before");
        let newest = killed.states.len() - 1;
        let other = killed.look(1, newest as u64, engine).unwrap();
        check_look(&mut Random(3), &other, &killed.states[newest][1], "other");
    }
    // The point is not restored, and leaves nothing; the one before is.
    let raw = killed.dir.path().join("raw");
    let restore = |lsn| {
        let (at, progress) = (Point::Lsn(lsn), &mut |_, _| {});
        restore_disk(&killed.disk(0), &killed.log(), at, &raw, None, progress)
    };
    let refused = restore(lsn).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Damaged);
    assert!(refused.to_string().contains("damaged at byte"), "{refused}");
    assert!(!raw.exists());
    restore(lsn - 1).unwrap();
    assert!(std::fs::read(&raw).unwrap() == killed.states[lsn as usize - 1][0]);
}

/// Writes, discards and zeroes of two queues are read back, over the past, and nothing of them
/// stays.
#[test]
fn what_is_written_to_a_look_is_thrown_away() {
    let killed = KilledLog::new();
    let before = killed.files();
    for (seed, engine) in [(21, EngineKind::Auto), (22, EngineKind::Blocking)] {
        let mut random = Random(seed);
        for (lsn, state) in killed.since_checkpoint(0).step_by(7) {
            let look = killed.scratch(0, lsn, engine);
            assert!(!look.capabilities().read_only && look.is_unsafe());
            let mut queues = [look.open_queue().unwrap(), look.open_queue().unwrap()];
            let mut state = state.clone();
            for _ in 0..60 {
                let queue = &mut *queues[random.below(2) as usize];
                assert!(
                    run(queue, modify(&mut random, &mut state))
                        .unwrap()
                        .is_none()
                );
                if random.below(8) == 0 {
                    run(queue, Operation::Flush).unwrap();
                }
            }
            check_look(&mut random, &look, &state, &format!("LSN {lsn}"));
            let operation = Operation::Write {
                sector: SECTORS,
                data: fill(1, 1),
            };
            let failure = run(&mut *queues[0], operation).unwrap_err();
            assert_eq!(failure, Failure::OutOfRange);
        }
        let again = killed.look(0, REQUESTS[0] as u64, engine).unwrap();
        check_look(&mut random, &again, &killed.states[REQUESTS[0]][0], "again");
    }
    assert!(killed.files() == before);
}

/// A write for which the scratch file has no space fails as a whole, and all other requests go on.
#[test]
fn a_write_that_finds_no_space_changes_nothing() {
    let Some(place) = MemoryFs::tmpfs("size=1m") else {
        return;
    };
    let killed = KilledLog::new();
    let full = (1 << 20) - (64 << 10);
    std::fs::write(place.path().join("filler"), vec![1; full]).unwrap();
    for engine in [EngineKind::Auto, EngineKind::Blocking] {
        let path = place.path().join("scratch");
        let mut options = std::fs::File::options();
        let scratch = options.read(true).write(true).create_new(true).open(&path);
        std::fs::remove_file(&path).unwrap();
        let disk = DiskOptions::new(killed.disk(0));
        let lsn = REQUESTS[0];
        let point = Point::Lsn(lsn as u64);
        let look = Look::open(
            &disk,
            &killed.log(),
            point,
            Some(scratch.unwrap()),
            &small(engine),
        );
        let look = look.unwrap();
        let mut queue = look.open_queue().unwrap();
        let mut state = killed.states[lsn][0].clone();
        let mut write = |sector: u64, byte: u8, sectors: usize| {
            let data = fill(byte, sectors);
            let written = run(&mut *queue, Operation::Write { sector, data });
            if written.is_ok() {
                state[sector as usize * 512..][..sectors * 512].fill(byte);
            }
            written.map(drop)
        };
        write(0, 1, 32).unwrap();
        // Half of this write has its space already.
        assert_eq!(write(16, 2, 200), Err(Failure::Io));
        write(8, 3, 16).unwrap();
        check_look(&mut Random(5), &look, &state, "no space");
        // A discard gives space back.
        let (sector, sectors) = (0, 32);
        run(&mut *queue, Operation::Discard { sector, sectors }).unwrap();
        let data = fill(4, 64);
        run(&mut *queue, Operation::Write { sector: 64, data }).unwrap();
    }
}

/// A clone is a disk of its own: it has the state of the point, takes writes, and the other disk
/// stays as it is.
#[test]
fn a_clone_of_any_point_is_a_disk_of_its_own() {
    let killed = KilledLog::new();
    let before = killed.files();
    let newest = killed.states.len() as u64 - 1;
    let options = small(EngineKind::Auto);
    let points = [REQUESTS[0] as u64, newest - 20, newest].map(|lsn| (Some(Point::Lsn(lsn)), lsn));
    for (number, (at, lsn)) in points.into_iter().chain([(None, newest)]).enumerate() {
        let name = |part: &str| killed.dir.path().join(format!("{part}-{number}"));
        let (new, log) = (name("new"), name("new-log"));
        // What an interrupted clone left.
        let left = killed
            .dir
            .path()
            .join(format!("new-{number}.walvisor-part"));
        std::fs::write(&left, vec![9; 1 << 20]).unwrap();
        let (disk, progress) = (killed.disk(0), &mut |_, _| {});
        let done = clone_disk(&disk, &killed.log(), at, &new, &log, &options, progress).unwrap();
        assert!(done.size == SECTORS * 512 && done.copied <= done.size);
        assert!(!left.exists());
        let mut state = killed.states[lsn as usize][0].clone();
        let store = Store::open(&log, &[DiskOptions::new(&new)], &options).unwrap();
        let mut port = store.disks()[0].open_port().unwrap();
        assert!(read(&mut port, 0, SECTORS as u32)[..] == state, "LSN {lsn}");
        run(&mut port, modify(&mut Random(9), &mut state)).unwrap();
        drop(port);
        store.close().unwrap();
        assert!(std::fs::read(&new).unwrap() == state);
        // What exists is not replaced.
        let again = clone_disk(&disk, &killed.log(), at, &new, &log, &options, progress);
        assert_eq!(again.unwrap_err().kind(), ErrorKind::AlreadyExists);
    }
    assert!(killed.files() == before);
    let (new, log) = (killed.dir.path().join("x"), killed.dir.path().join("x-log"));
    let (at, progress) = (Some(Point::Lsn(newest + 1)), &mut |_, _| {});
    let disk = killed.disk(0);
    let refused = clone_disk(&disk, &killed.log(), at, &new, &log, &options, progress);
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::NotFound);
    assert!(!new.exists() && !log.exists());
}

/// What changed between any two points is what the records between them touched, sector by sector.
#[test]
fn changes_are_what_the_records_touched() {
    let killed = KilledLog::new();
    let newest = killed.states.len() as u64 - 1;
    let oldest = REQUESTS[0] as u64;
    let changes = |disk: usize, from: u64, to: Option<u64>| {
        let (disk, log) = (killed.disk(disk), killed.log());
        disk_changes(&disk, &log, Point::Lsn(from), to.map(Point::Lsn), None)
    };
    for disk in 0..NAMES.len() {
        let pairs = (oldest..=newest).flat_map(|from| {
            let to = (from..=newest).step_by(1 + (from as usize * 7) % 23);
            to.map(move |to| (from, Some(to))).chain([(from, None)])
        });
        for (from, to) in pairs {
            let found = changes(disk, from, to).unwrap();
            let to = to.unwrap_or(newest);
            assert_eq!(
                (found.size, found.from_lsn, found.to_lsn),
                (SECTORS * 512, from, to)
            );
            let mut model = vec![None; SECTORS as usize];
            let records = &killed.touched[from as usize + 1..=to as usize];
            for (_, sectors, now) in records.iter().filter(|record| record.0 == disk) {
                model[sectors.start as usize..sectors.end as usize].fill(Some(*now));
            }
            let mut last: Option<ChangedRange> = None;
            for range in found.ranges {
                if let Some(last) = last {
                    let end = last.offset + last.len;
                    assert!(end < range.offset || end == range.offset && last.now != range.now);
                }
                let first = (range.offset / 512) as usize;
                let sectors = &mut model[first..first + (range.len / 512) as usize];
                assert!(range.len > 0 && sectors.iter().all(|now| *now == Some(range.now)));
                sectors.fill(None);
                last = Some(range);
            }
            assert!(model.iter().all(Option::is_none), "{from}..{to}");
        }
    }
    let error = changes(0, oldest + 5, Some(oldest + 4)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    for (from, to) in [(oldest - 1, None), (oldest, Some(newest + 1))] {
        assert_eq!(
            changes(0, from, to).unwrap_err().kind(),
            ErrorKind::NotFound
        );
    }
}
