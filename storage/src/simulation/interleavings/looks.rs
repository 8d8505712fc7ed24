//! Looks at a disk in use beside folds: threads that open looks, read them and end them, while the
//! keeper folds segments and writers use them again.

use walvisor_testkit::{Random, Seeds};

use super::super::fixture::{Fixture, Shape, filled};
use super::super::medium::World;
use super::super::oracle::{Violation, value_of};
use super::super::{Total, killers, run_all};
use super::{ScheduleChoice, explore};
use crate::disk::handle::Disk;
use crate::store::view::DataPlace;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Arc, thread};
use crate::view::look::Look;
use crate::{CommitWait, Operation, Point, Port, Retention, SECTOR_SIZE, Store};

/// Sectors of each of the disk's eight places. A segment has room for a few of them.
const PLACE: u64 = 24;
const PLACES: u64 = 8;
/// Records: they go around the ring more than once.
const WRITES: u64 = 40;

/// Counters of runs, which show whether they tried what they should.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    runs: u64,
    looks: u64,
    refused: u64,
    folds: u64,
}

impl Total for Totals {
    fn add(&mut self, other: &Self) {
        self.runs += other.runs;
        self.looks += other.looks;
        self.refused += other.refused;
        self.folds += other.folds;
    }
}

/// The place that a record fills with its LSN.
fn place(lsn: u64) -> u64 {
    lsn * 5 / 3 % PLACES
}

/// The disk after a record.
fn state(lsn: u64) -> Vec<u32> {
    let mut places = vec![0; PLACES as usize];
    (1..=lsn).for_each(|lsn| places[place(lsn) as usize] = lsn as u32);
    let sectors = places.iter().map(|&value| [value; PLACE as usize]);
    sectors.flatten().collect()
}

/// What a look shows.
fn shown(look: &Look) -> Result<Vec<u32>, Violation> {
    let broken = |error| format!("a look can't be read: {error}");
    let (layers, size) = (look.layers(), PLACES * PLACE * SECTOR_SIZE);
    let mut bytes = vec![0; size as usize];
    for part in layers.data(0..size, u64::MAX) {
        let (range, data) = part.map_err(broken)?;
        if matches!(data, DataPlace::Zero) {
            continue;
        }
        let into = &mut |at, some: &[u8]| {
            bytes[at as usize..][..some.len()].copy_from_slice(some);
            Ok(true)
        };
        layers.read(range, &data, into).map_err(broken)?;
    }
    Ok(bytes.chunks(SECTOR_SIZE as usize).map(value_of).collect())
}

/// Writes until the log refuses, which it may while looks need all of it.
fn write(mut port: Port, durable: &AtomicU64) {
    for lsn in 1..=WRITES {
        let (sector, data) = (place(lsn) * PLACE, filled(lsn as u32, PLACE));
        let write = port.end_for_test(Operation::Write { sector, data });
        if write
            .and_then(|_| port.end_for_test(Operation::Flush))
            .is_err()
        {
            return;
        }
        durable.store(lsn, Ordering::Release);
    }
}

/// Opens looks, one after the other, and reads each several times.
fn look(disk: &Disk, mut random: Random, durable: &AtomicU64) -> Result<Totals, Violation> {
    let mut totals = Totals::default();
    for _ in 0..3 {
        let before = durable.load(Ordering::Acquire);
        let at = if random.one_in(2) {
            Point::Newest
        } else {
            Point::Lsn(before.saturating_sub(random.below(4)))
        };
        let look = match (disk.look(at, None), at) {
            (Ok(look), _) => look,
            // The log is full of the other look, or the base image has passed the point.
            (Err(error), at) => {
                let told = error.to_string();
                let full = ["the log is full", "can't be made durable"];
                let full = full.iter().any(|part| told.contains(part));
                if at == Point::Newest && !full {
                    return Err(format!("a look is refused: {error}"));
                }
                totals.refused += 1;
                continue;
            }
        };
        totals.looks += 1;
        let first = shown(&look)?;
        let mut legal = match at {
            Point::Lsn(lsn) => lsn..=lsn,
            _ => before..=WRITES,
        };
        if !legal.any(|lsn| state(lsn) == first) {
            return Err(format!(
                "a look at {at} shows {first:?}, after LSN {before}"
            ));
        }
        // The look stays while the log goes on; a log that is full of it refuses writes, which end
        // then.
        let until = before + random.below(10);
        for _ in 0..2000 {
            if durable.load(Ordering::Acquire) >= until {
                break;
            }
            thread::yield_now();
        }
        for _ in 0..2 {
            thread::yield_now();
            if shown(&look)? != first {
                return Err(format!("a look at {at} has changed"));
            }
        }
    }
    Ok(totals)
}

fn run(seed: u64) -> Result<Totals, Violation> {
    let mut random = Random(seed);
    let shape = Shape {
        disks: 1,
        sectors: PLACES * PLACE,
        segment_size: 64 << 10,
        max_segments: 4 + random.below(3) as u32,
    };
    let mut fixture = Fixture::new(World::new(random.next()), shape);
    fixture.retain = match random.below(3) {
        0 => Retention::All,
        1 => Retention::Bytes(64 << 10),
        _ => Retention::Nothing,
    };
    let running = fixture.open(false, CommitWait::NONE);
    let running = running.expect("opening a new log");
    let (disk, log) = (running.disks[0].clone(), running.disks[0].log.clone());
    let store = Store::start(log.clone(), running.disks, running.keeper).expect("a thread");
    let durable = Arc::new(AtomicU64::new(0));
    let port = disk.open_port().expect("a port");
    let newest = durable.clone();
    let writer = thread::spawn(move || write(port, &newest));
    let lookers = [(); 2].map(|()| {
        let (disk, durable, random) = (disk.clone(), durable.clone(), Random(random.next()));
        thread::spawn(move || look(&disk, random, &durable))
    });
    let ended = lookers.map(|looker| looker.join().expect("a looker"));
    writer.join().expect("the writer");
    drop(disk);
    let closed = store.close();
    let mut totals = Totals {
        runs: 1,
        folds: log.counters.snapshot().checkpoints,
        ..Totals::default()
    };
    for ended in ended {
        totals.add(&ended?);
    }
    closed.map_err(|error| format!("closing a good log failed: {error}"))?;
    Ok(totals)
}

#[test]
fn looks_beside_folds_are_the_disk_at_one_moment() {
    let name = "looks_beside_folds_are_the_disk_at_one_moment";
    // Runs of few switches are long: a thread that waits for another does so for long.
    for (choice, count) in [
        (ScheduleChoice::Random, 150),
        (ScheduleChoice::FewSwitches, 20),
    ] {
        let seeds = Seeds::of(name, "WALVISOR_INTERLEAVINGS", count, count);
        let all: Totals = run_all(&seeds, |seed| explore(choice, seed, run));
        let least = all.looks.min(all.refused * 20).min(all.folds);
        assert!(
            all.runs < 60 || least > all.runs / 2,
            "{choice:?}: too little tried"
        );
    }
}

#[test]
fn planted_faults_of_looks_are_noticed_in_interleavings() {
    killers::INTERLEAVED_LOOKS.assert_all(|seed| {
        let broken = explore(ScheduleChoice::Random, seed, run).err()?;
        assert!(broken.contains("look"), "{broken}");
        Some(broken)
    });
}
