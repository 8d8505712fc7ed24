//! A client of `walvisor serve vhost-user`: it drives a block device from this process, as libblkio
//! does.
//!
//! ```text
//!   read, write, flush ─▶ virtqueue ─ kick ─▶ eventfd ─▶ daemon
//!   ended ◀────────────── virtqueue ◀ event ─ eventfd ◀─┘        requests and their buffers: memory of both
//! ```

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use virtio_driver::{VhostUser, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags};

use crate::PATIENCE;

/// Most bytes that a request may transfer: each slot has a buffer of its own.
pub const BUFFER: usize = 64 << 10;
/// Number of slots of a connection, shared by all its queues.
pub const SLOTS: usize = 128;
const QUEUE_SIZE: u16 = 128;
/// Bytes of [`SharedMemory`].
const SHARED: usize = BUFFER * SLOTS;

/// Memory shared with the daemon.
struct SharedMemory {
    address: *mut u8,
    file: File,
}

impl SharedMemory {
    fn new() -> io::Result<Self> {
        let fd: OwnedFd = memfd_create("buffers", MemfdFlags::CLOEXEC)?;
        let file = File::from(fd);
        file.set_len(SHARED as u64)?;
        // SAFETY: this is a new mapping, at an address that the system chooses.
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
        let address = address?.cast();
        Ok(Self { address, file })
    }

    fn buffer(&self, slot: usize, len: usize) -> *mut u8 {
        assert!(slot < SLOTS && len <= BUFFER, "slot {slot}, {len} bytes");
        self.address.wrapping_add(slot * BUFFER)
    }
}

impl Drop for SharedMemory {
    fn drop(&mut self) {
        // SAFETY: `new` made the mapping, and nothing uses it any more: the queues were dropped
        // before it.
        let unmapped = unsafe { munmap(self.address.cast(), SHARED) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Doorbells rung and interrupts received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NotificationCounts {
    /// Number of doorbells that the client rang because the device wanted them.
    pub doorbells: u64,
    /// Number of interrupts that the device sent. Two that arrive before the client reads its
    /// eventfd count as two.
    pub interrupts: u64,
}

/// A connection with some queues. Requests of a queue end in any order. A slot identifies a request
/// and its buffer, and belongs to the caller's request until that has ended.
pub struct VhostUserClient {
    queues: Vec<VirtioBlkQueue<'static, usize>>,
    transport: Box<VirtioBlkTransport>,
    shared: SharedMemory,
    notices: NotificationCounts,
}

impl VhostUserClient {
    /// Connects to the daemon at `socket`, and sets up `queues` queues.
    #[track_caller]
    #[must_use]
    pub fn connect(socket: &Path, queues: usize) -> Self {
        Self::try_connect(socket, queues).expect("a daemon with such a device")
    }

    /// The same, for a daemon that may not be there.
    ///
    /// # Errors
    /// If no daemon listens there, or it has no such device or fewer queues.
    pub fn try_connect(socket: &Path, queues: usize) -> io::Result<Self> {
        let features = VirtioFeatureFlags::VERSION_1
            | VirtioFeatureFlags::RING_EVENT_IDX
            | VirtioFeatureFlags::RING_INDIRECT_DESC;
        // Bits 9 to 14 of a block device: FLUSH, TOPOLOGY, CONFIG_WCE, MQ, DISCARD, WRITE_ZEROES.
        let features = features.bits() | 0x7e00;
        let path = socket
            .to_str()
            .ok_or_else(|| io::Error::other("the socket's path is no UTF-8"))?;
        let mut transport: Box<VirtioBlkTransport> = Box::new(VhostUser::new(path, features)?);
        let shared = SharedMemory::new()?;
        transport.map_mem_region(shared.address as usize, SHARED, shared.file.as_raw_fd(), 0)?;
        let queues = VirtioBlkQueue::setup_queues(&mut *transport, queues, QUEUE_SIZE)?;
        Ok(Self {
            queues,
            transport,
            shared,
            notices: NotificationCounts::default(),
        })
    }

    /// Capacity in sectors of 512 bytes, from the configuration space.
    pub fn capacity(&self) -> u64 {
        u64::from(self.transport.get_config().expect("an answer").capacity)
    }

    /// Number of queues of the device.
    pub fn num_queues(&self) -> u16 {
        u16::from(self.transport.get_config().expect("an answer").num_queues)
    }

    /// Whether the write cache is on, from the configuration space (`writeback`, with CONFIG_WCE).
    ///
    /// # Errors
    /// If the daemon does not answer.
    pub fn write_cache(&self) -> io::Result<bool> {
        Ok(self.transport.get_config()?.writeback != 0)
    }

    /// Writes `data` at byte `offset`, which is a multiple of 512.
    pub fn write(&mut self, queue: usize, slot: usize, offset: u64, data: &[u8]) {
        let buffer = self.shared.buffer(slot, data.len());
        // SAFETY: the buffer has this length, and its slot is the caller's until the request has
        // ended.
        let queued = unsafe {
            buffer.copy_from_nonoverlapping(data.as_ptr(), data.len());
            self.queues[queue].write_raw(offset, buffer, data.len(), slot)
        };
        queued.expect("room in the queue");
    }

    /// Reads `len` bytes at byte `offset`, which is a multiple of 512; [`data`](Self::data) returns
    /// them when the request has ended.
    pub fn read(&mut self, queue: usize, slot: usize, offset: u64, len: usize) {
        let buffer = self.shared.buffer(slot, len);
        // SAFETY: the buffer has this length, and its slot is the caller's until the request has
        // ended.
        let queued = unsafe { self.queues[queue].read_raw(offset, buffer, len, slot) };
        queued.expect("room in the queue");
    }

    /// Makes completed writes durable.
    pub fn flush(&mut self, queue: usize, slot: usize) {
        let queued = self.queues[queue].flush(slot);
        queued.expect("room in the queue");
    }

    /// Discards `len` bytes at byte `offset`, both multiples of 512.
    pub fn discard(&mut self, queue: usize, slot: usize, offset: u64, len: u64) {
        let queued = self.queues[queue].discard(offset, len, slot);
        queued.expect("room in the queue");
    }

    /// Writes zeroes to `len` bytes at byte `offset`, both multiples of 512.
    pub fn write_zeroes(&mut self, queue: usize, slot: usize, offset: u64, len: u64) {
        let queued = self.queues[queue].write_zeroes(offset, len, false, slot);
        queued.expect("room in the queue");
    }

    /// The data that an ended request has read.
    pub fn data(&self, slot: usize, len: usize) -> Vec<u8> {
        let buffer = self.shared.buffer(slot, len);
        let mut data = vec![0; len];
        // SAFETY: the buffer has this length, and the request has ended.
        unsafe { buffer.copy_to_nonoverlapping(data.as_mut_ptr(), len) };
        data
    }

    /// Rings the doorbell of `queue` if the device wants it.
    pub fn kick(&mut self, queue: usize) {
        // The available index must be visible before the client reads whether the device wants a
        // doorbell.
        fence(Ordering::SeqCst);
        if self.queues[queue].avail_notif_needed() {
            let doorbell = self.transport.get_submission_notifier(queue);
            doorbell.notify().expect("an eventfd");
            self.notices.doorbells += 1;
        }
    }

    /// Waits for a completion of `queue`, and returns all slots that have ended, with their status.
    #[track_caller]
    pub fn completions(&mut self, queue: usize) -> Vec<(usize, i32)> {
        loop {
            let done = self.ended(queue);
            if !done.is_empty() {
                return done;
            }
            self.wait(PATIENCE).expect("an interrupt");
        }
    }

    /// Kicks `queue`, and waits for `count` of its requests, all of which must succeed.
    #[track_caller]
    pub fn finish(&mut self, queue: usize, mut count: usize) {
        self.kick(queue);
        while count > 0 {
            for (slot, status) in self.completions(queue) {
                assert_eq!(status, 0, "queue {queue}, slot {slot}");
                count -= 1;
            }
        }
    }

    /// Kicks `queue`, and waits for one of its requests.
    ///
    /// # Errors
    /// That of the request, or that it takes longer than `patience`.
    pub fn end(&mut self, queue: usize, patience: Duration) -> io::Result<()> {
        self.kick(queue);
        loop {
            match self.ended(queue).first() {
                Some((_, 0)) => return Ok(()),
                Some((_, error)) => return Err(io::Error::from_raw_os_error(-error)),
                None => self.wait(patience)?,
            }
        }
    }

    /// The slots of `queue` that have ended, with their status (0, or a negative errno). If there
    /// are none, an interrupt will announce the next.
    pub fn ended(&mut self, queue: usize) -> Vec<(usize, i32)> {
        let queue = &mut self.queues[queue];
        // The request for an interrupt must be visible before the client reads the used ring.
        queue.set_used_notif_enabled(true);
        fence(Ordering::SeqCst);
        let done = queue.completions();
        done.map(|completion| (completion.context, completion.ret))
            .collect()
    }

    /// Sleeps until a queue has received an interrupt.
    ///
    /// # Errors
    /// [`TimedOut`](io::ErrorKind::TimedOut) if none comes within `patience`.
    pub fn wait(&mut self, patience: Duration) -> io::Result<()> {
        Self::wait_for_any(std::slice::from_mut(self), patience)
    }

    /// Sleeps until a queue of any of several clients has received an interrupt.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn wait_for_any(clients: &mut [Self], patience: Duration) -> io::Result<()> {
        let ready: Vec<(usize, usize)> = {
            let each = clients.iter().enumerate().flat_map(|(at, client)| {
                (0..client.queues.len()).map(move |queue| (at, queue, client.event(queue)))
            });
            let (places, mut fds): (Vec<_>, Vec<_>) = each
                .map(|(at, queue, event)| {
                    ((at, queue), PollFd::from_borrowed_fd(event, PollFlags::IN))
                })
                .unzip();
            let patience = Timespec::try_from(patience).map_err(io::Error::other)?;
            poll(&mut fds, Some(&patience))?;
            let rung = places.into_iter().zip(&fds);
            rung.filter(|(_, fd)| !fd.revents().is_empty())
                .map(|(place, _)| place)
                .collect()
        };
        if ready.is_empty() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        ready
            .into_iter()
            .try_for_each(|(at, queue)| clients[at].clear(queue))
    }

    /// An eventfd that is readable when `queue` has received an interrupt.
    pub fn event(&self, queue: usize) -> BorrowedFd<'_> {
        let event = self.transport.get_completion_fd(queue);
        // The driver's descriptor types may be of another version of rustix.
        // SAFETY: the transport keeps `event` open, and the result borrows `self`.
        unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
    }

    /// Makes [`event`](Self::event) unreadable until the next interrupt.
    ///
    /// # Errors
    /// If it was not readable.
    pub fn clear(&mut self, queue: usize) -> io::Result<()> {
        self.notices.interrupts += self.transport.get_completion_fd(queue).read()?;
        Ok(())
    }

    /// Counts doorbells and interrupts from now on. During set-up a device sends interrupts for
    /// requests that a queue may hold. They have arrived when [`connect`](Self::connect) returns,
    /// and belong to no request.
    ///
    /// # Errors
    /// If an eventfd cannot be read.
    pub fn start_counting(&mut self) -> io::Result<()> {
        for queue in 0..self.queues.len() {
            let mut fds = [PollFd::from_borrowed_fd(self.event(queue), PollFlags::IN)];
            if poll(&mut fds, Some(&Timespec::default()))? > 0 {
                self.clear(queue)?;
            }
        }
        self.notices = NotificationCounts::default();
        Ok(())
    }

    /// Doorbells and interrupts so far, or since the last [`start_counting`](Self::start_counting).
    pub fn notices(&self) -> NotificationCounts {
        self.notices
    }
}
