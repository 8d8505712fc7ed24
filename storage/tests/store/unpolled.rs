//! A port that its owner does not poll stops no other port, whatever it has begun.

use walvisor_storage::{BackendQueue, Completion, Operation, Port, Store};

use crate::support::{MIB, SIZE, TestDisk, port, put_in, wait};

/// Two ports of a disk: one that is served, and one that is not.
fn ports() -> (TestDisk, Store, [Port; 2]) {
    let place = TestDisk::new();
    let store = place.open();
    let ports = [0; 2].map(|disk| port(&store, disk));
    (place, store, ports)
}

fn write(port: &mut Port, block: u64) {
    port.submit(block, put_in(block * 8, block as u8, 8));
}

/// Serves the port until `count` requests have ended.
fn serve(port: &mut Port, count: usize) -> Vec<Completion> {
    let done = wait(port, count);
    assert!(done.iter().all(|end| end.result.is_ok()), "{done:?}");
    done
}

/// A port takes the records of all into a batch, and its owner has nothing to wait for: it serves
/// others, or its thread panics.
#[test]
fn a_batch_does_not_wait_for_the_port_that_took_it() {
    for panics in [false, true] {
        let (_place, _store, [mut served, mut left]) = ports();
        let begin = move || {
            for block in 1..512 {
                write(&mut left, block);
            }
            if panics {
                left.submit(0, Operation::Flush);
            }
            left.kick();
            assert!(!panics, "planted");
            left
        };
        let left = std::thread::spawn(begin).join();
        assert_eq!(left.is_err(), panics);
        write(&mut served, 513);
        served.submit(3, Operation::Flush);
        serve(&mut served, 2);
    }
}

/// Reads that nobody takes do not keep the log from going around its ring.
#[test]
fn reads_that_nobody_takes_pin_no_segment_for_long() {
    let (_place, store, [mut served, mut left]) = ports();
    // Four segments of 1 MiB.
    for round in 0..32 {
        for number in round * 64..round * 64 + 64 {
            write(&mut served, number % (SIZE / 4096));
        }
        served.submit(0, Operation::Flush);
        serve(&mut served, 65);
        let (sector, sectors) = (round * 37 % 1024 * 8, 8);
        left.submit(round, Operation::Read { sector, sectors });
        left.kick();
    }
    assert!(store.log_counters().log_bytes > 4 * MIB);
    let reads = serve(&mut left, 32);
    let has_data = |end: &Completion| end.result.as_ref().is_ok_and(|data| data.is_some());
    assert!(reads.iter().all(has_data));
    drop((left, served));
    store.close().unwrap();
}
