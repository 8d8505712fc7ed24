//! Disks that come and go while other disks of their log are written.
//!
//! `WALVISOR_MEMBER_CYCLES=N` makes it N additions and removals.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use walvisor_storage::{
    Disk, DiskOptions, ErrorKind, Image, Port, Retention, Store, StoreOptions, create_disk,
};

use crate::bench::Bench;
use crate::support::{
    MIB, TestDisk, all, copy_image, flush, mark, port, put_in, read, refused, run, wait_until,
    write,
};

const SIZE: u64 = 4 * MIB;
/// Blocks of 8 sectors that are written on each disk.
const BLOCKS: usize = 64;

fn options() -> StoreOptions {
    StoreOptions {
        segment_size: MIB,
        max_segments: 12,
        ..StoreOptions::default()
    }
}

/// What a disk must hold: the byte of each block whose FLUSH was acknowledged.
struct Oracle {
    port: Port,
    bytes: [u8; BLOCKS],
    writes: u64,
}

impl Oracle {
    fn new(disk: &Disk, bytes: [u8; BLOCKS]) -> Self {
        Self {
            port: disk.open_port().unwrap(),
            bytes,
            writes: 0,
        }
    }

    /// Writes some blocks, and flushes them.
    fn step(&mut self) {
        for _ in 0..4 {
            self.writes += 1;
            let block = self.writes.wrapping_mul(0x9e37_79b9) % BLOCKS as u64;
            let byte = (self.writes % 251) as u8;
            write(&mut self.port, block * 8, byte, 8);
            self.bytes[block as usize] = byte;
        }
        flush(&mut self.port);
    }

    fn check(&mut self) {
        let data = read(&mut self.port, 0, BLOCKS as u32 * 8);
        assert!(holds(&data, &self.bytes));
    }
}

fn holds(data: &[u8], bytes: &[u8; BLOCKS]) -> bool {
    let mut blocks = data.chunks(4096).zip(bytes);
    blocks.all(|(block, byte)| all(block, *byte))
}

#[test]
fn disks_come_and_go_while_others_are_written() {
    let cycles = std::env::var("WALVISOR_MEMBER_CYCLES");
    let cycles: usize = cycles.map_or(12, |cycles| cycles.parse().unwrap());
    let place = TestDisk::made(&["stays-0", "stays-1", "stays-2"], SIZE, options());
    // These are raw images, and join the log when they are first added.
    let changing = ["changes-0", "changes-1"].map(|name| place.at(name));
    for path in &changing {
        std::fs::File::create(path).unwrap().set_len(SIZE).unwrap();
    }
    let mut store = place.open();
    let (stop, steps) = (AtomicBool::new(false), AtomicUsize::new(0));
    let mut held = [[0; BLOCKS]; 2];
    let staying = store.disks().to_vec();
    let written = thread::scope(|scope| {
        let write = |disk| {
            let mut oracle = Oracle::new(disk, [0; BLOCKS]);
            while !stop.load(Ordering::SeqCst) {
                oracle.step();
                steps.fetch_add(1, Ordering::SeqCst);
            }
            oracle.check();
            oracle.bytes
        };
        let writers: Vec<_> = staying
            .iter()
            .map(|disk| scope.spawn(move || write(disk)))
            .collect();
        for cycle in 0..cycles {
            let (path, held) = (&changing[cycle % 2], &mut held[cycle % 2]);
            let disk = store.add_disk(&DiskOptions::new(path)).unwrap().clone();
            let mut oracle = Oracle::new(&disk, *held);
            oracle.check();
            oracle.writes = cycle as u64 * 100;
            (0..5).for_each(|_| oracle.step());
            *held = oracle.bytes;
            drop((oracle, disk));
            store.remove_disk(path).unwrap();
            assert!(holds(&std::fs::read(path).unwrap(), held));
            // The image can be opened elsewhere at once, as a raw one.
            drop(Image::open(path, false).unwrap());
            let until = steps.load(Ordering::SeqCst) + 20;
            wait_until("writes", || steps.load(Ordering::SeqCst) >= until);
        }
        stop.store(true, Ordering::SeqCst);
        writers
            .into_iter()
            .map(|writer| writer.join().unwrap())
            .collect::<Vec<_>>()
    });
    // A crash now: no FLUSH that was acknowledged is lost.
    let killed = place.crash();
    drop(staying);
    store.close().unwrap();
    let recovered = killed.open();
    for (disk, bytes) in recovered.disks().iter().zip(written) {
        Oracle::new(disk, bytes).check();
    }
    recovered.close().unwrap();
}

#[test]
fn what_cannot_be_added_or_removed_is_refused_and_disturbs_nobody() {
    let place = TestDisk::made(&["a", "b"], SIZE, options());
    let at = |name: &str| place.at(name);
    create_disk(&at("other"), SIZE, &at("other.wal"), &options()).unwrap();
    let mut store = Store::open(&place.log(), &[DiskOptions::new(at("a"))], &options()).unwrap();
    let mut queue = port(&store, 0);
    write(&mut queue, 0, 7, 8);
    copy_image(&at("a"), &at("copy"));
    // The disk of a log that was not closed.
    let other = DiskOptions::new(at("other"));
    let other = Store::open(&at("other.wal"), &[other], &options()).unwrap();
    copy_image(&at("other"), &at("killed"));
    for (name, kind, part) in [
        ("copy", ErrorKind::WrongLog, "a copy of the disk"),
        ("missing", ErrorKind::NotFound, ""),
        ("killed", ErrorKind::WrongLog, "was not closed"),
    ] {
        let added = store.add_disk(&DiskOptions::new(at(name))).map(drop);
        assert_eq!(refused(added, part), kind);
    }
    other.close().unwrap();

    // A disk that leaves with a port open fails its writes, and its image is complete.
    let b = DiskOptions::new(at("b"));
    store.add_disk(&b).unwrap();
    let mut late = port(&store, 1);
    write(&mut late, 0, 8, 8);
    store.remove_disk(&at("b")).unwrap();
    assert_eq!(store.disks().len(), 1);
    assert!(all(&std::fs::read(at("b")).unwrap()[..4096], 8));
    assert!(mark(&at("b")).is_none_or(|mark| mark.ends_with("closed")));
    assert_eq!(
        refused(store.remove_disk(&at("b")), ""),
        ErrorKind::NotFound
    );
    assert!(run(&mut late, put_in(0, 1, 8)).is_err());
    drop(late);
    store.add_disk(&b).unwrap();
    flush(&mut queue);
    assert!(all(&read(&mut queue, 0, 8), 7));
    drop(queue);
    store.close().unwrap();
}

/// A disk that leaves a log that keeps history stays there with its records, and comes back with
/// all of them, also to a log that was opened without it.
#[test]
fn a_disk_with_history_leaves_and_comes_back() {
    let mut bench = Bench::new(Retention::All);
    let disks = bench.place.disks();
    let [a, b] = [0, 1].map(|disk| DiskOptions::new(&disks[disk]));
    bench.open();
    bench.change(30);
    let mut left = port(bench.store(), 1);
    let store = bench.store.as_mut().unwrap();
    store.remove_disk(&disks[1]).unwrap();
    assert!(run(&mut left, put_in(0, 1, 8)).is_err());
    assert_eq!(refused(store.add_disk(&b).map(drop), ""), ErrorKind::Locked);
    drop(left);
    store.add_disk(&b).unwrap();
    bench.change(20);
    bench
        .store
        .as_mut()
        .unwrap()
        .remove_disk(&disks[1])
        .unwrap();
    bench.close();
    bench.check();
    // It has records in the log, but nobody uses it when the log is opened.
    let detached = DiskOptions::detached(&disks[1]);
    let mut store = Store::open(&bench.place.log(), &[a, detached], &bench.place.options).unwrap();
    store.add_disk(&b).unwrap();
    bench.store = Some(store);
    bench.change(10);
    bench.close();
    bench.check();
}
