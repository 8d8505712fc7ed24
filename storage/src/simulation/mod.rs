//! Crash tests on a simulated medium, judged by an oracle that knows only what the disk promises.
//!
//! Small histories are tried exhaustively ([`exhaustive`]), and threads have tests of their own
//! (`interleavings`). Apart from those, a *history* is a run of random requests on a few ports of a
//! few disks of one log, cut by power losses: in the middle of requests, of checkpoints, of
//! recoveries. One thread does everything in an order that one seed decides, so one seed reproduces
//! one run.
//!
//! The oracle keeps every modification in LSN order, and a *floor*: how much of that order must
//! survive. In half of the runs changes are completed only once they are written, and a second
//! floor is how much of them must survive a kill. After a crash the disks together must be exactly
//! the state after some prefix of the order that is not below the floor. Some disks are then
//! restored in place, and the states from before are looked at later, as long as the log has them.
//!
//! Half of the histories do more with a log: beside its requests (`live`), without one of its ports
//! (`absences`), and with commands between two openings (`offline`).
//! `WALVISOR_TELL=1` prints what they do.

mod absences;
#[cfg(not(feature = "shuttle"))]
mod atomic;
#[cfg(not(feature = "shuttle"))]
mod bench;
mod bytes;
#[cfg(not(feature = "shuttle"))]
mod changed;
mod clients;
#[cfg(not(feature = "shuttle"))]
mod closing;
mod crash_states;
mod damaged;
mod engine;
mod exhaustive;
mod files;
mod fixture;
#[cfg(not(feature = "shuttle"))]
mod flood;
mod history;
#[cfg(not(feature = "shuttle"))]
mod horizon;
#[cfg(feature = "shuttle")]
mod interleavings;
#[cfg(not(feature = "shuttle"))]
mod last_batch;
#[cfg(not(feature = "shuttle"))]
mod life;
mod live;
#[cfg(not(feature = "shuttle"))]
mod looks;
mod medium;
mod names;
mod offline;
mod oracle;
mod past;
mod point_exports;
#[cfg(not(feature = "shuttle"))]
mod rewinds;
#[cfg(not(feature = "shuttle"))]
mod sealed;
#[cfg(not(feature = "shuttle"))]
mod space;
#[cfg(not(feature = "shuttle"))]
mod spill;
#[cfg(not(feature = "shuttle"))]
mod written;

use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};

use history::History;
#[cfg(not(feature = "shuttle"))]
use life::SimulatedRun;
use oracle::Violation;

use crate::mutant::{Mutant, PLANTED};
use crate::sync::stepped::SteppedClock;

/// The seeds that the environment asks for: `WALVISOR_SEED` is the first (default 1), the variable
/// `count` is their number. With `WALVISOR_SEED` alone, one seed is replayed; without either there
/// are `usual` seeds.
fn seeds(count: &str, usual: u64) -> Range<u64> {
    let number = |name: &str| {
        let text = std::env::var(name).ok()?;
        let number = text.parse().ok();
        Some(number.unwrap_or_else(|| panic!("{name}={text}: give a whole number below 2^64")))
    };
    seeds_from(number("WALVISOR_SEED"), number(count), usual)
}

/// Prints what happens in a history, if the environment has `WALVISOR_TELL`, for whoever replays a
/// seed.
fn trace(what: impl FnOnce() -> String) {
    static TELLS: LazyLock<bool> = LazyLock::new(|| std::env::var_os("WALVISOR_TELL").is_some());
    if *TELLS {
        println!("{}", what());
    }
}

fn seeds_from(first: Option<u64>, count: Option<u64>, usual: u64) -> Range<u64> {
    let count = count.unwrap_or(if first.is_some() { 1 } else { usual });
    let first = first.unwrap_or(1);
    let end = first.checked_add(count);
    first..end.unwrap_or_else(|| panic!("{count} seeds from {first}: the last is above 2^64"))
}

/// Counters of what happened in runs.
trait Total: Default + Send {
    fn add(&mut self, other: &Self);
}

/// Runs `one` for each of `numbers`, on all cores. A panic of one ends the whole test.
fn on_all_cores<T: Total>(numbers: &Range<u64>, one: impl Fn(u64) -> T + Sync) -> T {
    let next = AtomicU64::new(numbers.start);
    let some = || {
        let mut total = T::default();
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            if number >= numbers.end {
                return total;
            }
            total.add(&one(number));
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut total = T::default();
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(some)).collect();
        for worker in workers {
            let part = worker.join();
            total.add(&part.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
    });
    total
}

/// Runs all of `seeds` on all cores; panics with the seed of the first run that broke a promise.
/// `name`: the test that replays it.
fn run_all<T: Total>(
    seeds: &Range<u64>,
    name: &str,
    run: impl Fn(u64) -> Result<T, Violation> + Sync,
) -> T {
    let replay = |seed| {
        format!(
            "replay: WALVISOR_SEED={seed} WALVISOR_HISTORIES=1 cargo test -p walvisor-storage \
             {name}"
        )
    };
    on_all_cores(seeds, |seed| {
        let _clock = SteppedClock::start();
        let run = AssertUnwindSafe(|| run(seed));
        match std::panic::catch_unwind(run) {
            Ok(Ok(run)) => run,
            Ok(Err(broken)) => panic!("{broken}\n{}", replay(seed)),
            Err(_) => panic!("the store panicked\n{}", replay(seed)),
        }
    })
}

/// Runs the histories of `seeds`.
fn run(seeds: Range<u64>) {
    let (first, count) = (seeds.start, seeds.end - seeds.start);
    let total = run_all(&seeds, "random_histories", |seed| History::new(seed).run());
    println!("{count} histories from seed {first}: {total:?}");
    // Runs without crashes, or without checkpoints, would prove little.
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
        assert!(
            total.kills > count / 2 && total.worked_on > count / 4 && total.kept > count / 8,
            "too few processes work on with what others left"
        );
        assert!(
            total.cut_closes > count / 10,
            "too few closes leave something in the log"
        );
        assert!(total.marks > count / 2, "too few marks survive");
        assert!(
            total.rewound > count / 10 && total.cut_rewinds > count / 50,
            "too few restores in place"
        );
        assert!(
            total.late_writes > count / 60
                && total.torn_slots > count / 100
                && total.failed_write_backs > count / 50,
            "too little is late, torn or not written back"
        );
        total.assert_lively(count);
    }
}

/// `WALVISOR_SEED=N` replays one history; `WALVISOR_HISTORIES=N` runs more or fewer; with both, N
/// histories from that seed on.
#[test]
fn random_histories_keep_the_promises() {
    run(seeds("WALVISOR_HISTORIES", 15_000));
}

/// The same with logs that always keep history, of which each state is looked at after each crash.
#[test]
fn random_histories_that_keep_history_keep_the_promises() {
    let seeds = seeds("WALVISOR_HISTORIES", 5_000);
    let total = run_all(&seeds, "random_histories_that_keep", |seed| {
        History::keeping(seed).run()
    });
    let count = seeds.end - seeds.start;
    println!(
        "{count} histories with history kept, from seed {}: {total:?}",
        seeds.start
    );
    if count >= 1000 {
        assert!(
            total.looked_back > 10 * count
                && total.pinned > count
                && total.saved > count / 10
                && total.checkpoints > count / 4,
            "too little looked at"
        );
        total.assert_keeping(count);
    }
}

#[test]
fn a_range_of_seeds_starts_anywhere() {
    assert_eq!(seeds_from(None, None, 500), 1..501);
    assert_eq!(seeds_from(Some(7), None, 500), 7..8);
    assert_eq!(seeds_from(None, Some(20), 500), 1..21);
    assert_eq!(seeds_from(Some(400_001), Some(20), 500), 400_001..400_021);
    let last = u64::MAX - 1;
    assert_eq!(seeds_from(Some(last), None, 500), last..u64::MAX);
}

/// Promise 4 for bytes that rot, vanish or land in the wrong place. No panic, and no read past the
/// end, may happen.
#[test]
fn damage_is_reported_or_harmless() {
    // The last one's first step requests another.
    let reported = (1..=5000u64)
        .chain([100_131])
        .filter(|&seed| {
            let _clock = SteppedClock::start();
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

/// The promise broken by a run with a planted fault. A panic is not a broken promise, unless it is
/// the promised reaction: `promised` is then a part of its message.
fn broken<T>(
    ran: std::thread::Result<Result<T, Violation>>,
    promised: Option<&str>,
) -> Option<Violation> {
    let panic = match ran {
        Ok(ended) => return ended.err(),
        Err(panic) => panic,
    };
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied())?;
    promised
        .is_some_and(|promised| text.contains(promised))
        .then(|| text.to_owned())
}

/// Disks are created, imported, resized and closed; `WALVISOR_LIVES=N` runs more or fewer lives.
#[test]
#[cfg(not(feature = "shuttle"))]
fn disks_are_made_resized_and_closed_whole_or_not_at_all() {
    let seeds = seeds("WALVISOR_LIVES", 10_000);
    let total = run_all(&seeds, "disks_are_made", |seed| {
        SimulatedRun::new(seed).run()
    });
    let count = seeds.end - seeds.start;
    println!("{count} lives from seed {}: {total:?}", seeds.start);
    if count >= 1000 {
        let tried = [
            total.made,
            total.imported,
            total.adopted,
            total.resized,
            total.grown,
            total.closed,
            total.cut_closes,
            total.log_sizes,
            total.moved,
            total.left,
            total.given_up,
            total.removed,
        ];
        let cut = [
            total.cuts,
            total.kills,
            total.cut_openings,
            total.absent,
            total.oldest,
        ];
        assert!(
            tried.iter().chain(&cut).all(|&times| times > count / 20),
            "too little tried"
        );
    }
}

/// The faults that no run of `seeds` notices.
fn survivors<T>(
    all: &[Mutant],
    seeds: Range<u64>,
    run: impl Fn(u64) -> Result<T, Violation>,
) -> Vec<Mutant> {
    let mut survivors = Vec::new();
    for &mutant in all {
        PLANTED.set(Some(mutant));
        let killer = seeds.clone().find_map(|seed| {
            let _clock = SteppedClock::start();
            let ran = std::panic::catch_unwind(AssertUnwindSafe(|| run(seed)));
            Some((seed, broken(ran, None)?))
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
    survivors
}

/// Each planted fault breaks a promise that the oracle sees, within a bounded number of histories.
#[test]
fn every_planted_fault_is_noticed() {
    let all = [
        Mutant::AckBeforeSync,
        Mutant::SyncLost,
        Mutant::AnsweredUnwritten,
        Mutant::SkipBaseSync,
        Mutant::BaseSyncTooEarly,
        Mutant::CopyBeforeDurable,
        Mutant::StripeUnread,
        Mutant::RecycleEarly,
        Mutant::ReuseSalt,
        Mutant::LsnRestart,
        Mutant::ChecksumBeforeCopy,
        Mutant::DropLastDescriptor,
        Mutant::IndexSkipsDiscard,
        Mutant::SyncLastSegmentOnly,
        Mutant::SyncOwnWrite,
        Mutant::SyncTooEarly,
        Mutant::MarkAnsweredEarly,
        Mutant::RecoveryStopsEarly,
        Mutant::RecoveryAcceptsStale,
        Mutant::RecoverySkipsChecksum,
        Mutant::SummaryTrustedUnsynced,
        Mutant::SummaryTrustedStale,
        Mutant::SummaryStopsEarly,
        Mutant::PointReadsNewer,
        Mutant::FoldPassesPin,
        Mutant::SnapshotUnsaved,
        Mutant::SavedAgain,
        Mutant::SavedUnsynced,
        Mutant::FoldSplitsRewind,
        Mutant::RewindForgotten,
        Mutant::FoldSkipsZeroes,
        Mutant::FoldForgetsNewer,
        Mutant::FoldForgetsSegment,
        Mutant::SummaryUnreserved,
        Mutant::RecoverySkipsSync,
        Mutant::RecoveryTrustsCache,
        Mutant::RecoveryTrustsControl,
        Mutant::SegmentsNotLocked,
        Mutant::SegmentNamedUnsynced,
        Mutant::SegmentNameUnsynced,
        Mutant::ControlInPlace,
        Mutant::FailedSyncRetried,
        Mutant::WriteBackTakesError,
        Mutant::WaiterLostOnError,
        Mutant::StuckWaitersForgotten,
        Mutant::ReadSkipsChecksum,
        Mutant::CutTakenForWhole,
        Mutant::CutMarkedClosed,
        Mutant::CutUndrained,
        Mutant::LookUnpinned,
        Mutant::ExportUnsaved,
        Mutant::DiscardKeepsRecord,
        Mutant::ShrinkDropsLive,
        Mutant::LeaveUncopied,
        Mutant::RemoveUncopied,
        Mutant::RewindUnwritten,
        Mutant::DeletedForOlder,
        Mutant::BatchKept,
    ];
    let survivors = survivors(&all, 1..20_000, |seed| History::new(seed).run());
    assert!(survivors.is_empty(), "survived: {survivors:?}");
}

/// The same for the faults planted where disks are created, opened, resized and closed.
#[test]
#[cfg(not(feature = "shuttle"))]
fn every_planted_fault_in_the_life_of_a_disk_is_noticed() {
    let all = [
        Mutant::OpenTrustsNames,
        Mutant::ControlNamedUnwritten,
        Mutant::LogNamesUnsynced,
        Mutant::ImageNamedUnsynced,
        Mutant::ImageNameUnsynced,
        Mutant::SegmentNamedUnsynced,
        Mutant::MarkUnsynced,
        Mutant::ClosedEarly,
        Mutant::CutTakenForWhole,
        Mutant::CutMarkedClosed,
        Mutant::ResizeUnannounced,
        Mutant::LengthUnsynced,
        Mutant::SkipBaseSync,
        Mutant::AttachTrustsCache,
    ];
    let survivors = survivors(&all, 1..20_000, |seed| SimulatedRun::new(seed).run());
    assert!(survivors.is_empty(), "survived: {survivors:?}");
}
