//! A port that waits until its records are written is notified even if the leader was in the way.

use std::time::Duration;

use super::fixture::{Fixture, RunningStore, Shape, filled};
use super::medium::World;
use crate::log::group_commit::{Group, GroupBuffers, Leader};
use crate::medium::file::Io;
use crate::mutant::{Mutant, PLANTED};
use crate::sync::atomic::Ordering;
use crate::{BackendQueue, CommitWait, Operation, Port};

fn write(port: &mut Port, value: u32) {
    let (sector, data) = (0, filled(value, 1));
    port.submit(u64::from(value), Operation::Write { sector, data });
}

/// An open log whose ring has all its segments.
fn open(wait: CommitWait) -> (Fixture, RunningStore) {
    let fixture = Fixture::new(World::new(1), Shape::one_disk(8, 4));
    let mut running = fixture.open(false, wait).unwrap();
    (0..4).for_each(|_| running.keeper.step(false).unwrap());
    (fixture, running)
}

/// Takes the batch that a port would write next, as if its thread were in the middle of writing it.
fn begin_batch(running: &RunningStore) -> Option<(Io, Group)> {
    let log = &running.disks[0].log;
    log.write_behind(&mut log.lock(), &mut GroupBuffers::default())
}

/// Ends a batch that was begun so.
fn end_batch(running: &RunningStore, (io, group): (Io, Group)) {
    let log = &running.disks[0].log;
    let ran = log.appender.append(io);
    log.end_group(
        group,
        ran.result,
        None,
        &mut GroupBuffers::default(),
        |_| (),
    );
}

/// Whether a port learns that its record is written. The record came while the leader wrote a batch
/// without a sync, for a port that has been closed since.
fn notifies_written() -> bool {
    let (_fixture, running) = open(CommitWait::NONE);
    let log = running.disks[0].log.clone();
    let [mut first, mut flushing, mut last] =
        [0, 1, 2].map(|_| running.disks[0].open_port().unwrap());
    // While the first batch is under way, the leader takes the records that the flushing port waits
    // for.
    write(&mut first, 1);
    assert!(!first.notify_written(11));
    let firsts = begin_batch(&running).expect("a batch");
    write(&mut flushing, 2);
    flushing.submit(12, Operation::Flush);
    let mut leader = Leader::new(log.clone(), None);
    let (io, group) = leader.begin().expect("a batch");
    assert_eq!(log.lock().pipeline.batched(), 2);
    drop(flushing);
    write(&mut last, 3);
    assert!(!last.notify_written(13));
    last.kick();
    end_batch(&running, firsts);
    assert!(
        begin_batch(&running).is_none(),
        "it waits behind the leader's batch"
    );
    let mut next = Some((io, group));
    while let Some((io, group)) = next {
        let ran = log.appender.append(io);
        leader.end(group, ran, true);
        next = leader.begin();
    }
    let told = log.written.load(Ordering::Acquire) == 3;
    let mut done = Vec::new();
    last.completions(&mut done);
    assert_eq!(told, done.iter().any(|end| end.token == 13));
    told
}

#[test]
fn a_waiter_behind_the_leaders_batch_is_notified() {
    assert!(notifies_written());
    PLANTED.set(Some(Mutant::WrittenForgotten));
    let told = notifies_written();
    PLANTED.set(None);
    assert!(!told, "the planted fault was not noticed");
}

/// A FLUSH whose group is in its commit delay is answered even if the leader writes a batch in the
/// meantime.
#[test]
fn a_commit_delay_outlives_a_batch_of_the_leader() {
    let wait = CommitWait {
        longest: Some(Duration::from_secs(3600)),
        count: Some(3),
    };
    let (_fixture, running) = open(wait);
    let [mut flushing, mut writing] = [0, 1].map(|_| running.disks[0].open_port().unwrap());
    write(&mut flushing, 1);
    flushing.submit(12, Operation::Flush);
    write(&mut writing, 2);
    // The leader finds both: the group waits, and the written waiter's batch does not.
    assert!(!writing.notify_written(13));
    let mut done = Vec::new();
    for _ in 0..1000 {
        running.step_writer();
        flushing.completions(&mut done);
    }
    assert!(done.iter().any(|end| end.token == 12));
}

/// How many records are in batches once a second record is there, while the batch of the first is
/// being written; `flush`: and a FLUSH waits for that.
fn batched_beside_a_batch(flush: bool) -> u64 {
    let (_fixture, running) = open(CommitWait::NONE);
    let [mut first, mut second] = [0, 1].map(|_| running.disks[0].open_port().unwrap());
    write(&mut first, 1);
    assert!(!first.notify_written(11));
    let firsts = begin_batch(&running).expect("a batch");
    if flush {
        first.submit(12, Operation::Flush);
    }
    write(&mut second, 2);
    assert!(!second.notify_written(13));
    second.kick();
    let batched = running.disks[0].log.lock().pipeline.batched();
    end_batch(&running, firsts);
    batched
}

#[test]
fn records_collect_during_a_batch_unless_clients_flush() {
    assert_eq!(batched_beside_a_batch(false), 1);
    assert_eq!(batched_beside_a_batch(true), 2);
}

/// A thread that serves a guest may not be allowed to open files.
#[test]
fn the_page_cache_of_a_segment_is_open_before_it_is_written() {
    let (_fixture, running) = open(CommitWait::NONE);
    let state = running.disks[0].log.lock();
    let ready: Vec<_> = state
        .ring
        .ready()
        .map(|segment| segment.has_cache())
        .collect();
    assert!(
        !ready.is_empty() && ready.iter().all(|open| *open),
        "{ready:?}"
    );
}
