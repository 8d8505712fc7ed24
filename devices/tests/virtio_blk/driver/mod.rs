//! A virtio-blk driver for tests. It does what a guest's driver does and does not know the device's implementation. It
//! uses registers through a transport, rings and buffers in guest memory, doorbells and interrupts.

mod mmio;
#[path = "../../support/numbers.rs"]
mod numbers;
mod pci;
mod ring;
mod vhost_user;

use std::fs::File;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use virtio_bindings::virtio_blk::*;
use virtio_bindings::virtio_config::{VIRTIO_F_IN_ORDER, VIRTIO_F_RING_RESET, VIRTIO_F_VERSION_1};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;
use walvisor_devices::backend::Backend;
use walvisor_devices::block::{BlockConfig, BlockCounts, BlockMetrics, VirtioBlock};

pub use mmio::MmioDriver;
pub use numbers::Random;
pub use pci::PciDriver;
pub use ring::{Piece, Ring};
pub use vhost_user::VhostUserDriver;

pub const ACKNOWLEDGE: u8 = 1;
pub const DRIVER: u8 = 2;
pub const DRIVER_OK: u8 = 4;
pub const FEATURES_OK: u8 = 8;
pub const NEEDS_RESET: u8 = 64;

pub const VERSION_1: u64 = 1 << VIRTIO_F_VERSION_1;
pub const EVENT_IDX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;
pub const INDIRECT: u64 = 1 << VIRTIO_RING_F_INDIRECT_DESC;
pub const IN_ORDER: u64 = 1 << VIRTIO_F_IN_ORDER;
pub const RING_RESET: u64 = 1 << VIRTIO_F_RING_RESET;
pub const FLUSH: u64 = 1 << VIRTIO_BLK_F_FLUSH;
pub const CONFIG_WCE: u64 = 1 << VIRTIO_BLK_F_CONFIG_WCE;
/// Every feature that the device offers.
pub const EVERYTHING: u64 = u64::MAX;

pub const OK: u8 = VIRTIO_BLK_S_OK as u8;
pub const IOERR: u8 = VIRTIO_BLK_S_IOERR as u8;
pub const UNSUPP: u8 = VIRTIO_BLK_S_UNSUPP as u8;
/// The status byte that the driver writes before the device answers.
pub const UNANSWERED: u8 = 0xee;

/// The time after which a test has hung: no wait takes so long, even on the slowest machine.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// Long enough for a forbidden event to happen if it would.
pub const A_WHILE: Duration = Duration::from_millis(50);

pub type Memory = Arc<GuestMemoryMmap>;

/// Guest memory: two adjacent regions, so that a buffer can lie across their border, and nothing after them.
pub const REGION: u64 = 32 << 20;
pub const MEMORY_END: u64 = 2 * REGION;

pub fn guest_memory() -> Memory {
    // Backed by a file, so that it can be shared.
    let fd = memfd_create("guest memory", MemfdFlags::CLOEXEC).expect("a file");
    let file = Arc::new(File::from(fd));
    file.set_len(MEMORY_END).expect("memory");
    let regions = [0, REGION].map(|start| {
        let file = FileOffset::from_arc(Arc::clone(&file), start);
        (GuestAddress(start), REGION as usize, Some(file))
    });
    Arc::new(GuestMemoryMmap::from_ranges_with_files(regions).expect("guest memory"))
}

/// The transports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Mmio,
    Pci,
    VhostUser,
}

/// Turns functions that take a [`Kind`] into one test per transport.
macro_rules! on_both_transports {
    ($($name:ident,)*) => {
        mod mmio {
            $(#[test] fn $name() { super::$name($crate::driver::Kind::Mmio); })*
        }
        mod pci {
            $(#[test] fn $name() { super::$name($crate::driver::Kind::Pci); })*
        }
    };
}

/// The same with a third test for vhost-user, except for the functions after the semicolon.
macro_rules! on_every_transport {
    ($($name:ident,)* $(; $($registers:ident,)*)?) => {
        on_both_transports! { $($name,)* $($($registers,)*)? }
        mod vhost_user {
            $(#[test] fn $name() { super::$name($crate::driver::Kind::VhostUser); })*
        }
    };
}

/// Registers as a driver sees them, whatever the transport.
pub trait Registers {
    fn device_features(&mut self) -> u64;
    fn set_driver_features(&mut self, features: u64);
    fn status(&mut self) -> u8;
    fn set_status(&mut self, status: u8);
    fn generation(&mut self) -> u32;
    fn read_config(&mut self, offset: u64, data: &mut [u8]);
    fn write_config(&mut self, offset: u64, data: &[u8]);
    /// Selects `queue` and returns its maximum size.
    fn queue_max(&mut self, queue: u16) -> u16;
    /// Sets a queue's size, addresses and interrupt, and enables it.
    fn set_queue(&mut self, queue: u16, size: u16, addresses: [u64; 3]);
    /// Doorbell by a register access: an exit to user space.
    fn notify(&mut self, queue: u16);
    /// Starts the reset of `queue` alone (2.6.1).
    fn reset_queue(&mut self, queue: u16);
    /// Whether the reset of `queue` is still going on.
    fn queue_resetting(&mut self, queue: u16) -> bool;
    /// Tries to enable `queue` as it is.
    fn enable_queue(&mut self, queue: u16);
    /// Disables `queue`, if the transport can.
    fn disable_queue(&mut self, queue: u16);
    /// Whether `queue` is enabled.
    fn queue_enabled(&mut self, queue: u16) -> bool;
    /// Writes nonsense into the size and address registers of `queue`.
    fn scribble_on_queue(&mut self, queue: u16);
    /// The eventfds that an ioeventfd would write to.
    fn doorbells(&self) -> Vec<EventFd>;
    /// Interrupts of `queue` since the last call, in whatever way the transport delivers them.
    fn take_queue_interrupts(&mut self, queue: u16) -> u64;
    /// Configuration change interrupts since the last call.
    fn take_config_interrupts(&mut self) -> u64;
    fn capacity_changed(&mut self);
    fn pause(&mut self);
    fn resume(&mut self);
    fn set_write_cache(&mut self, on: bool) -> bool;
}

/// A driver with a device of its own.
pub struct Driver {
    pub registers: ManuallyDrop<Box<dyn Registers>>,
    pub memory: Memory,
    pub rings: Vec<Ring>,
    pub metrics: Arc<BlockMetrics>,
    pub features: u64,
    /// Doorbells rung.
    pub kicks: u64,
    doorbells: Vec<EventFd>,
    next_page: Arc<AtomicU64>,
}

impl Drop for Driver {
    fn drop(&mut self) {
        // Dropping a device drains it. After a test has failed no thread may be left to end its requests, so the
        // device is leaked.
        if !std::thread::panicking() {
            // SAFETY: the field is not used again.
            unsafe { ManuallyDrop::drop(&mut self.registers) }
        }
    }
}

/// The answer to a request.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: u8,
    pub data: Vec<u8>,
    pub written: u32,
}

/// A request in the ring.
#[derive(Clone, Debug)]
pub struct PostedRequest {
    pub head: u16,
    data: GuestAddress,
    data_len: usize,
    status: GuestAddress,
}

pub fn config(queues: u16) -> BlockConfig {
    BlockConfig {
        queues,
        queue_size: 64,
        serial: "serial-of-a-disk".into(),
        ..BlockConfig::default()
    }
}

impl Driver {
    /// A device that no driver has initialised yet.
    pub fn attach(kind: Kind, backend: impl Backend + 'static, config: BlockConfig) -> Self {
        let memory = guest_memory();
        let device = VirtioBlock::new(Arc::new(backend), config).expect("a device");
        let metrics = device.metrics();
        let registers: Box<dyn Registers> = match kind {
            Kind::Mmio => Box::new(MmioDriver::new(device, Arc::clone(&memory))),
            Kind::Pci => Box::new(PciDriver::new(device, Arc::clone(&memory))),
            Kind::VhostUser => Box::new(VhostUserDriver::new(device, Arc::clone(&memory))),
        };
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

    /// A live device, with those of the `wanted` features that it offers.
    pub fn start(
        kind: Kind,
        backend: impl Backend + 'static,
        config: BlockConfig,
        wanted: u64,
    ) -> Self {
        let mut driver = Self::attach(kind, backend, config);
        driver.initialise(wanted);
        driver
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

    /// Writes a request's bytes into fresh guest memory: readable and writable part, each without a gap.
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
        self.memory.write_obj(UNANSWERED, status).expect("status");
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

    pub fn write(&mut self, queue: usize, sector: u64, data: &[u8]) {
        let answer = self.request(queue, VIRTIO_BLK_T_OUT, sector, data, 0);
        assert_eq!(
            (answer.status, answer.written),
            (OK, 1),
            "write of sector {sector}"
        );
    }

    pub fn read(&mut self, queue: usize, sector: u64, len: usize) -> Vec<u8> {
        let answer = self.request(queue, VIRTIO_BLK_T_IN, sector, &[], len);
        assert_eq!(
            (answer.status, answer.written),
            (OK, len as u32 + 1),
            "read of {sector}"
        );
        answer.data
    }

    pub fn flush(&mut self, queue: usize) {
        assert_eq!(
            self.request(queue, VIRTIO_BLK_T_FLUSH, 0, &[], 0).status,
            OK
        );
    }

    pub fn read_config<const N: usize>(&mut self, offset: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.registers.read_config(offset, &mut bytes);
        bytes
    }

    pub fn counts(&self) -> BlockCounts {
        self.metrics.counts()
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

/// Waits for a condition that another thread brings about.
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "waited in vain for {what}");
        pause(start);
    }
}

/// Yields to runnable threads at first, and sleeps later.
fn pause(waiting_since: Instant) {
    if waiting_since.elapsed() < Duration::from_micros(200) {
        std::thread::yield_now();
    } else {
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Bytes that differ from sector to sector and from seed to seed.
pub fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Random(seed | 1);
    (0..len).map(|_| random.next() as u8).collect()
}
