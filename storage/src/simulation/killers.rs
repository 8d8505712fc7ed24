//! Which seeds notice each planted fault, so that nobody has to search for them.
//!
//! A change of the store may change what seeds do. If a fault survives all of its seeds then, or
//! has none yet, its test fails, and with `WALVISOR_SEARCH_MUTANTS=1`, or a fault's name, searches: it
//! prints the rows to put here, and fails only if no seed notices a fault. `WALVISOR_SEED=N` searches from N.

use std::fmt::Write;
use std::ops::Range;
use std::panic::AssertUnwindSafe;

use super::oracle::Violation;
use super::{TARGET, Total, on_all_cores};
use crate::mutant::{Mutant, PLANTED};
use crate::sync::stepped::SteppedClock;

/// Planted faults, and seeds of which one test's runs notice each.
pub(super) struct Killers {
    test: &'static str,
    /// Those that a search tries.
    seeds: Range<u64>,
    /// How many seeds a search looks for.
    wanted: usize,
    rows: &'static [(Mutant, &'static [u64])],
}

/// Of random histories.
pub(super) const HISTORIES: Killers = Killers {
    test: "every_planted_fault_is_noticed",
    seeds: 1..20000,
    wanted: 3,
    rows: &[
        (Mutant::AckBeforeSync, &[7, 8, 11]),
        (Mutant::SyncLost, &[1, 3, 5]),
        (Mutant::AnsweredUnwritten, &[5, 14, 63]),
        (Mutant::SkipBaseSync, &[1, 2, 3]),
        (Mutant::BaseSyncTooEarly, &[5, 6, 7]),
        (Mutant::CopyBeforeDurable, &[1, 4, 10]),
        (Mutant::StripeUnread, &[31, 45, 77]),
        (Mutant::RecycleEarly, &[5850, 6651, 6745]),
        (Mutant::ReuseSalt, &[1, 2, 3]),
        (Mutant::LsnRestart, &[2, 4, 13]),
        (Mutant::ChecksumBeforeCopy, &[1, 2, 3]),
        (Mutant::DropLastDescriptor, &[1, 2, 3]),
        (Mutant::IndexSkipsDiscard, &[2, 7, 9]),
        (Mutant::SyncLastSegmentOnly, &[3, 28, 41]),
        (Mutant::SyncOwnWrite, &[7, 25, 28]),
        (Mutant::SyncTooEarly, &[8, 15, 28]),
        (Mutant::MarkAnsweredEarly, &[5, 14, 31]),
        (Mutant::RecoveryStopsEarly, &[1, 3, 5]),
        (Mutant::RecoveryAcceptsStale, &[2, 5, 6]),
        (Mutant::RecoverySkipsChecksum, &[4, 15, 31]),
        (Mutant::SummaryTrustedUnsynced, &[3166, 4323, 5828]),
        (Mutant::SummaryTrustedStale, &[35, 146, 218]),
        (Mutant::SummaryStopsEarly, &[5, 15, 29]),
        (Mutant::PointReadsNewer, &[1, 2, 3]),
        (Mutant::FoldPassesHold, &[1, 5, 7]),
        (Mutant::SnapshotUnsaved, &[1, 5, 8]),
        (Mutant::SavedAgain, &[1, 35, 46]),
        (Mutant::SavedUnsynced, &[1, 5, 9]),
        (Mutant::FoldSplitsRewind, &[157, 230, 520]),
        (Mutant::RewindForgotten, &[2, 6, 7]),
        (Mutant::FoldSkipsZeroes, &[1, 5, 8]),
        (Mutant::FoldForgetsNewer, &[1, 5, 8]),
        (Mutant::FoldForgetsSegment, &[210, 282, 756]),
        (Mutant::SummaryUnreserved, &[3, 7, 8]),
        (Mutant::RecoverySkipsSync, &[29, 47, 52]),
        (Mutant::RecoveryTrustsCache, &[1334, 2139, 2310]),
        (Mutant::RecoveryTrustsControl, &[179, 813, 2618]),
        (Mutant::SegmentsNotLocked, &[1148, 1894, 11031]),
        (Mutant::SegmentNamedUnsynced, &[1, 3, 4]),
        (Mutant::SegmentNameUnsynced, &[3, 7, 11]),
        (Mutant::ControlInPlace, &[19, 21, 31]),
        (Mutant::FailedSyncRetried, &[3, 4, 21]),
        (Mutant::WriteBackTakesError, &[5, 13, 15]),
        (Mutant::WaiterLostOnError, &[4, 9, 24]),
        (Mutant::StuckWaitersForgotten, &[8, 14, 78]),
        (Mutant::ReadSkipsChecksum, &[57, 86, 153]),
        (Mutant::CutTakenForWhole, &[17, 29, 122]),
        (Mutant::CutMarkedClosed, &[7, 11, 12]),
        (Mutant::CutUndrained, &[7, 8, 14]),
        (Mutant::LookUnheld, &[7, 8, 28]),
        (Mutant::ExportUnsaved, &[1753, 2186, 2806]),
        (Mutant::DiscardKeepsRecord, &[13, 50, 62]),
        (Mutant::ShrinkDropsLive, &[7092, 7428, 8596]),
        (Mutant::LeaveUncopied, &[8, 18, 38]),
        (Mutant::RemoveUncopied, &[377, 399, 767]),
        (Mutant::RewindUnwritten, &[6, 7, 25]),
        (Mutant::DeletedForOlder, &[135, 242, 248]),
        (Mutant::BatchKept, &[38, 68, 71]),
    ],
};

/// Of lives of disks.
pub(super) const LIVES: Killers = Killers {
    test: "every_planted_fault_in_the_life_of_a_disk_is_noticed",
    seeds: 1..20000,
    wanted: 3,
    rows: &[
        (Mutant::OpenTrustsNames, &[337, 903, 1236]),
        (Mutant::ControlNamedUnwritten, &[109, 111, 137]),
        (Mutant::LogNamesUnsynced, &[1, 2, 5]),
        (Mutant::ImageNamedUnsynced, &[3, 5, 7]),
        (Mutant::ImageNameUnsynced, &[6, 8, 9]),
        (Mutant::SegmentNamedUnsynced, &[1, 3, 4]),
        (Mutant::MarkUnsynced, &[1, 3, 6]),
        (Mutant::ClosedEarly, &[22, 78, 83]),
        (Mutant::CutTakenForWhole, &[22, 83, 86]),
        (Mutant::CutMarkedClosed, &[22, 78, 83]),
        (Mutant::ResizeUnannounced, &[47, 57, 85]),
        (Mutant::LengthUnsynced, &[3, 5, 7]),
        (Mutant::SkipBaseSync, &[1, 9, 19]),
        (Mutant::AttachTrustsCache, &[634, 990, 1268]),
    ],
};

/// Of the numbers of [explorations](super::exhaustive), which have no seeds.
pub(super) const SMALL_HISTORIES: Killers = Killers {
    test: "small_histories_notice_planted_faults",
    seeds: 0..24,
    wanted: 1,
    rows: &[
        (Mutant::AckBeforeSync, &[0]),
        (Mutant::AnsweredUnwritten, &[4]),
        (Mutant::SkipBaseSync, &[0]),
        (Mutant::CopyBeforeDurable, &[0]),
        (Mutant::ChecksumBeforeCopy, &[0]),
        (Mutant::DropLastDescriptor, &[12]),
        (Mutant::IndexSkipsDiscard, &[16]),
        (Mutant::RecoveryStopsEarly, &[0]),
        (Mutant::RecoverySkipsChecksum, &[0]),
        (Mutant::RecoverySkipsSync, &[0]),
    ],
};

/// Seeds for images that fail while the log still takes writes.
pub(super) const SPILLS: Killers = Killers {
    test: "planted_faults_of_spill_files_are_noticed",
    seeds: 1..5000,
    wanted: 3,
    rows: &[
        (Mutant::SpillUncommitted, &[2, 3, 7]),
        (Mutant::SpillUnsure, &[33, 126, 300]),
        (Mutant::CopyBackUnsynced, &[2, 3, 7]),
    ],
};

/// Of changes since a snapshot.
pub(super) const CHANGES: Killers = Killers {
    test: "a_discard_missing_from_the_changes_is_noticed",
    seeds: 1..100,
    wanted: 3,
    rows: &[(Mutant::ChangesMissDiscard, &[1, 4, 44])],
};

/// Of plans and schedules of threads.
pub(super) const INTERLEAVINGS: Killers = Killers {
    test: "every_planted_fault_of_the_protocol_is_noticed_in_interleavings",
    seeds: 1..5000,
    wanted: 3,
    rows: &[
        (Mutant::AckBeforeSync, &[2, 45, 49]),
        (Mutant::SyncLost, &[53, 64, 96]),
        (Mutant::AnsweredUnwritten, &[21, 25, 28]),
        (Mutant::FailedSyncRetried, &[64, 73, 86]),
        (Mutant::WriteBackTakesError, &[251, 257, 620]),
        (Mutant::WaiterLostOnError, &[12, 16, 53]),
        (Mutant::BatchKept, &[15, 87, 94]),
        (Mutant::LeaderLeavesSilently, &[222, 267, 2501]),
        (Mutant::SignalClearedLate, &[5, 20, 31]),
        (Mutant::SegmentFreedSilently, &[59, 180, 264]),
    ],
};

/// Of schedules of threads that look at a disk in use.
pub(super) const INTERLEAVED_LOOKS: Killers = Killers {
    test: "planted_faults_of_looks_are_noticed_in_interleavings",
    seeds: 1..2000,
    wanted: 3,
    rows: &[
        (Mutant::LookUnheld, &[1, 6, 7]),
        (Mutant::FoldPassesHold, &[1, 6, 7]),
        (Mutant::PointReadsNewer, &[1, 2, 3]),
    ],
};

/// The faults that take no seed, each with the file whose test plants it.
const WITHOUT_SEEDS: [(Mutant, &str); 6] = [
    (Mutant::CopyBackTrustsCache, include_str!("spill.rs")),
    (Mutant::DurableLsnIgnored, include_str!("last_batch.rs")),
    (Mutant::ProofInOneSlot, include_str!("last_batch.rs")),
    (Mutant::RoomUnshared, include_str!("flood.rs")),
    (Mutant::WrittenForgotten, include_str!("written.rs")),
    (
        Mutant::ControlChecksumIgnored,
        include_str!("../format/control.rs"),
    ),
];

/// What was noticed of one fault: its number, and the seeds with the promises that they broke.
type Noticed = (usize, Vec<(u64, Violation)>);

impl Total for Vec<Noticed> {
    fn add(&mut self, other: &Self) {
        self.extend_from_slice(other);
    }
}

impl Killers {
    /// Asserts that a run of some seed breaks a promise with each fault. A panic breaks none.
    pub(super) fn assert_noticed<T>(&self, run: impl Fn(u64) -> Result<T, Violation> + Sync) {
        self.assert_all(|seed| {
            let ran = std::panic::catch_unwind(AssertUnwindSafe(|| run(seed)));
            ran.ok()?.err()
        });
    }

    /// The same with what is `broken` by the run of a seed.
    pub(super) fn assert_all(&self, broken: impl Fn(u64) -> Option<Violation> + Sync) {
        let search = std::env::var("WALVISOR_SEARCH_MUTANTS").ok();
        let searches = search.is_some();
        // Other than 1: the name of the only one.
        let only = search.filter(|search| search != "1");
        let is_meant = |mutant: Mutant| {
            let mut only = only.iter();
            only.all(|only| format!("{mutant:?}") == *only)
        };
        let first = std::env::var("WALVISOR_SEED").ok();
        let first = first.map(|seed| seed.parse().expect("WALVISOR_SEED is a number"));
        let first = first.unwrap_or(self.seeds.start);
        let seeds = first..first + self.seeds.end - self.seeds.start;
        let numbers = 0..self.rows.len();
        let numbers: Vec<_> = numbers.filter(|at| is_meant(self.rows[*at].0)).collect();
        let mut noticed = on_all_cores(0..numbers.len() as u64, |at| {
            let number = numbers[at as usize];
            let (mutant, known) = self.rows[number];
            let breaks = |seed| {
                let _clock = SteppedClock::start();
                PLANTED.set(Some(mutant));
                let broken = broken(seed);
                PLANTED.set(None);
                Some((seed, broken?))
            };
            let killers = if searches {
                seeds.clone().filter_map(breaks).take(self.wanted).collect()
            } else {
                known.iter().copied().find_map(breaks).into_iter().collect()
            };
            vec![(number, killers)]
        });
        noticed.sort_by_key(|(number, _)| *number);
        let (mut survivors, mut rows) = (Vec::new(), String::new());
        for (number, killers) in noticed {
            let (mutant, _) = self.rows[number];
            let Some((seed, broken)) = killers.first() else {
                survivors.push(mutant);
                continue;
            };
            let short: String = broken.replace('\n', " ").chars().take(100).collect();
            println!("{mutant:?}: seed {seed}: {short}");
            let seeds: Vec<_> = killers.iter().map(|(seed, _)| *seed).collect();
            writeln!(rows, "        (Mutant::{mutant:?}, &{seeds:?}),").expect("room");
        }
        if searches {
            println!("{}: the rows for {}:\n{rows}", self.test, file!());
            assert!(survivors.is_empty(), "no seed notices {survivors:?}");
        }
        assert!(
            survivors.is_empty(),
            "{survivors:?} survived. Their seeds may do something else since the store was changed. \
             WALVISOR_SEARCH_MUTANTS=1 cargo test {TARGET} {} -- --nocapture searches for others, and \
             prints the rows for {}",
            self.test,
            file!()
        );
    }
}

/// No fault is forgotten.
#[test]
fn some_test_notices_each_planted_fault() {
    let tables = [
        HISTORIES,
        LIVES,
        SMALL_HISTORIES,
        SPILLS,
        CHANGES,
        INTERLEAVINGS,
        INTERLEAVED_LOOKS,
    ];
    let rows = tables.iter().flat_map(|table| table.rows);
    let mut noticed: Vec<Mutant> = rows.map(|(mutant, _)| *mutant).collect();
    for (mutant, file) in WITHOUT_SEEDS {
        let plants = format!("Some(Mutant::{mutant:?})");
        assert!(file.contains(&plants), "{mutant:?}");
        noticed.push(mutant);
    }
    let forgotten = Mutant::ALL.iter().filter(|fault| !noticed.contains(fault));
    let forgotten: Vec<_> = forgotten.collect();
    println!("{} planted faults", Mutant::ALL.len());
    assert!(forgotten.is_empty(), "{forgotten:?}");
}
