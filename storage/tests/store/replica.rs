//! FLUSHes that wait for a replica, and writes that wait because it lacks too much.

use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use walvisor_storage::{
    Backend, BackendQueue, CacheMode, Completion, DiskOptions, EngineKind, ErrorKind, Failure,
    FollowStep, LogFollower, LogReplica, LogRoot, Operation, Port, ReplicaCall, ReplicaOptions,
    Result, Retention, Store, StoreOptions,
};

use crate::support::{
    MIB, SIZE, TestDisk, all, commit, flush, port, put_in, read, refused, run, small, wait,
    wait_until, write,
};

/// How long to wait for what must come.
const LIMIT: Duration = Duration::from_secs(60);

/// A replica that FLUSHes wait for. The receiver gets each call.
fn replicate(store: &Store) -> (LogReplica, Receiver<ReplicaCall>) {
    let (sender, calls) = channel();
    let owner = move |call| sender.send(call).unwrap();
    let options = ReplicaOptions {
        sync: true,
        limit: None,
    };
    (store.disks()[0].replicate(options, owner).unwrap(), calls)
}

fn limit(bytes: u64) -> ReplicaOptions {
    ReplicaOptions {
        sync: false,
        limit: Some(bytes),
    }
}

/// A disk whose log has segments of 1 MiB, and a replica that may lack `most` bytes.
fn limited(place: &TestDisk, retain: Retention, most: u64) -> (Store, LogReplica) {
    let (store, replica, _) = limited_with_calls(place, retain, most);
    (store, replica)
}

/// As [`limited`], with a receiver that gets each call.
fn limited_with_calls(
    place: &TestDisk,
    retain: Retention,
    most: u64,
) -> (Store, LogReplica, Receiver<ReplicaCall>) {
    let options = StoreOptions {
        retain: Some(retain),
        await_replica: true,
        ..small(EngineKind::Auto)
    };
    let store = place.try_open(&options).unwrap();
    let (sender, calls) = channel();
    // Not everybody listens.
    let owner = move |call| {
        let _ = sender.send(call);
    };
    let replica = store.disks()[0].replicate(limit(most), owner).unwrap();
    (store, replica, calls)
}

fn submit(port: &mut Port, operation: Operation) {
    port.submit(1, operation);
    port.kick();
}

/// Writes 64 KiB, without waiting for it.
fn submit_write(port: &mut Port, number: u64) {
    submit(port, put_in(number % 64 * 128, number as u8, 128));
}

/// Begins a FLUSH after a write, and waits until it waits for the replica.
fn flush_begins(port: &mut Port, replica: &LogReplica, calls: &Receiver<ReplicaCall>) {
    write(port, 0, 1, 8);
    submit(port, Operation::Flush);
    until_waiting(replica, calls, 1);
    assert!(completions(port).is_empty());
}

/// Waits until so many requests wait for the replica, and its owner knows it. A call of an earlier
/// wait may come late.
fn until_waiting(replica: &LogReplica, calls: &Receiver<ReplicaCall>, count: usize) {
    let known = |call| replica.awaited().map(ReplicaCall::Waits) == Some(call);
    while !known(calls.recv_timeout(LIMIT).expect("requests wait")) || replica.waiting() < count {}
}

fn completions(port: &mut Port) -> Vec<Completion> {
    let mut done = Vec::new();
    port.completions(&mut done);
    done
}

#[track_caller]
fn ended(port: &mut Port, expected: std::result::Result<(), Failure>) {
    let result = wait(port, 1).remove(0).result;
    assert_eq!(result.map(drop), expected);
}

#[test]
fn a_flush_waits_until_the_replica_has_its_records() {
    for group_commit in [true, false] {
        let options = StoreOptions {
            group_commit,
            ..small(EngineKind::Auto)
        };
        let place = TestDisk::made(&["disk.img"], SIZE, options);
        let store = place.open();
        let (replica, calls) = replicate(&store);
        let mut port = port(&store, 0);
        flush_begins(&mut port, &replica, &calls);
        let durable = replica.awaited().unwrap();
        replica.acknowledge(durable - 1);
        assert!(completions(&mut port).is_empty());
        replica.acknowledge(durable);
        ended(&mut port, Ok(()));
        // What the replica has needs no other acknowledgement, even a lower one.
        replica.acknowledge(0);
        assert_eq!(replica.acknowledged(), durable);
        flush(&mut port);
        drop((port, replica));
        store.close().unwrap();
    }
}

#[test]
fn one_acknowledgement_completes_every_flush_that_it_covers() {
    let place = TestDisk::new();
    let store = place.open();
    let (replica, calls) = replicate(&store);
    let mut ports: Vec<Port> = (0..16).map(|_| port(&store, 0)).collect();
    for (number, port) in (0..).zip(&mut ports) {
        write(port, number * 8, 1, 8);
        submit(port, Operation::Flush);
    }
    until_waiting(&replica, &calls, ports.len());
    replica.acknowledge(replica.awaited().unwrap());
    ports.iter_mut().for_each(|port| ended(port, Ok(())));
    assert_eq!(replica.waiting(), 0);
}

#[test]
fn a_write_through_disk_waits_with_each_write() {
    let place = TestDisk::new();
    let store = place.open_with(EngineKind::Auto, CacheMode::Writethrough);
    let (replica, calls) = replicate(&store);
    let mut port = port(&store, 0);
    submit(&mut port, put_in(0, 1, 8));
    until_waiting(&replica, &calls, 1);
    assert!(completions(&mut port).is_empty());
    replica.acknowledge(replica.awaited().unwrap());
    ended(&mut port, Ok(()));
}

#[test]
fn a_flush_fails_once_the_replica_is_lost() {
    let place = TestDisk::new();
    let store = place.open();
    let (replica, calls) = replicate(&store);
    let mut queue = port(&store, 0);
    flush_begins(&mut queue, &replica, &calls);
    replica.lose();
    ended(&mut queue, Err(Failure::Io));
    for _ in 0..2 {
        assert_eq!(run(&mut queue, Operation::Flush).err(), Some(Failure::Io));
        write(&mut queue, 8, 2, 8);
    }
    // Nothing is lost here.
    assert!(all(&read(&mut queue, 8, 8), 2));
    drop(queue);
    store.close().unwrap();
    let store = place.open();
    flush(&mut port(&store, 0));
    assert!(all(&read(&mut port(&store, 0), 8, 8), 2));
}

/// What an earlier process wrote may not be in the replica, even if the images have it; nor what a
/// disk wrote that has left the log and comes back.
#[test]
fn a_flush_of_what_was_written_earlier_waits_too() {
    let place = TestDisk::new();
    let store = place.open();
    commit(&store.disks()[0], 0, 1, 8);
    let killed = place.crash();
    store.close().unwrap();
    for place in [&place, &killed] {
        let store = place.open();
        let (replica, calls) = replicate(&store);
        let mut port = port(&store, 0);
        submit(&mut port, Operation::Flush);
        until_waiting(&replica, &calls, 1);
        assert!(completions(&mut port).is_empty());
        assert_eq!(replica.awaited(), Some(1));
        replica.acknowledge(1);
        ended(&mut port, Ok(()));
    }

    let place = TestDisk::made(&["disk.img", "other"], MIB, small(EngineKind::Auto));
    let other = &place.disks()[1];
    let mut store = place.open();
    let (replica, calls) = replicate(&store);
    let mut queue = port(&store, 1);
    flush_begins(&mut queue, &replica, &calls);
    let awaited = replica.awaited();
    replica.end_waits();
    replica.wait_again();
    ended(&mut queue, Err(Failure::Io));
    drop(queue);
    store.remove_disk(other).unwrap();
    let disk = store.add_disk(&DiskOptions::new(other)).unwrap();
    let mut queue = disk.open_port().unwrap();
    submit(&mut queue, Operation::Flush);
    until_waiting(&replica, &calls, 1);
    assert!(replica.awaited() >= awaited);
    replica.acknowledge(replica.awaited().unwrap());
    ended(&mut queue, Ok(()));
}

#[test]
fn the_log_goes_on_while_flushes_wait_for_the_replica() {
    let place = TestDisk::new();
    let store = place.open();
    let (replica, calls) = replicate(&store);
    let again = store.disks()[0].replicate(ReplicaOptions::default(), |_| ());
    assert_eq!(refused(again, ""), ErrorKind::AlreadyExists);
    let [mut waiting, mut other] = [0; 2].map(|disk| port(&store, disk));
    flush_begins(&mut waiting, &replica, &calls);
    // Around the ring, so the log is copied to the image meanwhile.
    let checkpoints = store.log_counters().checkpoints;
    for number in 0..64 {
        write(&mut other, number % 8 * 256, number as u8, 256);
    }
    assert!(store.log_counters().checkpoints > checkpoints);
    // A snapshot is refused while such a small log is full.
    wait_until("a snapshot", || {
        store.disks()[0].snapshot("monday".parse().unwrap()).is_ok()
    });
    assert_eq!(replica.waiting(), 1);
    store.disks()[0].end_pauses();
    assert_eq!(calls.try_iter().last(), Some(ReplicaCall::Drains));
    // A port that goes away takes its requests along.
    drop(waiting);
    assert_eq!(replica.waiting(), 0);
    drop(other);
    store.close().unwrap();
}

/// How many writes end before one waits.
fn write_until_one_waits(port: &mut Port, replica: &LogReplica, written: &mut u64) -> u64 {
    for count in 0.. {
        let waits = replica.holds_back();
        submit_write(port, *written);
        if waits {
            assert!(completions(port).is_empty());
            return count;
        }
        ended(port, Ok(()));
        flush(port);
        *written += 1;
    }
    unreachable!("the limit is reached");
}

#[test]
fn writes_wait_while_the_replica_lacks_its_limit() {
    let place = TestDisk::new();
    let (store, replica) = limited(&place, Retention::Bytes(3 * MIB), 2 * MIB);
    assert_eq!(replica.backlog_bytes(), Some(0));
    let [mut queue, mut other] = [0; 2].map(|disk| port(&store, disk));
    let mut written = 0;
    for _ in 0..2 {
        let count = write_until_one_waits(&mut queue, &replica, &mut written);
        // Each batch has a header of 4 KiB at least.
        assert!((20..=32).contains(&count), "{count} writes of 64 KiB");
        let lacks = replica.backlog_bytes().unwrap();
        assert!((2 * MIB..3 * MIB).contains(&lacks), "{lacks} bytes");
        // FLUSHes don't wait, nor do reads.
        flush(&mut other);
        read(&mut other, 0, 8);
        // Each write is a record.
        replica.acknowledge(written);
        ended(&mut queue, Ok(()));
        written += 1;
        assert!(!replica.holds_back());
    }
    write_until_one_waits(&mut queue, &replica, &mut written);
    // Somebody waits for the requests to end.
    replica.end_waits();
    ended(&mut queue, Err(Failure::Io));
    submit_write(&mut queue, 0);
    ended(&mut queue, Err(Failure::Io));
    store.disks()[0].mark(&"monday".parse().unwrap()).unwrap();
    replica.wait_again();
    submit_write(&mut queue, 0);
    assert!(completions(&mut queue).is_empty());
    replica.lose();
    ended(&mut queue, Ok(()));
    (0..40).for_each(|number| write(&mut queue, number * 128, 1, 128));
    drop((queue, other));
    store.close().unwrap();
}

#[test]
fn a_replica_that_was_lost_comes_back_with_its_next_acknowledgement() {
    let place = TestDisk::new();
    let store = place.open();
    let (replica, calls) = replicate(&store);
    let mut queue = port(&store, 0);
    for _ in 0..2 {
        flush_begins(&mut queue, &replica, &calls);
        replica.lose();
        ended(&mut queue, Err(Failure::Io));
        submit(&mut queue, Operation::Flush);
        ended(&mut queue, Err(Failure::Io));
        // Whatever it has.
        replica.acknowledge(0);
        flush_begins(&mut queue, &replica, &calls);
        replica.acknowledge(replica.awaited().unwrap());
        ended(&mut queue, Ok(()));
    }
    drop((queue, replica));
    store.close().unwrap();

    let place = TestDisk::new();
    let (store, replica, calls) = limited_with_calls(&place, Retention::Bytes(3 * MIB), 2 * MIB);
    let (mut queue, mut written) = (port(&store, 0), 0);
    write_until_one_waits(&mut queue, &replica, &mut written);
    assert_eq!(
        calls.try_iter().last(),
        Some(ReplicaCall::Waits(written)),
        "the owner knows what is durable"
    );
    replica.lose();
    ended(&mut queue, Ok(()));
    (0..64).for_each(|number| write(&mut queue, number * 128, 1, 128));
    assert!(!replica.holds_back());
    replica.acknowledge(0);
    assert!(replica.holds_back());
    drop(queue);
    store.close().unwrap();
}

/// Takes all that the follower finds behind `last`, without a gap; returns the newest LSN.
fn follow(follower: &mut LogFollower, mut last: u64) -> u64 {
    loop {
        match follower.step(MIB as usize).unwrap() {
            FollowStep::Piece(piece) => {
                assert_eq!(piece.first.lsn, last + 1);
                last = piece.last.lsn;
            }
            FollowStep::CaughtUp => return last,
            step => panic!("{step:?}"),
        }
    }
}

/// Whoever reads the log from outside finds every record, however often the ring goes round,
/// however little the log keeps by itself, and when it is opened again, which makes room.
#[test]
fn nothing_is_overwritten_that_the_replica_lacks() {
    let soon = Duration::from_millis(1);
    for retain in [
        Retention::Bytes(MIB),
        Retention::Bytes(3 * MIB),
        Retention::Time(soon),
        Retention::All,
    ] {
        let place = TestDisk::new();
        // The smaller logs have room for less than the limit.
        let (mut store, mut replica) = limited(&place, retain, 3 * MIB);
        let root = LogRoot::read(&place.log()).unwrap();
        let mut follower = LogFollower::new(&place.log(), &root);
        let (mut written, mut last) = (0, 0);
        for round in 0..10 {
            let mut port = port(&store, 0);
            write_until_one_waits(&mut port, &replica, &mut written);
            if round == 5 {
                replica.end_waits();
                ended(&mut port, Err(Failure::Io));
                drop((port, replica));
                store.close().unwrap();
                (store, replica) = limited(&place, retain, 3 * MIB);
                assert!(replica.holds_back(), "{retain}");
                refused(store.disks()[0].checkpoint(), "its archive lacks");
                last = follow(&mut follower, last);
                assert_eq!(last, written);
                replica.acknowledge(last);
                continue;
            }
            // Nobody may give it up.
            refused(store.disks()[0].checkpoint(), "its archive lacks");
            last = follow(&mut follower, last);
            replica.acknowledge(last);
            ended(&mut port, Ok(()));
            written += 1;
        }
        assert!(written * 64 * 1024 > 6 * MIB, "the ring goes round");
        store.close().unwrap();
    }
}

#[test]
fn a_limit_needs_a_log_that_keeps_history() {
    let place = TestDisk::new();
    let (store, replica) = limited(&place, Retention::All, 2 * MIB);
    let disk = &store.disks()[0];
    // History is dropped only once the replica has it.
    (0..8).for_each(|number| commit(disk, number * 128, 1, 128));
    assert!(disk.checkpoint().is_err());
    replica.acknowledge(8);
    disk.checkpoint().unwrap();
    disk.set_retain(Retention::Bytes(4 * MIB)).unwrap();
    let kind = refused(disk.set_retain(Retention::Nothing), "set retain=1h");
    assert_eq!(kind, ErrorKind::InvalidInput);
    assert_eq!(disk.retain(), Retention::Bytes(4 * MIB));
    replica.lose();
    drop(replica);
    store.close().unwrap();

    let place = TestDisk::new();
    let store = place.open();
    let replicate = |bytes| -> Result<_> { store.disks()[0].replicate(limit(bytes), |_| ()) };
    refused(replicate(MIB), "set retain=1h");
    refused(replicate(MIB - 1), "at least 1M");
}

/// What an earlier process wrote may not be in the replica.
#[test]
fn what_is_in_the_log_counts_until_it_is_acknowledged() {
    let place = TestDisk::new();
    let (store, replica) = limited(&place, Retention::Bytes(3 * MIB), 2 * MIB);
    replica.lose();
    let newest = 64;
    (0..newest).for_each(|number| commit(&store.disks()[0], number * 128, 1, 128));
    drop(replica);
    store.close().unwrap();
    let (store, replica) = limited(&place, Retention::Bytes(3 * MIB), 2 * MIB);
    let mut port = port(&store, 0);
    assert!(replica.backlog_bytes() >= Some(3 * MIB));
    submit_write(&mut port, 0);
    assert!(completions(&mut port).is_empty());
    replica.acknowledge(newest - 1);
    assert!(completions(&mut port).is_empty());
    replica.acknowledge(newest);
    ended(&mut port, Ok(()));
    drop(port);
    store.close().unwrap();
}
