//! Snapshots that are made and deleted beside copies. Looks at a disk in use, beside changes and
//! copies in any order, are a part of the random histories.

use super::bench::{Bench, SECTORS};
use super::oracle::value_of;
use crate::catalog::snapshot::Snapshot;
use crate::log::holds::HoldOwner;
use crate::log::orders::{KeeperOrder, KeeperTask};
use crate::store::view::DataPlace;
use crate::sync::atomic::Ordering;
use crate::sync::mpsc;
use crate::view::look::Look;
use crate::{Point, Retention, SECTOR_SIZE, SnapshotName};

/// What a look at a bench's disk shows.
fn values(look: &Look) -> Vec<u32> {
    values_of(look, SECTORS)
}

/// What a look at a disk of so many sectors shows.
pub(super) fn values_of(look: &Look, sectors: u64) -> Vec<u32> {
    let layers = look.layers();
    let size = sectors * SECTOR_SIZE;
    let mut bytes = vec![0; size as usize];
    for part in layers.data(0..size, u64::MAX) {
        let (range, data) = part.unwrap();
        if matches!(data, DataPlace::Zero) {
            continue;
        }
        let read = layers.read(range, &data, &mut |at, some: &[u8]| {
            bytes[at as usize..][..some.len()].copy_from_slice(some);
            Ok(true)
        });
        read.unwrap();
    }
    bytes.chunks(SECTOR_SIZE as usize).map(value_of).collect()
}

/// A bench whose log has room for what happens while looks are open: also in memory.
fn roomy(seed: u64, kept: Retention) -> Option<Bench> {
    let bench = Bench::keeping(seed, kept);
    let roomy = bench.running.disks[0].log.index_limit > 1000;
    roomy.then_some(bench)
}

const KEPT: [Retention; 3] = [
    Retention::Nothing,
    Retention::All,
    Retention::Bytes(64 << 10),
];

/// A bench with a snapshot of this name that its base image has moved past, and what the snapshot
/// shows.
fn past_snapshot(seed: u64, name: SnapshotName) -> Option<(Bench, Vec<u32>)> {
    let mut bench = roomy(seed, Retention::Nothing)?;
    bench.changes();
    bench.running.keeper.snapshot(name, None).unwrap();
    let shown = bench.values.clone();
    bench.changes();
    bench.running.keeper.step(true).unwrap();
    Some((bench, shown))
}

/// What a look at a snapshot shows.
fn values_at(bench: &mut Bench, name: SnapshotName) -> Vec<u32> {
    let disk = bench.running.disks[0].clone();
    let held = bench
        .running
        .keeper
        .hold(&disk.state, HoldOwner::Look)
        .unwrap();
    let at = Point::Snapshot(name);
    let look = Look::in_use(&disk.log, &disk.state, at, held, None).unwrap();
    let shown = values(&look);
    drop(look);
    let freeze = disk.log.lock().keeper.holds.has_open();
    assert!(!freeze, "a look that has ended holds nothing");
    shown
}

/// While a copy saves for the newest snapshot, that is deleted. The older one then needs the same
/// in its own files.
#[test]
fn a_snapshot_deleted_while_a_copy_saves_for_it_leaves_the_older_one_whole() {
    let [older, newer]: [SnapshotName; 2] = ["older", "newer"].map(|name| name.parse().unwrap());
    let mut tried = 0;
    for seed in 1..60 {
        let Some((mut bench, shown)) = past_snapshot(seed, older) else {
            continue;
        };
        bench.changes();
        bench.running.keeper.snapshot(newer, None).unwrap();
        bench.running.keeper.step(true).unwrap();
        bench.changes();
        let (answer, answered) = mpsc::channel();
        let task = KeeperTask::DeleteSnapshot(newer);
        let disk = bench.running.disks[0].clone();
        disk.log
            .lock()
            .keeper
            .orders
            .push(KeeperOrder { task, answer });
        bench.running.keeper.step(true).unwrap();
        // If nothing was copied, nobody has served the orders.
        let Ok(deleted) = answered.try_recv() else {
            continue;
        };
        deleted.unwrap();
        tried += 1;
        assert_eq!(values_at(&mut bench, older), shown, "seed {seed}");
    }
    assert!(tried > 10, "{tried}");
}

/// A snapshot is made while a copy saves for an older one, in a log with little room. It begins no
/// copy of its own.
#[test]
fn a_snapshot_made_while_a_copy_saves_begins_no_other_copy() {
    let [older, newer]: [SnapshotName; 2] = ["older", "newer"].map(|name| name.parse().unwrap());
    let (mut tried, mut few) = (0, 0);
    for seed in 1..60 {
        let Some((mut bench, shown)) = past_snapshot(seed, older) else {
            continue;
        };
        let disk = bench.running.disks[0].clone();
        let little = 2 * disk.log.segment_size;
        for _ in 0..4 {
            for _ in 0..400 {
                bench.changes();
                if disk.log.lock().ring.unused_bytes() <= little {
                    break;
                }
            }
            let (answer, answered) = mpsc::channel();
            let task = KeeperTask::Snapshot(newer, None);
            let mut state = disk.log.lock();
            few += u64::from(state.ring.unused_bytes() <= little);
            state.keeper.orders.push(KeeperOrder { task, answer });
            drop(state);
            bench.running.keeper.step(true).unwrap();
            if answered.try_recv().is_ok_and(|made| made.is_ok()) {
                tried += 1;
                let gone = |control: &mut _| Snapshot::remove(newer, control);
                bench.running.keeper.change_history(gone).unwrap();
            }
            disk.log.lock().keeper.orders.clear();
        }
        assert_eq!(values_at(&mut bench, older), shown, "seed {seed}");
    }
    assert!(tried > 50 && few > 10, "{tried}, {few} with little room");
}

/// A snapshot takes a sync of the log and a write of the control file, also in a log with little
/// room: it copies nothing.
#[test]
fn a_snapshot_copies_nothing() {
    let mut few = 0;
    for seed in 1..30 {
        for kept in KEPT {
            let Some(mut bench) = roomy(seed, kept) else {
                continue;
            };
            let log = bench.running.disks[0].log.clone();
            for number in 0..200 {
                bench.changes();
                let little = log.lock().ring.unused_bytes() <= 2 * log.segment_size;
                if !little {
                    continue;
                }
                few += 1;
                let written = || log.counters.base_writes.load(Ordering::Relaxed);
                let before = written();
                let name = format!("at-{number}").parse().unwrap();
                let made = bench.running.keeper.snapshot(name, None);
                assert!(made.is_ok() && written() == before, "seed {seed}, {kept:?}");
                break;
            }
        }
    }
    assert!(few > 10, "{few}");
}
