//! FLUSHes that wait for a replica, and writes that wait because it lacks too much.

use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use crate::support::{TestDisk, fill, flush, read, run, small, wait, wait_until, write};
use walvisor_storage::{
    Backend, BackendQueue, CacheMode, Completion, DiskOptions, EngineKind, ErrorKind, Failure,
    FollowStep, LogFollower, LogReplica, LogRoot, MarkText, Operation, Port, ReplicaCall,
    ReplicaOptions, Retention, Store, StoreOptions, create_disk,
};

/// How long to wait for what must come.
const LIMIT: Duration = Duration::from_secs(60);

/// Makes the FLUSHes of a log wait. The receiver gets each call.
fn replicate(store: &Store) -> (LogReplica, Receiver<ReplicaCall>) {
    let (sender, calls) = channel();
    let owner = move |call| sender.send(call).unwrap();
    let options = ReplicaOptions {
        sync: true,
        limit: None,
    };
    (store.disks()[0].replicate(options, owner).unwrap(), calls)
}

const MIB: u64 = 1 << 20;

/// A disk whose log has segments of 1 MiB, and a replica that may lack `most` bytes.
fn limited(place: &TestDisk, retain: Retention, most: u64) -> (Store, LogReplica) {
    let options = StoreOptions {
        retain: Some(retain),
        await_replica: true,
        ..small(EngineKind::Auto)
    };
    let disks = [DiskOptions::new(&place.disk)];
    let store = Store::open(&place.log(), &disks, &options).unwrap();
    let replica = store.disks()[0].replicate(limit(most), |_| ()).unwrap();
    (store, replica)
}

fn limit(bytes: u64) -> ReplicaOptions {
    ReplicaOptions {
        sync: false,
        limit: Some(bytes),
    }
}

/// Writes 64 KiB, without waiting for it.
fn submit_write(port: &mut Port, number: u64) {
    let (sector, data) = (number % 64 * 128, fill(number as u8, 128));
    submit(port, Operation::Write { sector, data });
}

/// Waits until so many requests wait for the replica.
fn until_waiting(replica: &LogReplica, calls: &Receiver<ReplicaCall>, count: usize) {
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
    replica.end_waits();
    replica.wait_again();
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
    let again = store.disks()[0].replicate(ReplicaOptions::default(), |_| ());
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
    // A snapshot is refused while such a small log is full.
    wait_until("a snapshot", || {
        store.disks()[0].snapshot("monday".parse().unwrap()).is_ok()
    });
    assert_eq!(replica.waiting(), 1);
    store.disks()[0].end_pauses();
    assert_eq!(calls.try_iter().last(), Some(ReplicaCall::Drains));
    // A port that goes away takes its requests along.
    drop(port);
    assert_eq!(replica.waiting(), 0);
    drop(other);
    store.close().unwrap();
}

/// How many writes end before one waits.
fn write_until_one_waits(port: &mut Port, replica: &LogReplica, written: &mut u64) -> u64 {
    for count in 0.. {
        if replica.holds_back() {
            submit_write(port, *written);
            assert!(completions(port).is_empty());
            return count;
        }
        submit_write(port, *written);
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
    let disk = &store.disks()[0];
    let (mut port, mut other) = (disk.open_port().unwrap(), disk.open_port().unwrap());
    let mut written = 0;
    let count = write_until_one_waits(&mut port, &replica, &mut written);
    // Each batch has a header of 4 KiB at least.
    assert!((20..=32).contains(&count), "{count} writes of 64 KiB");
    let lacks = replica.backlog_bytes().unwrap();
    assert!((2 * MIB..3 * MIB).contains(&lacks), "{lacks} bytes");
    // FLUSHes don't wait, nor do reads.
    flush(&mut other);
    assert_eq!(read(&mut other, 0, 8)[0], 0);
    // Each write is a record.
    let newest = written;
    replica.acknowledge(newest);
    ended(&mut port, Ok(()));
    written += 1;
    assert!(!replica.holds_back());
    let again = write_until_one_waits(&mut port, &replica, &mut written);
    assert!((20..=32).contains(&again), "{again} writes of 64 KiB");
    // Somebody waits for the requests to end.
    replica.end_waits();
    ended(&mut port, Err(Failure::Io));
    submit_write(&mut port, 0);
    ended(&mut port, Err(Failure::Io));
    disk.mark(&"monday".parse::<MarkText>().unwrap()).unwrap();
    replica.wait_again();
    submit_write(&mut port, 0);
    assert!(completions(&mut port).is_empty());
    replica.lose();
    ended(&mut port, Ok(()));
    (0..40).for_each(|number| write(&mut port, number * 128, 1, 128));
    drop((port, other));
    store.close().unwrap();
}

/// Whoever reads the log from outside finds every record, however often the ring goes round, and
/// however little the log keeps by itself.
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
        let (store, replica) = limited(&place, retain, 3 * MIB);
        let disk = &store.disks()[0];
        let root = LogRoot::read(&place.log()).unwrap();
        let mut follower = LogFollower::new(&place.log(), &root);
        let mut port = disk.open_port().unwrap();
        let (mut written, mut next) = (0, 1);
        for _ in 0..20 {
            write_until_one_waits(&mut port, &replica, &mut written);
            // Nobody may give it up.
            let error = disk.checkpoint().unwrap_err();
            assert!(error.to_string().contains("its archive lacks"), "{error}");
            loop {
                match follower.step(1 << 20).unwrap() {
                    FollowStep::Piece(piece) => {
                        assert_eq!(piece.first.lsn, next, "{retain}");
                        next = piece.last.lsn + 1;
                    }
                    FollowStep::CaughtUp => break,
                    step => panic!("{retain}: {step:?}"),
                }
            }
            replica.acknowledge(next - 1);
            ended(&mut port, Ok(()));
            written += 1;
        }
        assert!(written * 64 * 1024 > 12 * MIB, "the ring goes round");
        drop(port);
        store.close().unwrap();
    }
}

#[test]
fn a_limit_needs_a_log_that_keeps_history() {
    let place = TestDisk::new();
    let (store, replica) = limited(&place, Retention::All, 2 * MIB);
    let disk = &store.disks()[0];
    disk.set_retain(Retention::Bytes(4 * MIB)).unwrap();
    let error = disk.set_retain(Retention::Nothing).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("set retain=1h"), "{error}");
    assert_eq!(disk.retain(), Retention::Bytes(4 * MIB));
    replica.lose();
    drop(replica);
    store.close().unwrap();

    let place = TestDisk::new();
    let store = place.open();
    let refused = |bytes| {
        let replica = store.disks()[0].replicate(limit(bytes), |_| ());
        replica.err().map(|error| error.to_string())
    };
    assert!(refused(MIB).unwrap().contains("set retain=1h"));
    assert!(refused(MIB - 1).unwrap().contains("at least 1M"));
}

/// What an earlier process wrote may not be in the replica.
#[test]
fn what_is_in_the_log_counts_until_it_is_acknowledged() {
    let place = TestDisk::new();
    let (store, replica) = limited(&place, Retention::Bytes(3 * MIB), 2 * MIB);
    let mut port = store.disks()[0].open_port().unwrap();
    replica.lose();
    (0..64).for_each(|number| write(&mut port, number * 128, 1, 128));
    flush(&mut port);
    let newest = 64;
    drop((port, replica));
    store.close().unwrap();
    let (store, replica) = limited(&place, Retention::Bytes(3 * MIB), 2 * MIB);
    let mut port = store.disks()[0].open_port().unwrap();
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

/// A log that is opened again makes room at once, of what its retention does not keep.
#[test]
fn a_log_that_is_opened_again_keeps_what_the_replica_lacks() {
    let place = TestDisk::new();
    let soon = Retention::Time(Duration::from_millis(1));
    let (store, replica) = limited(&place, soon, 3 * MIB);
    let root = LogRoot::read(&place.log()).unwrap();
    let mut follower = LogFollower::new(&place.log(), &root);
    let mut port = store.disks()[0].open_port().unwrap();
    let mut written = 0;
    write_until_one_waits(&mut port, &replica, &mut written);
    replica.end_waits();
    ended(&mut port, Err(Failure::Io));
    drop((port, replica));
    store.close().unwrap();
    let (store, replica) = limited(&place, soon, 3 * MIB);
    assert!(replica.holds_back());
    std::thread::sleep(Duration::from_millis(200));
    let mut next = 1;
    while let FollowStep::Piece(piece) = follower.step(1 << 20).unwrap() {
        assert_eq!(piece.first.lsn, next);
        next = piece.last.lsn + 1;
    }
    assert_eq!(next, written + 1);
    drop(replica);
    store.close().unwrap();
}

#[test]
fn history_is_dropped_only_once_the_replica_has_it() {
    let place = TestDisk::new();
    let (store, replica) = limited(&place, Retention::All, 2 * MIB);
    let disk = &store.disks()[0];
    let mut port = disk.open_port().unwrap();
    (0..8).for_each(|number| write(&mut port, number * 128, 1, 128));
    assert!(disk.checkpoint().is_err());
    replica.acknowledge(8);
    disk.checkpoint().unwrap();
    drop((port, replica));
    store.close().unwrap();
}
