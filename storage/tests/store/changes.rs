//! What has changed since each snapshot: exact, while the disk is in use, after a kill, and in a
//! look at the past.


use crate::support::{Random, TestDisk, fill, flush, run};
use walvisor_storage::{
    Disk, DiskOptions, Look, Operation, Point, Retention, SnapshotName, Store, StoreOptions,
    Tracked, create_disk,
};

const SIZE: u64 = 4 << 20;
const SECTORS: usize = SIZE as usize / 512;
const ROUNDS: u64 = 14;

fn options() -> StoreOptions {
    StoreOptions {
        segment_size: 256 << 10,
        max_segments: 32,
        retain: Some(Retention::Nothing),
        ..StoreOptions::default()
    }
}

fn open(place: &TestDisk) -> Store {
    Store::open(&place.log(), &[DiskOptions::new(&place.disk)], &options()).unwrap()
}

/// Which sectors have changed since a snapshot, as the disk says.
fn told(disk: &dyn Tracked, since: u64) -> Vec<bool> {
    let mut sectors = Vec::new();
    while sectors.len() < SECTORS {
        let at = sectors.len() as u64;
        let changes = disk.changes(since, at, SECTORS as u64 - at, 7).unwrap();
        assert!((1..=7).contains(&changes.len()));
        for change in changes {
            assert!(change.sectors > 0);
            sectors.extend((0..change.sectors).map(|_| change.changed));
        }
    }
    sectors
}

/// A snapshot, and the sectors that have changed since.
struct ChangesSince {
    name: SnapshotName,
    lsn: u64,
    changed: Vec<bool>,
}

struct Model {
    random: Random,
    since: Vec<ChangesSince>,
}

impl Model {
    /// Changes the disk in many ways.
    fn change(&mut self, disk: &Disk) {
        let mut port = disk.open_port().unwrap();
        let mut next = self.random.below(SECTORS as u64);
        for _ in 0..40 {
            // Often behind the range before, so that both are one in the index.
            let sector = match self.random.below(2) {
                0 => next % SECTORS as u64,
                _ => self.random.below(SECTORS as u64),
            };
            let sectors = (1 + self.random.below(60)).min(SECTORS as u64 - sector);
            let byte = self.random.below(256) as u8;
            let operation = match self.random.below(8) {
                0 => Operation::Discard {
                    sector,
                    sectors: sectors as u32,
                },
                1 => Operation::WriteZeroes {
                    sector,
                    sectors: sectors as u32,
                    unmap: byte > 128,
                },
                _ => Operation::Write {
                    sector,
                    data: fill(byte, sectors as usize),
                },
            };
            run(&mut port, operation).unwrap();
            if self.random.below(5) == 0 {
                flush(&mut port);
            }
            for since in &mut self.since {
                since.changed[sector as usize..(sector + sectors) as usize].fill(true);
            }
            next = sector + sectors;
        }
    }

    fn snapshot(&mut self, disk: &Disk, name: &str) {
        let made = disk.snapshot(name.parse().unwrap()).unwrap();
        self.since.push(ChangesSince {
            name: made.name,
            lsn: made.lsn,
            changed: vec![false; SECTORS],
        });
    }

    fn check(&self, disk: &dyn Tracked) {
        let points = disk.past_points();
        assert_eq!(points.len(), self.since.len());
        for (since, point) in self.since.iter().zip(points) {
            assert_eq!(
                (point.name, point.number),
                (since.name.to_string(), since.lsn)
            );
            let told = told(disk, since.lsn);
            let wrong: Vec<_> = (0..SECTORS)
                .filter(|&at| told[at] != since.changed[at])
                .map(|at| (at, told[at]))
                .collect();
            assert!(wrong.is_empty(), "{} {}: {wrong:?}", since.name, since.lsn);
        }
    }
}

#[test]
fn each_sector_that_has_changed_since_a_snapshot_is_told_and_no_other() {
    let place = TestDisk::empty();
    create_disk(&place.disk, SIZE, &place.log(), &options()).unwrap();
    let mut store = open(&place);
    let mut model = Model {
        random: Random(7),
        since: Vec::new(),
    };
    let mut passed = 0;
    for round in 0..ROUNDS {
        let disk = store.disks()[0].clone();
        let horizon = disk.history().horizon.lsn;
        let behind = model.since.iter().filter(|since| since.lsn < horizon);
        passed += behind.count();
        model.change(&disk);
        model.snapshot(&disk, &format!("s{round}"));
        model.check(&disk);
        model.change(&disk);
        model.check(&disk);
        if round % 4 == 2 {
            // The base images go past all snapshots.
            disk.checkpoint().unwrap();
            model.check(&disk);
            model.change(&disk);
        }
        if model.since.len() == 3 {
            // Its records go to the image.
            let oldest = model.since.remove(0);
            disk.delete_snapshot(oldest.name).unwrap();
            assert!(disk.changes(oldest.lsn, 0, 8, 1).is_err());
        }
        model.check(&disk);
        if round % 5 == 4 {
            flush(&mut disk.open_port().unwrap());
            let killed = place.crash();
            let again = open(&killed);
            model.check(&again.disks()[0]);
            drop(again);
            drop(disk);
            store.close().unwrap();
            store = open(&place);
            model.check(&store.disks()[0]);
        }
    }
    let disk = store.disks()[0].clone();
    assert!(store.log_counters().checkpoints > 0, "the log went round");
    assert!(passed > 0, "the base images have gone past no snapshot");
    let all = model.since.iter().map(|since| since.changed.clone());
    let all: Vec<_> = all.collect();
    model.snapshot(&disk, "last");
    model.change(&disk);
    drop(disk);
    store.close().unwrap();
    let at = Point::Snapshot("last".parse().unwrap());
    let options = options();
    let look = Look::open(
        &DiskOptions::new(&place.disk),
        &place.log(),
        at,
        None,
        &options,
    );
    let look = look.unwrap();
    // Nothing has changed between the last snapshot and itself.
    let mut model_at = model.since;
    let last = model_at.last_mut().unwrap();
    last.changed.fill(false);
    for (since, changed) in model_at.iter_mut().zip(all) {
        since.changed = changed;
    }
    Model {
        since: model_at,
        random: Random(0),
    }
    .check(&look);
}
