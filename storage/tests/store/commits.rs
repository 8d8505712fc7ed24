//! The store from outside: its promises, tested on files that a crash, simulated by copying them,
//! leaves behind.


use std::time::{Duration, Instant};

use crate::support::{Random, SIZE, TestDisk, fill, flush, read, run, small, wait_all, wait_until, write};
use walvisor_storage::{
    Backend, BackendQueue, Buffer, CacheMode, CommitWait, DiskOptions, EngineKind, Failure,
    Operation, Port, Store, StoreOptions, create_disk, default_log_dir,
};

fn engines() -> Vec<EngineKind> {
    vec![EngineKind::Auto, EngineKind::Blocking]
}

/// No group begins before `count` FLUSHes wait, not even when a segment that becomes ready wakes
/// the writer.
fn together(count: u32) -> CommitWait {
    CommitWait {
        longest: Some(Duration::from_secs(3600)),
        count: Some(count),
    }
}

#[test]
fn reads_merge_memory_log_base_and_zeroes() {
    for engine in engines() {
        let place = TestDisk::new();
        let store = place.open_with(engine, CacheMode::Writeback);
        let mut port = store.disks()[0].open_port().unwrap();
        write(&mut port, 0, 1, 64);
        flush(&mut port);
        write(&mut port, 8, 2, 8);
        run(
            &mut port,
            Operation::Discard {
                sector: 24,
                sectors: 8,
            },
        )
        .unwrap();
        run(
            &mut port,
            Operation::WriteZeroes {
                sector: 33,
                sectors: 1,
                unmap: false,
            },
        )
        .unwrap();
        let check = |port: &mut Port| {
            let data = read(port, 4, 64);
            for s in 0..64u64 {
                let want = match s + 4 {
                    8..16 => 2,
                    24..=31 | 33 => 0,
                    64.. => 0,
                    _ => 1,
                };
                assert!(
                    data[s as usize * 512..][..512].iter().all(|&b| b == want),
                    "sector {} {engine:?}",
                    s + 4
                );
            }
        };
        check(&mut port);
        flush(&mut port);
        check(&mut port);
        drop(port);
        store.close().unwrap();
        // Closed cleanly: the base image is a plain raw image.
        let base = std::fs::read(&place.disk).unwrap();
        assert!(
            base[..8 * 512].iter().all(|&b| b == 1)
                && base[8 * 512..16 * 512].iter().all(|&b| b == 2)
        );
        assert!(base[24 * 512..32 * 512].iter().all(|&b| b == 0));
        let store = place.open_with(engine, CacheMode::Writeback);
        check(&mut store.disks()[0].open_port().unwrap());
    }
}

#[test]
fn flushed_writes_survive_a_crash_and_a_crash_after_that() {
    for engine in engines() {
        let place = TestDisk::new();
        let store = place.open_with(engine, CacheMode::Writeback);
        let mut port = store.disks()[0].open_port().unwrap();
        for i in 0..40u64 {
            write(&mut port, i * 8, i as u8 + 1, 8);
            if i % 3 == 0 {
                flush(&mut port);
            }
        }
        flush(&mut port);
        let crashed = place.crash();
        let report = crashed.report();
        assert_eq!((report.records, report.last_lsn), (40, 40));
        let again = {
            let store = crashed.open();
            let mut port = store.disks()[0].open_port().unwrap();
            for i in 0..40u64 {
                assert!(
                    read(&mut port, i * 8, 8).iter().all(|&b| b == i as u8 + 1),
                    "write {i}"
                );
            }
            write(&mut port, 0, 99, 8);
            flush(&mut port);
            crashed.crash()
        };
        let store = again.open();
        let mut port = store.disks()[0].open_port().unwrap();
        assert!(read(&mut port, 0, 8).iter().all(|&b| b == 99));
        assert!(read(&mut port, 39 * 8, 8).iter().all(|&b| b == 40));
    }
}

#[test]
fn a_flush_with_nothing_new_costs_no_sync_and_concurrent_flushes_share_one() {
    let place = TestDisk::new();
    let disks = [DiskOptions::new(&place.disk)];
    let options = StoreOptions {
        commit_wait: together(4),
        ..small(EngineKind::Auto)
    };
    let store = Store::open(&place.log(), &disks, &options).unwrap();
    let mut ports: Vec<Port> = (0..4)
        .map(|_| store.disks()[0].open_port().unwrap())
        .collect();
    flush(&mut ports[0]);
    assert_eq!(store.log_counters().syncs, 0);
    for (i, port) in ports.iter_mut().enumerate() {
        port.submit(
            1,
            Operation::Write {
                sector: i as u64 * 8,
                data: fill(7, 8),
            },
        );
        port.submit(2, Operation::Flush);
    }
    // No port was kicked yet, so all four FLUSHes wait. The first port that is served leads one
    // group for all.
    let ended = wait_all(&mut ports.iter_mut().collect::<Vec<_>>(), 8).len();
    let counters = store.log_counters();
    assert_eq!(
        (
            ended,
            counters.flushes,
            counters.flushes_grouped,
            counters.syncs
        ),
        (8, 5, 4, 1)
    );
    flush(&mut ports[3]);
    assert_eq!(store.log_counters().syncs, 1);
}

#[test]
fn without_group_commit_each_flush_costs_a_write_and_a_sync() {
    for engine in engines() {
        let place = TestDisk::new();
        let options = StoreOptions {
            group_commit: false,
            ..small(engine)
        };
        let disks = [DiskOptions::new(&place.disk)];
        let store = Store::open(&default_log_dir(&place.disk), &disks, &options).unwrap();
        let mut ports: Vec<Port> = (0..4)
            .map(|_| store.disks()[0].open_port().unwrap())
            .collect();
        for (i, port) in ports.iter_mut().enumerate() {
            let sector = i as u64 * 8;
            let data = fill(i as u8 + 1, 8);
            port.submit(1, Operation::Write { sector, data });
            port.submit(2, Operation::Flush);
        }
        wait_all(&mut ports.iter_mut().collect::<Vec<_>>(), 8);
        let counters = store.log_counters();
        assert_eq!((counters.groups, counters.syncs), (4, 4));
        assert_eq!(counters.group_sizes[..2], [4, 0]);
        // Without group commit a FLUSH costs a sync even if it finds everything durable already.
        flush(&mut ports[0]);
        assert_eq!(store.log_counters().syncs, 5);
        let batches = place.crash().report().batches;
        assert_eq!(batches, 4);
    }
}

/// The alternative to one write for a group: each record in a write of its own and one sync for
/// all, with the same log.
#[test]
fn with_a_write_per_waiter_a_group_has_many_writes_and_one_sync() {
    for clients in [1u64, 4, 128, 256] {
        let place = TestDisk::new();
        let options = StoreOptions {
            write_per_waiter: true,
            commit_wait: together(clients as u32),
            segment_size: 8 << 20,
            ..small(EngineKind::Auto)
        };
        // Room for a group in one segment.
        std::fs::remove_dir_all(default_log_dir(&place.disk)).unwrap();
        std::fs::remove_file(&place.disk).unwrap();
        create_disk(&place.disk, SIZE, &default_log_dir(&place.disk), &options).unwrap();
        let disks = [DiskOptions::new(&place.disk)];
        let store = Store::open(&default_log_dir(&place.disk), &disks, &options).unwrap();
        let mut ports: Vec<Port> = (0..clients)
            .map(|_| store.disks()[0].open_port().unwrap())
            .collect();
        for round in 0..3 {
            for (i, port) in (0..).zip(&mut ports) {
                let data = Buffer::from(&fill((i + round) as u8, 4)[..]);
                let sector = 4 * i;
                port.submit(1, Operation::Write { sector, data });
            }
            for port in &mut ports {
                port.submit(2, Operation::Flush);
                port.kick();
            }
            let mut waiting: Vec<_> = ports.iter_mut().collect();
            wait_all(&mut waiting, 2 * clients as usize);
            let counters = store.log_counters();
            assert_eq!(counters.writes, (round + 1) * clients, "{clients} clients");
            assert_eq!((counters.syncs, counters.groups), (round + 1, round + 1));
        }
        let crashed = place.crash();
        let report = crashed.report();
        assert_eq!((report.batches, report.records), (3, 3 * clients));
        let store = crashed.open();
        let mut port = store.disks()[0].open_port().unwrap();
        for i in 0..clients {
            let data = read(&mut port, 4 * i, 4);
            assert!(data.iter().all(|&byte| byte == (i + 2) as u8), "{i}");
        }
    }
}

/// Every write and every sync of the log costs an operation and takes its latency; reads do not.
#[test]
fn a_slow_medium_is_charged_for_writes_and_syncs() {
    let place = TestDisk::new();
    let operation_latency = Duration::from_millis(20);
    let options = StoreOptions {
        operation_latency,
        operations_per_second: std::num::NonZeroU32::new(100),
        ..small(EngineKind::Auto)
    };
    let disks = [DiskOptions::new(&place.disk)];
    let store = Store::open(&default_log_dir(&place.disk), &disks, &options).unwrap();
    let mut port = store.disks()[0].open_port().unwrap();
    let began = Instant::now();
    for round in 1..=5 {
        write(&mut port, 0, round as u8, 8);
        flush(&mut port);
        assert!(began.elapsed() >= 2 * operation_latency * round);
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

/// The stages overlap: while a group syncs, larger batches of other records are written and wait
/// for no sync.
#[test]
fn batches_are_written_while_a_group_syncs() {
    for engine in engines() {
        // On a busy machine a sync may be over before anything could be written beside it.
        let mut latencies = [1, 4, 16, 64].map(|n| Duration::from_millis(300 * n));
        let overlap = |latency: &mut Duration| writes_beside_a_sync(engine, *latency);
        assert!(latencies.iter_mut().any(overlap), "{engine:?}");
    }
}

/// Whether 256 KiB of log were written while a sync of this `latency` was under way.
fn writes_beside_a_sync(engine: EngineKind, latency: Duration) -> bool {
    let place = TestDisk::new();
    let options = StoreOptions {
        sync_latency: latency,
        ..small(engine)
    };
    let disks = [DiskOptions::new(&place.disk)];
    let store = Store::open(&default_log_dir(&place.disk), &disks, &options).unwrap();
    let mut ports = [0, 1].map(|_| store.disks()[0].open_port().unwrap());
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
    let overlap = store.log_counters().syncs == 0;
    assert_eq!(wait_all(&mut [&mut ports[0]], 1)[0].token, 9);
    assert_eq!(store.log_counters().syncs, 1);
    flush(&mut ports[1]);
    let written = place.crash().report().payload_bytes;
    assert_eq!(written, 4096 + 24 * 16384);
    overlap
}

/// A group that waits starts as soon as the requested number of FLUSHes wait, or no other client
/// can join.
#[test]
fn a_group_waits_for_others_to_join() {
    for engine in engines() {
        let place = TestDisk::new();
        let options = StoreOptions {
            commit_wait: together(3),
            ..small(engine)
        };
        let disks = [DiskOptions::new(&place.disk)];
        let store = Store::open(&default_log_dir(&place.disk), &disks, &options).unwrap();
        let mut ports: Vec<Port> = (0..4)
            .map(|_| store.disks()[0].open_port().unwrap())
            .collect();
        let mut ended = 0;
        for port in &mut ports[..3] {
            assert_eq!((ended, store.log_counters().syncs), (0, 0));
            write(port, 0, 1, 8);
            port.submit(9, Operation::Flush);
            port.kick();
            let mut done = Vec::new();
            port.completions(&mut done);
            ended += done.len();
        }
        // The third port led; the fourth had nothing to flush.
        wait_all(&mut ports.iter_mut().take(3).collect::<Vec<_>>(), 3 - ended);
        assert_eq!(store.log_counters().group_sizes[2], 1);
        // Two ports are left, and both wait: no other can join.
        ports.truncate(2);
        for port in &mut ports {
            write(port, 0, 2, 8);
            port.submit(9, Operation::Flush);
            port.kick();
        }
        wait_all(&mut ports.iter_mut().collect::<Vec<_>>(), 2);
        // The port that keeps the time may leave: the others begin anew, and a single port waits
        // for no other.
        write(&mut ports[0], 0, 3, 8);
        ports[0].submit(9, Operation::Flush);
        ports[0].kick();
        write(&mut ports[1], 0, 4, 8);
        drop(ports.remove(0));
        flush(&mut ports[0]);
        assert_eq!(store.log_counters().syncs, 3, "{engine:?}");
        // A port with two clients has joined fully only when both have a FLUSH in the group.
        let port = &mut ports[0];
        port.set_clients(2);
        write(port, 0, 5, 8);
        for token in [9, 10] {
            port.submit(token, Operation::Flush);
            port.kick();
        }
        wait_all(&mut [port], 2);
        assert_eq!(store.log_counters().syncs, 4, "{engine:?}");
    }
}

#[test]
fn an_injected_latency_is_added_to_each_sync() {
    let place = TestDisk::new();
    let sync_latency = Duration::from_millis(30);
    let options = StoreOptions {
        sync_latency,
        ..small(EngineKind::Auto)
    };
    let disks = [DiskOptions::new(&place.disk)];
    let store = Store::open(&default_log_dir(&place.disk), &disks, &options).unwrap();
    let mut port = store.disks()[0].open_port().unwrap();
    write(&mut port, 0, 1, 8);
    let began = Instant::now();
    flush(&mut port);
    assert!(began.elapsed() >= sync_latency);
}

#[test]
fn writethrough_writes_are_durable_when_they_complete() {
    let place = TestDisk::new();
    let store = place.open_with(EngineKind::Auto, CacheMode::Writethrough);
    let disk = store.disks()[0].clone();
    let mut port = disk.open_port().unwrap();
    write(&mut port, 16, 5, 8);
    assert_eq!(store.log_counters().syncs, 1);
    let crashed = place.crash();
    assert!(
        read(&mut crashed.open().disks()[0].open_port().unwrap(), 16, 8)
            .iter()
            .all(|&b| b == 5)
    );
    disk.set_write_cache(true);
    write(&mut port, 16, 6, 8);
    assert_eq!(store.log_counters().syncs, 1);
    disk.set_write_cache(false);
    write(&mut port, 24, 6, 8);
    assert_eq!(store.log_counters().syncs, 2);
}

#[test]
fn the_ring_wraps_many_times_and_nothing_is_lost() {
    for engine in engines() {
        let place = TestDisk::new();
        let store = place.open_with(engine, CacheMode::Writeback);
        let mut port = store.disks()[0].open_port().unwrap();
        let mut random = Random(12345);
        let mut model = vec![0u8; (SIZE / 512) as usize];
        // 40 MiB go through a ring of 4 MiB.
        for i in 0..1200u64 {
            let sectors = random.below(16) * 8 + 8;
            let sector = random.below(SIZE / 512 - sectors);
            let byte = (i % 250) as u8 + 1;
            write(&mut port, sector, byte, sectors as usize);
            model[sector as usize..(sector + sectors) as usize].fill(byte);
            if i % 7 == 0 {
                flush(&mut port);
            }
        }
        flush(&mut port);
        assert!(
            store.log_counters().checkpoints > 3,
            "{:?}",
            store.log_counters()
        );
        let crashed = place.crash();
        for store in [store, crashed.open()] {
            let mut port = store.disks()[0].open_port().unwrap();
            for (chunk, want) in model.chunks(64).enumerate() {
                let data = read(&mut port, chunk as u64 * 64, want.len() as u32);
                for (s, want) in want.iter().enumerate() {
                    assert!(
                        data[s * 512..][..512].iter().all(|b| b == want),
                        "sector {}",
                        chunk * 64 + s
                    );
                }
            }
        }
    }
}

#[test]
fn one_log_serves_several_disks_with_one_sync() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let paths = ["a.img", "b.img"].map(|name| dir.path().join(name));
    let options = StoreOptions {
        commit_wait: together(2),
        ..small(EngineKind::Auto)
    };
    for path in &paths {
        create_disk(path, SIZE, &log, &options).unwrap();
    }
    let disks = paths.each_ref().map(DiskOptions::new);
    let store = Store::open(&log, &disks, &options).unwrap();
    let mut ports: Vec<Port> = store
        .disks()
        .iter()
        .map(|disk| disk.open_port().unwrap())
        .collect();
    for (i, port) in ports.iter_mut().enumerate() {
        port.submit(
            1,
            Operation::Write {
                sector: 0,
                data: fill(i as u8 + 1, 8),
            },
        );
        port.submit(2, Operation::Flush);
    }
    wait_all(&mut ports.iter_mut().collect::<Vec<_>>(), 4);
    assert_eq!(store.log_counters().syncs, 1);
    // A FLUSH of the other disk finds everything durable, and does not wait for this disk's
    // records.
    write(&mut ports[0], 8, 9, 8);
    flush(&mut ports[1]);
    assert_eq!(store.log_counters().syncs, 1);
    drop(ports);
    store.close().unwrap();
    for (i, path) in paths.iter().enumerate() {
        assert_eq!(std::fs::read(path).unwrap()[0], i as u8 + 1);
    }
}

#[test]
fn requests_outside_the_disk_fail_and_read_only_disks_refuse_writes() {
    let place = TestDisk::new();
    {
        let store = place.open();
        let mut port = store.disks()[0].open_port().unwrap();
        let end = SIZE / 512;
        for (sector, sectors) in [
            (end, 1),
            (end - 1, 2),
            (u64::MAX, 1),
            (u64::MAX - 1, u32::MAX),
            (1 << 55, 1),
            (0, 0),
        ] {
            assert_eq!(
                run(&mut port, Operation::Read { sector, sectors }).unwrap_err(),
                Failure::OutOfRange
            );
            assert_eq!(
                run(&mut port, Operation::Discard { sector, sectors }).unwrap_err(),
                Failure::OutOfRange
            );
        }
        let data = Buffer::from(&[0; 700][..]);
        assert_eq!(
            run(&mut port, Operation::Write { sector: 0, data }).unwrap_err(),
            Failure::TooLarge
        );
        let data = fill(1, 8);
        assert_eq!(
            run(
                &mut port,
                Operation::Write {
                    sector: end - 7,
                    data
                }
            )
            .unwrap_err(),
            Failure::OutOfRange
        );
    }
    let options = DiskOptions {
        read_only: true,
        ..DiskOptions::new(&place.disk)
    };
    let store = Store::open(&place.log(), &[options], &small(EngineKind::Auto)).unwrap();
    let mut port = store.disks()[0].open_port().unwrap();
    assert_eq!(
        run(
            &mut port,
            Operation::Write {
                sector: 0,
                data: fill(1, 8)
            }
        )
        .unwrap_err(),
        Failure::ReadOnly
    );
    assert_eq!(store.disks()[0].max_atomic_bytes(), 0);
    flush(&mut port);
    assert!(read(&mut port, 0, 8).iter().all(|&b| b == 0));
}

/// What front-ends promise of a write rests on promise 2, which is about one record.
#[test]
fn the_longest_atomic_write_is_one_record() {
    let place = TestDisk::new();
    let store = place.open();
    let most = store.disks()[0].max_atomic_bytes() / 512;
    assert_eq!(most, (256 << 10) / 512, "a quarter of a segment");
    let mut port = store.disks()[0].open_port().unwrap();
    write(&mut port, 3, 7, most);
    flush(&mut port);
    assert_eq!(place.crash().report().records, 1);
    let longer = Operation::Write {
        sector: 3,
        data: fill(7, most + 1),
    };
    assert_eq!(run(&mut port, longer).unwrap_err(), Failure::TooLarge);
}

#[test]
fn many_threads_share_syncs() {
    let place = TestDisk::new();
    let store = place.open();
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let mut port = store.disks()[0].open_port().unwrap();
            scope.spawn(move || {
                for i in 0..100u64 {
                    write(&mut port, thread * 1000 + i * 8, thread as u8 + 1, 8);
                    flush(&mut port);
                }
            });
        }
    });
    let counters = store.log_counters();
    assert_eq!(counters.flushes, 800);
    assert!(
        counters.syncs < 800 && counters.groups <= counters.syncs,
        "{counters:?}"
    );
    println!(
        "800 flushes by 8 threads: {} syncs, {} groups",
        counters.syncs, counters.groups
    );
}

/// A guest that only discards writes few bytes to the log but fills the index, which is bounded
/// too.
#[test]
fn records_without_payload_are_checkpointed_before_they_are_too_many() {
    let place = TestDisk::new();
    let store = place.open();
    let mut port = store.disks()[0].open_port().unwrap();
    // More than twice the limit of a million records.
    for _ in 0..140 {
        for sector in 0..SIZE / 512 {
            port.submit(sector, Operation::Discard { sector, sectors: 1 });
        }
        assert_eq!(
            wait_all(&mut [&mut port], (SIZE / 512) as usize).len() as u64,
            SIZE / 512
        );
    }
    wait_until("a checkpoint", || store.log_counters().checkpoints > 0);
}
