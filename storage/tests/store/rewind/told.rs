//! What changes, dumps and clones tell of a restore.

use walvisor_storage::{
    Allocation, ChangedRange, Point, Retention, StoreOptions, clone_disk, disk_changes,
    dump_records,
};

use super::bench::{Bench, SECTORS};

/// What a restore undid has changed, too, and nothing else has.
#[test]
fn changes_over_a_restore_are_exact() {
    let mut bench = Bench::new(Retention::All);
    bench.work(30);
    let done = bench.back(0, 12);
    bench.work(10);
    let changes = |from, to| {
        let to = Some(Point::Lsn(to));
        disk_changes(&bench.disk(0), &bench.log(), Point::Lsn(from), to, None).unwrap()
    };
    let points: Vec<u64> = bench.states.keys().copied().step_by(3).collect();
    for &from in &points {
        for &to in points.iter().filter(|to| **to >= from) {
            let (then, now) = (&bench.states[&from][0], &bench.states[&to][0]);
            let mut changed = vec![false; SECTORS as usize];
            for ChangedRange {
                offset,
                len,
                now: what,
            } in changes(from, to).ranges
            {
                let range = offset as usize..(offset + len) as usize;
                changed[range.start / 512..range.end / 512].fill(true);
                let zero = now[range].iter().all(|&byte| byte == 0);
                assert!(what == Allocation::Data || zero, "{from} to {to}: {offset}");
            }
            for (sector, changed) in changed.into_iter().enumerate() {
                let range = sector * 512..(sector + 1) * 512;
                let differs = then[range.clone()] != now[range];
                assert!(changed || !differs, "{from} to {to}: sector {sector}");
            }
        }
    }
    assert!(changes(12, done.lsn.unwrap()).ranges.is_empty());
    assert!(changes(done.from_lsn, done.from_lsn).ranges.is_empty());
}

/// Records that were undone are told as such.
#[test]
fn a_dump_tells_what_was_undone() {
    let mut bench = Bench::new(Retention::All);
    bench.work(30);
    bench.back(0, 12);
    let mut undone = Vec::new();
    dump_records(&bench.log(), &mut |record| {
        assert!(!record.in_base);
        let wanted = record.disk.ends_with("a") && record.lsn > 12;
        assert_eq!(record.undone, wanted, "{}", record.lsn);
        undone.extend(record.undone.then_some(record.lsn));
    })
    .unwrap();
    assert!(!undone.is_empty());
}

#[test]
fn a_clone_is_of_the_restored_disk() {
    let mut bench = Bench::new(Retention::All);
    bench.work(30);
    bench.back(0, 12);
    for (at, lsn) in [(None, 31), (Some(Point::Lsn(25)), 25)] {
        let [new, log] = ["clone", "clone-log"].map(|name| bench.dir.path().join(name));
        let options = StoreOptions::default();
        let progress = &mut |_, _| {};
        clone_disk(
            &bench.disk(0),
            &bench.log(),
            at,
            &new,
            &log,
            &options,
            progress,
        )
        .unwrap();
        assert!(std::fs::read(&new).unwrap() == bench.states[&lsn][0]);
        std::fs::remove_file(new).unwrap();
        std::fs::remove_dir_all(log).unwrap();
    }
}
