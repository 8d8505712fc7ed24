//! FLUSHes that wait for a replica.

mod support;

use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use support::{TestDisk, fill, flush, read, run, small, wait, write};
use walvisor_storage::{
    Backend, BackendQueue, CacheMode, Completion, DiskOptions, EngineKind, ErrorKind, Failure,
    Operation, Port, ReplicaCall, Store, StoreOptions, SyncReplica, create_disk,
};

/// How long to wait for what must come.
const LIMIT: Duration = Duration::from_secs(60);

/// Makes the FLUSHes of a log wait. The receiver gets each call.
fn replicate(store: &Store) -> (SyncReplica, Receiver<ReplicaCall>) {
    let (sender, calls) = channel();
    let owner = move |call| sender.send(call).unwrap();
    (store.disks()[0].replicate(owner).unwrap(), calls)
}

/// Waits until so many requests wait for the replica.
fn until_waiting(replica: &SyncReplica, calls: &Receiver<ReplicaCall>, count: usize) {
    while replica.waiting() < count {
        let call = calls.recv_timeout(LIMIT).expect("requests wait");
        assert_eq!(call, ReplicaCall::Waits);
    }
}

fn submit(port: &mut Port, operation: Operation) {
    port.submit(1, operation);
    port.kick();
}

fn completions(port: &mut Port) -> Vec<Completion> {
    let mut done = Vec::new();
    port.completions(&mut done);
    done
}

#[track_caller]
fn ended(port: &mut Port, expected: Result<(), Failure>) {
    let result = wait(port, 1).remove(0).result;
    assert_eq!(result.map(drop), expected);
}

#[test]
fn a_flush_waits_until_the_replica_has_its_records() {
    for group_commit in [true, false] {
        let (place, options) = (
            TestDisk::new(),
            StoreOptions {
                group_commit,
                ..small(EngineKind::Auto)
            },
        );
        let disks = [DiskOptions::new(&place.disk)];
        let store = Store::open(&place.log(), &disks, &options).unwrap();
        let (replica, calls) = replicate(&store);
        let mut port = store.disks()[0].open_port().unwrap();
        write(&mut port, 0, 1, 8);
        submit(&mut port, Operation::Flush);
        until_waiting(&replica, &calls, 1);
        assert!(completions(&mut port).is_empty());
        let durable = replica.awaited().unwrap();
        replica.acknowledge(durable - 1);
        assert!(completions(&mut port).is_empty());
        replica.acknowledge(durable);
        ended(&mut port, Ok(()));
        // What the replica has needs no other acknowledgement, even a lower one.
        replica.acknowledge(0);
        assert_eq!(replica.acknowledged(), durable);
        run(&mut port, Operation::Flush).unwrap();
        drop((port, replica));
        store.close().unwrap();
    }
}

#[test]
fn one_acknowledgement_completes_every_flush_that_it_covers() {
    let place = TestDisk::new();
    let store = place.open();
    let (replica, calls) = replicate(&store);
    let open = |_| store.disks()[0].open_port().unwrap();
    let mut ports: Vec<Port> = (0..16).map(open).collect();
    for (number, port) in ports.iter_mut().enumerate() {
        write(port, number as u64 * 8, 1, 8);
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
    let mut port = store.disks()[0].open_port().unwrap();
    let (sector, data) = (0, fill(1, 8));
    submit(&mut port, Operation::Write { sector, data });
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
    let mut port = store.disks()[0].open_port().unwrap();
    write(&mut port, 0, 1, 8);
    submit(&mut port, Operation::Flush);
    until_waiting(&replica, &calls, 1);
    replica.lose();
    ended(&mut port, Err(Failure::Io));
    assert_eq!(run(&mut port, Operation::Flush).err(), Some(Failure::Io));
    write(&mut port, 8, 2, 8);
    assert_eq!(run(&mut port, Operation::Flush).err(), Some(Failure::Io));
    assert_eq!(&read(&mut port, 8, 8)[..], &[2; 4096]);
    // Nothing is lost here.
    drop(port);
    store.close().unwrap();
    let store = place.open();
    let mut port = store.disks()[0].open_port().unwrap();
    flush(&mut port);
    assert_eq!(&read(&mut port, 8, 8)[..], &[2; 4096]);
}

/// What an earlier process wrote may not be in the replica, even if the images have it.
#[test]
fn a_flush_of_what_an_earlier_process_wrote_waits_too() {
    for closed in [false, true] {
        let place = TestDisk::new();
        let store = place.open();
        let mut port = store.disks()[0].open_port().unwrap();
        write(&mut port, 0, 1, 8);
        flush(&mut port);
        let killed = place.crash();
        drop(port);
        store.close().unwrap();
        let store = if closed { &place } else { &killed }.open();
        let (replica, calls) = replicate(&store);
        let mut port = store.disks()[0].open_port().unwrap();
        submit(&mut port, Operation::Flush);
        until_waiting(&replica, &calls, 1);
        assert!(completions(&mut port).is_empty());
        assert_eq!(replica.awaited(), Some(1));
        replica.acknowledge(1);
        ended(&mut port, Ok(()));
    }
}

/// Its records may have been on their way to the replica.
#[test]
fn a_disk_that_comes_back_waits_for_what_it_wrote_before() {
    let place = TestDisk::new();
    let (other, options) = (place.disk.with_extension("other"), small(EngineKind::Auto));
    create_disk(&other, 1 << 20, &place.log(), &options).unwrap();
    let disks = [&place.disk, &other].map(DiskOptions::new);
    let mut store = Store::open(&place.log(), &disks, &options).unwrap();
    let (replica, calls) = replicate(&store);
    let mut port = store.disks()[1].open_port().unwrap();
    write(&mut port, 0, 1, 8);
    submit(&mut port, Operation::Flush);
    until_waiting(&replica, &calls, 1);
    let awaited = replica.awaited().unwrap();
    replica.fail_waiting();
    ended(&mut port, Err(Failure::Io));
    drop(port);
    store.remove_disk(&other).unwrap();
    let disk = store.add_disk(&disks[1]).unwrap();
    let mut port = disk.open_port().unwrap();
    submit(&mut port, Operation::Flush);
    until_waiting(&replica, &calls, 1);
    assert!(replica.awaited() >= Some(awaited));
    replica.acknowledge(replica.awaited().unwrap());
    ended(&mut port, Ok(()));
}

#[test]
fn the_log_goes_on_while_flushes_wait_for_the_replica() {
    let place = TestDisk::new();
    let store = place.open();
    let (replica, calls) = replicate(&store);
    let again = store.disks()[0].replicate(|_| ());
    let again = again.err().expect("one replica");
    assert_eq!(again.kind(), ErrorKind::AlreadyExists);
    let mut port = store.disks()[0].open_port().unwrap();
    let mut other = store.disks()[0].open_port().unwrap();
    write(&mut port, 0, 1, 8);
    submit(&mut port, Operation::Flush);
    until_waiting(&replica, &calls, 1);
    // Around the ring, so the log is copied to the image meanwhile.
    let checkpoints = store.log_counters().checkpoints;
    for number in 0..64 {
        write(&mut other, number % 8 * 256, number as u8, 256);
    }
    assert!(store.log_counters().checkpoints > checkpoints);
    store.disks()[0]
        .snapshot("monday".parse().unwrap())
        .unwrap();
    assert_eq!(replica.waiting(), 1);
    store.disks()[0].end_pauses();
    assert_eq!(calls.try_iter().last(), Some(ReplicaCall::Drains));
    // A port that goes away takes its requests along.
    drop(port);
    assert_eq!(replica.waiting(), 0);
    drop(other);
    store.close().unwrap();
}
