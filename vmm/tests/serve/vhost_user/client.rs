//! A program with a virtio driver of its own: what libblkio is made of.

use std::fs::File;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{Ordering, fence};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use virtio_driver::{VhostUser, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags};

/// Nothing takes this long on the slowest machine.
const PATIENCE: Timespec = Timespec {
    tv_sec: 20,
    tv_nsec: 0,
};
/// What a request may transfer, each in a buffer of its own.
pub const BUFFER: usize = 64 << 10;
const QUEUE_SIZE: u16 = 128;

/// Memory that both sides see.
struct Shared {
    address: *mut u8,
    file: File,
}

/// Bytes of [`Shared`].
const SHARED: usize = BUFFER * 64;

impl Shared {
    fn new() -> Self {
        let fd: OwnedFd = memfd_create("buffers", MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(fd);
        file.set_len(SHARED as u64).unwrap();
        // SAFETY: a new mapping, at a place that the system chooses.
        let address = unsafe {
            mmap(
                std::ptr::null_mut(),
                SHARED,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &file,
                0,
            )
        };
        Self {
            address: address.unwrap().cast(),
            file,
        }
    }

    fn buffer(&self, slot: usize) -> *mut u8 {
        assert!(slot < SHARED / BUFFER);
        self.address.wrapping_add(slot * BUFFER)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: the mapping was made by `new`, and nobody uses it any more.
        unsafe { munmap(self.address.cast(), SHARED) }.unwrap();
    }
}

/// A connection with `queues` queues. Requests of a queue end in any order; they are told apart by their slot, which is
/// the number of their buffer too.
pub struct Client {
    queues: Vec<VirtioBlkQueue<'static, usize>>,
    transport: Box<VirtioBlkTransport>,
    shared: Shared,
}

impl Client {
    pub fn connect(socket: &Path, queues: usize) -> Self {
        let features = VirtioFeatureFlags::VERSION_1
            | VirtioFeatureFlags::RING_EVENT_IDX
            | VirtioFeatureFlags::RING_INDIRECT_DESC;
        // Bits 9 to 14 of a block device: FLUSH, TOPOLOGY, CONFIG_WCE, MQ, DISCARD, WRITE_ZEROES.
        let features = features.bits() | 0x7e00;
        let mut transport: Box<VirtioBlkTransport> =
            Box::new(VhostUser::new(socket.to_str().unwrap(), features).unwrap());
        let shared = Shared::new();
        transport
            .map_mem_region(shared.address as usize, SHARED, shared.file.as_raw_fd(), 0)
            .unwrap();
        let queues = VirtioBlkQueue::setup_queues(&mut *transport, queues, QUEUE_SIZE).unwrap();
        Self {
            queues,
            transport,
            shared,
        }
    }

    /// Capacity in sectors, as the device tells it.
    pub fn capacity(&self) -> u64 {
        u64::from(self.transport.get_config().unwrap().capacity)
    }

    pub fn num_queues(&self) -> u16 {
        u16::from(self.transport.get_config().unwrap().num_queues)
    }

    pub fn write(&mut self, queue: usize, slot: usize, offset: u64, data: &[u8]) {
        assert!(data.len() <= BUFFER);
        let buffer = self.shared.buffer(slot);
        // SAFETY: the buffer is as long, and its slot is the caller's until the request has ended.
        unsafe {
            buffer.copy_from_nonoverlapping(data.as_ptr(), data.len());
            self.queues[queue].write_raw(offset, buffer, data.len(), slot)
        }
        .unwrap();
    }

    pub fn read(&mut self, queue: usize, slot: usize, offset: u64, len: usize) {
        assert!(len <= BUFFER);
        let buffer = self.shared.buffer(slot);
        // SAFETY: the buffer is as long, and its slot is the caller's until the request has ended.
        unsafe { self.queues[queue].read_raw(offset, buffer, len, slot) }.unwrap();
    }

    pub fn flush(&mut self, queue: usize, slot: usize) {
        self.queues[queue].flush(slot).unwrap();
    }

    pub fn discard(&mut self, queue: usize, slot: usize, offset: u64, len: u64) {
        self.queues[queue].discard(offset, len, slot).unwrap();
    }

    pub fn write_zeroes(&mut self, queue: usize, slot: usize, offset: u64, len: u64) {
        self.queues[queue]
            .write_zeroes(offset, len, false, slot)
            .unwrap();
    }

    /// What a request has read.
    pub fn data(&self, slot: usize, len: usize) -> Vec<u8> {
        let mut data = vec![0; len];
        // SAFETY: the buffer is as long, and the request has ended.
        unsafe {
            self.shared
                .buffer(slot)
                .copy_to_nonoverlapping(data.as_mut_ptr(), len);
        }
        data
    }

    /// Rings the doorbell of `queue` if the device wants it.
    pub fn kick(&mut self, queue: usize) {
        // What is available must be visible before the device's wish is looked at.
        fence(Ordering::SeqCst);
        if self.queues[queue].avail_notif_needed() {
            let notifier = self.transport.get_submission_notifier(queue);
            notifier.notify().unwrap();
        }
    }

    /// Waits for an interrupt of `queue`, and then for nothing more: the slots that have ended with their status.
    pub fn completions(&mut self, queue: usize) -> Vec<(usize, i32)> {
        loop {
            let done = self.ended(queue);
            if !done.is_empty() {
                return done;
            }
            let mut fds = [PollFd::from_borrowed_fd(self.event(queue), PollFlags::IN)];
            assert!(
                poll(&mut fds, Some(&PATIENCE)).unwrap() > 0,
                "queue {queue}: no interrupt"
            );
            self.clear(queue);
        }
    }

    /// The slots of `queue` that have ended, with their status. If there are none, an interrupt will tell of the next.
    pub fn ended(&mut self, queue: usize) -> Vec<(usize, i32)> {
        let queue = &mut self.queues[queue];
        // The wish for an interrupt must be visible before the ring is looked at.
        queue.set_used_notif_enabled(true);
        fence(Ordering::SeqCst);
        let done = queue.completions();
        done.map(|completion| (completion.context, completion.ret))
            .collect()
    }

    /// Readable when `queue` has had an interrupt.
    pub fn event(&self, queue: usize) -> BorrowedFd<'_> {
        let event = self.transport.get_completion_fd(queue);
        // The driver's descriptors are of another version of rustix.
        // SAFETY: the transport keeps `event` open, and it is borrowed as long as this.
        unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
    }

    /// Makes [`event`](Self::event) unreadable until the next interrupt.
    pub fn clear(&self, queue: usize) {
        self.transport.get_completion_fd(queue).read().unwrap();
    }

    /// Rings, and waits for `count` requests of `queue`, all of which must succeed.
    pub fn finish(&mut self, queue: usize, mut count: usize) {
        self.kick(queue);
        while count > 0 {
            for (slot, status) in self.completions(queue) {
                assert_eq!(status, 0, "queue {queue}, slot {slot}");
                count -= 1;
            }
        }
    }
}
