//! A worker over a RAM disk. A socket stands in for the UIO device, with a model of the kernel at
//! its other end.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::mpsc::channel;

use super::super::kernel::{EndedCommand, Kernel, Request};
use super::*;
use crate::backend::Backend;
use crate::backend::ram::RamDisk;

const BLOCK: usize = 512;

struct TestHost {
    kernel: Kernel,
    device: Device,
    uio: UnixStream,
    worker: Option<Worker>,
}

impl TestHost {
    fn new() -> Self {
        Self::with_disk(RamDisk::new(64))
    }

    fn with_disk(disk: impl Backend + 'static) -> Self {
        Self {
            kernel: Kernel::new(16384, 64),
            device: Device::new(Arc::new(disk), "disk", "serial", 512).unwrap(),
            uio: UnixStream::pair().unwrap().0,
            worker: None,
        }
    }

    fn start(&mut self) {
        let (ours, uio) = UnixStream::pair().unwrap();
        self.uio = ours;
        let ring = CommandRing::open(self.kernel.memory()).unwrap();
        self.worker = Some(Worker::start(&self.device, ring, uio.into()).unwrap());
    }

    fn queue(&mut self, request: Request) -> u16 {
        self.kernel.queue(request).unwrap()
    }

    fn ring(&mut self) {
        self.uio.write_all(&1_u32.to_ne_bytes()).unwrap();
    }

    /// Waits until the worker has reported this many ended commands.
    fn wait_for_ended(&mut self, count: usize) -> Vec<EndedCommand> {
        let mut ended = Vec::new();
        while ended.len() < count {
            self.uio.read_exact(&mut [0; 4]).unwrap();
            ended.extend(self.kernel.take_ended());
        }
        assert_eq!(ended.len(), count);
        ended
    }

    /// Carries out a command.
    fn run(&mut self, request: Request) -> EndedCommand {
        self.queue(request);
        self.ring();
        self.wait_for_ended(1).remove(0)
    }

    fn counts(&self) -> crate::block::BlockCounts {
        self.device.metrics().counts()
    }
}

fn read(lba: u8, blocks: u8) -> Request {
    Request {
        cdb: vec![0x28, 0, 0, 0, 0, lba, 0, 0, blocks, 0],
        read: usize::from(blocks) * BLOCK,
        ..Request::default()
    }
}

fn write(lba: u8, byte: u8) -> Request {
    Request {
        cdb: vec![0x2a, 0, 0, 0, 0, lba, 0, 0, 1, 0],
        out: vec![byte; BLOCK],
        ..Request::default()
    }
}

#[test]
fn waiting_commands_make_one_batch_and_one_wake() {
    let mut host = TestHost::new();
    for lba in 0..32 {
        host.queue(write(lba, lba + 1));
    }
    host.start();
    let ended = host.wait_for_ended(32);
    assert!(ended.iter().all(|ended| ended.status == 0));
    let counts = host.counts();
    assert_eq!(
        (counts.requests, counts.writes, counts.interrupts),
        (32, 32, 1)
    );
    assert_eq!(counts.bytes_written, 32 * BLOCK as u64);
    // Commands sent one at a time are each reported at once.
    for lba in 0..4 {
        let data = host.run(read(lba, 2)).data;
        let expected = [vec![lba + 1; BLOCK], vec![lba + 2; BLOCK]].concat();
        assert_eq!(data, expected);
    }
    let counts = host.counts();
    assert_eq!((counts.interrupts, counts.errors), (5, 0));
    assert_eq!(counts.bytes_read, 8 * BLOCK as u64);
}

#[test]
fn refusals_come_with_sense_data() {
    let mut host = TestHost::new();
    host.start();
    let ended = host.run(read(64, 1));
    assert_eq!(ended.status, 2);
    // Fixed format: ILLEGAL REQUEST, LOGICAL BLOCK ADDRESS OUT OF RANGE.
    assert_eq!((ended.sense[0] & 0x7f, ended.sense[2]), (0x70, 5));
    assert_eq!(ended.sense[12..14], [0x21, 0]);
    assert_eq!(host.counts().errors, 1);
}

#[test]
fn a_volatile_cache_is_reported_before_a_write_is_answered() {
    let mut host = TestHost::new();
    let told = Arc::new(Mutex::new(Vec::new()));
    let hook = Arc::clone(&told);
    host.device
        .on_write_cache(Box::new(move |on| hook.lock().unwrap().push(on)));
    host.start();
    let control = host.device.control();
    let backend = Arc::clone(host.device.unit().backend());
    assert!(!control.set_write_cache(false));
    for on in [false, true, true] {
        backend.set_write_cache(on);
        host.run(write(1, 9));
    }
    assert_eq!(*told.lock().unwrap(), [true, false, true]);
    // The owner cannot turn writeback on: an initiator that has seen writethrough would not flush.
    backend.set_write_cache(false);
    assert!(!control.set_write_cache(true));
}

#[test]
fn the_end_of_the_write_cache_is_reported_once_nothing_is_volatile() {
    let disk = RamDisk::with_power_loss(64, true);
    let mut host = TestHost::with_disk(disk.clone());
    let (tell, told) = channel();
    let hook = Mutex::new(tell);
    host.device.on_write_cache(Box::new(move |on| {
        // After `false` the next process would let initiators go on, so a power loss now must lose
        // nothing.
        if !on {
            disk.power_loss();
        }
        hook.lock().unwrap().send(on).unwrap();
    }));
    host.start();
    host.run(write(1, 9));
    assert!(!host.device.control().set_write_cache(false));
    host.run(read(1, 1));
    assert_eq!([told.recv(), told.recv()], [Ok(true), Ok(false)]);
    assert_eq!(host.run(read(1, 1)).data, [9; BLOCK]);
}

#[test]
fn a_command_that_reads_nothing_leaks_nothing_of_others() {
    let mut host = TestHost::new();
    host.start();
    host.run(write(1, 9));
    // A READ of zero blocks, into the buffer that the write used.
    let request = Request {
        read: BLOCK,
        ..read(1, 0)
    };
    assert_eq!(host.run(request).data, [0; BLOCK]);
}

#[test]
fn a_paused_device_leaves_commands_in_the_ring() {
    let mut host = TestHost::new();
    host.start();
    let control = host.device.control();
    control.pause().unwrap();
    host.queue(write(1, 9));
    host.ring();
    control.pause().unwrap();
    assert_eq!(host.counts().requests, 0);
    control.resume();
    host.wait_for_ended(1);
    assert_eq!(host.counts().requests, 1);
}

#[test]
fn commands_left_in_the_ring_wait_for_the_next_worker() {
    let mut host = TestHost::new();
    host.start();
    host.run(write(1, 7));
    host.worker.take().unwrap().stop();
    let id = host.queue(read(1, 1));
    assert!(host.kernel.take_ended().is_empty());
    host.start();
    let ended = host.wait_for_ended(1);
    assert_eq!((ended[0].id, ended[0].data[0]), (id, 7));
}

#[test]
fn a_torn_entry_stops_the_device_but_not_earlier_commands() {
    let mut host = TestHost::new();
    host.queue(write(3, 5));
    host.kernel.finish(8, 1);
    host.queue(write(4, 5));
    host.start();
    let ended = host.wait_for_ended(1);
    assert_eq!(ended[0].status, 0);
    // The worker's thread has ended, so its end of the socket is closed.
    assert_eq!(host.uio.read(&mut [0; 4]).unwrap(), 0);
    assert_eq!(host.counts().requests, 1);
}

#[test]
fn a_device_that_is_removed_is_served_no_longer() {
    let mut host = TestHost::new();
    host.start();
    let (other, _) = UnixStream::pair().unwrap();
    drop(std::mem::replace(&mut host.uio, other));
    // The worker reads nothing, or gets an error: it must not retry forever.
    while !host.worker.as_ref().unwrap().finished() {
        std::thread::yield_now();
    }
}
