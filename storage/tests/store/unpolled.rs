//! A port that its owner does not poll stops no other port, whatever it has begun.

use crate::support::{TestDisk, wait};
use walvisor_storage::{
    BackendQueue, Buffer, Completion, DiskOptions, Operation, Store, StoreOptions,
};

const MIB: u64 = 1 << 20;
const BLOCK: usize = 4096;

fn open(place: &TestDisk, options: &StoreOptions) -> Store {
    Store::open(&place.log(), &[DiskOptions::new(&place.disk)], options).unwrap()
}

fn write(port: &mut dyn BackendQueue, token: u64, block: u64) {
    let data = Buffer::from(&[token as u8; BLOCK][..]);
    let sector = block * 8;
    port.submit(token, Operation::Write { sector, data });
}

/// Serves the port until `count` requests have ended.
fn serve(port: &mut dyn BackendQueue, count: usize) -> Vec<Completion> {
    let done = wait(port, count);
    assert!(done.iter().all(|end| end.result.is_ok()), "{done:?}");
    done
}

/// A port takes the records of all into a batch, and its owner has nothing to wait for.
#[test]
fn a_batch_does_not_wait_for_the_port_that_took_it() {
    let place = TestDisk::new();
    let store = open(&place, &StoreOptions::default());
    let disk = &store.disks()[0];
    let mut served = disk.open_port().unwrap();
    write(&mut served, 1, 0);
    serve(&mut served, 1);
    let mut left = disk.open_port().unwrap();
    for block in 1..512 {
        write(&mut left, block, block);
    }
    left.kick();
    write(&mut served, 2, 513);
    served.submit(3, Operation::Flush);
    serve(&mut served, 2);
    drop(left);
}

/// Reads that nobody takes do not keep the log from going around its ring.
#[test]
fn reads_that_nobody_takes_pin_no_segment_for_long() {
    let place = TestDisk::new();
    let store = open(&place, &StoreOptions::default());
    let disk = &store.disks()[0];
    let [mut left, mut served] = [(); 2].map(|()| disk.open_port().unwrap());
    // Four segments of 1 MiB.
    let mut token = 0;
    for round in 0..32 {
        for _ in 0..64 {
            token += 1;
            write(&mut served, token, token % (8 * MIB / BLOCK as u64));
        }
        served.submit(0, Operation::Flush);
        serve(&mut served, 65);
        let (sector, sectors) = (token % 1024 * 8, 8);
        left.submit(round, Operation::Read { sector, sectors });
        left.kick();
    }
    let reads = serve(&mut left, 32);
    assert!(
        reads
            .iter()
            .all(|end| end.result.as_ref().unwrap().is_some())
    );
    drop((left, served));
    store.close().unwrap();
}

/// A thread that panics between a request and its completion takes only its own requests along.
#[test]
fn a_thread_that_panics_stops_no_other() {
    let place = TestDisk::new();
    let store = open(&place, &StoreOptions::default());
    let disk = &store.disks()[0];
    let mut served = disk.open_port().unwrap();
    let mut left = disk.open_port().unwrap();
    let panicked = std::thread::spawn(move || {
        for block in 1..512 {
            write(&mut left, block, block);
        }
        left.submit(0, Operation::Flush);
        left.kick();
        panic!("planted");
    });
    assert!(panicked.join().is_err());
    write(&mut served, 1, 0);
    served.submit(2, Operation::Flush);
    serve(&mut served, 2);
}
