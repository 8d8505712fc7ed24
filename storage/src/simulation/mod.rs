//! Crash tests on a simulated medium, judged by an oracle that knows only what the disk promises.
//!
//! The small ones are all tried ([`exhaustive`]), threads have tests of their own (`interleavings`). Otherwise a
//! *history* is a run of random requests on a few ports of a few disks of one log, cut by power losses: in the
//! middle of requests, of checkpoints, of recoveries. One thread does everything in an order that one seed decides,
//! so one seed reproduces one run.
//!
//! The oracle keeps every modification in LSN order, and a *floor*: how much of that order must survive. After a
//! crash the disks together have to be exactly the state after some prefix of the order that is not below the floor.

mod clients;
mod crash_states;
mod engine;
mod exhaustive;
mod fixture;
mod history;
#[cfg(feature = "shuttle")]
mod interleavings;
mod medium;
mod oracle;
#[cfg(not(feature = "shuttle"))]
mod space;

use std::sync::atomic::{AtomicU64, Ordering};

use history::History;

/// Runs the histories of `seeds` on all cores; panics with the seed of the first that broke a promise.
fn run(first: u64, count: u64) {
    let next = AtomicU64::new(first);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let totals: Vec<history::Totals> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|_| {
                scope.spawn(|| {
                    let mut totals = history::Totals::default();
                    loop {
                        let seed = next.fetch_add(1, Ordering::Relaxed);
                        if seed >= first + count {
                            return totals;
                        }
                        let ran = std::panic::catch_unwind(|| History::new(seed).run());
                        match ran {
                            Ok(Ok(run)) => totals.add(&run),
                            Ok(Err(broken)) => {
                                panic!("{broken}\nreplay: WALVISOR_SEED={seed} cargo test -p walvisor-storage histories")
                            }
                            Err(_) => panic!(
                                "the store panicked\nreplay: WALVISOR_SEED={seed} cargo test -p walvisor-storage histories"
                            ),
                        }
                    }
                })
            })
            .collect();
        workers
            .into_iter()
            .map(|worker| {
                worker
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
            .collect()
    });
    let mut total = history::Totals::default();
    totals.iter().for_each(|part| total.add(part));
    println!("{count} histories from seed {first}: {total:?}");
    // A run that crashes nowhere, or never checkpoints, would prove little.
    if count >= 1000 {
        assert!(
            total.crashes > count / 2 && total.recovery_crashes > count / 2,
            "too few crashes"
        );
        assert!(
            total.checkpoints > count && total.flushes > count,
            "too little work"
        );
        assert!(
            total.lost_records > 0 && total.poisoned > 0 && total.refused > 0,
            "nothing was ever lost"
        );
    }
}

/// `WALVISOR_SEED=N` replays one; `WALVISOR_HISTORIES=N` runs more or fewer.
#[test]
fn random_histories_keep_the_promises() {
    let number = |name| {
        std::env::var(name)
            .ok()
            .map(|text| text.parse::<u64>().expect("a number"))
    };
    match number("WALVISOR_SEED") {
        Some(seed) => run(seed, 1),
        None => run(1, number("WALVISOR_HISTORIES").unwrap_or(100_000)),
    }
}

/// Promise 4 on bytes that rot, vanish or land in the wrong place; nothing panics, nothing is read past its end.
#[test]
fn damage_is_reported_or_harmless() {
    let reported = (1..=5000u64)
        .filter(|&seed| {
            let outcome = History::new(seed).run_damaged();
            outcome.unwrap_or_else(|broken| panic!("seed {seed}: {broken}"))
        })
        .count();
    println!("5000 damaged logs: {reported} reported, the others harmless");
    assert!(
        (300..4500).contains(&reported),
        "{reported} of 5000 reported: too few damaged, or all refused"
    );
}

/// Each planted fault breaks a promise that the oracle sees, within a bounded number of histories.
#[test]
fn every_planted_fault_is_noticed() {
    use crate::mutant::{Mutant, PLANTED};
    let all = [
        Mutant::AckBeforeSync,
        Mutant::AckOwnWrite,
        Mutant::SkipBaseSync,
        Mutant::BaseSyncTooEarly,
        Mutant::CopyBeforeDurable,
        Mutant::RecycleEarly,
        Mutant::ReuseSalt,
        Mutant::LsnRestart,
        Mutant::ChecksumBeforeCopy,
        Mutant::DropLastDescriptor,
        Mutant::IndexSkipsDiscard,
        Mutant::SyncLastSegmentOnly,
        Mutant::SyncOwnWrite,
        Mutant::SyncCoversWriting,
        Mutant::RecoveryStopsEarly,
        Mutant::RecoveryAcceptsStale,
        Mutant::RecoverySkipsChecksum,
        Mutant::RecoverySkipsSync,
        Mutant::FailedSyncRetried,
        Mutant::WaiterLostOnError,
        Mutant::StuckWaitersForgotten,
        Mutant::StaleReadAfterError,
    ];
    let mut survivors = Vec::new();
    for mutant in all {
        PLANTED.set(Some(mutant));
        let killer = (1..20_000).find_map(|seed| {
            let ran = std::panic::catch_unwind(|| History::new(seed).run());
            match ran {
                Ok(Ok(_)) => None,
                Ok(Err(broken)) => Some((seed, broken)),
                Err(_) => Some((seed, "panic".into())),
            }
        });
        PLANTED.set(None);
        match killer {
            Some((seed, broken)) => {
                let short: String = broken.chars().take(100).collect();
                println!("{mutant:?}: killed by seed {seed}: {short}");
            }
            None => survivors.push(mutant),
        }
    }
    assert!(survivors.is_empty(), "survived: {survivors:?}");
}
