//! A virtio-blk driver. It does what a guest's driver does and does not know the device's
//! implementation. It uses registers through a transport, rings and buffers in guest memory,
//! doorbells and interrupts.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use virtio_bindings::virtio_blk::{VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use super::{
    ACKNOWLEDGE, DRIVER, DRIVER_OK, EVENT_IDX, FEATURES_OK, MEMORY_END, Memory, NEEDS_RESET, Piece,
    Registers, Ring, VERSION_1,
};
use crate::wait::{PATIENCE, pause, wait_until};

/// A driver with a device of its own, and what the test that made the device knows of it.
pub struct BlockDriver<M> {
    /// The device.
    pub registers: ManuallyDrop<Box<dyn Registers>>,
    /// The guest's memory.
    pub memory: Memory,
    /// The ring of each queue, once the device is initialised.
    pub rings: Vec<Ring>,
    /// The metrics of the device, for example.
    pub metrics: M,
    /// The negotiated features.
    pub features: u64,
    /// Doorbells rung.
    pub kicks: u64,
    doorbells: Vec<EventFd>,
    next_page: Arc<AtomicU64>,
}

impl<M> Drop for BlockDriver<M> {
    fn drop(&mut self) {
        // Dropping a device drains it. After a test has failed no thread may be left to end its
        // requests, so the device is leaked.
        if !std::thread::panicking() {
            // SAFETY: the field is not used again.
            unsafe { ManuallyDrop::drop(&mut self.registers) }
        }
    }
}

/// The answer to a request.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    /// The status byte.
    pub status: u8,
    /// What the device has written before it.
    pub data: Vec<u8>,
    /// The length in the used ring.
    pub written: u32,
}

/// A request in the ring.
#[derive(Clone, Debug)]
pub struct PostedRequest {
    /// The head of its chain.
    pub head: u16,
    data: GuestAddress,
    data_len: usize,
    status: GuestAddress,
}

impl<M> BlockDriver<M> {
    /// The status byte that the driver writes before the device answers.
    pub const UNANSWERED: u8 = 0xee;

    /// A driver that has not initialised its device yet.
    pub fn new(registers: Box<dyn Registers>, memory: Memory, metrics: M) -> Self {
        Self {
            doorbells: registers.doorbells(),
            registers: ManuallyDrop::new(registers),
            memory,
            rings: Vec::new(),
            metrics,
            features: 0,
            kicks: 0,
            next_page: Arc::new(AtomicU64::new(0x1000)),
        }
    }

    /// Initialises the device (virtio 1.2, 3.1.1), with a ring for every queue.
    pub fn initialise(&mut self, wanted: u64) {
        self.negotiate(wanted);
        self.rings.clear();
        for queue in 0.. {
            let max = self.registers.queue_max(queue);
            if max == 0 {
                break;
            }
            let pages = self.allocate(Ring::bytes(max));
            let ring = Ring::new(
                Arc::clone(&self.memory),
                max,
                pages,
                self.features & EVENT_IDX != 0,
            );
            self.registers.set_queue(queue, max, ring.addresses());
            self.rings.push(ring);
        }
        let status = self.registers.status();
        self.registers.set_status(status | DRIVER_OK);
        assert_eq!(
            self.registers.status(),
            ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK
        );
    }

    /// Initialises the device from reset to FEATURES_OK.
    pub fn negotiate(&mut self, wanted: u64) {
        self.registers.set_status(0);
        assert_eq!(self.registers.status(), 0);
        self.registers.set_status(ACKNOWLEDGE);
        self.registers.set_status(ACKNOWLEDGE | DRIVER);
        self.features = self.registers.device_features() & (wanted | VERSION_1);
        self.registers.set_driver_features(self.features);
        self.registers
            .set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK);
        assert_eq!(self.registers.status(), ACKNOWLEDGE | DRIVER | FEATURES_OK);
    }

    /// Fresh guest pages, which are never freed.
    pub fn allocate(&self, bytes: usize) -> GuestAddress {
        let len = (bytes as u64).next_multiple_of(0x1000);
        let address = self.next_page.fetch_add(len, Ordering::Relaxed);
        assert!(
            address + len <= MEMORY_END,
            "the test uses too much guest memory"
        );
        GuestAddress(address)
    }

    /// Puts a request into the ring, one descriptor for each part, and publishes nothing yet.
    pub fn post(
        &mut self,
        queue: usize,
        kind: u32,
        sector: u64,
        out: &[u8],
        data_in: usize,
    ) -> PostedRequest {
        let (posted, readable, writable) = self.lay_out(kind, sector, out, data_in);
        let mut pieces = vec![Piece::readable(readable, 16)];
        if !out.is_empty() {
            pieces.push(Piece::readable(
                GuestAddress(readable.0 + 16),
                out.len() as u32,
            ));
        }
        if data_in > 0 {
            pieces.push(Piece::writable(writable, data_in as u32));
        }
        pieces.push(Piece::writable(posted.status, 1));
        let head = self.rings[queue].add(&pieces);
        PostedRequest { head, ..posted }
    }

    /// Writes a request's bytes into fresh guest memory: readable and writable part, each without a
    /// gap.
    pub fn lay_out(
        &self,
        kind: u32,
        sector: u64,
        out: &[u8],
        data_in: usize,
    ) -> (PostedRequest, GuestAddress, GuestAddress) {
        let readable = self.allocate(16 + out.len());
        let writable = self.allocate(data_in + 1);
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.memory.write_slice(&header, readable).expect("header");
        self.memory
            .write_slice(out, GuestAddress(readable.0 + 16))
            .expect("data");
        let status = GuestAddress(writable.0 + data_in as u64);
        self.memory
            .write_obj(Self::UNANSWERED, status)
            .expect("status");
        (
            PostedRequest {
                head: u16::MAX,
                data: writable,
                data_len: data_in,
                status,
            },
            readable,
            writable,
        )
    }

    /// Publishes what was added and rings, if the device wants it, through the eventfd.
    pub fn kick(&mut self, queue: usize) -> bool {
        let wanted = self.rings[queue].publish();
        if wanted {
            self.doorbells[queue].write(1).expect("doorbell");
            self.kicks += 1;
        }
        wanted
    }

    /// Waits until the device has used one more chain, and returns its head and length.
    pub fn next_used(&mut self, queue: usize) -> (u16, u32) {
        self.wait_for_used(queue, Ring::pop_used)
    }

    /// The same, but the chain is not freed, so that it can be offered again.
    pub fn next_used_keep_chain(&mut self, queue: usize) -> (u16, u32) {
        self.wait_for_used(queue, Ring::take_used_keep_chain)
    }

    fn wait_for_used(
        &mut self,
        queue: usize,
        mut take: impl FnMut(&mut Ring) -> Option<(u16, u32)>,
    ) -> (u16, u32) {
        let start = Instant::now();
        loop {
            if let Some(used) = take(&mut self.rings[queue]) {
                return used;
            }
            assert!(start.elapsed() < PATIENCE, "queue {queue}: no answer");
            assert_eq!(
                self.registers.status() & NEEDS_RESET,
                0,
                "the device needs a reset"
            );
            pause(start);
        }
    }

    /// The device's answer to `posted`.
    pub fn answer(&self, posted: &PostedRequest, written: u32) -> Answer {
        let mut data = vec![0; posted.data_len];
        self.memory
            .read_slice(&mut data, posted.data)
            .expect("data");
        let status = self.memory.read_obj(posted.status).expect("status");
        Answer {
            status,
            data,
            written,
        }
    }

    /// Makes one request and waits for its answer.
    pub fn request(
        &mut self,
        queue: usize,
        kind: u32,
        sector: u64,
        out: &[u8],
        data_in: usize,
    ) -> Answer {
        let posted = self.post(queue, kind, sector, out, data_in);
        self.kick(queue);
        let (head, written) = self.next_used(queue);
        assert_eq!(head, posted.head);
        self.answer(&posted, written)
    }

    /// Writes to the disk.
    #[track_caller]
    pub fn write(&mut self, queue: usize, sector: u64, data: &[u8]) {
        let answer = self.request(queue, VIRTIO_BLK_T_OUT, sector, data, 0);
        assert_eq!(
            (answer.status, answer.written),
            (0, 1),
            "write of sector {sector}"
        );
    }

    /// Reads from the disk.
    #[track_caller]
    pub fn read(&mut self, queue: usize, sector: u64, len: usize) -> Vec<u8> {
        let answer = self.request(queue, VIRTIO_BLK_T_IN, sector, &[], len);
        assert_eq!(
            (answer.status, answer.written),
            (0, len as u32 + 1),
            "read of {sector}"
        );
        answer.data
    }

    /// Makes completed writes durable.
    #[track_caller]
    pub fn flush(&mut self, queue: usize) {
        assert_eq!(self.request(queue, VIRTIO_BLK_T_FLUSH, 0, &[], 0).status, 0);
    }

    /// Bytes of the configuration space.
    pub fn read_config<const N: usize>(&mut self, offset: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.registers.read_config(offset, &mut bytes);
        bytes
    }

    /// Offers a chain that cannot be, and waits until the device asks for a reset.
    pub fn break_queue(&mut self, queue: usize) {
        self.rings[queue].offer(u16::MAX);
        self.rings[queue].publish();
        self.registers.notify(queue as u16);
        self.wait_for_needs_reset();
    }

    /// Waits until the device asks for a reset and has said so with an interrupt.
    pub fn wait_for_needs_reset(&mut self) {
        wait_until("DEVICE_NEEDS_RESET", || {
            self.registers.status() & NEEDS_RESET != 0
        });
        wait_until("a configuration interrupt", || {
            self.registers.take_config_interrupts() > 0
        });
    }
}

/// A discard or write zeroes segment (virtio 1.2, 5.2.6).
pub fn segment(sector: u64, sectors: u32, flags: u32) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&sector.to_le_bytes());
    bytes[8..12].copy_from_slice(&sectors.to_le_bytes());
    bytes[12..].copy_from_slice(&flags.to_le_bytes());
    bytes
}
