//! Requests at work allocate no memory: they reuse that of earlier requests.

#[path = "support/heap.rs"]
mod heap;
mod support;

use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use support::{TestDisk, wait_until};
use walvisor_storage::{
    BackendQueue, Buffer, CacheMode, Completion, DiskOptions, EngineKind, Operation, Port, Store,
    StoreOptions, create_disk,
};

/// Blocks of 4 KiB that are written and read: they cover the disk.
const BLOCKS: u64 = 2048;

struct Client {
    port: Port,
    done: Vec<Completion>,
    block: Vec<u8>,
    next: u64,
}

impl Client {
    /// The sector of the next block, in an order without neighbours.
    fn sector(&mut self) -> u64 {
        self.next += 1;
        self.next.wrapping_mul(0x9e37_79b1) % BLOCKS * 8
    }

    /// Submits `count` requests and a FLUSH, and waits for all.
    fn group(&mut self, count: u64, operation: impl Fn(&mut Self) -> Operation) {
        for _ in 0..count {
            let operation = operation(self);
            self.port.submit(0, operation);
        }
        self.port.submit(0, Operation::Flush);
        self.port.kick();
        let mut open = count + 1;
        while open > 0 {
            self.port.completions(&mut self.done);
            if self.done.is_empty() {
                let limit = Duration::from_secs(120).try_into().unwrap();
                let event = self.port.event();
                let mut fds = [PollFd::from_borrowed_fd(event, PollFlags::IN)];
                assert!(rustix::event::poll(&mut fds, Some(&limit)).unwrap() > 0);
            }
            open -= self.done.len() as u64;
            assert!(
                self.done
                    .drain(..)
                    .all(|completion| completion.result.is_ok())
            );
        }
    }

    /// Counts the allocations in the whole process for `groups` groups of `count` requests.
    fn allocations(
        &mut self,
        groups: u64,
        count: u64,
        operation: impl Fn(&mut Self) -> Operation,
    ) -> u64 {
        let before = heap::calls();
        (0..groups).for_each(|_| self.group(count, &operation));
        heap::calls() - before
    }

    fn write(&mut self) -> Operation {
        let data = Buffer::from(&self.block[..]);
        Operation::Write {
            sector: self.sector(),
            data,
        }
    }

    fn read(&mut self) -> Operation {
        Operation::Read {
            sector: self.sector(),
            sectors: 8,
        }
    }
}

/// This test is alone in its process, because the counter counts for all threads.
#[test]
fn writes_flushes_and_reads_reuse_memory() {
    for engine in [EngineKind::Auto, EngineKind::Blocking] {
        let place = TestDisk::empty();
        let options = StoreOptions {
            segment_size: 128 << 20,
            max_segments: 8,
            engine,
            ..StoreOptions::default()
        };
        create_disk(&place.disk, BLOCKS * 4096, &place.log(), &options).unwrap();
        for cache in [CacheMode::Writeback, CacheMode::Writethrough] {
            let disk = DiskOptions {
                cache,
                ..DiskOptions::new(&place.disk)
            };
            let store = Store::open(&place.log(), &[disk], &options).unwrap();
            let mut client = Client {
                port: store.disks()[0].open_port().unwrap(),
                done: Vec::with_capacity(128),
                block: vec![0x5a; 4096],
                next: 0,
            };
            // A group may begin before the buffers of the last, completed group are given back.
            let both = (0..2 * 65).map(|_| Buffer::from(&client.block[..]));
            drop(both.collect::<Vec<_>>());
            // Now every block is written, lists have their final capacity, and the keeper has its
            // two segments ready.
            client.allocations(64, 64, Client::write);
            client.allocations(16, 64, Client::read);
            let segment = place.log().join("segment-00002");
            wait_until("a spare segment", || segment.exists());
            // The keeper may allocate meanwhile, for a segment that it makes.
            let mut least = |count, operation: fn(&mut Client) -> Operation| {
                let tries = [(); 3].map(|()| client.allocations(100, count, operation));
                tries.into_iter().min().unwrap()
            };
            let many = least(64, Client::write);
            let few = least(4, Client::write);
            let reads = least(64, Client::read);
            println!(
                "{engine:?} {cache:?}: allocations a group: {} of 64 writes, {} of 4 writes; {} \
                 for 64 reads",
                many as f64 / 100.0,
                few as f64 / 100.0,
                reads as f64 / 100.0
            );
            // Requests and groups allocate nothing, not even every other group. A stray allocation
            // is no error.
            let most = many.max(few).max(reads);
            assert!(most < 50, "{many}, {few} and {reads} in 100 groups");
            drop(client);
            store.close().unwrap();
        }
    }
}
