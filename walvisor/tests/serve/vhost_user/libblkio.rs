//! libblkio, used through the Rust crate that implements it. Programs such as QEMU's block layer do
//! their I/O with it.

use std::mem::MaybeUninit;
use std::path::Path;
use std::time::Duration;

use blkio::{Blkio, BlkioStartOutcome, Blkioq, Completion, MemoryRegion, ReqFlags};

use super::daemon;
use crate::{MIB, create, metric, noise, test_dir};

const PATIENCE: Duration = Duration::from_secs(120);
const PIECE: usize = 4096;
/// More requests than a ring of libblkio holds: it has 256 descriptors.
const REQUESTS: usize = 600;
const NONE: ReqFlags = ReqFlags::empty();

/// An open disk.
struct Disk {
    queues: Vec<Blkioq>,
    /// Queues that are polled, without interrupts.
    polled: Vec<Blkioq>,
    buffer: MemoryRegion,
    /// Declared after its queues, so that it is dropped last.
    disk: Blkio,
}

fn connect(socket: &Path, read_only: bool) -> Blkio {
    let mut disk = Blkio::new("virtio-blk-vhost-user").unwrap();
    disk.set_bool("read-only", read_only).unwrap();
    disk.set_str("path", socket.to_str().unwrap()).unwrap();
    disk.connect().unwrap();
    disk
}

impl Disk {
    fn open(socket: &Path, queues: i32, polled: i32) -> Self {
        let mut disk = connect(socket, false);
        disk.set_i32("num-queues", queues).unwrap();
        disk.set_i32("num-poll-queues", polled).unwrap();
        let BlkioStartOutcome {
            queues,
            poll_queues,
        } = disk.start().unwrap();
        let buffer = disk.alloc_mem_region(REQUESTS * PIECE).unwrap();
        disk.map_mem_region(&buffer).unwrap();
        Self {
            queues,
            polled: poll_queues,
            buffer,
            disk,
        }
    }

    fn fill(&mut self, data: &[u8]) {
        assert!(data.len() <= self.buffer.len);
        // SAFETY: the region is at least this long, and no request is in flight.
        unsafe {
            (self.buffer.addr as *mut u8).copy_from_nonoverlapping(data.as_ptr(), data.len())
        };
    }

    fn content(&self, len: usize) -> Vec<u8> {
        assert!(len <= self.buffer.len);
        // SAFETY: the region is at least this long, and no request is in flight.
        unsafe { std::slice::from_raw_parts(self.buffer.addr as *const u8, len) }.to_vec()
    }

    /// The address at `offset` in the buffer.
    fn at(&self, offset: usize) -> *mut u8 {
        self.buffer.addr.wrapping_add(offset) as *mut u8
    }
}

/// Submits the queued requests and waits for `count` completions. Returns each request's number and
/// result, sorted.
#[track_caller]
fn finish(queue: &mut Blkioq, count: usize) -> Vec<(usize, i32)> {
    let mut completions: Vec<MaybeUninit<Completion>> = Vec::new();
    completions.resize_with(count, MaybeUninit::uninit);
    let mut patience = PATIENCE;
    let done = queue.do_io(&mut completions, count, Some(&mut patience), None);
    assert_eq!(done.unwrap(), count);
    let mut done: Vec<_> = completions
        .iter()
        .map(|completion| {
            // SAFETY: `do_io` has returned that it filled in all of them.
            let completion = unsafe { completion.assume_init_ref() };
            (completion.user_data, completion.ret)
        })
        .collect();
    done.sort_unstable();
    done
}

#[test]
fn a_program_with_libblkio_reads_what_it_wrote() {
    let dir = &test_dir();
    create(dir, "disk.img", "16M");
    let serve = "--disk path=disk.img,socket=s,queues=4 --metrics metrics.txt";
    let daemon = daemon(dir, serve);
    let socket = dir.join("s");
    let asked = connect(&socket, false);
    assert_eq!(asked.get_u64("capacity").unwrap(), 16 * MIB);
    assert_eq!(asked.get_i32("max-queues").unwrap(), 4);
    assert_eq!(asked.get_i32("request-alignment").unwrap(), 512);
    assert!(asked.get_u64("max-mem-regions").unwrap() > 0);
    assert!(asked.get_u64("max-discard-len").unwrap() >= 16 * MIB);
    assert!(asked.get_u64("max-write-zeroes-len").unwrap() >= 16 * MIB);
    assert!(asked.get_bool("flush-needed").unwrap());
    drop(asked);

    let mut disk = Disk::open(&socket, 2, 1);
    let data = noise(REQUESTS * PIECE);
    disk.fill(&data);
    let all: Vec<(usize, i32)> = (0..REQUESTS).map(|index| (index, 0)).collect();
    for index in 0..REQUESTS {
        let from = disk.at(index * PIECE);
        disk.queues[0].write((index * PIECE) as u64, from, PIECE, index, NONE);
    }
    assert_eq!(finish(&mut disk.queues[0], REQUESTS), all);
    disk.queues[1].flush(7, NONE);
    assert_eq!(finish(&mut disk.queues[1], 1), [(7, 0)]);
    disk.fill(&vec![0; data.len()]);
    for index in 0..REQUESTS {
        let to = disk.at(index * PIECE);
        disk.polled[0].read((index * PIECE) as u64, to, PIECE, index, NONE);
    }
    assert_eq!(finish(&mut disk.polled[0], REQUESTS), all);
    assert!(disk.content(data.len()) == data);

    // A write with FUA, zeroes with and without deallocation, a discard, and a read beyond the end.
    let (from, piece) = (disk.at(0), PIECE as u64);
    let queue = &mut disk.queues[1];
    queue.write(8 * piece, from, PIECE, 1, ReqFlags::FUA);
    queue.write_zeroes(piece, piece, 2, NONE);
    queue.write_zeroes(2 * piece, piece, 3, ReqFlags::NO_UNMAP);
    queue.discard(3 * piece, piece, 4, NONE);
    assert_eq!(finish(queue, 4), [(1, 0), (2, 0), (3, 0), (4, 0)]);
    queue.read(16 * MIB, from, PIECE, 5, NONE);
    assert_eq!(finish(queue, 1), [(5, -libc::EIO)]);
    let region = disk.buffer;
    drop((disk.queues, disk.polled));
    disk.disk.unmap_mem_region(&region);
    drop(disk.disk);

    let mut disk = Disk::open(&socket, 1, 0);
    let to = disk.at(0);
    disk.queues[0].read(0, to, 10 * PIECE, 0, NONE);
    assert_eq!(finish(&mut disk.queues[0], 1), [(0, 0)]);
    let expected = [
        &data[..PIECE],
        &[0; 3 * PIECE],
        &data[4 * PIECE..8 * PIECE],
        &data[..PIECE],
        &data[9 * PIECE..10 * PIECE],
    ]
    .concat();
    assert!(disk.content(10 * PIECE) == expected);
    drop(disk);
    assert_eq!(daemon.stop(), "");
    let metrics = std::fs::read_to_string(dir.join("metrics.txt")).unwrap();
    let writes = metric(&metrics, "walvisor_block_writes_total");
    assert_eq!(writes, REQUESTS as u64 + 1);
    // One explicit flush, and one that makes the FUA write durable.
    assert_eq!(metric(&metrics, "walvisor_block_flushes_total"), 2);
    assert_eq!(metric(&metrics, "walvisor_block_errors_total"), 1);
}
