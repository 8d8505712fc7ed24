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
//!
//! [`killers`] says which seeds notice each planted fault.

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
mod killers;
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

use std::fmt::Debug;
use std::panic::AssertUnwindSafe;
use std::sync::{LazyLock, Mutex};

use history::History;
#[cfg(not(feature = "shuttle"))]
use life::SimulatedRun;
use oracle::Violation;
use walvisor_testkit::Seeds;

use crate::sync::stepped::SteppedClock;

/// The arguments of `cargo test` that select these tests.
const TARGET: &str = if cfg!(feature = "shuttle") {
    "-p walvisor-storage --lib --features shuttle"
} else {
    "-p walvisor-storage --lib"
};

/// Prints what happens in a history, if the environment has `WALVISOR_TELL`, for whoever replays a
/// seed.
fn trace(what: impl FnOnce() -> String) {
    static TELLS: LazyLock<bool> = LazyLock::new(|| std::env::var_os("WALVISOR_TELL").is_some());
    if *TELLS {
        println!("{}", what());
    }
}

/// Counters of what happened in runs.
trait Total: Default + Send {
    fn add(&mut self, other: &Self);
}

/// How many there are.
impl Total for u64 {
    fn add(&mut self, other: &Self) {
        *self += other;
    }
}

/// Runs `one` for each of `numbers`, on all cores. A panic of one ends the whole test.
fn on_all_cores<T: Total>(
    numbers: impl Iterator<Item = u64> + Send,
    one: impl Fn(u64) -> T + Sync,
) -> T {
    let numbers = Mutex::new(numbers);
    let some = || {
        let mut total = T::default();
        loop {
            let next = numbers.lock().expect("no panic under this lock").next();
            match next {
                Some(number) => total.add(&one(number)),
                None => return total,
            }
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
/// Returns what happened with the fixed ones.
fn run_all<T: Total + Debug>(seeds: &Seeds, run: impl Fn(u64) -> Result<T, Violation> + Sync) -> T {
    println!("{seeds}");
    let one = |seed| {
        let _clock = SteppedClock::start();
        let run = AssertUnwindSafe(|| run(seed));
        let broken = match std::panic::catch_unwind(run) {
            Ok(Ok(run)) => return run,
            Ok(Err(broken)) => broken,
            Err(_) => "the store panicked".to_owned(),
        };
        panic!("{broken}\n{}", seeds.failed(seed, TARGET))
    };
    on_all_cores(seeds.known.iter().copied(), one);
    let fixed = on_all_cores(seeds.fixed.clone(), one);
    println!("the fixed ones: {fixed:?}");
    if !seeds.fresh.is_empty() {
        println!("the others: {:?}", on_all_cores(seeds.fresh.clone(), one));
    }
    fixed
}

/// `WALVISOR_SEED=N` replays one history; `WALVISOR_HISTORIES=N` runs more or fewer; with both, N
/// histories from that seed on.
#[test]
fn random_histories_keep_the_promises() {
    let name = "random_histories_keep_the_promises";
    let seeds = Seeds::of(name, "WALVISOR_HISTORIES", 1000, 1500);
    let total = run_all(&seeds, |seed| History::new(seed).run());
    let count = seeds.fixed.end - seeds.fixed.start;
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

/// The same with logs that always keep history, of which each state is looked at after each crash.
#[test]
fn random_histories_that_keep_history_keep_the_promises() {
    let name = "random_histories_that_keep_history_keep_the_promises";
    let seeds = Seeds::of(name, "WALVISOR_HISTORIES", 500, 500);
    let total = run_all(&seeds, |seed| History::keeping(seed).run());
    let count = seeds.fixed.end - seeds.fixed.start;
    if count >= 500 {
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

/// Promise 4 for bytes that rot, vanish or land in the wrong place. No panic, and no read past the
/// end, may happen.
#[test]
fn damage_is_reported_or_harmless() {
    let name = "damage_is_reported_or_harmless";
    let seeds = Seeds::of(name, "WALVISOR_HISTORIES", 500, 500);
    let reported = run_all(&seeds, |seed| {
        History::new(seed).run_damaged().map(u64::from)
    });
    let count = seeds.fixed.end - seeds.fixed.start;
    assert!(
        count < 500 || (count / 16..count * 9 / 10).contains(&reported),
        "{reported} of {count} reported: too few damaged, or all refused"
    );
}

/// Disks are created, imported, resized and closed; `WALVISOR_LIVES=N` runs more or fewer lives.
#[test]
#[cfg(not(feature = "shuttle"))]
fn disks_are_made_resized_and_closed_whole_or_not_at_all() {
    let name = "disks_are_made_resized_and_closed_whole_or_not_at_all";
    let seeds = Seeds::of(name, "WALVISOR_LIVES", 500, 500);
    let total = run_all(&seeds, |seed| SimulatedRun::new(seed).run());
    let count = seeds.fixed.end - seeds.fixed.start;
    if count >= 500 {
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

/// Each planted fault breaks a promise that the oracle sees.
#[test]
fn every_planted_fault_is_noticed() {
    killers::HISTORIES.assert_noticed(|seed| History::new(seed).run());
}

/// The same for the faults planted where disks are created, opened, resized and closed.
#[test]
#[cfg(not(feature = "shuttle"))]
fn every_planted_fault_in_the_life_of_a_disk_is_noticed() {
    killers::LIVES.assert_noticed(|seed| SimulatedRun::new(seed).run());
}
