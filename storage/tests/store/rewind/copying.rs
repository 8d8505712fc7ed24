//! What is copied to the base images of a log with restores.

use std::time::Duration;

use walvisor_storage::{Retention, StoreOptions};

use super::bench::Bench;

/// The base images go past a restore as a whole, however the log goes round, and never stop where
/// they would have what it undid.
#[test]
fn folds_pass_a_restore_as_a_whole() {
    for (retain, segments) in [(Retention::Bytes(256 << 10), 12), (Retention::All, 8)] {
        let mut bench = Bench::with(StoreOptions {
            segment_size: 64 << 10,
            max_segments: segments,
            retain: Some(retain),
            ..StoreOptions::default()
        });
        let mut passed = 0;
        let mut points = Vec::new();
        // How far a log that is closed has been folded depends on its threads.
        for round in 0.. {
            if round >= 12 && passed > 2 {
                break;
            }
            assert!(round < 200, "{passed} restores were passed");
            bench.work(50);
            let horizon = bench.horizon();
            let split = |&&(to, at): &&(u64, u64)| to < horizon && horizon < at;
            assert_eq!(points.iter().find(split), None, "{horizon}");
            passed += points.iter().filter(|(_, at)| *at <= horizon).count();
            points.retain(|(_, at)| *at > horizon);
            if bench.newest - horizon < 20 {
                continue;
            }
            let back = 1 + bench.random.below(60);
            let to = bench.newest.saturating_sub(back).max(horizon);
            let done = bench.back(round % 2, to);
            points.extend(done.lsn.map(|lsn| (to, lsn)));
            bench.check_some(17);
        }
    }
}

/// A checkpoint of everything ends the history, with its restores, and the slot is of the older
/// version again.
#[test]
fn a_checkpoint_drops_the_restores() {
    let version = |bench: &Bench| {
        let control = std::fs::read(bench.log().join("control")).unwrap();
        [control[8], control[65536 + 8]]
    };
    let mut bench = Bench::new(Retention::All);
    bench.work(30);
    assert_eq!(version(&bench), [2, 2]);
    bench.back(0, 10);
    // Both slots know it.
    assert_eq!(version(&bench), [3, 3]);
    for count in [0, 10] {
        let store = bench.open();
        bench.change(&store, count);
        store.disks()[0].checkpoint().unwrap();
        store.close().unwrap();
        assert!(version(&bench).contains(&2));
        assert_eq!(bench.horizon(), bench.newest);
        bench.check();
        for disk in 0..2 {
            let image = std::fs::read(bench.disk(disk)).unwrap();
            assert!(image == bench.states[&bench.newest][disk]);
        }
        bench.work(10);
        bench.check();
        bench.back(1, bench.newest - 5);
    }
}

/// A log that keeps nothing on purpose: after a kill the disk is restored, and the next opening
/// copies that.
#[test]
fn a_log_without_history_is_restored_after_a_kill() {
    let mut bench = Bench::new(Retention::Nothing);
    bench.work_killed(40);
    let done = bench.back(0, 12);
    bench.back(0, done.from_lsn);
    bench.back(0, 12);
    assert!(bench.exported(0) == bench.states[&12][0]);
    bench.work(0);
    assert_eq!(bench.horizon(), bench.newest);
    bench.check();
    // With room for no more than a part of it to be copied.
    bench.options.close_time = Some(Duration::ZERO);
    bench.work_killed(30);
    bench.back(1, bench.horizon());
    bench.work_killed(3);
    // A copy may have begun, so only the newest state is certain to be there.
    for disk in 0..2 {
        assert!(bench.exported(disk) == bench.states[&bench.newest][disk]);
    }
    bench.work(3);
    bench.work(0);
    for disk in 0..2 {
        assert!(bench.exported(disk) == bench.states[&bench.newest][disk]);
    }
}
