//! What has changed since a snapshot of a disk in use, beside copies in any order.

use super::bench::{Bench, SECTORS};
use super::killers;
use crate::{Retention, Tracked};

/// Whether each sector that has changed since a snapshot is reported as changed.
fn changes_are_told(seed: u64) -> bool {
    let kept = [
        Retention::Nothing,
        Retention::All,
        Retention::Bytes(64 << 10),
    ][seed as usize % 3];
    let mut bench = Bench::keeping(seed, kept);
    bench.changes();
    let keeper = &mut bench.running.keeper;
    keeper.snapshot("then".parse().unwrap(), None).unwrap();
    let (lsn, then) = (bench.running.appended(), bench.values.clone());
    for _ in 0..6 {
        bench.changes();
        if bench.below(2) == 0 {
            bench.checkpoint();
        }
        let disk = &bench.running.disks[0];
        let told = Tracked::changes(disk, lsn, 0, SECTORS, usize::MAX).unwrap();
        let told = told
            .iter()
            .flat_map(|change| std::iter::repeat_n(change.changed, change.sectors as usize));
        let told: Vec<bool> = told.collect();
        assert_eq!(told.len(), then.len(), "seed {seed}");
        let differs = then
            .iter()
            .zip(&bench.values)
            .map(|(then, now)| then != now);
        if differs.zip(told).any(|(differs, told)| differs && !told) {
            return false;
        }
    }
    true
}

#[test]
fn everything_that_has_changed_is_reported() {
    for seed in 1..200 {
        assert!(changes_are_told(seed), "seed {seed}");
    }
}

#[test]
fn a_discard_missing_from_the_changes_is_noticed() {
    killers::CHANGES
        .assert_all(|seed| (!changes_are_told(seed)).then(|| "a change is missing".to_owned()));
}
