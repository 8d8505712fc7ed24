//! Shortage of room: a base image or a log without space, and a slow base image.

use std::path::Path;
use std::time::Duration;

use super::fixture::{Fixture, RunningStore, Shape, carry_out as end, filled};
use super::medium::{LOG, World};
use crate::{
    Backend, BackendQueue, CommitWait, Completion, Condition, Failure, Operation, Port, Retention,
    StallCause, Store,
};

const SECTORS: u64 = 504;
const SEGMENTS: u32 = 4;
/// Sectors of a write. With the header of its batch it takes 16 KiB: three fill a segment, with its
/// header and summary.
const WRITE: u64 = 24;
const WRITES_OF_A_SEGMENT: u32 = 3;

fn open() -> (Fixture, RunningStore) {
    open_ring(SEGMENTS)
}

fn open_ring(max_segments: u32) -> (Fixture, RunningStore) {
    let shape = Shape::one_disk(SECTORS, max_segments);
    let fixture = Fixture::new(World::new(1), shape);
    // A log that was created for an existing image has no segment yet.
    let first = Path::new(LOG).join("segment-00000");
    fixture.medium.lock().names.unset(&first);
    let running = fixture.open(false, CommitWait::NONE);
    (fixture, running.expect("a new log"))
}

fn write(number: u32) -> Operation {
    let sector = u64::from(number) * WRITE % SECTORS;
    let data = filled(number, WRITE);
    Operation::Write { sector, data }
}

fn shortage(fixture: &Fixture, base: bool, log: bool) {
    let mut world = fixture.medium.lock();
    (world.base_full, world.log_full) = (base, log);
}

/// Writes and flushes, from `first` on, until a request fails; returns the number of the first
/// write that was not flushed.
fn fill(running: &mut RunningStore, port: &mut Port, first: u32) -> u32 {
    let mut number = first;
    while end(running, port, write(number)).is_ok() && end(running, port, Operation::Flush).is_ok()
    {
        number += 1;
        assert!(number < 1000, "a ring without end");
    }
    number
}

fn read(running: &mut RunningStore, port: &mut Port, number: u32) {
    let sector = u64::from(number) * WRITE % SECTORS;
    let sectors = WRITE as u32;
    let data = end(running, port, Operation::Read { sector, sectors }).unwrap();
    assert_eq!(data.unwrap()[..], filled(number, WRITE)[..]);
}

/// Without space in the base image the log takes writes while it has room. Then writes and flushes
/// fail, and reads go on. Once there is space, everything works again and nothing is lost.
#[test]
fn a_full_base_image_fills_the_log_then_requests_fail_then_all_recovers() {
    let (fixture, mut running) = open();
    shortage(&fixture, true, false);
    let mut port = running.disks[0].open_port().unwrap();
    let left = fill(&mut running, &mut port, 1);
    assert!(left > WRITES_OF_A_SEGMENT * (SEGMENTS - 1), "{left}");
    // Some more writes are taken that are not durable; then none.
    let mut newest = left;
    while end(&mut running, &mut port, write(newest + 1)).is_ok() {
        newest += 1;
        assert!(newest < left + 10, "memory without end");
    }
    for _ in 0..3 {
        for operation in [Operation::Flush, write(0)] {
            assert_eq!(
                end(&mut running, &mut port, operation).unwrap_err(),
                Failure::Io
            );
        }
        (newest - 8..newest).for_each(|number| read(&mut running, &mut port, number));
    }
    assert!(!running.poisoned());
    shortage(&fixture, false, false);
    running.keeper.step(false).unwrap();
    end(&mut running, &mut port, Operation::Flush).unwrap();
    for number in newest + 1..newest + 40 {
        end(&mut running, &mut port, write(number)).unwrap();
        end(&mut running, &mut port, Operation::Flush).unwrap();
    }
    let all = running.read().unwrap();
    drop(port);
    running.keeper.close().unwrap();
    assert_eq!(fixture.bases(), all);
}

/// A failed checkpoint does not fail requests that only wait for the next segment file.
#[test]
fn while_the_ring_grows_a_failed_checkpoint_refuses_nobody() {
    let (fixture, mut running) = open();
    let mut port = running.disks[0].open_port().unwrap();
    shortage(&fixture, true, false);
    end(&mut running, &mut port, write(1)).unwrap();
    end(&mut running, &mut port, Operation::Flush).unwrap();
    assert!(running.keeper.step(true).is_err());
    for number in 2..=WRITES_OF_A_SEGMENT * (SEGMENTS - 1) {
        end(&mut running, &mut port, write(number)).unwrap();
        port.submit(1, Operation::Flush);
        // The keeper is late, and another attempt fails.
        let mut done: Vec<Completion> = Vec::new();
        for turn in 0..400 {
            port.kick();
            running.step_writer();
            port.completions(&mut done);
            if turn == 200 && done.is_empty() {
                let _ = running.keeper.step(false);
            }
        }
        let ended = done.pop().map(|done| done.result.map(drop));
        assert_eq!(ended, Some(Ok(())), "{number}");
    }
}

/// Closing while the base image has no space fails, but everything acknowledged is in the log.
#[test]
fn closing_without_space_leaves_everything_in_the_log() {
    let (fixture, mut running) = open();
    let mut port = running.disks[0].open_port().unwrap();
    shortage(&fixture, true, false);
    for number in 1..3 {
        end(&mut running, &mut port, write(number)).unwrap();
    }
    assert!(running.keeper.step(true).is_err());
    // This write comes after the failed checkpoint, and is never flushed.
    end(&mut running, &mut port, write(3)).unwrap();
    drop(port);
    assert!(running.keeper.close().is_err());
    let all = running.read().unwrap();
    drop(running);
    fixture.lose_power();
    let running = fixture.open(false, CommitWait::NONE).unwrap();
    assert_eq!(running.read().unwrap(), all);
}

/// Without space for more segment files the ring keeps its size and is reused, history or not.
#[test]
fn a_log_that_can_not_grow_recycles_its_segments() {
    recycle(Retention::Nothing, 0, 2);
    recycle(Retention::All, 1, 2);
    recycle(Retention::All, 0, 3);
}

fn recycle(retain: Retention, snapshots: usize, most: u32) {
    let (fixture, mut running) = open();
    let mut port = running.disks[0].open_port().unwrap();
    let files = |running: &RunningStore| running.disks[0].log.lock().ring.counts().0;
    while files(&running) < most {
        running.keeper.step(false).unwrap();
        end(&mut running, &mut port, write(0)).unwrap();
        end(&mut running, &mut port, Operation::Flush).unwrap();
    }
    let retained = running.keeper.change_history(|control| retain.set(control));
    retained.unwrap();
    shortage(&fixture, false, true);
    for name in ["first", "second"].iter().take(snapshots) {
        end(&mut running, &mut port, write(0)).unwrap();
        let name = name.parse().unwrap();
        running.keeper.snapshot(name, None).unwrap();
    }
    for number in 1..40 {
        end(&mut running, &mut port, write(number)).unwrap();
        end(&mut running, &mut port, Operation::Flush).unwrap();
        let log = &running.disks[0].log;
        let kept = log.lock().pipeline.unapplied() > 0;
        assert!(kept || most == 2, "only the oldest segments are given up");
    }
    assert_eq!(files(&running), most);
    // The ring grows again when it has to and can.
    shortage(&fixture, true, false);
    fill(&mut running, &mut port, 1);
    assert_eq!(files(&running), SEGMENTS);
}

/// With segments of any size and writes of any length, a checkpoint makes the pending records
/// durable when all but the ring's last segment are full. Otherwise it could free no segment.
#[test]
fn what_may_be_pending_fits_the_last_segment() {
    for sectors in 1..=32 {
        let (_fixture, mut running) = open();
        let log = running.disks[0].log.clone();
        let mut port = running.disks[0].open_port().unwrap();
        let mut written = 0;
        // Whether the write is taken, by a store whose keeper does no checkpoint.
        let mut is_taken = |sectors, running: &RunningStore, port: &mut Port| {
            written += 1;
            let sector = u64::from(written) * WRITE % SECTORS;
            let data = filled(written, sectors);
            port.submit(1, Operation::Write { sector, data });
            let mut done: Vec<Completion> = Vec::new();
            for _ in 0..100 {
                port.kick();
                running.step_writer();
                port.completions(&mut done);
            }
            !done.is_empty()
        };
        let counts = || log.lock().ring.counts();
        while counts().0 < SEGMENTS || counts().1 > 1 {
            log.lock().keeper.checkpoint = false;
            running.keeper.step(false).unwrap();
            assert!(is_taken(WRITE, &running, &mut port));
        }
        while is_taken(sectors, &running, &mut port) {}
        let pending = log.lock().pipeline.queued_bytes();
        assert!(pending >= 32 << 10, "{sectors}: {pending}");
        let done = running.keeper.step(true);
        done.unwrap_or_else(|error| panic!("{sectors} sectors a write: {error}"));
    }
}

/// Without space for the first segment file nothing can be made durable, so FLUSH fails.
#[test]
fn a_log_without_any_segment_refuses_until_it_has_one() {
    let (fixture, mut running) = open();
    shortage(&fixture, false, true);
    let mut port = running.disks[0].open_port().unwrap();
    end(&mut running, &mut port, write(1)).unwrap();
    for _ in 0..3 {
        let refused = end(&mut running, &mut port, Operation::Flush);
        assert_eq!(refused.unwrap_err(), Failure::Io);
    }
    shortage(&fixture, false, false);
    let _ = running.keeper.step(false);
    end(&mut running, &mut port, Operation::Flush).unwrap();
    read(&mut running, &mut port, 1);
}

/// A thread that panics in the middle of a group makes the log fail, not wait forever.
#[test]
fn a_panic_in_a_group_fails_the_log() {
    let (_fixture, mut running) = open();
    running.keeper.step(false).unwrap();
    let mut ports = [(); 2].map(|()| running.disks[0].open_port().unwrap());
    let [first, second] = &mut ports;
    // The leader is going to write the record.
    first.submit(1, write(1));
    // A panicked thread has poisoned the disk's index, so the next change panics too.
    let disk = running.disks[0].state.clone();
    let panics = std::thread::spawn(move || {
        let _index = disk.index_mut();
        panic!("planted");
    });
    assert!(panics.join().is_err());
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        end(&mut running, first, Operation::Flush)
    }));
    assert!(ended.is_err());
    assert!(running.poisoned());
    for operation in [Operation::Flush, write(2)] {
        let refused = end(&mut running, second, operation);
        assert_eq!(refused.unwrap_err(), Failure::Io);
    }
    let told = running.disks[0].condition();
    let Condition::ReadOnly(trouble) = &told else {
        panic!("{told:?}");
    };
    assert!(trouble.error.contains("panicked") && trouble.refuses_writes);
}

/// A panic of the keeper fails the log too: without the keeper no segment would become free.
#[test]
fn a_panic_of_the_keeper_fails_the_log() {
    let (fixture, running) = open();
    let log = running.disks[0].log.clone();
    let store = Store::start(log, running.disks, running.keeper).unwrap();
    let mut port = store.disks()[0].open_port().unwrap();
    fixture.medium.lock().create_panics = true;
    let mut failed = false;
    for number in 1..WRITES_OF_A_SEGMENT * SEGMENTS {
        for operation in [write(number), Operation::Flush] {
            // The wait has no limit: if the log hangs, so does the test.
            failed |= port.end_for_test(operation).is_err();
        }
    }
    assert!(failed, "the ring has no room for all");
    drop(port);
    let error = store.close().unwrap_err();
    assert!(error.to_string().contains("panicked"), "{error}");
}

/// A slow checkpoint delays no request until the ring is full, and then only until it is done. A
/// ring below its limit grows in the meantime.
#[test]
fn writers_go_on_beside_a_slow_checkpoint_until_the_ring_is_full() {
    writers_go_on(SEGMENTS);
    writers_go_on(4 * SEGMENTS);
}

fn writers_go_on(segments: u32) {
    let (fixture, running) = open_ring(segments);
    fixture.medium.lock().base_blocked = true;
    let log = running.disks[0].log.clone();
    let store = Store::start(log, running.disks, running.keeper).unwrap();
    let mut port = store.disks()[0].open_port().unwrap();
    let mut run = |operation, patience: Duration| {
        port.submit(1, operation);
        let mut done: Vec<Completion> = Vec::new();
        let began = std::time::Instant::now();
        loop {
            port.kick();
            port.completions(&mut done);
            match done.pop() {
                Some(end) => return Some(end.result.map(drop)),
                None if began.elapsed() > patience => return None,
                None => std::thread::sleep(Duration::from_micros(100)),
            }
        }
    };
    let (long, short) = (Duration::from_secs(20), Duration::from_millis(50));
    let held_up = (1..=WRITES_OF_A_SEGMENT * (segments - 1)).find(|&number| {
        [write(number), Operation::Flush]
            .into_iter()
            .any(|operation| run(operation, long) != Some(Ok(())))
    });
    if let Some(number) = held_up {
        // Otherwise the store would never close.
        fixture.medium.lock().base_blocked = false;
        panic!("write {number} of a ring of {segments} segments waited for the checkpoint");
    }
    let began = std::time::Instant::now();
    while store.log_counters().base_writes == 0 {
        assert!(began.elapsed() < long, "half a ring is checkpointed");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(store.log_counters().checkpoints, 0);
    assert_eq!(run(write(0), long), Some(Ok(())), "it stays in memory");
    assert_eq!(run(Operation::Flush, short), None, "the ring is full");
    let condition = || store.disks()[0].condition();
    assert_eq!(condition(), Condition::Stalled(StallCause::LogFull));
    fixture.medium.lock().base_blocked = false;
    assert_eq!(run(Operation::Flush, long), Some(Ok(())));
    // The FLUSH has ended, and the checkpoint that made room for it goes on.
    let began = std::time::Instant::now();
    while condition() != Condition::Ok {
        assert!(began.elapsed() < long, "{:?}", condition());
        std::thread::sleep(Duration::from_millis(1));
    }
    drop(port);
    store.close().unwrap();
}

/// A copy goes on while the next segment is made, but not while writers need the segment.
#[test]
fn a_copy_yields_to_a_segment_that_writers_need() {
    let shape = Shape::one_disk(64, 16);
    let fixture = Fixture::new(World::new(1), shape);
    let running = fixture.open(false, CommitWait::NONE).unwrap();
    let log = running.disks[0].log.clone();
    while log.lock().ring.next_file().is_some() {
        log.preallocate_segment(false, || {}).unwrap();
    }
    let mut taken = Vec::new();
    let mut steps_beside = |count: usize| {
        let mut state = log.lock();
        taken.extend((0..count).map(|_| state.ring.take_free()));
        drop(state);
        let mut steps = 0;
        log.preallocate_segment(true, || steps += 1).unwrap();
        steps
    };
    assert_eq!(steps_beside(0), 0, "enough are ready");
    assert!(steps_beside(1) > 0);
    assert_eq!(steps_beside(2), 0, "none is ready");
}

/// With 4 MiB at a time, the slowest FLUSHes of a new log took three to four times as long.
#[test]
fn a_flush_waits_for_a_quarter_mib_of_a_new_segment_at_most() {
    let shape = Shape {
        segment_size: 1 << 20,
        ..Shape::one_disk(64, 16)
    };
    let fixture = Fixture::new(World::new(1), shape);
    let running = fixture.open(false, CommitWait::NONE).unwrap();
    let log = running.disks[0].log.clone();
    let mut steps = 0;
    while log.lock().ring.has_none_free() {
        log.preallocate_segment(false, || {}).unwrap();
    }
    log.preallocate_segment(false, || steps += 1).unwrap();
    assert_eq!(steps, 4);
}

/// Each obstacle of a write has its cause. The condition tells the causes that may last.
#[test]
fn each_write_that_does_not_go_on_is_told_and_counted_by_its_cause() {
    use crate::log::admission::Admission;
    use crate::sync::atomic::Ordering::Relaxed;
    let (_fixture, mut running) = open();
    let disk = running.disks[0].state.clone();
    let log = running.disks[0].log.clone();
    let mut port = running.disks[0].open_port().unwrap();
    let discard = |sector| Operation::Discard { sector, sectors: 1 };
    type Set = fn(&crate::log::state::Log, &crate::log::disk_state::DiskState, bool);
    let waits: [(StallCause, Set); 3] = [
        (StallCause::Restore, |_, disk, on| {
            disk.rewinding.store(on, Relaxed)
        }),
        (StallCause::Closing, |log, _, on| {
            log.lock().keeper.stop = on
        }),
        (StallCause::SpillFull, |log, disk, on| {
            log.lock().keeper.pauses = on;
            disk.spill_full.store(on, Relaxed);
        }),
    ];
    for (number, (cause, set)) in (1..).zip(waits) {
        set(&log, &disk, true);
        let told = running.disks[0].condition();
        let lasts = cause == StallCause::SpillFull;
        assert_eq!(told == Condition::Stalled(cause), lasts, "{told:?}");
        for token in 0..2 {
            port.submit(token, discard(number));
        }
        let counters = log.counters.snapshot();
        assert_eq!(counters.stalled.get(cause), 2, "{cause:?}");
        let change = crate::log::pipeline::Modification::rewind(0);
        let answer = log.admit(&mut log.lock(), &disk, &change);
        assert_eq!(answer, Admission::Wait(cause));
        set(&log, &disk, false);
        let mut done = Vec::new();
        port.completions(&mut done);
        assert_eq!(done.len(), 2, "{cause:?}");
        assert_eq!(running.disks[0].condition(), Condition::Ok);
    }
    let fails: [(StallCause, Set); 2] = [
        (StallCause::Closing, |_, disk, on| {
            disk.detached.store(on, Relaxed)
        }),
        (StallCause::SpillFull, |_, disk, on| {
            disk.spill_full.store(on, Relaxed)
        }),
    ];
    for (cause, set) in fails {
        set(&log, &disk, true);
        let result = end(&mut running, &mut port, discard(9));
        assert_eq!(result.map(drop), Err(Failure::Io));
        assert_eq!(log.counters.snapshot().refused.get(cause), 1, "{cause:?}");
        // What fails counts before what waits.
        disk.rewinding.store(true, Relaxed);
        let result = end(&mut running, &mut port, discard(9));
        assert_eq!(result.map(drop), Err(Failure::Io));
        disk.rewinding.store(false, Relaxed);
        set(&log, &disk, false);
    }
    end(&mut running, &mut port, discard(9)).unwrap();
    let counted = log.counters.snapshot();
    let sum = |counts: crate::StallCounts| -> u64 {
        StallCause::ALL.iter().map(|&cause| counts.get(cause)).sum()
    };
    assert_eq!((sum(counted.stalled), sum(counted.refused)), (6, 4));
}
