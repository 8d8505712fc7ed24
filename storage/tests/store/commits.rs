//! Requests, groups and syncs: what a log does for a FLUSH, on files.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use walvisor_storage::{
    Backend, BackendQueue, Buffer, CacheMode, CommitWait, DiskOptions, EngineKind, Failure,
    Operation, Port, Store, StoreOptions,
};

use crate::support::{
    ENGINES, MIB, Random, SIZE, TestDisk, all, commit, discard, flush, port, put_in, read, run,
    small, wait, wait_all, wait_until, write, zeroes,
};

/// No group begins before `count` FLUSHes wait, not even when a segment that becomes ready wakes
/// the writer.
fn together(count: u32) -> CommitWait {
    CommitWait {
        longest: Some(Duration::from_secs(3600)),
        count: Some(count),
    }
}

fn made(options: StoreOptions) -> TestDisk {
    TestDisk::made(&["disk.img"], SIZE, options)
}

fn ports(store: &Store, count: usize) -> Vec<Port> {
    (0..count).map(|_| port(store, 0)).collect()
}

/// Submits a write and a FLUSH to each port, port N to sector 8 N, and serves them all.
fn flush_all(ports: &mut [Port], byte: u8) {
    for (sector, port) in (0..).step_by(8).zip(&mut *ports) {
        port.submit(1, put_in(sector, byte, 8));
        port.submit(2, Operation::Flush);
    }
    let count = 2 * ports.len();
    // No port was kicked yet, so all FLUSHes wait.
    wait_all(&mut ports.iter_mut().collect::<Vec<_>>(), count);
}

#[test]
fn reads_merge_memory_log_base_and_zeroes() {
    for engine in ENGINES {
        let place = TestDisk::new();
        let store = place.open_with(engine, CacheMode::Writeback);
        let mut queue = port(&store, 0);
        write(&mut queue, 0, 1, 64);
        flush(&mut queue);
        write(&mut queue, 8, 2, 8);
        run(&mut queue, discard(24, 8)).unwrap();
        run(&mut queue, zeroes(33, 1, false)).unwrap();
        let check = |data: &[u8], first: u64| {
            for (sector, bytes) in (first..).zip(data.chunks(512)) {
                let want = match sector {
                    8..16 => 2,
                    24..=31 | 33 | 64.. => 0,
                    _ => 1,
                };
                assert!(all(bytes, want), "sector {sector} {engine:?}");
            }
        };
        check(&read(&mut queue, 4, 64), 4);
        flush(&mut queue);
        check(&read(&mut queue, 4, 64), 4);
        drop(queue);
        store.close().unwrap();
        // Closed cleanly: the base image is a plain raw image.
        check(&std::fs::read(&place.disk).unwrap(), 0);
        let store = place.open_with(engine, CacheMode::Writeback);
        check(&read(&mut port(&store, 0), 4, 64), 4);
    }
}

#[test]
fn flushes_share_a_sync_and_one_with_nothing_new_costs_none() {
    let place = made(StoreOptions {
        commit_wait: together(4),
        ..small(EngineKind::Auto)
    });
    let store = place.open();
    let mut ports = ports(&store, 4);
    flush(&mut ports[0]);
    assert_eq!(store.log_counters().syncs, 0);
    flush_all(&mut ports, 7);
    flush(&mut ports[3]);
    let counters = store.log_counters();
    let flushes = (counters.flushes, counters.flushes_grouped, counters.syncs);
    assert_eq!(flushes, (6, 4, 1));
}

#[test]
fn without_group_commit_each_flush_costs_a_write_and_a_sync() {
    for engine in ENGINES {
        let place = made(StoreOptions {
            group_commit: false,
            ..small(engine)
        });
        let store = place.open();
        let mut ports = ports(&store, 4);
        flush_all(&mut ports, 1);
        let counters = store.log_counters();
        assert_eq!((counters.groups, counters.syncs), (4, 4));
        assert_eq!(counters.group_sizes[..2], [4, 0]);
        // Without group commit a FLUSH costs a sync even if it finds everything durable already.
        flush(&mut ports[0]);
        assert_eq!(store.log_counters().syncs, 5);
        assert_eq!(place.crash().report().batches, 4);
    }
}

/// The alternative to one write for a group: each record in a write of its own and one sync for
/// all, with the same log.
#[test]
fn with_a_write_per_waiter_a_group_has_many_writes_and_one_sync() {
    for clients in [1, 4, 256] {
        // Room for a group in one segment.
        let place = made(StoreOptions {
            write_per_waiter: true,
            commit_wait: together(clients as u32),
            segment_size: 8 * MIB,
            ..small(EngineKind::Auto)
        });
        let store = place.open();
        let mut ports = ports(&store, clients);
        for round in 1..4 {
            flush_all(&mut ports, round as u8);
            let counters = store.log_counters();
            let writes = counters.writes as usize;
            assert_eq!(writes, round * clients, "{clients} clients");
            let round = round as u64;
            assert_eq!((counters.syncs, counters.groups), (round, round));
        }
        let crashed = place.crash();
        let report = crashed.report();
        assert_eq!((report.batches, report.records), (3, 3 * clients as u64));
        let store = crashed.open();
        assert!(all(&read(&mut port(&store, 0), 0, 8 * clients as u32), 3));
    }
}

/// Every write and every sync of the log costs an operation and takes its latency; reads do not.
/// An injected latency is added to each sync.
#[test]
fn a_slow_medium_is_charged_for_writes_and_syncs() {
    let latency = Duration::from_millis(20);
    let slow = StoreOptions {
        operation_latency: latency,
        operations_per_second: NonZeroU32::new(100),
        ..small(EngineKind::Auto)
    };
    let slow_syncs = StoreOptions {
        sync_latency: 2 * latency,
        ..small(EngineKind::Auto)
    };
    for options in [slow, slow_syncs] {
        let place = made(options);
        let store = place.open();
        let mut port = port(&store, 0);
        let began = Instant::now();
        for round in 1..=5 {
            write(&mut port, 0, round as u8, 8);
            flush(&mut port);
            assert!(began.elapsed() >= 2 * latency * round);
        }
        let counters = store.log_counters();
        assert_eq!((counters.writes, counters.syncs), (5, 5));
        // Records that no FLUSH waits for are written by the same thread as the groups.
        for i in 0..48 {
            write(&mut port, i * 32, 7, 32);
        }
        port.kick();
        wait_until("the records", || {
            store.log_counters().log_bytes >= 256 << 10
        });
        assert_eq!(store.log_counters().syncs, 5);
        flush(&mut port);
        assert_eq!(place.crash().report().records, 5 + 48);
    }
}

/// The stages overlap: while a group syncs, larger batches of other records are written and wait
/// for no sync.
#[test]
fn batches_are_written_while_a_group_syncs() {
    for engine in ENGINES {
        // The sync does not end before this test does.
        let place = made(StoreOptions {
            sync_latency: Duration::from_secs(3600),
            ..small(engine)
        });
        let store = place.open();
        let mut ports = ports(&store, 2);
        write(&mut ports[0], 0, 1, 8);
        ports[0].submit(9, Operation::Flush);
        ports[0].kick();
        for i in 0..24 {
            write(&mut ports[1], 8 + i * 32, 2, 32);
        }
        let mut done = Vec::new();
        // Two batches of at least an eighth of a segment each, besides the group's own.
        wait_until("two batches", || {
            ports[1].completions(&mut done);
            store.log_counters().log_bytes >= 256 << 10
        });
        assert_eq!(store.log_counters().syncs, 0, "{engine:?}");
        assert!(place.crash().report().payload_bytes >= 4096 + (128 << 10));
        // To close it would wait for the sync.
        std::mem::forget((ports, store));
    }
}

/// A group that waits starts as soon as the requested number of FLUSHes wait, or no other client
/// can join.
#[test]
fn a_group_waits_for_others_to_join() {
    for engine in ENGINES {
        let place = made(StoreOptions {
            commit_wait: together(3),
            ..small(engine)
        });
        let store = place.open();
        let mut ports = ports(&store, 4);
        let mut ended = 0;
        let begin = |port: &mut Port, byte| {
            write(port, 0, byte, 8);
            port.submit(9, Operation::Flush);
            port.kick();
        };
        for port in &mut ports[..3] {
            assert_eq!((ended, store.log_counters().syncs), (0, 0));
            begin(port, 1);
            let mut done = Vec::new();
            port.completions(&mut done);
            ended += done.len();
        }
        // The third port led; the fourth had nothing to flush.
        wait_all(&mut ports[..3].iter_mut().collect::<Vec<_>>(), 3 - ended);
        assert_eq!(store.log_counters().group_sizes[2], 1);
        // Two ports are left, and both wait: no other can join.
        ports.truncate(2);
        ports.iter_mut().for_each(|port| begin(port, 2));
        wait_all(&mut ports.iter_mut().collect::<Vec<_>>(), 2);
        // The port that keeps the time may leave: the others begin again, and a single port waits
        // for no other.
        begin(&mut ports[0], 3);
        write(&mut ports[1], 0, 4, 8);
        drop(ports.remove(0));
        flush(&mut ports[0]);
        assert_eq!(store.log_counters().syncs, 3, "{engine:?}");
        // A port with two clients has joined fully only when both have a FLUSH in the group.
        ports[0].set_clients(2);
        begin(&mut ports[0], 5);
        ports[0].submit(10, Operation::Flush);
        wait(&mut ports[0], 2);
        assert_eq!(store.log_counters().syncs, 4, "{engine:?}");
    }
}

#[test]
fn writethrough_writes_are_durable_when_they_complete() {
    let place = TestDisk::new();
    let store = place.open_with(EngineKind::Auto, CacheMode::Writethrough);
    let mut queue = port(&store, 0);
    write(&mut queue, 16, 5, 8);
    assert_eq!(store.log_counters().syncs, 1);
    let crashed = place.crash().open();
    assert!(all(&read(&mut port(&crashed, 0), 16, 8), 5));
    for (cache, syncs) in [(true, 1), (false, 2)] {
        store.disks()[0].set_write_cache(cache);
        write(&mut queue, 16, 6, 8);
        assert_eq!(store.log_counters().syncs, syncs);
    }
}

/// Threads write and flush together until the ring has wrapped many times.
#[test]
fn the_ring_wraps_many_times_and_nothing_is_lost() {
    const THREADS: usize = 4;
    const SECTORS: u64 = SIZE / 512 / THREADS as u64;
    for engine in ENGINES {
        let place = TestDisk::new();
        let store = place.open_with(engine, CacheMode::Writeback);
        let write_own = |thread: usize| {
            let (mut port, first) = (port(&store, 0), thread as u64 * SECTORS);
            let mut random = Random(12345 + thread as u64);
            let mut model = vec![0; SECTORS as usize];
            // 40 MiB of all go through a ring of 4 MiB.
            for i in 0..300 {
                let sectors = random.below(16) * 8 + 8;
                let sector = random.below(SECTORS - sectors);
                let byte = (i % 250) as u8 + 1;
                write(&mut port, first + sector, byte, sectors as usize);
                model[sector as usize..(sector + sectors) as usize].fill(byte);
                if i % 7 == 0 {
                    flush(&mut port);
                }
            }
            flush(&mut port);
            model
        };
        let model = std::thread::scope(|scope| {
            let threads: [_; THREADS] =
                std::array::from_fn(|thread| scope.spawn(move || write_own(thread)));
            threads.map(|thread| thread.join().unwrap()).concat()
        });
        let counters = store.log_counters();
        assert!(counters.checkpoints > 3 && counters.groups <= counters.syncs);
        let crashed = place.crash();
        for store in [store, crashed.open()] {
            let mut port = port(&store, 0);
            for (at, want) in (0..).step_by(64).zip(model.chunks(64)) {
                let data = read(&mut port, at, 64);
                let mut sectors = data.chunks(512).zip(want);
                assert!(sectors.all(|(bytes, want)| all(bytes, *want)), "{at}");
            }
        }
    }
}

#[test]
fn one_log_serves_several_disks_with_one_sync() {
    let options = StoreOptions {
        commit_wait: together(2),
        ..small(EngineKind::Auto)
    };
    let place = TestDisk::made(&["a.img", "b.img"], SIZE, options);
    let store = place.open();
    let mut ports = [0, 1].map(|disk| port(&store, disk));
    flush_all(&mut ports, 1);
    assert_eq!(store.log_counters().syncs, 1);
    // A FLUSH of the other disk finds everything durable, and does not wait for this disk's
    // records.
    write(&mut ports[0], 0, 9, 8);
    flush(&mut ports[1]);
    assert_eq!(store.log_counters().syncs, 1);
    drop(ports);
    store.close().unwrap();
    let [a, b] = [0, 1].map(|disk| std::fs::read(&place.disks()[disk]).unwrap());
    assert_eq!((a[0], b[8 * 512]), (9, 1));
}

#[test]
fn requests_outside_the_disk_fail_and_read_only_disks_refuse_writes() {
    let place = TestDisk::new();
    let store = place.open();
    let mut queue = port(&store, 0);
    let end = SIZE / 512;
    for (sector, sectors) in [
        (end, 1),
        (end - 1, 2),
        (u64::MAX, 1),
        (u64::MAX - 1, u32::MAX),
        (1 << 55, 1),
        (0, 0),
    ] {
        for operation in [
            Operation::Read { sector, sectors },
            discard(sector, sectors),
        ] {
            let failure = run(&mut queue, operation).unwrap_err();
            assert_eq!(failure, Failure::OutOfRange);
        }
    }
    let beyond = run(&mut queue, put_in(end - 7, 1, 8));
    assert_eq!(beyond.unwrap_err(), Failure::OutOfRange);
    let (sector, data) = (0, Buffer::from(&[0; 700][..]));
    let odd = run(&mut queue, Operation::Write { sector, data });
    assert_eq!(odd.unwrap_err(), Failure::TooLarge);
    // What front-ends promise of a write rests on promise 2, which is about one record: the longest
    // atomic write is one.
    let most = store.disks()[0].max_atomic_bytes() / 512;
    assert_eq!(most, (256 << 10) / 512, "a quarter of a segment");
    write(&mut queue, 3, 7, most);
    flush(&mut queue);
    assert_eq!(place.crash().report().records, 1);
    let longer = run(&mut queue, put_in(3, 7, most + 1));
    assert_eq!(longer.unwrap_err(), Failure::TooLarge);
    drop(queue);
    store.close().unwrap();

    let read_only = DiskOptions {
        read_only: true,
        ..DiskOptions::new(&place.disk)
    };
    let store = Store::open(&place.log(), &[read_only], &place.options).unwrap();
    let mut queue = port(&store, 0);
    let written = run(&mut queue, put_in(0, 1, 8));
    assert_eq!(written.unwrap_err(), Failure::ReadOnly);
    assert_eq!(store.disks()[0].max_atomic_bytes(), 0);
    flush(&mut queue);
    assert!(all(&read(&mut queue, 3, 8), 7));
}

/// A guest that only discards writes few bytes to the log but fills the index, which is bounded
/// too.
#[test]
fn records_without_payload_are_checkpointed_before_they_are_too_many() {
    let place = TestDisk::new();
    let store = place.open();
    commit(&store.disks()[0], 0, 1, 8);
    let mut port = port(&store, 0);
    // More than twice the limit of a million records.
    for _ in 0..140 {
        for sector in 0..SIZE / 512 {
            port.submit(sector, discard(sector, 1));
        }
        wait(&mut port, (SIZE / 512) as usize);
    }
    wait_until("a checkpoint", || store.log_counters().checkpoints > 0);
}
